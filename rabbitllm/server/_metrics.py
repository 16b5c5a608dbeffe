"""Counters and timings of the server; `/metrics` shows them and the batch's as Prometheus text, version 0.0.4."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rabbitllm.generation.request import BatchStats, Delta, Event
from rabbitllm.version import __version__

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


def text_format(families: Iterable[Family]) -> str:
    """The families as text."""
    lines = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for suffix, labels, value in family.samples:
            pairs = ",".join(f'{name}="{_escaped(text, quoted=True)}"' for name, text in labels.items())
            lines.append(f"{family.name}{suffix}{f'{{{pairs}}}' if pairs else ''} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if abs(value) < 1e15 and value == int(value) else repr(float(value))


class Counts:
    """Counters by label values; safe to use from any thread."""

    def __init__(self, *labels: str) -> None:
        self._labels = labels
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], float] = {}

    def add(self, *values: str, amount: float = 1) -> None:
        """Increase a counter."""
        with self._lock:
            self._counts[values] = self._counts.get(values, 0) + amount

    def family(self, name: str, text: str, metric_type: str = "counter") -> Family:
        """The counters as a family."""
        with self._lock:
            counts = dict(self._counts)
        samples = [("", dict(zip(self._labels, values, strict=True)), count) for values, count in counts.items()]
        return Family(name, metric_type, text, samples)


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
        for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
            below += count
            samples.append(("_bucket", {"le": _number(bound)}, below))
        samples += [("_sum", {}, total), ("_count", {}, below)]
        return Family(name, "histogram", text, samples)


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
"""Bucket bounds: from a resident model to one that is read from a slow disk for each token."""


class Metrics:
    """Counters; safe to use from any thread."""

    def __init__(self) -> None:
        self.requests = Counts("endpoint", "status")
        self.first = Histogram(_SECONDS)
        self.between = Histogram(_SECONDS)
        self.whole = Histogram(_SECONDS)
        self.left = Counts()
        self.open = Counts()

    def watch(self) -> Callable[[int, Event, float], None]:
        """A function that times the tokens of one answer's requests; called in the batch's thread."""
        start, last_times = time.perf_counter(), dict[int, float]()

        def note(choice: int, event: Event, now: float) -> None:
            if not isinstance(event, Delta):
                self.whole.observe(now - start)
            elif event.tokens:
                if choice in last_times:
                    self.between.observe((now - last_times[choice]) / len(event.tokens), len(event.tokens))
                else:
                    self.first.observe(now - start)
                last_times[choice] = now

        return note

    def families(self, stats: Mapping[str, BatchStats], models: Sequence[str]) -> list[Family]:
        """All metrics; those of batches have the model as a label where there are several.

        Args:
            stats: loaded model -> statistics of its batch.
            models: the names of all models.
        """
        about = [("", {"version": __version__, "model": model}, 1.0) for model in models]
        return [
            Family("rabbitllm_info", "gauge", "Version and models of this server.", about),
            self.requests.family("rabbitllm_http_requests_total", "Answered HTTP requests."),
            self.open.family("rabbitllm_http_requests_open", "Open HTTP requests.", "gauge"),
            self.left.family(
                "rabbitllm_clients_left_total", "Requests whose client disconnected before the answer was complete."
            ),
            self.first.family("rabbitllm_time_to_first_token_seconds", "Time from a request to its first token."),
            self.between.family("rabbitllm_time_between_tokens_seconds", "Time between two tokens of an answer."),
            self.whole.family("rabbitllm_request_seconds", "Time from a request to the end of its answer."),
            *_of_all({name: _batch_families(each) for name, each in stats.items()}, labelled=len(models) > 1),
        ]


def _of_all(by_model: Mapping[str, Sequence[Family]], *, labelled: bool) -> Iterator[Family]:
    """The families of all models, each as one family."""
    for alike in zip(*by_model.values(), strict=True):
        samples = [
            (suffix, {"model": model, **labels} if labelled else labels, value)
            for model, family in zip(by_model, alike, strict=True)
            for suffix, labels, value in family.samples
        ]
        yield replace(alike[0], samples=samples)


_OF_BATCH = (
    ("running", "running", "Running requests."),
    ("most_running", "running_limit", "Maximum running requests."),
    ("waiting", "waiting", "Waiting requests."),
    ("most_waiting", "waiting_limit", "Maximum waiting requests."),
    ("cache_bytes", "cache_bytes", "Bytes of KV caches in memory."),
    ("cache_limit_bytes", "cache_limit_bytes", "Maximum bytes of KV caches in memory."),
    ("aside_bytes", "aside_bytes", "Bytes of KV caches that are swapped out to RAM or a file."),
    ("aside_limit_bytes", "aside_limit_bytes", "Maximum bytes of swapped-out KV caches."),
    ("passes", "passes_total", "Passes over all layers."),
    ("pass_seconds", "pass_seconds_total", "Time of all passes."),
    ("disk_seconds", "disk_wait_seconds_total", "Part of the passes' time that waits for the disk."),
    ("copy_seconds", "copy_wait_seconds_total", "Part of the passes' time that waits for copies to a device."),
    ("streamed_bytes", "streamed_bytes_total", "Bytes of weights read or copied for passes."),
    ("prompt_tokens", "prompt_tokens_total", "Prompt tokens."),
    ("kept_tokens", "kept_tokens_total", "Prompt tokens found in the prefix cache."),
    ("new_tokens", "generated_tokens_total", "Generated tokens."),
    ("drafted_tokens", "drafted_tokens_total", "Tokens that drafts proposed."),
    ("accepted_tokens", "accepted_tokens_total", "Drafted tokens that were right."),
    ("forced_tokens", "forced_tokens_total", "Tokens that a grammar forced, without a pass."),
    ("prompt_bytes", "prompt_cache_bytes", "Bytes of the prompt cache on disk."),
    ("prompt_limit_bytes", "prompt_cache_limit_bytes", "Limit of the prompt cache on disk."),
    ("prompt_hits", "prompt_cache_hits_total", "Requests that continued a prefix from disk."),
    ("prompt_saved_tokens", "prompt_cache_saved_tokens_total", "Prompt tokens read from disk and not computed."),
    ("prompt_read_bytes", "prompt_cache_read_bytes_total", "Bytes read from the prompt cache."),
    ("prompt_written_bytes", "prompt_cache_written_bytes_total", "Bytes written to the prompt cache."),
    ("preempted", "preempted_total", "Preemptions of running requests."),
    ("resumed", "resumed_total", "Preempted requests resumed with their KV cache swapped in."),
)
"""Statistic of a batch, name of its metric, what it is; what is a total only grows."""


def _batch_families(stats: BatchStats) -> list[Family]:
    families = []
    for key, name, text in _OF_BATCH:
        type_name = "counter" if name.endswith("_total") else "gauge"
        families.append(Family(f"rabbitllm_{name}", type_name, text, [("", {}, getattr(stats, key))]))
    drafts = stats.drafts
    for name, counts in (("checked", drafts.checked), ("right", drafts.right)):
        text = f"Drafted tokens that were {name}, by their place in the draft."
        depths = [("", {"depth": str(depth)}, float(count)) for depth, count in enumerate(counts, 1)]
        families.append(Family(f"rabbitllm_{name}_tokens_total", "counter", text, depths))
    text = "Time in which tokens were drafted."
    families.append(Family("rabbitllm_draft_seconds_total", "counter", text, [("", {}, drafts.seconds)]))
    ended = [("", {"reason": reason}, float(count)) for reason, count in stats.ended.items()]
    return [*families, Family("rabbitllm_generations_total", "counter", "Finished requests, by reason.", ended)]
