"""The benchmark of shared system prompts: what it asks, counts and compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serve import shared_prompt
from benchmarks.serve.shared_prompt import ALIKE, APART, LEFT, SharedRun
from tests.benchmarks.test_capped import needs_groups


def test_what_is_shared_by_the_prompts_of_each_row() -> None:
    for row in (ALIKE, LEFT, APART):
        texts = [body["prompt"].split() for body in shared_prompt.bodies(row, 3, 1000)]
        assert [len(text) for text in texts] == [1016] * 4
        systems = {tuple(text[:1000]) for text in texts}
        assert len(systems) == (4 if row == APART else 1)
        assert len({tuple(text[1000:]) for text in texts}) == 4
        assert len({text[0] for text in texts}) > 1 if row == APART else True


def test_tokens_are_counted_as_the_server_says() -> None:
    text = '# HELP x y\nrabbitllm_prompt_tokens_total 12\nrabbitllm_kept_tokens_total 5.0\nother{a="b c"} 1\n'
    assert shared_prompt.counted(text) == (12, 5)


def test_rows_compared_with_the_one_that_shares_nothing() -> None:
    runs = [SharedRun(row, 0, computed_tokens=count) for row, count in ((ALIKE, 50), (LEFT, 10), (APART, 100))]
    assert shared_prompt.compared(runs, lambda run: run.computed_tokens) == {ALIKE: 0.5, LEFT: 0.1}
    assert shared_prompt.compared(runs[:2], lambda run: run.computed_tokens) == {ALIKE: None, LEFT: None}


@pytest.mark.long
@needs_groups
def test_a_shared_prompt_is_computed_once_at_tiny_scale(tmp_path: Path) -> None:
    given = ["--scale", "tiny", "--turns", "1", "--clients", "2", "--work-dir", str(tmp_path)]
    assert shared_prompt.main([*given, "--results", str(tmp_path / "r")]) == 0
    text = (tmp_path / "r.md").read_text()
    for row, computed in ((ALIKE, 1032), (LEFT, 32), (APART, 2032)):
        assert f"| {row} | 1/1 | 2032 (2032-2032) | {computed} ({computed}-{computed}) |" in text
