"""A pool of open files: the least recently used file is closed for another, and reopened when it is used.

A system limits the descriptors of a process, often to 1,024, and a checkpoint may have more files than that.
Independent of formats; it writes nothing, and each file syncs itself before it is closed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from rabbitllm.base.forks import own_lock

MAX_FILES = 256
"""Few models have more layers; each file that is closed for another costs a sync that a thread waits for."""
_LEAST_FILES = 4
_SHARE = 8
"""Inverse of the share of the process's descriptors that a pool takes at most; a file may need two."""


class Reopenable(Protocol):
    """A file that a pool opens and closes."""

    @property
    def is_settled(self) -> bool:
        """Whether it can be closed now without losing data."""
        ...

    def reopen(self) -> None:
        """Open it. Called while it is closed, by one thread at a time."""
        ...

    def settle(self) -> None:
        """Make closing safe. Called while it is open; other threads may use it meanwhile."""
        ...

    def release(self) -> None:
        """Close it. Called while no thread uses it."""
        ...


class OpenFiles:
    """A pool of files, of which a limited number is open. Safe to use from several threads.

    A thread may use one file of a pool at a time.

    Args:
        limit: files that may be open at a time; by default derived from the limit of the process.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit or _files_allowed()
        self._lock = own_lock(threading.Lock())
        self._changed = own_lock(threading.Condition(self._lock))
        self._users: dict[Reopenable, int] = {}
        """Open file -> number of threads that use it; the least recently used first."""
        self._dropped: deque[Reopenable] = deque()
        """Files that were dropped while the lock was taken, perhaps by the same thread."""
        self._doomed: set[Reopenable] = set()
        """Files that were dropped while in use."""

    @contextlib.contextmanager
    def using(self, file: Reopenable) -> Iterator[None]:
        """Keep a file open while the context is; waits while the limit of files is in use.

        Raises:
            OSError: the file cannot be opened, or another one cannot be settled to make room for it.
        """
        try:
            while (other := self._taken_instead(file)) is not None:
                try:
                    other.settle()
                finally:
                    self._leave(other, for_another=True)
            try:
                yield
            finally:
                self._leave(file)
        finally:
            self._close_dropped()

    def drop(self, file: Reopenable) -> None:
        """Close a file as it is, once no thread uses it. Never waits: a garbage collection may call it anywhere."""
        self._dropped.append(file)
        self._close_dropped()

    def _taken_instead(self, file: Reopenable) -> Reopenable | None:
        """Return None once `file` is open and in use by the caller; else another open file, to be closed for it."""
        with self._lock:
            while True:
                if file in self._users or len(self._users) < self._limit:
                    if file not in self._users:
                        file.reopen()
                    self._users[file] = self._users.pop(file, 0) + 1
                    return None
                unused = next((other for other, users in self._users.items() if not users), None)
                if unused is not None:
                    self._users[unused] = 1
                    return unused
                self._changed.wait()

    def _leave(self, file: Reopenable, *, for_another: bool = False) -> None:
        with self._lock:
            self._users[file] -= 1
            if not self._users[file] and (file in self._doomed or (for_another and file.is_settled)):
                self._close(file)
            self._changed.notify_all()

    def _close_dropped(self) -> None:
        """Close dropped files that are not in use. If the lock is taken, its holder does this afterwards."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                file = self._dropped.popleft()
                if self._users.get(file):
                    self._doomed.add(file)
                elif file in self._users:
                    self._close(file)
            finally:
                self._lock.release()

    def _close(self, file: Reopenable) -> None:
        del self._users[file]
        self._doomed.discard(file)
        file.release()
        self._changed.notify_all()


def _files_allowed() -> int:
    if sys.platform == "win32":  # its limit per process is 8,192
        return MAX_FILES
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_FILES
    return min(MAX_FILES, max(_LEAST_FILES, limit // _SHARE))
