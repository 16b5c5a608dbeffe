"""Builds a running model from a split directory: skeleton, weights, placement, hooks. Opens no checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from rabbitllm.collection import uncollected
from rabbitllm.engine import published, skeleton
from rabbitllm.engine.costs import cache_room, held_bytes, unit_costs
from rabbitllm.engine.devices import CpuDevice, Device, resolve_devices, suits_bf16
from rabbitllm.engine.expert_finding import expert_sources, without_experts
from rabbitllm.engine.expert_source import ExpertSource
from rabbitllm.engine.experts import bind_experts, expert_costs
from rabbitllm.engine.fused_choice import FusedChoice
from rabbitllm.engine.fused_units import fused_experts, fused_units
from rabbitllm.engine.llama4_experts import route_llama4
from rabbitllm.engine.packed_weight import StoredMatrix
from rabbitllm.engine.page_locked import keep_units
from rabbitllm.engine.part import Share, with_others
from rabbitllm.engine.pass_line import PassLine
from rabbitllm.engine.placement import Budget, Placement, Tier, place
from rabbitllm.engine.read_ahead import read_ahead
from rabbitllm.engine.row_products import RowProducts
from rabbitllm.engine.saving import origin_of
from rabbitllm.engine.span_reader import PROBES, THROUGH_THE_CACHE, Way, choose_way
from rabbitllm.engine.streamed_model import adopt
from rabbitllm.engine.streamer import Streamer
from rabbitllm.engine.unit_source import UnitSource, source_of
from rabbitllm.engine.units import find_units
from rabbitllm.engine.weights import WeightMap, map_weights
from rabbitllm.errors import OptionError, RabbitLLMError
from rabbitllm.formats.tensor_spec import torch_dtype
from rabbitllm.layers.compression import Quantised, check_compression
from rabbitllm.layers.layer_store import LayerStore, WeightFiles
from rabbitllm.layers.packed_products import Matrix, multiplies
from rabbitllm.options import StreamOptions
from rabbitllm.profiler import Profiler

logger = logging.getLogger(__name__)

SCALES_IN_PLACE = frozenset({"rwkv"})
"""Model types whose forward changes weights, which a unit that is let go of would forget."""
HOST_MARGIN = 1 << 30
DEVICE_MARGIN = 3 << 29
"""Bytes left to activations and the KV cache where the caller sets no limit, if that is less than a sixteenth of
what is free; and a tenth of what is free besides."""


_MAPPED = (Tier.RESIDENT, Tier.PACKED)


def check(config_folder: Path, options: StreamOptions, devices: Sequence[Device]) -> None:
    """Refuse before a split what `load_model` would refuse after it: the model, the dtype, the attention.

    Raises:
        UnknownArchitectureError, OptionError: as `load_model` does.
    """
    config = skeleton.read_config(config_folder, options.trust_remote_code)
    quantiser = published.quantiser_for(config_folder, config, devices)
    dtype = _named_dtype(options.dtype) or _config_dtype(config) or torch.float32
    attention = _attention(options.attn_implementation, config, devices, dtype)
    skeleton.build_skeleton(config_folder, config, dtype, attention, options.trust_remote_code, quantiser)


@dataclass(frozen=True)
class Blueprint:
    """A model as it is decided before any of its weights is read.

    Attributes:
        model: the skeleton; None of its weights are bound.
        weights: which stored tensors make which parameters.
        sources: its units, in the order of a pass, without the experts.
        experts: the modules whose experts are brought in one by one.
        placement: where each goes.
        quantiser: transformers' own, of weights that are published quantised; None for plain ones.
    """

    model: Any
    weights: WeightMap
    sources: Mapping[str, UnitSource]
    experts: tuple[ExpertSource, ...]
    placement: Placement
    quantiser: Any = None


@uncollected()
def blueprint(store: WeightFiles, options: StreamOptions, home: Path, devices: Sequence[Device]) -> Blueprint:
    """Decide all that `load_model` decides from names and sizes alone.

    Args:
        store: the tensors; of those that are only planned there need be no file.
        options: see `StreamOptions`.
        home: where the config is.
        devices: where to compute.

    Raises:
        IncompleteSplitError, UnknownArchitectureError, OptionError: as `load_model` does.
        RabbitLLMError: the model changes its weights, and not all of them can stay.
    """
    config = skeleton.read_config(home, options.trust_remote_code)
    quantiser = published.quantiser_for(home, config, devices)
    dtype = _choose_dtype(options.dtype, config, store, devices)
    if quantiser is not None:
        dtype = quantiser.update_dtype(dtype)
    attention = _attention(options.attn_implementation, config, devices, dtype)
    model = skeleton.build_skeleton(home, config, dtype, attention, options.trust_remote_code, quantiser)
    route_llama4(model)
    weights = map_weights(model, store.tensors, str(store.folder), quantiser)
    packs = _packs_on_host if not options.exact and all(device.shares_host_memory for device in devices) else None
    units = find_units(model)
    experts = expert_sources(model, units, weights, store, packs)
    sources = {unit.name: source_of(without_experts(unit, experts), weights, store, packs) for unit in units}
    placement = place_units(model, sources, experts, devices, options)
    if config.model_type in SCALES_IN_PLACE and not placement.is_resident:
        raise RabbitLLMError(
            f"{config.model_type} rescales its weights in place, so all of them must stay; they need "
            f"{sum(source.ready_bytes for source in sources.values()):,} bytes, more than the limits allow.",
            "Allow more with max_memory.",
        )
    return Blueprint(model, weights, sources, tuple(experts), placement, quantiser)


@torch.inference_mode(False)  # a caller's inference mode is no reason for weights that can never have gradients
def load_model(
    folder: Path | WeightFiles,
    options: StreamOptions,
    config_folder: Path | None = None,
    devices: Sequence[Device] | None = None,
    share: Share | None = None,
) -> Any:
    """A genuine transformers model whose weights are in `folder`.

    Args:
        folder: a finished split directory; or other files with weights, opened.
        options: see `StreamOptions`.
        config_folder: where config and tokenizer are, if not in `folder` (a directory of RabbitLLM 1.1 has none).
        devices: where to compute; by default what `options` name.
        share: says which part of the model this process computes; None for the whole.

    Returns:
        The model, with `tokenizer`, `profiler`, `placement` and `unused_tensors` on it.

    Raises:
        IncompleteSplitError: a tensor is missing or damaged; each is named.
        UnknownArchitectureError: transformers does not know the model.
        DeviceError: the device does not exist.
        MissingPackageError: the layers are compressed and bitsandbytes is not installed, or they are published
            quantised in a way that needs a package which is not.
    """
    store: WeightFiles = LayerStore(folder) if isinstance(folder, Path) else folder
    folder = store.folder
    for scheme in {tensor.quantised.scheme for tensor in store.tensors.values() if tensor.quantised}:
        check_compression(scheme)  # now, rather than in the first pass
    home = folder if (folder / "config.json").exists() or config_folder is None else config_folder
    chosen = list(devices or resolve_devices(options.device, options.max_memory, options.pin_memory))
    drawn = blueprint(store, options, home, chosen)
    if share is not None:
        drawn = _only_a_part(drawn, share, store, chosen, options)
    model, weights, sources, placement = drawn.model, drawn.weights, drawn.sources, drawn.placement
    by_name = {device.name: device for device in chosen}
    skeleton.materialise_buffers(model, _device_finder(placement, by_name), weights.absent)
    profiler = Profiler(options.profiling, "Passes, by stage")
    way = _way(sources, placement, by_name, store)
    ways = _expert_ways(drawn.experts, placement, by_name, store)
    placement, kept = keep_units(placement, sources, by_name, store)
    experts: Sequence[ExpertSource] = drawn.experts
    if not options.exact:
        choice = FusedChoice()
        sources = {**sources, **fused_units(sources, placement, by_name, weights, store, choice)}
        experts = fused_experts(experts, placement, by_name, choice)
    profiler.in_place = _in_place(model, sources, placement)
    with torch.no_grad():
        pools = bind_experts(model, experts, placement, by_name, store, profiler, ways)
        streamer = Streamer(
            model,
            sources,
            placement,
            by_name,
            store,
            profiler,
            kept,
            pools,
            way=way,
            prefetching=options.prefetching,
        )
    home_device = by_name[placement.home].torch_device
    if len(chosen) > 1:  # callers expect the output where their inputs came from
        model.register_forward_hook(lambda module, args, output: send_to_device(output, home_device))
    if weights.unused:
        logger.info("%d stored tensors are not used by %s.", len(weights.unused), type(model).__name__)
    published.finish(model, drawn.quantiser)
    published.say_how(drawn.quantiser, folder, model.dtype, chosen)
    if options.fast_bfloat16:
        RowProducts(model)
    streamed = adopt(model, home_device, placement)
    streamed.tokenizer = skeleton.read_tokenizer(home, options.trust_remote_code)
    streamed.profiler = profiler
    streamed.streamer = streamer
    if options.show_progress and (placement.streamed_bytes or placement.uploaded_bytes):
        units = [sources[placed.unit].unit.module for placed in placement.units]
        streamed.pass_line = PassLine(units, streamer.waited)
    streamed.unused_tensors = weights.unused
    in_place = model.config.model_type in SCALES_IN_PLACE
    streamed._origin = origin_of(streamed, store, home, weights, changes_itself=in_place)
    streamed._held_bytes = held_bytes(placement, sources, experts)
    streamed._show_progress = options.show_progress
    read_ahead(_mapped_spans(model, sources, placement, by_name, store))
    return streamed


def _only_a_part(
    drawn: Blueprint, share: Share, store: WeightFiles, devices: Sequence[Device], options: StreamOptions
) -> Blueprint:
    """The same model, of which this process places and computes a part."""
    limits = options.max_memory or {}
    budgets = {device.name: limits.get(device.name, default_budget(device)) for device in devices}
    part = share(drawn.model, drawn.sources, unit_costs(drawn.model, drawn.sources, drawn.experts), store, budgets)
    own = {name: source for name, source in drawn.sources.items() if name in part.units}
    experts = tuple(source for source in drawn.experts if source.unit in part.units)
    limited = replace(options, max_memory={**limits, **part.budgets})
    placement = place_units(drawn.model, own, experts, devices, limited)
    return replace(drawn, experts=experts, placement=with_others(placement, drawn.sources))


def _choose_dtype(wanted: str | None, config: Any, store: WeightFiles, devices: Sequence[Device]) -> torch.dtype:
    """The caller's dtype, else the config's, else that of the weights; fp16 for bf16 where a GPU has no bf16."""
    named = _named_dtype(wanted)
    if named is not None:
        return named
    dtype = _config_dtype(config) or _stored_dtype(store)
    if dtype == torch.bfloat16 and not all(suits_bf16(device) for device in devices):
        logger.warning("This GPU has no bfloat16; the model computes in float16. Pass dtype='float32' if it overflows.")
        return torch.float16
    return dtype


def _named_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise OptionError(f"dtype={name!r} is no floating dtype of torch.", "For example dtype='bfloat16'.")
    return dtype


def _config_dtype(config: Any) -> torch.dtype | None:
    return getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)


def _stored_dtype(store: WeightFiles) -> torch.dtype:
    for tensor in store.tensors.values():
        if tensor.quantised is not None and tensor.quantised.dtype is not None:
            found: torch.dtype = getattr(torch, tensor.quantised.dtype)
            return found
        dtype = torch_dtype(tensor.parts[0].dtype)
        if tensor.quantised is None and dtype.is_floating_point and dtype.itemsize > 1:  # a byte is a published code
            return dtype
    return torch.float32


def _attention(wanted: str, config: Any, devices: Sequence[Device], dtype: torch.dtype) -> str | None:
    """What to ask transformers for. "auto": FlashAttention 2 where it is installed and usable, else its own choice."""
    if wanted != "auto":
        return wanted
    if devices[0].torch_device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    from transformers.utils import is_flash_attn_2_available

    own = skeleton.model_class(config)
    kinds = getattr(own, "_compatible_flash_implementations", None) or ["flash_attention_2"]
    supported = getattr(own, "_supports_flash_attn", False) and "flash_attention_2" in kinds
    return "flash_attention_2" if supported and suits_bf16(devices[0]) and is_flash_attn_2_available() else None


def place_units(
    model: nn.Module,
    sources: Mapping[str, UnitSource],
    experts: Sequence[ExpertSource],
    devices: Sequence[Device],
    options: StreamOptions,
) -> Placement:
    """A place for every unit, within what is free or what the caller allows.

    Args:
        model: the skeleton.
        sources: its units, in the order of a pass.
        experts: those that are brought in by themselves.
        devices: where to compute.
        options: see `StreamOptions`.
    """
    costs = unit_costs(model, sources, experts)
    limits = options.max_memory or {}
    budgets = [
        Budget(device.name, limits.get(device.name, default_budget(device)), device.shares_host_memory)
        for device in devices
    ]
    return place(
        costs,
        budgets,
        small_first=options.small_layers_resident,
        cached_layers=options.cache_layers or 0,
        host_bytes=host_room(devices, options),
        experts=expert_costs(experts),
    )


def _packs_on_host(form: Quantised, dtype: torch.dtype) -> type[StoredMatrix] | None:
    return Matrix if multiplies(form) else None


def weight_memory(devices: Sequence[Device], options: StreamOptions) -> int:
    """Bytes of memory that weights may stay in, on the devices and page-locked beside them."""
    limits = options.max_memory or {}
    on_devices = sum(limits.get(device.name, default_budget(device)) for device in devices)
    return on_devices + host_room(devices, options)


def host_room(devices: Sequence[Device], options: StreamOptions) -> int:
    """Bytes of host memory to page-lock, for all devices that share none: never more than is free, since none of it can
    be swapped."""
    if not options.pin_memory or all(device.shares_host_memory for device in devices):
        return 0
    free = default_budget(CpuDevice())
    return min((options.max_memory or {}).get("cpu", free), free)


def _in_place(model: nn.Module, sources: Mapping[str, UnitSource], placement: Placement) -> dict[str, int]:
    """ "device tier" -> stored bytes that each pass uses without moving them; of an embedding it uses only rows."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    found: dict[str, int] = {}
    for placed in placement.units:
        if placed.tier in _MAPPED and sources[placed.unit].unit.module is not embedding:
            key = f"{placed.device} {placed.tier.value}"
            found[key] = found.get(key, 0) + placed.stored
    return found


