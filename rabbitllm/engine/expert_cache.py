"""The eviction policy of the expert cache. Pure: usage counts in, the slot of each expert out.

Each module has slots of its own, in proportion to its experts. Each expert has a worth: how often it was used recently
(an average over some 3 tokens) and in the long run (over some 500). The recent average decides among recently used
experts, the long one among all others; over traces with published distributions of use no single average came near to
both (docs/PERFORMANCE.md). A missing expert evicts the one with the least worth. If its own worth is less still, it is
read for this use alone, and none is evicted. Reads no files and allocates no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HALF_LIVES = (3.0, 512.0)
"""Tokens after which a use counts half, in the recent average and in the long one."""

Numbers = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


@dataclass(eq=False)
class _Shelf:
    """One module's slots and experts.

    Attributes:
        begin: its first slot.
        owner: slot -> expert, -1 for none.
        slot: expert -> slot, counted from `begin`, -1 for none.
        uses: half-life -> expert -> uses, older ones weighted less.
    """

    begin: int
    owner: Numbers
    slot: Numbers
    uses: Values

    @property
    def worth(self) -> Values:
        """The worth of each expert: a mean of its averages over both spans."""
        weighed: Values = self.uses.T @ _WEIGHTS
        return weighed


_WEIGHTS = 1.0 / np.array(HALF_LIVES)
_KEPT = 2.0**-_WEIGHTS
"""The factor by which one more token reduces the weight of a use."""


class ExpertCache:
    """Slots of one size, and the experts in them.

    Args:
        experts: how many each module has.
        slots: their number.
    """

    def __init__(self, experts: Sequence[int], slots: int) -> None:
        self.slots = slots
        ends = np.cumsum([0, *experts]) * slots // max(sum(experts), 1)
        self._shelves = [
            _Shelf(int(begin), np.full(end - begin, -1), np.full(count, -1), np.zeros((len(HALF_LIVES), count)))
            for count, begin, end in zip(experts, ends[:-1], ends[1:], strict=True)
        ]

    def use(self, module: int, experts: Numbers, counts: Numbers, tokens: int) -> None:
        """Record that a pass uses these experts of a module.

        Args:
            module: its index.
            experts: distinct ones.
            counts: how many of the tokens use each; the uses count as spread evenly over the tokens.
            tokens: the number of tokens of the pass.
        """
        uses, left = self._shelves[module].uses, _KEPT**tokens
        uses *= left[:, None]
        uses[:, experts] += np.outer((1 - left) / (1 - _KEPT), counts / tokens)

    def slots_of(self, module: int, experts: Numbers) -> Numbers:
        """The slot of each of these experts, -1 for none."""
        shelf = self._shelves[module]
        found = shelf.slot[experts]
        return np.where(found >= 0, found + shelf.begin, -1)

    def admit(self, module: int, experts: Numbers, busy: Numbers) -> Numbers:
        """Give slots to experts that have none, to those of most worth first.

        Args:
            module: their module.
            experts: distinct ones.
            busy: slots whose experts are not evicted.

        Returns:
            The slot of each, -1 for none.
        """
        shelf, given = self._shelves[module], np.full(len(experts), -1)
        worth = shelf.worth
        of_slots = np.where(shelf.owner >= 0, worth[shelf.owner], -1.0)
        of_slots[busy - shelf.begin] = np.inf
        victims = np.argsort(of_slots, kind="stable")[: len(experts)].tolist()
        order = np.argsort(-worth[experts], kind="stable").tolist()
        for at, victim in zip(order, victims, strict=False):
            expert = experts[at]
            if worth[expert] < of_slots[victim]:
                break
            if shelf.owner[victim] >= 0:
                shelf.slot[shelf.owner[victim]] = -1
            shelf.owner[victim], shelf.slot[expert] = expert, victim
            given[at] = shelf.begin + victim
        return given

    def forget(self, module: int, slot: int) -> None:
        """Mark a slot of a module as empty: its expert was not read, or is in other memory now."""
        shelf = self._shelves[module]
        expert = shelf.owner[slot - shelf.begin]
        if expert >= 0:
            shelf.slot[expert] = shelf.owner[slot - shelf.begin] = -1

    @property
    def held(self) -> int:
        """The number of occupied slots."""
        return sum(int(np.count_nonzero(shelf.owner >= 0)) for shelf in self._shelves)

    def uses(self) -> list[Values]:
        """The decayed use counts of each module's experts, (half-lives, experts)."""
        return [shelf.uses.copy() for shelf in self._shelves]

    def learn(self, module: int, uses: Values) -> None:
        """Take over another cache's use counts of a module's experts."""
        self._shelves[module].uses[:] = uses

    def best(self, module: int) -> Numbers:
        """The experts of a module that were used, those of most worth first."""
        worth = self._shelves[module].worth
        return np.argsort(-worth, kind="stable")[: np.count_nonzero(worth)]
