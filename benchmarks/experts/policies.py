"""What caches of experts would have hit, had they been there while a trace was recorded. Pure.

A cache holds some experts of all layers together, all of one size. A layer's experts of a pass are asked for together;
those that are missing are brought in; then the least valuable are let go until the rest fits. What was just used may
itself be let go (it was needed once, in memory that any engine has for that), which makes `Clairvoyant` the optimum of
caches that bring in only what is asked for (L. A. Belady, IBM Systems Journal 5, 1966).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.experts.trace import Trace

Slots = npt.NDArray[np.int64]
"""Experts of all layers: layer * experts + expert."""
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """What one layer asks for in one pass.

    Attributes:
        number: of the pass.
        slots: different ones.
    """

    number: int
    slots: Slots


def groups_of(trace: Trace) -> list[Group]:
    """In the order in which a model asks."""
    found = []
    for number, ids in enumerate(trace.passes()):
        for layer in range(trace.layers):
            found.append(Group(number, np.unique(ids[:, layer].astype(np.int64) + layer * trace.experts)))
    return found


class Policy(Protocol):
    """Says what every expert is worth; keeps that up to date."""

    def begin(self, slots: int, groups: list[Group]) -> None:
        """A replay begins."""

    def used(self, index: int, group: Group) -> None:
        """A group was asked for, the one of that index."""

    @property
    def values(self) -> Values:
        """Of every slot; only their order counts."""


class Recency:
    """The longer ago, the less: LRU. Those of one group are as recent as each other, the last of them first to stay."""

    def begin(self, slots: int, groups: list[Group]) -> None:
        self.values = np.full(slots, -np.inf)

    def used(self, index: int, group: Group) -> None:
        self.values[group.slots] = index


@dataclass
class Clairvoyant:
    """The later it is needed again, the less: the optimum.

    Attributes:
        counted: for every pass, whether a hit of it is worth anything; by default all are.
    """

    counted: Sequence[bool] | None = None

    def begin(self, slots: int, groups: list[Group]) -> None:
        self.values = np.full(slots, -np.inf)
        following = np.full(slots, -np.inf)
        self._next: list[Values] = []
        for index in range(len(groups) - 1, -1, -1):
            group = groups[index]
            self._next.append(following[group.slots])
            if self.counted is None or self.counted[group.number]:
                following[group.slots] = -index
        self._next.reverse()

    def used(self, index: int, group: Group) -> None:
        self.values[group.slots] = self._next[index]


@dataclass(frozen=True)
class Outcome:
    """Of a replay: experts asked for, and those that were there."""

    asked: int
    hits: int

    @property
    def rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0


def replay(trace: Trace, capacity: int, policy: Policy, counted: Sequence[bool] | None = None) -> Outcome:
    """What a cache would have hit that is empty at first.

    Args:
        trace: what was asked for.
        capacity: experts that it holds.
        policy: which of them.
        counted: for every pass, whether its hits are counted; by default those of all.
    """
    groups = groups_of(trace)
    policy.begin(trace.slots, groups)
    held = np.zeros(trace.slots, dtype=bool)
    asked = hits = 0
    for index, group in enumerate(groups):
        if counted is None or counted[group.number]:
            asked, hits = asked + len(group.slots), hits + int(held[group.slots].sum())
        policy.used(index, group)
        held[group.slots] = True
        there = np.flatnonzero(held)
        if (excess := len(there) - capacity) > 0:
            held[there[np.argpartition(policy.values[there], excess - 1)[:excess]]] = False
    return Outcome(asked, hits)
