"""Blocks of GGUF files times bfloat16, for processors that multiply pairs of bfloat16 (VDPBF16PS).

A code is an integer that bfloat16 represents exactly, so 32 codes are looked up by one instruction (VPERMW) and
multiplied with 32 inputs by another, where float32 needs six for them. The products are exact, and their sums float32.

A vector has 64 bytes of codes, taken as 32 words: in a word the codes of two bytes lie one above the other, and each is
the index of a lookup once the word is shifted so that it is lowest. So no byte is widened, and the inputs are brought
into the order in which codes come out.

The scales of a block are decoded as one vector too. The minima are multiplied with the sums of the inputs of their
groups by a single instruction; the sums are the same for all rows.

`LAYOUTS` says how the inputs are ordered, and `parts` emits the code for the same types. Loops are in
`_block_kernels.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant._gguf_decoders import IQ4_VALUES

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PairLayout:
    """The order of the inputs of a step, which is one block or some.

    Attributes:
        step: elements.
        sizes: the digits of an element's number, the most significant first.
        order: the digits that an input's place has, by their numbers in `sizes`.
        group: elements for whose sum there is a lane of minima; 0 if there are no minima.
    """

    step: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    group: int = 0

    @property
    def groups(self) -> int:
        """Sums of a step's inputs, one for each lane of minima; 0 if there are none."""
        return self.step // self.group if self.group else 0

    @functools.cached_property
    def _strides(self) -> tuple[int, ...]:
        """Elements from one value of a digit to the next, in the order of the inputs."""
        strides = [math.prod(self.sizes[digit + 1 :]) for digit in range(len(self.sizes))]
        return tuple(strides[digit] for digit in self.order)

    @functools.cached_property
    def _counts(self) -> tuple[int, ...]:
        return tuple(self.sizes[digit] for digit in self.order)

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of bfloat16 (T, K), each without gaps, in this order."""
        count, columns = x.shape
        steps = columns // self.step
        # one view instead of two: half of the time that so few elements take
        return x.as_strided((count, steps, *self._counts), (x.stride(0), self.step, *self._strides)).contiguous()

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """The sums of the groups: float32 (T, steps, groups)."""
        import torch

        return x.view(len(x), x.shape[1] // self.group, self.group).sum(-1, dtype=torch.float32)


# a nibble's half, then low and high nibbles apart; of each word the even and the odd byte
_FOUR_BLOCKS = PairLayout(128, (4, 2, 8, 2), (1, 3, 0, 2))
_FOUR_BLOCKS_AND_SUMS = PairLayout(128, _FOUR_BLOCKS.sizes, _FOUR_BLOCKS.order, 8)
_FOUR_GROUPS = PairLayout(256, (2, 4, 2, 8, 2), (0, 2, 4, 1, 3))
_NIBBLES = PairLayout(256, (2, 2, 2, 16, 2), (0, 2, 4, 1, 3), 32)
_SIX_BITS = PairLayout(256, (2, 2, 2, 16, 2), (0, 1, 4, 2, 3))
_TWO_BITS = PairLayout(256, (2, 4, 16, 2), (1, 3, 0, 2))

LAYOUTS: Mapping[str, PairLayout] = {
    "Q4_0": _FOUR_BLOCKS,
    "Q4_1": _FOUR_BLOCKS_AND_SUMS,
    "Q5_0": _FOUR_BLOCKS,
    "Q5_1": _FOUR_BLOCKS_AND_SUMS,
    "IQ4_NL": _FOUR_BLOCKS,
    "IQ4_XS": _FOUR_GROUPS,
    "Q2_K": PairLayout(256, _TWO_BITS.sizes, _TWO_BITS.order, 16),
    "Q3_K": _TWO_BITS,
    "Q4_K": _NIBBLES,
    "Q5_K": _NIBBLES,
    "Q6_K": _SIX_BITS,
}
"""The types that have such a kernel."""


class PairPart(NamedTuple):
    """Codes whose products are summed in the lanes of one vector before their scales are applied.

    Attributes:
        words: vectors of 32 bfloat16, as words.
        scale: of each lane, float32.
    """

    words: tuple[Any, ...]
    scale: Any


def parts(emit: Any, scheme: str, base: Any) -> tuple[Iterator[PairPart], Any]:
    """The parts of the step at an address, in the order of the inputs, and the minima or None.

    The minima are 16 float32, of which there may be more than groups.
    """
    step = _StepInMemory(emit, base)
    return _EMITTED[scheme](step)


def _words(values: Any) -> list[int]:
    """Integers as the bits of bfloat16, which has all up to 256."""
    return [int(bits >> 16) for bits in np.array(values, np.float32).view(np.uint32)]


class _StepInMemory:
    """Shorthand over an `Emitter` for the bytes of a step."""

    def __init__(self, emit: Any, base: Any) -> None:
        from llvmlite import ir

        self.emit, self.b, self.ir, self._base = emit, emit.b, ir, base

    # Vectors.

    def kind(self, bits: int, count: int) -> Any:
        return self.ir.VectorType(self.ir.IntType(bits), count)

    def constant(self, bits: int, values: Any) -> Any:
        return self.ir.Constant(self.kind(bits, len(values)), list(values))

    def load(self, offset: int, bits: int, count: int) -> Any:
        return self.emit.load(self.emit.add(self._base, offset), self.kind(bits, count), 1)

    def pick(self, vector: Any, order: Any) -> Any:
        return self.b.shuffle_vector(vector, vector, self.constant(32, order))

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
        return operation(vector, self.constant(vector.type.element.width, values))

    def merged(self, low: Any, high: Any, mask: int) -> Any:
        """The bits of `mask` in each byte of words from one vector, all others from another."""
        word = mask * 0x0101
        return self.b.or_(self.masked(low, word), self.masked(high, 0xFFFF ^ word))

    def look_up(self, values: Any, index: Any) -> Any:
        """Words of a table by the lowest bits of words: 4 or 5 of them, or 6 for 64 values."""
        words = self.kind(16, 32)
        bits = _words(values)
        if len(bits) == 64:
            permute = self.emit.function("llvm.x86.avx512.vpermi2var.hi.512", words, words, words, words)
            return self.b.call(permute, [self.constant(16, bits[:32]), index, self.constant(16, bits[32:])])
        table = self.constant(16, bits * (32 // len(bits)))
        return self.b.call(self.emit.function("llvm.x86.avx512.permvar.hi.512", words, words, words), [table, index])

    def both_bytes(self, values: Any, index: Any) -> tuple[Any, Any]:
        """The values of the codes that are lowest in the even bytes, and in the odd ones."""
        return self.look_up(values, index), self.look_up(values, self.right(index, 8))

    # Scales.

    def halves(self, offset: int, order: list[int]) -> Any:
        """16 float32 from one or two float16."""
        half = self.ir.VectorType(self.ir.HalfType(), max(order) + 1)
        loaded = self.emit.load(self.emit.add(self._base, offset), half, 1)
        return self.b.fpext(self.pick(loaded, order), self.emit.floats)

    def floats(self, ints: Any, *, signed: bool = False) -> Any:
        """16 float32 from bytes or ints."""
        if ints.type.element.width < 32:
            ints = (self.b.sext if signed else self.b.zext)(ints, self.emit.ints)
        return self.b.sitofp(ints, self.emit.floats)

    def times(self, a: Any, b: Any) -> Any:
        return self.b.fmul(a, b)

    def ints(self, offset: int, bits: int, count: int, order: Any) -> Any:
        """Ints of 32 bits from consecutive shorter ones, in an order."""
        picked = self.pick(self.load(offset, bits, count), order)
        return picked if bits == 32 else self.b.zext(picked, self.kind(32, picked.type.count))


def _each(first: int, count: int) -> list[int]:
    """Lanes of `count` consecutive scales, which share 16 lanes equally."""
    return [first + lane * count // 16 for lane in range(16)]


def _four_blocks(scheme: str, values: Any) -> Callable[[_StepInMemory], tuple[Iterator[PairPart], Any]]:
    """Four blocks of a scale, in some types a minimum and 32 fifth bits, and 16 bytes."""
    words = BLOCK_TYPES[scheme].nbytes // 2
    before = words - 8  # words of a block before its codes
    end = 4 * words - 32  # of the first word of the last 32
    minimum, fifth = scheme.endswith("1"), scheme.startswith("Q5")

    def emitted(step: _StepInMemory) -> tuple[Iterator[PairPart], Any]:
        first, last = step.codes(0), step.codes(2 * end)

        def of_blocks(places: list[int]) -> Any:
            """Words at their places in the step."""
            order = step.constant(32, [place if place < 32 else 32 + place - end for place in places])
            return step.b.shuffle_vector(first, last, order)

        def halves(word: int) -> Any:
            raw = of_blocks([lane // 4 * words + word for lane in range(16)])
            half = step.ir.VectorType(step.ir.HalfType(), 16)
            return step.b.fpext(step.b.bitcast(raw, half), step.emit.floats)

        low = of_blocks([place // 8 * words + before + place % 8 for place in range(32)])
        pairs: list[Any] = []
        for high in range(2):
            index = step.right(low, 4 * high)
            if not fifth:
                pairs += step.both_bytes(values, index)
                continue
            # two bits for each word, of which the lower is that of the even byte
            bits = of_blocks([lane // 8 * words + before - 2 + high for lane in range(32)])
            bits = step.right(bits, [2 * (lane % 8) for lane in range(32)])
            pairs.append(step.look_up(values, step.merged(index, step.left(bits, 4), 15)))
            pairs.append(step.look_up(values, step.merged(step.right(index, 8), step.left(bits, 3), 15)))
        # each minimum has four lanes, which meet the sums of a quarter of the inputs each
        least = step.emit.b.fneg(halves(1)) if minimum else None
        return iter([PairPart(tuple(pairs), halves(0))]), least

    return emitted


def _iq4_xs(step: _StepInMemory) -> tuple[Iterator[PairPart], Any]:
    low = step.right(step.ints(4, 32, 1, [0] * 16), [4 * (lane % 8) for lane in range(16)])
    high = step.right(step.ints(2, 16, 1, [0] * 16), [2 * (lane % 8) for lane in range(16)])
    factors = step.b.or_(step.masked(low, 15), step.left(step.masked(high, 3), 4))
    factors = step.b.sub(factors, step.emit.every(32))
    scales = step.times(step.halves(0, [0] * 16), step.floats(factors))

    def found() -> Iterator[PairPart]:
        for z in range(2):
            index = step.codes(8 + 64 * z)
            words = [*step.both_bytes(IQ4_VALUES, index), *step.both_bytes(IQ4_VALUES, step.right(index, 4))]
            yield PairPart(tuple(words), step.pick(scales, _each(4 * z, 4)))

    return found(), None


def _six_bit_scales(step: _StepInMemory) -> Any:
    """The minima of 8 groups and then their scales, from the block's first 16 bytes; see `_gguf_decoders._six_bits`."""
    fields = step.load(0, 32, 4)  # float16; factors 0 to 3 with upper bits of 4 to 7: of scales, of minima; lower bits
    low = step.masked(step.right(step.pick(fields, [2, 3, 1, 3]), [0, 4, 0, 0]), [0x3F3F3F3F, 0x0F0F0F0F] * 2)
    high = step.masked(step.right(step.pick(fields, [2, 2, 1, 1]), 2), [0, 0x30303030] * 2)
    factors = step.b.bitcast(step.b.or_(low, high), step.kind(8, 16))
    return step.times(step.halves(0, [1] * 8 + [0] * 8), step.floats(factors))


