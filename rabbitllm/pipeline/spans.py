"""Which process gets which layers.

A token goes through all processes in turn, so its time does not depend on the number of layers in each process, as long
as all of them are resident. So the plan minimizes first the streamed bytes, then the fullest process's share of memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rabbitllm.engine.placement import SLOTS
from rabbitllm.errors import HostsError


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive layers, from `begin` to `end` exclusive."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.begin <= layer < self.end


def plan_spans(layers: Sequence[int], others: int, budgets: Sequence[int]) -> tuple[Span, ...]:
    """A span for each process, in order, which together cover all layers.

    Args:
        layers: bytes of each layer, in the order of a pass.
        others: bytes of the other weights (embedding, norm, head); the first process has those, and so may have no
            layer. Every other one has at least one.
        budgets: bytes that weights may take in each process.

    Raises:
        HostsError: there are more workers than layers.
    """
    count, ranks = len(layers), len(budgets)
    if ranks - 1 > count:
        raise HostsError(f"{count} layers cannot be spread over {ranks} processes.", "Start fewer of them.")
    sums = [0]
    for nbytes in layers:
        sums.append(sums[-1] + nbytes)
    # best[end]: the cost of the processes so far if they have the layers before `end`, and the end of each span
    best: dict[int, tuple[int, float, tuple[int, ...]]] = {0: (0, 0.0, ())}
    for rank, budget in enumerate(budgets):
        reached: dict[int, tuple[int, float, tuple[int, ...]]] = {}
        for begin, (streamed, fullest, ends) in best.items():
            for end in range(begin + (rank > 0), count + 1):
                load = sums[end] - sums[begin] + (others if rank == 0 else 0)
                more = _streamed(load, max(layers[begin:end], default=0), budget)
                full = load / budget if budget else math.inf if load else 0.0
                found = (streamed + more, max(fullest, full), (*ends, end))
                if end not in reached or found < reached[end]:
                    reached[end] = found
        best = reached
    ends = best[count][2]
    return tuple(Span(begin, end) for begin, end in zip((0, *ends), ends, strict=False))


def _streamed(load: int, largest: int, budget: int) -> int:
    """Bytes that a process streams in each pass: weights that do not fit beside the streaming buffers."""
    return 0 if load <= budget else min(load, load - budget + SLOTS * largest)
