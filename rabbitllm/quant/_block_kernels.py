"""Kernels for blocks of GGUF files: the tables of `_block_formats.py` as code for vectors.

They are those of `_product_kernels.py`. By codes, minima are multiplied by the sums of the inputs, which are the same
for all rows. Numbers have the bits of `gguf_blocks.dequantize`.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant import _integers, _product_kernels
from rabbitllm.quant._block_formats import FORMATS, BlockFormat, Field, Fields
from rabbitllm.quant._integers import WORDS, CodeSteps, InputLayout, Position, Products
from rabbitllm.quant._kernel_interface import BFLOATS, CODES
from rabbitllm.quant._vectors import F32, I8, I16, I32, Emitter, emitted, every, features, half_power, narrowed, number


def kernel(method: str, scheme: str, width: int) -> Callable[[Any], None]:
    """As `_product_kernels.kernel`, by any method, `NUMBERS` too; the scheme is a key of `FORMATS`."""
    if method == CODES:
        least = _product_kernels.LEAST_SLOW if scheme == "Q8_0" else _product_kernels.LEAST_WIDE
        steps = functools.partial(_BlockSteps, scheme)
        return _product_kernels.code_kernel(f"{method}_{scheme}_{width}", steps, width, least, rows=1)
    nbytes = _product_kernels.step_size(method, width)
    return _product_kernels.rows_kernel(f"{method}_{scheme}_{width}", _fill(method, scheme, width), nbytes)


# Numbers.


def halves_of(emit: Emitter, form: BlockFormat, base: Any) -> list[Any]:
    """The scale and, where there is one, the minimum of the block at an address, float32."""
    if not form.halves:
        return [half_power(emit, base)]
    return [emit.b.fpext(emit.load(emit.add(base, offset), ir.HalfType(), 1), F32) for offset in form.halves]


def _times(emit: Emitter, scale: Any, base: Any, fields: Sequence[Field], least: int) -> Any:
    """A scale times the number that fields have."""
    b, factor = emit.b, ir.Constant(I32, least)
    for offset, shift, bits, first in fields:
        byte = emit.load(emit.add(base, offset), I8, 1)
        if bits == 8:
            part = b.sext(byte, I32)
        else:
            part = b.and_(b.lshr(b.zext(byte, I32), ir.Constant(I32, shift)), ir.Constant(I32, (1 << bits) - 1))
        factor = b.add(factor, b.shl(part, ir.Constant(I32, first)))
    return b.fmul(scale, b.sitofp(factor, F32))


def codes_of(emit: Emitter, form: BlockFormat, load: Callable[[int, ir.Type], Any], begin: int) -> Any:
    """The codes of a run of elements, or their values, bytes; `load` loads from an offset in the block."""
    b, run, codes = emit.b, ir.VectorType(I8, form.run), None
    for plane in form.planes:
        offset, shift = plane.at(begin)
        if plane.run:
            some = b.lshr(load(offset, run), every(run, shift)) if shift else load(offset, run)
            some = b.and_(some, every(run, (1 << plane.bits) - 1)) if shift + plane.bits < 8 else some
        else:
            some = b.zext(b.bitcast(load(offset, I16), ir.VectorType(ir.IntType(1), form.run)), run)
        some = b.shl(some, every(run, plane.first)) if plane.first else some
        codes = some if codes is None else b.or_(codes, some)
    if form.values:
        shuffle = emit.function("llvm.x86.ssse3.pshuf.b.128", run, run, run)
        return b.call(shuffle, [ir.Constant(run, [value & 255 for value in form.values]), codes])
    return b.sub(codes, every(run, -form.least)) if form.least else codes


def scale_and_minimum(emit: Emitter, form: BlockFormat, base: Any, halves: list[Any], group: int) -> list[Any]:
    """The scale of a group and, where there is one, its minimum, which is subtracted."""
    scale, *least = halves
    if form.factors:
        scale = _times(emit, scale, base, form.factors[group], form.least_factor)
    if least:
        least = [_times(emit, least[0], base, form.minima[group], 0) if form.minima else emit.b.fneg(least[0])]
    return [scale, *least]


@contextmanager
def each_block(emit: Emitter, scheme: str, codes: Any, row_bytes: Any, *part: Any) -> Iterator[tuple[Any, ...]]:
    """A loop over the blocks of a part of a row, which is given as the row, its first step, the number of steps, and
    the elements of a step. Gives a block's number and address, its scale and minimum, and what loads from an offset."""
    b, block, (row, first, steps, elements) = emit.b, BLOCK_TYPES[scheme], part
    first, count = (b.udiv(b.mul(step, number(elements)), number(block.elements)) for step in (first, steps))
    start = emit.add(codes, b.mul(row, row_bytes), b.mul(first, number(block.nbytes)))
    with emit.loop(count) as index:
        base = emit.add(start, b.mul(index, number(block.nbytes)))
        # what is loaded again after a store, LLVM loads again
        load = functools.cache(lambda offset, ir_type: emit.load(emit.add(base, offset), ir_type, 1))
        yield index, base, halves_of(emit, FORMATS[scheme], base), load


