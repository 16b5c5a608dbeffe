"""Requests that begin and end between passes: their tokens are those that each gets alone."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from greenlet import greenlet
from transformers.cache_utils import DynamicCache

from rabbitllm.errors import BusyError, ClosedError, OptionError
from rabbitllm.generation import cache_manager
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.cache_file import CacheFile
from rabbitllm.generation.kv_cache import bytes_of, cost_by_config
from rabbitllm.generation.memory import PassCost
from rabbitllm.generation.model_runner import PackedGroup
from rabbitllm.generation.packed_batch import PackedSequence
from rabbitllm.generation.request import Delta, Event, Failed, FinishReason, Limits, Request, Result, Sampling
from tests.generation.submitting import Open, Submitted, alone, answered, answered_together, begin, prompt
from tests.support.builders import FAMILIES, VOCABULARY_SIZE, build_checkpoint, make_tokenizer
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_configs import models
from tests.support.tiny_models import plain_model, split


def test_every_request_gets_its_own_tokens(open_batch: Open, plain: Any) -> None:
    batch, _ = open_batch()
    requests = [Request(prompt(3 + 7 * number, number), 5 + number) for number in range(8)]
    for one in answered(batch, requests):
        assert one.tokens == alone(plain, one.request)
        assert len(one.finished.tokens) == len(one.tokens)
        assert one.finished.finish is (FinishReason.STOP if one.tokens[-1] == 2 else FinishReason.LENGTH)


def test_requests_join_while_others_run_and_leave_when_they_are_done(open_batch: Open, plain: Any) -> None:
    batch, _ = open_batch()
    first = Submitted(Request(prompt(10), 40))
    later: list[Submitted] = []

    def receive(event: Event) -> None:
        first.receive(event)
        if isinstance(event, Delta) and len(first.tokens) in (3, 9, 20):
            later.append(begin(batch, Request(prompt(12, len(later) + 1), 4)))

    batch.submit(first.request, receive)
    first.wait()
    assert len(later) == 3
    for one in (first, *later):
        assert one.wait().tokens == alone(plain, one.request)
    passes = batch.stats.passes
    assert passes < sum(len(one.tokens) for one in (first, *later))  # they shared them
    assert batch.stats.running == batch.stats.waiting == 0


def test_nothing_refers_to_the_greenlet_of_a_thread_that_has_ended(open_batch: Open) -> None:
    """A garbage collection that finds one ends the process; greenlet has freed it with the thread."""
    batch, _ = open_batch()
    answered(batch, [Request(prompt(4), 3)])
    batch.close()
    ended = [one for one in gc.get_objects() if type(one) is greenlet and one.dead]
    assert [user for user in gc.get_referrers(*ended) if user is not ended] == []


def test_the_totals_have_a_request_when_its_end_is_reported(open_batch: Open) -> None:
    batch, _ = open_batch()
    found: list[int] = []
    for number in range(3):
        one = Submitted(Request(prompt(5, number), 2))

        def receive(event: Event, one: Submitted = one) -> None:
            if isinstance(event, Result):
                found.append(sum(batch.stats.ended.values()))
            one.receive(event)

        batch.submit(one.request, receive)
        one.wait()
    assert found == [1, 2, 3]


def test_a_pass_brings_each_weight_once_however_many_take_part(open_batch: Open) -> None:
    batch, model = open_batch(profiling=True)
    requests = [Request(prompt(5, number), 6) for number in range(6)]
    answered(batch, requests)
    stats = batch.stats
    read = model.profiler.stages["read"].nbytes
    assert read <= (stats.passes + 1) * model.placement.streamed_bytes  # one pass is read ahead
    assert read >= (stats.passes - 1) * model.placement.streamed_bytes > 0


def test_long_prompts_come_in_chunks_while_others_decode(open_batch: Open, plain: Any) -> None:
    batch, model = open_batch(Limits(chunk=16))
    lengths: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda module, calls: lengths.append(len(calls)))
    long, short = (begin(batch, Request(prompt(n, n), 12)) for n in (150, 4))
    for one in (long, short):
        assert one.wait().tokens == alone(plain, one.request)
    assert len(short.tokens) > 3
    assert batch.stats.passes >= 150 // 16


def test_exact_has_the_bits_of_a_text_alone(split_folder: Any, open_batch: Open) -> None:
    batch, _ = open_batch(Limits(exact=True), dtype="bfloat16")
    requests = [Request(prompt(4 + number, number), 12, top_logprobs=3) for number in range(5)]
    together = answered(batch, requests)
    for one in together:
        (single,) = answered(batch, [one.request])
        assert one.chosen == single.chosen


def test_likelihoods_are_those_of_the_logits(open_batch: Open, plain: Any) -> None:
    batch, _ = open_batch()
    (one,) = answered(batch, [Request(prompt(9), 6, Sampling(temperature=0.7, seed=3), top_logprobs=4)])
    ids = torch.tensor([[*one.request.prompt, *one.tokens]])
    expected = torch.log_softmax(plain(ids).logits[0].detach().float(), dim=-1)
    for place, chosen in enumerate(one.chosen, start=len(one.request.prompt) - 1):
        best = expected[place].topk(4)
        assert chosen.logprob == pytest.approx(float(expected[place, chosen.token]), abs=1e-4)
        assert [like.token for like in chosen.top_logprobs] == best.indices.tolist()
        assert [like.logprob for like in chosen.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_seed_gives_the_same_tokens_alone_and_together(open_batch: Open, plain: Any) -> None:
    batch, _ = open_batch()
    requests = [Request(prompt(6, number), 12, Sampling(1.0, 0.95, seed=number % 3)) for number in range(6)]
    for one in answered(batch, requests):
        torch.manual_seed(one.request.sampling.seed or 0)
        ids = torch.tensor([one.request.prompt])
        made = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=True, temperature=1.0, top_p=0.95
        )
        assert one.tokens == made[0, ids.shape[1] :].tolist()


def test_a_stop_text_ends_an_answer_before_it(open_batch: Open) -> None:
    batch, _ = open_batch()
    (whole,) = answered(batch, [Request(prompt(9), 24)])
    stop = whole.text[3:6]
    (cut,) = answered(batch, [Request(prompt(9), 24, stop=("never in it", stop))])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finished.finish, cut.finished.stop) == (FinishReason.STOP, stop)
    assert len(cut.tokens) < len(whole.tokens)


def test_a_beginning_that_is_known_is_not_computed_again(open_batch: Open, plain: Any) -> None:
    batch, _ = open_batch()
    shared = prompt(100)
    (first,) = answered(batch, [Request(shared + prompt(5, 1), 4)])
    (second,) = answered(batch, [Request(shared + prompt(9, 2), 8)])
    assert first.finished.kept_tokens == 0
    assert second.finished.kept_tokens == 100
    assert second.tokens == alone(plain, second.request)
    going_on = Request((*second.request.prompt, *second.tokens, *prompt(3, 4)), 4)
    (third,) = answered(batch, [going_on])
    assert third.finished.kept_tokens >= len(second.request.prompt) + len(second.tokens) - 1
    assert third.tokens == alone(plain, third.request)


def test_requests_with_one_beginning_wait_until_the_first_has_computed_it(open_batch: Open, plain: Any) -> None:
    batch, _ = open_batch(Limits(chunk=32))
    shared = prompt(120)
    several = answered(batch, [Request(shared + prompt(4, number + 1), 6) for number in range(6)])
    assert [one.tokens for one in several] == [alone(plain, one.request) for one in several]
    assert [one.finished.kept_tokens for one in several] == [0, *[120] * 5]


def test_what_outgrows_the_memory_gives_its_place_back_and_loses_nothing(open_batch: Open, plain: Any) -> None:
    token_bytes = 2 * 2 * 16 * 4 * 3  # key and value, heads, width, float32, layers
    batch, _ = open_batch(Limits(cache_bytes=155 * token_bytes))
    requests = [Request(prompt(10, number), 90, top_logprobs=1) for number in (1, 2)]
    several = answered(batch, requests)
    for one in several:
        assert one.tokens == alone(plain, one.request)
        assert len(one.chosen) == len(one.finished.tokens)
    stats = batch.stats
    assert stats.preempted > 0
    assert stats.cache_bytes <= stats.cache_limit_bytes


def test_one_that_has_no_room_left_ends(open_batch: Open, plain: Any) -> None:
    token_bytes = 2 * 2 * 16 * 4 * 3
    batch, _ = open_batch(Limits(cache_bytes=40 * token_bytes))
    (one,) = answered(batch, [Request(prompt(10), 100)])
    assert one.tokens == alone(plain, one.request)[: len(one.tokens)]
    assert 20 <= len(one.tokens) < 40
    assert one.finished.finish is FinishReason.LENGTH
    with pytest.raises(OptionError, match="KV cache needs"):
        batch.submit(Request(prompt(60), 1), lambda event: None)


def test_cancelling_frees_the_place_and_touches_no_other(open_batch: Open, plain: Any) -> None:
    batch, _ = open_batch(Limits(running=2))
    stays = begin(batch, Request(prompt(5, 1), 60))
    goes = Submitted(Request(prompt(5, 2), 100))

    def receive(event: Event) -> None:
        goes.receive(event)
        assert goes.handle is not None
        goes.handle.cancel()

    goes.handle = batch.submit(goes.request, receive)
    waits = begin(batch, Request(prompt(5, 3), 5))
    assert goes.finished.finish is FinishReason.CANCELLED
    assert 1 <= len(goes.tokens) <= 2
    assert waits.wait().tokens == alone(plain, waits.request)
    assert stays.wait().tokens == alone(plain, stays.request)


def test_who_does_not_want_to_hear_more_is_cancelled(open_batch: Open) -> None:
    batch, _ = open_batch()
    heard: list[Event] = []

    def receive(event: Event) -> None:
        heard.append(event)
        raise ConnectionError

    batch.submit(Request(prompt(5), 200), receive)
    (other,) = answered(batch, [Request(prompt(5, 1), 5)])
    assert len(other.finished.tokens) == 5
    batch.close()
    assert len(heard) <= 4


def test_time_is_limited(open_batch: Open) -> None:
    batch, _ = open_batch()
    late, other = answered(batch, [Request(prompt(5), 200, seconds=1e-4), Request(prompt(5, 1), 5)])
    assert late.finished.finish is FinishReason.TIMEOUT
    assert other.finished.finish is FinishReason.LENGTH


@contextlib.contextmanager
def one_in_a_pass(batch: Batch) -> Iterator[None]:
    """One request runs, and its pass is not over while the context is open: no other request can begin."""
    begun, go_on = threading.Event(), threading.Event()

    def receive(event: Event) -> None:
        begun.set()
        go_on.wait(60)

    batch.submit(Request(prompt(5), 3), receive)
    assert begun.wait(60)
    try:
        yield
    finally:
        go_on.set()


def test_who_has_a_place_at_the_next_pass_does_not_wait(open_batch: Open) -> None:
    """A burst between two passes is accepted as far as there are free places, and room in the queue after these."""
    batch, _ = open_batch(Limits(running=4, waiting=1))
    with one_in_a_pass(batch):
        taken = [begin(batch, Request(prompt(5, number), 3)) for number in range(1, 5)]
        with pytest.raises(BusyError):
            begin(batch, Request(prompt(5, 5), 3))
    assert [one.finished.finish for one in taken] == [FinishReason.LENGTH] * 4


def test_no_more_wait_than_may(open_batch: Open) -> None:
    batch, _ = open_batch(Limits(running=1, waiting=2))
    with one_in_a_pass(batch):
        waiting = [begin(batch, Request(prompt(5, number), 3)) for number in (1, 2)]
        with pytest.raises(BusyError) as refused:
            begin(batch, Request(prompt(5, 3), 3))
    assert refused.value.retry_after >= 1
    for one in waiting:
        assert len(one.finished.tokens) == 3
    assert len(begin(batch, Request(prompt(5, 3), 3)).finished.tokens) == 3


def test_an_error_of_one_touches_no_other(open_batch: Open, plain: Any) -> None:
    batch, model = open_batch()
    ordinary = model.prepare_inputs_for_generation
    unlucky = prompt(7, 5)

    def fails_for_one(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] == len(unlucky) + 2:
            raise ValueError("this one")
        return ordinary(input_ids, *args, **kwargs)

    model.prepare_inputs_for_generation = fails_for_one
    one, *others = answered(batch, [Request(unlucky, 9), Request(prompt(20, 1), 9), Request(prompt(30, 2), 9)])
    assert isinstance(one.end, Failed)
    assert isinstance(one.end.error, ValueError)
    assert len(one.tokens) == 2
    assert [other.tokens for other in others] == [alone(plain, other.request) for other in others]


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError("input/output error")],
    ids=lambda error: type(error).__name__,
)
def test_a_prefix_that_cannot_be_copied_is_computed_again(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    batch, _ = open_batch()
    shared = prompt(100)
    answered(batch, [Request(shared, 2)])
    copy = cache_manager.copied

    def fails(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(cache_manager, "copied", fails)
    (one,) = answered(batch, [Request(shared + prompt(9, 2), 8)])
    monkeypatch.setattr(cache_manager, "copied", copy)
    (other,) = answered(batch, [Request(shared + prompt(9, 3), 8)])
    for made in (one, other):
        assert made.tokens == alone(plain, made.request)
    assert (one.finished.kept_tokens, other.finished.kept_tokens) == (0, 100)
    assert "A shared prefix of 100 tokens is computed again" in caplog.text
    assert batch.error is None


def test_finished_caches_give_way_before_a_prefix_is_copied(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = cost_by_config(plain.config, torch.float32).bytes_for(100)
    batch, _ = open_batch(Limits(cache_bytes=4 * each))
    answered(batch, [Request(prompt(99, number), 2) for number in range(4)])
    copy, held = cache_manager.copied, []

    def copied(*given: Any) -> Any:
        held.append(batch._scheduler.caches._finished.nbytes)
        return copy(*given)

    monkeypatch.setattr(cache_manager, "copied", copied)
    assert batch.stats.cache_bytes >= 3 * each
    (one,) = answered(batch, [Request(prompt(99, 3) + prompt(60, 9), 2)])
    assert one.finished.kept_tokens == 99
    assert len(held) == 1
    assert held[0] + 1.6 * each <= 4 * each


def test_an_error_while_a_request_begins_ends_it_alone(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, _ = open_batch()
    unlucky, ordinary = prompt(40, 5), cache_manager.common_prefix

    def fails_for_one(wanted: Any, ids: Any) -> int:
        if tuple(wanted) == unlucky:
            raise ZeroDivisionError("this one")
        return ordinary(wanted, ids)

    monkeypatch.setattr(cache_manager, "common_prefix", fails_for_one)
    requests = [Request(prompt(20, 1), 9), Request(unlucky, 9), Request(prompt(30, 2), 9)]
    before, one, after = answered_together(batch, requests)
    assert isinstance(one.end, Failed)
    assert str(one.end.error) == "this one"
    assert [other.tokens for other in (before, after)] == [alone(plain, other.request) for other in (before, after)]
    assert batch.stats.ended == {"length": 2, "failed": 1}


def test_an_error_of_the_tokenizer_at_an_end_ends_one_request(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, _ = open_batch()
    one = Submitted(Request(prompt(9), 30))

    def fails() -> None:
        raise OverflowError("no such token")

    def receive(event: Event) -> None:
        one.receive(event)
        if isinstance(event, Delta) and len(one.tokens) == 3:
            assert one.handle is not None
            monkeypatch.setattr(one.handle._stream, "end", fails)
            one.handle.cancel()

    with batch.paused():
        one.handle = batch.submit(one.request, receive)
    assert isinstance(one.end, Failed)
    assert str(one.end.error) == "no such token"
    (other,) = answered(batch, [Request(prompt(9), 6)])
    assert other.tokens == alone(plain, other.request)


def test_an_error_around_a_pass_ends_those_in_it_and_not_those_that_follow(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, _ = open_batch()

    def fails(*given: Any) -> None:
        raise ZeroDivisionError("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(CacheFile, "begin", fails)
        for one in answered(batch, [Request(prompt(7, number), 9) for number in range(2)]):
            assert isinstance(one.end, Failed)
            assert str(one.end.error) == "on purpose"
    (after,) = answered(batch, [Request(prompt(7), 9)])
    assert after.tokens == alone(plain, after.request)
    assert batch.error is None


def test_weights_that_cannot_be_read_fail_those_that_run_and_not_those_that_follow(
    open_batch: Open, plain: Any
) -> None:
    batch, model = open_batch()
    broken = True

    def cannot(module: Any, args: Any) -> None:
        if broken:
            raise OSError("no such disk")

    model.model.layers[1].register_forward_pre_hook(cannot)
    for one in answered(batch, [Request(prompt(7, number), 9) for number in range(3)]):
        assert isinstance(one.end, Failed)
        assert isinstance(one.end.error, OSError)
    broken = False
    (after,) = answered(batch, [Request(prompt(7), 9)])
    assert after.tokens == alone(plain, after.request)
    assert batch.stats.ended == {"failed": 3, str(after.finished.finish): 1}


def test_closing_finishes_what_runs(open_batch: Open, plain: Any) -> None:
    batch, model = open_batch()
    several = [begin(batch, Request(prompt(5, number), 30)) for number in range(3)]
    batch.close()
    for one in several:
        assert one.over.is_set()
        assert one.tokens == alone(plain, one.request)
    with pytest.raises(ClosedError):
        batch.submit(Request(prompt(5), 3), lambda event: None)
    ids = torch.tensor([prompt(5)])
    assert torch.equal(model(ids).logits, plain(ids).logits)  # the model is as it was


def test_closing_at_once_returns_what_there_is(open_batch: Open, plain: Any) -> None:
    batch, _ = open_batch()
    begun = threading.Event()
    one = Submitted(Request(prompt(5), 200))

    def receive(event: Event) -> None:
        one.receive(event)
        begun.set()

    batch.submit(one.request, receive)
    assert begun.wait(60)
    batch.close(0)
    assert one.finished.finish is FinishReason.CANCELLED
    assert one.tokens == alone(plain, one.request)[: len(one.tokens)]


@pytest.mark.parametrize(
    "request_",
    [Request((), 3), Request((5,), 0), Request((5, VOCABULARY_SIZE), 3), Request((5, -1), 3), Request((5,) * 250, 7)],
)
def test_what_no_pass_could_answer_is_refused(open_batch: Open, request_: Request) -> None:
    batch, _ = open_batch()
    with pytest.raises(OptionError):
        batch.submit(request_, lambda event: None)


def test_what_is_over_is_not_left_to_a_search_for_cycles(open_batch: Open) -> None:
    """Which comes late where there are many objects, and keys, values and logits would wait for it."""
    batch, _ = open_batch()
    answered(batch, [Request(prompt(5, number), 3) for number in range(3)])
    gc.collect()
    gc.disable()
    try:
        made = answered(batch, [Request(prompt(9, number), 4) for number in range(4)])
        ended = [weakref.ref(one.handle) for one in made if one.handle is not None]
        assert len(ended) == 4
        del made
        answered(batch, [Request(prompt(5), 1)])  # the batch's thread has gone on
        texts = [one for one in gc.get_objects() if type(one) in (PackedSequence, PackedGroup)]
    finally:
        gc.enable()
    assert [one() for one in ended] == [None] * 4
    assert len(texts) <= 2  # of the last pass, at most


def test_prompts_of_a_pass_go_through_each_layer_in_parts(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassCost, "parts_in", lambda *given: (10_000, 64))
    batch, model = open_batch(Limits(chunk=1 << 30, throughput=True), profiling=True)
    rows: list[int] = []
    layer = model.model.layers[1].mlp.down_proj
    layer.register_forward_pre_hook(lambda module, given: rows.append(given[0].shape[-2]))
    requests = [Request(prompt(10 + 5 * number, number), 4) for number in range(9)]
    for one in answered_together(batch, requests):
        assert one.tokens == alone(plain, one.request)
    whole = sum(len(request.prompt) for request in requests)
    assert max(rows) <= 64  # never all at once
    first = rows[: next(at for at in range(len(rows)) if sum(rows[: at + 1]) >= whole) + 1]
    assert sum(first) == whole  # and yet all in the first pass
    assert len(first) > whole // 64
    stats = batch.stats
    assert stats.passes == 4
    assert model.profiler.stages["read"].nbytes <= (stats.passes + 1) * model.placement.streamed_bytes


def test_a_prompt_longer_than_a_part_takes_several_passes(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassCost, "parts_in", lambda *given: (10_000, 32))
    batch, _ = open_batch(Limits(chunk=1 << 30, throughput=True))
    requests = [Request(prompt(100, 1), 3), Request(prompt(7, 2), 3)]
    for one in answered_together(batch, requests):
        assert one.tokens == alone(plain, one.request)
    assert batch.stats.passes >= 6


def test_a_prompt_longer_than_a_part_that_is_worth_it_still_takes_one_pass(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pass costs all the weights."""
    monkeypatch.setattr(PassCost, "max_tokens", 30)
    batch, model = open_batch(Limits(chunk=1 << 30, throughput=True))
    rows: list[int] = []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda module, given: rows.append(given[0].shape[-2]))
    requests = [Request(prompt(length, length), 3) for length in (100, 20, 9, 15)]
    for one in answered_together(batch, requests):
        assert one.tokens == alone(plain, one.request)
    assert batch.stats.passes == 3
    assert rows[:3] == [100, 29, 15]


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3"])
def test_parts_of_other_families(open_batch: Open, tmp_path: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassCost, "parts_in", lambda *given: (10_000, 40))
    folder = build_checkpoint(tmp_path / family, family, dtype=torch.float32)
    batch, _ = open_batch(Limits(chunk=1 << 30, throughput=True), folder=split(folder))
    plain = plain_model(folder, dtype=torch.float32).eval()
    for one in answered_together(batch, [Request(prompt(12 + 3 * number, number), 4) for number in range(6)]):
        assert one.tokens == alone(plain, one.request)


