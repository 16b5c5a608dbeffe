"""Texts cut into segments can be put together again. Every task is in one micro-batch, none larger than it may be, and
every micro-batch in one pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.generation.scoring.micro_batches import (
    PADDING_SHARE,
    MicroBatch,
    TextLayout,
    chains,
    cut,
    linked,
    micro_batches,
)
from rabbitllm.generation.scoring.tasks import Task, TextRequest

TASKS = st.sets(st.lists(st.integers(0, 1), min_size=1, max_size=10).map(tuple), min_size=1, max_size=20).map(
    lambda found: [Task(ids, ()) for ids in sorted(found, key=hash)]
)
LIMIT = 24


def tokens_at(batch: MicroBatch) -> list[int]:
    if batch.segments is not None:
        return [token for part in batch.segments.parts for token in part.ids]
    return [token for task in batch.tasks for token in (*task.ids, *[-1] * (batch.length - len(task.ids)))]


@pytest.mark.parametrize("form", TextLayout)
@given(tasks=TASKS)
def test_all_and_no_more_than_may_be(form: TextLayout, tasks: list[Task]) -> None:
    batches = micro_batches(tasks, form, LIMIT, min_shared=2)
    assert sorted(task.ids for batch in batches for task in batch.tasks) == sorted(task.ids for task in tasks)
    for batch in batches:
        there = tokens_at(batch)
        assert batch.tokens == len(there) <= LIMIT
        for number, task in enumerate(batch.tasks):
            assert tuple(there[row] for row in batch.rows(number)) == task.ids
        filling = batch.tokens - sum(len(task.ids) for task in batch.tasks)
        if form is TextLayout.FILLED:
            assert filling * PADDING_SHARE <= batch.tokens
        if form in (TextLayout.EQUAL, TextLayout.ALONE):
            assert filling == 0


def test_one_that_is_too_long_goes_by_itself() -> None:
    tasks = [Task((1,) * 30, ()), Task((2,), ()), Task((3,), ())]
    for form in TextLayout:
        sizes = sorted(batch.tokens for batch in micro_batches(tasks, form, LIMIT))
        assert sizes == ([1, 1, 30] if form is TextLayout.ALONE else [2, 30])


def test_those_with_the_same_beginning_are_together() -> None:
    shared = (5,) * 20
    tasks = [Task((*shared, number), ()) for number in range(8)] + [Task((number, *shared), ()) for number in range(4)]
    batches = micro_batches(tasks[::-1], TextLayout.PACKED, 28, min_shared=16)
    assert [batch.tokens for batch in batches].count(28) == 1
    assert sum(batch.tokens for batch in batches) == 28 + 4 * 21


@given(tasks=TASKS, first=st.integers(0, 9))
def test_what_is_handed_on_was_computed_and_has_no_rows_that_are_asked_for(tasks: list[Task], first: int) -> None:
    asked = [Task(one.ids, (TextRequest(0, min(first, len(one.ids) - 1), (1,), None),)) for one in tasks]
    before: list[int] = []
    handed = 0
    for own, alone in zip(
        linked(found := micro_batches(asked, TextLayout.PACKED, LIMIT, min_shared=2)), found, strict=True
    ):
        assert own.segments is not None
        assert own.tasks == alone.tasks
        there = [token for part in own.segments.computed for token in part.ids]
        assert own.tokens == len(there) == alone.tokens - handed
        for number, task in enumerate(own.tasks):
            rows = own.segments.rows(number)
            known = rows.count(-1)
            assert known in (0, *(part.begins + len(part.ids) for part in own.segments.path(number)))
            assert rows[:known] == [-1] * known
            assert task.ids[:known] == tuple(before[:known])
            assert tuple(there[row] for row in rows[known:]) == task.ids[known:]
            assert known <= task.asked[0].first
        assert handed == own.segments.rows(0).count(-1)
        before, handed = list(own.tasks[-1].ids[: own.shared_prefix]), own.shared_prefix


@given(tasks=TASKS, most=st.integers(1, 4))
def test_chains_are_linked_and_end_where_nothing_is_handed_on(tasks: list[Task], most: int) -> None:
    found = micro_batches(tasks, TextLayout.PACKED, LIMIT, min_shared=2)
    made = chains(found, most)
    assert [batch.tasks for chain in made for batch in chain] == [batch.tasks for batch in found]
    at = 0
    for chain in made:
        alone = found[at : at + len(chain)]
        assert chain == linked(alone)
        assert all(batch.shared_prefix for batch in chain[:-1])
        at += len(chain)
        if len(chain) < most and at < len(found):
            assert not linked([alone[-1], found[at]])[0].shared_prefix


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
