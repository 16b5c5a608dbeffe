"""The benchmark of several processes: what is compared with what, and that it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale import pipeline
from benchmarks.scale.pipeline import ALONE, FREE, PipelineRun, row_name
from tests.benchmarks.test_capped import needs_groups


def test_several_are_compared_with_one_under_the_same_cap() -> None:
    rows: dict[str, tuple[int, int | None]] = {FREE: (1, None)}
    rows |= {row_name(ALONE, 65): (1, 65), row_name("2 processes", 65): (2, 65), row_name("2 processes", 20): (2, 20)}
    runs = [
        PipelineRun(FREE, 0, token_seconds=0.1, tokens=[1, 2]),
        PipelineRun("1 process, 65 %", 0, token_seconds=0.6, streamed=500, tokens=[1, 2]),
        PipelineRun("2 processes, 65 %", 0, token_seconds=0.2, spans=[3, 4], tokens=[1, 2]),
        PipelineRun("2 processes, 20 %", 0, token_seconds=0.9, streamed=9, spans=[3, 4], tokens=[1, 3]),
    ]
    lines = {line[0]: line[2:] for line in pipeline.tabulate(runs, rows, 1).rows}
    assert lines["2 processes, 65 %"][0] == "3+4"
    assert lines["2 processes, 65 %"][4].startswith("3.00")
    assert [lines[row][5] for row in rows] == ["yes", "yes", "yes", "NO"]
    goals = [note for note in pipeline.notes_on(runs, rows) if "beside one that streams" in note]
    assert len(goals) == 1  # of those that keep all of it
    assert goals[0].startswith("2 processes, 65 %")
    assert "reached" in goals[0]


@pytest.mark.long
@needs_groups
def test_at_tiny_scale(tmp_path: Path) -> None:
    given = ["--scale", "tiny", "--turns", "1", "--tokens", "4", "--shares", "50", "--only", "1 process", "2 processes"]
    assert pipeline.main([*given, "--work-dir", str(tmp_path), "--results", str(tmp_path / "r")]) == 0
    text = (tmp_path / "r.md").read_text()
    assert all(f"| {row} | 1/1 |" in text for row in (FREE, "1 process, 50 %", "2 processes, 50 %"))
    assert " NO |" not in text
    assert not (tmp_path / "pipeline-run").exists()
