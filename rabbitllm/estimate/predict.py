"""Predicts the seconds per token before a split is made: from the engine's placement and this machine's rates.

Only the needed rates are measured: none for a form that no unit is multiplied from, and no slowdown by reading if
nothing is streamed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rabbitllm import prepare
from rabbitllm.base.options import StreamOptions
from rabbitllm.engine.devices import resolve_devices
from rabbitllm.engine.load_plan import LoadPlan, make_load_plan, too_little_memory
from rabbitllm.engine.placement import Placement, Tier
from rabbitllm.errors import RabbitLLMError
from rabbitllm.estimate.generation import Experts, GenerationEstimate, TierContent
from rabbitllm.estimate.machine import Machine
from rabbitllm.estimate.pass_estimator import PassEstimator
from rabbitllm.estimate.products import can_measure
from rabbitllm.estimate.routing import RoutedWork, routed_work
from rabbitllm.estimate.source_scan import SourceScan
from rabbitllm.estimate.work import work_of
from rabbitllm.splitter.plan import PlannedFiles
from rabbitllm.store.layer_file import LAYER_SUFFIX
from rabbitllm.store.layer_store import LayerStore, WeightFiles

STAYING = (Tier.RESIDENT, Tier.PACKED, Tier.PINNED)
"""Tiers that are not read from the disk again."""


def generations(
    survey: SourceScan, options: StreamOptions, min_free: int
) -> tuple[tuple[str, ...], list[GenerationEstimate]]:
    """Return the devices of a model, and the generation estimate at each compression.

    Args:
        survey: of the model.
        options: as `AutoModel.from_pretrained` would get them.
        min_free: bytes of the disk to keep free.

    Raises:
        DeviceError: the device does not exist.
    """
    devices = resolve_devices(options.device, options.max_memory, options.pin_memory)
    machine = Machine(devices, options, min_free)
    found = []
    with prepare.config_folder(survey.source) as home:
        for compression in survey.folders:
            try:
                store = _store(survey, compression)
                drawn = make_load_plan(store, options, home, devices) if store is not None else None
            except RabbitLLMError as error:
                found.append(GenerationEstimate(compression, obstacle=error.problem, refused=True))
                continue
            if store is None or drawn is None:
                found.append(GenerationEstimate(compression, obstacle=survey.obstacle(compression)))
                continue
            try:
                found.append(foretell(compression, drawn, store.folder, machine, _readable(survey, compression)))
            except RabbitLLMError as error:
                found.append(GenerationEstimate(compression, obstacle=error.problem))
    return tuple(device.name for device in devices), found


def _store(survey: SourceScan, compression: str | None) -> WeightFiles | None:
    """Return the layer files, existing or planned."""
    folder = survey.folders[compression]
    if compression in survey.manifests and survey.obstacle(compression) is None:
        return LayerStore(folder)
    return PlannedFiles(survey.plans[compression], folder) if compression in survey.plans else None


def _readable(survey: SourceScan, compression: str | None) -> Sequence[Path]:
    """Return files to measure reading with: layer files of this compression, or shards, or other layer files."""
    groups = [list(survey.folders[compression].glob(f"*{LAYER_SUFFIX}"))]
    if survey.source.local is not None and survey.checkpoint is not None:
        groups.append([survey.source.local / shard for shard in survey.checkpoint.index.shards])
    groups += [list(folder.glob(f"*{LAYER_SUFFIX}")) for folder in survey.folders.values()]
    return next((found for group in groups if (found := [path for path in group if path.is_file()])), [])


def foretell(
    compression: str | None, drawn: LoadPlan, folder: Path, machine: Machine, readable: Sequence[Path]
) -> GenerationEstimate:
    """Return the generation estimate for a model from its load plan.

    Args:
        compression: of its files.
        drawn: the load plan.
        folder: the folder of its layer files, which may not exist yet.
        machine: the machine to run it on.
        readable: files that may be on the same disk as the layer files.
    """
    work, routed = work_of(drawn), routed_work(drawn)
    experts, refusal = experts_of(routed), too_little_memory(drawn, machine.devices)
    stays = sum(p.counted for p in drawn.placement.units if p.tier in STAYING)
    found = GenerationEstimate(
        compression,
        placed=_held(drawn.placement),
        stays_bytes=stays + sum(own.kept_bytes + own.host_bytes for own in experts),
        copied_bytes=sum(unit.uploaded for unit in work if not unit.once) + sum(own.copied_bytes for own in experts),
        read_bytes=sum(unit.streamed for unit in work if not unit.once) + sum(own.read_bytes for own in experts),
        experts=experts,
        placement=drawn.placement,
        too_little_memory=None if refusal is None else refusal.problem,
    )
    if refusal is not None or not can_measure():
        return found
    with machine.something_to_read(folder, readable) as files:
        pace = PassEstimator(drawn, work, routed, machine, files).pace()
    return dataclasses.replace(
        found,
        from_the_disk=pace.from_the_disk,
        token_seconds=pace.token_seconds,
        first_token_seconds=pace.first_token_seconds,
        speeds=pace.speeds,
        found_token_seconds=pace.found_token_seconds,
    )


def _held(placement: Placement) -> tuple[TierContent, ...]:
    units: Counter[tuple[str, Tier]] = Counter()
    nbytes: Counter[tuple[str, Tier]] = Counter()
    for placed in placement.units:
        units[placed.device, placed.tier] += 1
        nbytes[placed.device, placed.tier] += placed.counted
    return tuple(
        TierContent(device, tier.value, count, nbytes[device, tier]) for (device, tier), count in units.items()
    )


def experts_of(work: Sequence[RoutedWork]) -> tuple[Experts, ...]:
    """Sum up the modules of each device and tier."""
    groups: dict[tuple[str, Tier], list[RoutedWork]] = {}
    for routed in work:
        groups.setdefault((routed.device, routed.tier), []).append(routed)
    found = []
    for (device, tier), own in groups.items():
        stored = [routed.experts * routed.expert_bytes for routed in own]
        found.append(
            Experts(
                device=device,
                tier=tier.value,
                count=sum(routed.experts for routed in own),
                used=sum(routed.used for routed in own),
                stored_bytes=sum(stored),
                used_bytes=sum(routed.used_bytes for routed in own),
                kept_bytes=round(sum(one.on_device * size for one, size in zip(own, stored, strict=True))),
                host_bytes=round(sum(one.in_host * size for one, size in zip(own, stored, strict=True))),
                read_bytes=round(sum(routed.read_bytes for routed in own)),
                copied_bytes=round(sum(routed.copied_bytes for routed in own)),
            )
        )
    return tuple(found)
