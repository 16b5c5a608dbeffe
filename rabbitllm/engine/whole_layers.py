"""Which plans have layers that compute a token by one call of compiled code."""

from __future__ import annotations

import torch

from rabbitllm.engine._attention import fuse_attention, fuse_layers, is_whole_layer
from rabbitllm.engine._gates import fuse_gates
from rabbitllm.engine._norms import fuse_norms
from rabbitllm.engine._recurrences import fuse_recurrences
from rabbitllm.engine.load_plan import LoadPlan
from rabbitllm.engine.placement import Tier


def layers_are_one_call(plan: LoadPlan) -> bool:
    """Whether all decoder layers stay in memory and compute a token by one call, without experts; the skeleton, which
    needs no weights for this, gets other forwards."""
    layers = [placed for placed in plan.placement.units if plan.sources[placed.unit].unit.is_layer]
    stay = all(
        placed.device in plan.placement.hosts
        and (placed.tier is Tier.RESIDENT or (placed.tier is Tier.PACKED and plan.sources[placed.unit].is_view))
        for placed in layers
    )
    if plan.model.dtype != torch.bfloat16 or not stay:
        return False
    for fuse in (fuse_norms, fuse_recurrences, fuse_attention, fuse_gates, fuse_layers):
        fuse(plan.model)
    return all(map(is_whole_layer, (plan.sources[placed.unit].unit.module for placed in layers)))
