"""Hooks that bind a unit's weights before it computes and free them afterwards, even if it raises.

Resident units have no hook. A packed unit is made from stored bytes on its device, a streamed one from bytes that the
loader reads; while it computes, the loader prefetches the unit that followed it in the last pass.

Some modules are not called: another one reads their weight (a position embedding, learned queries, a tied head). The
first read in a pass makes such a weight as if it were resident, and it is kept until the pass ends. A pass is a call of
the model, or of a part of it that has such units. Any other read of a weight that is not in memory is refused.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from accelerate.utils import send_to_device
from accelerate.utils.operations import honor_type
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from rabbitllm.base.forks import ForkGuard, compute_on_one_thread, own_lock
from rabbitllm.engine.devices import Device, memory_explained
from rabbitllm.engine.embedding_rows import TableRows
from rabbitllm.engine.expert_pool import ExpertPool
from rabbitllm.engine.placement import READY, SLOTS, Placement, Tier
from rabbitllm.engine.prefetch import FilledSlot, HostBuffers, Loader, Uploader, bytes_of, largest
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, ReadMode, SpanReader, compare
from rabbitllm.engine.units import Memo, PartReader, Place, UnitSource, mapped_part
from rabbitllm.engine.weight_tensors import called_by, untrainable
from rabbitllm.errors import AbsentWeightError
from rabbitllm.store.layer_store import WeightFiles
from rabbitllm.telemetry.passes import COMPUTE, DEQUANTIZE
from rabbitllm.telemetry.profiler import Profiler


class Boundary:
    """A forward pre-hook for the units of one device; register with `with_kwargs=True`.

    A copy lives as long as its original does, and is used until either is changed in place. (Inference tensors have
    no version counter: such an original counts as unchanged until the pass is over.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: Any = WeakIdKeyDictionary()  # original -> its version, the copy, the copy's version

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The inputs on the device, or None if they are there already."""
        there, named = self._brought(args), self._brought(kwargs)
        return None if there is args and named is kwargs else (there, named)

    def forget(self) -> None:
        """Begin another pass."""
        self._copies.clear()

    def _brought(self, value: Any) -> Any:
        """A value with its tensors on the device; the same object if they are there already."""
        if isinstance(value, torch.Tensor):
            return value if value.device == self._device else self._copy(value)
        if hasattr(value, "to"):
            return send_to_device(value, self._device)
        if isinstance(value, tuple | list):
            parts = [self._brought(part) for part in value]
            same = all(part is old for part, old in zip(parts, value, strict=True))
            return value if same else honor_type(value, parts)
        if isinstance(value, Mapping):
            named = {key: self._brought(part) for key, part in value.items()}
            same = all(named[key] is value[key] for key in named)
            return value if same else type(value)(named)  # type: ignore[call-arg]
        return value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        version = None if tensor.is_inference() else tensor._version
        known = self._copies.get(tensor)
        if known is not None and known[0] == version and known[1]._version == known[2]:
            copy: torch.Tensor = known[1]
            return copy
        if tensor.requires_grad:  # such a copy has an autograd history, so it serves one use only
            return tensor.to(self._device)
        with torch.inference_mode(False):  # so that the copy has a version
            copy = tensor.to(self._device)
        self._copies[tensor] = version, copy, copy._version
        return copy


_calling: ContextVar[object] = ContextVar("whose model is being called", default=None)
"""For each thread and greenlet: the calls of the members of a joint pass are interleaved."""


class _CurrentDevices(threading.local):
    """The contexts that a thread is in, each of which makes a device current: resident models compute in several."""

    def __init__(self) -> None:
        self.contexts: list[AbstractContextManager[Any]] = []


@dataclass
class DeviceExecutor:
    """One device with the loader of its units, and the order in which these followed each other.

    Attributes:
        kept: its pinned host memory, with units; None if it shares host memory.
        way: how streamed units are read.
    """

    device: Device
    loader: Loader | Uploader
    boundary: Boundary
    kept: HostBuffers | None
    way: ReadMode
    follower: dict[str, str] = field(default_factory=dict)
    previous: str | None = None

    def came_to(self, unit: str) -> None:
        """Record that this unit followed the previous one."""
        if self.previous is not None:
            self.follower[self.previous] = unit
        self.previous = unit

    def following(self, unit: str) -> Iterator[str]:
        """The units that followed a unit in the last pass, until one repeats."""
        seen = {unit}
        while (unit := self.follower[unit]) not in seen:
            seen.add(unit)
            yield unit


def device_executors(
    sources: Mapping[str, UnitSource],
    placement: Placement,
    devices: Mapping[str, Device],
    store: WeightFiles,
    profiler: Profiler,
    kept: Mapping[str, HostBuffers],
    way: ReadMode = THROUGH_THE_CACHE,
) -> dict[str, DeviceExecutor]:
    """An executor for each device, with the buffers of its streamed units."""
    made = {}
    for name, device in devices.items():
        moving = {
            placed.unit: sources[placed.unit]
            for placed in placement.units
            if placed.device == name and placed.tier in (Tier.STREAMED, Tier.PINNED)
        }
        order = list(moving)
        disk = SpanReader(store, way, store.checks)
        loader: Loader | Uploader
        if name in kept:
            loader = Uploader(moving, disk, device, profiler, kept[name])
        else:
            buffers = [device.host_buffer(largest(moving)) for _ in range(SLOTS if moving else 0)]
            loader = Loader(moving, disk, device, profiler, buffers, SLOTS - 1)
        follower = dict(zip(order, order[1:] + order[:1], strict=True))
        made[name] = DeviceExecutor(device, loader, Boundary(device.torch_device), kept.get(name), way, follower)
    return made


class Streamer:
    """Installs the hooks of a model and owns the loaders and buffers that they use.

    Attributes:
        turn: held by the thread that runs a pass; see `passing`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sources: Mapping[str, UnitSource],
        placement: Placement,
        executors: Mapping[str, DeviceExecutor],
        store: WeightFiles,
        profiler: Profiler,
        pools: Mapping[str, ExpertPool],
        prefetching: bool = True,
    ) -> None:
        self._model = model
        self._store = store
        self._profiler = profiler
        self._limits = placement.limits
        self._prefetching = prefetching
        self.pools = pools
        self.executors = executors
        self._mapped = mapped_part(store)
        self._packed: dict[str, PartReader] = {}
        self._memos: dict[str, Memo] = {name: {} for name in executors}
        self._started: dict[str, float] = {}
        self.turn = own_lock(threading.RLock())
        self._home = ForkGuard()
        self._has_turn = False
        self._brought: dict[str, dict[str, torch.Tensor]] = {}
        self._brought_memos: dict[str, Memo] = {name: {} for name in executors}
        self.tables: dict[str, TableRows] = {}
        self._letting_go: dict[str, Callable[[], None]] = {}
        self._current = _CurrentDevices()
        for placed in placement.units:
            self._install(sources[placed.unit], placed.tier, self.executors[placed.device])
        self._watch_calls(sources, placement)

    @property
    def bound(self) -> set[str]:
        """Non-resident units that are bound: those that compute at this moment, or were read in this pass."""
        return {*self._letting_go, *self._brought}

    def waited(self) -> tuple[float, float]:
        """Seconds that passes have waited so far: for the disk, and for copies from host memory."""
        loaders = [executor.loader for executor in self.executors.values()]
        disk = sum(loader.waited for loader in loaders) + sum(pool.waited for pool in self.pools.values())
        return disk, sum(loader.waited_for_copies for loader in loaders)

    def _watch_calls(self, sources: Mapping[str, UnitSource], placement: Placement) -> None:
        """Make each forward in which a weight may be read a pass, or a part of one.

        These are the forwards of the model, of the models inside it, and of the modules around units that are no
        layers: generation calls an encoder separately, or tokenises an image with one; peft calls the model's forward.
        The forwards are replaced, since torch runs no hooks after a KeyboardInterrupt.
        """
        layers = {name for name, source in sources.items() if source.unit.is_layer}
        absent = [placed.unit for placed in placement.units if placed.tier not in READY]
        around = {path for unit in absent if unit not in layers for path in _around(unit)}
        for name, module in self._model.named_modules():
            begins = isinstance(module, PreTrainedModel) and not layers.intersection(_around(name))
            if begins and placement.is_resident:  # threads need not take turns
                module.register_forward_pre_hook(lambda module, args: self.begin())
            elif begins or (name in around and type(module).forward is not nn.Module.forward):
                # a method, so that a copy of the module has its own
                module.forward = MethodType(self._as_a_pass(type(module).forward), module)

    def _as_a_pass(self, ordinary: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(ordinary)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _calling.get() is self:
                return ordinary(module, *args, **kwargs)
            with self.passing(), torch.no_grad():
                output = ordinary(module, *args, **kwargs)
            return untrainable(output, training=module.training)

        return forward

    def memory_explained(self) -> AbstractContextManager[None]:
        """A context in which a GPU's lack of memory is explained; see `devices.memory_explained`."""
        return memory_explained([executor.device for executor in self.executors.values()], self._limits)

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A context around a pass, or a part of one.

        Threads take turns; members of joint passes meet in the turn of their hub. Weights that an interrupted pass left
        are freed when it ends, and when another one begins.

        Raises:
            OutOfDeviceMemory: a GPU has too little memory; then these weights and the activations are freed.
        """
        if _calling.get() is self:
            yield
            return
        with self.memory_explained(), self._in_turn():
            yield

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        shared = getattr(self._model, "shared_passes", None)
        if shared is not None and shared.is_coroutine():
            token = _calling.set(self)
            try:
                yield
            finally:
                _calling.reset(token)
                if not self._has_turn:
                    self._forget_what_was_read()
            return
        with self.turn:
            self._come_home()
            token, inside = _calling.set(self), self._has_turn
            try:
                self._has_turn = True
                if not inside:
                    self.begin()
                yield
            finally:
                _calling.reset(token)
                self._has_turn = inside
                if not inside:
                    self._let_go()

    def begin(self) -> None:
        """Prepare a pass.

        Raises:
            ForkedError: as `_come_home` does.
        """
        self._come_home()
        self._let_go()
        for pool in self.pools.values():
            pool.end()
        for executor in self.executors.values():
            executor.boundary.forget()

    def _come_home(self) -> None:
        """In a forked process, before its first pass: discard the state of the parent's threads.

        Raises:
            ForkedError: the model is on a GPU, or another thread of the parent was in a pass.
        """
        if self._home.is_here:
            return
        if not all(executor.device.shares_host_memory for executor in self.executors.values()):
            remedy = "Load the model in the process that uses it: a CUDA context does not survive a fork."
            self._home.refuse("A model on a GPU", remedy)
        if self._has_turn:  # locks that libraries held at the fork are never released in this process
            remedy = "Fork while no thread computes, or load the model in the process that uses it."
            self._home.refuse("A pass that another thread had begun", remedy)
        self._home.settle()
        compute_on_one_thread()
        for executor in self.executors.values():
            executor.loader.reset()

    def _make_current(self, device: Device) -> None:
        context = device.as_current()
        context.__enter__()
        self._current.contexts.append(context)

    def _unmake_current(self) -> None:
        if self._current.contexts:
            self._current.contexts.pop().__exit__(None, None, None)

    def _let_go(self) -> None:
        """Free all bound weights, and those that were made because they were read."""
        while self._current.contexts:  # after a KeyboardInterrupt
            self._unmake_current()
        for name in list(self._letting_go):
            self._letting_go[name]()  # kept until it is over: it may be interrupted too
            self._letting_go.pop(name, None)
        for executor in self.executors.values():
            executor.loader.give_back_taken()  # one that was interrupted before it noted its slot
        self._forget_what_was_read()

    def _forget_what_was_read(self) -> None:
        self._brought.clear()
        for memo in self._brought_memos.values():
            memo.clear()

    def _install(self, source: UnitSource, tier: Tier, executor: DeviceExecutor) -> None:
        unit, device = source.unit, executor.device
        if tier is Tier.ELSEWHERE:
            self._unbinding(source, device, elsewhere=True)()
            return
        if not device.shares_host_memory:
            unit.module.register_forward_pre_hook(lambda module, args: self._make_current(device))
            unit.module.register_forward_hook(lambda module, args, output: self._unmake_current(), always_call=True)
        if len(self.executors) > 1:  # also on the first device: OPT's last norm is registered before its layers
            unit.module.register_forward_pre_hook(executor.boundary, with_kwargs=True)
        if tier in READY or (tier is Tier.PACKED and source.is_view):  # multiplied in stored form
            for place, tensor in self._made_for_good(source, device, self._memos[device.name]):
                place.bind(tensor)
            if self._profiler.enabled and not unit.holds_units:  # their time is not counted twice
                unit.module.register_forward_pre_hook(lambda module, args: self._start(unit.name))
                unit.module.register_forward_hook(
                    lambda module, args, output: self._stop(unit.name, device), always_call=True
                )
            return
        if tier is Tier.ROWS:
            rows = TableRows(source, self._store, device.torch_device)
            self.tables[unit.name] = rows
            self._unbinding(source, device, look_up=rows)()
            if rows.beside is not None:
                if self._store.checks is not None:
                    compare(self._store.checks, rows.beside.spans)
                for place, tensor in self._made_for_good(rows.beside, device, self._memos[device.name]):
                    place.bind(tensor)
            return
        unbind = self._unbinding(source, device)
        unbind()
        if tier is Tier.PACKED:
            part = self._packed[unit.name] = self._part(source, device)
            self._hook(source, device, lambda: part, unbind)
        else:
            self._stream(source, executor, unbind)

    def _stream(self, source: UnitSource, executor: DeviceExecutor, unbind: Callable[[], None]) -> None:
        """Bind a unit whose stored bytes are read or copied for each pass."""
        name, loaded = source.unit.name, list[FilledSlot]()

        def bring() -> PartReader:
            executor.came_to(name)
            loaded.append(executor.loader.take(name))
            if self._prefetching:
                executor.loader.expect(executor.following(name))
            return source.part_of(loaded[-1].slot.buffer)

        def let_go() -> None:
            unbind()
            if loaded:
                executor.loader.give_back(loaded[-1])
                loaded.clear()

        self._hook(source, executor.device, bring, let_go)

    def _hook(
        self, source: UnitSource, device: Device, bring: Callable[[], PartReader], let_go: Callable[[], None]
    ) -> None:
        """Bind a unit's weights before it computes, from the stored bytes that `bring` returns; `let_go` frees them."""
        name, module = source.unit.name, source.unit.module

        def before(module: nn.Module, args: Any) -> None:
            self._letting_go[name] = let_go
            part = bring()
            if is_plain := not source.dequantizes:
                self._start(name)  # binding is counted with computing
            # a parameter made in a caller's inference mode does not show that it requires a gradient: see Place.bind
            with self._dequantizing(source), torch.inference_mode(False):
                source.make(self._model, part)
                if self._profiler.enabled:
                    device.synchronise()
            if not is_plain:
                self._start(name)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._stop(name, device)
            self._letting_go.pop(name, let_go)()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)

    def _dequantizing(self, source: UnitSource) -> AbstractContextManager[None]:
        """The profiler's stage in which a unit is dequantized; an empty context if it has no codes."""
        if source.dequantizes:
            return self._profiler.stage(source.unit.name, DEQUANTIZE)
        return contextlib.nullcontext()

    def _start(self, unit: str) -> None:
        self._started[unit] = self._working_time()

    def _stop(self, unit: str, device: Device) -> None:
        started = self._started.pop(unit, None)
        if started is not None and self._profiler.enabled:
            device.synchronise()
            self._profiler.add(unit, COMPUTE, self._working_time() - started)

    def _working_time(self) -> float:
        """A clock that stops while a unit waits for experts."""
        return time.perf_counter() - sum(pool.waited for pool in self.pools.values())

    def _unbinding(
        self, source: UnitSource, device: Device, *, elsewhere: bool = False, look_up: TableRows | None = None
    ) -> Callable[[], None]:
        """A function that replaces the weights of a unit by placeholders."""

        def bring(place: Place) -> torch.Tensor:
            return self._bring(source, device, place, elsewhere=elsewhere)

        absent = [(place, place.placeholder(device.torch_device, bring, look_up)) for place in source.places]

        def unbind() -> None:
            for place, placeholder in absent:
                place.bind(placeholder)

        return unbind

    def _bring(self, source: UnitSource, device: Device, place: Place, *, elsewhere: bool) -> torch.Tensor:
        """The weight of a placeholder that is read outside its unit's own forward.

        Raises:
            AbsentWeightError: it cannot be read now.
        """
        unit = source.unit
        if not elsewhere and not unit.is_layer and _calling.get() is self:
            made = self._brought.get(unit.name)
            if made is None:
                memo = ChainMap(self._brought_memos[device.name], self._memos[device.name])
                with self._dequantizing(source):
                    made = self._brought[unit.name] = self._made_for_reading(source, device, memo)
            return made[place.target]
        if not elsewhere and called_by("peft"):  # some adapters are initialised from their base weights
            memo = ChainMap[str, dict[str, torch.Tensor]]({}, self._memos[device.name])
            return self._made_for_reading(source, device, memo, place.target)[place.target]
        why = "it is made for each pass"
        if elsewhere:
            why = "it is on another host"
        elif unit.is_layer:
            why = f"it is in memory only while {unit.name} computes, and at no other time"
        raise AbsentWeightError(
            f"{place.target} cannot be read, because it is not in memory: {why}.",
            "Load the model with enough max_memory for all weights, or read the weight from its file with "
            "rabbitllm.lazy_load. model.save_pretrained(folder) writes all weights.",
        )

    def _made_for_reading(
        self, source: UnitSource, device: Device, memo: Memo, only: str | None = None
    ) -> dict[str, torch.Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            made = self._made_for_good(source, device, memo, only)
            return {place.target: place.bindable(tensor) for place, tensor in made}

    def _made_for_good(
        self, source: UnitSource, device: Device, memo: Memo, only: str | None = None
    ) -> Iterator[tuple[Place, torch.Tensor]]:
        """The parameters of a unit in memory of their own, as for a resident one: they use no streaming buffer."""
        # tensors of a unit that is not a view are copied, else a norm would keep the bytes of its whole layer
        apart = not device.shares_host_memory and not source.is_view
        part = self._packed.get(source.unit.name) or self._part(source, device)
        return source.made(self._model, part, memo, apart=apart, only=only)

    def _part(self, source: UnitSource, device: Device) -> PartReader:
        """A reader of a unit's stored parts, resident on its device."""
        return self._mapped if device.shares_host_memory else self._uploaded(source, device)

    def _uploaded(self, source: UnitSource, device: Device) -> PartReader:
        """A reader of a unit's stored bytes, after they are copied to its device."""
        buffer = device.device_buffer(source.buffer_bytes)
        kept = self.executors[device.name].kept
        host = kept.units.get(source.unit.name) if kept is not None else None
        if host is None:
            host = torch.empty(source.buffer_bytes, dtype=torch.uint8)
            reader = SpanReader(self._store, THROUGH_THE_CACHE, self._store.checks)
            reader.read(source.spans, bytes_of(host))
        ticket = device.upload(host, buffer, device.leave())
        device.landed(ticket)
        device.arrive(ticket)
        return source.part_of(buffer)


def _around(path: str) -> Iterator[str]:
    """The paths of the modules that a module is in, without the model's own."""
    return (path[:at] for at, letter in enumerate(path) if letter == ".")
