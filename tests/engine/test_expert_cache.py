"""Which experts stay: whatever is used in whatever order, no slot is shared, and none is taken that is in use."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.engine.expert_cache import ExpertCache

COUNTS = [3, 5, 4]


def uses() -> st.SearchStrategy[list[tuple[int, list[int]]]]:
    """A run of passes: which experts of which module."""
    one = st.integers(0, len(COUNTS) - 1).flatmap(
        lambda module: st.tuples(
            st.just(module), st.lists(st.integers(0, COUNTS[module] - 1), min_size=1, unique=True).map(sorted)
        )
    )
    return st.lists(one, max_size=40)


def use(cache: ExpertCache, module: int, experts: list[int], share: float = 1.0) -> tuple[list[int], list[int]]:
    """A pass as a pool makes one: the slots of those that were there, and what the others were given."""
    chosen = np.array(experts, np.int64)
    cache.use(module, chosen, np.full(len(chosen), share))
    slots = cache.slots_of(module, chosen)
    given = cache.admit(module, chosen[slots < 0], slots[slots >= 0])
    return slots[slots >= 0].tolist(), given.tolist()


@given(uses(), st.integers(0, 14))
def test_a_slot_has_one_expert_and_an_expert_one_slot(passes: list[tuple[int, list[int]]], slots: int) -> None:
    cache = ExpertCache(COUNTS, slots)
    for module, experts in passes:
        here, given_slots = use(cache, module, experts)
        new = [slot for slot in given_slots if slot >= 0]
        assert not set(here) & set(new)
        assert len(set(new)) == len(new)
        assert all(0 <= slot < slots for slot in new)
        found = [cache.slots_of(m, np.arange(count)) for m, count in enumerate(COUNTS)]
        taken = [slot for part in found for slot in part.tolist() if slot >= 0]
        assert len(taken) == len(set(taken)) == cache.held <= slots


@given(uses())
def test_with_a_slot_for_each_everything_stays(passes: list[tuple[int, list[int]]]) -> None:
    cache, seen = ExpertCache(COUNTS, sum(COUNTS)), set()
    for module, experts in passes:
        here, given_slots = use(cache, module, experts)
        known = {(module, expert) for expert in experts} & seen
        assert len(here) == len(known)
        assert all(slot >= 0 for slot in given_slots)
        seen |= {(module, expert) for expert in experts}


def test_what_is_used_often_stays_when_much_is_used_once() -> None:
    cache = ExpertCache([8], 2)
    for _ in range(3):
        use(cache, 0, [0, 1])
    for once in range(2, 8):
        here, given_slots = use(cache, 0, [0, once])
        assert len(here) == 1
        assert given_slots == [-1]
    assert (cache.slots_of(0, np.array([0, 1])) >= 0).all()


def test_old_uses_count_for_less() -> None:
    cache = ExpertCache([4], 1, half_life=2.0)
    for _ in range(6):
        use(cache, 0, [0])
    passes = 0
    while cache.slots_of(0, np.array([1]))[0] < 0:
        use(cache, 0, [1])
        passes += 1
    assert 2 <= passes <= 4  # 3.3 and more at 0 halve every 2 passes while 1 gains 1 each


def test_a_use_by_few_of_many_tokens_is_worth_less() -> None:
    cache = ExpertCache([4], 1)
    use(cache, 0, [0], 0.5)
    assert use(cache, 0, [1], 0.25)[1] == [-1]
    assert use(cache, 0, [2], 1.0)[1] == [0]


def test_what_could_not_be_brought_is_forgotten() -> None:
    cache = ExpertCache([4], 2)
    _, (slot,) = use(cache, 0, [3])
    cache.forget(slot)
    assert cache.held == 0
    assert cache.slots_of(0, np.array([3])).tolist() == [-1]


def test_scores_survive_being_scaled_back() -> None:
    cache = ExpertCache([3], 1, half_life=0.01)  # a use is worth 2**100 times the one before
    for _ in range(30):
        use(cache, 0, [0])
    for _ in range(2):
        use(cache, 0, [1])
    assert np.isfinite(cache.scores()[0]).all()
    assert cache.slots_of(0, np.array([1]))[0] >= 0


def test_a_cache_begins_with_the_scores_of_another() -> None:
    first = ExpertCache(COUNTS, 2)
    for _ in range(5):
        use(first, 1, [2, 4])
    second = ExpertCache(COUNTS, 2)
    second.expect(first.scores())
    use(second, 1, [2, 4])
    assert use(second, 1, [0])[1] == [-1]


@pytest.mark.parametrize("slots", [20, 60])
def test_skewed_use_hits_more_often_than_with_the_most_recent(slots: int) -> None:
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
