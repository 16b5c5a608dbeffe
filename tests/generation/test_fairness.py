"""Who waits for whom: counted in passes, with a tiny model whose passes count as slow as their rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.errors import BusyError
from rabbitllm.generation._scheduler import (
    MANY_TOKENS,
    MAX_OVERTAKEN,
    TIMES,
    TOKENS_EACH,
    ScheduledPass,
    Scheduler,
    TokenBudget,
    rows_of,
)
from rabbitllm.generation._sequence import Sequence
from rabbitllm.generation.kv_cache import cost_by_config
from rabbitllm.generation.request import Delta, FinishReason, Limits, Request, Sampling
from tests.generation.submitting import prompt
from tests.support.tiny_models import load

CHUNK = 16
BESIDE_ONE = TIMES * (MANY_TOKENS + TOKENS_EACH)
"""Prompt tokens in a pass beside a sequence in decode."""


class Counted(Scheduler):
    """A scheduler that notes the rows of its passes."""

    rows: list[int]

    def schedule(self) -> ScheduledPass:
        scheduled = super().schedule()
        self.rows.append(scheduled.num_tokens)
        return scheduled


class Passes:
    """A scheduler whose passes are counted, and whose budget does not depend on the clock."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.model = load(folder, 60_000, dtype="float32")
        self.cost = cost_by_config(self.model.config, torch.float32)
        if "cache_tokens" in limits:
            limits["cache_bytes"] = self.cost.bytes_for(limits.pop("cache_tokens"))
        self.scheduler = Counted(self.model, Limits(**{"draft": "none", "chunk": CHUNK, **limits}))
        self.count = 0
        self.rows = self.scheduler.rows = []
        self.first: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.numbers: dict[Sequence, int] = {}

    def submit(self, tokens: int, new: int = 4, **options: Any) -> int:
        number = len(self.numbers)
        request = Request(prompt(tokens, number), new, Sampling(ignore_eos=True), **options)

        def receive(event: Any) -> None:
            if isinstance(event, Delta):
                self.tokens.setdefault(number, []).extend(token.token for token in event.tokens)
            self.first.setdefault(number, self.count)

        sequence = Sequence(self.model, request, receive, self.scheduler.wake)
        self.scheduler.submit(sequence)
        self.numbers[sequence] = number
        return number

    def step(self) -> list[int]:
        """One pass; the numbers of those that run after it was scheduled."""
        self.count += 1
        assert self.count < 2000, "nothing goes on"
        self.scheduler.step()
        return self.running

    @property
    def running(self) -> list[int]:
        return [self.numbers[sequence] for sequence in self.scheduler.running]

    def until(self, number: int) -> int:
        """Passes until the first token of a request."""
        begun = self.count
        while number not in self.first:
            self.step()
        return self.count - begun

    def finish(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()


Open = Callable[..., Passes]


@pytest.fixture
def passes(split_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr(TokenBudget, "after", lambda self, tokens, seconds: TokenBudget(1.0, 1.0))
    opened: list[Passes] = []

    def make(**limits: Any) -> Passes:
        opened.append(Passes(split_folder, **limits))
        opened[-1].scheduler._budget = TokenBudget(1.0, 1.0)
        return opened[-1]

    yield make
    for passed in opened:
        passed.scheduler.end(FinishReason.CANCELLED)


def test_a_short_prompt_does_not_wait_for_a_long_one(passes: Open) -> None:
    passed = passes()
    long = passed.submit(240)
    passed.step()
    short = passed.submit(5)
    assert passed.until(short) <= 2
    assert long not in passed.first


def test_short_prompts_slow_a_long_one_by_half_at_most(passes: Open) -> None:
    passed = passes(running=4, waiting=400)
    long = passed.submit(15 * CHUNK)
    for _ in range(200):
        passed.submit(CHUNK, 1)
    assert passed.until(long) <= 2 * 15 + 1


def test_a_long_prompt_beside_decode_brings_few_rows(passes: Open) -> None:
    """So the time between tokens of those that decode is that of a pass of few rows, however long the prompt is."""
    passed = passes(chunk=512)
    decoding = passed.submit(4, 200)
    passed.until(decoding)
    long = passed.submit(240)
    passed.rows.clear()
    assert passed.until(long) > 240 // BESIDE_ONE
    assert max(passed.rows) == BESIDE_ONE + 1


def test_parts_of_a_prompt_give_the_tokens_of_the_whole(passes: Open) -> None:
    alone, passed = passes(chunk=512), passes(chunk=512)
    alone.submit(4, 1)
    whole = alone.submit(200, 8)
    alone.finish()
    passed.until(passed.submit(4, 40))
    parts = passed.submit(200, 8)
    assert passed.until(parts) > 200 // BESIDE_ONE
    passed.finish()
    assert passed.tokens[parts] == alone.tokens[whole]


def test_small_requests_use_memory_that_a_large_one_cannot(passes: Open) -> None:
    passed = passes(cache_tokens=140, swap_bytes=0)
    passed.submit(40), passed.submit(100)
    small = passed.submit(10)
    passed.step()
    assert small in passed.running


def test_a_large_request_is_overtaken_a_number_of_times(passes: Open) -> None:
    passed = passes(cache_tokens=240, swap_bytes=0)
    passed.submit(40, 60)
    large = passed.submit(200, 1)
    overtook = 0
    for _ in range(10 * MAX_OVERTAKEN):
        number = passed.submit(10, 1)
        passed.step()
        overtook += number in passed.first
        if large in passed.running or large in passed.first:
            break
    assert large in passed.running or large in passed.first
    assert 0 < overtook <= MAX_OVERTAKEN


def test_lower_priorities_go_first_and_the_others_are_not_starved(passes: Open) -> None:
    passed = passes(running=1, waiting=400)
    patient = passed.submit(4, 1, priority=10)
    urgent = [passed.submit(4, 1, priority=-1) for _ in range(3 * MAX_OVERTAKEN)]
    passed.finish()
    before = [number for number in urgent if passed.first[number] < passed.first[patient]]
    assert len(before) == MAX_OVERTAKEN


def test_memory_is_taken_from_the_last_of_the_lowest_priority(passes: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rabbitllm.generation._sequence.RESERVED_TOKENS", 4)
    passed = passes(cache_tokens=80)
    low, first, last = passed.submit(20, 30, priority=1), passed.submit(20, 30), passed.submit(20, 30)
    while passed.scheduler.totals.preempted < 2:
        passed.step()
    assert passed.running == [first]
    assert [passed.numbers[sequence] for sequence in passed.scheduler.waiting] == [last, low]


def test_whoever_came_later_never_takes_memory(passes: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts beside answers that grow, at random: those preempted are the last ones that were admitted."""
    monkeypatch.setattr("rabbitllm.generation._sequence.RESERVED_TOKENS", 4)
    passed, chance = passes(cache_tokens=300, waiting=400), random.Random(5)
    preempt, seen = passed.scheduler.preempt, []

    def watched(sequence: Sequence) -> None:
        assert sequence is passed.scheduler.running[-1]
        seen.append(sequence)
        preempt(sequence)

    monkeypatch.setattr(passed.scheduler, "preempt", watched)
    for _ in range(16):
        passed.submit(*chance.choice(((5, 40), (150, 3), (30, 20))))
        passed.step()
    passed.finish()
    assert seen
    assert len(passed.first) == 16


def test_keys_take_turns(passes: Open) -> None:
    passed = passes(running=2, waiting=100)
    many = [passed.submit(4, 2, owner="a") for _ in range(20)]
    few = [passed.submit(4, 2, owner="b") for _ in range(2)]
    passed.finish()
    assert max(passed.first[number] for number in few) < sorted(passed.first[number] for number in many)[6]


def test_limits_of_a_key(passes: Open) -> None:
    passed = passes(running=4, waiting=100, running_of_key=1, waiting_of_key=2)
    first = passed.submit(4, 3, owner="a")
    for _ in range(2):
        passed.submit(4, 3, owner="a")
    with pytest.raises(BusyError, match=r"of this API key is full \(3 waiting\)"):
        passed.submit(4, 3, owner="a")
    other = passed.submit(4, 3, owner="b")
    passed.step()
    assert passed.running == [first, other]
    with pytest.raises(BusyError, match=r"of this API key is full \(2 waiting\)"):
        passed.submit(4, 3, owner="a")
    passed.finish()
    assert passed.submit(4, 3, owner="a") == 4


counts = st.lists(
    st.tuples(st.integers(1, 300), st.integers(0, 3000), st.booleans()).map(lambda t: (t[0], t[0] + t[1], t[2])),
    max_size=20,
)


@given(counts, st.integers(1, 600), st.integers(0, 600))
def test_rows_of_a_pass(ready: list[tuple[int, int, bool]], budget: int, more: int) -> None:
    rows = rows_of(ready, budget, budget + more)
    assert all(row == count for row, (count, _, _) in zip(rows, ready, strict=True) if count == 1)
    assert all(
        row in (0, count) or (divisible and row < count) for row, (count, _, divisible) in zip(rows, ready, strict=True)
    )
    prompts = [(row, *entry) for row, entry in zip(rows, ready, strict=True) if entry[0] > 1]
    if prompts:  # the first one never starves
        row, count, _, divisible = prompts[0]
        assert row >= min(count, -(-budget // 2)) if divisible else row == count
        assert sum(entry[0] for entry in prompts) <= max(budget + more, row)
