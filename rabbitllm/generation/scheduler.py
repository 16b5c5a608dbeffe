"""The request queue, and the decisions which sequences take part in the next pass, are admitted, or are preempted.

    order      first come, first served; preempted sequences come first
    a pass     every sequence in decode, and as many prompt tokens as keep the pass short
    memory     a sequence is admitted if the running ones leave room for its KV cache and some more tokens;
               if the caches exceed the limit later, the sequence admitted last is preempted

Any thread may add a request. Only the batch's thread starts and removes requests, so it may read `running` at any time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rabbitllm.base.forks import own_lock
from rabbitllm.errors import BusyError, ClosedError
from rabbitllm.generation.request import FinishReason
from rabbitllm.generation.sequence import RequestHandle, SequenceMemory

MANY_TOKENS = 64
"""The time of a pass with fewer tokens counts as the time to stream the weights."""
FIRST_TOKENS = 1024
"""Prompt tokens in a pass before their cost is measured."""
MAX_TOKENS = 8192
"""The most prompt tokens in a pass: their activations need memory too."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The measured time of passes, and from it the budget of prompt tokens: as many as double the time of a pass.

    A pass over streamed weights has a minimum time for any number of tokens; up to the budget, tokens cost little.

    Attributes:
        least: seconds of the shortest recent pass; None before the first.
        each: seconds that a token adds; None until a pass with many tokens was measured.
    """

    least: float | None = None
    each: float | None = None

    def after(self, tokens: int, seconds: float) -> TokenBudget:
        """The budget updated by one more pass."""
        if tokens >= MANY_TOKENS and self.least is not None:
            each = max(seconds - self.least, 0.0) / tokens
            return TokenBudget(self.least, each if self.each is None else 0.5 * (self.each + each))
        # the minimum rises slowly, so that a short pass long ago does not count for ever
        return TokenBudget(seconds if self.least is None else min(seconds, 1.05 * self.least), self.each)

    def recompute_seconds(self, tokens: int, chunk: int) -> float | None:
        """Estimated seconds to recompute the KV cache of a sequence; None if not measured yet.

        Counts the time that its tokens add to passes, and the whole time of every pass but the last, which yields its
        next token.

        Args:
            tokens: number of tokens of the sequence.
            chunk: tokens of it in one pass.
        """
        if self.least is None or self.each is None:
            return None
        return tokens * self.each + (-(-tokens // chunk) - 1) * self.least

    def prompt_tokens(self, chunk: int) -> int:
        """Budget of prompt tokens in the next pass; at least a chunk.

        Args:
            chunk: tokens of one prompt in a pass.
        """
        if self.least is None or self.each is None:
            return max(chunk, FIRST_TOKENS)
        return min(max(chunk, int(self.least / max(self.each, 1e-9))), MAX_TOKENS)


def take_part(tokens: Sequence[int], chunk: int) -> list[int]:
    """Indices of the sequences that take part in the next pass, in ascending order.

    Args:
        tokens: number of tokens that each sequence brings; one for a sequence in decode.
        chunk: maximum prompt tokens in a pass; the first prompt takes part in any case.
    """
    found = []
    left = chunk
    for place, count in enumerate(tokens):
        if count <= 1:
            found.append(place)
        elif left == chunk or count <= left:
            found.append(place)
            left -= count
    return found


def fits(text: SequenceMemory, running: Sequence[SequenceMemory], cost: Callable[[int], int], limit: int) -> bool:
    """Whether memory has room for one more sequence; with no others running it always may begin.

    Args:
        text: the waiting sequence.
        running: the running sequences.
        cost: function from tokens to bytes of the KV cache.
        limit: limit in bytes.
    """
    return not running or cost(text.soon) + sum(cost(one.soon) for one in running) <= limit


def too_many(running: Sequence[SequenceMemory], cost: Callable[[int], int], limit: int) -> int:
    """How many running sequences, counted from the last, are preempted before the next pass.

    Args:
        running: sequences in the order in which they were admitted.
        cost, limit: see `fits`.
    """
    needed = [cost(one.tokens + 1) for one in running]
    count = 0
    while count < len(running) - 1 and sum(needed[: len(needed) - count]) > limit:
        count += 1
    return count


def retry_after(waiting: int, places: int, seconds: float) -> float:
    """Estimated seconds until a new request can be accepted, from 1 to 600.

    Args:
        waiting: number of waiting requests.
        places: maximum number of running requests.
        seconds: recent duration of a request.
    """
    return min(max(1.0, seconds * max(waiting, 1) / max(places, 1)), 600.0)


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
