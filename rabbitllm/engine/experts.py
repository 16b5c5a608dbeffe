"""Binds the experts of a model: as ordinary tensors, as stacks over the mapped files, or from a pool.

`placement.py` chooses among these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from rabbitllm.base.forks import Workers
from rabbitllm.engine.devices import Device
from rabbitllm.engine.expert_pool import ExpertPool, PooledExperts, transit_slots
from rabbitllm.engine.expert_source import ExpertSource, with_tables
from rabbitllm.engine.expert_stack import ExpertStack, Supply
from rabbitllm.engine.expert_supply import FileBytes, MappedExperts, mapped_bytes
from rabbitllm.engine.first_use import check_experts_before
from rabbitllm.engine.pinned_memory import HostBuffers
from rabbitllm.engine.placement import ExpertCost, Placement, Tier
from rabbitllm.engine.span_reader import ReadMode, SpanReader
from rabbitllm.store.layer_store import WeightFiles
from rabbitllm.telemetry.profiler import Profiler


def expert_costs(sources: Sequence[ExpertSource]) -> list[ExpertCost]:
    """The memory cost of the experts of each module, as input to the placement."""
    return [
        ExpertCost(
            name=source.name,
            unit=source.unit,
            stored=source.stored_bytes,
            ready=source.ready_bytes,
            is_ready=source.is_ready,
            experts=source.experts,
            slot=source.nbytes,
            transit=transit_slots([source]),
        )
        for source in sources
    ]


def bind_experts(
    model: PreTrainedModel,
    sources: Sequence[ExpertSource],
    placement: Placement,
    devices: Mapping[str, Device],
    store: WeightFiles,
    profiler: Profiler,
    ways: Mapping[str, ReadMode],
) -> dict[str, ExpertPool]:
    """Give every routed module its experts.

    Args:
        model: the skeleton; stacks and hooks are added to it.
        sources: the modules.
        placement: the tiers and devices of their experts.
        devices: by name.
        store: the layer files.
        profiler: records reads and hits.
        ways: device -> how its experts are read.

    Returns:
        Device name -> its pool, for those that have one.
    """
    file_bytes = mapped_bytes(store)
    places = {placed.unit: placed for placed in placement.experts}
    known = {
        source.name: with_tables(source, store, devices[places[source.name].device].torch_device) for source in sources
    }
    pools = {}
    for pool in placement.pools:
        own = [known[p.unit] for p in placement.experts if p.device == pool.device]
        device = devices[pool.device]
        host = None if device.shares_host_memory else HostBuffers(device)
        disk = SpanReader(store, ways[pool.device], store.checks)
        pools[pool.device] = made = ExpertPool(model, own, device, pool.slots, disk, profiler, host, pool.host_slots)
        for number, source in enumerate(own):
            supply = PooledExperts(made, number)
            _bind(source, supply, device.torch_device)
            source.module.register_forward_pre_hook(supply.before, with_kwargs=True)
            source.module.register_forward_hook(supply.after, always_call=True)
    mapped = [placed for placed in placement.experts if placed.tier is not Tier.ROUTED]
    for placed in mapped:
        _bind_mapped(model, known[placed.unit], file_bytes, placed.tier is Tier.RESIDENT)
    _check_mapped([known[placed.unit] for placed in mapped], store)
    return pools


def _check_mapped(sources: Sequence[ExpertSource], store: WeightFiles) -> None:
    """Have the experts in mapped files compared with their checksums, if there are checksums for each of them."""
    checks = store.checks
    if checks is None or not sources:
        return
    thread = Workers(1, "checksums")
    for source in sources:
        if all(checks.by_block(span.file) for span in source.spans(0)):
            check_experts_before(source, checks, thread)


def _bind(source: ExpertSource, supply: Supply, device: torch.device) -> None:
    for name, leaf in source.leaves.items():
        leaf.place.bind(ExpertStack(supply, name, leaf.place.shape, leaf.place.dtype, device))


def _bind_mapped(model: PreTrainedModel, source: ExpertSource, file_bytes: FileBytes, for_good: bool) -> None:
    """Bind experts on the host: as views of the file if possible, else as copies, made once or for each use."""
    supply = MappedExperts(model, source, file_bytes)
    for name, leaf in source.leaves.items():
        whole = supply.strided(name)
        if whole is None:
            stack = ExpertStack(supply, name, leaf.place.shape, leaf.place.dtype, torch.device("cpu"))
            lasting = for_good and leaf.packed is None
            whole = stack.copied(range(source.experts)) if lasting else stack
        leaf.place.bind(whole)
