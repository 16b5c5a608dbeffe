"""A trace of real passes: valid JSON, every event inside its pass, none across another's border."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.errors import OptionError
from rabbitllm.telemetry.passes import PassInput
from rabbitllm.telemetry.profiler import COMPUTE, READ, READ_WAIT, Profiler
from rabbitllm.telemetry.trace import Event, Trace
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import INPUT, load, split

PASSES = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(split(build_checkpoint(tmp_path_factory.mktemp("model"), "llama", shards=2)), 0, profiling=True)


@pytest.fixture(scope="module")
def record(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Perfetto would read."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with torch.inference_mode(), model.profiler.trace() as trace:
        model.generate(INPUT, max_new_tokens=PASSES, min_new_tokens=PASSES, do_sample=False)
    trace.write(path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def complete(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [event for event in record["traceEvents"] if event["ph"] == "X"]


def nanoseconds(event: Mapping[str, Any]) -> tuple[int, int]:
    return round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)


def test_events_are_complete_and_threads_have_names(record: Mapping[str, Any]) -> None:
    events = complete(record)
    assert len(events) + 3 == len(record["traceEvents"])
    for event in events:
        assert event.keys() == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    names = {e["tid"]: e["args"]["name"] for e in record["traceEvents"] if e["name"] == "thread_name"}
    assert set(names) == {event["tid"] for event in events}
    assert sorted(names.values()) == ["MainThread", "read-cpu_0"]
    by_thread = {names[tid]: {e["cat"] for e in events if e["tid"] == tid} for tid in names}
    assert by_thread == {"MainThread": {"pass", READ_WAIT, COMPUTE}, "read-cpu_0": {READ}}
    assert record["otherData"] == {"dropped_events": 0}


def test_events_of_a_thread_follow_or_contain_each_other(record: Mapping[str, Any]) -> None:
    events = complete(record)
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    for tid in {event["tid"] for event in events}:
        ends: list[int] = []
        for event in (e for e in events if e["tid"] == tid):
            start, end = nanoseconds(event)
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or end <= ends[-1], event
            ends.append(end)


def test_every_pass_has_its_layers_inside(record: Mapping[str, Any], model: Any) -> None:
    events = complete(record)
    passes = [event for event in events if event["cat"] == "pass"]
    assert [event["name"] for event in passes] == [f"pass {n + 1}" for n in range(PASSES)]
    assert [event["args"]["kind"] for event in passes] == ["prompt"] + ["further"] * (PASSES - 1)
    units = [placed.unit for placed in model.placement.units]
    for one in passes:
        start, end = nanoseconds(one)
        inside = [e for e in events if e["cat"] == COMPUTE and start <= nanoseconds(e)[0] <= nanoseconds(e)[1] <= end]
        assert [event["args"]["layer"] for event in inside] == units
    stored = {placed.unit: placed.stored for placed in model.placement.units}
    reads = [event["args"] for event in events if event["cat"] == READ]
    assert reads
    assert all(arguments["bytes"] == stored[arguments["layer"]] for arguments in reads)


def test_nothing_is_kept_outside_of_a_trace(model: Any) -> None:
    with model.profiler.trace() as trace:
        pass
    with torch.inference_mode():
        model(INPUT)
    assert trace.events == ()
    assert trace.passes == ()


def test_the_oldest_events_go_first() -> None:
    profiler = Profiler()
    with profiler.trace(most_events=5) as trace:
        for number in range(8):
            profiler.add(f"layers.{number}", COMPUTE, 0.001)
    assert [event.layer for event in trace.events] == [f"layers.{n}" for n in range(3, 8)]
    assert trace.dropped == 3


def test_a_trace_of_a_profiler_that_is_off_is_refused() -> None:
    with pytest.raises(OptionError, match="profiling_mode=True"), Profiler(enabled=False).trace():
        pass


def test_an_empty_trace_is_valid(tmp_path: Path) -> None:
    Trace().write(tmp_path / "trace.json")
    assert complete(json.loads((tmp_path / "trace.json").read_text())) == []


def test_threads_are_told_apart() -> None:
    profiler = Profiler()

    def record_one() -> None:
        profiler.add("layers.0", READ, 0.5, 7)

    with profiler.trace() as trace:
        thread = threading.Thread(target=record_one, name="reader")
        thread.start()
        thread.join()
        with profiler.forward(PassInput(1, 1)), profiler.stage("layers.0", COMPUTE):
            pass
    read, computed = trace.events
    assert (read.thread, read.seconds, read.nbytes) == ("reader", 0.5, 7)
    assert isinstance(computed, Event)
    (one,) = trace.passes
    assert inside(trace.events, one.start, one.start + one.wall) == [computed]


def inside(events: Sequence[Event], start: float, end: float) -> list[Event]:
    return [event for event in events if start <= event.start and event.end <= end]
