"""Lines over numbers that multiply, several panels next to each other, as a picture; drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COUNTS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 300, 500, 700, 1000)
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00")
_MARKS = "osD^"
_WIDTH_INCHES, _HEIGHT_INCHES = 11.0, 8.0


@dataclass(frozen=True)
class Line:
    """Its name, its points, and whether it is the second kind of the same name."""

    name: str
    points: Mapping[int, float]
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """A title, what goes across, and lines; those of one name have one colour."""

    title: str
    across: str
    lines: Sequence[Line]


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Two panels a row, both scales logarithmic.

    Args:
        path: of the file, .svg or .png.
        title: above all.
        panels: with at least one line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    FigureCanvasAgg(figure)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    every = figure.subplots(-(-len(panels) // 2), 2, squeeze=False).flat
    for axes, panel in zip(every, panels, strict=False):
        axes.set_xscale("log")
        axes.set_yscale("log")
        for line in panel.lines:
            if not line.points:
                continue
            at = names.index(line.name)
            label = None if line.is_dashed else line.name
            style = "--" if line.is_dashed else "-"
            numbers = sorted(line.points)
            axes.plot(
                numbers,
                [line.points[number] for number in numbers],
                style,
                marker=_MARKS[at % len(_MARKS)],
                markersize=3.5,
                color=_COLOURS[at % len(_COLOURS)],
                label=label,
                linewidth=1.3,
            )
        axes.set_title(panel.title, loc="left", fontsize=10)
        axes.set_xlabel(panel.across)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(color="#E4E4E4", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
