"""Every model type whose texts go through the model side by side has the logits that each text has alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rabbitllm.batching.packed_families import PACKABLE, can_be_packed
from tests.batching.together import LENGTHS, alone, assert_alike, forwards, prompts, together
from tests.engine.test_every_architecture import build
from tests.support.builders import FAMILIES, Family, build_checkpoint
from tests.support.hybrid_families import HYBRIDS, WINDOW
from tests.support.tiny_models import load, split

SHORT = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3")
"""Keys and values alone, windows beside them, attention by the model's own function, and latent attention."""
SETTINGS: dict[str, Family] = {family.model_type: family for family in (*FAMILIES.values(), *HYBRIDS.values())}
"""Where there are some in which windows are shorter than prompts; of the others those of the sweep are taken."""


def checkpoint(folder: Path, name: str) -> Path:
    family = SETTINGS.get(name)
    if family is None:
        build(folder, name)
        return folder
    return build_checkpoint(folder, family, tied=family.ties[0])


def test_prompts_are_longer_than_windows() -> None:
    assert sorted(LENGTHS)[1] > WINDOW


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in sorted(PACKABLE)]
)
def test_side_by_side(tmp_path: Path, name: str) -> None:
    directory = split(checkpoint(tmp_path / "model", name))
    for budget in (0,) if name in SHORT else (0, 1 << 34):
        model = load(directory, budget)
        assert can_be_packed(model)
        given = prompts()
        expected = alone(model, given)
        with forwards(model) as rows:
            assert_alike(together(model, given), expected)
        assert rows[:2] == [LENGTHS[0] + 6 + LENGTHS[2], 1 + 6 + 1]
