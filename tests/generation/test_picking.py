"""Who takes part, who begins, who gives a place back: numbers in, decisions out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.generation.packed_batch import grouped
from rabbitllm.generation.scheduler import FIRST_TOKENS, MAX_TOKENS, TokenBudget, fits, retry_after, take_part, too_many
from rabbitllm.generation.sequence import AHEAD_TOKENS, SequenceMemory

texts = st.lists(st.builds(SequenceMemory, st.integers(1, 500), st.integers(0, 500)), max_size=12)


@given(st.lists(st.integers(1, 300), max_size=20), st.integers(1, 600))
def test_texts_that_go_on_always_take_part_and_prompts_as_far_as_they_fit(tokens: list[int], chunk: int) -> None:
    chosen = take_part(tokens, chunk)
    assert {place for place, count in enumerate(tokens) if count == 1} <= set(chosen)
    prompts = [tokens[place] for place in chosen if tokens[place] > 1]
    assert sum(prompts) <= chunk or len(prompts) == 1
    waiting = [place for place, count in enumerate(tokens) if count > 1]
    assert not waiting or waiting[0] in chosen  # the first one never starves


@given(texts, st.integers(1, 100), st.integers(1, 200_000))
def test_what_is_left_after_places_were_given_back_fits_or_is_one(
    running: list[SequenceMemory], each: int, limit: int
) -> None:
    def cost(tokens: int) -> int:
        return each * tokens

    count = too_many(running, cost, limit)
    left = running[: len(running) - count]
    assert len(left) >= min(len(running), 1)
    assert len(left) <= 1 or sum(cost(one.tokens + 1) for one in left) <= limit
    if count:  # not one more than needed
        assert sum(cost(one.tokens + 1) for one in running[: len(left) + 1]) > limit


def test_a_text_begins_if_all_of_them_have_room_for_some_tokens_more() -> None:
    running = [SequenceMemory(10, 1000)]
    needed = (10 + AHEAD_TOKENS) + (20 + 5)
    assert fits(SequenceMemory(20, 5), running, lambda tokens: tokens, needed)
    assert not fits(SequenceMemory(20, 5), running, lambda tokens: tokens, needed - 1)
    assert fits(SequenceMemory(20, 5), [], lambda tokens: tokens, 1)


def test_prompts_may_make_a_pass_twice_as_long() -> None:
    pace = TokenBudget()
    assert pace.prompt_tokens(512) == FIRST_TOKENS
    pace = pace.after(4, 10.0)
    assert pace.prompt_tokens(512) == FIRST_TOKENS
    pace = pace.after(1000, 12.0)  # two milliseconds a token
    assert pace.prompt_tokens(512) == pytest.approx(5000, rel=0.02)
    assert pace.after(100, 110.0).prompt_tokens(512) == 512
    assert pace.after(1000, 10.0).after(1000, 10.0).after(1000, 10.0).prompt_tokens(512) == MAX_TOKENS


def test_a_text_that_is_recomputed_takes_what_its_tokens_add_and_all_passes_but_the_last() -> None:
    pace = TokenBudget().after(4, 10.0)
    assert pace.recompute_seconds(100, 512) is None  # not shown yet
    pace = pace.after(1000, 12.0)
    assert pace.recompute_seconds(500, 512) == pytest.approx(500 * 0.002)
    assert pace.recompute_seconds(1500, 512) == pytest.approx(1500 * 0.002 + 2 * 10.0)


def test_passes_that_became_slow_are_believed_after_a_while() -> None:
    pace = TokenBudget().after(1, 1.0)
    for _ in range(100):
        pace = pace.after(1, 8.0)
    assert pace.least == 8.0


def test_a_refused_request_is_told_a_time_within_reason() -> None:
    assert retry_after(0, 64, 0.01) == 1.0
    assert retry_after(128, 64, 30.0) == 60.0
    assert retry_after(10_000, 1, 1000.0) == 600.0


@pytest.mark.parametrize(
    ("sizes", "most", "groups"),
    [([], 4, []), ([1, 2, 3], None, [[1, 2, 3]]), ([1, 2, 3], 3, [[1, 2], [3]]), ([9, 1, 1], 4, [[9], [1, 1]])],
)
def test_groups_of_neighbours(sizes: list[int], most: int | None, groups: list[list[int]]) -> None:
    assert [sizes[group] for group in grouped(sizes, most)] == groups


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 20))
def test_everything_is_in_one_group_and_no_group_could_have_had_the_next(sizes: list[int], most: int) -> None:
    groups = [sizes[group] for group in grouped(sizes, most)]
    assert list(itertools.chain(*groups)) == sizes
    assert all(len(group) == 1 or sum(group) <= most for group in groups)
    assert all(sum(one) + after[0] > most for one, after in itertools.pairwise(groups))
