"""Tests of limits of time, which go on while all processes of a test are stopped (SIGSTOP): a server that goes on then
gives up what is a minute late.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

NOTICED = 5.0
"""Seconds without a sign of a thread that is due ten times a second: on a busy machine it is not as late as this."""


def unless_stopped(attempt: Callable[[], T], attempts: int = 5) -> T:
    """What an attempt returns, or another one if it fails and this process was stopped meanwhile."""
    waits = list[float]()
    try:
        with _watched(waits):
            return attempt()
    except Exception:
        if attempts == 1 or max(waits) < NOTICED:
            raise
    return unless_stopped(attempt, attempts - 1)


@contextlib.contextmanager
def _watched(waits: list[float]) -> Iterator[None]:
    """Append the seconds from each sign of a thread to the next one, and to the end."""
    over = threading.Event()

    def watch() -> None:
        last, is_over = time.monotonic(), False
        while not is_over:
            is_over = over.wait(0.1)
            waits.append(time.monotonic() - last)
            last += waits[-1]

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
