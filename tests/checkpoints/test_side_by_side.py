"""Calls in parallel: order, errors, how many at once, and that calls that hang are not waited for."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rabbitllm.base.forks import DaemonThread
from rabbitllm.checkpoints.fetch import side_by_side

ROOT = Path(__file__).parent.parent.parent


def test_results_in_the_order_of_the_items() -> None:
    released = threading.Event()

    def slow_first(item: int) -> int:
        if item == 0:
            assert released.wait(600)
        elif item == 3:
            released.set()
        return item * item

    assert side_by_side(slow_first, range(4), 4) == [0, 1, 4, 9]


@pytest.mark.parametrize("threads", [1, 3, 100])
def test_thread_limit(threads: int) -> None:
    lock, running, peak = threading.Lock(), 0, 0
    together = threading.Barrier(min(threads, 12))

    def count(item: int) -> int:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        together.wait(600)
        with lock:
            running -= 1
        return item

    assert side_by_side(count, range(12), threads) == list(range(12))
    assert peak == min(threads, 12)


def test_no_items() -> None:
    assert side_by_side(str, [], 4) == []


def test_first_error_is_raised_and_no_further_item_is_started() -> None:
    begun = []

    def fail(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise KeyError(item)

    with pytest.raises(KeyError, match="1"):
        side_by_side(fail, range(1000), 1)
    assert len(begun) < 1000


def test_error_does_not_wait_for_a_hanging_call() -> None:
    never = threading.Event()

    def call(item: int) -> None:
        if item == 0:
            never.wait()
        raise ValueError(item)

    with pytest.raises(ValueError, match="1"):
        side_by_side(call, range(2), 2)
    never.set()


def test_no_item_is_begun_after_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the threads that were started before: the caller has its error, and their results would go nowhere."""
    begun, starts, released = list[int](), list[str](), threading.Event()
    first_is_busy, start = threading.Event(), DaemonThread.start

    def call(item: int) -> None:
        begun.append(item)
        first_is_busy.set()
        released.wait(600)

    def one_starts(thread: DaemonThread) -> None:
        starts.append(thread.name)
        if len(starts) > 1:
            assert first_is_busy.wait(600)
            raise MemoryError("can't start new thread")
        start(thread)

    monkeypatch.setattr(DaemonThread, "start", one_starts)
    others = {*threading.enumerate()}  # one of an earlier test may still be about to end
    with pytest.raises(MemoryError):
        side_by_side(call, range(9), 3)
    (thread,) = (thread for thread in {*threading.enumerate()} - others if thread.name == starts[0])
    released.set()
    thread.join(600)
    assert begun == [0]


HANGS = """
import threading
from rabbitllm.base.forks import DaemonThread
from rabbitllm.checkpoints.fetch import side_by_side

def call(number):
    if number:
        raise KeyboardInterrupt
    threading.Event().wait()

side_by_side(call, range(2), 2)
"""


def test_process_ends_despite_a_hanging_call() -> None:
    result = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert "KeyboardInterrupt" in result.stderr
