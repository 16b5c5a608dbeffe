"""The placement of units: on their device, in pinned host memory, or on the disk. Pure: sizes and limits in, tiers out.

Passes are cyclic, so a cache of the most recent units of a model that does not fit would never hit. Instead a fixed
subset is resident, evenly spread, so that the transfers of the other units overlap with its computation.
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rabbitllm.base.grouping import grouped
from rabbitllm.base.rounding import round_up
from rabbitllm.base.terminal import Printed, aligned, size
from rabbitllm.display import tier_picture
from rabbitllm.display.tier_picture import COLOURS, Bar

SLOTS = 2
"""Buffers of a device for streamed units: one in use and one that is being filled."""
EXPERT_STAGING = 8
"""Staging buffers in host memory for experts of another device: one for each thread that reads."""
LARGE_TABLE = 64 << 20
"""Bytes from which an embedding is not made ready for its few rows on the host. A token of Gemma-3-270M takes 11 ms
either way."""
STAGING = 2
"""Staging buffers in host memory for streamed units of another device: one is filled, one is copied from."""


class Tier(enum.Enum):
    """The location and form of a unit's weights between two passes."""

    RESIDENT = "resident"
    """Ready to use, on the device that computes."""
    PACKED = "packed"
    """On the device, in stored form; dequantized or fused for each use."""
    ROWS = "rows"
    """An embedding of which only the rows that a pass looks up are read."""
    MAPPED = "mapped rows"
    """An embedding that is used in its mapped file: only the rows that are looked up take memory."""
    PINNED = "page-locked RAM"
    """In pinned host memory (ordinary memory if the driver pins no more), in stored form; copied for each pass."""
    STREAMED = "streamed"
    """In the layer file; read for each pass, and copied to a device that does not share host memory."""
    ROUTED = "by routing"
    """Experts: in the layer file, except those in a cache; read when a token is routed to them."""
    ELSEWHERE = "on another host"
    """Another process computes it; see `rabbitllm.pipeline`."""


READY = (Tier.RESIDENT, Tier.MAPPED)
"""Tiers of units that can be used at any time, as in an ordinary model."""
HOOKED = (Tier.PACKED, Tier.PINNED, Tier.STREAMED)
"""Tiers of units whose parameters are bound, and made if necessary, for each pass; packed views are bound once."""


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
        scratch: bytes besides `stored` that each use takes while the unit is not ready: what is dequantized, cast or
            fused for it.
        is_view: whether it is used in its stored form.
        is_layer: whether it is a decoder layer.
        must_stay: whether it has to be resident: it contains other units, or cannot be streamed for another reason.
        by_rows: whether it is an embedding that can be read row by row.
        routed: bytes of its experts in the layer file, which are streamed individually and not part of `stored`.
        scales: bytes of dequantized scales that are kept with it in stored form.
        shared: its tensors that other units share.
        is_table: whether it is a table other than the input embedding, which is always read by rows.
        copy: bytes of its copy at fewer bits, which is in memory if the unit is streamed; 0 if it gets none.
        slot: bytes of a buffer that it is streamed through, if it is in pieces; else 0.
        once: whether it is made ready once wherever it is kept: its codes are rearranged, and `scales` has what it then
            takes besides `stored`.
    """

    name: str
    stored: int
    ready: int
    scratch: int
    is_view: bool
    is_layer: bool
    must_stay: bool
    by_rows: bool
    routed: int = 0
    scales: int = 0
    shared: tuple[SharedTensor, ...] = ()
    is_table: bool = False
    copy: int = 0
    slot: int = 0
    once: bool = False

    @property
    def kept(self) -> int:
        """Memory of the unit in the form in which it is kept, with what that takes besides `stored`."""
        return self.stored + self.scales

    @property
    def instead(self) -> int:
        """Memory that the unit in stored form takes besides that of its copy, which it then needs no more."""
        return max(self.kept - self.copy, 0)


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
        copy: bytes of the copies of all experts at fewer bits, if they are streamed individually; 0 if they get none.
    """

    name: str
    unit: str
    stored: int
    ready: int
    is_ready: bool
    experts: int
    slot: int
    transit: int
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """A device and the bytes for weights on it; `is_host`: whether it computes with mapped layer files."""

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


