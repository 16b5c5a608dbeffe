"""Blocks of GGUF files as vectors of integers, which `_integers.py` multiplies.

A vector has 64 bytes of codes, taken as 32 words: in a word the codes of two bytes lie one above the other, and each is
a word of its own once the word is shifted so that it is lowest, and its other bits are cleared. So no byte is widened,
and the inputs are brought into the order in which codes come out.

The scales of a block are decoded as one vector too. The minima are multiplied with the sums of the inputs of their
groups by a single instruction; the sums are the same for all rows.

`LAYOUTS` says how the inputs are ordered, and `parts` emits the code for the same types. Loops are in
`_block_kernels.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from llvmlite import ir

from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant import _integers
from rabbitllm.quant._gguf_decoders import FP4_VALUES, IQ4_VALUES
from rabbitllm.quant._integers import WORDS, InputLayout
from rabbitllm.quant._vectors import F32, I8, I32, Emitter, half_power

# two blocks: of each word the even and the odd byte, then low and high nibbles apart
_TWO_BLOCKS = InputLayout(64, (2, 2, 8, 2), (3, 1, 0, 2))
_TWO_BLOCKS_AND_SUMS = InputLayout(64, _TWO_BLOCKS.sizes, _TWO_BLOCKS.order, 32)
_NIBBLES = InputLayout(256, (2, 2, 2, 16, 2), (0, 2, 4, 1, 3), 32)
_TWO_BITS = InputLayout(256, (2, 4, 16, 2), (1, 3, 0, 2))

LAYOUTS: Mapping[str, InputLayout] = {
    "Q4_0": _TWO_BLOCKS,
    "Q4_1": _TWO_BLOCKS_AND_SUMS,
    "Q5_0": _TWO_BLOCKS,
    "Q5_1": _TWO_BLOCKS_AND_SUMS,
    "Q8_0": InputLayout(64, (2, 2, 16), (1, 0, 2)),
    "IQ4_NL": _TWO_BLOCKS,
    "MXFP4": _TWO_BLOCKS,
    "IQ4_XS": InputLayout(256, (2, 4, 2, 8, 2), (0, 2, 4, 1, 3)),
    "TQ2_0": _TWO_BITS,
    "Q2_K": InputLayout(256, _TWO_BITS.sizes, _TWO_BITS.order, 16),
    "Q3_K": _TWO_BITS,
    "Q4_K": _NIBBLES,
    "Q5_K": _NIBBLES,
    "Q6_K": InputLayout(256, _NIBBLES.sizes, (0, 1, 4, 2, 3)),
}
"""The types that have such a kernel."""


class IntegerPart(NamedTuple):
    """Codes whose products are summed in the lanes of one vector before their scales are applied.

    Attributes:
        words: vectors of 32 integers.
        scale: of each of 16 lanes, float32.
    """

    words: tuple[Any, ...]
    scale: Any


def parts(emit: Emitter, scheme: str, base: Any) -> tuple[Iterator[IntegerPart], Any]:
    """The parts of the step at an address, in the order of the inputs, and the minima or None.

    The minima are 16 float32, of which there may be more than groups.
    """
    return _EMITTED[scheme](_StepInMemory(emit, base))


class _StepInMemory:
    """Shorthand over an `Emitter` for the bytes of a step."""

    def __init__(self, emit: Emitter, base: Any) -> None:
        self.emit, self.b, self.base = emit, emit.b, base

    # Vectors.

    def load(self, offset: int, bits: int, count: int) -> Any:
        return self.emit.load(self.emit.add(self.base, offset), ir.VectorType(ir.IntType(bits), count), 1)

    def pick(self, vector: Any, order: Any) -> Any:
        return self.emit.pick(vector, vector, order)

    def codes(self, offset: int) -> Any:
        """64 bytes as 32 words."""
        return self.load(offset, 16, 32)

    def twice(self, offset: int) -> Any:
        """32 bytes as 16 words, twice."""
        return self.pick(self.load(offset, 16, 16), [*range(16)] * 2)

    def right(self, vector: Any, counts: Any) -> Any:
        return self._by(self.b.lshr, vector, counts)

    def left(self, vector: Any, counts: Any) -> Any:
        return self._by(self.b.shl, vector, counts)

    def masked(self, vector: Any, mask: Any) -> Any:
        return self._by(self.b.and_, vector, mask)

    def _by(self, operation: Any, vector: Any, operand: Any) -> Any:
        if operand == 0 and operation != self.b.and_:
            return vector
        values = [operand] * vector.type.count if isinstance(operand, int) else operand
        return operation(vector, ir.Constant(vector.type, values))

    def merged(self, low: Any, high: Any, mask: int) -> Any:
        """The bits of `mask` in each byte of words from one vector, all others from another."""
        word = mask * 0x0101
        return self.b.or_(self.masked(low, word), self.masked(high, 0xFFFF ^ word))

    def both_bytes(self, values: range | tuple[int, ...], index: Any) -> tuple[Any, Any]:
        """The values of the codes that are lowest in the even bytes, and in the odd ones.

        Consecutive values, whose number is a power of two, are computed, and 16 others are looked up.
        """
        if isinstance(values, range):
            even, odd = (self.masked(word, len(values) - 1) for word in (index, self.right(index, 8)))
            return self.minus(even, -values.start), self.minus(odd, -values.start)
        table = ir.Constant(ir.VectorType(I8, 16), [value & 255 for value in values])
        return _integers.looked_up_words(self.emit, table, self.masked(index, 0x0F0F))

    def minus(self, words: Any, value: int) -> Any:
        return self._by(self.b.sub, words, value) if value else words

    # Scales.

    def half(self, offset: int) -> Any:
        """A float32 from a float16."""
        raw = self.emit.load(self.emit.add(self.base, offset), ir.HalfType(), 1)
        return self.b.fpext(raw, F32)

    def lanes(self, *scalars: Any) -> Any:
        """16 float32, an equal share of consecutive lanes for each scalar."""
        share = 16 // len(scalars)
        vectors = [self.emit.spread(scalar) for scalar in scalars]
        result = vectors[0]
        for index, vector in enumerate(vectors[1:], 1):
            order = [16 + lane if lane // share == index else lane for lane in range(16)]
            result = self.emit.pick(result, vector, order)
        return result

    def floats(self, ints: Any, *, signed: bool = False) -> Any:
        """16 float32 from bytes or ints."""
        if ints.type.element.width < 32:
            ints = (self.b.sext if signed else self.b.zext)(ints, self.emit.ints)
        return self.b.sitofp(ints, self.emit.floats)

    def ints(self, offset: int, bits: int, count: int, order: Any) -> Any:
        """Ints of 32 bits from consecutive shorter ones, in an order."""
        picked = self.pick(self.load(offset, bits, count), order)
        return picked if bits == 32 else self.b.zext(picked, ir.VectorType(I32, picked.type.count))


def _each(first: int, count: int) -> list[int]:
    """Lanes of `count` consecutive scales, which share 16 lanes equally."""
    return [first + lane * count // 16 for lane in range(16)]


Emitted = tuple[Iterator[IntegerPart], Any]


def _two_blocks(scheme: str, values: range | tuple[int, ...]) -> Callable[[_StepInMemory], Emitted]:
    """Two blocks of a scale, in some types a minimum and 32 fifth bits, and 16 bytes."""
    nbytes = BLOCK_TYPES[scheme].nbytes
    has_minimum, has_fifth = scheme.endswith("1"), scheme.startswith("Q5")

    def emitted(step: _StepInMemory) -> Emitted:
        def both(offset: int, count: int) -> Any:
            """Words at an offset in each block, one after the other."""
            return step.emit.joined(*(step.load(block + offset, 16, count) for block in (0, nbytes)))

        low = both(nbytes - 16, 8)
        index = step.emit.joined(low, step.right(low, 4))
        if has_fifth:
            # bits 0 to 15 of a block are those of lower halves, of which a word has two; AVX2 has no shifts by lane
            bits = both(nbytes - 20, 2)
            bits = step.pick(bits, [2 * (lane // 8 % 2) + lane // 16 for lane in range(32)])
            words = []
            for odd in range(2):
                own = step.masked(bits, [1 << (2 * (lane % 8) + odd) for lane in range(32)])
                is_clear = step.b.icmp_unsigned("==", own, ir.Constant(WORDS, [0] * 32))
                fifth = step.b.select(is_clear, ir.Constant(WORDS, [0] * 32), ir.Constant(WORDS, [16] * 32))
                code = step.b.or_(step.masked(step.right(index, 8 * odd), 15), fifth)
                words.append(step.minus(code, 16 if scheme == "Q5_0" else 0))
        else:
            words = [*step.both_bytes(values, index)]

        def scales(offset: int) -> list[Any]:
            if scheme == "MXFP4":
                # half the powers, since the table has twice the values
                exponents = (step.emit.load(step.emit.add(step.base, block + offset), I8, 1) for block in (0, nbytes))
                return [half_power(step.b, step.b.zext(exponent, I32)) for exponent in exponents]
            return [step.half(block + offset) for block in (0, nbytes)]

        least = None
        if has_minimum:
            least = step.b.fneg(step.pick(step.lanes(*scales(2)), [0, 8] * 8))
        return iter([IntegerPart(tuple(words), step.lanes(*scales(0) * 2))]), least

    return emitted


def _q8_0(step: _StepInMemory) -> Emitted:
    words = []
    for half in range(2):
        codes = step.emit.joined(*(step.load(block + 2 + 16 * half, 8, 16) for block in (0, 34)))
        words.append(step.b.sext(codes, WORDS))
    return iter([IntegerPart(tuple(words), step.lanes(step.half(0), step.half(34)))]), None


def _tq2_0(step: _StepInMemory) -> Emitted:
    scale, index = step.lanes(step.half(64)), step.codes(0)
    words = [step.both_bytes(range(-1, 3), step.right(index, 2 * part)) for part in range(4)]
    return iter([IntegerPart(tuple(word for pair in words for word in pair), scale)]), None


def _iq4_xs(step: _StepInMemory) -> Emitted:
    low = step.right(step.ints(4, 32, 1, [0] * 16), [4 * (lane % 8) for lane in range(16)])
    high = step.right(step.ints(2, 16, 1, [0] * 16), [2 * (lane % 8) for lane in range(16)])
    factors = step.b.or_(step.masked(low, 15), step.left(step.masked(high, 3), 4))
    factors = step.b.sub(factors, step.emit.every(32))
    scales = step.b.fmul(step.lanes(step.half(0)), step.floats(factors))

    def decoded() -> Iterator[IntegerPart]:
        for z in range(2):
            index = step.codes(8 + 64 * z)
            words = [*step.both_bytes(IQ4_VALUES, index), *step.both_bytes(IQ4_VALUES, step.right(index, 4))]
            yield IntegerPart(tuple(words), step.pick(scales, _each(4 * z, 4)))

    return decoded(), None


def _six_bit_scales(step: _StepInMemory) -> Any:
    """The minima of 8 groups and then their scales, from the block's first 16 bytes; see `_gguf_decoders._six_bits`."""
    fields = step.load(0, 32, 4)  # float16; factors 0 to 3 with upper bits of 4 to 7: of scales, of minima; lower bits
    low = step.masked(step.right(step.pick(fields, [2, 3, 1, 3]), [0, 4, 0, 0]), [0x3F3F3F3F, 0x0F0F0F0F] * 2)
    high = step.masked(step.right(step.pick(fields, [2, 2, 1, 1]), 2), [0, 0x30303030] * 2)
    factors = step.b.bitcast(step.b.or_(low, high), ir.VectorType(I8, 16))
    return step.b.fmul(step.lanes(step.half(2), step.half(0)), step.floats(factors))


