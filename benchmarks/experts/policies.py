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
        time: tokens before this pass.
        slots: different ones.
        counts: how many tokens of the pass are routed to each.
    """

    number: int
    time: int
    layer: int
    slots: Slots
    counts: Slots


def groups_of(trace: Trace) -> list[Group]:
    """In the order in which a model asks."""
    found, time = [], 0
    for number, ids in enumerate(trace.passes()):
        for layer in range(trace.layers):
            slots, counts = np.unique(ids[:, layer].astype(np.int64) + layer * trace.experts, return_counts=True)
            found.append(Group(number, time, layer, slots, counts))
        time += len(ids)
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
class Frequency:
    """How often lately: each use counts half as much every `half_life` tokens later. Known of what is not cached, too.

    Attributes:
        half_life: in tokens; infinite: every use counts the same for ever.
        by_token: an expert that n tokens of a pass are routed to counts n times, otherwise once.
    """

    half_life: float
    by_token: bool = True

    def begin(self, slots: int, groups: list[Group]) -> None:
        self.values = np.full(slots, -np.inf)

    def used(self, index: int, group: Group) -> None:
        # as logarithms of what a use is worth as seen from time 0, so that nothing has to age but what is used
        weights = np.log2(group.counts) if self.by_token else 0.0
        self.values[group.slots] = np.logaddexp2(self.values[group.slots], group.time / self.half_life + weights)


@dataclass
class TwoSpans:
    """A frequency of a short half-life and `share` times one of a long half-life."""

    short: float
    long: float
    share: float

    def begin(self, slots: int, groups: list[Group]) -> None:
        self._spans = np.array([self.short, self.long])[:, None]
        self._sums = np.zeros((2, slots))
        self._since = np.zeros((2, slots))
        self._time = 0

    def used(self, index: int, group: Group) -> None:
        self._time = group.time
        aged = self._aged()[:, group.slots] + group.counts
        self._sums[:, group.slots], self._since[:, group.slots] = aged, group.time

    def _aged(self) -> Values:
        aged: Values = self._sums * np.exp2((self._since - self._time) / self._spans)
        return aged

    @property
    def values(self) -> Values:
        short, long = self._aged()
        # a use as it is worth in the long run, so that the share is one of equals
        return short / self.short + self.share * long / self.long  # type: ignore[no-any-return]


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


def replay(
    trace: Trace,
    capacity: int,
    policy: Policy,
    *,
    by_layer: bool = False,
    counted: Sequence[bool] | None = None,
) -> Outcome:
    """What a cache would have hit that is empty at first.

    Args:
        trace: what was asked for.
        capacity: experts that it holds.
        policy: which of them.
        by_layer: every layer has an equal part of the capacity to itself; otherwise they compete.
        counted: for every pass, whether its hits are counted; by default those of all.
    """
    groups = groups_of(trace)
    policy.begin(trace.slots, groups)
    held = np.zeros(trace.slots, dtype=bool)
    room = capacity // trace.layers if by_layer else capacity
    counts = np.zeros(trace.layers if by_layer else 1, dtype=np.int64)
    asked = hits = 0
    for index, group in enumerate(groups):
        there = int(held[group.slots].sum())
        if counted is None or counted[group.number]:
            asked, hits = asked + len(group.slots), hits + there
        policy.used(index, group)
        held[group.slots] = True
        of = group.layer if by_layer else 0
        counts[of] += len(group.slots) - there
        excess = int(counts[of]) - room
        if excess > 0:
            first = group.layer * trace.experts if by_layer else 0
            rivals = np.flatnonzero(held[first : first + trace.experts] if by_layer else held) + first
            values = policy.values[rivals]
            held[rivals[np.argpartition(values, excess - 1)[:excess]]] = False
            counts[of] = room
    return Outcome(asked, hits)
