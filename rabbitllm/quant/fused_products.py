"""Products with a matrix that is stored at 4bit, on a device for which bitsandbytes has a kernel.

One input is multiplied from the codes; more inputs with the matrix, which is dequantized for each product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rabbitllm.quant.compression import NF4_BLOCK, Quantized, dequantize, multiply_4bit

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FusedMatrix:
    """A stored matrix on the device that multiplies it.

    Attributes:
        form: one for which `can_multiply` is true; (N, K).
        payload: uint8 codes.
        absmax: float32, one per block.
        table: float32 (16,), the value of each code.
    """

    form: Quantized
    payload: torch.Tensor
    absmax: torch.Tensor
    table: torch.Tensor

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized matrix."""
        return dequantize(self.form, self.payload, self.absmax, self.table, dtype)

    def grouped(self, x: torch.Tensor) -> None:
        """None: groups are multiplied one by one."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ W.T + bias`: (..., K) of a floating dtype -> (..., N) of the same."""
        import torch

        if x.numel() != x.shape[-1]:
            return torch.nn.functional.linear(x, self.dequantized(x.dtype), bias)
        product = multiply_4bit(self.form, self.payload, self.absmax, self.table, x.reshape(1, -1).contiguous())
        if bias is not None:
            product = product + bias
        return product.view(*x.shape[:-1], self.form.shape[0])


def can_multiply(form: Quantized) -> bool:
    """Whether bitsandbytes' kernel accepts such a matrix: 2-D at 4bit, each row a whole number of blocks."""
    return form.scheme == "4bit" and len(form.shape) == 2 and all(form.shape) and form.shape[1] % NF4_BLOCK == 0
