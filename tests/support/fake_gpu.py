"""A GPU made of CPU tensors, on which every copy that is not waited for, and every tensor left elsewhere, shows.

A real GPU hides such mistakes nearly always: the copy happens to be over in time. Here an upload is carried out as late
as the contract of `rabbitllm.engine.devices.Device` allows, and the buffer holds garbage until then. Inside `watched()`
every operation of this thread is looked at as well: it must not mix tensors of two devices, must not read a buffer
before its upload has arrived, and what it reads must not be uploaded into before a mark that comes later. Fresh memory
needs such a mark too: as with CUDA's caching allocator, work asked earlier may not be done with it.

The computation is late too: a copy to the host that is not waited for has its values once the host waits for the
device, and no thread of a pool may compute on a device, since no stream orders its work. Each device has one link,
whose copies come one after the other, by a modelled clock.

The tensors are ordinary ones of the CPU, so results have the bits of the CPU. A device is told apart by the index in
`torch.device("cpu", index)`, which torch itself ignores. Knows the contract, and nothing else of rabbitllm.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rabbitllm.engine.devices import aligned_host

HOST = torch.device("cpu")
GARBAGE = 0xFF
"""Every byte of a buffer whose bytes have not arrived: not a number in every floating type."""


class _Current(threading.local):
    device = torch.device("cpu", 1)


current = _Current()
"""The current device of this thread."""


class Race(RuntimeError):
    """Two things that a GPU may do at once would touch the same bytes."""


class WrongDevice(RuntimeError):
    """An operation on tensors of two devices."""


@dataclass(eq=False)
class _Memory:
    """What is known of one allocation."""

    device: torch.device
    touched: int
    """When the computation last used it, or when it was allocated."""
    pending: RequestHandle | None = None
    """The upload into it that has not arrived."""


@dataclass(eq=False)
class RequestHandle:
    """An upload; it refers to both buffers only until it is over, as an event of CUDA refers to none."""

    host: torch.Tensor | None
    device: torch.Tensor | None
    memory: _Memory
    nbytes: int
    staged: torch.Tensor | None = None
    """What was in the host buffer when the copy left it."""
    end: float = 0.0
    """When it is over, by the modelled clock."""
    is_over: bool = False


@dataclass(frozen=True)
class Mark:
    """A point of a device's computation."""

    owner: FakeGpu
    time: int
    now: float
    """When the computation reaches it, by the modelled clock."""


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Not that of a tensor which stands for a weight: it has a size, and no address."""
    try:
        return storage.data_ptr() != 0
    except RuntimeError:
        return False


class _Ledger:
    """Which allocation is whose. Allocations are told apart by their storage, which views share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._time = 0
        self._known: dict[int, tuple[StorageWeakRef, _Memory]] = {}
        self.gpus: weakref.WeakValueDictionary[torch.device, FakeGpu] = weakref.WeakValueDictionary()
        self.host_now = 0.0
        """What the modelled clock shows when the host queues work."""

    def tick(self) -> int:
        self._time += 1
        return self._time

    def put(self, tensor: torch.Tensor, device: torch.device) -> _Memory:
        storage = tensor.untyped_storage()
        if len(self._known) > 20_000:
            self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
        memory = _Memory(device, self.tick())
        # while the weak reference is held, no other storage gets the same key
        self._known[storage._cdata] = (StorageWeakRef(storage), memory)
        if (gpu := self.gpus.get(device)) is not None:
            gpu.hold(storage)
        return memory

    def find(self, tensor: torch.Tensor) -> _Memory | None:
        entry = self._known.get(tensor.untyped_storage()._cdata)
        return entry[1] if entry is not None else None

    def place(self, tensor: torch.Tensor) -> torch.device:
        if tensor.device.index is not None:  # one without a storage, which stands for a weight, names it by itself
            return tensor.device
        memory = self.find(tensor)
        return memory.device if memory is not None else HOST


_ledger = _Ledger()


