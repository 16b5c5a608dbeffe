"""Disk use during a split: recorded from its events, and drawn by matplotlib (PNG, SVG or PDF by the file's suffix).

Independent of how a split works; a point is one measurement of the disk, from an event.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.base import progress
from rabbitllm.base.terminal import amount, duration, unit_of
from rabbitllm.display.figure import blank, check_picture, unframed, write

MAX_POINTS = 4_000
"""Limit of points; beyond it they are thinned to half: the higher of two neighbours is kept, so no peak is lost."""
FAR = 1.5
"""A limit this many times above everything else is written down instead of drawn."""
SPLIT_COLOUR, SOURCE_COLOUR, LIMIT_COLOUR, WHOLE_COLOUR = "#0072B2", "#BDBDBD", "#D55E00", "#555555"
"""Okabe and Ito's palette, which is safe for colour-blind readers; and greys."""
LABELLED, APART = 0.14, 0.04
"""Parts of the width: for labels at its left, and between two shard numbers."""
MAX_LABEL = 60
_WIDTH, _HEIGHT, _DPI = 8.0, 4.4, 200


@dataclass(frozen=True, slots=True)
class DiskSample:
    """A measurement of the disk.

    Attributes:
        seconds: since the first measurement.
        disk_bytes: size of the split: layer files and staged shards.
        source_left_bytes: size of the source's remaining shards on this disk.
        limit_bytes: disk budget of the split.
    """

    seconds: float
    disk_bytes: int
    source_left_bytes: int
    limit_bytes: int

    @property
    def total(self) -> int:
        """The sum of split and source."""
        return self.disk_bytes + self.source_left_bytes


@dataclass(frozen=True, slots=True)
class UsedUp:
    """The moment when a shard was used up: seconds since the first point, and the shard's number."""

    seconds: float
    number: int


