"""Where the time of each layer went, in a split and in a pass, and which stage is the limit.

Both halves of the package record here, so it lies below both. Thread-safe. When off, a stage costs one call that
returns at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

READ = "read"
QUANTISE = "quantise"
WRITE = "write"
SYNC = "sync"
SHARD_WAIT = "wait for shards"
READ_WAIT = "wait for disk"
UPLOAD = "copy to device"
PINNED_UPLOAD = "copy from page-locked RAM"
UPLOAD_WAIT = "wait for copies"
DEQUANTISE = "dequantise"
COMPUTE = "compute"
FETCH = "fetch"

HIDDEN_STAGES = frozenset({SHARD_WAIT})
"""Not work: the time between a layer's first tensor and its last. Listed, but never the bottleneck."""
OVERLAPPED_STAGES = frozenset({READ, UPLOAD, PINNED_UPLOAD})
"""Done in the background of a pass; what of it was not hidden shows as `READ_WAIT` and `UPLOAD_WAIT`."""


@dataclass(frozen=True, slots=True)
class Total:
    """What one stage took.

    Attributes:
        seconds: of all threads that were in it together, waiting included.
        count: number of records.
        nbytes: bytes moved.
        cpu_seconds: core-seconds of `seconds`; 0 where only the time was told.
        threads: that were in it.
    """

    seconds: float
    count: int
    nbytes: int
    cpu_seconds: float = 0.0
    threads: int = 1

    @property
    def busy_seconds(self) -> float:
        """How long it would keep its threads busy if they shared it evenly."""
        return self.seconds / self.threads

    def plus(self, other: Total) -> Total:
        """Both together; how many threads that were is not known from here."""
        return Total(
            self.seconds + other.seconds,
            self.count + other.count,
            self.nbytes + other.nbytes,
            self.cpu_seconds + other.cpu_seconds,
        )


_NOTHING = Total(0.0, 0, 0)


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
        self._threads: dict[str, set[int]] = {}

    def add(self, layer: str, stage: str, seconds: float, nbytes: int = 0, cpu_seconds: float = 0.0) -> None:
        """Record that `stage` of `layer` took `seconds` of the calling thread and moved `nbytes`."""
        if not self.enabled:
            return
        new = Total(seconds, 1, nbytes, cpu_seconds)
        with self._lock:
            self._records[layer, stage] = self._records.get((layer, stage), _NOTHING).plus(new)
            self._threads.setdefault(stage, set()).add(threading.get_ident())

    @contextlib.contextmanager
    def stage(self, layer: str, stage: str, nbytes: int = 0) -> Iterator[None]:
        """Record the time spent inside the context."""
        start, cpu_start = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.add(layer, stage, time.perf_counter() - start, nbytes, time.thread_time() - cpu_start)

    def clear(self) -> None:
        """Forget everything recorded."""
        with self._lock:
            self._records.clear()
            self._threads.clear()

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
        """stage -> total over all layers; the one that kept its threads busy longest first."""
        sums: dict[str, Total] = {}
        with self._lock:
            for (_, stage), total in self._records.items():
                sums[stage] = sums.get(stage, _NOTHING).plus(total)
            found = {stage: replace(total, threads=len(self._threads[stage])) for stage, total in sums.items()}
        return dict(sorted(found.items(), key=lambda item: -item[1].busy_seconds))

    @property
    def bottleneck(self) -> str | None:
        """The stage that kept its threads busy longest, among those that make the caller wait; None without any."""
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
        rows = [("stage", "busy s", "threads", "core s", "records", "mean ms", "GB/s", "")]
        for name, total in stages.items():
            rate = f"{total.nbytes / total.busy_seconds / 1e9:.2f}" if total.nbytes and total.seconds else ""
            mark = "<-- BOTTLENECK" if name == limit else ""
            mean = total.seconds / total.count * 1e3
            cores = f"{total.cpu_seconds:.3f}" if total.cpu_seconds else ""
            busy, threads = f"{total.busy_seconds:.3f}", str(total.threads)
            rows.append((name, busy, threads, cores, str(total.count), f"{mean:.2f}", rate, mark))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [self.title] if self.title else []
        for row in rows:
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)),
            ]
            lines.append("  ".join([*cells, row[-1]]).rstrip())
        if limit is not None:
            lines.append(f"Bottleneck: {limit} ({stages[limit].busy_seconds:.3f} s)")
        return "\n".join(lines)
