"""The benchmark of scoring: what is asked, what is compared with what, and a rehearsal."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.batch import score
from benchmarks.batch.score import CHOICES, OURS, RESIDENT, ScoreRun, alike, notes_on, of_the_sum, questions_for
from tests.benchmarks.test_capped import needs_groups


def run(row: str, seconds: float, read_seconds: float = 0.0, logprobs: tuple[float | None, ...] = ()) -> ScoreRun:
    return ScoreRun(row, 0, seconds=seconds, read_seconds=read_seconds, logprobs=logprobs)


def test_questions_are_the_same_each_time_and_begin_alike() -> None:
    questions = questions_for(1000, 5, 30)
    assert questions == questions_for(1000, 5, 30)
    assert len({tuple(one["context"][:30]) for one in questions}) == 1
    assert len({tuple(one["context"]) for one in questions}) == 5
    assert all(len(one["choices"]) == CHOICES and all(one["choices"]) for one in questions)


def test_of_reading_and_computing() -> None:
    runs = [run(RESIDENT, 8.0), run(OURS, 11.0, read_seconds=2.0)]
    found = of_the_sum(runs, OURS)
    assert found is not None
    assert found.median == 1.1
    assert any("1.1 (at most 1.2): reached" in note for note in notes_on(runs, [OURS]))


def test_sums_that_are_alike() -> None:
    runs = [run(RESIDENT, 1.0, logprobs=(-3.0, -5.0))]
    assert alike([*runs, run(OURS, 1.0, logprobs=(-3.1, -5.0))], OURS) == [True]
    assert alike([*runs, run(OURS, 1.0, logprobs=(-3.1, -6.0))], OURS) == [False]
    assert alike([*runs, run(OURS, 1.0, logprobs=(None, -5.0))], OURS) == [True]


@pytest.mark.long
@needs_groups
def test_at_tiny_scale(tmp_path: Path) -> None:
    given = ["--scale", "tiny", "--turns", "1", "--questions", "10", "--shared", "60", "--work-dir", str(tmp_path)]
    assert score.main([*given, "--results", str(tmp_path / "r"), "--only", RESIDENT, OURS]) == 0
    text = (tmp_path / "r.md").read_text()
    assert f"| {RESIDENT} | 1/1 |" in text
    assert f"| {OURS} | 1/1 |" in text
    assert not (tmp_path / "score-run").exists()
