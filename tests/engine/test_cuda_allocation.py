"""What runs of memory of one size take of a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.engine.placement import Budget
from rabbitllm.engine.placing import place, taken
from tests.engine.test_placement_of_experts import mixture

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, 512),
        (1, 512),
        (513, 1024),
        (MIB, MIB),
        (MIB + 1, 20 * MIB // 19),
        (7 * MIB, 10 * MIB),
        (9 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (354 * MIB, 354 * MIB),
    ],
)
def test_by_size(nbytes: int, expected: int) -> None:
    assert taken(nbytes) == expected


@given(st.integers(1, 1 << 34), st.integers(1, 200))
def test_so_many_fit_the_segments_that_they_are_said_to_take(nbytes: int, count: int) -> None:
    """Segment by segment, as the allocator fills them."""
    rounded = -(-nbytes // 512) * 512
    if rounded >= 10 * MIB:
        held = count * (-(-rounded // (2 * MIB)) * 2 * MIB)
    else:
        segment = 2 * MIB if rounded <= MIB else 20 * MIB
        held = -(-count // (segment // rounded)) * segment
    assert nbytes <= taken(nbytes)
    last = 20 * MIB if rounded < 10 * MIB else 0  # the last segment may not be full
    rounding = count  # of shares to whole bytes
    assert count * taken(nbytes) <= held + rounding
    assert held <= count * taken(nbytes) + rounding + last


def test_experts_are_kept_on_a_gpu_by_what_their_slots_take_there() -> None:
    costs, experts = mixture(3)
    room = 4 * 100 + 300 + 5 * 512
    for is_host, slots in ((True, 5 * 512 // 100), (False, 5)):
        (pool,) = place(costs, [Budget("d", room, is_host)], experts=experts).pools
        assert pool.slots == slots
