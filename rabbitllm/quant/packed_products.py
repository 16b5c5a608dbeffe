"""Products with a matrix that is stored at 4bit or 8bit, on the CPU, without dequantizing the whole matrix.

For few inputs each code is decoded in registers for every few of them (`packed_kernels.py`): at 4bit a token then reads
a quarter of the bytes of bfloat16. For more inputs a few rows at a time are decoded once for all of them
(`panel_kernels.py`). For very many, as in the prefill of a long prompt, a few rows at a time are dequantized into
memory that stays in the cache, and multiplied by torch. So are matrices with code values that no kernel has a table
for.

Kernels multiply by code value times scale in float32; the dequantized matrix has the same values, rounded.
"""

from __future__ import annotations

import enum
import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rabbitllm.quant import bfloat_products, kernel_trial, panel_products
from rabbitllm.quant.code_tables import PAIRS, table_of
from rabbitllm.quant.compression import BLOCKS, Quantized, dequantize
from rabbitllm.quant.row_team import over_rows

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_INPUTS = 16
MAX_INPUTS_IN_PAIRS = 64
"""Rows of input up to which the kernel without panels is faster than dequantizing, in float32 and in pairs of bfloat16
(2 cores of an AMD EPYC, with AVX-512)."""
MAX_GROUPED = 512
"""Maximum rows of all groups together, which are in memory in float32 as inputs and as results."""
CHUNK_ELEMENTS = 1 << 21
"""Elements that are dequantized at a time: 4 MiB of bfloat16."""
WORTH_A_THREAD = 1 << 16
"""Bytes of codes per thread: about 4 microseconds of work, while starting a second thread takes 2."""


