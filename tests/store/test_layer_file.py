"""The offsets and the order of a layer's tensors and pieces, and the name of its file."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import conversion_mapping
from transformers.core_model_loading import WeightConverter

from benchmarks.lib import models
from rabbitllm.checkpoints.naming import LayerName
from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.safetensors_file import TensorToWrite, parse_header
from rabbitllm.formats.tensor_spec import DTYPES, TensorPiece, TensorSpec, byte_size
from rabbitllm.store.layer_file import (
    BY_NAME,
    EXPERTS_TOGETHER,
    Joined,
    LayerLayout,
    in_order,
    join,
    lay_out,
    layer_file_name,
)
from rabbitllm.store.stored_form import StoredForm, stored_form
from tests.support.draws import draws

LAYER = LayerName("layers.0", "model.layers.0")


def form(name: str, shape: tuple[int, ...], dtype: str = "BF16", compression: str | None = None) -> StoredForm:
    return stored_form(TensorSpec(name, dtype, shape, "shard", 0, byte_size(dtype, shape)), compression)


def order_of(layout: LayerLayout) -> list[str]:
    return sorted(layout.offsets, key=lambda name: (layout.offsets[name], name))


FORMS = [
    form("h.10.weight", (64, 64)),  # 8192 bytes: whole blocks
    form("h.2.weight", (64, 32)),  # 4096 bytes
    form("b", (160,)),  # 320 bytes: a multiple of 64
    form("a", (32,)),  # 64 bytes
    form("c", (7,)),  # 14 bytes: neither
    form("scalar", (), "F32"),
]


def test_order_and_alignment() -> None:
    layout = lay_out(LAYER, FORMS)
    assert order_of(layout) == ["h.2.weight", "h.10.weight", "a", "b", "c", "scalar"]
    assert len(layout.header) == 4096
    assert list(layout.offsets.values()) == [4096, 8192, 16384, 16448, 16768, 16782]
    assert layout.size == 16786
    assert layout.file_name == "model.layers.0.safetensors"


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_tensors_of_a_cache_line_are_aligned(compression: str | None) -> None:
    shapes = [(64, 64), (65, 67), (160, 64), (7,), (64,), (32,), (4096, 3), (1, 4100), (100, 100)]
    forms = [form(f"w{index}", shape, compression=compression) for index, shape in enumerate(shapes)]
    layout = lay_out(LAYER, forms)
    for part in (part for stored in forms for part in stored.parts):
        if part.nbytes % 4096 == 0:
            assert layout.offsets[part.name] % 4096 == 0
        elif part.nbytes % 64 == 0:
            assert layout.offsets[part.name] % 64 == 0


def test_layout_depends_only_on_the_tensors() -> None:
    expected = lay_out(LAYER, FORMS)
    for seed in range(10):
        layout = lay_out(LAYER, random.Random(seed).sample(FORMS, len(FORMS)))
        assert (layout.header, layout.offsets, layout.size) == (expected.header, expected.offsets, expected.size)


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_safetensors_reader_opens_the_file(tmp_path: Path, compression: str | None) -> None:
    forms = [form(f"w{index}", shape, compression=compression) for index, shape in enumerate([(65, 67), (9,), (0, 5)])]
    layout = lay_out(LAYER, forms)
    (tmp_path / layout.file_name).write_bytes(layout.header.ljust(layout.size, b"\0"))
    with safe_open(tmp_path / layout.file_name, framework="pt") as opened:
        assert set(opened.keys()) == {part.name for stored in forms for part in stored.parts}
    header = parse_header(layout.header[8:], layout.size, "f")
    assert {tensor.name: tensor.offset for tensor in header.tensors} == layout.offsets


def test_tensor_named_like_a_part_of_another() -> None:
    clashing = form("w.4bit.absmax", (68,), "F32")
    with pytest.raises(
        InvalidIndexError, match=r"Two tensors of layer layers.0 would be stored as 'w.4bit.absmax'"
    ) as bad:
        lay_out(LAYER, [form("w", (65, 67), compression="4bit"), clashing])
    assert "Remove compression." in str(bad.value)
    assert lay_out(LAYER, [form("w", (65, 67)), clashing]).offsets.keys() == {"w", "w.4bit.absmax"}


# File names


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("model.layers.0", "model.layers.0.safetensors"),
        ("lm_head", "lm_head.safetensors"),
        ("model.embed-tokens_2~", "model.embed-tokens_2~.safetensors"),
        ("../../etc/passwd", "%2E.%2F..%2Fetc%2Fpasswd.safetensors"),
        ("..", "%2E..safetensors"),
        (".hidden", "%2Ehidden.safetensors"),
        ("/abs", "%2Fabs.safetensors"),
        ("a\\b:c*d", "a%5Cb%3Ac%2Ad.safetensors"),
        ("a b", "a%20b.safetensors"),
        ("100%", "100%25.safetensors"),
        ("%2Ehidden", "%252Ehidden.safetensors"),
        ("слой", "%D1%81%D0%BB%D0%BE%D0%B9.safetensors"),
    ],
)
def test_file_name(stem: str, name: str) -> None:
    assert layer_file_name(stem) == name


def test_long_names_are_cut_and_stay_unique() -> None:
    stems = ["x" * 179, "x" * 180, "x" * 181, "x" * 5000, "x" * 5001, "猫" * 100, "猫" * 101, "猫" * 99 + "犬"]
    names = [layer_file_name(stem) for stem in stems]
    assert len(set(names)) == len(names)
    assert all(len(name.encode()) + len(".done") <= 255 for name in names)
    assert names[1] == "x" * 180 + ".safetensors"
    assert names[2].startswith("x" * 160 + "-")


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)


@given(st.lists(st.one_of(TEXT, st.text("./\\%2Ee", min_size=1)), min_size=2, unique=True))
@example([".", "%2E"])
@example(["/", "%2F", "%252F"])
def test_names_are_plain_and_unique(stems: list[str]) -> None:
    names = [layer_file_name(stem) for stem in stems]
    for first, second in itertools.combinations(names, 2):
        assert first != second
    for name in names:
        assert Path(name).name == name
        assert name.isascii()
        assert name.isprintable()
        assert not name.startswith(".")
        assert not set(name) & set('/\\:*?"<>| ')
        assert len(name) <= 200


LAYER_ORDER = "model.layers.7"


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
def test_each_part_is_aligned_and_appears_once(parts: list[TensorToWrite], version: int, random: object) -> None:
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
    other_parts=PARTS,
)
def test_expert_is_one_run_of_bytes(
    experts: int, sizes: list[int], whole_blocks: bool, other_parts: list[TensorToWrite]
) -> None:
    if whole_blocks:
        sizes = [-(-size // 4096) * 4096 for size in sizes]
    payload, scales = sizes
    of_expert = [
        [
            TensorToWrite(f"x.experts.{expert}.{projection}.{leaf}", "U8", (size,))
            for leaf, size in (("weight", payload), ("weight.4bit.absmax", scales))
            for projection in ("gate_proj", "up_proj", "down_proj")
        ]
        for expert in range(experts)
    ]
    other_parts = [part for part in other_parts if not part.name.startswith("x.")]
    ordered = in_order([*other_parts, *itertools.chain(*of_expert)])
    place = begins(ordered)
    stride = 3 * (payload + scales)
    for expert, parts in enumerate(of_expert):
        begin = place[parts[0].name]
        assert begin == place[of_expert[0][0].name] + expert * stride
        assert begin % (4096 if payload % 4096 == scales % 4096 == 0 else 64) == 0
        assert [place[part.name] - begin for part in parts] == [
            *range(0, 3 * payload, payload),
            *range(3 * payload, stride, scales),
        ]


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_gate_and_up_of_a_published_model(compression: str | None) -> None:
    """Qwen3-Coder-Next's first layer: 512 experts."""
    config = {**models.QWEN3_CODER_NEXT, "num_hidden_layers": 1}
    layer = [tensor for tensor in models.qwen3_next(config) if ".layers.0." in tensor.name]
    parts = [part for tensor in layer for part in stored([tensor.name], tensor.shape, compression)]
    place = begins(in_order(parts))
    size = {part.name: part.nbytes for part in parts}
    experts = [f"model.layers.0.mlp.experts.{index}" for index in range(512)]
    runs = ["weight", f"weight.{compression}.absmax"] if compression else ["weight"]
    expert_bytes = sum(size[f"{experts[0]}.{which}_proj.{leaf}"] for which in ("gate", "up", "down") for leaf in runs)
    for index, expert in enumerate(experts):
        for leaf in runs:
            gate, up, down = (f"{expert}.{which}_proj.{leaf}" for which in ("gate", "up", "down"))
            assert place[up] == place[gate] + size[gate]
            assert place[down] == place[up] + size[up]
        begin = place[f"{expert}.gate_proj.weight"]
        assert begin == place[f"{experts[0]}.gate_proj.weight"] + index * expert_bytes
        assert begin % (64 if compression == "8bit" else 4096) == 0


