"""The same call for many items in a few threads that do not delay an interrupt.

A `ThreadPoolExecutor` waits for its threads, on leaving its context and again when the interpreter exits, so that
Ctrl-C while a hub does not answer would take as long as all attempts. These threads are daemons.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(call: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """Call `call` with each item, in at most `threads` daemon threads.

    Returns:
        The results, in the order of the items.

    Raises:
        Exception: that of the first call to fail; no further item is started, and running calls are abandoned. The same
            if the caller is interrupted.
    """
    tasks = [(item, Future[Result]()) for item in items]
    waiting: queue.SimpleQueue[tuple[Item, Future[Result]]] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)

    def work() -> None:
        while True:
            try:
                item, future = waiting.get_nowait()
            except queue.Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call(item))
            except BaseException as error:
                future.set_exception(error)
                for _, later in tasks:
                    later.cancel()

    for number in range(min(threads, len(tasks))):
        threading.Thread(target=work, name=f"side-by-side-{number}", daemon=True).start()
    futures = [future for _, future in tasks]
    try:
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            if not future.cancelled():
                future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
