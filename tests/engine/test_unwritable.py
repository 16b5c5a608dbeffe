"""What stands for a weight that is not in memory, and what of it is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from rabbitllm.engine.expert_stack import ExpertStack
from rabbitllm.engine.quantized_weight import QuantizedWeight
from rabbitllm.engine.unwritable import AbsentWeight
from rabbitllm.errors import AbsentWeightError, ReadOnlyWeightError
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import ALL, load, split

SHAPE = torch.Size((3, 4))


class Refused(Exception):
    """That something asked for the weight."""


def refuse() -> torch.Tensor:
    raise Refused


def absent(
    bring: Callable[[], torch.Tensor] = refuse, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> AbsentWeight:
    return AbsentWeight(bring, SHAPE, dtype, torch.device("cpu"), **more)


def add_in_place(weight: Any) -> None:
    weight.data += 1


def set_an_item(weight: Any) -> None:
    weight[0] = 1


def set_data(weight: Any) -> None:
    weight.data = torch.ones(tuple(weight.shape))


WRITES: list[Callable[[Any], Any]] = [
    add_in_place,
    set_an_item,
    set_data,
    lambda weight: weight.detach().mul_(2),
    lambda weight: weight.copy_(torch.zeros(tuple(weight.shape))),
    lambda weight: weight.data.fill_(0),
    lambda weight: torch.add(torch.ones(()), 1.0, out=weight),
]


@pytest.mark.parametrize("write", WRITES)
def test_no_writing_to_what_is_not_there(write: Callable[[Any], Any]) -> None:
    with torch.no_grad(), pytest.raises(ReadOnlyWeightError, match="read from the disk when its layer computes"):
        write(absent())


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    ("family", "compression", "budget", "name", "kind"),
    [
        ("llama", "4bit", ALL, "model.layers.1.mlp.up_proj.weight", QuantizedWeight),
        ("qwen3_moe", None, 0, "model.layers.1.mlp.experts.down_proj", ExpertStack),
    ],
)
def test_no_writing_to_what_is_there_in_another_form(
    tmp_path: Path,
    family: str,
    compression: str | None,
    budget: int,
    name: str,
    kind: type,
    write: Callable[[Any], Any],
) -> None:
    files = split(build_checkpoint(tmp_path, family), compression)
    weight = load(files, budget, exact=False).get_parameter(name)
    assert isinstance(weight, kind)
    with torch.no_grad(), pytest.raises(ReadOnlyWeightError, match=r"by (its|their) codes"):
        write(weight)


def test_it_is_a_parameter_that_takes_no_memory() -> None:
    weight = absent()
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device) == (SHAPE, torch.bfloat16, torch.device("cpu"))
    assert weight.requires_grad
    assert not weight.requires_grad_(False).requires_grad
    assert not absent(dtype=torch.uint8).requires_grad
    assert not isinstance(absent(is_parameter=False), nn.Parameter)
    with pytest.raises(RuntimeError, match="invalid python storage"):
        weight.untyped_storage().data_ptr()


WITHOUT_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda w: (
        w.shape,
        w.size(),
        w.size(0),
        w.dim(),
        w.ndim,
        w.numel(),
        len(w),
        w.stride(),
        w.is_contiguous(),
    ),
    "dtype": lambda w: (w.dtype, w.is_floating_point(), w.is_complex(), w.element_size(), w.itemsize, w.nbytes),
    "device": lambda w: (
        w.device,
        w.is_cuda,
        w.is_cpu,
        w.is_meta,
        w.get_device(),
        w.layout,
        w.is_sparse,
        w.is_pinned(),
    ),
    "gradient": lambda w: (w.requires_grad, w.grad, w.is_leaf, w.grad_fn, w.requires_grad_(False).requires_grad),
    "functions": lambda w: (torch.is_floating_point(w), torch.numel(w), torch.is_tensor(w), torch.result_type(w, 1.5)),
    "kind": lambda w: (w.type(), torch.is_complex(w), w.is_shared(), w.is_inference(), w.is_quantized),
    "another's": lambda w: (
        torch.ones(2, 2).to(w).dtype,
        torch.ones(2).type_as(w).dtype,
        torch.ones(4).expand_as(w).shape,
    ),
    "new": lambda w: (
        w.new_zeros(2).tolist(),
        w.new_ones(1).dtype,
        w.new_empty((2, 3)).shape,
        w.new_tensor([1, 2]).tolist(),
    ),
    "like": lambda w: (
        torch.zeros_like(w).tolist(),
        torch.empty_like(w).shape,
        torch.ones_like(w, dtype=torch.int8).tolist(),
    ),
    "like, elsewhere": lambda w: (torch.rand_like(w).device, torch.empty_like(w, device="meta").device),
}


@pytest.mark.parametrize("asked", sorted(WITHOUT_VALUES))
def test_what_needs_no_values_is_answered_as_for_a_weight_that_is_there(asked: str) -> None:
    there = nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16))
    assert WITHOUT_VALUES[asked](absent()) == WITHOUT_VALUES[asked](there)


@pytest.mark.parametrize(
    "same",
    [
        lambda w: w.to("cpu"),
        lambda w: w.to(torch.bfloat16),
        lambda w: w.to(device="cpu", dtype=torch.bfloat16),
        lambda w: w.to(torch.ones(1, dtype=torch.bfloat16)),
        lambda w: w.bfloat16(),
        lambda w: w.cpu(),
        lambda w: w.contiguous(),
        lambda w: w.share_memory_(),
        lambda w: w.requires_grad_(),
    ],
)
def test_a_change_that_changes_nothing_is_none(same: Callable[[Any], Any]) -> None:
    weight = absent()
    assert same(weight) is weight


def test_another_name_for_it_is_absent_too() -> None:
    for other in (absent().data, absent().detach(), nn.Parameter(absent())):
        assert type(other) is AbsentWeight
        with pytest.raises(Refused):
            other.sum()
    assert not absent().detach().requires_grad
    assert isinstance(nn.Parameter(absent()), nn.Parameter)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a sum": lambda w: w.float().sum(),
    "a product": lambda w: nn.functional.linear(torch.ones(2, 4), w.float()),
    "an operator": lambda w: w + 1,
    "another's operator": lambda w: torch.ones(SHAPE) * w,
    "in a list": lambda w: torch.cat([torch.ones(SHAPE, dtype=w.dtype), w]),
    "by name": lambda w: torch.add(input=torch.ones(SHAPE), other=w),
    "an item": lambda w: w[0],
    "turned": lambda w: w.T,
    "another dtype": lambda w: w.to(torch.float32),
    "a copy": lambda w: w.to(torch.bfloat16, copy=True),
    "a clone": lambda w: w.clone(),
    "copied": lambda w: torch.zeros(SHAPE).copy_(w),
    "new of it": lambda w: torch.ones(1).new_tensor(w.detach()),
    "rows": lambda w: nn.functional.embedding(torch.tensor([0, 2]), w),
    "a list": lambda w: w.tolist(),
    "an array": lambda w: w.detach().float().numpy(),
    "numpy": lambda w: np.asarray(w.detach().float()),
    "an address": lambda w: w.data_ptr(),
    "a number": lambda w: w[0, 0].item(),
    "a truth": lambda w: bool(w.any()),
    "rows one by one": lambda w: list(w),
    "compared": lambda w: torch.equal(w, w),
    "a view": lambda w: w.view(-1),
    "inside another function": lambda w: torch.einsum("ij,kj->ik", w, w),
    "dlpack": lambda w: torch.from_dlpack(w.detach().float()),
}


@pytest.mark.parametrize("asked", sorted(READS))
def test_what_needs_values_asks_for_the_weight(asked: str) -> None:
    there = torch.arange(12.0, dtype=torch.bfloat16).view(SHAPE)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(Refused):
            READS[asked](absent())
    with torch.no_grad():
        wanted, found = READS[asked](there), READS[asked](absent(bring=lambda: nn.Parameter(there)))
    if asked == "an address":
        assert found == wanted
        return
    assert type(found) is type(wanted)
    assert np.array_equal(np.asarray(_plain(found)), np.asarray(_plain(wanted)))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.detach().float().numpy() if isinstance(value, torch.Tensor) else value


def test_operations_that_no_torch_function_sees_ask_too() -> None:
    """A product of something packed with it, and autograd's own functions, do not."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> None:
            return None

    class Other(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    other, there = torch.ones(SHAPE).as_subclass(Other), torch.full(SHAPE, 3.0)
    for compute in (lambda w: Doubled.apply(w), lambda w: other + w):
        with torch.no_grad(), pytest.raises(Refused):
            compute(absent(dtype=torch.float32))
        with torch.no_grad():
            found = compute(absent(dtype=torch.float32, bring=lambda: there))
        assert torch.equal(found.as_subclass(torch.Tensor), compute(there).as_subclass(torch.Tensor))


def test_what_it_prints() -> None:
    said = "AbsentWeight((3, 4), torch.bfloat16, cpu, not in memory)"
    assert repr(absent()) == str(absent()) == f"{absent()}" == said


def test_no_initialising_by_a_function_that_takes_it_by_name() -> None:
    for begin in (nn.init.zeros_, nn.init.ones_, nn.init.normal_):
        with pytest.raises(ReadOnlyWeightError):
            begin(absent(bring=lambda: torch.ones(SHAPE)))


def test_copies_and_pickles() -> None:
    weight = absent(marks={"quant_type": "nf4"})
    assert weight.quant_type == "nf4"
    again = copy.deepcopy(weight)
    assert type(again) is AbsentWeight
    assert (again.shape, again.dtype, again.quant_type) == (SHAPE, torch.bfloat16, "nf4")
    assert isinstance(again, nn.Parameter)
    assert again.requires_grad
    for write in (
        lambda: torch.save({"weight": weight.detach()}, io.BytesIO()),
        lambda: pickle.dumps(weight),
    ):
        with pytest.raises(AbsentWeightError, match="save_pretrained"):
            write()
    with pytest.raises(Refused):
        safetensors.torch.save({"weight": weight.detach()})
