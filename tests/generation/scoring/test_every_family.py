"""Every type that may be padded, and every one with shared prefixes, scores texts together as it does each alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rabbitllm.generation._packed_batch import PACKABLE
from rabbitllm.generation.scoring import Room
from rabbitllm.generation.scoring.micro_batches import TextLayout
from rabbitllm.generation.scoring.score import FILLABLE, layout_of
from tests.generation.scoring.compared_with_plain import alone, assert_alike, scored, texts_for
from tests.generation.test_packed_batch import ALONE, checkpoint
from tests.support.tiny_models import load, split

STATES = FILLABLE - PACKABLE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt2" else pytest.mark.long) for name in sorted(ALONE | STATES)]
)
def test_scores_are_those_of_each_text_alone(tmp_path: Path, name: str) -> None:
    """Compared with the same streamed model, whose bits other tests compare; all waiting activations are offloaded."""
    model = load(split(checkpoint(tmp_path / "model", name)), 60_000, exact=False)
    assert layout_of(model, exact=False) is (TextLayout.FILLED if name in STATES else TextLayout.PACKED)
    texts = texts_for()
    expected = [alone(model, text) for text in texts]
    room = Room(tokens=40, memory_bytes=0, disk_bytes=1 << 30, scratch=tmp_path)
    assert_alike(scored(model, texts, room), expected)
    results = scored(model, texts, Room(exact=True))
    assert [results[result.index] for result in expected] == expected
