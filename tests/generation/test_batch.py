"""Requests that begin and end between passes: their tokens are those that each gets alone."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from greenlet import greenlet
from safetensors.torch import save_file
from transformers.cache_utils import DynamicCache

from rabbitllm.engine._expert_pool import ExpertPool
from rabbitllm.errors import BusyError, ClosedError, NotANumberError, OptionError
from rabbitllm.generation import cache_manager
from rabbitllm.generation._cache_file import CacheFile
from rabbitllm.generation._model_runner import ModelRunner, PackedGroup
from rabbitllm.generation._packed_batch import PackedSequence
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.draft import Drafting
from rabbitllm.generation.grammar import Grammar
from rabbitllm.generation.kv_cache import bytes_of, cost_by_config
from rabbitllm.generation.memory import PassCost
from rabbitllm.generation.request import Delta, Event, Failed, FinishReason, Limits, Request, Result, Sampling
from rabbitllm.generation.session import generate
from tests.engine import test_hybrid_caches
from tests.generation.submitting import Open, Submitted, alone, answered, answered_together, begin, prompt
from tests.support.builders import FAMILIES, VOCABULARY_SIZE, build_checkpoint, make_tokenizer, read_tensors
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_configs import models
from tests.support.tiny_models import ALL, plain_model, split

WIDE = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "indexer_head_dim": 64,
    "hidden_size": 256,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
"""Sizes with which a token's layer is one call or two."""


def test_every_request_gets_its_own_tokens(open_batch: Open, plain: Any) -> None:
    batch, _ = open_batch()
    requests = [Request(prompt(3 + 7 * index, index), 5 + index) for index in range(8)]
    for answer in answered(batch, requests):
        assert answer.tokens == alone(plain, answer.request)
        assert len(answer.finished.tokens) == len(answer.tokens)
        assert answer.finished.finish is (FinishReason.STOP if answer.tokens[-1] == 2 else FinishReason.LENGTH)


def test_requests_join_and_leave_a_running_batch(open_batch: Open, plain: Any) -> None:
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
    for answer in (first, *later):
        assert answer.wait().tokens == alone(plain, answer.request)
    passes = batch.stats.passes
    assert passes < sum(len(answer.tokens) for answer in (first, *later))  # they shared them
    assert batch.stats.running == batch.stats.waiting == 0


def test_greenlets_of_ended_threads_are_freed(open_batch: Open) -> None:
    """A garbage collection that finds one ends the process; greenlet has freed it with the thread."""
    gc.collect()  # a request that failed in an earlier test: its error's frames refer to its coroutine
    batch, _ = open_batch()
    answered(batch, [Request(prompt(4), 3)])
    batch.close()
    ended = [item for item in gc.get_objects() if type(item) is greenlet and item.dead]
    assert [user for user in gc.get_referrers(*ended) if user is not ended] == []


def test_totals_include_a_request_at_its_end_event(open_batch: Open) -> None:
    batch, _ = open_batch()
    totals: list[int] = []
    for index in range(3):
        submitted = Submitted(Request(prompt(5, index), 2))

        def receive(event: Event, submitted: Submitted = submitted) -> None:
            if isinstance(event, Result):
                totals.append(sum(batch.stats.ended.values()))
            submitted.receive(event)

        batch.submit(submitted.request, receive)
        submitted.wait()
    assert totals == [1, 2, 3]


def test_each_weight_is_loaded_once_a_pass(open_batch: Open) -> None:
    batch, model = open_batch(profiling=True)
    requests = [Request(prompt(5, index), 6) for index in range(6)]
    answered(batch, requests)
    stats = batch.stats
    read = model.profiler.stages["read"].nbytes
    assert read <= (stats.passes + 1) * model.placement.streamed_bytes  # one pass is read ahead
    assert read >= (stats.passes - 1) * model.placement.streamed_bytes > 0


