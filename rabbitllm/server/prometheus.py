"""Prometheus' text format, version 0.0.4: families of samples as lines. Knows nothing of what is counted."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Family:
    """Samples of one name.

    Attributes:
        name: of letters, digits and underscores.
        kind: "counter", "gauge" or "histogram".
        help: what is counted.
        samples: what follows the name, labels, value.
    """

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[str, Mapping[str, str], float]]


def counter(name: str, text: str, value: float) -> Family:
    """A number that only grows."""
    return Family(name, "counter", text, [("", {}, value)])


def gauge(name: str, text: str, value: float) -> Family:
    """A number that goes up and down."""
    return Family(name, "gauge", text, [("", {}, value)])


def written(families: Iterable[Family]) -> str:
    """All of them, as the format has it."""
    lines = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for suffix, labels, value in family.samples:
            said = ",".join(f'{name}="{_escaped(text, quoted=True)}"' for name, text in labels.items())
            lines.append(f"{family.name}{suffix}{f'{{{said}}}' if said else ''} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


class Counts:
    """Numbers that only grow, by their labels; may be used from any thread.

    Args:
        labels: their names.
    """

    def __init__(self, *labels: str) -> None:
        self._labels = labels
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], float] = {}

    def add(self, *values: str, amount: float = 1) -> None:
        """Count one more."""
        with self._lock:
            self._counts[values] = self._counts.get(values, 0) + amount

    def family(self, name: str, text: str) -> Family:
        """As samples."""
        with self._lock:
            counts = dict(self._counts)
        samples = [("", dict(zip(self._labels, values, strict=True)), count) for values, count in counts.items()]
        return Family(name, "counter", text, samples)


class Histogram:
    """How often a value was at most so large; may be used from any thread.

    Args:
        bounds: rising.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += times
            self._sum += value * times

    def family(self, name: str, text: str) -> Family:
        """As samples: cumulative, as the format has it."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        samples: list[tuple[str, Mapping[str, str], float]] = []
        below = 0
        for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
            below += count
            samples.append(("_bucket", {"le": _number(bound)}, below))
        samples += [("_sum", {}, total), ("_count", {}, below)]
        return Family(name, "histogram", text, samples)
