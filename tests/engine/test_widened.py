"""Products and convolutions of bfloat16 in float32 have the class's results but for rounding."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Conv1D
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, causal_conv1d_update

from rabbitllm.engine import _widened, forwards
from rabbitllm.engine._recurrences import step_of
from rabbitllm.engine._rotary import fuse_rotary
from rabbitllm.engine._widened import wide_torch, widen_convolutions, with_wide_convolutions
from rabbitllm.engine.row_attention import in_float32
from rabbitllm.quant import bfloat_products, turned
from tests.engine.test_forwards import by_expert, inputs, layer
from tests.support.builders import build_checkpoint
from tests.support.kernel_rows import plain_products as plain_products
from tests.support.rounding import assert_as_near, assert_products, assert_rounded_once, exact_logits
from tests.support.tiny_models import ALL, INPUT, load, plain_model, run, split


@pytest.fixture(autouse=True)
def slow_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a processor without instructions for bfloat16; nothing of it is kept for other tests."""
    monkeypatch.setattr(bfloat_products, "torch_has_instructions", lambda: False)
    for is_over in (False, True):
        step_of.cache_clear()
        in_float32.cache_clear()
        if not is_over:
            yield


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize(
    ("name", "operands"),
    [
        ("matmul", [random(2, 3, 9, 32), random(2, 3, 32, 40)]),
        ("matmul", [random(2, 3, 32), random(32, 40)]),
        ("matmul", [random(3, 20, 32), random(40, 32).mT]),
        ("bmm", [random(3, 9, 32), random(3, 32, 40)]),
        ("baddbmm", [random(3, 9, 40), random(3, 9, 32), random(3, 32, 40)]),
        ("addmm", [random(40), random(20, 32), random(32, 40)]),
        ("addmm", [random(40), random(3, 32), random(32, 40)]),
        ("addmm", [random(3, 40), random(3, 32), random(32, 40)]),
        ("einsum", ["bik,bkj->bij", random(3, 9, 32), random(3, 32, 40)]),
    ],
)
def test_products(name: str, operands: list[Any]) -> None:
    """Each of them in one rounding, and by torch's own for gradients, with `out` and for other dtypes."""
    ordinary, wide = getattr(torch, name), getattr(wide_torch, name)
    doubles = [x.double() if isinstance(x, torch.Tensor) else x for x in operands]
    expected = ordinary(*doubles)
    with torch.no_grad():
        result = wide(*operands)
        assert torch.equal(wide(*doubles), expected)
    assert result.dtype is torch.bfloat16
    assert result.shape == expected.shape
    assert_rounded_once(result, expected)
    assert torch.equal(wide(*operands), ordinary(*operands))  # with gradients
    scaled = {"alpha": 0.5, "beta": 2.0}
    if name in ("baddbmm", "addmm"):
        with torch.no_grad():
            exact = ordinary(*doubles, **scaled)
            assert_rounded_once(wide(*operands, **scaled), exact)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [("bmm", [(2, 3, 32), (32, 40)]), ("addmm", [(40,), (2, 3, 32), (32, 40)]), ("matmul", [(40,), (3, 32), (32, 40)])],
)
@torch.no_grad()
def test_operands_that_torch_refuses(name: str, shapes: list[tuple[int, ...]]) -> None:
    for module in (torch, wide_torch):
        with pytest.raises((RuntimeError, TypeError)):
            getattr(module, name)(*(random(*shape) for shape in shapes))


@torch.no_grad()
def test_a_product_of_nothing() -> None:
    assert torch.equal(wide_torch.matmul(random(2, 3, 0), random(0, 6)), torch.zeros(2, 3, 6).bfloat16())


@torch.no_grad()
def test_autocast_has_its_own_dtype() -> None:
    module, x = nn.Conv1d(8, 8, 3).bfloat16(), random(1, 8, 9)
    assert widen_convolutions(module) == 1
    with torch.autocast("cpu", dtype=torch.float16):
        assert module(x).dtype is torch.float16
        assert wide_torch.matmul(x, random(9, 4)).dtype is torch.float16


