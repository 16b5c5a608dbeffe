"""The timing of one pass as a picture (PNG, SVG or PDF by the file's suffix), drawn by matplotlib.

Above, a timeline: the threads that provide weights, and the caller. Below, the caller's time and the disk's for each
layer. Independent of the origin of the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rabbitllm.display.figure import blank, check_picture, unframed, write
from rabbitllm.errors import OptionError
from rabbitllm.telemetry.passes import PROMPT, Pass, median_pass
from rabbitllm.telemetry.totals import (
    CALLER_STAGES,
    COMPUTE,
    COPIES,
    DEQUANTIZE,
    PINNED_UPLOAD,
    READ,
    READ_WAIT,
    UPLOAD,
    UPLOAD_WAIT,
)
from rabbitllm.telemetry.trace import Event, Trace

COLOURS: Mapping[str, str] = {
    READ: "#0072B2",
    UPLOAD: "#56B4E9",
    PINNED_UPLOAD: "#009E73",
    READ_WAIT: "#D9D9D9",
    UPLOAD_WAIT: "#A6A6A6",
    DEQUANTIZE: "#CC79A7",
    COMPUTE: "#E69F00",
}
"""Okabe and Ito's palette, which is safe for colour-blind readers."""
_LABELS: Mapping[str, str] = {READ: "disk", UPLOAD: "copy to device", READ_WAIT: "wait for weights"}
_LANES: Sequence[tuple[str, frozenset[str]]] = (
    ("disk", frozenset({READ})),
    ("copy", frozenset(COPIES)),
    ("caller", frozenset(CALLER_STAGES)),
)
_CALLERS = CALLER_STAGES
_BRINGERS = (READ, *COPIES)
_MAX_NAMES = 40
"""Limit of layers that are all named below the bars."""
_WIDTH, _HEIGHT = 11.0, 6.2
"""Size in inches."""


def draw(trace: Trace, path: str | Path, title: str = "", note: str = "") -> None:
    """Draw the median pass of a trace.

    Args:
        trace: a trace with at least one complete pass.
        path: path of the file, which is replaced.
        title: first line, above the picture.
        note: second line.

    Raises:
        OptionError, MissingPackageError: see `check_picture`; or there is no complete pass.
        OSError: the file cannot be written.
    """
    check_picture(path)
    events = trace.events
    earliest = min((event.start for event in events), default=float("inf"))
    whole = [one for one in trace.passes if not trace.dropped or one.start >= earliest]
    chosen = median_pass(whole)
    if chosen is None:
        raise OptionError("There is no whole pass to draw.", "Trace more passes, or keep more events.")
    write(_drawn(chosen, events, title, note), path)


def _inside(events: Iterable[Event], one: Pass) -> list[Event]:
    """Events that overlap the pass."""
    end = one.start + one.wall
    return [event for event in events if event.end > one.start and event.start < end]


def spent_by_layer(one: Pass, events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """layer -> stage -> seconds of a pass, layers in its order.

    Reading and copying count for the pass that used the weights: those of the first layer arrived at the end of the
    previous pass, and this pass prefetches them for the next.
    """
    known = list(events)
    spent: dict[str, dict[str, float]] = {}
    used: dict[str, float] = {}
    for event in sorted(_inside(known, one), key=lambda event: event.start):
        if event.stage in _CALLERS:
            stages = spent.setdefault(event.layer, {})
            stages[event.stage] = stages.get(event.stage, 0.0) + event.seconds
            used[event.layer] = event.end
    for event in sorted(known, key=lambda event: event.start):
        if event.stage in _BRINGERS and event.end <= used.get(event.layer, 0.0):
            spent[event.layer][event.stage] = event.seconds
    return spent


def _drawn(one: Pass, events: Sequence[Event], title: str, note: str) -> Any:
    figure = blank(_WIDTH, _HEIGHT)
    above, below = figure.subplots(2, 1, height_ratios=(1, 1.9))
    inside = _inside(events, one)
    _timeline(above, one, inside)
    _bars(below, spent_by_layer(one, events))
    present = [stage for stage in COLOURS if any(event.stage == stage for event in inside)]
    handles = [_patch(COLOURS[stage], _LABELS.get(stage, stage)) for stage in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle("\n".join(line for line in (title, note) if line), x=0.01, ha="left", fontsize=11)
    return figure


def _timeline(axes: Any, one: Pass, events: Sequence[Event]) -> None:
    """Draw a lane for the disk, one for copies, one for the caller; x in milliseconds of the pass."""
    lanes = [(name, stages) for name, stages in _LANES if any(event.stage in stages for event in events)]
    for row, (_, stages) in enumerate(lanes):
        for stage in stages:
            spans = [_clipped(event, one) for event in events if event.stage == stage]
            axes.broken_barh(spans, (row - 0.36, 0.72), color=COLOURS[stage], edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, one.wall * 1e3)
    kind = f"over {one.tokens} tokens of prompt" if one.kind == PROMPT else f"over {_tokens(one.tokens)}"
    axes.set_xlabel(f"milliseconds of pass {one.number}, {kind}")
    unframed(axes)


def _clipped(event: Event, one: Pass) -> tuple[float, float]:
    """Start and length in milliseconds of the part within the pass."""
    start, end = max(event.start - one.start, 0.0), min(event.end - one.start, one.wall)
    return start * 1e3, (end - start) * 1e3


def _bars(axes: Any, spent: Mapping[str, Mapping[str, float]]) -> None:
    """Draw two bars for each layer: the caller's times, stacked, and next to them those of the disk and the copies."""
    layers = list(spent)
    brings = any(stage in stages for stages in spent.values() for stage in _BRINGERS)
    width = 0.4 if brings else 0.8
    for stages, shift in ((_CALLERS, width / 2 if brings else 0.0), (_BRINGERS, -width / 2)):
        bottom = [0.0] * len(layers)
        for stage in stages:
            heights = [spent[layer].get(stage, 0.0) * 1e3 for layer in layers]
            axes.bar([x + shift for x in range(len(layers))], heights, width, bottom, color=COLOURS[stage])
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    step = max(-(-len(layers) // _MAX_NAMES), 1)
    axes.set_xticks(range(0, len(layers), step), _short(layers)[::step], rotation=90, fontsize=8)
    axes.set_xlim(-0.6, len(layers) - 0.4)
    axes.set_ylabel("milliseconds")
    unframed(axes)


def _short(layers: Sequence[str]) -> list[str]:
    """Names of layers without a common prefix such as `model.`."""
    return [layer.removeprefix("model.").removeprefix("transformer.") for layer in layers]


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)
