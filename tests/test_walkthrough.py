"""docs/walkthrough runs as it stands, and prints what it says it prints."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.one_thread import one_thread as one_thread
from tests.support.pages import Piece, pieces_of, run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "walkthrough" / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_every_piece_prints_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the program that writes it, on a copy."""
    assert len(pieces_of(TEXT)) > 10
    copy = shutil.copy(PAGE, tmp_path / "page.md")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["pages", str(copy)])
    runpy.run_path(str(pages.__file__), run_name="__main__")
    assert copy.read_text(encoding="utf-8") == TEXT


def test_what_a_page_says_is_compared() -> None:
    text = "```python\na = 1\n```\n\n```python\nprint(a)\n```\n\n```text\n2\n```\n"
    assert pieces_of(text) == [Piece("a = 1\n", None, 2), Piece("print(a)\n", "2\n", 6)]
    assert run(pieces_of(text), Path("page")) == ["", "1\n"]
