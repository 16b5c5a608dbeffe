"""Products of integers: how inputs are rounded, and the code for the vectors of integers that kernels decode codes to.

Codes are decoded to integers of 16 bits, and inputs are rounded to such integers, with a scale for every few of them.
Products are summed exactly in 32 bits, a pair at a time (VPMADDWD, or VPDPWSSD), and multiplied by the scales in
float32. Where VNNI multiplies bytes (VPDPBUSD), published codes of 4 bits are bytes and such inputs have two, with the
same sums. An input's error is at most a 2**-15th of the largest input near it, far below that of any scheme; inputs of
8 bits would add as much loss as Q8_0 itself has.

4bit loses so much more that its codes and inputs have 8 bits but for AVX-512 without VNNI: looking two bytes of each
code up and bringing them together was a third of the instructions. A half of each `SEGMENT` has a scale then, and
consecutive segments are summed in turns: a vector of 512 bits has two of them.

Vectors have 512 bits; for processors with AVX2, LLVM divides them. All sums have the same order on both: but for that
one, products have the same bits on every processor.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from rabbitllm.base.compiling import float_of, floats_at, to_array, wide, words_at
from rabbitllm.quant import _vectors
from rabbitllm.quant._kernel_interface import SEGMENT, Preparation
from rabbitllm.quant._vectors import F32, HALF_BYTES, I8, I16, I32, ZERO_CODE, Emitter, every, features, number

LARGEST_INPUT, LARGEST_CODE = (1 << 14) - 1, (1 << 15) - 1
"""The largest integers of inputs and of codes: four products fit 32 bits."""


@dataclass(frozen=True)
class InputLayout:
    """The order of the inputs of a step: of codes that are decoded together, whose inputs have one scale.

    Attributes:
        step: elements.
        sizes: the digits of an element's number, the most significant first.
        order: the digits that an input's place has, by their numbers in `sizes`.
        group: elements for whose sum there is a lane of minima; 0 if there are no minima.
        error: the tolerated error of a product, relative to its norm.
    """

    step: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    group: int = 0
    error = 3e-4

    @property
    def groups(self) -> int:
        """Sums of a step's inputs, one for each lane of minima; 0 if there are none."""
        return self.step // self.group if self.group else 0

    @functools.cached_property
    def order_address(self) -> int:
        """The address of the number of the element at each place, int32."""
        return int(self.elements.ctypes.data)

    @functools.cached_property
    def elements(self) -> npt.NDArray[np.int32]:
        """The element at each place."""
        elements = np.arange(self.step, dtype=np.int32).reshape(self.sizes)
        return np.ascontiguousarray(elements.transpose(self.order)).ravel()

    def preparation(self, columns: int) -> Preparation:
        """How rows of so many columns, whole steps, are brought into this order.

        With them are float32 for each step: their scale, then the sums of the groups, of rounded inputs.
        """
        numbers = self.step, self.group, self.order_address
        return Preparation(round_inputs, numbers, 2 * columns, 4 * (columns // self.step) * (1 + self.groups))


class ByteLayout(InputLayout):
    """The even inputs of a segment, or of `TOGETHER`, then the odd ones, in 8 bits; each half of a segment has a
    scale."""

    error = 1e-2

    def preparation(self, columns: int) -> Preparation:
        """See `InputLayout`; with a step are eight scales, four of each half, and what eight sums begin with."""
        return Preparation(round_to_bytes, (self.step, 0, self.order_address), columns, columns)


class TwoByteLayout(InputLayout):
    """The even inputs of a segment, or of `TOGETHER`, then the odd ones: bytes for how often 128 goes into them, and
    then in the same order what is left, 0 to 127."""

    def preparation(self, columns: int) -> Preparation:
        """See `InputLayout`; with a step is half its scale eight times, for codes twice as large, and what eight sums
        begin with."""
        return Preparation(round_to_two_bytes, (self.step, 0, self.order_address), 2 * columns, columns)


_NEAREST = np.float32(_vectors.NEAREST)
_LARGEST_FLOAT, _SMALLEST = np.float32(LARGEST_INPUT), np.float32(1e-30)
_HALF, _LARGEST_BYTE, _OFFSET = SEGMENT // 2, np.float32(127), 128
OFFSET_BITS = 4
CODE_OFFSET = 1 << OFFSET_BITS
"""What is added to integers of `TwoByteLayout`'s codes, -16 to 14, of which VPDPBUSD takes no negative ones."""
TOGETHER = 2 if _vectors.lanes() == 16 and _vectors.multiplies_fours(16) else 1
"""Consecutive segments of 4bit codes that are multiplied together, since they fill a vector."""


@_vectors.inlined
def _widen(values, x, is_bfloat, count):  # type: ignore[no-untyped-def]
    """So many inputs as float32."""
    if is_bfloat:
        words = to_array(words_at(x), count)
        for i in range(count):
            values[i] = wide(words[i])
    else:
        singles = to_array(floats_at(x), count)
        for i in range(count):
            values[i] = singles[i]


@_vectors.inlined
def _round(values, bits, begin, end, largest_integer):  # type: ignore[no-untyped-def]
    """Some inputs as integers in the last bits of float32; returns the scale of these."""
    most = np.int32(0)
    for i in range(begin, end):
        most = max(most, bits[i] & np.int32(0x7FFFFFFF))  # ordered as the floats are
    largest = float_of(most)
    factor = largest_integer / largest if largest > _SMALLEST else np.float32(0)
    for i in range(begin, end):
        values[i] = values[i] * factor + _NEAREST
    return largest / largest_integer


@_vectors.inlined
def _sum(bits, begin, end):  # type: ignore[no-untyped-def]
    """The sum of some of these integers, 0 for what is infinite, whose higher bits are of no number."""
    total = np.int32(0)
    for value in bits[begin:end]:
        total += np.int32(np.int16(value & 0xFFFF))
    return total


@_vectors.inlined
def _segment(words, n, values, bits):  # type: ignore[no-untyped-def]
    """Widen a segment of inputs.

    Returns how many inputs come before those that are multiplied together with it, its number among these segments, how
    many they are, and where its scales and what sums begin with are written.
    """
    is_bfloat, steps = words[2], words[4]
    x = words[1] + (2 if is_bfloat else 4) * (n // steps * words[5] + n % steps * SEGMENT)
    _widen(values, x, is_bfloat, SEGMENT)
    part = n % steps % TOGETHER
    together, before = min(TOGETHER, steps - n % steps + part), SEGMENT * (n - part)
    scales = to_array(floats_at(words[10] + before + _HALF * part), 8)
    moved = to_array(floats_at(words[10] + before + _HALF * (part + together)), 8).view(np.int32)
    return before, part, together, scales, moved


def round_inputs(data):  # type: ignore[no-untyped-def]
    """See `InputLayout.preparation`.

    After the own address that of x; whether it is bfloat16, else float32; rows, steps, elements from one row to the
    next, a layout's step and group; and the addresses of its order, of the integers and of the floats.
    """
    words = to_array(data, 11)
    is_bfloat, rows, steps, row, step, group = words[2], words[3], words[4], words[5], words[6], words[7]
    floats_a_step = 1 + (step // group if group else 0)
    places = to_array(words_at(words[8]), 2 * step).view(np.uint32)
    values = np.empty(step, np.float32)
    bits = values.view(np.int32)
    for n in range(rows * steps):
        # arrays of a step: LLVM knows that no index is negative, which Python counts from the end
        x = words[1] + (2 if is_bfloat else 4) * (n // steps * row + n % steps * step)
        results = to_array(words_at(words[9] + 2 * step * n), step)
        others = to_array(floats_at(words[10] + 4 * floats_a_step * n), floats_a_step)
        _widen(values, x, is_bfloat, step)
        others[0] = scale = _round(values, bits, 0, step, _LARGEST_FLOAT)
        for g in range(floats_a_step - 1):
            others[1 + g] = np.float32(_sum(bits, g * group, (g + 1) * group)) * scale
        for i in range(step):
            results[i] = np.uint16(bits[places[i]] & 0xFFFF)


def round_to_bytes(data):  # type: ignore[no-untyped-def]
    """See `ByteLayout`; the arguments are those of `round_inputs`."""
    words = to_array(data, 11)
    values = np.empty(SEGMENT, np.float32)
    bits = values.view(np.int32)
    for n in range(words[3] * words[4]):
        before, part, together, scales, moved = _segment(words, n, values, bits)
        # the first half; the second is behind those of all together
        results = to_array(words_at(words[9] + before + _HALF * part), _HALF // 2 * (together + 1))
        for half in range(2):
            scale = _round(values, bits, _HALF * half, _HALF * half + _HALF, _LARGEST_BYTE)
            for i in range(4):
                scales[4 * half + i] = scale
        for i in range(8):
            moved[i] = -_OFFSET * _sum(bits, 8 * i, 8 * i + 8)
        for odd in range(2):
            own = results[_HALF // 2 * together * odd :]
            for i in range(_HALF // 2):
                own[i] = bits[4 * i + odd] & 0xFF | (bits[4 * i + 2 + odd] & 0xFF) << 8


def round_to_two_bytes(data):  # type: ignore[no-untyped-def]
    """See `TwoByteLayout`; the arguments are those of `round_inputs`."""
    words = to_array(data, 11)
    values = np.empty(SEGMENT, np.float32)
    bits = values.view(np.int32)
    for n in range(words[3] * words[4]):
        before, part, together, scales, moved = _segment(words, n, values, bits)
        results = to_array(words_at(words[9] + 2 * before + _HALF * part), _HALF // 2 * (3 * together + 1))
        scale = _round(values, bits, 0, SEGMENT, _LARGEST_FLOAT) / np.float32(2)
        for i in range(8):
            scales[i] = scale
            moved[i] = -CODE_OFFSET * _sum(bits, 8 * i, 8 * i + 8)
        for odd in range(2):
            high, low = results[_HALF // 2 * together * odd :], results[_HALF // 2 * together * (2 + odd) :]
            for i in range(_HALF // 2):
                first, second = bits[4 * i + odd], bits[4 * i + 2 + odd]
                high[i] = first >> 7 & 0xFF | (second >> 7 & 0xFF) << 8
                low[i] = first & 0x7F | (second & 0x7F) << 8


# Vectors.

WORDS, INTS = ir.VectorType(I16, 32), ir.VectorType(I32, 16)
_BYTES = ir.VectorType(I8, 64)
HAS_WORDS = "avx512bw" in features()
_LANE = 16
"""Bytes within which instructions look bytes up and interleave them."""


def look_up(emit: Emitter, table: Any, index: Any) -> Any:
    """Bytes of a table, a vector of 16 bytes, by 32 or 64 bytes, whose upper halves are 0."""
    tables = emit.joined(*[table] * (index.type.count // 16))
    return _divided(emit, index.type, "avx2.pshuf.b", "avx512.pshuf.b.512", tables, index)


def looked_up_nibbles(emit: Emitter, table: Any, both: Any) -> tuple[Any, Any]:
    """Bytes of a table of 16, by the lower and by the upper halves of bytes, a vector of words."""
    b, as_bytes = emit.b, ir.VectorType(I8, 2 * both.type.count)
    nibbles = [both, b.lshr(both, every(both.type, 4))]
    if "avx512vbmi" in features():  # which takes as many bits of an index as there are bytes
        tables = emit.joined(*[table] * (as_bytes.count // 16))
        name = f"llvm.x86.avx512.permvar.qi.{8 * as_bytes.count}"
        permute = functools.partial(b.call, emit.function(name, *[as_bytes] * 3))
        low, high = (permute([tables, b.bitcast(words, as_bytes)]) for words in nibbles)
    else:
        nibbles = [b.and_(words, every(both.type, 0x0F0F)) for words in nibbles]
        low, high = (look_up(emit, table, b.bitcast(words, as_bytes)) for words in nibbles)
    return low, high


def looked_up_words(emit: Emitter, table: Any, index: Any) -> tuple[Any, Any]:
    """Signed bytes of a table, as words: by the even and by the odd bytes of 64, whose upper halves are 0."""
    both = emit.b.bitcast(look_up(emit, table, emit.b.bitcast(index, _BYTES)), WORDS)
    eight = every(WORDS, 8)
    return emit.b.ashr(emit.b.shl(both, eight), eight), emit.b.ashr(both, eight)


def permuted_words(emit: Emitter, table: Any, indices: Iterable[Any]) -> list[Any]:
    """Words of a table of 16 by vectors of words, of which four bits count, with AVX-512."""
    both = emit.joined(table, table)  # a fifth bit chooses the half
    permute = emit.function("llvm.x86.avx512.permvar.hi.512", *[WORDS] * 3)
    return [emit.b.call(permute, [both, index]) for index in indices]


def summed_products(emit: Emitter, codes: Iterable[Any], inputs: Iterable[Any]) -> Any:
    """The sums of products of vectors of words with as many of inputs, 16 float32."""
    return emit.b.sitofp(summed_integers(emit, codes, inputs), emit.floats)


def summed_integers(emit: Emitter, codes: Iterable[Any], inputs: Iterable[Any]) -> Any:
    """The same as integers."""
    total: Any = ir.Constant(INTS, [0] * 16)
    for words, values in zip(codes, inputs, strict=True):
        pairs = _divided(emit, INTS, "avx2.pmadd.wd", "avx512.pmaddw.d.512", words, values)
        total = emit.b.add(total, pairs)
    return total


def interleaved_bytes(emit: Emitter, even: Any, odd: Any) -> tuple[Any, Any]:
    """Two vectors of 64 bytes as two of 32 words: of the first eight bytes of each 16, and of the others."""
    order = [lane + i + half for lane in range(0, 64, _LANE) for i in range(_LANE // 2) for half in (0, 64)]
    orders = order, [place + _LANE // 2 for place in order]
    first, second = (emit.b.bitcast(emit.pick(even, odd, places), WORDS) for places in orders)
    return first, second


def _signed(emit: Emitter, words: Any, signs: Any) -> Any:
    """Words that are negated where the others are negative."""
    if not HAS_WORDS:
        return _divided(emit, WORDS, "avx2.psign.w", "", words, signs)  # 0 where these are 0
    mask = emit.b.ashr(signs, every(WORDS, 15))
    return emit.b.sub(emit.b.xor(words, mask), mask)


def _divided(emit: Emitter, result: Any, half_name: str, name: str, *vectors: Any) -> Any:
    """An instruction with vectors of 512 bits, or twice the one with halves of them; or that one, if they have 256."""
    is_half = result.count * result.element.width == 256
    if HAS_WORDS or is_half:
        name = half_name if is_half else name
        call = emit.function(f"llvm.x86.{name}", result, *(vector.type for vector in vectors))
        return emit.b.call(call, vectors)
    both = zip(*map(emit.halves, vectors), strict=True)
    half_type = ir.VectorType(result.element, result.count // 2)
    return emit.joined(*(_divided(emit, half_type, half_name, name, *each) for each in both))


# Steps of codes.


Position: TypeAlias = tuple[Any, Any, Any, Any, Any]
"""Where a step of codes is, in numbers of LLVM: the address of all scales, row, steps in a row, step, and shift."""
Products: TypeAlias = Iterator[tuple[int, Iterable[Any], Iterable[Any]]]
"""An accumulator's number, and two vectors for each input, whose products are added to it."""


class CodeSteps(ABC):
    """Emits how steps of codes are decoded, multiplied and scaled; steps are segments, `SEGMENT`, or blocks.

    Attributes:
        code_bytes, input_bytes, other_bytes: of a step: of codes, of inputs, and of what is with those.
        together: consecutive steps that are multiplied together.
        rest: multiplies a step of those that are left over; None if none are.
        accumulators: lanes of the vectors in which an input's products are summed.
        turns: how many of these take turns, each for the steps that are multiplied together.
        factor: of the sums; None for 1.
    """

    code_bytes: int
    input_bytes, other_bytes, together, turns = HALF_BYTES, 4, 1, 1
    rest: CodeSteps | None = None
    factor: Any = None

    def __init__(self, emit: Emitter) -> None:
        self._emit, self.accumulators = emit, [emit.width]

    def inputs(self, inputs: Any, others: Any) -> list[Any]:
        """What `products` takes of a step's inputs at these addresses: two vectors, and their scale in all lanes."""
        emit = self._emit
        words = [emit.load(emit.add(inputs, offset), WORDS, 2) for offset in (0, 64)]
        return [*words, emit.spread(emit.load(others, F32, 4))]

    @abstractmethod
    def products(self, address: Any, inputs: list[list[Any]], position: Position) -> Products:
        """The products of a step of codes at an address."""

    def total(self, total: Any, least: Any = None) -> Any:
        """The accumulators of an input as one vector; the second one is subtracted."""
        if least is None:
            return total
        order = [min(lane, least.type.count) for lane in range(total.type.count)]  # zeros follow
        return self._emit.b.fsub(total, self._emit.pick(least, ir.Constant(least.type, None), order))


# Codes of our own schemes.


class _OwnSegments(CodeSteps):
    """Segments of our own schemes, of which all codes have one scale.

    Attributes:
        layout: of the inputs.
        tables: how many vectors of 16 bytes the table has; the factor follows.
        lanes: in which the products of a segment are summed.
    """

    layout: InputLayout
    tables: int
    lanes = 16

    def __init__(self, emit: Emitter, table: Any) -> None:
        super().__init__(emit)
        places = [emit.add(table, 16 * index) for index in range(self.tables + 1)]
        self._tables = [emit.load(place, ir.VectorType(I8, 16), 1) for place in places[:-1]]
        self.factor = emit.load(places[-1], F32, 1)

    def products(self, address: Any, inputs: list[list[Any]], position: Position) -> Products:
        emit, (scales, row, steps, step, shift) = self._emit, position
        sums = self._sums(address, inputs)
        first, scales_of = emit.add(emit.b.mul(row, steps), step), list[Any]()
        for number_of_step in range(self.together):
            block = emit.b.lshr(emit.add(first, number_of_step), shift)
            scale = emit.load(emit.add(scales, emit.b.mul(block, number(4))), F32, 4)
            scales_of.append(emit.spread(scale, self.lanes))
        scale = emit.joined(*scales_of)
        yield 0, sums, [emit.b.fmul(scale, of_inputs) for *_, of_inputs in inputs]

    @abstractmethod
    def _sums(self, address: Any, inputs: list[list[Any]]) -> list[Any]:
        """The sums of the products of a segment's integers with those of each input, float32."""


class _LookedUp(_OwnSegments):
    """Looks up 4bit codes, of which the first of a byte is in its high half, with AVX-512 and no VNNI."""

    code_bytes, tables, layout = 32, 2, InputLayout(SEGMENT, (32, 2), (1, 0))

    def _sums(self, address: Any, inputs: list[list[Any]]) -> list[Any]:
        emit = self._emit
        order = [16 * (place % 2) + place // 2 for place in range(32)]
        table = emit.b.bitcast(emit.pick(self._tables[0], self._tables[1], order), ir.VectorType(I16, 16))
        low = emit.b.zext(emit.load(address, ir.VectorType(I8, 32), 1), WORDS)
        words = permuted_words(emit, table, (emit.b.lshr(low, every(WORDS, 4)), low))
        return [summed_products(emit, words, vectors) for *vectors, _ in inputs]


class _LookedUpBytes(_OwnSegments):
    """The same as bytes, with AVX2: products are those of the sizes of codes with inputs of the same sign."""

    code_bytes, tables, layout = 32, 1, ByteLayout(SEGMENT, (32, 2), (1, 0))
    input_bytes, other_bytes, lanes = SEGMENT, SEGMENT, 8

    def __init__(self, emit: Emitter, table: Any, together: int = TOGETHER) -> None:
        super().__init__(emit, table)
        self.together, self.turns, self.accumulators = together, 2 // TOGETHER, [8 * TOGETHER] * (2 // TOGETHER)
        self.rest = type(self)(emit, table, 1) if together > 1 else self

    def inputs(self, inputs: Any, others: Any) -> list[Any]:
        emit, count, half = self._emit, 8 * self.together, _HALF * self.together
        low, high = (emit.load(emit.add(inputs, offset), ir.VectorType(I8, half), 1) for offset in (0, half))
        moved = emit.load(emit.add(others, half), ir.VectorType(I32, count), 4)
        return [low, high, moved, emit.load(others, ir.VectorType(F32, count), 4)]

    def total(self, total: Any, least: Any = None) -> Any:
        return total if least is None else self._emit.joined(total, least)

    def products(self, address: Any, inputs: list[list[Any]], position: Position) -> Products:
        missing = self.accumulators[0] - 8 * self.together
        for accumulator, sums, scales in super().products(address, inputs, position):
            if missing:
                rest = every(ir.VectorType(F32, missing), 0.0)
                sums, scales = ([self._emit.joined(each, rest) for each in values] for values in (sums, scales))
            yield accumulator, sums, scales

    def _sums(self, address: Any, inputs: list[list[Any]]) -> list[Any]:
        emit, b, words = self._emit, self._emit.b, ir.VectorType(I16, 16 * self.together)
        codes = [*looked_up_nibbles(emit, self._tables[0], emit.load(address, words, 1))][::-1]  # the upper half first
        totals = self._products(codes, inputs)
        return [b.sitofp(total, ir.VectorType(F32, total.type.count)) for total in totals]

    def _products(self, codes: list[Any], inputs: list[list[Any]]) -> Iterable[Any]:
        """The sums of the products of the halves of segments with those of each input, eight integers of each."""
        emit, b, words, ints = self._emit, self._emit.b, ir.VectorType(I16, 16), ir.VectorType(I32, 8)
        sign = emit.function("llvm.x86.avx2.psign.b", *[codes[0].type] * 3)
        in_pairs = emit.function("llvm.x86.avx2.pmadd.ub.sw", words, *[codes[0].type] * 2)
        in_fours = emit.function("llvm.x86.avx2.pmadd.wd", ints, words, words)
        sizes = [b.call(sign, [code, code]) for code in codes]
        for halves in inputs:
            signed = (b.call(sign, each) for each in zip(halves, codes, strict=False))
            pairs = (b.call(in_pairs, each) for each in zip(sizes, signed, strict=True))
            yield b.add(*(b.call(in_fours, [each, every(words, 1)]) for each in pairs))


class _LookedUpFours(_LookedUpBytes):
    """The same with VNNI: codes are 128 larger, and sums begin smaller by the inputs' 128 times."""

    def __init__(self, emit: Emitter, table: Any, together: int = TOGETHER) -> None:
        super().__init__(emit, table, together)
        self._tables[0] = emit.b.xor(self._tables[0], every(self._tables[0].type, -_OFFSET))

    def _products(self, codes: list[Any], inputs: list[list[Any]]) -> Iterable[Any]:
        fours = self._emit.fours
        return (fours(fours(moved, codes[0], low), codes[1], high) for low, high, moved, _ in inputs)


class _OnLines(_OwnSegments):
    """Computes 8bit codes: the 128 distances from zero are sixteen straight lines of eight."""

    code_bytes, tables, layout = 64, 3, InputLayout(SEGMENT, (4, 2, 8), (1, 0, 2))

    def _sums(self, address: Any, inputs: list[list[Any]]) -> list[Any]:
        emit, b = self._emit, self._emit.b
        side = b.sub(every(_BYTES, ZERO_CODE), emit.load(address, _BYTES, 1))  # from 127 to -128
        distance = emit.function("llvm.abs.v64i8", _BYTES, _BYTES, ir.IntType(1))
        distance = b.call(distance, [side, ir.Constant(ir.IntType(1), 0)])
        bounded = b.select(b.icmp_unsigned("<", distance, every(_BYTES, 127)), distance, every(_BYTES, 127))
        before = b.and_(bounded, every(_BYTES, 120))
        line = b.bitcast(b.lshr(b.bitcast(before, WORDS), every(WORDS, 3)), _BYTES)
        along = b.sub(distance, before)
        slope, low, high = (look_up(emit, values, line) for values in self._tables)
        lines = interleaved_bytes(emit, slope, low)
        places = interleaved_bytes(emit, along, every(_BYTES, 1))
        starts = interleaved_bytes(emit, every(_BYTES, 0), high)
        signs = interleaved_bytes(emit, side, side)
        words = []
        for pair, place, start, sign in zip(lines, places, starts, signs, strict=True):
            both = b.bitcast(pair, _BYTES), b.bitcast(place, _BYTES)
            sums = _divided(emit, WORDS, "avx2.pmadd.ub.sw", "avx512.pmaddubs.w.512", *both)
            value, most = b.add(sums, start), every(WORDS, _LARGEST_LINE)
            value = b.select(b.icmp_signed("<", value, most), value, most)
            words.append(_signed(emit, value, sign))
        return [summed_products(emit, words, vectors) for *vectors, _ in inputs]


_LOOKED_UP = _LookedUpFours if _vectors.multiplies_fours(8) else _LookedUp if HAS_WORDS else _LookedUpBytes
OWN_STEPS: dict[str, type[_OwnSegments]] = {"4bit": _LOOKED_UP, "8bit": _OnLines}
_LARGEST_LINE = 16000
"""The integer of 1 at 8bit: slopes of the largest values are 225 then, which fits a byte."""
_LINE_ERROR = 3e-4
"""Maximum error of a value, relative to the largest: below a tenth of the error of a matrix at 8bit."""


@functools.cache
def table_of(scheme: str, levels: bytes) -> npt.NDArray[np.uint8] | None:
    """The table of `OWN_STEPS`, from the float32 values of the codes; None if these do not fit.

    At 4bit it has 16 integers, or their lower and then their upper bytes, at 8bit the slopes of 16 lines, and the lower
    and upper bytes of their starts; then the factor of an integer, float32.
    """
    values = np.frombuffer(levels, np.float32).astype(np.float64)
    most = np.abs(values).max()
    if not np.isfinite(most) or not most:
        return None
    if scheme == "4bit":
        size = OWN_STEPS[scheme].tables
        largest = LARGEST_CODE if size == 2 else steps_of_bytes(values / most)
        return packed(np.rint(values / most * largest), size, most / largest)
    # from zero upwards; the product of a code has the opposite sign
    side = np.arange(256) - ZERO_CODE
    ahead = values[ZERO_CODE:] / most * _LARGEST_LINE
    starts, slopes = np.rint(ahead[:128:8]), np.rint((ahead[7:128:8] - ahead[:128:8]) / 7)
    line = np.minimum(np.abs(side) // 8, 15)
    approximated = np.minimum(starts[line] + slopes[line] * (np.abs(side) - 8 * line), _LARGEST_LINE)
    off = np.abs(np.copysign(approximated, side) / _LARGEST_LINE - values / most).max()
    if off > _LINE_ERROR or slopes.min() < 0 or slopes.max() > 255 or starts.min() < 0 or starts[0]:
        return None
    return np.concatenate([slopes.astype(np.uint8), packed(starts, 2, -most / _LARGEST_LINE)])


def steps_of_bytes(values: npt.NDArray[np.float64]) -> float:
    """The number of steps to 1, 112 to 127, for which values up to 1 are off least as bytes."""
    return min(np.arange(112.0, 127.25, 0.25), key=lambda n: np.square(np.rint(values * n) / n - values).sum())


def packed(integers: npt.NDArray[Any], size: int, factor: float) -> npt.NDArray[np.uint8]:
    """Whole numbers by their bytes, the lowest of all first, and the factor of an integer, float32."""
    planes = [integers.astype(np.int16).view(np.uint8)[part::2] for part in range(size)]
    return np.concatenate([*planes, np.array([factor], np.float32).view(np.uint8)])
