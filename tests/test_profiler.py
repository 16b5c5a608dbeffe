"""Where the time went: sums, the bottleneck, the report."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rabbitllm.profiler import COMPUTE, QUANTISE, READ, READ_WAIT, SHARD_WAIT, WRITE, Profiler, Total


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


def test_report_marks_the_bottleneck() -> None:
    profiler = Profiler(title="Split of x, by stage")
    profiler.add("layers.0", READ, 0.5, 10**9)
    profiler.add("layers.0", WRITE, 2.0, 10**9)
    profiler.add("layers.0", SHARD_WAIT, 9.0)
    title, head, *rows, limit = profiler.report().splitlines()
    assert (title, limit) == ("Split of x, by stage", "Bottleneck: write (2.000 s)")
    assert head.split("  ")[0] == "stage"
    assert [row.split()[0] for row in rows] == ["wait", "write", "read"]
    assert rows[1].split() == ["write", "2.000", "1", "2000.00", "0.50", "<--", "BOTTLENECK"]
    assert rows[2].split() == ["read", "0.500", "1", "500.00", "2.00"]


def test_report_of_nothing_says_how_to_get_one() -> None:
    assert Profiler(title="Passes").report() == "Passes: nothing was recorded (pass profiling_mode=True)."
    assert Profiler().report() == "(no profiling data)"
