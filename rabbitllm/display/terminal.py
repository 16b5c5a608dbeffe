"""Rows at the end of a terminal's output that change in place, below the complete output of other code.

From the first rows on, everything that Python writes to stdout or stderr goes through here: the rows are erased, the
text is written, and the rows are drawn again below it. Output that bypasses Python (a library in C, another process)
is not seen; it appears at the cursor, which is always at the end of the text, and the next painting is below it.

Invariant: between two writes the cursor is at the end of the others' text, never inside the rows.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.cells import cell_len

from rabbitllm.base.terminal import PLAIN_LETTERS, STYLES, Row
from rabbitllm.display.form import size_of
from rabbitllm.display.nested_bars import NestedBars

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
TAB = 8
GONE = contextlib.suppress(ValueError, OSError)
"""For a closed stream or terminal: a failing display must not end the work that it displays."""


class Terminal:
    """The terminal behind stderr, and behind stdout if that is one too.

    Not thread-safe by itself: `exclusively` is held during everything caused by other code.

    Args:
        stream: stderr.
        exclusively: a reentrant lock.
    """

    def __init__(self, stream: Any, exclusively: contextlib.AbstractContextManager[Any]) -> None:
        self.stream = stream
        self._exclusively = exclusively
        self._raw: Callable[[str], int] = stream.write
        self._column = 0
        self._wrapped = False
        self._inside = False
        self._rows: Sequence[Row] = ()
        self._painted = ""
        self._letters = PLAIN_LETTERS if not _has_letters(stream) else {}
        self._colours = not os.environ.get("NO_COLOR")
        self.guests = NestedBars(self._finished_line)
        self._watched: list[Any] = []
        self._watch(stream)
        self.watch_stdout()

    def watch_stdout(self) -> None:
        """Intercept writes to the current stdout, if it is a terminal: it may have been redirected before."""
        isatty = getattr(sys.stdout, "isatty", None)
        if isatty is not None and isatty() and not any(sys.stdout is other for other in self._watched):
            self._watch(sys.stdout)

    def begin(self) -> None:
        """Prepare for rows; existing tqdm bars are adopted below them."""
        if self.guests.adopt(self.stream):
            self._put("\r\x1b[J")
            self._column = 0

    def paint(self, rows: Sequence[Row]) -> None:
        """Replace the shown rows by these and those of adopted bars."""
        self.guests.adopt(self.stream)
        width, height = size_of(self.stream)
        shown = [*rows, *(((text, ""),) for text in self.guests.rows())][: height - 1]
        self._rows = rows
        text = f"{width} " + "\r\n".join(self._drawn(row, width - 1) for row in shown)
        if text == self._painted or not shown:
            return
        self._flush()
        out = ""
        if self._column >= width:  # the line is full: the next output would start another one
            out, self._column, self._wrapped = "\r\n", 0, True
        below = self._column > 0
        lines = [self._drawn(row, width - 1) for row in shown]
        out += ("\x1b[K\r\n" if below else "\r") + "\x1b[K\r\n".join(lines) + "\x1b[J"
        up = len(lines) - 1 + below
        out += (f"\x1b[{up}A" if up else "") + "\r" + (f"\x1b[{self._column}C" if below else "")
        self._put(out)
        self._painted = text

    def erase(self) -> None:
        """Erase the rows; those of `paint` are dropped."""
        self._rows = ()
        self._wipe()

    def above(self, text: str) -> None:
        """Print a line above the rows."""
        begun = self._column > 0 and not self._wrapped
        with GONE:
            self._foreign(self._raw, self.stream, ("\n" if begun else "") + text + "\n")

    def detach(self) -> None:
        """Erase the rows for good."""
        self.erase()
        self.let_others_write()

    def let_others_write(self) -> None:
        """Stop intercepting the writes of other code."""
        for stream in self._watched:
            with contextlib.suppress(AttributeError):
                del stream.write
        self._watched = []

    def _watch(self, stream: Any) -> None:
        raw = stream.write

        def write(text: str) -> int:
            with self._exclusively:
                return self._foreign(raw, stream, text)

        with contextlib.suppress(AttributeError):  # a stream whose `write` cannot be replaced
            stream.write = write
            self._watched.append(stream)

    def _foreign(self, raw: Callable[[str], int], stream: Any, text: str) -> int:
        if self._inside or not isinstance(text, str):
            return raw(text)
        if self._rows and self.guests.adopt(self.stream) and self.guests.is_theirs(text):
            return len(text)
        self._wipe()
        rest = text[1:] if self._wrapped and text.startswith("\n") else text
        self._wrapped = self._wrapped and not text
        self._inside = True
        try:
            raw(rest)
            if self._rows:
                with GONE:
                    stream.flush()
        finally:
            self._inside = False
        self._column = column_after(self._column, rest, size_of(self.stream)[0])
        if self._rows and self._column == 0:  # after a partial line, the next tick is soon enough
            self.paint(self._rows)
        return len(text)

    def _finished_line(self, text: str) -> None:
        """Write the last state of a closed tqdm bar."""
        with self._exclusively:
            self.above(text)

    def _wipe(self) -> None:
        if self._painted:
            self._painted = ""
            self._put("\x1b[J")

    def _put(self, text: str) -> None:
        self._inside = True
        try:
            with GONE:
                self._raw(text)
                self.stream.flush()
        finally:
            self._inside = False

    def _flush(self) -> None:
        for stream in self._watched:
            with GONE:
                stream.flush()

    def _drawn(self, row: Row, width: int) -> str:
        """A row cut to a width, with its styles."""
        out, room = "", width
        for text, style in row:
            cut = text[:room].translate(self._letters)
            while cell_len(cut) > room:
                cut = cut[:-1]
            room -= cell_len(cut)
            out += f"\x1b[{STYLES[style]}m{cut}\x1b[0m" if cut and style and self._colours else cut
        return out


def column_after(column: int, text: str, width: int) -> int:
    """The cursor's column after a text that begins in `column`: 0 at the start of a line, `width` where it is full."""
    line = _ESCAPES.sub("", text)
    cut = max(line.rfind("\n"), line.rfind("\r"))
    if cut >= 0:
        line, column = line[cut + 1 :], 0
    for number, stretch in enumerate(line.split("\t")):
        if number:
            column = min((column // TAB + 1) * TAB, width - 1)
        column += cell_len(stretch)
    return column if column <= width else (column - 1) % width + 1


def _has_letters(stream: Any) -> bool:
    return "utf" in (getattr(stream, "encoding", None) or "utf-8").lower()
