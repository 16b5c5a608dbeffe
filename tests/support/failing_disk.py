"""Ways in which a disk fails: errors in place of steps, and writes that take less than they were given."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest

from rabbitllm.storage.durable import Step
from tests.support.splitting import Counter

WRITES = ("write", "create", "make_folder")
SYNCS = ("sync", "sync_folder")
EVERYTHING = (*WRITES, *SYNCS, "rename", "unlink", "remove_folder")


@dataclass(frozen=True)
class Fault:
    """What goes wrong: the error, the steps that it may hit, and whether it stays."""

    code: int
    kinds: tuple[str, ...]
    stays: bool = False

    def error(self) -> OSError:
        return OSError(self.code, os.strerror(self.code))

    def observer(self, index: int, error: OSError | None = None) -> Callable[[Step], None]:
        """An observer of steps that fails the one numbered ``index``, among those it may hit, and perhaps all later."""
        raised = error or self.error()

        def fail(number: int, step: Step) -> None:
            if number == index or (self.stays and number > index):
                raise raised

        return Counter(fail, self.kinds)


FAULTS: Mapping[str, Fault] = {
    "the disk is full": Fault(errno.ENOSPC, WRITES, stays=True),
    "the disk is full for a moment": Fault(errno.ENOSPC, WRITES),
    "a write fails": Fault(errno.EIO, ("write",)),
    "a sync finds the disk full": Fault(errno.ENOSPC, SYNCS),
    "a sync fails": Fault(errno.EIO, SYNCS),
    "the disk is gone": Fault(errno.EIO, EVERYTHING, stays=True),
}


@contextlib.contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """Let ``os.pwrite`` and ``os.write`` take so many bytes together: of the last write a part, and then no more."""
    room = nbytes
    pwrite, write = os.pwrite, os.write

    def taken(data: memoryview) -> memoryview:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[:room]
        room -= len(part)
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, taken(data), offset))
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, taken(data)))
        yield


@contextlib.contextmanager
def short_writes(take: Callable[[int], int]) -> Iterator[None]:
    """Let ``os.pwrite`` and ``os.write`` take so many of the bytes they are given."""
    pwrite, write = os.pwrite, os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[: take(len(data))], offset))
        patch.setattr(os, "write", lambda fd, data: write(fd, data[: take(len(data))]))
        yield
