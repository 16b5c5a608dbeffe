"""Kernels that multiply by published codes: FP8, FP4 and integers of 4 bits, with scales for groups of inputs.

A segment of 64 codes of FP8 is decoded to vectors of those at even indices and of those at odd ones, one of 4 bits to
integers. So each lane of their products has codes of one group, and a vector of scales multiplies several groups at
once. The loops and arguments are those of `_product_kernels.py`, but for `shift`, see `shift_of`.
"""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from rabbitllm.quant import _integers, _product_kernels
from rabbitllm.quant._integers import WORDS, CodeSteps, InputLayout, Position, Products
from rabbitllm.quant._kernel_interface import INTEGERS, PAIRS, SEGMENT, ZEROED, CodeKernel
from rabbitllm.quant._vectors import F32, HALF_BYTES, I8, I16, I32, Emitter, every, number

NIBBLES = "nibbles"
_SCALE_BITS = {"f32": 32, "bf16": 16, "f16": 16, "power": 8, "float8": 8, ZEROED: 32}
_TABLE_BYTES = {NIBBLES: 16, "float8": 256}
"""Bytes of a table; a factor follows, float32, which multiplies sums."""
_SMALLER = 256.0
"""A float8_e4m3fn whose bits are moved to those of a float16 is smaller by this factor."""
_ALL = 62
"""The logarithm of more rows or segments than a matrix has."""


