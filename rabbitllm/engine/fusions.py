"""Which modules compute by compiled code, and in which order they get it."""

from __future__ import annotations

from torch import nn

from rabbitllm.base.programs import HALVES
from rabbitllm.engine._activations import fuse_activations
from rabbitllm.engine._attention import fuse_attention, fuse_layers, is_whole_layer
from rabbitllm.engine._gates import fuse_gates
from rabbitllm.engine._indexes import fuse_angles
from rabbitllm.engine._mixtures import fuse_mixtures
from rabbitllm.engine._norms import fuse_norms
from rabbitllm.engine._recurrences import fuse_recurrences
from rabbitllm.engine._rotary import fuse_rotary
from rabbitllm.engine._routed import fuse_experts
from rabbitllm.engine._streams import fuse_streams
from rabbitllm.engine._whole_steps import fuse_models
from rabbitllm.engine._widened import widen_convolutions
from rabbitllm.engine.forwards import group_llama4
from rabbitllm.engine.load_plan import LoadPlan
from rabbitllm.engine.placement import Tier


def fuse(model: nn.Module, *, is_multiplied: bool) -> None:
    """Give forwards of compiled code to the modules of a model all of whose devices are CPUs.

    Args:
        model: with its weights.
        is_multiplied: whether matrices are multiplied by this package's kernels, which whole layers need.
    """
    fuse_norms(model)  # first: recurrences take their forms
    fuse_recurrences(model, prompts=is_multiplied)
    if is_multiplied:
        fuse_attention(model)
        fuse_angles(model)
        fuse_gates(model)
    fuse_activations(model)
    fuse_experts(model, prompts=is_multiplied)
    fuse_mixtures(model)
    if is_multiplied:
        fuse_layers(model)
        fuse_streams(model)
        fuse_models(model)
        widen_convolutions(model)
        group_llama4(model)
    fuse_rotary(model, prompts=is_multiplied)  # of attentions that are not replaced as a whole


def layers_are_one_call(plan: LoadPlan) -> bool:
    """Whether all decoder layers stay in memory and compute a token by one call, without experts; the skeleton, which
    needs no weights for this, gets other forwards."""
    layers = [placed for placed in plan.placement.units if plan.sources[placed.unit].unit.is_layer]
    stay = all(
        placed.device in plan.placement.hosts
        and (placed.tier is Tier.RESIDENT or (placed.tier is Tier.PACKED and plan.sources[placed.unit].is_view))
        for placed in layers
    )
    if plan.model.dtype not in HALVES or not stay:
        return False
    for fuse_parts in (fuse_norms, fuse_recurrences, fuse_attention, fuse_gates, fuse_layers):
        fuse_parts(plan.model)
    return all(map(is_whole_layer, (plan.sources[placed.unit].unit.module for placed in layers)))
