"""Events of a split for listeners, and the statistics that accumulate from them.

The splitter sends them; a progress bar, a log, the demo or a test listens. Independent of both, and of terminals; the
clock is a parameter. Rates are of the last seconds; they do not include work of an earlier run.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class DownloadStarted:
    """The standard route is about to download all missing files of a repository before it splits.

    Attributes:
        label: the repository.
        files: number of missing files.
        nbytes: of all of them.
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
        peak_bytes: the largest increase of disk use during the split.
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
class KernelsCompiling:
    """Kernels are being compiled, which is done once for each installation; sent from any thread, many times."""


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
        disposal: its disposal, as text.
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
        output_bytes: of all layer files.
        seconds: duration of this call.
        peak_disk_bytes: largest size of the folder in any sample.
        peak_memory_bytes: largest anonymous memory of the process in any sample, above that at the start.
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
    | KernelsCompiling
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


COMPILING = "preparing kernels (once per installation)"
LONG_SECONDS = 2.0
"""A shorter compilation is not mentioned."""
PAUSE_SECONDS = 5.0
"""Seconds without an event after which it has ended: a step of it takes less."""
RATE_SECONDS = 10.0
"""Period over which rates are estimated."""
SAMPLE_SECONDS = 0.25
"""Minimum time between two points that rates are estimated from, however many events arrive."""
FIRST_SECONDS = 0.5
"""Minimum period for a rate."""


@dataclass(frozen=True, slots=True)
class CurrentRates:
    """Bytes per second over the last seconds; None if there is no such stage, or the period is too short.

    Attributes:
        done: source bytes that got into layer files; during a download, bytes that arrived.
        fetch: bytes that arrived from the hub.
        quantize: source bytes that were quantized.
        write: bytes that were written to layer files.
    """

    done: float | None = None
    fetch: float | None = None
    quantize: float | None = None
    write: float | None = None


@dataclass(frozen=True, slots=True)
class SplitStats:
    """The state of a split, or of the download before it, at a moment.

    Attributes:
        doing: "downloading", "splitting" or `COMPILING`.
        label: the source.
        done_bytes: source bytes in layer files (during a download, fetched bytes), including earlier runs.
        total_bytes: of the source (or of the download).
        rates: see `CurrentRates`.
        seconds_left: by the slower of fetching and splitting, at their present rates; None if neither is in progress.
            A fetch that waits for room on the disk counts with its rate before.
        disk_bytes: bytes that the split occupies; None while it is not known.
        limit_bytes: bytes that it may occupy.
        source_left_bytes: of the source's shards that are on this disk.
        shard: number of the current one, from 1; 0 before the first.
        shards: number of all shards.
        shard_here: fraction of the current one that has arrived; 1 if it is not fetched.
        layer: layer of the last bytes.
        layers_done: finished, in this run or before.
        layers: number of all layers.
        seconds: since it began.
    """

    doing: str = "splitting"
    label: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    rates: CurrentRates = CurrentRates()
    seconds_left: float | None = None
    disk_bytes: int | None = None
    limit_bytes: int | None = None
    source_left_bytes: int = 0
    shard: int = 0
    shards: int = 0
    shard_here: float = 1.0
    layer: str = ""
    layers_done: int = 0
    layers: int = 0
    seconds: float = 0.0

    @property
    def share(self) -> float:
        """Done share of all bytes, from 0 to 1."""
        return min(self.done_bytes / self.total_bytes, 1.0) if self.total_bytes else 0.0


