"""Reports: facts, tables, harmless text, and short formats."""

from __future__ import annotations

import io
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import (
    Column,
    LinePiece,
    amount,
    bar,
    counted,
    disarmed,
    duration,
    fitting,
    harmless,
    large,
    part,
    put,
    put_fact,
    put_table,
    shortened,
    size,
    speed,
    text_of,
)


def console(width: int | None = None) -> Console:
    """One of a terminal of that width, or of a file."""
    return Console(file=io.StringIO(), width=width, force_terminal=width is not None, color_system=None)


def printed(output: Console) -> str:
    assert isinstance(output.file, io.StringIO)
    return output.file.getvalue()


BIDI_CONTROLS = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
HOSTILE = [
    ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
    ("a\rb\nc\td", r"a\rb\nc\td"),
    ("gpj.\u202eexe", r"gpj.\u202eexe"),
    ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
    ("\x9b31m", r"\x9b31m"),
    ("\ud800", r"\ud800"),
    ("[bold red]no markup[/]", "[bold red]no markup[/]"),
    ("▁동 ång", "▁동 ång"),
]


@pytest.mark.parametrize(("text", "shown"), HOSTILE)
def test_harmless(text: str, shown: str) -> None:
    assert harmless(text) == shown
    output = console(60)
    put_fact(output, "name", harmless(text))
    put_table(output, [Column("name")], [(harmless(text),)])
    assert printed(output).count(shown) == 2


@pytest.mark.parametrize(
    ("text", "indent", "lines"),
    [
        ("  a hare and a rabbit in a field", 0, ["  a hare and a rabbit in", "  a field"]),
        ("a hare, a rabbit and a doe in a field", 4, ["a hare, a rabbit and", "    a doe in a field"]),
        ("a hare and a very old rabbit", 0, ["a hare and a very old", "rabbit"]),
    ],
)
def test_further_lines_of_a_paragraph_are_indented(text: str, indent: int, lines: list[str]) -> None:
    for output, expected in ((console(24), lines), (console(), [text])):
        put(output, Text(text), indent)
        assert [line.rstrip() for line in printed(output).splitlines()] == expected


def test_value_in_a_file_is_one_line() -> None:
    output = console()
    put_fact(output, "folder", "a 兎 of 兎兎兎兎")
    assert printed(output) == "folder        a 兎 of 兎兎兎兎\n"


@given(st.text(alphabet=st.characters(codec=None)))
def test_control_characters_are_escaped(text: str) -> None:
    shown = harmless(text)
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert harmless(shown) == shown or len(shown) > 200


def test_text_of_a_model_is_disarmed() -> None:
    assert disarmed("a\x1b]0;title\x07\r\u202eb") == r"a\x1b]0;title\x07\r\u202eb"
    assert disarmed("\x9b31m\x7f\u2066x\u2069\u200f") == r"\x9b31m\x7f\u2066x\u2069\u200f"


@pytest.mark.parametrize("text", ["Größe\n\t大きい", "می\u200cرود", "👩\u200d🚀 ❤\ufe0f", "क\u094d\u200dष", "a\xa0b"])
def test_joiners_are_kept(text: str) -> None:
    assert disarmed(text) == text


@given(st.text(alphabet=st.characters(codec=None)))
def test_only_control_characters_are_escaped(text: str) -> None:
    kept = [c for c in text if c in "\n\t" or not (unicodedata.category(c) == "Cc" or c in BIDI_CONTROLS)]
    assert disarmed("".join(kept)) == "".join(kept)
    unescaped = set(disarmed(text)) - set("\n\t")
    assert not unescaped & BIDI_CONTROLS
    assert "Cc" not in map(unicodedata.category, unescaped)


def test_long_name_is_cut() -> None:
    assert harmless("x" * 300) == "x" * 200 + "…"
    assert harmless("x" * 200) == "x" * 200


def test_paths_below_the_home_folder_are_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "me")
    assert shortened(tmp_path / "me" / "mod\x1bels") == r"~/mod\x1bels"
    assert shortened(tmp_path / "me") == "~"
    assert shortened(tmp_path / "metoo") == str(tmp_path / "metoo")


COLUMNS = [Column("name"), Column("middle", rank=2), Column("number", right=True, rank=1), Column("wide", rank=3)]
ROWS = [("동동", "m", "7", "w" * 30), ("x", "", "12,345", "")]


