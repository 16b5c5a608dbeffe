"""The request queue and the running requests, shared by all threads; the queue can be held and closed.

Any thread may add a request. Only the batch's thread starts and removes requests, so it may read `running` at any
time. The batch decides which requests are admitted and preempted.
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
    """Holds the waiting and the running requests.

    Args:
        most_running: maximum number of running requests.
        most_waiting: maximum number of waiting requests; those that can begin at once do not count.

    Attributes:
        running: requests in the order in which they began.
    """

    def __init__(self, most_running: int, most_waiting: int) -> None:
        self._most_running = most_running
        self._most_waiting = most_waiting
        self.running: list[RequestHandle] = []
        self._waiting: deque[RequestHandle] = deque()
        self._lately = 1.0  # moving average of the seconds that a request took
        self._closing: float | None = None  # time at which unfinished requests are cancelled
        self._holders = 0
        self._change = own_lock(threading.Condition())

    # in any thread ---------------------------------------------------------------------------------------------------

    def come_in(self, handle: RequestHandle) -> None:
        """Append a request to the queue.

        Raises:
            BusyError: the request queue is full.
            ClosedError: the queue is closed.
        """
        with self._change:
            if self._closing is not None:
                raise ClosedError("No more requests are taken on.", "Start the server again.")
            free = max(self._most_running - len(self.running), 0)
            if len(self._waiting) >= self._most_waiting + free:  # requests with a free slot begin at once
                after = retry_after(len(self._waiting), self._most_running, self._lately)
                raise BusyError(
                    f"{len(self._waiting):,} requests wait already, as many as may.",
                    f"Try again in {after:.0f} s.",
                    after,
                )
            self._waiting.append(handle)
            self._change.notify_all()

    def wake(self) -> None:
        """Wake the batch's thread because the state of a request has changed."""
        with self._change:
            self._change.notify_all()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Start no pass while the context is open; new requests wait."""
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
        """Add and remove no request while the context is open."""
        with self._change:
            yield

    def close(self, seconds: float | None = None) -> None:
        """Accept no more requests.

        Args:
            seconds: time after which unfinished requests are cancelled; None for never.
        """
        with self._change:
            until = time.monotonic() + seconds if seconds is not None else float("inf")
            self._closing = until if self._closing is None else min(until, self._closing)
            self._change.notify_all()

    @property
    def waiting(self) -> list[RequestHandle]:
        """The waiting requests, in their order."""
        with self._change:
            return list(self._waiting)

    # in the batch's thread -------------------------------------------------------------------------------------------

    def wait(self) -> bool:
        """Wait while there are no requests or the queue is held; False once it is closed and empty."""
        with self._change:
            while self._holders or not (self.running or self._waiting):
                if self._closing is not None and not self._holders:
                    return False
                self._change.wait()
        return True

    def unwanted(self) -> list[tuple[RequestHandle, FinishReason]]:
        """Requests that are cancelled or past their deadline, each with its finish reason."""
        now = time.monotonic()
        with self._change:
            closing = self._closing is not None and now >= self._closing
            return [
                (handle, FinishReason.CANCELLED if handle.is_cancelled or closing else FinishReason.TIMEOUT)
                for handle in (*self.running, *self._waiting)
                if handle.is_cancelled or closing or (handle.deadline is not None and now >= handle.deadline)
            ]

    def begin(self, handle: RequestHandle) -> None:
        """Move a request from the queue to the running ones."""
        with self._change:
            self._waiting.remove(handle)
            self.running.append(handle)

    def make_way(self, handle: RequestHandle) -> None:
        """Move a preempted request to the front of the queue."""
        with self._change:
            self.running.remove(handle)
            self._waiting.appendleft(handle)

    def leave(self, handle: RequestHandle) -> None:
        """Remove a request that has ended, waiting or running."""
        with self._change:
            if handle in self.running:
                self.running.remove(handle)
            else:
                self._waiting.remove(handle)

    def took(self, seconds: float) -> None:
        """Record the duration of a request, from which `BusyError` estimates when to try again."""
        self._lately = 0.8 * self._lately + 0.2 * seconds
