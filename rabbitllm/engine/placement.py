"""Records of the placement: tiers, the costs of units and the budgets of devices, and the result.

`placing.py` decides.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rabbitllm.base.terminal import size

SLOTS = 2
"""Buffers of a device for streamed units: one in use and one that is being filled."""
EXPERT_STAGING = 8
"""Staging buffers in host memory for experts that are copied to another device: one for each thread that reads."""
STAGING = 2
"""Staging buffers in host memory for streamed units of another device: one is filled, one is copied from."""


class Tier(enum.Enum):
    """The location and form of a unit's weights between two passes."""

    RESIDENT = "resident"
    """Ready to use, on the device that computes."""
    PACKED = "packed"
    """On the device, in stored form; dequantized or fused for each use."""
    ROWS = "rows"
    """An embedding of which only the rows of the input tokens are read."""
    MAPPED = "mapped rows"
    """An embedding that is used in its mapped file: ready, and only the rows that are looked up take memory."""
    PINNED = "page-locked RAM"
    """In pinned host memory, in stored form; copied to the device for each pass."""
    STREAMED = "streamed"
    """In the layer file; read for each pass, and copied to a device with memory of its own."""
    ROUTED = "by routing"
    """Experts: in the layer file, except those in a cache; read when a token is routed to them."""
    ELSEWHERE = "on another host"
    """Another process computes it; see `rabbitllm.pipeline`."""


READY = (Tier.RESIDENT, Tier.MAPPED)
"""Tiers of units that can be used at any time, as in an ordinary model."""


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor that several units share, as tied embeddings do.

    Attributes:
        key: equal for these units.
        stored: bytes in the layer file.
        ready: bytes when ready to use.
    """

    key: str
    stored: int
    ready: int


@dataclass(frozen=True, slots=True)
class UnitCost:
    """The memory cost of a unit.

    Attributes:
        name: its path in the model.
        stored: bytes in the layer file.
        ready: bytes when ready to use; equal to `stored` if nothing is compressed, cast or fused.
        is_view: whether it is used in its stored form.
        is_layer: whether it is a decoder layer.
        must_stay: whether it has to be resident: it contains other units, or cannot be streamed for another reason.
        by_rows: whether it is an input embedding that can be read row by row.
        routed: bytes of its experts in the layer file, which are streamed individually and not part of `stored`.
        scales: bytes of dequantized scales, if the unit is multiplied from its codes.
        shared: its tensors that other units share.
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
    """The memory cost of the experts of one module.

    Attributes:
        name: the module's path in the model.
        unit: the unit that it is in.
        stored: bytes of all experts in the layer file.
        ready: bytes of all experts when ready to use.
        is_ready: whether they are used in their stored form.
        experts: their number.
        slot: bytes of the memory that one is read into.
        transit: slots that are needed in addition to those of the cache.
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
    """A device and the bytes for weights on it; `is_host` if layer files can be used as mapped."""

    device: str
    nbytes: int
    is_host: bool


@dataclass(frozen=True, slots=True)
class PlacedUnit:
    """The placement of one unit.

    Attributes:
        unit: its path in the model.
        device: the device that computes it.
        tier: of its weights between two passes.
        stored: bytes of its tensors in the layer files.
        tied: the part of `stored` that is counted at another unit of the same device, which shares the tensors.
    """

    unit: str
    device: str
    tier: Tier
    stored: int
    tied: int = 0

    @property
    def counted(self) -> int:
        """Stored bytes, without those counted at another unit."""
        return self.stored - self.tied


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory for streamed experts.

    Attributes:
        device: the device that computes the experts.
        slots: cache slots on the device.
        host_slots: further cache slots in host memory.
        transit: slots for experts that are not cached.
        slot: bytes of a slot.
        experts: the number of streamed experts of the device.
        stored: their bytes in the layer files.
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
        """Bytes on the device."""
        return (self.slots + self.transit) * self.slot

    @property
    def kept(self) -> int:
        """Bytes of the cache slots, on the device and in host memory."""
        return (self.slots + self.host_slots) * self.slot


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of every unit; prints as a table.

    Attributes:
        units: in the order of the model, without experts that are streamed individually.
        budgets: the devices.
        experts: the modules whose experts are streamed individually.
        pools: memory for streamed experts, one for each device that has any.
    """

    units: tuple[PlacedUnit, ...]
    budgets: tuple[Budget, ...]
    experts: tuple[PlacedUnit, ...] = ()
    pools: tuple[Pool, ...] = ()

    def of(self, unit: str) -> PlacedUnit:
        """The placement of one unit."""
        return next(placed for placed in self.units if placed.unit == unit)

    @property
    def home(self) -> str:
        """The device of the first unit, of the inputs, and of tensors outside all units."""
        return self.units[0].device

    @property
    def is_resident(self) -> bool:
        """Whether every unit is ready to use at any time, as in an ordinary model."""
        return all(placed.tier in READY for placed in (*self.units, *self.experts))

    @property
    def streamed_bytes(self) -> int:
        """Bytes that each pass reads from the disk; each tied unit counts."""
        return sum(placed.stored for placed in self.units if placed.tier is Tier.STREAMED)

    @property
    def uploaded_bytes(self) -> int:
        """Bytes that each pass copies from host memory to devices with memory of their own, streamed or pinned."""
        return sum(self._uploaded(budget) for budget in self.budgets)

    def plot(self, path: str | Path, title: str = "") -> None:
        """Draw the device and tier of each layer; see `engine.tier_picture.draw_placement`.

        Args:
            path: of the picture, .png, .svg or .pdf; an existing file is replaced.
            title: of the picture.

        Raises:
            OptionError, MissingPackageError: no such format, or matplotlib is not installed.
        """
        from rabbitllm.engine.tier_picture import draw_placement

        draw_placement(self, path, title)

    def changed(self, tiers: Mapping[str, Tier]) -> Placement:
        """A copy with other tiers for some units."""
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
        """The line about the bytes that each pass copies and reads; empty if there are none."""
        links = [(budget.device, self._uploaded(budget)) for budget in self.budgets]
        moved = [f"{size(nbytes)} are copied to {device}" for device, nbytes in links if nbytes]
        if self.streamed_bytes:
            moved.append(f"{size(self.streamed_bytes)} are read from the disk")
        return ["each pass: " + ", ".join(moved)] if moved else []


def _in_words(pool: Pool) -> str:
    kept = f"{size(pool.slots * pool.slot)} of experts are kept on {pool.device}"
    return kept + (f", {size(pool.host_slots * pool.slot)} in page-locked RAM" if pool.host_slots else "")