def test_table_shows_columns_that_fit() -> None:
    wide = console()
    assert put_table(wide, COLUMNS, ROWS) == ()
    head, first, second = printed(wide).splitlines()
    assert head.split() == ["name", "middle", "number", "wide"]
    assert [cell_len(line[: line.index(word)]) for line, word in ((first, "m"), (head, "middle"))] == [6, 6]
    assert second == "x             12,345"
    narrow = console(20)
    assert put_table(narrow, COLUMNS, ROWS) == ("wide",)
    assert all(cell_len(line) <= 20 for line in printed(narrow).splitlines())
    assert put_table(console(12), COLUMNS, ROWS) == ("middle", "wide")
    assert put_table(console(3), COLUMNS, ROWS) == ("middle", "number", "wide")


def test_table_has_no_empty_columns() -> None:
    output = console(20)
    assert put_table(output, COLUMNS, [("x", "", "7", ""), ("y", "", "", "")]) == ()
    assert printed(output).splitlines()[0].split() == ["name", "number"]
    assert put_table(output, COLUMNS, []) == ("wide",)


def test_table_cuts_what_may_be_cut_where_there_is_room_for_some_of_it() -> None:
    columns, rows = (
        [Column("name"), Column("folder", rank=1, least=9)],
        [("x", "~/cache/동동/model-4bit"), ("y", "~/a")],
    )
    for width in range(2, 40):
        output = console(width)
        narrow = put_table(output, columns, rows)
        head, first, second = printed(output).splitlines()
        assert ("folder" in head) == (width >= len("name") + 2 + 9)
        assert narrow == (() if "model-4bit" in first and "…" not in first else ("folder",))
        assert max(map(cell_len, (head, first, second))) <= max(width, len("name"))
        if "folder" in head:
            assert second == "y     ~/a"
            assert re.fullmatch(r"x     ~/(cache/동동/model-4bit|.*….*bit)", first)


def test_numbers_in_words() -> None:
    assert [large(n) for n in (7, 6_738_415_616, 1_500_000, 2 * 10**12)] == [
        "7",
        "6.74 billion",
        "1.50 million",
        "2.00 trillion",
    ]
    sizes = [size(nbytes) for nbytes in (0, 1, 99_999, 450_000, MB, 13_476_929_273, -MB)]
    assert sizes == ["0 bytes", "1 byte", "99,999 bytes", "0.45 MB", "1.00 MB", "13.48 GB", "-1.00 MB"]
    assert (counted(1, "shard"), counted(1234, "shard")) == ("1 shard", "1,234 shards")


# Amounts, durations, bars and lines that fit.


MB, GB = 10**6, 10**9


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 MB"),
        (450_000, "0.45 MB"),
        (9.994 * MB, "9.99 MB"),
        (9.996 * MB, "10.0 MB"),
        (1 << 20, "1.05 MB"),
        (GB, "1.00 GB"),
        (145.4 * GB, "145 GB"),
    ],
)
def test_amounts(nbytes: float, text: str) -> None:
    assert amount(nbytes) == text


def test_parts_have_one_unit() -> None:
    assert part(MB, 57 * GB) == "0.0 of 57.0 GB"
    assert part(GB / 2, 4 * GB) == "0.50 of 4.00 GB"
    assert part(5 * MB, 600 * MB) == "5.0 of 600.0 MB"


def test_speeds() -> None:
    assert speed(118.2 * MB) == "118 MB/s"
    assert speed(0) == "0 MB/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (61, "1 min 01 s"), (754, "13 min"), (5_400, "1 h 30 min"), (7_500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(-1, 2), st.integers(0, 200))
def test_bar_width(share: float, width: int) -> None:
    assert len(text_of(bar(share, width))) == width


def test_bar_share() -> None:
    assert text_of(bar(0.25, 4)) == "━───"
    assert text_of(bar(0.375, 4)) == "━╸──"
    assert text_of(bar(1, 4)) == "━━━━"


@given(st.lists(st.tuples(st.text("abc", max_size=9), st.integers(0, 5))), st.integers(0, 60))
def test_pieces_fit_and_keep_their_order(given_pieces: list[tuple[str, int]], width: int) -> None:
    pieces = [LinePiece(text, rank) for text, rank in given_pieces]
    row = fitting(pieces, width)
    assert len(text_of(row)) <= width
    texts = [text for text, style in row if style != "dim"]
    remaining = iter([piece.text for piece in pieces])
    assert all(any(text == piece_text for piece_text in remaining) for text in texts)


def test_least_important_pieces_are_dropped_first() -> None:
    pieces = [LinePiece("aaaa", 1), LinePiece("bb", 2), LinePiece("cccc", 0), LinePiece("", 0)]
    assert [text_of(fitting(pieces, width)) for width in (20, 12, 8, 3)] == [
        "aaaa · bb · cccc",
        "aaaa · cccc"[:11],
        "cccc",
        "",
    ]