_LABELS: Mapping[Tier, tuple[str, str]] = {
    Tier.RESIDENT: (tier_picture.READY, tier_picture.MAPPED),
    Tier.PACKED: (tier_picture.STORED, tier_picture.CODES),
    Tier.ROWS: (tier_picture.ROWS, tier_picture.ROWS),
    Tier.MAPPED: (tier_picture.ROWS, tier_picture.ROWS),
    Tier.PINNED: (tier_picture.PINNED, tier_picture.PINNED),
    Tier.STREAMED: (tier_picture.DISK, tier_picture.DISK),
    Tier.ELSEWHERE: (tier_picture.AWAY, tier_picture.AWAY),
}
"""Tier -> label on a GPU, and on the host."""


@dataclass(frozen=True, slots=True)
class TierContent:
    """The content of one tier of a device: a value of `Tier`, units, and bytes that are counted for them."""

    device: str
    tier: str
    units: int
    stored_bytes: int


def tier_contents(placed: Iterable[PlacedUnit]) -> tuple[TierContent, ...]:
    """Units and bytes by device and tier, in the order in which these occur."""
    nbytes = grouped(((unit.device, unit.tier), unit.counted) for unit in placed)
    return tuple(TierContent(device, tier.value, len(sizes), sum(sizes)) for (device, tier), sizes in nbytes.items())


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
    def host_bytes(self) -> int:
        """Bytes of the slots in host memory."""
        return self.host_slots * self.slot

    @property
    def kept(self) -> int:
        """Bytes of the cache slots, on the device and in host memory."""
        return self.slots * self.slot + self.host_bytes

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of the experts that have a slot on the device, and in host memory."""
        return self.slots / self.experts, self.host_slots / self.experts


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of all that is streamed, at fewer bits and in memory; with them the model is its own draft.

    Attributes:
        kind: the type of their blocks.
        nbytes: their bytes.
        lacking: bytes that they take beyond the budget.
    """

    kind: str
    nbytes: int
    lacking: int = 0


