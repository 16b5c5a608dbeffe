"""Which offer to take for each item so that all keep within a budget of bytes and their losses add up to little. Pure.

Of each item only the offers on the lower convex hull of (bytes, loss) can be taken: a step from one to the next has a
gain a byte, and steps are taken in the order of that gain. One that does not fit is passed over, and all behind it that
build on it. At a budget that is a sum of first steps nothing is better; at others what is lost is less than the gain of
the first step that was passed over. What a larger budget gives is never worse: what it takes before the first step that
only it can take is the same, and what the smaller one takes instead has no more gain a byte, in fewer bytes than that
step. Steps of equal gain go by the order of the items, so the outcome depends on nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """One way to have an item: what it takes, bytes, and what it costs in quality."""

    nbytes: int
    loss: float


@dataclass(frozen=True, slots=True)
class _Step:
    item: int
    level: int
    offer: int
    nbytes: int
    rate: float


def allocate(items: Sequence[Sequence[Offer]], budget: int) -> tuple[int, ...] | None:
    """Which offer each item gets.

    Args:
        items: the offers of each, at least one.
        budget: bytes that the offers taken may have together.

    Returns:
        For each item the number of its offer; None if not even the smallest ones keep within the budget.
    """
    hulls = [_hull(offers) for offers in items]
    taken = [hull[0] for hull in hulls]
    left = budget - sum(offers[offer].nbytes for offers, offer in zip(items, taken, strict=True))
    if left < 0:
        return None
    levels = [0] * len(items)
    steps = [step for item, hull in enumerate(hulls) for step in _steps(item, items[item], hull)]
    for step in sorted(steps, key=lambda step: (-step.rate, step.item, step.level)):
        if step.nbytes <= left and levels[step.item] == step.level:
            taken[step.item] = step.offer
            levels[step.item] += 1
            left -= step.nbytes
    return tuple(taken)


def _steps(item: int, offers: Sequence[Offer], hull: Sequence[int]) -> Iterator[_Step]:
    """From each offer of a hull to the next, with its gain a byte; rounded, it must not be above the one before."""
    rate = math.inf
    for level, (before, after) in enumerate(itertools.pairwise(hull)):
        nbytes = offers[after].nbytes - offers[before].nbytes
        rate = min(rate, (offers[before].loss - offers[after].loss) / nbytes)
        yield _Step(item, level, after, nbytes, rate)


def _hull(offers: Sequence[Offer]) -> list[int]:
    """The offers that are worth their bytes, the smallest first: each step has less gain a byte than the one before."""
    hull: list[int] = []
    for number in sorted(range(len(offers)), key=lambda n: (offers[n].nbytes, offers[n].loss, n)):
        if hull and offers[number].loss >= offers[hull[-1]].loss:
            continue
        while len(hull) > 1 and _bends_up(offers[hull[-2]], offers[hull[-1]], offers[number]):
            hull.pop()
        hull.append(number)
    return hull


def _bends_up(first: Offer, middle: Offer, last: Offer) -> bool:
    """Whether the middle one lies above the line between the others."""
    gained = (first.loss - middle.loss) * (last.nbytes - middle.nbytes)
    return gained < (middle.loss - last.loss) * (middle.nbytes - first.nbytes)
