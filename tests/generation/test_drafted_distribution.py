"""Sampled answers with drafts have the target's distribution: chi-square over 10^5 answers.

The loop, its rule and the sources of proposals are the real ones. A pass is a function of its tokens, and so is a tree:
each is computed once and kept. Otherwise 10^5 answers would take hours.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from rabbitllm.generation import _proposals, draft
from rabbitllm.generation._proposals import FromModel
from rabbitllm.generation._rewind import Rewindable
from rabbitllm.generation.draft import Drafting, prepare_draft
from rabbitllm.generation.kv_cache import CACHE_ARGUMENT
from tests.generation.test_rewind import IDS, PROMPT, checkpoint, spoiled
from tests.support.always_drafts import always_drafts  # noqa: F401  a fixture that applies by itself
from tests.support.tiny_models import load, one_thread, split  # noqa: F401

pytestmark = pytest.mark.long
DRAWS = 100_000
ANSWER = 3
"""Tokens of an answer."""
CHOICES = 3
"""Tokens that may follow each text."""
PROCESSORS = LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(CHOICES)])
SOURCES = ("model", "tree", "ngram")


@pytest.fixture
def passes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass is computed once, in a new cache, and so is each tree."""
    known: dict[Any, torch.Tensor] = {}
    compute = Rewindable.logits

    def logits(track: Any, ids: torch.Tensor, count: int, parents: Any = ()) -> torch.Tensor:
        key = id(track._model), track.tokens, count, tuple(parents), *ids[0].tolist()
        if key not in known:
            real, before = Rewindable(track._model), ids[:, : track.tokens]
            if track.tokens:
                compute(real, before, 1, parents[: max(track.tokens - ids.shape[1] + len(parents), 0)])
            known[key] = compute(real, ids, count, parents)
        track.tokens = ids.shape[1]
        return known[key].clone()

    def settle(track: Any, tokens: int, path: Any = (), leaves: int = 0) -> None:
        track.tokens = min(track.tokens, tokens)

    trees: dict[tuple[int, ...], Any] = {}
    grow = FromModel._tree

    def tree(source: Any, ids: torch.Tensor, logits: torch.Tensor, most: int) -> Any:
        key = most, *ids[0].tolist()
        if key not in trees:
            trees[key] = grow(source, ids, logits, most)
        source._computed = []
        return trees[key]

    monkeypatch.setattr(FromModel, "_tree", tree)
    monkeypatch.setattr(Rewindable, "logits", logits)
    monkeypatch.setattr(Rewindable, "mark", lambda track: None)
    monkeypatch.setattr(Rewindable, "settle", settle)


def chi_square(model: Any, source: Any, prompt: tuple[int, ...], draws: int) -> tuple[float, int]:
    """Chi-square over all answers, relative to its limit; and the number of drafted tokens that were right."""
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(ANSWER):
        expected = {
            (*answer, token): before * share
            for answer, before in expected.items()
            for token, share in following(model, (*prompt, *answer)).items()
        }
    config = GenerationConfig(do_sample=True, max_length=len(prompt) + ANSWER)
    stop = StoppingCriteriaList([MaxLengthCriteria(config.max_length)])
    drafting, ids = Drafting(source), torch.tensor([prompt])
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))  # remains empty
    torch.manual_seed(0)
    answers = Counter[tuple[int, ...]]()
    for _ in range(draws):
        answered = drafting(model, ids, PROCESSORS, stop, config, **{CACHE_ARGUMENT: cache})
        answers[tuple(answered[0, len(prompt) :].tolist())] += 1
    assert answers.keys() <= expected.keys()
    chi = sum((answers[key] - draws * share) ** 2 / (draws * share) for key, share in expected.items())
    free = len(expected) - 1
    return chi / (free + 5 * math.sqrt(2 * free)), sum(drafting.brought.right)


def following(model: Any, ids: tuple[int, ...]) -> dict[int, float]:
    """Of each token that may follow a text, the probability; by the model alone."""
    scores = PROCESSORS(torch.tensor([ids]), model(torch.tensor([ids])).logits[:, -1].float())
    shares = scores.softmax(dim=-1)[0]
    return {int(token): float(shares[token]) for token in shares.nonzero()}


def repeating(model: Any) -> tuple[int, ...]:
    """A prompt whose last token was followed by one that the model may choose now."""
    ids = IDS[:, :PROMPT].repeat(260, 1)
    ids[:, -1] = ids[:, 1]
    ids[:, 2] = torch.arange(3, 263)
    likely = PROCESSORS(ids, model(ids).logits[:, -1].float()).softmax(dim=-1)
    fitting = (likely.gather(1, ids[:, 2:3]) > 0.3).nonzero()
    return tuple(ids[int(fitting[0, 0])].tolist())


def prepared(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, tuple[int, ...]]:
    """A model, its draft, and a prompt."""
    directory = split(checkpoint(folder / "model", "llama"))
    model = load(directory)
    if source == "ngram":
        return model, source, repeating(model)
    other = spoiled(load(directory), "flat")
    prepare_draft(model, other)
    monkeypatch.setattr(_proposals, "takes_trees", lambda model: source == "tree")
    return model, other, tuple(IDS[0, :PROMPT].tolist())


@pytest.mark.parametrize("source", SOURCES)
@torch.no_grad()
def test_drafted_answers_have_the_targets_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes_once: None, source: str
) -> None:
    model, drafted, prompt = prepared(tmp_path, source, monkeypatch)
    chi, right = chi_square(model, drafted, prompt, DRAWS)
    assert chi < 1
    assert right > DRAWS / 20


@pytest.mark.parametrize("source", SOURCES)
@torch.no_grad()
def test_a_wrong_rule_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes_once: None, source: str) -> None:
    """A drafted token is accepted a little too often: in three of ten cases whatever the model says."""
    model, drafted, prompt = prepared(tmp_path, source, monkeypatch)
    choose = draft._chosen

    def chosen(scores: Any, proposal: Any, followers: Any, samples: bool) -> Any:
        if followers and float(torch.rand(())) < 0.3 and scores[0, proposal.tokens[0, followers[0]]].isfinite():
            return proposal.tokens[:, followers[0] : followers[0] + 1], followers[0]
        return choose(scores, proposal, followers, samples)

    monkeypatch.setattr(draft, "_chosen", chosen)
    assert chi_square(model, drafted, prompt, DRAWS // 20)[0] > 1
