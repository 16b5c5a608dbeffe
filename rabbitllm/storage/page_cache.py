"""Ways to keep the data of a file out of the page cache: transfers past it in whole blocks, or early write-back.

Opens the file once more and passes on its descriptor; it writes nothing itself.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rabbitllm.base.forks import own_lock

DIRECT_ALIGNMENT = 4096
"""Offset, length and memory alignment that O_DIRECT needs, bytes."""


class PastTheCache:
    """A second descriptor of an open file, for whole blocks that need not be in the page cache (O_DIRECT).

    Args:
        path: path at which the file can be opened once more.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._is_refused = False
        self._lock = own_lock(threading.Lock())

    def move(self, how: Callable[[int], int]) -> int | None:
        """Call `how` with the descriptor and return its result; None if the system or file system has no O_DIRECT.

        Args:
            how: reads or writes memory, with offset and length in multiples of `DIRECT_ALIGNMENT`.
        """
        if self._is_refused or not hasattr(os, "O_DIRECT"):
            return None
        try:
            with self._lock:
                if self._descriptor is None:
                    self._descriptor = os.open(self._path, os.O_RDWR | os.O_DIRECT)
            return how(self._descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT):
                raise
            # tmpfs and some network file systems, or no /proc; the descriptor stays open, as another thread may use it
            self._is_refused = True
            return None

    def close(self) -> None:
        """Close the descriptor, if there is one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@functools.cache
def write_back_call() -> Callable[[int], object] | None:
    """Return a function that makes Linux begin to write a file's dirty pages without waiting: sync_file_range(2).

    Not `posix_fadvise(…, POSIX_FADV_DONTNEED)`, which begins that too: it also walks through every page of the file and
    drops those that are on the disk already.
    """
    if sys.platform != "linux":
        return None
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    begin_only, whole_file = 2, 0  # SYNC_FILE_RANGE_WRITE; a length of 0 is to the end
    return lambda descriptor: call(descriptor, 0, whole_file, begin_only)