@dataclass(frozen=True, slots=True)
class Placement(Printed):
    """The placement of every unit; prints as a table.

    Attributes:
        units: placement of each unit in the order of the model, without experts that are streamed individually.
        budgets: limits of the devices.
        experts: modules whose experts are streamed individually.
        pools: memory for streamed experts, one for each device that has any.
        copies: of what is streamed, for drafts; None if there are none.
    """

    units: tuple[PlacedUnit, ...]
    budgets: tuple[Budget, ...]
    experts: tuple[PlacedUnit, ...] = ()
    pools: tuple[Pool, ...] = ()
    copies: Copies | None = None

    @property
    def hosts(self) -> set[str]:
        """The devices that compute with mapped layer files."""
        return {budget.device for budget in self.budgets if budget.is_host}

    def of(self, unit: str) -> PlacedUnit:
        """The placement of one unit.

        Args:
            unit: its path in the model, such as "model.layers.0".

        Raises:
            KeyError: there is no such unit.
        """
        for placed in self.units:
            if placed.unit == unit:
                return placed
        raise KeyError(f"The model has no unit {unit!r}; its first is {self.units[0].unit!r}.")

    @property
    def home(self) -> str:
        """The device of the first unit, of the inputs, and of tensors outside all units."""
        return self.units[0].device

    @property
    def limits(self) -> dict[str, int]:
        """Device -> bytes for weights on it."""
        return {budget.device: budget.nbytes for budget in self.budgets}

    @property
    def is_resident(self) -> bool:
        """Whether every unit is ready to use at any time, as in an ordinary model."""
        ready, hosts = {*READY, Tier.ROWS}, self.hosts  # a host reads rows from memory that it maps
        units = [placed.tier in (ready if placed.device in hosts else READY) for placed in self.units]
        return all(units) and all(placed.tier in READY for placed in self.experts)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that each pass reads from the disk; each tied unit counts."""
        return sum(placed.stored for placed in self.units if placed.tier is Tier.STREAMED)

    @property
    def contents(self) -> tuple[TierContent, ...]:
        """The units of each device and tier, and their bytes, without experts that are streamed individually."""
        return tier_contents(self.units)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that weights take between two passes, mapped files included."""
        hosts, kept = self.hosts, (Tier.RESIDENT, Tier.PACKED)
        units = sum(p.counted for p in self.units if p.tier is Tier.PINNED or (p.device in hosts and p.tier in kept))
        mapped = sum(p.stored for p in self.experts if p.tier is not Tier.ROUTED)
        copies = self.copies.nbytes if self.copies is not None else 0
        return units + mapped + sum(p.nbytes if p.device in hosts else p.host_bytes for p in self.pools) + copies

    @property
    def uploaded_bytes(self) -> int:
        """Bytes that each pass copies from host memory to devices with memory of their own, streamed or pinned."""
        return sum(self._uploaded(budget) for budget in self.budgets)

    @property
    def moved_bytes(self) -> int:
        """Bytes that each pass reads from the disk or copies to a device, whichever is more; 0 if nothing is moved."""
        return max(self.streamed_bytes, self.uploaded_bytes)

    @property
    def stays(self) -> bool:
        """Whether passes use weights where they are: none are read from the disk, and none copied to a device."""
        return not self.moved_bytes and not self.pools

    def bytes_on(self, device: str) -> int:
        """Bytes of weights on a device between two passes; those of mapped files count."""
        return self.host_bytes if device == "cpu" else sum(self.bytes_by_device.get(device, {}).values())

    def plot(self, path: str | Path, title: str = "") -> None:
        """Draw the device and tier of each layer; needs matplotlib.

        Args:
            path: file of the picture, .png, .svg or .pdf; an existing file is replaced.
            title: title of the picture.

        Raises:
            OptionError, MissingPackageError: no such format, or matplotlib is not installed.
        """
        tier_picture.draw_tiers(self.bars, self.bytes_by_device, self.limits, path, title)

    @property
    def bars(self) -> tuple[Bar, ...]:
        """The stored bytes of each unit by their location, in the order of a pass."""
        hosts, shares = self.hosts, {pool.device: pool.shares for pool in self.pools}
        units = {placed.unit for placed in self.units}
        experts = grouped((enclosing(placed.unit, units) or placed.unit, placed) for placed in self.experts)
        bars = []
        for placed in self.units:
            parts: Counter[str] = Counter({_LABELS[placed.tier][placed.device in hosts]: placed.counted})
            for inside in experts.get(placed.unit, ()):
                shares_of = shares[inside.device] if inside.tier is Tier.ROUTED else (1.0, 0.0)
                cached, pinned = (round(share * inside.stored) for share in shares_of)
                parts[tier_picture.EXPERTS] += cached
                parts[tier_picture.EXPERTS_PINNED] += pinned
                parts[tier_picture.EXPERTS_AWAY] += inside.stored - cached - pinned
            bars.append(Bar(placed.unit, placed.device, {label: n for label in COLOURS if (n := parts[label])}))
        return tuple(bars)

    @property
    def bytes_by_device(self) -> dict[str, dict[str, int]]:
        """Each device, pinned memory and the disk -> the bytes on it, by the labels of `tier_picture.COLOURS`."""
        totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for bar in self.bars:
            for label, nbytes in bar.parts.items():
                pinned = label in (tier_picture.PINNED, tier_picture.EXPERTS_PINNED)
                place = "disk" if label in tier_picture.ON_DISK else "page-locked" if pinned else bar.device
                totals[place][label] += nbytes
        order = [*self.limits, *(place for place in ("page-locked", "disk") if place in totals)]
        return {place: {label: n for label in COLOURS if (n := totals[place][label])} for place in order}

    def changed(self, tiers: Mapping[str, Tier]) -> Placement:
        """A copy with other tiers for some units."""
        return replace(self, units=tuple(replace(p, tier=tiers.get(p.unit, p.tier)) for p in self.units))

    def _uploaded(self, budget: Budget) -> int:
        moves = () if budget.is_host else (Tier.PINNED, Tier.STREAMED)
        return sum(p.stored for p in self.units if p.device == budget.device and p.tier in moves)

    def __str__(self) -> str:
        entries = [("", part) for part in self.contents] + [("experts, ", part) for part in tier_contents(self.experts)]
        devices, tiers = [budget.device for budget in self.budgets], [tier.value for tier in Tier]
        entries.sort(key=lambda part: (devices.index(part[1].device), tiers.index(part[1].tier)))
        rows = [(part.device, name + part.tier, str(part.units), size(part.stored_bytes)) for name, part in entries]
        lines = aligned([("device", "tier", "units", "size"), *rows], left=(0, 1))
        for pool in self.pools:
            pinned = f", {size(pool.host_bytes)} in page-locked RAM" if pool.host_slots else ""
            lines.append(f"{size(pool.slots * pool.slot)} of experts are kept on {pool.device}{pinned}")
        if self.copies is not None:
            kind, nbytes = self.copies.kind.lower(), self.copies.nbytes
            lines.append(f"{size(nbytes)} are copies at {kind} of what is streamed, for drafts")
        return "\n".join([*lines, *self._traffic()])

    def _traffic(self) -> list[str]:
        """The line about the bytes that each pass copies and reads; empty if there are none."""
        links = [(budget.device, self._uploaded(budget)) for budget in self.budgets]
        moved = [f"{size(nbytes)} are copied to {device}" for device, nbytes in links if nbytes]
        if self.streamed_bytes:
            moved.append(f"{size(self.streamed_bytes)} are read from the disk")
        return ["each pass: " + ", ".join(moved)] if moved else []


