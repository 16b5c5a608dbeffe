"""Which experts stay in memory: in any order of use no slot is shared, and none in use is taken."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.engine._expert_pool import ExpertCache, HostSlot
from rabbitllm.engine.experts import ChosenExperts
from rabbitllm.storage.files import read_range
from tests.engine.test_fake_gpu import load_on
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.tiny_models import split

COUNTS = [3, 5, 4]


def uses() -> st.SearchStrategy[list[tuple[int, list[int]]]]:
    """A run of passes: which experts of which module."""
    use_of_module = st.integers(0, len(COUNTS) - 1).flatmap(
        lambda module: st.tuples(
            st.just(module), st.lists(st.integers(0, COUNTS[module] - 1), min_size=1, unique=True).map(sorted)
        )
    )
    return st.lists(use_of_module, max_size=40)


def use(
    cache: ExpertCache, module: int, experts: list[int], count: int = 1, of: int = 1
) -> tuple[list[int], list[int]]:
    """A pass like a pool's: the slots of cached experts, and those that the others get.

    Args:
        count: tokens that use each of the experts.
        of: tokens of the pass.
    """
    chosen = np.array(experts, np.int64)
    cache.use(module, chosen, np.full(len(chosen), count), of)
    slots = cache.slots_of(module, chosen)
    admitted = cache.admit(module, chosen[slots < 0], slots[slots >= 0])
    return slots[slots >= 0].tolist(), admitted.tolist()


@given(uses(), st.integers(0, 14))
def test_slots_and_experts_are_one_to_one(passes: list[tuple[int, list[int]]], slots: int) -> None:
    cache = ExpertCache(COUNTS, slots)
    for module, experts in passes:
        cached, given_slots = use(cache, module, experts)
        new = [slot for slot in given_slots if slot >= 0]
        assert not set(cached) & set(new)
        assert len(set(new)) == len(new)
        assert all(0 <= slot < slots for slot in new)
        slots_by_module = [cache.slots_of(m, np.arange(count)) for m, count in enumerate(COUNTS)]
        taken = [slot for part in slots_by_module for slot in part.tolist() if slot >= 0]
        assert len(taken) == len(set(taken)) == cache.occupied <= slots


@given(uses())
def test_with_enough_slots_all_experts_stay(passes: list[tuple[int, list[int]]]) -> None:
    cache, seen = ExpertCache(COUNTS, sum(COUNTS)), set()
    for module, experts in passes:
        cached, given_slots = use(cache, module, experts)
        repeated = {(module, expert) for expert in experts} & seen
        assert len(cached) == len(repeated)
        assert all(slot >= 0 for slot in given_slots)
        seen |= {(module, expert) for expert in experts}


def test_frequently_used_experts_stay() -> None:
    cache = ExpertCache([80], 18)
    for _ in range(60):
        use(cache, 0, [0, 1])
    for once in range(2, 80, 2):  # more than there are slots, and for longer than a recent use counts
        use(cache, 0, [once, once + 1])
    assert (cache.slots_of(0, np.array([0, 1])) >= 0).all()
    assert (cache.slots_of(0, np.array([78, 79])) >= 0).all()


def test_most_recent_of_equally_used_experts_stays() -> None:
    cache = ExpertCache([8], 2)
    for expert in (0, 1, 2, 3):
        use(cache, 0, [expert])
    assert (cache.slots_of(0, np.array([2, 3])) >= 0).all()


def test_experts_of_long_ago_are_evicted() -> None:
    cache = ExpertCache([4], 1)
    for _ in range(100):
        use(cache, 0, [0])
    for _ in range(100):
        use(cache, 0, [1])
    assert cache.slots_of(0, np.array([0, 1])).tolist() == [-1, 0]


def test_pass_of_many_tokens_equals_passes_of_one_token() -> None:
    """Bit for bit for experts that all tokens use; experts of few tokens are worth less."""
    at_once, singly = ExpertCache([4], 1), ExpertCache([4], 1)
    use(at_once, 0, [0, 2], 9, 9)
    for _ in range(9):
        use(singly, 0, [0, 2])
    assert np.allclose(at_once.modules[0].uses, singly.modules[0].uses)
    use(at_once, 0, [1], 1, 9)
    assert (at_once.modules[0].uses[:, 1] < at_once.modules[0].uses[:, 0]).any()


def test_slots_are_shared_in_proportion() -> None:
    cache = ExpertCache([10, 30], 20)
    for module, count in enumerate((10, 30)):
        use(cache, module, list(range(count)))
    assert [int((cache.slots_of(m, np.arange(n)) >= 0).sum()) for m, n in enumerate((10, 30))] == [5, 15]


def test_unread_experts_lose_their_slots() -> None:
    cache = ExpertCache([4], 2)
    _, (slot,) = use(cache, 0, [3])
    cache.clear(0, slot)
    assert cache.occupied == 0
    assert cache.slots_of(0, np.array([3])).tolist() == [-1]


def test_cache_begins_with_the_uses_of_another() -> None:
    first = ExpertCache(COUNTS, 6)
    for _ in range(5):
        use(first, 1, [2, 4])
    second = ExpertCache(COUNTS, 6)
    for state, other in zip(first.modules, second.modules, strict=True):
        other.uses[:] = state.uses
    assert second.modules[1].best.tolist() == [2, 4]
    assert second.modules[0].best.tolist() == []


@pytest.mark.parametrize("slots", [20, 60])
def test_skewed_use_hits_more_often_than_least_recently_used(slots: int) -> None:
    """Zipf-like use of 200 experts; an LRU cache of the same size on the same passes is the measure."""
    generator = np.random.default_rng(0)
    worth = 1.0 / np.arange(1, 201)
    cache, recent = ExpertCache([200], slots), OrderedDict[int, None]()
    hits = lru_hits = 0
    for _ in range(600):
        experts = sorted(generator.choice(200, 8, replace=False, p=worth / worth.sum()).tolist())
        hits += len(use(cache, 0, experts)[0])
        for expert in experts:
            lru_hits += expert in recent
            recent[expert] = None
            recent.move_to_end(expert)
            if len(recent) > slots:
                recent.popitem(last=False)
    assert hits > lru_hits


@pytest.fixture
def pool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a device with slots of its own and slots in host memory; codes, if any, are multiplied."""
    sizes = {"num_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 128}  # whole blocks
    checkpoint = build_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16, **sizes)
    folder = split(checkpoint, getattr(request, "param", None))
    monkeypatch.setattr("rabbitllm.engine.load_plan._is_right", lambda *trial: True)
    model = load_on([FakeGpu(0)], folder, 1 << 21, 1 << 19, exact=not hasattr(request, "param"))
    (pool,) = model.streamer.pools.values()
    pool.folder, pool.model = folder, model
    return pool


