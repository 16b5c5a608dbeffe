"""Hooks that bind a unit's weights before it computes and free them afterwards, even if it raises.

Resident units have no hook. The weights of a quantized unit are made from stored bytes on its device, those of a
streamed one from bytes that the loader reads. While a unit computes, the loader prefetches the unit that followed it in
the last pass.

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
from typing import Any, TypeVar

import torch
from accelerate.utils import send_to_device
from accelerate.utils.operations import honor_type
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from rabbitllm.base.forks import ForkGuard, own_lock
from rabbitllm.base.openmp import compute_in_a_fork
from rabbitllm.engine._copies import WeightCopies
from rabbitllm.engine._embedding_rows import TableRows
from rabbitllm.engine._expert_pool import ExpertPool
from rabbitllm.engine._fusing import AROUND
from rabbitllm.engine._pieces import product_of
from rabbitllm.engine.devices import Device, memory_explained
from rabbitllm.engine.placement import HOOKED, READY, SLOTS, Placement, Tier
from rabbitllm.engine.prefetch import FilledSlot, HostBuffers, Loader, Uploader, bytes_of, largest
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, ReadMode, SpanReader, compare
from rabbitllm.engine.units import BufferViews, ParameterEntry, PartReader, TensorsByRecipe, UnitSource, mapped_part
from rabbitllm.engine.weight_tensors import called_by, untrainable
from rabbitllm.errors import AbsentWeightError
from rabbitllm.store.layer_store import WeightFiles
from rabbitllm.telemetry.passes import COMPUTE, DEQUANTIZE, LOAD
from rabbitllm.telemetry.profiler import Profiler


class InputMover:
    """A forward pre-hook for the units of one device; register with `with_kwargs=True`.

    A copy lives as long as its original does, and is used until either is changed in entry. (Inference tensors have
    no version counter: such an original counts as unchanged until the pass is over.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: Any = WeakIdKeyDictionary()  # original -> its version, the copy, the copy's version

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The inputs on the device, or None if they are there already."""
        moved, named = self._moved(args), self._moved(kwargs)
        return None if moved is args and named is kwargs else (moved, named)

    def forget(self) -> None:
        """Forget all copies: another pass begins."""
        self._copies.clear()

    def _moved(self, value: Any) -> Any:
        """A value with its tensors on the device; the same object if they are there already."""
        if isinstance(value, torch.Tensor):
            return value if value.device == self._device else self._copy(value)
        if hasattr(value, "to"):
            return send_to_device(value, self._device)
        if isinstance(value, tuple | list):
            parts = [self._moved(part) for part in value]
            is_same = all(part is old for part, old in zip(parts, value, strict=True))
            return value if is_same else honor_type(value, parts)
        if isinstance(value, Mapping):
            named = {key: self._moved(part) for key, part in value.items()}
            is_same = all(named[key] is value[key] for key in named)
            return value if is_same else type(value)(named)  # type: ignore[call-arg]
        return value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        version = None if tensor.is_inference() else tensor._version
        cached = self._copies.get(tensor)
        if cached is not None and cached[0] == version and cached[1]._version == cached[2]:
            copy: torch.Tensor = cached[1]
            return copy
        if tensor.requires_grad:  # such a copy has an autograd history, so it serves one use only
            return tensor.to(self._device)
        with torch.inference_mode(False):  # so that the copy has a version
            copy = tensor.to(self._device)
        self._copies[tensor] = version, copy, copy._version
        return copy


T = TypeVar("T")
_Release = Callable[[], None]

_calling: ContextVar[object] = ContextVar("streamer of the running pass", default=None)
"""For each thread and greenlet: the calls of the coroutines of a shared pass are interleaved."""


class _CurrentDevices(threading.local):
    """The contexts that a thread is in, each of which makes a device current: resident models compute in several."""

    def __init__(self) -> None:
        self._contexts: list[AbstractContextManager[Any]] = []

    def enter(self, device: Device) -> None:
        """Make a device current."""
        context = device.as_current()
        context.__enter__()
        self._contexts.append(context)

    def leave(self) -> None:
        """Make the previous device current, if there is one."""
        if self._contexts:
            self._contexts.pop().__exit__(None, None, None)

    def leave_all(self) -> None:
        """Make the device current that was before all of these."""
        while self._contexts:
            self.leave()


@dataclass
class DeviceExecutor:
    """One device with the loader of its units, and the order in which these followed each other.

    Attributes:
        pinned: its pinned host memory, with units; None if it shares host memory.
        scratch: bytes that the weights of a pass take besides those between two passes.
    """

    device: Device
    loader: Loader | Uploader
    boundary: InputMover
    pinned: HostBuffers | None
    scratch: int
    follower: dict[str, str] = field(default_factory=dict)
    previous: str | None = None

    def free_bytes(self) -> int:
        """Bytes of the device for KV caches and activations, between two passes."""
        return max(self.device.free_bytes() - self.scratch, 0)

    def record(self, unit: str) -> None:
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
    pinned: Mapping[str, HostBuffers],
    read_mode: ReadMode = THROUGH_THE_CACHE,
) -> dict[str, DeviceExecutor]:
    """An executor for each device, with the buffers of its streamed units."""
    executors = {}
    for name, device in devices.items():
        hooked = [placed for placed in placement.units if placed.device == name and placed.tier in HOOKED]
        scratch = max((sources[placed.unit].scratch_bytes for placed in hooked), default=0)
        whole = (sources[placed.unit].reads for placed in hooked if placed.tier is not Tier.PACKED)
        moving = {name: source for reads in whole for name, source in reads.items()}
        order = list(moving)
        disk = SpanReader(store, read_mode, store.checks)
        loader: Loader | Uploader
        if name in pinned:
            loader = Uploader(moving, disk, device, profiler, pinned[name])
        else:
            buffers = [device.host_buffer(largest(moving)) for _ in range(SLOTS if moving else 0)]
            # as many as there are buffers: the thread that reads is not woken for each, while all cores compute
            loader = Loader(moving, disk, device, profiler, buffers, SLOTS)
        follower = dict(zip(order, order[1:] + order[:1], strict=True))
        boundary = InputMover(device.torch_device)
        executors[name] = DeviceExecutor(device, loader, boundary, pinned.get(name), scratch, follower)
    return executors


class Streamer:
    """Installs the hooks of a model and owns the loaders and buffers that they use.

    Attributes:
        pass_lock: held by the thread that runs a pass; see `passing`.
        copies: of what is streamed, for drafts.
        is_drafting: whether these are in use; then passes read nothing and are not recorded.
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
        prefetching: bool,
        loading: Profiler,
        copies: WeightCopies,
    ) -> None:
        self._model = model
        self._store = store
        self._profiler = profiler
        self._limits = placement.limits
        self._prefetching = prefetching
        self.copies, self.is_drafting = copies, False
        self.pools = pools
        self.executors = executors
        self._mapped = mapped_part(store)
        self._quantized: dict[str, PartReader] = {}
        self._memos: dict[str, TensorsByRecipe] = {name: {} for name in executors}
        self._started: dict[str, float] = {}
        self.pass_lock = own_lock(threading.RLock())
        self._process = ForkGuard()
        self._in_pass = False
        self._read: dict[str, dict[str, torch.Tensor]] = {}
        self._read_memos: dict[str, TensorsByRecipe] = {name: {} for name in executors}
        self.tables: dict[str, TableRows] = {}
        self._is_resident = placement.is_resident
        self._release: dict[str, _Release] = {}
        self._current = _CurrentDevices()
        for placed in placement.units:
            with loading.stage(placed.unit, LOAD, placed.stored if placed.tier in (*READY, Tier.PACKED) else 0):
                self._install(sources[placed.unit], placed.tier, self.executors[placed.device])
        self._watch_calls(sources, placement)

    @property
    def bound(self) -> set[str]:
        """Non-resident units that are bound: those that compute at this moment, or were read in this pass."""
        return {*self._release, *self._read}

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
        absent = [placed.unit for placed in placement.units if placed.tier not in READY and not placement.is_resident]
        around = {path for unit in absent if unit not in layers for path in _parent_paths(unit)}
        for name, module in self._model.named_modules():
            begins = isinstance(module, PreTrainedModel) and not layers.intersection(_parent_paths(name))
            if begins and placement.is_resident:  # threads need not take turns
                module.register_forward_pre_hook(lambda module, args: self.begin())
            elif begins or (name in around and type(module).forward is not nn.Module.forward):
                # a method: a copy of the module then binds it to itself
                module.forward = MethodType(self._as_a_pass(type(module).forward), module)

    def _as_a_pass(self, ordinary: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(ordinary)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _calling.get() is self:
                return ordinary(module, *args, **kwargs)
            with self.passing(), torch.no_grad():
                output = ordinary(module, *args, **kwargs)
            return untrainable(output, (*args, *kwargs.values()), training=module.training)

        setattr(forward, AROUND, self._as_a_pass)
        return forward

    def memory_explained(self) -> AbstractContextManager[None]:
        """A context in which a GPU's lack of memory is explained; see `devices.memory_explained`."""
        return memory_explained([executor.device for executor in self.executors.values()], self._limits)

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A context around a pass, or a part of one.

        Threads wait for each other; coroutines of a shared pass belong to the pass of their executor. Weights that an
        interrupted pass left are freed when it ends, and when another one begins.

        Raises:
            OutOfDeviceMemory: a GPU has too little memory; then these weights and the activations are freed.
        """
        if _calling.get() is self:
            yield
            return
        with self.memory_explained(), self._exclusive():
            yield

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        # Python raises a Ctrl-C behind a call: so `_calling` is set within `try`, and set back last
        shared, caller = getattr(self._model, "shared_passes", None), _calling.get()
        if shared is not None and shared.is_coroutine():
            try:
                _calling.set(self)
                yield
            finally:
                _calling.set(caller)
                if not self._in_pass:
                    self._release_read()
            return
        with self.pass_lock:
            self._check_process()
            inside, self._in_pass = self._in_pass, True
            try:
                _calling.set(self)
                if not inside:
                    self.begin()
                yield
            finally:
                self._in_pass = inside
                _calling.set(caller)
                if not inside:
                    self._release_all()

    def begin(self) -> None:
        """Prepare a pass.

        Raises:
            ForkedError: as `_check_process` does.
        """
        self._check_process()
        self._release_all()
        for pool in self.pools.values():
            pool.end()
        for executor in self.executors.values():
            executor.boundary.forget()

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        """A context in which the passes of this thread use `copies` instead of the disk; others wait."""
        with self.pass_lock:
            if self.is_drafting:  # for several sequences at once
                yield
                return
            self._release_all()  # an interrupted pass would do so later, and unbind the copies
            with self.copies.bound():
                self._set_drafting(value=True)
                try:
                    yield
                finally:
                    self._set_drafting(value=False)

    def _set_drafting(self, *, value: bool) -> None:
        self.is_drafting = value
        for pool in self.pools.values():
            pool.is_paused = value

    def _check_process(self) -> None:
        """In a forked process, before its first pass, discard the state of the parent's threads.

        Raises:
            ForkedError: the model is on a GPU, or another thread of the parent was in a pass.
        """
        if self._process.is_here:
            return
        if not all(executor.device.shares_host_memory for executor in self.executors.values()):
            remedy = "Load the model in the process that uses it: a CUDA context does not survive a fork."
            self._process.refuse("A model on a GPU", remedy)
        if self._in_pass:  # locks that libraries held at the fork are never released in this process
            remedy = "Fork while no thread computes, or load the model in the process that uses it."
            self._process.refuse("A pass that another thread had begun", remedy)
        self._process.settle()
        compute_in_a_fork()
        for executor in self.executors.values():
            executor.loader.reset()

    def _release_all(self) -> None:
        """Free all bound weights, and those that were made because they were read."""
        self._current.leave_all()  # there are some after a KeyboardInterrupt
        for name in list(self._release):
            self._release[name]()  # removed afterwards: it may be interrupted too
            self._release.pop(name, None)
        for executor in self.executors.values():
            executor.loader.give_back_taken()  # of a unit that was interrupted before it recorded its slot
        self._release_read()

    def _release_read(self) -> None:
        self._read.clear()
        for memo in self._read_memos.values():
            memo.clear()

    def _install(self, source: UnitSource, tier: Tier, executor: DeviceExecutor) -> None:
        unit, device = source.unit, executor.device
        if tier is Tier.ELSEWHERE:
            self._unbinding(source, device, elsewhere=True)()
            return
        if not device.shares_host_memory:
            unit.module.register_forward_pre_hook(lambda module, args: self._current.enter(device))
            unit.module.register_forward_hook(lambda module, args, output: self._current.leave(), always_call=True)
        for job in source.jobs:
            for _, entry in job.quantized:
                if entry.sibling is not None:
                    entry.sibling.install()
        if len(self.executors) > 1:  # also on the first device: OPT's last norm is registered before its layers
            unit.module.register_forward_pre_hook(executor.boundary, with_kwargs=True)
        if tier in READY or (tier is Tier.PACKED and source.is_view):  # multiplied in stored form
            for entry, tensor in self._permanent(source, device, self._memos[device.name]):
                entry.bind(tensor)
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
            if rows.others is not None:
                if self._store.checks is not None:
                    compare(self._store.checks, rows.others.spans)
                for entry, tensor in self._permanent(rows.others, device, self._memos[device.name]):
                    entry.bind(tensor)
            return
        if source.pieces and tier is Tier.STREAMED:
            take = functools.partial(self._taken, executor=executor)
            product = product_of(source, self._model, self._profiler, take, executor.loader.give_back)
            self._unbinding(source, device, by_pieces=product)()
            return
        unbind = self._unbinding(source, device)
        unbind()
        if tier is Tier.PACKED:
            part = self._quantized[unit.name] = self._part(source, device)
            self._hook(source, device, lambda: part, functools.partial(source.bind, self._model), unbind)
        else:
            self._stream(source, executor, unbind)

    def _stream(self, source: UnitSource, executor: DeviceExecutor, unbind: Callable[[], None]) -> None:
        """Bind a unit whose stored bytes are read or copied for each pass."""
        loaded = list[FilledSlot]()

        def load() -> torch.Tensor:
            loaded.append(self._taken(source.unit.name, executor))
            return loaded[-1].slot.buffer

        def release() -> None:
            unbind()
            if loaded:
                executor.loader.give_back(loaded[-1])
                loaded.clear()

        views = BufferViews(source, self._model, executor.device.torch_device)
        self._hook(source, executor.device, load, views.bind, release)

    def _taken(self, name: str, executor: DeviceExecutor) -> FilledSlot:
        """What is read at once, by its name; the next one is read meanwhile."""
        executor.record(name)
        loaded = executor.loader.take(name)
        if self._prefetching:
            executor.loader.prefetch(executor.following(name))
        return loaded

    def _hook(
        self, source: UnitSource, device: Device, load: Callable[[], T], bind: Callable[[T], object], release: _Release
    ) -> None:
        """Bind a unit's weights before it computes, from what `load` returns, by `bind`; `release` frees them."""
        name, module, entries, dequantizes = source.unit.name, source.unit.module, [*source.entries], source.dequantizes

        def before(module: nn.Module, args: Any) -> None:
            if self.is_drafting and name not in self._quantized:  # its copy is bound
                return
            if name not in self._release:  # else it is bound, by a call that was interrupted
                for entry in entries:
                    entry.check_absent()
            self._release[name] = release
            stored = load()
            if not dequantizes:
                self._start(name)  # binding is counted with computing
            # a parameter made in a caller's inference mode does not show that it requires a gradient: see `bindable`
            with self._dequantizing(source), torch.inference_mode(False):
                bind(stored)
                if self._profiler.enabled:
                    device.synchronise()
            if dequantizes:
                self._start(name)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._stop(name, device)
            if not self.is_drafting or name in self._quantized:
                self._release.get(name, release)()
                self._release.pop(name, None)  # afterwards, as in `_release_all`

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)

    def _dequantizing(self, source: UnitSource) -> AbstractContextManager[None]:
        """The profiler's stage in which a unit is dequantized; an empty context if it has no codes."""
        if source.dequantizes:
            return self._profiler.stage(source.unit.name, DEQUANTIZE)
        return contextlib.nullcontext()

    def _start(self, unit: str) -> None:
        if not self.is_drafting:
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
        self, source: UnitSource, device: Device, *, elsewhere: bool = False, **answers: Callable[..., torch.Tensor]
    ) -> Callable[[], None]:
        """A function that replaces the weights of a unit by placeholders, with these answers."""

        def read(entry: ParameterEntry) -> torch.Tensor:
            return self._read_absent(source, device, entry, elsewhere=elsewhere)

        absent = [(entry, entry.placeholder(device.torch_device, read, **answers)) for entry in source.entries]
        for _, placeholder in absent:
            placeholder.is_at_hand = self._is_resident and "look_up" in answers

        def unbind() -> None:
            for entry, placeholder in absent:
                entry.set(placeholder)

        return unbind

    def _read_absent(
        self, source: UnitSource, device: Device, entry: ParameterEntry, *, elsewhere: bool
    ) -> torch.Tensor:
        """The weight of a placeholder that is read outside its unit's own forward.

        Raises:
            AbsentWeightError: it cannot be read now.
        """
        unit = source.unit
        if not elsewhere and not unit.is_layer and _calling.get() is self:
            weights = self._read.get(unit.name)
            if weights is None:
                memo = ChainMap(self._read_memos[device.name], self._memos[device.name])
                with self._dequantizing(source):
                    weights = self._read[unit.name] = self._readable(source, device, memo)
            return weights[entry.target]
        # where all fits, a table is like other weights; some adapters are initialised from their base weights
        if (self._is_resident and unit.name in self.tables) or (not elsewhere and called_by("peft")):
            memo = ChainMap[str, dict[str, torch.Tensor]]({}, self._memos[device.name])
            return self._readable(source, device, memo, entry.target)[entry.target]
        why = "it is computed in each pass"
        if elsewhere:
            why = "it is on another host"
        elif unit.is_layer:
            why = f"it is in memory only while {unit.name} computes"
        raise AbsentWeightError(
            f"Weight {entry.target} is not in memory: {why}.",
            "Load the model with enough max_memory for all weights, or read the weight from its file with "
            "rabbitllm.lazy_load. model.save_pretrained(folder) writes all weights.",
        )

    def _readable(
        self, source: UnitSource, device: Device, memo: TensorsByRecipe, only: str | None = None
    ) -> dict[str, torch.Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            parameters = self._permanent(source, device, memo, only)
            return {entry.target: entry.bindable(tensor) for entry, tensor in parameters}

    def _permanent(
        self, source: UnitSource, device: Device, memo: TensorsByRecipe, only: str | None = None
    ) -> Iterator[tuple[ParameterEntry, torch.Tensor]]:
        """The parameters of a unit outside the streaming buffers, as for a resident one."""
        # tensors of a unit that is not a view are copied, else a norm would keep the bytes of its whole layer
        copies = not device.shares_host_memory and not source.is_view
        part = self._quantized.get(source.unit.name) or self._part(source, device)
        return source.parameters(self._model, part, memo, copies=copies, only=only)

    def _part(self, source: UnitSource, device: Device) -> PartReader:
        """A reader of a unit's stored parts, resident on its device: copied to it if it has its own memory."""
        if device.shares_host_memory:
            return self._mapped
        buffer = device.device_buffer(source.buffer_bytes)
        pinned = self.executors[device.name].pinned
        host = pinned.units.get(source.unit.name) if pinned is not None else None
        if host is None:
            host = torch.empty(source.buffer_bytes, dtype=torch.uint8, device="cpu")
            reader = SpanReader(self._store, THROUGH_THE_CACHE, self._store.checks)
            reader.read(source.spans, bytes_of(host))
        ticket = device.upload(host, buffer, device.leave())
        device.landed(ticket)
        device.arrive(ticket)
        return source.part_of(buffer)


def _parent_paths(path: str) -> Iterator[str]:
    """The paths of the modules that a module is in, without the model's own."""
    return (path[:index] for index, letter in enumerate(path) if letter == ".")