def test_an_error_of_one_part_ends_its_texts_alone(open_batch: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassCost, "parts_in", lambda *given: (10_000, 30))
    batch, model = open_batch(Limits(chunk=1 << 30, throughput=True))
    projection = model.model.layers[1].mlp.up_proj
    calls = 0

    def fails_once(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("the second part")

    projection.register_forward_pre_hook(fails_once)
    found = answered_together(batch, [Request(prompt(20, number), 3) for number in range(4)])
    failed = [getattr(one.end, "error", None) for one in found]
    assert [str(error) for error in failed if error is not None] == ["the second part"]


def test_while_it_is_held_no_pass_begins(open_batch: Open) -> None:
    batch, _ = open_batch(Limits(throughput=True))
    with batch.paused():
        made = [Submitted(Request(prompt(5, number), 3)) for number in range(5)]
        for one in made:
            batch.submit(one.request, one.receive)
        assert not made[0].over.wait(0.2)
        assert batch.stats.passes == 0
    for one in made:
        one.wait()
    assert batch.stats.passes == 3


CAUSAL = sorted(name for name, family in FAMILIES.items() if not family.encoder_decoder)


def every_way() -> Iterator[Any]:
    """Families, resident and streamed; at once one of the two for each by turns, and both for the first."""
    for number, family in enumerate(CAUSAL):
        for streamed in (True, False):
            later = number > 0 and streamed == bool(number % 2)
            name = f"{'streamed' if streamed else 'resident'}-{family}"
            yield pytest.param(family, streamed, id=name, marks=pytest.mark.long if later else ())


def test_a_token_that_is_forced_at_the_end(tmp_path: Path, open_batch: Open) -> None:
    """As BART's checkpoints recommend."""
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.float32)
    transformers.GenerationConfig(forced_eos_token_id=2, pad_token_id=0).save_pretrained(folder)
    plain = plain_model(folder, dtype=torch.float32).eval()
    batch, _ = open_batch(folder=split(folder))
    for one in answered(batch, [Request(prompt(9, number), 1 + number) for number in range(3)]):
        assert one.tokens == alone(plain, one.request)
        assert one.tokens[-1] == 2


