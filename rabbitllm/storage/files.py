"""Files open for reading: positional reads and mappings, reads past the page cache, and pools of few descriptors.

`PositionalFile` reads at any offset by several threads at once, with `os.preadv` where the system has it and a lock
around seek and read on Windows. `DirectIO` keeps data out of the page cache: transfers past it in whole blocks, or
early write-back. `OpenFiles` is a pool: the least recently used file is closed for another, and reopened when it is
used, since a system limits the descriptors of a process, often to 1,024, and a checkpoint may have more files.
Independent of formats; writes nothing itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import stat
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from rabbitllm.base.forks import own_lock
from rabbitllm.base.rounding import round_up

HUGE_PAGE = 2 << 20
CAN_MAP_PRIVATELY = hasattr(mmap, "MAP_PRIVATE")
"""False on Windows, where a private mapping would reserve memory for the whole file."""
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # in Python from 3.13 on

_MAP_FAILED = ctypes.c_void_p(-1).value


class PositionalFile(contextlib.AbstractContextManager["PositionalFile"]):
    """A file open for reading at any offset. A context manager.

    Args:
        path: path of the file.
        direct: bypass the page cache, where the system has O_DIRECT; offsets, lengths and addresses must then be
            multiples of the file system's block, or reads fail with EINVAL. Opening may fail with it too.
    """

    def __init__(self, path: Path, *, direct: bool = False) -> None:
        self.path = path
        self._lock = threading.Lock()
        direct_flag = getattr(os, "O_DIRECT", 0) if direct else 0
        self._descriptor = file_opener(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | direct_flag)

    @property
    def descriptor(self) -> int:
        """Its descriptor, until it is closed."""
        return self._descriptor

    def advise_sequential(self) -> None:
        """Advise the kernel that the file is read sequentially, so that it reads ahead more."""
        if sys.platform == "linux":
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def will_need(self, offset: int, length: int) -> None:
        """Advise the kernel to read a range into the page cache, perhaps asynchronously."""
        if sys.platform == "linux":
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def read_in_huge_pages(self, offset: int, length: int) -> None:
        """Read the whole huge pages of a range into the page cache now, as such if its file system has them; a hint.

        Weights that are mapped are then read by products at 1.3 times the rate. Pages that are cached stay as they are;
        after a small one at the beginning, such as that of a header, Linux would read on in small ones.
        """
        begin, end = round_up(offset, HUGE_PAGE), offset + length
        if sys.platform == "linux" and end - begin >= HUGE_PAGE and end <= self.size():
            pages = self.map_privately()[begin:end]
            if _advise(pages, _IN_HUGE_PAGES):
                _advise(pages, _READ_NOW)

    def drop_cache(self, offset: int, length: int) -> None:
        """Advise the kernel that a range will not be needed again soon."""
        if sys.platform == "linux":
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_DONTNEED)

    def is_cached(self, offset: int) -> bool:
        """Whether the page at `offset` is in the page cache; False where the system does not tell."""
        if sys.platform != "linux":
            return False
        try:
            return os.preadv(self._descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
        except OSError:  # it would have to be read
            return False

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset` (bytes); return the number of bytes read, fewer only at the end of the file."""
        done = 0
        while done < len(buffer):
            count = self._read_some(buffer[done:], offset + done)
            if count == 0:
                break
            done += count
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

    def __exit__(self, *exception: object) -> None:
        self.close()


def file_opener(path: str | Path, flags: int) -> int:
    """Open a regular file, without waiting: the opening of a pipe would block until another process opens it.

    Returns:
        The descriptor.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a folder.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o644)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "a pipe, a device or a folder is in the place of a file", str(path))


def read_range(path: Path, offset: int, length: int) -> bytes:
    """See `PositionalFile.read_at`."""
    with PositionalFile(path) as file:
        return file.read_at(offset, length)


def read_whole(path: Path) -> bytes:
    """The content of a small file."""
    with open(path, "rb", opener=file_opener) as file:
        return file.read()


@functools.cache
def _mapping_calls() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer]:
    """mmap(2) and munmap(2)."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mmap.restype = ctypes.c_void_p
    library.munmap.argtypes, library.munmap.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int
    return library.mmap, library.munmap


