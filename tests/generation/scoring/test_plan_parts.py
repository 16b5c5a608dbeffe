"""How many tokens go through a layer together by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from rabbitllm.generation.memory import HEAP_BLOCK_BYTES, PassCost, cost_of_a_pass
from rabbitllm.generation.scoring.plan import LEAST_TOKENS, MAX_TOKENS, limits_of
from rabbitllm.generation.scoring.records import Room
from tests.support.tiny_models import load


def test_on_a_processor_no_tensor_is_too_large_for_a_heap(split_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(split_folder)
    (lane,) = model.streamer.lanes.values()
    monkeypatch.setattr(lane.device, "free_bytes", lambda: 64 << 30)
    assert limits_of(model, Room()).tokens == MAX_TOKENS  # so narrow a model's fit
    for name, wide in (("hidden_size", 2048), ("intermediate_size", 5632), ("vocab_size", 32000)):
        monkeypatch.setattr(model.config, name, wide)
    tokens = limits_of(model, Room()).tokens
    assert LEAST_TOKENS < tokens < MAX_TOKENS
    block = cost_of_a_pass(model.config, 4).block
    assert tokens * block <= HEAP_BLOCK_BYTES < (tokens + 1) * block
    monkeypatch.setattr(lane.device, "free_bytes", lambda: 0)
    assert limits_of(model, Room()).tokens == LEAST_TOKENS
    assert limits_of(model, Room(tokens=7)).tokens == 7


def test_a_model_too_wide_for_that_still_has_parts_that_are_worth_it() -> None:
    assert PassCost(1, 0, 1, 0, 1, HEAP_BLOCK_BYTES).max_tokens == 512
