"""Caches other than a full KV cache in each layer (windows, states, indexes, keys that layers share).

Long generations of padded batches are bit for bit what transformers computes, wherever the weights are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from rabbitllm.engine.load_plan import SCALES_IN_PLACE
from rabbitllm.engine.placement import Tier
from tests.engine.test_fake_gpu import load_on
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.hybrid_families import HYBRIDS
from tests.support.long_generation import LENGTHS, NEW_TOKENS, Trail, assert_same_trail, continued, prompts
from tests.support.tiny_models import load, plain_model, split, tiers

FEW = 24
FEWEST = 10
"""New tokens where not the length is what is tried; more than any window has room for."""
NO_LAYER_OF_ITS_OWN = ("gpt_neo", "minimax", "rwkv", "xlstm")
"""Families that keep a window, or a state, elsewhere than in a layer of transformers' cache."""
WAYS: dict[str, dict[str, Any]] = {
    "static": {"cache_implementation": "static"},
    "static, in chunks": {"cache_implementation": "static", "prefill_chunk_size": 6},
    "in chunks": {"prefill_chunk_size": 6},
    "offloaded": {"cache_implementation": "offloaded"},
    "quantized": {"cache_implementation": "quantized"},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "drawn": {"do_sample": True, "top_k": 20},
    "looked up": {"prompt_lookup_num_tokens": 3},
    "assisted": {"assistant_model": None},
}
"""Options of `generate`; transformers refuses some of them for some models, and then we have to as well."""
ALWAYS = {"no cache", "drawn"}


def family(name: str) -> str:
    """The same name, unless the installed transformers is from before that family."""
    if HYBRIDS[name].model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip("transformers does not know it")
    return name


def checkpoint(folder: Path, name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    chosen = HYBRIDS[family(name)]
    return build_checkpoint(folder, chosen, tied=chosen.ties[0], dtype=dtype, shards=2, seed=seed)


def budgets(directory: Path, name: str) -> list[int]:
    """Bytes for weights: what lets half of them stay, and none; of some models all have to."""
    if HYBRIDS[name].model_type in SCALES_IN_PLACE:
        return []
    return [sum(placed.stored for placed in load(directory).placement.units) // 2, 0]


def short_of(chosen: tuple[str, ...]) -> list[Any]:
    """Every family; the short run has the chosen ones."""
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.long) for name in HYBRIDS]


def some_ways(name: str) -> list[str]:
    """Three of the ways that are not for every family, others for others."""
    optional = sorted(WAYS.keys() - ALWAYS)
    first = crc32(name.encode())
    return [optional[(first + step) % len(optional)] for step in (0, 3, 6)]


def attempt(
    model: Any, way: dict[str, Any], assistant: Any = None, new_tokens: int = FEW, **options: Any
) -> Trail | Exception:
    """A generation in that way, or what was raised instead."""
    inputs = prompts()
    if not way.keys().isdisjoint({"prompt_lookup_num_tokens", "assistant_model"}):  # these take one prompt
        inputs = {key: value[-1:] for key, value in inputs.items()}
    if "assistant_model" in way:
        way = {"assistant_model": assistant}
    try:
        return continued(model, inputs, new_tokens, **way, **options)
    except Exception as error:
        return error


def assert_same_outcome(actual: Trail | Exception, expected: Trail | Exception) -> None:
    if isinstance(expected, Trail):
        if isinstance(actual, Exception):
            raise actual
        assert_same_trail(actual, expected)
    else:
        assert isinstance(actual, type(expected))
        assert str(actual) == str(expected)


def in_both_dtypes() -> list[Any]:
    """Every family, wherever the weights are, in one dtype; and for the short run two of them, streamed."""
    short = [("qwen3_next", torch.bfloat16, False), ("gemma3", torch.float32, False)]
    full = [(name, (torch.float32, torch.bfloat16)[index % 2], True) for index, name in enumerate(HYBRIDS)]
    return [pytest.param(*case, marks=pytest.mark.long if case[2] else ()) for case in (*short, *full)]


@pytest.mark.parametrize(("name", "dtype", "everywhere"), in_both_dtypes())
def test_long_generations_of_a_padded_batch(tmp_path: Path, name: str, dtype: torch.dtype, everywhere: bool) -> None:
    folder = checkpoint(tmp_path / "model", name, dtype)
    expected = continued(plain_model(folder, dtype=dtype), prompts())
    assert len(expected.logits) == NEW_TOKENS
    assert len(expected.tokens) == len(LENGTHS)
    if name not in NO_LAYER_OF_ITS_OWN:
        assert isinstance(expected.cache, DynamicCache)
        special = [layer for layer in expected.cache.layers if type(layer) is not DynamicLayer]
        assert special
        for layer in special:
            if getattr(layer, "is_sliding", False):
                assert layer.keys.shape[-2] < min(LENGTHS[-1], NEW_TOKENS)

    directory = split(folder)
    if everywhere:
        resident = load(directory)
        assert resident.placement.is_resident
        assert_same_trail(continued(resident, prompts()), expected)
    for budget in budgets(directory, name)[0 if everywhere else 1 :]:
        model = load(directory, budget)
        assert Tier.STREAMED in tiers(model).values()
        assert_same_trail(continued(model, prompts()), expected)


