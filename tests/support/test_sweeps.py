"""Which cases of wide sweeps are part of the short run."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.support.sweeps import COVERED, PARTS, leave_the_rest_to_the_long_run

TESTS = Path(__file__).parent.parent
NAME = "cli/test_plan.py::test_peak_of_a_folder"


class Case:
    """As much of a test as is asked for: its name and its marks."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid = nodeid
        self.marks = list(marks)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark)

    def get_closest_marker(self, name: str) -> pytest.MarkDecorator | None:
        return next((mark for mark in self.marks if mark.name == name), None)


def left_after(cases: list[Case]) -> list[str]:
    leave_the_rest_to_the_long_run(cases)  # type: ignore[arg-type]
    return [case.nodeid for case in cases if case.get_closest_marker("long") is None]


@pytest.mark.parametrize("number", [1, 3, 4, 5, 16])
def test_one_in_so_many_and_never_none(number: int) -> None:
    cases = [Case(f"tests/{NAME}[{n}]") for n in range(number)]
    assert len(left_after(cases)) == -(-number // PARTS[NAME])


def test_the_same_ones_each_time_and_among_others() -> None:
    names = [f"tests/{NAME}[{n}]" for n in range(40)]
    drawn = left_after([Case(name) for name in names])
    assert left_after([Case(name) for name in reversed(names)]) == drawn[::-1]
    others = [Case("tests/test_x.py::test_x[1]"), Case("tests/test_x.py::test_x[2]")]
    assert left_after([*others, *map(Case, names)]) == [*(case.nodeid for case in others), *drawn]


def test_of_rooms_that_make_models_a_twelfth() -> None:
    assert len(left_after([Case(f"tests/engine/test_x.py::test_x[{n}]") for n in range(13)])) == 2
    assert len(left_after([Case(f"tests/formats/test_x.py::test_x[{n}]") for n in range(7)])) == 7


def test_what_is_long_anyway_is_not_drawn() -> None:
    cases = [Case(f"tests/{NAME}[{n}]", pytest.mark.long) for n in range(9)] + [Case(f"tests/{NAME}[x]")]
    assert left_after(cases) == [f"tests/{NAME}[x]"]


def test_what_others_cover_is_long() -> None:
    assert left_after([Case(f"tests/{name}") for name in COVERED]) == []


@pytest.mark.parametrize("name", [*PARTS, *COVERED])
def test_each_is_there(name: str) -> None:
    assert name in functions_of(name.partition("::")[0])
    assert (name in PARTS) != (name in COVERED)


@pytest.mark.parametrize("name", sorted({name for names in COVERED.values() for name in names}))
def test_what_covers_others_is_in_the_short_run(name: str) -> None:
    assert name not in COVERED
    marks = functions_of(name.partition("::")[0])[name]
    assert "pytest.mark.long" not in marks


@functools.cache
def functions_of(file: str) -> dict[str, list[str]]:
    """The tests of a file, and their decorators."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {f"{file}::{node.name}": [ast.unparse(mark) for mark in node.decorator_list] for node in functions}