def shift_of(rows: int, columns: int) -> int:
    """The argument `shift`, for a scale for so many rows and columns, both powers of two; 0 means all of them."""
    by_columns = (max(columns, SEGMENT) // SEGMENT).bit_length() - 1 if columns else _ALL
    return by_columns | (rows.bit_length() - 1 if rows else _ALL) << 8


def table_of(kernel: CodeKernel, width: int, values: npt.NDArray[np.float32], factor: float) -> npt.NDArray[np.uint8]:
    """The table of a kernel of `width` lanes, from the values of all codes, exact in bfloat16, times a factor."""
    if kernel.codes == NIBBLES:
        table = (2 * values).astype(np.int8).view(np.uint8)  # FP4 has halves
    else:
        words = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        table = words[:128].view(np.uint8)
        factor *= _SMALLER if width != PAIRS else 1.0
    factor *= _SMALLER if kernel.scales == "float8" else 1.0
    return np.concatenate([table, np.array([factor], np.float32).view(np.uint8)])


def kernel(method: str, scheme: CodeKernel, width: int) -> Callable[[Any], None]:
    """As `_product_kernels.kernel`, by codes."""
    name = "_".join((method, *map(str, scheme), str(width)))
    few = _IntegerSegments if scheme.group == SEGMENT else _FourSegments
    by_width: dict[int, type[_ScaledSegments]] = {INTEGERS: few, PAIRS: _PairSegments}
    return _product_kernels.code_kernel(name, functools.partial(by_width.get(width, _FloatSegments), scheme), width)


class _ScaledSegments(CodeSteps):
    """Segments of which each few codes have a scale."""

    codes_a_part = SEGMENT

    def __init__(self, kernel: CodeKernel, emit: Emitter, table: Any) -> None:
        super().__init__(emit)
        self._kernel = kernel
        self.factor = emit.load(emit.add(table, _TABLE_BYTES[kernel.codes]), F32, 1)
        self.code_bytes = SEGMENT // 2 if kernel.codes == NIBBLES else SEGMENT

    def products(self, address: Any, inputs: list[list[Any]], position: Position) -> Products:
        emit, b, a_segment = self._emit, self._emit.b, SEGMENT // self._kernel.group
        scales, row, segments, segment, shift = position
        by_columns, by_rows = b.and_(shift, number(255)), b.lshr(shift, number(8))
        in_row = emit.add(b.lshr(b.sub(segments, number(1)), by_columns), 1)
        first = b.mul(emit.add(b.mul(b.lshr(row, by_rows), in_row), b.lshr(segment, by_columns)), number(a_segment))
        parts = self._parts(address, inputs, self._loaded(scales, first, a_segment))
        count = max(a_segment // len(parts), 1)
        for part, values in enumerate(parts):
            few = self._floats(self._loaded(scales, emit.add(first, part * count), count), count)
            yield 0, values, itertools.repeat(emit.pick(few, few, self._scale_of_lanes(count)))

    @abstractmethod
    def _parts(self, address: Any, inputs: list[list[Any]], scales: Any) -> list[list[Any]]:
        """Sums of parts of a segment times the inputs of each token, still apart in lanes; `scales` as `_loaded`."""

    def _loaded(self, scales: Any, index: Any, count: int) -> Any:
        """So many consecutive scales, as they are stored."""
        emit, bits = self._emit, _SCALE_BITS[self._kernel.scales]
        place = emit.add(scales, emit.b.mul(index, number(bits // 8)))
        return emit.load(place, ir.VectorType(ir.IntType(bits), count), 1)

    def _scale_of_lanes(self, count: int) -> list[int]:
        """Which of so many consecutive scales a lane of the products has."""
        width = self._emit.width
        return [lane * count // width for lane in range(width)]

    def _floats(self, words: Any, count: int) -> Any:
        b, scale_type, wide = self._emit.b, self._kernel.scales, ir.VectorType(I32, count)
        floats = ir.VectorType(F32, count)
        if scale_type == "f32":
            return b.bitcast(words, floats)
        if scale_type == ZEROED:
            words, scale_type = b.trunc(words, ir.VectorType(I16, count)), "f16"
        if scale_type == "f16":
            return b.fpext(b.bitcast(words, ir.VectorType(ir.HalfType(), count)), floats)
        if scale_type == "float8":
            return _wider(b, b.zext(words, ir.VectorType(I16, count)), count)
        if scale_type == "bf16":
            return b.bitcast(b.shl(b.zext(words, wide), every(wide, 16)), floats)
        exponents = b.zext(words, wide)
        bits, least = b.shl(exponents, every(wide, 23)), every(wide, 1 << 22)  # 2 ** -127, below the normal numbers
        return b.bitcast(b.select(b.icmp_unsigned(">", bits, least), bits, least), floats)

    def _halves(self, words: Any, vector_type: ir.VectorType) -> tuple[Any, Any]:
        """The even and the odd codes of a vector of words with two bytes."""
        return self._emit.b.and_(words, every(vector_type, 255)), self._emit.b.lshr(words, every(vector_type, 8))


NIBBLE_LAYOUT = InputLayout(SEGMENT, (16, 2, 2), (1, 2, 0))
"""The order of the inputs of a segment of codes of 4 bits."""


class _IntegerSegments(_ScaledSegments):
    """Looks codes of 4 bits up, of which the first of a byte is in its low half, and multiplies integers."""

    def __init__(self, kernel: CodeKernel, emit: Emitter, table: Any) -> None:
        super().__init__(kernel, emit, table)
        self._table = emit.load(table, ir.VectorType(I8, 16), 1)
        if _integers.HAS_WORDS:
            self._table = emit.b.sext(self._table, ir.VectorType(I16, 16))

    def inputs(self, inputs: Any, others: Any) -> list[Any]:
        *words, scale = super().inputs(inputs, others)
        return [*words, self._emit.b.fmul(scale, every(self._emit.floats, 0.5))]  # the table has twice the values

    def _parts(self, address: Any, inputs: list[list[Any]], scales: Any) -> list[list[Any]]:
        zeros = self._zeros(scales, self._scale_of_lanes(scales.type.count))
        sums = self._sums(address, [pair for *pair, _ in inputs], zeros)
        return [[self._emit.b.fmul(total, scale) for total, (*_, scale) in zip(sums, inputs, strict=True)]]

    def _zeros(self, scales: Any, order: list[int]) -> Any:
        """The zeros of lanes, in the upper halves of these scales, for two words each; None if there are none."""
        if self._kernel.scales != ZEROED:
            return None
        b, sixteen = self._emit.b, every(scales.type, 16)
        zeros = b.lshr(scales, sixteen)
        both = b.or_(zeros, b.shl(zeros, sixteen))
        return b.bitcast(self._emit.pick(both, both, order), WORDS)

    def _sums(self, address: Any, inputs: list[list[Any]], zeros: Any) -> list[Any]:
        """The sums of the products of a segment's integers, less zeros, with those of each input, float32."""
        emit, b, words = self._emit, self._emit.b, ir.VectorType(I16, 16)
        both = emit.load(address, words, 1)
        if _integers.HAS_WORDS:
            index = emit.joined(both, b.lshr(both, every(words, 4)))
            values = _integers.permuted_words(emit, self._table, (index, b.lshr(index, every(WORDS, 8))))
        else:
            nibbles = (b.and_(word, every(words, 0x0F0F)) for word in (both, b.lshr(both, every(words, 4))))
            values = [*_integers.looked_up_words(emit, self._table, emit.joined(*nibbles))]
        if zeros is not None:
            values = [b.sub(each, zeros) for each in values]
        return [_integers.summed_products(emit, values, pair) for pair in inputs]

    def _scale_of_lanes(self, count: int) -> list[int]:
        return [lane % 8 * count // 8 for lane in range(16)]  # of low halves, then of high ones


class _FourSegments(_IntegerSegments):
    """Four consecutive segments of several scales each, which are multiplied by those of the inputs together."""

    together = 4

    def __init__(self, kernel: CodeKernel, emit: Emitter, table: Any) -> None:
        super().__init__(kernel, emit, table)
        self.rest = _IntegerSegments(kernel, emit, table)
        self._scales = SEGMENT // kernel.group  # of a segment

    def inputs(self, inputs: Any, others: Any) -> list[Any]:
        emit, b = self._emit, self._emit.b
        words = [emit.load(emit.add(inputs, 64 * half), WORDS, 2) for half in range(2 * self.together)]
        floats = ir.VectorType(F32, self.together)
        scales = b.fmul(emit.load(others, floats, 4), every(floats, 0.5))  # as of one segment
        order = [lane // self._scales for lane in range(self.together * self._scales)]
        return [*words, emit.pick(scales, scales, order)]

    def products(self, address: Any, inputs: list[list[Any]], position: Position) -> Products:
        emit, b, count = self._emit, self._emit.b, self._scales
        scales, row, segments, segment, _ = position  # no scale is of several rows or segments
        first = b.mul(emit.add(b.mul(row, segments), segment), number(count))
        stored = self._loaded(scales, first, self.together * count)
        few = self._floats(stored, self.together * count)
        scales_of = [b.fmul(few, of_inputs) for *_, of_inputs in inputs]
        for n in range(self.together):
            order = [n * count + scale for scale in self._scale_of_lanes(count)]
            pairs = [words[2 * n : 2 * n + 2] for words in inputs]
            sums = self._sums(emit.add(address, self.code_bytes * n), pairs, self._zeros(stored, order))
            yield 0, sums, [emit.pick(each, each, order) for each in scales_of]


class _FloatSegments(_ScaledSegments):
    """Multiplies in float32; even and odd inputs are in separate arrays."""

    other_bytes = HALF_BYTES

    def __init__(self, kernel: CodeKernel, emit: Emitter, table: Any) -> None:
        super().__init__(kernel, emit, table)
        self.codes_a_part = max(2 * emit.width, kernel.group)

    def inputs(self, inputs: Any, others: Any) -> list[Any]:
        emit = self._emit
        places = itertools.product(range(0, HALF_BYTES, emit.width * 4), (inputs, others))
        return [emit.load(emit.add(half, offset), emit.floats, 4) for offset, half in places]

    def _parts(self, address: Any, inputs: list[list[Any]], scales: Any) -> list[list[Any]]:
        emit, width = self._emit, self._emit.width
        words = ir.VectorType(I16, width)
        parts = [[emit.zero] * len(inputs) for _ in range(SEGMENT // self.codes_a_part)]
        for begin in range(0, SEGMENT, 2 * width):
            part = parts[begin // self.codes_a_part]
            halves = self._halves(emit.load(emit.add(address, begin), words, 1), words)
            both = [_wider(emit.b, codes, width) for codes in halves]
            for t, vectors in enumerate(inputs):
                for weight, value in zip(both, vectors[begin // width :], strict=False):
                    part[t] = emit.fma(weight, value, part[t])
        return parts


class _BFloat(ir.Type):  # type: ignore[misc]
    """bfloat16, a type that llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class _PairSegments(_ScaledSegments):
    """Multiplies pairs of bfloat16: of the even codes of a segment, then of the odd ones."""

    def __init__(self, kernel: CodeKernel, emit: Emitter, table: Any) -> None:
        super().__init__(kernel, emit, table)
        places = range(0, _TABLE_BYTES[kernel.codes], 64)
        self._tables = [emit.load(emit.add(table, offset), WORDS, 1) for offset in places]

    def inputs(self, inputs: Any, others: Any) -> list[Any]:
        emit = self._emit
        first, second = (emit.load(emit.add(inputs, offset), WORDS, 2) for offset in (0, 64))
        return [emit.pick(first, second, range(parity, 64, 2)) for parity in (0, 1)]

    def _parts(self, address: Any, inputs: list[list[Any]], scales: Any) -> list[list[Any]]:
        emit, paired = self._emit, ir.VectorType(_BFloat(), 32)
        multiply = emit.function("llvm.x86.avx512bf16.dpbf16ps.512", emit.floats, emit.floats, paired, paired)
        halves = self._halves(emit.load(address, WORDS, 1), WORDS)
        weights = [emit.b.bitcast(self._of_128(code), paired) for code in halves]
        sums: list[Any] = [emit.zero] * len(inputs)
        for t, vectors in enumerate(inputs):
            for weight, value in zip(weights, vectors, strict=True):
                sums[t] = emit.b.call(multiply, [sums[t], weight, emit.b.bitcast(value, paired)])
        return [sums]

    def _of_128(self, code: Any) -> Any:
        """The values of float8 codes, which are positive up to 127 and the same, negative, beyond."""
        emit, b = self._emit, self._emit.b
        permute = emit.function("llvm.x86.avx512.vpermi2var.hi.512", *[WORDS] * 4)
        low, high = (b.call(permute, [self._tables[index], code, self._tables[index + 1]]) for index in (0, 2))
        is_high = b.icmp_unsigned("!=", b.and_(code, every(WORDS, 64)), every(WORDS, 0))
        return b.or_(b.select(is_high, high, low), b.shl(b.and_(code, every(WORDS, 128)), every(WORDS, 8)))


def _wider(b: Any, codes: Any, count: int) -> Any:
    """float8_e4m3fn codes in words as float32, smaller by `_SMALLER`, by way of a float16 with the same bits."""
    words, floats = ir.VectorType(I16, count), ir.VectorType(F32, count)
    size = b.and_(codes, every(words, 127))
    is_nan = b.icmp_unsigned("==", size, every(words, 127))
    moved = b.or_(b.shl(size, every(words, 7)), b.shl(b.and_(codes, every(words, 128)), every(words, 8)))
    moved = b.select(is_nan, every(words, 0x7E00), moved)
    return b.fpext(b.bitcast(moved, ir.VectorType(ir.HalfType(), count)), floats)