class Compilation:
    """Whether kernels are compiled now, and have been for long, by events.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first = self._last = float("-inf")

    def hear(self, event: Event) -> None:
        """Process an event; bytes that are done were waiting for kernels."""
        now = self._clock()
        if isinstance(event, KernelsCompiling):
            self._first = now if now - self._last >= PAUSE_SECONDS else self._first
            self._last = now
        elif isinstance(event, BytesDone):
            self._first = self._last = float("-inf")

    @property
    def is_long(self) -> bool:
        """Whether a user should hear of it."""
        return self._clock() - self._last < PAUSE_SECONDS and self._last - self._first >= LONG_SECONDS


@dataclass(frozen=True, slots=True)
class _TaskCounts:
    """Bytes since this run began; differences of two of them, divided by seconds, are rates.

    During `idle` seconds nothing was fetched because there was no room for another shard.
    """

    at: float
    done: int = 0
    fetched: int = 0
    quantized: int = 0
    written: int = 0
    idle: float = 0.0


class SplitProgress:
    """Derives statistics from events. Not thread-safe: a caller with several threads must lock.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._compilation = Compilation(clock)
        self._begin(SplitStats())

    def _begin(self, stats: SplitStats) -> None:
        self._stats = stats
        """What events tell; the rest is computed from what follows."""
        self._start = self._clock()
        self._before = 0
        self._started: SplitStarted | None = None
        self._sizes: dict[str, int] = {}
        self._shard_done: dict[str, int] = {}
        self._shard_fetched: dict[str, int] = {}
        self._current = ""
        self._layers: set[str] = set()
        self._idle, self._idle_since = 0.0, None if stats.doing == "downloading" else self._start
        self._pace: float | None = None
        self._counts = _TaskCounts(self._start)
        self._points: deque[_TaskCounts] = deque([self._counts])

    def hear(self, event: Event) -> None:
        """Process an event."""
        self._compilation.hear(event)
        match event:
            case BytesDone():
                done = self._shard_done
                done[event.shard] = done.get(event.shard, 0) + event.nbytes
                self._stats = replace(self._stats, layer=event.layer or self._stats.layer)
                self._count(event.nbytes, 0, event.quantized, event.written)
            case BytesFetched():
                self._fetched(event)
            case DiskSampled():
                self._stats = replace(self._stats, disk_bytes=event.disk_bytes, limit_bytes=event.limit_bytes)
            case ShardStarted():
                self._current, self._stats = event.shard, replace(self._stats, shard=event.number, shards=event.of)
            case ShardDone():
                self._shard_done[event.shard] = self._sizes.get(event.shard, self._shard_done.get(event.shard, 0))
                left = event.source_left_bytes
                self._stats = replace(self._stats, disk_bytes=event.disk_bytes, source_left_bytes=left)
            case LayerDone():
                self._layers.add(event.layer)
            case SplitStarted():
                self._start_split(event)
            case DownloadStarted():
                self._begin(SplitStats("downloading", event.label, total_bytes=event.nbytes))

    def _fetched(self, event: BytesFetched) -> None:
        fetched = self._shard_fetched
        fetched[event.shard] = fetched.get(event.shard, 0) + event.nbytes
        if self._idle_since is not None:
            self._idle, self._idle_since = self._idle_now(), None
        if not event.earlier:
            self._count(0, max(event.nbytes, 0), 0, 0)
        if self._sizes and fetched[event.shard] >= self._sizes.get(event.shard, 0):  # until the next one begins
            self._idle_since = self._clock()

    def _idle_now(self) -> float:
        return self._idle + (self._clock() - self._idle_since if self._idle_since is not None else 0.0)

    def _start_split(self, event: SplitStarted) -> None:
        earlier = self._stats  # the disk is sampled before the split's first own event
        self._begin(
            SplitStats(
                label=event.label,
                total_bytes=event.source_bytes,
                disk_bytes=earlier.disk_bytes,
                limit_bytes=earlier.limit_bytes,
                source_left_bytes=event.source_left_bytes,
                shard=event.resumed,
                shards=event.resumed + len(event.shards),
                layers=event.layers,
            )
        )
        self._started = event
        self._sizes = dict(zip(event.shards, event.shard_bytes, strict=False))
        self._before = event.source_bytes - sum(event.shard_bytes) if event.shard_bytes else 0

    def _count(self, done: int, fetched: int, quantized: int, written: int) -> None:
        now, last = self._clock(), self._counts
        self._counts = _TaskCounts(
            now,
            last.done + done,
            last.fetched + fetched,
            last.quantized + quantized,
            last.written + written,
            self._idle_now(),
        )
        if now - self._points[-1].at >= SAMPLE_SECONDS:
            self._points.append(self._counts)
        while len(self._points) > 1 and self._points[1].at <= now - RATE_SECONDS:
            self._points.popleft()

    def stats(self) -> SplitStats:
        """Return the present statistics."""
        now = self._clock()
        rates, done, started = self._rates(now), self._done(), self._started
        return replace(
            self._stats,
            doing=COMPILING if self._compilation.is_long else self._stats.doing,
            done_bytes=done,
            rates=rates,
            seconds_left=self._seconds_left(rates, done),
            shard_here=self._here(),
            layers_done=len(self._layers) + (started.layers_before if started is not None else 0),
            seconds=now - self._start,
        )

    def _done(self) -> int:
        if self._stats.doing == "downloading":
            return min(max(sum(self._shard_fetched.values()), 0), self._stats.total_bytes)
        sizes = self._sizes
        return self._before + sum(min(done, sizes.get(shard, done)) for shard, done in self._shard_done.items())

    def _here(self) -> float:
        size, fetched = self._sizes.get(self._current, 0), self._shard_fetched.get(self._current)
        return 1.0 if fetched is None or not size else min(max(fetched / size, 0.0), 1.0)

    def _rates(self, now: float) -> CurrentRates:
        while len(self._points) > 1 and self._points[1].at <= now - RATE_SECONDS:
            self._points.popleft()
        first, last, started = self._points[0], self._counts, self._started
        seconds = now - max(first.at, now - RATE_SECONDS)
        if seconds < FIRST_SECONDS:
            return CurrentRates()
        fetch = (last.fetched - first.fetched) / seconds
        if self._stats.doing == "downloading":
            return CurrentRates(fetch, fetch)
        active = seconds - (self._idle_now() - first.idle)
        if active >= FIRST_SECONDS:
            self._pace = (last.fetched - first.fetched) / active
        return CurrentRates(
            (last.done - first.done) / seconds,
            fetch if started is not None and started.fetches else None,
            (last.quantized - first.quantized) / seconds if started is not None and started.quantizes else None,
            (last.written - first.written) / seconds,
        )

    def _seconds_left(self, rates: CurrentRates, done: int) -> float | None:
        """Return the longer of the time left to split, at the rate of splitting, and the time left to fetch."""
        seconds = []
        if rates.done:
            seconds.append((self._stats.total_bytes - done) / rates.done)
        if self._pace and self._started is not None and self._started.fetches:
            fetched = sum(min(max(n, 0), self._sizes.get(s, n)) for s, n in self._shard_fetched.items())
            seconds.append(max(sum(self._sizes.values()) - fetched, 0) / self._pace)
        return max(seconds, default=None)
