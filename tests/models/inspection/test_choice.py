"""Which rows are shown."""

from __future__ import annotations

import pytest

from rabbitllm.models.inspection.choice import RowChoice, searched
from rabbitllm.models.inspection.records import Opcode, is_row_major, row_major

NAMES = ["a.weight", "b.weight", "a.bias", "[x]"]


@pytest.mark.parametrize(
    ("choice", "shown", "matching", "more"),
    [
        (RowChoice(), NAMES, 4, 0),
        (RowChoice(limit=3), NAMES[:3], 4, 1),
        (RowChoice(skip=1, limit=2), NAMES[1:3], 4, 1),
        (RowChoice(skip=9, limit=2), [], 4, 0),
        (RowChoice("weight"), NAMES[:2], 2, 0),
        (RowChoice("a.*"), ["a.weight", "a.bias"], 2, 0),
        (RowChoice("?.bias"), ["a.bias"], 1, 0),
        (RowChoice("weigh?"), [], 0, 0),
        (RowChoice("[[]x]"), ["[x]"], 1, 0),
        (RowChoice("a", skip=1, limit=1), ["a.bias"], 2, 0),
        (RowChoice(""), NAMES, 4, 0),
    ],
)
def test_rows(choice: RowChoice, shown: list[str], matching: int, more: int) -> None:
    assert choice.of(NAMES, str) == (shown, matching, more)


def test_an_opcode_is_found_by_its_name_and_by_its_argument() -> None:
    assert searched(Opcode(2, 0, "GLOBAL", "'os system'")) == "GLOBAL 'os system'"


def test_strides() -> None:
    assert [row_major(shape) for shape in ((), (3,), (2, 3, 4), (2, 0, 4))] == [(), (1,), (12, 4, 1), (4, 4, 1)]
    assert is_row_major((2, 1, 3), (3, 99, 1))
    assert not is_row_major((2, 3), (1, 2))
