"""Common parts of the commands' reports: facts with their names, tables that fit a width, and harmless text.

Content of files is printed as text and never as markup, and every character that a terminal might act upon (escape
sequences, line breaks, bidirectional controls) is printed as an escape. Independent of the contents of reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

LABEL = 14
"""Columns for the names of facts."""
GAP = "  "


def harmless(text: str, most: int = 200) -> str:
    """Make text of a file harmless: one line of printable characters, cut after `most` of them with a mark."""
    cut = text[:most]
    if not cut.isprintable():
        cut = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
    return cut if len(text) <= most else cut + "…"


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


def counted(count: int, what: str) -> str:
    """Format a count: `1 shard`, `2 shards`."""
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def large(count: int) -> str:
    """Format a large number: `6.74 billion`."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.2f} {word}"
    return f"{count:,}"


def unit_of(nbytes: float) -> tuple[int, str]:
    """Return the unit for a size, and its name: GiB from one GiB on, else MiB."""
    return (1 << 30, "GiB") if abs(nbytes) >= 1 << 30 else (1 << 20, "MiB")


def size(nbytes: int) -> str:
    """Format bytes in MiB or GiB, with two decimals; below 100,000 as a number of bytes."""
    if abs(nbytes) < 100_000:
        return counted(nbytes, "byte")
    scale, unit = unit_of(nbytes)
    return f"{nbytes / scale:.2f} {unit}"


def size_rounded_up(nbytes: int) -> str:
    """Format bytes in MiB or GiB, rounded up: parsed again, the text is never less than `nbytes`."""
    scale, unit = unit_of(nbytes)
    whole, hundredths = divmod(-(-nbytes * 100 // scale), 100)
    return f"{whole}.{hundredths:02} {unit}"


def put(console: Console, text: Text) -> None:
    """Print a paragraph: wrapped on a terminal, one plain line elsewhere."""
    console.print(text, soft_wrap=not console.is_terminal)


def put_fact(console: Console, name: str, value: str) -> None:
    """Print a fact, with its further lines below its first."""
    width = max(console.width - LABEL, 20) if console.is_terminal else len(value)
    for number, line in enumerate(Text(value).wrap(console, width)):
        line.rstrip()
        lead = Text(f"{'' if number else name:<{LABEL}}", "cyan")
        console.print(Text.assemble(lead, line), soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: its head.
        right: whether its values are right-aligned.
        rank: if not all columns fit, those with the lowest ranks are shown; one of 0 is always shown.
    """

    name: str
    right: bool = False
    rank: int = 0


def put_table(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Print a table; on a terminal, without the columns that do not fit its width.

    Args:
        console: the console to print to.
        columns: from left to right.
        rows: a value for each column, harmless already.

    Returns:
        The names of the columns that were left out.
    """
    widths = [
        max([cell_len(column.name), *(cell_len(row[at]) for row in rows)], default=0)
        for at, column in enumerate(columns)
    ]
    shown = _fitting(columns, widths, console.width if console.is_terminal else None)
    head = _line([columns[at].name for at in shown], [columns[at] for at in shown], [widths[at] for at in shown])
    console.print(Text(head, "dim"), soft_wrap=True)
    kept, fitting = [columns[at] for at in shown], [widths[at] for at in shown]
    for row in rows:  # not through rich, which takes seconds for a vocabulary
        console.file.write(_line([row[at] for at in shown], kept, fitting) + "\n")
    return tuple(column.name for at, column in enumerate(columns) if at not in shown)


def _fitting(columns: Sequence[Column], widths: Sequence[int], room: int | None) -> list[int]:
    """Return the indices of the columns that are shown, from left to right."""
    shown: list[int] = []
    taken = -len(GAP)
    for at in sorted(range(len(columns)), key=lambda at: columns[at].rank):
        needed = widths[at] + len(GAP)
        if room is None or not columns[at].rank or taken + needed <= room:
            shown.append(at)
            taken += needed
    return sorted(shown)


def _line(values: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = [_padded(value, column, width) for value, column, width in zip(values, columns, widths, strict=True)]
    return GAP.join(padded).rstrip()


def _padded(value: str, column: Column, width: int) -> str:
    if value.isascii():
        return value.rjust(width) if column.right else value.ljust(width)
    return " " * (width - cell_len(value)) + value if column.right else set_cell_size(value, width)
