"""An attention with an index attends to the tokens that its class chooses, with its class's cache, and notices what
changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from rabbitllm.engine import _attention
from rabbitllm.engine._attention import relative_error
from rabbitllm.engine.kv_room import IndexRoom
from rabbitllm.engine.transformers_api import DynamicIndexedLayer
from rabbitllm.engine.turns import taking_turns
from rabbitllm.generation.kv_cache import drop_last
from tests.engine.test_attention import ROUNDING
from tests.engine.test_siblings import PROMPT, checkpoint
from tests.engine.test_streams import KINDS, SETTINGS
from tests.support.hybrid_families import HYBRIDS
from tests.support.kernel_rows import plain_products as plain_products
from tests.support.tiny_models import load

qwen4_exp = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
pytestmark = [pytest.mark.bits, pytest.mark.usefixtures("plain_products")]
TOKENS = 70
ANGLES = torch.randn(2, TOKENS, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
Change = Callable[[pytest.MonkeyPatch, Any], None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each token of an attention by itself was one call."""
    computed, compute = list[bool](), _attention._indexed_step

    def counted(*args: Any) -> Any:
        result = compute(*args)
        computed.append(result is not None)
        return result

    monkeypatch.setattr(_attention, "_indexed_step", counted)
    return computed


def attention(tmp_path: Path, compression: str | None = "q8_0", **options: Any) -> Any:
    """The attention of a model's second layer, with the KV cache of its own."""
    directory = checkpoint(tmp_path, HYBRIDS["qwen4_exp"], compression, **SETTINGS, **options)
    return load(directory, exact=False, fast_bfloat16=True).model.layers[KINDS.index("indexed_attention")].self_attn


def empty(attn: Any) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [DynamicIndexedLayer() for _ in range(attn.layer_idx + 1)]
    return cache


def layer_of(attn: Any, cache: DynamicCache) -> Any:
    return cache.layers[attn.layer_idx]


@torch.no_grad()
def computed(attn: Any, cache: DynamicCache, x: torch.Tensor, *, by_class: bool, hidden: int | None = None) -> Any:
    """What an attention makes of the next tokens, whose mask may hide one of the others."""
    rows, past = x.shape[1], layer_of(attn, cache).get_seq_length()
    count = past + rows
    mask = torch.ones(rows, count, dtype=torch.bool).tril(past)[None, None].repeat(len(x), 1, 1, 1)
    if hidden is not None:
        mask[..., hidden] = False
    angles = tuple(each[None, :count].repeat(len(x), 1, 1) for each in ANGLES)
    function = type(attn).forward if by_class else type(attn).__call__
    return function(attn, x, angles, attention_mask=mask, cache=cache)[0]


def tokens(attn: Any, seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (1, 1)), attn.q_proj.in_features, generator=generator).bfloat16()


def kept(attn: Any, cache: DynamicCache) -> list[torch.Tensor]:
    layer = layer_of(attn, cache)
    return [layer.keys, layer.values, layer.indexer_keys]


def assert_alike(attn: Any, caches: list[DynamicCache], x: torch.Tensor, hidden: int | None = None) -> None:
    """Both ways compute nearly the same, and keep the same."""
    got, expected = (computed(attn, c, x, by_class=n == 1, hidden=hidden) for n, c in enumerate(caches))
    assert relative_error(got, expected) < 2 * ROUNDING
    assert all(map(torch.equal, *(kept(attn, cache) for cache in caches)))


@pytest.mark.parametrize(
    ("compression", "budget", "ratio"), [("q8_0", 8, 2), ("4bit", 16, 4), (None, 8, 4), (None, 12, 3), (None, 1000, 4)]
)
def test_many_tokens(tmp_path: Path, compression: str | None, budget: int, ratio: int, calls: list[bool]) -> None:
    attn = attention(tmp_path, compression, indexer_budget=budget, indexer_compress_ratio=ratio)
    caches = [empty(attn), empty(attn)]
    for step in range(TOKENS):
        if step == TOKENS // 2:
            torch.set_num_threads(1 if (threads := torch.get_num_threads()) > 1 else 2)
        assert_alike(attn, caches, tokens(attn, step))
    torch.set_num_threads(threads)
    assert calls == [False] + [True] * (TOKENS - 1)


