"""In which order a layer file holds its tensors: each once, no holes, aligned, and those of an expert together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import conversion_mapping
from transformers.core_model_loading import WeightConverter

from benchmarks import qwen3_next
from rabbitllm.formats.safetensors_file import TensorToWrite
from rabbitllm.formats.tensor_spec import TensorSpec, byte_size
from rabbitllm.quant.compression import stored_form
from rabbitllm.store.layer_file import BY_NAME, EXPERTS_TOGETHER, in_order

LAYER = "model.layers.7"


def stored(names: Iterable[str], shape: tuple[int, ...], compression: str | None = None) -> list[TensorToWrite]:
    specs = (TensorSpec(name, "BF16", shape, "shard", 0, byte_size("BF16", shape)) for name in names)
    return [part for spec in specs for part in stored_form(spec, compression).parts]


def begins(parts: Sequence[TensorToWrite]) -> dict[str, int]:
    ends = itertools.accumulate(part.nbytes for part in parts)
    return {part.name: end - part.nbytes for part, end in zip(parts, ends, strict=True)}


def names(parts: Iterable[TensorToWrite]) -> list[str]:
    return [part.name for part in parts]


WS = ("w1", "w3", "w2")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "fc1", "fc2", "odd.one")
LEAVES = ("weight", "weight_scale_inv", "weight.4bit.absmax", "weight.4bit.quant_map", "bias", "weight.8bit.code")
EXPERT_NAMES = st.builds(
    "{}experts.{}.{}.{}".format,
    st.sampled_from(["", "model.layers.7.mlp.", "model.layers.7.block_sparse_moe."]),
    st.integers(0, 12),
    st.sampled_from(PROJECTIONS),
    st.sampled_from(LEAVES),
)
OTHER_NAMES = st.one_of(
    st.sampled_from(["mlp.experts.gate_up_proj", "mlp.gate.weight", "mlp.shared_experts.gate_proj.weight", "norm"]),
    st.text(min_size=1),
)
SIZES = st.one_of(
    st.sampled_from([0, 1, 63, 64, 96, 128, 4032, 4096, 8192, 12288]), st.integers(0, 9000), st.integers(0, 4)
)
PARTS = st.lists(
    st.builds(lambda name, size: TensorToWrite(name, "U8", (size,)), st.one_of(EXPERT_NAMES, OTHER_NAMES), SIZES),
    unique_by=lambda part: part.name,
)


@given(PARTS, st.sampled_from([BY_NAME, EXPERTS_TOGETHER]), st.randoms())
def test_each_part_once_aligned_and_in_an_order_of_its_own(
    parts: list[TensorToWrite], version: int, random: object
) -> None:
    ordered = in_order(parts, version)
    assert sorted(names(ordered)) == sorted(names(parts))
    for part in ordered:
        if part.nbytes % 64 == 0:
            assert begins(ordered)[part.name] % 64 == 0
        if part.nbytes % 4096 == 0 and (version == BY_NAME or "experts." not in part.name):
            assert begins(ordered)[part.name] % 4096 == 0
    random.shuffle(parts)  # type: ignore[attr-defined]
    assert in_order(parts, version) == ordered


@given(
    experts=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 300).map(lambda lines: 64 * lines), min_size=2, max_size=2),
    whole_blocks=st.booleans(),
    others=PARTS,
)
def test_an_expert_is_one_run_of_bytes(
    experts: int, sizes: list[int], whole_blocks: bool, others: list[TensorToWrite]
) -> None:
    if whole_blocks:
        sizes = [-(-size // 4096) * 4096 for size in sizes]
    payload, scales = sizes
    of_expert = [
        [
            TensorToWrite(f"x.experts.{number}.{projection}.{leaf}", "U8", (size,))
            for leaf, size in (("weight", payload), ("weight.4bit.absmax", scales))
            for projection in ("gate_proj", "up_proj", "down_proj")
        ]
        for number in range(experts)
    ]
    others = [part for part in others if not part.name.startswith("x.")]
    ordered = in_order([*others, *itertools.chain(*of_expert)])
    place = begins(ordered)
    stride = 3 * (payload + scales)
    for number, parts in enumerate(of_expert):
        begin = place[parts[0].name]
        assert begin == place[of_expert[0][0].name] + number * stride
        assert begin % (4096 if payload % 4096 == scales % 4096 == 0 else 64) == 0
        assert [place[part.name] - begin for part in parts] == [
            *range(0, 3 * payload, payload),
            *range(3 * payload, stride, scales),
        ]


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_gate_and_up_of_a_published_model(compression: str | None) -> None:
    """Qwen3-Coder-Next's first layer: 512 experts."""
    config = {**qwen3_next.QWEN3_CODER_NEXT, "num_hidden_layers": 1}
    layer = [tensor for tensor in qwen3_next.tensors(config) if ".layers.0." in tensor.name]
    parts = [part for tensor in layer for part in stored([tensor.name], tensor.shape, compression)]
    place = begins(in_order(parts))
    size = {part.name: part.nbytes for part in parts}
    experts = [f"model.layers.0.mlp.experts.{number}" for number in range(512)]
    runs = ["weight", f"weight.{compression}.absmax"] if compression else ["weight"]
    one = sum(size[f"{experts[0]}.{which}_proj.{leaf}"] for which in ("gate", "up", "down") for leaf in runs)
    for number, expert in enumerate(experts):
        for leaf in runs:
            gate, up, down = (f"{expert}.{which}_proj.{leaf}" for which in ("gate", "up", "down"))
            assert place[up] == place[gate] + size[gate]
            assert place[down] == place[up] + size[up]
        begin = place[f"{expert}.gate_proj.weight"]
        assert begin == place[f"{experts[0]}.gate_proj.weight"] + number * one
        assert begin % (64 if compression == "8bit" else 4096) == 0


