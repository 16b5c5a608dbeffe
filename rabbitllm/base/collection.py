"""Disables Python's cyclic garbage collector while many long-lived records are created.

The collector would traverse all live objects, torch's modules too, repeatedly without finding garbage: half of the time
of planning a model of 74,000 tensors.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from rabbitllm.base.forks import own_lock

_lock = own_lock(threading.Lock())
_open, _was_on = 0, True


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable collection in all threads while a context is open; also a decorator. It stays off if it was off."""
    global _open, _was_on
    with _lock:
        _was_on = _was_on if _open else gc.isenabled()
        _open += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open and _was_on:
                gc.enable()