def _fill(method: str, scheme: str, width: int) -> Any:
    """See `_product_kernels._fill`; a step is two vectors of elements. Scales, table and shift are unused."""
    block, form = BLOCK_TYPES[scheme], FORMATS[scheme]
    size = 2 if method == BFLOATS else 4

    def fill(emit, codes, scales, table, panel, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
        builder, part = emit.b, (row, first, steps, 2 * width)
        with each_block(emit, scheme, codes, row_bytes, *part) as (index, base, halves, load):
            place = emit.add(panel, builder.mul(index, number(block.elements * size)))
            for element in range(0, block.elements, width):
                if element % form.run == 0:
                    codes_of_run = codes_of(emit, form, load, element)
                if element % form.group == 0:
                    scale, *least = map(emit.spread, scale_and_minimum(emit, form, base, halves, element // form.group))
                begin = element % form.run
                few = emit.pick(codes_of_run, codes_of_run, range(begin, begin + width))
                value = builder.fmul(builder.sitofp(builder.sext(few, emit.ints), emit.floats), scale)
                value = builder.fsub(value, *least) if least else value
                if method == BFLOATS:
                    bits = builder.lshr(narrowed(builder, builder.bitcast(value, emit.ints)), emit.every(16))
                    value = builder.trunc(bits, ir.VectorType(I16, width))
                emit.store(value, emit.add(place, size * element), size)

    return emitted(fill, width)


# Codes as integers. A vector has 64 bytes of codes, taken as 32 words: in a word the codes of two bytes lie one above
# the other, and each is a word of its own once it is shifted so that it is lowest, and other bits are cleared. So no
# byte is widened, and the inputs are brought into the order in which codes come out. The scales of a block are decoded
# as one vector too. The minima are multiplied with the sums of the inputs of their groups by one instruction.

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


class _StepInMemory:
    """Shorthand over an `Emitter` for the bytes of a step."""

    def __init__(self, emit: Emitter, base: Any) -> None:
        self.emit, self.b, self.base = emit, emit.b, base

    # Vectors.

    def load(self, offset: int, bits: int, count: int) -> Any:
        return self.emit.load(self.emit.add(self.base, offset), ir.VectorType(ir.IntType(bits), count), 1)

    def pick(self, vector: Any, order: Any) -> Any:
        return self.emit.pick(vector, vector, order)

    def right(self, vector: Any, counts: Any) -> Any:
        return self._by(self.b.lshr, vector, counts)

    def left(self, vector: Any, counts: Any) -> Any:
        return self._by(self.b.shl, vector, counts)

    def moved(self, vector: Any, low: int, high: int) -> Any:
        """Words shifted right, the lower half by `low` and the upper one by `high`; left if these are negative."""
        if low < 0 < high:
            return self.left(self.right(vector, [0] * 16 + [high - low] * 16), -low)
        shift = self.left if min(low, high) < 0 else self.right
        return shift(vector, [abs(low)] * 16 + [abs(high)] * 16)

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
        return self._by(self.b.sub, words, value)

    # Scales.

    def halves(self, *offsets: int) -> Any:
        """16 float32, an equal share of consecutive lanes for each float16.

        These are converted as vectors: for a single one LLVM takes a register of sums, for which each step waits.
        """
        lanes, share = [], 16 // len(offsets)
        for offset in offsets:
            begin = offset if offset < 64 else offset - 6  # a scale after the codes ends the step
            half = self.b.bitcast(self.load(begin, 16, 4), ir.VectorType(ir.HalfType(), 4))
            few = self.b.fpext(half, ir.VectorType(F32, 4))
            lanes.append(self.pick(few, [(offset - begin) // 2] * share))
        return self.emit.joined(*lanes)

    def factors(self, fields: Fields, least: int) -> Any:
        """The numbers of all groups, which have as many fields each, as 16 float32; of 8 groups twice."""
        total = self.emit.every(least)
        for part in zip(*fields, strict=True):
            first, last = part[0].offset, part[-1].offset
            lanes = [part[lane % len(part)] for lane in range(16)]
            some = self.pick(self.load(first, 8, last - first + 1), [field.offset - first for field in lanes])
            if part[0].bits == 8:
                ints = self.b.sext(some, self.emit.ints)
            else:
                ints = self.right(self.b.zext(some, self.emit.ints), [field.shift for field in lanes])
                ints = self.left(self.masked(ints, (1 << part[0].bits) - 1), part[0].first)
            total = self.b.add(total, ints)
        return self.b.sitofp(total, self.emit.floats)


Emitted = tuple[Iterator[tuple[Sequence[Any], Any]], Any]
"""Vectors of words whose products are summed before a scale of each of 16 lanes is applied, and that, in the order of
the inputs; and 16 minima, of which there may be more than groups, or None."""


def _values(form: BlockFormat) -> range | tuple[int, ...]:
    """The values of all codes."""
    return form.values or range(form.least, form.least + (1 << sum(plane.bits for plane in form.planes)))


def _two_blocks(scheme: str) -> Callable[[_StepInMemory], Emitted]:
    """Two blocks of a scale, in some types a minimum and 32 fifth bits, and 16 bytes."""
    nbytes, form = BLOCK_TYPES[scheme].nbytes, FORMATS[scheme]
    values, (low_bits, *fifth_bits) = _values(form), form.planes

    def emitted(step: _StepInMemory) -> Emitted:
        def both(offset: int, count: int) -> Any:
            """Words at an offset in each block, one after the other."""
            return step.emit.joined(*(step.load(block + offset, 16, count) for block in (0, nbytes)))

        low = both(low_bits.offset, 8)
        index = step.emit.joined(low, step.right(low, 4))
        words = [] if fifth_bits else [*step.both_bytes(values, index)]
        for plane in fifth_bits:
            # bits 0 to 15 of a block are those of lower halves, of which a word has two; AVX2 has no shifts by lane
            bits = both(plane.offset, 2)
            bits = step.pick(bits, [2 * (lane // 8 % 2) + lane // 16 for lane in range(32)])
            for odd in range(2):
                own = step.masked(bits, [1 << (2 * (lane % 8) + odd) for lane in range(32)])
                is_clear = step.b.icmp_unsigned("==", own, every(WORDS, 0))
                fifth = step.b.select(is_clear, every(WORDS, 0), every(WORDS, 16))
                code = step.b.or_(step.masked(step.right(index, 8 * odd), 15), fifth)
                words.append(step.minus(code, -form.least))
        starts = 0, nbytes
        if form.halves:
            scales, *minima = (step.halves(*(start + offset for start in starts)) for offset in form.halves)
        else:
            powers = (half_power(step.emit, step.emit.add(step.base, start)) for start in starts)
            scales, minima = step.emit.joined(*(step.emit.spread(power, 8) for power in powers)), []
        least = step.b.fneg(step.pick(minima[0], [0, 8] * 8)) if minima else None
        return iter([(words, step.pick(scales, [0, 0, 0, 0, 8, 8, 8, 8] * 2))]), least

    return emitted


def _q8_0(step: _StepInMemory) -> Emitted:
    words = []
    for half in range(2):
        codes = step.emit.joined(*(step.load(block + 2 + 16 * half, 8, 16) for block in (0, 34)))
        words.append(step.b.sext(codes, WORDS))
    return iter([(words, step.halves(0, 34))]), None


def _super_block(scheme: str) -> Callable[[_StepInMemory], Emitted]:
    """A block of 256."""
    form, low, values = FORMATS[scheme], FORMATS[scheme].planes[0], _values(FORMATS[scheme])
    groups = (LAYOUTS[scheme].elements[::2] // form.group).reshape(-1, 16).tolist()  # of each lane of products
    run = 16 * low.run

    def words(step: _StepInMemory) -> Iterator[Any]:
        for begin in range(0, 32 * low.bits, 64):
            stored = step.load(low.offset + begin, 16, 32)
            for part in range(8 // low.bits):
                index = step.right(stored, low.bits * part)
                for plane in form.planes[1:]:
                    firsts = ((begin + half) // run * run * 8 // low.bits + part * run + half % run for half in (0, 32))
                    (offset, first), (_, second) = map(plane.at, firsts)
                    twice = step.pick(step.load(offset, 16, 16), [*range(16)] * 2)
                    moved = step.moved(twice, first - plane.first, second - plane.first)
                    index = step.merged(index, moved, (1 << plane.first) - 1)
                yield from step.both_bytes(values, index)

    def emitted(step: _StepInMemory) -> Emitted:
        scales, minima = (_six_bit_scales if scheme in ("Q4_K", "Q5_K") else _scales)(step, form)
        spread = None if "avx512bw" in features() else step.emit.spread_lanes(scales, step.base)

        def of_lanes(order: list[int]) -> Any:
            if spread is not None and order == [order[0]] * 8 + [order[8]] * 8:
                return step.emit.joined(*map(spread, order[::8]))
            return step.pick(scales, order)

        def decoded() -> Iterator[tuple[Sequence[Any], Any]]:
            for order, some in itertools.groupby(zip(groups, words(step), strict=True), operator.itemgetter(0)):
                yield [word for _, word in some], of_lanes(order)

        return decoded(), minima

    return emitted


def _scales(step: _StepInMemory, form: BlockFormat) -> tuple[Any, Any]:
    scale, *least = map(step.halves, form.halves)
    scales = step.b.fmul(scale, step.factors(form.factors, form.least_factor)) if form.factors else scale
    return scales, step.b.fmul(*least, step.factors(form.minima, 0)) if least else None


def _six_bit_scales(step: _StepInMemory, form: BlockFormat) -> tuple[Any, Any]:
    """The same for groups of which half have one field."""
    fields = step.load(0, 32, 4)  # float16; factors 0 to 3 with upper bits of 4 to 7: of scales, of minima; lower bits
    low = step.masked(step.right(step.pick(fields, [2, 3, 1, 3]), [0, 4, 0, 0]), [0x3F3F3F3F, 0x0F0F0F0F] * 2)
    high = step.masked(step.right(step.pick(fields, [2, 2, 1, 1]), 2), [0, 0x30303030] * 2)
    factors = step.b.bitcast(step.b.or_(low, high), ir.VectorType(I8, 16))
    both = step.b.fmul(step.halves(2, 0), step.b.uitofp(factors, step.emit.floats))
    return step.pick(both, [*range(8, 16)] * 2), both


_EMITTED: Mapping[str, Callable[[_StepInMemory], Emitted]] = {
    name: _q8_0 if name == "Q8_0" else (_two_blocks if layout.step == 64 else _super_block)(name)
    for name, layout in LAYOUTS.items()
}


# Products.


class _BlockSteps(CodeSteps):
    """One block of 256, or two of 32."""

    def __init__(self, scheme: str, emit: Emitter, table: Any) -> None:
        super().__init__(emit)
        layout = LAYOUTS[scheme]
        self._scheme, self._groups = scheme, layout.groups
        self.accumulators += [layout.groups] if layout.groups else []
        self.code_bytes = BLOCK_TYPES[scheme].row_bytes(layout.step)
        self.input_bytes, self.other_bytes = 2 * layout.step, 4 + 4 * layout.groups

    def inputs(self, inputs: Any, others: Any) -> list[Any]:
        return [inputs, others]

    def products(self, address: Any, inputs: list[list[Any]], position: Position) -> Products:
        emit, groups = self._emit, self._groups
        parts, minima = _EMITTED[self._scheme](_StepInMemory(emit, address))
        products, offset = [emit.zero] * len(inputs), 0
        for words, scale in parts:
            for t, (start, _) in enumerate(inputs):
                vectors = (emit.load(emit.add(start, offset + 64 * n), WORDS, 2) for n in range(len(words)))
                products[t] = emit.fma(_integers.summed_products(emit, words, vectors), scale, products[t])
            offset += 64 * len(words)
        yield 0, products, [emit.spread(emit.load(place, F32, 4)) for _, place in inputs]
        if minima is not None:
            sums = [emit.load(emit.add(place, 4), ir.VectorType(F32, groups), 4) for _, place in inputs]
            yield 1, itertools.repeat(emit.pick(minima, minima, range(groups))), sums
