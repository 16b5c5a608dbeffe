"""A stand-in for a kill inside this process: from a chosen step on nothing changes the disk any more.

    with dying_at(17) as death:
        call.make()
    if death.step is None: ...  # it finished in fewer steps

A hundred times faster than a real kill (`tests.support.crashes`), and to the disk the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rabbitllm.storage.durable import Step
from tests.support.leftovers import wait_for_threads
from tests.support.splitting import Counter
from tests.support.ticks import observe_ticks


class Death(BaseException):
    """What is raised in place of a step; no handler of errors catches it."""


@dataclass
class Died:
    """How a call ended: the first step that was not carried out, or None if it came to its own end."""

    step: Step | None = None


@contextlib.contextmanager
def dying_at(index: int, *observers: Callable[[Step], None], kinds: tuple[str, ...] = ()) -> Iterator[Died]:
    """Let what runs in the context die before its step ``index``, counted from 0 among the steps of these kinds.

    The steps that are carried out are shown to the observers. Threads are waited for: a dead process has none.
    """
    died = Died()

    def watch(step: Step) -> None:
        with lock:
            if died.step is None and not (kinds and step.kind not in kinds):
                counter(step)
            if died.step is not None:
                raise Death
            for observer in observers:
                observer(step)

    def note(number: int, step: Step) -> None:
        if number == index:
            died.step = step

    lock = threading.Lock()
    counter = Counter(note)
    before = set(threading.enumerate())
    with observe_ticks(watch):
        try:
            with contextlib.suppress(Death):
                yield died
        finally:
            wait_for_threads(before)