def test_long_prompts_are_chunked_while_others_decode(open_batch: Open, plain: Any) -> None:
    batch, model = open_batch(Limits(chunk=16))
    lengths: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda module, calls: lengths.append(len(calls)))
    long, short = (begin(batch, Request(prompt(n, n), 12)) for n in (150, 4))
    for answer in (long, short):
        assert answer.wait().tokens == alone(plain, answer.request)
    assert len(short.tokens) > 3
    assert batch.stats.passes >= 150 // 16


def test_exact_has_the_bits_of_a_text_alone(split_folder: Any, open_batch: Open) -> None:
    batch, _ = open_batch(Limits(exact=True), dtype="bfloat16")
    requests = [Request(prompt(4 + index, index), 12, top_logprobs=3) for index in range(5)]
    together = answered(batch, requests)
    for answer in together:
        (single,) = answered(batch, [answer.request])
        assert answer.chosen == single.chosen


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("budget", [ALL, 0])
def test_exact_has_the_bits_of_a_text_whose_layers_are_one_call(
    open_batch: Open, tmp_path: Path, name: str, budget: int
) -> None:
    """Nothing goes through its parts with others' rows, so that it is computed as alone."""
    folder = split(build_checkpoint(tmp_path / name, name, dtype=torch.bfloat16, **WIDE), "4bit")
    batch, _ = open_batch(Limits(exact=True), folder=folder, budget=budget, dtype=None)
    requests = [Request(prompt(4 + index, index), 9, top_logprobs=3) for index in range(3)]
    together = answered_together(batch, requests)
    assert [answer.chosen for answer in together] == [answered(batch, [each])[0].chosen for each in requests]


def test_logprobs_are_those_of_the_logits(open_batch: Open, plain: Any) -> None:
    batch, _ = open_batch()
    (answer,) = answered(batch, [Request(prompt(9), 6, Sampling(temperature=0.7, seed=3), top_logprobs=4)])
    ids = torch.tensor([[*answer.request.prompt, *answer.tokens]])
    expected = torch.log_softmax(plain(ids).logits[0].detach().float(), dim=-1)
    for place, chosen in enumerate(answer.chosen, start=len(answer.request.prompt) - 1):
        best = expected[place].topk(4)
        assert chosen.logprob == pytest.approx(float(expected[place, chosen.token]), abs=1e-4)
        assert [like.token for like in chosen.top_logprobs] == best.indices.tolist()
        assert [like.logprob for like in chosen.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_seed_gives_the_same_tokens_alone_and_together(open_batch: Open, plain: Any) -> None:
    batch, _ = open_batch()
    requests = [Request(prompt(6, index), 12, Sampling(1.0, 0.95, seed=index % 3)) for index in range(6)]
    for answer in answered(batch, requests):
        torch.manual_seed(answer.request.sampling.seed or 0)
        ids = torch.tensor([answer.request.prompt])
        output = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=True, temperature=1.0, top_p=0.95
        )
        assert answer.tokens == output[0, ids.shape[1] :].tolist()


def test_an_answer_ends_before_its_stop_string(open_batch: Open) -> None:
    batch, _ = open_batch()
    (whole,) = answered(batch, [Request(prompt(9), 24)])
    stop = whole.text[3:6]
    (cut,) = answered(batch, [Request(prompt(9), 24, stop=("never in it", stop))])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finished.finish, cut.finished.stop) == (FinishReason.STOP, stop)
    assert len(cut.tokens) < len(whole.tokens)


def test_a_cached_prefix_is_not_recomputed(open_batch: Open, plain: Any) -> None:
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


def test_requests_wait_for_a_shared_prefix_being_computed(open_batch: Open, plain: Any) -> None:
    batch, _ = open_batch(Limits(chunk=32))
    shared = prompt(120)
    several = answered(batch, [Request(shared + prompt(4, index + 1), 6) for index in range(6)])
    assert [answer.tokens for answer in several] == [alone(plain, answer.request) for answer in several]
    assert [answer.finished.kept_tokens for answer in several] == [0, *[120] * 5]