# The GPU memory that allocations take: torch's allocator cuts them from segments, and rounds.
#
# The sizes are those of torch's caching allocator for CUDA (c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize,
# kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer, kRoundLarge), the same since its version 1.0.

_ROUND = 512
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_LARGE = 10 << 20
_LARGE_SEGMENT = 20 << 20
_ROUND_LARGE = 2 << 20


def allocated_bytes(nbytes: int) -> int:
    """Bytes of a GPU that one of many allocations of `nbytes` takes, with its share of the unused ends of segments.

    At worst 1.5 times `nbytes`: two allocations of 6.7 MiB have a segment of 20 MiB.
    """
    rounded = max(round_up(nbytes, _ROUND), _ROUND)
    if rounded >= _LARGE:
        return round_up(rounded, _ROUND_LARGE)
    segment = _SMALL_SEGMENT if rounded <= _SMALL else _LARGE_SEGMENT
    return segment // (segment // rounded)


Sized = TypeVar("Sized", UnitCost, PlacedUnit)


def place(
    costs: Sequence[UnitCost],
    budgets: Sequence[Budget],
    *,
    small_first: bool = True,
    cached_layers: int = 0,
    host_bytes: int = 0,
    experts: Sequence[ExpertCost] = (),
    kind: str | None = None,
) -> Placement:
    """Give every unit a device and a tier.

    Experts, of which a token uses a few, get the memory that units leave. If the costs have copies, so has the host
    memory room for those of all that is streamed.

    Args:
        costs: the units, in the order of a pass.
        budgets: the devices. With several, each gets a run of units if all of them fit; else units alternate between
            the devices, so that all links copy at the same time.
        small_first: keep all other units before any decoder layer.
        cached_layers: keep at least this many decoder layers in host memory, even beyond the budget: the first ones
            that would be streamed.
        host_bytes: host memory that may be pinned for devices with memory of their own.
        experts: the modules whose experts are streamed individually.
        kind: the type of the blocks of copies; None if there are none.
    """
    runs = _runs(costs, budgets)
    placed, routed, pools, free = _placed(runs, budgets, small_first, cached_layers, experts)
    if len(budgets) > 1 and any(unit.tier is Tier.STREAMED for unit in placed.values()):
        placed, routed, pools, free = _placed(_in_turns(costs, budgets), budgets, small_first, cached_layers, experts)
    placement = Placement(tuple(placed[cost.name] for cost in costs), tuple(budgets), tuple(routed), tuple(pools))
    decoder = {cost.name for cost in costs if cost.is_layer}
    pinned = _pinned_layers(placement, decoder, host_bytes, cached_layers)
    placement = placement.changed(dict.fromkeys(pinned, Tier.PINNED))
    units = _counted_once(placement, {cost.name: cost.shared for cost in costs if cost.shared})
    copies = None
    if kind is not None:
        read = {p.unit for p in (*placement.units, *routed) if p.tier in (Tier.STREAMED, Tier.ROUTED)}
        nbytes = sum(cost.copy for cost in costs if cost.name in read)
        nbytes += sum(cost.copy for cost in experts if cost.name in read)
        copies = Copies(kind, nbytes, max(-free, 0))
    return replace(placement, units=units, pools=_with_host_slots(placement, host_bytes), copies=copies)


