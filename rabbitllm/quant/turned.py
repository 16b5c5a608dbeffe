"""Products with a quantized matrix (K, N) from the left, as some classes keep their experts: its blocks lie along N.

A row of the matrix has one factor for each row of input. So some rows at a time are decoded into the cache, in bfloat16
as the dequantized matrix has them, and are added to float32 sums in the order of K, which all machines share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.quant import _kernels, bfloat_products
from rabbitllm.quant._kernel_interface import BFLOAT16, SEGMENT, TURNED, Preparation
from rabbitllm.quant.products import Matrix, sample

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


_INPUTS = 2, 1, 0
"""The numbers of `Preparation` for inputs in their order, in float32."""


class TurnedOperands(NamedTuple):
    """What the kernel of a matrix (K, N) gets as "codes", "scales", "table", "row_bytes" and "shift"; its scheme, lanes
    and shape (N, K), and the rows of input up to which it is the fastest method."""

    codes: int
    scales: int
    table: int
    row_bytes: int
    shift: int
    scheme: str
    width: int
    shape: tuple[int, int]
    most: int

    @classmethod
    def of(cls, matrix: Any) -> TurnedOperands | None:
        """Those of a stored matrix, or of the transpose of a plain one without gaps; None without a kernel."""
        is_coded = isinstance(matrix, TurnedMatrix)
        if not is_coded and (type(matrix) is not torch.Tensor or matrix.dim() != 2 or matrix.is_contiguous()):
            return None
        columns, rows = matrix.form.shape[::-1] if is_coded else matrix.shape
        if columns % SEGMENT or rows % _INPUTS[0]:
            return None
        from rabbitllm.quant import _product_kernels, _vectors  # numba comes with them

        width, most = _vectors.lanes(), FEW_INPUTS
        if is_coded:
            codes, scales, table, row_bytes, _, shift = matrix.operands(width)
            own = codes, scales, table, row_bytes, shift, matrix.form.scheme
            is_fit = table != 0 and own[5] in _product_kernels.STEP_BYTES  # not blocks
        else:
            own = matrix.data_ptr(), 0, 0, 2 * columns, 0, BFLOAT16
            most = min(most, bfloat_products.max_rows())
            is_fit = matrix.dtype is torch.bfloat16 and matrix.is_cpu and matrix.t().is_contiguous()
        is_fit = is_fit and width > 0 and most > 0 and _agrees(own[5], width)
        return cls(*own, width, (columns, rows), most) if is_fit else None

    @property
    def preparation(self) -> Preparation:
        """How the kernel takes inputs."""
        from rabbitllm.quant import joint_kernels  # numba comes with it

        return Preparation(joint_kernels.widen_inputs, _INPUTS, 4 * self.shape[1])


@functools.cache
def _agrees(scheme: str, width: int) -> bool:
    """Whether the kernel's products with samples agree with the dequantized matrix and float32."""

    def products() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        random = RandomTensors()
        for inputs, rows, columns in ((1, 36, 192), (3, 64, 8192)):  # the last by several threads, in two parts
            if scheme == BFLOAT16:
                plain = random.normal(rows, columns)
                work = plain.data_ptr(), 0, 0, 2 * columns, 0
            else:
                matrix = sample(scheme, (rows, columns), random)
                plain = matrix.decoded(0, rows, torch.bfloat16)
                codes, scales, table, row_bytes, _, shift = matrix.operands(width)
                work = codes, scales, table, row_bytes, shift
            x = random.normal(inputs, rows, dtype=torch.float32)
            out = torch.empty(inputs, columns, dtype=torch.float32, device="cpu")
            codes, scales, table, row_bytes, shift = work
            piece = codes, scales, x.data_ptr(), 0, table, out.data_ptr(), row_bytes, rows, shift, inputs, columns
            _kernels.run(TURNED, scheme, width, [piece], rows * row_bytes)
            yield out, x @ plain.float()

    return _kernels.agrees(f"of turned matrices at {scheme}", products())