@torch.no_grad()
def test_of_equal_scores_those_are_chosen_that_torch_chooses(tmp_path: Path, calls: list[bool]) -> None:
    attn = attention(tmp_path, None)
    attn.indexer.index_qk_proj.weight.data[: 4 * 64] = 0
    caches = [empty(attn), empty(attn)]
    for step in range(TOKENS):
        assert_alike(attn, caches, tokens(attn, step))
    assert sum(calls) == TOKENS - 1


@torch.no_grad()
def test_what_is_no_number_ends_in_none(tmp_path: Path, calls: list[bool]) -> None:
    attn = attention(tmp_path, None)
    cache = empty(attn)
    computed(attn, cache, tokens(attn, 0, 1, 40), by_class=True)
    layer_of(attn, cache).indexer_keys[:, ::3] = torch.nan
    for step in range(8):
        assert computed(attn, cache, tokens(attn, step), by_class=False).isfinite().all()
    assert computed(attn, cache, tokens(attn, 0) * torch.nan, by_class=False).isnan().all()
    assert calls == [True] * 9


def shortened(attn: Any, cache: DynamicCache, count: int) -> DynamicCache:
    layer_of(attn, cache).crop(-count)
    return cache


def dropped(attn: Any, cache: DynamicCache, count: int) -> DynamicCache:
    alone = DynamicCache()
    alone.layers = [layer_of(attn, cache)]
    drop_last(alone, count)
    return cache


def shared(attn: Any, cache: DynamicCache, count: int) -> DynamicCache:
    """A shallow copy, after which the first one gets other tokens, too."""
    other = copy.copy(cache)
    other.layers = list(map(copy.copy, cache.layers))
    for step in range(3):
        computed(attn, cache, tokens(attn, 900 + step), by_class=False)
    return other


def replaced(attn: Any, cache: DynamicCache, count: int) -> DynamicCache:
    layer_of(attn, cache).indexer_keys.data = layer_of(attn, cache).indexer_keys.flip(1)
    return cache


def in_chunks(attn: Any, cache: DynamicCache, count: int) -> DynamicCache:
    computed(attn, cache, tokens(attn, 800, 1, count), by_class=False)
    return cache


