"""A picture of a placement (PNG, SVG or PDF by the file's name), drawn by matplotlib.

The upper part has a bar for each unit in the order of a pass: its height is the stored bytes, its colour the tier. On
it are the cached shares of streamed experts, and above them the share that is read when it is used. The lower part has
a bar for each device and the disk: its length is the bytes there. A plan's placement is drawn like a model's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.base.terminal import unit_of
from rabbitllm.display.pictures import blank, check_picture, unframed, write
from rabbitllm.engine.placement import PlacedUnit, Placement, Tier, enclosing

READY, STORED = "on the GPU, ready", "on the GPU, as stored"
MAPPED, CODES = "in RAM", "in RAM, as stored"
ROWS = "rows of the embedding, when used"
PINNED = "page-locked RAM, copied for each pass"
DISK = "disk, read for each pass"
AWAY = "on another host"
EXPERTS, EXPERTS_PINNED = "experts that are kept", "experts in page-locked RAM"
EXPERTS_AWAY = "experts on the disk, read when used"
COLOURS: Mapping[str, str] = {
    READY: "#E69F00",
    STORED: "#F0E442",
    MAPPED: "#009E73",
    CODES: "#7FCFB3",
    ROWS: "#999999",
    PINNED: "#56B4E9",
    DISK: "#0072B2",
    EXPERTS: "#D55E00",
    EXPERTS_PINNED: "#CC79A7",
    EXPERTS_AWAY: "#BFD9EC",
    AWAY: "#DDDDDD",
}
"""Label -> colour, bottom first; from the palette of Okabe and Ito, which the colour-blind can tell apart."""
ON_DISK = (DISK, EXPERTS_AWAY, ROWS)
"""Labels of bytes that are only in the layer file between two passes."""
_LABELS: Mapping[Tier, tuple[str, str]] = {
    Tier.RESIDENT: (READY, MAPPED),
    Tier.PACKED: (STORED, CODES),
    Tier.ROWS: (ROWS, ROWS),
    Tier.MAPPED: (ROWS, ROWS),
    Tier.PINNED: (PINNED, PINNED),
    Tier.STREAMED: (DISK, DISK),
    Tier.ELSEWHERE: (AWAY, AWAY),
}
"""Tier -> label on a GPU, and on the host."""
_WIDTH = 8.5
"""Inches; at 800 pixels a point of type is more than one pixel."""
_AXIS, _LETTER, _GAP = 7.0, 0.085, 0.12
"""Inches: the length of the axis of units, the width of a letter below it, and the gap between two names there."""
_MAX_LABELS = 14
_SEEN = 0.0005
"""Share of all bytes below which a colour is not visible, and omitted from the legend."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One unit: its path, its device, and its stored bytes by the labels of `COLOURS`, including its experts."""

    unit: str
    device: str
    parts: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())


def bars(placement: Placement) -> tuple[Bar, ...]:
    """The bar of each unit, in the order of a pass."""
    hosts = {budget.device for budget in placement.budgets if budget.is_host}
    shares = {pool.device: pool.shares for pool in placement.pools}
    experts: dict[str, list[PlacedUnit]] = {}
    units = {placed.unit for placed in placement.units}
    for placed in placement.experts:
        experts.setdefault(enclosing(placed.unit, units) or placed.unit, []).append(placed)
    found = []
    for placed in placement.units:
        parts: Counter[str] = Counter({_LABELS[placed.tier][placed.device in hosts]: placed.counted})
        for inside in experts.get(placed.unit, ()):
            kept, pinned = shares[inside.device] if inside.tier is Tier.ROUTED else (1.0, 0.0)
            parts[EXPERTS] += round(kept * inside.stored)
            parts[EXPERTS_PINNED] += round(pinned * inside.stored)
            parts[EXPERTS_AWAY] += inside.stored - round(kept * inside.stored) - round(pinned * inside.stored)
        found.append(Bar(placed.unit, placed.device, {label: n for label in COLOURS if (n := parts[label])}))
    return tuple(found)


def bytes_by_device(placement: Placement) -> dict[str, dict[str, int]]:
    """Each device, pinned memory and the disk -> the bytes on it, by the labels of `COLOURS`."""
    found: dict[str, Counter[str]] = {budget.device: Counter() for budget in placement.budgets}
    for bar in bars(placement):
        for label, nbytes in bar.parts.items():
            where = "disk" if label in ON_DISK else "page-locked" if label in (PINNED, EXPERTS_PINNED) else bar.device
            found.setdefault(where, Counter())[label] += nbytes
    order = [*(budget.device for budget in placement.budgets), "page-locked", "disk"]
    return {where: {label: n for label in COLOURS if (n := found[where][label])} for where in order if where in found}


