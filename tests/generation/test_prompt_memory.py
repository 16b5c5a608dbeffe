"""A prompt stays within the memory that weights leave: experts give way to it, or it comes in chunks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from rabbitllm.engine import _routed, devices
from rabbitllm.engine._expert_pool import ExpertCache
from rabbitllm.engine.free_memory import available_ram, untouched_bytes
from rabbitllm.engine.prefetch import bytes_of
from rabbitllm.errors import NotEnoughMemoryError
from rabbitllm.generation import kv_cache, memory
from rabbitllm.generation.memory import keep_prompts_within_memory
from rabbitllm.telemetry.passes import PassInput
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import ALL, budget_that_keeps, load, split

MANY = {"num_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "hidden_size": 256}
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def ids_of(model: Any, batch: int, length: int) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def lengths_of(model: Any, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, list[int]]:
    """An answer, and the tokens of each pass."""
    lengths = list[int]()

    def see(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(see, with_kwargs=True)
    answer = model.generate(ids, **GREEDY, **options)
    hook.remove()
    return answer, lengths


def leave(monkeypatch: pytest.MonkeyPatch, model: Any, nbytes: int) -> None:
    """Let so many bytes be free, and no more be had."""
    monkeypatch.setattr(model.streamer.executors["cpu"].device, "missing_bytes", lambda needed: needed - nbytes)
    for name in ("reclaimable_bytes", "last_bytes", "available_ram"):
        monkeypatch.setattr(memory, name, lambda: 0)


def needed(monkeypatch: pytest.MonkeyPatch, model: Any, *sizes: int) -> int:
    """Bytes of a pass: see `PromptMemory._missing`."""
    with monkeypatch.context() as patch:
        leave(patch, model, 0)
        return int(model.pass_memory._missing(*sizes)[0])


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return split(build_checkpoint(tmp_path, "qwen3_moe", **MANY), "4bit")


@pytest.mark.skipif(not untouched_bytes(memoryview(devices.page_aligned(4096))), reason="the system has no mincore")
def test_experts_give_their_memory_to_a_prompt(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(mixture, budget_that_keeps(mixture, 0.3, exact=False, dtype="bfloat16"), exact=False, dtype="bfloat16")
    ids = ids_of(model, 2, 100)
    expected = model.generate(ids, **GREEDY)
    model.generate(ids, **GREEDY)
    keep_prompts_within_memory(model)
    (pool,) = model.streamer.pools.values()
    given = sum(len(slot.memory) for slot in pool._slots[: pool.cache.slots // 2])

    def returned() -> int:
        return sum(untouched_bytes(bytes_of(slot.memory)) for slot in pool._slots)

    before, begun = returned(), list[int]()
    leave(monkeypatch, model, needed(monkeypatch, model, 2, 100, 0, 0, 164) - given)
    hook = model.get_submodule("model.layers.0").register_forward_hook(lambda *args: begun.append(returned()))
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    hook.remove()
    assert begun[0] - before >= given // 2  # while the prompt is computed
    assert pool.cache.occupied <= pool.cache.slots - sum(len(state.lent) for state in pool.cache.modules)
    monkeypatch.undo()
    assert available_ram() > 1 << 28
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert pool.cache.occupied == pool.cache.slots
    assert not any(len(state.lent) for state in pool.cache.modules)


@pytest.mark.parametrize(
    ("family", "batch"), [("llama", 1), ("llama", 3), ("gemma3", 1), ("gemma3", 2), ("qwen3_next", 1)]
)
def test_a_prompt_without_memory_comes_in_chunks(
    tmp_path: Path, family: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and states, too, as far as they go on; in chunks that are as large as memory allows."""
    model = load(split(build_checkpoint(tmp_path, family, max_position_embeddings=512)), ALL, exact=False)
    ids = ids_of(model, batch, 150)
    keep_prompts_within_memory(model)
    whole, lengths = lengths_of(model, ids)
    assert lengths == [150, 1, 1, 1]
    for chunk in (max(64 // batch, 16), 70):
        leave(monkeypatch, model, needed(monkeypatch, model, batch, chunk, 150 - chunk, 0, 150))
        expected = model.generate(ids, prefill_chunk_size=chunk, **GREEDY)
        answer, lengths = lengths_of(model, ids)
        assert lengths == [*[chunk] * (150 // chunk), 150 % chunk, 1, 1, 1]
        assert torch.equal(answer, expected)
        assert torch.equal(answer, whole)
        monkeypatch.undo()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_a_chat_goes_on_in_chunks(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(split(build_checkpoint(tmp_path, family, max_position_embeddings=512)), ALL, exact=False)
    ids = ids_of(model, 1, 250)
    keep_prompts_within_memory(model)

    def second_turn(patch: pytest.MonkeyPatch | None = None) -> tuple[torch.Tensor, list[int]]:
        first = model.generate(ids[:, :90], return_dict_in_generate=True, **GREEDY)
        prompt, cache = torch.cat([first.sequences, ids[:, 90:]], 1), first[kv_cache.CACHE_ARGUMENT]
        if patch is not None:
            end = prompt.shape[1]
            leave(patch, model, needed(patch, model, 1, 70, end - 70, cache.get_seq_length(), end))
        return lengths_of(model, prompt, **{kv_cache.CACHE_ARGUMENT: cache})

    expected, lengths = second_turn()
    assert lengths == [161, 1, 1, 1]
    answer, lengths = second_turn(monkeypatch)
    assert lengths == [70, 70, 21, 1, 1, 1]
    assert torch.equal(answer, expected)


def test_a_prompt_that_cannot_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in chunks of the caller, and without chunks; what may fit is tried, with a warning."""
    model = load(split(build_checkpoint(tmp_path, "llama", max_position_embeddings=512)), ALL, exact=False)
    keep_prompts_within_memory(model)
    ids = ids_of(model, 1, 150)
    expected = model.generate(ids, **GREEDY)
    least = needed(monkeypatch, model, 1, 64, 86, 0, 150)
    leave(monkeypatch, model, least // 5)
    with pytest.raises(NotEnoughMemoryError, match="150 tokens and their KV cache need at least"):
        model.generate(ids, **GREEDY)
    with pytest.raises(NotEnoughMemoryError, match="100 tokens and their KV cache need at least"):
        model.generate(ids, prefill_chunk_size=100, **GREEDY)
    with pytest.raises(NotEnoughMemoryError, match="150 tokens and their KV cache need at least"):
        model(ids)
    monkeypatch.undo()
    assert not caplog.text
    leave(monkeypatch, model, least * 9 // 10)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert caplog.text.count("the system may end the process") == 1


def test_a_short_prompt_costs_no_look_at_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(split(build_checkpoint(tmp_path, "gemma3")), ALL)
    keep_prompts_within_memory(model)
    model.pass_memory._missing = None  # not called
    assert model.pass_memory.chunk(ids_of(model, 3, 21), {}) is None
    assert not caplog.text


def test_a_shared_pass_takes_lent_slots_back(mixture: Path) -> None:
    model = load(mixture, budget_that_keeps(mixture, 0.3, exact=False, dtype="bfloat16"), exact=False, dtype="bfloat16")
    (pool,) = model.streamer.pools.values()
    pool.lend(1 << 40)
    assert sum(len(state.lent) for state in pool.cache.modules) == pool.cache.slots
    with model.joint_pass(PassInput(1, 1, 0)):
        assert not any(len(state.lent) for state in pool.cache.modules)


@pytest.mark.parametrize(("family", "batch"), [("qwen3_next", 2), ("mamba2", 1), ("llama", 1)])
def test_prompts_that_chunks_may_change_stay_whole(
    tmp_path: Path, family: str, batch: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """States of several sequences, or that do not go on, and here Llama, since it computes exactly."""
    model = load(split(build_checkpoint(tmp_path, family)), ALL, exact=family == "llama")
    keep_prompts_within_memory(model)
    leave(monkeypatch, model, needed(monkeypatch, model, batch, 100, 0, 0, 100) * 9 // 10)
    _, lengths = lengths_of(model, ids_of(model, batch, 100))
    assert lengths == [100, 1, 1, 1]
    assert "the system may end the process" in caplog.text


@pytest.mark.parametrize("count", [0, 1, 3, 19, 20])
def test_as_many_slots_are_lent_as_are_asked_for(count: int) -> None:
    """Also if that is fewer than one of each module; those that were used least."""
    cache = ExpertCache([8, 4, 8, 8], 20)
    for module, state in enumerate(cache.modules):
        for expert in range(len(state.owner)):
            cache.use(module, np.array([expert]), np.array([1 + expert]), 1)
            cache.admit(module, np.array([expert]), np.empty(0, np.int64))
    taken = cache.lend(count)
    assert len(taken) == count == 20 - cache.occupied
    for state in cache.modules:
        worth = state.worth
        kept = [worth[expert] for expert in state.owner if expert >= 0]
        assert all(
            worth[expert] <= min(kept, default=1e9) for expert in range(len(state.owner)) if state.slot[expert] < 0
        )
    assert cache.lend(count) == []


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_the_kv_cache_of_a_prompt_is_estimated(tmp_path: Path, family: str) -> None:
    """Of windows and states, too; never less, and not much more."""
    model = load(split(build_checkpoint(tmp_path, family)), ALL, exact=False)
    keep_prompts_within_memory(model)
    ids = ids_of(model, 1, 200)
    cache = DynamicCache(config=model.config.get_text_config())
    model(ids, **{kv_cache.cache_argument(model): cache})
    cost = model.pass_memory._kv_cost
    windows = tuple((window + 200, each) for window, each in cost.windows)
    held = kv_cache.bytes_of(cache)
    assert held - 64 <= dataclasses.replace(cost, windows=windows).bytes_for(200) < 2 * held


@torch.no_grad()
def test_experts_of_a_prompt_are_multiplied_some_rows_at_a_time(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bits, whether they come and go or stay."""
    for budget in (budget_that_keeps(mixture, 0.3, exact=False, dtype="bfloat16"), ALL):
        model = load(mixture, budget, exact=False, dtype="bfloat16")
        ids, rows = ids_of(model, 1, 400), list[int]()
        expected = model(ids).logits
        multiplied = _routed.ExpertStack.multiplied

        def count(stack: Any, x: torch.Tensor, *groups: Any, rows: Any = rows, multiplied: Any = multiplied) -> Any:
            rows.append(len(x))
            return multiplied(stack, x, *groups)

        with monkeypatch.context() as patch:
            patch.setattr(_routed, "_ROWS", 200)
            patch.setattr(_routed, "_TOKENS", 7)
            patch.setattr(_routed.ExpertStack, "multiplied", count)
            assert torch.equal(model(ids).logits, expected)
        assert rows
        assert max(rows) <= 400  # an expert alone may have more than 200
        assert len(rows) >= 2 * 2 * 400 * 3 // 400
