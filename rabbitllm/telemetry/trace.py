"""Every single event of some passes, and a trace file for Perfetto and Chrome's tracing page.

The file has the JSON Object Format of Google's "Trace Event Format" (the document that Catapult's trace viewer
refers to): complete events ("ph": "X") with `ts` and `dur` in microseconds, and metadata events ("M") that name the
process and its threads.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.base.forks import own_lock
from rabbitllm.storage.durable import write_whole
from rabbitllm.telemetry.passes import Pass

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

    def add_pass(self, one: Pass, thread: str) -> None:
        """Record a pass of a thread."""
        with self._lock:
            self._passes.append((one, thread))

    @property
    def events(self) -> tuple[Event, ...]:
        """Events in the order in which they ended."""
        with self._lock:
            return tuple(self._events)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Passes in the order in which they ended."""
        with self._lock:
            return tuple(one for one, _ in self._passes)

    def write(self, path: str | Path) -> None:
        """Write a Chrome trace (JSON).

        Raises:
            OSError: the file cannot be written.
        """
        with self._lock:
            record = chrome_trace(tuple(self._events), tuple(self._passes), self.dropped)
        write_whole(Path(path), json.dumps(record).encode())


def chrome_trace(events: Sequence[Event], passes: Sequence[tuple[Pass, str]], dropped: int = 0) -> dict[str, Any]:
    """A Chrome trace as an object: passes with their layers' stages inside them, by thread.

    Args:
        events: events of layers.
        passes: each with the name of its thread.
        dropped: number of dropped earlier events, for `otherData`.
    """
    begin = min([event.start for event in events] + [one.start for one, _ in passes], default=0.0)
    threads: dict[str, int] = {}
    found = []
    for one, thread in passes:
        arguments = {"kind": one.kind, "tokens_in": one.tokens, "tokens_made": one.made, "limit": one.bottleneck}
        found.append(_complete(f"pass {one.number}", "pass", one.start - begin, one.wall, thread, threads, arguments))
    for event in events:
        name, arguments = f"{event.stage} {event.layer}", {"layer": event.layer, "bytes": event.nbytes}
        started = event.start - begin
        found.append(_complete(name, event.stage, started, event.seconds, event.thread, threads, arguments))
    # parents before their children, as viewers that read in order expect
    found.sort(key=lambda entry: (entry["ts"], -entry["dur"]))
    names = [_metadata("process_name", 0, "rabbitllm")]
    names += [_metadata("thread_name", number, name) for name, number in threads.items()]
    return {"traceEvents": names + found, "displayTimeUnit": "ms", "otherData": {"dropped_events": dropped}}


def _complete(
    name: str, category: str, start: float, seconds: float, thread: str, threads: dict[str, int], arguments: Any
) -> dict[str, Any]:
    number = threads.setdefault(thread, len(threads) + 1)
    # both ends in whole nanoseconds, so that rounding keeps events inside their parents
    ts, end = round(start * 1e9), round((start + seconds) * 1e9)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": ts / 1e3,
        "dur": (end - ts) / 1e3,
        "pid": _PROCESS,
        "tid": number,
        "args": arguments,
    }


def _metadata(name: str, thread: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PROCESS, "tid": thread, "args": {"name": value}}