ACCEPTED = {"IQ4_XS": 0.93, "Q3_K": 0.88, "Q2_K": 0.83}
"""Type of blocks -> the share of tokens of such copies that is expected to be right, after right ones.

Qwen2.5-Coder-1.5B in bfloat16, two thirds streamed, had 0.92 to 0.98, 0.87 to 0.93 and 0.88 to 0.93, prose and code;
all streamed 0.89, 0.80 and 0.66 of prose.
"""
MEMORY_SPEED = 8
"""How many bytes of weights are computed with, as expected, in the time in which one is read from the disk."""
MOST_DRAFTED = 20
"""The most tokens that a draft is expected to have."""


def tokens_per_read(placement: Placement, copies: Copies) -> float:
    """The tokens that a placement with copies is expected to make in the time in which a byte is read from the disk.

    A pass reads what is streamed, and computes with all weights. A step of a draft computes with what is in memory. The
    best number of steps counts. Experts count as if all of them were read.
    """
    routed = sum(placed.stored for placed in placement.experts if placed.tier is Tier.ROUTED)
    read = placement.streamed_bytes + routed - sum(pool.kept for pool in placement.pools)
    looked_up = (Tier.MAPPED, Tier.ROWS)
    whole = sum(placed.stored for placed in (*placement.units, *placement.experts) if placed.tier not in looked_up)
    seconds = max(read, 0) + whole / MEMORY_SPEED
    right = ACCEPTED[copies.kind]
    step = (whole - placement.streamed_bytes - routed + copies.nbytes) / MEMORY_SPEED
    return max(
        (1 - right ** (count + 1)) / (1 - right) / max(seconds + count * step, 1) for count in range(MOST_DRAFTED + 1)
    )


def _placed(
    shares: Sequence[Sequence[UnitCost]],
    budgets: Sequence[Budget],
    small_first: bool,
    cached_layers: int,
    experts: Sequence[ExpertCost],
) -> tuple[dict[str, PlacedUnit], list[PlacedUnit], list[Pool], int]:
    """The units of each device, their experts, the pools of these, and the least bytes that a device has left; see
    `place`."""
    placed: dict[str, PlacedUnit] = {}
    routed: list[PlacedUnit] = []
    pools: list[Pool] = []
    left: list[int] = []
    for budget, share in zip(budgets, shares, strict=True):
        names = {cost.name for cost in share}
        inside = [cost for cost in experts if cost.unit in names]
        taken = max((cost.transit * cost.slot for cost in inside), default=0) + sum(cost.copy for cost in inside)
        tiers, free = _tiers(share, replace(budget, nbytes=budget.nbytes - taken), small_first)
        left.append(free)
        tier = _experts_tier(inside, budget, free + taken, all(t in (*READY, Tier.ROWS) for t in tiers.values()))
        routed += [PlacedUnit(cost.name, budget.device, tier, cost.stored) for cost in inside]
        if inside and tier is Tier.ROUTED:
            pools.append(_pool(inside, budget, free))
        if budget.is_host:
            for cost in [cost for cost in share if cost.is_layer][:cached_layers]:
                if tiers[cost.name] is Tier.STREAMED:
                    tiers[cost.name] = _kept_tier(cost, budget)
        placed |= {cost.name: PlacedUnit(cost.name, budget.device, tiers[cost.name], cost.stored) for cost in share}
    return placed, routed, pools, min(left)