def _q4_k(step: _StepInMemory, *, has_fifth: bool = False) -> Emitted:
    scales, fifth = _six_bit_scales(step), step.twice(16) if has_fifth else None

    def decoded() -> Iterator[IntegerPart]:
        for z in range(2):
            low = step.codes((48 if has_fifth else 16) + 64 * z)
            for high in range(2):
                index, first = step.right(low, 4 * high), 4 * z + high
                if fifth is not None:
                    groups = [first] * 16 + [first + 2] * 16  # whose bits become the lowest of upper halves
                    shift = step.right if z else step.left
                    index = step.merged(index, shift(fifth, [abs(group - 4) for group in groups]), 15)
                words = step.both_bytes(range(32 if has_fifth else 16), index)
                # a group and the next but one, whose codes are in one vector
                yield IntegerPart(words, step.pick(scales, [8 + first] * 8 + [8 + first + 2] * 8))

    return decoded(), scales


def _q6_k(step: _StepInMemory) -> Emitted:
    scales = step.b.fmul(step.lanes(step.half(208)), step.floats(step.load(192, 8, 16), signed=True))

    def decoded() -> Iterator[IntegerPart]:
        for half in range(2):
            low, upper = step.codes(64 * half), step.twice(128 + 32 * half)
            for high in range(2):
                moved = step.right(upper, [0] * 16 + [2] * 16) if high else step.left(upper, [4] * 16 + [2] * 16)
                index = step.merged(step.right(low, 4 * high), moved, 15)
                words = step.both_bytes(range(-32, 32), index)
                yield IntegerPart(words, step.pick(scales, _each(8 * half + 4 * high, 4)))

    return decoded(), None


