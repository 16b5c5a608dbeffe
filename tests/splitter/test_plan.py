"""The plan: every byte once, and the most disk it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.checkpoints.checkpoint import ShardFacts
from rabbitllm.checkpoints.index import index_of
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.durable import Step, observe_steps
from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.safetensors_file import Header
from rabbitllm.formats.tensor_spec import DTYPES, byte_size
from rabbitllm.layers.compression import BLOCKS
from rabbitllm.options import SplitOptions
from rabbitllm.splitter import plan as plan_module
from rabbitllm.splitter.plan import (
    Arrival,
    DiskUse,
    PlannedShard,
    SplitPlan,
    disk_use,
    gib,
    moves,
    on_disk,
    own_records_bytes,
    recompressed,
    tensors_by_shard,
)
from rabbitllm.splitter.split import Request, plan_split
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.plans import MIB, even, plan_of, shard_of
from tests.support.splitting import split

# Moves


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


@settings(max_examples=150, deadline=None)
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
        patch.setattr(plan_module, "CHUNK_BYTES", chunk)
        for shard in plan.shards:
            check_moves(plan, shard, chunk)


def check_moves(plan: SplitPlan, shard: PlannedShard, chunk: int) -> None:
    found = list(moves(plan, shard.name, plan.layouts))
    at = 100
    assert all(0 <= move.nbytes <= chunk for move in found)
    for move in (move for move in found if move.nbytes):
        assert move.offset == at  # the shard's own order, without holes and without a byte twice
        at += move.nbytes
    assert at == shard.size
    for tensor in shard.tensors:
        runs = [move for move in found if move.form.source.name == tensor.name]
        assert runs, f"{tensor.name} would have no constants"
        assert runs[0].first == 0
        if runs[0].form.scheme is None:
            assert sum(run.nbytes for run in runs) == tensor.nbytes
            continue
        block = BLOCKS[runs[0].form.scheme]
        assert all(run.elements % block == 0 for run in runs[:-1])
        assert [run.first for run in runs] == [sum(r.elements for r in runs[:n]) for n in range(len(runs))]
        assert sum(run.elements for run in runs) == tensor.elements
    # and what is stored of the plan fills the layer files without holes
    for layout in plan.layouts.values():
        parts = [p for form in (*layout.forms, *layout.settles) for p in form.parts]
        spans = sorted((layout.places[p.name], p.nbytes) for p in parts if p.name in layout.places)
        assert {p.name for p in parts} == layout.places.keys() | layout.scratch_places.keys()
        ends = [len(layout.header), *(begin + length for begin, length in spans)]
        assert [begin for begin, _ in spans] == ends[:-1]
        assert ends[-1] == layout.size


def test_moves_of_some_layers_only() -> None:
    plan = plan_of((shard_of("a", {f"model.layers.{n}.w": ("F32", (8,)) for n in range(4)}),))
    assert [move.layer for move in moves(plan, "a", ["layers.1", "layers.3"])] == ["layers.1", "layers.3"]
    assert list(moves(plan, "a", [])) == []
    assert list(moves(plan, "unknown", plan.layouts)) == []


def test_plan_depends_on_nothing_but_its_arguments() -> None:
    shards = even(3, 16384)
    assert plan_of(shards, "4bit") == plan_of(shards, "4bit")
    assert plan_of(shards).output_bytes == 3 * (4096 + 16384)
    assert plan_of(shards).source_bytes == 3 * (100 + 16384)


# Which shard gives a tensor


def facts_of(shard: PlannedShard) -> ShardFacts:
    return ShardFacts(shard.name, shard.size, shard.fingerprint, Header(shard.tensors, {}, 100))


def test_index_decides_between_two_shards() -> None:
    tensor = ("F32", (8,))
    first, second = shard_of("a", {"x": tensor, "y": tensor}), shard_of("b", {"y": tensor, "z": tensor})
    found = tensors_by_shard(index_of({"x": "a", "y": "b"}), [facts_of(first), facts_of(second)])
    assert {shard: [t.name for t in tensors] for shard, tensors in found.items()} == {"a": ["x"], "b": ["y", "z"]}
    found = tensors_by_shard(index_of({"x": "a", "z": "b"}), [facts_of(first), facts_of(second)])
    assert [t.name for t in found["a"]] == ["x", "y"]  # a tensor that only headers know is taken from the first


@pytest.mark.parametrize(("promised", "more"), [(["p"], ""), (["p", "q", "r"], " and 2 more")])
def test_index_promises_what_the_header_does_not_have(promised: list[str], more: str) -> None:
    shard = shard_of("a", {"x": ("F32", (8,))})
    with pytest.raises(
        InvalidIndexError, match=f"The index puts 'p'{more} into a, whose header does not have it"
    ) as bad:
        tensors_by_shard(index_of(dict.fromkeys(["x", *promised], "a")), [facts_of(shard)])
    assert "Fetch the index and that shard again" in str(bad.value)


# Disk


def test_disk_of_a_local_source_whose_shards_are_deleted() -> None:
    plan = plan_of(even(4, MIB))
    shard, layer = MIB + 100, MIB + 4096 + 4096
    assert disk_use(plan, deletes_shards=True) == DiskUse(created=4 * layer, added=layer + 3 * (layer - shard))
    assert disk_use(plan, deletes_shards=False) == DiskUse(created=4 * layer, added=4 * layer)


def test_disk_of_fetched_shards() -> None:
    plan = plan_of(even(4, MIB, staged=True))
    shard, layer = MIB + 100, MIB + 4096 + 4096
    shard = on_disk(shard)
    for deletes in (True, False):
        assert disk_use(plan, deletes_shards=deletes) == DiskUse(4 * layer + shard, 4 * layer + shard)
    # the last shard has none after it, so two are there while the last but one is used
    most = max(3 * layer + 2 * shard, 4 * layer + shard)
    assert disk_use(plan, arrival=Arrival.FILE_AHEAD, deletes_shards=True) == DiskUse(most, most)
    smaller = plan_of(even(4, MIB, staged=True), "4bit")
    assert disk_use(smaller, arrival=Arrival.FILE_AHEAD, deletes_shards=True).added > 2 * shard
    assert disk_use(plan, arrival=Arrival.STREAM, deletes_shards=True) == DiskUse(4 * layer, 4 * layer)


def test_disk_of_what_an_earlier_run_has_created() -> None:
    plan = plan_of(even(4, MIB, staged=True))
    shard, layer = on_disk(MIB + 100), MIB + 4096 + 4096
    there = layer + 5000  # and a piece of the second shard
    use = disk_use(plan, deletes_shards=True, used=frozenset(["shard-0"]), in_use=there, small_files=7)
    assert use == DiskUse(4 * layer + shard + 7, 4 * layer + shard + 7 - there)


def test_records_are_bounded(tmp_path: Path) -> None:
    """Journal and manifest of a real split stay below what the plan sets aside for them, and not far below."""
    source = write_shards(tmp_path / "model", cut(llama_tensors(layers=6), 4))
    plan = plan_split(Request(LocalCheckpoint(source), tmp_path / "out", "llama", SplitOptions()))
    sizes: list[int] = []

    def look(step: Step) -> None:
        if step.kind == "unlink" and step.path.name == "split.journal":
            sizes.append(step.path.stat().st_size + (step.path.parent / "split.json").stat().st_size)

    with observe_steps(look):
        split(source)
    assert len(sizes) == 1
    assert sizes[0] <= own_records_bytes(plan) <= 4 * sizes[0] + 4096


def test_recompressed_plan_is_the_plan_at_that_compression() -> None:
    shards = even(3, MIB)
    assert recompressed(plan_of(shards), "4bit") == plan_of(shards, "4bit")
    assert recompressed(plan_of(shards, "4bit"), None) == plan_of(shards)


@pytest.mark.parametrize(("compression", "factor"), [("4bit", 0.2813), ("8bit", 0.501)])
def test_disk_under_compression(compression: str, factor: float) -> None:
    use = disk_use(plan_of(even(8, 4 * MIB, staged=True), compression), deletes_shards=True)
    assert use.created == pytest.approx(8 * 4 * MIB * factor + 4 * MIB, rel=0.01)
    assert use.added == use.created


def test_peak_is_where_a_large_shard_comes_late() -> None:
    small = even(3, MIB, staged=True)
    large = shard_of("z", {"model.layers.9.w": ("BF16", (16 * MIB // 128, 64))}, staged=True)
    first = disk_use(plan_of((large, *small), "4bit"), deletes_shards=True)
    last = disk_use(plan_of((*small, large), "4bit"), deletes_shards=True)
    assert first.created < last.created
    assert last.created - first.created == pytest.approx(3 * 0.2813 * MIB, rel=0.05)


def test_shards_used_up_earlier_no_longer_add() -> None:
    plan = plan_of(even(4, MIB))
    layer = MIB + 4096 + 4096
    used = frozenset(["shard-0", "shard-1"])
    there = 2 * layer
    assert disk_use(plan, deletes_shards=False, used=used, in_use=there) == DiskUse(created=4 * layer, added=2 * layer)
    everything = frozenset(shard.name for shard in plan.shards)
    assert disk_use(plan, deletes_shards=False, used=everything) == DiskUse(created=4 * layer, added=0)


def test_header_counts_once_for_a_layer_in_many_shards() -> None:
    shards = tuple(shard_of(f"s{n}", {f"model.layers.0.w{n}": ("F32", (16, 64))}) for n in range(5))
    plan = plan_of(shards)
    assert disk_use(plan, deletes_shards=False).added == 4096 + 4096 + 5 * 4096
    assert plan.output_bytes == 4096 + 5 * 4096


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    compression=st.sampled_from([None, "4bit", "8bit", "4bit-double"]),
    staged=st.booleans(),
)
def test_disk_is_bounded_as_promised(sizes: list[int], compression: str | None, staged: bool) -> None:
    shards = tuple(
        shard_of(f"s{n}", {f"model.layers.{n}.w": ("BF16", (size * 64, 64))}, staged) for n, size in enumerate(sizes)
    )
    plan = plan_of(shards, compression)
    use = disk_use(plan, deletes_shards=True)
    slack = 64 * 1024 * len(plan.layouts)
    largest = max(shard.size for shard in shards)
    assert use.created <= plan.output_bytes + (largest if staged else 0) + slack
    if staged:
        assert use.added == use.created
    else:
        assert use.added <= largest + slack
        assert use.added >= plan.output_bytes - plan.source_bytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 MiB"),
        (3 * MIB // 2, "1.50 MiB"),
        (1 << 30, "1.00 GiB"),
        (150 * 10**9, "139.70 GiB"),
        (-MIB, "-1.00 MiB"),
    ],
)
def test_sizes_as_people_read_them(nbytes: int, text: str) -> None:
    assert gib(nbytes) == text


def test_plan_of_a_real_checkpoint_counts_its_files(tmp_path: Path) -> None:
    tensors = llama_tensors(dtype=torch.float32)
    source = write_shards(tmp_path / "model", cut(tensors, 3))
    checkpoint = LocalCheckpoint(source)
    facts = [found for shard in checkpoint.index.shards if (found := checkpoint.facts(shard))]
    chosen = tensors_by_shard(checkpoint.index, facts)
    shards = tuple(PlannedShard(f.name, f.size, f.fingerprint, chosen[f.name], f.staged) for f in facts)
    plan = plan_of(shards, "8bit")
    made = split(source, compression="8bit")
    assert plan.output_bytes == sum(path.stat().st_size for path in made.glob("*.safetensors"))
    assert {layout.file_name: layout.size for layout in plan.layouts.values()} == {
        path.name: path.stat().st_size for path in made.glob("*.safetensors")
    }
