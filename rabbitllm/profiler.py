"""Where the time of each layer went, in a split and in a pass, and which stage is the limit.

Both halves of the package record here, so it lies below both. Thread-safe. When off, a stage costs one call that
returns at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

READ = "read"
QUANTISE = "quantise"
WRITE = "write"
SHARD_WAIT = "wait for shards"
READ_WAIT = "wait for disk"
UPLOAD = "copy to device"
DEQUANTISE = "dequantise"
COMPUTE = "compute"
FETCH = "fetch"

HIDDEN_STAGES = frozenset({SHARD_WAIT})
"""Not work: the time between a layer's first tensor and its last. Listed, but never the bottleneck."""
OVERLAPPED_STAGES = frozenset({READ})
"""Done in the background of a pass; what of it was not hidden shows as `READ_WAIT`."""


@dataclass(frozen=True, slots=True)
class Total:
    """What one stage took over all layers: seconds, number of records, bytes."""

    seconds: float
    count: int
    nbytes: int


class Profiler:
    """Seconds and bytes by layer and stage.

    Args:
        enabled: record anything at all.
        title: first line of the report.
    """

    def __init__(self, enabled: bool = True, title: str = "") -> None:
        self.enabled = enabled
        self.title = title
        self._lock = threading.Lock()
        self._records: dict[tuple[str, str], Total] = {}

    def add(self, layer: str, stage: str, seconds: float, nbytes: int = 0) -> None:
        """Record that `stage` of `layer` took `seconds` and moved `nbytes`."""
        if not self.enabled:
            return
        with self._lock:
            old = self._records.get((layer, stage), Total(0.0, 0, 0))
            self._records[layer, stage] = Total(old.seconds + seconds, old.count + 1, old.nbytes + nbytes)

    @contextlib.contextmanager
    def stage(self, layer: str, stage: str, nbytes: int = 0) -> Iterator[None]:
        """Record the time spent inside the context."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(layer, stage, time.perf_counter() - start, nbytes)

    def clear(self) -> None:
        """Forget everything recorded."""
        with self._lock:
            self._records.clear()

    @property
    def layers(self) -> Mapping[str, Mapping[str, Total]]:
        """layer -> stage -> total, layers in the order of their first record."""
        table: dict[str, dict[str, Total]] = {}
        with self._lock:
            for (layer, stage), total in self._records.items():
                table.setdefault(layer, {})[stage] = total
        return table

    @property
    def stages(self) -> Mapping[str, Total]:
        """stage -> total over all layers, longest first."""
        sums: dict[str, Total] = {}
        with self._lock:
            for (_, stage), total in self._records.items():
                old = sums.get(stage, Total(0.0, 0, 0))
                sums[stage] = Total(old.seconds + total.seconds, old.count + total.count, old.nbytes + total.nbytes)
        return dict(sorted(sums.items(), key=lambda item: -item[1].seconds))

    @property
    def bottleneck(self) -> str | None:
        """The stage that took longest, among those that make the caller wait; None if nothing was recorded."""
        stages = self.stages
        blocking = [s for s in stages if s not in HIDDEN_STAGES]
        if READ_WAIT in stages or COMPUTE in stages:
            blocking = [s for s in blocking if s not in OVERLAPPED_STAGES]
        return blocking[0] if blocking else None

    def report(self) -> str:
        """A table of the stages, the bottleneck marked, as text."""
        stages = self.stages
        if not stages:
            return (
                f"{self.title}: nothing was recorded (pass profiling_mode=True)."
                if self.title
                else "(no profiling data)"
            )
        limit = self.bottleneck
        rows = [("stage", "total s", "records", "mean ms", "GB/s", "")]
        for name, total in stages.items():
            rate = f"{total.nbytes / total.seconds / 1e9:.2f}" if total.nbytes and total.seconds else ""
            mark = "<-- BOTTLENECK" if name == limit else ""
            mean = total.seconds / total.count * 1e3
            rows.append((name, f"{total.seconds:.3f}", str(total.count), f"{mean:.2f}", rate, mark))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [self.title] if self.title else []
        for row in rows:
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:5], widths[1:5], strict=True)),
            ]
            lines.append("  ".join([*cells, row[5]]).rstrip())
        if limit is not None:
            lines.append(f"Bottleneck: {limit} ({stages[limit].seconds:.3f} s)")
        return "\n".join(lines)
