"""Every kind of cache goes back after wrong tokens, and is then what it is one token after the other."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from rabbitllm.engine.placement import Tier
from rabbitllm.errors import OptionError
from rabbitllm.generation._rewind import Rewindable, takes_trees
from rabbitllm.generation.draft import Drafting, prepare_draft
from rabbitllm.generation.kv_cache import (
    BY_ROWS,
    CACHE_ARGUMENT,
    cache_layers,
    can_go_back,
    keeps,
    layers_of,
    why_not_back,
)
from rabbitllm.generation.request import Request, Result, Sampling
from rabbitllm.generation.session import Session, answer
from rabbitllm.telemetry.passes import FURTHER
from tests.chat.talkers import characters, talker, talker_folder
from tests.support import tiny_configs
from tests.support.always_drafts import always_drafts  # noqa: F401  a fixture that applies by itself
from tests.support.builders import FAMILIES, Family, build_checkpoint
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_models import ALL, load, one_thread, plain_model, split, tiers  # noqa: F401

IN_MEMORY = ("rwkv",)
"""Families that change their weights, and are not streamed."""
OWN = ("linear_cache", "rnn_state")
"""Attributes with states of the caches that families have of their own."""
PLAIN = ("llama", "gemma3", "gpt_oss", "gemma3n", "llama4")
SHORT = ("llama", "gemma3", "qwen3_next", "mamba", "falcon_h1", "deepseek_v32", "minimax", "rwkv")
PROMPT, TOKENS = 12, 16
IDS = torch.randint(3, 270, (1, 48), generator=torch.Generator().manual_seed(1))


def family_of(name: str) -> Family:
    return HYBRIDS.get(name) or FAMILIES[name]


def checkpoint(folder: Path, name: str, **options: Any) -> Path:
    family = family_of(name)
    if family.model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip("transformers does not know it")
    if "index_n_heads" in family.settings:  # few, so that scores are equal
        options["index_n_heads"] = 4
    return build_checkpoint(folder, family, tied=family.ties[0], **options)


def all_families() -> list[Any]:
    """Every family with states, and some without; the short run has one of each kind."""
    names = (*PLAIN, *list(HYBRIDS)[list(HYBRIDS).index("axk2") :])
    return [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in names]


def states(model: Any, cache: Any) -> Iterator[torch.Tensor]:
    """All tensors of a cache, and the states in a model's modules."""
    held = [vars(layer) for layer in layers_of(cache)] + [vars(module) for module in model.modules()]
    for name in ("keys", "values", "conv_states", "recurrent_states", "conv1d_state", "indexer_keys"):
        yield from tensors_in([attributes.get(name) for attributes in held])
    yield from tensors_in(cache if isinstance(cache, list) else [vars(cache).get(name) for name in OWN])


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def copies(model: Any, cache: Any) -> list[torch.Tensor]:
    found = [tensor.clone() for tensor in states(model, cache) if tensor.numel()]
    assert found
    return found


