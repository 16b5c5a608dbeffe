"""Texts cut into segments can be put together again, and what they begin with is there once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.generation.scoring.segments import common, cut

TEXTS = st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=12)


@given(TEXTS, st.integers(1, 4))
def test_every_text_is_the_rows_of_its_segments(texts: set[tuple[int, ...]], worth: int) -> None:
    ordered = sorted(texts)
    segments = cut(ordered, worth)
    rows = [token for part in segments.parts for token in part.ids]
    assert segments.tokens == len(rows)
    for number, text in enumerate(ordered):
        assert tuple(rows[row] for row in segments.rows(number)) == text


@given(TEXTS, st.integers(1, 4))
def test_segments_know_what_comes_before_them(texts: set[tuple[int, ...]], worth: int) -> None:
    segments = cut(sorted(texts), worth)
    row = 0
    for number, part in enumerate(segments.parts):
        assert part.ids
        assert part.row == row
        assert all(before < number for before in part.after)
        assert part.begins == sum(len(segments.parts[before].ids) for before in part.after)
        if part.after:
            assert segments.parts[part.after[-1]].after == part.after[:-1]
        row += len(part.ids)


@given(TEXTS)
def test_with_every_token_worth_it_each_beginning_is_there_once(texts: set[tuple[int, ...]]) -> None:
    beginnings = {text[:length] for text in texts for length in range(1, len(text) + 1)}
    assert cut(sorted(texts), 1).tokens == len(beginnings)


def test_a_short_beginning_is_not_worth_a_segment() -> None:
    texts = [(1, 2, 3, 4), (1, 2, 3, 5), (1, 7)]
    assert cut(sorted(texts), 4).tokens == 10
    assert cut(sorted(texts), 3).tokens == 3 + 1 + 1 + 2


def test_texts_that_are_beginnings_of_each_other() -> None:
    texts = [tuple(range(length)) for length in range(10, 2000, 10)]
    segments = cut(texts, 10)
    assert segments.tokens == 1990
    assert len(segments.parts[-1].after) == len(texts) - 1


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9))
def test_common_beginning(one: list[int], other: list[int]) -> None:
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    assert common(one, other) == expected
