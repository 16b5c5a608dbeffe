"""Bars for rows in groups, on a logarithmic scale, as a picture; drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.measure import Spread

_OURS, _OTHERS = "#0072B2", "#B8B8B8"
_WIDTH_INCHES, _BAR_INCHES = 9.0, 0.26


@dataclass(frozen=True)
class Bar:
    """One row: its name, its figures (None: it failed), and whether it is this project's."""

    name: str
    figures: Spread | None
    is_ours: bool


def grouped(rows: Iterable[tuple[str, Bar]]) -> dict[str, list[Bar]]:
    """Bars by their headings, in the order in which these first come; within each the least first, failures last."""
    groups: dict[str, list[Bar]] = {}
    for heading, bar in rows:
        groups.setdefault(heading, []).append(bar)
    for found in groups.values():
        found.sort(key=lambda bar: bar.figures.median if bar.figures is not None else float("inf"))
    return groups


def under_cap(share: int | None) -> str:
    """The heading of rows under a cap in percent of the weights."""
    return "no cap" if share is None else f"idle process + {share} % of the weights"


def draw(path: Path, title: str, unit: str, groups: Mapping[str, Sequence[Bar]]) -> None:
    """Draw groups one below the other, each with its bars in the order given; medians, with lines to the extremes.

    Args:
        path: of the file, .svg or .png.
        title: above all.
        unit: below the scale.
        groups: heading -> bars.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = [len(bars) for bars in groups.values()]
    figure = Figure(figsize=(_WIDTH_INCHES, _BAR_INCHES * (sum(counts) + 3 * len(counts)) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(groups), 1, height_ratios=counts, sharex=True, squeeze=False)[:, 0]
    for axes, (heading, bars) in zip(all_axes, groups.items(), strict=True):
        for at, bar in enumerate(bars):
            if bar.figures is None:
                axes.text(0.01, at, "failed", transform=axes.get_yaxis_transform(), va="center", color="#777777")
                continue
            median, low, high = bar.figures.median, bar.figures.low, bar.figures.high
            axes.barh(at, median, color=_OURS if bar.is_ours else _OTHERS, height=0.72)
            axes.plot([low, high], [at, at], color="black", linewidth=1)
            axes.text(high * 1.06, at, f"{median:.3g}", va="center", fontsize=8)
        axes.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=9)
        axes.set_ylim(len(bars) - 0.5, -0.5)  # downwards, with room for a row that failed
        axes.set_xscale("log")
        axes.set_title(heading, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    all_axes[-1].set_xlabel(unit)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
