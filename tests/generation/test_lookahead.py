"""Drafts in packed passes: fewer passes, and for every sequence the tokens that it gets without drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from rabbitllm.engine.kv_room import append
from rabbitllm.generation import _proposals, _sequence
from rabbitllm.generation._batch_drafts import BatchDrafts
from rabbitllm.generation._proposals import FromText, Proposal
from rabbitllm.generation._rewind import MAX_CARRIED
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.kv_cache import CONTINUING, cost_by_config, drop_last
from rabbitllm.generation.request import Delta, Event, FinishReason, Limits, Request, Sampling
from tests.generation.submitting import Open, Submitted, alone, answered, answered_together, begin, prompt
from tests.generation.test_packed_batch import ALONE, SHORT
from tests.generation.test_packed_batch import checkpoint as checkpoint_of
from tests.generation.test_rewind import glm5_next
from tests.support.always_drafts import TOKENS, always_drafts  # noqa: F401  a fixture that applies by itself
from tests.support.builders import WINDOW, build_checkpoint, make_tokenizer
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_models import split

NEW_TOKENS = 24
NOT_PACKED = ("qwen3_next", "nemotron_h", "deepseek_v32")
"""With states, with a recurrence that computes one row after the other, and with an index."""
INDEXED = frozenset({"axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"})
GLM = "glm5_next_text"
"""Has no class for text alone."""
LENGTHS = (5, 3 * WINDOW, 40, 17)
NONE = Limits(draft="none")
Drafts = Callable[[Iterable[Sequence[int]], str], None]


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """Lets all sequences draft the tokens that follow in given texts: all right, all wrong, or some."""

    def make(texts: Iterable[Sequence[int]], how: str) -> None:
        known = [list(text) for text in texts]

        class FromTexts(FromText):
            def propose(self, ids: torch.Tensor, most: int) -> Proposal:
                begun = ids[0].tolist()
                after = next((text[len(begun) :] for text in known if text[: len(begun)] == begun), [])[:most]
                for place in range(len(after)):
                    if how == "wrong" or (how == "some" and (len(begun) + place) % 5 == 0):
                        after[place] = 3 + (after[place] + 1) % 200
                return Proposal(torch.tensor([after], dtype=torch.int64))

        monkeypatch.setattr(_proposals, "FromText", FromTexts)

    return make


def endless(folder: Path, name: str) -> Path:
    """A split model whose answers have all of their tokens."""
    if name == GLM:
        glm5_next().save_pretrained(folder)
    else:
        checkpoint_of(folder, name)
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    GenerationConfig(pad_token_id=0).save_pretrained(folder)
    return split(folder)


def requests(**options: Any) -> list[Request]:
    return [Request(prompt(length, length), NEW_TOKENS, **options) for length in LENGTHS]


def texts_of(answers: Iterable[Submitted]) -> list[list[int]]:
    return [[*answer.request.prompt, *answer.tokens] for answer in answers]


def same(answers: Sequence[Submitted], expected: Sequence[Submitted]) -> None:
    """The same tokens, with about the same probabilities where there are any, the same text and the same end."""
    for answer, other in zip(answers, expected, strict=True):
        assert answer.tokens == other.tokens
        assert (answer.text, answer.finished.finish) == (other.text, other.finished.finish)
        for chosen, like in zip(answer.chosen, other.chosen, strict=True):
            assert chosen.logprob == pytest.approx(like.logprob, abs=1e-4)
            assert [top.token for top in chosen.top_logprobs] == [top.token for top in like.top_logprobs]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in (*SHORT, *NOT_PACKED) else pytest.mark.long)
        for name in sorted(ALONE | CONTINUING | INDEXED)
    ],
)
def test_all_families_get_their_tokens_in_fewer_passes(
    tmp_path: Path, open_batch: Open, drafts: Drafts, name: str
) -> None:
    """Prompts longer than windows, and shorter ones; then answers continue from their KV caches."""
    folder = endless(tmp_path / "model", name)
    batch, _ = open_batch(replace(NONE, chunk=16), folder=folder)
    plain = answered_together(batch, requests(top_logprobs=2))
    before = batch.stats.passes
    further = [Request((*text, *prompt(3)), 4, top_logprobs=2) for text in texts_of(plain)]
    continued = answered(batch, further)
    for how in ("right", "some", "wrong"):
        drafts(texts_of(plain), how)
        batch, _ = open_batch(Limits(chunk=16, draft="ngram"), folder=folder)
        same(answered_together(batch, requests(top_logprobs=2)), plain)
        stats = batch.stats
        assert stats.new_tokens == len(LENGTHS) * NEW_TOKENS
        if how == "wrong":
            assert stats.accepted_tokens == 0 < stats.drafted_tokens
        else:
            assert stats.passes < before - (12 if how == "right" else 0)
            assert (stats.accepted_tokens == stats.drafted_tokens) is (how == "right")
        same(answered(batch, further), continued)
        lacking = MAX_CARRIED + TOKENS + 1 if name in CONTINUING and how != "right" else 0
        assert batch.stats.kept_tokens >= sum(len(request.prompt) - 4 - lacking for request in further)


def test_text_that_repeats(open_batch: Open, plain: Any) -> None:
    """Without any help: tokens that followed the same ones before, in prompts of mixed lengths."""
    asked = [Request((prompt(5, index) * 9)[: 10 + 9 * index], 90) for index in range(4)]
    batch, _ = open_batch()
    for answer in answered_together(batch, asked):
        assert answer.tokens == alone(plain, answer.request)
    stats = batch.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    without, _ = open_batch(NONE)
    answered_together(without, asked)
    assert without.stats.drafted_tokens == 0
    assert stats.passes < without.stats.passes
    for index, request in enumerate(asked):  # and one at a time, which saves more
        answered(batch, [request])
        used = batch.stats.passes - stats.passes
        stats = batch.stats
        assert used < 80 or index


def test_requests_join_leave_and_are_preempted(
    open_batch: Open, plain: Any, drafts: Drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In room for a part of them; a later request with the same beginning comes while others draft."""
    monkeypatch.setattr(_sequence, "RESERVED_TOKENS", 4)
    asked = [*requests(), Request((*prompt(40, 40), 7), NEW_TOKENS), Request(prompt(30, 3), 5)]
    expected = [alone(plain, request) for request in asked]
    drafts([[*request.prompt, *tokens] for request, tokens in zip(asked, expected, strict=True)], "some")
    token_bytes = cost_by_config(plain.config, torch.float32).bytes_for(1)
    for swap_bytes in (None, 0):
        limits = Limits(cache_bytes=100 * token_bytes, chunk=8, swap_bytes=swap_bytes)
        batch, _ = open_batch(limits)
        later: list[Submitted] = []
        first = Submitted(asked[0])

        def receive(event: Event, batch: Batch = batch, later: list[Submitted] = later, first: Any = first) -> None:
            first.receive(event)
            if isinstance(event, Delta) and len(later) < 2:
                later.append(begin(batch, asked[4 + len(later)]))

        with batch.paused():
            batch.submit(first.request, receive)
            others = [begin(batch, request) for request in asked[1:4]]
        answers = [first.wait(), *others, *later]
        assert [answer.wait().tokens for answer in answers] == expected
        stats = batch.stats
        assert stats.preempted > 0
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
        assert stats.cache_bytes <= stats.cache_limit_bytes