def _mapped_spans(
    model: nn.Module,
    sources: Mapping[str, UnitSource],
    placement: Placement,
    devices: Mapping[str, Device],
    store: WeightFiles,
) -> list[tuple[Path, int, int]]:
    """What of the files stays in memory as mapped, in the order of a pass: (path, offset, bytes)."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    stays = [p.unit for p in placement.units if p.tier in _MAPPED and devices[p.device].shares_host_memory]
    # of an embedding a few rows are touched
    wanted = (sources[unit] for unit in stays if sources[unit].unit.module is not embedding)
    return [(store.path(span.file), span.offset, span.nbytes) for source in wanted for span in source.spans]


def _way(
    sources: Mapping[str, UnitSource], placement: Placement, devices: Mapping[str, Device], store: WeightFiles
) -> Way:
    """How what is streamed is read, by whether the page cache could hold it beside what stays in host memory."""
    spans = [span for p in placement.units if p.tier is Tier.STREAMED for span in sources[p.unit].spans]
    return choose_way(store, spans, cache_room(placement, devices.values()))


def _expert_ways(
    experts: Sequence[ExpertSource], placement: Placement, devices: Mapping[str, Device], store: WeightFiles
) -> dict[str, Way]:
    """Device -> how experts that come and go are read: those that are read through the page cache stay there as long
    as the system lets them, since many are used again."""
    found = {}
    for pool in placement.pools:
        own = {placed.unit for placed in placement.experts if placed.device == pool.device}
        chosen = [source for source in experts if source.name in own]
        way = THROUGH_THE_CACHE
        if all(source.in_blocks for source in chosen):
            sample = [span for source in chosen[:PROBES] for span in source.spans(source.experts // 2)]
            way = choose_way(store, sample, cache_room(placement, devices.values()), pool.stored)
        found[pool.device] = way if way.direct else THROUGH_THE_CACHE
    return found


def default_budget(device: Device) -> int:
    """Bytes for weights on a device, where nobody says: what is free, less what one text needs beside them."""
    free = device.free_bytes()
    margin = HOST_MARGIN if device.shares_host_memory else DEVICE_MARGIN
    return free - free // 10 - min(margin, free // 16)


def _device_finder(placement: Placement, devices: Mapping[str, Device]) -> Any:
    """Module path -> the torch device of the unit around it, else of the first unit."""
    owners = {placed.unit: devices[placed.device].torch_device for placed in placement.units}
    home = devices[placement.home].torch_device

    def find(path: str) -> torch.device:
        while path:
            if path in owners:
                return owners[path]
            path = path.rpartition(".")[0]
        return home

    return find