class FakeGpu:
    """A `Device` for tests; `uploads` and `uploaded_bytes` count the copies.

    Args:
        index: which one.
        memory: bytes that it says are free.
        lockable: bytes of host memory that it pins, and no more.
        capacity: bytes of all tensors on it, then memory runs out; None if it never does. The computation of a thread
            counts inside `watched()` only.
        has_bf16: False as on a T4.

    Attributes:
        used: bytes of the tensors on it, if it has a capacity.
        peak: the most of these so far.
        now: seconds of the modelled clock at which all computation that was asked of it is over.
        copied: the same for copies to it.
    """

    shares_host_memory = False
    link_rate = 1e9
    """Bytes a second of its link, by the modelled clock."""
    memory_rate = 1e11
    """Bytes a second that computation reads and writes."""

    def __init__(
        self,
        index: int,
        memory: int = 1 << 30,
        lockable: int = 1 << 40,
        capacity: int | None = None,
        has_bf16: bool = True,
    ) -> None:
        self.has_bf16 = has_bf16
        self.name = f"fake:{index}"
        self.torch_device = torch.device("cpu", index + 1)
        self.memory = memory
        self.lockable = lockable
        self.locked: dict[int, int] = {}
        """Address -> bytes of host buffers that are pinned."""
        self.uploaded_from: list[int] = []
        """Addresses, in the order of the uploads."""
        self.uploads = 0
        self.uploaded_bytes = 0
        self.marks = 0
        self.waits = 0
        """How often the main thread waited for it: by `landed` or `synchronise`, and in operations of `watched()`."""
        self.waited_for: Counter[str] = Counter()
        """The same by what it waited for."""
        self.interrupt_at: int | None = None
        """The number of the wait in which Ctrl-C comes."""
        self._under_way: list[RequestHandle] = []
        self._buffers: list[tuple[StorageWeakRef, int]] = []
        self.capacity = capacity
        self.peak = 0
        self._held: list[tuple[StorageWeakRef, int]] = []
        self._at_most = 0
        """`used` when it was last counted, and what came since then."""
        self.now = self.copied = 0.0
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors of the host that copies were asked into, and what they hold once these are over."""
        _ledger.gpus[self.torch_device] = self

    @property
    def used(self) -> int:
        self._held = [entry for entry in self._held if not entry[0].expired()]
        self._at_most = sum(nbytes for _, nbytes in self._held)
        return self._at_most

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Count a tensor's memory; as CUDA's allocator, raise an error if it is too much."""
        if self.capacity is None or not _has_memory(storage):
            return
        nbytes = storage.nbytes()
        if self._at_most + nbytes > min(self.peak, self.capacity):  # else nothing is told by counting
            used = self.used + nbytes
            if used > self.capacity:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {nbytes} bytes. GPU {self.name} has a total capacity of "
                    f"{self.capacity} bytes of which {self.capacity - used + nbytes} are free. Of the rest"
                )
            self.peak = max(self.peak, used)
        self._held.append((StorageWeakRef(storage), nbytes))
        self._at_most += nbytes

    def empty_cache(self) -> None:
        pass

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        before, current.device = current.device, self.torch_device
        try:
            yield
        finally:
            current.device = before

    @property
    def allocated(self) -> int:
        """Bytes of device buffers that are in use."""
        return sum(nbytes for buffer, nbytes in self._buffers if not buffer.expired())

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        if sum(self.locked.values()) + nbytes > self.lockable:
            raise RuntimeError("no more memory can be pinned")
        with _disable_current_modes():
            buffer = aligned_host(nbytes).fill_(GARBAGE)
        self.locked[buffer.data_ptr()] = nbytes
        return buffer

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        with _ledger.lock, _disable_current_modes():
            if any(ticket.host.data_ptr() == buffer.data_ptr() for ticket in self._under_way):
                raise Race("host memory is unlocked while a copy from it is under way")
            del self.locked[buffer.data_ptr()]

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        with _ledger.lock, _disable_current_modes():
            buffer = torch.full((nbytes,), GARBAGE, dtype=torch.uint8)
            _ledger.put(buffer, self.torch_device)
            self._buffers.append((StorageWeakRef(buffer.untyped_storage()), nbytes))
            return buffer

    def upload(self, host: torch.Tensor, device: torch.Tensor, after: Any) -> Any:
        with _ledger.lock, _disable_current_modes():
            if host.shape != device.shape:
                raise ValueError(f"{tuple(host.shape)} bytes do not fit {tuple(device.shape)}")
            memory = _ledger.find(device)
            if memory is None or memory.device != self.torch_device:
                raise WrongDevice(f"the buffer is not one of {self.name}")
            if not isinstance(after, Mark) or after.owner is not self or after.time < memory.touched:
                raise Race(f"an upload to {self.name} waits for no mark after the last use of its buffer")
            device.fill_(GARBAGE)
            if memory.pending is not None:  # which is overwritten, since uploads are carried out in order
                self._under_way.remove(memory.pending)
            self.copied = max(self.copied, after.now) + host.nbytes / self.link_rate
            ticket = memory.pending = RequestHandle(host, device, memory, host.nbytes, end=self.copied)
            self._under_way.append(ticket)
            self.uploads += 1
            self.uploaded_bytes += host.nbytes
            self.uploaded_from.append(host.data_ptr())
            return ticket

    def _wait(self, why: str) -> None:
        if threading.current_thread() is threading.main_thread():
            self.waits += 1
            self.waited_for[why] += 1
            if self.waits == self.interrupt_at:
                raise KeyboardInterrupt

    def compute(self, nbytes: int, after: float) -> None:
        """Ask for a computation that reads and writes so many bytes, not before a moment."""
        self.now = max(self.now, after) + nbytes / self.memory_rate

    def fetch(self, target: torch.Tensor) -> None:
        """Let a tensor of the host hold garbage until the host waits."""
        self._late.append((target, target.clone()))
        target.fill_(float("nan") if target.is_floating_point() else 1 if target.dtype is torch.bool else -1)

    def finish(self, why: str) -> None:
        """Let the host wait until all computation is over."""
        self._wait(why)
        _ledger.host_now = max(_ledger.host_now, self.now)
        for target, value in self._late:
            target.copy_(value)
        self._late.clear()

    def landed(self, ticket: Any) -> None:
        self._wait("a copy")
        with _ledger.lock, _disable_current_modes():
            # from now on the host buffer may hold something else
            if ticket.staged is None and not ticket.is_over:
                ticket.staged = ticket.host.clone()

    def arrive(self, ticket: Any) -> None:
        with _ledger.lock, _disable_current_modes():
            memory = ticket.memory
            if memory.pending is not None and memory.pending is not ticket:
                raise Race("the buffer was given to another upload before this one arrived")
            if ticket in self._under_way:
                self._carry_out(ticket)
            memory.touched = _ledger.tick()
            self.now = max(self.now, ticket.end)

    def seconds(self, ticket: Any) -> float:
        if not ticket.is_over:
            raise RuntimeError("the copy is not over")
        return float(ticket.nbytes / self.link_rate)

    def leave(self) -> Any:
        with _ledger.lock:
            self.marks += 1
            return Mark(self, _ledger.tick(), self.now)

    def synchronise(self) -> None:
        with _ledger.lock, _disable_current_modes():
            self.now = max(self.now, self.copied)
            self.finish("all of its work")
            for ticket in list(self._under_way):
                self._carry_out(ticket)

    def free_bytes(self) -> int:
        return self.memory

    def _carry_out(self, ticket: RequestHandle) -> None:
        assert ticket.device is not None
        ticket.device.copy_(ticket.staged if ticket.staged is not None else ticket.host)
        ticket.is_over, ticket.host, ticket.device, ticket.staged = True, None, None, None
        if ticket.memory.pending is ticket:
            ticket.memory.pending = None
        self._under_way.remove(ticket)