def test_drafts_preempt_nobody(open_batch: Open, plain: Any, drafts: Drafts, monkeypatch: pytest.MonkeyPatch) -> None:
    """With just the room that the tokens need, no pass takes more of it; drafts are shortened or left out."""
    asked = requests()
    expected = [alone(plain, request) for request in asked]
    texts = [[*request.prompt, *tokens] for request, tokens in zip(asked, expected, strict=True)]
    token_bytes = cost_by_config(plain.config, torch.float32).bytes_for(1)
    room = sum(map(len, texts)) * token_bytes
    drafts(texts, "wrong")
    proposed: list[int] = []
    propose = BatchDrafts.propose

    def watched(self: BatchDrafts, wanting: Any) -> int:
        proposed.append(propose(self, wanting))
        running = batch._scheduler.running
        assert sum(sequence.length.tokens + 1 for sequence in running) * token_bytes <= room
        assert sum(sequence.length.tokens + 1 + len(sequence.lookahead.tokens) for sequence in running) <= limit
        return proposed[-1]

    limit = room // token_bytes
    monkeypatch.setattr(BatchDrafts, "propose", watched)
    batch, _ = open_batch(Limits(cache_bytes=room))
    for answer, tokens in zip(answered_together(batch, asked), expected, strict=True):
        assert answer.tokens == tokens
    assert batch.stats.preempted == 0
    assert max(proposed) > 0
    assert proposed[-1] == 0


