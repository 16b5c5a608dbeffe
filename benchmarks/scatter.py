"""What costs how much: points with names, one colour a maker, as a picture; drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_COLOURS = ("#0072B2", "#D55E00", "#555555", "#009E73")
_MARKS = "os^D"
_WIDTH_INCHES, _HEIGHT_INCHES = 9.0, 5.5


@dataclass(frozen=True)
class Point:
    """One of a maker's, by name."""

    name: str
    maker: str
    across: float
    upwards: float


def draw(path: Path, title: str, across: str, upwards: str, points: Sequence[Point]) -> None:
    """Draw them, upwards logarithmic; a maker's are joined in the order of their cost.

    Args:
        path: of the file, .svg or .png.
        title: above all.
        across, upwards: what the axes are.
        points: with positive numbers.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_yscale("log")
    makers = list(dict.fromkeys(point.maker for point in points))
    for number, maker in enumerate(makers):
        own = sorted((point for point in points if point.maker == maker), key=lambda point: point.across)
        colour, mark = _COLOURS[number % len(_COLOURS)], _MARKS[number % len(_MARKS)]
        line = {"linewidth": 1.0, "alpha": 0.9} if number == 0 else {"linestyle": "none"}
        axes.plot([p.across for p in own], [p.upwards for p in own], marker=mark, color=colour, label=maker, **line)
        for point in own:
            below = number == 0
            axes.annotate(
                point.name,
                (point.across, point.upwards),
                (4, -11 if below else 5),
                textcoords="offset points",
                fontsize=8,
                color=colour,
                ha="right" if below else "left",
            )
    axes.set_xlabel(across)
    axes.set_ylabel(upwards)
    axes.grid(color="#E4E4E4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
