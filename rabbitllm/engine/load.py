"""Builds a running model from a split directory: skeleton, weights, placement, hooks. Opens no checkpoint."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.utils import send_to_device

from rabbitllm.base.grouping import summed
from rabbitllm.base.options import RunOptions
from rabbitllm.engine import _published, forwards, skeleton
from rabbitllm.engine._copies import WeightCopies
from rabbitllm.engine._embedding_rows import has_readable_rows
from rabbitllm.engine._first_use import ReadAhead, check_rows_before, read_none_around, wait_before
from rabbitllm.engine._mixtures import routers_in
from rabbitllm.engine._recurrences import fuse_recurrences
from rabbitllm.engine._saving import origin_of
from rabbitllm.engine._streamer import Streamer, device_executors
from rabbitllm.engine._weights import check_unused
from rabbitllm.engine.devices import Device, budget_of, memory_explained, resolve_devices
from rabbitllm.engine.expert_source import ExpertSource
from rabbitllm.engine.experts import bind_experts, ranges_in_place
from rabbitllm.engine.fusions import fuse
from rabbitllm.engine.heads import Heads, plan_heads
from rabbitllm.engine.load_plan import (
    SCALES_IN_PLACE,
    LoadPlan,
    LoadPlanner,
    PartChooser,
    cache_room,
    held_bytes,
    only_a_part,
    too_little_memory,
)
from rabbitllm.engine.pass_line import PassLine
from rabbitllm.engine.placement import READY, Placement, Tier, enclosing
from rabbitllm.engine.prefetch import keep_units, wait_for_jobs
from rabbitllm.engine.span_reader import PROBES, ReadMode, choose_read_mode
from rabbitllm.engine.streamed_model import Internals, StreamedModel, adopt
from rabbitllm.engine.units import input_embedding
from rabbitllm.errors import IncompleteSplitError, RabbitLLMError
from rabbitllm.quant.schemes import SCHEMES, bitsandbytes
from rabbitllm.store.layer_store import LayerStore, WeightFiles
from rabbitllm.telemetry.passes import LOAD, PLAN
from rabbitllm.telemetry.profiler import Profiler

logger = logging.getLogger(__name__)


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
        MissingPackageError: the layers are compressed, a GPU computes, and bitsandbytes is not installed; or they
            are published quantized in a format whose package is not installed.
    """
    store: WeightFiles = (
        LayerStore(folder, verify_checksums=options.verify_checksums) if isinstance(folder, Path) else folder
    )
    home = store.folder if (store.folder / "config.json").exists() or config_folder is None else config_folder
    chosen = list(devices or resolve_devices(options.device, options.max_memory, options.pin_memory))
    is_compressed = any(tensor.quantized and tensor.quantized.scheme in SCHEMES for tensor in store.tensors.values())
    if is_compressed and not all(device.shares_host_memory for device in chosen):
        bitsandbytes()  # fails now rather than in the first pass
    planner = planner or LoadPlanner(options, chosen, home)
    wait_for_jobs()
    if not all(device.shares_host_memory for device in chosen):
        gc.collect()  # the caller's own came too early for the buffers of a dropped model that a job still had
    limits = {device.name: budget_of(device, options) for device in chosen}
    with memory_explained(chosen, limits, "loading"):  # no variable here keeps what is to be freed after an error
        model = _bound(planner, share, store, home, chosen, options)
    model.tokenizer = planner.tokenizer(home)
    return model


