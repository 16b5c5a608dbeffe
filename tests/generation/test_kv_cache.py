"""KV caches of one sequence: growing in place, their size, copies of prefixes, and going back."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from rabbitllm.engine import kv_room
from rabbitllm.engine.kv_room import append, is_window
from rabbitllm.generation.kv_cache import (
    CONTINUING,
    MAX_SEQUENCES,
    MIN_PREFIX_TOKENS,
    ConversationCache,
    PrefixCache,
    bytes_of,
    common_prefix,
    copied,
    cost_by_cache,
    cost_by_config,
    empty_cache,
    keeps,
    usable,
)
from tests.chat.talkers import family_of
from tests.support.builders import FAMILIES, VOCABULARY_SIZE, WINDOW, build_checkpoint
from tests.support.hybrid_families import HYBRIDS
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


def test_cost_by_cache_holds_for_longer_caches(model: Any) -> None:
    cost = cost_by_cache(cache_of(model, 9))
    assert cost is not None
    for tokens in (9, 20, 70):
        cache = cache_of(model, tokens)
        nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if has_keys(layer))
        states = bytes_of(cache) - storages(cache)
        # a window shows one token less than it takes
        windows = sum(token for _, token in cost.windows)
        assert nbytes + states <= cost.bytes_for(tokens) <= nbytes + states + windows
        assert cost_by_config(model.config, torch.float32).bytes_for(tokens) > 0


def test_cost_by_config_is_exact_without_windows(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "llama", "llama", dtype=torch.float32, tokenizer=False)
    model = plain_model(folder, dtype=torch.float32)
    assert cost_by_config(model.config, torch.float32) == cost_by_cache(cache_of(model, 7))


@torch.no_grad()
def test_a_copied_prefix_is_equal_and_shares_no_memory(model: Any) -> None:
    whole = ids(40)
    cache = cache_of(model, 40)
    before = copy.deepcopy(cache)
    prompt = [*whole[0, :30].tolist(), *[5] * 6]
    tokens = usable(prompt, whole[0].tolist(), cache)
    if tokens == 0:  # states, or windows that have slid
        assert any("conv_states" in vars(layer) or getattr(layer, "is_sliding", False) for layer in cache.layers)
        prompt = [*whole[0].tolist(), *[5] * 6]
        tokens = usable(prompt, whole[0].tolist(), cache)
        assert tokens == 40
    else:
        assert tokens == 30
    part = copied(cache, tokens)
    assert part.get_seq_length() == tokens
    new = torch.tensor([prompt[tokens:]])
    logits = model(new, past_key_values=part).logits[0, -1]
    expected = model(torch.tensor([prompt])).logits[0, -1]
    assert torch.allclose(logits, expected, atol=2e-4, rtol=1e-3)
    for layer, old in zip(cache.layers, before.layers, strict=True):  # the source is as it was
        for name, value in vars(old).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(vars(layer)[name], value)


def test_common_prefix() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2, 3], [1, 2, 3, 5]) == 3
    assert common_prefix([9, 2, 3], [1, 2, 3]) == 0


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9))
def test_common_prefix_of_any_two_sequences(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(a, b) == expected


def test_short_prefixes_are_not_usable_and_one_token_is_always_computed(tmp_path: Path) -> None:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 40, 8), torch.zeros(1, 1, 40, 8), 0)
    text = list(range(40))
    assert usable([*text[: MIN_PREFIX_TOKENS - 1], 99, 99], text, cache) == 0
    assert usable([*text[:MIN_PREFIX_TOKENS], 99, 99], text, cache) == MIN_PREFIX_TOKENS
    assert usable(text, text, cache) == 39


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    prefixes = PrefixCache()
    texts = []
    for first in range(3):
        cache = DynamicCache()
        cache.update(torch.zeros(1, 1, 10, 8), torch.zeros(1, 1, 10, 8), 0)
        texts.append([first, *range(50, 59)])
        prefixes.put(texts[-1], cache)
    nbytes = 2 * 10 * 8 * 4
    assert prefixes.nbytes == 3 * nbytes
    prefixes.used(texts[0])
    prefixes.shrink(2 * nbytes)
    assert [list(ids) for ids, _ in prefixes.entries()] == [texts[2], texts[0]]
    longer = DynamicCache()
    longer.update(torch.zeros(1, 1, 12, 8), torch.zeros(1, 1, 12, 8), 0)
    prefixes.put([*texts[0], 1, 2], longer)  # its own prefix is dropped
    assert [len(ids) for ids, _ in prefixes.entries()] == [10, 12]
    prefixes.shrink(0)
    assert prefixes.nbytes == 0


def test_the_number_of_cached_prefixes_is_limited() -> None:
    prefix_cache = PrefixCache()
    texts = [[index, *range(50, 59)] for index in range(MAX_SEQUENCES + 3)]
    for text in texts[:MAX_SEQUENCES]:
        prefix_cache.put(text, DynamicCache())
    prefix_cache.used(texts[1])
    for text in texts[MAX_SEQUENCES:]:
        prefix_cache.put(text, DynamicCache())
    prefixes = [list(ids) for ids, _ in prefix_cache.entries()]
    assert prefixes == [*texts[4:MAX_SEQUENCES], texts[1], *texts[MAX_SEQUENCES:]]


def test_reserved_room_counts() -> None:
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


HEADS, WIDTH = 2, 4


@pytest.fixture
def small_layers_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_room, "MIN_ROOM_BYTES", 10 * HEADS * WIDTH * 4)


def some(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, HEADS, tokens, WIDTH), torch.randn(1, HEADS, tokens, WIDTH)


def both(layer: DynamicLayer, plain: DynamicLayer, tokens: int) -> None:
    pair = some(tokens)
    for updated, expected in zip(append(layer, *pair), plain.update(*pair), strict=True):
        assert torch.equal(updated, expected)
    assert torch.equal(layer.keys, plain.keys)
    assert torch.equal(layer.values, plain.values)
    assert layer.get_seq_length() == plain.get_seq_length()


def window() -> DynamicSlidingWindowLayer:
    return DynamicSlidingWindowLayer(16)


LAYERS = pytest.mark.parametrize("kind", [DynamicLayer, window])


@LAYERS
@pytest.mark.usefixtures("small_layers_have_room")
def test_caches_grow_in_place(kind: Callable[[], DynamicLayer]) -> None:
    layer, plain = kind(), kind()
    places = set()
    for tokens in [3, *[1] * 120, 70, *[1] * 40]:
        both(layer, plain, tokens)
        places.add(layer.keys.untyped_storage().data_ptr())
    assert len(places) < 30  # and not a new one for each


@pytest.mark.usefixtures("small_layers_have_room")
def test_a_growing_cache_has_the_same_logits(model: Any) -> None:
    growing, plain = empty_cache(model), DynamicCache(config=model.config)
    with torch.no_grad():
        for begin, end in ((0, 9), *((at, at + 1) for at in range(9, 50)), (50, 57)):
            outputs = (model(ids(60)[:, begin:end], past_key_values=cache).logits for cache in (growing, plain))
            assert torch.equal(*outputs)
    every = [layer for layer in growing.layers if kv_room.can_grow(layer)]
    assert [layer for layer in growing.layers if "_room" in vars(layer)] == every
    pair = [value.requires_grad_() for value in some(1)]
    for cache in (growing, plain):
        cache.layers = [DynamicLayer()]
        for _ in range(12):  # what a gradient needs is not overwritten
            keys, values = cache.update(*pair, 0)
        assert "_room" not in vars(cache.layers[0])
        (keys * values).sum().backward()


@pytest.mark.usefixtures("small_layers_have_room")
@pytest.mark.parametrize("length", [20, 21, 24])
def test_room_of_another_layer_is_not_written(length: int) -> None:
    """Two layers with the same first tokens and the same room: each goes on with its own."""
    first, plain = DynamicLayer(), DynamicLayer()
    for tokens in (20, 1, 3):
        both(first, plain, tokens)
    second, other_plain = copy.copy(first), copy.copy(plain)
    for layer in (second, other_plain):
        layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
    for pair in ((second, other_plain), (first, plain), (second, other_plain)):
        both(*pair, 2)
        for layer, expected in ((first, plain), (second, other_plain)):
            assert torch.equal(layer.keys, expected.keys)
            assert torch.equal(layer.values, expected.values)


@LAYERS
@pytest.mark.usefixtures("small_layers_have_room")
@pytest.mark.parametrize("seed", range(4))
def test_any_operations_on_a_layer(kind: Callable[[], DynamicLayer], seed: int) -> None:
    """Cut, copied with and without its tensors, both copies going on, put back to tensors of before, or given other
    `data`."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    pairs = [(kind(), kind())]
    both(*pairs[0], 20)
    saved = (0, pairs[0][0].keys, pairs[0][0].values, pairs[0][1].keys, pairs[0][1].values)
    for _ in range(150):
        index = chance.randrange(len(pairs))
        layer, plain = pairs[index]
        match chance.choice(["append"] * 6 + ["cut", "fork", "clone", "keep", "put back", "data"]):
            case "append":
                both(layer, plain, chance.randint(1, 5))
            case "cut" if not is_window(layer):
                for target in (layer, plain):
                    target.crop(-min(3, target.get_seq_length() - 1))
            case "fork" if len(pairs) < 4:
                pairs.append((copy.copy(layer), copy.copy(plain)))
            case "clone" if len(pairs) < 4:
                pairs.append((copy.deepcopy(layer), copy.deepcopy(plain)))
            case "keep":
                saved = (index, layer.keys, layer.values, plain.keys, plain.values)
            case "put back":
                layer, plain = pairs[saved[0]]
                layer.keys, layer.values, plain.keys, plain.values = saved[1:]
            case "data" if layer.keys.shape[2] > 3:
                begin = chance.choice([0, 2])
                for tensor in (layer.keys, layer.values, plain.keys, plain.values):
                    tensor.data = tensor.data[:, :, begin : begin - 2 or None]
        for layer, plain in pairs:
            assert torch.equal(layer.keys, plain.keys)
            assert torch.equal(layer.values, plain.values)


