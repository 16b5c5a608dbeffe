"""Who is let in, in which order, who takes part in a pass, and who is preempted."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.load import load_model
from rabbitllm.errors import BusyError, ClosedError, NotEnoughMemoryError
from rabbitllm.generation._packed_batch import grouped
from rabbitllm.generation._scheduler import (
    FAILED,
    FIRST_TOKENS,
    MANY_TOKENS,
    MAX_TOKENS,
    MOST_TIMES,
    TIMES,
    TOKENS_EACH,
    Scheduler,
    TokenBudget,
    retry_after,
)
from rabbitllm.generation._sequence import Sequence, SequenceLength, SequenceStatus
from rabbitllm.generation.cache_manager import excess
from rabbitllm.generation.request import Delta, Event, Failed, FinishReason, Limits, Request, Result
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.tiny_models import ALL, load, split

Open = Callable[[int, int], tuple[Scheduler, Callable[[], Sequence]]]


@pytest.fixture
def scheduled(split_folder: Path) -> Iterator[Open]:
    opened: list[Scheduler] = []

    def make(running: int, waiting: int) -> tuple[Scheduler, Callable[[], Sequence]]:
        model = load(split_folder, 60_000, dtype="float32")
        scheduler = Scheduler(model, Limits(running, waiting))
        opened.append(scheduler)

        def submit() -> Sequence:
            sequence = Sequence(model, Request((3, 4), 5), lambda event: None, scheduler.wake)
            scheduler.submit(sequence)
            return sequence

        return scheduler, submit

    yield make
    for scheduler in opened:
        scheduler.end(FinishReason.CANCELLED)


def test_preempted_sequences_precede_waiting_ones(scheduled: Open) -> None:
    scheduler, submit = scheduled(2, 2)
    sequences = [submit() for _ in range(4)]
    assert list(scheduler.schedule().sequences) == scheduler.running == sequences[:2]
    scheduler.preempt(sequences[1])
    assert scheduler.running == sequences[:1]
    assert scheduler.waiting == sequences[1:]
    scheduler.finish(sequences[0], FinishReason.CANCELLED)
    scheduler.finish(sequences[2], FinishReason.CANCELLED)
    assert not scheduler.running
    assert scheduler.waiting == [sequences[1], sequences[3]]
    expected = (SequenceStatus.FINISHED, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED, SequenceStatus.WAITING)
    assert tuple(sequence.status for sequence in sequences) == expected
    scheduled_pass = scheduler.schedule()
    assert scheduled_pass.sequences == (sequences[1], sequences[3])
    assert scheduled_pass.num_tokens == 4
    assert sequences[1].status is SequenceStatus.RUNNING


def test_the_waiting_queue_is_limited(scheduled: Open) -> None:
    scheduler, submit = scheduled(2, 1)
    for _ in range(3):
        submit()
    with pytest.raises(BusyError, match=r"full \(3 waiting\)"):
        submit()
    scheduler.schedule()
    with pytest.raises(BusyError, match=r"full \(1 waiting\)"):
        submit()


def test_at_the_end_each_request_gets_an_answer(split_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(split_folder, 60_000, dtype="float32")
    scheduler = Scheduler(model, Limits(1, 3))
    events: list[list[Event]] = [[], [], []]
    for told in events:
        scheduler.submit(Sequence(model, Request((3, 4), 5), told.append, scheduler.wake))
    scheduler.schedule()
    drop, (first,) = scheduler.caches.drop, scheduler.running

    def fail_for_the_first(sequence: Sequence) -> None:
        drop(sequence)
        if sequence is first:
            raise OSError("the device is gone")

    monkeypatch.setattr(scheduler.caches, "drop", fail_for_the_first)
    scheduler.end(FinishReason.CANCELLED)
    (failed,), *others = events
    assert isinstance(failed, Failed)
    assert str(failed.error) == "the device is gone"
    assert [[type(event) for event in told] for told in others] == [[Result]] * 2


def test_unwanted_sequences(scheduled: Open) -> None:
    scheduler, submit = scheduled(1, 4)
    late, cancelled, waiting = (submit() for _ in range(3))
    scheduler.schedule()
    late.deadline = time.monotonic() - 1
    cancelled.cancel()
    assert scheduler.unwanted() == [(late, FinishReason.TIMEOUT), (cancelled, FinishReason.CANCELLED)]
    scheduler.close()
    assert scheduler.unwanted() == [(late, FinishReason.TIMEOUT), (cancelled, FinishReason.CANCELLED)]
    assert list(scheduler.schedule().sequences) == [waiting]
    scheduler.close(0)
    scheduler.close(60)  # it was to be over already
    assert dict(scheduler.unwanted())[waiting] is FinishReason.CANCELLED
    with pytest.raises(ClosedError):
        submit()


def test_a_paused_scheduler_has_no_work(scheduled: Open) -> None:
    scheduler, submit = scheduled(4, 4)
    outcomes: list[bool] = []
    with scheduler.paused():
        submit()
        thread = threading.Thread(target=lambda: outcomes.append(scheduler.wait()))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(600)
    assert outcomes == [True]
    scheduler.finish(scheduler.waiting[0], FinishReason.CANCELLED)
    scheduler.close()
    assert not scheduler.wait()


texts = st.lists(st.builds(SequenceLength, st.integers(1, 500), st.integers(0, 500)), max_size=12)


@given(texts, st.integers(1, 100), st.integers(1, 200_000))
def test_remaining_sequences_fit_or_are_one(running: list[SequenceLength], each: int, limit: int) -> None:
    def cost(tokens: int) -> int:
        return each * tokens

    count = excess(running, cost, limit)
    remaining = running[: len(running) - count]
    assert len(remaining) >= min(len(running), 1)
    assert len(remaining) <= 1 or sum(cost(length.tokens + 1) for length in remaining) <= limit
    if count:  # not one more than needed
        assert sum(cost(length.tokens + 1) for length in running[: len(remaining) + 1]) > limit


def test_prompts_may_make_a_pass_twice_as_long() -> None:
    pace = TokenBudget()
    assert pace.prompt_tokens(512) == FIRST_TOKENS
    pace = pace.after(4, 10.0)
    assert pace.prompt_tokens(512) == FIRST_TOKENS
    pace = pace.after(1000, 12.0)  # two milliseconds a token
    assert pace.prompt_tokens(512) == pytest.approx(5000, rel=0.02)
    assert pace.after(100, 110.0).prompt_tokens(512) == 512
    assert pace.after(1000, 10.0).after(1000, 10.0).after(1000, 10.0).prompt_tokens(512) == MAX_TOKENS


def test_prompts_beside_sequences_in_decode_take_their_share_of_the_time() -> None:
    pace = TokenBudget(10.0, 1.0)
    assert pace.prompt_tokens(512, 1, 40) == TIMES * (MANY_TOKENS + 40 * TOKENS_EACH)
    assert pace.prompt_tokens(512, 5, 1) == 5 * (MANY_TOKENS + TOKENS_EACH)
    assert pace.prompt_tokens(512, 50, 1) == MOST_TIMES * (MANY_TOKENS + TOKENS_EACH)
    assert TokenBudget(10.0, 0.02).prompt_tokens(512, 1, 10) == TIMES * (500 + 10 * TOKENS_EACH)


def test_a_long_prompt_at_first_does_not_make_tokens_cheap() -> None:
    pace = TokenBudget().after(1024, 0.8).after(90, 0.2)
    assert pace.prompt_tokens(512, 1, 20) == TIMES * (MANY_TOKENS + 20 * TOKENS_EACH)
    pace = pace.after(24, 0.15).after(104, 0.23)  # a millisecond a token
    assert pace.prompt_tokens(512, 1, 20) == TIMES * (0.15 // (0.08 / 80) + 20 * TOKENS_EACH)


def test_slower_passes_change_the_estimate() -> None:
    pace = TokenBudget().after(1, 1.0)
    for _ in range(100):
        pace = pace.after(1, 8.0)
    assert pace.least == 8.0


def test_retry_after_is_bounded() -> None:
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
def test_groups_are_complete_and_maximal(sizes: list[int], most: int) -> None:
    groups = [sizes[group] for group in grouped(sizes, most)]
    assert list(itertools.chain(*groups)) == sizes
    assert all(len(group) == 1 or sum(group) <= most for group in groups)
    assert all(sum(part) + after[0] > most for part, after in itertools.pairwise(groups))


@pytest.mark.long
def test_a_pass_out_of_memory_is_repeated_with_fewer_sequences(tmp_path: Path) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama"))
    gpu, events = FakeGpu(0, capacity=ALL), list[list[Event]]()
    with watched(), torch.no_grad():
        options = RunOptions(max_memory={gpu.name: 0, "cpu": 0}, show_progress=False, exact=True)
        model = load_model(directory, options, None, [gpu])

        def answers(lengths: list[int]) -> list[list[int]]:
            scheduler = Scheduler(model, Limits(8, 8, exact=True))
            events.clear()
            for length in lengths:
                events.append([])
                prompt = tuple(3 + (7 * index + length) % 200 for index in range(length))
                scheduler.submit(Sequence(model, Request(prompt, 2), events[-1].append, scheduler.wake))
            while scheduler.running or scheduler.waiting:
                scheduler.step()
            scheduler.end(FinishReason.CANCELLED)
            gc.collect()
            assert scheduler.totals.ended.get(FAILED, 0) == sum(isinstance(its[-1], Failed) for its in events)
            return [[t.token for e in its if isinstance(e, Delta) for t in e.tokens] for its in events]

        lengths = [40, 41, 42, 43, 44, 45, 46, 47]
        answers(lengths[:1])
        alone, gpu.peak = gpu.peak, 0
        expected = answers(lengths)
        assert gpu.peak > 2 * (alone - gpu.used)
        gpu.capacity = gpu.used + (alone - gpu.used) * 5 // 2
        assert answers(lengths) == expected
        texts = answers([*lengths[:3], 900, *lengths[3:]])
    assert texts == [*expected[:3], [], *expected[3:]]
    error = events[3][-1]
    assert isinstance(error, Failed)
    assert isinstance(error.error, NotEnoughMemoryError)
