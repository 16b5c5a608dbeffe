"""The time of each layer, in a split and in a pass, and the stage that limits it; and traces of single events.

Splits and passes record here. Thread-safe. When off, a stage costs one call.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rabbitllm.base.forks import own_lock
from rabbitllm.base.terminal import Printed
from rabbitllm.errors import OptionError
from rabbitllm.storage.durable import require_kind, write_whole
from rabbitllm.telemetry._report import (
    drafts_record,
    expert_table,
    pass_record,
    pass_table,
    slowest_layers,
    stage_table,
    sums_record,
    totals_record,
    wait_table,
)
from rabbitllm.telemetry.passes import NOTHING, Drafts, Pass, PassInput, PassSums, Total, limit_of, sums_of

MAX_EVENTS = 100_000
MAX_PASSES = 1_000
_PROCESS = 1


@dataclass(frozen=True, slots=True)
class Event:
    """One execution of a stage of a layer.

    Attributes:
        start: start in seconds of `time.perf_counter`.
        seconds: duration.
        thread: name of its thread.
        layer, stage: the layer and the stage.
        nbytes: bytes moved.
    """

    start: float
    seconds: float
    thread: str
    layer: str
    stage: str
    nbytes: int

    @property
    def end(self) -> float:
        """End, in seconds of `time.perf_counter`."""
        return self.start + self.seconds


class Trace:
    """The last events and passes recorded while it was open; thread-safe.

    Args:
        most_events: limit; the oldest are dropped first.
    """

    def __init__(self, most_events: int = MAX_EVENTS) -> None:
        self._lock = own_lock(threading.Lock())
        self._events: deque[Event] = deque(maxlen=most_events)
        self._passes: deque[tuple[Pass, str]] = deque(maxlen=MAX_PASSES)
        self.dropped = 0

    def add(self, event: Event) -> None:
        """Record an event."""
        with self._lock:
            self.dropped += len(self._events) == self._events.maxlen
            self._events.append(event)

    def add_pass(self, step: Pass, thread: str) -> None:
        """Record a pass of a thread."""
        with self._lock:
            self._passes.append((step, thread))

    @property
    def events(self) -> tuple[Event, ...]:
        """Events in the order in which they ended."""
        with self._lock:
            return tuple(self._events)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Passes in the order in which they ended."""
        with self._lock:
            return tuple(step for step, _ in self._passes)

    def write(self, path: str | Path) -> None:
        """Write a Chrome trace (JSON); an existing trace is replaced.

        Raises:
            OptionError: a file of that name is no trace.
            OSError: the file cannot be written.
        """
        check_trace(path)
        with self._lock:
            record = chrome_trace(tuple(self._events), tuple(self._passes), self.dropped)
        write_whole(Path(path), json.dumps(record).encode())


def check_trace(path: str | Path) -> None:
    """Refuse to replace a file that is no trace.

    Raises:
        OptionError: there is one.
    """
    require_kind(Path(path), "is not a trace", b'{"traceEvents":')


def chrome_trace(events: Sequence[Event], passes: Sequence[tuple[Pass, str]], dropped: int = 0) -> dict[str, Any]:
    """A Chrome trace as an object: passes with their layers' stages inside them, by thread.

    It has the JSON Object Format of Google's "Trace Event Format": complete events ("ph": "X") with `ts` and `dur` in
    microseconds, and metadata events ("M") that name the process and its threads. Perfetto reads it too.

    Args:
        events: events of layers.
        passes: each with the name of its thread.
        dropped: number of dropped earlier events, for `otherData`.
    """
    begin = min([event.start for event in events] + [step.start for step, _ in passes], default=0.0)
    threads: dict[str, int] = {}
    records: list[dict[str, Any]] = []

    def add(name: str, category: str, start: float, seconds: float, thread: str, arguments: dict[str, Any]) -> None:
        # both ends in whole nanoseconds, so that rounding keeps events inside their parents
        ts, end = round((start - begin) * 1e9), round((start - begin + seconds) * 1e9)
        times = {"ts": ts / 1e3, "dur": (end - ts) / 1e3}
        place = {"pid": _PROCESS, "tid": threads.setdefault(thread, len(threads) + 1), "args": arguments}
        records.append({"name": name, "cat": category, "ph": "X", **times, **place})

    for step, thread in passes:
        arguments = {"kind": step.kind, "tokens_in": step.tokens, "tokens_made": step.made, "limit": step.bottleneck}
        add(f"pass {step.number}", "pass", step.start, step.wall, thread, arguments)
    for event in events:
        arguments = {"layer": event.layer, "bytes": event.nbytes}
        add(f"{event.stage} {event.layer}", event.stage, event.start, event.seconds, event.thread, arguments)
    # parents before their children, as viewers that read in order expect
    records.sort(key=lambda entry: (entry["ts"], -entry["dur"]))
    labels = [("process_name", 0, "rabbitllm"), *(("thread_name", tid, name) for name, tid in threads.items())]
    names = [
        {"name": label, "ph": "M", "pid": _PROCESS, "tid": tid, "args": {"name": name}} for label, tid, name in labels
    ]
    return {"traceEvents": names + records, "displayTimeUnit": "ms", "otherData": {"dropped_events": dropped}}