def _bound(
    planner: LoadPlanner,
    share: PartChooser | None,
    store: WeightFiles,
    home: Path,
    devices: Sequence[Device],
    options: RunOptions,
) -> StreamedModel:
    """The planned model, with its weights resident or streamed; see `load_model`."""
    loading = Profiler(options.profiling, "Load, by stage")
    with loading.stage("model", PLAN):
        plan = planner.take(store, home, options)
    if share is not None:
        plan, options = only_a_part(plan, share, store, devices, options)
    of_heads = None
    if options.heads or (options.heads is None and plan.placement.moved_bytes):
        try:
            of_heads, plan = plan_heads(plan, store, home, options, devices)
        except RabbitLLMError as problem:
            if options.heads:
                raise
            logger.info("No heads for multi-token prediction are used: %s", problem.problem)
    if (error := too_little_memory(plan, devices)) is not None:
        raise error  # the system would kill the process in the first pass, without a message
    by_name = {device.name: device for device in devices}
    profiler = Profiler(options.profiling, "Passes, by stage")
    profiler.before = (loading,)
    plan, streamer = _with_weights(plan, store, by_name, profiler, loading, options)
    unused = plan.weights.unused
    if unused:
        logger.info("%d stored tensors are not used by %s.", len(unused), type(plan.model).__name__)
        try:
            check_unused(plan.model, plan.weights, store)
        except IncompleteSplitError as mismatch:
            logger.warning("%s The config and the weights may belong to different models.", mismatch.problem)
    _adapt_modules(plan, store, by_name, options)
    placement, sources = plan.placement, plan.sources
    device = by_name[placement.home].torch_device
    model = adopt(plan.model, device, placement)
    model.profiler, model.streamer, model.unused_tensors = profiler, streamer, unused
    if options.show_progress and (placement.streamed_bytes or placement.uploaded_bytes):
        model.pass_line = PassLine([sources[placed.unit].unit.module for placed in placement.units], streamer.waited)
    # all of it is bound by now
    origin = origin_of(model, store, home, plan.weights, changes_itself=model.config.model_type in SCALES_IN_PLACE)
    held = held_bytes(placement, sources, plan.experts)
    if of_heads is not None:
        beside = {of_heads.device.name: of_heads.device}
        heads, streamer = _with_weights(of_heads.plan, store, beside, Profiler(False, "Heads"), loading, options)
        _adapt_modules(heads, store, beside, options)
        model.heads = Heads(model, heads.model, streamer, of_heads.device.torch_device, of_heads.nbytes)
        held += of_heads.nbytes
    model._internals = Internals(device, placement.is_resident, origin, held, options)
    return model


def _with_weights(
    plan: LoadPlan,
    store: WeightFiles,
    by_name: Mapping[str, Device],
    profiler: Profiler,
    loading: Profiler,
    options: RunOptions,
) -> tuple[LoadPlan, Streamer]:
    """Load what is resident, and install the hooks that stream the rest; the plan may then pin other units.

    Read modes come first: they depend on whether what is streamed fits into host memory with all resident weights.
    Units in mapped files are compared with their checksums before their use: completely, or an embedding by its rows.
    """
    plan = plan.as_multiplied()
    skeleton.materialise_buffers(plan.model, _device_finder(plan.placement, by_name), plan.weights.absent)
    model, sources, checks = plan.model, plan.sources, store.checks
    room = cache_room(plan.placement)
    streamed = (sources[placed.unit] for placed in plan.placement.units if placed.tier is Tier.STREAMED)
    read_mode = choose_read_mode(store, [span for source in streamed for span in source.spans], room)
    read_modes = _expert_read_modes(plan.experts, plan.placement, store, room)
    placement, pinned = keep_units(plan.placement, sources, by_name, store)
    embedding = input_embedding(model)  # in its stored form a pass reads a few rows of it
    in_place = [placed for placed in placement.units if placed.tier in (*READY, Tier.PACKED)]
    read = [placed for placed in in_place if sources[placed.unit].unit.module is not embedding]
    profiler.in_place = summed((f"{placed.device} {placed.tier.value}", placed.stored) for placed in read)
    mapped = [sources[placed.unit] for placed in in_place if by_name[placed.device].shares_host_memory]
    by_rows = [embedding] if embedding is not None else []
    whole = {s.unit.name: s.spans for s in mapped if not (s.is_view and has_readable_rows(s, by_rows))}
    rows = [sources[placed.unit] for placed in placement.units if placed.tier is Tier.ROWS]
    read_none_around([*rows, *(mapped if placement.pools else ())], store)
    read_ahead = ReadAhead(whole, store, checks, ranges_in_place(plan.experts, placement), owner=model)
    with torch.no_grad():
        pools = bind_experts(model, plan.experts, placement, by_name, store, profiler, read_modes)
        executors = device_executors(sources, placement, by_name, store, profiler, pinned, read_mode)
        with loading.stage("copies", LOAD):
            copies = WeightCopies(model, sources, plan.experts, placement, store)
        streamer = Streamer(
            model, sources, placement, executors, store, profiler, pools, options.prefetching, loading, copies
        )
    for unit in (source.unit for source in mapped if checks is not None):
        if unit.name in whole:
            wait_before(unit.module, functools.partial(read_ahead.wait_for, unit.name))
        elif checks is not None:
            check_rows_before(unit.module, next(iter(sources[unit.name].stored.values())), checks)
    return replace(plan, placement=placement), streamer


