"""What costs how much: points with names, one colour a maker, as a picture; drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#555555")
_MARKS = "oDs^"
_NAMES = (("center", 0, -14), ("right", -5, 6), ("center", 0, 7), ("left", 7, -3))
"""Of each maker: where a name stands, in points from its mark."""
_WIDTH_INCHES, _HEIGHT_INCHES = 9.0, 5.5


@dataclass(frozen=True)
class Point:
    """One of a maker's, by name."""

    name: str
    maker: str
    across: float
    upwards: float


def draw(path: Path, title: str, across: str, upwards: str, points: Sequence[Point], joined: str) -> None:
    """Draw them, upwards logarithmic.

    Args:
        path: of the file, .svg or .png.
        title: above all.
        across, upwards: what the axes are.
        points: with positive numbers, of four makers at most.
        joined: the maker whose points are joined in the order of their cost.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_yscale("log")
    makers = list(dict.fromkeys(point.maker for point in points))
    for maker, colour, mark, (side, right, up) in zip(makers, _COLOURS, _MARKS, _NAMES, strict=False):
        own = sorted((point for point in points if point.maker == maker), key=lambda point: point.across)
        line = "-" if maker == joined else "none"
        axes.plot(
            [p.across for p in own], [p.upwards for p in own], marker=mark, color=colour, label=maker, linestyle=line
        )
        for point in own:
            axes.annotate(
                point.name,
                (point.across, point.upwards),
                (right, up),
                textcoords="offset points",
                fontsize=8,
                color=colour,
                ha=side,
            )
    axes.margins(x=0.16, y=0.1)
    axes.set_xlabel(across)
    axes.set_ylabel(upwards)
    axes.grid(color="#E4E4E4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
