"""Prefetches units that are not resident into fixed buffers: from the disk, or from pinned host memory.

On a device that shares host memory, the computation uses the bytes in the buffers of `Loader`. For another device,
`Uploader` adds a second thread, unless all units are pinned: copies of these do not wait, and handing each to a thread
takes longer than asking for it. One thread reads units from the disk into a few pinned buffers, as far ahead as there
are buffers: the disk reads while other units are copied. The other thread begins the copies, in the order of use, each
as soon as a device buffer is free: of pinned units directly, of others from the buffer that they were read into. So a
copy waits for a read only if its unit is the next one. Only the next read into the same buffer waits for a copy; the
computation waits on the device.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from rabbitllm.base.forks import ForkGuard, Workers
from rabbitllm.base.terminal import size
from rabbitllm.engine.devices import Device, aligned_host
from rabbitllm.engine.placement import SLOTS, STAGING, Placement, Tier
from rabbitllm.engine.span_reader import FileSpan, ReadMode, SpanReader
from rabbitllm.engine.units import UnitSource
from rabbitllm.store.layer_store import WeightFiles
from rabbitllm.telemetry.passes import PINNED_UPLOAD, READ, READ_WAIT, UPLOAD, UPLOAD_WAIT
from rabbitllm.telemetry.profiler import Profiler

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class BufferSlot:
    """A buffer, uint8 (bytes,).

    Attributes:
        buffer: the memory that jobs fill.
        left: the `left` of its last `give_back`, for the next job.
        taken: whether it is in use.
    """

    buffer: torch.Tensor
    left: Any = None
    taken: bool = False


@dataclass(frozen=True)
class FilledSlot:
    """A unit's bytes in a slot, and the result of its job."""

    unit: str
    slot: BufferSlot
    ticket: Any


@dataclass(frozen=True)
class _Bytes:
    """What jobs need of a `UnitSource`, which would keep the model, and its memory after it was dropped."""

    unit: str
    spans: tuple[FileSpan, ...]
    buffer_bytes: int
    stored_bytes: int

    @classmethod
    def of(cls, sources: Mapping[str, UnitSource]) -> dict[str, _Bytes]:
        """Those of each of these units."""
        return {
            name: cls(source.unit.name, source.spans, source.buffer_bytes, source.stored_bytes)
            for name, source in sources.items()
        }


Job = Callable[[BufferSlot], Any]

_JOBS = set[Future[Any]]()


def wait_for_jobs(seconds: float = 30.0) -> None:
    """Wait until the jobs that have begun are done: those of a model that was dropped keep its buffers until then."""
    jobs = _JOBS.copy()  # in one step: other models add theirs
    wait([job for job in jobs if not job.done()], seconds)  # one that is cancelled may never be said to be


class Prefetcher:
    """Buffers, and what fills them.

    Args:
        slots: the buffers.
        thread: the name of a thread that fills them; None if no job waits, so that callers run the jobs themselves.
    """

    def __init__(self, slots: Sequence[BufferSlot], thread: str | None) -> None:
        self._slots = tuple(slots)
        self._wanted: dict[str, Job] = {}
        self._pending: dict[str, tuple[BufferSlot, Future[Any]]] = {}
        self._thread = None if thread is None else Workers(1, thread)

    def request(self, unit: str, job: Job) -> None:
        """Fill a buffer with a unit once one is free, unless it was requested already."""
        if unit not in self._pending:
            self._wanted.setdefault(unit, job)
        self._start()

    def forget(self, but: Collection[str] = ()) -> None:
        """Cancel all requests but these. Their buffers are free at once: a running job ends before the next begins."""
        for unit in [unit for unit in self._wanted if unit not in but]:
            del self._wanted[unit]
        for unit in [unit for unit in self._pending if unit not in but]:
            _, future = self._pending.pop(unit)
            future.cancel()

    def take(self, unit: str, job: Job | None = None) -> FilledSlot:
        """A unit; blocks until its job is done. `give_back` it after use.

        If it has no buffer, all other requests are cancelled, and `job` fills one.

        Raises:
            Exception: the error of the job; the unit may be requested again.
            RuntimeError: every buffer is in use.
        """
        if unit not in self._pending and job is not None:
            self.forget()
            self.request(unit, job)
        if unit not in self._pending:
            raise RuntimeError(f"there is no free buffer for {unit}")
        slot, future = self._pending[unit]
        try:
            ticket = future.result()
        except Exception:
            del self._pending[unit]
            raise
        # not earlier: if the wait is interrupted, the next call must still find the slot
        del self._pending[unit]
        slot.taken = True
        return FilledSlot(unit, slot, ticket)

    def give_back(self, loaded: FilledSlot, left: Any = None) -> None:
        """Allow a slot to be filled again once `left` is reached; the jobs interpret `left`."""
        loaded.slot.left = left
        # moved to the end: the slot that was free for longest is filled next, since its wait is the shortest
        self._slots = (*(slot for slot in self._slots if slot is not loaded.slot), loaded.slot)
        loaded.slot.taken = False
        self._start()

    def give_back_taken(self, leave: Callable[[], Any]) -> None:
        """Give back every taken slot; `leave` returns its `left`. For slots whose taker was interrupted."""
        for slot in self._slots:
            if slot.taken:
                self.give_back(FilledSlot("", slot, None), leave())

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def reset(self) -> None:
        """Discard all requests and taken slots: in a forked process, whose thread has no jobs."""
        self._wanted.clear()
        self._pending.clear()
        for slot in self._slots:
            slot.taken = False

    def _start(self) -> None:
        busy = {id(slot) for slot, _ in self._pending.values()}
        free = [slot for slot in self._slots if not slot.taken and id(slot) not in busy]
        for unit, slot in zip(list(self._wanted), free, strict=False):
            self._pending[unit] = slot, self._fill(self._wanted[unit], slot)
            del self._wanted[unit]

    def _fill(self, job: Job, slot: BufferSlot) -> Future[Any]:
        if self._thread is not None:
            future = self._thread.submit(job, slot)
            _JOBS.add(future)
            future.add_done_callback(_JOBS.discard)
            return future
        future = Future()
        try:
            future.set_result(job(slot))
        except Exception as error:
            future.set_exception(error)
        return future