def test_a_sequence_over_the_memory_limit_is_preempted_and_loses_no_token(open_batch: Open, plain: Any) -> None:
    token_bytes = 2 * 2 * 16 * 4 * 3  # key and value, heads, width, float32, layers
    batch, _ = open_batch(Limits(cache_bytes=155 * token_bytes))
    requests = [Request(prompt(10, index), 90, top_logprobs=1) for index in (1, 2)]
    for _ in range(9):
        for answer in answered(batch, requests):
            assert answer.tokens == alone(plain, answer.request)
            assert len(answer.chosen) == len(answer.finished.tokens)
        if batch.stats.preempted:  # on a busy machine the first may end before the second begins
            break
    stats = batch.stats
    assert stats.preempted > 0
    assert stats.cache_bytes <= stats.cache_limit_bytes


def test_a_single_sequence_ends_when_memory_is_full(open_batch: Open, plain: Any) -> None:
    token_bytes = 2 * 2 * 16 * 4 * 3
    batch, _ = open_batch(Limits(cache_bytes=40 * token_bytes))
    (answer,) = answered(batch, [Request(prompt(10), 100)])
    assert answer.tokens == alone(plain, answer.request)[: len(answer.tokens)]
    assert 20 <= len(answer.tokens) < 40
    assert answer.finished.finish is FinishReason.LENGTH
    with pytest.raises(OptionError, match="KV cache needs"):
        batch.submit(Request(prompt(60), 1), lambda event: None)


def test_cancelling_frees_the_slot_and_affects_no_other_request(open_batch: Open, plain: Any) -> None:
    batch, _ = open_batch(Limits(running=2))
    stays = begin(batch, Request(prompt(5, 1), 60))
    leaving = Submitted(Request(prompt(5, 2), 100))

    def receive(event: Event) -> None:
        leaving.receive(event)
        assert leaving.handle is not None
        leaving.handle.cancel()

    leaving.handle = batch.submit(leaving.request, receive)
    waits = begin(batch, Request(prompt(5, 3), 5))
    assert leaving.finished.finish is FinishReason.CANCELLED
    assert 1 <= len(leaving.tokens) <= 2
    assert waits.wait().tokens == alone(plain, waits.request)
    assert stays.wait().tokens == alone(plain, stays.request)


def test_an_error_of_a_callback_cancels_its_request(open_batch: Open) -> None:
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


def test_a_request_times_out(open_batch: Open) -> None:
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
        go_on.wait(600)

    batch.submit(Request(prompt(5), 3), receive)
    assert begun.wait(600)
    try:
        yield
    finally:
        go_on.set()


def test_a_request_that_starts_at_the_next_pass_is_not_queued(open_batch: Open) -> None:
    """A burst between two passes is accepted as far as there are free places, and room in the queue after these."""
    batch, _ = open_batch(Limits(running=4, waiting=1))
    with one_in_a_pass(batch):
        submitted = [begin(batch, Request(prompt(5, index), 3)) for index in range(1, 5)]
        with pytest.raises(BusyError):
            begin(batch, Request(prompt(5, 5), 3))
    assert [answer.finished.finish for answer in submitted] == [FinishReason.LENGTH] * 4


def test_the_queue_is_limited(open_batch: Open) -> None:
    batch, _ = open_batch(Limits(running=1, waiting=2))
    with one_in_a_pass(batch):
        waiting = [begin(batch, Request(prompt(5, index), 3)) for index in (1, 2)]
        with pytest.raises(BusyError) as refused:
            begin(batch, Request(prompt(5, 3), 3))
    assert refused.value.retry_after >= 1
    for answer in waiting:
        assert len(answer.finished.tokens) == 3
    assert len(begin(batch, Request(prompt(5, 3), 3)).finished.tokens) == 3


