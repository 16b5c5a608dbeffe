"""Plans of checkpoints that exist as headers only, and what a real call's plan says of the disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rabbitllm.base.options import ShardPolicy, SplitOptions
from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.checkpoints.hub import HubCheckpoint
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.checkpoints.naming import assign_layers
from rabbitllm.formats.tensor_spec import TensorSpec, byte_size
from rabbitllm.quant.schemes import DOUBLE, NF4_BLOCK, SCALE_BYTES, scheme_of
from rabbitllm.splitter.disk_budget import DiskBudget, DiskUse, ShardTransfer, disk_use
from rabbitllm.splitter.plan import PlannedShard, SplitPlan, make_plan
from rabbitllm.splitter.request import SplitRequest, disk_budget_of, plan_split
from tests.support.splitting import Call

SOURCE = SourceIdentity("local", "m", None, {})
MIB = 1 << 20


def shard_of(name: str, tensors: dict[str, tuple[str, tuple[int, ...]]], staged: bool = False) -> PlannedShard:
    """A shard that holds these tensors one after the other: name -> dtype and shape."""
    specs, offset = [], 100
    for tensor, (dtype, shape) in tensors.items():
        specs.append(TensorSpec(tensor, dtype, shape, name, offset, byte_size(dtype, shape)))
        offset += specs[-1].nbytes
    return PlannedShard(name, offset, "sampled:0", tuple(specs), staged)


def plan_of(shards: tuple[PlannedShard, ...], compression: str | None = None) -> SplitPlan:
    names = [tensor.name for shard in shards for tensor in shard.tensors]
    return make_plan(SOURCE, shards, assign_layers(names, "llama"), compression)


def even(shards: int, nbytes: int, staged: bool = False) -> tuple[PlannedShard, ...]:
    """Shards with one layer each, of so many bytes in bf16."""
    return tuple(
        shard_of(f"shard-{n}", {f"model.layers.{n}.w": ("BF16", (nbytes // 128, 64))}, staged) for n in range(shards)
    )


def all_freed(plan: SplitPlan, deletes: bool = True) -> dict[str, int]:
    """What a disk gets back where each shard of a plan is deleted and was the only one to have its bytes."""
    return {shard.name: shard.size for shard in plan.shards} if deletes else {}


def uses_of(call: Call) -> dict[ShardTransfer, DiskUse]:
    """What the disk is planned to take for a sequential call, by the way that shards arrive."""
    source = call.find()
    assert source.repository is not None or source.local is not None
    checkpoint = HubCheckpoint(source.repository) if source.repository else LocalCheckpoint(source.local)  # type: ignore[arg-type]
    options = SplitOptions(call.compression, shards=ShardPolicy.DELETE_USED)
    request = SplitRequest(checkpoint, source.split_folder, {"model_type": "llama"}, options)
    plan = plan_split(request)
    disk_budget = disk_budget_of(request, plan)
    return {
        way: peak_of(plan, shard_transfer=way, freed=disk_budget.freed, small_files=disk_budget.small_files)
        for way in ShardTransfer
    }


def resident_bytes(plan: SplitPlan, bare: SplitPlan) -> int:
    """Memory in which all of a split's weights stay: as they are stored, scales that are made of quantized ones
    with them, and room to make the largest layer.

    Args:
        plan: the split.
        bare: the same with all tensors as they are.
    """
    of = plan.chosen.schemes.get if plan.chosen is not None else None
    scale_bytes = 0
    for spec in plan.tensors:
        if (of(spec.name) if of is not None else scheme_of(spec, plan.compression)) == DOUBLE:
            scale_bytes += math.ceil(spec.elements / NF4_BLOCK) * SCALE_BYTES
    return plan.output_bytes + scale_bytes + max((layout.size for layout in bare.layouts.values()), default=0)


def peak_of(
    plan: SplitPlan, at_once: int = 1, *, shard_transfer: ShardTransfer = ShardTransfer.FILE, **state: Any
) -> DiskUse:
    """The disk use of a split; `state` are fields of `DiskBudget`."""
    return disk_use(plan, DiskBudget(Path(), **state), shard_transfer, at_once)
