"""Common parts of reports: named values, tables that fit a width, harmless text, and short formats.

Content of files is printed as text and never as markup, and every character that a terminal might act upon (escape
sequences, line breaks, bidirectional controls) is printed as an escape. Independent of the contents of reports and of
streams.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

LABEL = 14
"""Columns for the names of values."""
GAP = "  "


def harmless(text: str, limit: int = 200) -> str:
    """Make text of a file harmless: one line of printable characters, cut after `limit` of them with a mark."""
    cut = text[:limit]
    if not cut.isprintable():
        cut = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
    return cut if len(text) <= limit else cut + "…"


def error_line(error: Exception, limit: int = 400) -> str:
    """Format an error as one harmless line, with its type if its text alone says little."""
    text = " ".join(str(error).split())
    if not isinstance(error, ValueError | OSError | ImportError):
        text = f"{type(error).__name__}: {text}"
    return harmless(text, limit)


def disarmed(text: str) -> str:
    """Make text of a model harmless, keeping its lines and tabs: characters that a terminal acts upon become escapes.

    These are control characters and bidirectional controls (Unicode's property Bidi_Control). Joiners are kept: emoji
    consist of them, and Persian requires them.
    """
    return text.translate(_ACTED_UPON)


_BIDI_CONTROLS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ACTED_UPON = {
    code: chr(code).encode("unicode_escape").decode("ascii")
    for code in (*range(0x20), *range(0x7F, 0xA0), *_BIDI_CONTROLS)
    if chr(code) not in "\n\t"
}


def shortened(path: Path) -> str:
    """Return a path with `~` for the home folder, harmless."""
    try:
        return harmless(str(Path("~") / path.relative_to(Path.home())))
    except (ValueError, RuntimeError):  # the path is elsewhere; there is no home
        return harmless(str(path))


def counted(count: int, noun: str) -> str:
    """Format a count: `1 shard`, `2 shards`."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def listed(names: Iterable[str], limit: int = 5, separator: str = ", ") -> str:
    """Format names, at most `limit` of them: `a, b and 3 more`."""
    texts = list(names)
    rest = f" and {len(texts) - limit:,} more" if len(texts) > limit else ""
    return separator.join(texts[:limit]) + rest


def large(count: int) -> str:
    """Format a large number: `6.74 billion`."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.2f} {word}"
    return f"{count:,}"


def unit_of(nbytes: float) -> tuple[int, str]:
    """Return the unit for a size, and its name: GB from one GB on, else MB."""
    return (10**9, "GB") if abs(nbytes) >= 10**9 else (10**6, "MB")


def size(nbytes: int) -> str:
    """Format bytes in MB or GB, with two decimals; below 100,000 as a number of bytes."""
    if abs(nbytes) < 100_000:
        return counted(nbytes, "byte")
    scale, unit = unit_of(nbytes)
    return f"{nbytes / scale:.2f} {unit}"


def size_rounded_up(nbytes: int) -> str:
    """Format bytes in MB or GB, rounded up: parsed again, the text is never less than `nbytes`."""
    scale, unit = unit_of(nbytes)
    whole, hundredths = divmod(-(-nbytes * 100 // scale), 100)
    return f"{whole}.{hundredths:02} {unit}"


def put(console: Console, text: Text, indent: int = 0) -> None:
    """Print a paragraph: wrapped on a terminal, one plain line elsewhere.

    Further lines begin at `indent`, or below the first where that begins with more spaces.
    """
    begin = len(text.plain) - len(text.plain.lstrip(" "))
    further = max(begin, indent)
    if not (console.is_terminal and further):
        console.print(text, soft_wrap=not console.is_terminal)
        return
    for index, line in enumerate(text[begin:].wrap(console, max(console.width - further, 20))):
        line.rstrip()
        console.print(Text(" " * (further if index else begin)).append_text(line), soft_wrap=True)


def put_fact(console: Console, name: str, value: str) -> None:
    """Print a named value, with its further lines below its first."""
    width = max(console.width - LABEL, 20) if console.is_terminal else _columns(value)
    for index, line in enumerate(Text(value).wrap(console, width)):
        line.rstrip()
        lead = Text(f"{'' if index else name:<{LABEL}}", "cyan")
        console.print(Text.assemble(lead, line), soft_wrap=True)


def text_on(show: Callable[[Console], None]) -> str:
    """Return what a report prints, as text without colours and without a last line break."""
    lines = io.StringIO()
    show(Console(file=lines, color_system=None, force_terminal=False, force_jupyter=False, highlight=False))
    return lines.getvalue().rstrip("\n")


class Printed:
    """A result whose text is a table; a notebook shows it as its value."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: its head.
        right: whether its values are right-aligned.
        rank: if not all columns fit, those with the lowest ranks are shown; one of 0 is always shown.
        least: width in columns of the terminal to which longer values may be cut in their middle; 0 for not at all.
    """

    name: str
    right: bool = False
    rank: int = 0
    least: int = 0


def put_table(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Print a table without columns that are empty; on a terminal, without those that do not fit its width.

    Args:
        console: the console to print to.
        columns: from left to right.
        rows: a value for each column, harmless already.

    Returns:
        The names of the columns that were left out or cut.
    """
    filled = [index for index in range(len(columns)) if not rows or any(row[index] for row in rows)]
    columns, rows = [columns[index] for index in filled], [[row[index] for index in filled] for row in rows]
    cells = [*zip(*([column.name for column in columns], *rows), strict=True)]
    widths = [max(map(_columns, column)) for column in cells]
    shown = _fitting(columns, widths, console.width if console.is_terminal else None)
    left_aligned = [place for place, index in enumerate(shown) if not columns[index].right]
    texts = [[_cut(cell, width) for cell in cells[index]] for index, width in shown.items()]
    head, *lines = aligned([*zip(*texts, strict=True)], left_aligned)
    console.print(Text(head, "dim"), soft_wrap=True)
    console.file.writelines(line + "\n" for line in lines)  # not through rich, which takes seconds for a vocabulary
    return tuple(column.name for index, column in enumerate(columns) if shown.get(index, 0) < widths[index])


def _fitting(columns: Sequence[Column], widths: Sequence[int], room: int | None) -> dict[int, int]:
    """Return index -> width of the columns that are shown, from left to right."""
    left = sum(widths) + len(GAP) * len(widths) if room is None else room + len(GAP)
    shown: dict[int, int] = {}
    for index in sorted(range(len(columns)), key=lambda index: columns[index].rank):
        width = min(widths[index], columns[index].least or widths[index])
        if not columns[index].rank or width + len(GAP) <= left:
            shown[index] = width
            left -= width + len(GAP)
    for index, width in shown.items():  # what is left goes to those that are cut
        more = min(widths[index] - width, max(left, 0))
        shown[index] += more
        left -= more
    return dict(sorted(shown.items()))


def _cut(text: str, width: int) -> str:
    """Return the text, with its end and some of its beginning only where it is wider than this."""
    cut, kept = text, len(text)
    while _columns(cut) > width:
        kept -= 1
        cut = f"{text[: kept // 3]}…{text[len(text) - kept + kept // 3 :]}"
    return cut


def _columns(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def aligned(rows: Iterable[Sequence[str]], left: Collection[int]) -> list[str]:
    """Format rows as lines; the columns `left` are left-aligned, the others right-aligned."""
    columns = []
    for index, cells in enumerate(zip(*rows, strict=True)):
        lengths = [*map(_columns, cells)]
        width, is_left = max(lengths), index in left
        padded = ((cell, " " * (width - length)) for cell, length in zip(cells, lengths, strict=True))
        columns.append([cell + padding if is_left else padding + cell for cell, padding in padded])
    return [GAP.join(cells).rstrip() for cells in zip(*columns, strict=True)]


Span: TypeAlias = tuple[str, str]
"""Text and its style: "" or one of `STYLES`."""
Row: TypeAlias = tuple[Span, ...]
STYLES = {"bold": "1", "dim": "2", "colour": "36"}
"""Style -> code of a terminal's "select graphic rendition" (ECMA-48)."""
SEPARATOR = " · "
FULL, HALF, EMPTY = "━", "╸", "─"
"""Characters of a bar."""
MIN_BAR, MAX_BAR = 8, 60
"""Columns of a bar."""
PLAIN_LETTERS = str.maketrans({"·": "|", FULL: "=", HALF: "-", EMPTY: "."})
"""Replacements for a terminal without these characters."""


def amount(nbytes: float) -> str:
    """Format bytes in GB, or in MB below one GB, with three digits."""
    scale, unit = unit_of(nbytes)
    value = nbytes / scale
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f} {unit}"


def part(nbytes: float, of: float) -> str:
    """Format a part and its whole, both in the unit of the whole: `12.3 of 57.0 GB`."""
    scale, unit = unit_of(of)
    decimals = 1 if of / scale >= 10 else 2
    return f"{nbytes / scale:.{decimals}f} of {of / scale:.{decimals}f} {unit}"


def speed(bytes_per_second: float) -> str:
    """Format a rate: `118 MB/s`, `2.31 GB/s`."""
    return f"{amount(bytes_per_second)}/s" if bytes_per_second else "0 MB/s"


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


def minute(moment: str) -> str:
    """Format an ISO time to the minute, in its own time zone: `2026-07-01 12:30`."""
    return moment[:16].replace("T", " ")


def bar(share: float, width: int) -> Row:
    """Return a bar of `width` columns, filled from the left; a row of two spans."""
    halves = round(2 * width * min(max(share, 0.0), 1.0))
    filled = FULL * (halves // 2) + HALF * (halves % 2)
    return ((filled, "colour"), (EMPTY * (width - len(filled)), "dim"))


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
    shown = [piece for piece in pieces if piece.text]
    kept: list[int] = []
    used = -len(SEPARATOR)
    for index in sorted(range(len(shown)), key=lambda index: shown[index].rank):
        needed = len(shown[index].text) + len(SEPARATOR)
        if used + needed > width:
            break  # a less important piece must not appear whenever a more important one does not fit
        kept.append(index)
        used += needed
    spans: list[Span] = []
    for index in sorted(kept):
        spans += [(SEPARATOR, "dim")] if spans else []
        spans.append((shown[index].text, shown[index].style))
    return tuple(spans)


def text_of(row: Sequence[Span]) -> str:
    """Return the text of a row without its styles."""
    return "".join(text for text, _ in row)


def progress_row(head: str, share: float, pieces: Iterable[LinePiece], width: int) -> Row:
    """Return a row of at most `width` columns: a word, a bar of the done share, and the pieces that fit."""
    head = f"{head} "
    tail = fitting(pieces, width - len(head) - MIN_BAR - 1)
    room = width - len(head) - 1 - len(text_of(tail))
    return ((head, ""), *bar(share, min(max(room, 0), MAX_BAR)), (" ", ""), *tail)


def plain_line(head: str, pieces: Iterable[LinePiece]) -> str:
    """Return a word and all pieces as one line of text."""
    return f"{head} " + ", ".join(piece.text for piece in pieces if piece.text)