@pytest.mark.parametrize("rows", [1, 16, 17, 70])
@torch.no_grad()
def test_layers_of_gpt2(rows: int) -> None:
    module, x = Conv1D(96, 160).bfloat16(), random(1, rows, 160)
    module.bias.copy_(random(96))
    assert fuse_rotary(module, prompts=True) == 1
    assert_products(module(x)[0], x[0], module.weight.T, module.bias)
    copied = copy.deepcopy(module)
    copied.weight.zero_()
    assert torch.equal(copied(x)[0], module.bias.expand(rows, -1))


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv1d(24, 16, 3, stride=2, padding=1), (24, 50)),
        (nn.Conv1d(24, 24, 4, padding=3, groups=24, bias=False), (1, 24, 50)),
        (nn.Conv2d(3, 16, 4, stride=4), (2, 3, 16, 16)),
        (nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), (1, 8, 9, 9)),
        (nn.Conv3d(3, 16, (2, 4, 4), stride=(2, 4, 4), bias=False), (5, 3, 2, 4, 4)),
    ],
)
def test_convolutions(convolution: nn.Module, shape: tuple[int, ...]) -> None:
    module, x = copy.deepcopy(convolution).bfloat16(), random(*shape)
    plain, expected = copy.deepcopy(module).float(), copy.deepcopy(module).double()(x.double())
    assert widen_convolutions(module) == 1
    with torch.no_grad():
        result = module(input=x)
        assert torch.equal(module.float()(x.float()), plain(x.float()))
    assert result.dtype is torch.bfloat16
    assert_rounded_once(result, expected)
    module.bfloat16()(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@torch.no_grad()
def test_convolutions_of_hybrids() -> None:
    """Of prompts, and of texts that go on by several tokens; transformers' own functions."""
    x, weight, states = random(1, 12, 9), random(12, 4), random(1, 12, 3)
    result = with_wide_convolutions(causal_conv1d_fn)(x, weight, None, "silu")
    expected = causal_conv1d_fn(x.double(), weight.double(), None, "silu")
    assert (result - expected).norm() <= 2**-7 * expected.norm()  # and those of the activation
    assert with_wide_convolutions(causal_conv1d_fn) is not causal_conv1d_fn
    copied, update = states.clone(), step_of(causal_conv1d_update, prompts=True)
    result, exact = update(x, copied, weight), causal_conv1d_update(x.double(), states.double(), weight.double())
    assert_rounded_once(result, exact)
    assert torch.equal(copied, x[:, :, -3:])


def test_torch_s_own_where_it_has_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat_products, "torch_has_instructions", lambda: True)
    assert not widen_convolutions(nn.Conv1d(8, 8, 3))
    assert not fuse_rotary(Conv1D(8, 8), prompts=True)


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("top_k", [1, 2])
def test_experts_of_llama_4(top_k: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moe, x = by_expert(layer(top_k, torch.bfloat16)), inputs(tokens, torch.bfloat16)
    products, product = list[int](), turned.product
    monkeypatch.setattr(turned, "product", lambda x, *others: products.append(len(x)) or product(x, *others))
    with torch.no_grad():
        plain, exact = moe(x)[0], copy.deepcopy(moe).double()
        forwards.group_llama4(moe)
        assert_as_near(moe(x)[0], plain, exact(x.double())[0])
    assert sum(products) == 2 * top_k * tokens
    assert torch.equal(moe(x)[0], plain)  # with gradients


@pytest.mark.usefixtures("plain_products")
@pytest.mark.parametrize(("family", "budget"), [("gpt2", ALL), ("gpt2", 0), ("bloom", ALL)])
@torch.inference_mode()
def test_models(tmp_path: Path, family: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, are_widened = list[bool](), _widened._are_widened
    monkeypatch.setattr(_widened, "_are_widened", lambda tensors: asked.append(are_widened(tensors)) or asked[-1])
    folder = build_checkpoint(tmp_path / "model", family, tied=True, dtype=torch.bfloat16)
    plain, directory = run(plain_model(folder, dtype=torch.bfloat16)).logits, split(folder)
    fast = run(load(directory, budget, exact=False, fast_bfloat16=True)).logits
    assert asked
    assert all(asked)
    del asked[:]
    assert_as_near(fast, plain, exact_logits(folder, INPUT))
    assert torch.equal(run(load(directory)).logits, plain)
    assert not asked
