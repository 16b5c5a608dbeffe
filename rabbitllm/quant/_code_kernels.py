"""Kernels that multiply by published codes: FP8, FP4 and integers of 4 or 8 bits, with scales for groups of inputs.

A segment of 64 codes of FP8 is decoded to vectors of those at even indices and of those at odd ones, one of the others
to integers. So each lane of their products has codes of one group, and a vector of scales multiplies several groups at
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

from rabbitllm.quant import _integers, _product_kernels, _vectors
from rabbitllm.quant._integers import (
    CODE_OFFSET,
    OFFSET_BITS,
    TOGETHER,
    WORDS,
    CodeSteps,
    InputLayout,
    Position,
    Products,
    TwoByteLayout,
)
from rabbitllm.quant._kernel_interface import INTEGERS, PAIRS, SEGMENT, ZEROED, ZEROED_BFLOATS, CodeKernel
from rabbitllm.quant._vectors import F32, HALF_BYTES, I8, I16, I32, Emitter, every, number

NIBBLES, WHOLE = "nibbles", "integers"
_SCALE_BITS = {"f32": 32, "bf16": 16, "f16": 16, "power": 8, "float8": 8, ZEROED: 32, ZEROED_BFLOATS: 32}
_TABLE_BYTES = {NIBBLES: 16, WHOLE: 16, "float8": 256}
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
    elif kernel.codes == WHOLE:
        table = np.full(16, values[0]).astype(np.int8).view(np.uint8)  # 0, or -128: where a code and its value differ
    else:
        words = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        table = words[:128].view(np.uint8)
        factor *= _SMALLER if width != PAIRS else 1.0
    factor *= _SMALLER if kernel.scales == "float8" else 1.0
    return np.concatenate([table, np.array([factor], np.float32).view(np.uint8)])


def kernel(method: str, scheme: CodeKernel, width: int) -> Callable[[Any], None]:
    """As `_product_kernels.kernel`, by codes."""
    name = "_".join((method, *map(str, scheme), str(width)))
    of_nibbles = _FourSegments if _HAS_FOURS else _NibbleSegments
    of_integers = of_nibbles if scheme.codes == NIBBLES else _ByteSegments
    by_width: dict[int, type[_ScaledSegments]] = {INTEGERS: of_integers, PAIRS: _PairSegments}
    return _product_kernels.code_kernel(name, functools.partial(by_width.get(width, _FloatSegments), scheme), width)


class _ScaledSegments(CodeSteps):
    """Segments of which each few codes have a scale."""

    def __init__(self, kernel: CodeKernel, emit: Emitter, table: Any) -> None:
        super().__init__(emit)
        self._kernel = kernel
        self.factor = emit.load(emit.add(table, _TABLE_BYTES[kernel.codes]), F32, 1)
        self.code_bytes = SEGMENT // 2 if kernel.codes == NIBBLES else SEGMENT

    def _scales(self, position: Position, after: int, count: int) -> Any:
        """So many consecutive scales as they are stored, some after the first one of a segment."""
        emit, b, bits = self._emit, self._emit.b, _SCALE_BITS[self._kernel.scales]
        scales, row, segments, segment, shift = position
        by_columns, by_rows = b.and_(shift, number(255)), b.lshr(shift, number(8))
        in_row = emit.add(b.lshr(b.sub(segments, number(1)), by_columns), 1)
        of_segment = emit.add(b.mul(b.lshr(row, by_rows), in_row), b.lshr(segment, by_columns))
        index = emit.add(b.mul(of_segment, number(SEGMENT // self._kernel.group)), after)
        place = emit.add(scales, b.mul(index, number(bits // 8)))
        return emit.load(place, ir.VectorType(ir.IntType(bits), count), 1)

    def _floats(self, words: Any) -> Any:
        """These as float32."""
        b, scale_type, count = self._emit.b, self._kernel.scales, words.type.count
        wide, floats = ir.VectorType(I32, count), ir.VectorType(F32, count)
        if scale_type == ZEROED_BFLOATS:
            words, scale_type = b.and_(words, every(wide, -1 << 16)), "f32"
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


_HAS_FOURS = _vectors.multiplies_fours(8)
LAYOUTS: dict[str, InputLayout] = {
    NIBBLES: TwoByteLayout(SEGMENT, (32, 2), (1, 0)) if _HAS_FOURS else InputLayout(SEGMENT, (16, 2, 2), (1, 2, 0)),
    WHOLE: InputLayout(SEGMENT, (32, 2), (1, 0)),
}
"""The order of the inputs of a segment of codes that are multiplied as integers."""


class _IntegerSegments(_ScaledSegments):
    """Multiplies integers; each of a segment's `lanes` sums some consecutive ones."""

    lanes: int

    def products(self, address: Any, inputs: list[list[Any]], position: Position) -> Products:
        emit, b, count = self._emit, self._emit.b, SEGMENT // self._kernel.group
        if count > 1:
            few = self._scales(position, 0, self.together * count)
        else:  # which several segments may share
            *before, segment, shift = position
            of_segments = ((*before, emit.add(segment, n), shift) for n in range(self.together))
            few = emit.joined(*(self._scales(place, 0, 1) for place in of_segments))
        order = [lane * count // self.lanes for lane in range(self.lanes * self.together)]
        floats = self._floats(few)
        scale, zeros = emit.pick(floats, floats, order), None
        if self._kernel.scales in (ZEROED, ZEROED_BFLOATS):
            zeros = emit.pick(few, few, order)
            sixteen = every(zeros.type, 16)
            zeros = b.ashr(zeros if self._kernel.scales == ZEROED else b.shl(zeros, sixteen), sixteen)
        sums = self._sums(address, [integers for *integers, _ in inputs], zeros)
        totals = (b.fmul(b.sitofp(total, scale.type), each[-1]) for total, each in zip(sums, inputs, strict=True))
        yield 0, map(self._filled, totals), itertools.repeat(self._filled(scale))

    def _filled(self, lanes: Any) -> Any:
        """The lanes of one segment or two as a whole vector."""
        zeros = ir.Constant(lanes.type, None)
        return self._emit.pick(lanes, zeros, range(16)) if lanes.type.count < 16 else lanes

    @abstractmethod
    def _sums(self, address: Any, inputs: list[list[Any]], zeros: Any) -> list[Any]:
        """The sums of the products of integers, less half of a lane's number in `zeros` if there are any, with those of
        each input."""

    def _in_pairs(self, zeros: Any) -> Any:
        """The numbers of lanes as words, each twice."""
        b = self._emit.b
        both = b.and_(zeros, every(zeros.type, 0xFFFF))
        return b.or_(both, b.shl(both, every(both.type, 16)))


class _ByteSegments(_IntegerSegments):
    """Multiplies codes of a byte, whose upper bit may be another one than that of their value; a lane sums four."""

    lanes = 16

    def __init__(self, kernel: CodeKernel, emit: Emitter, table: Any) -> None:
        super().__init__(kernel, emit, table)
        self._changed = emit.joined(*[emit.load(table, ir.VectorType(I8, 16), 1)] * 4)

    def _sums(self, address: Any, inputs: list[list[Any]], zeros: Any) -> list[Any]:
        emit, b, eight = self._emit, self._emit.b, every(WORDS, 8)
        codes = b.xor(emit.load(address, self._changed.type, 1), self._changed)
        odd = b.bitcast(codes, WORDS)
        values: Any = [b.ashr(b.shl(odd, eight), eight), b.ashr(odd, eight)]
        if zeros is not None:
            own = b.bitcast(self._in_pairs(b.ashr(zeros, every(zeros.type, 1))), WORDS)
            values = [b.sub(each, own) for each in values]
        return [_integers.summed_integers(emit, values, integers) for integers in inputs]


class _NibbleSegments(_IntegerSegments):
    """Looks codes of 4 bits up, of which the first of a byte is in its low half.

    A lane sums eight, so that two segments fill a vector.
    """

    lanes = 8

    def __init__(self, kernel: CodeKernel, emit: Emitter, table: Any, together: int = 2) -> None:
        super().__init__(kernel, emit, table)
        self.together, self._table = together, emit.load(table, ir.VectorType(I8, 16), 1)
        self.rest = type(self)(kernel, emit, table, 1) if together > 1 else None

    def inputs(self, inputs: Any, others: Any) -> list[Any]:
        emit = self._emit
        words = [emit.load(emit.add(inputs, offset), WORDS, 2) for offset in range(0, 128 * self.together, 64)]
        scales = (emit.load(emit.add(others, 4 * n), F32, 4) for n in range(self.together))
        scale = emit.joined(*(emit.spread(scale, 8) for scale in scales))
        return [*words, emit.b.fmul(scale, every(scale.type, 0.5))]  # the table has twice the values

    def _sums(self, address: Any, inputs: list[list[Any]], zeros: Any) -> list[Any]:
        emit, b, words = self._emit, self._emit.b, ir.VectorType(I16, 16)
        sums: list[list[Any]] = [[] for _ in inputs]
        for n in range(self.together):
            both = emit.load(emit.add(address, n * self.code_bytes), words, 1)
            nibbles = (b.and_(word, every(words, 0x0F0F)) for word in (both, b.lshr(both, every(words, 4))))
            values: Any = _integers.looked_up_words(emit, self._table, emit.joined(*nibbles))
            if zeros is not None:
                both = self._in_pairs(zeros)
                own = b.bitcast(emit.pick(both, both, [8 * n + lane % 8 for lane in range(16)]), WORDS)
                values = [b.sub(each, own) for each in values]
            for of_token, integers in zip(sums, inputs, strict=True):
                total = _integers.summed_integers(emit, values, integers[2 * n : 2 * n + 2])
                of_token.append(b.add(*emit.halves(total)))
        return [emit.joined(*of_token) for of_token in sums]


class _FourSegments(_NibbleSegments):
    """The same by bytes with VNNI: inputs have two, and codes are larger by as much as sums begin smaller."""

    other_bytes = SEGMENT

    def __init__(self, kernel: CodeKernel, emit: Emitter, table: Any, together: int = 2) -> None:
        super().__init__(kernel, emit, table, together)
        self._table = emit.b.add(self._table, every(self._table.type, CODE_OFFSET))

    def inputs(self, inputs: Any, others: Any) -> list[Any]:
        emit, size = self._emit, min(self.together, TOGETHER)
        nbytes, ints, floats = (ir.VectorType(of, n * size) for of, n in ((I8, 32), (I32, 8), (F32, 8)))
        vectors, scales = [], []
        for n in range(0, self.together, size):
            places = (emit.add(inputs, 128 * n + 32 * size * part) for part in range(4))
            vectors += [emit.load(place, nbytes, 1) for place in places]
            place = emit.add(others, self.other_bytes * n)
            vectors.append(emit.load(emit.add(place, 32 * size), ints, 4))
            scales.append(emit.load(place, floats, 4))
        return [*vectors, emit.joined(*scales)]

    def _sums(self, address: Any, inputs: list[list[Any]], zeros: Any) -> list[Any]:
        emit, b, size = self._emit, self._emit.b, min(self.together, TOGETHER)
        words = ir.VectorType(I16, 16 * size)
        sums: list[list[Any]] = [[] for _ in inputs]
        for n in range(0, self.together, size):
            both = emit.load(emit.add(address, n * self.code_bytes), words, 1)
            first, second = _integers.looked_up_nibbles(emit, self._table, both)
            for of_token, integers in zip(sums, inputs, strict=True):
                *uppers, even, odd, moved = integers[5 * n // size : 5 * n // size + 5]
                upper = emit.fours(emit.fours(None, first, uppers[0]), second, uppers[1])
                lower = emit.fours(emit.fours(moved, first, even), second, odd)
                total = b.add(b.shl(upper, every(upper.type, 7)), lower)
                if zeros is not None:  # sums begin smaller by the inputs' `CODE_OFFSET` times
                    own = emit.pick(zeros, zeros, range(8 * n, 8 * (n + size)))
                    total = b.add(total, b.mul(own, b.ashr(moved, every(moved.type, OFFSET_BITS))))
                of_token.append(total)
        return [emit.joined(*of_token) for of_token in sums]


class _InParts(_ScaledSegments):
    """Multiplies floats, and each part of a segment by its scales."""

    codes_a_part = SEGMENT

    def products(self, address: Any, inputs: list[list[Any]], position: Position) -> Products:
        emit, parts = self._emit, self._parts(address, inputs)
        count = max(SEGMENT // self._kernel.group // len(parts), 1)
        order = [lane * count // emit.width for lane in range(emit.width)]
        for part, values in enumerate(parts):
            few = self._floats(self._scales(position, part * count, count))
            yield 0, values, itertools.repeat(emit.pick(few, few, order))

    @abstractmethod
    def _parts(self, address: Any, inputs: list[list[Any]]) -> list[list[Any]]:
        """Sums of parts of a segment times the inputs of each token, still apart in lanes."""

    def _halves(self, words: Any, vector_type: ir.VectorType) -> tuple[Any, Any]:
        """The even and the odd codes of a vector of words with two bytes."""
        return self._emit.b.and_(words, every(vector_type, 255)), self._emit.b.lshr(words, every(vector_type, 8))


class _FloatSegments(_InParts):
    """Multiplies in float32; even and odd inputs are in separate arrays."""

    other_bytes = HALF_BYTES

    def __init__(self, kernel: CodeKernel, emit: Emitter, table: Any) -> None:
        super().__init__(kernel, emit, table)
        self.codes_a_part = max(2 * emit.width, kernel.group)

    def inputs(self, inputs: Any, others: Any) -> list[Any]:
        emit = self._emit
        places = itertools.product(range(0, HALF_BYTES, emit.width * 4), (inputs, others))
        return [emit.load(emit.add(half, offset), emit.floats, 4) for offset, half in places]

    def _parts(self, address: Any, inputs: list[list[Any]]) -> list[list[Any]]:
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


class _PairSegments(_InParts):
    """Multiplies pairs of bfloat16: of the even codes of a segment, then of the odd ones."""

    def __init__(self, kernel: CodeKernel, emit: Emitter, table: Any) -> None:
        super().__init__(kernel, emit, table)
        places = range(0, _TABLE_BYTES[kernel.codes], 64)
        self._tables = [emit.load(emit.add(table, offset), WORDS, 1) for offset in places]

    def inputs(self, inputs: Any, others: Any) -> list[Any]:
        emit = self._emit
        first, second = (emit.load(emit.add(inputs, offset), WORDS, 2) for offset in (0, 64))
        return [emit.pick(first, second, range(parity, 64, 2)) for parity in (0, 1)]

    def _parts(self, address: Any, inputs: list[list[Any]]) -> list[list[Any]]:
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
