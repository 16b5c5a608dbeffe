"""Amounts, rates and durations in few characters, and pieces of a line that fit a width. Knows nothing of streams."""

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
"""What a bar is made of."""
PLAIN_LETTERS = str.maketrans({"·": "|", FULL: "=", HALF: "-", EMPTY: "."})
"""For a terminal without these letters."""


def amount(nbytes: float, decimals: int | None = None) -> str:
    """Bytes in GiB, or in MiB below one GiB; as many decimals as three digits leave, or as asked."""
    scale, unit = unit_of(nbytes)
    value = nbytes / scale
    return f"{_digits(value) if decimals is None else f'{value:.{decimals}f}'} {unit}"


def part(nbytes: float, of: float) -> str:
    """`12.3 of 57.0 GiB`: both in the unit of the second."""
    scale, unit = unit_of(of)
    decimals = 1 if of / scale >= 10 else 2
    return f"{nbytes / scale:.{decimals}f} of {of / scale:.{decimals}f} {unit}"


def speed(bytes_per_second: float) -> str:
    """`118 MiB/s`, `2.31 GiB/s`."""
    return f"{amount(bytes_per_second)}/s" if bytes_per_second else "0 MiB/s"


def duration(seconds: float) -> str:
    """`9 s`, `4 min 10 s`, `2 h 05 min`."""
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
    """Three digits of a number below 1000; of a larger one its whole part."""
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


def bar(share: float, width: int) -> Row:
    """A bar of so many columns, filled from the left; a row of two spans."""
    halves = round(2 * width * min(max(share, 0.0), 1.0))
    done = FULL * (halves // 2) + HALF * (halves % 2)
    return ((done, "colour"), (EMPTY * (width - len(done)), "dim"))


@dataclass(frozen=True, slots=True)
class LinePiece:
    """A part of a line that may be left out.

    Attributes:
        text: what it says; "" for nothing.
        rank: where not all fit, those with the lowest stay.
        style: see `Span`.
    """

    text: str
    rank: int = 0
    style: str = ""


def fitting(pieces: Iterable[LinePiece], width: int) -> Row:
    """As many of the pieces as fit so many columns, in their order, with a separator between them."""
    all_of_them = [piece for piece in pieces if piece.text]
    chosen: list[int] = []
    taken = -len(SEPARATOR)
    for at in sorted(range(len(all_of_them)), key=lambda at: all_of_them[at].rank):
        needed = len(all_of_them[at].text) + len(SEPARATOR)
        if taken + needed > width:
            break  # or a less important one would take the place of one that comes and goes
        chosen.append(at)
        taken += needed
    spans: list[Span] = []
    for at in sorted(chosen):
        spans += [(SEPARATOR, "dim")] if spans else []
        spans.append((all_of_them[at].text, all_of_them[at].style))
    return tuple(spans)


def text_of(row: Sequence[Span]) -> str:
    """A row without its styles."""
    return "".join(text for text, _ in row)
