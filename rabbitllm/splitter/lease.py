"""A file in the split directory that says which run its layer files may be filled for.

The processes that fill them elsewhere read it. A process that reads the wrong run, or finds no file, looks at another
folder or belongs to a run that is over. A process that died leaves its file. The next run replaces it, and the workers
of the dead run stop at their next look. The file is scratch: it describes a running process and holds no data.
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
"""How often it is looked at, at most."""


@dataclass(frozen=True)
class Lease:
    """Leave to fill layer files in a folder; can be sent to another process.

    Attributes:
        folder: the split directory.
        run: which run gave it.
    """

    folder: Path
    run: str

    def holds(self) -> bool:
        """Whether the file is there and says so."""
        try:
            return (self.folder / LEASE_NAME).read_bytes() == self.run.encode()
        except OSError:
            return False


class LeaseCheck:
    """Looks at a lease now and then, from any thread.

    Args:
        lease: which.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._next = 0.0

    def check(self) -> None:
        """
        Raises:
            ClusterError: it does not hold (any more).
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
    """A lease that holds while the context is open; the caller is the only one at work on the folder (`lock.py`)."""
    lease = Lease(folder, uuid.uuid4().hex)
    durable.write_scratch(folder / LEASE_NAME, lease.run.encode())
    try:
        yield lease
    finally:
        revoke(folder)


def revoke(folder: Path) -> None:
    """End the lease on a folder. Workers that fill layer files there stop within `LOOK_SECONDS` and a chunk."""
    durable.remove_scratch(folder / LEASE_NAME)