def multiplies(form: Quantized) -> bool:
    """Whether there is a kernel for this matrix on this machine: 2-D, each row a whole number of segments."""
    if len(form.shape) != 2 or not all(form.shape) or form.shape[1] % 64:
        return False
    return _kernel_agrees(form.scheme)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A stored matrix, with the arguments of kernels for it.

    Attributes:
        form: one for which `multiplies` is true; (N, K).
        payload: uint8 codes.
        absmax: float32, one per block.
        table: float32, the value of each code.
    """

    form: Quantized
    payload: torch.Tensor
    absmax: torch.Tensor
    table: torch.Tensor
    _given: tuple[int, ...] = field(init=False)
    _tables: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        scheme, (_, columns) = self.form.scheme, self.form.shape
        row_bytes, segment = columns // (2 if scheme == "4bit" else 1), _kernels().SEGMENT
        shift = (BLOCKS[scheme] // segment).bit_length() - 1
        object.__setattr__(self, "_given", (row_bytes, columns // segment, shift))

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized matrix."""
        return dequantize(self.form, self.payload, self.absmax, self.table, dtype)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `linear`."""
        return linear(x, self, bias)

    def grouped(self, x: torch.Tensor) -> GroupedProduct | None:
        """See `GroupedProduct`; None without a kernel, or for so many rows that a product's overhead is negligible."""
        width = kernel_for(self.form.scheme, x.dtype)
        return GroupedProduct(x, self) if len(x) <= MAX_GROUPED and self.is_known_to(width) else None

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ W.T` in float32, from the codes: (T, K) of any floating dtype -> (T, N)."""
        return self.times_with(kernel_for(self.form.scheme, x.dtype), x)

    def times_with(self, width: int, x: torch.Tensor) -> torch.Tensor:
        """The same by the kernel of `width` lanes."""
        import torch

        out = torch.empty(len(x), self.form.shape[0])
        _walk(width, _Inputs(width, x), [(self, 0, len(x))], out)
        return out

    def by_panels(self, width: int, x: torch.Tensor) -> torch.Tensor:
        """The same by the kernel of panels; see `panel_products.multiplies` for the number of rows."""
        stored, table, _ = self.arguments(width)
        return panel_products.times(width, self.form.scheme, stored, table, x, self.form.shape[0])

    def arguments(self, width: int) -> tuple[tuple[int, int], int, tuple[int, ...]]:
        """The arguments of the kernel of `width` lanes for this matrix.

        Returns:
            The addresses of codes and scales; the address of the lookup table, 0 if there is none; and bytes of a row,
            segments in a row and the logarithm of segments in a block.
        """
        return (self.payload.data_ptr(), self.absmax.data_ptr()), self._table(width), self._given

    def is_known_to(self, width: int) -> bool:
        """Whether the kernel of `width` lanes has a table for the codes."""
        return bool(self._table(width))

    def _table(self, width: int) -> int:
        if width not in self._tables:  # the array is kept in the cache of `table_of`
            found = table_of(self.form.scheme, width, self.table.numpy().tobytes())
            self._tables[width] = 0 if found is None else found.ctypes.data
        return self._tables[width]


class _Inputs:
    """Rows (T, K) in the format of the kernel of `width` lanes."""

    def __init__(self, width: int, x: torch.Tensor) -> None:
        import torch

        count, columns = x.shape
        self._step = columns * 2  # bytes of a row's even inputs in float32, or of all of them in bfloat16
        if width == PAIRS:
            self._ready, self._odd = x.contiguous(), 0
        else:
            self._ready = torch.empty(2, count, columns // 2)  # even and odd inputs
            self._ready.copy_(x.view(count, columns // 2, 2).permute(2, 0, 1))
            self._odd = self._ready.data_ptr() + count * self._step

    def of(self, row: int) -> tuple[int, int]:
        """The addresses of a row's even inputs and of its odd ones; the second is 0 if they are not separated."""
        return self._ready.data_ptr() + row * self._step, self._odd and self._odd + row * self._step


class GroupedProduct:
    """Products of groups of rows, each with a matrix of its own, all of one form.

    The inputs are prepared once, and many matrices are one job for all threads.

    Args:
        x: (S, K), of a floating dtype.
        like: a matrix of the form, (N, K).
    """

    def __init__(self, x: torch.Tensor, like: Matrix) -> None:
        import torch

        self._x = x
        self._width = kernel_for(like.form.scheme, x.dtype)
        self._out = torch.zeros(len(x), like.form.shape[0])

    # made at the first use: all groups may use the other kernel
    @functools.cached_property
    def _inputs(self) -> _Inputs:
        return _Inputs(self._width, self._x)

    @functools.cached_property
    def _panel_inputs(self) -> panel_products.PanelInputs:
        return panel_products.PanelInputs(self._width, self._x)

    def multiply(self, matrices: Sequence[Matrix], groups: Sequence[tuple[int, int]]) -> None:
        """Compute `x[begin:end] @ W.T` for each matrix and its group; each group is computed once."""
        few: list[tuple[Matrix, int, int]] = []
        many: list[panel_products.Piece] = []
        for matrix, (begin, end) in zip(matrices, groups, strict=True):
            way = _way(matrix, self._width, end - begin)
            if way is ProductMethod.CODES:
                few.append((matrix, begin, end))
            elif way is ProductMethod.PANELS:
                stored, table, _ = matrix.arguments(self._width)
                many.append((stored, table, begin, end))
            else:
                self._out[begin:end] = _in_chunks(self._x[begin:end], matrix, None)
        if few:
            _walk(self._width, self._inputs, few, self._out)
        if many:
            scheme = matrices[0].form.scheme
            panel_products.add_products(self._width, scheme, self._panel_inputs, many, self._out)

    def result(self) -> torch.Tensor:
        """The products of all groups, (S, N) of x's dtype; rows of no group are zero."""
        return self._out.to(self._x.dtype)


def _walk(width: int, inputs: _Inputs, work: Sequence[tuple[Matrix, int, int]], out: torch.Tensor) -> None:
    """Multiply the rows [begin, end) with each matrix; all matrices are of one form."""
    import torch

    kernels, form, given = _kernels(), work[0][0].form, []
    rows = form.shape[0]
    for matrix, begin, end in work:
        stored, table, shape = matrix.arguments(width)
        target = out.data_ptr() + begin * rows * 4
        given.append((*stored, *inputs.of(begin), table, target, *shape, end - begin, rows))
    nbytes = rows * shape[0] * len(work)
    threads = min(torch.get_num_threads(), -(-nbytes // WORTH_A_THREAD))
    kernel = kernels.row_range(form.scheme, width)
    over_rows(kernel, lambda: kernels.in_a_team(form.scheme, width), given, threads, kernels.ROWS)


@functools.cache
def _kernels() -> Any:
    """The module of the kernels, which takes a second to import."""
    from rabbitllm.quant import packed_kernels

    return packed_kernels


@functools.cache
def _vectors() -> Any:
    from rabbitllm.quant import vectors  # numba comes with it

    return vectors


@functools.cache
def kernel_for(scheme: str, dtype: torch.dtype) -> int:
    """Lanes of the kernel for inputs of a dtype; `PAIRS` for bfloat16 if this machine has that kernel and it agrees."""
    import torch

    if dtype == torch.bfloat16 and _vectors().multiplies_pairs() and _agrees(scheme, PAIRS):
        return PAIRS
    return int(_vectors().lanes())


def linear(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ W.T + bias`.

    Args:
        x: (..., K), of a floating dtype.
        matrix: (N, K).
        bias: (N,) or None.

    Returns:
        (..., N) of x's dtype; for few inputs (`MAX_INPUTS`) sums are in float32.
    """
    flat = x.reshape(-1, x.shape[-1])
    width = kernel_for(matrix.form.scheme, x.dtype)
    way = _way(matrix, width, len(flat))
    if way is ProductMethod.DEQUANTIZED:
        result = _in_chunks(flat, matrix, bias)
    else:
        result = matrix.times_with(width, flat) if way is ProductMethod.CODES else matrix.by_panels(width, flat)
        if bias is not None:
            result += bias
        result = result.to(x.dtype)
    return result.view(*x.shape[:-1], matrix.form.shape[0])


class ProductMethod(enum.Enum):
    """The method to multiply rows with a matrix."""

    CODES = enum.auto()
    PANELS = enum.auto()
    DEQUANTIZED = enum.auto()


def _way(matrix: Matrix, width: int, count: int) -> ProductMethod:
    """The fastest method for `count` rows, with the kernel of `width` lanes."""
    if not matrix.is_known_to(width):
        return ProductMethod.DEQUANTIZED
    if panel_products.multiplies(matrix.form.scheme, width, count):
        return ProductMethod.PANELS
    return (
        ProductMethod.CODES
        if count <= (MAX_INPUTS_IN_PAIRS if width == PAIRS else MAX_INPUTS)
        else ProductMethod.DEQUANTIZED
    )


def _in_chunks(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    import torch

    form, (rows, columns) = matrix.form, matrix.form.shape
    block = BLOCKS[form.scheme]
    step = block // math.gcd(block, columns)  # rows that are whole blocks
    step *= max(CHUNK_ELEMENTS // columns // step, 1)
    # processors without instructions for bfloat16 are slow at it, so float32 is used there
    wide = x.float() if x.dtype == torch.bfloat16 and bfloat_products.kernel_here() else x
    out = x.new_empty(len(x), rows)
    codes = matrix.payload.view(rows, -1)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        scales = matrix.absmax.view(-1)[begin * columns // block : -(-end * columns // block)]
        few = replace(form, shape=(end - begin, columns))
        part = dequantize(few, codes[begin:end].reshape(-1, 1), scales, matrix.table, wide.dtype)
        added = None if bias is None else bias[begin:end].to(wide.dtype)
        out[:, begin:end] = torch.nn.functional.linear(wide, part, added)
    return out


@functools.cache
def _kernel_agrees(scheme: str) -> bool:
    """Whether this machine has a kernel, and its result on a sample is right."""
    try:
        lanes = _vectors().lanes()
    except ImportError:
        logger.info("numba is not installed; compressed layers are dequantized for each use.")
        return False
    return bool(lanes) and _agrees(scheme, lanes)


def _agrees(scheme: str, width: int) -> bool:
    import torch

    def product(form: Quantized, payload: Any, absmax: Any, table: Any, x: torch.Tensor) -> torch.Tensor:
        return Matrix(form, payload, absmax, table).times_with(width, x)

    dtype = torch.bfloat16 if width == PAIRS else torch.float32
    shapes = ((1, 7, 192), (6, 5, 4096), (1, 64, 4096))  # the last by several threads
    off = kernel_trial.first_error(kernel_trial.of_codes(scheme, dtype, shapes, product))
    if off is not None:
        logger.warning("The kernel for products at %s is off by %.1e here and is not used.", scheme, off)
    return off is None