@contextlib.contextmanager
def watched() -> Iterator[Operations]:
    """Look at every operation of this thread, and of threads of a pool that get work meanwhile."""
    submit = ThreadPoolExecutor.submit

    def apart(job: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with _NoComputation():
            return job(*args, **named)

    def submitted(pool: ThreadPoolExecutor, job: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        return submit(pool, apart, job, *args, **named)

    ThreadPoolExecutor.submit = submitted  # type: ignore[assignment, method-assign]
    try:
        with _DeviceOfTensors(), Operations() as operations:
            yield operations
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


class _NoComputation(TorchDispatchMode):
    """For threads without a stream of their own."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if not func.is_view and any(_ledger.place(tensor) != HOST for tensor in _tensors(named, _tensors(args, []))):
            raise Race(f"{func} in a thread whose work on the device no stream orders")
        return func(*args, **named)


_GET_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_TO = (torch.Tensor.to, torch.Tensor.cpu)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MAKERS = (torch.tensor, torch.as_tensor)
_TRANSFERS = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
# in inference mode an operation that is made of others is not taken apart
_TRANSFERS |= {torch.ops.aten.to.device, torch.ops.aten.to.dtype_layout, torch.ops.aten.to.dtype}
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}
_ASKS_THE_DEVICE = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere"),
    *("masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
}
"""Operations whose result, or the size of it, is a number that the host needs."""


def _answers_itself(cls: type) -> bool:
    """Whether a kind of tensor, or one that it is derived from, has a `__torch_function__` of its own."""
    return any("__torch_function__" in vars(base) for base in takewhile(lambda base: base not in _PLAIN, cls.__mro__))


class _DeviceOfTensors(TorchFunctionMode):
    """Tensors answer where they are, and can be fetched to the host."""

    def __init__(self) -> None:
        super().__init__()
        self._answering: list[Any] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func == _GET_DEVICE and args[0].device.type == "cpu":
            return _ledger.place(args[0])
        if func == _IS_CPU and args[0].device.type == "cpu":
            return _ledger.place(args[0]) == HOST
        if func in _TO and _ledger.find(args[0]) is not None and self._means_host(func, (*args[1:], *named.values())):
            # to torch both are the CPU, so it would hand out the tensor itself
            Operations.look([args[0]])
            with _disable_current_modes():
                result = func(args[0].clone(), *args[1:], **named)
                _to_the_host(result, _ledger.place(args[0]), is_waited_for=not named.get("non_blocking"))
                return result
        if func is torch.Tensor.numpy and _ledger.find(args[0]) is not None:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if func is torch.Tensor.tolist and (memory := _ledger.find(args[0])) is not None:
            Operations.look([args[0]])
            _asks(memory.device, "tolist")
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.Tensor):  # to where another one is
            where = _ledger.place(args[1])
            if where != HOST and _ledger.find(args[0]) is None:
                result = func(args[0].clone(), *args[1:], **named)
                _ledger.put(result, where)
                return result
        own = next((cls for cls in types if _answers_itself(cls)), None)
        if own is not None and func not in self._answering:  # a kind of tensor that may ask others where they are
            self._answering.append(func)
            try:
                with self:
                    return own.__torch_function__(func, types, args, named)
            finally:
                self._answering.pop()
        result = func(*args, **named)
        if func is torch.Tensor.new_tensor and "device" not in named and (where := _ledger.place(args[0])) != HOST:
            _ledger.put(result, where)  # nor do they show whose new tensor it is
            _asks(where, "a copy from ordinary memory")
        if func in _MAKERS and named.get("device") is not None and torch.device(named["device"]).index is not None:
            where = torch.device(named["device"])
            _ledger.put(result, where)  # the operations below do not show its device
            _asks(where, "a copy from ordinary memory")
        return result

    def _means_host(self, func: Callable[..., Any], wanted: tuple[Any, ...]) -> bool:
        if func is torch.Tensor.cpu:
            return True
        devices = [_ledger.place(value) if isinstance(value, torch.Tensor) else value for value in wanted]
        return any(str(device) == "cpu" for device in devices)


def _asks(device: torch.device, why: str) -> None:
    """Let the host wait for a device's computation."""
    if (gpu := _ledger.gpus.get(device)) is not None:
        with _ledger.lock, _disable_current_modes():
            gpu.finish(why)


def _to_the_host(result: torch.Tensor, device: torch.device, *, is_waited_for: bool) -> None:
    """A copy from a device to the host."""
    if is_waited_for:
        _asks(device, "a copy to the host")
    elif (gpu := _ledger.gpus.get(device)) is not None:
        gpu.fetch(result)


def _tensors(value: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of an operation's arguments or results, added to some; by hand, for torch's own walk over any kind of tree
    takes longer than the operation on a tensor of a tiny model."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, _TREES):
        for entry in value.values() if isinstance(value, dict) else value:
            if type(entry) not in _LEAVES:
                _tensors(entry, tensors)
    return tensors


_TREES = (list, tuple, dict)
_LEAVES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class Operations(TorchDispatchMode):
    """Checks what each operation reads, and notes where its results are.

    Attributes:
        crossings: (from, to) -> copies of tensors from one device to another.
        count: operations on devices, each of which is at least one launch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.crossings: Counter[tuple[torch.device, torch.device]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        tensors = _tensors(named, _tensors(args, []))
        with _ledger.lock:
            if not func.is_view:
                self.look(tensors)
            home = self._common_device(func, args, tensors)
            if home != HOST and (why := self._asks_for(func, args, named)):
                _asks(home, why)
        result = func(*args, **named)
        device = named.get("device")
        if func is torch.ops.aten._to_copy.default and device is not None and torch.device(device).index is None:
            device = home  # a cast inside another operation names the CPU; one that fetches was answered before
        with _ledger.lock:
            for output in _tensors(result, []):
                if output.device.type == "cpu" and _ledger.find(output) is None:
                    where = device if device is not None and torch.device(device).index is not None else home
                    where = HOST if device is not None and torch.device(device).index is None else where
                    if where != HOST:
                        _ledger.put(output, torch.device(where))
            if func in _TRANSFERS:
                self._cross(func, args, named, result)
            elif home != HOST and not func.is_view and (gpu := _ledger.gpus.get(home)) is not None:
                self.count += 1
                used = [*tensors, *_tensors(result, [])]
                gpu.compute(sum(tensor.nbytes for tensor in used), _ledger.host_now)
        return result

    def _cross(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any], result: torch.Tensor) -> None:
        """Note a copy from one device to another."""
        source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]  # copy_: its target first
        begin, end = _ledger.place(source), _ledger.place(result)
        if begin == end:
            return
        self.crossings[begin, end] += 1
        names = [argument.name for argument in func._schema.arguments]
        is_waited_for = not {**dict(zip(names, args, strict=False)), **named}.get("non_blocking")
        if end == HOST:
            with _disable_current_modes():
                _to_the_host(result, begin, is_waited_for=is_waited_for)
        elif begin == HOST:
            if is_waited_for:
                _asks(end, "a copy from ordinary memory")
        elif (gpu := _ledger.gpus.get(end)) is not None and (other := _ledger.gpus.get(begin)) is not None:
            gpu.compute(result.nbytes, other.now)

    @staticmethod
    def _asks_for(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> str:
        """What of an operation the host has to wait for; "" for nothing."""
        name = func._schema.name.partition("::")[2]
        if name in _ASKS_THE_DEVICE or (name == "where" and len(args) == 1):
            return str(name)
        if name == "repeat_interleave" and named.get("output_size") is None and not isinstance(args[-1], int):
            return str(name)
        if func in _INDEXING:
            index = _tensors(args[1], [])
            if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in index):
                return "an index of booleans"
            if any(tensor.dim() and _ledger.place(tensor) == HOST for tensor in index):
                return "an index from the host"
        return ""

    @staticmethod
    def look(tensors: list[torch.Tensor]) -> None:
        """Note that the computation uses these."""
        for tensor in tensors:
            memory = _ledger.find(tensor)
            if memory is None:
                continue
            if memory.pending is not None:
                raise Race("a buffer is used before its upload has arrived")
            memory.touched = _ledger.tick()

    @staticmethod
    def _common_device(func: Any, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> torch.device:
        if func in _TRANSFERS:
            return _ledger.place(tensors[0])
        # as on a GPU, numbers and indices may come from the host
        index = {id(tensor) for tensor in _tensors(args[1], [])} if func in _INDEXING else set()
        large = [tensor for tensor in tensors if tensor.dim() and tensor.device.type == "cpu"]
        places = {_ledger.place(tensor) for tensor in large if id(tensor) not in index}
        places |= {_ledger.place(tensor) for tensor in large if id(tensor) in index} - {HOST}
        if len(places) > 1:
            raise WrongDevice(f"{func} on tensors of {', '.join(sorted(map(str, places)))}")
        scalars = {_ledger.place(tensor) for tensor in tensors if not tensor.dim()} - {HOST}
        return next(iter(places or scalars), HOST)