def _experts_tier(experts: Sequence[ExpertCost], budget: Budget, room: int, all_resident: bool) -> Tier:
    """The tier of all experts of a device. `room`: bytes that units leave."""
    if budget.is_host and all_resident and sum(cost.ready for cost in experts) <= room:
        return Tier.RESIDENT
    if budget.is_host and sum(cost.stored for cost in experts) <= room:
        return Tier.RESIDENT if all(cost.is_ready for cost in experts) else Tier.PACKED
    return Tier.ROUTED


def _pool(experts: Sequence[ExpertCost], budget: Budget, free: int) -> Pool:
    slot = max(cost.slot for cost in experts)
    count, transit = sum(cost.experts for cost in experts), max(cost.transit for cost in experts)
    # slots of a GPU are allocated individually; those of the host are one allocation
    slots = min(max(free, 0) // (slot if budget.is_host else allocated_bytes(slot)), count)
    return Pool(budget.device, slots, 0, transit, slot, count, sum(cost.stored for cost in experts))


def _with_host_slots(placement: Placement, host_bytes: int) -> tuple[Pool, ...]:
    """Give the rest of pinned memory to experts without a slot on their device."""
    gpus = [budget.device for budget in placement.budgets if not budget.is_host]
    room = host_bytes - sum(p.stored for p in placement.units if p.tier is Tier.PINNED) - _staging(placement, gpus)
    wanting = [pool for pool in placement.pools if pool.device in gpus]
    room -= sum(EXPERT_STAGING * pool.slot for pool in wanting)
    wants = {pool.device: pool.experts - pool.slots for pool in wanting}
    total = sum(wants[pool.device] * pool.slot for pool in wanting) or 1
    share = min(max(room, 0) / total, 1.0)
    return tuple(replace(pool, host_slots=int(wants.get(pool.device, 0) * share)) for pool in placement.pools)


def _staging(placement: Placement, devices: Iterable[str]) -> int:
    """Bytes of the staging buffers for streamed units of these devices."""
    streamed = [p for p in placement.units if p.tier is Tier.STREAMED]
    return STAGING * sum(max((p.stored for p in streamed if p.device == name), default=0) for name in devices)


def _pinned_layers(placement: Placement, layers: set[str], host_bytes: int, cached_layers: int) -> list[str]:
    """The streamed units of GPUs to keep in pinned host memory.

    They are evenly spread over the units of each device: each gets memory in proportion to the bytes that it would
    stream, and its reads from the disk are evenly spaced.
    """
    gpus = [budget.device for budget in placement.budgets if not budget.is_host]
    streamed = [p for name in gpus for p in placement.units if p.device == name and p.tier is Tier.STREAMED]
    room = host_bytes
    if sum(p.stored for p in streamed) > room:
        room -= _staging(placement, gpus)
    chosen = [p.unit for p in _spread(streamed, room)]
    missing = max(cached_layers - len(layers.intersection(chosen)), 0)
    in_order = (p.unit for p in placement.units if p in streamed and p.unit in layers and p.unit not in chosen)
    return [*chosen, *itertools.islice(in_order, missing)]


def _runs(costs: Sequence[UnitCost], budgets: Sequence[Budget]) -> list[list[UnitCost]]:
    """Contiguous runs of units, one for each device, of stored bytes in proportion to the budgets."""
    total = sum(cost.stored + cost.routed for cost in costs) or 1
    shares = [budget.nbytes for budget in budgets]
    if not any(shares):
        shares = [1] * len(budgets)
    runs: list[list[UnitCost]] = [[] for _ in budgets]
    ends = list(itertools.accumulate(share / sum(shares) for share in shares))
    passed, device = 0, 0
    for group in _groups(costs):
        nbytes = sum(cost.stored + cost.routed for cost in group)
        while device < len(budgets) - 1 and (passed + nbytes / 2) / total > ends[device]:
            device += 1
        runs[device] += group
        passed += nbytes
    return runs


def _in_turns(costs: Sequence[UnitCost], budgets: Sequence[Budget]) -> list[list[UnitCost]]:
    """The units of each device, alternating. A device gets its budget and an equal share of the bytes beyond all
    budgets, so that all links copy the same amount."""
    beyond = max(sum(cost.stored + cost.routed for cost in costs) - sum(budget.nbytes for budget in budgets), 1)
    targets = [budget.nbytes + beyond / len(budgets) for budget in budgets]
    assigned, shares = [0] * len(budgets), [list[UnitCost]() for _ in budgets]
    for group in _groups(costs):
        nbytes = sum(cost.stored + cost.routed for cost in group)
        device = min(range(len(budgets)), key=lambda index: (assigned[index] + nbytes / 2) / targets[index])
        shares[device] += group
        assigned[device] += nbytes
    return shares


def _groups(costs: Sequence[UnitCost]) -> Iterator[list[UnitCost]]:
    """The units that need one device: each decoder layer, and the others between two layers, before them or after them.

    Models add what such others return, as token and position embeddings.
    """
    for is_layer, run in itertools.groupby(costs, key=lambda cost: cost.is_layer):
        group = list(run)
        yield from [[cost] for cost in group] if is_layer else [group]


def _tiers(costs: Sequence[UnitCost], budget: Budget, small_first: bool) -> tuple[dict[str, Tier], int]:
    """A tier for each unit of a device, and the bytes that are left on it."""
    tiers = {cost.name: Tier.MAPPED if _is_mapped(cost, budget) else Tier.ROWS for cost in costs if cost.by_rows}
    looked_up: dict[str, Tier] = {name: tier for name, tier in tiers.items() if tier is Tier.MAPPED}
    for cost in [cost for cost in costs if tiers.get(cost.name) is Tier.ROWS and budget.is_host and not cost.is_view]:
        rest = ready_once(other for other in costs if other is not cost)
        if ready_once(costs) - rest >= LARGE_TABLE:  # not one that a tied head also needs
            looked_up[cost.name] = Tier.ROWS
    need = ready_once(cost for cost in costs if cost.name not in looked_up)
    if need <= budget.nbytes:
        return dict.fromkeys((cost.name for cost in costs), Tier.RESIDENT) | looked_up, budget.nbytes - need
    # made ready once, since such a unit may be used outside its forward
    tiers |= {cost.name: Tier.RESIDENT for cost in costs if cost.must_stay}
    room = budget.nbytes - ready_once(cost for cost in costs if cost.must_stay)
    candidates = [cost for cost in costs if cost.name not in tiers]
    scratch = max((cost.scratch for cost in candidates), default=0)
    whole = _kept_once(candidates, budget, set())
    if whole + scratch <= room:
        return tiers | {cost.name: _kept_tier(cost, budget) for cost in candidates}, room - scratch - whole
    tiers |= {cost.name: Tier.STREAMED for cost in candidates}
    free, kept = room - scratch - sum(cost.copy for cost in candidates), set[str]()
    if small_first:
        for cost in [cost for cost in candidates if not cost.is_layer]:
            others, kept_with_it = [other for other in candidates if other is not cost], set(kept)
            more = max(_kept_once([cost], budget, kept_with_it) - cost.copy, 0)
            if more + _slots(others) <= free:
                tiers[cost.name] = _kept_tier(cost, budget)
                free -= more
                candidates, kept = others, kept_with_it
    slots = _slots(candidates)
    layers = [cost for cost in candidates if cost.is_layer or not small_first]
    for cost in _spread(layers, free - slots, operator.attrgetter("instead")):
        tiers[cost.name] = _kept_tier(cost, budget)
        free -= cost.instead
    return tiers, free - slots


def enclosing(path: str, modules: Container[str]) -> str | None:
    """The innermost known module around a module or a parameter, which may be the module itself; None if there is
    none."""
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return path or None


def ready_once(costs: Iterable[UnitCost]) -> int:
    """Memory of units that are ready; a tensor that several share counts once."""
    total, counted = 0, set[str]()
    for cost in costs:
        total += cost.ready - sum(shared.ready for shared in cost.shared if shared.key in counted)
        counted.update(shared.key for shared in cost.shared)
    return total


def _kept_once(costs: Iterable[UnitCost], budget: Budget, kept: set[str]) -> int:
    """Memory of units in stored form besides the tensors in `kept`; adds theirs to these.

    A shared tensor counts once in a mapped file, and once on a device if it is ready there; in stored form each unit on
    a device has a copy.
    """
    total = 0
    for cost in costs:
        total += cost.kept
        if budget.is_host or _kept_tier(cost, budget) is Tier.RESIDENT:
            total -= sum(shared.stored for shared in cost.shared if shared.key in kept)
            kept.update(shared.key for shared in cost.shared)
    return total


_COUNTING = (Tier.RESIDENT, Tier.PACKED, Tier.PINNED, Tier.STREAMED, Tier.ROWS, Tier.MAPPED)
"""Of units that share a tensor, the one whose tier comes first here counts it."""


def _counted_once(placement: Placement, shared: Mapping[str, Sequence[SharedTensor]]) -> tuple[PlacedUnit, ...]:
    """The units, each with the bytes of its tensors that are counted at another unit of its device."""
    hosts, tied = placement.hosts, dict[str, int]()
    counted: set[tuple[str, str]] = set()
    for tier in _COUNTING:
        for placed in (placed for placed in placement.units if placed.tier is tier and placed.unit in shared):
            tensors = shared[placed.unit]
            # each unit has a copy in pinned memory, and in stored form on a device that maps no files
            if tier is not Tier.PINNED and (tier is not Tier.PACKED or placed.device in hosts):
                tied[placed.unit] = sum(tensor.stored for tensor in tensors if (placed.device, tensor.key) in counted)
            counted.update((placed.device, tensor.key) for tensor in tensors)
    return tuple(replace(placed, tied=tied.get(placed.unit, 0)) for placed in placement.units)


def min_bytes(costs: Sequence[UnitCost], placement: Placement, device: str) -> tuple[int, str]:
    """Minimum bytes of a pass on a device, with all streamable units streamed; and the name of the largest such unit.

    These are the buffers of the largest streamed unit, its dequantized weights, the units that have to be resident, and
    the transit slots of experts.
    """
    tiers = {placed.unit: placed.tier for placed in placement.units if placed.device == device}
    streamed = [cost for cost in costs if tiers.get(cost.name) is Tier.STREAMED]
    resident = ready_once(cost for cost in costs if cost.must_stay and not cost.is_view and cost.name in tiers)
    transit = sum(pool.transit * pool.slot for pool in placement.pools if pool.device == device)
    largest = max(streamed, key=lambda cost: cost.slot or cost.stored + cost.ready, default=None)
    scratch = max((cost.scratch for cost in streamed), default=0)
    return _slots(streamed) + scratch + resident + transit, largest.name if largest is not None else ""


def _slots(costs: Sequence[UnitCost]) -> int:
    """Bytes of the buffers if these units are streamed."""
    return SLOTS * max((cost.slot or cost.kept for cost in costs), default=0)


def _is_mapped(cost: UnitCost, budget: Budget) -> bool:
    """Whether it is the input embedding and used in its mapped file, where only rows that are read take memory."""
    return cost.by_rows and cost.is_view and budget.is_host and not cost.is_table


def _kept_tier(cost: UnitCost, budget: Budget) -> Tier:
    """The tier of a unit that is kept.

    A view is resident in its stored form. On a GPU, a unit that is not larger when ready (cast, fused) is made ready
    once; on the host that would copy the mapped file, and only codes are rearranged once.
    """
    once = cost.is_view or cost.once or (not budget.is_host and cost.ready <= cost.stored)
    return Tier.RESIDENT if once else Tier.PACKED


def _spread(
    costs: Sequence[Sized], room: int, size: Callable[[Sized], int] = operator.attrgetter("stored")
) -> list[Sized]:
    """Units of at most `room` bytes together, evenly spread over the pass."""
    total = sum(map(size, costs))
    if room <= 0 or not total:
        return []
    share = min(room, total)
    chosen, credit, used = [], 0, 0  # credit is an integer, in units of 1 / `total`
    for cost in costs:
        nbytes = size(cost)
        credit += nbytes * share
        if credit >= nbytes * total and used + nbytes <= room:
            chosen.append(cost)
            credit -= nbytes * total
            used += nbytes
    return chosen
