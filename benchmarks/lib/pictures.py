"""Pictures of results, drawn by matplotlib from the JSON of the results.

    python -m benchmarks picture FILE.json

A picture is a mapping with `kind`, `title`, and the keys of its kind; a function for each kind makes it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.measure import Spread

Picture = Mapping[str, Any]
_OURS, _OTHERS = "#0072B2", "#8C8C8C"
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00")
_STYLES, _MARKS = ("-", "--", "-.", ":"), "osD^vPX*"
_APART = 1.16
_LETTERS = 90
"""Of a line of a title."""


def bars(title: str, unit: str, rows: Iterable[tuple[str, str, Spread | None, bool]]) -> Picture:
    """Bars in groups, the least first, on a logarithmic scale.

    Args:
        title: of the picture.
        unit: of the scale.
        rows: group, name, figures (None for a row that failed), and whether it is this project's.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for group, name, spread, is_ours in rows:
        figures = None if spread is None else [spread.median, spread.low, spread.high]
        groups.setdefault(group, []).append({"name": name, "figures": figures, "ours": is_ours})
    for own in groups.values():
        own.sort(key=lambda bar: bar["figures"] or [float("inf")])
    return {"kind": "bars", "title": title, "unit": unit, "groups": groups}


def lines(title: str, across: str, upwards: str, drawn: Mapping[str, tuple[Mapping[int, float], bool]]) -> Picture:
    """Lines over a number that doubles, both scales logarithmic; a thin line shows linear growth for ours.

    Args:
        title: of the picture.
        across, upwards: the axes.
        drawn: name -> points, and whether it is this project's.
    """
    content = [{"name": name, "points": sorted(points.items()), "ours": ours} for name, (points, ours) in drawn.items()]
    return {"kind": "lines", "title": title, "across": across, "upwards": upwards, "lines": content}


def points(title: str, across: str, upwards: str, drawn: Mapping[str, Sequence[tuple[str, float, float]]]) -> Picture:
    """Points with names, upwards logarithmic; a line joins those of the first maker.

    Args:
        title: of the picture.
        across, upwards: the axes.
        drawn: maker -> name, across and upwards of each point; four makers at most.
    """
    return {"kind": "points", "title": title, "across": across, "upwards": upwards, "makers": drawn}


def panels(title: str, drawn: Mapping[str, tuple[str, Sequence[tuple[str, Mapping[int, float], bool]]]]) -> Picture:
    """Panels, two in a row, with lines, both scales logarithmic.

    Args:
        title: of the picture.
        drawn: title -> the axis across, and of each line its name, its points and whether it is dashed.
    """
    content = {
        heading: {"across": across, "lines": [[name, sorted(points.items()), dashed] for name, points, dashed in rows]}
        for heading, (across, rows) in drawn.items()
    }
    return {"kind": "panels", "title": title, "panels": content}


def areas(
    title: str,
    parts: Mapping[str, Sequence[float]],
    seconds: Sequence[float],
    levels: Mapping[str, float],
    marks: Sequence[float],
) -> Picture:
    """GB over time, stacked, with horizontal lines and marked moments.

    Args:
        title: of the picture.
        parts: name -> GB at each moment.
        seconds: the moments.
        levels: name -> GB of a horizontal line.
        marks: marked moments, seconds.
    """
    return {"kind": "areas", "title": title, "parts": parts, "seconds": seconds, "levels": levels, "marks": marks}


