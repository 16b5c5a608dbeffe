"""Fixed buffers that one thread fills, unit by unit, ahead of need.

A unit is requested together with the job that fills a buffer with it; the job runs in the thread as soon as a buffer
is free, in the order of the requests. All other state belongs to one caller, so it needs no lock: a buffer is free if
it is neither pending nor taken, so a call that is interrupted anywhere loses no buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from rabbitllm.base.forks import Workers


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


Job = Callable[[BufferSlot], Any]


class Prefetcher:
    """The buffers and their thread.

    Args:
        slots: the buffers.
        thread: the name of the thread.
    """

    def __init__(self, slots: Sequence[BufferSlot], thread: str) -> None:
        self._slots = tuple(slots)
        self._wanted: dict[str, Job] = {}
        self._pending: dict[str, tuple[BufferSlot, Future[Any]]] = {}
        self._thread = Workers(1, thread)

    def is_coming(self, unit: str) -> bool:
        """Whether a unit has a buffer, filled or not."""
        return unit in self._pending

    def request(self, unit: str, job: Job) -> None:
        """Fill a buffer with a unit once one is free, unless it was requested already."""
        if unit not in self._pending:
            self._wanted.setdefault(unit, job)
        self._start()

    def forget(self, but: Collection[str] = ()) -> None:
        """Drop all requests but these. Their buffers are free at once: a running job ends before the next begins."""
        for unit in [unit for unit in self._wanted if unit not in but]:
            del self._wanted[unit]
        for unit in [unit for unit in self._pending if unit not in but]:
            _, future = self._pending.pop(unit)
            future.cancel()

    def take(self, unit: str) -> FilledSlot:
        """A unit that `is_coming`; blocks until its job is done. `give_back` it after use.

        Raises:
            Exception: the error of the job; the unit may be requested again.
            RuntimeError: every buffer is in use.
        """
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
        """Declare that a slot may be filled again once `left` is reached; the jobs interpret `left`."""
        loaded.slot.left = left
        # moved to the end, so that the slot that was free for longest is filled next: its wait is the shortest
        self._slots = (*(slot for slot in self._slots if slot is not loaded.slot), loaded.slot)
        loaded.slot.taken = False
        self._start()

    def close(self) -> None:
        """Stop the thread."""
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
            self._pending[unit] = slot, self._thread.submit(self._wanted[unit], slot)
            del self._wanted[unit]
