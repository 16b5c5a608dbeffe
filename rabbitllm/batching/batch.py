"""Generations that come and go while passes go on: the thread that owns the model, and the door to it.

`submit` may be called from any thread, and events are handed out in the batch's own: who takes them must not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rabbitllm.batching.request import Event, Facts, Request


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch takes on.

    Attributes:
        running: requests in one pass, at most.
        waiting: requests that wait for a place, at most.
        cache_bytes: keys and values of all requests, and those kept for later prompts; None for a quarter of the
            memory that is free when the batch begins.
        chunk: tokens of a prompt in one pass, so that a long one does not keep the others waiting.
        exact: compute each request's rows by themselves: its tokens are then those that it gets alone in any dtype,
            at the price of speed.
    """

    running: int = 64
    waiting: int = 256
    cache_bytes: int | None = None
    chunk: int = 512
    exact: bool = False


class Ticket:
    """A request that was taken on."""

    def cancel(self) -> None:
        """End it with the pass that is going on; may be called from any thread, any number of times."""
        raise NotImplementedError


class Batch:
    """Answers requests on one model, all in the same passes.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        limits: see `Limits`.

    Raises:
        OptionError: the model is none that goes on with a text.
    """

    def __init__(self, model: Any, limits: Limits = Limits()) -> None:
        raise NotImplementedError

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def submit(self, request: Request, notify: Callable[[Event], None]) -> Ticket:
        """Take a request on.

        Args:
            request: what is asked for.
            notify: is given each event as it happens, in the batch's thread; what it raises cancels the request.

        Raises:
            BusyError: as many wait as may.
            ClosedError: the batch takes on nothing more.
            OptionError: no pass could ever answer it: its prompt is longer than the model's context, or needs more
                memory for keys and values than there is.
        """
        raise NotImplementedError

    def close(self, seconds: float | None = None) -> None:
        """Take on nothing more, finish what runs and waits, and end; returns when that is done.

        Args:
            seconds: after so long, what is not finished is cancelled; None for no limit, 0 for at once.
        """
        raise NotImplementedError

    @property
    def facts(self) -> Facts:
        """What it has done so far, and does now."""
        raise NotImplementedError
