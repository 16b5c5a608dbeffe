"""What a device without host memory multiplies from its codes, where its trial says so (`fused_choice.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rabbitllm.engine.devices import Device
from rabbitllm.engine.expert_source import ExpertSource, packed_by
from rabbitllm.engine.fused_choice import FusedChoice
from rabbitllm.engine.placement import Placement, Tier
from rabbitllm.engine.quantized_weight import StoredMatrix
from rabbitllm.engine.unit_source import Packs, UnitSource, source_of
from rabbitllm.engine.weights import WeightMap
from rabbitllm.quant.compression import Quantized
from rabbitllm.quant.fused_products import FusedMatrix
from rabbitllm.store.layer_store import WeightFiles


def fused_units(
    sources: Mapping[str, UnitSource],
    placement: Placement,
    devices: Mapping[str, Device],
    weights: WeightMap,
    store: WeightFiles,
    choice: FusedChoice,
) -> dict[str, UnitSource]:
    """Units that other devices than the host make for each use, multiplied from their codes where that is sooner.

    What is resident was made once, and stays so: any number of inputs is then multiplied at once.
    """
    found = {}
    for placed in placement.units:
        device = devices[placed.device]
        if not device.shares_host_memory and placed.tier not in (Tier.RESIDENT, Tier.ROWS, Tier.ELSEWHERE):
            packs = _packs_on(device, choice)
            found[placed.unit] = source_of(sources[placed.unit].unit, weights, store, packs)
    return found


def fused_experts(
    experts: Sequence[ExpertSource], placement: Placement, devices: Mapping[str, Device], choice: FusedChoice
) -> list[ExpertSource]:
    """The same for experts; those on the host are as they were."""
    places = {placed.unit: devices[placed.device] for placed in placement.experts}
    return [
        source if places[source.name].shares_host_memory else packed_by(source, _packs_on(places[source.name], choice))
        for source in experts
    ]


def _packs_on(device: Device, choice: FusedChoice) -> Packs:
    def packs(form: Quantized, dtype: torch.dtype) -> type[StoredMatrix] | None:
        return FusedMatrix if choice.pays(device, form, dtype) else None

    return packs
