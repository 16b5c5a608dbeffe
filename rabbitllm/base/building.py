"""The building of models, one at a time and beside no pass.

While transformers builds and initialises a model it changes torch's default dtype and the functions of `torch.nn.init`
for the whole process: two builders would leave them changed, and a pass beside one compute with another dtype.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from threading import get_ident

from rabbitllm.base.forks import in_child, own_lock


class Building:
    """A lock of the builder's thread, which may take it again; it waits for running passes, and new ones for it.

    A pass that builds a model, in a hook for example, is not running meanwhile. One within another is a part of it.
    """

    def __init__(self) -> None:
        self._change = own_lock(threading.Condition())
        self._passes = set[int]()  # their threads
        self._builder = self._builders = 0
        self._paused = list[bool]()  # whether the builder's thread had a pass, each time that it took the lock
        in_child(self._forget)

    def __enter__(self) -> None:
        thread = get_ident()
        with self._change:
            is_paused = thread in self._passes
            self._passes.discard(thread)
            self._builders += 1
            self._change.notify_all()
            try:
                self._change.wait_for(lambda: not self._passes and self._builder in (0, thread))
            except BaseException:  # an interrupt
                self._end(is_paused)
                raise
            self._builder = thread
            self._paused.append(is_paused)

    def __exit__(self, *error: object) -> None:
        with self._change:
            is_paused = self._paused.pop()
            self._builder = self._builder if self._paused else 0
            self._end(is_paused)

    def _end(self, is_paused: bool) -> None:
        self._builders -= 1
        self._passes |= {get_ident()} if is_paused else set()
        self._change.notify_all()

    @contextlib.contextmanager
    def a_pass(self) -> Iterator[None]:
        """Run a pass of a batch."""
        thread = get_ident()
        if thread == self._builder or thread in self._passes:
            yield
            return
        with self._change:
            self._change.wait_for(lambda: not self._builders)
            self._passes.add(thread)
        try:
            yield
        finally:
            with self._change:
                self._passes.discard(thread)
                self._change.notify_all()

    def _forget(self) -> None:
        """A fork has one thread, that which forked."""
        self._passes &= {get_ident()}
        if self._builder != get_ident():
            self._builder, self._paused = 0, []
        self._builders = len(self._paused)


BUILDING = Building()
"""Models are built beside no pass, one at a time."""
