"""Texts cut into segments can be put together again. Every task is in one micro-batch, none larger than it may be, and
every micro-batch in one pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.generation.scoring._tasks import Task, TextRequest
from rabbitllm.generation.scoring.micro_batches import (
    PADDING_SHARE,
    MicroBatch,
    TextLayout,
    chains,
    cut,
    linked,
    micro_batches,
)

TASKS = st.sets(st.lists(st.integers(0, 1), min_size=1, max_size=10).map(tuple), min_size=1, max_size=20).map(
    lambda texts: [Task(ids, ()) for ids in sorted(texts, key=hash)]
)
LIMIT = 24


def tokens_at(batch: MicroBatch) -> list[int]:
    if batch.segments is not None:
        return [token for part in batch.segments.parts for token in part.ids]
    return [token for task in batch.tasks for token in (*task.ids, *[-1] * (batch.length - len(task.ids)))]


@pytest.mark.parametrize("form", TextLayout)
@given(tasks=TASKS)
def test_micro_batches_are_complete_and_limited(form: TextLayout, tasks: list[Task]) -> None:
    batches = micro_batches(tasks, form, LIMIT, min_shared=2)
    assert sorted(task.ids for batch in batches for task in batch.tasks) == sorted(task.ids for task in tasks)
    for batch in batches:
        there = tokens_at(batch)
        assert batch.tokens == len(there) <= LIMIT
        for index, task in enumerate(batch.tasks):
            assert tuple(there[row] for row in batch.rows(index)) == task.ids
        filling = batch.tokens - sum(len(task.ids) for task in batch.tasks)
        if form is TextLayout.FILLED:
            assert filling * PADDING_SHARE <= batch.tokens
        if form in (TextLayout.EQUAL, TextLayout.ALONE):
            assert filling == 0


def test_a_long_text_is_a_micro_batch_alone() -> None:
    tasks = [Task((1,) * 30, ()), Task((2,), ()), Task((3,), ())]
    for form in TextLayout:
        sizes = sorted(batch.tokens for batch in micro_batches(tasks, form, LIMIT))
        assert sizes == ([1, 1, 30] if form is TextLayout.ALONE else [2, 30])


def test_texts_with_a_shared_prefix_are_packed_together() -> None:
    shared = (5,) * 20
    tasks = [Task((*shared, token), ()) for token in range(8)] + [Task((token, *shared), ()) for token in range(4)]
    batches = micro_batches(tasks[::-1], TextLayout.PACKED, 28, min_shared=16)
    assert [batch.tokens for batch in batches].count(28) == 1
    assert sum(batch.tokens for batch in batches) == 28 + 4 * 21


@given(tasks=TASKS, first=st.integers(0, 9))
def test_a_handed_on_prefix_was_computed_and_has_no_requested_rows(tasks: list[Task], first: int) -> None:
    asked = [Task(task.ids, (TextRequest(0, min(first, len(task.ids) - 1), (1,), None),)) for task in tasks]
    before: list[int] = []
    handed = 0
    for batch, alone in zip(
        linked(batches := micro_batches(asked, TextLayout.PACKED, LIMIT, min_shared=2)), batches, strict=True
    ):
        assert batch.segments is not None
        assert batch.tasks == alone.tasks
        there = [token for part in batch.segments.computed for token in part.ids]
        assert batch.tokens == len(there) == alone.tokens - handed
        for index, task in enumerate(batch.tasks):
            rows = batch.segments.rows(index)
            shared = rows.count(-1)
            assert shared in (0, *(part.begins + len(part.ids) for part in batch.segments.path(index)))
            assert rows[:shared] == [-1] * shared
            assert task.ids[:shared] == tuple(before[:shared])
            assert tuple(there[row] for row in rows[shared:]) == task.ids[shared:]
            assert shared <= task.asked[0].first
        assert handed == batch.segments.rows(0).count(-1)
        before, handed = list(batch.tasks[-1].ids[: batch.shared_prefix]), batch.shared_prefix


@given(tasks=TASKS, limit=st.integers(1, 4))
def test_chains_are_linked_and_end_without_a_shared_prefix(tasks: list[Task], limit: int) -> None:
    batches = micro_batches(tasks, TextLayout.PACKED, LIMIT, min_shared=2)
    passes = chains(batches, limit)
    assert [batch.tasks for chain in passes for batch in chain] == [batch.tasks for batch in batches]
    begin = 0
    for chain in passes:
        alone = batches[begin : begin + len(chain)]
        assert chain == linked(alone)
        assert all(batch.shared_prefix for batch in chain[:-1])
        begin += len(chain)
        if len(chain) < limit and begin < len(batches):
            assert not linked([alone[-1], batches[begin]])[0].shared_prefix


TEXTS = st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=12)


@given(TEXTS, st.integers(1, 4))
def test_every_text_is_the_rows_of_its_segments(texts: set[tuple[int, ...]], worth: int) -> None:
    ordered = sorted(texts)
    segments = cut(ordered, worth)
    rows = [token for part in segments.parts for token in part.ids]
    assert segments.tokens == len(rows)
    for index, text in enumerate(ordered):
        assert tuple(rows[row] for row in segments.rows(index)) == text


@given(TEXTS, st.integers(1, 4))
def test_segments_know_what_comes_before_them(texts: set[tuple[int, ...]], worth: int) -> None:
    segments = cut(sorted(texts), worth)
    row = 0
    for index, part in enumerate(segments.parts):
        assert part.ids
        assert part.row == row
        assert all(before < index for before in part.after)
        assert part.begins == sum(len(segments.parts[before].ids) for before in part.after)
        if part.after:
            assert segments.parts[part.after[-1]].after == part.after[:-1]
        row += len(part.ids)


@given(TEXTS)
def test_each_prefix_is_one_segment(texts: set[tuple[int, ...]]) -> None:
    beginnings = {text[:length] for text in texts for length in range(1, len(text) + 1)}
    assert cut(sorted(texts), 1).tokens == len(beginnings)


def test_a_short_prefix_is_no_segment() -> None:
    texts = [(1, 2, 3, 4), (1, 2, 3, 5), (1, 7)]
    assert cut(sorted(texts), 4).tokens == 10
    assert cut(sorted(texts), 3).tokens == 3 + 1 + 1 + 2


def test_texts_that_are_prefixes_of_each_other() -> None:
    texts = [tuple(range(length)) for length in range(10, 2000, 10)]
    segments = cut(texts, 10)
    assert segments.tokens == 1990
    assert len(segments.parts[-1].after) == len(texts) - 1
