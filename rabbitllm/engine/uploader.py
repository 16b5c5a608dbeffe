"""Prefetches units from host memory into device buffers, for devices with memory of their own.

One thread reads units on the disk into a few pinned buffers, as far ahead as there are buffers, so that the disk reads
while other units are copied. Another thread begins the copies, in the order of use, each as soon as a device buffer is
free: units that are kept in pinned memory directly from there, the others from the buffer that they were read into. So
copies wait for a read only when its unit is the next one that is needed. Only the next read into the same buffer waits
for a copy; the computation waits on the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch

from rabbitllm.engine.devices import Device
from rabbitllm.engine.loader import Loader, largest
from rabbitllm.engine.pinned_memory import HostBuffers
from rabbitllm.engine.placement import SLOTS, STAGING
from rabbitllm.engine.prefetcher import BufferSlot, FilledSlot, Prefetcher
from rabbitllm.engine.span_reader import SpanReader
from rabbitllm.engine.unit_source import UnitSource
from rabbitllm.telemetry.profiler import PINNED_UPLOAD, READ_WAIT, UPLOAD, UPLOAD_WAIT, Profiler


class Uploader:
    """Copies the units of one device to it that are not resident on it.

    Args:
        sources: the units, by name.
        kept: the bytes of units that are kept in host memory, uint8, in the layout of their source.
        disk: reads the other units.
        device: the device that they are copied to.
        profiler: records reading, copying and waiting.
        memory: provides buffers to read into.

    Attributes:
        waited: seconds that callers have waited for units on the disk, in all.
        waited_for_copies: seconds that callers have waited for units in host memory, in all.
    """

    def __init__(
        self,
        sources: Mapping[str, UnitSource],
        kept: Mapping[str, torch.Tensor],
        disk: SpanReader,
        device: Device,
        profiler: Profiler,
        memory: HostBuffers,
    ) -> None:
        self.waited = self.waited_for_copies = 0.0
        self._sources = sources
        self._kept = kept
        self._device = device
        self._profiler = profiler
        self._memory = memory  # kept, since its buffers are unpinned when it is freed
        on_disk = {name: source for name, source in sources.items() if name not in kept}
        staging = [memory.take_anyhow(largest(on_disk)) for _ in range(STAGING if on_disk else 0)]
        self._disk = Loader(on_disk, disk, device, profiler, staging, STAGING)
        buffers = [device.device_buffer(largest(sources)) for _ in range(SLOTS if sources else 0)]
        # the first copy waits too: this memory may still be used by a running computation
        self._ahead = Prefetcher([BufferSlot(buffer, device.leave()) for buffer in buffers], f"upload-{device.name}")

    @property
    def loads(self) -> int:
        """How many units were read from the disk."""
        return self._disk.loads

    def expect(self, units: Iterable[str]) -> None:
        """Prefetch these in this order, and cancel all other requests; buffers limit the reads, slots the copies."""
        order = list(units)
        soon = order[:SLOTS]
        self._ahead.forget(but=soon)
        for at, unit in enumerate(soon):
            reads = tuple(islice((name for name in order[at:] if name not in self._kept), STAGING))
            self._ahead.request(unit, partial(self._upload, unit, reads))

    def take(self, unit: str) -> FilledSlot:
        """The unit's bytes on the device; blocks until their copy is queued. `give_back` its slot after use."""
        start = time.perf_counter()
        if not self._ahead.is_coming(unit):
            self._ahead.forget()  # other units were expected; their slots are needed now
            self._ahead.request(unit, partial(self._upload, unit, None))
        loaded = self._ahead.take(unit)
        waited, stage = time.perf_counter() - start, UPLOAD_WAIT if unit in self._kept else READ_WAIT
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
        """Declare that no computation after those queued so far uses this slot."""
        self._ahead.give_back(loaded, self._device.leave())

    def reset(self) -> None:
        """Discard all requests and taken slots; see `Prefetcher.reset`."""
        self._ahead.reset()
        self._disk.reset()

    def close(self) -> None:
        """Stop both threads."""
        self._ahead.close()
        self._disk.close()

    def _upload(self, unit: str, reads: tuple[str, ...] | None, slot: BufferSlot) -> Any:
        """Begin a copy; runs in the thread. `reads`: the units to read ahead, or None for no change."""
        if reads is not None:
            self._disk.expect(reads)
        target = slot.buffer[: self._sources[unit].buffer_bytes]
        if unit in self._kept:
            return self._device.upload(self._kept[unit], target, slot.left)
        read, ticket = self._disk.bring(unit), None
        try:
            ticket = self._device.upload(read.slot.buffer[: len(target)], target, slot.left)
        finally:
            self._disk.give_back(read, ticket)
        return ticket

    def _record_copy(self, loaded: FilledSlot) -> None:
        unit, device = loaded.unit, self._device
        with self._profiler.stage(unit, UPLOAD_WAIT):
            device.landed(loaded.ticket)
        stage = PINNED_UPLOAD if unit in self._kept else UPLOAD
        self._profiler.add(unit, stage, device.seconds(loaded.ticket), self._sources[unit].stored_bytes)
