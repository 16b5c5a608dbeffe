"""Hooks that bind a unit's weights before it computes and let them go after, even if it raises.

Resident units have no hook at all. A packed unit is made from what is on its device, a streamed one from what the
loader brings; while it computes, the loader is already bringing the one that followed it in the last pass. Knows
neither files nor formats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rabbitllm.engine.ahead import Loaded
from rabbitllm.engine.boundary import Boundary
from rabbitllm.engine.devices import Device
from rabbitllm.engine.embedding_rows import EmbeddingRows
from rabbitllm.engine.expert_pool import ExpertPool
from rabbitllm.engine.loader import Loader, largest
from rabbitllm.engine.page_locked import Kept
from rabbitllm.engine.placement import SLOTS, Placement, Tier
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, SpanReader, Way
from rabbitllm.engine.unit_source import Memo, PartReader, UnitSource, mapped_part
from rabbitllm.engine.uploader import Uploader
from rabbitllm.layers.layer_store import WeightFiles
from rabbitllm.profiler import COMPUTE, DEQUANTISE, Profiler


@dataclass
class DeviceLane:
    """One device with what brings its units, and the order in which these followed each other."""

    device: Device
    loader: Loader | Uploader
    boundary: Boundary
    follower: dict[str, str] = field(default_factory=dict)
    previous: str | None = None

    def came_to(self, unit: str) -> None:
        """Note that this unit is next, and learn from it."""
        if self.previous is not None:
            self.follower[self.previous] = unit
        self.previous = unit

    def following(self, unit: str) -> Iterator[str]:
        """What came after a unit in the last pass, until the same comes again."""
        seen = {unit}
        while (unit := self.follower[unit]) not in seen:
            seen.add(unit)
            yield unit


class Streamer:
    """Installs the hooks of a model and owns what they need.

    Args:
        model: the skeleton, buffers in place.
        sources: every unit, in the order of a pass.
        placement: where each goes.
        devices: by name.
        store: the split directory.
        profiler: where time is recorded.
        kept: device name -> what of it is in host memory.
        pools: device name -> its experts that come and go.
        way: how streamed units are read.
        prefetching: bring the next unit while this one computes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sources: Mapping[str, UnitSource],
        placement: Placement,
        devices: Mapping[str, Device],
        store: WeightFiles,
        profiler: Profiler,
        kept: Mapping[str, Kept],
        pools: Mapping[str, ExpertPool],
        *,
        way: Way = THROUGH_THE_CACHE,
        prefetching: bool = True,
    ) -> None:
        self._model = model
        self._store = store
        self.way = way
        self._profiler = profiler
        self._prefetching = prefetching
        self.pools = pools
        self._mapped = mapped_part(store)
        self._memos: dict[str, Memo] = {name: {} for name in devices}
        self._started: dict[str, float] = {}
        self.embedding_rows: EmbeddingRows | None = None
        self._letting_go: dict[str, Callable[[], None]] = {}
        self.lanes: dict[str, DeviceLane] = {}
        for name, device in devices.items():
            moving = {
                placed.unit: sources[placed.unit]
                for placed in placement.units
                if placed.device == name and placed.tier in (Tier.STREAMED, Tier.PINNED)
            }
            order = list(moving)
            follower = dict(zip(order, order[1:] + order[:1], strict=True))
            loader = self._loader(moving, device, kept.get(name))
            self.lanes[name] = DeviceLane(device, loader, Boundary(device.torch_device), follower)
        for placed in placement.units:
            self._install(sources[placed.unit], placed.tier, self.lanes[placed.device])
        self._recover_from_interrupts([name for name, source in sources.items() if source.unit.is_layer])

    def _loader(self, moving: Mapping[str, UnitSource], device: Device, kept: Kept | None) -> Loader | Uploader:
        disk = SpanReader(self._store, self.way, self._store.checks)
        if kept is not None:
            return Uploader(moving, kept.units, disk, device, self._profiler, kept.memory)
        buffers = [device.host_buffer(largest(moving)) for _ in range(SLOTS if moving else 0)]
        return Loader(moving, disk, device, self._profiler, buffers, SLOTS - 1)

    @property
    def bound(self) -> set[str]:
        """Units that are neither resident nor unbound: at most those that compute at this moment."""
        return set(self._letting_go)

    def waited(self) -> tuple[float, float]:
        """Seconds that passes have waited so far: for the disk, and for copies from host memory."""
        loaders = [lane.loader for lane in self.lanes.values()]
        disk = sum(loader.waited for loader in loaders) + sum(pool.waited for pool in self.pools.values())
        return disk, sum(loader.waited_for_copies for loader in loaders)

    def _recover_from_interrupts(self, layers: Sequence[str]) -> None:
        """Before each pass, let go of what an interrupted one left: torch runs no hooks after a KeyboardInterrupt.

        Generation calls an encoder by itself, so any model inside the model may be where a pass begins.
        """
        for name, module in self._model.named_modules():
            inside_a_layer = any(name.startswith(layer + ".") for layer in layers)
            if isinstance(module, PreTrainedModel) and not inside_a_layer:
                module.register_forward_pre_hook(lambda module, args: self.begin())

    def begin(self) -> None:
        """Make ready for a pass."""
        for name in list(self._letting_go):
            self._letting_go.pop(name)()
        for pool in self.pools.values():
            pool.end()
        for lane in self.lanes.values():
            lane.boundary.forget()

    def _install(self, source: UnitSource, tier: Tier, lane: DeviceLane) -> None:
        unit, device = source.unit, lane.device
        if tier is Tier.ELSEWHERE:
            self._unbind(source, device)
            return
        if len(self.lanes) > 1:  # also on the first device: OPT's last norm is registered before its layers
            unit.module.register_forward_pre_hook(lane.boundary, with_kwargs=True)
        if tier is Tier.RESIDENT or (tier is Tier.PACKED and source.is_view):  # multiplied as it is stored: never made
            apart = (
                not device.shares_host_memory and not source.is_view
            )  # or a norm would keep all of its layer's bytes
            part = self._mapped if device.shares_host_memory else self._uploaded(source, device)
            source.make(self._model, part, self._memos[device.name], apart=apart)
            if self._profiler.enabled and not unit.holds_units:  # their time is not counted twice
                unit.module.register_forward_pre_hook(lambda module, args: self._start(unit.name))
                unit.module.register_forward_hook(
                    lambda module, args, output: self._stop(unit.name, device), always_call=True
                )
            return
        self._unbind(source, device)
        if tier is Tier.ROWS:
            rows = self.embedding_rows = EmbeddingRows(source, self._mapped, device.torch_device, self._store.checks)
            unit.module.register_forward_pre_hook(rows.before, with_kwargs=True)
            unit.module.register_forward_hook(rows.after, always_call=True)
        elif tier is Tier.PACKED:
            kept = self._mapped if device.shares_host_memory else self._uploaded(source, device)
            self._hook(source, device, _Packed(kept))
        else:
            self._hook(source, device, _Streamed(source, lane, self._prefetching))

    def _hook(self, source: UnitSource, device: Device, supply: _Packed | _Streamed) -> None:
        name, module = source.unit.name, source.unit.module

        def let_go() -> None:
            self._unbind(source, device)
            supply.let_go()

        def before(module: nn.Module, args: Any) -> None:
            self._letting_go[name] = let_go
            part = supply.bring()
            # a parameter that is made in a caller's inference mode hides that it requires a gradient: see Place.bind
            with self._profiler.stage(name, DEQUANTISE), torch.inference_mode(False):
                source.make(self._model, part)
                if self._profiler.enabled:
                    device.synchronise()
            self._start(name)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._stop(name, device)
            self._letting_go.pop(name, let_go)()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)

    def _start(self, unit: str) -> None:
        self._started[unit] = self._working_time()

    def _stop(self, unit: str, device: Device) -> None:
        started = self._started.pop(unit, None)
        if started is not None and self._profiler.enabled:
            device.synchronise()
            self._profiler.add(unit, COMPUTE, self._working_time() - started)

    def _working_time(self) -> float:
        """A clock that stands still while a unit waits for experts."""
        return time.perf_counter() - sum(pool.waited for pool in self.pools.values())

    def _unbind(self, source: UnitSource, device: Device) -> None:
        for place in source.places:
            place.bind_placeholder(device.torch_device)

    def _uploaded(self, source: UnitSource, device: Device) -> PartReader:
        """A unit's stored bytes, copied to its device for good."""
        buffer = device.device_buffer(source.buffer_bytes)
        host = torch.empty(source.buffer_bytes, dtype=torch.uint8)
        reader = SpanReader(self._store, THROUGH_THE_CACHE, self._store.checks)
        reader.read(source.spans, host.numpy().data.cast("B"))
        ticket = device.upload(host, buffer, device.leave())
        device.landed(ticket)
        device.arrive(ticket)
        return source.part_of(buffer)


class _Packed:
    """Supply of a unit whose stored bytes are on its device."""

    def __init__(self, part: PartReader) -> None:
        self._part = part

    def bring(self) -> PartReader:
        return self._part

    def let_go(self) -> None:
        pass


class _Streamed:
    """Supply of a unit whose stored bytes are brought for each pass."""

    def __init__(self, source: UnitSource, lane: DeviceLane, prefetching: bool) -> None:
        self._source = source
        self._lane = lane
        self._prefetching = prefetching
        self._loaded: Loaded | None = None

    def bring(self) -> PartReader:
        lane, name = self._lane, self._source.unit.name
        lane.came_to(name)
        self._loaded = lane.loader.take(name)
        if self._prefetching:
            lane.loader.expect(lane.following(name))
        return self._source.part_of(self._loaded.slot.buffer)

    def let_go(self) -> None:
        if self._loaded is not None:
            self._lane.loader.give_back(self._loaded)
            self._loaded = None
