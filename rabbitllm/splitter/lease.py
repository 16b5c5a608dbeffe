"""A file in the split directory that names the run for which its layer files may be filled.

The processes that fill them elsewhere read it. If a process reads another run, or finds no file, it sees another folder
or belongs to a run that is over. A process that dies leaves its file; the next run replaces it, and the workers of the
dead run stop at their next check. The file is scratch: it describes a running process and holds no data.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.errors import ClusterError
from rabbitllm.storage import durable

LEASE_NAME = ".lease"
LOOK_SECONDS = 0.5
"""Minimum time between two checks of the file."""


@dataclass(frozen=True)
class Lease:
    """Permission to fill layer files in a folder; can be sent to another process.

    Attributes:
        folder: the split directory.
        run: id of the run that granted it.
    """

    folder: Path
    run: str

    def holds(self) -> bool:
        """Whether the file exists and names this run."""
        try:
            return (self.folder / LEASE_NAME).read_bytes() == self.run.encode()
        except OSError:
            return False


class LeaseCheck:
    """Checks a lease at intervals, from any thread.

    Args:
        lease: the lease to check.
    """

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
                f"{self._lease.folder} is no longer the split directory of the run that this worker works for.",
                "Nothing: another run has taken it over, or the call is over. What was done so far is safe.",
            )


@contextlib.contextmanager
def granted(folder: Path) -> Iterator[Lease]:
    """Grant a lease while the context is open; the caller must hold the lock of the folder (`lock.py`)."""
    lease = Lease(folder, uuid.uuid4().hex)
    durable.write_scratch(folder / LEASE_NAME, lease.run.encode())
    try:
        yield lease
    finally:
        revoke(folder)


def revoke(folder: Path) -> None:
    """End the lease on a folder. Workers that fill layer files there stop within `LOOK_SECONDS` and a chunk."""
    durable.remove_scratch(folder / LEASE_NAME)