@torch.no_grad()
def one_by_one(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    track = Rewindable(model)
    logits = [track.logits(IDS[:, :end], 1) for end in range(PROMPT, IDS.shape[1] + 1)]
    return torch.cat(logits), copies(model, track.cache)


@pytest.mark.parametrize("name", all_families())
@torch.no_grad()
def test_a_cache_goes_back_after_wrong_tokens(tmp_path: Path, name: str) -> None:
    """Passes of right tokens and wrong ones after them: the wrong ones are dropped; logits and states remain right."""
    assert_goes_back(plain_model(checkpoint(tmp_path / "model", name)))


@torch.no_grad()
def assert_goes_back(model: Any) -> None:
    assert can_go_back(model)
    expected, expected_states = one_by_one(model)
    wrong, track = (IDS.repeat(1, 2) + 7) % 260 + 3, Rewindable(model)
    actual = [track.logits(IDS[:, :PROMPT], 1)]
    known, right, carried = PROMPT, 0, 0
    while known < IDS.shape[1]:
        right = (right + 1) % 4
        until = min(known + 1 + right, IDS.shape[1])
        if until - track.tokens <= 6 and until < IDS.shape[1]:
            track.mark()
            logits = track.logits(torch.cat((IDS[:, :until], wrong[:, until : until + 3]), dim=1), until - known + 3)
            actual.append(logits[: until - known])
            track.settle(until)
        else:
            actual.append(track.logits(IDS[:, :until], until - known))
        carried = max(carried, until - track.tokens)
        known = until
    assert (carried > 0) == (not track._is_cropped)
    assert track.tokens == known
    scale = expected.std()
    assert float((torch.cat(actual) - expected).abs().max()) < 1e-4 * scale
    for state, other in zip(copies(model, track.cache), expected_states, strict=True):
        assert state.shape == other.shape
        if state.is_floating_point():
            assert (state.double() - other.double()).norm() <= 1e-5 * other.double().norm()


def classes() -> list[Any]:
    """Every class that continues a text, with or without pictures, and its model type."""
    mappings = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    found = {name if isinstance(name, str) else name[0]: kind for mapping in mappings for kind, name in mapping.items()}
    return sorted(found.items())


NOT_BY_TEXT = (
    "Llama4ForConditionalGeneration",
    "PI0ForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
)
"""Classes that need more than text: what `generate` alone gives them, or a robot's state (PI0, which moves)."""


@pytest.mark.long
@pytest.mark.parametrize(("name", "model_type"), classes())
@torch.no_grad()
def test_every_class_goes_back_or_says_why(name: str, model_type: str) -> None:
    model = next(tiny_configs.models(getattr(transformers, name), model_type, []), None)
    if model is None or name in NOT_BY_TEXT:
        pytest.skip("it cannot be built small, or called")
    shaken(model)
    if why := why_not_back(model):
        assert "is not known to" not in why
        return
    try:
        model(IDS)
    except Exception as error:
        pytest.skip(f"it cannot be called with text alone: {error}")
    assert_goes_back(model)


def shaken(model: Any) -> Any:
    """The model with noise on all weights: some classes begin with zeros."""
    for parameter in model.float().eval().parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    return model


def glm5_next() -> Any:
    """GLM-5-Next with indexes, which its smallest config has not; published models take pictures."""
    model_class = getattr(transformers, "Glm5NextForConditionalGeneration", None)
    if model_class is None:
        pytest.skip("transformers does not know it")
    config = next(tiny_configs.models(model_class, "glm5_next", [])).config
    text = config.text_config
    text.layer_types, text.indexer_types = ["linear_attention", "indexed_attention"] * 2, ["full"] * 4
    text.num_hidden_layers, text.mlp_layer_types, text.index_kpool = 4, ["dense", "sparse"] * 2, 2
    return shaken(model_class(config))


@torch.no_grad()
def test_states_beside_indexes_go_back() -> None:
    model = glm5_next()
    assert {type(layer).__name__ for layer in cache_layers(model)} == {"LinearAttentionLayer", "DynamicIndexedLayer"}
    assert_goes_back(model)


TREE = (-1, -1, 0, 0, 1, 2, 4, 4)
BRANCHED, NO_TREES = ("llama", "qwen3_moe", "deepseek_v3", "falcon", "phi3"), ("gemma3", "gpt2", "bloom", "qwen3_next")


@pytest.mark.parametrize("name", [*BRANCHED, *NO_TREES])
@torch.no_grad()
def test_rows_of_a_tree_are_those_of_their_paths(tmp_path: Path, name: str) -> None:
    """Each row has the logits of its path alone, also if the tree grows by levels, and so has what follows a path."""
    model = plain_model(build_checkpoint(tmp_path / "model", name, tied=FAMILIES[name].ties[0]))  # without windows
    assert takes_trees(model) == (name in BRANCHED)
    if name in NO_TREES:
        return
    text, leaves = IDS[:, :PROMPT], IDS[:, PROMPT : PROMPT + len(TREE)]

    def alone(path: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.cat((text, leaves[:, path]), dim=1)).logits[0, -1].float()
        return logits

    paths = [[index] for index in range(len(TREE))]
    for index, parent in enumerate(TREE):
        paths[index] = [*paths[parent], index] if parent >= 0 else [index]
    expected = torch.stack([alone([]), *map(alone, paths)])
    for levels in ((8,), (2, 5, 8)):
        track = Rewindable(model)
        track.logits(text[:, :-1], 1)
        track.mark()
        rows, known = [], -1
        for level in levels:
            tokens = torch.cat((text, leaves[:, :level]), dim=1)
            rows.append(track.logits(tokens, level - known, TREE[:level])[-(level - known) :])
            known = level
        assert float((torch.cat(rows) - expected).abs().max()) < 1e-4 * expected.std()
        track.settle(PROMPT + 3, [1, 4, 7], len(TREE))
        further = torch.cat((text, leaves[:, [1, 4, 7, 0]]), dim=1)
        assert track.tokens == PROMPT + 3
        following = alone([1, 4, 7, 0])
        assert float((track.logits(further, 1)[0] - following).abs().max()) < 1e-4 * following.std()


def spoiled(draft: Any, how: str) -> Any:
    """A draft that is always right, sometimes, or never."""
    draft.generation_config.assistant_confidence_threshold = 0  # a random model is never sure
    noise = torch.Generator().manual_seed(0)

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        spread = output.logits.std()
        if how == "noisy":
            output.logits = output.logits + 0.7 * spread * torch.randn(output.logits.shape, generator=noise)
        if how == "wrong":
            output.logits = -output.logits
        if how == "flat":
            output.logits = output.logits / 4
        return output

    draft.register_forward_hook(hook)
    return draft


def asked(model: Any, draft: Any = None, **request: Any) -> Result:
    return answer(model, Request(tuple(IDS[0, :PROMPT].tolist()), TOKENS, **request), lambda piece: None, draft=draft)


@pytest.mark.parametrize("name", all_families())
def test_greedy_answers_are_the_models_own(tmp_path: Path, name: str) -> None:
    """Streamed and in memory; with drafts of the same family, whose own states go back too."""
    directory = split(checkpoint(tmp_path / "model", name))
    resident, streamed = load(directory), load(directory, ALL if name in IN_MEMORY else 0, profiling=True)
    assert (Tier.STREAMED in tiers(streamed).values()) == (name not in IN_MEMORY)
    expected = asked(streamed).tokens
    passes = {}
    for how in ("right", "noisy", "wrong"):
        draft = spoiled(load(directory), how)
        for model in (streamed, resident):
            prepare_draft(model, draft)
            streamed.profiler.clear()
            assert asked(model, draft).tokens == expected
            if model is streamed:
                passes[how] = model.profiler.sums[FURTHER].passes
    prepare_draft(streamed, "ngram")
    assert asked(streamed, "ngram").tokens == expected
    assert passes["right"] <= 5
    assert passes["right"] < passes["noisy"] < passes["wrong"] <= len(expected)


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3", "nemotron_h", "lfm3", "deepseek_v32", "minimax"])
def test_a_chat_keeps_its_cache(tmp_path: Path, name: str) -> None:
    model = talker(talker_folder(tmp_path / "model", name))
    draft = spoiled(load(split(tmp_path / "model")), "noisy")
    draft.tokenizer = characters()
    prepare_draft(model, draft)
    assert_a_chat_keeps_its_cache(model, draft)


def test_a_draft_model_goes_on_in_a_chat(tmp_path: Path) -> None:
    """It reads what is new in a conversation only, also after an answer that it has drafted wrong, or that changed."""
    model = talker(talker_folder(tmp_path / "model", "llama"))
    draft = spoiled(load(split(tmp_path / "model")), "noisy")
    draft.tokenizer = characters()
    prepare_draft(model, draft)
    rows: list[int] = []
    draft.get_input_embeddings().register_forward_hook(lambda module, args, output: rows.append(args[0].shape[1]))
    sessions = Session(model, 12), Session(model, 12, draft=draft)
    messages: list[dict[str, Any]] = []
    for question in ("hi", "and then?", "why?", "so?"):
        messages.append({"role": "user", "content": question})
        rows.clear()
        plain, drafted = (session.answer(list(messages), lambda piece: None) for session in sessions)
        assert drafted.tokens == plain.tokens
        assert rows[0] == drafted.prompt_tokens - drafted.kept_tokens
        messages.append({"role": "assistant", "content": plain.text[:-3]})
    assert drafted.kept_tokens > 12
    session = sessions[1]
    assert session.cache is not None
    beside = session.cache.cache.beside
    without = session.cache_bytes - beside.nbytes
    assert 0 < beside.nbytes <= 2 * without
    session.forget()
    assert session.cache_bytes == 0


def assert_a_chat_keeps_its_cache(model: Any, draft: Any) -> None:
    """Answers of a chat are those without a draft, and the cache is kept where it is without a draft."""
    sessions = Session(model, 12), Session(model, 12, draft=draft)
    messages: list[dict[str, Any]] = []
    for question in ("hi", "and then?", "why?", "so?"):
        messages.append({"role": "user", "content": question})
        plain, drafted = (session.answer(list(messages), lambda piece: None) for session in sessions)
        assert drafted.tokens == plain.tokens
        assert (drafted.kept_tokens > 0) == (plain.kept_tokens > 0)
        messages.append({"role": "assistant", "content": plain.text})
    assert (drafted.kept_tokens > 0) == keeps(model)
    if (kept := sessions[1].cache) is not None:
        beside = kept.cache.beside
        assert beside is not None
        copied = copy.deepcopy(kept.cache).beside
        assert copied.of() is beside.of()  # models are not copied
        assert copied.cache is not beside.cache


def test_sampled_answers_with_a_seed_are_the_same_with_ngrams(tmp_path: Path) -> None:
    directory = split(checkpoint(tmp_path / "model", "qwen3_next"))
    model = load(directory, 0)
    prepare_draft(model, "ngram")
    warm = Sampling(0.3, top_k=4, seed=5)
    assert asked(model, "ngram", sampling=warm).tokens == asked(model, sampling=warm).tokens


def test_sampled_answers_with_a_seed_are_the_same_with_trees(tmp_path: Path) -> None:
    directory = split(checkpoint(tmp_path / "model", "llama"))
    model, draft = load(directory, 0, profiling=True), spoiled(load(directory), "noisy")
    prepare_draft(model, draft)
    warm = Sampling(0.3, top_k=4, seed=5)
    expected = asked(model, sampling=warm).tokens
    model.profiler.clear()
    assert asked(model, draft, sampling=warm).tokens == expected
    assert model.profiler.sums[FURTHER].passes < TOKENS - 1


def probabilities(model: Any, ids: tuple[int, ...], sampling: Sampling) -> dict[int, float]:
    """Of the tokens that a sampling with these options chooses from: token -> probability."""
    best = (model(torch.tensor([ids])).logits[0, -1].float() / sampling.temperature).topk(sampling.top_k)
    return dict(zip(best.indices.tolist(), best.values.softmax(dim=0).tolist(), strict=True))


HOT = Sampling(0.5, top_k=3)
DRAWN = 3
"""Tokens of an answer."""


@pytest.mark.parametrize(("name", "draws"), [("llama", 200), pytest.param("qwen3_next", 200, marks=pytest.mark.long)])
@torch.no_grad()
def test_sampled_answers_have_the_models_distribution(tmp_path: Path, name: str, draws: int) -> None:
    """Chi-square over all answers of three tokens; the draft model has another distribution."""
    directory = split(checkpoint(tmp_path / "model", name))
    model, draft = load(directory, profiling=True), spoiled(load(directory), "flat")
    model.generation_config.eos_token_id = model.tokenizer.eos_token_id = None
    prepare_draft(model, draft)
    passes = assert_the_models_distribution(model, draft, draws)
    assert passes < (DRAWN - 0.3) * draws


def assert_the_models_distribution(model: Any, draft: Any, draws: int, sampling: Sampling = HOT) -> int:
    """Chi-square over all answers of `DRAWN` tokens; returns the number of passes of these answers."""
    prompt = tuple(IDS[0, :PROMPT].tolist())
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DRAWN):
        expected = {
            (*drawn, token): before * share
            for drawn, before in expected.items()
            for token, share in probabilities(model, (*prompt, *drawn), sampling).items()
        }
    torch.manual_seed(0)
    earlier = sum(sums.passes for sums in model.profiler.sums.values())
    found = Counter(
        answer(model, Request(prompt, DRAWN, sampling), lambda piece: None, draft=draft).tokens for _ in range(draws)
    )
    assert found.keys() <= expected.keys()
    chi = sum((found[key] - draws * share) ** 2 / (draws * share) for key, share in expected.items())
    free = len(expected) - 1
    assert chi < free + 5 * math.sqrt(2 * free)
    return sum(sums.passes for sums in model.profiler.sums.values()) - earlier


