"""Counters and timings of the server; `/metrics` shows them together with those of its batch."""

from __future__ import annotations

import threading
import time

from rabbitllm.generation.request import BatchStats, Delta, Event
from rabbitllm.server.prometheus import Counts, Family, Histogram, counter, gauge
from rabbitllm.version import __version__

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
        self._lock = threading.Lock()
        self._open = 0

    def begin(self) -> None:
        """Count a new HTTP request."""
        with self._lock:
            self._open += 1

    def end(self) -> None:
        """Count the end of an HTTP request."""
        with self._lock:
            self._open -= 1

    def watch(self) -> TokenTimer:
        """A timer for the requests of one answer."""
        return TokenTimer(self)

    def families(self, facts: BatchStats, model: str) -> list[Family]:
        """All metrics."""
        with self._lock:
            now_open = self._open
        return [
            Family("rabbitllm_info", "gauge", "What runs.", [("", {"version": __version__, "model": model}, 1)]),
            self.requests.family("rabbitllm_http_requests_total", "Requests of HTTP that were answered."),
            gauge("rabbitllm_http_requests_open", "Requests of HTTP that are being answered.", now_open),
            self.left.family("rabbitllm_clients_left_total", "Clients that left before their answer was complete."),
            self.first.family("rabbitllm_time_to_first_token_seconds", "From a request to its first token."),
            self.between.family("rabbitllm_time_between_tokens_seconds", "Between two tokens of an answer."),
            self.whole.family("rabbitllm_request_seconds", "From a request to the end of its answer."),
            *_of_the_batch(facts),
        ]


class TokenTimer:
    """Times the tokens of one answer's requests; called in the batch's thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._last: dict[int, float] = {}

    def __call__(self, choice: int, event: Event, now: float) -> None:
        """Record an event."""
        if not isinstance(event, Delta):
            self._metrics.whole.observe(now - self._start)
            return
        if not event.tokens:
            return
        last = self._last.get(choice)
        if last is None:
            self._metrics.first.observe(now - self._start)
        else:
            self._metrics.between.observe((now - last) / len(event.tokens), len(event.tokens))
        self._last[choice] = now


def _of_the_batch(facts: BatchStats) -> list[Family]:
    ended = [("", {"reason": reason}, float(count)) for reason, count in facts.ended.items()]
    return [
        gauge("rabbitllm_running", "Generations that take part in passes.", facts.running),
        gauge("rabbitllm_running_limit", "How many may.", facts.most_running),
        gauge("rabbitllm_waiting", "Generations that have not begun.", facts.waiting),
        gauge("rabbitllm_waiting_limit", "How many may wait.", facts.most_waiting),
        gauge("rabbitllm_cache_bytes", "KV caches in memory.", facts.cache_bytes),
        gauge("rabbitllm_cache_limit_bytes", "How many may be.", facts.cache_limit_bytes),
        gauge("rabbitllm_aside_bytes", "KV caches that are swapped out, to RAM or a file.", facts.aside_bytes),
        gauge("rabbitllm_aside_limit_bytes", "How many may be.", facts.aside_limit_bytes),
        counter("rabbitllm_passes_total", "Walks over all layers.", facts.passes),
        counter("rabbitllm_pass_seconds_total", "Time that they took.", facts.pass_seconds),
        counter("rabbitllm_disk_wait_seconds_total", "Of that, waiting for the disk.", facts.disk_seconds),
        counter("rabbitllm_copy_wait_seconds_total", "Of that, waiting for copies.", facts.copy_seconds),
        counter("rabbitllm_streamed_bytes_total", "Of weights, brought for passes.", facts.streamed_bytes),
        counter("rabbitllm_prompt_tokens_total", "Tokens of prompts.", facts.prompt_tokens),
        counter("rabbitllm_kept_tokens_total", "Of these, not computed again.", facts.kept_tokens),
        counter("rabbitllm_generated_tokens_total", "Tokens that were generated.", facts.new_tokens),
        counter("rabbitllm_preempted_total", "Times that a generation gave its place back.", facts.preempted),
        counter("rabbitllm_resumed_total", "Times that one had its KV cache swapped in then.", facts.resumed),
        Family("rabbitllm_generations_total", "counter", "Generations that ended.", ended),
    ]
