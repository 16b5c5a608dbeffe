"""Products with a matrix that is stored at 4bit, 8bit or in blocks of GGUF, without dequantizing the whole matrix.

On the CPU, for few inputs each code is decoded in registers for every few of them, to integers (`_integers.py`). For
more inputs a few rows at a time are decoded once for all of them, a panel (`_byte_kernels.py`). For very many inputs of
bfloat16 a few rows at a time are dequantized into the cache, and multiplied by torch, where that is faster; so are
matrices with code values that no kernel has a table for (times: benchmarks/NOTES.md).

On a device for which bitsandbytes has kernels, it multiplies: from the codes, or with the dequantized matrix
if its own tables say so; then with some rows of the matrix at a time, so that these need little memory.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant import _kernels, bfloat_products, gguf_blocks
from rabbitllm.quant._block_formats import FORMATS
from rabbitllm.quant._kernel_interface import (
    BFLOATS,
    BYTE_STEP,
    BYTE_WIDTH,
    BYTES,
    CODES,
    DEQUANTIZED,
    INTEGERS,
    PAIRS,
    SEGMENT,
    WORD_WIDTH,
    CodeKernel,
    InputRows,
    Preparation,
)
from rabbitllm.quant.quantize import (
    MAX_ELEMENTS,
    NO_SCALES,
    NestedScales,
    dequantize,
    multiply_4bit,
    nested_operands,
    operands,
)
from rabbitllm.quant.schemes import NESTED_BLOCK, NF4_BLOCK, SCALE_BYTES, STORED, Quantized, code_values

if TYPE_CHECKING:
    from rabbitllm.base.programs import Place, Program
    from rabbitllm.quant._integers import InputLayout

MAX_CODE_INPUTS, MAX_CODE_INPUTS_WITH_AMX = {"4bit": 32, "8bit": 12, "Q8_0": 24}, {"8bit": 8}
"""Rows of input up to which codes are decoded for every few of them; 16 for other schemes than these."""
MAX_AMX_INPUTS, MAX_WORD_INPUTS = 32, 128
"""Rows of bfloat16 up to which panels are faster than torch with AMX, and with AVX512-BF16 as integers of two bytes."""
MAX_GROUPED = 512
"""Maximum rows of all groups together, which are in memory in float32 as inputs and as results."""
FEW_OF_GROUP = 16
"""The same for each group, if these are more: many prompts choose hundreds of experts."""
CHUNK_ELEMENTS = 1 << 22
"""Elements that are dequantized at a time: 8 MiB of bfloat16."""
TILE_ROWS, MAX_PADDED = 16, 1024
"""Rows that AMX multiplies at once, and the most rows that get others: see `_with_common_length`."""
FUSED_ELEMENTS = 1 << 26
"""Elements of a matrix that bitsandbytes may dequantize at a time: 128 MiB of float16."""
FEW_INPUTS = 4
"""Rows of input that it always multiplies from the codes (0.50, backends/cuda/ops.py)."""


def multiplies(form: Quantized) -> bool:
    """Whether there is a kernel for this matrix on this machine: 2-D, each row a whole number of segments or blocks."""
    if len(form.shape) != 2 or not all(form.shape):
        return False
    from rabbitllm.quant import _vectors  # numba comes with it

    is_usable = form.scheme in FORMATS if form.scheme in BLOCK_TYPES else not form.shape[1] % SEGMENT
    return is_usable and bool(_vectors.lanes()) and agrees(CODES, form.scheme, INTEGERS)


def max_panel_inputs(width: int, dtype: torch.dtype) -> int:
    """Rows of input of a dtype up to which panels of a width are faster than torch."""
    if dtype is not torch.bfloat16 or not bfloat_products.torch_has_instructions():
        return sys.maxsize
    if bfloat_products.torch_has_tiles():
        return MAX_AMX_INPUTS
    return MAX_WORD_INPUTS if width == WORD_WIDTH else sys.maxsize


def can_multiply(form: Quantized) -> bool:
    """Whether bitsandbytes' kernel accepts such a matrix: 2-D at 4bit or 4bit-double, each row whole blocks."""
    return form.codes.scheme == "4bit" and len(form.shape) == 2 and all(form.shape) and form.shape[1] % NF4_BLOCK == 0


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A stored matrix (N, K).

    Attributes:
        form: its scheme and shape, with dequantized scales.
        payload: uint8 codes.
        absmax: float32, one per block; empty for blocks of GGUF files, whose scales are in the payload.
        table: float32, the value of each code; empty for blocks of GGUF files.
    """

    form: Quantized
    payload: torch.Tensor
    absmax: torch.Tensor
    table: torch.Tensor

    @classmethod
    def of(cls, form: Quantized, parts: Sequence[TensorSpec], read: Callable[[TensorSpec], torch.Tensor]) -> Self:
        """A stored matrix; the arguments are those of `operands`."""
        return cls(*operands(form, parts, read))

    @staticmethod
    def scale_bytes(form: Quantized) -> int:
        """Bytes of scales that are dequantized before a product."""
        return form.expanded_bytes

    @staticmethod
    def scratch_bytes(form: Quantized, dtype: torch.dtype) -> int:
        """Maximum bytes that a product takes on a GPU besides inputs and result, for any number of inputs."""
        return 0

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized matrix."""
        return dequantize(self.form, self.payload, self.absmax, self.table, dtype)

    def clone(self) -> Self:
        """A copy in other memory."""
        return replace(self, payload=self.payload.clone(), absmax=self.absmax.clone(), table=self.table.clone())


