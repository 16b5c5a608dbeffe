"""What is decided of where each unit lives: tiers, what units and devices bring to the decision, and its outcome.

Records alone; `placing.py` decides.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rabbitllm.base.terminal import size

SLOTS = 2
"""Buffers of a device for streamed units: one that computes and one that is being filled."""
EXPERT_STAGING = 8
"""Buffers of host memory that experts go through on their way to another device: one for each thread that reads."""
STAGING = 2
"""Buffers of host memory that what is read for another device goes through: one is filled, one is copied from."""


class Tier(enum.Enum):
    """Where a unit's weights are between two passes."""

    RESIDENT = "resident"
    """Ready to use, on the device that computes."""
    PACKED = "packed"
    """On the device, as stored; dequantized or fused for each use."""
    ROWS = "rows"
    """An embedding of which only the rows of the tokens at hand are brought in."""
    MAPPED = "mapped rows"
    """An embedding that is used in its mapped file: ready, and of it only the rows that are looked up take memory."""
    PINNED = "page-locked RAM"
    """In host memory, as stored; copied to the device for each pass."""
    STREAMED = "streamed"
    """In the layer file; read for each pass, and copied to a device that shares no host memory."""
    ROUTED = "by routing"
    """Experts: in the layer file, but for those that a cache has; read when a token is routed to them."""
    ELSEWHERE = "on another host"
    """Another process computes it; see `rabbitllm.pipeline`."""


READY = (Tier.RESIDENT, Tier.MAPPED)
"""What can be used at any time, as in an ordinary model."""


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """What several units are made from, as tied embeddings are.

    Attributes:
        key: equal for the units.
        stored: bytes in the layer file.
        ready: bytes when made.
    """

    key: str
    stored: int
    ready: int