def test_what_does_not_fill_a_cache_line_does_not_move_the_others() -> None:
    parts = [
        TensorToWrite(f"experts.{number}.{which}_proj.{leaf}", "U8", (size,))
        for number in (0, 1)
        for which in ("down", "gate", "up")
        for leaf, size in (("weight", 4096), ("weight_scale", 2))
    ]
    assert [name.removeprefix("experts.").replace("_proj", "") for name in names(in_order(parts))] == [
        *("0.gate.weight", "0.up.weight", "0.down.weight", "1.gate.weight", "1.up.weight", "1.down.weight"),
        *("0.gate.weight_scale", "0.up.weight_scale", "0.down.weight_scale"),
        *("1.gate.weight_scale", "1.up.weight_scale", "1.down.weight_scale"),
    ]


def test_published_block_scales_lie_with_their_expert() -> None:
    """DeepSeek-V3's FP8: a float32 scale for each 128 x 128."""
    shapes = {"gate_proj": (2048, 7168), "up_proj": (2048, 7168), "down_proj": (7168, 2048)}
    parts = [TensorToWrite("model.layers.3.mlp.gate.weight", "BF16", (256, 7168))]
    for number, (projection, (rows, columns)) in itertools.product(range(3), shapes.items()):
        name = f"model.layers.3.mlp.experts.{number}.{projection}.weight"
        parts += [
            TensorToWrite(name, "F8_E4M3", (rows, columns)),
            TensorToWrite(f"{name}_scale_inv", "F32", (rows // 128, 56)),
        ]
    ordered = [name.removeprefix("model.layers.3.mlp.") for name in names(in_order(parts))]
    one = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    one += [f"{name}_scale_inv" for name in one]
    assert ordered == ["gate.weight", *(f"experts.{number}.{name}" for number in range(3) for name in one)]


def test_tables_lie_behind_everything_of_their_size() -> None:
    matrices = [f"experts.{number}.{which}.weight" for number in (0, 1) for which in ("w1", "w2", "w3")]
    parts = [
        *stored(matrices, (64, 64), "4bit"),
        *stored(["z.weight"], (64, 64), "4bit"),
        TensorToWrite("odd", "U8", (7,)),
    ]
    ordered = names(in_order(parts))
    run = [f"experts.{n}.{w}.{leaf}" for n in (0, 1) for leaf in ("weight", "weight.4bit.absmax") for w in WS]
    assert ordered[: len(run)] == run
    fused = [f"experts.{number}.{which}.weight" for number in (0, 1) for which in WS]
    maps = [f"{name}.4bit.quant_map" for name in fused]
    states = [f"{name}.4bit.quant_state.bitsandbytes__nf4" for name in fused]
    others = ["z.weight", "z.weight.4bit.absmax", "z.weight.4bit.quant_map"]
    odd = ["odd", "z.weight.4bit.quant_state.bitsandbytes__nf4"]
    assert ordered[len(run) :] == [*others, *maps, *odd, *states]


def test_the_first_version_goes_by_size_and_name() -> None:
    parts = stored([f"experts.{n}.{which}_proj.weight" for n in (10, 2) for which in ("up", "gate", "down")], (64, 64))
    assert names(in_order(parts, BY_NAME)) == [
        f"experts.{n}.{which}_proj.weight" for n in (2, 10) for which in ("down", "gate", "up")
    ]
    assert names(in_order(parts)) == [
        f"experts.{n}.{which}_proj.weight" for n in (2, 10) for which in ("gate", "up", "down")
    ]


def fusions() -> list[tuple[str, ...]]:
    """The source patterns of every conversion of transformers that fuses matrices of experts."""
    mapping = conversion_mapping._build_checkpoint_conversion_mapping()
    found = {
        tuple(entry.source_patterns)
        for entries in mapping.values()
        for entry in entries
        if isinstance(entry, WeightConverter) and len(entry.source_patterns) > 1
    }
    return sorted(patterns for patterns in found if all("experts.*." in pattern for pattern in patterns))


@pytest.mark.parametrize("patterns", fusions())
def test_what_transformers_fuses_is_adjacent_in_its_order(patterns: tuple[str, ...]) -> None:
    tensors = [pattern.replace("\\", "").replace("*", "3").strip("$^") for pattern in patterns]
    others = [
        "x.experts.3.down_proj.weight",
        "x.experts.3.w2.weight",
        "x.experts.4.w1.weight",
    ]
    full = [f"x.{name.lstrip('.')}" for name in tensors]
    ordered = names(in_order(stored([*reversed(full), *others], (64, 64))))
    at = ordered.index(full[0])
    assert ordered[at : at + len(full)] == full
