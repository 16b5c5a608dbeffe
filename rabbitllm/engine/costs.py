"""What each unit of a model takes, as the placement asks it. Knows tensors and their sizes, and reads no weights.

The tensors may lie in files or only be planned: the same costs come of both, so that a plan places what a model will.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from rabbitllm.engine.devices import Device
from rabbitllm.engine.embedding_rows import can_bring_rows
from rabbitllm.engine.free_memory import available_ram
from rabbitllm.engine.placement import Placement, Tier, UnitCost
from rabbitllm.engine.unit_source import UnitSource


def unit_costs(model: nn.Module, sources: Mapping[str, UnitSource]) -> list[UnitCost]:
    """A cost for each unit, in the order of `sources`, which is that of a pass."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    costs = []
    for name, source in sources.items():
        module = source.unit.module
        # a small module may hand out its own weights as its output (a learned query), so they must outlive its forward
        streamable = source.unit.is_layer or isinstance(module, (nn.Linear, nn.Embedding))
        stays = source.unit.holds_units or not streamable or not source.jobs
        rows = can_bring_rows(source, embedding)
        costs.append(
            UnitCost(name, source.stored_bytes, source.ready_bytes, source.is_view, source.unit.is_layer, stays, rows)
        )
    return costs


def cache_room(placement: Placement, devices: Iterable[Device]) -> int:
    """Bytes of host memory that the page cache may take beside what will stay there, none of which is there yet."""
    on_host = {device.name for device in devices if device.shares_host_memory}
    kept = sum(
        p.stored
        for p in placement.units
        if p.tier is Tier.PINNED or (p.device in on_host and p.tier is not Tier.STREAMED)
    )
    return available_ram() - kept