class Loader:
    """Reads streamed units.

    Args:
        sources: the units, by name.
        disk: reads their bytes.
        device: its copies determine when a buffer may be filled again.
        profiler: records reading and waiting.
        buffers: uint8, each as large as the largest unit (see `largest`).
        depth: the number of units that `prefetch` reads.

    Attributes:
        loads: how many units were read.
        waited: seconds that callers have waited for the disk, in all.
        waited_for_copies: always 0; see `Uploader`.
    """

    waited_for_copies = 0.0

    def __init__(
        self,
        sources: Mapping[str, UnitSource],
        disk: SpanReader,
        device: Device,
        profiler: Profiler,
        buffers: Sequence[torch.Tensor],
        depth: int,
    ) -> None:
        self._units = _Bytes.of(sources)
        self._disk = disk
        self._device = device
        self._profiler = profiler
        self._depth = depth
        self._prefetcher = Prefetcher([BufferSlot(buffer) for buffer in buffers], f"read-{device.name}")
        self.loads = 0
        self.waited = 0.0

    def request(self, unit: str) -> None:
        """Begin to read a unit, unless it was requested already."""
        self._prefetcher.request(unit, partial(self._read, unit))

    def prefetch(self, units: Iterable[str]) -> None:
        """Prefetch the first of these, and cancel all other requests."""
        soon = list(islice(units, self._depth))
        self._prefetcher.forget(but=soon)
        for unit in soon:
            self.request(unit)

    def take(self, unit: str) -> FilledSlot:
        """The unit's bytes; blocks until they are read, and records the wait. `give_back` its slot after use."""
        start = time.perf_counter()
        loaded = self.fetch(unit)
        waited = time.perf_counter() - start
        self.waited += waited
        self._profiler.add(self._units[unit].unit, READ_WAIT, waited)
        return loaded

    def fetch(self, unit: str) -> FilledSlot:
        """The unit's bytes, like `take`, without a record of the wait."""
        return self._prefetcher.take(unit, partial(self._read, unit))

    def give_back(self, loaded: FilledSlot, ticket: Any = None) -> None:
        """Free a slot once the upload of this ticket is complete."""
        self._prefetcher.give_back(loaded, ticket)

    def give_back_taken(self) -> None:
        """Free all slots: between two passes no computation uses one."""
        self._prefetcher.give_back_taken(lambda: None)

    def reset(self) -> None:
        """Discard all requests and taken slots; see `Prefetcher.reset`."""
        self._prefetcher.reset()

    def close(self) -> None:
        """Stop the reading thread."""
        self._prefetcher.close()

    def _read(self, unit: str, slot: BufferSlot) -> None:
        self.loads += 1
        its = self._units[unit]
        if slot.left is not None:
            self._device.landed(slot.left)
        with self._profiler.stage(its.unit, READ, its.stored_bytes):
            self._disk.read(its.spans, bytes_of(slot.buffer[: its.buffer_bytes]))


