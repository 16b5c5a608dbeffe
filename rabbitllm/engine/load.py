"""Builds a running model from a split directory: skeleton, weights, placement, hooks. Opens no checkpoint."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.utils import send_to_device
from torch import nn

from rabbitllm.base.options import RunOptions
from rabbitllm.engine import _published, skeleton
from rabbitllm.engine._embedding_rows import has_readable_rows
from rabbitllm.engine._first_use import ReadAhead, check_rows_before, wait_before
from rabbitllm.engine._saving import origin_of
from rabbitllm.engine._streamer import Streamer, device_executors
from rabbitllm.engine._weights import check_unused
from rabbitllm.engine.devices import Device, budget_of, memory_explained, resolve_devices
from rabbitllm.engine.expert_source import ExpertSource
from rabbitllm.engine.experts import bind_experts
from rabbitllm.engine.forwards import RowProducts, keep_finite, repeat_keys_on
from rabbitllm.engine.load_plan import (
    SCALES_IN_PLACE,
    LoadPlan,
    LoadPlanner,
    PartChooser,
    cache_room,
    held_bytes,
    only_a_part,
    refuse_too_little_memory,
)
from rabbitllm.engine.pass_line import PassLine
from rabbitllm.engine.placement import READY, Placement, Tier, enclosing
from rabbitllm.engine.prefetch import keep_units
from rabbitllm.engine.span_reader import PROBES, THROUGH_THE_CACHE, ReadMode, choose_read_mode
from rabbitllm.engine.streamed_model import Internals, StreamedModel, adopt
from rabbitllm.engine.units import UnitSource, input_embedding
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.quant.schemes import SCHEMES, check_compression
from rabbitllm.store.checksums import LayerChecks
from rabbitllm.store.layer_store import LayerStore, WeightFiles
from rabbitllm.telemetry.profiler import Profiler

logger = logging.getLogger(__name__)


_IN_PLACE = (*READY, Tier.PACKED)
"""Tiers of weights that a pass uses where they are."""


@torch.inference_mode(False)  # else weights loaded in a caller's inference mode could never have gradients
def load_model(
    folder: Path | WeightFiles,
    options: RunOptions,
    config_folder: Path | None = None,
    devices: Sequence[Device] | None = None,
    share: PartChooser | None = None,
    planner: LoadPlanner | None = None,
) -> StreamedModel:
    """A model of transformers' own class with the weights in `folder`.

    Args:
        folder: a finished split directory; or other opened files with weights.
        options: see `RunOptions`.
        config_folder: the folder of config and tokenizer, if not `folder` (a directory of RabbitLLM 1.1 has none).
        devices: the devices to compute on; by default those of `options`.
        share: chooses the part of the model that this process computes; None for the whole.
        planner: made the plan of these files, or of the same ones when they were planned, for these devices; None if
            nothing did.

    Returns:
        The model, with the attributes `tokenizer`, `processor`, `profiler`, `placement` and `unused_tensors`.

    Raises:
        IncompleteSplitError: a tensor is missing or damaged; each is named.
        UnknownArchitectureError: transformers does not support the model.
        DeviceError: the device does not exist.
        NotEnoughMemoryError: not even one layer at a time fits the memory that this process may use; or a GPU has too
            little (`OutOfDeviceMemory`).
        MissingPackageError: the layers are compressed and bitsandbytes is not installed, or they are published
            quantized in a format whose package is not installed.
    """
    store: WeightFiles = (
        LayerStore(folder, verify_checksums=options.verify_checksums) if isinstance(folder, Path) else folder
    )
    folder = store.folder
    for scheme in {tensor.quantized.scheme for tensor in store.tensors.values() if tensor.quantized} & SCHEMES.keys():
        check_compression(scheme)  # fails now rather than in the first pass
    home = folder if (folder / "config.json").exists() or config_folder is None else config_folder
    chosen = list(devices or resolve_devices(options.device, options.max_memory, options.pin_memory))
    planner = planner or LoadPlanner(options, chosen, home)
    limits = {device.name: budget_of(device, options) for device in chosen}
    with memory_explained(chosen, limits, "loading"):  # no variable here keeps what is to be freed after an error
        model = _bound(_planned(planner, store, options, home, chosen, share), store, home, chosen, options)
    model.tokenizer = planner.tokenizer(home)
    return model


def _planned(
    planner: LoadPlanner,
    store: WeightFiles,
    options: RunOptions,
    home: Path,
    devices: Sequence[Device],
    share: PartChooser | None,
) -> LoadPlan:
    plan = planner.take(store, home, options)
    if share is not None:
        plan = only_a_part(plan, share, store, devices, options)
    refuse_too_little_memory(plan, devices)
    return plan


def _bound(
    plan: LoadPlan, store: WeightFiles, home: Path, devices: Sequence[Device], options: RunOptions
) -> StreamedModel:
    """The model of a plan, with its weights resident or streamed; see `load_model`."""
    by_name = {device.name: device for device in devices}
    plan = plan.as_multiplied()
    skeleton.materialise_buffers(plan.model, _device_finder(plan.placement, by_name), plan.weights.absent)
    profiler = Profiler(options.profiling, "Passes, by stage")
    plan, streamer = _with_weights(plan, store, by_name, profiler, options)
    _warn_of_unused(plan, store)
    _adapt_modules(plan, store, by_name, options)
    return _streamed(plan, store, home, streamer, profiler, options)


def _with_weights(
    plan: LoadPlan, store: WeightFiles, by_name: Mapping[str, Device], profiler: Profiler, options: RunOptions
) -> tuple[LoadPlan, Streamer]:
    """Load what is resident, and install the hooks that stream the rest; the plan may then pin other units.

    Read modes come first: they depend on whether what is streamed fits into host memory with all resident weights.
    """
    model, sources = plan.model, plan.sources
    streamed = (sources[placed.unit] for placed in plan.placement.units if placed.tier is Tier.STREAMED)
    read_mode = choose_read_mode(store, [span for s in streamed for span in s.spans], cache_room(plan.placement))
    read_modes = _expert_read_modes(plan.experts, plan.placement, store)
    placement, pinned = keep_units(plan.placement, sources, by_name, store)
    profiler.in_place = _in_place(model, sources, placement)
    in_files = (p.unit for p in placement.units if p.tier in _IN_PLACE and by_name[p.device].shares_host_memory)
    mapped = [sources[unit] for unit in in_files]
    embedding = input_embedding(model)  # in its stored form a pass reads a few rows of it
    by_rows = [embedding] if embedding is not None else []
    whole = {s.unit.name: s.spans for s in mapped if not (s.is_view and has_readable_rows(s, by_rows))}
    read_ahead = ReadAhead(whole, store, store.checks)
    with torch.no_grad():
        pools = bind_experts(model, plan.experts, placement, by_name, store, profiler, read_modes)
        executors = device_executors(sources, placement, by_name, store, profiler, pinned, read_mode)
        streamer = Streamer(model, sources, placement, executors, store, profiler, pools, options.prefetching)
    _compare_before_use(mapped, whole, read_ahead, store.checks)
    return replace(plan, placement=placement), streamer


def _adapt_modules(plan: LoadPlan, store: WeightFiles, by_name: Mapping[str, Device], options: RunOptions) -> None:
    """Change what modules compute where a device, a dtype, a published format or an option needs it."""
    model, devices = plan.model, list(by_name.values())
    if len(devices) > 1:  # callers expect the output on the device of their inputs
        home_device = by_name[plan.placement.home].torch_device
        model.register_forward_hook(lambda module, args, output: send_to_device(output, home_device))
    for device in devices:
        if not device.has_bf16:
            repeat_keys_on(device.torch_device)
    if plan.is_narrowed:
        keep_finite(source.unit.module for source in plan.sources.values() if source.unit.is_layer)
    _published.finish(model, plan.quantizer)
    _published.warn_of_dequantizing(plan.quantizer, store.folder, model.dtype, devices, _coded(plan))
    if options.fast_bfloat16:
        RowProducts(model)


def _warn_of_unused(plan: LoadPlan, store: WeightFiles) -> None:
    model, unused = plan.model, plan.weights.unused
    if unused:
        logger.info("%d stored tensors are not used by %s.", len(unused), type(model).__name__)
        try:
            check_unused(model, plan.weights, store)
        except IncompleteSplitError as error:
            logger.warning("%s The config and the weights may belong to different models.", error.problem)


def _streamed(
    plan: LoadPlan, store: WeightFiles, home: Path, streamer: Streamer, profiler: Profiler, options: RunOptions
) -> StreamedModel:
    """The model with the methods and attributes of `StreamedModel`; all of it is bound by now."""
    placement, sources = plan.placement, plan.sources
    home_device = streamer.executors[placement.home].device.torch_device
    model = adopt(plan.model, home_device, placement)
    model.profiler, model.streamer, model.unused_tensors = profiler, streamer, plan.weights.unused
    if options.show_progress and (placement.streamed_bytes or placement.uploaded_bytes):
        model.pass_line = PassLine([sources[placed.unit].unit.module for placed in placement.units], streamer.waited)
    origin = origin_of(model, store, home, plan.weights, changes_itself=model.config.model_type in SCALES_IN_PLACE)
    held = held_bytes(placement, sources, plan.experts)
    model._internals = Internals(home_device, placement.is_resident, origin, held, options)
    return model


def _in_place(model: nn.Module, sources: Mapping[str, UnitSource], placement: Placement) -> dict[str, int]:
    """Device and tier -> stored bytes that each pass uses in place, without the embedding, of which it uses rows."""
    embedding = input_embedding(model)
    nbytes = Counter[str]()
    for placed in placement.units:
        if placed.tier in _IN_PLACE and sources[placed.unit].unit.module is not embedding:
            nbytes[f"{placed.device} {placed.tier.value}"] += placed.stored
    return dict(nbytes)


def _compare_before_use(
    mapped: Sequence[UnitSource], whole: Container[str], read_ahead: ReadAhead, checks: LayerChecks | None
) -> None:
    """Compare each mapped unit with checksums before its use: those in `whole` completely, others by their rows."""
    if checks is None:
        return
    for source in mapped:
        unit = source.unit
        if unit.name in whole:
            wait_before(unit.module, functools.partial(read_ahead.wait_for, unit.name))
        else:
            check_rows_before(unit.module, next(iter(source.stored.values())), checks)


def _expert_read_modes(
    experts: Sequence[ExpertSource], placement: Placement, store: WeightFiles
) -> dict[str, ReadMode]:
    """Device -> the read mode of streamed experts; those that are read through the page cache stay in it, since many
    are used again."""
    read_modes = {}
    for pool in placement.pools:
        names = {placed.unit for placed in placement.experts if placed.device == pool.device}
        chosen = [source for source in experts if source.name in names]
        read_mode = THROUGH_THE_CACHE
        if all(source.in_blocks for source in chosen):
            sample = [span for source in chosen[:PROBES] for span in source.spans(source.experts // 2)]
            read_mode = choose_read_mode(store, sample, cache_room(placement), pool.stored)
        read_modes[pool.device] = read_mode if read_mode.direct else THROUGH_THE_CACHE
    return read_modes


def _device_finder(placement: Placement, devices: Mapping[str, Device]) -> Callable[[str], torch.device]:
    """Module path -> the torch device of the unit around it, else of the first unit."""
    owners = {placed.unit: devices[placed.device].torch_device for placed in placement.units}
    home = devices[placement.home].torch_device
    return lambda path: owners.get(enclosing(path, owners) or "", home)


def _coded(plan: LoadPlan) -> list[bool]:
    """For each parameter that a quantizer makes, whether it is multiplied from its codes."""
    jobs = (job for source in plan.sources.values() for job in source.jobs)
    leaves = (leaf for source in plan.experts for leaf in source.leaves.values())
    multiplied = [(job.recipe, bool(job.quantized)) for job in jobs]
    multiplied += [(leaf.recipe, leaf.matrix_type is not None) for leaf in leaves]
    return [coded for recipe, coded in multiplied if _published.loads(recipe.converter, plan.quantizer)]
