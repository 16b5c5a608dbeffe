"""A drawing of disk in use over time, as SVG, by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 900, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 44, 48
_GB = 1e9


@dataclass(frozen=True)
class Point:
    """A moment: seconds, bytes of layer files, bytes of everything else."""

    seconds: float
    layers: int
    other: int


@dataclass(frozen=True)
class Level:
    """A horizontal line: bytes, and what it says."""

    nbytes: int
    label: str
    colour: str


def drawing(title: str, points: Sequence[Point], levels: Sequence[Level], marks: Iterable[float], mark: str) -> str:
    """An SVG document.

    Args:
        title: above it.
        points: in order of time.
        levels: what the use of disk is to be compared with.
        marks: seconds at which something happened.
        mark: what that is.
    """
    last = max(points[-1].seconds, 1e-9)
    top = max(*(level.nbytes for level in levels), *(point.layers + point.other for point in points)) * 1.08
    frame = _Frame(last, top)
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
        *_axes(frame),
        _area(frame, [(p.seconds, p.layers, p.layers + p.other) for p in points], "#e8a33d"),
        _area(frame, [(p.seconds, 0, p.layers) for p in points], "#3b76b5"),
    ]
    for number, level in enumerate(levels):  # by turns above and below, since they may be close; on the left, where
        y, at, above = frame.y(level.nbytes), _LEFT + 6, 14 if number % 2 else -5  # the disk is empty yet
        body.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="{level.colour}" stroke-dasharray="6 3"/>')
        label = escape(level.label)
        body.append(f'<text x="{at}" y="{y + above:.1f}" fill="{level.colour}">{label}</text>')
    for seconds in marks:
        x = frame.x(seconds)
        body.append(f'<path d="M{x:.1f} {_TOP}V{HEIGHT - _BOTTOM}" stroke="#b03030" stroke-dasharray="2 3"/>')
    body += _legend((("#3b76b5", "layer files"), ("#e8a33d", "fetched shards and the hub cache"), ("#b03030", mark)))
    return "\n".join([*body, "</svg>"]) + "\n"


@dataclass(frozen=True)
class _Frame:
    """Where seconds and bytes are on the paper."""

    last: float
    top: float

    def x(self, seconds: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * seconds / self.last

    def y(self, nbytes: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * nbytes / self.top


def _area(frame: _Frame, spans: Sequence[tuple[float, int, int]], colour: str) -> str:
    """The stretch between two curves; what was sampled holds until the next sample."""
    there, back = [f"M{frame.x(spans[0][0]):.1f} {frame.y(spans[0][1]):.1f}"], []
    for number, (seconds, low, high) in enumerate(spans):
        until = spans[number + 1][0] if number + 1 < len(spans) else frame.last
        there.append(f"V{frame.y(high):.1f}H{frame.x(until):.1f}")
        back.append(f"V{frame.y(low):.1f}H{frame.x(seconds):.1f}")
    return f'<path d="{"".join([*there, *reversed(back)])}Z" fill="{colour}"/>'


def _axes(frame: _Frame) -> list[str]:
    lines = []
    unit, name = (60.0, "minutes") if frame.last > 180 else (1.0, "seconds")
    for value in _ticks(frame.top / _GB):
        y = frame.y(value * _GB)
        lines.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="#e4e4e4"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in _ticks(frame.last / unit):
        x, foot = frame.x(value * unit), HEIGHT - _BOTTOM + 18
        lines.append(f'<text x="{x:.1f}" y="{foot}" text-anchor="middle">{value:g}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    lines.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{name}</text>')
    lines.append(f'<text x="{_LEFT - 6}" y="{_TOP - 8}" text-anchor="end">GB</text>')
    return lines


def _ticks(top: float) -> list[float]:
    """Round values from 0 to `top`, five to ten of them."""
    step = 10 ** math.floor(math.log10(top / 5)) if top > 0 else 1.0
    step *= next(factor for factor in (1, 2, 5, 10) if top / (step * factor) <= 10)
    return [number * step for number in range(int(top / step) + 1)]


def _legend(entries: Sequence[tuple[str, str]]) -> list[str]:
    lines, x = [], WIDTH - _RIGHT - 400
    for colour, label in entries:
        lines.append(f'<rect x="{x}" y="30" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{x + 14}" y="39">{escape(label)}</text>')
        x += 30 + 7 * len(label)
    return lines
