"""A model's answer as it comes: whole words on the lines of a terminal, and a line in place of its reasoning."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import IO, TextIO

from rich.cells import cell_len
from rich.console import Console

from rabbitllm.base.terminal import SEPARATOR, Row, counted, disarmed, duration
from rabbitllm.display.region import THE_REGION, Claim, DisplayForm, form_of, size_of

FENCES = ("```", "~~~")
"""Marks of a block of code, whose lines are not wrapped."""
_TAB = 8
_LAST_WORDS = 1_000
"""Letters of a reasoning that are kept to show its last words."""


class WordWrap:
    """Breaks lines of a terminal between words, and writes a word as its letters come.

    The beginning of a word that turns out too long for its line is erased there and written on the next. Lines of code,
    and words longer than a line, are left to the terminal. Text of wide characters breaks between any two of them.
    """

    def __init__(self) -> None:
        self._column = 0
        self._gap = ""  # spaces that are not written yet: at the edge a line break takes their place
        self._word = ""
        self._line = ""
        self._is_code = False

    def feed(self, text: str, columns: int) -> str:
        """The text as it is written to a terminal of so many columns."""
        return "".join(self._next(letter, columns) for letter in text)

    def _next(self, letter: str, columns: int) -> str:
        if letter == "\n":
            fits = self._column + len(self._gap) < columns
            self._is_code ^= self._line.lstrip().startswith(FENCES)
            gap, self._column, self._gap, self._word, self._line = self._gap, 0, "", "", ""
            return f"{gap}\n" if fits else "\n"
        self._line += letter
        if self._is_code:
            return letter
        if letter in " \t":
            stop = _TAB - (self._column + len(self._gap)) % _TAB
            self._gap, self._word = self._gap + " " * (1 if letter == " " else stop), ""
            return ""
        cells = cell_len(letter)
        if cells == 2 or (cell_len(self._word[-1:]) == 2 and cells):
            self._word = ""
        gap, self._gap = self._gap, ""
        end = self._column + len(gap) + cells
        begun, self._word = self._word, self._word + letter
        if end < columns or not self._column:  # the last column stays free: there terminals put the cursor differently
            self._column = end
            return gap + letter
        moved = cell_len(begun)
        if moved == self._column:  # longer than a line
            self._column = end if end <= columns else cells
            return letter
        self._column = moved + cells
        erased = f"\x1b[{moved}D\x1b[K" if begun else ""
        return f"{erased}\n{begun}{letter}"


class _ThinkingLine:
    """One line about a reasoning that goes on: its time, its tokens, and its last words as far as they fit."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._text = ""
        self._tokens = 0

    def add(self, text: str, tokens: int) -> None:
        """The next piece, and the tokens so far."""
        self._text, self._tokens = (self._text + text)[-_LAST_WORDS:], tokens

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def rows(self, width: int) -> Sequence[Row]:
        line, words = self.line() + SEPARATOR, disarmed(" ".join(self._text.split()))
        while words and cell_len(line + words) > width:
            words = words[1:]
        return [((line + words, "dim"),)]

    def line(self) -> str:
        return f"thinking … {duration(self.seconds)}, {counted(self._tokens, 'token')}"


class AnswerPrinter:
    """Prints an answer, and on a terminal how long the reasoning before it takes.

    A file or a pipe gets the answer alone, unchanged. Then the note on reasoning goes to `notes` if that is a terminal.
    Characters that an encoding lacks become question marks. On a terminal, control characters are written as escapes,
    since a model may generate any of them. Methods raise BrokenPipeError if the reader has closed the pipe.

    Args:
        out: for the answer; stdout by default.
        notes: console for everything else.
    """

    def __init__(self, notes: Console, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._aside: IO[str] | None = self._out if self._out.isatty() else notes.file if notes.is_terminal else None
        self._wrap = WordWrap()
        self._thinking: tuple[_ThinkingLine, Claim] | None = None
        self._last = "\n"

    def think(self, text: str, tokens: int) -> None:
        """Show a piece of the reasoning, which has so many tokens by now, until more comes."""
        if self._aside is None:
            return
        if self._thinking is None:
            thinking = _ThinkingLine()
            self._thinking = thinking, THE_REGION.claim(thinking)
        self._thinking[0].add(text, tokens)

    def write(self, text: str) -> None:
        """Print a piece of the answer."""
        self._end_thoughts()
        self._last = text[-1:] or self._last
        self._print(self._out, text)

    def end(self) -> None:
        """End the last line."""
        self._end_thoughts()
        if self._last != "\n":
            self.write("\n")

    def _end_thoughts(self) -> None:
        """Say how long the model thought, in place of its thoughts."""
        if self._thinking is not None and self._aside is not None:
            (thinking, claim), self._thinking = self._thinking, None
            claim.release()
            self._print(self._aside, f"(thought for {duration(max(thinking.seconds, 1))})\n", is_dim=True)

    def _print(self, out: IO[str], text: str, *, is_dim: bool = False) -> None:
        text = disarmed(text) if out.isatty() else text
        if form_of(out) is DisplayForm.TERMINAL:
            text = self._wrap.feed(text, size_of(out)[0])
            text = f"\x1b[2m{text}\x1b[0m" if is_dim and text else text
        encoding = getattr(out, "encoding", None) or "utf-8"
        out.write(text.encode(encoding, "replace").decode(encoding))
        out.flush()
