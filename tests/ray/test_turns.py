"""Which parts of a split may be in work together, and that they go round whatever is finished first."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rabbitllm.base.options import SplitOptions
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.ray.ray_shard_executor import Part, next_part
from rabbitllm.splitter.disk_budget import ShardTransfer, disk_use_at_once
from rabbitllm.splitter.filler import SplitWork
from rabbitllm.splitter.plan import SplitPlan
from tests.support.builders import build_checkpoint
from tests.support.plans import MIB, all_freed, plan_of, shard_of


def chain(shards: int) -> SplitPlan:
    """Each shard has a layer of its own, and one that it shares with the next."""
    return plan_of(
        tuple(
            shard_of(
                f"shard-{n}",
                {
                    f"model.layers.{2 * n}.b": ("BF16", (512, 64)),
                    f"model.layers.{2 * n + 1}.w": ("BF16", (512, 64)),
                    f"model.layers.{2 * n + 2}.a": ("BF16", (512, 64)),
                },
            )
            for n in range(shards)
        )
    )


@pytest.fixture
def parts(tmp_path: Path) -> list[Part]:
    checkpoint = LocalCheckpoint(build_checkpoint(tmp_path / "any", "llama"))
    plan = chain(7)
    use = disk_use_at_once(plan, 3, shard_transfer=ShardTransfer.FILE)
    work = SplitWork(plan, checkpoint, tmp_path, SplitOptions(), "cpu", ShardTransfer.FILE, use, frozenset(), {}, 3)
    layers = plan.layer_map.shard_to_layers
    return [(shard, work.of_shard(shard.name, layers[shard.name])) for shard in plan.shards]


def names(parts: list[Part]) -> list[str]:
    return [shard.name for shard, _ in parts]


def test_machines_apart_never_fill_the_same_layer(parts: list[Part]) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        waiting, in_work, most, begun = [*parts], list[Part](), 0, list[str]()
        while waiting or in_work:
            while len(in_work) < 3 and (part := next_part(waiting, in_work, apart=True)) is not None:
                layers = [layer for _, work in in_work for layer in work.plan.layouts]
                assert not set(layers) & part[1].plan.layouts.keys()
                waiting.remove(part)
                in_work.append(part)
                begun.append(part[0].name)
            most = max(most, len(in_work))
            in_work.remove(chance.choice(in_work))
        assert sorted(begun) == names(parts)
        assert most == 3


def test_on_one_machine_they_go_in_order(parts: list[Part]) -> None:
    assert next_part(parts[2:], parts[:2], apart=False) == parts[2]
    assert next_part(parts[1:], parts[:1], apart=True) == parts[2]
    assert next_part([], parts, apart=False) is None
    assert next_part(parts[1:2], parts[:1], apart=True) is None


def test_a_part_is_all_that_its_shard_needs_and_no_more(parts: list[Part]) -> None:
    shard, work = parts[3]
    assert work.plan.shards == (shard,)
    assert sorted(work.plan.layouts) == ["layers.6", "layers.7", "layers.8"]
    assert work.plan.layer_map.shard_to_layers == {shard.name: tuple(work.plan.layouts)}


def reached(plan: SplitPlan, at_once: int, deletes: bool, chance: random.Random) -> int:
    """The most that the disk is fuller than at the start, when shards are finished in some order."""
    waiting, in_work, written, freed, most = [*plan.shards], [], 0, 0, 0
    seen: set[str] = set()
    while waiting or in_work:
        while waiting and len(in_work) < at_once:
            shard = waiting.pop(0)
            in_work.append(shard)
            for layer in plan.layer_map.shard_to_layers[shard.name]:
                layout = plan.layouts[layer]
                written += layout.shard_bytes[shard.name] + (layout.header_bytes if layer not in seen else 0)
                seen.add(layer)
        most = max(most, written - freed)
        done = chance.choice(in_work)
        in_work.remove(done)
        freed += done.size if deletes else 0
    return most


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("deletes", [False, True])
def test_the_bound_holds_in_any_order_and_is_near(compression: str | None, deletes: bool) -> None:
    sizes = [8, 1, 3, 1, 5, 2]
    plan = plan_of(
        tuple(
            shard_of(f"shard-{n}", {f"model.layers.{n}.w": ("BF16", (size * MIB // 128, 64))})
            for n, size in enumerate(sizes)
        ),
        compression,
    )
    for at_once in (1, 2, 3, 6):
        bound = disk_use_at_once(plan, at_once, shard_transfer=ShardTransfer.FILE, freed=all_freed(plan, deletes))
        seen = max(reached(plan, at_once, deletes, random.Random(seed)) for seed in range(200))
        assert seen <= bound.added
        if not deletes:
            assert bound.added <= seen + 16384 * len(sizes)
        assert bound.created >= plan.output_bytes
    assert disk_use_at_once(
        plan, 6, shard_transfer=ShardTransfer.FILE, freed=all_freed(plan)
    ).added <= plan.output_bytes + (1 << 16)


def test_shards_that_are_fetched_count_as_often_as_they_are_in_work() -> None:
    plan = plan_of(
        tuple(shard_of(f"shard-{n}", {f"model.layers.{n}.w": ("BF16", (8192, 64))}, staged=True) for n in range(4))
    )
    streamed = disk_use_at_once(plan, 3, shard_transfer=ShardTransfer.STREAM, freed=all_freed(plan))
    files = disk_use_at_once(plan, 3, shard_transfer=ShardTransfer.FILE, freed=all_freed(plan))
    assert files.created - streamed.created == 3 * (-(-plan.shards[0].size // 4096) * 4096)
