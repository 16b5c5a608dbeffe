"""Prompts longer than windows, chunks, and the number of tokens after which rotary angles change: transformers' tokens.

`longrope` (Phi-3 and Phi-4) rotates all tokens of a long sequence otherwise than those of a short one. So what was
computed for a beginning alone is wrong for a long prompt: neither chunks nor shared prefixes are allowed there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rabbitllm.errors import OptionError
from rabbitllm.generation import _sequence
from rabbitllm.generation.draft import NGRAM, prepare_draft
from rabbitllm.generation.kv_cache import cost_by_config
from rabbitllm.generation.request import Delta, Limits, Request
from rabbitllm.generation.session import Session
from rabbitllm.generation.template import ChatTemplate
from tests.chat.talkers import talker, talker_folder
from tests.engine.test_every_architecture import build
from tests.generation.submitting import Open, Submitted, answered, answered_together
from tests.support.builders import FAMILIES, Family, build_checkpoint, make_tokenizer
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_models import ALL, load, plain_model, split

CHANGE = 24
"""Tokens after which the angles change."""
TOLERANCE = 1e-3
"""Of log probabilities."""
LONGROPE = "longrope"
SHORT = ("llama", "gemma3", "llama4", "llama-longrope", "phi3-longrope")
"""Full attention, windows, chunked attention, and angles that change with and without the cache being dropped."""
DECODERS: Mapping[str, Family] = {
    name: family for name, family in {**HYBRIDS, **FAMILIES}.items() if not family.encoder_decoder
}
OTHERS = sorted(
    set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {family.model_type for family in DECODERS.values()} - set(DECODERS)
)
"""Types for which the tests have no settings of their own."""
WITHOUT_ONE_DECODER = ("blt",)
"""Types of several decoders, which are refused."""


def ids(tokens: int, seed: int) -> tuple[int, ...]:
    """Random ids that every tokenizer has, none of them special."""
    drawn = torch.randint(100, 200, (tokens,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def longrope(family: Family, change: int = CHANGE) -> dict[str, Any]:
    """Settings for angles that change after so many tokens; none if the family's layers have no such angles."""
    config = family.config(family.ties[0])
    head = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
    head = head or config.hidden_size // config.num_attention_heads
    params = copy.deepcopy(getattr(config, "rope_parameters", None) or {})
    ropes = [r for r in (params, *params.values()) if isinstance(r, dict) and r.get("rope_type") == "default"]
    for rope in ropes:
        pairs = int(head * rope.get("partial_rotary_factor", 1)) // 2
        rope |= {"rope_type": LONGROPE, "original_max_position_embeddings": change, "factor": 8.0}
        rope |= {"short_factor": [1.0] * pairs, "long_factor": [2.0 + index for index in range(pairs)]}
        if family.model_type == "phimoe":
            rope |= {"short_mscale": 1.0, "long_mscale": 1.5}
    has_own = hasattr(config, "original_max_position_embeddings")
    original = {"original_max_position_embeddings": change} if has_own or family.model_type == "phimoe" else {}
    return {"rope_parameters": params, **original} if ropes else {}


def checkpoint(folder: Path, name: str) -> Path:
    """A small random model whose answers have all of their tokens; or skip."""
    family = DECODERS.get(name.removesuffix(f"-{LONGROPE}"))
    if family is None:
        build(folder, name)
    else:
        settings = longrope(family) if name.endswith(LONGROPE) else {}
        if name.endswith(LONGROPE) and not settings:
            pytest.skip("it has no rotary angles of the ordinary kind")
        try:
            build_checkpoint(folder, family, tied=family.ties[0], tokenizer=False, **settings)
        except Exception as error:
            if not settings:
                raise
            pytest.skip(f"transformers makes no such model: {error}")
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    GenerationConfig(pad_token_id=0).save_pretrained(folder)
    return folder


def requests() -> list[Request]:
    """In this order: one that ends before the change, and those that it could be a prefix of; then others after those.

    With one beginning: short; long; one that decodes across the change; longer than the long one; short again.
    """
    beginning, long = ids(20, 1), ids(40, 2)
    prompts = [
        (beginning, 3),
        ((*beginning, *long), 6),
        ((*beginning, *ids(2, 3)), 12),
        ((*beginning, *long, *ids(9, 4)), 6),
        ((*beginning[:18], *ids(3, 5)), 3),
    ]
    return [Request(prompt, tokens, top_logprobs=1) for prompt, tokens in prompts]


@dataclass(frozen=True)
class Expected:
    """What transformers generates for a request.

    Attributes:
        tokens: ids after the prompt.
        logprobs: of each of them, (vocabulary,).
    """

    tokens: list[int]
    logprobs: list[torch.Tensor]


@torch.no_grad()
def expected(plain: Any, request: Request) -> Expected:
    prompt = torch.tensor([request.prompt])
    output = plain.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logprobs = [torch.log_softmax(logits[0].double(), -1) for logits in output.logits]
    return Expected(output.sequences[0, prompt.shape[1] :].tolist(), logprobs)


def assert_same(answer: Submitted, reference: Expected) -> None:
    """The tokens and their log probabilities, up to a place where rounding decides."""
    assert len(answer.finished.tokens) == len(reference.tokens)
    for chosen, token, logprobs in zip(answer.chosen, reference.tokens, reference.logprobs, strict=True):
        assert chosen.logprob == pytest.approx(float(logprobs[chosen.token]), abs=TOLERANCE)
        assert float(logprobs[token] - logprobs[chosen.token]) <= TOLERANCE
        if chosen.token != token:
            return


