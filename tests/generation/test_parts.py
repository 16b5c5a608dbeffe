"""Passes of many prompts whose texts go through each layer in parts: the same tokens, less memory, one reading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rabbitllm.generation.batch import Batch, Limits
from rabbitllm.generation.memory import PassCost
from rabbitllm.generation.request import Request
from tests.generation.asking import Asked, alone
from tests.support.builders import VOCABULARY_SIZE, build_checkpoint
from tests.support.tiny_models import plain_model, split

Open = Callable[..., tuple[Batch, Any]]


def prompt(length: int, seed: int) -> tuple[int, ...]:
    drawn = torch.randint(3, VOCABULARY_SIZE, (length,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def asked_together(batch: Batch, requests: list[Request]) -> list[Asked]:
    made = [Asked(request) for request in requests]
    with batch.held():
        for one in made:
            batch.submit(one.request, one.told)
    return [one.wait() for one in made]


def test_prompts_of_a_pass_go_through_each_layer_in_parts(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassCost, "parts_in", lambda *given: (10_000, 64))
    batch, model = open_batch(Limits(chunk=1 << 30, in_bulk=True), profiling=True)
    rows: list[int] = []
    layer = model.model.layers[1].mlp.down_proj
    layer.register_forward_pre_hook(lambda module, given: rows.append(given[0].shape[-2]))
    requests = [Request(prompt(10 + 5 * number, number), 4) for number in range(9)]
    for one in asked_together(batch, requests):
        assert one.tokens == alone(plain, one.request)
    whole = sum(len(request.prompt) for request in requests)
    assert max(rows) <= 64  # never all at once
    first = rows[: next(at for at in range(len(rows)) if sum(rows[: at + 1]) >= whole) + 1]
    assert sum(first) == whole  # and yet all in the first pass
    assert len(first) > whole // 64
    facts = batch.facts
    assert facts.passes == 4
    assert model.profiler.stages["read"].nbytes <= (facts.passes + 1) * model.placement.streamed_bytes


def test_a_prompt_longer_than_a_part_takes_several_passes(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassCost, "parts_in", lambda *given: (10_000, 32))
    batch, _ = open_batch(Limits(chunk=1 << 30, in_bulk=True))
    requests = [Request(prompt(100, 1), 3), Request(prompt(7, 2), 3)]
    for one in asked_together(batch, requests):
        assert one.tokens == alone(plain, one.request)
    assert batch.facts.passes >= 6


def test_a_prompt_longer_than_a_part_that_is_worth_it_still_takes_one_pass(
    open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pass costs all the weights."""
    monkeypatch.setattr(PassCost, "max_tokens", 30)
    batch, model = open_batch(Limits(chunk=1 << 30, in_bulk=True))
    rows: list[int] = []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda module, given: rows.append(given[0].shape[-2]))
    requests = [Request(prompt(length, length), 3) for length in (100, 20, 9, 15)]
    for one in asked_together(batch, requests):
        assert one.tokens == alone(plain, one.request)
    assert batch.facts.passes == 3
    assert rows[:3] == [100, 29, 15]


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3"])
def test_parts_of_other_families(open_batch: Open, tmp_path: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassCost, "parts_in", lambda *given: (10_000, 40))
    folder = build_checkpoint(tmp_path / family, family, dtype=torch.float32)
    batch, _ = open_batch(Limits(chunk=1 << 30, in_bulk=True), folder=split(folder))
    plain = plain_model(folder, dtype=torch.float32).eval()
    for one in asked_together(batch, [Request(prompt(12 + 3 * number, number), 4) for number in range(6)]):
        assert one.tokens == alone(plain, one.request)


def test_an_error_of_one_part_ends_its_texts_alone(open_batch: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassCost, "parts_in", lambda *given: (10_000, 30))
    batch, model = open_batch(Limits(chunk=1 << 30, in_bulk=True))
    projection = model.model.layers[1].mlp.up_proj
    calls = 0

    def fails_once(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("the second part")

    projection.register_forward_pre_hook(fails_once)
    found = asked_together(batch, [Request(prompt(20, number), 3) for number in range(4)])
    failed = [getattr(one.end, "error", None) for one in found]
    assert [str(error) for error in failed if error is not None] == ["the second part"]


def test_while_it_is_held_no_pass_begins(open_batch: Open) -> None:
    batch, _ = open_batch(Limits(in_bulk=True))
    with batch.held():
        made = [Asked(Request(prompt(5, number), 3)) for number in range(5)]
        for one in made:
            batch.submit(one.request, one.told)
        assert not made[0].over.wait(0.2)
        assert batch.facts.passes == 0
    for one in made:
        one.wait()
    assert batch.facts.passes == 3
