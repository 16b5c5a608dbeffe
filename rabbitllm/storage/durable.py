"""Every step that changes the disk, one function each, with a hook through which a test may fail it.

Nothing else in the package writes, renames or unlinks. The rule that makes a crash harmless is implemented here: a file
gets its final name by a rename, after its bytes are fsynced, and the folder is fsynced after the rename. Independent of
layers, shards and models.

The hook: `observe_steps` installs a callback that is called with each `Step` just before it is carried out. A test
raises from it (a full disk), kills the process in it (a crash), or records the step (a power cut, replayed later).
Without a callback a step costs one `is None`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rabbitllm.base.forks import direct_read
from rabbitllm.errors import OptionError
from rabbitllm.storage.files import DIRECT_ALIGNMENT, DirectIO, OpenFiles, file_opener, read_range, write_back_call

PART_SUFFIX = ".part"
"""Suffix of an unfinished file until its rename."""

READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EBUSY)
"""Errors of an unlink of what may not be deleted; the last one of a file that is mounted into a container."""
NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF)
"""Errors of a folder's fsync where folders have none: VirtualBox's shared folders and 9p (EINVAL), some FUSE (ENOTSUP),
some virtiofs (EBADF). Databases go on there too: names are then as durable as the host makes them."""
BEGINNING_BYTES = 4096
"""Bytes of a file by which its kind is recognized."""
MAX_RIVALS = 1000
"""Processes that may write a file before this one."""
FAT32_BYTES = 1 << 32
"""A file of FAT32 has fewer."""
WRITE_BACK_BYTES = 32 << 20
"""Bytes of a file in the page cache at which the kernel is made to begin writing them."""


@dataclass(frozen=True, slots=True)
class Step:
    """One change of the disk, about to happen.

    `kind` is one of "create", "write", "sync", "sync_folder", "rename", "unlink", "make_folder", "remove_folder".
    `offset` and `data` are set for "write", `target` for "rename".
    """

    kind: str
    path: Path
    offset: int = 0
    data: bytes | memoryview = b""
    target: Path | None = None


_observer: Callable[[Step], None] | None = None


@contextlib.contextmanager
def observe_steps(observer: Callable[[Step], None]) -> Iterator[None]:
    """Call `observer` before each step while the context is open. For tests; not reentrant."""
    global _observer
    if _observer is not None:
        raise RuntimeError("steps are already observed")
    _observer = observer
    try:
        yield
    finally:
        _observer = None


_guards: list[tuple[str, Callable[[], None]]] = []


def add_guard(covers: str, check: Callable[[], None]) -> None:
    """Call `check`, which may raise, right before each step on a path whose resolved form begins with `covers`."""
    _guards.append((covers, check))


def remove_guard(check: Callable[[], None]) -> None:
    """Remove a guard."""
    _guards[:] = [guard for guard in _guards if guard[1] != check]


def require_guards(path: Path) -> None:
    """Check the guards before a step on `path` that is carried out elsewhere.

    Raises:
        InUseError: a lease that covers the path is lost (`leases.py`).
    """
    if not _guards:
        return
    resolved = os.path.join(os.path.realpath(path.parent), path.name)
    for covers, check in [*_guards]:
        if resolved.startswith(covers):
            check()


def _announce(step: Step) -> None:
    if _observer is not None:
        _observer(step)
    require_guards(step.path)  # last: between the check and the step is no wait


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors of calls that know its descriptor alone: several disks may be in use."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


class GrowingFile:
    """A file that is filled in place, in any order, by several threads.

    Opened without truncation, so that a resumed run keeps the bytes already there. A pool may close it between two
    writes; written data is synced first, since a system reports a failed write only while the file is open.

    Args:
        path: of the file, which is created if missing.
        size: bytes that the file is set to.
        write_back: have the kernel write as the file is filled, so that `sync` takes little time.
        files: the pool that it is opened in; by default it stays open until `close`.
    """

    def __init__(self, path: Path, size: int, *, write_back: bool = False, files: OpenFiles | None = None) -> None:
        self.path = path
        self._absolute = os.path.abspath(path)
        self._size = size
        self._files = files or OpenFiles(1)
        self._write_back = write_back_call() if write_back else None
        self._waiting = 0
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        self._direct = DirectIO(self._absolute)
        self._inode: tuple[int, int] | None = None
        self._is_closed = False
        self._is_synced = False
        self._is_written = False
        with self._files.using(self):
            pass

    def write_at(self, data: memoryview, offset: int, *, aligned: bool = False) -> None:
        """Write all of `data` (bytes) at `offset` (bytes).

        With `aligned` the caller guarantees that the memory of `data` starts on a 4096-byte boundary. The part that the
        file system accepts for O_DIRECT is then written past the page cache, since the bytes have to reach the disk now
        and are not read soon.
        """
        with self._files.using(self):
            _announce(Step("write", self.path, offset, data))
            try:
                with _naming(self.path):
                    self._write(data, offset, aligned)
            finally:  # last, since a sync that another thread began before does not cover this write
                self._is_written, self._is_synced = True, False

    def _write(self, data: memoryview, offset: int, aligned: bool) -> None:
        if aligned and offset % DIRECT_ALIGNMENT == 0:
            written = self._write_direct(data, offset)
            data, offset = data[written:], offset + written
        if data:
            _write_all(self._descriptor, data, offset, self._lock)
            if self._write_back is not None and self._is_due(len(data)):
                self._write_back(self._descriptor)

    def _is_due(self, written: int) -> bool:
        """Whether the kernel should begin to write, with these further bytes in the page cache."""
        with self._lock:
            waiting = self._waiting + written
            self._waiting = waiting if waiting < WRITE_BACK_BYTES else 0
        return waiting >= WRITE_BACK_BYTES

    def _write_direct(self, data: memoryview, offset: int) -> int:
        """Write the leading whole blocks of `data` with O_DIRECT; return the number of bytes written."""
        whole = len(data) - len(data) % DIRECT_ALIGNMENT
        if not whole:
            return 0

        def write(descriptor: int) -> int:
            _write_all(descriptor, data[:whole], offset, None)
            return whole

        return self._direct.move(write) or 0

    def sync(self) -> None:
        """Sync the file; on return every byte written so far would survive a power cut."""
        with self._syncing:
            if self._is_synced:  # possibly by the pool, which then closed it
                return
        with self._files.using(self):
            self._sync()

    def _sync(self) -> None:
        with self._syncing:
            if self._is_synced:
                return
            _announce(Step("sync", self.path))
            self._is_written, self._is_synced = False, True  # first, since another thread may write meanwhile
            try:
                with _naming(self.path):
                    os.fsync(self._descriptor)
            except BaseException:
                self._is_written, self._is_synced = True, False
                raise

    def close(self) -> None:
        """Close the descriptors; does not sync."""
        self._is_closed = True
        self._files.drop(self)

    @property
    def is_settled(self) -> bool:
        """See `Reopenable`."""
        return not self._is_written

    def reopen(self) -> None:
        """See `Reopenable`; creates the file the first time, and later refuses another file at its path.

        Raises:
            OSError: it cannot be opened or resized; or it is gone, or was replaced by another file.
        """
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self.path))
        flags = os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
        if self._inode is None:
            if not self.path.exists():
                _announce(Step("create", self.path))
            flags |= os.O_CREAT
        descriptor = file_opener(self._absolute, flags)
        try:
            status = os.fstat(descriptor)
            if self._inode is None and status.st_size != self._size:
                with _naming(self.path):
                    os.ftruncate(descriptor, self._size)
            elif self._inode not in (None, (status.st_dev, status.st_ino)):
                raise OSError(errno.ESTALE, "the file was replaced", str(self.path))
        except BaseException:
            os.close(descriptor)
            raise
        self._inode = status.st_dev, status.st_ino
        self._descriptor = descriptor

    def settle(self) -> None:
        """See `Reopenable`."""
        if self._is_written:
            self._sync()

    def release(self) -> None:
        """See `Reopenable`."""
        self._direct.close()
        os.close(self._descriptor)


def _write_all(descriptor: int, data: memoryview, offset: int, lock: threading.Lock | None) -> None:
    while data:
        if hasattr(os, "pwrite"):
            written = os.pwrite(descriptor, data, offset)
        else:  # Windows has no positional write
            assert lock is not None
            with lock:
                os.lseek(descriptor, offset, os.SEEK_SET)
                written = os.write(descriptor, data)
        data, offset = data[written:], offset + written


class Log:
    """A file of lines, each durable when `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = file_opener(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))

    def append(self, line: str) -> None:
        """Append `line` and a newline, and sync."""
        data = memoryview((line + "\n").encode())
        _announce(Step("write", self.path, os.fstat(self._descriptor).st_size, data))
        with _naming(self.path):
            while data:
                data = data[os.write(self._descriptor, data) :]
        self.sync()

    def sync(self) -> None:
        """Make earlier lines durable, those of another process too."""
        with _naming(self.path):
            _announce(Step("sync", self.path))
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def write_whole(path: Path, data: bytes, *, new: bool = False) -> None:
    """Write `path` so that it is always either absent (or old) or complete.

    Several processes may write the same path at once: each waits for the one before it.

    Raises:
        FileExistsError: `new`, and the path exists by the time at which it would be replaced.
        OSError: the disk is full, or fails; the unfinished file is removed.
    """
    part = path.with_name(path.name + PART_SUFFIX)
    for _ in range(MAX_RIVALS):
        descriptor = _created_alone(part)
        if descriptor is not None:
            break
    else:
        raise OSError(errno.EBUSY, "other processes keep writing it", str(part))
    try:
        _fill(descriptor, part, [data])
        if new and path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        if sys.platform != "win32":  # which renames no open file
            rename(part, path)
    except OSError:
        remove_scratch(part)  # while it is locked; on Windows, which removes no open file, the next write removes it
        raise
    finally:
        os.close(descriptor)  # and ends the lock
    if sys.platform == "win32":
        rename(part, path)
    sync_folder(path.parent)


def _created_alone(part: Path) -> int | None:
    """Create and lock an unfinished file, for this process alone; None if another process was quicker.

    What another process left is removed, once that has ended.
    """
    if os.path.lexists(part):
        _remove_left(part)
    try:
        _announce(Step("create", part))
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
    except FileExistsError:
        return None
    if _is_locked(descriptor, part):
        return descriptor
    os.close(descriptor)
    return None


def _remove_left(part: Path) -> None:
    if sys.platform == "win32":  # which removes no open file
        remove(part)
        return
    try:
        descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    except OSError:  # a link, or unreadable
        remove(part)
        return
    try:
        if _is_locked(descriptor, part):
            remove(part)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int, part: Path) -> bool:
    """Lock an unfinished file, once no other process has it; whether it has its name then. There may be no locks."""
    if sys.platform != "win32":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.fstat(descriptor), part.lstat())
    except FileNotFoundError:
        return False


def _fill(descriptor: int, part: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a new file, and sync it."""
    offset = 0
    with _naming(part):
        for piece in pieces:
            _announce(Step("write", part, offset, piece))
            _write_all(descriptor, memoryview(piece), offset, threading.Lock())
            offset += len(piece)
        _announce(Step("sync", part))
        os.fsync(descriptor)


def write_private(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file that its owner alone may read; its name is absent or of a complete file.

    Several processes may write the same path at once: the last rename counts.

    Raises:
        OSError: the disk is full, or fails; the unfinished file is removed.
    """
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PART_SUFFIX}")
    _announce(Step("create", part))
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        try:
            _fill(descriptor, part, pieces)
        finally:
            os.close(descriptor)
        publish(part, path)
    except OSError:
        remove_scratch(part)
        raise


def begins_as(path: Path, *beginnings: bytes | re.Pattern[bytes]) -> bool:
    """Whether a file begins as one of its kind. It may end within its first bytes, if a power cut shortened it.

    Args:
        path: of the file; an unfinished one may have zeros for bytes that a power cut lost.
        beginnings: first bytes of such files, or patterns of these, which also match those of shortened ones.
    """
    begin = read_range(path, 0, BEGINNING_BYTES)
    if path.name.endswith(PART_SUFFIX):
        begin = begin.rstrip(b"\0")
    return any(
        begin[: len(expected)] == expected[: len(begin)] if isinstance(expected, bytes) else expected.match(begin)
        for expected in beginnings
    )


def require_kind(path: Path, kind: str, *beginnings: bytes | re.Pattern[bytes]) -> None:
    """Refuse to write where no file can be made, or over one that does not begin as one of its kind.

    Args:
        path: of the file that `write_whole` will write.
        kind: what another file is not, in words: "is not a trace".
        beginnings: see `begins_as`.

    Raises:
        OptionError: there is another file or a folder, or no folder to write in; nothing was changed.
    """
    if not path.parent.is_dir():
        raise OptionError(f"There is no folder {path.parent} for {path.name}.", "Make the folder, or use another path.")
    if path.is_dir():
        raise OptionError(f"{path} is a folder; the path of a file was expected.", "Add a name for the file.")
    if not os.access(path.parent, os.W_OK):
        raise OptionError(f"This user cannot write in the folder {path.parent}.", "Use a file in another folder.")
    for there in (path, path.with_name(path.name + PART_SUFFIX)):
        if there.is_file() and not begins_as(there, *beginnings):
            raise OptionError(f"{there} exists and {kind}; it was not changed.", "Use another name for the file.")


def publish(part: Path, final: Path) -> None:
    """Give a synced file its final name, durably."""
    rename(part, final)
    sync_folder(final.parent)


def rename(part: Path, final: Path) -> None:
    """Give a synced file its final name; durable once the folder is synced (`sync_folder`)."""
    _announce(Step("rename", part, target=final))
    os.replace(part, final)


def touch(path: Path) -> None:
    """Make an empty file; durable once the folder is synced (`sync_folder`)."""
    _announce(Step("create", path))
    os.close(file_opener(path, os.O_WRONLY | os.O_CREAT))


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable.

    A no-op on Windows, where a folder cannot be opened, and where the file system says that folders have no sync; any
    other error, such as one of the disk, is raised.
    """
    _announce(Step("sync_folder", folder))
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with _naming(folder):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Unlink one file or link. A missing one is accepted: a crash may have followed the unlink."""
    _announce(Step("unlink", path))
    path.unlink(missing_ok=True)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Create `folder` and its parents, durably.

    Args:
        folder: the folder.
        mode: permissions of each new folder, less the process's umask.
    """
    missing = []
    parent = folder
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    for path in reversed(missing):
        _announce(Step("make_folder", path))
        path.mkdir(mode, exist_ok=True)
        sync_folder(path.parent)


def remove_folder(folder: Path, suffix: str = "") -> None:
    """Remove the files in a folder whose names end with `suffix`, and the folder unless it contains others.

    It may be absent.
    """
    if not folder.is_dir():
        return
    paths = list(folder.iterdir())
    matching = [path for path in paths if path.name.endswith(suffix)]
    for path in matching:
        remove(path)
    if matching == paths:
        _announce(Step("remove_folder", folder))
        folder.rmdir()


@contextlib.contextmanager
def open_scratch(path: Path, *, create: bool = True) -> Iterator[int]:
    """Yield a descriptor of a scratch file, which is created empty if missing.

    Scratch files describe a running process and hold no data. They are neither synced nor announced as steps: losing
    them loses nothing, and remains after a crash are overwritten or ignored, so there is no failure, kill or power cut
    for a test to inject; except for writes that may find the disk full."""
    flags = os.O_RDWR | (os.O_CREAT if create else 0) | getattr(os, "O_NOFOLLOW", 0)
    descriptor = file_opener(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_scratch(path: Path, data: bytes) -> None:
    """Write a scratch file; a reader must be able to handle a partial one."""
    path.write_bytes(data)


def create_scratch(path: Path, data: bytes) -> None:
    """Create a scratch file that other processes see whole or not at all; only one of them can create it.

    Raises:
        FileExistsError: the path exists.
        OSError: the file system has no hard links, or fails.
    """
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
    try:
        write_scratch(new, data)
        os.link(new, path)
    finally:
        remove_scratch(new)


class ScratchFolder:
    """A new folder among the system's temporary files, for this process; a context manager, which removes it.

    After a kill the next scratch folder that is made removes it: its owner holds a lock on it, which the system ends
    with the process. A forked child leaves it to its parent. Without locks (Windows) it stays after a kill.

    Attributes:
        path: the folder. It is inside the locked one, so a checkpoint in it can be locked (`folder_lock.py`).
    """

    def __init__(self) -> None:
        _remove_dead_scratch()
        while True:
            locked = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
            descriptor, has_locks = _lock_scratch(locked)
            if descriptor is not None or not has_locks:
                break  # else another process took it for one of a dead process, before it was locked
        self._finish = weakref.finalize(self, _remove_scratch, locked, descriptor, os.getpid())
        self.path = locked / "files"
        self.path.mkdir()

    def remove(self) -> None:
        """Remove it and everything in it, if this process made it."""
        self._finish()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exception: object) -> None:
        self.remove()


SCRATCH_PREFIX = "rabbitllm-scratch-"


def _remove_dead_scratch() -> None:
    """Remove scratch folders of this user whose processes are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*"):
        descriptor, _ = _lock_scratch(path)
        if descriptor is not None:
            _remove_scratch(path, descriptor, os.getpid())


def _lock_scratch(path: Path) -> tuple[int | None, bool]:
    """Lock a folder: its descriptor, None if that is not possible; and whether the system has locks."""
    if sys.platform == "win32":
        return None, False
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:  # another process removed it
        return None, True
    except OSError:
        return None, False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen = os.fstat(descriptor)
        if seen.st_uid == os.geteuid() and os.path.samestat(seen, path.stat()):
            return descriptor, True
        has_locks = True
    except OSError as error:
        has_locks = error.errno in (errno.EWOULDBLOCK, errno.ENOENT)
    os.close(descriptor)
    return None, has_locks


def _remove_scratch(path: Path, descriptor: int | None, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def require_size(path: Path, nbytes: int) -> None:
    """Check that a file of so many bytes can be in a folder: a scratch file at `path`, of holes, which is removed.

    Smaller files than any limit are not tried, since FAT has no holes, and would write zeros.

    Raises:
        OSError: it cannot: files of FAT32 end at 4.29 GB, those of a process where `ulimit -f` says.
    """
    if nbytes < min(FAT32_BYTES, _file_limit()):
        return
    try:
        with open_scratch(path) as descriptor, _naming(path):
            os.ftruncate(descriptor, nbytes)
    except OSError as error:
        if error.errno == errno.EFBIG:  # a full disk is no answer: shards are deleted before such a file is whole
            raise
    finally:
        remove_scratch(path)


def _file_limit() -> int:
    """Bytes that a file of this process may have (POSIX, RLIMIT_FSIZE)."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


@contextlib.contextmanager
def nameless_file(folder: Path, blocks: Iterable[bytes]) -> Iterator[int]:
    """Yield the descriptor of an unnamed file on the disk of `folder`, which is deleted with it.

    Args:
        folder: a writable folder.
        blocks: its content; each block is on the disk before the next is requested.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        for block in blocks:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
        yield file.fileno()


_Transfer: TypeAlias = Callable[[int, memoryview, int], int]
"""Writes or reads bytes of a descriptor at an offset, and returns their number."""


class NamelessFile:
    """An unnamed file for data that does not fit into memory: for this process alone, deleted with its descriptor.

    Written and read at offsets; if `READS_AT_OFFSETS`, by several threads at a time. The disk may be full, so a write
    is announced as a step. With `aligned` the caller guarantees that memory, offset and length are multiples of 4096
    bytes: then they bypass the page cache if the file system allows it; otherwise they pass through it, and pages that
    are on the disk already are dropped.

    Args:
        folder: a writable folder; None for the system's folder for temporary files.
    """

    READS_AT_OFFSETS = hasattr(os, "preadv")
    """False on Windows, where a file has one position for all threads."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        self._direct = DirectIO(f"/proc/self/fd/{self._file.fileno()}")

    def write_at(self, data: memoryview, offset: int, *, aligned: bool = False) -> None:
        """Write bytes at an offset.

        Raises:
            OSError: the disk is full.
        """
        _announce(Step("write", self._folder, offset, data))
        self._move_all(_write_from, self._file.write, data, offset, aligned)

    def read_at(self, data: memoryview, offset: int, *, aligned: bool = False) -> None:
        """Fill `data` with the bytes from an offset on.

        Raises:
            OSError: the file ends before them.
        """
        self._move_all(_read_into, self._file.readinto, data, offset, aligned)

    def _move_all(
        self, how: _Transfer, in_place: Callable[[memoryview], int], data: memoryview, offset: int, aligned: bool
    ) -> None:
        """Write or read all of `data`; `in_place` does it at the position of the file, without `READS_AT_OFFSETS`."""
        while data:
            if self.READS_AT_OFFSETS:
                count = self._move(how, data, offset, aligned)
            else:
                self._file.seek(offset)
                count = in_place(data)
            if not count:
                raise OSError(errno.EIO, "the file is shorter than what was written to it")
            data, offset, aligned = data[count:], offset + count, aligned and count % DIRECT_ALIGNMENT == 0

    def _move(self, how: _Transfer, data: memoryview, offset: int, aligned: bool) -> int:
        moved = direct_read(self._direct.move, lambda descriptor: how(descriptor, data, offset)) if aligned else None
        if moved is None:
            if sys.platform == "linux" and aligned:  # pages read ahead of the next offset would stay in the cache
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            moved = how(self._file.fileno(), data, offset)
        if sys.platform == "linux" and aligned:  # for pages that are not on the disk yet this begins the writing
            os.posix_fadvise(self._file.fileno(), offset, moved, os.POSIX_FADV_DONTNEED)
        return moved

    def close(self) -> None:
        """Close the file, which frees its bytes on the disk."""
        self._direct.close()
        self._file.close()


def _write_from(descriptor: int, data: memoryview, offset: int) -> int:
    if sys.platform == "win32":
        raise NotImplementedError
    return os.pwrite(descriptor, data, offset)


def _read_into(descriptor: int, data: memoryview, offset: int) -> int:
    if sys.platform == "win32":
        raise NotImplementedError
    return os.preadv(descriptor, [data], offset)


def mark_used(path: Path) -> None:
    """Set the time of a file to now, if that is possible: a cache drops those with the earliest times."""
    with contextlib.suppress(OSError):
        os.utime(path)


def remove_scratch(path: Path) -> None:
    """Remove a scratch file if it exists and can be removed."""
    with contextlib.suppress(OSError):
        path.unlink()


def remove_empty_folder(folder: Path) -> None:
    """Remove a folder if it exists, is empty and can be removed."""
    with contextlib.suppress(OSError):
        folder.rmdir()