def draw(picture: Picture, path: Path) -> None:
    """Draw a picture into a file, .svg or .png."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "rabbitllm"  # the same file each time
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    _KINDS[picture["kind"]](figure, picture)
    figure.suptitle(textwrap.fill(picture["title"], _LETTERS), x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def redraw(results: Path) -> list[Path]:
    """Draw the pictures of a results file next to it: `picture`, and each of `pictures` with its name appended.

    Raises:
        SystemExit: the results have no picture.
    """
    held = json.loads(results.read_text(encoding="utf-8"))
    by_name = {results.stem: held.get("picture")}
    by_name |= {f"{results.stem}-{name}": picture for name, picture in held.get("pictures", {}).items()}
    drawn = {results.with_name(f"{name}.svg"): picture for name, picture in by_name.items() if picture is not None}
    if not drawn:
        raise SystemExit(f"{results.name} has no picture.")
    for path, picture in drawn.items():
        draw(picture, path)
    return list(drawn)


def _bars(figure: Any, picture: Picture) -> None:
    counts = [len(group) for group in picture["groups"].values()]
    figure.set_size_inches(9.0, 0.26 * (sum(counts) + 3 * len(counts)) + 0.6)
    every = figure.subplots(len(counts), 1, height_ratios=counts, sharex=True, squeeze=False)[:, 0]
    for axes, (heading, group) in zip(every, picture["groups"].items(), strict=True):
        for row, bar in enumerate(group):
            if bar["figures"] is None:
                axes.text(0.01, row, "failed", transform=axes.get_yaxis_transform(), va="center", color="#777777")
                continue
            median, low, high = bar["figures"]
            axes.barh(row, median, color=_OURS if bar["ours"] else "#B8B8B8", height=0.72)
            axes.plot([low, high], [row, row], color="black", linewidth=1)
            axes.text(high * 1.06, row, f"{median:.3g}", va="center", fontsize=8)
        axes.set_yticks(range(len(group)), [bar["name"] for bar in group], fontsize=9)
        axes.set_ylim(len(group) - 0.5, -0.5)  # downwards, with room for a row that failed
        axes.set_xscale("log")
        axes.set_title(heading, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    every[-1].set_xlabel(picture["unit"])


def _lines(figure: Any, picture: Picture) -> None:
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    figure.set_size_inches(9.0, 5.0)
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    numbers = sorted({number for line in picture["lines"] for number, _ in line["points"]})
    others = 0
    for line in picture["lines"]:
        along, values = zip(*line["points"], strict=True)
        if line["ours"]:
            axes.plot(along, values, "-", marker="o", color=_OURS, linewidth=2)
            axes.plot(along, [values[0] * number / along[0] for number in along], ":", color=_OURS, linewidth=0.8)
        else:
            axes.plot(along, values, _STYLES[others % 4], marker=_MARKS[others % 8], color=_OTHERS, linewidth=1.2)
            others += 1
    lowest = 0.0
    for line in sorted(picture["lines"], key=lambda line: line["points"][-1][1]):  # no name covers another
        number, value = line["points"][-1]
        height = max(value, lowest)
        lowest = height * _APART
        colour = _OURS if line["ours"] else "#555555"
        place = (numbers[-1] * 1.12, height)
        axes.annotate(
            line["name"], (number, value), place, fontsize=8, va="center", color=colour, annotation_clip=False
        )
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    _name(axes, picture)


def _points(figure: Any, picture: Picture) -> None:
    figure.set_size_inches(9.0, 5.5)
    axes = figure.subplots()
    axes.set_yscale("log")
    colours, places = ("#0072B2", "#56B4E9", "#D55E00", "#555555"), ((0, -14), (-5, 6), (0, 7), (7, -3))
    sides = ("center", "right", "center", "left")
    for number, (maker, points) in enumerate(picture["makers"].items()):
        own, colour = sorted(points, key=lambda point: point[1]), colours[number]
        style = "-" if number == 0 else "none"
        across, upwards = [point[1] for point in own], [point[2] for point in own]
        axes.plot(across, upwards, marker=_MARKS[number], color=colour, label=maker, linestyle=style)
        for name, *position in own:
            about = {"fontsize": 8, "color": colour, "ha": sides[number], "textcoords": "offset points"}
            axes.annotate(name, position, places[number], **about)
    axes.margins(x=0.16, y=0.1)
    axes.grid(color="#E4E4E4", linewidth=0.8)
    axes.legend(frameon=False)
    _name(axes, picture)


def _panels(figure: Any, picture: Picture) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator, StrMethodFormatter

    figure.set_size_inches(11.0, 8.0)
    panels = picture["panels"]
    names = list(dict.fromkeys(name for panel in panels.values() for name, _, _ in panel["lines"]))
    every = figure.subplots(-(-len(panels) // 2), 2, squeeze=False).flat
    for axes, (title, panel) in zip(every, panels.items(), strict=False):
        axes.set_xscale("log")
        axes.set_yscale("log")
        for name, along, dashed in panel["lines"]:
            if along:
                index = names.index(name)
                style = {"linestyle": "--" if dashed else "-", "label": None if dashed else name, "linewidth": 1.3}
                mark = {"marker": _MARKS[index % 8], "markersize": 3.5, "color": _COLOURS[index % 4]}
                axes.plot([point[0] for point in along], [point[1] for point in along], **style, **mark)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel(panel["across"])
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(color="#E4E4E4", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)


def _areas(figure: Any, picture: Picture) -> None:
    figure.set_size_inches(9.0, 4.2)
    axes = figure.subplots()
    colours = ("#3b76b5", "#e8a33d")
    axes.stackplot(picture["seconds"], *picture["parts"].values(), labels=list(picture["parts"]), colors=colours)
    for number, (name, value) in enumerate(picture["levels"].items()):
        axes.axhline(value, linestyle="--", color=("#777777", "#208040")[number % 2], label=name)
    for index, moment in enumerate(picture["marks"]):
        axes.axvline(moment, linestyle=":", color="#b03030", label=None if index else "kill")
    axes.legend(fontsize=8, frameon=False)
    _name(axes, {"across": "seconds", "upwards": "GB"})


def _name(axes: Any, picture: Picture) -> None:
    axes.set_xlabel(picture["across"])
    axes.set_ylabel(picture["upwards"])
    axes.spines[["top", "right"]].set_visible(False)


_KINDS: Mapping[str, Callable[[Any, Picture], None]] = {
    "bars": _bars,
    "lines": _lines,
    "points": _points,
    "panels": _panels,
    "areas": _areas,
}
