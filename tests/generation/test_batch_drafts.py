"""A draft model, or the checkpoint's heads, for many requests: their tokens as without drafts, in fewer passes."""

from __future__ import annotations

import copy
import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from rabbitllm.engine.heads import Heads
from rabbitllm.errors import OptionError
from rabbitllm.generation import _sequence
from rabbitllm.generation._model_runner import ModelRunner
from rabbitllm.generation._mtp import PackedHeads
from rabbitllm.generation._packed_batch import PackedForward
from rabbitllm.generation._rewind import Rewindable
from rabbitllm.generation._width import Costs, Width
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.cache_manager import CacheManager
from rabbitllm.generation.kv_cache import Beside, cost_by_config
from rabbitllm.generation.request import Limits, Request, Sampling
from tests.generation.submitting import Open, answered, answered_together, begin, prompt
from tests.generation.test_lookahead import NEW_TOKENS, NONE, endless, requests, same
from tests.generation.test_rewind import spoiled
from tests.generation.test_self_draft import load_with_copies
from tests.support.always_drafts import always_drafts  # noqa: F401  a fixture that applies by itself
from tests.support.builders import build_checkpoint
from tests.support.hybrid_families import HYBRIDS
from tests.support.mtp_heads import build_with_head, make_predictable
from tests.support.tiny_models import load, split

COPIED = ("qwen3_next", "mixtral", "gemma3_text")
SELF = Limits(draft="self")
HOT = Sampling(1.3, 0.95, seed=3)


def proposing(folder: Path, how: str = "noisy") -> Any:
    """The model itself, all in memory, with other weights here and there."""
    draft = spoiled(load(folder, dtype="float32"), how)
    draft.generation_config.assistant_confidence_threshold = 0  # a random model is never sure
    return draft


def asked() -> list[Request]:
    """Greedy and sampled, with penalties, probabilities, a stop text and lengths."""
    sampled = [Request(prompt(20, 1), NEW_TOKENS, HOT.nth(index), top_logprobs=3) for index in range(2)]
    penalised = Request(prompt(9, 2), NEW_TOKENS, Sampling(repetition_penalty=1.7), top_logprobs=2)
    return [*requests(top_logprobs=2), *sampled, penalised, *(Request(prompt(9, 2), count) for count in (1, 2, 7))]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", pytest.param("qwen3_next", marks=pytest.mark.long)])