class DiskRecord:
    """Records the disk use from the events of a split. Thread-safe.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._start: float | None = None
        self._points: list[DiskSample] = []
        self._shards: list[UsedUp] = []
        self._source_left = 0
        self._limit = 0
        self.label = ""
        self.source_bytes = 0
        self.of = 0

    def __call__(self, event: progress.Event) -> None:
        with self._lock:
            match event:
                case progress.SplitStarted():
                    self._take_up(event)
                case progress.DiskSampled():
                    self._limit = event.limit_bytes
                    self._add(event.disk_bytes)
                case progress.ShardDone():
                    self.of = event.of
                    self._add(event.disk_bytes)  # before and after the deletion of the source's shard
                    self._source_left = event.source_left_bytes
                    at = self._add(event.disk_bytes)
                    self._shards.append(UsedUp(at, event.number))

    def _take_up(self, event: progress.SplitStarted) -> None:
        self.label, self.source_bytes = event.label, event.source_bytes
        self._source_left = event.source_left_bytes
        self._points = [DiskSample(p.seconds, p.disk_bytes, self._source_left, p.limit_bytes) for p in self._points]

    def _add(self, disk_bytes: int) -> float:
        now = self._clock()
        self._start = now if self._start is None else self._start
        self._points.append(DiskSample(now - self._start, disk_bytes, self._source_left, self._limit))
        if len(self._points) > MAX_POINTS:
            self._points = thinned(self._points)
        return now - self._start

    @property
    def points(self) -> tuple[DiskSample, ...]:
        """The measurements in order."""
        with self._lock:
            return tuple(self._points)

    @property
    def shards(self) -> tuple[UsedUp, ...]:
        """The used-up shards in order."""
        with self._lock:
            return tuple(self._shards)

    @property
    def peak(self) -> DiskSample | None:
        """The first measurement with the maximum of source and split together; None without any."""
        return max(self.points, key=lambda point: point.total, default=None)


def thinned(points: Sequence[DiskSample]) -> list[DiskSample]:
    """Half as many points: of each two neighbours the one with more disk use; first and last are kept."""
    inner = points[1:-1]
    pairs = (inner[at : at + 2] for at in range(0, len(inner), 2))
    return [points[0], *(max(pair, key=lambda point: point.total) for pair in pairs), points[-1]]


@contextlib.contextmanager
def pictured(path: str | Path | None) -> Iterator[DiskRecord | None]:
    """Record splits inside the context, and draw the record at the end, also if one fails.

    Args:
        path: path of the picture; None for no picture.

    Raises:
        OptionError, MissingPackageError: see `check_picture`, before anything else.
        OSError: the file cannot be written.
    """
    if path is None:
        yield None
        return
    check_picture(path)
    record = DiskRecord()
    try:
        with progress.listening(record, shows=False):
            yield record
    finally:
        if record.points:
            draw(record, path)


def draw(record: DiskRecord, path: str | Path) -> None:
    """Draw a record with at least one point.

    Raises:
        OptionError, MissingPackageError: see `check_picture`.
        OSError: the file cannot be written.
    """
    check_picture(path)
    write(_drawn(record), path, _DPI)


def _drawn(record: DiskRecord) -> Any:
    points, peak = record.points, record.peak
    assert peak is not None
    figure = blank(_WIDTH, _HEIGHT)
    axes = figure.subplots()
    most = max(peak.total, record.source_bytes)
    scale, unit = unit_of(most)
    per, time_unit = _time_unit(points[-1].seconds)
    times = [point.seconds / per for point in points]
    split = [point.disk_bytes / scale for point in points]
    total = [point.total / scale for point in points]
    axes.fill_between(
        times, split, color=SPLIT_COLOUR, linewidth=0, step="post", label="the split (layers, and shards fetched)"
    )
    if max(point.source_left_bytes for point in points):
        label = "the checkpoint's own shards"
        axes.fill_between(times, split, total, color=SOURCE_COLOUR, linewidth=0, step="post", label=label)
    note = _limits(axes, record, most, scale)
    axes.plot([peak.seconds / per], [peak.total / scale], "o", color="black", markersize=5, zorder=5)
    _label_peak(axes, peak, times[-1], per, scale)
    _shard_marks(axes, record, per)
    axes.set_xlim(0, max(times[-1], 1e-9))
    axes.set_ylim(0, 1.07 * axes.get_ylim()[1])  # room for the label of a peak
    axes.set_xlabel(time_unit)
    axes.set_ylabel(f"{unit} on the disk")
    unframed(axes)
    facts = (
        f"a checkpoint of {amount(record.source_bytes)} in {record.of} shards, split in {duration(points[-1].seconds)}"
    )
    label = record.label if len(record.label) <= MAX_LABEL else "…" + record.label[-MAX_LABEL:]
    figure.suptitle(f"{label}\n{facts}{note}", x=0.01, ha="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


def _limits(axes: Any, record: DiskRecord, most: int, scale: float) -> str:
    """Draw lines for the limit and for the checkpoint's size; return the text for a limit that is far off."""
    axes.axhline(
        record.source_bytes / scale, color=WHOLE_COLOUR, linestyle=":", linewidth=1.5, label="the whole checkpoint"
    )
    limits = [point.limit_bytes for point in record.points if point.limit_bytes]
    if not limits:
        return ""
    if min(limits) > FAR * most:
        return f"; limit of the split {amount(min(limits))}"
    times = [point.seconds for point in record.points]
    per, _ = _time_unit(times[-1])
    heights = [point.limit_bytes / scale for point in record.points]
    axes.step(
        [time / per for time in times],
        heights,
        where="post",
        color=LIMIT_COLOUR,
        linestyle="--",
        linewidth=1.5,
        label="limit of the split",
    )
    return ""


def _label_peak(axes: Any, peak: DiskSample, end: float, per: float, scale: float) -> None:
    """Write the label next to the peak's dot, on the side with enough room."""
    left = peak.seconds / per > end / 2
    axes.annotate(
        f"peak {amount(peak.total)}",
        (peak.seconds / per, peak.total / scale),
        xytext=(-8 if left else 8, 6),
        textcoords="offset points",
        ha="right" if left else "left",
        va="bottom",
        fontweight="bold",
        fontsize=10,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
        zorder=6,
    )


def _shard_marks(axes: Any, record: DiskRecord, per: float) -> None:
    """Draw a thin line where each shard was used up, some of them with a number above."""
    end = record.points[-1].seconds
    numbered = LABELLED * end  # end of the labels
    for shard in record.shards:
        axes.axvline(shard.seconds / per, color="white", linewidth=0.8, alpha=0.8, zorder=1.5)
        axes.axvline(shard.seconds / per, ymin=0.985, ymax=1.0, color="black", linewidth=0.8)
        if shard.seconds >= numbered:
            numbered = shard.seconds + APART * end
            where = (shard.seconds / per, 1.01)
            axes.annotate(str(shard.number), where, xycoords=("data", "axes fraction"), ha="center", fontsize=8)
    if record.shards:
        axes.annotate("shards used up:", (0, 1.01), xycoords="axes fraction", ha="left", fontsize=8, color="#333333")