@pytest.mark.usefixtures("small_layers_have_room")
def test_a_window_of_one_token_keeps_all_as_transformers_does() -> None:
    layer, plain = DynamicSlidingWindowLayer(1), DynamicSlidingWindowLayer(1)
    for tokens in (20, 1, 1):
        both(layer, plain, tokens)


def test_a_window_that_records_its_past_gets_no_room() -> None:
    layer, plain = window(), window()
    for tokens in (20, 1, 1, 5):
        both(layer, plain, tokens)
    for each in (layer, plain):
        each.activate_past_recording()
    for tokens in (1, 3):
        both(layer, plain, tokens)
    for each in (layer, plain):
        each.crop(-2)
    both(layer, plain, 1)


IDS = torch.randint(3, 270, (40,), generator=torch.Generator().manual_seed(1)).tolist()
FIRST, SECOND = 20, 30
"""Tokens before a snapshot, and in all before the cache is cut."""
SHORT = ("llama", "gemma3", "falcon_h1")
NAMES = [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in ("mistral", "gemma4", "qwen3_next", "zaya"))]
"""Every kind of layer; the short run has full attention alone, with sliding windows, and with a state."""


def made(folder: Path, name: str) -> Any:
    if family_of(name).model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip("transformers does not know it")
    return plain_model(build_checkpoint(folder, family_of(name), tied=family_of(name).ties[0], tokenizer=False))


