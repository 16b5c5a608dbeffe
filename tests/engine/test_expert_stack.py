"""A stack of experts answers as an ordinary parameter of the same numbers does, and asks for no expert too many."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rabbitllm.engine.expert_stack import ExpertStack
from rabbitllm.errors import AbsentWeightError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Given:
    """Experts of ordinary tensors; `asked` says which were wanted."""

    def __init__(self, **leaves: torch.Tensor) -> None:
        self.leaves = leaves
        self.asked: list[int] = []

    def each(self, leaf: str, experts: Sequence[int]) -> Iterator[torch.Tensor]:
        for expert in experts:
            self.asked.append(expert)
            yield self.leaves[leaf][expert]

    def order(self, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Those with even numbers are here."""
        late = [at for at, expert in enumerate(experts) if expert % 2]
        return [at for at in range(len(experts)) if at not in late], late

    def stack(self, leaf: str) -> ExpertStack:
        whole = self.leaves[leaf]
        return ExpertStack(self, leaf, whole.shape, whole.dtype, whole.device)


def experts(count: int = 6, rows: int = 32, columns: int = 64, dtype: torch.dtype = torch.float32) -> Given:
    return Given(weight=torch.randn(count, rows, columns).to(dtype))


def groups(sizes: Sequence[int]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[1, 0, 3, 0, 0, 2], [0, 0, 0, 0, 0, 1], [5, 1, 1, 1, 1, 40], [0, 0, 0, 0, 0, 0]])
def test_grouped_products_have_the_bits_of_torchs_own(dtype: torch.dtype, sizes: list[int]) -> None:
    given = experts(dtype=dtype)
    x = torch.randn(sum(sizes), 64).to(dtype)
    with torch.no_grad():
        expected = nn.functional.grouped_mm(x, given.leaves["weight"].transpose(-2, -1), offs=groups(sizes))
        got = nn.functional.grouped_mm(x, given.stack("weight").transpose(-2, -1), offs=groups(sizes))
    assert torch.equal(got, expected)
    used = [expert for expert, size in enumerate(sizes) if size]
    assert given.asked == [e for e in used if not e % 2] + [e for e in used if e % 2]  # those that are here come first


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_stored_turned(dtype: torch.dtype) -> None:
    given = experts(rows=64, columns=32, dtype=dtype)
    x, ends = torch.randn(6, 64).to(dtype), groups([1, 2, 0, 0, 3, 0])
    expected = nn.functional.grouped_mm(x, given.leaves["weight"], offs=ends)
    assert torch.equal(nn.functional.grouped_mm(x, given.stack("weight"), offs=ends), expected)
    fallback = torch.ops.transformers.grouped_mm_fallback
    assert torch.equal(fallback(x, given.stack("weight"), ends), fallback(x, given.leaves["weight"], ends))
    assert given.asked == [0, 4, 1] * 2


def test_single_experts_are_asked_for_singly() -> None:
    given = experts()
    stack, whole = given.stack("weight"), given.leaves["weight"]
    assert torch.equal(stack[3], whole[3])
    assert torch.equal(stack[torch.tensor(2)], whole[2])
    assert torch.equal(stack[-1], whole[-1])
    assert torch.equal(stack.transpose(1, 2)[1], whole.transpose(1, 2)[1])
    assert given.asked == [3, 2, 5, 1]
    with pytest.raises(IndexError, match="6 experts"):
        stack[6]


def test_several_experts_are_copied_and_each_is_asked_for_once() -> None:
    given = experts()
    index = torch.tensor([[4, 1], [4, 4]])
    assert torch.equal(given.stack("weight")[index], given.leaves["weight"][index])
    assert given.asked == [1, 4]


def test_whatever_else_is_asked_gets_all_of_them() -> None:
    given = experts()
    stack, whole = given.stack("weight"), given.leaves["weight"]
    assert torch.equal(stack + 1, whole + 1)
    assert torch.equal(stack[2:4], whole[2:4])
    assert torch.equal(stack.sum(0), whole.sum(0))
    assert torch.equal(torch.bmm(stack, whole.mT), torch.bmm(whole, whole.mT))
    assert torch.equal(stack.mT, whole.mT)
    assert torch.equal(stack[torch.tensor([True, False] * 3)], whole[torch.tensor([True, False] * 3)])


def test_it_is_a_parameter_like_any_other() -> None:
    given = experts(dtype=torch.bfloat16)
    module = nn.Module()
    module.weight = nn.Parameter(given.stack("weight"))
    assert isinstance(module.weight, nn.Parameter)
    assert (module.weight.shape, module.weight.dtype, module.weight.device.type) == ((6, 32, 64), torch.bfloat16, "cpu")
    assert sum(parameter.numel() for parameter in module.parameters()) == 6 * 32 * 64
    assert given.asked == []
    assert "by expert" in repr(module.weight)
    assert torch.equal(copy.deepcopy(given.stack("weight")) * 1, given.leaves["weight"])


def test_gradients_pass_through_to_the_inputs() -> None:
    given = experts()
    ends = groups([1, 0, 2, 0, 0, 1])
    inputs = [torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    for x, weight in zip(inputs, (given.leaves["weight"], given.stack("weight")), strict=True):
        nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends).square().sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]


class Experts(nn.Module):
    """What transformers' kernels look at."""

    has_gate, has_bias, is_transposed, has_post_expert_norm, _is_expert_parallel = True, False, False, False, False
    act_fn = nn.SiLU()
    num_experts = 6

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        activated: torch.Tensor = self.act_fn(gate) * up
        return activated


@pytest.mark.parametrize("kernel", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_transformers_kernels_ask_for_routed_experts_alone(kernel: str, tokens: int) -> None:
    given = Given(gate_up_proj=torch.randn(6, 64, 48), down_proj=torch.randn(6, 48, 32))
    index = torch.stack([torch.randperm(5)[:2] for _ in range(tokens)])  # never the last one
    x, worth = torch.randn(tokens, 48), torch.rand(tokens, 2)
    plain, stacked = Experts(), Experts()
    for leaf, weight in given.leaves.items():
        setattr(plain, leaf, nn.Parameter(weight))
        setattr(stacked, leaf, nn.Parameter(given.stack(leaf)))
    with torch.no_grad():
        expected, got = (ALL_EXPERTS_FUNCTIONS[kernel](module, x, index, worth) for module in (plain, stacked))
    assert torch.equal(got, expected)
    assert sorted(given.asked) == sorted([*set(index.flatten().tolist())] * 2)


def test_what_reads_memory_by_itself_gets_all_experts_or_an_error() -> None:
    given = experts()
    stack, whole = given.stack("weight"), given.leaves["weight"]
    assert np.array_equal(stack.numpy(), whole.numpy())
    assert np.array_equal(np.asarray(stack), whole.numpy())
    assert stack.tolist() == whole.tolist()
    assert torch.equal(torch.from_dlpack(stack), whole)
    with pytest.raises(AbsentWeightError, match="experts are read from the disk"):
        stack.data_ptr()
    with pytest.raises(AbsentWeightError, match="cannot be pickled"):
        torch.save(stack, io.BytesIO())