def _pair_of_groups(first: int) -> list[int]:
    """Lanes of the scales of a group and of the next but one, whose codes are in one vector."""
    return [8 + first] * 8 + [8 + first + 2] * 8


def _q4_k(step: _StepInMemory) -> tuple[Iterator[PairPart], Any]:
    scales = _six_bit_scales(step)

    def found() -> Iterator[PairPart]:
        for z in range(2):
            index = step.codes(16 + 64 * z)
            for high in range(2):
                words = step.both_bytes(range(16), step.right(index, 4 * high))
                yield PairPart(words, step.pick(scales, _pair_of_groups(4 * z + high)))

    return found(), scales


def _q5_k(step: _StepInMemory) -> tuple[Iterator[PairPart], Any]:
    scales, fifth = _six_bit_scales(step), step.twice(16)

    def found() -> Iterator[PairPart]:
        for z in range(2):
            low = step.codes(48 + 64 * z)
            for high in range(2):
                groups = [4 * z + high] * 16 + [4 * z + high + 2] * 16  # whose bits become the lowest of upper halves
                moved = (
                    step.right(fifth, [group - 4 for group in groups])
                    if z
                    else step.left(fifth, [4 - group for group in groups])
                )
                index = step.merged(step.right(low, 4 * high), moved, 15)
                yield PairPart(step.both_bytes(range(32), index), step.pick(scales, _pair_of_groups(4 * z + high)))

    return found(), scales