@pytest.mark.parametrize("how", ["right", "some"])
def test_samples_penalties_and_limits(open_batch: Open, drafts: Drafts, how: str) -> None:
    """Random numbers are those of each request, also after a draft; so are penalties, stop texts and lengths."""
    hot = [Sampling(1.3, 0.95, seed=3).nth(index) for index in range(3)]
    asked = [Request(prompt(20, 1), NEW_TOKENS, sampling, top_logprobs=3) for sampling in hot]
    asked += [Request(prompt(9, 2), NEW_TOKENS, Sampling(repetition_penalty=1.7))]
    asked += [Request(prompt(9, 2), tokens) for tokens in (1, 2, 3, 7)]
    batch, _ = open_batch(NONE)
    plain = answered_together(batch, asked)
    assert len({tuple(answer.tokens) for answer in plain[:3]}) == 3
    word = plain[4 + 3].text[2:5]
    asked += [Request(prompt(9, 2), 7, stop=(word,))]
    plain += answered(batch, asked[-1:])
    assert plain[-1].finished.finish is FinishReason.STOP
    drafts(texts_of(plain), how)
    batch, _ = open_batch()
    for answers in (answered_together(batch, asked), answered_together(batch, asked)):
        same(answers, plain)
    assert batch.stats.accepted_tokens > 0
    # what is kept of an answer that ended within a draft continues as it would without
    ended = plain[-1]
    further = Request((*ended.request.prompt, *ended.tokens, *prompt(4)), 5)
    assert answered(batch, [further])[0].tokens == answered(open_batch(NONE)[0], [further])[0].tokens
    assert batch.stats.kept_tokens > 0


def test_windows_after_a_stop_text_within_a_draft(tmp_path: Path, open_batch: Open, drafts: Drafts) -> None:
    """The rows after it leave no trace in the KV cache that a further turn continues."""
    folder = endless(tmp_path / "model", "gemma3_text")
    text = answered(open_batch(NONE, folder=folder)[0], [Request(prompt(20, 20), NEW_TOKENS)])[0]
    stopped = Request(prompt(20, 20), NEW_TOKENS, stop=(text.text[5:8],))
    (ended,) = answered(open_batch(NONE, folder=folder)[0], [stopped])
    further = Request((*stopped.prompt, *ended.tokens, *prompt(4)), 9, top_logprobs=2)
    expected = answered(open_batch(NONE, folder=folder)[0], [further])
    drafts(texts_of([text]), "right")
    batch, _ = open_batch(folder=folder)
    same(answered(batch, [stopped]), [ended])
    assert batch.stats.accepted_tokens < batch.stats.drafted_tokens  # it stopped within a draft
    same(answered(batch, [further]), expected)
    assert batch.stats.kept_tokens >= len(stopped.prompt)


def test_a_cancelled_request(open_batch: Open, plain: Any, drafts: Drafts) -> None:
    """In the middle of an accepted draft: nothing more comes, and the others go on."""
    first, other = Submitted(Request(prompt(20, 1), 60)), Request(prompt(12, 5), 40)
    texts = [[*request.prompt, *alone(plain, request)] for request in (first.request, other)]
    drafts(texts, "right")
    batch, _ = open_batch()

    def receive(event: Event) -> None:
        first.receive(event)
        if len(first.tokens) == 3 and first.handle is not None:
            first.handle.cancel()

    with batch.paused():
        first.handle = batch.submit(first.request, receive)
        second = begin(batch, other)
    assert second.wait().tokens == texts[1][12:]
    assert first.wait().finished.finish is FinishReason.CANCELLED
    assert first.tokens == texts[0][20 : 20 + len(first.tokens)]
    assert answered(batch, [first.request])[0].tokens == texts[0][20:]


def test_where_drafts_are_used(open_batch: Open, tmp_path: Path) -> None:
    """By default where weights are streamed; never where KV caches do not go on, or with exact passes."""
    loop = [Request(prompt(5) * 4, 40)]

    def drafted(limits: Limits, **options: Any) -> int:
        batch, _ = open_batch(limits, **options)
        answered(batch, loop)
        return batch.stats.drafted_tokens

    assert drafted(Limits()) > 0
    assert drafted(Limits(throughput=True)) > 0
    assert drafted(Limits(), budget=1 << 34) == 0
    assert drafted(Limits(draft="ngram"), budget=1 << 34) > 0
    assert drafted(Limits(exact=True)) == 0
    for name, limits in (("qwen3_next", Limits(draft="ngram")), ("jamba", Limits())):
        hybrid = build_checkpoint(tmp_path / name, HYBRIDS[name], dtype=torch.float32)
        assert (drafted(limits, folder=split(hybrid)) > 0) is (name == "qwen3_next")


def test_a_cut_layer_keeps_its_room() -> None:
    """A copy of it keeps its tokens, too."""
    from transformers import DynamicCache

    cache = DynamicCache()
    rows = torch.arange(40_000.0).repeat(16, 1)[None, None]  # 64 tokens of 160 KB, with room for more
    cache.update(rows, -rows, 0)
    layer = cache.layers[0]
    append(layer, rows[:, :, :5], rows[:, :, :5])
    before = layer.keys.data_ptr()
    drop_last(cache, 3)
    keys, _ = append(layer, rows[:, :, :1] + 1, rows[:, :, :1])
    assert keys.shape[2] == 16 + 2 + 1
    assert keys.data_ptr() == before
    assert torch.equal(keys[:, :, -1:], rows[:, :, :1] + 1)
