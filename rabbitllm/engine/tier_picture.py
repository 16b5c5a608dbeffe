"""A picture of a placement (PNG, SVG or PDF by the file's name), drawn by matplotlib.

The upper part has a bar for each unit in the order of a pass, with its stored bytes as height and the colour of its
tier; stacked on it are the cached shares of streamed experts, and above them the share that is read when it is used.
The lower part has a bar for each device and the disk, with the bytes on it. A plan's placement is drawn like a model's.
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
LOCKED = "page-locked RAM, copied for each pass"
DISK = "disk, read for each pass"
AWAY = "on another host"
EXPERTS, EXPERTS_NEAR = "experts that are kept", "experts in page-locked RAM"
EXPERTS_AWAY = "experts on the disk, read when used"
COLOURS: Mapping[str, str] = {
    READY: "#E69F00",
    STORED: "#F0E442",
    MAPPED: "#009E73",
    CODES: "#7FCFB3",
    ROWS: "#999999",
    LOCKED: "#56B4E9",
    DISK: "#0072B2",
    EXPERTS: "#D55E00",
    EXPERTS_NEAR: "#CC79A7",
    EXPERTS_AWAY: "#BFD9EC",
    AWAY: "#DDDDDD",
}
"""Label -> colour, from the bottom of a bar up; from the palette of Okabe and Ito, which the colour-blind can tell
apart."""
ON_DISK = (DISK, EXPERTS_AWAY, ROWS)
"""Labels of bytes that are only in the layer file between two passes."""
_LABELS: Mapping[Tier, tuple[str, str]] = {
    Tier.RESIDENT: (READY, MAPPED),
    Tier.PACKED: (STORED, CODES),
    Tier.ROWS: (ROWS, ROWS),
    Tier.MAPPED: (ROWS, ROWS),
    Tier.PINNED: (LOCKED, LOCKED),
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
        for own in experts.get(placed.unit, ()):
            kept, near = shares[own.device] if own.tier is Tier.ROUTED else (1.0, 0.0)
            parts[EXPERTS] += round(kept * own.stored)
            parts[EXPERTS_NEAR] += round(near * own.stored)
            parts[EXPERTS_AWAY] += own.stored - round(kept * own.stored) - round(near * own.stored)
        found.append(Bar(placed.unit, placed.device, {word: n for word in COLOURS if (n := parts[word])}))
    return tuple(found)


def places(placement: Placement) -> dict[str, dict[str, int]]:
    """Each device, pinned memory and the disk -> the bytes on it, by the labels of `COLOURS`."""
    found: dict[str, Counter[str]] = {budget.device: Counter() for budget in placement.budgets}
    for bar in bars(placement):
        for word, nbytes in bar.parts.items():
            place = "disk" if word in ON_DISK else "page-locked" if word in (LOCKED, EXPERTS_NEAR) else bar.device
            found.setdefault(place, Counter())[word] += nbytes
    order = [*(budget.device for budget in placement.budgets), "page-locked", "disk"]
    return {place: {word: n for word in COLOURS if (n := found[place][word])} for place in order if place in found}


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

    shown, there = bars(placement), places(placement)
    sums = {word: sum(bar.parts.get(word, 0) for bar in shown) for word in COLOURS}
    words = [word for word in COLOURS if sums[word] > _SEEN * sum(sums.values())]
    rows = -(-len(words) // 2)
    below = 0.34 * len(there) + 0.45
    figure = blank(_WIDTH, 3.4 + below + 0.25 * rows)
    upper, lower = figure.subplots(2, 1, height_ratios=(3.0, below))
    scale = unit_of(sum(sums.values()))
    _units(upper, shown, *scale)
    _totals(lower, placement, there, *scale)
    handles = [Patch(facecolor=COLOURS[word], edgecolor="white", label=word) for word in words]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    figure.suptitle("\n".join(line for line in (title, note) if line), x=0.01, ha="left", fontsize=11)
    return figure


def _units(axes: Any, shown: Sequence[Bar], size: float, name: str) -> None:
    """Draw a bar for each unit, with the devices' names above."""
    bottom = [0.0] * len(shown)
    for word, colour in COLOURS.items():
        heights = [bar.parts.get(word, 0) / size for bar in shown]
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
    """First and last bar of each device, in their order; all bars if the devices take turns."""
    runs = []
    for device, run in itertools.groupby(range(len(shown)), lambda at: shown[at].device):
        bars_of_device = list(run)
        runs.append((bars_of_device[0], bars_of_device[-1], device))
    devices = sorted({device for _, _, device in runs})
    return runs if len(runs) == len(devices) else [(0, len(shown) - 1, f"{', '.join(devices)} in turns")]


def _labels(shown: Sequence[Bar]) -> list[tuple[int, str]]:
    """Indices of bars and their labels: large units outside the decoder and some layer numbers, without overlap."""
    inches = _AXIS / len(shown)
    known = {at: bar.unit.rpartition(".")[2] for at, bar in enumerate(shown)}
    layers = [at for at, name in known.items() if name.isdigit()]
    others = sorted((at for at in known if at not in layers), key=lambda at: -shown[at].nbytes)
    step = _rounded(-(-len(layers) // _MAX_LABELS))
    found: dict[int, str] = {}
    for at in (*others, *(at for at in layers if int(known[at]) % step == 0)):
        distances = ((abs(at - other) * inches, len(known[at]) + len(name)) for other, name in found.items())
        if all(distance >= letters / 2 * _LETTER + _GAP for distance, letters in distances):
            found[at] = known[at]
    return sorted(found.items())


def _rounded(step: int) -> int:
    """The next round number."""
    return next((good for good in (1, 2, 5, 10, 20, 25, 50, 100) if good >= step), step)


def _totals(axes: Any, placement: Placement, there: Mapping[str, Mapping[str, int]], size: float, name: str) -> None:
    """Draw a bar for each device and the disk, with the bytes on it as length; the limit of a device as a line."""
    limits = {budget.device: budget.nbytes / size for budget in placement.budgets}
    longest = max((sum(parts.values()) / size for parts in there.values()), default=0.0) or 1.0
    for row, (place, parts) in enumerate(there.items()):
        left = 0.0
        for word, nbytes in parts.items():
            axes.barh(row, nbytes / size, 0.66, left, color=COLOURS[word], linewidth=0)
            left += nbytes / size
        limit = limits.get(place)
        said = f"{left:,.2f} {name}" + (f" of {limit:,.2f} allowed" if limit is not None else "")
        end = left
        if limit is not None and limit <= 1.3 * longest:
            axes.plot([limit, limit], [row - 0.4, row + 0.4], color="#444444", linewidth=1.5)
            end = max(left, limit)
        axes.text(end + 0.01 * longest, row, f" {said}", va="center", fontsize=10)
    axes.set_yticks(range(len(there)), list(there), fontsize=10)
    axes.set_ylim(len(there) - 0.5, -0.5)
    axes.set_xlim(0, 1.75 * longest)
    axes.tick_params(axis="x", labelsize=10)
    axes.set_xlabel(f"{name} as stored", fontsize=10)
    unframed(axes)
