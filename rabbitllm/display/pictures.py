"""Pictures of a pass and of the disk during a split (PNG, SVG or PDF by the file's suffix), drawn by matplotlib.

matplotlib is imported when the first figure is made.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rabbitllm.base import progress
from rabbitllm.base.terminal import amount, counted, duration, unit_of
from rabbitllm.errors import OptionError, missing_package
from rabbitllm.storage.durable import require_kind, write_whole
from rabbitllm.telemetry.passes import (
    CALLER_STAGES,
    COMPUTE,
    COPIES,
    DEQUANTIZE,
    PINNED_UPLOAD,
    PROMPT,
    READ,
    READ_WAIT,
    UPLOAD,
    UPLOAD_WAIT,
    Pass,
    median_pass,
)
from rabbitllm.telemetry.profiler import Event, Trace

FORMATS = ("png", "svg", "pdf")


def check_picture(path: str | Path) -> None:
    """Refuse, before anything is measured, a picture that could not be drawn afterwards.

    Raises:
        OptionError: the suffix of the name is not a supported format, or a file of that name is no picture.
        MissingPackageError: matplotlib is not installed.
    """
    ending = Path(path).suffix.removeprefix(".").lower()
    if ending not in FORMATS:
        raise OptionError(
            f"{path} is not the name of a picture file.", f"Use a name that ends in .{', .'.join(FORMATS)}."
        )
    require_kind(Path(path), "a picture", b"\x89PNG", b"%PDF", b"<?xml")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing_package("Plots need", "matplotlib", "plot") from error


def blank(width: float, height: float) -> Any:
    """An empty white figure of this size in inches, independent of the backend of the process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def unframed(axes: Any) -> None:
    """Remove the sides of axes that have no scale."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def write(figure: Any, path: str | Path, dpi: int = 150) -> None:
    """Write a figure in the format of the file's suffix; an existing picture is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format=Path(path).suffix[1:].lower(), dpi=dpi)
    write_whole(Path(path), buffer.getvalue())


# The timing of one pass. Above, a timeline: the threads that provide weights, and the caller. Below, the caller's time
# and the disk's for each layer.


COLOURS: Mapping[str, str] = {
    READ: "#0072B2",
    UPLOAD: "#56B4E9",
    PINNED_UPLOAD: "#009E73",
    READ_WAIT: "#D9D9D9",
    UPLOAD_WAIT: "#A6A6A6",
    DEQUANTIZE: "#CC79A7",
    COMPUTE: "#E69F00",
}
"""Okabe and Ito's palette, which is safe for colour-blind readers."""
_STAGE_LABELS: Mapping[str, str] = {READ: "disk", UPLOAD: "copy to device", READ_WAIT: "wait for weights"}
_LANES: Sequence[tuple[str, frozenset[str]]] = (
    ("disk", frozenset({READ})),
    ("copy", frozenset(COPIES)),
    ("caller", frozenset(CALLER_STAGES)),
)
_PROVIDERS = (READ, *COPIES)
_MAX_NAMES = 40
"""Limit of layers that are all named below the bars."""
_WIDTH, _HEIGHT = 11.0, 6.2
"""Size in inches."""


def draw_pass(trace: Trace, path: str | Path, title: str = "", note: str = "") -> None:
    """Draw the median pass of a trace.

    Args:
        trace: a trace with at least one complete pass.
        path: path of the file, which is replaced.
        title: first line, above the picture.
        note: second line.

    Raises:
        OptionError, MissingPackageError: see `check_picture`; or there is no complete pass.
        OSError: the file cannot be written.
    """
    check_picture(path)
    events = trace.events
    earliest = min((event.start for event in events), default=float("inf"))
    whole = [one for one in trace.passes if not trace.dropped or one.start >= earliest]
    chosen = median_pass(whole)
    if chosen is None:
        raise OptionError("The trace has no complete pass to plot.", "Trace more passes, or keep more events.")
    write(_pass_figure(chosen, events, title, note), path)


def _events_of(events: Iterable[Event], one: Pass) -> list[Event]:
    """Events that overlap the pass."""
    end = one.start + one.wall
    return [event for event in events if event.end > one.start and event.start < end]


