"""Products with a quantized matrix (K, N) from the left, as some classes keep their experts: its blocks lie along N.

A row of the matrix has one factor for each row of input. So some rows at a time are decoded into the cache, in bfloat16
as the dequantized matrix has them, and are added to float32 sums in the order of K, which all machines share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rabbitllm.quant import bfloat_products
from rabbitllm.quant.products import Matrix

FEW_INPUTS = 16
"""Rows of input that our kernel multiplies; for more torch's product is faster."""
STRIP_ELEMENTS = 1 << 21
"""Elements that are decoded at a time: 4 MiB of bfloat16; threads begin and end for each."""


def is_faster() -> bool:
    """Whether products here are faster than torch's of bfloat16, which takes 25 times as long without instructions."""
    return not bfloat_products.torch_has_instructions()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight + bias` by the fastest method here, if possible with sums as `TurnedMatrix` has them: (T, K), (K, N)
    and (N,) -> (T, N)."""
    rows, columns = weight.shape
    if is_faster() and x.dtype is weight.dtype is torch.bfloat16 and x.is_cpu and x.shape[1] == rows:
        if weight.is_contiguous():
            step = rows if len(x) <= FEW_INPUTS else max(STRIP_ELEMENTS // columns, 1)
            return _sums(x, rows, columns, step, lambda begin, end: weight[begin:end], bias)
        if bfloat_products.multiplies(x, weight.t()):
            return bfloat_products.linear(x, weight.t(), bias)
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _sums(
    x: torch.Tensor,
    rows: int,
    columns: int,
    step: int,
    strip_of: Callable[[int, int], torch.Tensor],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product with a matrix of which some rows are there at a time."""
    from rabbitllm.quant import dequantize_kernels  # numba comes with it

    wide = x.float().contiguous()
    out = torch.zeros(len(x), columns, dtype=torch.float32, device="cpu")
    if bias is not None:
        out += bias
    for begin in range(0, rows, step):
        inputs, strip = wide[:, begin : begin + step], strip_of(begin, min(begin + step, rows))
        if len(x) <= FEW_INPUTS:
            dequantize_kernels.add_rows(inputs, strip, out)
        else:
            out.addmm_(inputs, strip.float())
    return out.to(x.dtype)


@dataclass(frozen=True, slots=True)
class TurnedMatrix(Matrix):
    """A stored matrix (K, N); `multiplies` is true for its form."""

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ W`: (T, K) of bfloat16 -> (T, N) of the same."""
        if len(x) > FEW_INPUTS and not is_faster():
            return torch.mm(x, self.dequantized(x.dtype))
        rows, columns = self.form.shape
        step = self.together * max(STRIP_ELEMENTS // columns // self.together, 1)
        return _sums(x, rows, columns, step, lambda begin, end: self.decoded(begin, end, x.dtype))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ W.T + bias`, which no class computes."""
        return torch.nn.functional.linear(x, self.dequantized(x.dtype), bias)

    def grouped(self, x: torch.Tensor, groups: int = 1) -> None:
        """None: groups are multiplied one by one."""