@pytest.mark.parametrize("name", short_of(("gemma4", "mamba2")))
def test_generations_are_independent(tmp_path: Path, name: str) -> None:
    """Neither one that ended, nor one that was interrupted inside a layer; and what is kept on purpose goes on."""
    folder = checkpoint(tmp_path / "model", name)
    directory, plain = split(folder), plain_model(folder)
    other = continued(plain, prompts(1), FEW)
    expected = continued(plain, prompts(), FEW)
    model = load(directory, *budgets(directory, name)[-1:])

    assert_same_trail(continued(model, prompts(), FEW), expected)
    assert_same_trail(continued(model, prompts(1), FEW), other)
    interrupt(model)
    assert_same_trail(continued(model, prompts(1), FEW), other)
    assert not model.streamer.bound
    first = continued(model, prompts(), FEW)
    assert_same_outcome(second_turn(model, first), second_turn(plain, expected))


def interrupt(model: Any) -> None:
    """Begin a generation, and end it like Ctrl-C inside the middle one of the units, in the fifth pass over it."""
    streamed = [unit for unit, tier in tiers(model).items() if tier is Tier.STREAMED] or list(tiers(model))
    calls = []

    def stop(module: torch.nn.Module, args: Any) -> None:
        calls.append(module)
        if len(calls) == 5:
            raise KeyboardInterrupt

    handle = model.get_submodule(streamed[len(streamed) // 2]).register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        continued(model, prompts(2), FEW)
    handle.remove()


def second_turn(model: Any, first: Trail) -> Trail | Exception:
    """Go on from the cache of a generation with another few tokens, or what was raised instead."""
    more = prompts(3, (5,) * len(LENGTHS))
    mask = prompts()["attention_mask"]
    inputs = {
        "input_ids": torch.cat([first.tokens, more["input_ids"]], 1),
        "attention_mask": torch.cat([mask, mask.new_ones(len(mask), FEW + 5)], 1),
    }
    try:
        return continued(model, inputs, FEW, past_key_values=first.cache)
    except Exception as error:
        return error


@pytest.mark.parametrize("name", short_of(("mistral",)))
@pytest.mark.long
def test_other_caches_and_ways_to_generate(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path / "model", name)
    directory, plain = split(folder), plain_model(folder)
    model = load(directory, *budgets(directory, name)[-1:])
    assistant = plain_model(checkpoint(tmp_path / "assistant", name, seed=1))
    worked = set()
    ways = WAYS if name == "mistral" else {way: WAYS[way] for way in sorted(ALWAYS) + some_ways(name)}
    for way, options in ways.items():
        expected = attempt(plain, options, assistant)
        assert_same_outcome(attempt(model, options, assistant), expected)
        worked |= {way} if isinstance(expected, Trail) else set()
    assert worked >= ALWAYS
    if name == "mistral":
        assert worked >= WAYS.keys() - {"offloaded", "quantized"}


@pytest.mark.parametrize("name", short_of(("gemma4",)))
@pytest.mark.long
def test_two_devices(tmp_path: Path, name: str) -> None:
    """Each layer's cache where that layer is, also where layers share one; the fake GPUs take no mixing.

    Without a mode of the caller's: in inference mode the fake cannot take operations apart, and their last bits differ.
    """
    folder = checkpoint(tmp_path / "model", name)
    directory, plain = split(folder), plain_model(folder)
    for way in ("drawn",) if name in NO_LAYER_OF_ITS_OWN else ("beams", "static, in chunks"):
        expected = attempt(plain, WAYS[way], new_tokens=FEWEST, mode=torch.no_grad)
        if way == "static, in chunks" and isinstance(expected, Exception):
            continue  # on one device transformers makes that cache beforehand, which not every model bears
        with watched():
            model = load_on([FakeGpu(0), FakeGpu(1)], directory, *budgets(directory, name)[-1:] or [1 << 30])
            actual = attempt(model, WAYS[way], new_tokens=FEWEST, mode=torch.no_grad)
        assert len({placed.device for placed in model.placement.units}) == 2
        assert isinstance(expected, Trail)
        assert_same_outcome(actual, expected)