def test_an_error_of_one_request_affects_no_other(open_batch: Open, plain: Any) -> None:
    batch, model = open_batch()
    ordinary = model.prepare_inputs_for_generation
    unlucky = prompt(7, 5)

    def fails_for_one(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] == len(unlucky) + 2:
            raise ValueError("this one")
        return ordinary(input_ids, *args, **kwargs)

    model.prepare_inputs_for_generation = fails_for_one
    failed, *rest = answered(batch, [Request(unlucky, 9), Request(prompt(20, 1), 9), Request(prompt(30, 2), 9)])
    assert isinstance(failed.end, Failed)
    assert isinstance(failed.end.error, ValueError)
    assert len(failed.tokens) == 2
    assert [other.tokens for other in rest] == [alone(plain, other.request) for other in rest]


UNREADABLE = 200
"""A token whose embedding has a NaN in `with_nan`."""


@pytest.fixture(scope="module")
def with_nan(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nan") / "model"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("splitted_model*"))
    tensors = read_tensors(folder)
    tensors["model.embed_tokens.weight"][UNREADABLE, 3] = math.nan
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return split(folder)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 0.9, seed=1, top_k=20), Sampling(min_tokens=2)])
@pytest.mark.parametrize("grammar", [None, Grammar.of_choice(["the rain", "a longer one"])])
def test_scores_that_are_no_numbers_end_their_request_alone(
    open_batch: Open, with_nan: Path, sampling: Sampling, grammar: Grammar | None
) -> None:
    batch, model = open_batch(folder=with_nan)
    unlucky = Request((*prompt(7, 5), UNREADABLE), 5, sampling, grammar=grammar)
    lucky = Request(tuple(token for token in prompt(20, 1) if token != UNREADABLE), 5, sampling, grammar=grammar)
    expected = answered(batch, [lucky])[0].tokens
    failed, other = answered_together(batch, [unlucky, lucky])
    assert isinstance(failed.end, Failed)
    assert isinstance(failed.end.error, NotANumberError)
    assert failed.tokens == []
    assert other.tokens == expected
    for drafting in (None, Drafting("ngram")):
        with pytest.raises(NotANumberError, match="the highest is nan"):
            generate(model, unlucky, print, drafting=drafting)
        assert list(generate(model, replace(lucky, sampling=Sampling()), print, drafting=drafting).tokens)


