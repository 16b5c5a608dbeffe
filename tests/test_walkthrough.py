"""docs/walkthrough runs as it stands, and prints what it says it prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.pages import Piece, pieces_of, run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "walkthrough" / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_every_piece_prints_what_the_page_says(tmp_path: Path) -> None:
    """By the command that writes it, on a copy."""
    assert len(pieces_of(TEXT)) > 10
    copy = Path(shutil.copy(PAGE, tmp_path))
    command = [sys.executable, "-m", "tests.support.pages", str(copy)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert copy.read_text(encoding="utf-8") == TEXT


def test_what_a_page_says_is_compared() -> None:
    text = "```python\na = 1\n```\n\n```python\nprint(a)\n```\n\n```text\n2\n```\n"
    assert pieces_of(text) == [Piece("a = 1\n", None, 2), Piece("print(a)\n", "2\n", 6)]
    assert run(pieces_of(text), Path("page")) == ["", "1\n"]
