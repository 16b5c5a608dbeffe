"""Locks, threads and reads around a fork."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from rabbitllm.base import forks
from rabbitllm.base.forks import ForkGuard, Workers, direct_read, fulfil, own_lock, without_forks
from rabbitllm.errors import ForkedError
from tests.support.forked import PATIENCE, in_a_fork

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def held_elsewhere(lock: threading.Lock | threading.RLock | threading.Condition) -> threading.Event:  # type: ignore[valid-type]
    """Have another thread hold a lock until the event is set."""
    has, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:  # type: ignore[attr-defined]
            has.set()
            over.wait(PATIENCE)

    threading.Thread(target=hold, daemon=True).start()
    assert has.wait(PATIENCE)
    return over


@pytest.mark.parametrize("lock_type", [threading.Lock, threading.RLock, threading.Condition])
def test_lock_is_free_in_a_child_and_held_in_the_parent(lock_type: type) -> None:
    lock = own_lock(lock_type())
    over = held_elsewhere(lock)

    def take() -> bool:
        return bool(lock.acquire(blocking=False))

    assert in_a_fork(take)
    assert not take()
    over.set()


def test_unfinished_jobs_fail_in_a_child_and_new_ones_run() -> None:
    workers, begun, over = Workers(1, "test"), threading.Event(), threading.Event()

    def job() -> int:
        begun.set()
        over.wait(PATIENCE)
        return 1

    finished = workers.submit(int, "7")
    assert finished.result() == 7
    running, queued = workers.submit(job), workers.submit(int, "8")
    assert begun.wait(PATIENCE)

    def in_the_child() -> int:
        for future in (running, queued):
            with pytest.raises(ForkedError, match="had unfinished work"):
                future.result(PATIENCE)
        return finished.result() + int(workers.submit(int, "3").result(PATIENCE))

    assert in_a_fork(in_the_child) == 10
    over.set()
    assert (running.result(), queued.result()) == (1, 8)


def test_fork_waits_for_direct_reads() -> None:
    order: list[str] = []
    begun = threading.Event()

    def read() -> None:
        begun.set()
        time.sleep(0.3)
        order.append("read")

    thread = threading.Thread(target=direct_read, args=(read,))
    thread.start()
    assert begun.wait(PATIENCE)
    assert in_a_fork(lambda: order) == ["read"]
    thread.join()
    assert direct_read(int, "3") == 3


def test_guard_refuses_other_processes() -> None:
    guard = ForkGuard()
    guard.refuse("It", "Nothing.")
    with pytest.raises(ForkedError, match=f"It belongs to process {os.getpid()}, and this process"):
        in_a_fork(lambda: guard.refuse("It", "Nothing."))

    def settle() -> bool:
        guard.settle()
        return guard.is_here

    assert in_a_fork(settle)


def waits_for_no_fork() -> None:
    with without_forks:
        pass


@pytest.mark.parametrize("call", [lambda: direct_read(int, "3"), waits_for_no_fork])
def test_an_interrupt_leaves_no_lock_taken(call: Callable[[], object]) -> None:
    """Ctrl-C comes after a call of C, such as that which takes a lock, and Python keeps its traceback. No fork waits
    for a read that was interrupted, also in another thread."""
    errors, calls = list[KeyboardInterrupt](), 0

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "c_return"
        if calls == len(errors) + 1:
            raise KeyboardInterrupt

    is_interrupted, marked = True, 0
    while is_interrupted:
        calls, is_interrupted = 0, False
        sys.setprofile(interrupt)
        try:
            call()
            sys.setprofile(None)
        except KeyboardInterrupt as error:
            sys.setprofile(None)
            is_interrupted = calls > 0
            errors.append(error)
        assert not without_forks.locked(), calls
        is_interrupted &= len(errors) < 20
        marked += threading.get_ident() in forks._READS._marks
        forked = Future[int]()
        threading.Thread(target=fulfil, args=(forked, in_a_fork, lambda: len(forks._READS._marks)), daemon=True).start()
        assert forked.result(PATIENCE) == 0
    assert errors
    assert marked or call is waits_for_no_fork