def _adapt_modules(plan: LoadPlan, store: WeightFiles, by_name: Mapping[str, Device], options: RunOptions) -> None:
    """Change what modules compute where a device, a dtype, a published format or an option needs it."""
    model, devices = plan.model, list(by_name.values())
    if len(devices) > 1:  # callers expect the output on the device of their inputs
        home_device = by_name[plan.placement.home].torch_device
        model.register_forward_hook(lambda module, args, output: send_to_device(output, home_device))
    for device in devices:
        if not device.has_bf16:
            forwards.repeat_keys_on(device.torch_device)
    if model.dtype == torch.float16:
        forwards.widen_inputs(model)
    if plan.is_narrowed:
        forwards.keep_finite(source.unit.module for source in plan.sources.values() if source.unit.is_layer)
    if plan.quantizer is not None:  # as transformers' own loading does
        model.hf_quantizer = plan.quantizer
        plan.quantizer.postprocess_model(model)
    # each parameter, and whether it is multiplied from its codes
    multiplied = [(job.recipe, bool(job.quantized)) for source in plan.sources.values() for job in source.jobs]
    leaves = (leaf for source in plan.experts for leaf in source.leaves.values())
    multiplied += [(leaf.recipe, leaf.matrix_type is not None) for leaf in leaves]
    coded = [is_coded for recipe, is_coded in multiplied if _published.loads(recipe.converter)]
    _published.warn_of_dequantizing(plan.quantizer, store.folder, model.dtype, devices, coded)
    on_cpu = any(device.shares_host_memory for device in devices)
    is_fast = options.fast_bfloat16 if options.fast_bfloat16 is not None else on_cpu and not options.exact
    is_fast = is_fast and forwards.has_plain_matrices(model, plan.sources.values(), plan.experts)
    if is_fast := is_fast and forwards.load_kernels(model):
        forwards.RowProducts(model)
    is_multiplied = any(is_coded for _, is_coded in multiplied) or is_fast
    if not options.exact and all(device.shares_host_memory for device in devices):
        fuse(model, is_multiplied=is_multiplied)
    elif not options.exact and on_cpu:
        fuse_recurrences(model, prompts=is_multiplied)
    if is_multiplied and not (is_fast or options.exact):  # experts' inputs are rounded then, more than routers' sums
        forwards.RowProducts(model, routers_in(model))


def _expert_read_modes(
    experts: Sequence[ExpertSource], placement: Placement, store: WeightFiles, room: int
) -> dict[str, ReadMode]:
    """Device -> the read mode of streamed experts."""
    read_modes = {}
    for pool in placement.pools:
        names = {placed.unit for placed in placement.experts if placed.device == pool.device}
        chosen = [source for source in experts if source.name in names]
        sample = [span for source in chosen[:PROBES] for span in source.spans(source.experts // 2)]
        read_modes[pool.device] = choose_read_mode(store, sample, room, pool.stored)
    return read_modes


def _device_finder(placement: Placement, devices: Mapping[str, Device]) -> Callable[[str], torch.device]:
    """Module path -> the torch device of the unit around it, else of the first unit."""
    owners = {placed.unit: devices[placed.device].torch_device for placed in placement.units}
    home = devices[placement.home].torch_device
    return lambda path: owners.get(enclosing(path, owners) or "", home)
