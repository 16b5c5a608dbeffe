"""A lock on a split directory: one process (and thread) at a time; others wait, print one message, and then take over.

It is an operating system lock, through filelock: flock, or its counterpart on Windows. It ends with the process that
holds it, so nothing has to be cleaned up after a kill. On a file system without locks it is a lease (`leases.py`), and
the next process waits `STALE_SECONDS` after a kill. This module is independent of splits and shards: after the lock is
acquired the caller must check the directory again, since the previous holder may have finished the split. The holder
may grant a lease on the directory to processes that fill layer files for it elsewhere (`granted`).

A process that has loaded a model holds a shared lock on the directory (`read_lock`, `folder_lock.py`). It prevents only
the replacement and the removal of layer files.

Invariant: while a caller is inside `locked`, no other one is. When the last caller has left, no file of the lock
remains, nor the directory if it was created for the lock and is empty.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rabbitllm.errors import ClusterError, InUseError
from rabbitllm.storage import durable, folder_lock, leases
from rabbitllm.storage.files import read_whole
from rabbitllm.storage.folder_lock import BROKEN_LOCKS, NO_LOCKS, FolderKind, FolderLock, lock_failure
from rabbitllm.storage.leases import FOLDER_LEASE, KeptLease

if TYPE_CHECKING:
    from filelock import BaseFileLock

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
HOLDER_NAME = ".lock.holder"
"""Names the holder of the lock. A separate file: filelock before 3.30 empties the lock file at every attempt."""
POLL_SECONDS = 0.1
SILENT_SECONDS = 0.5
"""Waits shorter than this print no message; by then the holder has also written its note."""
MAX_RESTARTS = 1000
"""How often the folder or the lock's file may vanish before it is locked; beyond that the error is raised, since there
is another cause, such as a file system that tells another inode at each look."""

# Why removing the lock file is safe, although a waiting process may have it open.
#
# Unlinking separates waiting processes from new ones: a process that opened the file before locks a file without a
# name, a later one creates a new file, and both would assume to be alone. Three rules prevent that.
#
# 1. A lock counts only if its file has the name. filelock does not tell which file it locked (before 3.20.4 it does not
#    check either), so `_try_lock_file` opens the file first, has filelock lock whatever has the name, and then checks
#    whether the name still belongs to the file it opened. A file that lost its name never gets it back, and while it is
#    open no new one has its inode number; so if the check passes, filelock locked that file. If not, the lock is
#    released and acquired again.
# 2. Only the holder of the lock removes the file: `_remove_lock_file` locks it once more for that, after filelock has
#    released it, and leaves the file if another process was quicker. It cannot be done before: filelock 3.20.4 to 3.29
#    unlink on release, by name, and would remove the file that a third process has created and locked in between. Their
#    own unlink happens while they hold the lock on the file of that name (they do check), so rule 1 covers it.
# 3. The process that gets the lock checks the directory again: a manifest means that nothing is left to do.
#
# On Windows an open file cannot be removed, so there the last process that has it open removes it.


@contextlib.contextmanager
def locked(folder: Path, *, excluding_readers: bool = False) -> Iterator[None]:
    """Hold a split directory exclusively while the context is open; wait while another caller holds it.

    Creates the folder if it is missing, and removes it again if it stays empty (a split that was refused).

    Args:
        folder: the split directory.
        excluding_readers: layer files will be replaced; refuse, without waiting, if a process has loaded the model.

    Raises:
        InUseError: a process has loaded the model.
        SplitError: the file system fails to lock.
        OSError: the folder cannot be written.
    """
    created: list[Path] = []
    try:
        lock = _wait_for(folder, created)
        try:
            if not isinstance(lock, KeptLease):
                with contextlib.suppress(OSError):  # a full disk is reported elsewhere; the note is only informative
                    durable.write_scratch(folder / HOLDER_NAME, leases.note())
            with folder_lock.exclusive(folder, FolderKind.SPLIT) if excluding_readers else contextlib.nullcontext():
                yield
        finally:
            _unlock(folder, lock)
    finally:
        for path in created:
            durable.remove_empty_folder(path)


@contextlib.contextmanager
def locked_without_waiting(folder: Path) -> Iterator[None]:
    """As `locked` with `excluding_readers`, for an existing folder, without waiting.

    Raises:
        InUseError: another process works on it, or has loaded its model.
        SplitError: the file system fails to lock.
    """
    try:
        lock = _try_lock(folder)
    except _Unlinked:
        lock = None
    if lock is None:
        raise InUseError(
            f"{folder} is in use by {_describe_holder(folder)}.",
            "Wait for that process or end it, and make the call again.",
        )
    try:
        with folder_lock.exclusive(folder, FolderKind.SPLIT):
            yield
    finally:
        _unlock(folder, lock)


def read_lock(folder: Path) -> FolderLock:
    """Lock a finished split directory for reading; waits while another process repairs or removes it.

    After the wait the caller must check again whether the split is finished.

    Raises:
        SplitError: the file system fails to lock.
    """
    report = _WaitReport(folder)
    while True:
        try:
            return folder_lock.shared(folder, FolderKind.SPLIT)
        except InUseError:
            report()
        time.sleep(POLL_SECONDS)


def is_left_over(folder: Path) -> bool:
    """Whether files of a lock or a lease are in the folder: a process holds it, or was killed while holding it.

    Those of another user, whom this one cannot lock out, do not count.
    """
    return any(os.access(folder / name, os.W_OK) for name in (LOCK_NAME, HOLDER_NAME, FOLDER_LEASE, LEASE_NAME))


def is_lock_file(name: str) -> bool:
    """Whether a file of this name in a split directory belongs to its lock."""
    return name in (LOCK_NAME, HOLDER_NAME) or name.startswith(FOLDER_LEASE)


def _wait_for(folder: Path, created: list[Path]) -> BaseFileLock | KeptLease:
    """Acquire the lock. Adds the folders it creates to `created`, innermost first."""
    report, restarts = _WaitReport(folder), 0
    until_stale = f", at most {leases.STALE_SECONDS:.0f} s if that process has ended"
    while True:
        created[:0] = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            durable.make_folder(folder)
            lock = _try_lock(folder, partial(report, until_stale))
        except (_Unlinked, FileNotFoundError, FileExistsError):  # the last by mkdir, if the folder is removed just then
            restarts += 1
            if restarts > MAX_RESTARTS:
                raise
            continue
        if lock is not None:
            if restarts:  # filelock itself may have created the folder again, without a sync
                durable.sync_folder(folder.parent)
            return lock
        report()
        time.sleep(POLL_SECONDS)


def _try_lock(folder: Path, waiting: Callable[[], None] | None = None) -> BaseFileLock | KeptLease | None:
    """Try to lock an existing folder; None if it is locked. A lease is waited for if there is `waiting` (`take`).

    Raises:
        _Unlinked: see there.
        SplitError: the file system fails to lock, or has neither locks nor hard links.
    """
    try:
        with durable.open_scratch(folder / LOCK_NAME) as descriptor:
            return _try_lock_file(folder / LOCK_NAME, descriptor)
    except _NoLocksError:
        durable.remove_scratch(folder / LOCK_NAME)
    return leases.take(folder / FOLDER_LEASE, waiting)


class _Unlinked(OSError):
    """The locked file does not, or no longer, have the name."""


class _NoLocksError(Exception):
    """The file system has no locks."""


def _try_lock_file(path: Path, descriptor: int) -> BaseFileLock | None:
    """Lock the file that `path` names and `descriptor` has open; None if it is held already.

    Raises:
        _Unlinked, _NoLocksError: see there.
        SplitError: the file system fails to lock.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        _require_locks(descriptor)
        lock.acquire(blocking=False)
    except Timeout:
        return None
    except OSError as error:  # some file systems refuse to lock and accept the unlock
        if error.errno in NO_LOCKS:
            raise _NoLocksError from None
        if error.errno in BROKEN_LOCKS:
            raise lock_failure(path.parent, error) from error
        raise
    if not _is_named(descriptor, path):
        lock.release()
        raise _Unlinked(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
    return lock


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether `path` names the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _require_locks(descriptor: int) -> None:
    """Check that the file system has locks, by releasing a lock that is not held, which has no effect.

    Without flock filelock would use a lock file that remains after a kill.

    Raises:
        OSError: it has none.
    """
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _unlock(folder: Path, lock: BaseFileLock | KeptLease) -> None:
    """Release the lock and remove its files."""
    if isinstance(lock, KeptLease):
        lock.release()
        return
    durable.remove_scratch(folder / HOLDER_NAME)
    with contextlib.suppress(OSError):  # a failing file system releases it when this process ends
        lock.release()
    _remove_lock_file(folder / LOCK_NAME)


def _remove_lock_file(path: Path) -> None:
    """Remove the lock file, unless another process has the lock by now; that process then removes it."""
    if sys.platform == "win32":
        durable.remove_scratch(path)
        return
    import fcntl

    with contextlib.suppress(OSError), durable.open_scratch(path, create=False) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_named(descriptor, path):
            durable.remove_scratch(path)


def _describe_holder(folder: Path) -> str:
    """Describe the holder of the lock."""
    note = folder / HOLDER_NAME
    return leases.described(note) if note.exists() else leases.holder(folder / FOLDER_LEASE)


class _WaitReport:
    """Reports once which process this one waits for, if it waits for longer than `SILENT_SECONDS`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._due = time.monotonic() + SILENT_SECONDS

    def __call__(self, limit: str = "") -> None:
        if time.monotonic() < self._due:
            return
        self._due = math.inf
        text = f"{self._folder} is in use by {_describe_holder(self._folder)}; waiting{limit}."
        logger.warning("%s", text)
        if logger.hasHandlers():  # without handlers logging itself writes the warning to stderr
            print(text, file=sys.stderr, flush=True)


LEASE_NAME = ".lease"
LOOK_SECONDS = 0.5
"""Minimum time between two checks of the file."""


@dataclass(frozen=True)
class Lease:
    """Permission to fill layer files in a folder, for any process: a file in the split directory that names a run.

    The processes that fill them elsewhere read it. If a process reads another run, or finds no file, it sees another
    folder or belongs to a run that is over. A process that dies leaves its file; the next run replaces it, and the
    workers of the dead run stop at their next check. The file is scratch: it describes a running process and holds no
    data.

    Attributes:
        folder: the split directory.
        run: id of the run that granted it.
    """

    folder: Path
    run: str

    def holds(self) -> bool:
        """Whether the file exists and names this run."""
        try:
            return read_whole(self.folder / LEASE_NAME) == self.run.encode()
        except OSError:
            return False

    def end(self) -> None:
        """End it, unless it is over: then the file is another run's, whose workers go on."""
        if self.holds():
            revoke(self.folder)


class LeaseCheck:
    """Checks a lease at intervals, from any thread."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._next = 0.0

    def check(self) -> None:
        """
        Raises:
            ClusterError: the lease does not hold, or no longer holds.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_SECONDS
        if not self._lease.holds():
            raise ClusterError(
                f"{self._lease.folder} no longer belongs to the run of this worker.",
                "No action is needed: another run uses the folder, or the call has ended. The finished part is kept.",
            )


@contextlib.contextmanager
def granted(folder: Path) -> Iterator[Lease]:
    """Grant a lease while the context is open; the caller must hold the lock of the folder (`lock.py`)."""
    lease = Lease(folder, uuid.uuid4().hex)
    durable.write_scratch(folder / LEASE_NAME, lease.run.encode())
    try:
        yield lease
    finally:
        lease.end()


def revoke(folder: Path) -> None:
    """End the lease of any run on a folder. Workers that fill layer files there stop within `LOOK_SECONDS` and a chunk.

    The caller must hold the lock of the folder.
    """
    durable.remove_scratch(folder / LEASE_NAME)