def test_small_parts_do_not_move_the_other_parts() -> None:
    parts = [
        TensorToWrite(f"experts.{expert}.{which}_proj.{leaf}", "U8", (size,))
        for expert in (0, 1)
        for which in ("down", "gate", "up")
        for leaf, size in (("weight", 4096), ("weight_scale", 2))
    ]
    assert [name.removeprefix("experts.").replace("_proj", "") for name in names(in_order(parts))] == [
        *("0.gate.weight", "0.up.weight", "0.down.weight", "1.gate.weight", "1.up.weight", "1.down.weight"),
        *("0.gate.weight_scale", "0.up.weight_scale", "0.down.weight_scale"),
        *("1.gate.weight_scale", "1.up.weight_scale", "1.down.weight_scale"),
    ]


def test_published_block_scales_are_next_to_their_expert() -> None:
    """DeepSeek-V3's FP8: a float32 scale for each 128 x 128."""
    shapes = {"gate_proj": (2048, 7168), "up_proj": (2048, 7168), "down_proj": (7168, 2048)}
    parts = [TensorToWrite("model.layers.3.mlp.gate.weight", "BF16", (256, 7168))]
    for expert, (projection, (rows, columns)) in itertools.product(range(3), shapes.items()):
        name = f"model.layers.3.mlp.experts.{expert}.{projection}.weight"
        parts += [
            TensorToWrite(name, "F8_E4M3", (rows, columns)),
            TensorToWrite(f"{name}_scale_inv", "F32", (rows // 128, 56)),
        ]
    ordered = [name.removeprefix("model.layers.3.mlp.") for name in names(in_order(parts))]
    names_of_expert = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    names_of_expert += [f"{name}_scale_inv" for name in names_of_expert]
    assert ordered == ["gate.weight", *(f"experts.{expert}.{name}" for expert in range(3) for name in names_of_expert)]


def test_tables_follow_all_parts_of_their_size() -> None:
    matrices = [f"experts.{expert}.{which}.weight" for expert in (0, 1) for which in ("w1", "w2", "w3")]
    parts = [
        *stored(matrices, (64, 64), "4bit"),
        *stored(["z.weight"], (64, 64), "4bit"),
        TensorToWrite("odd", "U8", (7,)),
    ]
    ordered = names(in_order(parts))
    run = [f"experts.{n}.{w}.{leaf}" for n in (0, 1) for leaf in ("weight", "weight.4bit.absmax") for w in WS]
    assert ordered[: len(run)] == run
    fused = [f"experts.{expert}.{which}.weight" for expert in (0, 1) for which in WS]
    maps = [f"{name}.4bit.quant_map" for name in fused]
    states = [f"{name}.4bit.quant_state.bitsandbytes__nf4" for name in fused]
    other_names = ["z.weight", "z.weight.4bit.absmax", "z.weight.4bit.quant_map"]
    odd = ["odd", "z.weight.4bit.quant_state.bitsandbytes__nf4"]
    assert ordered[len(run) :] == [*other_names, *maps, *odd, *states]


def test_first_version_orders_by_size_and_name() -> None:
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
    patterns_found = {
        tuple(entry.source_patterns)
        for entries in mapping.values()
        for entry in entries
        if isinstance(entry, WeightConverter) and len(entry.source_patterns) > 1
    }
    return sorted(patterns for patterns in patterns_found if all("experts.*." in pattern for pattern in patterns))


@pytest.mark.parametrize("patterns", fusions())
def test_tensors_that_transformers_fuses_are_adjacent_in_its_order(patterns: tuple[str, ...]) -> None:
    tensors = [pattern.replace("\\", "").replace("*", "3").strip("$^") for pattern in patterns]
    other_names = [
        "x.experts.3.down_proj.weight",
        "x.experts.3.w2.weight",
        "x.experts.4.w1.weight",
    ]
    full = [f"x.{name.lstrip('.')}" for name in tensors]
    ordered = names(in_order(stored([*reversed(full), *other_names], (64, 64))))
    begin = ordered.index(full[0])
    assert ordered[begin : begin + len(full)] == full


def cut(shape: tuple[int, ...], ranks: int, dim: int, dtype: str = "BF16") -> list[TensorSpec]:
    """A tensor in equal pieces along a dimension, each in a separate shard."""
    size = shape[dim] // ranks
    piece_shape = (*shape[:dim], size, *shape[dim + 1 :])
    return [
        TensorSpec(
            f"w#{rank}",
            dtype,
            piece_shape,
            f"r{rank}",
            100,
            byte_size(dtype, piece_shape),
            piece=TensorPiece("w", shape, dim, begin),
        )
        for rank, begin in enumerate(range(0, shape[dim], size))
    ]


def laid_out(joined: Joined) -> LayerLayout:
    return lay_out(LAYER, [], [joined])


@pytest.mark.parametrize(
    ("shape", "ranks", "dim", "compression", "direct", "scheme"),
    [
        ((64, 128), 2, 0, None, True, None),
        ((64, 128), 2, 1, None, False, None),
        ((64, 128), 2, 0, "4bit", True, "4bit"),
        ((64, 128), 2, 1, "4bit", False, "4bit"),
        ((64, 128), 4, 1, "4bit", False, None),  # rows of 32: two pieces in a block of 64
        ((64, 128), 4, 0, "8bit", True, "8bit"),
        ((64, 128), 8, 0, "8bit", False, None),  # pieces of 1024: two in a block of 2048
        ((64, 4096), 2, 1, "8bit", False, "8bit"),
        ((64, 128), 2, 1, "8bit", False, None),
        ((8, 128), 2, 1, "8bit", False, None),  # too small to be compressed
        ((256,), 4, 0, "4bit", True, None),
    ],
)
def test_offsets_of_pieces(
    shape: tuple[int, ...], ranks: int, dim: int, compression: str | None, direct: bool, scheme: str | None
) -> None:
    joined = join(reversed(cut(shape, ranks, dim)), compression)
    assert bool(joined.direct) == direct
    assert {form.scheme for form in joined.pieces} == {scheme}
    assert [form.source.name for form in joined.pieces] == [f"w#{rank}" for rank in range(ranks)]
    layout = laid_out(joined)
    assert layout.tensors == ("w",)
    assert bool(layout.scratch_bytes) == (not direct)
    assert sum(layout.shard_bytes.values()) == sum(part.nbytes for form in joined.pieces for part in form.parts)


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
@pytest.mark.parametrize("dim", [0, 1])
def test_layer_file_equals_that_of_a_whole_tensor(dim: int, compression: str | None) -> None:
    specs = cut((64, 128), 2, dim)
    joined = join(specs, compression)
    layout, plain = laid_out(joined), lay_out(LAYER, [joined.whole])
    assert (layout.header, layout.size) == (plain.header, plain.size)
    assert plain.offsets.items() <= layout.offsets.items()


def written(layout: LayerLayout, joined: Joined) -> Iterator[tuple[int, int]]:
    """The runs (offset, length) of the layer file that pieces, joins and constants fill."""
    for form in joined.pieces:
        for part in form.parts:
            if part.name in layout.offsets:
                yield layout.offsets[part.name], part.nbytes
    for form in layout.joins:
        for part in form.parts:
            yield layout.offsets[part.name], part.nbytes
    for form in layout.fixed:
        for part in form.parts[2:]:
            yield layout.offsets[part.name], part.nbytes


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 200),
    ranks=st.sampled_from([2, 3, 4, 8]),
    dim=st.sampled_from([0, 1]),
    compression=st.sampled_from([None, "4bit", "8bit"]),
    dtype=st.sampled_from(["BF16", "F32"]),
)
@settings(max_examples=draws(200), deadline=None)
def test_every_byte_of_the_layer_file_is_filled_once(
    rows: int, columns: int, ranks: int, dim: int, compression: str | None, dtype: str
) -> None:
    shape = (rows * ranks, columns) if dim == 0 else (rows, columns * ranks)
    joined = join(cut(shape, ranks, dim, dtype), compression)
    layout = laid_out(joined)
    end = layout.header_bytes
    for offset, nbytes in sorted(run for run in written(layout, joined) if run[1]):
        assert offset == end
        end += nbytes
    assert end == layout.size
    ends = [(place, place + part.nbytes) for form in joined.pieces for part in form.parts
            if (place := layout.scratch_offsets.get(part.name)) is not None]  # fmt: skip
    assert all(end <= begin for (_, end), (begin, _) in zip(sorted(ends), sorted(ends)[1:], strict=False))
    assert max((end for _, end in ends), default=0) == layout.scratch_bytes


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), ranks=st.sampled_from([2, 3, 8]), dim=st.sampled_from([0, 1]))
@settings(max_examples=draws(100), deadline=None)
def test_whole_tensor_is_read_from_its_pieces(rows: int, columns: int, ranks: int, dim: int) -> None:
    """By torch's own strides, over memory that has the pieces where the scratch file has them."""
    shape = (rows * ranks, columns) if dim == 0 else (rows, columns * ranks)
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    joined = dataclasses.replace(join(cut(shape, ranks, dim, "F32"), None), direct={})  # rows too, for the sake of it
    layout = laid_out(joined)
    memory = torch.full((-(-layout.scratch_bytes // 4),), -1.0)
    for form, piece in zip(joined.pieces, whole.chunk(ranks, dim), strict=True):
        begin = layout.scratch_offsets[form.parts[0].name] // 4
        memory[begin : begin + piece.numel()] = piece.flatten()
    (form,) = layout.joins
    spec = form.source
    assert spec.strides is not None
    read = torch.as_strided(memory, spec.sizes, spec.strides, spec.offset // (DTYPES[spec.dtype].bits // 8))
    assert torch.equal(read.reshape(shape), whole)


def changed(specs: list[TensorSpec], index: int, **changes: object) -> list[TensorSpec]:
    return [s._replace(**changes) if position == index else s for position, s in enumerate(specs)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (cut((64, 64), 4, 0)[1:], "that starts at 0 is missing: found 16 in r1"),
        (cut((64, 64), 4, 0)[:3], "end at 48; expected 64"),
        ([*cut((64, 64), 4, 0), *cut((64, 64), 4, 0)[:1]], "that starts at 16 is missing"),
        (changed(cut((64, 64), 4, 1), 2, dtype="F16"), "r0 has BF16 .* r2 has F16"),
        (changed(cut((64, 64), 4, 1), 2, shape=(64, 8)), r"r2 has BF16 \(64, 8\); expected equal parts of \(64, 64\)"),
        (changed(cut((64, 64), 4, 1), 1, piece=TensorPiece("w", (64, 32), 1, 16)), "do not belong together"),
        (changed(cut((64, 64), 4, 1), 1, piece=TensorPiece("w", (64, 64), 0, 16)), "do not belong together"),
    ],
    ids=range(7),
)
def test_pieces_that_do_not_make_a_whole(specs: list[TensorSpec], says: str) -> None:
    with pytest.raises(InvalidIndexError, match=says) as refused:
        join(specs, None)
    assert "Download the shards again" in refused.value.remedy
