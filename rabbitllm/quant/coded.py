"""Matrices of checkpoints that are published quantized, multiplied from their codes on the CPU.

FP8 (float8_e4m3fn), FP4 (E2M1) and integers of 4 bits, each with a scale for a block of rows and columns. For few rows
of input the kernels of `_code_kernels.py` decode in registers: only the published bytes are read. They multiply the
value of a code times its scale in float32; the dequantized matrix has the same values, rounded. For more rows some rows
of the matrix at a time are dequantized and multiplied by torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rabbitllm.formats.tensor_spec import DTYPES, torch_dtype
from rabbitllm.quant import _kernels
from rabbitllm.quant._kernel_interface import CODES, INTEGERS, PAIRS, CodeKernel, InputRows, IntegerProduct
from rabbitllm.quant._kernels import segment_inputs
from rabbitllm.quant.products import MAX_GROUPED, SEGMENT, dense_product

if TYPE_CHECKING:
    import torch

FP8, FP4, INT4 = "fp8", "fp4", "int4"
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the 16 codes of FP4 (E2M1), in the Open Compute Project's Microscaling Formats Specification."""
SCALES = {"F32": "f32", "BF16": "bf16", "F16": "f16", "U8": "power", "F8_E8M0": "power", "F8_E4M3": "float8"}
"""Dtypes of scales -> how kernels call them; U8 is the exponent of a power of two, as E8M0 is."""
MAX_INPUTS = {INTEGERS: 48, PAIRS: 48, 16: 48, 8: 24}
"""Width -> rows of input up to which codes are decoded for every few of them (see benchmarks/NOTES.md)."""


