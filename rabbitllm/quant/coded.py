"""Matrices of checkpoints that are published quantized, multiplied from their codes on the CPU.

FP8 (float8_e4m3fn), FP4 (E2M1) and integers of 4 or 8 bits, each with a scale for a block of rows and columns. For few
rows of input the kernels of `_code_kernels.py` decode in registers; for more, some rows of the matrix at a time are
dequantized and multiplied by torch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.formats.tensor_spec import DTYPES, torch_dtype
from rabbitllm.quant._kernel_interface import (
    CODES,
    DEQUANTIZED,
    INTEGERS,
    PAIRS,
    SEGMENT,
    ZEROED,
    ZEROED_BFLOATS,
    CodeKernel,
    Preparation,
)
from rabbitllm.quant.products import InputRounding, KernelMatrix, agrees, dense_product

FP8, FP4, INT4, INT8, UINT8 = "fp8", "fp4", "int4", "int8", "uint8"
_OF_A_BYTE = (FP8, INT8, UINT8)
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the 16 codes of FP4 (E2M1), in the Open Compute Project's Microscaling Formats Specification."""
SCALES = {"F32": "f32", "BF16": "bf16", "F16": "f16", "U8": "power", "F8_E8M0": "power", "F8_E4M3": "float8"}
"""Dtypes of scales -> how kernels call them; U8 is the exponent of a power of two, as E8M0 is."""
WITH_ZEROS = {torch.float16: "I32", torch.bfloat16: "U32"}
"""Dtype of scales -> what the dtype of these with zeros is called here; no format stores them."""
_KERNEL_SCALES = {**SCALES, WITH_ZEROS[torch.float16]: ZEROED, WITH_ZEROS[torch.bfloat16]: ZEROED_BFLOATS}
MAX_INPUTS = {INTEGERS: 48, PAIRS: 48, 16: 48, 8: 24}
"""Width -> rows of input up to which codes are decoded for every few of them (see benchmarks/NOTES.md)."""


