"""A plain matrix of bfloat16 or float16, multiplied where it lies, as one more of those that our kernels multiply."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from rabbitllm.quant import bfloat_products
from rabbitllm.quant._kernel_interface import BFLOAT16, CODES, DEQUANTIZED, PANELS, PLAIN, InputRows, Preparation
from rabbitllm.quant.products import KernelMatrix


class PlainForm(NamedTuple):
    """The shape (N, K) of a plain matrix."""

    shape: tuple[int, ...]


class PlainMatrix(KernelMatrix):
    """The matrix of a weight (N, K) for which `bfloat_products.width_for` has a kernel, and which is not kept.

    Attributes:
        form: its shape.
    """

    __slots__ = "_address", "_dtype", "_size", "_stride", "_weight", "form", "kernel"

    @property
    def max_inputs(self) -> int:  # type: ignore[override]
        """Rows of input up to which this is the fastest method."""
        return min(bfloat_products.FEW_ROWS, bfloat_products.max_rows())

    def __init__(self, weight: torch.Tensor) -> None:
        self.form, self._weight, self._address = PlainForm(tuple(weight.shape)), weakref.ref(weight), weight.data_ptr()
        self._size, self._stride, self._dtype = weight.shape, weight.stride(), weight.dtype
        self.kernel = PLAIN[weight.dtype]

    def is_of(self, weight: Any) -> bool:
        """Whether it is the matrix of a weight, too: one that lies there in this form."""
        if type(weight) not in (torch.nn.Parameter, torch.Tensor) or weight.data_ptr() != self._address:
            return False
        if weight.dtype is not self._dtype or weight.shape != self._size or weight.stride() != self._stride:
            return False
        if self._weight() is not weight:  # a streamed one, which is another tensor in each pass
            self._weight = weakref.ref(weight)
        return True

    def changes(self) -> int:
        weight = self._weight()
        return 0 if weight is None or weight.is_inference() else weight._version

    def method_for(self, count: int, dtype: torch.dtype) -> tuple[str, int]:
        if dtype != self._dtype or count > bfloat_products.max_rows_of(dtype):
            return DEQUANTIZED, 0
        from rabbitllm.quant import _vectors  # numba comes with it

        return CODES if count <= self.max_inputs else PANELS, _vectors.lanes()

    def preparation(self, width: int) -> Preparation:
        from rabbitllm.quant import joint_kernels  # numba comes with it

        widen = joint_kernels.widen_inputs if self.kernel == BFLOAT16 else joint_kernels.widen_in_order
        return Preparation(widen, (2 * width, 1, 0), 4 * self.form.shape[1])

    def inputs(self, width: int, x: torch.Tensor) -> InputRows:
        return InputRows(bfloat_products.widened(width, x))

    def operands(self, width: int) -> tuple[int, int, int, int, int, int]:
        columns = self.form.shape[1]
        return self._address, 0, 0, 2 * columns, columns // (2 * width), 0

    def in_chunks(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight = self._weight()
        assert weight is not None
        return torch.nn.functional.linear(x, weight, bias)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight = self._weight()
        assert weight is not None
        return product(x, weight, bias)


def matrix_of(weight: torch.Tensor) -> PlainMatrix | None:
    """The matrix of a weight; None if no kernel multiplies it here."""
    return PlainMatrix(weight) if bfloat_products.width_for(weight) else None


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ W.T + bias` by the fastest method here: (..., K), (N, K) and (N,) -> (..., N)."""
    multiply = bfloat_products.linear if bfloat_products.multiplies(x, weight) else torch.nn.functional.linear
    return multiply(x, weight, bias)
