"""Pages of documentation whose Python runs, one piece after the other, and prints what stands below it.

    python -m tests.support.pages docs/walkthrough/README.md

writes what the pieces of a page print into it again. Also finds the examples in the help of a command.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PIECE = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```\n)?", re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """One block of Python, and what the page says it prints (None: nothing is said)."""

    code: str
    output: str | None
    line: int


def pieces_of(text: str) -> list[Piece]:
    """The pieces of a page, in their order."""
    matches = _PIECE.finditer(text)
    return [Piece(match["code"], match["output"], text.count("\n", 0, match.start()) + 2) for match in matches]


def run(pieces: list[Piece], page: Path) -> list[str]:
    """What each piece prints; they share one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for piece in pieces:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile("\n" * (piece.line - 1) + piece.code, str(page), "exec"), names)
        printed.append(said.getvalue())
    return printed


def examples_of(command: Any) -> list[str]:
    """The examples at the end of the help of a command of typer."""
    return [line.strip() for line in (command.help or "").partition("\n\nExamples:\n")[2].splitlines()]


def _write(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    printed = iter(run(pieces_of(text), page))

    def with_output(match: re.Match[str]) -> str:
        said = next(printed)
        return f"```python\n{match['code']}```\n" + (f"\n```text\n{said}```\n" if said else "")

    page.write_text(_PIECE.sub(with_output, text), encoding="utf-8")


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
