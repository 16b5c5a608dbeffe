"""What happens during a split, as records that anyone may listen to.

The splitter tells; a progress bar, a log, the demo or a test listens. Knows neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class DownloadStarted:
    """The standard route is about to download what it lacks of a repository, all of it, before it splits.

    Attributes:
        label: the repository.
        files: how many it lacks.
        nbytes: of them together.
    """

    label: str
    files: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SplitStarted:
    """A split begins or goes on.

    Attributes:
        label: the source.
        shards: shard names in the order they will be taken; those already used up are not among them.
        source_bytes: of all shards, used up or not.
        output_bytes: of all layer files.
        peak_bytes: the most the split will add to the disk at any moment.
        resumed: shards that an earlier run used up.
        shard_bytes: of each of `shards`.
        layers: how many there will be.
        layers_before: of them, those that an earlier run finished.
        source_left_bytes: of the source's shards that are on this disk as it begins.
        fetches: whether any shard comes from the hub.
        quantizes: whether tensors are quantized on the way.
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
    """Bytes of a shard that have come from the hub, or that an earlier run had fetched; told of from any thread.

    During a download on the standard route, bytes of any file. Negative where a download starts over.

    Attributes:
        earlier: they were here before; no rate is to be estimated from them.
    """

    shard: str
    nbytes: int
    earlier: bool = False


@dataclass(frozen=True, slots=True)
class BytesDone:
    """Source bytes of a shard that are in their layer files; told of from any thread, for a few MB at a time.

    Attributes:
        layer: which the last of them went to.
        quantized: of them, those that were quantized.
        written: bytes that were made of them.
    """

    shard: str
    nbytes: int
    layer: str = ""
    quantized: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class DiskSampled:
    """A look at the disk; several times a second, from a thread of its own.

    Attributes:
        disk_bytes: what the split occupies: layer files (finished or not) and staged shards.
        limit_bytes: what it may occupy: `max_disk`, or that and what else is free less `min_free_disk`, whichever is
            less. Where others use the same disk, or shards of the source are deleted, it changes.
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
        disposal: what became of it, in words.
        disk_bytes: what the split occupies now: layer files (finished or not) and staged shards.
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
    """The split directory is whole.

    Attributes:
        folder: where it is.
        layers: how many.
        output_bytes: of them together.
        seconds: that this call took.
        peak_disk_bytes: the most that the folder was seen to occupy.
        peak_memory_bytes: the most anonymous memory that the process was seen to have above that at the start.
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
    """Call `listener` with every event while the context is open; from the thread that causes it.

    Args:
        listener: what to call.
        shows: whether it shows them to a person, or only keeps them.
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
    """Whether a listener shows the events to a person; if none does, a default display may be put up."""
    return bool(_showing)