def spent_by_layer(one: Pass, events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """layer -> stage -> seconds of a pass, layers in its order.

    Reading and copying count for the pass that used the weights: those of the first layer arrived at the end of the
    previous pass, and this pass prefetches them for the next.
    """
    known = list(events)
    spent: dict[str, dict[str, float]] = {}
    used: dict[str, float] = {}
    for event in sorted(_events_of(known, one), key=lambda event: event.start):
        if event.stage in CALLER_STAGES:
            stages = spent.setdefault(event.layer, {})
            stages[event.stage] = stages.get(event.stage, 0.0) + event.seconds
            used[event.layer] = event.end
    for event in sorted(known, key=lambda event: event.start):
        if event.stage in _PROVIDERS and event.end <= used.get(event.layer, 0.0):
            spent[event.layer][event.stage] = event.seconds
    return spent


def _pass_figure(one: Pass, events: Sequence[Event], title: str, note: str) -> Any:
    from matplotlib.patches import Patch

    figure = blank(_WIDTH, _HEIGHT)
    above, below = figure.subplots(2, 1, height_ratios=(1, 1.9))
    inside = _events_of(events, one)
    _timeline(above, one, inside)
    _bars(below, spent_by_layer(one, events))
    present = [stage for stage in COLOURS if any(event.stage == stage for event in inside)]
    handles = [Patch(color=COLOURS[stage], label=_STAGE_LABELS.get(stage, stage)) for stage in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle("\n".join(line for line in (title, note) if line), x=0.01, ha="left", fontsize=11)
    return figure


def _timeline(axes: Any, one: Pass, events: Sequence[Event]) -> None:
    """Draw a lane for the disk, one for copies, one for the caller; x in milliseconds of the pass."""
    lanes = [(name, stages) for name, stages in _LANES if any(event.stage in stages for event in events)]
    for row, (_, stages) in enumerate(lanes):
        for stage in stages:
            spans = [_clipped(event, one) for event in events if event.stage == stage]
            axes.broken_barh(spans, (row - 0.36, 0.72), color=COLOURS[stage], edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, one.wall * 1e3)
    axes.set_xlabel(
        f"milliseconds of pass {one.number}, over {counted(one.tokens, 'token')}{' of prompt' * (one.kind == PROMPT)}"
    )
    unframed(axes)


def _clipped(event: Event, one: Pass) -> tuple[float, float]:
    """Start and length in milliseconds of the part within the pass."""
    start, end = max(event.start - one.start, 0.0), min(event.end - one.start, one.wall)
    return start * 1e3, (end - start) * 1e3


def _bars(axes: Any, spent: Mapping[str, Mapping[str, float]]) -> None:
    """Draw two bars for each layer: the caller's times, stacked, and next to them those of the disk and the copies."""
    layers = list(spent)
    has_providers = any(stage in stages for stages in spent.values() for stage in _PROVIDERS)
    width = 0.4 if has_providers else 0.8
    for stages, shift in ((CALLER_STAGES, width / 2 if has_providers else 0.0), (_PROVIDERS, -width / 2)):
        bottom = [0.0] * len(layers)
        for stage in stages:
            heights = [spent[layer].get(stage, 0.0) * 1e3 for layer in layers]
            axes.bar([x + shift for x in range(len(layers))], heights, width, bottom, color=COLOURS[stage])
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    step = max(-(-len(layers) // _MAX_NAMES), 1)
    names = [layer.removeprefix("model.").removeprefix("transformer.") for layer in layers]
    axes.set_xticks(range(0, len(layers), step), names[::step], rotation=90, fontsize=8)
    axes.set_xlim(-0.6, len(layers) - 0.4)
    axes.set_ylabel("milliseconds")
    unframed(axes)


# Disk use during a split, recorded from its events; a point is one measurement of the disk, from an event.


MAX_POINTS = 4_000
"""Limit of points; beyond it, of each two neighbours only the higher is kept."""
MAX_AXIS = 1.5
"""Maximum of the y-axis, relative to the peak; a higher limit is only given as text."""
SPLIT_COLOUR, SOURCE_COLOUR, LIMIT_COLOUR, WHOLE_COLOUR = "#0072B2", "#BDBDBD", "#D55E00", "#555555"
"""Colours of the same palette, and greys."""
LABEL_WIDTH, NUMBER_DISTANCE = 0.14, 0.04
"""Fractions of the width: for labels at the left, and between two shard numbers."""
MAX_LABEL = 60
_DISK_WIDTH, _DISK_HEIGHT, _DISK_DPI = 8.0, 4.4, 200


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
                    self.label, self.source_bytes = event.label, event.source_bytes
                    self._source_left = left = event.source_left_bytes
                    self._points = [replace(point, source_left_bytes=left) for point in self._points]
                case progress.DiskSampled():
                    self._limit = event.limit_bytes
                    self._add(event.disk_bytes)
                case progress.ShardDone():
                    self.of = event.of
                    self._add(event.disk_bytes)  # before and after the deletion of the source's shard
                    self._source_left = event.source_left_bytes
                    at = self._add(event.disk_bytes)
                    self._shards.append(UsedUp(at, event.number))

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
    """Half of the points: of each two neighbours the one with more disk use; first and last are kept."""
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
            write(_disk_figure(record), path, _DISK_DPI)


def _disk_figure(record: DiskRecord) -> Any:
    points, peak = record.points, record.peak
    assert peak is not None
    figure = blank(_DISK_WIDTH, _DISK_HEIGHT)
    axes = figure.subplots()
    highest = max(peak.total, record.source_bytes)
    scale, unit = unit_of(highest)
    seconds = points[-1].seconds
    units = (1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours")
    per, time_unit = units[(seconds >= 180) + (seconds >= 3 * 3600)]
    times = [point.seconds / per for point in points]
    split = [point.disk_bytes / scale for point in points]
    total = [point.total / scale for point in points]
    label = "the split (layer files and downloaded shards)"
    axes.fill_between(times, split, color=SPLIT_COLOUR, linewidth=0, step="post", label=label)
    if max(point.source_left_bytes for point in points):
        label = "the original shards"
        axes.fill_between(times, split, total, color=SOURCE_COLOUR, linewidth=0, step="post", label=label)
    whole = {"color": WHOLE_COLOUR, "linestyle": ":", "linewidth": 1.5, "label": "the whole checkpoint"}
    axes.axhline(record.source_bytes / scale, **whole)
    limits = [point.limit_bytes / scale for point in points]
    if any(limits):
        line = {"color": LIMIT_COLOUR, "linestyle": "--", "linewidth": 1.5, "label": "limit of the split"}
        axes.step(times, limits, where="post", **line)
    axes.plot([peak.seconds / per], [peak.total / scale], "o", color="black", markersize=5, zorder=5)
    _shard_marks(axes, record, per)
    axes.set_xlim(0, max(times[-1], 1e-9))
    axes.set_ylim(0, 1.07 * min(max(*limits, highest / scale), MAX_AXIS * highest / scale))
    axes.set_xlabel(time_unit)
    axes.set_ylabel(f"{unit} on the disk")
    unframed(axes)
    took = f"{amount(record.source_bytes)} in {record.of} shards, split in {duration(points[-1].seconds)}"
    limit = f"; limit of the split {amount(min(filter(None, limits)) * scale)}" if any(limits) else ""
    label = record.label if len(record.label) <= MAX_LABEL else "…" + record.label[-MAX_LABEL:]
    figure.suptitle(
        f"{label}\na checkpoint of {took}; peak {amount(peak.total)}{limit}", x=0.01, ha="left", fontsize=10
    )
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _shard_marks(axes: Any, record: DiskRecord, per: float) -> None:
    """Draw a thin line where each shard was used up, some of them with a number above."""
    end = record.points[-1].seconds
    numbered = LABEL_WIDTH * end  # end of the labels
    for shard in record.shards:
        axes.axvline(shard.seconds / per, color="white", linewidth=0.8, alpha=0.8, zorder=1.5)
        axes.axvline(shard.seconds / per, ymin=0.985, ymax=1.0, color="black", linewidth=0.8)
        if shard.seconds >= numbered:
            numbered = shard.seconds + NUMBER_DISTANCE * end
            where = (shard.seconds / per, 1.01)
            axes.annotate(str(shard.number), where, xycoords=("data", "axes fraction"), ha="center", fontsize=8)
    if record.shards:
        axes.annotate("shards used:", (0, 1.01), xycoords="axes fraction", ha="left", fontsize=8, color="#333333")
