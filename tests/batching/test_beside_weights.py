"""What is left beside the weights: numbers alone, and a batch that never computes more than fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rabbitllm.batching.batch import Batch
from rabbitllm.batching.beside_weights import LEAST_TOKENS, left_to_requests, tokens_of_a_pass
from rabbitllm.batching.request import Request
from rabbitllm.errors import OptionError
from tests.batching.asking import alone, asked

LLAMA = SimpleNamespace(hidden_size=2048, intermediate_size=5632)


def test_what_weights_are_not_to_take() -> None:
    assert left_to_requests(1000, None) == 200
    assert left_to_requests(1000, 300) == 400
    assert left_to_requests(1000, 5000) == 1000


def test_tokens_follow_from_the_widths() -> None:
    """A gigabyte is some thousand tokens of a model of this width, in 16 bit; half as many in 32."""
    tokens = tokens_of_a_pass(LLAMA, 2, 1 << 30)
    assert 4_000 < tokens < 16_000
    assert tokens_of_a_pass(LLAMA, 4, 1 << 30) == tokens // 2
    assert tokens_of_a_pass(LLAMA, 2, 0) == LEAST_TOKENS
    by_layer = SimpleNamespace(hidden_size=2048, intermediate_size=[1024, 5632])
    assert tokens_of_a_pass(by_layer, 2, 1 << 30) == tokens
    assert tokens_of_a_pass(SimpleNamespace(hidden_size=768), 2, 1 << 30) > tokens


def test_prompts_are_cut_by_the_memory_there_is(split_folder: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With next to nothing free a pass has `LEAST_TOKENS` of prompts, and the answers are the same."""
    from tests.support.tiny_models import load

    model = load(split_folder, dtype="float32")
    (lane,) = model.streamer.lanes.values()
    monkeypatch.setattr(lane.device, "free_bytes", lambda: 400_000)
    model.profiler.clear()
    requests = [Request(tuple(range(3 + number, 63 + number)), 4) for number in (0, 70)]
    with Batch(model) as batch:
        found = asked(batch, requests)
        passes = batch.facts.passes
    assert [one.tokens for one in found] == [alone(plain, request) for request in requests]
    assert passes >= 2 * 60 // LEAST_TOKENS


def test_no_memory_at_all_is_said_at_once(split_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.tiny_models import load

    model = load(split_folder, dtype="float32")
    (lane,) = model.streamer.lanes.values()
    monkeypatch.setattr(lane.device, "free_bytes", lambda: 1000)
    with pytest.raises(OptionError, match="1,000 bytes are free"):
        Batch(model)
