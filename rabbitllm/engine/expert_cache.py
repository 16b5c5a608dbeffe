"""Which experts stay in memory. Pure: what was used in, which slot of memory each expert gets out.

Each module has slots of its own, in proportion to its experts, and every expert a worth: how often it was used lately
(an average over some 3 tokens) and in the long run (over some 500). The first decides among what was used just now, the
second among all the rest; over traces with published distributions of use no single average came near to both
(docs/PERFORMANCE.md). An expert that is not there takes the slot of the one with the least worth, unless its own is
less still: then it is brought in for this use alone, and nothing leaves for it. Knows no files and no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HALF_LIVES = (3.0, 512.0)
"""Tokens after which a use counts for half: lately, and in the long run."""

Numbers = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


@dataclass(eq=False)
class _Shelf:
    """One module's slots and experts.

    Attributes:
        begin: its first slot.
        owner: slot -> expert, -1 for none.
        slot: expert -> slot, counted from `begin`, -1 for none.
        uses: half-life -> expert -> uses, older ones for less.
    """

    begin: int
    owner: Numbers
    slot: Numbers
    uses: Values

    @property
    def worth(self) -> Values:
        """Of each expert: a mean of its averages over both spans."""
        weighed: Values = self.uses.T @ _WEIGHTS
        return weighed


_WEIGHTS = 1.0 / np.array(HALF_LIVES)
_KEPT = 2.0**-_WEIGHTS
"""What is left of a use after one more token."""


class ExpertCache:
    """Slots of one size, and who is in them.

    Args:
        experts: how many each module has.
        slots: how many there are.
    """

    def __init__(self, experts: Sequence[int], slots: int) -> None:
        self.slots = slots
        ends = np.cumsum([0, *experts]) * slots // max(sum(experts), 1)
        self._shelves = [
            _Shelf(int(begin), np.full(end - begin, -1), np.full(count, -1), np.zeros((len(HALF_LIVES), count)))
            for count, begin, end in zip(experts, ends[:-1], ends[1:], strict=True)
        ]

    def use(self, module: int, experts: Numbers, counts: Numbers, tokens: int) -> None:
        """Note that a pass uses these experts of a module.

        Args:
            module: its number.
            experts: distinct ones.
            counts: how many of the tokens use each; as if they were spread evenly over them.
            tokens: of the pass.
        """
        uses, left = self._shelves[module].uses, _KEPT**tokens
        uses *= left[:, None]
        uses[:, experts] += np.outer((1 - left) / (1 - _KEPT), counts / tokens)

    def slots_of(self, module: int, experts: Numbers) -> Numbers:
        """The slot of each of these experts, -1 for those that are in none."""
        shelf = self._shelves[module]
        found = shelf.slot[experts]
        return np.where(found >= 0, found + shelf.begin, -1)

    def admit(self, module: int, experts: Numbers, busy: Numbers) -> Numbers:
        """Give slots to experts that are in none, to those of most worth first.

        Args:
            module: their module.
            experts: distinct ones.
            busy: slots that keep who is in them.

        Returns:
            The slot of each, -1 for those that have to do without.
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
        """Declare a slot of a module empty: what should be in it did not come, or went elsewhere."""
        shelf = self._shelves[module]
        expert = shelf.owner[slot - shelf.begin]
        if expert >= 0:
            shelf.slot[expert] = shelf.owner[slot - shelf.begin] = -1

    @property
    def held(self) -> int:
        """The number of occupied slots."""
        return sum(int(np.count_nonzero(shelf.owner >= 0)) for shelf in self._shelves)

    def uses(self) -> list[Values]:
        """What is known of the experts of each module, (half-lives, experts)."""
        return [shelf.uses.copy() for shelf in self._shelves]

    def learn(self, module: int, uses: Values) -> None:
        """Take over what another cache knew of a module's experts."""
        self._shelves[module].uses[:] = uses

    def best(self, module: int) -> Numbers:
        """The experts of a module that were used at all, those of most worth first."""
        worth = self._shelves[module].worth
        return np.argsort(-worth, kind="stable")[: np.count_nonzero(worth)]
