"""What answers took, as the difference of two states of a profiler that records."""

from __future__ import annotations

from rabbitllm.generation.session import AnswerWork, work_between
from rabbitllm.telemetry.passes import PassInput
from rabbitllm.telemetry.profiler import EXPERTS_READ, READ, UPLOAD, Profiler


def test_only_what_came_since_counts() -> None:
    profiler = Profiler()
    record(profiler, PassInput(1, 9, 0, 1), {READ: 100})
    before = profiler.sums
    record(profiler, PassInput(1, 4, 9, 1), {READ: 30, UPLOAD: 30})
    record(profiler, PassInput(1, 1, 13, 1), {READ: 20, EXPERTS_READ: 7})
    record(profiler, PassInput(1, 1, 14, 1), {READ: 20, EXPERTS_READ: 7})
    got = work_between(before, profiler.sums)
    assert got == AnswerWork(3, 6, {READ: 70, UPLOAD: 30}, {EXPERTS_READ: 2})
    assert work_between({}, profiler.sums).tokens == 15
    assert got.plus(got) == AnswerWork(6, 12, {READ: 140, UPLOAD: 60}, {EXPERTS_READ: 4})


def test_without_a_profiler_there_is_nothing() -> None:
    assert work_between({}, Profiler(enabled=False).sums) == AnswerWork()


def record(profiler: Profiler, entry: PassInput, moved: dict[str, int]) -> None:
    with profiler.forward(entry):
        for stage, nbytes in moved.items():
            profiler.add("layers.0", stage, 0.1, nbytes)
