"""Which unit lives where: on its device, in page-locked host memory, or on the disk. Pure: sizes and limits in, a tier
for every unit out.

A pass over a model that does not fit is cyclic, so a cache that keeps the most recent gets no hits at all; a fixed
subset is kept instead, spread evenly, so that the transfers of the rest hide behind its computation.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

SLOTS = 2
"""Buffers of a device for streamed units: one that computes and one that is being filled."""
STAGING = 2
"""Buffers of host memory that what is read for another device goes through: one is filled, one is copied from."""


class Tier(enum.Enum):
    """Where a unit's weights are between two passes."""

    RESIDENT = "resident"
    """Ready to use, on the device that computes."""
    PACKED = "packed"
    """On the device, as stored; dequantised or fused for each use."""
    ROWS = "rows"
    """An embedding of which only the rows of the tokens at hand are brought in."""
    PINNED = "page-locked RAM"
    """In host memory, as stored; copied to the device for each pass."""
    STREAMED = "streamed"
    """In the layer file; read for each pass, and copied to a device that shares no host memory."""


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
    """

    name: str
    stored: int
    ready: int
    is_view: bool
    is_layer: bool
    must_stay: bool
    by_rows: bool


@dataclass(frozen=True, slots=True)
class Budget:
    """A device and the bytes of it that weights may take; `is_host` where layer files can be used as mapped."""

    device: str
    nbytes: int
    is_host: bool


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one unit went."""

    unit: str
    device: str
    tier: Tier
    stored: int