EDITS: dict[str, Callable[[Any, DynamicCache, int], DynamicCache]] = {
    "crop": shortened,
    "drop": dropped,
    "deep copy": lambda attn, cache, count: copy.deepcopy(cache),
    "shallow copy": shared,
    "other data": replaced,
    "chunk": in_chunks,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_cache_that_others_change(
    tmp_path: Path, edit: Callable[[Any, DynamicCache, int], DynamicCache], calls: list[bool]
) -> None:
    attn = attention(tmp_path, None)
    caches = [empty(attn), empty(attn)]
    for cache in caches:
        computed(attn, cache, tokens(attn, 0, 1, 20), by_class=True)
    for round in range(3):
        for step in range(6):
            assert_alike(attn, caches, tokens(attn, 100 * round + step))
        before = len(calls)
        caches = [edit(attn, cache, 3 + round) for cache in caches]
        del calls[before:]
        for step in range(3):
            assert_alike(attn, caches, tokens(attn, 50 + step))
    assert calls == [True] * 27


def test_a_block_s_key_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attn, lengths, make = attention(tmp_path, None), list[int](), IndexRoom.__init__

    def counted(self: Any, keys: torch.Tensor, tokens: int, *others: Any) -> None:
        lengths.append(tokens)
        make(self, keys, tokens, *others)

    monkeypatch.setattr(IndexRoom, "__init__", counted)
    cache = empty(attn)
    computed(attn, cache, tokens(attn, 0, 1, 20), by_class=True)
    for step in range(30):
        computed(attn, cache, tokens(attn, step), by_class=False)
    room = layer_of(attn, cache)._room
    assert lengths == [room.keys.shape[2]]
    assert room.index.done == 25


def test_other_rows_are_left_to_the_class(tmp_path: Path, calls: list[bool]) -> None:
    attn = attention(tmp_path, None)
    for count, rows, hidden in ((2, 1, None), (1, 3, None), (1, 1, 2)):
        caches = [empty(attn), empty(attn)]
        for cache in caches:
            computed(attn, cache, tokens(attn, 0, count, 20), by_class=True)
        for step in range(3):
            assert_alike(attn, caches, tokens(attn, step, count, rows), hidden)
    assert not any(calls)
    with taking_turns():
        assert_alike(attn, caches, tokens(attn, 0))
    caches = [empty(attn), empty(attn)]
    for cache in caches:
        computed(attn, cache, tokens(attn, 0, 1, 20), by_class=True)
        layer = layer_of(attn, cache)
        layer.update_indexer = lambda keys, layer=layer: DynamicIndexedLayer.update_indexer(layer, keys * 2)
    assert_alike(attn, caches, tokens(attn, 0))
    assert not any(calls)


def other_weight(name: str) -> Change:
    def change(patch: pytest.MonkeyPatch, attn: Any) -> None:
        part = attn.get_submodule(name)
        random = torch.randn(part.weight.shape, generator=torch.Generator().manual_seed(1))
        patch.setitem(part._parameters, "weight", nn.Parameter((4 * random).to(part.weight.dtype)))

    return change


def hooked(name: str) -> Change:
    return lambda patch, attn: patch.setitem(
        attn.get_submodule(name)._forward_hooks, 7, lambda module, args, output: output.flip(-1)
    )


CHANGES: dict[str, Change] = {
    **{f"weight of {name}": other_weight(f"indexer.{name}") for name in ("q_layernorm", "k_layernorm")},
    "weight of the Linear": other_weight("indexer.index_qk_proj"),
    **{f"hook on {name}": hooked(name) for name in ("indexer", "indexer.k_layernorm", "indexer.index_qk_proj")},
    "chosen": lambda patch, attn: patch.setattr(attn.indexer, "block_topk", 2),
    "ratio": lambda patch, attn: patch.setattr(attn.indexer, "compress_ratio", 1),
    "part": lambda patch, attn: patch.setitem(attn.indexer._modules, "q_layernorm", nn.LogSigmoid()),
    "class": lambda patch, attn: patch.setattr(
        type(attn.indexer),
        "forward",
        lambda self, x, angles, mask, cache: (
            cache.update_indexer(torch.zeros(1, 1, 64, dtype=x.dtype), self.layer_idx) is not None and mask
        ),
    ),
}


@torch.no_grad()
def test_a_change_between_two_tokens_is_noticed(
    tmp_path: Path, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    attn = attention(tmp_path, None)
    cache = empty(attn)
    computed(attn, cache, tokens(attn, 0, 1, 40), by_class=True)
    for step in range(2):
        computed(attn, cache, tokens(attn, step), by_class=False)
    x = tokens(attn, 7)

    def both() -> list[torch.Tensor]:
        """Both ways, each for a copy of the cache, which has keys of blocks already."""
        results = []
        for by_class in (False, True):
            results.append(computed(attn, cache, x, by_class=by_class))
            layer_of(attn, cache).crop(-1)
        return results

    before, _ = both()
    caches = [cache, copy.deepcopy(cache)]
    assert_alike(attn, caches, x)
    with monkeypatch.context() as patch:
        CHANGES["weight of k_layernorm"](patch, attn)
        assert_alike(attn, caches, tokens(attn, 8))  # also of blocks whose keys there were
    layer_of(attn, cache).crop(-2)
    for name, change in CHANGES.items():
        with monkeypatch.context() as patch:
            change(patch, attn)
            got, expected = both()
        assert relative_error(got, expected) < 2 * ROUNDING, name
        assert relative_error(got, before) > 8 * ROUNDING, name
        del calls[:]
        assert torch.equal(both()[0], before), name
        assert calls == [True], name


@torch.no_grad()
def test_a_model_past_its_budget_has_nearly_the_logits_of_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # all experts, of which rounding can choose no others
    settings = {**SETTINGS, "num_experts": 3, "num_experts_per_tok": 3}
    directory = checkpoint(tmp_path, HYBRIDS["qwen4_exp"], "q8_0", **settings)
    logits = list[torch.Tensor]()
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr("rabbitllm.engine.fusions.fuse_attention", lambda model: 0)
        model = load(directory, exact=False, fast_bfloat16=True)
        cache = DynamicCache(config=model.config)
        rows = [model(PROMPT.repeat(1, 5), cache=cache).logits[:, -1:]]
        rows += [model(torch.tensor([[step + 1]]), cache=cache).logits for step in range(40)]
        logits.append(torch.cat(rows, 1))
    assert torch.equal(logits[0][:, 0], logits[1][:, 0])
    assert not torch.equal(*logits)
    assert relative_error(*logits) < 8 * ROUNDING


def test_classes_that_choose_otherwise_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rabbitllm.engine.fusions import fuse_attention

    fused = list[int]()
    monkeypatch.setattr("rabbitllm.engine.fusions.fuse_attention", lambda model: fused.append(fuse_attention(model)))
    attn = attention(tmp_path, None)
    own = type(attn.indexer).forward
    others: list[Callable[..., Any]] = [
        lambda self, x, angles, mask, cache: own(self, x, angles, mask, cache) & mask.cumsum(-1).bool().flip(-1),
        lambda self, x, angles, mask, cache: ~own(self, x, angles, mask, cache),
        lambda self, x, angles, mask, cache: own(self, x, [each.roll(1, 1) for each in angles], mask, cache),
        lambda self, x, angles, mask, cache: own(self, x * 2, angles, mask, cache),
    ]
    for number, other in enumerate(others):
        monkeypatch.setattr(type(attn.indexer), "forward", other)
        attention(tmp_path / str(number), None)
    assert fused == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_angles_that_change_as_a_sequence_grows_are_left_to_the_class(
    tmp_path: Path, rope_type: str, calls: list[bool]
) -> None:
    """Those of blocks before change too."""
    attn = attention(tmp_path, None)
    attn.config.rope_parameters["rope_type"] = rope_type
    cache = empty(attn)
    for step in range(3):
        computed(attn, cache, tokens(attn, step), by_class=False)
    assert not any(calls)


@torch.no_grad()
def test_angles_of_all_tokens_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint(tmp_path, HYBRIDS["qwen4_exp"], None, **SETTINGS)
    counts, rotary_class = list[int](), qwen4_exp.Qwen4ExpTextRotaryEmbedding
    recompose = rotary_class.recomposition_frequencies
    monkeypatch.setattr(
        rotary_class, "recomposition_frequencies", lambda self, x: counts.append(1) or recompose(self, x)
    )
    rotary = load(directory, exact=False, fast_bfloat16=True).model.rotary_emb
    x = torch.zeros(1, 1, 8).bfloat16()

    def assert_same(ids: torch.Tensor, rows: int = 1) -> int:
        """How often the class was asked."""
        del counts[:]
        both = rotary(x.expand(-1, rows, -1), ids)
        count = len(counts) // 2
        assert all(map(torch.equal, both, type(rotary).forward(rotary, x, ids)))
        return count

    text = torch.arange(200).expand(3, 1, -1)
    image = torch.cat([text[..., :20], 20 + torch.randint(0, 9, (3, 1, 30)), text[..., 29:]], 2)
    assert [assert_same(text[..., : 10 + step]) for step in range(90)].count(1) == 3
    assert assert_same(text[..., :5]) == 0  # another sequence
    assert assert_same(image[..., :60]) == 1
    assert [assert_same(image[..., : 61 + step]) for step in range(30)] == [0] * 30
    assert assert_same(image[..., :60] + 1) == 1
    assert assert_same(text[..., :60], rows=3) == 1
    assert assert_same(text[..., :70], rows=9) == 0
    for rows, ids in ((60, text[..., :60]), (1, text[..., :60].repeat(1, 2, 1))):
        assert assert_same(ids, rows) == 1
    changes: list[Callable[[], Any]] = [
        lambda: rotary.inv_freq.mul_(2),
        lambda: setattr(rotary, "attention_scaling", 0.5),
        lambda: rotary.mrope_section.reverse(),
    ]
    for change in changes:
        assert assert_same(image[..., :60]) == 1
        change()
        assert assert_same(image[..., :60]) == 1
        assert assert_same(text[..., :60]) == 1
