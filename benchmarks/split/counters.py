"""What a hub has sent, in a mapped file that another process reads for nothing."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_FORM = struct.Struct("<4q")


@dataclass(frozen=True)
class Sent:
    """Bytes of shards.

    Attributes:
        sent: to a client that fetches a shard to its end.
        again: of those, bytes that had been sent before.
        probed: looked at: ranges that end before their file does, for headers.
        open: no bytes but answers that are under way.
    """

    sent: int = 0
    again: int = 0
    probed: int = 0
    open: int = 0

    @property
    def new(self) -> int:
        """Sent for the first time: how far the whole is."""
        return self.sent - self.again


class Counters:
    """The counters in a file, which one process writes (`new`) and others read. A context manager."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        if new:
            path.write_bytes(bytes(_FORM.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FORM.size)

    def __enter__(self) -> Counters:
        return self

    def __exit__(self, *exception: object) -> None:
        self._map.close()

    def add(self, *, sent: int = 0, again: int = 0, probed: int = 0, open: int = 0) -> None:
        """Add to them; one thread at a time."""
        old = self.read()
        _FORM.pack_into(self._map, 0, old.sent + sent, old.again + again, old.probed + probed, old.open + open)

    def read(self) -> Sent:
        return Sent(*_FORM.unpack_from(self._map, 0))