@pytest.mark.parametrize("family", ["falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"])
def test_a_config_without_attention(tmp_path: Path, open_batch: Open, family: str) -> None:
    """As such models are published: nothing in it is about heads."""
    folder = build_checkpoint(tmp_path / family, FAMILIES.get(family) or HYBRIDS[family], dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    for name in ("num_attention_heads", "num_key_value_heads"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    plain = plain_model(folder, dtype=torch.float32).eval()
    batch, model = open_batch(Limits(chunk=24), folder=split(folder), budget=1 << 30)
    assert not hasattr(model.config, "num_attention_heads")
    for one in answered(batch, [Request(prompt(3 + 5 * number, number), 6) for number in range(4)]):
        assert one.tokens == alone(plain, one.request)
    cache = plain(torch.tensor([prompt(9)]), use_cache=True).get("cache")
    if isinstance(cache, DynamicCache):
        assert bytes_of(cache) <= cost_by_config(plain.config, torch.float32).bytes_for(9)


@pytest.mark.parametrize("name", ["openai-gpt", "bert", "cpmant", "moshi", "xlm", "roformer"])
def test_models_whose_prompts_cannot_come_in_parts(tmp_path: Path, open_batch: Open, name: str) -> None:
    """Without a KV cache, with one of another kind, or with tokens that attend to later ones or beyond the window."""
    next(iter(models(transformers.AutoModelForCausalLM, name, []))).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    plain = plain_model(tmp_path, dtype=torch.float32).eval()
    batch, model = open_batch(Limits(chunk=8), folder=split(tmp_path), budget=1 << 30)
    size = model.get_input_embeddings().num_embeddings
    texts = [tuple(id % size for id in prompt(3 + 9 * number, number)) for number in range(4)]
    for one in answered(batch, [Request(text, 6) for text in texts]):
        assert one.tokens == alone(plain, one.request)


@pytest.mark.parametrize(("family", "streamed"), [*every_way()])
def test_several_requests(tmp_path: Path, open_batch: Open, family: str, streamed: bool) -> None:
    folder = build_checkpoint(tmp_path / family, family, dtype=torch.float32)
    plain = plain_model(folder, dtype=torch.float32).eval()
    batch, _ = open_batch(Limits(chunk=24), folder=split(folder), budget=100_000 if streamed else 1 << 30)
    shared = prompt(30, 0)
    requests = [Request(prompt(3 + 11 * number, number), 6 + number) for number in range(4)]
    requests += [Request(shared + prompt(6, number), 6) for number in (7, 8)]
    for one in answered(batch, requests):
        assert one.tokens == alone(plain, one.request), f"prompt of {len(one.request.prompt)}"
