"""Layer -> shards, layer -> tensors, and when a layer has all it needs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.checkpoints.naming import LayerName, assign_layers
from rabbitllm.splitter.plan import LayerMap, build_layer_map

A, B, C = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
WEIGHT_MAP = {
    "lm_head.weight": C,
    "model.embed_tokens.weight": A,
    "model.layers.0.mlp.down_proj.weight": B,
    "model.layers.0.self_attn.q_proj.weight": A,
    "model.layers.0.input_layernorm.weight": C,
    "model.layers.1.self_attn.q_proj.weight": B,
    "model.layers.10.self_attn.q_proj.weight": C,
    "model.layers.2.self_attn.q_proj.weight": C,
    "model.norm.weight": C,
}


def mapped(weight_map: Mapping[str, str]) -> LayerMap:
    return build_layer_map(weight_map, assign_layers(list(weight_map), "llama"))


def test_layer_to_shards() -> None:
    assert mapped(WEIGHT_MAP).layer_to_shards == {
        "embed_tokens": {A},
        "layers.0": {A, B, C},
        "layers.1": {B},
        "layers.2": {C},
        "layers.10": {C},
        "norm": {C},
        "lm_head": {C},
    }


def test_layer_to_tensors() -> None:
    found = mapped(WEIGHT_MAP).layer_to_tensors
    assert found["layers.0"] == (
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.input_layernorm.weight",
    )
    assert sorted(tensor for tensors in found.values() for tensor in tensors) == sorted(WEIGHT_MAP)


def test_shard_to_layers() -> None:
    found = mapped(WEIGHT_MAP).shard_to_layers
    assert {shard: set(layers) for shard, layers in found.items()} == {
        A: {"embed_tokens", "layers.0"},
        B: {"layers.0", "layers.1"},
        C: {"layers.0", "layers.2", "layers.10", "norm", "lm_head"},
    }
    assert all(len(set(layers)) == len(layers) for layers in found.values())


def test_layers_are_in_the_order_of_a_pass() -> None:
    found = mapped(WEIGHT_MAP)
    expected = ["embed_tokens", "layers.0", "layers.1", "layers.2", "layers.10", "norm", "lm_head"]
    assert list(found.layers) == list(found.layer_to_tensors) == list(found.layer_to_shards) == expected
    assert found.layers["layers.10"] == LayerName("layers.10", "model.layers.10")


def test_tied_head_is_in_no_shard_and_is_no_layer() -> None:
    tied = {tensor: shard for tensor, shard in WEIGHT_MAP.items() if not tensor.startswith("lm_head")}
    assert "lm_head" not in mapped(tied).layers


def test_no_tensors() -> None:
    assert mapped({}) == LayerMap({}, {}, {}, {})


# Completion


@pytest.mark.parametrize(
    ("processed", "shard", "completed"),
    [
        ([], A, {"embed_tokens"}),
        ([], B, {"layers.1"}),
        ([], C, {"layers.2", "layers.10", "norm", "lm_head"}),
        ([A], B, {"layers.1"}),
        ([A, B], C, {"layers.0", "layers.2", "layers.10", "norm", "lm_head"}),
        ([A, C], B, {"layers.0", "layers.1"}),
        ([C, B], A, {"layers.0", "embed_tokens"}),
        ([A, B, C], C, {"layers.0", "layers.2", "layers.10", "norm", "lm_head"}),
        ([A, B, C], "unknown.safetensors", set()),
        (["unknown.safetensors", A], B, {"layers.1"}),
    ],
)
def test_layers_completed_by_a_shard(processed: list[str], shard: str, completed: set[str]) -> None:
    assert set(mapped(WEIGHT_MAP).completed_by(shard, processed)) == completed


class Noticing(dict[str, frozenset[str]]):
    """A table that notes which keys are looked up, and cannot be walked."""

    def __init__(self, content: Mapping[str, frozenset[str]]) -> None:
        super().__init__(content)
        self.asked: list[str] = []

    def __getitem__(self, key: str) -> frozenset[str]:
        self.asked.append(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("every layer was looked at")


def test_only_touched_layers_are_looked_at() -> None:
    whole = mapped({f"model.layers.{number}.w": f"shard-{number // 2}" for number in range(2000)})
    noticing = Noticing(whole.layer_to_shards)
    found = LayerMap(whole.layers, whole.layer_to_tensors, noticing, whole.shard_to_layers)
    assert set(found.completed_by("shard-7", ["shard-0"])) == {"layers.14", "layers.15"}
    assert sorted(noticing.asked) == ["layers.14", "layers.15"]


PLACES = st.dictionaries(
    st.builds("model.layers.{}.w{}".format, st.integers(0, 6), st.integers(0, 6)),
    st.integers(0, 5).map("shard-{}".format),
    min_size=1,
)


@given(PLACES, st.randoms(use_true_random=False))
def test_every_layer_is_completed_once_whatever_the_order(weight_map: dict[str, str], chance: random.Random) -> None:
    found = mapped(weight_map)
    shards = list(dict.fromkeys(weight_map.values()))
    chance.shuffle(shards)
    done: list[str] = []
    completed: list[str] = []
    for shard in shards:
        completed += found.completed_by(shard, done)
        done.append(shard)
        assert set(completed) == {layer for layer in found.layers if needs(weight_map, layer) <= set(done)}
    assert sorted(completed) == sorted(found.layers)


def needs(weight_map: Mapping[str, str], layer: str) -> set[str]:
    holders: Iterable[str] = (shard for tensor, shard in weight_map.items() if tensor.startswith(f"model.{layer}."))
    return set(holders)
