"""The model of time, as arithmetic: what overlaps, what is waited for, and what each costs the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.estimate.pass_estimator import Strain, UnitTime, pass_seconds

SECONDS = st.floats(0, 10).map(lambda value: round(value, 3))
ALONE = st.lists(st.builds(UnitTime, st.just("cpu"), SECONDS, SECONDS), min_size=1, max_size=12)
STEPS = st.lists(st.builds(UnitTime, st.sampled_from(["cpu", "cuda:0"]), SECONDS, SECONDS), min_size=1, max_size=12)


def streamed(count: int, compute: float, read: float) -> list[UnitTime]:
    return [UnitTime("cpu", compute, read)] * count


def test_what_stays_costs_its_computing() -> None:
    assert pass_seconds([UnitTime("cpu", 1), UnitTime("cpu", 2.5)]) == pytest.approx(3.5)
    assert pass_seconds([]) == 0


@pytest.mark.parametrize(("compute", "read", "each"), [(1, 3, 3), (3, 1, 3), (2, 2, 2), (0, 1, 1)])
def test_the_slower_of_both_decides_where_all_is_streamed(compute: float, read: float, each: float) -> None:
    assert pass_seconds(streamed(6, compute, read)) == pytest.approx(6 * each)


def test_a_single_streamed_unit_is_read_ahead_of_nothing() -> None:
    assert pass_seconds([UnitTime("cpu", 1, 3), UnitTime("cpu", 5)]) == pytest.approx(9)


def test_reading_goes_on_while_what_stays_computes() -> None:
    between = [UnitTime("cpu", 1, 4), UnitTime("cpu", 1), UnitTime("cpu", 1), UnitTime("cpu", 1)]
    assert pass_seconds(between * 3) == pytest.approx(12)
    assert pass_seconds([UnitTime("cpu", 1, 5), *between[1:]] * 3) == pytest.approx(15)
    assert pass_seconds([UnitTime("cpu", 1, 3), *between[1:]] * 3) == pytest.approx(12)


def test_what_stays_in_one_place_hides_one_unit_and_no_more() -> None:
    """Two buffers: the next unit is read ahead, and not the one after it."""
    crowded = [*streamed(3, 0, 2), UnitTime("cpu", 10)]
    # units 1 and 2 are waited for; unit 0 comes while the last step of the pass before computes
    assert pass_seconds(crowded) == pytest.approx(2 + 2 + 10)


def test_each_slows_the_other_while_both_go_on() -> None:
    alone, strained = streamed(4, 1, 1), Strain(computing=2, reading=3)
    # together, a second of reading takes three and one of computing two: 2/3 is read by then, 1/3 is read alone
    assert pass_seconds(alone, strained) == pytest.approx(4 * (2 + 1 / 3))
    assert pass_seconds([UnitTime("cpu", 1)], strained) == pytest.approx(1)


def test_devices_read_at_the_same_time_and_share_the_disk() -> None:
    both = [UnitTime("cuda:0", 0, 1), UnitTime("cuda:0", 0, 1), UnitTime("cuda:1", 0, 1), UnitTime("cuda:1", 0, 1)]
    assert pass_seconds(both) == pytest.approx(4)
    hidden = [UnitTime("cuda:0", 4, 1), UnitTime("cuda:0", 4, 1), UnitTime("cuda:1", 4, 1), UnitTime("cuda:1", 4, 1)]
    assert pass_seconds(hidden) == pytest.approx(16)


@given(ALONE)
def test_between_the_longer_of_both_and_their_sum(steps: list[UnitTime]) -> None:
    computing, reading = sum(step.compute for step in steps), sum(step.read for step in steps)
    assert max(computing, reading) - 1e-6 <= pass_seconds(steps) <= computing + reading + 1e-6


@given(STEPS)
def test_several_devices_take_no_longer_than_one_after_the_other(steps: list[UnitTime]) -> None:
    assert pass_seconds(steps) <= sum(step.compute + step.read for step in steps) + 1e-6


@given(ALONE, st.floats(1, 5), st.floats(1, 5))
def test_strain_never_helps_and_is_bounded(steps: list[UnitTime], computing: float, reading: float) -> None:
    alone, strained = pass_seconds(steps), pass_seconds(steps, Strain(computing, reading))
    assert alone - 1e-6 <= strained
    work = sum(step.compute * computing + step.read * reading for step in steps)
    assert strained <= work + 1e-6
