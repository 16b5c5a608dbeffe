"""Which process gets which layers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.engine.placement import SLOTS
from rabbitllm.errors import HostsError
from rabbitllm.pipeline._stack import Span, plan_spans

LAYERS = st.lists(st.integers(1, 9), min_size=1, max_size=7)
BUDGETS = st.lists(st.integers(0, 30), min_size=1, max_size=4)


def lengths(*args: object) -> list[int]:
    return [len(span) for span in plan_spans(*args)]  # type: ignore[arg-type]


def test_spans_of_equal_hosts() -> None:
    assert lengths([10] * 12, 0, [100] * 3) == [4, 4, 4]
    assert lengths([10] * 12, 30, [100] * 3) == [2, 5, 5]


def test_spans_follow_memory() -> None:
    assert lengths([10] * 12, 0, [20, 60, 40]) == [2, 6, 4]
    assert lengths([10] * 4, 100, [50, 40]) == [0, 4]


def test_more_hosts_than_layers_are_refused() -> None:
    assert lengths([1, 1], 0, [9, 9, 9]) == [0, 1, 1]
    with pytest.raises(HostsError, match="2 layers cannot be spread over 4 processes"):
        plan_spans([1, 1], 0, [9] * 4)


@given(LAYERS, st.integers(0, 20), BUDGETS)
def test_spans_are_optimal(layers: list[int], others: int, budgets: list[int]) -> None:
    ranks, count = len(budgets), len(layers)
    possible = [
        (0, *cuts, count)
        for cuts in itertools.combinations_with_replacement(range(count + 1), ranks - 1)
        if all(b > a for a, b in itertools.pairwise((*cuts, count)))
    ]
    if ranks - 1 > count:
        with pytest.raises(HostsError):
            plan_spans(layers, others, budgets)
        return

    def judged(ends: tuple[int, ...]) -> tuple[int, float]:
        streamed, full = 0, 0.0
        for rank, (begin, end) in enumerate(itertools.pairwise(ends)):
            load = sum(layers[begin:end]) + (others if rank == 0 else 0)
            over = load - budgets[rank]
            buffers = SLOTS * max(layers[begin:end], default=0)
            streamed += min(load, over + buffers) if over > 0 else 0
            full = max(full, load / budgets[rank] if budgets[rank] else float("inf") if load else 0.0)
        return streamed, full

    spans = plan_spans(layers, others, budgets)
    assert [span.begin for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert judged((0, *(span.end for span in spans))) == min(map(judged, possible))


def test_span_contains_its_layers() -> None:
    assert [layer for layer in range(6) if layer in Span(2, 5)] == [2, 3, 4]
