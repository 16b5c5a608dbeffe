"""Of every type that can be scored, the head makes of kept rows what the model itself makes of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rabbitllm.evaluation.compare import compare
from rabbitllm.generation._packed_batch import PACKABLE
from rabbitllm.generation.scoring import Room, ScoredText
from rabbitllm.generation.scoring.score import FILLABLE
from tests.generation.scoring.compared_with_plain import alone, texts_for
from tests.generation.test_packed_batch import ALONE, checkpoint
from tests.support.tiny_models import load, one_thread, split  # noqa: F401  a fixture that applies by itself


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(ALONE | (FILLABLE - PACKABLE)))
def test_comparison_with_itself_equals_single_scores(tmp_path: Path, name: str) -> None:
    model = load(split(checkpoint(tmp_path / "model", name)), 60_000, exact=False)
    with_continuation = [text for text in texts_for() if text.continuation]
    texts = [ScoredText(index, text.context, text.continuation) for index, text in enumerate(with_continuation)]
    expected = [alone(model, text) for text in texts]
    summary = compare(model, model, texts, Room(tokens=40, memory_bytes=0, disk_bytes=1 << 30, scratch=tmp_path))
    assert (summary.divergence.largest, summary.agreement) == (0, 1)
    total = math.fsum(result.logprob or 0 for result in expected)
    assert math.log(summary.perplexity) == pytest.approx(-total / summary.positions, abs=1e-4)
