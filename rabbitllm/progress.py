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
    """

    label: str
    shards: tuple[str, ...]
    source_bytes: int
    output_bytes: int
    peak_bytes: int
    resumed: int


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
    """

    shard: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class BytesDone:
    """Source bytes of a shard that are in their layer files."""

    shard: str
    nbytes: int


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
    DownloadStarted | SplitStarted | ShardStarted | BytesFetched | BytesDone | LayerDone | ShardDone | SplitDone
)

_listeners: list[Callable[[Event], None]] = []


@contextlib.contextmanager
def listening(listener: Callable[[Event], None]) -> Iterator[None]:
    """Call `listener` with every event while the context is open; from the thread that causes it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(event: Event) -> None:
    """Pass an event on to whoever listens."""
    for listener in tuple(_listeners):
        listener(event)


def has_listeners() -> bool:
    """Whether anyone listens; where nobody does, a default display may be put up."""
    return bool(_listeners)
