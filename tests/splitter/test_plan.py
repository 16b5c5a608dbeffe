"""The plan of a split: layers and shards, runs of bytes, bytes in gaps, and the future files."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm import prepare
from rabbitllm.base.options import RunOptions, SplitOptions
from rabbitllm.checkpoints.checkpoint import ShardMetadata
from rabbitllm.checkpoints.index import index_of
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.checkpoints.naming import LayerName, assign_layers
from rabbitllm.engine.devices import CpuDevice, Device
from rabbitllm.engine.load import load_model
from rabbitllm.engine.load_plan import make_load_plan
from rabbitllm.errors import InvalidIndexError
from rabbitllm.estimate.scan import SourceScan
from rabbitllm.formats.tensor_spec import DTYPES, Header, TensorSpec, byte_size
from rabbitllm.quant.schemes import SCHEMES
from rabbitllm.splitter import plan
from rabbitllm.splitter import plan as moves_module
from rabbitllm.splitter.plan import (
    Gaps,
    LayerMap,
    PlannedFiles,
    PlannedShard,
    SplitPlan,
    build_layer_map,
    has_small_gaps,
    moves,
    recompressed,
    tensors_by_shard,
)
from rabbitllm.store.layer_store import LayerStore
from tests.support.builders import build_checkpoint, cut, llama_tensors, write_shards
from tests.support.draws import draws
from tests.support.fake_gpu import FakeGpu
from tests.support.meta_files import tiny_llama, write_meta
from tests.support.plans import MIB, even, plan_of, shard_of
from tests.support.splitting import split as split_of
from tests.support.tiny_models import split


def tensor(offset: int, nbytes: int, strides: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec("w", "U8", (nbytes,), "shard", offset, nbytes, strides)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6),
    st.integers(0, 9),
    st.lists(st.integers(1, 25), max_size=20),
)
def test_only_bytes_in_gaps_are_kept(runs: list[tuple[int, int]], last: int, cuts: list[int]) -> None:
    tensors, between, offset = [], [], 0
    for gap, nbytes in runs:
        between.append((offset, offset + gap))
        tensors.append(tensor(offset + gap, nbytes))
        offset += gap + nbytes
    between.append((offset, offset + last))
    content = bytes(index % 251 + 1 for index in range(offset + last))
    assert has_small_gaps(tensors, len(content))
    kept = Gaps(reversed(tensors), len(content))
    chunks, begin = [], 0
    for length in [*cuts, len(content)]:
        chunks.append(content[begin : begin + length])
        begin += length
    assert b"".join(kept.watching(chunks)) == content
    held = {offset for begin, end in between for offset in range(begin, end)}
    for offset in range(len(content)):
        assert kept.read_at(offset, 1) == (content[offset : offset + 1] if offset in held else b"")
    for begin, end in between:
        assert kept.read_at(begin, end - begin) == content[begin:end]
    assert sum(map(len, kept._kept)) == len(held)


def test_gaps_that_cannot_be_kept() -> None:
    assert has_small_gaps([tensor(10, 5), tensor(15, 5), tensor(30, 0)], 40)
    assert not has_small_gaps([tensor(10, 6), tensor(15, 5)], 40)  # they share a byte
    assert not has_small_gaps([tensor(10, 5), tensor(10, 5)], 40)
    assert not has_small_gaps([tensor(10, 5, (2,))], 40)
    assert not has_small_gaps([tensor(36, 5)], 40)
    assert has_small_gaps([tensor(0, 100)], 100 + plan.MAX_GAP_BYTES)
    assert not has_small_gaps([tensor(1, 100)], 102 + plan.MAX_GAP_BYTES)  # a shard of which little is a tensor of ours


# Layer -> shards, layer -> tensors, and when a layer has all it needs.


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
    layer_to_tensors = mapped(WEIGHT_MAP).layer_to_tensors
    assert layer_to_tensors["layers.0"] == (
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.input_layernorm.weight",
    )
    assert sorted(tensor for tensors in layer_to_tensors.values() for tensor in tensors) == sorted(WEIGHT_MAP)


def test_shard_to_layers() -> None:
    shard_to_layers = mapped(WEIGHT_MAP).shard_to_layers
    assert {shard: set(layers) for shard, layers in shard_to_layers.items()} == {
        A: {"embed_tokens", "layers.0"},
        B: {"layers.0", "layers.1"},
        C: {"layers.0", "layers.2", "layers.10", "norm", "lm_head"},
    }
    assert all(len(set(layers)) == len(layers) for layers in shard_to_layers.values())


def test_layers_are_in_the_order_of_a_forward_pass() -> None:
    layer_map = mapped(WEIGHT_MAP)
    expected = ["embed_tokens", "layers.0", "layers.1", "layers.2", "layers.10", "norm", "lm_head"]
    assert list(layer_map.layers) == list(layer_map.layer_to_tensors) == list(layer_map.layer_to_shards) == expected
    assert layer_map.layers["layers.10"] == LayerName("layers.10", "model.layers.10")


def test_tied_head_is_not_a_layer() -> None:
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


class RecordingMap(dict[str, frozenset[str]]):
    """A mapping that records the keys that are looked up, and refuses iteration."""

    def __init__(self, content: Mapping[str, frozenset[str]]) -> None:
        super().__init__(content)
        self.asked: list[str] = []

    def __getitem__(self, key: str) -> frozenset[str]:
        self.asked.append(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("every layer was looked at")


def test_only_layers_of_the_shard_are_checked() -> None:
    whole = mapped({f"model.layers.{layer}.w": f"shard-{layer // 2}" for layer in range(2000)})
    noticing = RecordingMap(whole.layer_to_shards)
    layer_map = LayerMap(whole.layers, whole.layer_to_tensors, noticing, whole.shard_to_layers)
    assert set(layer_map.completed_by("shard-7", ["shard-0"])) == {"layers.14", "layers.15"}
    assert sorted(noticing.asked) == ["layers.14", "layers.15"]


PLACES = st.dictionaries(
    st.builds("model.layers.{}.w{}".format, st.integers(0, 6), st.integers(0, 6)),
    st.integers(0, 5).map("shard-{}".format),
    min_size=1,
)


@given(PLACES, st.randoms(use_true_random=False))
def test_every_layer_is_completed_once_in_any_order(weight_map: dict[str, str], chance: random.Random) -> None:
    layer_map = mapped(weight_map)
    shards = list(dict.fromkeys(weight_map.values()))
    chance.shuffle(shards)
    done: list[str] = []
    completed: list[str] = []
    for shard in shards:
        completed += layer_map.completed_by(shard, done)
        done.append(shard)
        assert set(completed) == {layer for layer in layer_map.layers if needs(weight_map, layer) <= set(done)}
    assert sorted(completed) == sorted(layer_map.layers)


def needs(weight_map: Mapping[str, str], layer: str) -> set[str]:
    holders: Iterable[str] = (shard for tensor, shard in weight_map.items() if tensor.startswith(f"model.{layer}."))
    return set(holders)


# The plan: which shard gives a tensor, and what layer files come to.


def test_plan_depends_only_on_its_arguments() -> None:
    shards = even(3, 16384)
    assert plan_of(shards, "4bit") == plan_of(shards, "4bit")
    assert plan_of(shards).output_bytes == 3 * (4096 + 16384)
    assert plan_of(shards).source_bytes == 3 * (100 + 16384)


def metadata_of(shard: PlannedShard) -> ShardMetadata:
    return ShardMetadata(shard.name, shard.size, shard.fingerprint, Header(shard.tensors, {}, 100))


def test_index_decides_between_two_shards() -> None:
    tensor = ("F32", (8,))
    first, second = shard_of("a", {"x": tensor, "y": tensor}), shard_of("b", {"y": tensor, "z": tensor})
    by_shard = tensors_by_shard(index_of({"x": "a", "y": "b"}), [metadata_of(first), metadata_of(second)])
    assert {shard: [t.name for t in tensors] for shard, tensors in by_shard.items()} == {"a": ["x"], "b": ["y", "z"]}
    by_shard = tensors_by_shard(index_of({"x": "a", "z": "b"}), [metadata_of(first), metadata_of(second)])
    assert {shard: [t.name for t in tensors] for shard, tensors in by_shard.items()} == {"a": ["x"], "b": ["y", "z"]}


@pytest.mark.parametrize(("promised", "more"), [(["p"], ""), (["p", "q", "r"], " and 2 more")])
def test_index_with_a_tensor_that_the_header_lacks(promised: list[str], more: str) -> None:
    shard = shard_of("a", {"x": ("F32", (8,))})
    with pytest.raises(
        InvalidIndexError, match=f"The index puts 'p'{more} into a, whose header does not have it"
    ) as bad:
        tensors_by_shard(index_of(dict.fromkeys(["x", *promised], "a")), [metadata_of(shard)])
    assert "Download the index and that shard again" in str(bad.value)


def test_recompressed_plan_equals_a_new_plan() -> None:
    shards = even(3, MIB)
    assert recompressed(plan_of(shards), "4bit") == plan_of(shards, "4bit")
    assert recompressed(plan_of(shards, "4bit"), None) == plan_of(shards)


def test_sizes_of_a_real_checkpoint(tmp_path: Path) -> None:
    tensors = llama_tensors(dtype=torch.float32)
    source = write_shards(tmp_path / "model", cut(tensors, 3))
    checkpoint = LocalCheckpoint(source)
    metadata = [shard_metadata for shard in checkpoint.index.shards if (shard_metadata := checkpoint.metadata(shard))]
    chosen = tensors_by_shard(checkpoint.index, metadata)
    shards = tuple(PlannedShard(f.name, f.size, f.fingerprint, chosen[f.name], f.staged) for f in metadata)
    plan = plan_of(shards, "8bit")
    folder = split_of(source, compression="8bit")
    assert plan.output_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert {layout.file_name: layout.size for layout in plan.layouts.values()} == {
        path.name: path.stat().st_size for path in folder.glob("*.safetensors")
    }


# Runs of bytes: every byte once.


SHAPES = st.lists(st.integers(0, 90), min_size=0, max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.builds("model.layers.{}.w{}".format, st.integers(0, 3), st.integers(0, 9)),
    st.tuples(st.sampled_from([*DTYPES]), SHAPES).filter(lambda t: DTYPES[t[0]].bits >= 8 or byte_sized(*t)),
    max_size=6,
)


def byte_sized(dtype: str, shape: tuple[int, ...]) -> bool:
    try:
        byte_size(dtype, shape)
    except ValueError:
        return False
    return True


@settings(max_examples=draws(150), deadline=None)
@given(
    first=TENSORS,
    second=TENSORS,
    compression=st.sampled_from([None, "4bit", "8bit", "4bit-double"]),
    chunk=st.sampled_from([2048 * 4, 3 * 2048 * 4, 4 << 20]),
)
def test_moves_cover_every_byte_exactly_once(
    first: dict[str, tuple[str, tuple[int, ...]]],
    second: dict[str, tuple[str, tuple[int, ...]]],
    compression: str | None,
    chunk: int,
) -> None:
    second = {name: tensor for name, tensor in second.items() if name not in first}
    plan = plan_of((shard_of("a", first), shard_of("b", second)), compression)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves_module, "CHUNK_BYTES", chunk)
        for shard in plan.shards:
            check_moves(plan, shard, chunk)


def check_moves(plan: SplitPlan, shard: PlannedShard, chunk: int) -> None:
    shard_moves = list(moves(plan, shard.name, plan.layouts))
    offset = 100
    assert all(0 <= move.nbytes <= chunk for move in shard_moves)
    for move in (move for move in shard_moves if move.nbytes):
        assert move.offset == offset  # the shard's own order, without holes and without a byte twice
        offset += move.nbytes
    assert offset == shard.size
    for tensor in shard.tensors:
        runs = [move for move in shard_moves if move.form.source.name == tensor.name]
        assert runs, f"{tensor.name} would have no constants"
        assert runs[0].first == 0
        if runs[0].form.scheme is None:
            assert sum(run.nbytes for run in runs) == tensor.nbytes
            continue
        block = SCHEMES[runs[0].form.scheme].block
        assert all(run.elements % block == 0 for run in runs[:-1])
        assert [run.first for run in runs] == [sum(r.elements for r in runs[:n]) for n in range(len(runs))]
        assert sum(run.elements for run in runs) == tensor.elements
    # and what is stored of the plan fills the layer files without holes
    for layout in plan.layouts.values():
        parts = [p for form in (*layout.forms, *layout.settles) for p in form.parts]
        spans = sorted((layout.offsets[p.name], p.nbytes) for p in parts if p.name in layout.offsets)
        assert {p.name for p in parts} == layout.offsets.keys() | layout.scratch_offsets.keys()
        ends = [len(layout.header), *(begin + length for begin, length in spans)]
        assert [begin for begin, _ in spans] == ends[:-1]
        assert ends[-1] == layout.size


def test_moves_of_some_layers_only() -> None:
    plan = plan_of((shard_of("a", {f"model.layers.{n}.w": ("F32", (8,)) for n in range(4)}),))
    assert [move.layer for move in moves(plan, "a", ["layers.1", "layers.3"])] == ["layers.1", "layers.3"]
    assert list(moves(plan, "a", [])) == []
    assert list(moves(plan, "unknown", plan.layouts)) == []


# What is planned is what is found: tensors, and where a model's weights will be, before and after a split.


COMPRESSIONS = [None, "8bit", "4bit"]
ROOMS = [0, 20_000, 150_000, 600_000, 1 << 34]
"""Bytes of weights: nothing, a little, about half, most of it, all."""
EXPERTS = ["qwen3_moe", "gpt_oss", "qwen3_next", "mixtral", "deepseek_v3", "jamba"]
FAMILIES = ["llama", "gemma3", "gpt_oss", "qwen3_moe", "opt", "mamba2", "t5"]


def planned(folder: Path, compression: str | None) -> PlannedFiles:
    spec = prepare.ModelSpec(str(folder), compression)
    survey = SourceScan(spec, SplitOptions(compression))
    assert not survey.folders[compression].exists()
    return PlannedFiles(survey.plans[compression], survey.folders[compression])


def all_options() -> Iterator[Any]:
    """Families and compressions; by default all uncompressed, and alternating compressions."""
    for index, family in enumerate(FAMILIES):
        for compression in COMPRESSIONS:
            later = compression not in (None, ("4bit", "8bit")[index % 2])
            yield pytest.param(family, compression, marks=pytest.mark.long if later else ())
    for family in EXPERTS:
        if family not in FAMILIES:
            yield from (pytest.param(family, compression, marks=pytest.mark.long) for compression in COMPRESSIONS)


@pytest.mark.parametrize(("family", "compression"), [*all_options()])
def test_planned_tensors_and_placement_equal_those_of_the_split(
    tmp_path: Path, family: str, compression: str | None
) -> None:
    folder = build_checkpoint(tmp_path / "m", family, tied=family == "t5", dtype=torch.bfloat16, shards=3)
    files = planned(folder, compression)
    options = [
        RunOptions(device="cpu", max_memory={"cpu": room}, show_progress=False, exact=exact, dtype=dtype)
        for room in ROOMS
        for exact, dtype in ((False, None), (True, "float32"))
    ]
    predicted = [make_load_plan(files, run_options, folder, [CpuDevice()]).placement for run_options in options]
    split_folder = split(folder, compression)
    assert files.tensors == LayerStore(split_folder).tensors
    assert predicted == [load_model(split_folder, run_options).placement for run_options in options]
    assert len(set(predicted)) > 2
    assert {bool(placement.experts) for placement in predicted} == {family in EXPERTS}
    if family in EXPERTS and compression is None:
        assert {bool(placement.pools) for placement in predicted} == {True, False}
        assert any(pool.slots for placement in predicted for pool in placement.pools)


@pytest.mark.parametrize("host", [0, 100_000, 1 << 30])
@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("qwen3_next", marks=pytest.mark.long)])
def test_planned_placement_on_gpus_equals_that_of_the_split(
    tmp_path: Path, family: str, compression: str | None, host: int
) -> None:
    folder = build_checkpoint(tmp_path / "m", family, dtype=torch.bfloat16, shards=2, num_experts=12)
    gpus: list[Device] = [FakeGpu(0), FakeGpu(1)]
    room = 120_000 if compression else 400_000
    options = RunOptions(max_memory={**{gpu.name: room for gpu in gpus}, "cpu": host}, show_progress=False)
    files = planned(folder, compression)
    predicted = make_load_plan(files, options, folder, gpus).placement
    assert {placed.device for placed in predicted.units} == {gpu.name for gpu in gpus}
    assert {pool.device for pool in predicted.pools} == {gpu.name for gpu in gpus}
    assert any(pool.host_slots for pool in predicted.pools) == bool(host > 100_000)
    assert predicted == load_model(split(folder, compression), options, None, gpus).placement


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_tensors_in_pieces(tmp_path: Path, compression: str | None) -> None:
    folder = write_meta(tmp_path / "m", tiny_llama(), ranks=2)
    files = planned(folder, compression)
    assert files.tensors == LayerStore(split(folder, compression)).tensors


def test_planned_files_have_no_bytes(tmp_path: Path) -> None:
    files = planned(build_checkpoint(tmp_path / "m", "llama"), None)
    part = next(iter(files.tensors.values())).parts[0]
    assert not files.path(part.file).exists()
    with pytest.raises(FileNotFoundError, match="only planned"):
        files.mapped(part.file)
