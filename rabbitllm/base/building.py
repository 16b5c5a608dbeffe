"""The building of models, one at a time and beside no pass.

While transformers builds and initialises a model it changes torch's default dtype and the functions of `torch.nn.init`
for the whole process: two builders would leave them changed, and a pass beside one compute with another dtype.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from rabbitllm.base.forks import in_child, own_lock


class Building:
    """A lock of the builder's thread, which may take it again; it waits for running passes, and new ones for it."""

    def __init__(self) -> None:
        self._lock = own_lock(threading.RLock())
        self._change = own_lock(threading.Condition())
        self._builders = self._passes = 0
        in_child(self._forget)

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            with self._change:
                self._builders += 1
                self._change.wait_for(lambda: not self._passes)
        except BaseException:  # an interrupt
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        with self._change:
            self._builders -= 1
            self._change.notify_all()
        self._lock.release()

    @contextlib.contextmanager
    def a_pass(self) -> Iterator[None]:
        """Run a pass of a batch, in whose thread no model may be built meanwhile."""
        with self._change:
            self._change.wait_for(lambda: not self._builders)
            self._passes += 1
        try:
            yield
        finally:
            with self._change:
                self._passes -= 1
                self._change.notify_all()

    def _forget(self) -> None:
        """A fork has none of the threads that build or run passes."""
        self._builders = self._passes = 0


BUILDING = Building()
