"""Who waits and who runs, for all threads to see: requests come in at a door, which can be held, and closed for good.

Any thread may ask to come in; from one to the other side of the door, and away, they get in the batch's thread alone,
which so may read `running` whenever it likes. Knows no model, and decides neither who begins nor who makes way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator

from rabbitllm.base.forks import own_lock
from rabbitllm.errors import BusyError, ClosedError
from rabbitllm.generation.picking import retry_after
from rabbitllm.generation.request import FinishReason
from rabbitllm.generation.request_handle import RequestHandle


class AdmissionQueue:
    """Lets requests in.

    Args:
        most_running: requests, at most.
        most_waiting: requests, at most, beside those for whom there is a place.

    Attributes:
        running: in the order in which they began.
    """

    def __init__(self, most_running: int, most_waiting: int) -> None:
        self._most_running = most_running
        self._most_waiting = most_waiting
        self.running: list[RequestHandle] = []
        self._waiting: deque[RequestHandle] = deque()
        self._lately = 1.0  # seconds that a request took
        self._closing: float | None = None  # when what is not finished is cancelled
        self._holders = 0
        self._change = own_lock(threading.Condition())

    # in any thread ---------------------------------------------------------------------------------------------------

    def come_in(self, handle: RequestHandle) -> None:
        """Wait as the last one.

        Raises:
            BusyError: as many wait as may.
            ClosedError: nobody is let in any more.
        """
        with self._change:
            if self._closing is not None:
                raise ClosedError("No more requests are taken on.", "Start the server again.")
            free = max(self._most_running - len(self.running), 0)
            if len(self._waiting) >= self._most_waiting + free:  # those for whom there is a place begin at once
                after = retry_after(len(self._waiting), self._most_running, self._lately)
                raise BusyError(
                    f"{len(self._waiting):,} requests wait already, as many as may.",
                    f"Try again in {after:.0f} s.",
                    after,
                )
            self._waiting.append(handle)
            self._change.notify_all()

    def wake(self) -> None:
        """Something about a request has changed."""
        with self._change:
            self._change.notify_all()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """There is nothing to do while the context is open; those who come in meanwhile wait."""
        with self._change:
            self._holders += 1
        try:
            yield
        finally:
            with self._change:
                self._holders -= 1
                self._change.notify_all()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Nobody comes or goes while the context is open."""
        with self._change:
            yield

    def close(self, seconds: float | None = None) -> None:
        """Let nobody in any more.

        Args:
            seconds: until those who are there are no longer wanted; None if they are to the end.
        """
        with self._change:
            until = time.monotonic() + seconds if seconds is not None else float("inf")
            self._closing = until if self._closing is None else min(until, self._closing)
            self._change.notify_all()

    @property
    def waiting(self) -> list[RequestHandle]:
        """Those that have not begun, in their order."""
        with self._change:
            return list(self._waiting)

    # in the batch's thread -------------------------------------------------------------------------------------------

    def wait(self) -> bool:
        """Until there is something to do; False when the end has come."""
        with self._change:
            while self._holders or not (self.running or self._waiting):
                if self._closing is not None and not self._holders:
                    return False
                self._change.wait()
        return True

    def unwanted(self) -> list[tuple[RequestHandle, FinishReason]]:
        """Those that nobody wants any more, or whose time is over."""
        now = time.monotonic()
        with self._change:
            closing = self._closing is not None and now >= self._closing
            return [
                (handle, FinishReason.CANCELLED if handle.is_cancelled or closing else FinishReason.TIMEOUT)
                for handle in (*self.running, *self._waiting)
                if handle.is_cancelled or closing or (handle.deadline is not None and now >= handle.deadline)
            ]

    def begin(self, handle: RequestHandle) -> None:
        """One that waited runs now."""
        with self._change:
            self._waiting.remove(handle)
            self.running.append(handle)

    def make_way(self, handle: RequestHandle) -> None:
        """One that ran waits again, before all others."""
        with self._change:
            self.running.remove(handle)
            self._waiting.appendleft(handle)

    def leave(self, handle: RequestHandle) -> None:
        """One is over, whichever side it is on."""
        with self._change:
            if handle in self.running:
                self.running.remove(handle)
            else:
                self._waiting.remove(handle)

    def took(self, seconds: float) -> None:
        """One was answered in this time: those who find everything taken are told to come back accordingly."""
        self._lately = 0.8 * self._lately + 0.2 * seconds