NAMES = [name for family in sorted(DECODERS) for name in (family, f"{family}-{LONGROPE}")] + OTHERS


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(n, marks=pytest.mark.long) for n in NAMES if n not in SHORT)])
def test_long_prompts(tmp_path: Path, open_batch: Open, name: str) -> None:
    folder = checkpoint(tmp_path / "model", name)
    plain = plain_model(folder, dtype=torch.float32).eval()
    try:
        several = [expected(plain, request) for request in requests()]
    except Exception as error:
        if name not in OTHERS:
            raise
        pytest.skip(f"transformers generates nothing: {error}")
    directory = split(folder)
    if name in WITHOUT_ONE_DECODER:
        with pytest.raises(OptionError, match="has no single decoder whose sizes tell"):
            open_batch(folder=directory, budget=ALL)
        return
    for chunk in (8, 512):
        batch, _ = open_batch(Limits(chunk=chunk), folder=directory, budget=ALL)
        answers = [answered(batch, [request])[0] for request in requests()]
        answers += answered_together(batch, requests())
        batch.close()
        for answer, reference in zip(answers, 2 * several, strict=True):
            assert_same(answer, reference)


CHANGING = pytest.mark.parametrize("name", ["llama-longrope", "phi3-longrope"])


@CHANGING
@pytest.mark.parametrize("swap_bytes", [None, 0], ids=["swapped out", "recomputed"])
def test_preempted_while_the_angles_change(
    tmp_path: Path, open_batch: Open, monkeypatch: pytest.MonkeyPatch, name: str, swap_bytes: int | None
) -> None:
    """With the angles that each token would have alone."""
    monkeypatch.setattr(_sequence, "RESERVED_TOKENS", 4)
    folder = checkpoint(tmp_path / "model", name)
    plain = plain_model(folder, dtype=torch.float32).eval()
    room = cost_by_config(plain.config, torch.float32).bytes_for(3 * CHANGE - 2)
    batch, _ = open_batch(Limits(chunk=8, cache_bytes=room, swap_bytes=swap_bytes), folder=split(folder), budget=ALL)
    for answer in answered_together(batch, [Request(ids(n, n), 24, top_logprobs=1) for n in (12, 17, 9)]):
        assert_same(answer, expected(plain, answer.request))
    assert batch.stats.preempted > 1
    assert (batch.stats.resumed > 0) is (swap_bytes is None)


def test_prefixes_are_shared_only_below_the_change(tmp_path: Path, open_batch: Open) -> None:
    batch, _ = open_batch(folder=split(checkpoint(tmp_path / "model", "phi3-longrope")), budget=ALL)
    cached = [answered(batch, [request])[0].finished.kept_tokens for request in requests()]
    assert cached == [0, 0, 20, 0, 18]
    assert batch.stats.kept_tokens == 38


@CHANGING
def test_a_cache_created_by_the_model_counts(tmp_path: Path, open_batch: Open, name: str) -> None:
    """Phi-3 drops its cache where the angles change, and makes another one."""
    folder = checkpoint(tmp_path / "model", name)
    batch, model = open_batch(Limits(chunk=8), folder=split(folder), budget=ALL)
    cost = cost_by_config(model.config, torch.float32)
    sizes: list[tuple[int, int]] = []
    for request in (Request(ids(20, 1), 12), Request(ids(40, 2), 5)):
        text = Submitted(request)

        def receive(event: Any, text: Submitted = text) -> None:
            text.receive(event)
            if isinstance(event, Delta):
                sizes.append((batch.stats.cache_bytes, cost.bytes_for(len(text.request.prompt) + len(text.tokens) - 1)))

        batch.submit(request, receive)
        text.wait()
        assert all(nbytes >= needed for nbytes, needed in sizes)
    assert len(sizes) == 17
    assert batch.stats.cache_bytes <= cost.bytes_for(CHANGE)  # what has the other angles is of no use to others


@CHANGING
def test_a_conversation_across_the_change_and_back(tmp_path: Path, name: str) -> None:
    """As after /drop: a prompt that is short again does not continue what was computed for a long one."""
    family, change = name.removesuffix(f"-{LONGROPE}"), 120
    folder = talker_folder(tmp_path / "model", family, **longrope(DECODERS[family], change))
    model, plain = talker(folder, ALL), plain_model(folder).eval()
    plain.generation_config.suppress_tokens = model.generation_config.suppress_tokens
    session = Session(model, 10)
    first = [{"role": "user", "content": "Who are you, and where do you live?"}]
    turn = [
        {"role": "assistant", "content": "A rabbit."},
        {"role": "user", "content": "And the others, where are they?"},
    ]
    lengths, cached = [], []
    for messages in (first, first + turn, first + 2 * turn, first + turn, first):
        answer = session.answer(messages, lambda text: None)
        prompt = torch.tensor([ChatTemplate(model).prompt(messages).ids])
        output = plain.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False)
        assert answer.tokens == tuple(output[0, prompt.shape[1] :].tolist())
        assert session.cached_tokens <= change
        lengths.append(prompt.shape[1])
        cached.append(answer.kept_tokens)
    assert lengths[1] < change < lengths[1] + 10 < lengths[2]
    assert cached[0] == cached[2] == 0
    assert min(cached[1], cached[3], cached[4]) > 40


@CHANGING
def test_drafts_are_refused_where_angles_change(tmp_path: Path, name: str) -> None:
    model = load(split(checkpoint(tmp_path / "model", name)))
    with pytest.raises(OptionError, match="cannot be used with a draft: its rotary angles change"):
        prepare_draft(model, NGRAM)
