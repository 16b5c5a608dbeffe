"""What waits comes back as it was, within the bounds that were set, and leaves nothing behind; what a function that
waits holds, and what of it it reads again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet

from rabbitllm.generation.scoring.activation_offload import ActivationOffload, HeldTensors, NoRoom, held, read_again
from rabbitllm.storage.durable import Step, observe_steps

SIZE = 10_000
"""Numbers of a tensor, of four bytes each."""


class Holder:
    """Takes turns with others; has two tensors that it needs and one that it does not."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.needed = [torch.rand(SIZE), torch.rand(SIZE // 2)]
        self.idle = torch.rand(SIZE)
        self.expected = [one.clone() for one in self.needed]

    def held(self) -> HeldTensors:
        return HeldTensors(tuple(one.untyped_storage() for one in self.needed), (self.idle.untyped_storage(),))

    def compute(self) -> None:
        for one, other in zip(self.needed, self.expected, strict=True):
            assert torch.equal(one, other)
        self.needed[0] = self.needed[0] + 1
        self.expected[0] = self.expected[0] + 1

    def bytes_here(self) -> int:
        return sum(one.untyped_storage().nbytes() for one in (*self.needed, self.idle))


def turns(offload: ActivationOffload, holders: list[Holder], rounds: int, limit: int) -> None:
    for one in holders:
        offload.leave(one, one.held())
    for _ in range(rounds):
        for one, following in zip(holders, [*holders[1:], holders[0]], strict=True):
            offload.expect(following)
            offload.take(one)
            one.compute()
            offload.leave(one, one.held())
            assert sum(one.bytes_here() for one in holders) <= limit


@pytest.mark.parametrize("near", [0, 60_000, 150_000])
@pytest.mark.parametrize("host", [0, 100_000, 1 << 30])
def test_it_comes_back_as_it_was(tmp_path: Path, near: int, host: int) -> None:
    holders = [Holder(seed) for seed in range(5)]
    with ActivationOffload(near, host, 1 << 30, tmp_path) as offload:
        turns(offload, holders, 4, near)
        assert offload.max_near <= near
        assert (offload.written > 0) == (near + host < 5 * SIZE * 10)
        assert not list(tmp_path.iterdir())


def test_those_that_came_first_stay(tmp_path: Path) -> None:
    holders = [Holder(seed) for seed in range(4)]
    near = 2 * SIZE * 6 + 100
    with ActivationOffload(near, 0, 1 << 30, tmp_path) as offload:
        turns(offload, holders, 3, near)
        # idle ones go once; of the others each round those of two
        assert offload.written == 4 * SIZE * 4 + 2 * SIZE * 6 * (1 + 3)
        assert offload.read == 2 * SIZE * 6 * 3


def test_a_place_in_the_file_is_used_again(tmp_path: Path) -> None:
    holders = [Holder(seed) for seed in range(3)]
    enough = 3 * 3 * (SIZE * 4 + 4096)
    with ActivationOffload(0, 0, enough, tmp_path) as offload:
        turns(offload, holders, 20, 0)
        assert offload.written > 5 * enough


def test_no_room(tmp_path: Path) -> None:
    holder = Holder(0)
    with ActivationOffload(0, 0, SIZE * 6, tmp_path) as offload, pytest.raises(NoRoom):
        offload.leave(holder, holder.held())


def test_what_two_hold_stays(tmp_path: Path) -> None:
    holders = [Holder(0), Holder(1)]
    holders[1].needed[1] = holders[0].needed[1]
    with ActivationOffload(0, 0, 1 << 30, tmp_path) as offload:
        offload.leave(holders[0], HeldTensors((), ()))
        offload.leave(holders[1], HeldTensors((holders[1].needed[1].untyped_storage(),), ()))
        assert not holders[0].needed[1].untyped_storage().nbytes()  # no other holder was known
        offload.take(holders[1])
        offload.leave(holders[0], HeldTensors((holders[0].needed[1].untyped_storage(),), ()))
        before = holders[0].needed[1].untyped_storage().nbytes()
        offload.leave(holders[1], HeldTensors((holders[1].needed[1].untyped_storage(),), ()))
        assert holders[0].needed[1].untyped_storage().nbytes() == before


def test_weights_stay(tmp_path: Path) -> None:
    holder = Holder(0)
    weight = holder.needed[0].untyped_storage()
    with ActivationOffload(0, 0, 1 << 30, tmp_path, frozenset([weight._cdata])) as offload:
        offload.leave(holder, holder.held())
        assert weight.nbytes() == SIZE * 4
        assert not holder.needed[1].untyped_storage().nbytes()


def test_what_was_read_ahead_of_one_who_ends(tmp_path: Path) -> None:
    holders = [Holder(0), Holder(1)]
    with ActivationOffload(0, 0, 1 << 30, tmp_path) as offload:
        for one in holders:
            offload.leave(one, one.held())
        offload.expect(holders[0])
        offload.over(holders[0])
        offload.take(holders[1])
        holders[1].compute()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """What could not be written is where it was; what was is brought back."""
    holder = Holder(0)
    written = 0

    def full(step: Step) -> None:
        nonlocal written
        if written == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += step.kind == "write"

    with ActivationOffload(0, 0, 1 << 30, tmp_path) as offload, observe_steps(full):
        with pytest.raises(OSError, match="No space left"):
            offload.leave(holder, holder.held())
        assert 0 < holder.bytes_here() < SIZE * 10
        offload.take(holder)
        holder.compute()
    assert written == 2
    assert not list(tmp_path.iterdir())


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