_NORMAL, _RANDOM, _NEEDED, _UNUSED, _IN_HUGE_PAGES, _READ_NOW = 0, 1, 3, 4, 14, 22
"""Linux's MADV_NORMAL, MADV_RANDOM, MADV_WILLNEED, MADV_DONTNEED, MADV_HUGEPAGE, MADV_POPULATE_READ (since 5.14)."""


def expect_random_reads(memory: memoryview, begin: int, end: int) -> None:
    """Have the system read only the touched pages of a run of mapped memory, and none ahead; a hint, for Linux.

    Since 6.3 it takes such pages for unused, and evicts them first (`vma_has_recency`, mm_inline.h): see `map_now`.
    """
    _advise(memory, _RANDOM, [(begin, end)])


def begin_to_read(memory: memoryview, runs: Iterable[tuple[int, int]] | None = None) -> None:
    """Have the system read mapped memory, or runs of it from one offset up to another, in the background; a hint, for
    Linux."""
    _advise(memory, _NEEDED, runs)


def map_now(memory: memoryview, begin: int, end: int) -> None:
    """Read a run of mapped memory now, map all its pages, and expect ordinary use; a hint, for Linux.

    Otherwise each access to up to 16 new pages is a fault: a token of a mixture whose experts are cached had 200.
    """
    _advise(memory, _READ_NOW, [(begin, end)])
    _advise(memory, _NORMAL, [(begin, end)])


def return_pages(memory: memoryview) -> None:
    """Return the whole pages of private memory to the system: they are zero until they are written to. For Linux."""
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) if len(memory) else 0
    begin, end = round_up(address, mmap.PAGESIZE) - address, (address + len(memory)) // mmap.PAGESIZE * mmap.PAGESIZE
    _advise(memory, _UNUSED, [(begin, end - address)] if end - address > begin else [])


def _advise(memory: memoryview, advice: int, runs: Iterable[tuple[int, int]] | None = None) -> bool:
    if sys.platform != "linux" or not len(memory) or memory.readonly:
        return False
    address, call, taken = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)), _load_madvise(), True
    for begin, end in runs if runs is not None else [(0, len(memory))]:
        page = (address + begin) // mmap.PAGESIZE * mmap.PAGESIZE
        taken = call(page, address + end - page, advice) == 0 and taken
    return taken


@functools.cache
def _load_madvise() -> ctypes._NamedFuncPointer:
    """madvise(2)."""
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call


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


DIRECT_ALIGNMENT = 4096
"""Offset, length and memory alignment that O_DIRECT needs, bytes."""


class DirectIO:
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


MAX_FILES = 256
"""Few models have more layers; each file that is closed for another costs a sync that a thread waits for."""
_MIN_FILES = 4
_SHARE = 8
"""Inverse of the share of the process's descriptors that a pool takes at most; a file may need two."""


class Reopenable(Protocol):
    """A file that a pool opens and closes."""

    @property
    def is_settled(self) -> bool:
        """Whether it can be closed now without losing data."""

    def reopen(self) -> None:
        """Open it. Called while it is closed, by one thread at a time."""

    def settle(self) -> None:
        """Make closing safe. Called while it is open; other threads may use it meanwhile."""

    def release(self) -> None:
        """Close it. Called while no thread uses it."""


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
            while (idle := self._taken_instead(file)) is not None:
                try:
                    idle.settle()
                finally:
                    self._leave(idle, for_another=True)
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
                unused = next((opened for opened, users in self._users.items() if not users), None)
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


def leaves_descriptors(count: int) -> bool:
    """Whether this process may keep so many more files open (on Linux alone): half of its descriptors stay free for
    others.

    Raises:
        OSError: there is no /proc, or no descriptor at all.
    """
    if sys.platform != "linux":
        return False
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit == resource.RLIM_INFINITY or 2 * (len(os.listdir("/proc/self/fd")) + count) <= limit


def _files_allowed() -> int:
    if sys.platform == "win32":  # its limit per process is 8,192
        return MAX_FILES
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_FILES
    return min(MAX_FILES, max(_MIN_FILES, limit // _SHARE))
