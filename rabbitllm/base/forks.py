"""Handling of threads, locks and direct reads when a process forks.

A fork (multiprocessing's fork method, a DataLoader with workers, os.fork) copies the memory of a process, but only the
calling thread. A lock that another thread held stays locked in the child, a job of another thread never ends, and torch
waits for an OpenMP team that does not exist, or crashes. So locks of objects that outlive a call are `own_lock`s, their
threads are `Workers`, and both are usable in a child; the team of the thread that forks ends before (`openmp.py`). A
child that does not use the model only runs a few resets. Independent of models.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

from rabbitllm.errors import ForkedError

L = TypeVar("L")
T = TypeVar("T")

_IN_CHILD: list[Callable[[], Callable[[], object] | None]] = []
"""References to functions that are called in a child, in the order of registration."""
_BEFORE: list[Callable[[], Callable[[], object] | None]] = []
"""The same of functions that are called before a fork."""
_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()


def own_lock(lock: L) -> L:
    """Return the same lock (threading.Lock, RLock or Condition), registered to be free in every forked child."""
    _LOCKS.add(lock)
    return lock


def in_child(method: Callable[[], object]) -> None:
    """Call a method of an object in every forked child, while the object lives; the method must not wait or raise."""
    _IN_CHILD.append(weakref.WeakMethod(method))


def before_fork(method: Callable[[], object]) -> None:
    """Call a method of an object before a fork, while the object lives, once no direct read is in progress."""
    _BEFORE.append(weakref.WeakMethod(method))


THREAD_BYTES = 16 << 20
"""Address space of a new thread: its stack, and allocations before its first line."""


def require_room_for_a_thread() -> None:
    """Refuse to start a thread that a limit of address space leaves no room for; call this before the start.

    `threading.Thread.start` never returns if the new thread cannot allocate its own state.

    Raises:
        MemoryError: less than `THREAD_BYTES` are left of RLIMIT_AS (Linux, getrlimit(2)).
    """
    if sys.platform != "linux":
        return
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    if limit - used < THREAD_BYTES:
        raise MemoryError("can't start new thread")


class DaemonThread(threading.Thread):  # noqa: TID251
    """A daemon thread; its start raises MemoryError if the thread has no room, where Python's own never returns."""

    def __init__(self, target: Callable[..., object], name: str, *args: object) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)

    def start(self) -> None:
        require_room_for_a_thread()
        super().start()


def fulfil(future: Future[Any], work: Callable[..., Any], *args: Any) -> None:
    """Give a future the result of some work, or its error."""
    try:
        future.set_result(work(*args))
    except BaseException as error:
        future.set_exception(error)


class ForkGuard:
    """Stores its owner: the process that created it."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the owner is this process."""
        return self._process == os.getpid()

    def settle(self) -> None:
        """Set this process as the owner."""
        self._process = os.getpid()

    def refuse(self, thing: str, remedy: str) -> None:
        """Raise an error unless this process is the owner.

        Raises:
            ForkedError: this process was forked from the owner.
        """
        if not self.is_here:
            raise ForkedError(
                f"{thing} belongs to process {self._process}, and this process ({os.getpid()}) was forked from it.",
                remedy,
            )


class Workers:
    """Threads that run jobs. In a forked child there are new threads, and unfinished jobs have failed.

    Args:
        count: limit of threads; each is started on demand.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._jobs: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._start()
        in_child(self._restart)

    def submit(
        self, job: Callable[..., Any], *args: Any, keep: Callable[[Future[Any]], object] = lambda future: None
    ) -> Future[Any]:
        """Run a job in one of the threads; `keep` gets its future before the caller has it.

        After a Ctrl-C in here, which leaves the caller no future to wait for, the job is over or never begins.
        """
        require_room_for_a_thread()  # the pool starts its threads on demand
        turn, calls = threading.Lock(), [functools.partial(job, *args)]

        def run() -> Any:
            with turn:
                return calls.pop()() if calls else None  # nothing keeps a job once its future is done

        try:
            future = self._pool.submit(run)
            self._jobs.add(future)
            keep(future)
        except BaseException:
            calls.clear()
            with turn:  # it may have begun
                raise
        return future

    def shutdown(self) -> None:
        """Stop the threads without waiting; jobs that have not begun are cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        require_room_for_a_thread()
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix=self._name)

    def _restart(self) -> None:
        fail_unfinished(list(self._jobs))
        self._start()


def fail_unfinished(futures: Iterable[Future[Any]]) -> None:
    """In a forked child: make futures whose thread is in the parent fail with `ForkedError` instead of never ending."""
    for future in futures:
        future._condition = threading.Condition()  # the thread may have held it
        if not future.done():
            future.set_exception(
                ForkedError(
                    f"A thread of the process that this one ({os.getpid()}) was forked from had unfinished work.",
                    "Call the model again.",
                )
            )


class _DirectReads:
    """Direct reads (past the page cache) in progress; a fork waits for them.

    The kernel writes such a read to the pages of a buffer. A fork in the meantime marks the pages as copy-on-write, and
    the parent may get a copy of a page before the bytes arrive (open(2), O_DIRECT: never run concurrently with fork).

    A Ctrl-C may come at any moment in the main thread, also while a read is marked as over. So a thread that has a mark
    reads only while the function that made it runs; and the lock is taken and released by functions of C, within which
    no Ctrl-C is raised.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._change = own_lock(threading.Condition(self.lock))
        self._marks = dict[int, FrameType]()
        in_child(self._forget)

    def read(self, read: Callable[..., T], *args: Any) -> T:
        """Return what `read` returns, within which there is no other direct read. No fork begins meanwhile."""
        with self.lock:
            self._marks[threading.get_ident()] = sys._getframe()
        try:
            return read(*args)
        finally:
            with self.lock:
                self._marks.pop(threading.get_ident(), None)
                self._change.notify_all()

    def settle(self) -> None:
        """Before a fork, with the lock: wait for reads in progress."""
        while any(self._is_reading(*running) for running in sys._current_frames().items()):
            self._change.wait(_INTERRUPTED_SECONDS)  # a Ctrl-C may have prevented that the end of a read was told
        for reference in _BEFORE:
            if (method := reference()) is not None:
                method()

    def _is_reading(self, thread: int, frame: FrameType | None) -> bool:
        """Whether another thread, which runs a function, is in a read."""
        mark = self._marks.get(thread) if thread != threading.get_ident() else None
        while frame is not None and frame is not mark:
            frame = frame.f_back
        return frame is not None

    def _forget(self) -> None:
        """In a forked child there are no reads."""
        self._marks.clear()


_INTERRUPTED_SECONDS = 0.05
_READS = _DirectReads()
direct_read = _READS.read
"""Call a function that reads past the page cache; no fork begins meanwhile."""
without_forks = _READS.lock
"""A context in which no fork begins; for what takes microseconds."""


def _after_fork() -> None:
    for lock in list(_LOCKS):
        lock._at_fork_reinit()  # as Python's own library resets its locks
    for reference in list(_IN_CHILD):
        method = reference()
        if method is not None:
            method()


def _before_fork() -> None:
    for references in (_IN_CHILD, _BEFORE):
        references[:] = [reference for reference in references if reference() is not None]
    _READS.settle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)  # after the next one: what was registered last is called first
    os.register_at_fork(before=_READS.lock.acquire, after_in_parent=_READS.lock.release, after_in_child=_after_fork)
