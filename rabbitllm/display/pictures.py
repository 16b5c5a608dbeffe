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
    shown,
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
    require_kind(Path(path), "is not a picture", b"\x89PNG", b"%PDF", b"<?xml")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing_package("Plots need", "matplotlib", "plot") from error


def empty_figure(width: float, height: float) -> Any:
    """An empty white figure of this size in inches, independent of the backend of the process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def hide_frame(axes: Any) -> None:
    """Remove the sides of axes that have no scale."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def put_title(figure: Any, title: str, size: int = 11) -> None:
    """Write lines above a figure, from its left edge."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=size)


def stack(
    draw: Callable[..., Any],
    positions: Sequence[float],
    thickness: float,
    parts: Sequence[Mapping[str, float]],
    colours: Mapping[str, str],
    scale: float,
) -> list[float]:
    """Draw bars of coloured parts.

    Args:
        draw: `axes.bar` or `axes.barh`.
        positions, thickness: of the bars.
        parts: label -> size, for each bar.
        colours: label -> colour; the first is nearest to the axis.
        scale: what the sizes are divided by.

    Returns:
        The length of each bar.
    """
    lengths = [0.0] * len(parts)
    for label, colour in colours.items():
        sizes = [bar.get(label, 0) / scale for bar in parts]
        if any(sizes):
            draw(positions, sizes, thickness, lengths, color=colour, linewidth=0)
            lengths = [length + size for length, size in zip(lengths, sizes, strict=True)]
    return lengths


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
    ("computing", frozenset(CALLER_STAGES)),
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
    whole = [pass_ for pass_ in trace.passes if not trace.dropped or pass_.start >= earliest]
    chosen = median_pass(whole)
    if chosen is None:
        raise OptionError("The trace has no complete pass to plot.", "Trace more passes, or keep more events.")
    write(_pass_figure(chosen, events, title, note), path)


def _events_of(events: Iterable[Event], pass_: Pass) -> list[Event]:
    """Events that overlap the pass."""
    end = pass_.start + pass_.wall
    return [event for event in events if event.end > pass_.start and event.start < end]


def spent_by_layer(pass_: Pass, events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """layer -> stage -> seconds of a pass, layers in its order.

    Reading and copying count for the pass that used the weights: those of the first layer arrived at the end of the
    previous pass, and this pass prefetches them for the next.
    """
    recorded = list(events)
    spent: dict[str, dict[str, float]] = {}
    used: dict[str, float] = {}
    for event in sorted(_events_of(recorded, pass_), key=lambda event: event.start):
        if event.stage in CALLER_STAGES:
            stages = spent.setdefault(event.layer, {})
            stages[event.stage] = stages.get(event.stage, 0.0) + event.seconds
            used[event.layer] = event.end
    for event in sorted(recorded, key=lambda event: event.start):
        if event.stage in _PROVIDERS and event.end <= used.get(event.layer, 0.0):
            spent[event.layer][event.stage] = event.seconds
    return spent


def _pass_figure(pass_: Pass, events: Sequence[Event], title: str, note: str) -> Any:
    from matplotlib.patches import Patch

    figure = empty_figure(_WIDTH, _HEIGHT)
    above, below = figure.subplots(2, 1, height_ratios=(1, 1.9))
    inside = _events_of(events, pass_)
    _timeline(above, pass_, inside)
    _bars(below, spent_by_layer(pass_, events))
    present = [stage for stage in COLOURS if any(event.stage == stage for event in inside)]
    handles = [Patch(color=COLOURS[stage], label=_STAGE_LABELS.get(stage, shown(stage))) for stage in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    put_title(figure, "\n".join(filter(None, (title, note))))
    return figure


def _timeline(axes: Any, pass_: Pass, events: Sequence[Event]) -> None:
    """Draw a lane for the disk, one for copies, one for the caller; x in milliseconds of the pass."""
    lanes = [(name, stages) for name, stages in _LANES if any(event.stage in stages for event in events)]
    for row, (_, stages) in enumerate(lanes):
        for stage in stages:
            spans = [_clip_to_pass(event, pass_) for event in events if event.stage == stage]
            axes.broken_barh(spans, (row - 0.36, 0.72), color=COLOURS[stage], edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, pass_.wall * 1e3)
    of_prompt = " of prompt" if pass_.kind == PROMPT else ""
    axes.set_xlabel(f"milliseconds of pass {pass_.number}, over {counted(pass_.tokens, 'token')}{of_prompt}")
    hide_frame(axes)


def _clip_to_pass(event: Event, pass_: Pass) -> tuple[float, float]:
    """Start and length in milliseconds of the part within the pass."""
    start, end = max(event.start - pass_.start, 0.0), min(event.end - pass_.start, pass_.wall)
    return start * 1e3, (end - start) * 1e3


def _bars(axes: Any, spent: Mapping[str, Mapping[str, float]]) -> None:
    """Draw two bars for each layer: the caller's times, stacked, and next to them those of the disk and the copies."""
    layers = list(spent)
    has_providers = any(stage in stages for stages in spent.values() for stage in _PROVIDERS)
    width = 0.4 if has_providers else 0.8
    for stages, shift in ((CALLER_STAGES, width / 2 if has_providers else 0.0), (_PROVIDERS, -width / 2)):
        colours = {stage: COLOURS[stage] for stage in stages}
        stack(axes.bar, [x + shift for x in range(len(layers))], width, [*spent.values()], colours, 1e-3)
    step = max(-(-len(layers) // _MAX_NAMES), 1)
    names = [layer.removeprefix("model.").removeprefix("transformer.") for layer in layers]
    axes.set_xticks(range(0, len(layers), step), names[::step], rotation=90, fontsize=8)
    axes.set_xlim(-0.6, len(layers) - 0.4)
    axes.set_ylabel("milliseconds")
    hide_frame(axes)


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


class DiskRecord:
    """Records the disk use from the events of a split, which several threads may send.

    Args:
        clock: returns seconds.

    Attributes:
        points: the measurements in order.
        shards: the used-up shards in order: seconds since the first measurement, and the shard's number.
        num_shards: of the split.
        label: of the source.
        source_bytes: size of the source.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._start: float | None = None
        self._source_left = self._limit = 0
        self.points: list[DiskSample] = []
        self.shards: list[tuple[float, int]] = []
        self.label, self.source_bytes, self.num_shards = "", 0, 0

    def __call__(self, event: progress.Event) -> None:
        with self._lock:
            match event:
                case progress.SplitStarted():
                    self.label, self.source_bytes = event.label, event.source_bytes
                    self._source_left = event.source_left_bytes
                    self.points = [replace(point, source_left_bytes=self._source_left) for point in self.points]
                case progress.DiskSampled():
                    self._limit = event.limit_bytes
                    self._add(event.disk_bytes)
                case progress.ShardDone():
                    self.num_shards = event.of
                    self._add(event.disk_bytes)  # before and after the deletion of the source's shard
                    self._source_left = event.source_left_bytes
                    self.shards.append((self._add(event.disk_bytes), event.number))

    def _add(self, disk_bytes: int) -> float:
        now = self._clock()
        self._start = now if self._start is None else self._start
        self.points.append(DiskSample(now - self._start, disk_bytes, self._source_left, self._limit))
        if len(self.points) > MAX_POINTS:
            self.points = thinned(self.points)
        return now - self._start

    @property
    def peak(self) -> DiskSample:
        """The first measurement with the maximum of source and split together."""
        return max(self.points, key=lambda point: point.total)


def thinned(points: Sequence[DiskSample]) -> list[DiskSample]:
    """Half of the points: of each two neighbours the one with more disk use; first and last are kept."""
    inner = points[1:-1]
    pairs = (inner[first : first + 2] for first in range(0, len(inner), 2))
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
    figure = empty_figure(_DISK_WIDTH, _DISK_HEIGHT)
    axes = figure.subplots()
    highest = max(peak.total, record.source_bytes)
    scale, unit = unit_of(highest)
    seconds = points[-1].seconds
    per, time_unit = [(1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours")][(seconds >= 180) + (seconds >= 3 * 3600)]
    times = [point.seconds / per for point in points]
    split, total, limits = (
        [nbytes / scale for nbytes in sizes]
        for sizes in zip(*((point.disk_bytes, point.total, point.limit_bytes) for point in points), strict=True)
    )
    area = {"linewidth": 0, "step": "post"}
    axes.fill_between(times, split, color=SPLIT_COLOUR, label="the split (layer files and downloaded shards)", **area)
    if total != split:
        axes.fill_between(times, split, total, color=SOURCE_COLOUR, label="the original shards", **area)
    whole = record.source_bytes / scale
    axes.axhline(whole, color=WHOLE_COLOUR, linestyle=":", linewidth=1.5, label="the whole checkpoint")
    if any(limits):
        axes.step(times, limits, LIMIT_COLOUR, where="post", linestyle="--", linewidth=1.5, label="limit of the split")
    axes.plot([peak.seconds / per], [peak.total / scale], "o", color="black", markersize=5, zorder=5)
    _shard_marks(axes, record, per)
    axes.set_xlim(0, max(times[-1], 1e-9))
    axes.set_ylim(0, 1.07 * min(max(*limits, highest / scale), MAX_AXIS * highest / scale))
    axes.set_xlabel(time_unit)
    axes.set_ylabel(f"{unit} on the disk")
    hide_frame(axes)
    took = f"{amount(record.source_bytes)} in {record.num_shards} shards, split in {duration(seconds)}"
    limit = f"; limit of the split {amount(min(filter(None, limits)) * scale)}" if any(limits) else ""
    label = record.label if len(record.label) <= MAX_LABEL else "…" + record.label[-MAX_LABEL:]
    put_title(figure, f"{label}\na checkpoint of {took}; peak {amount(peak.total)}{limit}", 10)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _shard_marks(axes: Any, record: DiskRecord, per: float) -> None:
    """Draw a thin line where each shard was used up, some of them with a number above."""
    end = record.points[-1].seconds
    labels_end = LABEL_WIDTH * end
    for seconds, shard in record.shards:
        axes.axvline(seconds / per, color="white", linewidth=0.8, alpha=0.8, zorder=1.5)
        axes.axvline(seconds / per, ymin=0.985, ymax=1.0, color="black", linewidth=0.8)
        if seconds >= labels_end:
            labels_end = seconds + NUMBER_DISTANCE * end
            axes.annotate(
                str(shard), (seconds / per, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=8
            )
    if record.shards:
        axes.annotate("shards used:", (0, 1.01), xycoords="axes fraction", ha="left", fontsize=8, color="#333333")