def _q6_k(step: _StepInMemory) -> tuple[Iterator[PairPart], Any]:
    scales = step.times(step.halves(208, [0] * 16), step.floats(step.load(192, 8, 16), signed=True))

    def found() -> Iterator[PairPart]:
        for half in range(2):
            low, upper = step.codes(64 * half), step.twice(128 + 32 * half)
            for high in range(2):
                moved = step.right(upper, [0] * 16 + [2] * 16) if high else step.left(upper, [4] * 16 + [2] * 16)
                index = step.merged(step.right(low, 4 * high), moved, 15)
                words = step.both_bytes(range(-32, 32), index)
                yield PairPart(words, step.pick(scales, _each(8 * half + 4 * high, 4)))

    return found(), None


def _quarters(scales: Any, step: _StepInMemory, part: int) -> Any:
    """Scales of groups of 16 of two halves of a block: those of the pairs `number` and `number + 4`."""
    return step.pick(scales, [8 * (lane // 8) + 2 * part + lane // 4 % 2 for lane in range(16)])


def _q2_k(step: _StepInMemory) -> tuple[Iterator[PairPart], Any]:
    both = step.load(0, 8, 16)
    scales = step.times(step.halves(80, [0] * 16), step.floats(step.masked(both, 15)))
    minima = step.times(step.halves(82, [0] * 16), step.floats(step.right(both, 4)))

    def found() -> Iterator[PairPart]:
        index = step.codes(16)
        for part in range(4):
            words = step.both_bytes(range(4), step.right(index, 2 * part))
            yield PairPart(words, _quarters(scales, step, part))

    return found(), minima


def _q3_k(step: _StepInMemory) -> tuple[Iterator[PairPart], Any]:
    low = step.right(step.ints(96, 8, 8, [*range(8)] * 2), [0] * 8 + [4] * 8)
    high = step.right(step.ints(104, 8, 4, [*range(4)] * 4), [lane // 4 * 2 for lane in range(16)])
    factors = step.b.or_(step.masked(low, 15), step.left(step.masked(high, 3), 4))
    factors = step.b.sub(factors, step.emit.every(32))
    scales = step.times(step.halves(108, [0] * 16), step.floats(factors))

    def found() -> Iterator[PairPart]:
        index, third = step.codes(32), step.right(step.twice(0), [0] * 16 + [4] * 16)
        for part in range(4):
            moved = step.left(third, 2 - part) if part < 2 else step.right(third, part - 2)
            # the lookup heeds five bits, of which two are others'
            eight = [value - 4 for value in range(8)] * 4
            words = step.both_bytes(eight, step.merged(step.right(index, 2 * part), moved, 3))
            yield PairPart(words, _quarters(scales, step, part))

    return found(), None


_EMITTED: Mapping[str, Callable[[_StepInMemory], tuple[Iterator[PairPart], Any]]] = {
    "Q4_0": _four_blocks("Q4_0", range(-8, 8)),
    "Q4_1": _four_blocks("Q4_1", range(16)),
    "Q5_0": _four_blocks("Q5_0", range(-16, 16)),
    "Q5_1": _four_blocks("Q5_1", range(32)),
    "IQ4_NL": _four_blocks("IQ4_NL", IQ4_VALUES),
    "IQ4_XS": _iq4_xs,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