@dataclass(frozen=True, slots=True)
class FusedMatrix(QuantizedMatrix):
    """A matrix on the device that multiplies it, by bitsandbytes; `can_multiply` is true for its form.

    Attributes:
        nested: at 4bit-double the scales of the scales; `absmax` is uint8 codes then.
    """

    nested: NestedScales | None = None

    @classmethod
    def of(cls, form: Quantized, parts: Sequence[TensorSpec], read: Callable[[TensorSpec], torch.Tensor]) -> Self:
        """A stored matrix with its scales as they are stored."""
        return cls(*nested_operands(form, parts, read))

    @staticmethod
    def scale_bytes(form: Quantized) -> int:
        """0: the kernels take quantized scales."""
        return 0

    @staticmethod
    def scratch_bytes(form: Quantized, dtype: torch.dtype) -> int:
        """See `QuantizedMatrix`: some rows are dequantized at a time, for more than `FEW_INPUTS` inputs."""
        is_nested = form.offset is not None
        elements = min(_rows_at_a_time(form, FEW_INPUTS + 1, is_nested), form.shape[0]) * form.shape[1]
        # bitsandbytes dequantizes quantized scales, and adds their mean in another tensor
        return elements * dtype.itemsize + (2 * SCALE_BYTES * elements // NF4_BLOCK if is_nested else 0)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized matrix."""
        absmax = self.absmax if self.nested is None else self.nested.expanded(self.absmax)
        return dequantize(self.form, self.payload, absmax, self.table, dtype)

    def clone(self) -> Self:
        """A copy in other memory."""
        copied = QuantizedMatrix.clone(self)
        return copied if self.nested is None else replace(copied, nested=self.nested.clone())

    def grouped(self, x: torch.Tensor, groups: int = 1) -> None:
        """None: groups are multiplied one by one."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ W.T + bias`: (..., K) of a floating dtype -> (..., N) of the same."""
        rows, columns = self.form.shape
        flat = x.reshape(-1, columns).contiguous()
        step = _rows_at_a_time(self.form, len(flat), self.nested is not None)
        if step >= rows:
            out = multiply_4bit(self.form, self.payload, self.absmax, flat, bias, self.nested)
        else:
            out = x.new_empty(len(flat), rows)
            for begin in range(0, rows, step):
                end = min(begin + step, rows)
                some = None if bias is None else bias[begin:end]
                out[:, begin:end] = self._rows(begin, end).linear(flat, some)
        return out.view(*x.shape[:-1], rows)

    def _rows(self, begin: int, end: int) -> Self:
        """Some of its rows, as views; with quantized scales the first one begins a block of these."""
        rows, columns = self.form.shape
        blocks = begin * columns // NF4_BLOCK, end * columns // NF4_BLOCK
        return replace(
            self,
            form=replace(self.form, shape=(end - begin, columns)),
            payload=self.payload.view(rows, -1)[begin:end].reshape(-1, 1),
            absmax=self.absmax.view(-1)[slice(*blocks)],
            nested=None if self.nested is None else self.nested.of_blocks(*blocks),
        )


def _rows_at_a_time(form: Quantized, inputs: int, is_nested: bool) -> int:
    """Rows of a matrix that bitsandbytes gets at a time; with quantized scales whole blocks of these."""
    columns = form.shape[1]
    step = NESTED_BLOCK // math.gcd(NESTED_BLOCK, columns // NF4_BLOCK) if is_nested else 1
    elements = MAX_ELEMENTS if inputs <= FEW_INPUTS else FUSED_ELEMENTS
    return max(elements // columns // step, 1) * step


class InputRounding(Protocol):
    """Rounds inputs that lie without gaps; equal ones round alike.

    Attributes:
        dtype: of the inputs.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """The rounded inputs; of up to two dimensions all rows may be rounded together."""

    def add_to(self, program: Program, x: Place, out: Place, rows: int, columns: int) -> None:
        """Add it to a program, for rows of their own."""


class KernelMatrix(ABC):
    """A matrix (N, K) in memory that is multiplied by our kernels, whatever its codes are.

    Attributes:
        form: has the shape.
        kernel: the scheme of its kernels.
        max_inputs: rows of input up to which codes are decoded for every few of them as integers.
        order: the input of each column, int64 (K,); None if they are in their order.
        rounding: what rounds the inputs of `linear` first, as their scheme says; None if nothing does.
    """

    __slots__ = ()
    order: torch.Tensor | None = None
    rounding: InputRounding | None = None
    form: Any
    kernel: str | CodeKernel
    max_inputs: int

    @abstractmethod
    def method_for(self, count: int, dtype: torch.dtype) -> tuple[str, int]:
        """The fastest method for `count` rows of a dtype, and the width of its kernel (`_product_kernels.kernel`)."""

    def changes(self) -> int:
        """How often its values were changed in place, as far as torch counts that; codes never are."""
        return 0

    @abstractmethod
    def preparation(self, width: int) -> Preparation:
        """How the kernel by codes of a width takes inputs."""

    def inputs(self, width: int, x: torch.Tensor) -> InputRows:
        """Rows (T, K) as kernels of a width take them; K is a multiple of their steps."""
        return self.preparation(width).of(x if self.order is None else x[:, self.order])

    @abstractmethod
    def operands(self, width: int) -> tuple[int, int, int, int, int, int]:
        """What kernels of a width get as "codes", "scales", "table", "row_bytes", "steps" and "shift"."""

    @abstractmethod
    def in_chunks(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ W.T + bias` by torch: (T, K) of a floating dtype -> (T, N) of the same; see `dense_product`."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ W.T + bias`: (..., K) of a floating dtype -> (..., N) of the same; the kernels' sums are in float32."""
        x = x if self.rounding is None else self.rounding.rounded(x)
        flat = x.reshape(-1, x.shape[-1])
        method, width = self.method_for(len(flat), x.dtype)
        if method == DEQUANTIZED:
            result = self.in_chunks(flat, bias)
        else:
            product = GroupedProduct(flat, self, torch.empty)
            if method == BYTES and bias is None and x.dtype == torch.bfloat16:
                product.rounded = torch.empty_like(product.out, dtype=x.dtype)
            if len(flat):
                product.run(method, width, [(self, 0, len(flat))])
            if bias is not None:
                product.out += bias
            result = product.result()
        return result.view(*x.shape[:-1], self.form.shape[0])

    def grouped(self, x: torch.Tensor, groups: int = 1) -> GroupedProduct | None:
        """See `GroupedProduct`; None without a kernel, or for so many rows that a product's overhead is negligible."""
        has_kernel = self.method_for(1, x.dtype)[0] != DEQUANTIZED
        return GroupedProduct(x, self) if has_kernel and len(x) <= max(MAX_GROUPED, FEW_OF_GROUP * groups) else None

    def times_by(self, method: str, width: int, x: torch.Tensor) -> torch.Tensor:
        """`x @ W.T` in float32 by a method's kernel of `width` lanes: (T, K) of any floating dtype -> (T, N)."""
        product = GroupedProduct(x, self, torch.empty)
        if len(x):
            product.run(method, width, [(self, 0, len(x))])
        return product.out


@dataclass(frozen=True, slots=True)
class Matrix(QuantizedMatrix, KernelMatrix):
    """A matrix of a scheme of ours or of blocks; `multiplies` is true for its form."""

    _tables: dict[int, int] = field(init=False, default_factory=dict)

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return self.form.scheme

    @property
    def max_inputs(self) -> int:  # type: ignore[override]
        most = MAX_CODE_INPUTS_WITH_AMX if bfloat_products.torch_has_tiles() else MAX_CODE_INPUTS
        return most.get(self.form.scheme, 16)

    def method_for(self, count: int, dtype: torch.dtype) -> tuple[str, int]:
        scheme = self.form.scheme
        # a few types of blocks are smaller than the steps of the kernel by codes
        if count <= self.max_inputs and self.table_for(INTEGERS) and not self.form.shape[1] % _layout(scheme).step:
            return CODES, INTEGERS
        from rabbitllm.quant import _byte_kernels

        width = _byte_kernels.width_of(scheme)
        if count <= max_panel_inputs(width, dtype) and self.table_for(width) and agrees(BYTES, scheme, width):
            return BYTES, width
        return DEQUANTIZED, 0

    def preparation(self, width: int) -> Preparation:
        return _preparation(self.form.scheme, self.form.shape[1])

    def inputs(self, width: int, x: torch.Tensor) -> InputRows:
        if width not in _BYTE_WIDTHS:
            return self.preparation(width).of(x)
        from rabbitllm.quant import _byte_kernels

        x = (x if x.dtype == torch.bfloat16 else x.float()).contiguous()
        steps = x.shape[1] // BYTE_STEP
        rounded = torch.empty(len(x), steps * _byte_kernels.step_bytes(width), dtype=torch.uint8, device="cpu")
        work = x.data_ptr(), 0, 0, 0, 0, rounded.data_ptr(), x.stride(0) * x.itemsize, steps, 0, 1, len(x)
        _kernels.run(BYTES, _byte_kernels.INPUTS[x.dtype], width, [work], x.nbytes)
        return InputRows(rounded)

    def operands(self, width: int) -> tuple[int, int, int, int, int, int]:
        scheme, columns = self.form.scheme, self.form.shape[1]
        step = _layout(scheme).step if width == INTEGERS else BYTE_STEP if width in _BYTE_WIDTHS else 2 * width
        sizes = _sizes(scheme, columns, step)
        return self.payload.data_ptr(), self.absmax.data_ptr(), self.table_for(width), *sizes

    def in_chunks(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return dense_product(x, bias, self.form.shape, self.together, self.decoded)

    @property
    def together(self) -> int:
        """Some of its rows begin a block at a multiple of so many."""
        block = STORED[self.form.scheme].block
        return block // math.gcd(block, self.form.shape[1])

    def decoded(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Some of its rows, dequantized; the first one begins a block."""
        from rabbitllm.quant import _vectors

        form, (rows, columns) = self.form, self.form.shape
        block, codes = STORED[form.scheme].block, self.payload.view(rows, -1)
        scales = self.absmax.view(-1)[begin * columns // block : -(-end * columns // block)]
        part = replace(form, shape=(end - begin, columns), dtype=None)  # rounded once, as the kernels' values
        few = replace(self, form=part, payload=codes[begin:end].reshape(-1, 1), absmax=scales)
        width = _vectors.lanes()
        if dtype == torch.bfloat16 and few.table_for(width) and agrees(BFLOATS, form.scheme, width):
            return few.bfloats(width)
        return few.dequantized(dtype)

    def bfloats(self, width: int) -> torch.Tensor:
        """The dequantized matrix in bfloat16, by a kernel of `width` lanes, rounded once."""
        out = torch.empty(self.form.shape, dtype=torch.bfloat16, device="cpu")
        codes, scales, table, *sizes = self.operands(width)
        work = codes, scales, 0, 0, table, out.data_ptr(), *sizes, 1, len(out)
        _kernels.run(BFLOATS, self.form.scheme, width, [work], self.payload.numel())
        return out

    def table_for(self, width: int) -> int:
        """The address of the lookup table for kernels of `width` lanes; 0 if these cannot represent the codes."""
        if self.form.scheme in BLOCK_TYPES:
            return _NO_TABLE
        if width not in self._tables:  # the array is kept in the cache of `table_of`
            from rabbitllm.quant import _byte_kernels, _integers, _vectors

            values = self.form.scheme, ctypes.string_at(self.table.data_ptr(), self.table.nbytes)
            if width in _BYTE_WIDTHS:
                table = _byte_kernels.table_of(*values, width)
            else:
                table = (_integers if width == INTEGERS else _vectors).table_of(*values)
            self._tables[width] = 0 if table is None else table.ctypes.data
        return self._tables[width]


@functools.cache
def _layout(scheme: str) -> InputLayout:
    from rabbitllm.quant import _block_kernels, _integers  # numba comes with them

    return _block_kernels.LAYOUTS[scheme] if scheme in BLOCK_TYPES else _integers.OWN_STEPS[scheme].layout


@functools.lru_cache(maxsize=1024)
def _preparation(scheme: str, columns: int) -> Preparation:
    return _layout(scheme).preparation(columns)


@functools.lru_cache(maxsize=1024)
def _sizes(scheme: str, columns: int, step: int) -> tuple[int, int, int]:
    """Bytes of codes in a row, steps in a row, and the logarithm of steps in a block that has no scales in it."""
    entry = STORED[scheme]
    return entry.payload_bytes(columns), columns // step, max(entry.block // step, 1).bit_length() - 1


class GroupedProduct:
    """Products of groups of rows, each with a matrix of its own, all of one form.

    The inputs are prepared once, and many matrices are one job for all threads.

    Args:
        x: (S, K), of a floating dtype.
        like: a matrix of the form, (N, K).
        make: makes `out`.

    Attributes:
        out: the products, (S, N), float32.
        rounded: the same in bfloat16, if a kernel by bytes is to round them.
    """

    rounded: torch.Tensor | None = None

    def __init__(self, x: torch.Tensor, like: KernelMatrix, make: Callable[..., torch.Tensor] = torch.zeros) -> None:
        (rows, columns), self._x = like.form.shape, x
        if x.shape[1] != columns:  # as torch; kernels would leave the memory of the inputs
            raise RuntimeError(f"inputs of {x.shape[1]} columns cannot be multiplied with {rows} rows of {columns}")
        self.out = make(len(x), rows, dtype=torch.float32, device="cpu")
        self._inputs: dict[int, InputRows] = {}

    def multiply(self, matrices: Sequence[KernelMatrix], groups: Sequence[tuple[int, int]]) -> None:
        """Compute `x[begin:end] @ W.T` for each matrix and its group; each group is computed once."""
        jobs: dict[tuple[str, int], list[tuple[KernelMatrix, int, int]]] = {}
        for matrix, (begin, end) in zip(matrices, groups, strict=True):
            method, width = matrix.method_for(end - begin, self._x.dtype)
            if method == DEQUANTIZED:
                self.out[begin:end] = matrix.in_chunks(self._x[begin:end], None)
            else:
                jobs.setdefault((method, width), []).append((matrix, begin, end))
        for how, work in jobs.items():
            self.run(*how, work)

    def run(self, method: str, width: int, work: Sequence[tuple[KernelMatrix, int, int]]) -> None:
        """Multiply the rows [begin, end) with each matrix by a method's kernel, as one job for all threads."""
        alike = next((matrix for matrix, *_ in work if matrix.order is None), None)
        if width not in self._inputs and alike is not None:
            self._inputs[width] = alike.inputs(width, self._x)
        rows, start, pieces, own = self.out.shape[1], self.out.data_ptr(), [], list[InputRows]()
        for matrix, begin, end in work:
            codes, scales, table, *sizes = matrix.operands(width)
            if matrix.order is not None:
                own.append(matrix.inputs(width, self._x[begin:end]))
            inputs = self._inputs[width].of(begin) if matrix.order is None else own[-1].of(0)
            (place, others), to = inputs, start + begin * rows * 4
            if self.rounded is not None:
                others = self.rounded[begin:].data_ptr()
            pieces.append((codes, scales, place, others, table, to, *sizes, end - begin, rows))
        _kernels.run(method, work[0][0].kernel, width, pieces, rows * sizes[0] * len(work))

    def result(self) -> torch.Tensor:
        """The products of all groups, (S, N) of x's dtype; rows of no group are zero."""
        return self.out.to(self._x.dtype) if self.rounded is None else self.rounded


def dense_product(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    shape: tuple[int, ...],
    together: int,
    decode: Callable[[int, int, torch.dtype], torch.Tensor],
) -> torch.Tensor:
    """`x @ W.T + bias` by torch, (T, N) of x's dtype, with `CHUNK_ELEMENTS` of the matrix at a time.

    Args:
        x: (T, K), of a floating dtype.
        bias: (N,) or None.
        shape: of the matrix, (N, K).
        together: some rows begin at a multiple of so many.
        decode: first row, row after the last, and dtype -> these rows, dequantized.
    """
    (rows, columns), count = shape, len(x)
    step, x = together * max(CHUNK_ELEMENTS // columns // together, 1), _with_common_length(x)
    # processors without instructions for bfloat16 are slow at it, so float32 is used there
    wide = x.float() if x.dtype == torch.bfloat16 and bfloat_products.widens() else x
    if step >= rows and wide is x:
        added = None if bias is None else bias.to(x.dtype)
        return torch.nn.functional.linear(x, decode(0, rows, x.dtype), added)[:count]
    out = x.new_empty(len(x), rows)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        added = None if bias is None else bias[begin:end].to(wide.dtype)
        out[:, begin:end] = torch.nn.functional.linear(wide, decode(begin, end, wide.dtype), added)
    return out[:count]


def _with_common_length(x: torch.Tensor) -> torch.Tensor:
    """Rows of bfloat16 with zeros up to whole tiles: torch compiles code for each number of rows, 1 MB in 2 to 9 ms,
    several times the product. It keeps a thousand of these, and experts of a prompt have as many lengths."""
    if not TILE_ROWS < len(x) <= MAX_PADDED or x.dtype != torch.bfloat16 or not bfloat_products.torch_has_tiles():
        return x
    return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % TILE_ROWS))


def sample(scheme: str, shape: tuple[int, int], random: RandomTensors) -> Matrix:
    """A matrix with random codes and scales; its rows are whole segments or blocks."""
    entry, elements = STORED[scheme], math.prod(shape)
    if entry.block_bytes:
        blocks = gguf_blocks.sample(scheme, elements, random)
        return Matrix(Quantized(scheme, shape, None), blocks, NO_SCALES, NO_SCALES)
    codes = random.integers(0, 256, entry.payload_bytes(elements))
    scales = random.positive(-(-elements // entry.block), least=0, dtype=torch.float32)
    return Matrix(Quantized(scheme, shape, "float32"), codes, scales, code_values(scheme))


@functools.cache
def agrees(method: str, scheme: Any, width: int, sample_of: Callable[..., Any] = sample) -> bool:
    """Whether a kernel's products with samples agree with the dequantized matrix and float32.

    `sample_of` makes a matrix of the scheme, of a shape, by `RandomTensors`.
    """

    def trials() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        random, dtype = RandomTensors(), torch.bfloat16 if width == PAIRS else torch.float32
        for inputs, rows, columns in _TRIALS[method]:
            matrix = sample_of(scheme, (rows, columns), random)
            x = random.normal(inputs, columns, dtype=dtype)
            is_product = method != BFLOATS
            product = matrix.times_by(method, width, x) if is_product else x @ matrix.bfloats(width).float().T
            yield product, x.float() @ matrix.dequantized(torch.float32).T

    tolerance = _TOLERANCES.get(BFLOATS if method == BFLOATS else width, _kernels.TOLERANCE)
    if width == INTEGERS and isinstance(scheme, str):
        tolerance = _layout(scheme).error
    name = scheme if isinstance(scheme, str) else " ".join(map(str, scheme))
    return _kernels.agrees(f"by {method} at {name}", trials(), tolerance)


_TRIALS = {
    CODES: ((1, 7, 768), (6, 5, 4096), (1, 64, 4096)),  # the last by several threads
    BYTES: ((7, 5, 768), (13, 70, 4096)),  # the last by several threads, with several panels for each row
    BFLOATS: ((7, 70, 4096),),
}
"""The products of a kernel's trial: inputs, rows, columns."""
_TOLERANCES = {INTEGERS: 3e-4, WORD_WIDTH: 3e-4, BYTE_WIDTH: 1e-2, BFLOATS: 4e-3}
"""The tolerated error by width or method: integers of 16 bits, and of 8; weights that are rounded to bfloat16."""
_BYTE_WIDTHS = BYTE_WIDTH, WORD_WIDTH
_NO_TABLE = -1
"""In place of the address of a table, for kernels whose values are in their code."""