@torch.no_grad()
def logits(model: Any, conversation: ConversationCache, until: int) -> torch.Tensor:
    """Of all tokens that the cache lacks, (tokens, vocabulary)."""
    ids = torch.tensor([IDS[len(conversation.ids) : until]])
    output: torch.Tensor = model(ids, past_key_values=conversation.cache, use_cache=True).logits[0]
    conversation.ids = IDS[:until]
    return output


def filled(model: Any) -> ConversationCache:
    conversation = ConversationCache(model)
    logits(model, conversation, FIRST)
    conversation.snapshot(IDS[:FIRST])
    logits(model, conversation, SECOND)
    return conversation


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_goes_back_to_what_it_was(tmp_path: Path, name: str) -> None:
    model = made(tmp_path, name)
    assert keeps(model)
    whole = model(torch.tensor([IDS])).logits[0].detach()
    cuttable = name == "llama"
    for length in (SECOND + 5, SECOND, SECOND - 1, FIRST + 1, FIRST, FIRST - 1, 1, 0):
        conversation = filled(model)
        length_now = conversation.crop(length)
        assert length_now == (min(length, SECOND) if cuttable or length >= SECOND else FIRST if length >= FIRST else 0)
        assert conversation.ids == IDS[:length_now]
        torch.testing.assert_close(logits(model, conversation, len(IDS)), whole[length_now:], rtol=0, atol=1e-4)
        again = conversation.crop(FIRST)  # the snapshot is still good, although it was used
        assert again == (FIRST if length_now >= FIRST or cuttable else 0)
        torch.testing.assert_close(logits(model, conversation, len(IDS)), whole[again:], rtol=0, atol=1e-4)


