"""The memory cost of each unit of a model, as input to the placement. Uses the sizes of tensors, and reads no weights.

Tensors in files and planned ones have the same costs, so that a plan and the loaded model have the same placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from rabbitllm.engine.devices import Device
from rabbitllm.engine.embedding_rows import can_bring_rows
from rabbitllm.engine.expert_source import ExpertSource
from rabbitllm.engine.free_memory import available_ram
from rabbitllm.engine.placement import READY, SLOTS, Placement, SharedTensor, Tier, UnitCost
from rabbitllm.engine.unit_source import UnitSource
from rabbitllm.engine.units import input_embedding


def unit_costs(
    model: nn.Module, sources: Mapping[str, UnitSource], experts: Iterable[ExpertSource] = ()
) -> list[UnitCost]:
    """A cost for each unit, in the order of `sources`, which is that of a pass.

    Args:
        model: the skeleton.
        sources: the units, without the experts that are streamed individually.
        experts: the experts modules that are streamed by expert.
    """
    routed: dict[str, int] = {}
    shared = _shared(sources.values())
    for expert in experts:
        routed[expert.unit] = routed.get(expert.unit, 0) + expert.stored_bytes
    embedding = input_embedding(model)
    costs = []
    for name, source in sources.items():
        module = source.unit.module
        # a small module may hand out its own weights as its output (a learned query), so they must outlive its forward
        streamable = source.unit.is_layer or isinstance(module, (nn.Linear, nn.Embedding))
        stays = source.unit.holds_units or not streamable or not source.jobs
        rows = can_bring_rows(source, embedding)
        sizes = source.stored_bytes, source.ready_bytes, source.is_view
        own = routed.get(name, 0), source.scale_bytes
        tied = tuple(
            SharedTensor(job.recipe.key, *source.bytes_of(job)) for job in source.jobs if job.recipe.key in shared
        )
        costs.append(UnitCost(name, *sizes, source.unit.is_layer, stays, rows, *own, tied))
    return costs


def _shared(sources: Iterable[UnitSource]) -> set[str]:
    """Recipe keys of tensors that several units share.

    In a plan of a large model one source stands for many layers, which share no tensors.
    """
    users: dict[str, set[int]] = {}
    for source in sources:
        for job in source.jobs:
            users.setdefault(job.recipe.key, set()).add(id(source))
    return {key for key, own in users.items() if len(own) > 1}


def held_bytes(placement: Placement, sources: Mapping[str, UnitSource], experts: Iterable[ExpertSource]) -> int:
    """Bytes of weights that are in memory between two passes, and of the buffers for streamed weights.

    A tensor that several units use in its stored form counts once.
    """
    as_stored: dict[str, int] = {}
    made: dict[frozenset[str], int] = {}
    largest: dict[str, int] = {}
    for placed in placement.units:
        source = sources[placed.unit]
        if placed.tier is Tier.RESIDENT and not source.is_view:
            made[frozenset(source.stored)] = source.ready_bytes
        elif placed.tier in (*READY, Tier.PACKED, Tier.PINNED):
            as_stored |= {name: stored.nbytes for name, stored in source.stored.items()}
            if source.is_view and source.scale_bytes and placed.tier is not Tier.PINNED:
                made[frozenset(source.stored)] = source.scale_bytes
        if placed.tier in (Tier.STREAMED, Tier.PINNED):
            largest[placed.device] = max(largest.get(placed.device, 0), source.buffer_bytes)
    for expert in experts:
        tier = next(placed.tier for placed in placement.experts if placed.unit == expert.name)
        if tier is not Tier.ROUTED:
            made[frozenset([expert.name])] = expert.ready_bytes if tier is Tier.RESIDENT else expert.stored_bytes
    pools = sum(pool.nbytes + pool.host_slots * pool.slot for pool in placement.pools)
    return sum(as_stored.values()) + sum(made.values()) + pools + SLOTS * sum(largest.values())


def cache_room(placement: Placement, devices: Iterable[Device]) -> int:
    """Bytes of host memory left to the page cache once all resident weights are loaded. Call it before any is."""
    on_host = {device.name for device in devices if device.shares_host_memory}
    kept = sum(
        p.counted
        for p in placement.units
        if p.tier is Tier.PINNED or (p.device in on_host and p.tier in (Tier.RESIDENT, Tier.PACKED))
    )
    mapped = sum(p.stored for p in placement.experts if p.tier is not Tier.ROUTED)
    pools = sum(p.nbytes if p.device in on_host else p.host_slots * p.slot for p in placement.pools)
    return available_ram() - kept - mapped - pools
