"""What `make fuzz` does for minutes, for a second: readers given files that are changed in keeping with their format.

Whatever such a file is, it is read or refused by a RabbitLLMError.
"""

from __future__ import annotations

import contextlib
import functools
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.__main__ import TARGETS as NAMES
from fuzz.targets import TARGETS, seeds_of
from rabbitllm.errors import RabbitLLMError
from tests.support.draws import draws

LAX = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@functools.cache
def seeds(name: str) -> tuple[bytes, ...]:
    return tuple(seeds_of(TARGETS[name]))


@functools.cache
def sound(name: str) -> tuple[bytes, ...]:
    """Those of the seeds that are believed."""
    believed = []
    for data in seeds(name):
        with contextlib.suppress(RabbitLLMError):
            TARGETS[name].read(data)
            believed.append(data)
    return tuple(believed)


def check(name: str, hostile: bool, times: int, random: Random) -> None:
    data = random.choice(seeds(name) if hostile else sound(name))
    for _ in range(times):
        data = TARGETS[name].mutate(data, random)
    with contextlib.suppress(RabbitLLMError):
        TARGETS[name].read(data)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=draws(300), deadline=None, suppress_health_check=LAX)
@given(hostile=st.booleans(), times=st.integers(1, 3), seed=st.integers(0, 1 << 62))
def test_read_or_refused(name: str, hostile: bool, times: int, seed: int) -> None:
    check(name, hostile, times, Random(seed))


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=draws(20_000), deadline=None, suppress_health_check=LAX)
@given(hostile=st.booleans(), times=st.integers(1, 3), seed=st.integers(0, 1 << 62))
def test_read_or_refused_long(name: str, hostile: bool, times: int, seed: int) -> None:
    check(name, hostile, times, Random(seed))


@pytest.mark.parametrize("name", TARGETS)
def test_changes_are_neither_all_sound_nor_all_refused(name: str) -> None:
    """Or nothing would be learnt from them; and one seed of chance makes one file."""
    random, believed = Random(1), 0
    for number in range(400):
        data = sound(name)[number % len(sound(name))]
        changed = TARGETS[name].mutate(data, Random(number))
        assert changed == TARGETS[name].mutate(data, Random(number))
        with contextlib.suppress(RabbitLLMError):
            TARGETS[name].read(TARGETS[name].mutate(data, random))
            believed += 1
    assert 12 < believed < 200


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_no_file_of_the_format_is_changed_too(name: str) -> None:
    for number in range(200):
        data = Random(number).randbytes(number)
        assert isinstance(TARGETS[name].mutate(data, Random(number)), bytes)


def test_every_target_is_run() -> None:
    assert tuple(TARGETS) == NAMES
