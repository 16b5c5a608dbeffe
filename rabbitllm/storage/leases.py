"""Leases for file systems without locks: files that a process creates exclusively and keeps fresh.

Where flock fails (NFS without a lock service, Lustre, some FUSE file systems), one process at a time holds the lease of
a path. Its file is created whole, by a hard link, which only one of several processes can make. The holder sets the
file's time every `BEAT_SECONDS`. If another process sees no change for `STALE_SECONDS`, the holder has ended or stands
still. Only changes count: clocks of hosts are not compared, and process ids are only told to the user.

A stale lease is taken over by creating its successor: `PATH.RUN`, where RUN is the id in the stale file. Only one
process can create that, and the id never comes again. So the files form a chain, and the last one holds:

    PATH  {"run": "A", …}      PATH.A  {"run": "B", …}      PATH.B  {"run": "C", …}      C holds

A holder that stood still learns of it before its next step on the disk (`durable.add_guard`): it is not the last of the
chain any more, or its own clock shows that it was late. It then stops, and leaves all files to its successor. Between
that check and the step is no wait; the steps of a split are such that one late step does no harm.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rabbitllm.base.forks import DaemonThread, ForkGuard
from rabbitllm.base.terminal import minute
from rabbitllm.errors import InUseError, SplitError
from rabbitllm.storage import durable
from rabbitllm.storage.files import file_opener

FOLDER_LEASE = ".lock.lease"
"""Name of the lease of a folder, in that folder."""
BEAT_SECONDS = 5.0
LATE_SECONDS = 60.0
"""A holder whose last beat is older than this has lost the lease; well below `STALE_SECONDS`."""
STALE_SECONDS = 120.0
POLL_SECONDS = 0.1
MAX_LOOK_SECONDS = 1.0
"""Counts for a wait between two looks at most: a process that itself stood still has seen nothing meanwhile."""
_IMPORTED = uuid.uuid4().hex
"""Tells this process, with its id, from all others on any host."""
_ended = set[str]()
"""Processes of which a lease was stale: their other leases are too."""
_RUN = re.compile(r"[0-9a-f]{32}")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK)


def note(**more: str) -> bytes:
    """Describe this process for other ones."""
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return json.dumps({**more, "pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode()


def described(path: Path) -> str:
    """Describe the process that wrote a note."""
    try:
        content = json.loads(path.read_bytes())
        since = minute(datetime.fromisoformat(content["since"]).astimezone().isoformat())
        return f"process {content['pid']} on {content['host']} since {since}"
    except (OSError, ValueError, KeyError, TypeError):  # an incomplete note, or none
        return "another process"


@dataclass(frozen=True, slots=True)
class _LeaseFile:
    """A file of a chain, as it was at one moment."""

    path: Path
    run: str
    process: str
    changed: int


def _chain(path: Path) -> Iterator[_LeaseFile]:
    """Yield the files of a lease, the holder's last."""
    file_path, seen = path, set[Path]()
    while file_path not in seen:  # a hostile folder may have a circle
        seen.add(file_path)
        try:  # opened, since network file systems then ask the server
            descriptor = file_opener(file_path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        except FileNotFoundError:
            return
        with open(descriptor, "rb") as file:
            status, content = os.fstat(descriptor), file.read(1 << 12)
        try:
            fields = json.loads(content)
            run, process = str(fields["run"]), str(fields["process"])
        except (ValueError, KeyError, TypeError):
            run = process = ""
        if not _RUN.fullmatch(run):  # a power cut can leave an empty file
            run = f"{status.st_ino:032x}"[-32:]
        yield _LeaseFile(file_path, run, process, status.st_mtime_ns)
        file_path = path.with_name(f"{path.name}.{run}")


def _last_file(path: Path) -> _LeaseFile | None:
    return next(iter(reversed([*_chain(path)])), None)


def holder(path: Path) -> str:
    """Describe the holder of a lease."""
    with contextlib.suppress(OSError):
        last = _last_file(path)
        return described(path if last is None else last.path)
    return "another process"


def _now() -> float:
    """Seconds of a clock that also counts while the machine sleeps."""
    if sys.platform == "win32":
        return time.monotonic()
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class KeptLease:
    """A lease that this process holds, kept fresh by a thread. Made by `take`.

    Args:
        path: of the first file of the chain.
        own: of this holder's file.
        run: id of this holder.
        covers: see `take`.
    """

    def __init__(self, path: Path, file_path: Path, run: str, covers: str) -> None:
        self._path, self._own, self._run = path, file_path, run
        self._beat_at = _now()
        self._owner = ForkGuard()
        self._released = threading.Event()
        DaemonThread(self._beat, "lease").start()
        durable.add_guard(covers, self.check)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            now = _now()
            if now - self._beat_at > LATE_SECONDS:
                return  # another process may have seen that already
            with contextlib.suppress(OSError):  # the file server may answer again in time
                os.utime(self._own)
                self._beat_at = now

    def check(self) -> None:
        """Check that this process still holds the lease.

        Raises:
            InUseError: it is lost.
        """
        last = _last_file(self._path) if _now() - self._beat_at <= LATE_SECONDS else None
        if last is None or last.run != self._run:
            raise InUseError(
                f"{self._path.parent} may be in use by another process now: this one stood still for more than "
                f"{LATE_SECONDS:.0f} s, or the file server did, or {self._path.name} was removed. It stops here.",
                "Make the same call again: it resumes. Nothing was changed or deleted since.",
            )

    def release(self) -> None:
        """Give the lease back; a lost one is left to its next holder."""
        self._released.set()
        durable.remove_guard(self.check)
        if not self._owner.is_here:  # a forked child does not hold it
            return
        with contextlib.suppress(InUseError, OSError):
            self.check()
            for file in [*_chain(self._path)]:  # the first one first: what is left of a chain without it is never read
                durable.remove_scratch(file.path)


def take(path: Path, waiting: Callable[[], None] | None = None, covers: str | None = None) -> KeptLease | None:
    """Take a lease; take it over if its holder has ended.

    Args:
        path: of its file, in an existing folder.
        waiting: called at each look while another process holds the lease; without it there is no wait for a holder
            that lives, only to see whether it does.
        covers: beginning of the resolved paths on which no step is carried out if the lease is lost; by default the
            folder of `path`.

    Returns:
        None if another process holds it, only without `waiting`.

    Raises:
        SplitError: the file system cannot keep leases.
        FileNotFoundError: the folder does not exist, or no longer.
    """
    run = uuid.uuid4().hex
    seen, patience, looked = None, 0.0, time.monotonic()
    while True:
        last = _last_file(path)
        now = time.monotonic()
        patience, looked = patience + min(now - looked, MAX_LOOK_SECONDS), now
        if last != seen:
            if seen is not None and last is not None and waiting is None:
                return None
            seen, patience = last, 0.0
        if last is None or last.process in _ended or patience >= STALE_SECONDS:
            file_path = path if last is None else path.with_name(f"{path.name}.{last.run}")
            if _create(path, file_path, run):
                _ended.update({last.process} if last is not None and last.process else ())
                return _kept(path, file_path, run, covers)
            seen, patience = None, 0.0
            continue
        if waiting is not None:
            waiting()
        time.sleep(POLL_SECONDS)


def _create(path: Path, file_path: Path, run: str) -> bool:
    """Create the file of a holder; return whether it is the last of the chain, and so holds the lease."""
    try:
        durable.create_scratch(file_path, note(run=run, process=f"{_IMPORTED}-{os.getpid()}"))
    except FileExistsError:  # another process was quicker; or only the answer of the file server was lost
        pass
    except FileNotFoundError:  # `_kept` of another process has removed the file under its first name
        if not path.parent.exists():
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise SplitError(
            f"{path.parent} cannot be locked: its file system has neither locks nor hard links, so that two processes "
            "could change it at once.",
            "Use a folder on another disk. Nothing was changed.",
        ) from error
    last = _last_file(path)
    if last is not None and last.run == run:
        return True
    if last is None or last.path != file_path:  # the chain has been given back meanwhile, so this file is in none
        with contextlib.suppress(OSError):
            if json.loads(file_path.read_bytes()).get("run") == run:
                durable.remove_scratch(file_path)
    return False


def _kept(path: Path, file_path: Path, run: str, covers: str | None) -> KeptLease:
    try:
        lease = KeptLease(path, file_path, run, covers or os.path.join(os.path.realpath(path.parent), ""))
    except BaseException:
        durable.remove_scratch(file_path)
        raise
    chain = {file.path for file in _chain(path)}
    # files of processes that were killed, or of one that is in `_create`, which tries again
    for stray in path.parent.glob(f"{glob.escape(path.name)}.*"):
        if stray not in chain:
            durable.remove_scratch(stray)
    return lease
