"""Which experts stay in memory. Pure: what was used in, which slot of memory each expert gets out.

Every expert of every layer has a score: how often it was used, where older uses count for less (half as much after
`half_life` passes). An expert that is not there gets the slot of the one with the lowest score, unless its own is
lower still: then it is brought in for this use alone, and nothing leaves for it. One budget serves all layers, so that
a layer whose tokens agree gives room to one whose tokens do not. Knows no files and no memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HALF_LIFE = 128.0
"""Passes after which a use counts for half."""
_LARGEST = 1e200
"""Scores are scaled back before they overflow."""

Numbers = npt.NDArray[np.int64]


class ExpertCache:
    """Slots of one size, and who is in them.

    Args:
        experts: how many each module has, module by module.
        slots: how many there are.
        half_life: in passes.
    """

    def __init__(self, experts: Sequence[int], slots: int, half_life: float = HALF_LIFE) -> None:
        self.slots = slots
        self._begin = np.concatenate([[0], np.cumsum(experts)]).astype(np.int64)
        self._score = np.zeros(self._begin[-1])
        self._slot = np.full(self._begin[-1], -1, np.int64)
        self._owner = np.full(slots, -1, np.int64)
        self._growth = 2.0 ** (1.0 / half_life)
        self._weight = np.ones(len(experts))

    def use(self, module: int, experts: Numbers, shares: npt.NDArray[np.float64]) -> None:
        """Note that a pass uses these experts of a module.

        Args:
            module: its number.
            experts: distinct ones.
            shares: of the tokens of this pass that use each: what one token's use of it is worth.
        """
        self._weight[module] *= self._growth
        self._score[self._begin[module] + experts] += self._weight[module] * shares
        if self._weight[module] > _LARGEST:
            self._score /= _LARGEST
            self._weight /= _LARGEST

    def slots_of(self, module: int, experts: Numbers) -> Numbers:
        """The slot of each of these experts, -1 for those that are in none."""
        found: Numbers = self._slot[self._begin[module] + experts]
        return found

    def admit(self, module: int, experts: Numbers, busy: Numbers) -> Numbers:
        """Give slots to experts that are in none, the most used ones first.

        Args:
            module: their module.
            experts: distinct ones.
            busy: slots that keep who is in them.

        Returns:
            The slot of each, -1 for those that have to do without.
        """
        given = np.full(len(experts), -1, np.int64)
        wanted = self._begin[module] + experts
        worth = np.where(self._owner >= 0, self._score[self._owner], -1.0)
        worth[busy] = np.inf
        count = min(len(experts), self.slots)
        if not count:
            return given
        victims = np.argpartition(worth, count - 1)[:count] if count < self.slots else np.arange(self.slots)
        victims = victims[np.argsort(worth[victims], kind="stable")]
        order = np.argsort(-self._score[wanted], kind="stable")
        for at, victim in zip(order.tolist(), victims.tolist(), strict=False):
            if self._score[wanted[at]] < worth[victim]:
                break
            if self._owner[victim] >= 0:
                self._slot[self._owner[victim]] = -1
            self._owner[victim] = wanted[at]
            self._slot[wanted[at]] = victim
            given[at] = victim
        return given

    def forget(self, slot: int) -> None:
        """Declare a slot empty: what should be in it could not be brought."""
        if self._owner[slot] >= 0:
            self._slot[self._owner[slot]] = -1
            self._owner[slot] = -1

    @property
    def held(self) -> int:
        """Slots that somebody is in."""
        return int(np.count_nonzero(self._owner >= 0))

    def scores(self) -> list[npt.NDArray[np.float64]]:
        """Of every module's experts, in uses by today's weight."""
        parts = [self._score[a:b] for a, b in zip(self._begin[:-1], self._begin[1:], strict=True)]
        return [part / weight for part, weight in zip(parts, self._weight, strict=True)]

    def expect(self, scores: Sequence[npt.NDArray[np.float64]]) -> None:
        """Begin with scores of an earlier time, as `scores` gave them."""
        for module, found in enumerate(scores):
            begin, end = self._begin[module], self._begin[module + 1]
            self._score[begin:end] = found * self._weight[module]
