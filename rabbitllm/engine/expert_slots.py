"""Memory for experts, and the threads that fill it: slots in a device's memory, and places in host memory.

A slot records whose bytes it holds, once all of them are there. Decides nothing (`expert_pool.py` does).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from rabbitllm.base.forks import Workers
from rabbitllm.engine.devices import Device
from rabbitllm.engine.expert_source import ExpertSource
from rabbitllm.engine.loader import bytes_of
from rabbitllm.engine.pinned_memory import HostBuffers
from rabbitllm.engine.placement import EXPERT_STAGING
from rabbitllm.engine.span_reader import SpanReader
from rabbitllm.telemetry.profiler import READ, Profiler

Whose = tuple[int, int]
"""A module's number, and an expert's."""


@dataclass(eq=False)
class ExpertSlot:
    """Memory of one expert.

    Attributes:
        memory: uint8, where the device computes.
        number: in the cache; -1 for none.
        left: the last use of it, for the next copy into it.
        coming: what is under way into it.
        ticket: of the copy that filled it, until the computation was told to wait for that.
        has: whose bytes are all in it.
        ready: (kind of module, leaf) -> the weight that is there, of those that are used as they are stored: a view of
            the memory, whichever expert is in it.
        made: of which of these the scales have been made for the expert that is in it.
    """

    memory: torch.Tensor
    number: int
    left: Any
    coming: Future[Any] | None = None
    ticket: Any = None
    has: Whose | None = None
    ready: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    made: set[tuple[int, str]] = field(default_factory=set)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way into it."""
        return self.coming is None or self.coming.done()


@dataclass(frozen=True, slots=True)
class Shelf:
    """A place in host memory, -1 for none, and whether it has the expert already."""

    number: int = -1
    filled: bool = False


class ExpertMemory:
    """Fills slots and places in host memory.

    Args:
        sources: the modules.
        device: where they compute.
        nbytes: of a slot.
        disk: reads.
        profiler: records it.
        host: gives host memory to copy from, to a device that shares none.
        places: experts that are kept there.

    Attributes:
        places: as given.
        host_has: place -> whose bytes are all in it.
    """

    def __init__(
        self,
        sources: Sequence[ExpertSource],
        device: Device,
        nbytes: int,
        disk: SpanReader,
        profiler: Profiler,
        host: HostBuffers | None,
        places: int,
    ) -> None:
        self.places = places
        self.host_has: list[Whose | None] = [None] * places
        self._sources = sources
        self._device = device
        self._nbytes = nbytes
        self._disk = disk
        self._profiler = profiler
        self._host = self._cut(host.take_anyhow(places * nbytes), places) if host is not None and places else []
        self._host_left: list[Any] = [None] * places
        self._staging = deque([host.take_anyhow(nbytes) for _ in range(EXPERT_STAGING)] if host is not None else [])
        self._keeper = host  # kept, since its buffers are unpinned when it is freed
        self._threads = Workers(EXPERT_STAGING, f"experts-{device.name}")

    def slots(self, count: int) -> list[ExpertSlot]:
        """So many, numbered."""
        if self._device.shares_host_memory:
            cut = self._cut(self._device.host_buffer(count * self._nbytes), count)  # in one, for huge pages
        else:
            cut = [self._device.device_buffer(self._nbytes) for _ in range(count)]
        return [ExpertSlot(part, number, self._device.leave()) for number, part in enumerate(cut)]

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()

    def bring(self, module: int, expert: int, slot: ExpertSlot, shelf: Shelf, leaf: str | None = None) -> Future[Any]:
        """Begin to fill a slot, with an expert or what one of its leaves is made from.

        Args:
            module, expert: whose bytes.
            slot: nothing is under way into it.
            shelf: where they are in host memory, or are to be kept there.
            leaf: which; None for all of the expert.

        Returns:
            The slot's `coming`: the ticket of the copy that fills it.
        """
        slot.has = None
        slot.made.clear()
        slot.coming = self._threads.submit(self._fill, module, expert, slot, shelf, leaf)
        return slot.coming

    def stock(self, module: int, expert: int, place: int) -> Future[None]:
        """Begin to fill a place in host memory."""
        return self._threads.submit(self._shelve, module, expert, place)

    def _cut(self, memory: torch.Tensor, count: int) -> list[torch.Tensor]:
        return [memory[at * self._nbytes : (at + 1) * self._nbytes] for at in range(count)]

    def _fill(self, module: int, expert: int, slot: ExpertSlot, shelf: Shelf, leaf: str | None) -> Any:
        source, ticket = self._sources[module], None
        if self._device.shares_host_memory:
            self._read(source, expert, leaf, slot.memory)
        elif shelf.number >= 0:
            if not shelf.filled:
                self._shelve(module, expert, shelf.number)
            ticket = self._upload(self._host[shelf.number], slot, source.extent(leaf))
            self._host_left[shelf.number] = ticket
        else:
            staged = self._staging.popleft()  # one for each thread
            try:
                self._read(source, expert, leaf, staged)
                ticket = self._upload(staged, slot, source.extent(leaf))
                self._device.landed(ticket)
            finally:
                self._staging.append(staged)
        slot.has = (module, expert) if leaf is None else None
        return ticket

    def _upload(self, host: torch.Tensor, slot: ExpertSlot, extent: slice) -> Any:
        return self._device.upload(host[extent], slot.memory[extent], slot.left)

    def _shelve(self, module: int, expert: int, place: int) -> None:
        self.host_has[place] = None
        if self._host_left[place] is not None:
            self._device.landed(self._host_left[place])
        self._read(self._sources[module], expert, None, self._host[place])
        self.host_has[place] = (module, expert)

    def _read(self, source: ExpertSource, expert: int, leaf: str | None, memory: torch.Tensor) -> None:
        spans = source.spans(expert, leaf)
        with self._profiler.stage(source.name, READ, sum(span.nbytes for span in spans)):
            self._disk.read(spans, bytes_of(memory))
