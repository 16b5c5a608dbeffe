"""The benchmark of drafts, in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.decode.drafts import (
    MODEL,
    PEER,
    PEER_MODEL,
    PLAIN,
    PLAIN_INSIDE,
    ROWS,
    WRONG,
    WRONG_INSIDE,
    Answer,
    main,
    rates,
)
from tests.support.always_drafts import always_drafts  # noqa: F401  a fixture that applies by itself


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    demo = str(Path(__file__).resolve().parents[2] / "rabbitllm" / "demo" / "model")
    assert main(["--smallest", "--draft", demo]) == 0
    lines = {line.partition("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    for row in ROWS:
        assert (f"{row}, prose, 0.7" in lines) == (row not in (PEER, PEER_MODEL))
    # the same model as the draft, and one that is never right
    assert "100%" in lines[f"{MODEL}, code, 0.0"]
    for row in (WRONG, WRONG_INSIDE):
        assert lines[f"{row}, code, 0.0"].split()[-1] == "0%"
        assert any(line.startswith(f"{row}, of the rate without a draft: ") for line in lines.values())
    assert any("equal to those without a draft: 8 of 8" in line for line in lines)


def test_rates_are_those_of_the_same_turn() -> None:
    def of(row: str, turn: int, seconds: float) -> Answer:
        return Answer(row, "code", 0.0, turn, seconds, 7, 8)

    answers = [of(PLAIN, 1, 4.0), of(PLAIN, 2, 2.0), of(WRONG, 1, 5.0), of(WRONG, 2, 1.0), of(WRONG, 3, 1.0)]
    assert rates(answers, answers[2:]) == pytest.approx([0.8, 2.0])
    # in memory beside that in memory, and llama.cpp's beside its own
    inside, peers = [of(PLAIN_INSIDE, 1, 1.0), of(WRONG_INSIDE, 1, 2.0)], [of(PEER, 1, 8.0), of(PEER_MODEL, 1, 2.0)]
    assert rates([*answers, *inside, *peers], [inside[1], *peers]) == pytest.approx([0.5, 0.5, 4.0])
