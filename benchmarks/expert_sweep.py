"""Which experts a cache should keep: policies replayed over drawn traces, and the optimum. Runs no model.

Texts and routers are those of `routing.py`; requests follow one another or are decoded side by side, each with a prompt
that is one pass. Hits are counted in passes of one token a sequence, after the first eighth. The engine's own cache is
among the policies. A line for each trace and size: the optimum's hit rate, then those of the others as a share of it.

    python -m benchmarks.expert_sweep [--layers 4] [--markdown]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import command_line, routing
from benchmarks.expert_policies import Clairvoyant, Frequency, Outcome, Policy, Recency, TwoSpans, groups_of, replay
from benchmarks.expert_trace import Ids, Trace
from benchmarks.report import Table
from benchmarks.routing import Habits
from rabbitllm.engine.expert_pool import ExpertCache

SIZES = (0.12, 0.20, 0.45)
"""Of all experts; the share of the engine's cache under a cap of 25 % of the weights is about the second."""
NOISE = 0.3
LIKE_30B = Habits(always=0.4, topic=1.2, theme=1.2, moment=1.5, word=0.3, noise=0.1)
"""Half of a token's 8 of 128 experts are those of the token before, as was published of Qwen3-30B-A3B
(https://github.com/kekzl/imp/pull/1359)."""


@dataclass(frozen=True)
class Traffic:
    """Requests.

    Attributes:
        experts, count: in a layer, and of them for a token.
        habits: of the texts.
        topics: that take turns.
        requests, tokens, prompt: how many, and how many tokens each has and of these its prompt.
        at_once: requests that are decoded at a time.
    """

    habits: Habits
    topics: int
    requests: int
    tokens: int
    prompt: int
    at_once: int = 1
    experts: int = 512
    count: int = 10


_FLAT, _SKEWED = (replace(habits, noise=NOISE) for habits in (routing.FLAT, routing.SKEWED))
TRAFFIC: Mapping[str, Traffic] = {
    "flat, 96 tokens, 8 topics": Traffic(_FLAT, 8, 32, 96, 32),
    "flat, 48 tokens, 4 topics": Traffic(_FLAT, 4, 64, 48, 16),
    "flat, 4 beside each other": Traffic(_FLAT, 8, 32, 96, 32, at_once=4),
    "skewed, 96 tokens, 8 topics": Traffic(_SKEWED, 8, 32, 96, 32),
    "skewed, 48 tokens, 4 topics": Traffic(_SKEWED, 4, 64, 48, 16),
    "skewed, 4 beside each other": Traffic(_SKEWED, 8, 32, 96, 32, at_once=4),
    "8 of 128, 200 tokens, 4 topics": Traffic(LIKE_30B, 4, 8, 200, 32, experts=128, count=8),
}
POLICIES: Mapping[str, tuple[Callable[[], Policy], bool]] = {
    "LRU": (Recency, False),
    "LRU by layer": (Recency, True),
    "half-life 8": (lambda: Frequency(8), False),
    "half-life 32": (lambda: Frequency(32), False),
    "half-life 128": (lambda: Frequency(128), False),
    "2 and 512": (lambda: TwoSpans(2, 512, 1.0), True),
}
"""Policies, and whether each layer has room of its own."""


def trace_of(traffic: Traffic, layers: int) -> Trace:
    """What the routers choose, pass by pass."""
    texts = [
        routing.meanings(traffic.habits, request % traffic.topics, traffic.tokens, request)
        for request in range(traffic.requests)
    ]
    alone = routing.trace(traffic.habits, texts, layers, traffic.experts, traffic.count)
    passes: list[Ids] = []
    for at in range(0, len(alone), traffic.at_once):
        together = [one.ids for one in alone[at : at + traffic.at_once]]
        passes.append(np.concatenate([ids[: traffic.prompt] for ids in together]))
        passes += [np.stack(ids) for ids in zip(*(one[traffic.prompt :] for one in together), strict=True)]
    ends = np.cumsum([len(one) for one in passes])
    return Trace(np.concatenate(passes), ends, traffic.experts)


def replay_engine(trace: Trace, capacity: int, counted: Sequence[bool]) -> Outcome:
    """What the engine's cache would have hit."""
    cache = ExpertCache([trace.experts] * trace.layers, capacity)
    sizes = np.diff(trace.ends, prepend=0).tolist()
    asked = hits = 0
    for group in groups_of(trace):
        experts = group.slots - group.layer * trace.experts
        cache.use(group.layer, experts, group.counts, sizes[group.number])
        slots = cache.slots_of(group.layer, experts)
        here = slots >= 0
        if counted[group.number]:
            asked, hits = asked + len(experts), hits + int(here.sum())
        cache.admit(group.layer, experts[~here], slots[here])
    return Outcome(asked, hits)


def sweep(layers: int) -> Table:
    """All policies over all traffic."""
    lines, gains = [], []
    for name, traffic in TRAFFIC.items():
        trace = trace_of(traffic, layers)
        sizes = np.diff(trace.ends, prepend=0)
        counted = [bool(size == traffic.at_once) and at >= len(sizes) // 8 for at, size in enumerate(sizes)]
        for size in SIZES:
            capacity = int(trace.slots * size)
            best = replay(trace, capacity, Clairvoyant(counted), counted=counted).rate
            rates = [
                replay(trace, capacity, make(), by_layer=own, counted=counted).rate for make, own in POLICIES.values()
            ]
            rates.append(replay_engine(trace, capacity, counted).rate)
            shares = [rate / best for rate in rates]
            gains.append([share - shares[0] for share in shares])
            lines.append((f"{name}, {size:.0%}", f"{best:.3f}", *(f"{share:.3f}" for share in shares)))
    lines.append(("mean gain over LRU", "", *(f"{gain:+.3f}" for gain in np.mean(gains, axis=0))))
    lines.append(("least gain over LRU", "", *(f"{gain:+.3f}" for gain in np.min(gains, axis=0))))
    return Table(("trace, cache", "optimum", *POLICIES, "the engine's"), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--markdown", action="store_true")
    options = command_line.parsed(parser, arguments, layers=1)
    table = sweep(options.layers)
    print(table.markdown() if options.markdown else table.text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
