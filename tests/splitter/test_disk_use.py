"""The most disk that a plan takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.base.options import SplitOptions
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.splitter.disk_budget import DiskUse, ShardTransfer, disk_use, on_disk, own_records_bytes
from rabbitllm.splitter.request import SplitRequest, plan_split
from rabbitllm.storage.durable import Step, observe_steps
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.plans import MIB, all_freed, even, plan_of, shard_of
from tests.support.splitting import split


def test_disk_of_a_local_source_whose_shards_are_deleted() -> None:
    plan = plan_of(even(4, MIB))
    shard, layer = MIB + 100, MIB + 4096 + 4096
    assert disk_use(plan, freed=all_freed(plan)) == DiskUse(created=4 * layer, added=layer + 3 * (layer - shard))
    assert disk_use(plan) == DiskUse(created=4 * layer, added=4 * layer)


def test_disk_of_fetched_shards() -> None:
    plan = plan_of(even(4, MIB, staged=True))
    shard, layer = MIB + 100, MIB + 4096 + 4096
    shard = on_disk(shard)
    for deletes in (True, False):
        assert disk_use(plan, freed=all_freed(plan, deletes)) == DiskUse(4 * layer + shard, 4 * layer + shard)
    # the last shard has none after it, so two are there while the last but one is used
    most = max(3 * layer + 2 * shard, 4 * layer + shard)
    assert disk_use(plan, shard_transfer=ShardTransfer.FILE_AHEAD, freed=all_freed(plan)) == DiskUse(most, most)
    smaller = plan_of(even(4, MIB, staged=True), "4bit")
    assert disk_use(smaller, shard_transfer=ShardTransfer.FILE_AHEAD, freed=all_freed(smaller)).added > 2 * shard
    assert disk_use(plan, shard_transfer=ShardTransfer.STREAM, freed=all_freed(plan)) == DiskUse(4 * layer, 4 * layer)


def test_disk_of_what_an_earlier_run_has_created() -> None:
    plan = plan_of(even(4, MIB, staged=True))
    shard, layer = on_disk(MIB + 100), MIB + 4096 + 4096
    there = layer + 5000  # and a piece of the second shard
    use = disk_use(plan, freed=all_freed(plan), used=frozenset(["shard-0"]), in_use=there, small_files=7)
    assert use == DiskUse(4 * layer + shard + 7, 4 * layer + shard + 7 - there)


def test_records_are_bounded(tmp_path: Path) -> None:
    """Journal and manifest of a real split stay below what the plan sets aside for them, and not far below."""
    source = write_shards(tmp_path / "model", cut(llama_tensors(layers=6), 4))
    plan = plan_split(SplitRequest(LocalCheckpoint(source), tmp_path / "out", "llama", SplitOptions()))
    sizes: list[int] = []

    def look(step: Step) -> None:
        if step.kind == "unlink" and step.path.name == "split.journal":
            sizes.append(step.path.stat().st_size + (step.path.parent / "split.json").stat().st_size)

    with observe_steps(look):
        split(source)
    assert len(sizes) == 1
    assert sizes[0] <= own_records_bytes(plan) <= 4 * sizes[0] + 4096


@pytest.mark.parametrize(("compression", "factor"), [("4bit", 0.2813), ("8bit", 0.501)])
def test_disk_under_compression(compression: str, factor: float) -> None:
    use = disk_use(plan_of(even(8, 4 * MIB, staged=True), compression))
    assert use.created == pytest.approx(8 * 4 * MIB * factor + 4 * MIB, rel=0.01)
    assert use.added == use.created


def test_peak_is_where_a_large_shard_comes_late() -> None:
    small = even(3, MIB, staged=True)
    large = shard_of("z", {"model.layers.9.w": ("BF16", (16 * MIB // 128, 64))}, staged=True)
    first = disk_use(plan_of((large, *small), "4bit"))
    last = disk_use(plan_of((*small, large), "4bit"))
    assert first.created < last.created
    assert last.created - first.created == pytest.approx(3 * 0.2813 * MIB, rel=0.05)


def test_shards_used_up_earlier_no_longer_add() -> None:
    plan = plan_of(even(4, MIB))
    layer = MIB + 4096 + 4096
    used = frozenset(["shard-0", "shard-1"])
    there = 2 * layer
    assert disk_use(plan, used=used, in_use=there) == DiskUse(created=4 * layer, added=2 * layer)
    everything = frozenset(shard.name for shard in plan.shards)
    assert disk_use(plan, used=everything) == DiskUse(created=4 * layer, added=0)


def test_header_counts_once_for_a_layer_in_many_shards() -> None:
    shards = tuple(shard_of(f"s{n}", {f"model.layers.0.w{n}": ("F32", (16, 64))}) for n in range(5))
    plan = plan_of(shards)
    assert disk_use(plan).added == 4096 + 4096 + 5 * 4096
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
    use = disk_use(plan, freed=all_freed(plan))
    slack = 64 * 1024 * len(plan.layouts)
    largest = max(shard.size for shard in shards)
    assert use.created <= plan.output_bytes + (largest if staged else 0) + slack
    if staged:
        assert use.added == use.created
    else:
        assert use.added <= largest + slack
        assert use.added >= plan.output_bytes - plan.source_bytes
