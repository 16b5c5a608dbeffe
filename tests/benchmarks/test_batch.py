"""The benchmark of many prompts: what is linear, what is compared with what, and the goals."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.batch.batch import (
    BatchRun,
    Case,
    against_ours,
    main,
    notes_on,
    of_linear,
    picture,
    tabulate,
)
from benchmarks.lib.worker import prompt
from tests.benchmarks.test_capped import needs_groups


def run(case: Case, tokens: int, seconds: float, turn: int = 0) -> BatchRun:
    return BatchRun(case.name, turn, seconds=seconds, new_tokens=tokens)


OURS = [Case("rabbitllm-2", number) for number in (1, 4, 16)]
PEER = Case("airllm-4.0.0", 4)
RUNS = [
    run(OURS[0], 10, 10.0),
    run(OURS[1], 40, 10.0),
    run(OURS[2], 160, 20.0),
    run(OURS[1], 40, 5.0, turn=1),
    run(PEER, 40, 40.0),
    BatchRun(PEER.name, 1, error="killed"),
]


def test_of_linear_is_within_a_turn() -> None:
    assert of_linear(RUNS, OURS[0]) == [1.0]
    assert of_linear(RUNS, OURS[1]) == [1.0]  # the second turn has no run of one prompt
    assert of_linear(RUNS, OURS[2]) == [0.5]


def test_compared_with_the_best_of_ours() -> None:
    assert against_ours(RUNS, PEER, (1, 4, 16)) == [1.0 / 8.0]


def test_table_notes_and_curves() -> None:
    cases = [*OURS, PEER]
    table = tabulate(RUNS, cases, 2)
    assert [row[0] for row in table.rows] == [case.name for case in cases]
    assert table.rows[3][1] == "1/2"
    notes = "\n".join(notes_on(RUNS, cases))
    assert "rabbitllm-2, 16 at once, of linear: 0.5 (at least 0.9): NOT reached" in notes
    assert "airllm-4.0.0, 4 at once failed: killed" in notes
    found = picture("title", RUNS, cases)
    assert found is not None
    drawn = {line["name"]: dict(line["points"]) for line in found["lines"]}
    assert drawn["rabbitllm-2"] == {1: 1.0, 4: 6.0, 16: 8.0}


@pytest.mark.parametrize("length", [16, 512])
def test_no_two_prompts_begin_alike(length: int) -> None:
    made = [prompt(number, length, 32000) for number in range(256)]
    assert len({one[0] for one in made}) == 256
    assert all(len(one) == length and max(one) < 32000 for one in made)


@pytest.mark.long
@needs_groups
def test_this_project_at_tiny_scale(tmp_path: Path) -> None:
    shape = ["--prompt-tokens", "24", "--tokens", "3", "--sequences", "1", "3", "--turns", "1"]
    given = ["--scale", "tiny", *shape, "--work-dir", str(tmp_path), "--only", "rabbitllm-2", "rabbitllm-2-4bit"]
    assert main([*given, "--results", str(tmp_path / "r")]) == 0
    text = (tmp_path / "r.md").read_text()
    for row in ("1 at once", "3 at once"):
        assert f"| rabbitllm-2, {row} | 1/1 |" in text
    assert (tmp_path / "r.svg").exists()
    assert not (tmp_path / "batch-run").exists()
