"""How much memory the weights leave: numbers alone, and a batch that never computes more than fits."""

from __future__ import annotations

from typing import Any

import pytest

from rabbitllm.base.terminal import size
from rabbitllm.errors import OptionError
from rabbitllm.generation.batch import Batch, Limits
from rabbitllm.generation.memory import LEAST_TOKENS, cost_of_a_pass, left_to_requests
from rabbitllm.generation.request import Request
from tests.generation.asking import alone, asked
from tests.support.tiny_models import load


def test_what_weights_are_not_to_take() -> None:
    assert left_to_requests(1000, None) == 200
    assert left_to_requests(1000, 300) == 400
    assert left_to_requests(1000, 5000) == 1000
    assert left_to_requests(1000, 300, 50) == 400
    assert left_to_requests(1000, 300, 250) == 550


def test_prompts_are_cut_by_the_memory_there_is(split_folder: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With next to nothing free a pass has `LEAST_TOKENS` of prompts, and the answers are the same."""
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
    model = load(split_folder, dtype="float32")
    (lane,) = model.streamer.lanes.values()
    monkeypatch.setattr(lane.device, "free_bytes", lambda: 1000)
    with pytest.raises(OptionError, match="leave 1,000 bytes free"):
        Batch(model)


def test_in_bulk_keys_and_values_leave_room_for_the_smallest_pass(
    split_folder: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(split_folder, dtype="float32")
    least = cost_of_a_pass(model.config, 4).least()
    (lane,) = model.streamer.lanes.values()
    monkeypatch.setattr(lane.device, "free_bytes", lambda: 300_000 + least)
    said = f"needs {size(least)} more; the weights leave {size(300_000 + least)} free"
    with pytest.raises(OptionError, match=said):
        Batch(model, Limits(cache_bytes=300_001, in_bulk=True))
    with Batch(model, Limits(cache_bytes=300_000, in_bulk=True)) as batch:
        request = Request(tuple(range(3, 40)), 3)
        (one,) = asked(batch, [request])
    assert one.tokens == alone(plain, request)


def test_no_more_texts_share_a_pass_than_there_is_memory_for_their_logits(
    split_folder: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(split_folder, dtype="float32")
    cost = cost_of_a_pass(model.config, 4)
    (lane,) = model.streamer.lanes.values()
    monkeypatch.setattr(lane.device, "free_bytes", lambda: 300_000 + max(12 * cost.answered, cost.least()))
    requests = [Request(tuple(range(3 + number, 9 + number)), 4) for number in range(7)]
    with Batch(model, Limits(cache_bytes=300_000, in_bulk=True)) as batch:
        most = cost.texts_in(lane.device.free_bytes() - 300_000)
        found = asked(batch, requests)
        facts = batch.facts
    assert [one.tokens for one in found] == [alone(plain, request) for request in requests]
    assert facts.passes >= -(-len(requests) // most) * 4