Sized = TypeVar("Sized", UnitCost, Placed)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every unit went; prints as a table.

    Attributes:
        units: in the order of the model.
        budgets: the devices.
    """

    units: tuple[Placed, ...]
    budgets: tuple[Budget, ...]

    def of(self, unit: str) -> Placed:
        """Where one unit went."""
        return next(placed for placed in self.units if placed.unit == unit)

    @property
    def home(self) -> str:
        """The device of the first unit: inputs go there, and what belongs to no unit is there."""
        return self.units[0].device

    @property
    def is_resident(self) -> bool:
        """Whether every unit is ready to use at any time, as in an ordinary model."""
        return all(placed.tier is Tier.RESIDENT for placed in self.units)

    @property
    def streamed_bytes(self) -> int:
        """What each pass reads from the disk."""
        return sum(placed.stored for placed in self.units if placed.tier is Tier.STREAMED)

    @property
    def uploaded_bytes(self) -> int:
        """What each pass copies from host memory to devices that share none, read from the disk or kept there."""
        return sum(self._uploaded(budget) for budget in self.budgets)

    def changed(self, tiers: Mapping[str, Tier]) -> Placement:
        """The same with other tiers for some units."""
        return replace(self, units=tuple(replace(p, tier=tiers.get(p.unit, p.tier)) for p in self.units))

    def _uploaded(self, budget: Budget) -> int:
        moves = () if budget.is_host else (Tier.PINNED, Tier.STREAMED)
        return sum(p.stored for p in self.units if p.device == budget.device and p.tier in moves)

    def __str__(self) -> str:
        rows = [("device", "tier", "units", "GB")]
        for budget in self.budgets:
            for tier in Tier:
                chosen = [p for p in self.units if p.device == budget.device and p.tier is tier]
                if chosen:
                    size = f"{sum(p.stored for p in chosen) / 1e9:.2f}"
                    rows.append((budget.device, tier.value, str(len(chosen)), size))
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
        return "\n".join(lines + self._traffic())

    def _traffic(self) -> list[str]:
        """What a pass moves, where it moves anything."""
        links = [(budget.device, self._uploaded(budget)) for budget in self.budgets]
        moved = [f"{nbytes / 1e9:.2f} GB are copied to {device}" for device, nbytes in links if nbytes]
        if self.streamed_bytes:
            moved.append(f"{self.streamed_bytes / 1e9:.2f} GB are read from the disk")
        return ["each pass: " + ", ".join(moved)] if moved else []


def place(
    costs: Sequence[UnitCost],
    budgets: Sequence[Budget],
    *,
    small_first: bool = True,
    cached_layers: int = 0,
    host_bytes: int = 0,
) -> Placement:
    """Give every unit a device and a tier.

    Args:
        costs: the units, in the order of a pass.
        budgets: the devices, in the order of a pass; with several, each gets a run of units in proportion.
        small_first: keep what is no decoder layer before any decoder layer.
        cached_layers: keep at least this many decoder layers in host memory, whatever the budget: the first ones that
            are not there, or on another device, anyway.
        host_bytes: host memory that may be page-locked for devices that share none.
    """
    placed: list[Placed] = []
    for budget, share in zip(budgets, _spans(costs, budgets), strict=True):
        tiers = _tiers(share, budget, small_first)
        if budget.is_host:
            layers = [cost for cost in share if cost.is_layer][:cached_layers]
            for cost in layers:
                if tiers[cost.name] is Tier.STREAMED:
                    tiers[cost.name] = _kept(cost)
        placed += [Placed(cost.name, budget.device, tiers[cost.name], cost.stored) for cost in share]
    placement = Placement(tuple(placed), tuple(budgets))
    decoder = {cost.name for cost in costs if cost.is_layer}
    return placement.changed(dict.fromkeys(_page_locked(placement, decoder, host_bytes, cached_layers), Tier.PINNED))


def _page_locked(placement: Placement, layers: set[str], host_bytes: int, cached_layers: int) -> list[str]:
    """Which streamed units of devices that share no host memory to keep there.

    One even choice over the whole walk: so each device gets its share of the memory by what it would stream, and the
    disk is asked at even distances, whichever device is at work.
    """
    apart = [budget.device for budget in placement.budgets if not budget.is_host]
    streamed = [p for p in placement.units if p.tier is Tier.STREAMED and p.device in apart]
    room = host_bytes
    if sum(p.stored for p in streamed) > room:
        room -= sum(STAGING * max((p.stored for p in streamed if p.device == name), default=0) for name in apart)
    chosen = [p.unit for p in _spread(streamed, room)]
    missing = max(cached_layers - len(layers.intersection(chosen)), 0)
    return chosen + [p.unit for p in streamed if p.unit in layers and p.unit not in chosen][:missing]


def _spans(costs: Sequence[UnitCost], budgets: Sequence[Budget]) -> list[list[UnitCost]]:
    """Contiguous runs of units, one a device, of stored bytes in proportion to the budgets."""
    total = sum(cost.stored for cost in costs) or 1
    shares = [budget.nbytes for budget in budgets]
    if not any(shares):
        shares = [1] * len(budgets)
    runs: list[list[UnitCost]] = [[] for _ in budgets]
    ends, at = [], 0.0
    for share in shares:
        at += share / sum(shares)
        ends.append(at)
    passed, device = 0, 0
    for cost in costs:
        middle = (passed + cost.stored / 2) / total
        while device < len(budgets) - 1 and middle > ends[device]:
            device += 1
        runs[device].append(cost)
        passed += cost.stored
    return runs


def _tiers(costs: Sequence[UnitCost], budget: Budget, small_first: bool) -> dict[str, Tier]:
    need = sum(_ready_cost(cost, budget) for cost in costs)
    if need <= budget.nbytes:
        return dict.fromkeys((cost.name for cost in costs), Tier.RESIDENT)
    tiers = {cost.name: _rows_tier(cost, budget) for cost in costs if cost.by_rows}
    # made for good, since it may be used outside its own forward
    tiers |= {cost.name: Tier.RESIDENT for cost in costs if cost.must_stay}
    room = budget.nbytes - sum(cost.ready for cost in costs if cost.must_stay)
    candidates = [cost for cost in costs if cost.name not in tiers]
    scratch = max((cost.ready for cost in candidates if not cost.is_view), default=0)
    if sum(cost.stored for cost in candidates) + scratch <= room:
        return tiers | {cost.name: _kept(cost) for cost in candidates}
    tiers |= {cost.name: Tier.STREAMED for cost in candidates}
    left = room - scratch
    if small_first:
        for cost in [cost for cost in candidates if not cost.is_layer]:
            rest = [other for other in candidates if other is not cost]
            if cost.stored + _slots(rest) <= left:
                tiers[cost.name] = _kept(cost)
                left -= cost.stored
                candidates = rest
    slots = _slots(candidates)
    layers = [cost for cost in candidates if cost.is_layer or not small_first]
    for cost in _spread(layers, left - slots):
        tiers[cost.name] = _kept(cost)
    return tiers


def _slots(costs: Sequence[UnitCost]) -> int:
    """Of the buffers, if these units are streamed."""
    return SLOTS * max((cost.stored for cost in costs), default=0)


def _ready_cost(cost: UnitCost, budget: Budget) -> int:
    """Memory of a unit that is kept ready. A mapped embedding costs the rows that are touched: next to nothing."""
    return 0 if cost.by_rows and cost.is_view and budget.is_host else cost.ready


def _rows_tier(cost: UnitCost, budget: Budget) -> Tier:
    return Tier.RESIDENT if cost.is_view and budget.is_host else Tier.ROWS


def _kept(cost: UnitCost) -> Tier:
    return Tier.RESIDENT if cost.is_view else Tier.PACKED


def _spread(costs: Sequence[Sized], room: int) -> list[Sized]:
    """Units of at most `room` bytes in all, evenly spread over the walk."""
    total = sum(cost.stored for cost in costs)
    if room <= 0 or not total:
        return []
    share = min(room, total)
    chosen, credit, used = [], 0, 0  # credit is counted in whole numbers, times `total`
    for cost in costs:
        credit += cost.stored * share
        if credit >= cost.stored * total and used + cost.stored <= room:
            chosen.append(cost)
            credit -= cost.stored * total
            used += cost.stored
    return chosen