def draw_placement(placement: Placement, path: str | Path, title: str = "", note: str = "") -> None:
    """Draw a placement.

    Args:
        placement: `model.placement`, or that of a plan (`plan(...).generations[0].placement`).
        path: of the picture; an existing file is replaced.
        title: first line above the picture.
        note: second line.

    Raises:
        OptionError: the ending of the file's name is not a supported format.
        MissingPackageError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    check_picture(path)
    write(_drawn(placement, title, note), path)


def _drawn(placement: Placement, title: str, note: str) -> Any:
    from matplotlib.patches import Patch

    shown, lengths = bars(placement), bytes_by_device(placement)
    sums = {label: sum(bar.parts.get(label, 0) for bar in shown) for label in COLOURS}
    labels = [label for label in COLOURS if sums[label] > _SEEN * sum(sums.values())]
    rows = -(-len(labels) // 2)
    below = 0.34 * len(lengths) + 0.45
    figure = blank(_WIDTH, 3.4 + below + 0.25 * rows)
    upper, lower = figure.subplots(2, 1, height_ratios=(3.0, below))
    scale = unit_of(sum(sums.values()))
    _units(upper, shown, *scale)
    _totals(lower, placement, lengths, *scale)
    handles = [Patch(facecolor=COLOURS[label], edgecolor="white", label=label) for label in labels]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    figure.suptitle("\n".join(line for line in (title, note) if line), x=0.01, ha="left", fontsize=11)
    return figure


def _units(axes: Any, shown: Sequence[Bar], size: float, name: str) -> None:
    """Draw a bar for each unit, with the devices' names above."""
    bottom = [0.0] * len(shown)
    for label, colour in COLOURS.items():
        heights = [bar.parts.get(label, 0) / size for bar in shown]
        if any(heights):
            axes.bar(range(len(shown)), heights, 0.86, bottom, color=colour, linewidth=0)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    at, names = zip(*_labels(shown), strict=True)
    axes.set_xticks(at, names, fontsize=10)
    axes.set_xlim(-0.7, len(shown) - 0.3)
    axes.set_ylim(0, 1.12 * max(bottom, default=0.0) or 1.0)
    axes.tick_params(axis="y", labelsize=10)
    axes.set_ylabel(f"{name} of each layer", fontsize=10)
    for first, last, devices in _runs(shown):
        if first:
            axes.axvline(first - 0.5, color="#444444", linewidth=0.8, linestyle=":")
        axes.text((first + last) / 2, 0.99, devices, transform=axes.get_xaxis_transform(), ha="center", va="top")
    unframed(axes)


def _runs(shown: Sequence[Bar]) -> list[tuple[int, int, str]]:
    """First and last bar of each device, in their order; all bars if the devices alternate."""
    runs = []
    for device, run in itertools.groupby(range(len(shown)), lambda at: shown[at].device):
        bars_of_device = list(run)
        runs.append((bars_of_device[0], bars_of_device[-1], device))
    devices = sorted({device for _, _, device in runs})
    return runs if len(runs) == len(devices) else [(0, len(shown) - 1, f"{', '.join(devices)} in turns")]


def _labels(shown: Sequence[Bar]) -> list[tuple[int, str]]:
    """Indices of bars and their names: large units outside the decoder and some layer numbers, without overlap."""
    inches = _AXIS / len(shown)
    known = {at: bar.unit.rpartition(".")[2] for at, bar in enumerate(shown)}
    layers = [at for at, name in known.items() if name.isdigit()]
    others = sorted((at for at in known if at not in layers), key=lambda at: -shown[at].nbytes)
    step = -(-len(layers) // _MAX_LABELS)
    step = next((round_number for round_number in (1, 2, 5, 10, 20, 25, 50, 100) if round_number >= step), step)
    found: dict[int, str] = {}
    for at in (*others, *(at for at in layers if int(known[at]) % step == 0)):
        distances = ((abs(at - other) * inches, len(known[at]) + len(name)) for other, name in found.items())
        if all(distance >= letters / 2 * _LETTER + _GAP for distance, letters in distances):
            found[at] = known[at]
    return sorted(found.items())


def _totals(axes: Any, placement: Placement, lengths: Mapping[str, Mapping[str, int]], size: float, name: str) -> None:
    """Draw a bar for each device and the disk, with the bytes on it as length; the limit of a device as a line."""
    longest = max((sum(parts.values()) / size for parts in lengths.values()), default=0.0) or 1.0
    for row, (where, parts) in enumerate(lengths.items()):
        left = 0.0
        for label, nbytes in parts.items():
            axes.barh(row, nbytes / size, 0.66, left, color=COLOURS[label], linewidth=0)
            left += nbytes / size
        limit = placement.limits[where] / size if where in placement.limits else None
        text = f"{left:,.2f} {name}" + (f" of {limit:,.2f} allowed" if limit is not None else "")
        end = left
        if limit is not None and limit <= 1.3 * longest:
            axes.plot([limit, limit], [row - 0.4, row + 0.4], color="#444444", linewidth=1.5)
            end = max(left, limit)
        axes.text(end + 0.01 * longest, row, f" {text}", va="center", fontsize=10)
    axes.set_yticks(range(len(lengths)), list(lengths), fontsize=10)
    axes.set_ylim(len(lengths) - 0.5, -0.5)
    axes.set_xlim(0, 1.75 * longest)
    axes.tick_params(axis="x", labelsize=10)
    axes.set_xlabel(f"{name} as stored", fontsize=10)
    unframed(axes)
