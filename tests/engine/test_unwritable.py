"""What stands for a weight that is not in memory, and what of it is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rabbitllm.engine.expert_stack import ExpertStack
from rabbitllm.engine.packed_weight import PackedWeight
from rabbitllm.engine.unwritable import AbsentWeight, no_number
from rabbitllm.errors import ReadOnlyWeightError
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import ALL, load, split

SHAPE = torch.Size((3, 4))


def absent(**more: Any) -> AbsentWeight:
    return AbsentWeight(no_number(torch.bfloat16, torch.device("cpu")), SHAPE, **more)


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
        ("llama", "4bit", ALL, "model.layers.1.mlp.up_proj.weight", PackedWeight),
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
    assert not AbsentWeight(no_number(torch.uint8, torch.device("cpu")), SHAPE).requires_grad
    assert weight.untyped_storage().nbytes() == 2


def test_whoever_computes_with_it_sees_that_it_is_no_number() -> None:
    weight = absent()
    assert type(weight + 1) is torch.Tensor
    assert (weight + 1).isnan().all()
    into = torch.zeros(SHAPE)
    into.copy_(weight)  # reading is allowed
    assert into.isnan().all()


def test_copies_and_pickles() -> None:
    weight = absent(marks={"quant_type": "nf4"})
    assert weight.quant_type == "nf4"
    again = copy.deepcopy(weight)
    assert type(again) is AbsentWeight
    assert (again.shape, again.dtype, again.quant_type) == (SHAPE, torch.bfloat16, "nf4")
    with pytest.raises(ReadOnlyWeightError, match="save_pretrained"):
        torch.save({"weight": weight.detach()}, io.BytesIO())
