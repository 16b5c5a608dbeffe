"""Prefetches layer files into host buffers.

On a device that shares host memory, the computation uses the bytes in place. For other devices they are then copied to
the device (`uploader.py`). The caller chooses the next unit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from rabbitllm.engine.devices import Device
from rabbitllm.engine.prefetcher import BufferSlot, FilledSlot, Prefetcher
from rabbitllm.engine.span_reader import SpanReader
from rabbitllm.engine.unit_source import UnitSource
from rabbitllm.telemetry.profiler import READ, READ_WAIT, Profiler


class Loader:
    """Reads streamed units.

    Args:
        sources: the units, by name.
        disk: reads their bytes.
        device: its copies determine when a buffer may be filled again.
        profiler: records reading and waiting.
        buffers: uint8, each as large as the largest unit (see `largest`).
        depth: how many units `expect` reads ahead.

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
        self._sources = sources
        self._disk = disk
        self._device = device
        self._profiler = profiler
        self._depth = depth
        self._ahead = Prefetcher([BufferSlot(buffer) for buffer in buffers], f"read-{device.name}")
        self.loads = 0
        self.waited = 0.0

    def request(self, unit: str) -> None:
        """Begin to read a unit, unless it was requested already."""
        self._ahead.request(unit, partial(self._read, unit))

    def expect(self, units: Iterable[str]) -> None:
        """Prefetch the first of these, and cancel all other requests."""
        soon = list(islice(units, self._depth))
        self._ahead.forget(but=soon)
        for unit in soon:
            self.request(unit)

    def take(self, unit: str) -> FilledSlot:
        """The unit's bytes; blocks until they are read, and records the wait. `give_back` its slot after use."""
        start = time.perf_counter()
        loaded = self.bring(unit)
        waited = time.perf_counter() - start
        self.waited += waited
        self._profiler.add(unit, READ_WAIT, waited)
        return loaded

    def bring(self, unit: str) -> FilledSlot:
        """The unit's bytes, like `take`, without a record of the wait."""
        if not self._ahead.is_coming(unit):
            self._ahead.forget()  # other units were expected; their buffers are needed now
            self.request(unit)
        return self._ahead.take(unit)

    def give_back(self, loaded: FilledSlot, ticket: Any = None) -> None:
        """Declare a slot free once the upload of this ticket is complete."""
        self._ahead.give_back(loaded, ticket)

    def reset(self) -> None:
        """Discard all requests and taken slots; see `Prefetcher.reset`."""
        self._ahead.reset()

    def close(self) -> None:
        """Stop the reading thread."""
        self._ahead.close()

    def _read(self, unit: str, slot: BufferSlot) -> None:
        self.loads += 1
        source = self._sources[unit]
        if slot.left is not None:
            self._device.landed(slot.left)
        with self._profiler.stage(unit, READ, source.stored_bytes):
            self._disk.read(source.spans, bytes_of(slot.buffer[: source.buffer_bytes]))


def largest(sources: Mapping[str, UnitSource]) -> int:
    """Bytes of a buffer that fits any of these units."""
    return max((source.buffer_bytes for source in sources.values()), default=0)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Host memory, uint8, to read into."""
    return tensor.numpy().data.cast("B")
