"""Where the time went: sums, the bottleneck, the report."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rabbitllm.profiler import COMPUTE, FETCH, QUANTISE, READ, READ_WAIT, SHARD_WAIT, WRITE, Profiler, Total


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
        with profiler.stage("norm", QUANTISE, 3):
            time.sleep(0.02)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    total = profiler.layers["norm"][QUANTISE]
    assert total.seconds >= 0.02
    assert (total.count, total.nbytes) == (1, 3)


def test_nothing_is_recorded_when_off() -> None:
    profiler = Profiler(enabled=False)
    profiler.add("norm", READ, 1.0)
    with profiler.stage("norm", READ):
        pass
    assert profiler.layers == {}


def test_threads_lose_no_record() -> None:
    profiler = Profiler()
    with ThreadPoolExecutor(8) as pool:
        for number in range(4000):
            pool.submit(profiler.add, f"layers.{number % 3}", READ, 0.001, 2)
    assert sum(stages[READ].count for stages in profiler.layers.values()) == 4000
    assert profiler.stages[READ].nbytes == 8000


@pytest.mark.parametrize(
    ("seconds", "bottleneck"),
    [
        ({READ: 1.0, WRITE: 2.0}, WRITE),
        ({READ: 1.0, SHARD_WAIT: 50.0}, READ),  # a layer that waits for its shards costs no time
        ({READ: 9.0, COMPUTE: 2.0, READ_WAIT: 1.0}, COMPUTE),  # read in the background of a pass
        ({READ: 9.0, COMPUTE: 1.0, READ_WAIT: 2.0}, READ_WAIT),
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
    both = threading.Barrier(2)

    def record() -> None:
        both.wait(10)
        profiler.add("layers.0", QUANTISE, 3.0, 8)

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    profiler.add("layers.0", FETCH, 4.0)
    assert profiler.stages[QUANTISE] == Total(6.0, 2, 16, threads=2)
    assert profiler.stages[QUANTISE].busy_seconds == 3.0
    assert profiler.bottleneck == FETCH
    profiler.add("layers.1", QUANTISE, 9.0)
    assert profiler.bottleneck == QUANTISE


def test_report_marks_the_bottleneck() -> None:
    profiler = Profiler(title="Split of x, by stage")
    profiler.add("layers.0", READ, 0.5, 10**9)
    profiler.add("layers.0", WRITE, 2.0, 10**9)
    profiler.add("layers.0", SHARD_WAIT, 9.0)
    title, head, *rows, limit = profiler.report().splitlines()
    assert (title, limit) == ("Split of x, by stage", "Bottleneck: write (2.000 s)")
    assert head.split("  ")[0] == "stage"
    assert [row.split()[0] for row in rows] == ["wait", "write", "read"]
    assert rows[1].split() == ["write", "2.000", "1", "1", "2000.00", "0.50", "<--", "BOTTLENECK"]
    assert rows[2].split() == ["read", "0.500", "1", "1", "500.00", "2.00"]


def test_report_has_core_seconds_where_they_were_measured() -> None:
    profiler = Profiler()
    with profiler.stage("layers.0", QUANTISE, 10**6):
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
    core_seconds = profiler.stages[QUANTISE].cpu_seconds
    assert 0.05 <= core_seconds <= profiler.stages[QUANTISE].seconds + 0.001
    head, row, _ = profiler.report().splitlines()
    assert head.split("  ")[0] == "stage"
    assert row.split()[3] == f"{core_seconds:.3f}"


def test_report_of_nothing_says_how_to_get_one() -> None:
    assert Profiler(title="Passes").report() == "Passes: nothing was recorded (pass profiling_mode=True)."
    assert Profiler().report() == "(no profiling data)"
