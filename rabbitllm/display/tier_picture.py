"""A picture of a placement (PNG, SVG or PDF by the file's name), drawn by matplotlib.

The upper part has a bar for each unit in the order of a pass: its height is the stored bytes, its colour the tier. On
it are the cached shares of streamed experts, and above them the share that is read when it is used. The lower part has
a bar for each device and the disk: its length is the bytes there. A plan's placement is drawn like a model's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.base.terminal import unit_of
from rabbitllm.display.pictures import check_picture, empty_figure, hide_frame, put_title, stack, write

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


def draw_tiers(
    bars: Sequence[Bar],
    totals: Mapping[str, Mapping[str, int]],
    limits: Mapping[str, int],
    path: str | Path,
    title: str,
) -> None:
    """Draw a placement.

    Args:
        bars: of its units, in the order of a pass.
        totals: each device, pinned memory and the disk -> the bytes on it, by the labels of `COLOURS`.
        limits: device -> bytes for weights on it.
        path: of the picture; an existing file is replaced.
        title: lines above the picture.

    Raises:
        OptionError: the ending of the file's name is not a supported format.
        MissingPackageError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    check_picture(path)
    from matplotlib.patches import Patch

    sums = {label: sum(bar.parts.get(label, 0) for bar in bars) for label in COLOURS}
    labels = [label for label in COLOURS if sums[label] > _SEEN * sum(sums.values())]
    lower_height = 0.34 * len(totals) + 0.45
    figure = empty_figure(_WIDTH, 3.4 + lower_height + 0.25 * -(-len(labels) // 2))
    upper, lower = figure.subplots(2, 1, height_ratios=(3.0, lower_height))
    scale, name = unit_of(sum(sums.values()))
    _draw_units(upper, bars, scale, name)
    _draw_totals(lower, totals, limits, scale, name)
    handles = [Patch(facecolor=COLOURS[label], edgecolor="white", label=label) for label in labels]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    put_title(figure, title)
    write(figure, path)


def _draw_units(axes: Any, bars: Sequence[Bar], scale: float, name: str) -> None:
    """Draw a bar for each unit, with the devices' names above."""
    heights = stack(axes.bar, range(len(bars)), 0.86, [bar.parts for bar in bars], COLOURS, scale)
    axes.set_xticks(*zip(*_labels(bars), strict=True), fontsize=10)
    axes.set_xlim(-0.7, len(bars) - 0.3)
    axes.set_ylim(0, 1.12 * max(heights, default=0.0) or 1.0)
    axes.tick_params(axis="y", labelsize=10)
    axes.set_ylabel(f"{name} of each layer", fontsize=10)
    for first, last, devices in _runs(bars):
        if first:
            axes.axvline(first - 0.5, color="#444444", linewidth=0.8, linestyle=":")
        axes.text((first + last) / 2, 0.99, devices, transform=axes.get_xaxis_transform(), ha="center", va="top")
    hide_frame(axes)


def _runs(bars: Sequence[Bar]) -> list[tuple[int, int, str]]:
    """First and last bar of each device, in their order; all bars if the devices alternate."""
    runs = []
    for device, run in itertools.groupby(range(len(bars)), lambda index: bars[index].device):
        indices = list(run)
        runs.append((indices[0], indices[-1], device))
    devices = sorted({device for _, _, device in runs})
    return runs if len(runs) == len(devices) else [(0, len(bars) - 1, f"{', '.join(devices)} in turns")]


def _labels(bars: Sequence[Bar]) -> list[tuple[int, str]]:
    """Indices of bars and their names: large units outside the decoder and some layer numbers, without overlap."""
    inches = _AXIS / len(bars)
    names = [bar.unit.rpartition(".")[2] for bar in bars]
    layers = [index for index, name in enumerate(names) if name.isdigit()]
    outside = sorted(set(range(len(bars))).difference(layers), key=lambda index: -bars[index].nbytes)
    step = -(-len(layers) // _MAX_LABELS)
    step = next((round_number for round_number in (1, 2, 5, 10, 20, 25, 50, 100) if round_number >= step), step)
    labels: dict[int, str] = {}
    for index in (*outside, *(index for index in layers if int(names[index]) % step == 0)):
        distances = ((abs(index - other) * inches, len(names[index] + name)) for other, name in labels.items())
        if all(distance >= letters / 2 * _LETTER + _GAP for distance, letters in distances):
            labels[index] = names[index]
    return sorted(labels.items())


def _draw_totals(
    axes: Any, totals: Mapping[str, Mapping[str, int]], limits: Mapping[str, int], scale: float, name: str
) -> None:
    """Draw a bar for each device and the disk, with the bytes on it as length; the limit of a device as a line."""
    lengths = stack(axes.barh, range(len(totals)), 0.66, [*totals.values()], COLOURS, scale)
    longest = max(lengths, default=0.0) or 1.0
    for row, (place, length) in enumerate(zip(totals, lengths, strict=True)):
        text, end = f"{length:,.2f} {name}", length
        if place in limits:
            limit = limits[place] / scale
            text += f" of {limit:,.2f} allowed"
            if limit <= 1.3 * longest:
                axes.plot([limit, limit], [row - 0.4, row + 0.4], color="#444444", linewidth=1.5)
                end = max(length, limit)
        axes.text(end + 0.01 * longest, row, f" {text}", va="center", fontsize=10)
    axes.set_yticks(range(len(totals)), list(totals), fontsize=10)
    axes.set_ylim(len(totals) - 0.5, -0.5)
    axes.set_xlim(0, 1.75 * longest)
    axes.tick_params(axis="x", labelsize=10)
    axes.set_xlabel(f"{name} as stored", fontsize=10)
    hide_frame(axes)
