"""How long a pass takes, from what each unit reads and computes. Pure: seconds in, seconds out.

A pass walks the units in order, and so does the next one behind it. Of a device's streamed units one computes while
the following one is read: reading begins when the one before it is taken, goes on through whatever computes until it
is needed, and is waited for if it is not done by then (`engine/loader.py`: one thread and two buffers a device). The
first streamed unit of a pass is read while the last ones of the pass before compute.

While both go on, each is slower than alone: computing by `Strain.computing`, reading by `Strain.reading`, which are
measured, not assumed. (Reading past the page cache costs the processor little; out of the page cache it is a copy that
takes a core.) Devices that read at the same time share the disk.

So where streamed units follow each other with r seconds of reading and c of computing each, a unit takes max(r, c)
where neither strains the other, and r + c where it is the only one, which nothing is read ahead of.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

PASSES = 3
"""That are walked after a first one, which nothing was read ahead of."""
_NOTHING = 1e-12
"""Seconds that rounding may leave over."""


@dataclass(frozen=True, slots=True)
class UnitTime:
    """One unit of a pass, in seconds of work that nothing else disturbs.

    Attributes:
        device: where it computes; each has a reader of its own.
        compute: to bind, make and multiply.
        read: to bring it; 0 where it stays.
    """

    device: str
    compute: float
    read: float = 0.0


@dataclass(frozen=True, slots=True)
class Strain:
    """How many times as long each takes while both go on; at least 1."""

    computing: float = 1.0
    reading: float = 1.0


ALONE = Strain()


def pass_seconds(steps: Sequence[UnitTime], strain: Strain = ALONE) -> float:
    """What a pass takes that follows others: the mean of a few, since those of several devices may differ in turn.

    Args:
        steps: the units, in the order of a pass.
        strain: what reading and computing do to each other.
    """
    walk = _Walk(strain)
    follower = _followers(steps)
    begun = 0.0
    for turn, number in itertools.product(range(1 + PASSES), range(len(steps))):
        if (turn, number) == (1, 0):
            begun = walk.now
        step = steps[number]
        if step.read:
            walk.wait(step.device, step.read)
            if follower[number] != number:
                walk.begin(step.device, steps[follower[number]].read)
        walk.compute(step.compute)
    return (walk.now - begun) / PASSES


def _followers(steps: Sequence[UnitTime]) -> dict[int, int]:
    """Streamed unit -> the one that the same device streams next, around the end; itself where it is the only one."""
    found: dict[int, int] = {}
    for device in {step.device for step in steps}:
        order = [number for number, step in enumerate(steps) if step.device == device and step.read]
        found |= dict(zip(order, order[1:] + order[:1], strict=True))
    return found


class _Walk:
    """The time, and how much each device's reader has still to read, in seconds alone; 0 when it waits to be taken."""

    def __init__(self, strain: Strain) -> None:
        self.now = 0.0
        self._strain = strain
        self._left: dict[str, float] = {}

    def begin(self, device: str, seconds: float) -> None:
        """Have the next unit read."""
        self._left[device] = seconds

    def wait(self, device: str, seconds: float) -> None:
        """Until the unit that was begun is read; `seconds` if none was."""
        self._left.setdefault(device, seconds)
        while self._left[device] > _NOTHING:
            self._pass(float("inf"), 1.0)
        del self._left[device]

    def compute(self, seconds: float) -> None:
        """So many seconds of work, were there no reading."""
        while seconds > _NOTHING:
            speed = 1 / self._strain.computing if self._reading() else 1.0
            seconds -= self._pass(seconds / speed, self._strain.reading) * speed

    def _reading(self) -> list[str]:
        return [device for device, left in self._left.items() if left > _NOTHING]

    def _pass(self, most: float, slower: float) -> float:
        """Let time go by until a reader is done, at most so many seconds; how many it were."""
        readers = self._reading()
        slower *= max(len(readers), 1)
        took = min([most, *(self._left[device] * slower for device in readers)])
        for device in readers:
            self._left[device] -= took / slower
        self.now += took
        return took
