"""What a checkpoint is made of, of plans that exist as headers only, against counts done by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, byte_size
from rabbitllm.quant.compression import is_compressible
from rabbitllm.splitter import split_estimate
from rabbitllm.splitter.plan import PlannedShard
from rabbitllm.splitter.split_estimate import TensorGroup
from tests.support.plans import plan_of, shard_of


def spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, dtype, shape, "s", 0, byte_size(dtype, shape))


def special() -> tuple[PlannedShard, ...]:
    """Two shards with one of everything that is not an ordinary weight."""
    first = shard_of(
        "model-1.safetensors",
        {
            "model.embed_tokens.weight": ("BF16", (128, 64)),
            "model.layers.0.self_attn.q_proj.weight": ("BF16", (64, 64)),
            "model.layers.0.mlp.gate.weight": ("BF16", (8, 1024)),
            "model.layers.0.conv1d.weight": ("F32", (128, 1, 64)),
            "model.layers.0.A_log": ("F32", (128, 64)),
            "model.layers.0.mlp.experts.down_proj_bias": ("BF16", (64, 65)),
            "model.layers.0.patch.weight": ("BF16", (8, 8, 16, 16)),
        },
    )
    second = shard_of(
        "model-2.safetensors",
        {
            "model.layers.0.fp8.weight": ("F8_E4M3", (64, 64)),
            "model.layers.0.small.weight": ("BF16", (4, 4)),
            "model.layers.0.tiny.weight": ("BF16", (2, 4)),
            "model.layers.0.steps": ("I64", (3,)),
            "model.layers.0.mask": ("BOOL", (5, 5)),
            "model.layers.0.scale": ("F32", ()),
            "model.layers.0.nothing": ("F32", (0, 64)),
            "model.norm.weight": ("BF16", (64,)),
        },
    )
    return first, second


def test_anatomy_of_a_checkpoint_with_everything() -> None:
    shards = special()
    plan = plan_of(shards)
    found = split_estimate.anatomy_of(plan, {"tie_word_embeddings": True})
    assert found.total_bytes == sum(shard.size for shard in shards)
    assert (found.shards, found.largest_shard_bytes) == (2, max(shard.size for shard in shards))
    assert (found.layers, found.largest_layer) == (3, "layers.0")
    assert found.largest_layer_bytes == plan.layouts["layers.0"].size
    assert found.tensors == 15
    floating = 128 * 64 + 64 * 64 + 8 * 1024 + 128 * 64 + 128 * 64 + 8 * 8 * 16 * 16 + 64 * 65 + 64 * 64 + 89
    assert found.parameters == floating
    assert found.tied_embeddings is True
    assert found.never_compressed == (
        TensorGroup("convolution", 1, 128 * 64 * 4),
        TensorGroup("more than 3 dimensions", 1, 8 * 8 * 16 * 16 * 2),
        TensorGroup("state-space decay", 1, 128 * 64 * 4),
        TensorGroup("expert router", 1, 8 * 1024 * 2),
        TensorGroup("biases of experts", 1, 64 * 65 * 2),
        TensorGroup("F8_E4M3 already", 1, 64 * 64),
        TensorGroup("under 4,096 elements", 2, 32 + 16),
    )
    assert found.not_floating == (TensorGroup("BOOL", 1, 25), TensorGroup("I64", 1, 24))
    assert (found.empty, found.scalars) == (1, 1)
    assert (found.layers_over_shards, found.most_shards_of_a_layer) == (1, 2)


@pytest.mark.parametrize(
    ("head", "config", "tied"),
    [
        (None, {"tie_word_embeddings": True}, True),
        (None, {"text_config": {"tie_word_embeddings": True}}, True),
        (None, {"tie_word_embeddings": False}, None),
        (None, {}, None),
        (None, {"tie_word_embeddings": "yes", "text_config": 7}, None),
        ("lm_head.weight", {"tie_word_embeddings": True}, False),
        ("model.lm_head.weight", {}, False),
        ("embed_out.weight", {}, False),
        ("output.weight", {}, False),
    ],
)
def test_tied_embeddings(head: str | None, config: Mapping[str, object], tied: bool | None) -> None:
    tensors = {"model.embed_tokens.weight": ("BF16", (64, 64)), "model.layers.0.output.dense": ("BF16", (8,))}
    tensors |= {head: ("BF16", (64, 64))} if head else {}
    assert split_estimate.anatomy_of(plan_of((shard_of("a", tensors),)), config).tied_embeddings is tied


ORDINARY = ("w.weight", "mlp.gate_proj.weight")
NAMES = (*ORDINARY, "mlp.gate.weight", "router.weight", "conv1d.weight", "A_log", "a.Conv.b", "a.bias")
SHAPES = ((), (0, 64), (4096,), (63, 65), (64, 64), (1024, 64), (1025, 64), (4, 32, 32), (2, 2, 32, 32), (1, 2, 3, 4))


def test_a_reason_is_named_for_what_is_not_compressed_and_for_nothing_else() -> None:
    reasons = set()
    for name in NAMES:
        for shape in SHAPES:
            for dtype in DTYPES:
                if DTYPES[dtype].bits < 8:
                    continue
                tensor = spec(name, dtype, shape)
                why = split_estimate.why_never_compressed(tensor)
                reasons.add(why)
                ordinary = split_estimate.is_floating(tensor) and len(shape) >= 2 and tensor.elements
                assert (why is None) == (not ordinary or is_compressible(tensor)), tensor
    assert {"expert router", "convolution", "state-space decay", "biases of experts"} < reasons
    assert {"more than 3 dimensions", "F64 already"} < reasons


def test_which_dtypes_are_floating() -> None:
    others = {name for name in DTYPES if not split_estimate.is_floating(spec("w", name, (2, 2)))}
    assert others == {"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64"}


def test_what_the_quantizer_is_measured_with() -> None:
    tensors = {"model.layers.0.a": ("F32", (64, 64)), "model.layers.0.b": ("BF16", (64, 256))}
    assert split_estimate.commonest_dtype(plan_of((shard_of("a", tensors),))) == "BF16"
    assert split_estimate.commonest_dtype(plan_of((shard_of("a", {"model.norm.weight": ("F32", (4096,))}),))) is None


def test_layers_above_10_gb() -> None:
    plan = plan_of((shard_of("a", {"model.layers.0.w": ("BF16", (80_000, 65_536)), "lm_head.w": ("BF16", (64, 64))}),))
    assert split_estimate.big_layers(plan) == ("layers.0",)
    assert split_estimate.big_layers(plan_of(plan.shards, "8bit")) == ()
