"""Layer files -> host buffer -> device, ahead of need, in buffers that are allocated once.

One thread reads; it takes a free slot, fills its host buffer with the unit's bytes, and begins the copy to the slot's
device buffer. The computation waits for that copy, uses the bytes in place, and gives the slot back. Which unit comes
next is the caller's to say. Knows no hooks and no modules.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from rabbitllm.engine.devices import Device
from rabbitllm.engine.span_reader import SpanReader
from rabbitllm.engine.unit_source import UnitSource
from rabbitllm.profiler import READ, READ_WAIT, UPLOAD, Profiler


@dataclass
class Slot:
    """A pair of buffers, and the mark of the last computation that used them."""

    host: torch.Tensor
    device: torch.Tensor
    left: Any


@dataclass(frozen=True)
class Loaded:
    """A unit's bytes in a slot; `ticket` is for `Device.arrive`."""

    unit: str
    slot: Slot
    ticket: Any


class Loader:
    """Brings the streamed units of one device.

    Args:
        sources: the streamed units, by name.
        disk: reads their bytes.
        device: where they go.
        profiler: records reading and waiting.
        slots: buffers; each as large as the largest unit.
    """

    def __init__(
        self, sources: Mapping[str, UnitSource], disk: SpanReader, device: Device, profiler: Profiler, slots: int
    ) -> None:
        self._sources = sources
        self._disk = disk
        self._device = device
        self._profiler = profiler
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._pending: dict[str, Future[Loaded]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=f"read-{device.name}")
        self._kept: dict[str, torch.Tensor] = {}
        self.loads = 0
        largest = max((source.buffer_bytes for source in sources.values()), default=0)
        for _ in range(slots if sources else 0):
            host = device.host_buffer(largest)
            on_device = host if device.shares_host_memory else device.device_buffer(largest)
            self._free.put(Slot(host, on_device, device.leave()))

    def keep_in_host_memory(self, unit: str) -> None:
        """Read a unit's bytes once and copy them from host memory from then on."""
        source = self._sources[unit]
        kept = self._device.host_buffer(source.buffer_bytes)
        self._disk.read(source.spans, _bytes(kept))
        self._kept[unit] = kept

    def request(self, unit: str) -> None:
        """Begin to bring a unit, if it is not on its way."""
        if unit not in self._pending:
            self._pending[unit] = self._reader.submit(self._load, unit)

    def take(self, unit: str) -> Loaded:
        """The unit's bytes; blocks until they are read. `give_back` its slot after use."""
        start = time.perf_counter()
        if unit not in self._pending:
            self._discard_pending()  # something else was expected; its slots are needed now
            self.request(unit)
        try:
            loaded = self._pending[unit].result()
        except Exception:
            del self._pending[unit]  # so that the next call tries again
            raise
        # only now: had the wait been interrupted, the next call would still find the slot
        del self._pending[unit]
        self._profiler.add(unit, READ_WAIT, time.perf_counter() - start)
        self._device.arrive(loaded.ticket)
        return loaded

    def give_back(self, loaded: Loaded) -> None:
        """Declare that the computation asked so far is the last to use this slot."""
        loaded.slot.left = self._device.leave()
        self._free.put(loaded.slot)

    def close(self) -> None:
        """Stop the reading thread."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _discard_pending(self) -> None:
        for unit in list(self._pending):
            future = self._pending.pop(unit)
            # one that failed has given its slot back, and its error concerns nobody any more
            if not future.cancel() and future.exception() is None:
                self._free.put(future.result().slot)

    def _load(self, unit: str) -> Loaded:
        source = self._sources[unit]
        slot = self._free.get()
        try:
            return self._fill(unit, source, slot)
        except BaseException:
            self._free.put(slot)
            raise

    def _fill(self, unit: str, source: UnitSource, slot: Slot) -> Loaded:
        self.loads += 1
        n = source.buffer_bytes
        host = self._kept.get(unit)
        if host is None:
            host = slot.host[:n]
            with self._profiler.stage(unit, READ, source.stored_bytes):
                self._disk.read(source.spans, _bytes(host))
        if self._device.shares_host_memory:
            if host.data_ptr() != slot.host.data_ptr():
                slot.host[:n].copy_(host)
            return Loaded(unit, slot, None)
        with self._profiler.stage(unit, UPLOAD, n):
            ticket = self._device.upload(host, slot.device[:n], slot.left)
            # the host buffer is filled again by this thread only, after the copy has left it
            self._device.landed(ticket)
        return Loaded(unit, slot, ticket)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data.cast("B")