def _quarters(scales: Any, step: _StepInMemory, part: int) -> Any:
    """Scales of groups of 16 of two halves of a block: those of the pairs `number` and `number + 4`."""
    return step.pick(scales, [8 * (lane // 8) + 2 * part + lane // 4 % 2 for lane in range(16)])


def _q2_k(step: _StepInMemory) -> Emitted:
    both = step.load(0, 8, 16)
    scales = step.b.fmul(step.lanes(step.half(80)), step.floats(step.masked(both, 15)))
    minima = step.b.fmul(step.lanes(step.half(82)), step.floats(step.right(both, 4)))

    def decoded() -> Iterator[IntegerPart]:
        index = step.codes(16)
        for part in range(4):
            words = step.both_bytes(range(4), step.right(index, 2 * part))
            yield IntegerPart(words, _quarters(scales, step, part))

    return decoded(), minima


def _q3_k(step: _StepInMemory) -> Emitted:
    low = step.right(step.ints(96, 8, 8, [*range(8)] * 2), [0] * 8 + [4] * 8)
    high = step.right(step.ints(104, 8, 4, [*range(4)] * 4), [lane // 4 * 2 for lane in range(16)])
    factors = step.b.or_(step.masked(low, 15), step.left(step.masked(high, 3), 4))
    factors = step.b.sub(factors, step.emit.every(32))
    scales = step.b.fmul(step.lanes(step.half(108)), step.floats(factors))

    def decoded() -> Iterator[IntegerPart]:
        index, third = step.codes(32), step.right(step.twice(0), [0] * 16 + [4] * 16)
        for part in range(4):
            moved = step.left(third, 2 - part) if part < 2 else step.right(third, part - 2)
            words = step.both_bytes(range(-4, 4), step.merged(step.right(index, 2 * part), moved, 3))
            yield IntegerPart(words, _quarters(scales, step, part))

    return decoded(), None


_EMITTED: Mapping[str, Callable[[_StepInMemory], Emitted]] = {
    "Q4_0": _two_blocks("Q4_0", range(-8, 8)),
    "Q4_1": _two_blocks("Q4_1", range(16)),
    "Q5_0": _two_blocks("Q5_0", range(-16, 16)),
    "Q5_1": _two_blocks("Q5_1", range(32)),
    "Q8_0": _q8_0,
    "IQ4_NL": _two_blocks("IQ4_NL", IQ4_VALUES),
    "MXFP4": _two_blocks("MXFP4", FP4_VALUES),
    "IQ4_XS": _iq4_xs,
    "TQ2_0": _tq2_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": functools.partial(_q4_k, has_fifth=True),
    "Q6_K": _q6_k,
}
