"""Lines over a number that doubles, both scales logarithmic, as a picture; drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_OURS, _OTHERS, _LINEAR = "#0072B2", "#8C8C8C", "#0072B2"
_STYLES = ("-", "--", "-.", ":")
_MARKS = "osD^vPX*"
_WIDTH_INCHES, _HEIGHT_INCHES = 9.0, 5.0


@dataclass(frozen=True)
class Line:
    """One row: its name, its points, and whether it is this project's."""

    name: str
    points: Mapping[int, float]
    is_ours: bool


def draw(path: Path, title: str, across: str, upwards: str, drawn: Sequence[Line]) -> None:
    """Draw them, named next to their ends; with ours, thin, what would be linear from its first point on.

    Args:
        path: of the file, .svg or .png.
        title: above all.
        across, upwards: what the axes are.
        drawn: with at least one point each.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    numbers = sorted({number for line in drawn for number in line.points})
    others = 0
    for line in drawn:
        along = sorted(line.points)
        colour = _OURS if line.is_ours else _OTHERS
        style, mark = ("-", "o") if line.is_ours else (_STYLES[others % len(_STYLES)], _MARKS[others % len(_MARKS)])
        others += not line.is_ours
        at = [line.points[number] for number in along]
        axes.plot(along, at, style, marker=mark, color=colour, label=line.name, linewidth=2 if line.is_ours else 1.2)
        if line.is_ours:
            ideal = [at[0] * number / along[0] for number in along]
            axes.plot(along, ideal, ":", color=_LINEAR, linewidth=0.8)
    for line, height in _apart([(line, line.points[max(line.points)]) for line in drawn]):
        last = max(line.points)
        axes.annotate(
            line.name,
            (last, line.points[last]),
            (numbers[-1] * 1.12, height),
            fontsize=8,
            va="center",
            color=_OURS if line.is_ours else "#555555",
            annotation_clip=False,
        )
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel(across)
    axes.set_ylabel(upwards)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


_APART = 1.16


def _apart(ends: Sequence[tuple[Line, float]]) -> list[tuple[Line, float]]:
    """Heights for names, from below, none closer to the next than this factor."""
    placed: list[tuple[Line, float]] = []
    for line, height in sorted(ends, key=lambda end: end[1]):
        least = placed[-1][1] * _APART if placed else 0.0
        placed.append((line, max(height, least)))
    return placed
