"""bitsandbytes' product with 4bit codes, by its implementation for the CPU: the parts are given as it wants them."""

from __future__ import annotations

import pytest
import torch

from rabbitllm.quant import products
from rabbitllm.quant.products import FusedMatrix, can_multiply
from rabbitllm.quant.schemes import Quantized
from tests.quant.test_packed_products import error, inputs, matrix, meant


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (37, 128), (128, 192), (64, 64), (130, 1024)])
def test_one_input_is_multiplied_from_the_codes(
    rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = matrix("4bit", rows, columns, dtype=dtype)
    x, bias = inputs(1, columns, dtype), inputs(1, rows, dtype)[0]
    exact = x.double() @ meant(parts).T
    dense = torch.nn.functional.linear(x, FusedMatrix(*parts).dequantized(dtype), bias)

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("the matrix was made")

    monkeypatch.setattr(products, "dequantize", refuse)
    found = FusedMatrix(*parts)
    assert error(found.linear(x, None), exact) < 4 * torch.finfo(dtype).eps
    assert error(found.linear(x, bias), dense.double()) < 4 * torch.finfo(dtype).eps
    for shape in ((columns,), (1, columns), (1, 1, columns)):
        product = found.linear(x.view(shape), bias)
        assert product.shape == (*shape[:-1], rows)
        assert product.dtype == dtype
        assert torch.equal(product.view(-1), found.linear(x, bias).view(-1))


@pytest.mark.parametrize("count", [0, 2, 7])
def test_more_inputs_have_the_bits_of_the_matrix(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = matrix("4bit", 37, 128)
    x, bias = inputs(count, 128, torch.bfloat16), inputs(1, 37, torch.bfloat16)[0]

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("codes were multiplied")

    monkeypatch.setattr(products, "multiply_4bit", refuse)
    found = FusedMatrix(*parts)
    assert torch.equal(found.linear(x, bias), torch.nn.functional.linear(x, found.dequantized(x.dtype), bias))


def test_inputs_that_are_views_of_others() -> None:
    parts = matrix("4bit", 16, 128)
    wide = inputs(128, 3, torch.bfloat16)
    row = wide.T[1:2]
    assert not row.is_contiguous()
    assert torch.equal(FusedMatrix(*parts).linear(row, None), FusedMatrix(*parts).linear(row.contiguous(), None))


@pytest.mark.parametrize(
    ("scheme", "shape", "can"),
    [
        ("4bit", (8, 64), True),
        ("4bit", (1, 128), True),
        ("4bit", (8, 96), False),
        ("4bit", (8, 0), False),
        ("4bit", (2, 8, 64), False),
        ("8bit", (8, 64), False),
    ],
)
def test_which_matrices_the_kernel_takes(scheme: str, shape: tuple[int, ...], can: bool) -> None:
    assert can_multiply(Quantized(scheme, shape, "bfloat16")) == can
