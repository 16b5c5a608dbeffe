"""Appending in place has the values of appending by copies, whatever else is done with a layer."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rabbitllm.generation import kv_cache
from rabbitllm.generation.kv_cache import append

HEADS, WIDTH = 2, 4


@pytest.fixture(autouse=True)
def small_layers_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "WORTH_BYTES", 10 * HEADS * WIDTH * 4)


def some(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, HEADS, tokens, WIDTH), torch.randn(1, HEADS, tokens, WIDTH)


def both(layer: DynamicLayer, plain: DynamicLayer, tokens: int) -> None:
    given = some(tokens)
    for got, expected in zip(append(layer, *given), plain.update(*given), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(layer.keys, plain.keys)
    assert torch.equal(layer.values, plain.values)
    assert layer.get_seq_length() == plain.get_seq_length()


def test_growing() -> None:
    layer, plain = DynamicLayer(), DynamicLayer()
    places = set()
    for tokens in [3, *[1] * 120, 70, *[1] * 40]:
        both(layer, plain, tokens)
        places.add(layer.keys.data_ptr())
    assert len(places) < 30  # and not a new one for each


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_done_with_a_layer(seed: int) -> None:
    """Cut, copied with and without its tensors, both copies going on, put back to tensors of before."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    pairs = [(DynamicLayer(), DynamicLayer())]
    both(*pairs[0], 20)
    kept = (0, pairs[0][0].keys, pairs[0][0].values, pairs[0][1].keys, pairs[0][1].values)
    for _ in range(150):
        number = chance.randrange(len(pairs))
        layer, plain = pairs[number]
        match chance.choice(["append"] * 6 + ["cut", "fork", "clone", "keep", "put back"]):
            case "append":
                both(layer, plain, chance.randint(1, 5))
            case "cut":
                for one in (layer, plain):
                    one.crop(-min(3, one.get_seq_length() - 1))
            case "fork" if len(pairs) < 4:
                pairs.append((copy.copy(layer), copy.copy(plain)))
            case "clone" if len(pairs) < 4:
                pairs.append((copy.deepcopy(layer), copy.deepcopy(plain)))
            case "keep":
                kept = (number, layer.keys, layer.values, plain.keys, plain.values)
            case "put back":
                layer, plain = pairs[kept[0]]
                layer.keys, layer.values, plain.keys, plain.values = kept[1:]
        for layer, plain in pairs:
            assert torch.equal(layer.keys, plain.keys)
            assert torch.equal(layer.values, plain.values)


def test_windows_are_left_to_themselves() -> None:
    layer, plain = DynamicSlidingWindowLayer(8), DynamicSlidingWindowLayer(8)
    for tokens in (20, 1, 1, 5):
        both(layer, plain, tokens)
