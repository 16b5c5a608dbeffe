"""docs/walkthrough runs as it stands, and prints what it says it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import Piece, pieces_of, run
from tests.support.tiny_models import one_thread  # noqa: F401  a fixture that applies by itself

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "walkthrough" / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_every_piece_prints_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    pieces = pieces_of(TEXT)
    assert len(pieces) > 10
    for piece, printed in zip(pieces, run(pieces, PAGE), strict=True):
        assert printed == (piece.output or ""), f"line {piece.line}"


def test_what_a_page_says_is_compared() -> None:
    text = "```python\na = 1\n```\n\n```python\nprint(a)\n```\n\n```text\n2\n```\n"
    assert pieces_of(text) == [Piece("a = 1\n", None, 2), Piece("print(a)\n", "2\n", 6)]
    assert run(pieces_of(text), Path("page")) == ["", "1\n"]