KEPT_PASSES = 1_000
"""Limit of passes that are kept individually, in about a megabyte; older ones are summed."""
_OFF = contextlib.nullcontext()


class Profiler(Printed):
    """Seconds and bytes by layer and stage, and by pass; prints as its report.

    Args:
        enabled: whether to record anything.
        title: first line of the report.
        kept_passes: limit of passes that are kept individually.

    Attributes:
        in_place: "device tier" -> stored bytes that each pass uses without moving them.
        before: profiles of earlier steps, which the report shows first: the split, the load.
    """

    def __init__(self, enabled: bool = True, title: str = "", kept_passes: int = KEPT_PASSES) -> None:
        self.enabled = enabled
        self.title = title
        self.in_place: Mapping[str, int] = {}
        self._lock = own_lock(threading.Lock())
        self._kept_passes = kept_passes
        self._trace: Trace | None = None
        self._is_open = False
        self._begin()

    def _begin(self) -> None:
        self.before: tuple[Profiler, ...] = ()
        self._records: dict[tuple[str, str], Total] = {}
        self._threads: dict[str, set[int]] = {}
        self._since: dict[str, Total] = {}
        self._since_threads: dict[str, set[int]] = {}
        self._passes: deque[Pass] = deque()
        self._earlier: dict[str, PassSums] = {}
        self._count = 0
        self._last_cache: Any = None
        self._drafts = Drafts()

    def add_drafts(self, drafts: Drafts) -> None:
        """Record what drafts brought in some passes."""
        if self.enabled:
            with self._lock:
                self._drafts = self._drafts.plus(drafts)

    @property
    def drafts(self) -> Drafts | None:
        """What drafts brought in all passes; None without any."""
        return self._drafts if self._drafts.passes else None

    def add(
        self,
        layer: str,
        stage: str,
        seconds: float,
        nbytes: int = 0,
        cpu_seconds: float = 0.0,
        count: int = 1,
        ended: float | None = None,
        thread: int | None = None,
    ) -> None:
        """Record that `stage` of `layer` took the last `seconds` of the calling thread and moved `nbytes`; or those
        until a time (`time.perf_counter`) of another thread, which has a number."""
        if not self.enabled:
            return
        trace = self._trace
        if trace is not None:
            now = time.perf_counter() if ended is None else ended
            name = threading.current_thread().name if thread is None else f"{stage} {thread:x}"
            trace.add(Event(now - seconds, seconds, name, layer, stage, nbytes))
        new, thread = Total(seconds, count, nbytes, cpu_seconds), threading.get_ident() if thread is None else thread
        with self._lock:
            self._records[layer, stage] = self._records.get((layer, stage), NOTHING).plus(new)
            self._since[stage] = self._since.get(stage, NOTHING).plus(new)
            self._threads.setdefault(stage, set()).add(thread)
            self._since_threads.setdefault(stage, set()).add(thread)

    def stage(self, layer: str, stage: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """Record the time spent inside the context."""
        return self._timed(layer, stage, nbytes) if self.enabled else _OFF

    @contextlib.contextmanager
    def _timed(self, layer: str, stage: str, nbytes: int) -> Iterator[None]:
        start, cpu_start = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.add(layer, stage, time.perf_counter() - start, nbytes, time.thread_time() - cpu_start)

    @contextlib.contextmanager
    def forward(self, entry: PassInput, text: Any = None) -> Iterator[None]:
        """Record the time inside the context as one pass. A nested or concurrent pass counts as part of it.

        Args:
            entry: its input.
            text: the KV cache. If the next pass has the same one, it continues the sequence, and the number of tokens
                that this pass made follows.
        """
        with self._lock:
            first = self.enabled and not self._is_open
            if first:
                self._is_open = True
                if text is not None and self._passes and self._last_cache is not None and self._last_cache() is text:
                    last = self._passes[-1]
                    self._passes[-1] = replace(last, made=last.entry.made(entry))
        start = time.perf_counter()
        try:
            yield
        finally:
            if first:
                self._close(entry, start, text)

    def _close(self, entry: PassInput, start: float, text: Any) -> None:
        wall = time.perf_counter() - start
        with self._lock:
            threads = self._since_threads
            stages = {stage: replace(total, threads=len(threads[stage])) for stage, total in self._since.items()}
            self._since, self._since_threads = {}, {}
            self._is_open = False
            self._count += 1
            step = Pass(self._count, start, wall, entry, None, stages)
            self._passes.append(step)
            self._last_cache = weakref.ref(text) if text is not None else None
            while len(self._passes) > self._kept_passes:
                self._earlier = sums_of([self._passes.popleft()], self._earlier)
        if self._trace is not None:
            self._trace.add_pass(step, threading.current_thread().name)

    @contextlib.contextmanager
    def trace(self, most_events: int = MAX_EVENTS) -> Iterator[Trace]:
        """A context manager that records each event inside it. `trace.write(path)` writes them as JSON for Perfetto.

        Args:
            most_events: number of events to keep; the last ones are kept.

        Raises:
            OptionError: the profiler is off.
        """
        if not self.enabled:
            raise OptionError("The profiler is off, so there are no events.", "Load with profiling_mode=True.")
        self._trace = trace = Trace(most_events)
        try:
            yield trace
        finally:
            self._trace = None

    def clear(self) -> None:
        """Drop all records."""
        with self._lock:
            self._begin()

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
        """stage -> total over all layers, by decreasing busy time."""
        sums: dict[str, Total] = {}
        with self._lock:
            for (_, stage), total in self._records.items():
                sums[stage] = sums.get(stage, NOTHING).plus(total)
            totals = {stage: replace(total, threads=len(self._threads[stage])) for stage, total in sums.items()}
        return dict(sorted(totals.items(), key=lambda item: -item[1].busy_seconds))

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The last passes, oldest first."""
        with self._lock:
            return tuple(self._passes)

    @property
    def sums(self) -> Mapping[str, PassSums]:
        """Kind of pass ("prompt", "further") -> sums of all of them."""
        with self._lock:
            return sums_of(self._passes, self._earlier)

    @property
    def bottleneck(self) -> str | None:
        """The stage with the longest busy time among those that make the caller wait; None without any."""
        return limit_of(self.stages)

    def report(self) -> str:
        """A report as text: the stages with the bottleneck marked, the passes, and their slowest layers.

        A split's report has the time between the first and the last tensor of each layer that lies in several shards.
        """
        earlier = [f"{profile.report()}\n\n" for profile in self.before if profile.stages]
        return "".join([*earlier, self._own_report()])

    def _own_report(self) -> str:
        stages = self.stages
        if not stages:
            why = "yet" if self.enabled else "(pass profiling_mode=True)"
            return f"{self.title or 'Profile'}: nothing was recorded {why}."
        lines = stage_table(stages, self.title) + wait_table(self.layers)
        if self.sums:
            experts = expert_table(self.sums)
            lines += ["", *pass_table(self.sums, self.passes), *(["", *experts] if experts else [])]
            lines += [f"Drafts: {self.drafts.words()}"] if self.drafts else []
            lines += ["", *slowest_layers(self.layers)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.report()

    def as_json(self) -> dict[str, Any]:
        """All records as one object for `json.dumps`; its fields are described in `telemetry/_report.py`."""
        passes = self.passes
        return {
            "title": self.title,
            "bottleneck": self.bottleneck,
            "stages": totals_record(self.stages),
            "layers": {layer: totals_record(totals) for layer, totals in self.layers.items()},
            "passes": [pass_record(step) for step in passes],
            "sums": {kind: sums_record(kind, total, passes) for kind, total in self.sums.items()},
            "in_place_bytes": dict(self.in_place),
            "drafts": drafts_record(self.drafts),
            "before": [profile.as_json() for profile in self.before],
        }