def test_an_unslid_window_is_cropped(tmp_path: Path) -> None:
    model = made(tmp_path, "mistral")
    whole = model(torch.tensor([IDS])).logits[0].detach()
    conversation = ConversationCache(model)
    logits(model, conversation, WINDOW - 1)
    assert conversation.crop(3) == 3
    torch.testing.assert_close(logits(model, conversation, len(IDS)), whole[3:], rtol=0, atol=1e-4)
    assert conversation.crop(len(IDS) - 1) == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers", [1, 2])
def test_recovery_from_an_aborted_pass(tmp_path: Path, name: str, layers: int) -> None:
    """After so many layers had taken its tokens, and the others had not."""
    model = made(tmp_path, name)
    whole = model(torch.tensor([IDS])).logits[0].detach()

    def stop(module: Any, args: Any) -> None:
        raise KeyboardInterrupt

    conversation = filled(model)
    hook = model.get_decoder().layers[layers].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        logits(model, conversation, SECOND + 3)
    hook.remove()
    length = conversation.recover(SECOND, IDS)
    assert length == (SECOND if name == "llama" else FIRST)
    torch.testing.assert_close(logits(model, conversation, len(IDS)), whole[length:], rtol=0, atol=1e-4)


def test_an_aborted_first_pass_leaves_an_empty_cache(tmp_path: Path) -> None:
    model = made(tmp_path, "llama")
    conversation = ConversationCache(model)
    logits(model, conversation, 5)
    assert conversation.recover(0, []) == 0
    assert (conversation.ids, conversation.nbytes) == ([], 0)


def test_size_of_a_conversation_cache(tmp_path: Path) -> None:
    """KV cache, float32: 3 layers, 2 heads of 16; of windows only so many tokens, and once more for the snapshot."""
    per_token = 2 * 2 * 16 * 4
    assert filled(made(tmp_path / "a", "llama")).nbytes == 3 * SECOND * per_token
    windows = filled(made(tmp_path / "b", "mistral")).nbytes
    assert windows == pytest.approx(2 * 3 * (WINDOW - 1) * per_token, abs=100)


def test_the_number_of_snapshots_is_limited(tmp_path: Path) -> None:
    model = made(tmp_path, "mistral")
    conversation, sizes = ConversationCache(model), []
    for length in range(10, 40, 3):
        logits(model, conversation, length)
        conversation.snapshot(IDS[:length])
        sizes.append(conversation.nbytes)
    assert len(set(sizes[2:])) == 1


def test_every_listed_type_is_tested() -> None:
    """By the long test of `test_session`, which goes through these families, and one that has a class for pictures
    alone by that of `test_lookahead`."""
    assert {family.model_type for family in HYBRIDS.values()} >= CONTINUING - {"glm5_next_text"}