def test_beams_are_refused(tmp_path: Path) -> None:
    model = load(split(checkpoint(tmp_path / "model", "qwen3_next")))
    for options, found in (
        ({"num_beams": 3}, "num_beams=3"),
        ({"num_return_sequences": 2, "do_sample": True}, "2 sequences"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"cache_implementation": "static"}, "a StaticCache as the KV cache"),
    ):
        with pytest.raises(OptionError, match=f"found {found}"):
            model.generate(IDS, max_new_tokens=3, custom_generate=Drafting("ngram"), **options)
    own = load(split(checkpoint(tmp_path / "own", "minimax")))
    with pytest.raises(OptionError, match="found a DynamicCache as the KV cache"):
        own.generate(IDS, custom_generate=Drafting("ngram"), **{CACHE_ARGUMENT: DynamicCache()})
    plain = model.generate(IDS, max_new_tokens=9, do_sample=False)
    assert torch.equal(model.generate(IDS, max_new_tokens=9, do_sample=False, custom_generate=Drafting("ngram")), plain)


def test_every_family_by_rows_is_tested() -> None:
    assert {family.model_type for family in HYBRIDS.values()} >= BY_ROWS


@pytest.mark.parametrize("name", ["deepseek_v32", "llama"])
def test_a_model_whose_cache_went_back_is_given_back(tmp_path: Path, name: str) -> None:
    """Its modules, which hold it by their hooks, were values of a table with weak keys."""
    model = load(split(checkpoint(tmp_path / "model", name)), 0)
    with torch.inference_mode():
        Rewindable(model).logits(IDS, 1)
    is_there = weakref.ref(model)
    del model
    gc.collect()
    assert is_there() is None
