"""Prometheus' text format, version 0.0.4: families of samples as lines. Independent of the metrics themselves."""

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
        name: letters, digits and underscores.
        kind: "counter", "gauge" or "histogram".
        help: description of the metric.
        samples: suffix of the name, labels, value.
    """

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[str, Mapping[str, str], float]]


def counter(name: str, text: str, value: float) -> Family:
    """A family with one value that only grows."""
    return Family(name, "counter", text, [("", {}, value)])


def gauge(name: str, text: str, value: float) -> Family:
    """A family with one value that goes up and down."""
    return Family(name, "gauge", text, [("", {}, value)])


def written(families: Iterable[Family]) -> str:
    """The families as text."""
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
    """Counters by label values; safe to use from any thread.

    Args:
        labels: names of the labels.
    """

    def __init__(self, *labels: str) -> None:
        self._labels = labels
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], float] = {}

    def add(self, *values: str, amount: float = 1) -> None:
        """Increase a counter."""
        with self._lock:
            self._counts[values] = self._counts.get(values, 0) + amount

    def family(self, name: str, text: str) -> Family:
        """The counters as a family."""
        with self._lock:
            counts = dict(self._counts)
        samples = [("", dict(zip(self._labels, values, strict=True)), count) for values, count in counts.items()]
        return Family(name, "counter", text, samples)


class Histogram:
    """A histogram; safe to use from any thread.

    Args:
        bounds: upper bounds of the buckets, ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += times
            self._sum += value * times

    def family(self, name: str, text: str) -> Family:
        """The histogram as a family, with cumulative buckets as the format requires."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        samples: list[tuple[str, Mapping[str, str], float]] = []
        below = 0
        for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
            below += count
            samples.append(("_bucket", {"le": _number(bound)}, below))
        samples += [("_sum", {}, total), ("_count", {}, below)]
        return Family(name, "histogram", text, samples)
