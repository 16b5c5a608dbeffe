"""Amounts, durations, bars and lines that fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.base.terminal import LinePiece, amount, bar, duration, fitting, part, speed, text_of

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 MiB"),
        (450_000, "0.43 MiB"),
        (9.994 * MIB, "9.99 MiB"),
        (9.996 * MIB, "10.0 MiB"),
        (1e9, "954 MiB"),
        (GIB, "1.00 GiB"),
        (145.4 * GIB, "145 GiB"),
    ],
)
def test_amounts(nbytes: float, text: str) -> None:
    assert amount(nbytes) == text


def test_parts_have_one_unit() -> None:
    assert part(MIB, 57 * GIB) == "0.0 of 57.0 GiB"
    assert part(GIB / 2, 4 * GIB) == "0.50 of 4.00 GiB"
    assert part(5 * MIB, 600 * MIB) == "5.0 of 600.0 MiB"


def test_speeds() -> None:
    assert speed(118.2 * MIB) == "118 MiB/s"
    assert speed(0) == "0 MiB/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (61, "1 min 01 s"), (754, "13 min"), (5_400, "1 h 30 min"), (7_500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(-1, 2), st.integers(0, 200))
def test_a_bar_has_its_width(share: float, width: int) -> None:
    assert len(text_of(bar(share, width))) == width


def test_a_bar_fills() -> None:
    assert text_of(bar(0.25, 4)) == "━───"
    assert text_of(bar(0.375, 4)) == "━╸──"
    assert text_of(bar(1, 4)) == "━━━━"


@given(st.lists(st.tuples(st.text("abc", max_size=9), st.integers(0, 5))), st.integers(0, 60))
def test_pieces_fit_and_keep_their_order(given_pieces: list[tuple[str, int]], width: int) -> None:
    pieces = [LinePiece(text, rank) for text, rank in given_pieces]
    row = fitting(pieces, width)
    assert len(text_of(row)) <= width
    texts = [text for text, style in row if style != "dim"]
    left = iter([piece.text for piece in pieces])
    assert all(any(text == other for other in left) for text in texts)


def test_the_least_important_pieces_go_first() -> None:
    pieces = [LinePiece("aaaa", 1), LinePiece("bb", 2), LinePiece("cccc", 0), LinePiece("", 0)]
    assert [text_of(fitting(pieces, width)) for width in (20, 12, 8, 3)] == [
        "aaaa · bb · cccc",
        "aaaa · cccc"[:11],
        "cccc",
        "",
    ]