@dataclass(frozen=True, slots=True)
class UnitCost:
    """What a unit takes.

    Attributes:
        name: its path in the model.
        stored: bytes in the layer file.
        ready: bytes when made; equal to `stored` where nothing is compressed, cast or fused.
        is_view: whether it is usable as stored.
        is_layer: whether it is a decoder layer.
        must_stay: it contains other units, or cannot be streamed for another reason.
        by_rows: an input embedding, which can be brought in row by row.
        routed: bytes of its experts in the layer file, which are brought in by themselves and not part of `stored`.
        scales: bytes of scales that are made from quantized ones, where the unit is multiplied from its codes.
        shared: what of it other units are made from too.
    """

    name: str
    stored: int
    ready: int
    is_view: bool
    is_layer: bool
    must_stay: bool
    by_rows: bool
    routed: int = 0
    scales: int = 0
    shared: tuple[SharedTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertCost:
    """What the experts of one module take.

    Attributes:
        name: the module's path in the model.
        unit: the unit that it is in.
        stored: bytes in the layer file, of all.
        ready: bytes of all, made.
        is_ready: whether they are used as they are stored.
        experts: how many.
        slot: bytes of the memory that one is read into.
        transit: slots that are needed in addition to those of kept experts.
    """

    name: str
    unit: str
    stored: int
    ready: int
    is_ready: bool
    experts: int
    slot: int
    transit: int


@dataclass(frozen=True, slots=True)
class Budget:
    """A device and the bytes of it that weights may take; `is_host` where layer files can be used as mapped."""

    device: str
    nbytes: int
    is_host: bool


@dataclass(frozen=True, slots=True)
class PlacedUnit:
    """Where one unit went.

    Attributes:
        unit: its path in the model.
        device: where it computes.
        tier: where it is between two passes.
        stored: bytes of its tensors in the layer files.
        tied: of these, what is counted at another unit of the same device, which is made from the same tensors.
    """

    unit: str
    device: str
    tier: Tier
    stored: int
    tied: int = 0

    @property
    def counted(self) -> int:
        """Stored bytes, those of tied units once."""
        return self.stored - self.tied


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory for streamed experts.

    Attributes:
        device: where they compute.
        slots: experts that are kept on the device.
        host_slots: further experts that are kept in host memory.
        transit: slots for experts that are not kept.
        slot: bytes of a slot.
        experts: streamed ones that compute there.
        stored: bytes of them.
    """

    device: str
    slots: int
    host_slots: int
    transit: int
    slot: int
    experts: int
    stored: int

    @property
    def nbytes(self) -> int:
        """On the device."""
        return (self.slots + self.transit) * self.slot

    @property
    def kept(self) -> int:
        """Bytes of experts that are kept, there and in host memory."""
        return (self.slots + self.host_slots) * self.slot


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every unit went; prints as a table.

    Attributes:
        units: in the order of the model, without experts that are brought in by themselves.
        budgets: the devices.
        experts: the modules whose experts are.
        pools: memory for those that come and go, one for each device that has any.
    """

    units: tuple[PlacedUnit, ...]
    budgets: tuple[Budget, ...]
    experts: tuple[PlacedUnit, ...] = ()
    pools: tuple[Pool, ...] = ()

    def of(self, unit: str) -> PlacedUnit:
        """Where one unit went."""
        return next(placed for placed in self.units if placed.unit == unit)

    @property
    def home(self) -> str:
        """The device of the first unit: inputs go there, and what belongs to no unit is there."""
        return self.units[0].device

    @property
    def is_resident(self) -> bool:
        """Whether every unit is ready to use at any time, as in an ordinary model."""
        return all(placed.tier in READY for placed in (*self.units, *self.experts))

    @property
    def streamed_bytes(self) -> int:
        """What each pass reads from the disk; of tied units each reads."""
        return sum(placed.stored for placed in self.units if placed.tier is Tier.STREAMED)

    @property
    def uploaded_bytes(self) -> int:
        """What each pass copies from host memory to devices that share none, read from the disk or kept there."""
        return sum(self._uploaded(budget) for budget in self.budgets)

    def plot(self, path: str | Path, title: str = "") -> None:
        """Draw which layer lives where; see `engine.tier_picture.draw_placement`.

        Args:
            path: of the picture, .png, .svg or .pdf, which is replaced.
            title: above it.

        Raises:
            OptionError, MissingPackageError: no such format, or matplotlib is not installed.
        """
        from rabbitllm.engine.tier_picture import draw_placement

        draw_placement(self, path, title)

    def changed(self, tiers: Mapping[str, Tier]) -> Placement:
        """The same with other tiers for some units."""
        return replace(self, units=tuple(replace(p, tier=tiers.get(p.unit, p.tier)) for p in self.units))

    def _uploaded(self, budget: Budget) -> int:
        moves = () if budget.is_host else (Tier.PINNED, Tier.STREAMED)
        return sum(p.stored for p in self.units if p.device == budget.device and p.tier in moves)

    def __str__(self) -> str:
        rows = [("device", "tier", "units", "size")]
        for budget in self.budgets:
            for tier in Tier:
                for what, units in (("", self.units), ("experts, ", self.experts)):
                    chosen = [p for p in units if p.device == budget.device and p.tier is tier]
                    if chosen:
                        nbytes = sum(p.counted for p in chosen)
                        rows.append((budget.device, what + tier.value, str(len(chosen)), size(nbytes)))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = []
        for row in rows:
            columns = (
                row[0].ljust(widths[0]),
                row[1].ljust(widths[1]),
                row[2].rjust(widths[2]),
                row[3].rjust(widths[3]),
            )
            lines.append("  ".join(columns))
        return "\n".join([*lines, *map(_in_words, self.pools), *self._traffic()])

    def _traffic(self) -> list[str]:
        """What a pass moves, where it moves anything."""
        links = [(budget.device, self._uploaded(budget)) for budget in self.budgets]
        moved = [f"{size(nbytes)} are copied to {device}" for device, nbytes in links if nbytes]
        if self.streamed_bytes:
            moved.append(f"{size(self.streamed_bytes)} are read from the disk")
        return ["each pass: " + ", ".join(moved)] if moved else []


def _in_words(pool: Pool) -> str:
    kept = f"{size(pool.slots * pool.slot)} of experts are kept on {pool.device}"
    return kept + (f", {size(pool.host_slots * pool.slot)} in page-locked RAM" if pool.host_slots else "")
