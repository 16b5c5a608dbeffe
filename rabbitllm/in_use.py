"""Whether a folder of weights is in use: those who read share it, one who deletes or replaces files has it alone.

The lock is the operating system's (flock) on the folder itself, which is opened for reading only. So it ends with the
process that holds it, whatever ends that; nothing is written, a read-only folder is locked like any other, and nothing
of it is left after a kill. It is one machine's: network file systems do not pass on locks of folders. Knows neither
splits nor checkpoints.

Where there is no such lock nothing is locked: on Windows, which cannot open a folder like a file and whose locks of
files are never shared, and on file systems that refuse it.
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
from datetime import datetime
from pathlib import Path

from rabbitllm.errors import InUseError, SplitError

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""What flock fails with on a file system that has no locks (Lustre mounted without them, some FUSE ones)."""
BROKEN_LOCKS = (errno.EIO, errno.ESTALE)
"""What it fails with where the file system should have locks, and does not answer."""
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
MOST_NAMED = 3
"""Processes that a message names."""


class Kind(enum.Enum):
    """What a folder holds, and what a call would do that needs it alone."""

    SOURCE = "this call would delete its shards"
    SPLIT = "this call would replace or remove its layer files"


class Hold:
    """A lock that is held until `close`, until this is no longer referred to, or until the process ends.

    A context manager, which closes it.

    Args:
        descriptor: of the locked folder; None where nothing is locked.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._end = weakref.finalize(self, _let_go, descriptor, os.getpid()) if descriptor is not None else None
        self._kept = False

    def close(self) -> None:
        """Let go of it, if that is not done."""
        if self._end is not None:
            self._end()

    def keep_with(self, user: object) -> None:
        """Hold it as long as `user` is referred to, also after this context."""
        self._kept = True
        weakref.finalize(user, self.close)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._kept:
            self.close()


def shared(folder: Path, kind: Kind) -> Hold:
    """Use a folder beside others who only read it.

    Raises:
        InUseError: somebody has it alone.
        SplitError: its file system does not answer.
    """
    hold = _locked(folder, alone=False)
    if hold is None:
        if kind is Kind.SOURCE:
            problem = f"{folder} is being split by {_users(folder)}, which deletes its shards."
        else:
            problem = f"{folder} is being repaired or removed by {_users(folder)}."
        raise InUseError(problem, "Wait until that is done, or end it, and call again. Nothing was touched.")
    return hold


def alone(folder: Path, kind: Kind) -> Hold:
    """Have a folder for oneself, to delete files in it.

    Raises:
        InUseError: somebody uses it.
        SplitError: its file system does not answer.
    """
    hold = _locked(folder, alone=True)
    if hold is None:
        shared(folder, kind).close()  # if somebody else has it alone, that is said
        raise InUseError(
            f"{folder} is in use by {_users(folder)}; {kind.value}.",
            "Wait until that is done, or end it, and call again. Nothing was touched.",
        )
    return hold


def _locked(folder: Path, *, alone: bool) -> Hold | None:
    """The lock; None if others have one that does not go with it."""
    if sys.platform == "win32":
        return Hold()
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it is not there (any more), or cannot be looked into: what comes next says so
        return Hold()
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _TAKEN:
            return None
        if error.errno in NO_LOCKS:
            return Hold()
        raise locks_broken(folder, error) from error
    return Hold(descriptor)


def locks_broken(folder: Path, error: OSError) -> SplitError:
    """What to raise where a file system does not answer when it is asked for a lock."""
    return SplitError(
        f"{folder} cannot be locked: {error.strerror}.",
        "Look whether its disk or server is well, and call again. Nothing was touched.",
    )


def _let_go(descriptor: int, process: int) -> None:
    if os.getpid() != process:  # a fork has the same lock, and must not end it
        os.close(descriptor)
        return
    import fcntl

    with contextlib.suppress(OSError):  # closing would do, if no process that was forked meanwhile had it open too
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _users(folder: Path) -> str:
    """Who has locks on a folder, in words: as far as the system tells, which Linux does."""
    found = _processes(folder)
    named = " and ".join(map(_named, found[:MOST_NAMED]))
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"{named}{more}" if named else "another process"


def _named(process: int) -> str:
    import psutil

    if process == os.getpid():
        return f"this process ({process})"
    try:
        began = datetime.fromtimestamp(psutil.Process(process).create_time()).astimezone()
    except psutil.Error:
        return f"process {process} on {socket.gethostname()}"
    since = began.isoformat(sep=" ", timespec="seconds")
    return f"process {process} on {socket.gethostname()}, which runs since {since}"


_LOCK_LINE = re.compile(r"^\d+: FLOCK +\w+ +\w+ (\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", re.MULTILINE)
"""A lock in /proc/locks that is held: process, device and inode (proc_locks(5))."""


def _processes(folder: Path) -> list[int]:
    """The processes that have locks on a folder."""
    try:
        lines = Path("/proc/locks").read_text()
        status = folder.stat()
    except OSError:
        return []
    device = os.major(status.st_dev), os.minor(status.st_dev)
    found = set[int]()
    for process, major, minor, inode in _LOCK_LINE.findall(lines):
        if int(inode) != status.st_ino:
            continue
        # the device of a btrfs is not that which its files say
        if device == (int(major, 16), int(minor, 16)) or _has_open(int(process), status):
            found.add(int(process))
    return sorted(found)


def _has_open(process: int, status: os.stat_result) -> bool:
    """Whether a process has this file open, as far as one may see."""
    opened = Path(f"/proc/{process}/fd")
    found = False
    with contextlib.suppress(OSError):  # of another user; the process has ended
        for name in os.listdir(opened):
            with contextlib.suppress(OSError):  # it has been closed
                found = found or os.path.samestat((opened / name).stat(), status)
    return found
