"""Locks on folders of weights: readers share a lock, a process that deletes or replaces files needs it exclusively.

The lock is flock on the folder itself, opened read-only. The operating system releases it when the process ends, also
after a kill. No lock file is written, so a read-only folder can be locked too and no stale state remains. The lock is
valid on one machine: network file systems do not forward locks of directories. This module is independent of splits and
checkpoints.

A call locks the split directory first and the source second, and never waits for the second: so there is no deadlock.

On a file system without flock a process that deletes shards holds a lease on their folder (`leases.py`), which excludes
other such processes; readers are not known there. Windows has no lock: it cannot open a directory as a file, and
filelock has no shared locks there; an exclusive lock for each reader would refuse the second reader.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import re
import socket
import sys
import weakref
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

from rabbitllm.base.forks import ForkGuard
from rabbitllm.base.terminal import listed, minute
from rabbitllm.errors import InUseError, SplitError
from rabbitllm.storage import leases
from rabbitllm.storage.leases import FOLDER_LEASE

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Errors of flock on a file system without locks (Lustre mounted without them, some FUSE file systems)."""
BROKEN_LOCKS = (errno.EIO, errno.ESTALE)
"""Errors of flock on a file system that supports locks and fails at this moment."""
LOCKED = (errno.EWOULDBLOCK, errno.EACCES)
"""Errors of flock on a file that another process has locked."""
MAX_NAMED = 3
"""A message names at most this many processes."""
_WAIT = "Wait for that process or end it, and make the call again. Nothing was changed."


class FolderKind(enum.Enum):
    """The contents of a folder; the value says why a call needs the lock exclusively."""

    SOURCE = "this call would delete its shards"
    SPLIT = "this call would replace or remove its layer files"


class FolderLock(contextlib.AbstractContextManager["FolderLock"]):
    """A lock, held until `close`, until the last reference to it is gone, or until the process ends.

    As a context manager it closes itself at the end of the context, unless `keep_for` was called.

    Args:
        release: ends it; None if the system has no locks.
    """

    def __init__(self, release: Callable[[], None] | None = None) -> None:
        self._end = weakref.finalize(self, release) if release is not None else None
        self._kept = False

    def close(self) -> None:
        """Release the lock; further calls have no effect."""
        if self._end is not None:
            self._end()

    def keep_for(self, user: object) -> None:
        """Hold the lock until `user` is garbage collected, also after the end of the context."""
        self._kept = True
        weakref.finalize(user, self.close)

    def __exit__(self, *exception: object) -> None:
        if not self._kept:
            self.close()


def shared(folder: Path, kind: FolderKind) -> FolderLock:
    """Lock a folder for reading, without waiting. A folder that cannot be opened is not locked.

    Raises:
        InUseError: another process holds the lock exclusively.
        SplitError: the file system failed.
    """
    lock = _try_lock(folder)
    if lock is None:
        if kind is FolderKind.SOURCE:
            problem = f"{folder} is being split by {_describe_holders(folder)}, which deletes its shards."
        else:
            problem = f"{folder} is being repaired or removed by {_describe_holders(folder)}."
        raise InUseError(problem, _WAIT)
    return lock


def exclusive(folder: Path, kind: FolderKind) -> FolderLock:
    """Lock a folder for deleting or replacing its files, without waiting.

    A split directory is locked by `splitter/lock.py` before, so a lease is only taken on a source.

    Raises:
        InUseError: another process, or another model in this process, holds a lock.
        SplitError: the file system failed.
    """
    lock = _try_lock(folder, kind)
    if lock is None:
        shared(folder, kind).close()  # raises the error for an exclusive holder, if there is one
        raise InUseError(f"{folder} is in use by {_describe_holders(folder)}; {kind.value}.", _WAIT)
    return lock


def alone(folder: Path) -> FolderLock | None:
    """Lock a folder exclusively, without waiting; None while another holder, of any process, has a lock.

    Raises:
        SplitError: the file system failed.
    """
    return _try_lock(folder, FolderKind.SPLIT)


def _try_lock(folder: Path, exclusive: FolderKind | None = None) -> FolderLock | None:
    """Try to lock, for reading unless a kind is given; return None if another holder prevents it."""
    if sys.platform == "win32":
        return FolderLock()
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # the folder is missing or unreadable: the caller's next step raises the better error
        return FolderLock()
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in LOCKED:
            return None
        if error.errno not in NO_LOCKS:
            raise lock_failure(folder, error) from error
        if exclusive is not FolderKind.SOURCE:
            return FolderLock()
        lease = leases.take(folder / FOLDER_LEASE)
        return None if lease is None else FolderLock(lease.release)
    return FolderLock(partial(_release, descriptor, ForkGuard()))


def lock_failure(folder: Path, error: OSError) -> SplitError:
    """Return the error to raise for one of `BROKEN_LOCKS`."""
    return SplitError(
        f"{folder} cannot be locked: {error.strerror}.",
        "Check its disk or file server, and make the call again. Nothing was changed.",
    )


def _release(descriptor: int, guard: ForkGuard) -> None:
    if sys.platform == "win32" or not guard.is_here:  # a forked child shares the lock and must not release it
        os.close(descriptor)
        return
    import fcntl

    with contextlib.suppress(OSError):  # closing alone would keep the lock while a forked child has it open
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _describe_holders(folder: Path) -> str:
    """Describe the processes that hold locks on a folder; Linux lists them, other systems do not."""
    processes = _find_holders(folder)
    return listed(map(_describe_process, processes), MAX_NAMED, " and ") or leases.holder(folder / FOLDER_LEASE)


def _describe_process(process: int) -> str:
    import psutil

    if process == os.getpid():
        return f"this process ({process})"
    try:
        began = datetime.fromtimestamp(psutil.Process(process).create_time()).astimezone()
    except psutil.Error:
        return f"process {process} on {socket.gethostname()}"
    return f"process {process} on {socket.gethostname()}, which runs since {minute(began.isoformat())}"


_LOCK_LINE = re.compile(r"^\d+: FLOCK +\w+ +\w+ (\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", re.MULTILINE)
"""A held lock in /proc/locks: process, device, inode (proc_locks(5)). Lines of waiting processes do not match."""


def _find_holders(folder: Path) -> list[int]:
    """Return the ids of the processes that hold locks on a folder."""
    if sys.platform == "win32":
        return []
    try:
        lines = Path("/proc/locks").read_text()
        status = folder.stat()
    except OSError:
        return []
    device = os.major(status.st_dev), os.minor(status.st_dev)
    holders = set[int]()
    for process, major, minor, inode in _LOCK_LINE.findall(lines):
        if int(inode) != status.st_ino:
            continue
        # on btrfs st_dev is the subvolume's, while /proc/locks has the file system's
        if device == (int(major, 16), int(minor, 16)) or _has_open(int(process), status):
            holders.add(int(process))
    return sorted(holders)


def _has_open(process: int, status: os.stat_result) -> bool:
    """Whether a process has this folder open; False if /proc denies access."""
    opened = Path(f"/proc/{process}/fd")
    is_open = False
    with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
        for name in os.listdir(opened):
            with contextlib.suppress(OSError):  # the process has closed it meanwhile
                is_open = is_open or os.path.samestat((opened / name).stat(), status)
    return is_open
