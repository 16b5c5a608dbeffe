"""In which order files of tests go to the processes that run them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import BITS, FIRST, put_in_order

HERE = Path(__file__).parent


def test_files_that_go_first_or_compare_bits_are_there() -> None:
    assert [name for name in (*FIRST, *BITS) if not (HERE / name).is_file()] == []


def test_long_files_first_then_those_with_many_tests() -> None:
    few, many, first = HERE / "b.py", HERE / "c.py", HERE / FIRST[0]
    items: list[Any] = [SimpleNamespace(path=path, name=n) for path in (few, many, first) for n in range(3)]
    items += [SimpleNamespace(path=many, name=3), SimpleNamespace(path=HERE / "a.py", name=0)]
    put_in_order(items)
    assert [(one.path, one.name) for one in items] == [
        *((first, n) for n in range(3)),
        *((many, n) for n in range(4)),
        *((few, n) for n in range(3)),
        (HERE / "a.py", 0),
    ]
