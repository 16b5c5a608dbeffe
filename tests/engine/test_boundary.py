"""What crosses to another device, how often, and that what was changed crosses again."""

from __future__ import annotations

import gc
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from rabbitllm.engine.boundary import Boundary
from tests.support.fake_gpu import FakeGpu, watched

HERE, THERE = FakeGpu(0).torch_device, FakeGpu(1).torch_device
MODULE = nn.Identity()
Pair = namedtuple("Pair", "first second")
modes = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


def cross(boundary: Boundary, *args: Any, **kwargs: Any) -> Any:
    found = boundary(MODULE, args, kwargs)
    return (args, kwargs) if found is None else found


@modes
def test_a_tensor_crosses_once(mode: Any) -> None:
    with mode(), watched() as operations:
        mask = torch.ones(3, device=HERE)
        boundary = Boundary(THERE)
        copies = [cross(boundary, torch.ones(2, device=HERE), mask=mask)[1]["mask"] for _ in range(4)]
        assert all(copy is copies[0] for copy in copies)
        assert copies[0].device == THERE
        assert torch.equal(copies[0].cpu(), mask.cpu())
        assert operations.crossings[HERE, THERE] == 1 + 4


@modes
def test_what_is_there_stays_the_very_same(mode: Any) -> None:
    with mode(), watched() as operations:
        tensor = torch.ones(3, device=THERE)
        state = [tensor, {"a": (tensor, None)}]
        boundary = Boundary(THERE)
        assert boundary(MODULE, (tensor, 3, None), {"state": state, "name": "x"}) is None
        args, kwargs = cross(boundary, torch.ones(1, device=HERE), state=state)
        assert kwargs["state"] is state
        assert args[0].device == THERE
        assert sum(operations.crossings.values()) == 1


@modes
def test_a_copy_that_was_changed_is_made_again(mode: Any) -> None:
    with mode(), watched():
        mask, boundary = torch.ones(3, device=HERE), Boundary(THERE)
        first = cross(boundary, mask)[0][0]
        first.add_(1)
        first[0] = 7
        second = cross(boundary, mask)[0][0]
        assert second is not first
        assert second.cpu().tolist() == [1, 1, 1]


def test_an_original_that_was_changed_crosses_again() -> None:
    with torch.no_grad(), watched():
        mask, boundary = torch.ones(3, device=HERE), Boundary(THERE)
        assert cross(boundary, mask)[0][0].cpu().tolist() == [1, 1, 1]
        mask.add_(1)
        assert cross(boundary, mask)[0][0].cpu().tolist() == [2, 2, 2]


@modes
def test_a_new_pass_copies_again(mode: Any) -> None:
    with mode(), watched():
        mask, boundary = torch.ones(3, device=HERE), Boundary(THERE)
        first = cross(boundary, mask)[0][0]
        mask.add_(1)
        boundary.forget()
        assert cross(boundary, mask)[0][0].cpu().tolist() == [2, 2, 2]
        assert first.cpu().tolist() == [1, 1, 1]


def test_copies_go_with_their_originals() -> None:
    with torch.no_grad(), watched():
        boundary = Boundary(THERE)
        for _ in range(5):
            cross(boundary, torch.ones(3, device=HERE))
        gc.collect()
        assert len(boundary._copies) == 0


@modes
def test_inside_whatever_holds_tensors(mode: Any) -> None:
    class Held(UserDict[str, torch.Tensor]):
        def to(self, device: torch.device, non_blocking: bool = False) -> Held:
            return Held({key: tensor.to(device) for key, tensor in self.items()})

    with mode(), watched():
        one = torch.ones(3, device=HERE)
        given: dict[str, Any] = {
            "list": [one, 1],
            "tuple": (one, "x"),
            "named": Pair(one, one),
            "dict": OrderedDict(a=one),
            "held": Held(a=one),
            "nested": ({"a": [one]},),
        }
        _, found = cross(Boundary(THERE), **given)
        assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in given.items()}
        tensors = [found["list"][0], found["tuple"][0], *found["named"], found["dict"]["a"], found["held"]["a"]]
        for tensor in (*tensors, found["nested"][0]["a"][0]):
            assert tensor.device == THERE
            assert torch.equal(tensor.cpu(), one.cpu())
        assert found["list"][1] == 1


def test_gradients_cross_back() -> None:
    with watched():
        boundary = Boundary(THERE)
        source = torch.ones(3, requires_grad=True)
        for _ in range(2):
            (cross(boundary, source)[0][0] * 2).sum().backward()
        assert source.grad is not None
        assert source.grad.tolist() == [4, 4, 4]
