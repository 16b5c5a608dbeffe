"""Events of a split, as records for listeners.

The splitter sends them; a progress bar, a log, the demo or a test listens. Independent of both sides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class DownloadStarted:
    """The standard route is about to download all missing files of a repository before it splits.

    Attributes:
        label: the repository.
        files: number of missing files.
        nbytes: of them together.
    """

    label: str
    files: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SplitStarted:
    """A split begins or is resumed.

    Attributes:
        label: the source.
        shards: names of the remaining shards in processing order, without those already used up.
        source_bytes: of all shards, used up or not.
        output_bytes: of all layer files.
        peak_bytes: the most that the split will add to the disk at any moment.
        resumed: number of shards that an earlier run used up.
        shard_bytes: of each of `shards`.
        layers: number of all layers.
        layers_before: number of those that an earlier run finished.
        source_left_bytes: of the source's shards that are on this disk as it begins.
        fetches: whether any shard comes from the hub.
        quantizes: whether tensors are quantized.
    """

    label: str
    shards: tuple[str, ...]
    source_bytes: int
    output_bytes: int
    peak_bytes: int
    resumed: int
    shard_bytes: tuple[int, ...] = ()
    layers: int = 0
    source_left_bytes: int = 0
    fetches: bool = False
    quantizes: bool = False
    layers_before: int = 0


@dataclass(frozen=True, slots=True)
class ShardStarted:
    """A shard is about to be fetched or read."""

    shard: str
    number: int
    of: int


@dataclass(frozen=True, slots=True)
class BytesFetched:
    """Bytes of a shard that arrived from the hub, or that an earlier run had fetched; sent from any thread.

    During a download on the standard route, bytes of any file. Negative if a download starts over.

    Attributes:
        earlier: whether they were here before; they must not count in a rate.
    """

    shard: str
    nbytes: int
    earlier: bool = False


@dataclass(frozen=True, slots=True)
class BytesDone:
    """Source bytes of a shard that are in their layer files; sent from any thread, for a few MB at a time.

    Attributes:
        layer: layer of the last of them.
        quantized: number of them that were quantized.
        written: bytes that were written for them.
    """

    shard: str
    nbytes: int
    layer: str = ""
    quantized: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class DiskSampled:
    """A sample of the disk; several times a second, from a separate thread.

    Attributes:
        disk_bytes: bytes of the split: layer files (finished or not) and staged shards.
        limit_bytes: bytes that it may occupy: the smaller of `max_disk`, and of `disk_bytes` plus the free disk less
            `min_free_disk`. It changes if others use the same disk, or shards of the source are deleted.
    """

    disk_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class LayerDone:
    """A layer file got its final name."""

    layer: str
    file: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardDone:
    """A shard is used up: durable in the layer files, and disposed of (or kept).

    Attributes:
        disposal: its disposal, in words.
        disk_bytes: present bytes of the split: layer files (finished or not) and staged shards.
        source_left_bytes: of the source's shards that are still on this disk.
    """

    shard: str
    number: int
    of: int
    disposal: str
    disk_bytes: int
    source_left_bytes: int


@dataclass(frozen=True, slots=True)
class SplitDone:
    """The split directory is complete.

    Attributes:
        folder: the split directory.
        layers: number of layers.
        output_bytes: of them together.
        seconds: duration of this call.
        peak_disk_bytes: the most that the folder occupied in any sample.
        peak_memory_bytes: the most anonymous memory of the process in any sample, above that at the start.
    """

    folder: str
    layers: int
    output_bytes: int
    seconds: float
    peak_disk_bytes: int = 0
    peak_memory_bytes: int = 0


Event: TypeAlias = (
    DownloadStarted
    | SplitStarted
    | ShardStarted
    | BytesFetched
    | BytesDone
    | DiskSampled
    | LayerDone
    | ShardDone
    | SplitDone
)

_listeners: list[Callable[[Event], None]] = []
_showing: list[Callable[[Event], None]] = []


@contextlib.contextmanager
def listening(listener: Callable[[Event], None], *, shows: bool = True) -> Iterator[None]:
    """Call `listener` with every event while the context is open, from the thread that causes it.

    Args:
        listener: function to call.
        shows: whether it displays events to a user, or only records them.
    """
    _listeners.append(listener)
    if shows:
        _showing.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        if shows:
            _showing.remove(listener)


def tell(event: Event) -> None:
    """Pass an event on to all listeners."""
    for listener in tuple(_listeners):
        listener(event)


def is_shown() -> bool:
    """Whether a listener displays the events to a user; if none does, a default display may be created."""
    return bool(_showing)
