"""The size of KV caches, and copies of their prefixes, for layers of every kind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from rabbitllm.generation.kv_cache import (
    MAX_TEXTS,
    WORTH_TOKENS,
    PrefixCache,
    append,
    bytes_of,
    common_prefix,
    copied,
    cost_by_cache,
    cost_by_config,
    usable,
)
from tests.support.builders import FAMILIES, VOCABULARY_SIZE, build_checkpoint
from tests.support.tiny_models import plain_model

KEEPING = ("llama", "gemma3_text", "gpt_oss", "qwen3_next")


def ids(length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY_SIZE, (1, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=[name for name in KEEPING if name in FAMILIES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    build_checkpoint(folder, request.param, dtype=torch.float32, tokenizer=False)
    return plain_model(folder, dtype=torch.float32).eval()


@torch.no_grad()
def cache_of(model: Any, tokens: int) -> Any:
    cache = DynamicCache(config=model.config)
    model(ids(tokens), past_key_values=cache)
    return cache


def has_keys(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None


def storages(cache: Any) -> int:
    """Bytes of the KV cache, with the tensors of which its own are views."""
    both = (tensor for layer in cache.layers if has_keys(layer) for tensor in (layer.keys, layer.values))
    return sum(tensor.untyped_storage().nbytes() for tensor in both)


def test_the_cost_that_a_cache_shows_is_that_of_longer_ones(model: Any) -> None:
    cost = cost_by_cache(cache_of(model, 9))
    assert cost is not None
    for tokens in (9, 20, 70):
        cache = cache_of(model, tokens)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if has_keys(layer))
        states = bytes_of(cache) - storages(cache)
        # a window shows one token less than it takes
        windows = sum(each for _, each in cost.windows)
        assert held + states <= cost.bytes_for(tokens) <= held + states + windows
        assert cost_by_config(model.config, torch.float32).bytes_for(tokens) > 0


def test_without_windows_the_config_says_it_exactly(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "llama", "llama", dtype=torch.float32, tokenizer=False)
    model = plain_model(folder, dtype=torch.float32)
    assert cost_by_config(model.config, torch.float32) == cost_by_cache(cache_of(model, 7))


@torch.no_grad()
def test_a_copied_prefix_is_the_cache_of_that_prefix_and_shares_no_memory(model: Any) -> None:
    whole = ids(40)
    cache = cache_of(model, 40)
    before = copy.deepcopy(cache)
    wanted = [*whole[0, :30].tolist(), *[5] * 6]
    known = usable(wanted, whole[0].tolist(), cache)
    if known == 0:  # states, or windows that have slid
        assert any("conv_states" in vars(layer) or getattr(layer, "is_sliding", False) for layer in cache.layers)
        wanted = [*whole[0].tolist(), *[5] * 6]
        known = usable(wanted, whole[0].tolist(), cache)
        assert known == 40
    else:
        assert known == 30
    part = copied(cache, known)
    assert part.get_seq_length() == known
    rest = torch.tensor([wanted[known:]])
    got = model(rest, past_key_values=part).logits[0, -1]
    expected = model(torch.tensor([wanted])).logits[0, -1]
    assert torch.allclose(got, expected, atol=2e-4, rtol=1e-3)
    for layer, old in zip(cache.layers, before.layers, strict=True):  # the source is as it was
        for name, value in vars(old).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(vars(layer)[name], value)


def test_beginnings() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2, 3], [1, 2, 3, 5]) == 3
    assert common_prefix([9, 2, 3], [1, 2, 3]) == 0


def test_a_short_beginning_is_worth_nothing_and_one_token_is_always_computed(tmp_path: Path) -> None:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 40, 8), torch.zeros(1, 1, 40, 8), 0)
    text = list(range(40))
    assert usable([*text[: WORTH_TOKENS - 1], 99, 99], text, cache) == 0
    assert usable([*text[:WORTH_TOKENS], 99, 99], text, cache) == WORTH_TOKENS
    assert usable(text, text, cache) == 39


def test_what_was_not_used_for_the_longest_time_goes_first() -> None:
    kept = PrefixCache()
    texts = []
    for first in range(3):
        cache = DynamicCache()
        cache.update(torch.zeros(1, 1, 10, 8), torch.zeros(1, 1, 10, 8), 0)
        texts.append([first, *range(50, 59)])
        kept.put(texts[-1], cache)
    each = 2 * 10 * 8 * 4
    assert kept.nbytes == 3 * each
    kept.used(texts[0])
    kept.shrink(2 * each)
    assert [list(ids) for ids, _ in kept.texts()] == [texts[2], texts[0]]
    longer = DynamicCache()
    longer.update(torch.zeros(1, 1, 12, 8), torch.zeros(1, 1, 12, 8), 0)
    kept.put([*texts[0], 1, 2], longer)  # its own prefix is dropped
    assert [len(ids) for ids, _ in kept.texts()] == [10, 12]
    kept.shrink(0)
    assert kept.nbytes == 0


def test_of_many_texts_those_used_last_are_kept() -> None:
    kept = PrefixCache()
    texts = [[number, *range(50, 59)] for number in range(MAX_TEXTS + 3)]
    for text in texts[:MAX_TEXTS]:
        kept.put(text, DynamicCache())
    kept.used(texts[1])
    for text in texts[MAX_TEXTS:]:
        kept.put(text, DynamicCache())
    found = [list(ids) for ids, _ in kept.texts()]
    assert found == [*texts[4:MAX_TEXTS], texts[1], *texts[MAX_TEXTS:]]


def test_room_that_is_reserved_counts() -> None:
    cache = DynamicCache()
    keys = torch.zeros(1, 4, 700, 128)
    cache.update(keys, keys.clone(), 0)
    cost = cost_by_cache(cache)
    assert cost is not None
    append(cache.layers[0], keys[:, :, :1], keys[:, :, :1])
    assert bytes_of(cache) == cost.bytes_for(701)
    for _ in range(150):
        append(cache.layers[0], keys[:, :, :1], keys[:, :, :1])
        assert bytes_of(cache) <= cost.bytes_for(cache.get_seq_length())
    part = copied(cache, 100)
    assert bytes_of(part) == 100 * cost.every_token
