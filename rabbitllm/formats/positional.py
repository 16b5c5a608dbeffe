"""Positional reads of a file by several threads at once, into the caller's memory.

`os.preadv` where the system has it; a lock around seek and read on Windows. Independent of formats.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
import weakref
from pathlib import Path

HUGE_PAGE = 2 << 20
CAN_MAP_PRIVATELY = hasattr(mmap, "MAP_PRIVATE")
"""False on Windows, where a private mapping would reserve memory for the whole file."""
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # in Python from 3.13 on

_MAP_FAILED = ctypes.c_void_p(-1).value


class PositionalFile:
    """A file open for reading at any offset. A context manager.

    Args:
        path: path of the file.
        direct: bypass the page cache, where the system has O_DIRECT; offsets, lengths and addresses must then be
            multiples of the file system's block, or reads fail with EINVAL. Opening may fail with it too.
    """

    def __init__(self, path: Path, *, direct: bool = False) -> None:
        self.path = path
        self._lock = threading.Lock()
        past_the_cache = getattr(os, "O_DIRECT", 0) if direct else 0
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | past_the_cache)

    def advise_sequential(self) -> None:
        """Advise the kernel that the file is read sequentially, so that it reads ahead more."""
        if sys.platform == "linux":
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def will_need(self, offset: int, length: int) -> None:
        """Advise the kernel to read a range into the page cache, perhaps asynchronously."""
        if sys.platform == "linux":
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def drop_cache(self, offset: int, length: int) -> None:
        """Advise the kernel that a range will not be needed again soon."""
        if sys.platform == "linux":
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_DONTNEED)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset` (bytes); return the number of bytes read, fewer only at the end of the file."""
        done = 0
        while done < len(buffer):
            got = self._read_some(buffer[done:], offset + done)
            if got == 0:
                break
            done += got
        return done

    def size(self) -> int:
        """Current length of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def identity(self) -> tuple[int, ...]:
        """Values that identify the file and its current version."""
        return identity_of(os.fstat(self._descriptor))

    def map_privately(self) -> memoryview:
        """The whole file as memory that is read from it on access; writes to it stay in this process.

        It exists as long as a view of it, also after the file is closed, and holds no descriptor (those of Python's
        `mmap` do). No memory is reserved for writes, so a file may be larger than memory. If the file is truncated
        afterwards, accessing the lost part ends the process (SIGBUS). Needs `CAN_MAP_PRIVATELY`.

        Raises:
            OSError: the system cannot map this file.
            ValueError: the file is empty.
        """
        if sys.platform == "win32":
            raise NotImplementedError
        length = self.size()
        if not length:
            raise ValueError(f"{self.path} is empty")
        map_file, unmap = _mapping_calls()
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = map_file(None, length, protection, mmap.MAP_PRIVATE | _NO_RESERVE, self._descriptor, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(self.path))
        pages = (ctypes.c_ubyte * length).from_address(address)
        # not at exit, when other threads may still use it
        weakref.finalize(pages, unmap, address, length).atexit = False
        return memoryview(pages).cast("B")

    def map_read_only(self) -> memoryview:
        """The same where `CAN_MAP_PRIVATELY` is false, but read-only.

        Raises:
            ValueError: the file is empty.
        """
        return memoryview(mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ))

    def read_at(self, offset: int, length: int) -> bytes:
        """The bytes of a range, fewer only at the end of the file. `length` (bytes) is allocated, so check it first."""
        buffer = bytearray(length)
        return bytes(memoryview(buffer)[: self.read_into(memoryview(buffer), offset)])

    def _read_some(self, buffer: memoryview, offset: int) -> int:
        if sys.platform == "win32" or not hasattr(os, "preadv"):
            with self._lock:
                os.lseek(self._descriptor, offset, os.SEEK_SET)
                data = os.read(self._descriptor, len(buffer))
            buffer[: len(data)] = data
            return len(data)
        return os.preadv(self._descriptor, [buffer], offset)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)

    def __enter__(self) -> PositionalFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@functools.cache
def _mapping_calls() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer]:
    """mmap(2) and munmap(2)."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mmap.restype = ctypes.c_void_p
    library.munmap.argtypes, library.munmap.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int
    return library.mmap, library.munmap


def identity_of(status: os.stat_result) -> tuple[int, ...]:
    """`PositionalFile.identity` for a file that is not open."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def page_aligned(nbytes: int) -> memoryview:
    """New private memory that starts on a page boundary, with huge pages if the system grants them.

    Page-aligned memory may be written bypassing the page cache, and huge pages take direct reads at 2 to 3 times
    the rate of small ones.
    """
    if sys.platform == "win32":
        return memoryview(mmap.mmap(-1, nbytes))
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux" and nbytes >= HUGE_PAGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
