"""Short formats of amounts, rates and durations, and pieces of a line that fit a width. Independent of streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rabbitllm.base.terminal import unit_of

Span: TypeAlias = tuple[str, str]
"""Text and its style: "" or one of `STYLES`."""
Row: TypeAlias = tuple[Span, ...]
STYLES = {"bold": "1", "dim": "2", "colour": "36"}
"""Style -> code of a terminal's "select graphic rendition" (ECMA-48)."""
SEPARATOR = " · "
FULL, HALF, EMPTY = "━", "╸", "─"
"""Characters of a bar."""
PLAIN_LETTERS = str.maketrans({"·": "|", FULL: "=", HALF: "-", EMPTY: "."})
"""Replacements for a terminal without these characters."""


def amount(nbytes: float, decimals: int | None = None) -> str:
    """Format bytes in GiB, or in MiB below one GiB; with three digits, or as many decimals as requested."""
    scale, unit = unit_of(nbytes)
    value = nbytes / scale
    return f"{_digits(value) if decimals is None else f'{value:.{decimals}f}'} {unit}"


def part(nbytes: float, of: float) -> str:
    """Format a part and its whole, both in the unit of the whole: `12.3 of 57.0 GiB`."""
    scale, unit = unit_of(of)
    decimals = 1 if of / scale >= 10 else 2
    return f"{nbytes / scale:.{decimals}f} of {of / scale:.{decimals}f} {unit}"


def speed(bytes_per_second: float) -> str:
    """Format a rate: `118 MiB/s`, `2.31 GiB/s`."""
    return f"{amount(bytes_per_second)}/s" if bytes_per_second else "0 MiB/s"


def duration(seconds: float) -> str:
    """Format a duration: `9 s`, `4 min 10 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 5_400:
        return f"{round(seconds / 60)} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min"


def _digits(value: float) -> str:
    """Format three digits of a number below 1000; of a larger one its integer part."""
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


def bar(share: float, width: int) -> Row:
    """Return a bar of `width` columns, filled from the left; a row of two spans."""
    halves = round(2 * width * min(max(share, 0.0), 1.0))
    done = FULL * (halves // 2) + HALF * (halves % 2)
    return ((done, "colour"), (EMPTY * (width - len(done)), "dim"))


@dataclass(frozen=True, slots=True)
class LinePiece:
    """A part of a line that may be left out.

    Attributes:
        text: its text; "" for nothing.
        rank: if not all fit, those with the lowest ranks are kept.
        style: see `Span`.
    """

    text: str
    rank: int = 0
    style: str = ""


def fitting(pieces: Iterable[LinePiece], width: int) -> Row:
    """Return the pieces that fit the width, the lowest ranks first, in their order, with separators."""
    all_of_them = [piece for piece in pieces if piece.text]
    chosen: list[int] = []
    taken = -len(SEPARATOR)
    for at in sorted(range(len(all_of_them)), key=lambda at: all_of_them[at].rank):
        needed = len(all_of_them[at].text) + len(SEPARATOR)
        if taken + needed > width:
            break  # a less important piece must not appear whenever a more important one does not fit
        chosen.append(at)
        taken += needed
    spans: list[Span] = []
    for at in sorted(chosen):
        spans += [(SEPARATOR, "dim")] if spans else []
        spans.append((all_of_them[at].text, all_of_them[at].style))
    return tuple(spans)


def text_of(row: Sequence[Span]) -> str:
    """Return the text of a row without its styles."""
    return "".join(text for text, _ in row)
