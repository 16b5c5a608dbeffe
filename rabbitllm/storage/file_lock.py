"""A lock on a file that is being written: an empty file beside it, which one process at a time has locked.

It is flock, which ends with the process; on a file system without locks it is a lease (`leases.py`). The lock is a file
of its own, since what is written is replaced and removed while the lock is held.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rabbitllm.errors import InUseError
from rabbitllm.storage import durable, leases
from rabbitllm.storage.folder_lock import LOCKED, NO_LOCKS

LOCK_SUFFIX = ".lock"


@contextlib.contextmanager
def locked_file(lock: Path, output: Path) -> Iterator[None]:
    """Hold a lock exclusively while the context is open; do not wait. The folder must exist.

    Args:
        lock: the empty file; what a killed process left is used.
        output: the file or folder that is written, and the beginning of the names of further files.

    Raises:
        InUseError: another process holds it, or there is another file in its place.
        OSError: the lock cannot be made.
    """
    if sys.platform == "win32":  # an open file cannot be replaced or removed there, which excludes a second process
        yield
        return
    import fcntl

    lease = None
    with durable.open_scratch(lock) as descriptor:
        if os.fstat(descriptor).st_size:
            raise InUseError(f"{lock} is not a lock of RabbitLLM.", "Use another output, or move that file away.")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = lock.exists() and os.path.samestat(os.fstat(descriptor), lock.stat())
        except OSError as error:
            if error.errno not in (*LOCKED, *NO_LOCKS):
                raise
            if error.errno in NO_LOCKS:
                covers = os.path.join(os.path.realpath(output.parent), output.name)
                lease = leases.take(lock.with_name(lock.name + ".lease"), covers=covers)
            is_ours = lease is not None
        if not is_ours:
            raise InUseError(
                f"Another process is writing {output}.", "Wait for that process or end it, and run the command again."
            )
        try:
            yield
        finally:
            durable.remove_scratch(lock)
            if lease is not None:
                lease.release()
