"""What a function that waits holds, and what of it it reads again."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet

from rabbitllm.generation.scoring.held import held, read_again

Waiting = Generator[None, Any, Any]


def in_a_loop(first: Any, second: Any) -> Waiting:
    third = first
    for _ in range(3):
        yield
        third = second
    yield third


def in_an_expression(first: Any, second: Any) -> Waiting:
    return (
        first
        + (
            yield
        )
        + second
    )  # fmt: skip


def behind(first: Any, second: Any) -> Waiting:
    third = first + second
    yield
    return third


def in_a_try(first: Any, second: Any) -> Waiting:
    third = 1
    try:
        yield
    except ValueError:
        third = first
    return third


def in_a_function_of_its_own(first: Any, second: Any) -> Waiting:
    def later() -> Any:
        return first

    yield
    return later


def by_name(first: Any, second: Any) -> Waiting:
    yield
    return locals()


@pytest.mark.parametrize(
    ("function", "again"),
    [
        (in_a_loop, {"second", "third"}),
        (in_an_expression, {"first", "second"}),
        (behind, {"third"}),
        (in_a_try, {"first", "third"}),
        (in_a_function_of_its_own, {"first", "later"}),
        (by_name, {"first", "second"}),
    ],
)
def test_variables_that_are_read_again(function: Callable[..., Waiting], again: set[str]) -> None:
    waiting = function(1, 2)
    next(waiting)
    frame = waiting.gi_frame
    assert read_again(frame.f_code, frame.f_lasti) >= again
    if function is not by_name:
        assert read_again(frame.f_code, frame.f_lasti) <= again


def test_what_a_greenlet_holds() -> None:
    made = {name: torch.zeros(1000) for name in ("given", "read", "idle", "inside", "small")}
    made["small"] = torch.zeros(3)
    hub = getcurrent()

    deep = made["inside"]

    def waits(given: Any) -> None:
        inside = {"a": (deep, [given])}
        hub.switch()
        inside.clear()

    def calls(given: Any, read: Any, idle: Any, small: Any) -> Any:
        waits(given)
        return read, small

    member = greenlet(calls)
    member.switch(made["given"], made["read"], made["idle"], made["small"])
    for _ in range(2):
        found = held(member.gr_frame, (made["given"],), 100)
        needed = {one._cdata for one in found.needed}
        idle = {one._cdata for one in found.idle}
        keys = {name: tensor.untyped_storage()._cdata for name, tensor in made.items()}
        assert needed == {
            keys["given"],
            keys["read"],
            keys["inside"],
        }
        assert idle == {keys["idle"]}
    member.switch()


def test_looking_keeps_nothing() -> None:
    """A frame that was looked at must not keep what its variables were then."""
    hub = getcurrent()

    class Counted:
        there = 0

        def __init__(self) -> None:
            Counted.there += 1

        def __del__(self) -> None:
            Counted.there -= 1

    def waits() -> None:
        value = Counted()
        hub.switch()
        value = Counted()
        hub.switch()
        del value

    member = greenlet(waits)
    member.switch()
    held(member.gr_frame, (), 100)
    member.switch()
    held(member.gr_frame, (), 100)
    assert Counted.there == 1
    member.switch()
    assert Counted.there == 0
