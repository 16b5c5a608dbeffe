"""Samples memory and disk while a split runs: the peaks, for a report, and whether free disk is running out.

A thread samples; the code that moves bytes calls `check()`, which costs a comparison. Independent of shards and layers.

Invariant: with the context open, if free space is under the limit for an interval, the next `check` raises.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rabbitllm.base.forks import DaemonThread
from rabbitllm.base.progress import DiskSampled, tell
from rabbitllm.base.terminal import size
from rabbitllm.errors import DiskFullError
from rabbitllm.storage.folders import allocated, existing

DISK_SHARE = 0.01
"""Share of a core that may be spent on summing the folder's files; with very many files they are summed less often."""


class DiskSampler:
    """A context manager that samples while it is open.

    Args:
        folder: the split directory; its disk is sampled even before the directory exists.
        min_free: bytes of free disk under which `check` raises; 0 for never.
        interval: seconds between samples.
        max_disk: bytes that the folder may occupy; only reported to listeners, since the plan keeps to it.
    """

    def __init__(self, folder: Path, min_free: int, interval: float = 0.1, max_disk: int | None = None) -> None:
        self._folder = folder
        self._min_free = min_free
        self._max_disk = max_disk
        self._interval = interval
        self._stop = threading.Event()
        self._thread = DaemonThread(self._sample_on, "watch")
        self._process: Any = None
        self._memory_at_start = 0
        self._max_memory = 0
        self.max_disk_bytes = 0
        self.min_free_bytes = sys.maxsize
        self._next_disk = 0.0

    def __enter__(self) -> DiskSampler:
        import psutil

        self._process = psutil.Process()
        self._memory_at_start = self._max_memory = anonymous_bytes(self._process)
        self._sample()  # so the first check raises on a disk that is too full at the start
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._next_disk = 0.0
        self._sample()

    def check(self) -> None:
        """Stop a split whose disk is running out, while there is still room to stop cleanly.

        Raises:
            DiskFullError: free space has been below `min_free`.
        """
        if self.min_free_bytes >= self._min_free:
            return
        raise DiskFullError(
            f"Only {size(self.min_free_bytes)} were free at {self._folder}, less than min_free_disk "
            f"({size(self._min_free)}). The split stopped; its finished part is kept.",
            "Free disk space or lower min_free_disk, and make the same call again: it resumes.",
        )

    @property
    def anonymous_bytes(self) -> int:
        """Maximum of the anonymous memory of this process, above that at the start."""
        return self._max_memory - self._memory_at_start

    def _sample_on(self) -> None:
        while not self._stop.wait(self._interval):
            with contextlib.suppress(Exception):  # of a listener, or without a free descriptor: the next one may go on
                self._sample()

    def _sample(self) -> None:
        """Take a sample, and tell the disk use, unless it was summed a short time ago."""
        free = 0
        with contextlib.suppress(OSError):  # the folder may appear and disappear
            free = shutil.disk_usage(existing(self._folder)).free
            self.min_free_bytes = min(self.min_free_bytes, free)
        self._max_memory = max(self._max_memory, anonymous_bytes(self._process))
        start = time.perf_counter()
        if start < self._next_disk:
            return
        cpu_start = time.thread_time()
        in_use = disk_bytes(self._folder)
        self.max_disk_bytes = max(self.max_disk_bytes, in_use)
        end = time.perf_counter()
        # CPU time, not wall time: on a busy machine most of that is spent waiting to be scheduled
        self._next_disk = end + max((time.thread_time() - cpu_start) / DISK_SHARE, end - start)
        limit = in_use + max(free - self._min_free, 0)
        tell(DiskSampled(in_use, limit if self._max_disk is None else min(limit, self._max_disk)))


def anonymous_bytes(process: Any) -> int:
    """Return the resident memory of a psutil process without mapped files, as far as the system tells them apart."""
    memory = process.memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def disk_bytes(folder: str | Path) -> int:
    """Return the bytes that everything below a folder occupies; holes do not count."""
    return sum(
        occupied(os.path.join(parent, name))
        for parent, folders, files in os.walk(folder)  # a folder that is gone by now has nothing
        for name in (*folders, *files)
    )


def occupied(entry: str | Path) -> int:
    """Return the bytes that a directory entry occupies; 0 if it is missing. Links are not followed."""
    try:
        return allocated(os.lstat(entry))
    except OSError:  # renamed or deleted meanwhile
        return 0