def bytes_of_expert(pool: Any, expert: int) -> bytes:
    """The stored bytes of an expert of the first module, in the layout of a slot."""
    slot = bytearray(pool._nbytes)
    for span in pool.sources[0].spans(expert):
        slot[span.at : span.at + span.nbytes] = read_range(pool.folder / span.file, span.offset, span.nbytes)
    return bytes(slot)


def held(pool: Any, memory: torch.Tensor) -> bytes:
    """The bytes of the first module's expert in a slot; gaps between its parts are zero."""
    slot = bytearray(pool._nbytes)
    for span in pool.sources[0].spans(0):
        slot[span.at : span.at + span.nbytes] = bytes(memory[span.at : span.at + span.nbytes].numpy())
    return bytes(slot)


def test_host_slot_is_refilled_after_its_copy(pool: Any) -> None:
    """Two experts go through the same slot; the device gets the first one, however late it copies."""
    first, second = pool._slots[:2]
    tickets = [pool._fill(0, expert, slot, HostSlot(0, False), None) for expert, slot in enumerate((first, second))]
    for ticket in tickets:
        pool._device.arrive(ticket)
    assert [held(pool, slot.memory) for slot in (first, second)] == [bytes_of_expert(pool, expert) for expert in (0, 1)]


def test_routing_changed_in_place_is_fetched_again(pool: Any) -> None:
    with watched():  # else a copy to the host would be the tensor itself
        index = torch.tensor([[3, 1], [2, 7]]).to(pool._device.torch_device)
        assert pool.numbers(index).tolist() == [3, 1, 2, 7]
        index[0, 0] = 5
        assert pool.numbers(index).tolist() == [5, 1, 2, 7]
        assert pool.numbers(index) is pool.numbers(index)


@pytest.mark.parametrize("pool", [None, "4bit"], indirect=True)
def test_modules_alike_have_the_same_views_of_a_slot(pool: Any) -> None:
    """Else a slot would keep as many as there are modules."""
    slot, leaves = pool._slots[0], list(pool.sources[0].leaves)
    weights = [[pool._weight(module, leaf, slot, 0) for leaf in leaves] for module in range(len(pool.sources))]
    assert len(weights) > 1
    assert all(weight is first for of_module in weights for weight, first in zip(of_module, weights[0], strict=True))
    assert len({*map(id, weights[0])}) == len(slot.ready) == len(leaves) == 2


@pytest.mark.parametrize("pool", [None, "4bit"], indirect=True)
@torch.no_grad()
def test_chosen_experts_may_be_written_to(pool: Any) -> None:
    """As the copies that torch makes; the experts stay as they are."""
    stack, index = pool.model.model.layers[0].mlp.experts.down_proj, torch.tensor([3, 3, 0])
    expected, rows = stack.copied([3, 3, 0]), torch.randn(3, stack.shape[2], 1, dtype=torch.bfloat16)
    for again in (copy.deepcopy, lambda chosen: pickle.loads(pickle.dumps(chosen))):
        assert torch.equal(again(stack[index]), expected)
    chosen = stack[index]
    assert isinstance(chosen, ChosenExperts)
    chosen.detach().mul_(2)
    chosen[1] = 0
    written = expected * torch.tensor([2, 0, 2])[:, None, None]
    assert torch.equal(chosen.clone(), written)
    assert torch.equal(torch.bmm(chosen, rows), torch.bmm(written, rows))
    assert chosen.data_ptr() == chosen.detach().data_ptr()
    assert torch.equal(stack[index].clone(), expected)
