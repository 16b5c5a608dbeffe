"""Where the time went: sums, the bottleneck, the report; and traces of real passes."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.errors import OptionError
from rabbitllm.telemetry.passes import (
    COMPUTE,
    FETCH,
    QUANTIZE,
    READ,
    READ_WAIT,
    SHARD_WAIT,
    UPLOAD,
    WRITE,
    PassInput,
    Total,
)
from rabbitllm.telemetry.profiler import Event, Profiler, Trace
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import INPUT, load, split


def test_records_add_up_by_layer_and_stage() -> None:
    profiler = Profiler()
    profiler.add("layers.0", READ, 1.0, 10)
    profiler.add("layers.0", READ, 0.5, 5)
    profiler.add("layers.1", READ, 0.25)
    profiler.add("layers.0", WRITE, 2.0, 7)
    assert profiler.layers == {
        "layers.0": {READ: Total(1.5, 2, 15), WRITE: Total(2.0, 1, 7)},
        "layers.1": {READ: Total(0.25, 1, 0)},
    }
    assert profiler.stages == {WRITE: Total(2.0, 1, 7), READ: Total(1.75, 3, 15)}
    assert list(profiler.stages) == [WRITE, READ]
    profiler.clear()
    assert (dict(profiler.layers), dict(profiler.stages), profiler.bottleneck) == ({}, {}, None)


def test_stage_measures_time_and_survives_an_exception() -> None:
    profiler = Profiler()

    def fail() -> None:
        with profiler.stage("norm", QUANTIZE, 3):
            time.sleep(0.02)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    total = profiler.layers["norm"][QUANTIZE]
    assert total.seconds >= 0.02
    assert (total.count, total.nbytes) == (1, 3)


def test_disabled_profiler_records_no_stage() -> None:
    profiler = Profiler(enabled=False)
    profiler.add("norm", READ, 1.0)
    with profiler.stage("norm", READ):
        pass
    assert profiler.layers == {}


def test_records_of_concurrent_threads() -> None:
    profiler = Profiler()
    with ThreadPoolExecutor(8) as pool:
        for index in range(4000):
            pool.submit(profiler.add, f"layers.{index % 3}", READ, 0.001, 2)
    assert sum(stages[READ].count for stages in profiler.layers.values()) == 4000
    assert profiler.stages[READ].nbytes == 8000


@pytest.mark.parametrize(
    ("seconds", "bottleneck"),
    [
        ({READ: 1.0, WRITE: 2.0}, WRITE),
        ({READ: 1.0, SHARD_WAIT: 50.0}, READ),  # a layer that waits for its shards costs no time
        ({READ: 9.0, COMPUTE: 2.0, READ_WAIT: 1.0}, COMPUTE),  # read in the background of a pass
        ({READ: 9.0, COMPUTE: 1.0, READ_WAIT: 2.0}, READ_WAIT),
        ({READ: 1.0, UPLOAD: 9.0, COMPUTE: 1.0, READ_WAIT: 2.0}, UPLOAD),  # what is waited for is the copy
        ({READ: 1.0, UPLOAD: 9.0, COMPUTE: 3.0, READ_WAIT: 2.0}, COMPUTE),
        ({SHARD_WAIT: 1.0}, None),
        ({}, None),
    ],
)
def test_bottleneck_is_the_longest_that_makes_the_caller_wait(
    seconds: dict[str, float], bottleneck: str | None
) -> None:
    profiler = Profiler()
    for stage, length in seconds.items():
        profiler.add("layers.0", stage, length)
    assert profiler.bottleneck == bottleneck


def test_stage_of_two_threads_is_the_limit_only_if_both_are_busy_longest() -> None:
    profiler = Profiler()
    barrier = threading.Barrier(2)

    def record() -> None:
        barrier.wait(600)
        profiler.add("layers.0", QUANTIZE, 3.0, 8)

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    profiler.add("layers.0", FETCH, 4.0)
    assert profiler.stages[QUANTIZE] == Total(6.0, 2, 16, threads=2)
    assert profiler.stages[QUANTIZE].busy_seconds == 3.0
    assert profiler.bottleneck == FETCH
    profiler.add("layers.1", QUANTIZE, 9.0)
    assert profiler.bottleneck == QUANTIZE


def test_report_marks_the_bottleneck() -> None:
    profiler = Profiler(title="Split of x, by stage")
    profiler.add("layers.0", READ, 0.5, 10**9)
    profiler.add("layers.0", WRITE, 2.0, 10**9)
    profiler.add("layers.0", SHARD_WAIT, 9.0)
    profile, waits = profiler.report().split("\n\n")
    title, head, *rows, limit = profile.splitlines()
    assert (title, limit) == ("Split of x, by stage", "Bottleneck: write (2.000 s)")
    assert [line.split() for line in waits.splitlines()] == [
        ["layer", "wait", "for", "shards,", "s"],
        ["layers.0", "9.000"],
    ]
    assert head.split("  ")[0] == "stage"
    assert [row.split()[0] for row in rows] == ["wait", "write", "read"]
    assert rows[1].split() == ["write", "2.000", "1", "1", "2000.00", "500", "MB/s", "<--", "BOTTLENECK"]
    assert rows[2].split() == ["read", "0.500", "1", "1", "500.00", "2.00", "GB/s"]


def test_report_has_core_seconds_where_they_were_measured() -> None:
    profiler = Profiler()
    with profiler.stage("layers.0", QUANTIZE, 10**6):
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
    core_seconds = profiler.stages[QUANTIZE].cpu_seconds
    assert 0.05 <= core_seconds <= profiler.stages[QUANTIZE].seconds + 0.001
    head, row, _ = profiler.report().splitlines()
    assert head.split("  ")[0] == "stage"
    assert row.split()[3] == f"{core_seconds:.3f}"


def test_empty_report_names_the_option() -> None:
    assert Profiler(False, "Passes").report() == "Passes: nothing was recorded (pass profiling_mode=True)."
    assert Profiler().report() == "Profile: nothing was recorded yet."


def test_earlier_steps_come_first_and_an_empty_one_not_at_all() -> None:
    split, load, passes = Profiler(title="Split"), Profiler(title="Load"), Profiler(title="Passes")
    passes.before = (split, load)
    load.add("layers.0", "load", 1.5)
    assert passes.report().startswith("Load\nstage")
    assert passes.report().endswith("Bottleneck: load (1.500 s)\n\nPasses: nothing was recorded yet.")
    assert [one["title"] for one in passes.as_json()["before"]] == ["Split", "Load"]
    passes.clear()
    assert passes.report() == "Passes: nothing was recorded yet."


# Passes


class Text:
    """Stands for a KV cache, of which the profiler wants nothing but that it is the same one."""


def make_pass(profiler: Profiler, entry: PassInput, text: Text | None = None, nbytes: int = 10) -> None:
    with profiler.forward(entry, text):
        profiler.add("layers.0", READ, 0.5, nbytes)
        profiler.add("layers.0", COMPUTE, 0.25)


def test_pass_has_stages_since_the_previous_one() -> None:
    profiler = Profiler()
    make_pass(profiler, PassInput(2, 7, 0, 1))
    profiler.add("layers.0", READ, 1.0, 5)  # ahead, for the next one
    start = time.perf_counter()
    make_pass(profiler, PassInput(2, 1, 7, 1))
    first, second = profiler.passes
    assert (first.number, first.kind, first.tokens, first.stages[READ]) == (1, "prompt", 14, Total(0.5, 1, 10))
    assert (second.number, second.kind, second.tokens, second.stages[READ]) == (2, "further", 2, Total(1.5, 2, 15))
    assert second.stages.keys() == {READ, COMPUTE}
    assert start <= second.start
    assert second.start + second.wall <= time.perf_counter()


def test_tokens_of_a_pass_are_known_at_the_next_one() -> None:
    profiler, text = Profiler(), Text()
    make_pass(profiler, PassInput(1, 7, 0, 1), text)
    make_pass(profiler, PassInput(1, 4, 7, 4), text)
    make_pass(profiler, PassInput(1, 4, 10, 4), text)
    make_pass(profiler, PassInput(1, 7, 0, 1), Text())
    make_pass(profiler, PassInput(1, 1, 7, 1), None)
    assert [step.made for step in profiler.passes] == [1, 3, None, None, None]


def test_cache_is_not_kept_alive() -> None:
    profiler, text = Profiler(), Text()
    make_pass(profiler, PassInput(1, 7, 0, 1), text)
    reference = weakref.ref(text)
    del text
    gc.collect()
    assert reference() is None


def test_dropped_passes_stay_in_the_sums() -> None:
    profiler, text = Profiler(kept_passes=3), Text()
    for index in range(8):
        make_pass(profiler, PassInput(1, 1, 7 + index, 1), text)
    assert [step.number for step in profiler.passes] == [6, 7, 8]
    further = profiler.sums["further"]
    assert (further.passes, further.tokens, further.made, further.made_passes) == (8, 8, 7, 7)
    assert further.stages[READ] == Total(4.0, 8, 80)
    profiler.clear()
    assert (profiler.passes, profiler.sums) == ((), {})


def test_nested_pass_is_part_of_the_outer_one() -> None:
    profiler = Profiler()
    with profiler.forward(PassInput(1, 7)):
        make_pass(profiler, PassInput(1, 1, 3))
    (step,) = profiler.passes
    assert (step.tokens, step.stages[READ].count) == (7, 1)


def test_failed_pass_is_recorded() -> None:
    profiler = Profiler()

    def fail() -> None:
        with profiler.forward(PassInput(1, 7)):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    make_pass(profiler, PassInput(1, 1, 7))
    assert [step.tokens for step in profiler.passes] == [7, 1]


def test_disabled_profiler_records_no_pass() -> None:
    profiler = Profiler(enabled=False)
    make_pass(profiler, PassInput(1, 1, 7))
    assert (profiler.passes, profiler.sums, profiler.as_json()["passes"]) == ((), {}, [])


def test_report_of_passes() -> None:
    profiler, text = Profiler(title="Passes, by stage"), Text()
    make_pass(profiler, PassInput(1, 30, 0, 1), text, 2 * 10**9)
    make_pass(profiler, PassInput(1, 4, 30, 4), text, 10**9)
    make_pass(profiler, PassInput(1, 4, 33, 4), text, 10**9)
    profiler.add("norm", COMPUTE, 0.001)
    stages, passes, layers = profiler.report().split("\n\n")
    assert stages.splitlines()[0] == "Passes, by stage"
    head, first, further = passes.splitlines()
    assert head.split("  ")[0] == "passes"
    assert first.split()[:3] == ["first", "token", "1"]
    assert first.split()[4:10] == ["30.0", "1.00", "2.00", "GB", "0.00", "MB"]
    assert further.split()[:3] == ["further", "tokens", "2"]
    assert further.split()[4:10] == ["4.0", "3.00", "1.00", "GB", "0.00", "MB"]
    assert further.endswith("compute")
    assert [line.split()[0] for line in layers.splitlines()] == ["slowest", "layers.0", "norm"]
    assert all(len(line) <= 80 for line in profiler.report().splitlines())


def test_report_of_a_split_has_no_passes() -> None:
    profiler = Profiler(title="Split of x, by stage")
    profiler.add("layers.0", READ, 0.5, 10**9)
    assert "\n\n" not in profiler.report()


def test_record_as_json() -> None:
    profiler, text = Profiler(title="Passes"), Text()
    profiler.in_place = {"cpu resident": 77}
    make_pass(profiler, PassInput(2, 30, 0, 1), text, 20)
    make_pass(profiler, PassInput(2, 1, 30, 1), text)
    record = json.loads(json.dumps(profiler.as_json()))
    fields = {"title", "bottleneck", "stages", "layers", "passes", "sums", "in_place_bytes", "before", "drafts"}
    assert record.keys() == fields
    assert record["drafts"] is None
    assert (record["title"], record["bottleneck"], record["in_place_bytes"]) == (
        "Passes",
        COMPUTE,
        {"cpu resident": 77},
    )
    total = {"seconds": 1.0, "busy_seconds": 1.0, "count": 2, "bytes": 30, "cpu_seconds": 0.0, "threads": 1}
    assert record["stages"][READ] == record["layers"]["layers.0"][READ] == total
    first, second = record["passes"]
    assert first.keys() == second.keys()
    keys = ("number", "kind", "tokens_in", "batch", "length", "past", "tokens_made")
    assert [first[name] for name in keys] == [1, "prompt", 60, 2, 30, 0, 2]
    assert (first["disk_bytes"], first["copied_bytes"], first["bottleneck"]) == (20, 0, COMPUTE)
    assert second["tokens_made"] is None
    sums = record["sums"]["further"]
    assert (sums["passes"], sums["tokens_in"], sums["disk_bytes"], sums["tokens_per_pass"]) == (1, 2, 10, None)
    assert sums["median_seconds"] == sums["seconds"] == second["seconds"]
    assert sums["overlap"] == pytest.approx(0.5 / second["seconds"])


# A trace: valid JSON, every event inside its pass, none across another's border


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
    content: dict[str, Any] = json.loads(path.read_text())
    return content


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


def test_events_of_layers_lie_within_their_pass(record: Mapping[str, Any], model: Any) -> None:
    events = complete(record)
    passes = [event for event in events if event["cat"] == "pass"]
    assert [event["name"] for event in passes] == [f"pass {n + 1}" for n in range(PASSES)]
    assert [event["args"]["kind"] for event in passes] == ["prompt"] + ["further"] * (PASSES - 1)
    units = [placed.unit for placed in model.placement.units]
    for step in passes:
        start, end = nanoseconds(step)
        inside = [e for e in events if e["cat"] == COMPUTE and start <= nanoseconds(e)[0] <= nanoseconds(e)[1] <= end]
        assert [event["args"]["layer"] for event in inside] == units
    stored = {placed.unit: placed.stored for placed in model.placement.units}
    reads = [event["args"] for event in events if event["cat"] == READ]
    assert reads
    assert all(arguments["bytes"] == stored[arguments["layer"]] for arguments in reads)


def test_no_event_is_kept_outside_a_trace(model: Any) -> None:
    with model.profiler.trace() as trace:
        pass
    with torch.inference_mode():
        model(INPUT)
    assert trace.events == ()
    assert trace.passes == ()


def test_oldest_events_are_dropped_first() -> None:
    profiler = Profiler()
    with profiler.trace(most_events=5) as trace:
        for index in range(8):
            profiler.add(f"layers.{index}", COMPUTE, 0.001)
    assert [event.layer for event in trace.events] == [f"layers.{n}" for n in range(3, 8)]
    assert trace.dropped == 3


def test_trace_of_a_disabled_profiler_is_refused() -> None:
    with pytest.raises(OptionError, match="profiling_mode=True"), Profiler(enabled=False).trace():
        pass


def test_empty_trace_is_valid(tmp_path: Path) -> None:
    Trace().write(tmp_path / "trace.json")
    assert complete(json.loads((tmp_path / "trace.json").read_text())) == []


def test_events_name_their_thread() -> None:
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
    (step,) = trace.passes
    assert inside(trace.events, step.start, step.start + step.wall) == [computed]


def inside(events: Sequence[Event], start: float, end: float) -> list[Event]:
    return [event for event in events if start <= event.start and event.end <= end]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.part"])
def test_a_file_that_is_no_trace_is_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(OptionError, match=f"{name} exists and is not a trace; it was not changed"):
        Trace().write(tmp_path / "trace.json")
    assert (tmp_path / name).read_bytes() == b"weights"
    (tmp_path / name).unlink()
    for _ in range(2):
        Trace().write(tmp_path / "trace.json")
