"""Caches replayed over traces: against a search of everything they could have done, and against LRU as it is told."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import numpy as np
import pytest

from benchmarks.experts.policies import Clairvoyant, Recency, groups_of, replay
from benchmarks.experts.trace import Trace
from tests.support.expert_use import joined, of_tokens


def drawn(tokens: int, layers: int, experts: int, count: int, seed: int) -> Trace:
    """Popular experts more often; a token never has one twice."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, experts + 1)
    keys = random.random((tokens, layers, experts)) ** (1 / weights)
    return of_tokens(np.argsort(-keys, axis=-1)[:, :, :count].astype(np.uint16), experts)


def best_possible(trace: Trace, capacity: int) -> int:
    """Hits of the best of all caches that keep what they had or were just asked for, by trying every one."""
    reached = {frozenset[int](): 0}
    for group in groups_of(trace):
        asked = frozenset(group.slots.tolist())
        following: dict[frozenset[int], int] = {}
        for held, hits in reached.items():
            there = held | asked
            for kept in itertools.combinations(sorted(there), min(capacity, len(there))):
                now = hits + len(held & asked)
                following[frozenset(kept)] = max(following.get(frozenset(kept), 0), now)
        reached = following
    return max(reached.values())


@pytest.mark.parametrize("seed", range(4))
def test_the_clairvoyant_is_as_good_as_anything(seed: int) -> None:
    trace = drawn(8, 2, 4, 2, seed)
    for capacity in (1, 3, 5):
        assert replay(trace, capacity, Clairvoyant()).hits == best_possible(trace, capacity)


def test_recency_is_lru() -> None:
    trace, capacity = drawn(200, 3, 12, 1, 0), 9
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for group in groups_of(trace):
        (slot,) = group.slots.tolist()
        hits += slot in cache
        cache[slot] = None
        cache.move_to_end(slot)
        if len(cache) > capacity:
            cache.popitem(last=False)
    outcome = replay(trace, capacity, Recency())
    assert (outcome.asked, outcome.hits) == (600, hits)
    assert outcome.rate == hits / 600


def test_nothing_beats_the_clairvoyant_and_all_hit_what_fits() -> None:
    trace = drawn(60, 2, 10, 3, 1)
    for capacity in (4, 10):
        assert replay(trace, capacity, Recency()).hits <= replay(trace, capacity, Clairvoyant()).hits
    firsts = sum(len(np.unique(trace.ids[:, layer])) for layer in range(2))
    assert replay(trace, trace.slots, Recency()).hits == 60 * 2 * 3 - firsts


def test_what_several_tokens_of_a_pass_ask_for_is_asked_for_once() -> None:
    first, second = (of_tokens(np.array(ids, np.uint16)[:, None, None], 4) for ids in ([0, 1], [0, 2]))
    together = Trace(np.array([0, 0, 1, 2], np.uint16)[:, None, None], np.array([2, 4]), 4)
    assert [group.slots.tolist() for group in groups_of(together)] == [[0], [1, 2]]
    after = joined([first, second])
    assert [group.slots.tolist() for group in groups_of(after)] == [[0], [1], [0], [2]]
    assert replay(after, 4, Recency(), counted=[False, False, True, True]).hits == 1
