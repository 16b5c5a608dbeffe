"""tools/size.py counts code only, and refuses a room that has outgrown its budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import size

CODE = '''"""A module.

Two lines.
"""

import os  # a comment
from pathlib import (
    Path,
)

__all__ = [
    "hop",
]

FAR = 3
"""Metres."""


def hop(  # a comment
    far: int = FAR,
) -> str:
    """Hop."""
    import sys

    # a comment
    return f"""{far} m

    of {Path(os.sep)} {sys.path}"""
'''
RETURN_LINES = 2
"""The blank one between them is no code."""


def test_code_without_blank_lines_comments_docstrings_and_imports() -> None:
    assert size.code_lines(CODE) == len(["FAR", "def", "far", ")"]) + RETURN_LINES


def test_a_room_is_a_folder_or_a_module(tmp_path: Path) -> None:
    for name, code in {"hop.py": "A = 1\n", "field/__init__.py": "", "field/den/hare.py": "A = 1\nB = 2\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    assert size.room_sizes(tmp_path) == {"hop": 1, "field": 2}


@pytest.mark.parametrize(
    ("code_size", "advice"),
    [(101, "or raise its budget in tools/"), (99 - size.SLACK, "Lower the budget: python -m tools.size --update")],
)
def test_a_room_that_does_not_match_its_budget(code_size: int, advice: str) -> None:
    (message,) = size.compare({"hop": code_size}, {"hop": 100})
    assert f"hop has {code_size} lines of code, and a budget of 100." in message
    assert advice in message


def test_a_room_may_be_a_little_below_its_budget() -> None:
    assert size.compare({"hop": 100 - size.SLACK}, {"hop": 100}) == []


def test_a_new_room_needs_a_budget_and_a_deleted_room_has_none() -> None:
    assert [message.split()[0] for message in size.compare({"new": 1}, {"old": 1})] == ["new", "old"]


def test_an_update_lowers_budgets_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, budgets = tmp_path / "package", tmp_path / "budgets.toml"
    package.mkdir()
    (package / "small.py").write_text("A = 1\n")
    (package / "large.py").write_text("A = 1\nB = 2\n")
    budgets.write_text("deleted = 1\nlarge = 1\nsmall = 100\n")
    monkeypatch.setattr(size, "PACKAGE", package)
    monkeypatch.setattr(size, "BUDGETS", budgets)
    assert size.main(["--update"]) == 1
    assert budgets.read_text() == "large = 1\nsmall = 1\n"
    output = capsys.readouterr()
    assert [line.split() for line in output.out.splitlines()] == [
        ["large", "2", "1"],
        ["small", "1", "1"],
        ["total", "3", "2"],
    ]
    assert output.err.startswith("large has 2 lines")
    budgets.write_text("large = 2\nsmall = 1\n")
    assert size.main([]) == 0
