"""Models of every family spread over three hosts: bit for bit what transformers computes, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rabbitllm.errors import HostsError
from tests.engine.test_every_architecture import build, passes, possible_passes
from tests.support.builders import FAMILIES, build_checkpoint, reference_logits
from tests.support.spread_models import spread
from tests.support.tiny_models import ALL, INPUT, assert_same, plain_model, run, split

REFUSED = {"t5": "it has an encoder"}
"""Families that cannot be spread, and why."""
REFUSED_TYPES = {
    *("cpmant", "ctrl", "git", "openai-gpt", "reformer", "xlm", "xlnet"),  # no layers that are called as a stack
    # layers share a KV cache
    *("deepseek_v4", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "zaya"),
    *("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "qwen4_exp_text"),  # caches with an index
    *("hy_v4", "minimax"),  # caches of their own
    "prophetnet",  # predicts several tokens at each position
    "hrm_text",  # goes through its layers several times
    "rwkv",  # rescales its weights
    *("dory", "xlstm"),  # change or split the output of a layer before the next one
}
"""Types that cannot be spread, of those that are built small here."""
SHORT: set[str] = {"llama"}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in FAMILIES]
)
def test_spread_model_is_bit_equal_to_transformers(tmp_path: Path, family: str) -> None:
    dtype = torch.bfloat16 if number_of(family) % 2 else torch.float32
    folder = build_checkpoint(tmp_path / "model", family, tied=FAMILIES[family].ties[-1], dtype=dtype)
    directory = split(folder)
    if family in REFUSED:
        with pytest.raises(HostsError, match=REFUSED[family]), spread(directory):
            pass
        return
    expected = reference_logits(folder, INPUT, dtype)
    with spread(directory, (ALL, 0, ALL)) as (model, crew):
        assert_same(run(model), expected)
    assert not crew.errors


def number_of(family: str) -> int:
    return list(FAMILIES).index(family)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_model_type_is_bit_equal_or_refused(tmp_path: Path, name: str) -> None:
    build(tmp_path / "model", name)
    plain = plain_model(tmp_path / "model")
    expected, generates = possible_passes(plain)
    directory = split(tmp_path / "model")
    if plain.config.model_type in REFUSED_TYPES:
        with (
            pytest.raises(HostsError, match=f"A model of type {plain.config.model_type} cannot be spread over hosts"),
            spread(directory),
        ):
            pass
        return
    with spread(directory) as (model, _):
        logits = passes(model, generates)
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))