def largest(sources: Mapping[str, UnitSource]) -> int:
    """Bytes of a buffer that fits any of these units."""
    return max((source.buffer_bytes for source in sources.values()), default=0)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Host memory, uint8, to read into."""
    return tensor.numpy().data.cast("B")


REFUSALS = (RuntimeError, MemoryError, OSError)
"""Errors of a system or a driver that cannot pin more memory."""
PIECE_BYTES = 256 << 20
"""Bytes that are pinned at a time for many slots: a driver's limit then costs one piece, not all of them."""


class HostBuffers:
    """Pinned host memory for copies to one device; released when this object is freed.

    Attributes:
        units: the units that are kept in it, by name: their bytes, uint8, in the layout of their source.
    """

    def __init__(self, device: Device) -> None:
        self.units: dict[str, torch.Tensor] = {}
        self._device = device
        self._locked: list[torch.Tensor] = []
        release = weakref.finalize(self, _release, device, self._locked, ForkGuard())
        release.atexit = False  # by then the driver may be unloaded, and the system frees all memory anyway

    def take(self, nbytes: int) -> torch.Tensor:
        """Pinned memory, uint8 (nbytes,), on a page boundary.

        Raises:
            RuntimeError, MemoryError, OSError: it is refused.
        """
        buffer = self._device.host_buffer(nbytes)
        self._locked.append(buffer)
        return buffer

    def take_anyhow(self, nbytes: int) -> torch.Tensor:
        """Pinned memory, or ordinary memory if that is refused: copies from it are slow, but correct."""
        return self.take_slots(1, nbytes)[0]

    def take_slots(self, count: int, nbytes: int) -> list[torch.Tensor]:
        """Memory for slots of one size: pinned in pieces until one is refused, and ordinary from then on.

        Args:
            count: the number of slots.
            nbytes: of a slot; a multiple of a page if there are several.
        """
        slots: list[torch.Tensor] = []
        in_piece, take = max(PIECE_BYTES // max(nbytes, 1), 1), self.take
        while (remaining := count - len(slots)) > 0:
            batch = min(in_piece, remaining)
            try:
                piece = take(batch * nbytes)
            except REFUSALS as error:
                if take is aligned_host:
                    raise
                message = "%s of host memory could not be pinned (%s): copies from it are slower."
                logger.warning(message, size(remaining * nbytes), error)
                take = aligned_host
                continue
            slots += [piece[index * nbytes : (index + 1) * nbytes] for index in range(batch)]
        return slots


def _release(device: Device, buffers: list[torch.Tensor], guard: ForkGuard) -> None:
    if not guard.is_here:  # a forked process has no driver, and the pages are pinned for its parent
        return
    device.synchronise()  # a copy may still be running
    for buffer in buffers:
        device.free_host_buffer(buffer)


def keep_units(
    placement: Placement, sources: Mapping[str, UnitSource], devices: Mapping[str, Device], store: WeightFiles
) -> tuple[Placement, dict[str, HostBuffers]]:
    """Read the units of `Tier.PINNED` into pinned memory, or into ordinary memory if the driver pins no more.

    Returns:
        The placement, where units that no memory was left for are streamed, and device name -> its pinned memory, for
        each device with memory of its own.

    Raises:
        OSError: a layer file cannot be read.
        IncompleteSplitError: its checksum differs.
    """
    memories = {name: HostBuffers(device) for name, device in devices.items() if not device.shares_host_memory}
    pinned = [placed for placed in placement.units if placed.tier is Tier.PINNED]
    # read once, so the page cache is better left to files that are read again and again
    reader = SpanReader(store, ReadMode(drop=True), store.checks)
    pins = True
    for index, placed in enumerate(pinned):
        source = sources[placed.unit]
        try:
            try:
                buffer = (memories[placed.device].take if pins else aligned_host)(source.buffer_bytes)
            except RuntimeError as error:  # a limit of the driver (WSL2) or of the user; memory itself is not short
                pins = False
                logger.warning(
                    "No more than %s of host memory can be pinned (%s); %d layers of %s are kept in ordinary memory, "
                    "from which copies are slower.",
                    size(sum(done.stored for done in pinned[:index])),
                    error,
                    len(pinned) - index,
                    size(sum(left.stored for left in pinned[index:])),
                )
                buffer = aligned_host(source.buffer_bytes)
        except REFUSALS as error:
            refused = pinned[index:]
            logger.warning(
                "There is no host memory for more than %s of layers (%s); %d layers of %s that were planned for host "
                "memory are read from the disk for each pass.",
                size(sum(done.stored for done in pinned[:index])),
                error,
                len(refused),
                size(sum(left.stored for left in refused)),
            )
            placement = placement.changed({left.unit: Tier.STREAMED for left in refused})
            break
        reader.read(source.spans, bytes_of(buffer))
        memories[placed.device].units[placed.unit] = buffer
    return placement, memories


class Uploader:
    """Copies units that are not resident to their device.

    Args:
        sources: the units, by name.
        disk: reads the other units.
        device: the device.
        profiler: records reading, copying and waiting.
        memory: keeps units in host memory, and provides buffers to read the others into.

    Attributes:
        waited: seconds that callers have waited for units on the disk, in all.
        waited_for_copies: seconds that callers have waited for units in host memory, in all.
    """

    def __init__(
        self,
        sources: Mapping[str, UnitSource],
        disk: SpanReader,
        device: Device,
        profiler: Profiler,
        memory: HostBuffers,
    ) -> None:
        self.waited = self.waited_for_copies = 0.0
        self._units = _Bytes.of(sources)
        self._pinned = memory.units
        self._device = device
        self._profiler = profiler
        self._memory = memory  # kept, since its buffers are unpinned when it is freed
        on_disk = {name: source for name, source in sources.items() if name not in memory.units}
        staging = [memory.take_anyhow(largest(on_disk)) for _ in range(STAGING if on_disk else 0)]
        self._disk = Loader(on_disk, disk, device, profiler, staging, STAGING)
        buffers = [device.device_buffer(largest(sources)) for _ in range(SLOTS if sources else 0)]
        # the first copy waits too: this memory may still be used by a running computation
        slots = [BufferSlot(buffer, device.leave()) for buffer in buffers]
        self._reads_from_disk = bool(on_disk)
        self._prefetcher = Prefetcher(slots, f"upload-{device.name}" if on_disk else None)

    @property
    def loads(self) -> int:
        """How many units were read from the disk."""
        return self._disk.loads

    def prefetch(self, units: Iterable[str]) -> None:
        """Prefetch these in this order, and cancel all other requests; buffers limit the reads, slots the copies."""
        order = list(units if self._reads_from_disk else islice(units, SLOTS))
        soon = order[:SLOTS]
        self._prefetcher.forget(but=soon)
        for position, unit in enumerate(soon):
            reads = tuple(islice((name for name in order[position:] if name not in self._pinned), STAGING))
            self._prefetcher.request(unit, partial(self._upload, unit, reads))

    def take(self, unit: str) -> FilledSlot:
        """The unit's bytes on the device; blocks until their copy is queued. `give_back` its slot after use."""
        start = time.perf_counter()
        loaded = self._prefetcher.take(unit, partial(self._upload, unit, None))
        waited, stage = time.perf_counter() - start, UPLOAD_WAIT if unit in self._pinned else READ_WAIT
        if stage is READ_WAIT:
            self.waited += waited
        else:
            self.waited_for_copies += waited
        self._profiler.add(unit, stage, waited)
        self._device.arrive(loaded.ticket)
        if self._profiler.enabled:
            self._record_copy(loaded)
        return loaded

    def give_back(self, loaded: FilledSlot) -> None:
        """Free a slot: no computation that is queued later uses it."""
        self._prefetcher.give_back(loaded, self._device.leave())

    def give_back_taken(self) -> None:
        """Free all slots: between two passes no computation that is queued later uses one."""
        self._prefetcher.give_back_taken(self._device.leave)

    def reset(self) -> None:
        """Discard all requests and taken slots; see `Prefetcher.reset`."""
        self._prefetcher.reset()
        self._disk.reset()

    def close(self) -> None:
        """Stop both threads."""
        self._prefetcher.close()
        self._disk.close()

    def _upload(self, unit: str, reads: tuple[str, ...] | None, slot: BufferSlot) -> Any:
        """Begin a copy; runs in the thread. `reads`: the units to prefetch from the disk, or None for no change."""
        if reads is not None:
            self._disk.prefetch(reads)
        target = slot.buffer[: self._units[unit].buffer_bytes]
        if unit in self._pinned:
            return self._device.upload(self._pinned[unit], target, slot.left)
        read, ticket = self._disk.fetch(unit), None
        try:
            ticket = self._device.upload(read.slot.buffer[: len(target)], target, slot.left)
        finally:
            self._disk.give_back(read, ticket)
        return ticket

    def _record_copy(self, loaded: FilledSlot) -> None:
        unit, device = loaded.unit, self._device
        with self._profiler.stage(unit, UPLOAD_WAIT):
            device.landed(loaded.ticket)
        stage = PINNED_UPLOAD if unit in self._pinned else UPLOAD
        self._profiler.add(unit, stage, device.seconds(loaded.ticket), self._units[unit].stored_bytes)