@dataclass(frozen=True, slots=True)
class CodedForm:
    """The form of a published matrix (N, K).

    Attributes:
        codes: `FP8`, `FP4`, `INT4`, `INT8` or `UINT8`; 4 bits are two a byte along K, the lower half first, integers
            plus 8; integers of `UINT8` are plus 128.
        scales: one of `SCALES`, or of `WITH_ZEROS`.
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
        return self.shape[1] if self.codes in _OF_A_BYTE else self.shape[1] // 2

    @property
    def has_zeros(self) -> bool:
        """Whether a zero is with each scale."""
        return self.scales in WITH_ZEROS.values()

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
        codes = _KERNEL_CODES.get(self.codes, "nibbles")
        return CodeKernel(codes, _KERNEL_SCALES[self.scales], group)


_KERNEL_CODES = {FP8: "float8", INT8: "integers", UINT8: "integers"}


def is_scheme(name: str) -> bool:
    """Whether it is the `scheme` of a form."""
    return name.partition(" ")[0] in (FP4, INT4, *_OF_A_BYTE)


def form_named(scheme: str, shape: tuple[int, int]) -> CodedForm:
    """A form by its `scheme`."""
    codes, scales, block = scheme.split()
    rows, _, columns = block.partition("x")
    return CodedForm(codes, scales, (int(rows), int(columns)), shape)


def multiplies(form: CodedForm) -> bool:
    """Whether there is a kernel for this matrix on this machine: each row a whole number of segments."""
    rows, columns = form.block
    if not all(form.shape) or form.shape[1] % SEGMENT or any(n & (n - 1) for n in form.block):
        return False
    if form.scales not in _KERNEL_SCALES or (form.codes not in _OF_A_BYTE and rows != 1) or 0 < columns < 16:
        return False
    width = kernel_for(form.kernel, None)
    return bool(width) and agrees(CODES, form.kernel, width, sample)


@functools.cache
def kernel_for(kernel: CodeKernel, dtype: torch.dtype | None) -> int:
    """Width of the kernel for inputs of a dtype: `INTEGERS` for all codes but FP8; 0 if there is none here.

    FP8 is multiplied with inputs of bfloat16 in `PAIRS`, if this machine has that kernel and it agrees.
    """
    from rabbitllm.quant import _vectors

    if kernel.codes != "float8":
        return INTEGERS if _vectors.lanes() else 0
    if dtype == torch.bfloat16 and _vectors.multiplies_pairs() and agrees(CODES, kernel, PAIRS, sample):
        return PAIRS
    return _vectors.lanes()


@dataclass(frozen=True, slots=True)
class CodedMatrix(KernelMatrix):
    """A published matrix (N, K) in memory; `multiplies` is true for its form.

    Attributes:
        form: how it is stored.
        payload: its codes, uint8 (bytes,).
        scales: the bytes of its scales, uint8 (bytes,), in the order of `form.grid`.
        factor: by which all scales are multiplied.
        order, rounding: see `KernelMatrix`; not both.
    """

    form: CodedForm
    payload: torch.Tensor
    scales: torch.Tensor
    factor: float = 1.0
    order: torch.Tensor | None = None
    rounding: InputRounding | None = None
    _tables: dict[int, Any] = field(init=False, default_factory=dict, repr=False)

    def clone(self) -> CodedMatrix:
        """A copy in other memory."""
        order = None if self.order is None else self.order.clone()
        return CodedMatrix(self.form, self.payload.clone(), self.scales.clone(), self.factor, order)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized matrix: value times scale in float32, rounded once."""
        whole = self._rows(*self._float_scales(), 0, self.form.shape[0], dtype)
        return whole if self.order is None else torch.empty_like(whole).index_copy_(1, self.order, whole)

    @property
    def kernel(self) -> CodeKernel:  # type: ignore[override]
        return self.form.kernel

    @property
    def max_inputs(self) -> int:  # type: ignore[override]
        return MAX_INPUTS.get(kernel_for(self.form.kernel, torch.bfloat16), 0)

    def method_for(self, count: int, dtype: torch.dtype) -> tuple[str, int]:
        width = kernel_for(self.form.kernel, dtype)
        return CODES if count <= MAX_INPUTS.get(width, 0) else DEQUANTIZED, width

    def preparation(self, width: int) -> Preparation:
        return _preparation(width, self.form.kernel.codes, self.form.shape[1])

    def operands(self, width: int) -> tuple[int, int, int, int, int, int]:
        from rabbitllm.quant._code_kernels import shift_of

        if width not in self._tables:
            self._tables[width] = _table(self.form.codes, self.form.kernel, width, self.factor)
        sizes = self.form.row_bytes, self.form.shape[1] // SEGMENT, shift_of(*self.form.block)
        return self.payload.data_ptr(), self.scales.data_ptr(), self._tables[width].ctypes.data, *sizes

    def in_chunks(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows_at = functools.partial(self._rows, *self._float_scales())
        x = x if self.order is None else x[:, self.order]
        return dense_product(x, bias, self.form.shape, self.form.block[0] or 1, rows_at)

    def _rows(
        self, scales: torch.Tensor, zeros: torch.Tensor | None, begin: int, end: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Some rows, dequantized with all float32 scales; `begin` is the first of a block, or all have one scale."""
        from rabbitllm.quant import dequantize_kernels

        (_, columns), block = self.form.shape, self.form.block
        codes = self.payload.view(self.form.shape[0], -1)[begin:end]
        some = slice(begin // block[0], -(-end // block[0])) if block[0] else slice(None)
        row_zeros = None if zeros is None else zeros[some]
        size, first = (block[0] or end - begin, block[1] or columns), None if self.form.codes in _OF_A_BYTE else 0
        return dequantize_kernels.blocks(codes, _values(self.form.codes), scales[some], size, dtype, first, row_zeros)

    def _float_scales(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scales, and the zeros if there are any, as float32, of shape `form.grid`."""
        stored, scale_type, zeros = self.scales, _KERNEL_SCALES[self.form.scales], None
        if scale_type == "power":
            floats = torch.exp2(stored.float() - 127.0)
        else:
            dtype = torch_dtype(self.form.scales)
            aligned = stored if not stored.data_ptr() % dtype.itemsize else stored.clone()
            if self.form.has_zeros:
                upper = int(scale_type == ZEROED)  # of the two halves, where zeros are
                dtype = torch.float16 if upper else torch.bfloat16
                zeros = (aligned.view(torch.int16)[upper::2].float() / 2).view(self.form.grid)
                floats = aligned.view(dtype)[1 - upper :: 2]
            else:
                floats = aligned.view(dtype)
        return floats.float().view(self.form.grid) * self.factor, zeros


@functools.cache
def _values(codes: str) -> torch.Tensor:
    """The value of each code, float32."""
    if codes == FP8:
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
    if codes in _OF_A_BYTE:
        return torch.arange(256, device="cpu").sub(0 if codes == INT8 else 128).to(torch.int8).float()
    return torch.tensor(FP4_VALUES if codes == FP4 else range(-8, 8), dtype=torch.float32, device="cpu")


@functools.lru_cache(maxsize=256)
def _table(codes: str, kernel: CodeKernel, width: int, factor: float) -> Any:
    from rabbitllm.quant import _code_kernels

    return _code_kernels.table_of(kernel, width, _values(codes).numpy(), factor)


@functools.lru_cache(maxsize=1024)
def _preparation(width: int, codes: str, columns: int) -> Preparation:
    from rabbitllm.quant import _code_kernels, joint_kernels

    if width == INTEGERS:
        return _code_kernels.LAYOUTS[codes].preparation(columns)
    if width == PAIRS:
        return Preparation(joint_kernels.widen_inputs, (columns, 0, 0), 2 * columns)
    return Preparation(joint_kernels.widen_inputs, (columns, 1, 1), 2 * columns, 2 * columns)


def zeroed(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The bytes of scales `WITH_ZEROS`: of scales of 16 bits and int16 zeros, (n,)."""
    halves = [scales.view(torch.int16), 2 * zeros]
    return torch.stack(halves if scales.dtype == torch.float16 else halves[::-1], 1).flatten().view(torch.uint8)


def sample(kernel: CodeKernel, shape: tuple[int, int], random: RandomTensors) -> CodedMatrix:
    """A matrix that a kernel multiplies, with random codes and scales."""
    name = next(name for name, scale_type in _KERNEL_SCALES.items() if scale_type == kernel.scales)
    codes = {"float8": FP8, "integers": UINT8}.get(kernel.codes, FP4)
    form = CodedForm(codes, name, (1, kernel.group), shape)
    payload = random.integers(0, 256, shape[0] * form.row_bytes)
    if codes == FP8:
        payload[payload & 127 == 127] = 0  # NaN
    count = form.grid[0] * form.grid[1]
    if kernel.scales == "power":
        scales = random.integers(120, 134, count)
    elif form.has_zeros:
        dtype, half = torch.float16 if kernel.scales == ZEROED else torch.bfloat16, 128 if codes == UINT8 else 8
        zeros = random.integers(-half, half + 1, count, dtype=torch.int16)
        scales = zeroed(random.positive(count, dtype=dtype), zeros)
    else:
        scales = random.positive(count, dtype=torch_dtype(name)).view(torch.uint8)
    return CodedMatrix(form, payload, scales, 0.5)