def test_a_request_that_overflows_float16_ends_alone(open_batch: Open, with_nan: Path) -> None:
    batch, _ = open_batch(folder=with_nan, dtype="float16")
    failed, other = answered_together(batch, [Request((5, UNREADABLE), 3), Request((5, 6), 3)])
    assert isinstance(failed.end, Failed)
    assert isinstance(failed.end.error, NotANumberError)
    assert len(other.tokens) == 3


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError("input/output error")],
    ids=lambda error: type(error).__name__,
)
def test_a_prefix_that_cannot_be_copied_is_recomputed(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    batch, _ = open_batch()
    shared = prompt(100)
    answered(batch, [Request(shared, 2)])
    copy = cache_manager.copied

    def fails(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(cache_manager, "copied", fails)
    (first,) = answered(batch, [Request(shared + prompt(9, 2), 8)])
    monkeypatch.setattr(cache_manager, "copied", copy)
    (second,) = answered(batch, [Request(shared + prompt(9, 3), 8)])
    for answer in (first, second):
        assert answer.tokens == alone(plain, answer.request)
    assert (first.finished.kept_tokens, second.finished.kept_tokens) == (0, 100)
    assert "A shared prefix of 100 tokens is computed again" in caplog.text
    assert batch.error is None


def test_finished_caches_are_evicted_before_a_prefix_is_copied(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = cost_by_config(plain.config, torch.float32).bytes_for(100)
    batch, _ = open_batch(Limits(cache_bytes=4 * nbytes))
    answered(batch, [Request(prompt(99, index), 2) for index in range(4)])
    copy, cached = cache_manager.copied, []

    def copied(*args: Any) -> Any:
        cached.append(batch._scheduler.caches._finished.nbytes)
        return copy(*args)

    monkeypatch.setattr(cache_manager, "copied", copied)
    for _ in range(60_000):  # a cache is kept after its answer
        if batch.stats.cache_bytes >= 3 * nbytes:
            break
        time.sleep(0.01)
    assert batch.stats.cache_bytes >= 3 * nbytes
    (answer,) = answered(batch, [Request(prompt(99, 3) + prompt(60, 9), 2)])
    assert answer.finished.kept_tokens == 99
    assert len(cached) == 1
    assert cached[0] + 1.6 * nbytes <= 4 * nbytes


def test_an_error_at_the_start_ends_one_request(open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, _ = open_batch()
    unlucky, ordinary = prompt(40, 5), cache_manager.common_prefix

    def fails_for_one(prompt_ids: Any, ids: Any) -> int:
        if tuple(prompt_ids) == unlucky:
            raise ZeroDivisionError("this one")
        return ordinary(prompt_ids, ids)

    monkeypatch.setattr(cache_manager, "common_prefix", fails_for_one)
    requests = [Request(prompt(20, 1), 9), Request(unlucky, 9), Request(prompt(30, 2), 9)]
    before, failed, after = answered_together(batch, requests)
    assert isinstance(failed.end, Failed)
    assert str(failed.end.error) == "this one"
    assert [other.tokens for other in (before, after)] == [alone(plain, other.request) for other in (before, after)]
    assert batch.stats.ended == {"length": 2, "failed": 1}


def test_an_error_of_the_tokenizer_ends_one_request(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, _ = open_batch()
    failed = Submitted(Request(prompt(9), 30))

    def fails() -> None:
        raise OverflowError("no such token")

    def receive(event: Event) -> None:
        failed.receive(event)
        if isinstance(event, Delta) and len(failed.tokens) == 3:
            assert failed.handle is not None
            monkeypatch.setattr(failed.handle._stream, "end", fails)
            failed.handle.cancel()

    with batch.paused():
        failed.handle = batch.submit(failed.request, receive)
    assert isinstance(failed.end, Failed)
    assert str(failed.end.error) == "no such token"
    (other,) = answered(batch, [Request(prompt(9), 6)])
    assert other.tokens == alone(plain, other.request)


def test_an_error_of_a_pass_ends_its_requests_and_no_later_ones(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, _ = open_batch()

    def fails(*args: Any) -> None:
        raise ZeroDivisionError("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(CacheFile, "begin", fails)
        for answer in answered(batch, [Request(prompt(7, index), 9) for index in range(2)]):
            assert isinstance(answer.end, Failed)
            assert str(answer.end.error) == "on purpose"
    (after,) = answered(batch, [Request(prompt(7), 9)])
    assert after.tokens == alone(plain, after.request)
    assert batch.error is None


def test_unreadable_weights_fail_running_requests_and_no_later_ones(open_batch: Open, plain: Any) -> None:
    batch, model = open_batch()
    broken = True

    def cannot(module: Any, args: Any) -> None:
        if broken:
            raise OSError("no such disk")

    model.model.layers[1].register_forward_pre_hook(cannot)
    for answer in answered(batch, [Request(prompt(7, index), 9) for index in range(3)]):
        assert isinstance(answer.end, Failed)
        assert isinstance(answer.end.error, OSError)
    broken = False
    (after,) = answered(batch, [Request(prompt(7), 9)])
    assert after.tokens == alone(plain, after.request)
    assert batch.stats.ended == {"failed": 3, str(after.finished.finish): 1}


def test_closing_finishes_running_requests(open_batch: Open, plain: Any) -> None:
    batch, model = open_batch()
    several = [begin(batch, Request(prompt(5, index), 30)) for index in range(3)]
    batch.close()
    for answer in several:
        assert answer.over.is_set()
        assert answer.tokens == alone(plain, answer.request)
    with pytest.raises(ClosedError):
        batch.submit(Request(prompt(5), 3), lambda event: None)
    ids = torch.tensor([prompt(5)])
    assert torch.equal(model(ids).logits, plain(ids).logits)  # the model is as it was


def test_closing_at_once_returns_partial_answers(open_batch: Open, plain: Any) -> None:
    batch, model = open_batch()
    model.model.norm.register_forward_pre_hook(lambda *_: time.sleep(0.01))  # all take seconds at least
    begun = threading.Event()
    submitted = Submitted(Request(prompt(5), 200))

    def receive(event: Event) -> None:
        submitted.receive(event)
        begun.set()

    batch.submit(submitted.request, receive)
    assert begun.wait(600)
    batch.close(0)
    assert submitted.finished.finish is FinishReason.CANCELLED
    assert submitted.tokens == alone(plain, submitted.request)[: len(submitted.tokens)]


@pytest.mark.parametrize(
    "request_",
    [Request((), 3), Request((5,), -1), Request((5, VOCABULARY_SIZE), 3), Request((5, -1), 3), Request((5,) * 250, 7)],
)
def test_unanswerable_requests_are_refused(open_batch: Open, request_: Request) -> None:
    batch, _ = open_batch()
    with pytest.raises(OptionError):
        batch.submit(request_, lambda event: None)


def test_a_request_for_no_token_is_answered_at_once(open_batch: Open) -> None:
    batch, _ = open_batch()
    events: list[Any] = []
    batch.submit(Request((5, 6), 0), events.append)
    (result,) = events
    assert (result.finish, result.tokens, result.prompt_tokens) == (FinishReason.LENGTH, (), 2)
    assert batch.stats.passes == 0


def test_finished_requests_are_freed_without_garbage_collection(open_batch: Open) -> None:
    """Which comes late where there are many objects, and keys, values and logits would wait for it."""
    batch, _ = open_batch()
    answered(batch, [Request(prompt(5, index), 3) for index in range(3)])
    gc.collect()
    gc.disable()
    try:
        answers = answered(batch, [Request(prompt(9, index), 4) for index in range(4)])
        ended = [weakref.ref(answer.handle) for answer in answers if answer.handle is not None]
        assert len(ended) == 4
        del answers
        answered(batch, [Request(prompt(5), 1)])  # the batch's thread has gone on
        texts = [item for item in gc.get_objects() if type(item) in (PackedSequence, PackedGroup)]
    finally:
        gc.enable()
    assert [item() for item in ended] == [None] * 4
    assert len(texts) <= 2  # of the last pass, at most


def test_prompts_of_a_pass_go_through_each_layer_in_groups(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassCost, "parts_in", lambda *args: (10_000, 64))
    batch, model = open_batch(Limits(chunk=1 << 30, throughput=True), profiling=True)
    rows: list[int] = []
    layer = model.model.layers[1].mlp.down_proj
    layer.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[-2]))
    requests = [Request(prompt(10 + 5 * index, index), 4) for index in range(9)]
    for answer in answered_together(batch, requests):
        assert answer.tokens == alone(plain, answer.request)
    whole = sum(len(request.prompt) for request in requests)
    assert max(rows) <= 64  # never all at once
    first = rows[: next(end for end in range(len(rows)) if sum(rows[: end + 1]) >= whole) + 1]
    assert sum(first) == whole  # and yet all in the first pass
    assert len(first) > whole // 64
    stats = batch.stats
    assert stats.passes == 4
    assert model.profiler.stages["read"].nbytes <= (stats.passes + 1) * model.placement.streamed_bytes


def test_a_prompt_longer_than_a_group_takes_several_passes(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassCost, "parts_in", lambda *args: (10_000, 32))
    batch, _ = open_batch(Limits(chunk=1 << 30, throughput=True))
    requests = [Request(prompt(100, 1), 3), Request(prompt(7, 2), 3)]
    for answer in answered_together(batch, requests):
        assert answer.tokens == alone(plain, answer.request)
    assert batch.stats.passes >= 6


def test_a_long_prompt_takes_one_pass_where_several_cost_more(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pass costs all the weights."""
    monkeypatch.setattr(PassCost, "max_tokens", 30)
    batch, model = open_batch(Limits(chunk=1 << 30, throughput=True))
    rows: list[int] = []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[-2]))
    requests = [Request(prompt(length, length), 3) for length in (100, 20, 9, 15)]
    for answer in answered_together(batch, requests):
        assert answer.tokens == alone(plain, answer.request)
    assert batch.stats.passes == 3
    assert rows[:3] == [100, 29, 15]


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3"])
def test_other_families(open_batch: Open, tmp_path: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassCost, "parts_in", lambda *args: (10_000, 40))
    folder = build_checkpoint(tmp_path / family, family, dtype=torch.float32)
    batch, _ = open_batch(Limits(chunk=1 << 30, throughput=True), folder=split(folder))
    plain = plain_model(folder, dtype=torch.float32).eval()
    for answer in answered_together(batch, [Request(prompt(12 + 3 * index, index), 4) for index in range(6)]):
        assert answer.tokens == alone(plain, answer.request)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_moe", {}),
        ("qwen3_next", {}),
        *((name, {"dtype": "bfloat16", "fast_bfloat16": True}) for name in ("qwen3_moe", "qwen3_next", "qwen4_exp")),
    ],
)
def test_a_pass_reads_each_chosen_expert_once(
    open_batch: Open, tmp_path: Path, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, and for sequences that are not packed: what no slot keeps is read once for all rows. In vain is read at
    most what the last pass used, too."""
    monkeypatch.setattr(PassCost, "parts_in", lambda *args: (10_000, 20))
    settings: dict[str, Any] = {"num_experts": 24, "num_experts_per_tok": 3, **(WIDE if options else {})}
    chosen_family = FAMILIES[name] if name in FAMILIES else HYBRIDS[test_hybrid_caches.family(name)]
    folder = split(build_checkpoint(tmp_path / name, chosen_family, **settings))
    batch, model = open_batch(Limits(chunk=1 << 30, throughput=True), folder=folder, budget=0, **options)
    [pool] = model.streamer.pools.values()
    chosen: list[set[tuple[str, int]]] = []
    reads: list[list[tuple[str, int]]] = []
    run, read = ModelRunner.run, ExpertPool._read

    def run_pass(runner: ModelRunner, coroutines: Any) -> None:
        chosen.append(set())
        reads.append([])
        run(runner, coroutines)

    def read_expert(pool: ExpertPool, source: Any, expert: int, leaf: str | None, memory: torch.Tensor) -> None:
        reads[-1] += [(source.name, expert)] * (leaf in (None, next(iter(source.leaves))))
        read(pool, source, expert, leaf, memory)

    monkeypatch.setattr(ModelRunner, "run", run_pass)
    monkeypatch.setattr(ExpertPool, "_read", read_expert)
    for source in pool.sources:
        source.module.register_forward_pre_hook(
            lambda module, args, name=source.name: chosen[-1].update((name, e) for e in args[1].unique().tolist())  # type: ignore[misc]
        )
    requests = [Request(prompt(9 + 3 * index, index), 4) for index in range(6)]
    answers = answered_together(batch, requests)
    assert all(len(answer.tokens) == 4 or answer.tokens[-1] == 2 for answer in answers)
    assert len(reads) == batch.stats.passes < 6 * 4
    assert not pool.cache.occupied
    for before, pass_chosen, pass_read in zip([set(), *chosen], chosen, reads, strict=False):
        assert pass_chosen <= {*pass_read} <= pass_chosen | before
        assert len(pass_read) == len({*pass_read})


def test_an_error_of_one_group_ends_its_requests_alone(open_batch: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassCost, "parts_in", lambda *args: (10_000, 30))
    batch, model = open_batch(Limits(chunk=1 << 30, throughput=True))
    projection = model.model.layers[1].mlp.up_proj
    calls = 0

    def fails_once(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("the second part")

    projection.register_forward_pre_hook(fails_once)
    answers = answered_together(batch, [Request(prompt(20, index), 3) for index in range(4)])
    failed = [getattr(answer.end, "error", None) for answer in answers]
    assert [str(error) for error in failed if error is not None] == ["the second part"]


def test_a_paused_batch_starts_no_pass(open_batch: Open) -> None:
    batch, _ = open_batch(Limits(throughput=True))
    with batch.paused():
        submitted = [Submitted(Request(prompt(5, index), 3)) for index in range(5)]
        for answer in submitted:
            batch.submit(answer.request, answer.receive)
        assert not submitted[0].over.wait(0.2)
        assert batch.stats.passes == 0
    for answer in submitted:
        answer.wait()
    assert batch.stats.passes == 3


CAUSAL = sorted(name for name, family in FAMILIES.items() if not family.encoder_decoder)


def every_way() -> Iterator[Any]:
    """Families, resident and streamed; at once one of the two for each by turns, and both for the first."""
    for index, family in enumerate(CAUSAL):
        for streamed in (True, False):
            later = index > 0 and streamed == bool(index % 2)
            name = f"{'streamed' if streamed else 'resident'}-{family}"
            yield pytest.param(family, streamed, id=name, marks=pytest.mark.long if later else ())


def test_a_forced_end_token(tmp_path: Path, open_batch: Open) -> None:
    """As BART's checkpoints recommend."""
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.float32)
    transformers.GenerationConfig(forced_eos_token_id=2, pad_token_id=0).save_pretrained(folder)
    plain = plain_model(folder, dtype=torch.float32).eval()
    batch, _ = open_batch(folder=split(folder))
    for answer in answered(batch, [Request(prompt(9, index), 1 + index) for index in range(3)]):
        assert answer.tokens == alone(plain, answer.request)
        assert answer.tokens[-1] == 2


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
    for answer in answered(batch, [Request(prompt(3 + 5 * index, index), 6) for index in range(4)]):
        assert answer.tokens == alone(plain, answer.request)
    cache = plain(torch.tensor([prompt(9)]), use_cache=True).get("cache")
    if isinstance(cache, DynamicCache):
        assert bytes_of(cache) <= cost_by_config(plain.config, torch.float32).bytes_for(9)


@pytest.mark.parametrize("name", ["openai-gpt", "bert", "cpmant", "moshi", "xlm", "roformer"])
def test_models_whose_prompts_cannot_be_chunked(tmp_path: Path, open_batch: Open, name: str) -> None:
    """Without a KV cache, with one of another kind, or with tokens that attend to later ones or beyond the window."""
    next(iter(models(transformers.AutoModelForCausalLM, name, []))).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    plain = plain_model(tmp_path, dtype=torch.float32).eval()
    batch, model = open_batch(Limits(chunk=8), folder=split(tmp_path), budget=1 << 30)
    size = model.get_input_embeddings().num_embeddings
    texts = [tuple(id % size for id in prompt(3 + 9 * index, index)) for index in range(4)]
    for answer in answered(batch, [Request(text, 6) for text in texts]):
        assert answer.tokens == alone(plain, answer.request)


@pytest.mark.parametrize(("family", "streamed"), [*every_way()])
def test_several_requests(tmp_path: Path, open_batch: Open, family: str, streamed: bool) -> None:
    folder = build_checkpoint(tmp_path / family, family, dtype=torch.float32)
    plain = plain_model(folder, dtype=torch.float32).eval()
    batch, _ = open_batch(Limits(chunk=24), folder=split(folder), budget=100_000 if streamed else 1 << 30)
    shared = prompt(30, 0)
    requests = [Request(prompt(3 + 11 * index, index), 6 + index) for index in range(4)]
    requests += [Request(shared + prompt(6, index), 6) for index in (7, 8)]
    for answer in answered(batch, requests):
        assert answer.tokens == alone(plain, answer.request), f"prompt of {len(answer.request.prompt)}"