def test_a_draft_model_proposes_for_all_requests_in_one_pass(
    tmp_path: Path, open_batch: Open, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also where layers have windows or states; then answers continue from their KV caches."""
    folder = endless(tmp_path / "model", name)
    plain, _ = open_batch(replace(NONE, chunk=16), folder=folder)
    expected = answered_together(plain, asked())
    stop = Request(prompt(9, 2), 7, stop=(expected[-1].text[2:5],))
    further = [Request((*answer.request.prompt, *answer.tokens, *prompt(3)), 4) for answer in expected[:4]]
    ended, continued = answered(plain, [stop]), answered(plain, further)

    draft, together = proposing(folder, "right"), []  # but not for samples, nor with a penalty
    real, run, learn, learnt = PackedForward.__call__, ModelRunner.run, Costs.learn_pass, list[bool]()

    def watched(self: PackedForward, sequences: Any) -> Any:
        if self._model is draft:
            together.append(len(sequences))
        return real(self, sequences)

    def running(self: ModelRunner, coroutines: Any) -> None:
        if self._model is draft and self._packed is None:
            together.append(len(coroutines))
        run(self, coroutines)

    def learning(self: Costs, rows: int, seconds: float | None, has_draft: bool) -> None:
        learnt.append(has_draft)
        learn(self, rows, seconds, has_draft)

    monkeypatch.setattr(PackedForward, "__call__", watched)
    monkeypatch.setattr(ModelRunner, "run", running)
    monkeypatch.setattr(Costs, "learn_pass", learning)
    batch, _ = open_batch(Limits(chunk=16, draft=draft), folder=folder)
    same(answered_together(batch, asked()), expected)
    stats = batch.stats
    assert len(learnt) == stats.passes  # a pass is of all sequences
    assert 0 < sum(learnt) < len(learnt)
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.passes < plain.stats.passes - 6
    assert max(together) >= 4
    same(answered(batch, [stop]), ended)
    same(answered(batch, further), continued)
    assert batch.stats.kept_tokens > stats.kept_tokens


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in COPIED)])
def test_copies_propose_for_all_requests_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Packed and by itself; also where caches go on, and where requests are preempted."""
    model = load_with_copies(endless(tmp_path / "model", name), dtype="float32", exact=False, profiling=True)
    run, together, recorded = ModelRunner.run, list[int](), 0

    def running(self: ModelRunner, coroutines: Any) -> None:
        if model.streamer.is_drafting:
            together.append(len(coroutines))
        run(self, coroutines)

    monkeypatch.setattr(ModelRunner, "run", running)
    answers, stats, preempted = [], [], list[Any]()
    questions = [*requests(top_logprobs=2), Request(prompt(20, 1), 8, HOT, top_logprobs=3)]

    def over_limit(self: CacheManager) -> list[Any]:
        begun = [sequence for sequence in self._running if len(sequence.tokens) > 4][: len(preempted) < 2]
        preempted.extend(begun)
        return begun

    for limits in (NONE, SELF, SELF):
        if len(stats) == 2:
            monkeypatch.setattr(CacheManager, "over_limit", over_limit)
        model.profiler.clear()
        batch = Batch(model, replace(limits, chunk=16))
        first = answered_together(batch, questions)
        further = [Request((*answer.request.prompt, *answer.tokens, *prompt(3)), 4) for answer in first[:2]]
        answers.append([*first, *answered(batch, further)])
        batch.close(0)
        stats.append(batch.stats)
        recorded = sum(sums.passes for sums in model.profiler.sums.values())
        assert recorded == batch.stats.passes  # drafts count as none
    plain, drafted, moved = stats
    same(answers[1], answers[0])
    same(answers[2], answers[0])
    assert max(together) >= 4
    assert 0 < drafted.accepted_tokens < drafted.drafted_tokens
    assert drafted.passes < plain.passes
    assert moved.preempted == len(preempted) == 2
    assert moved.accepted_tokens > 0


def test_a_draft_models_cache_has_the_text_alone(
    tmp_path: Path, open_batch: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after passes in which nothing is drafted: the wrong tokens of the last draft are dropped before."""
    folder = endless(tmp_path / "model", "llama")
    draft, turn, reading = proposing(folder, "wrong"), itertools.count(), list[bool]()
    read, real = WeakKeyDictionary[Rewindable, Any](), Rewindable.output

    def output(self: Rewindable, ids: Any, *args: Any) -> Any:
        if self._model is draft:
            reading.append(torch.equal(read.get(self, ids)[:, : self.tokens], ids[:, : self.tokens]))
            read[self] = ids
        return real(self, ids, *args)

    monkeypatch.setattr(Rewindable, "output", output)
    monkeypatch.setattr(Width, "choose", lambda *args: 0 if next(turn) % 4 else 5)
    batch, _ = open_batch(Limits(draft=draft), folder=folder)
    answered(batch, requests()[:1])
    assert len(reading) > 10
    assert all(reading)


def rows_read(monkeypatch: pytest.MonkeyPatch, draft: Any) -> list[tuple[int, int]]:
    """The tokens of each later pass of a draft model, or of heads, and those in its cache before."""
    rows, output, heads = list[tuple[int, int]](), Rewindable.output, Heads.__call__

    def watched(self: Rewindable, ids: Any, *args: Any) -> Any:
        if self._model is draft:
            rows.append((ids.shape[1] - self.tokens, self.tokens))
        return output(self, ids, *args)

    def of_heads(self: Heads, ids: Any, hidden: Any, positions: Any, cache: Any, *args: Any) -> Any:
        rows.append((ids.shape[1], cache.get_seq_length()))
        return heads(self, ids, hidden, positions, cache, *args)

    monkeypatch.setattr(Rewindable, "output", watched)
    monkeypatch.setattr(Heads, "__call__", of_heads)
    return rows


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "mtp"])
def test_a_second_question_continues_a_drafts_cache(
    tmp_path: Path, open_batch: Open, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of a conversation it reads what is new, also beside a request that has begun with the same text."""
    heads = name == "mtp"
    folder = endless_head(tmp_path / "model", "noisy") if heads else endless(tmp_path / "model", name)
    plain, _ = open_batch(replace(NONE, chunk=256), folder=folder, budget=None)
    draft = "mtp" if heads else proposing(folder)
    batch, _ = open_batch(Limits(chunk=256, draft=draft), folder=folder, budget=None, heads=heads)
    rows, text = rows_read(monkeypatch, draft), prompt(100, 5)
    for turn in range(3):
        rows.clear()
        (expected,), (actual,) = (answered(of, [Request(text, NEW_TOKENS)]) for of in (plain, batch))
        same([actual], [expected])
        read, before = rows[0]
        assert read + before >= len(text) - 3
        assert read >= 99 if turn == 0 else 10 < read < 20
        text = (*text, *expected.tokens, *prompt(10, 6))
    if name == "llama":
        rows.clear()
        shared = [Request((*prompt(120, 7), last), NEW_TOKENS) for last in (3, 4, 5)]
        first, accepted = begin(batch, shared[0]), batch.stats.accepted_tokens
        while batch.stats.accepted_tokens == accepted:  # until a draft was made
            time.sleep(0.001)
        same([first, *answered(batch, shared[1:])], answered(plain, shared))
        assert sum(read > 20 for read, _ in rows) == 1
        assert batch.stats.kept_tokens > 400


@pytest.mark.parametrize(("name", "readers"), [("llama", 1), ("qwen3_next", 3)])
def test_requests_that_begin_together_share_what_a_draft_reads(
    tmp_path: Path, open_batch: Open, monkeypatch: pytest.MonkeyPatch, name: str, readers: int
) -> None:
    """Where its cache can be cut after the tokens that they have in common."""
    folder = endless(tmp_path / "model", name)
    plain, _ = open_batch(replace(NONE, chunk=256), folder=folder, budget=None)
    draft = proposing(folder)
    batch, _ = open_batch(Limits(chunk=256, draft=draft), folder=folder, budget=None)
    rows = rows_read(monkeypatch, draft)
    asked = [Request((*prompt(40, 7), last), NEW_TOKENS) for last in (3, 4, 5)]  # none waits for another's KV cache
    same(answered_together(batch, asked), answered(plain, asked))
    assert sum(read > 20 for read, _ in rows) == readers
    assert batch.stats.accepted_tokens


@pytest.mark.parametrize("name", ["deepseek_v3", "llama"])
def test_the_beginning_of_a_drafts_cache_takes_its_share_of_memory(
    tmp_path: Path, open_batch: Open, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """For a request that shares a part of a longer text."""
    heads, sizes, copied = name == "deepseek_v3", list[tuple[int, int]](), Beside.copied
    folder = endless_head(tmp_path / "model", "noisy") if heads else endless(tmp_path / "model", name)

    def watched(self: Beside, tokens: int) -> Beside | None:
        copy = copied(self, tokens)
        assert copy is not None
        sizes.append((copy.nbytes, self.nbytes * tokens // self.tokens))
        return copy

    monkeypatch.setattr(Beside, "copied", watched)
    text, draft = prompt(220, 5), "mtp" if heads else proposing(folder)
    asked = [Request(text, NEW_TOKENS), Request((*text[:70], *prompt(9, 6)), NEW_TOKENS)]
    plain, _ = open_batch(replace(NONE, chunk=256), folder=folder, budget=None)
    batch, _ = open_batch(Limits(chunk=256, draft=draft), folder=folder, budget=None, heads=heads)
    for request in asked:
        same(answered(batch, [request]), answered(plain, [request]))
    ((nbytes, share),) = sizes
    assert 0.9 * share < nbytes <= share
    assert batch.stats.accepted_tokens > 0


def test_a_preempted_request_continues_a_drafts_cache(
    tmp_path: Path, open_batch: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = endless(tmp_path / "model", "llama")
    text = [Request(prompt(60, 5), NEW_TOKENS)]
    expected = answered(open_batch(NONE, folder=folder)[0], text)
    draft, turn = proposing(folder), itertools.count()
    rows = rows_read(monkeypatch, draft)
    monkeypatch.setattr(CacheManager, "over_limit", lambda self: self._running[: next(turn) in (4, 7)])
    batch, _ = open_batch(Limits(draft=draft), folder=folder)
    same(answered(batch, text), expected)
    assert batch.stats.preempted == batch.stats.resumed == 2
    assert rows[0][0] >= 60
    assert max(read for read, _ in rows[1:]) <= 3


def test_memory_of_a_draft_is_counted(tmp_path: Path, open_batch: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a part of the requests, which are preempted; what drafts keep is dropped before."""
    monkeypatch.setattr(_sequence, "RESERVED_TOKENS", 4)
    folder = endless(tmp_path / "model", "llama")
    expected = answered_together(open_batch(NONE, folder=folder)[0], requests())
    draft = proposing(folder)
    token_bytes = cost_by_config(draft.config, torch.float32).bytes_for(1)
    limit, most = 130 * token_bytes, []
    drafts = CacheManager.drafts

    def watched(self: CacheManager, *args: Any, **options: Any) -> Any:
        wanting = drafts(self, *args, **options)
        kept = sum(sequence.lookahead.nbytes for sequence in self._running if sequence.lookahead is not None)
        grown = sum(source.bytes_for(len(ids) + count) - source.nbytes for source, ids, count in wanting)
        rows = sum(count for *_, count in wanting) * token_bytes
        most.append(self.memory.next_bytes(sequence.length for sequence in self._running) + kept + grown + rows)
        assert self.nbytes() <= self.memory.limit
        return wanting

    monkeypatch.setattr(CacheManager, "drafts", watched)
    batch, _ = open_batch(Limits(cache_bytes=limit, chunk=8, draft=draft), folder=folder)
    for answer, other in zip(answered_together(batch, requests()), expected, strict=True):
        assert answer.tokens == other.tokens
    assert 0.7 * limit < max(most) <= limit  # of the budget, not only of what is reserved
    assert batch.stats.preempted > 0
    assert batch.stats.accepted_tokens > 0
    roomy, _ = open_batch(Limits(chunk=8, draft=draft), folder=folder)
    answered_together(roomy, requests())
    assert roomy.stats.drafted_tokens > batch.stats.drafted_tokens


@pytest.mark.parametrize("swap_bytes", [None, 0])
def test_states_are_preempted_with_what_they_lack(
    tmp_path: Path, open_batch: Open, monkeypatch: pytest.MonkeyPatch, swap_bytes: int | None
) -> None:
    """At moments when a cache lacks accepted tokens: it goes on from there, or its request begins again."""
    folder = endless_head(tmp_path / "model", "noisy", "qwen3_next")
    expected = answered_together(open_batch(NONE, folder=folder, budget=None)[0], requests())
    lacked: list[int] = []

    def over_limit(self: CacheManager) -> list[Any]:
        lacking = [s for s in self._running if s.lookahead is not None and s.lookahead.lacks][: len(lacked) < 3]
        lacked.extend(sequence.lookahead.lacks for sequence in lacking)
        return lacking

    monkeypatch.setattr(CacheManager, "over_limit", over_limit)
    limits = Limits(chunk=8, swap_bytes=swap_bytes, draft="mtp")
    batch, _ = open_batch(limits, folder=folder, budget=None, heads=True)
    same(answered_together(batch, requests()), expected)
    stats = batch.stats
    assert stats.preempted == len(lacked) == 3
    assert stats.accepted_tokens > 0
    assert stats.resumed == (3 if swap_bytes is None else 0)


def test_a_draft_that_fails_costs_no_request(
    tmp_path: Path, open_batch: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = endless(tmp_path / "model", "llama")
    expected = answered_together(open_batch(NONE, folder=folder)[0], requests())
    draft = proposing(folder)
    batch, _ = open_batch(Limits(draft=draft), folder=folder)

    def failing(module: Any, args: Any) -> None:
        raise MemoryError("no room")

    hook = draft.model.layers[0].register_forward_pre_hook(failing)
    same(answered_together(batch, requests()), expected)
    assert "A draft has failed: no room" in caplog.text
    assert batch.stats.drafted_tokens == 0
    hook.remove()
    same(answered_together(batch, requests()), expected)
    assert batch.stats.accepted_tokens > 0


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("deepseek_v3", "right"), ("deepseek_v3", "wrong"), ("qwen3_next", "noisy"), ("qwen3_5", "noisy")),
        *(pytest.param(name, "noisy", marks=pytest.mark.long) for name in ("qwen3_5_moe", "glm4_moe", "mellum")),
    ],
)
def test_the_heads_of_a_checkpoint(
    tmp_path: Path, open_batch: Open, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    """Prompts in pieces, and beginnings that are in the prefix cache; packed, and with states.

    Heads of several sequences compute what they do for each alone, in one call where there are no windows.
    """
    packed, compute = list[int](), PackedHeads._compute

    def watched(self: PackedHeads, calls: Any) -> Any:
        alone = [self._heads(*copy.deepcopy(call)) for call in calls]
        results = compute(self, calls)
        torch.testing.assert_close(results, alone, rtol=0, atol=1e-4)
        packed.append(len(calls))
        return results

    monkeypatch.setattr(PackedHeads, "_compute", watched)
    folder = endless_head(tmp_path / "model", how, name)
    plain, _ = open_batch(replace(NONE, chunk=16), folder=folder, budget=None)
    expected = answered_together(plain, asked())
    further = [Request((*answer.request.prompt, *answer.tokens, *prompt(3)), 9) for answer in expected[:4]]
    continued = answered(plain, further)
    batch, model = open_batch(Limits(chunk=16, draft="mtp"), folder=folder, budget=None, heads=True)
    same(answered_together(batch, asked()), expected)
    stats = batch.stats
    assert stats.drafted_tokens > 0
    if how == "wrong":
        assert stats.accepted_tokens == 0
    else:
        assert stats.passes < plain.stats.passes - 8
    same(answered(batch, further), continued)
    assert batch.stats.kept_tokens > 0
    assert (batch.stats.accepted_tokens > stats.accepted_tokens) is (how != "wrong")
    batch.close(0)
    assert not model.get_decoder()._forward_hooks
    assert (max(packed) > 3) is (name != "mellum")


def endless_head(folder: Path, how: str, name: str = "deepseek_v3") -> Path:
    make_predictable(build_with_head(folder, name), how)
    from transformers import GenerationConfig

    GenerationConfig(pad_token_id=0).save_pretrained(folder)
    return split(folder)


def test_drafts_that_cannot_be_used_are_refused(tmp_path: Path, open_batch: Open, split_folder: Path) -> None:
    draft = proposing(split_folder)
    with pytest.raises(OptionError, match="cannot be used for many requests of a LlamaForCausalLM: it needs KV"):
        open_batch(Limits(draft=draft, exact=True))
    restarts = split(build_checkpoint(tmp_path / "restarts", HYBRIDS["jamba"], dtype=torch.float32))
    for each in (draft, "ngram"):
        with pytest.raises(OptionError, match="cannot be used for many requests of a JambaForCausalLM: it needs KV"):
            Batch(load(restarts), Limits(draft=each))
    with pytest.raises(OptionError, match="loaded without its heads"):
        open_batch(Limits(draft="mtp"))
