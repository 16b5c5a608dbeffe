"""Bytes shared out among items: within the budget, never worse with more, as good as every combination tried."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.splitter.bit_allocation import Offer, allocate

OFFERS = st.builds(Offer, st.integers(0, 30), st.integers(0, 40).map(float))
ITEMS = st.lists(st.lists(OFFERS, min_size=1, max_size=4), max_size=5)
BUDGETS = st.integers(0, 160)


def taken(items: list[list[Offer]], budget: int) -> list[Offer] | None:
    found = allocate(items, budget)
    return None if found is None else [offers[number] for offers, number in zip(items, found, strict=True)]


def loss(offers: list[Offer]) -> float:
    return sum(offer.loss for offer in offers)


def nbytes(offers: list[Offer]) -> int:
    return sum(offer.nbytes for offer in offers)


def best(items: list[list[Offer]], budget: int) -> float | None:
    """The least loss of all combinations that fit."""
    fitting = [loss([*one]) for one in itertools.product(*items) if nbytes([*one]) <= budget]
    return min(fitting, default=None)


@given(ITEMS, BUDGETS)
@settings(max_examples=300, deadline=None)
def test_never_over_budget_and_refused_only_where_nothing_fits(items: list[list[Offer]], budget: int) -> None:
    found = taken(items, budget)
    if found is None:
        assert best(items, budget) is None
    else:
        assert nbytes(found) <= budget


@given(ITEMS, BUDGETS, BUDGETS)
@settings(max_examples=500, deadline=None)
def test_more_bytes_are_never_worse(items: list[list[Offer]], one: int, other: int) -> None:
    less, more = taken(items, min(one, other)), taken(items, max(one, other))
    if less is not None:
        assert more is not None
        assert loss(more) <= loss(less)


@given(ITEMS, BUDGETS)
@settings(max_examples=300, deadline=None)
def test_what_is_used_up_could_not_be_used_better(items: list[list[Offer]], budget: int) -> None:
    """Where no step was passed over, nothing with as many bytes loses less."""
    found = taken(items, budget)
    if found is None:
        return
    at_most = taken(items, nbytes(found))
    assert at_most is not None
    assert loss(at_most) == loss(found)
    dearest = max((max(o.loss for o in offers) - min(o.loss for o in offers) for offers in items), default=0)
    least = best(items, budget)
    assert least is not None
    assert least <= loss(found) <= least + dearest


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(0, 24))
@settings(max_examples=300, deadline=None)
def test_exact_where_each_step_takes_the_same(losses: list[list[int]], budget: int) -> None:
    """Steps of one byte, each gaining no more than the one before: then the order of gain is the best there is."""
    items = []
    for gains in losses:
        at, offers = float(sum(gains)), [Offer(0, float(sum(gains)))]
        for number, gain in enumerate(sorted(gains, reverse=True)):
            at -= gain
            offers.append(Offer(number + 1, at))
        items.append(offers)
    found = taken(items, budget)
    assert found is not None
    assert loss(found) == best(items, budget)


def test_equal_items_are_served_in_their_order() -> None:
    items = [[Offer(0, 5.0), Offer(10, 1.0)]] * 4
    assert allocate(items, 25) == (1, 1, 0, 0)


def test_an_offer_above_the_hull_is_not_taken() -> None:
    """The middle one costs 8 bytes for a gain of 1; the step past it gains more a byte, and others come first."""
    one = [Offer(0, 10.0), Offer(8, 9.0), Offer(10, 0.0)]
    assert allocate([one, one], 18) == (2, 0)
    assert allocate([one, one], 20) == (2, 2)


def test_a_step_that_does_not_fit_lets_later_ones_pass() -> None:
    large, small = [Offer(0, 100.0), Offer(50, 0.0)], [Offer(0, 1.0), Offer(5, 0.0)]
    assert allocate([large, small], 20) == (0, 1)
    assert allocate([large], 49) == (0,)
    assert allocate([[Offer(3, 0.0)]], 2) is None
    assert allocate([], 0) == ()
