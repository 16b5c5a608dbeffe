"""Products with a quantized matrix (K, N) from the left, as some classes keep their experts: its blocks lie along N.

A row of the matrix has one factor for each row of input. So some rows at a time are decoded into the cache, in bfloat16
as the dequantized matrix has them, and are added to float32 sums in the order of K, which all machines share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rabbitllm.quant import bfloat_products
from rabbitllm.quant.products import Matrix

FEW_INPUTS = 16
"""Rows of input that our kernel multiplies; for more torch's product is faster."""
STRIP_ELEMENTS = 1 << 21
"""Elements that are decoded at a time: 4 MiB of bfloat16; threads begin and end for each."""


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight` by the fastest method here, if possible with sums as `TurnedMatrix` has them: (T, K) and (K, N) ->
    (T, N)."""
    are_bfloats = x.dtype is weight.dtype is torch.bfloat16
    if len(x) > FEW_INPUTS or not are_bfloats or not weight.is_contiguous() or bfloat_products.torch_has_instructions():
        return torch.mm(x, weight)
    out = torch.zeros(len(x), weight.shape[1], dtype=torch.float32, device="cpu")
    _add_rows(x.float().contiguous(), weight, out)
    return out.to(x.dtype)


def _add_rows(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    from rabbitllm.quant import dequantize_kernels  # numba comes with it

    dequantize_kernels.add_rows(x, rows, out)


@dataclass(frozen=True, slots=True)
class TurnedMatrix(Matrix):
    """A stored matrix (K, N); `multiplies` is true for its form."""

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ W`: (T, K) of bfloat16 -> (T, N) of the same."""
        rows, columns = self.form.shape
        is_few = len(x) <= FEW_INPUTS
        if not is_few and bfloat_products.torch_has_instructions():
            return torch.mm(x, self.dequantized(x.dtype))
        wide = x.float().contiguous()
        out = torch.zeros(len(x), columns, dtype=torch.float32, device="cpu")
        step = self.together * max(STRIP_ELEMENTS // columns // self.together, 1)
        for begin in range(0, rows, step):
            strip = self.decoded(begin, min(begin + step, rows), x.dtype)
            if is_few:
                _add_rows(wide[:, begin : begin + step], strip, out)
            else:
                out.addmm_(wide[:, begin : begin + step], strip.float())
        return out.to(x.dtype)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ W.T + bias`, which no class computes."""
        return torch.nn.functional.linear(x, self.dequantized(x.dtype), bias)

    def grouped(self, x: torch.Tensor) -> None:
        """None: groups are multiplied one by one."""

    def routed(self) -> None:
        """None: as above."""
