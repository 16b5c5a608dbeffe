"""Calls in parallel: order, errors, how many at once, and that calls that hang are not waited for."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rabbitllm.checkpoints.fetch import side_by_side

ROOT = Path(__file__).parent.parent.parent


def test_results_in_the_order_of_the_items() -> None:
    later = threading.Event()

    def slow_first(number: int) -> int:
        if number == 0:
            assert later.wait(60)
        elif number == 3:
            later.set()
        return number * number

    assert side_by_side(slow_first, range(4), 4) == [0, 1, 4, 9]


@pytest.mark.parametrize("threads", [1, 3, 100])
def test_never_more_threads_than_asked_for(threads: int) -> None:
    lock, running, most = threading.Lock(), 0, 0
    together = threading.Barrier(min(threads, 12))

    def count(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(60)
        with lock:
            running -= 1
        return number

    assert side_by_side(count, range(12), threads) == list(range(12))
    assert most == min(threads, 12)


def test_nothing_to_do() -> None:
    assert side_by_side(str, [], 4) == []


def test_first_error_is_raised_and_no_further_item_is_begun() -> None:
    begun = []

    def fail(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise KeyError(number)

    with pytest.raises(KeyError, match="1"):
        side_by_side(fail, range(1000), 1)
    assert len(begun) < 1000


def test_an_error_does_not_wait_for_a_call_that_hangs() -> None:
    never = threading.Event()

    def call(number: int) -> None:
        if number == 0:
            never.wait()
        raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        side_by_side(call, range(2), 2)
    never.set()


HANGS = """
import threading
from rabbitllm.checkpoints.fetch import side_by_side

def call(number):
    if number:
        raise KeyboardInterrupt
    threading.Event().wait()

side_by_side(call, range(2), 2)
"""


def test_a_process_ends_while_a_call_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "KeyboardInterrupt" in done.stderr