@dataclass(frozen=True, slots=True)
class CodedForm:
    """The form of a published matrix (N, K).

    Attributes:
        codes: `FP8`, `FP4` or `INT4`; 4 bits are two a byte along K, the lower half first, integers plus 8.
        scales: one of `SCALES`.
        block: rows and columns with one scale, of which those at the ends may be smaller; 0 for all.
        shape: (N, K).
    """

    codes: str
    scales: str
    block: tuple[int, int]
    shape: tuple[int, int]

    @property
    def scheme(self) -> str:
        """A name of all but the shape."""
        return f"{self.codes} {self.scales} {self.block[0]}x{self.block[1]}"

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of a row."""
        return self.shape[1] if self.codes == FP8 else self.shape[1] // 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales."""
        return math.prod(self.grid) * DTYPES[self.scales].bits // 8

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.shape[0] * self.row_bytes + self.scale_bytes

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of scales."""
        rows, columns = (-(-of // (by or of)) for of, by in zip(self.shape, self.block, strict=True))
        return rows, columns

    @property
    def kernel(self) -> CodeKernel:
        """The kernel that multiplies it."""
        group = min(self.block[1] or SEGMENT, SEGMENT)
        return CodeKernel("float8" if self.codes == FP8 else "nibbles", SCALES[self.scales], group)


def is_scale(dtype: str) -> bool:
    """Whether kernels know scales of this dtype."""
    return dtype in SCALES


def is_scheme(name: str) -> bool:
    """Whether it is the `scheme` of a form."""
    return name.partition(" ")[0] in (FP8, FP4, INT4)


def form_named(scheme: str, shape: tuple[int, int]) -> CodedForm:
    """A form by its `scheme`."""
    codes, scales, block = scheme.split()
    rows, _, columns = block.partition("x")
    return CodedForm(codes, scales, (int(rows), int(columns)), shape)


def multiplies(form: CodedForm) -> bool:
    """Whether there is a kernel for this matrix on this machine: each row a whole number of segments."""
    rows, columns = form.block
    if (
        not all(form.shape)
        or form.shape[1] % SEGMENT
        or form.scales not in SCALES
        or any(n & (n - 1) for n in form.block)
    ):
        return False
    if (form.codes != FP8 and rows != 1) or 0 < columns < 16:
        return False
    width = kernel_for(form.kernel, None)
    return bool(width) and _agrees(form.kernel, width)


@functools.cache
def kernel_for(kernel: CodeKernel, dtype: torch.dtype | None) -> int:
    """Width of the kernel for inputs of a dtype: `INTEGERS` for codes of 4 bits; 0 if there is none here.

    FP8 is multiplied with inputs of bfloat16 in `PAIRS`, if this machine has that kernel and it agrees.
    """
    import torch

    from rabbitllm.quant import _vectors

    if kernel.codes == "nibbles":
        return INTEGERS if _vectors.lanes() and _vectors.reads_halves() else 0
    if dtype == torch.bfloat16 and _vectors.multiplies_pairs() and _agrees(kernel, PAIRS):
        return PAIRS
    return _vectors.lanes() if _vectors.reads_halves() else 0


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A published matrix (N, K) in memory; `multiplies` is true for its form.

    Attributes:
        form: how it is stored.
        payload: its codes, uint8 (bytes,).
        scales: the bytes of its scales, uint8 (bytes,), in the order of `form.grid`.
        factor: by which all scales are multiplied.
    """

    form: CodedForm
    payload: torch.Tensor
    scales: torch.Tensor
    factor: float = 1.0
    _tables: dict[int, Any] = field(init=False, default_factory=dict, repr=False)

    def clone(self) -> CodedMatrix:
        """A copy in other memory."""
        return CodedMatrix(self.form, self.payload.clone(), self.scales.clone(), self.factor)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized matrix: value times scale in float32, rounded once."""
        return self._rows(self._float_scales(), 0, self.form.shape[0], dtype)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ W.T + bias`: (..., K) of a floating dtype -> (..., N) of the same; the kernels' sums are in float32."""
        flat = x.reshape(-1, x.shape[-1])
        width = kernel_for(self.form.kernel, x.dtype)
        if len(flat) <= MAX_INPUTS[width]:
            result = self.times(width, flat)
            if bias is not None:
                result += bias
            result = result.to(x.dtype)
        else:
            rows_at = functools.partial(self._rows, self._float_scales())
            result = dense_product(flat, bias, self.form.shape, self.form.block[0] or 1, rows_at)
        return result.view(*x.shape[:-1], self.form.shape[0])

    def grouped(self, x: torch.Tensor) -> CodedProduct | None:
        """See `products.GroupedProduct`; None for so many rows that a product's overhead is negligible."""
        return CodedProduct(x, self.form) if len(x) <= MAX_GROUPED else None

    def as_integers(self) -> IntegerProduct | None:
        """See `products.Matrix.as_integers`."""
        kernel = self.form.kernel
        if kernel_for(kernel, None) != INTEGERS:
            return None
        from rabbitllm.quant._code_kernels import NIBBLE_LAYOUT, shift_of

        rows, row_bytes = self.form.shape[0], self.form.row_bytes
        pointers = self.payload.data_ptr(), self.scales.data_ptr(), 0, 0, self.table_for(INTEGERS), 0
        words = (*pointers, row_bytes, self.form.shape[1] // SEGMENT, shift_of(*self.form.block), 0, rows)
        return IntegerProduct(kernel, NIBBLE_LAYOUT, words, rows * row_bytes, MAX_INPUTS[INTEGERS])

    def times(self, width: int, x: torch.Tensor) -> torch.Tensor:
        """`x @ W.T` in float32 by the kernel of `width` lanes: (T, K) of any floating dtype -> (T, N)."""
        import torch

        out = torch.empty(len(x), self.form.shape[0])
        if len(x):
            _run(width, _prepared(width, x), [(self, 0, len(x))], out)
        return out

    def table_for(self, width: int) -> int:
        """The address of the table for the kernel of `width` lanes."""
        if width not in self._tables:
            self._tables[width] = _table(self.form.codes, self.form.kernel, width, self.factor)
        address: int = self._tables[width].ctypes.data
        return address

    def _rows(self, scales: torch.Tensor, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Some rows, dequantized with all float32 scales; `begin` is the first of a block, or all have one scale."""
        import torch

        from rabbitllm.quant import dequantize_kernels

        (_, columns), block = self.form.shape, self.form.block
        weights, bits = dequantize_kernels.empty((end - begin, columns), dtype)
        codes = self.payload.view(self.form.shape[0], -1)[begin:end].numpy()
        row_scales = (scales[begin // block[0] : -(-end // block[0])] if block[0] else scales).contiguous().numpy()
        values, threads = _values(self.form.codes), torch.get_num_threads()
        if self.form.codes == FP8:
            size = block[0] or end - begin, block[1] or columns
            dequantize_kernels.blocks(codes, values, row_scales, size, bits, threads)
        else:
            dequantize_kernels.fours(codes, values, row_scales, bits, threads)
        return weights.to(dtype)

    def _float_scales(self) -> torch.Tensor:
        """The scales as float32, of shape `form.grid`."""
        import torch

        stored, scale_type = self.scales, SCALES[self.form.scales]
        if scale_type == "power":
            floats = torch.exp2(stored.float() - 127.0)
        else:
            dtype = torch_dtype(self.form.scales)
            aligned = stored if not stored.data_ptr() % dtype.itemsize else stored.clone()
            floats = aligned.view(dtype).float()
        return floats.view(self.form.grid) * self.factor


class CodedProduct:
    """Products of groups of rows, each with a matrix of its own, all of one form; see `products.GroupedProduct`.

    Args:
        x: (S, K), of a floating dtype.
        form: of the matrices, (N, K).
    """

    def __init__(self, x: torch.Tensor, form: CodedForm) -> None:
        import torch

        self._x = x
        self._width = kernel_for(form.kernel, x.dtype)
        self._inputs = _prepared(self._width, x)
        self._out = torch.zeros(len(x), form.shape[0])

    def multiply(self, matrices: Sequence[CodedMatrix], groups: Sequence[tuple[int, int]]) -> None:
        """Compute `x[begin:end] @ W.T` for each matrix and its group; each group is computed once."""
        few = []
        for matrix, (begin, end) in zip(matrices, groups, strict=True):
            if end - begin <= MAX_INPUTS[self._width]:
                few.append((matrix, begin, end))
            else:
                self._out[begin:end] = matrix.linear(self._x[begin:end], None)
        if few:
            _run(self._width, self._inputs, few, self._out)

    def result(self) -> torch.Tensor:
        """The products of all groups, (S, N) of x's dtype; rows of no group are zero."""
        return self._out.to(self._x.dtype)


def _prepared(width: int, x: torch.Tensor) -> InputRows:
    if width != INTEGERS:
        return segment_inputs(width, x)
    from rabbitllm.quant import _code_kernels

    return _code_kernels.NIBBLE_LAYOUT.inputs(x)


def _run(width: int, inputs: InputRows, work: Sequence[tuple[CodedMatrix, int, int]], out: torch.Tensor) -> None:
    """Multiply the rows [begin, end) with each matrix, as one job for all threads; all matrices are of one form."""
    from rabbitllm.quant._code_kernels import shift_of

    form = work[0][0].form
    (rows, columns), start = form.shape, out.data_ptr()
    shape = form.row_bytes, columns // SEGMENT, shift_of(*form.block)
    pieces = [
        (matrix.payload.data_ptr(), matrix.scales.data_ptr(), *inputs.of(begin), matrix.table_for(width))
        + (start + begin * rows * 4, *shape, end - begin, rows)
        for matrix, begin, end in work
    ]
    _kernels.run(CODES, form.kernel, width, pieces, rows * form.row_bytes * len(work))


@functools.cache
def _values(codes: str) -> Any:
    """The value of each code, float32."""
    import numpy as np
    import torch

    if codes == FP8:
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    return np.array(FP4_VALUES if codes == FP4 else [code - 8 for code in range(16)], np.float32)


@functools.lru_cache(maxsize=256)
def _table(codes: str, kernel: CodeKernel, width: int, factor: float) -> Any:
    from rabbitllm.quant import _code_kernels

    return _code_kernels.table_of(kernel, width, _values(codes), factor)


@functools.cache
def _agrees(kernel: CodeKernel, width: int) -> bool:
    """Whether a kernel's result on a sample agrees with the dequantized matrix and float32."""
    import torch

    def trials() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator, dtype = torch.Generator().manual_seed(0), torch.bfloat16 if width == PAIRS else torch.float32
        for count, rows, columns in ((1, 7, 192), (6, 5, 4096), (1, 64, 4096)):  # the last by several threads
            matrix = sample(kernel, (rows, columns), generator)
            x = torch.randn(count, columns, generator=generator).to(dtype)
            yield matrix.times(width, x), x.float() @ matrix.dequantized(torch.float32).T

    tolerance = _kernels.INTEGER_TOLERANCE if width == INTEGERS else _kernels.TOLERANCE
    return _kernels.agrees(f"by {' '.join(map(str, kernel))} codes", trials(), tolerance)


def sample(kernel: CodeKernel, shape: tuple[int, int], generator: torch.Generator) -> CodedMatrix:
    """A matrix that a kernel multiplies, with random codes and scales."""
    import torch

    name = next(name for name, scale_type in SCALES.items() if scale_type == kernel.scales)
    is_fp8 = kernel.codes == "float8"
    form = CodedForm(FP8 if is_fp8 else FP4, name, (1, kernel.group), shape)
    # no code is a NaN
    payload = torch.randint(
        0, 126 if is_fp8 else 256, (shape[0] * form.row_bytes,), dtype=torch.uint8, generator=generator
    )
    if is_fp8:
        payload |= torch.randint(0, 2, payload.shape, dtype=torch.uint8, generator=generator) << 7
    count = form.grid[0] * form.grid[1]
    if kernel.scales == "power":
        scales = torch.randint(120, 134, (count,), dtype=torch.uint8, generator=generator)
    else:
        scales = (torch.rand(count, generator=generator) + 0.5).to(torch_dtype(name)).view(torch.uint8)
    return CodedMatrix(form, payload, scales, 0.5)
