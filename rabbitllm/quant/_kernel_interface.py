"""The interface of compiled kernels, which those who call them and those who emit them share.

A kernel is a C function that takes the address of int64s, the first of the parts that it computes, the one after the
last of them, and the number of all. The int64s are `BEFORE_WORK`, then those of each piece of work, which are
`ARGUMENTS`. Every kernel has the same. `_product_kernels.py` has one for each method, scheme and set of instructions,
`_block_kernels.py` those of blocks, `_code_kernels.py` those of published codes.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from rabbitllm.base.openmp import PARTS

CODES, PANELS, BYTES, DEQUANTIZED = "codes", "panels", "bytes", "dequantized"
"""Methods: decode each code for every few inputs; decode a few rows at a time, once for all inputs; the same, as
integers of one or two bytes, to which inputs are rounded; no kernel, but torch's product with a few rows at a time."""
TURNED = "turned"
"""The method for few inputs of a matrix (K, N): a few of its rows are decoded at a time, or lie there, and are added as
often as inputs say, which are float32. Its `row_bytes` and `shift` are those of such rows, and there are `steps`."""
NUMBERS, BFLOATS = "numbers", "bfloats"
"""Dequantization, which is no product: to float32, and to bfloat16."""
INTEGERS = 64
"""Value of `width` for kernels that multiply integers (`_integers.py`)."""
PAIRS = 32
"""Value of `width` for kernels that multiply pairs of bfloat16, inputs and the values of FP8 (VDPBF16PS)."""
BYTE_WIDTH, WORD_WIDTH, BYTE_STEP = 128, 256, 32
"""Values of `width` by `BYTES`, for codes and inputs of one byte and of two, and the elements of their steps."""
BFLOAT16, FLOAT16 = "bfloat16", "float16"
PLAIN = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""Dtype -> the scheme of a plain matrix, whose codes are its values."""
SEGMENT = 64
"""Codes of all schemes but blocks that are summed before their scale is applied."""
BEFORE_WORK = 2
"""Number of int64s before the pieces of work: the rows of a tile, which no part divides, and the number of pieces."""
ARGUMENTS = ("codes", "scales", "even", "odd", "table", "out", "row_bytes", "steps", "shift", "tokens", "rows")
"""The arguments of a piece of work: addresses up to `out` (`even` is that of all inputs where even and odd ones are not
apart); bytes of codes in a row, steps of the kernel in a row, the logarithm of steps in a block, inputs, and rows of
the whole matrix. Those that a kernel does not need are 0. For integers `odd` is that of the scales and sums
of inputs, and `steps` are those of `_integers.InputLayout`; by panels it is that of results in bfloat16, or 0."""


ZEROED, ZEROED_BFLOATS = "zeroed", "zeroed_bf16"
"""Scales of codes with zeros: float16, and above it an int16, twice the zero that is subtracted from a code's value;
bfloat16, and below it the same."""


class CodeKernel(NamedTuple):
    """In place of a scheme, for published codes: what a kernel of `_code_kernels.py` is compiled for.

    Attributes:
        codes: "nibbles" for two codes a byte, the lower half first, with a table of 16 values; "integers" of a byte;
            "float8" for float8_e4m3fn.
        scales: "f32", "bf16", "f16", "power" for the exponent of a power of two (E8M0), "float8", `ZEROED` or
            `ZEROED_BFLOATS`.
        group: codes of a row with a scale of their own: 16, 32, or 64 for that many or more.
    """

    codes: str
    scales: str
    group: int


def call(function: int, words: Iterable[int], thread: int = 0, threads: int = 1) -> None:
    """Call a compiled function, by its address, with that of int64s, for the parts of one of so many threads."""
    data = array("q", words)
    _parts_function(function)(data.buffer_info()[0], PARTS * thread, PARTS * (thread + 1), PARTS * threads)


@functools.cache
def _parts_function(function: int) -> Callable[[int, int, int, int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 3)(function)


class InputRows(NamedTuple):
    """Rows (T, K) as a kernel reads them.

    Attributes:
        inputs: those of each row, or the even ones: T rows of any dimensions, without gaps.
        others: the odd ones, or sums of inputs by group, likewise; None if the kernel needs neither.
    """

    inputs: torch.Tensor
    others: torch.Tensor | None = None

    def of(self, row: int) -> tuple[int, int]:
        """The addresses of a row's inputs and of its others; the second is 0 without any."""
        both = (0 if rows is None else rows.data_ptr() + row * rows.stride(0) * rows.itemsize for rows in self)
        inputs, others = both
        return inputs, others


class Preparation(NamedTuple):
    """How a kernel by codes takes rows of input.

    Attributes:
        function: the compiled function that prepares them.
        numbers: three of its words, see `_integers.round_inputs`: a step, and what else it needs to know.
        input_bytes, other_bytes: of a prepared row, and of what is with it.
    """

    function: Any
    numbers: tuple[int, int, int]
    input_bytes: int
    other_bytes: int = 0

    def of(self, x: torch.Tensor) -> InputRows:
        """Rows (T, K) of any floating dtype, prepared; K is a whole number of steps."""
        function, (step, *numbers), input_bytes, other_bytes = self
        if not any(numbers):
            return InputRows(x.contiguous())  # as they are
        is_bfloat, (count, columns) = x.dtype == torch.bfloat16, x.shape
        x = x if is_bfloat else x.float()
        x = x if x.stride(1) == 1 else x.contiguous()
        inputs = torch.empty(count, input_bytes, dtype=torch.uint8, device="cpu")
        others = torch.empty(count, other_bytes, dtype=torch.uint8, device="cpu") if other_bytes else None
        sizes = is_bfloat, count, columns // step, x.stride(0), step
        places = inputs.data_ptr(), 0 if others is None else others.data_ptr()
        call(_address_of(function), [0, x.data_ptr(), *sizes, *numbers, *places])
        return InputRows(inputs, others)


@functools.cache
def _address_of(function: Callable[..., None]) -> int:
    from rabbitllm.base.compiling import address_of  # numba comes with it

    return address_of(function)
