"""Tensors of waiting micro-batches come back as they were, within the bounds, and leave no file behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.generation.kv_cache import tensors_in
from rabbitllm.generation.scoring._activation_offload import ActivationOffload, NoRoom
from rabbitllm.storage.durable import Step, observe_steps

SIZE = 10_000
"""Numbers of a tensor, of four bytes each."""


class Holder:
    """Takes turns with others; holds two tensors."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.needed = [torch.rand(SIZE), torch.rand(SIZE // 2)]
        self.expected = [tensor.clone() for tensor in self.needed]

    def compute(self) -> None:
        for tensor, expected in zip(self.needed, self.expected, strict=True):
            assert torch.equal(tensor, expected)
        self.needed[0] = self.needed[0] + 1
        self.expected[0] = self.expected[0] + 1

    def bytes_here(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.needed)


def turns(offload: ActivationOffload, holders: list[Holder], rounds: int, limit: int) -> None:
    for holder in holders:
        offload.leave(holder, holder.needed)
    for _ in range(rounds):
        for holder, following in zip(holders, [*holders[1:], holders[0]], strict=True):
            offload.prefetch(following)
            offload.take(holder)
            holder.compute()
            offload.leave(holder, holder.needed)
            assert sum(holder.bytes_here() for holder in holders) <= limit


@pytest.mark.parametrize("near", [0, 60_000, 150_000])
@pytest.mark.parametrize("host", [0, 100_000, 1 << 30])
def test_offloaded_tensors_come_back_unchanged(tmp_path: Path, near: int, host: int) -> None:
    holders = [Holder(seed) for seed in range(5)]
    with ActivationOffload(near, host, 1 << 30, tmp_path) as offload:
        turns(offload, holders, 4, near)
        assert offload.max_resident <= near
        assert (offload.written > 0) == (near + host < 5 * SIZE * 6)
        assert not list(tmp_path.iterdir())


def test_the_first_tensors_stay_resident(tmp_path: Path) -> None:
    holders = [Holder(seed) for seed in range(4)]
    near = 2 * SIZE * 6 + 100
    with ActivationOffload(near, 0, 1 << 30, tmp_path) as offload:
        turns(offload, holders, 3, near)
        assert offload.written == 2 * SIZE * 6 * (1 + 3)  # those of two, each round
        assert offload.read == 2 * SIZE * 6 * 3


def test_slots_in_the_file_are_reused(tmp_path: Path) -> None:
    holders = [Holder(seed) for seed in range(3)]
    enough = 3 * 3 * (SIZE * 4 + 4096)
    with ActivationOffload(0, 0, enough, tmp_path) as offload:
        turns(offload, holders, 20, 0)
        assert offload.written > 5 * enough


def test_no_space_is_an_error(tmp_path: Path) -> None:
    holder = Holder(0)
    with ActivationOffload(0, 0, SIZE * 6, tmp_path) as offload, pytest.raises(NoRoom):
        offload.leave(holder, holder.needed)


def test_shared_tensors_stay_resident(tmp_path: Path) -> None:
    shared, single = torch.rand(SIZE), torch.rand(SIZE)
    with ActivationOffload(0, 0, 1 << 30, tmp_path) as offload:
        offload.leave("a", [shared])
        assert not shared.untyped_storage().nbytes()  # no other holder is known
        offload.leave("b", [shared, single])
        offload.take("b")
        offload.leave("b", [shared, single])
        assert [tensor.untyped_storage().nbytes() for tensor in (shared, single)] == [SIZE * 4, 0]
        offload.drop("a")
        offload.leave("b", [shared, single])
        assert not shared.untyped_storage().nbytes()


def test_offloaded_shared_tensors_return_for_the_next_owner(tmp_path: Path) -> None:
    """A tensor that is offloaded already when a second owner waits with it: it is filled for either of them."""
    shared = torch.rand(SIZE)
    expected = shared.clone()
    with ActivationOffload(0, 0, 1 << 30, tmp_path) as offload:
        offload.leave("a", [shared])
        offload.leave("b", [shared])
        offload.drop("a")
        offload.take("b")
        assert torch.equal(shared, expected)


def test_tensors_in_containers() -> None:
    first, second = torch.zeros(3), torch.zeros(4)
    endless: list[Any] = [second]
    endless.append(endless)
    tensors = tensors_in([(first, {"a": endless}), 7, None])
    assert {id(tensor) for tensor in tensors} == {id(first), id(second)}


def test_weights_are_not_offloaded(tmp_path: Path) -> None:
    holder = Holder(0)
    weight = holder.needed[0].untyped_storage()
    with ActivationOffload(0, 0, 1 << 30, tmp_path, fixed=frozenset([weight._cdata])) as offload:
        offload.leave(holder, holder.needed)
        assert weight.nbytes() == SIZE * 4
        assert not holder.needed[1].untyped_storage().nbytes()


def test_prefetched_tensors_of_an_ended_owner(tmp_path: Path) -> None:
    holders = [Holder(0), Holder(1)]
    with ActivationOffload(0, 0, 1 << 30, tmp_path) as offload:
        for holder in holders:
            offload.leave(holder, holder.needed)
        offload.prefetch(holders[0])
        offload.drop(holders[0])
        offload.take(holders[1])
        holders[1].compute()
    assert not list(tmp_path.iterdir())


def test_a_full_disk(tmp_path: Path) -> None:
    """What could not be written is where it was; what was is brought back."""
    holder = Holder(0)
    written = 0

    def full(step: Step) -> None:
        nonlocal written
        if written == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += step.kind == "write"

    with ActivationOffload(0, 0, 1 << 30, tmp_path) as offload, observe_steps(full):
        with pytest.raises(OSError, match="No space left"):
            offload.leave(holder, holder.needed)
        assert 0 < holder.bytes_here() < SIZE * 6
        offload.take(holder)
        holder.compute()
    assert written == 1
    assert not list(tmp_path.iterdir())
