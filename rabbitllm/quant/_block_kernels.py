"""Kernels for blocks of GGUF files: the descriptions of `_gguf_decoders.py` as code for vectors.

**By codes.** Each group of a block is decoded in registers and multiplied with its inputs; the sum is multiplied by the
group's scale, and the minimum by the sum of the inputs, which is the same for all rows. Fills out[token, row], float32.
With inputs of bfloat16 some types are multiplied in pairs (`_block_pairs.py`).

**By panels**, as in `_product_kernels.py`, with inputs in their own order.

**Numbers.** Fills out[row, column], float32, with the bits of `gguf_blocks.dequantize`.

A kernel is made when it is first needed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant import _block_pairs, _product_kernels
from rabbitllm.quant._gguf_decoders import DECODERS, Group
from rabbitllm.quant._kernel_interface import BEFORE_WORK, CODES, NUMBERS, PAIRS, PANELS, SUMMED
from rabbitllm.quant._product_kernels import PIECE_WORDS, arguments, named, own_rows, pieces
from rabbitllm.quant._vectors import F32, I8, I16, I32, Emitter, Pairs, emitted, number

TOKENS = 4
"""Inputs for each decoded group."""
PREFETCHED = 8192
"""How many bytes ahead codes are prefetched: one row at a time hides less of the memory's latency than four."""
_HALF = ir.HalfType()


def address(method: str, scheme: str, width: int) -> int:
    """The address of a kernel, which is compiled at the first call, or loaded from numba's cache.

    Args:
        method: `CODES`, `PANELS` or `NUMBERS`.
        scheme: a key of `DECODERS`.
        width: lanes of its vectors; `PAIRS`, by codes, for one that multiplies pairs of bfloat16.
    """
    return _product_kernels.address_of(_kernel(method, scheme, width))


@functools.cache
def _kernel(method: str, scheme: str, width: int) -> Callable[[Any], None]:
    name = f"{method}_{scheme}_{width}"
    if method == CODES:
        single, wide = (_dot(scheme, width, tokens) for tokens in (1, TOKENS))
        step = _step_of(scheme, width)
        return named(_by_codes, name, ONE=single, WIDE=wide, INPUT_BYTES=step.input_bytes, SUM_BYTES=step.sum_bytes)
    if method == NUMBERS:
        return named(_by_numbers, name, FILL=_fill(scheme, width))
    assert method == PANELS
    return _product_kernels.panel_kernel(scheme, width, _fill(scheme, width))


class _Number:
    """An LLVM int, or a vector of bytes, with Python's operators."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.b = builder
        self.value = value

    def _other(self, operand: _Number | int) -> Any:
        if isinstance(operand, _Number):
            return operand.value
        int_type = self.value.type
        return ir.Constant(int_type, [operand] * int_type.count if isinstance(int_type, ir.VectorType) else operand)

    def __and__(self, operand: _Number | int) -> _Number:
        return _Number(self.b, self.b.and_(self.value, self._other(operand)))

    def __or__(self, operand: _Number | int) -> _Number:
        return _Number(self.b, self.b.or_(self.value, self._other(operand)))

    def __rshift__(self, count: int) -> _Number:
        return _Number(self.b, self.b.lshr(self.value, self._other(count))) if count else self

    def __lshift__(self, count: int) -> _Number:
        return _Number(self.b, self.b.shl(self.value, self._other(count))) if count else self

    def __add__(self, operand: _Number | int) -> _Number:
        return _Number(self.b, self.b.add(self.value, self._other(operand)))

    def __sub__(self, operand: _Number | int) -> _Number:
        return _Number(self.b, self.b.sub(self.value, self._other(operand)))


class _BlockInMemory:
    """Reads the fields of the block at an address; see `_gguf_decoders.BlockReader`."""

    def __init__(self, emit: Emitter, base: Any) -> None:
        self._emit = emit
        self._base = base

    def bytes(self, offset: int, count: int) -> _Number:
        return self._read(offset, ir.VectorType(I8, count))

    def bits(self, offset: int, count: int) -> _Number:
        assert count == 16
        mask = self._emit.b.bitcast(self._read(offset, I16).value, ir.VectorType(ir.IntType(1), count))
        return _Number(self._emit.b, self._emit.b.zext(mask, ir.VectorType(I8, count)))

    def look_up(self, values: tuple[int, ...], index: _Number) -> _Number:
        bytes_16 = ir.VectorType(I8, 16)
        shuffle = self._emit.function("llvm.x86.ssse3.pshuf.b.128", bytes_16, bytes_16, bytes_16)
        table = ir.Constant(bytes_16, [value & 255 for value in values])
        return _Number(self._emit.b, self._emit.b.call(shuffle, [table, index.value]))

    def byte(self, offset: int) -> _Number:
        return _Number(self._emit.b, self._emit.b.zext(self._read(offset, I8).value, I32))

    def signed(self, value: _Number) -> _Number:
        b = self._emit.b
        return _Number(b, b.sext(b.trunc(value.value, I8), I32))

    def half(self, offset: int) -> Any:
        return self._emit.b.fpext(self._read(offset, _HALF).value, F32)

    def half_power(self, exponent: _Number) -> Any:
        b = self._emit.b
        is_small = b.icmp_signed("<", exponent.value, ir.Constant(I32, 2))
        bits = b.select(is_small, ((exponent + 1) << 21).value, ((exponent - 1) << 23).value)
        return b.bitcast(bits, F32)

    def times(self, scale: Any, factor: _Number) -> Any:
        return self._emit.b.fmul(scale, self._emit.b.sitofp(factor.value, F32))

    def negative(self, value: Any) -> Any:
        return self._emit.b.fneg(value)

    def _read(self, offset: int, ir_type: ir.Type) -> _Number:
        return _Number(self._emit.b, self._emit.load(self._emit.add(self._base, offset), ir_type, 1))


def _floats(emit: Emitter, group: Group, part: int) -> list[Any]:
    """The codes that share the scale `part`, as vectors of float32."""
    codes = group.codes.value
    share = codes.type.count // len(group.scales)
    vectors = []
    for begin in range(part * share, (part + 1) * share, emit.width):
        order = ir.Constant(ir.VectorType(I32, emit.width), list(range(begin, begin + emit.width)))
        few = emit.b.shuffle_vector(codes, codes, order)
        wide = (emit.b.sext if group.signed else emit.b.zext)(few, emit.ints)
        vectors.append(emit.b.sitofp(wide, emit.floats))
    return vectors


class _RowStep(NamedTuple):
    """Consecutive codes of a row that are multiplied together: a block, or in pairs a step of a `PairLayout`.

    Attributes:
        code_bytes, input_bytes, sum_bytes: bytes of its codes, of its inputs, and of the sums of these by group.
    """

    code_bytes: int
    input_bytes: int
    sum_bytes: int


def _step_of(scheme: str, width: int) -> _RowStep:
    block = BLOCK_TYPES[scheme]
    if width != PAIRS:
        return _RowStep(block.nbytes, 4 * block.elements, 4 * (block.elements // SUMMED))
    layout = _block_pairs.LAYOUTS[scheme]
    return _RowStep(block.row_bytes(layout.step), 2 * layout.step, 4 * layout.groups)


class _FloatSums:
    """The sums of a row's products with some inputs, float32: in lanes, less the minima times the sums of inputs."""

    def __init__(self, emit: Emitter, scheme: str, tokens: int) -> None:
        self._emit, self._scheme = emit, scheme
        self._totals = [emit.variable() for _ in range(tokens)]
        zero = ir.Constant(F32, 0.0)
        self._least = [cgutils.alloca_once_value(emit.b, zero) for _ in range(tokens)]  # type: ignore[no-untyped-call]

    def add(self, base: Any, inputs: list[Any], sums: list[Any]) -> None:
        """Add the products of the block at an address with each input, and with its sums by group."""
        emit, element = self._emit, 0
        emit.prefetch(emit.add(base, PREFETCHED))
        for group in DECODERS[self._scheme](_BlockInMemory(emit, base)):
            for part, scale in enumerate(group.scales):
                values, spread = _floats(emit, group, part), emit.spread(scale)
                least = group.minima[part] if group.minima else None
                for t in range(len(inputs)):
                    self._multiply(t, values, spread, emit.add(inputs[t], 4 * element))
                    if least is not None:
                        of_inputs = _sum_at(emit, sums[t], element, len(values) * emit.width)
                        product = emit.b.fmul(least, of_inputs)
                        emit.b.store(emit.b.fadd(emit.b.load(self._least[t]), product), self._least[t])
                element += len(values) * emit.width

    def _multiply(self, t: int, values: list[Any], scale: Any, inputs: Any) -> None:
        emit, product = self._emit, self._emit.zero
        for n, value in enumerate(values):
            product = emit.fma(value, emit.load(emit.add(inputs, 4 * n * emit.width), emit.floats, 4), product)
        emit.b.store(emit.fma(product, scale, emit.b.load(self._totals[t])), self._totals[t])

    def total(self, t: int) -> Any:
        """The result for one input."""
        total = self._emit.sum(self._emit.b.load(self._totals[t]))
        return self._emit.b.fsub(total, self._emit.b.load(self._least[t]))


def _sum_at(emit: Emitter, sums: Any, begin: int, count: int) -> Any:
    """The sum of an input's elements from `begin` on."""
    parts = [emit.load(emit.add(sums, 4 * g), F32, 4) for g in range(begin // SUMMED, (begin + count) // SUMMED)]
    return functools.reduce(emit.b.fadd, parts)


class _PairSums:
    """The same for inputs of bfloat16 in pairs; the minima are in lanes too.

    Parts are added in turns to two totals, since each addition waits for the one before.
    """

    def __init__(self, emit: Emitter, scheme: str, tokens: int) -> None:
        self._emit, self._scheme = emit, scheme
        self._even, self._odd, self._least = ([emit.variable() for _ in range(tokens)] for _ in range(3))
        arguments = emit.floats, *[Pairs.PAIRED] * 2
        self._pairs = emit.function("llvm.x86.avx512bf16.dpbf16ps.512", emit.floats, *arguments)

    def add(self, base: Any, inputs: list[Any], sums: list[Any]) -> None:
        """Add the products of the step at an address with each input, and with its sums by group."""
        emit, offset, layout = self._emit, 0, _block_pairs.LAYOUTS[self._scheme]
        for line in range(0, _step_of(self._scheme, PAIRS).code_bytes, 64):
            emit.prefetch(emit.add(base, PREFETCHED + line))
        parts, minima = _block_pairs.parts(emit, self._scheme, base)
        for part, totals in zip(parts, itertools.cycle((self._even, self._odd)), strict=False):
            for t in range(len(inputs)):
                self._multiply(totals[t], part, emit.add(inputs[t], offset))
            offset += 64 * len(part.words)
        for t in range(len(inputs) if minima is not None else 0):
            of_inputs = emit.load(sums[t], ir.VectorType(F32, layout.groups), 4)
            if layout.groups < 16:  # zeros follow, at no cost
                order = ir.Constant(ir.VectorType(I32, 16), [*range(8), *[8] * 8])
                of_inputs = emit.b.shuffle_vector(of_inputs, ir.Constant(of_inputs.type, None), order)
            emit.b.store(emit.fma(minima, of_inputs, emit.b.load(self._least[t])), self._least[t])

    def _multiply(self, total: Any, part: _block_pairs.PairPart, inputs: Any) -> None:
        emit, product = self._emit, self._emit.zero
        for n, words in enumerate(part.words):
            value = emit.load(emit.add(inputs, 64 * n), Pairs.PAIRED, 2)
            product = emit.b.call(self._pairs, [product, emit.b.bitcast(words, Pairs.PAIRED), value])
        emit.b.store(emit.fma(product, part.scale, emit.b.load(total)), total)

    def total(self, t: int) -> Any:
        """The result for one input."""
        even, odd, least = (self._emit.b.load(lanes[t]) for lanes in (self._even, self._odd, self._least))
        return self._emit.sum(self._emit.b.fsub(self._emit.b.fadd(even, odd), least))


def _dot(scheme: str, width: int, tokens: int) -> Any:
    """An intrinsic that multiplies a row by `tokens` consecutive inputs."""
    step, sums_type = _step_of(scheme, width), _PairSums if width == PAIRS else _FloatSums

    def dot(emit, codes, inputs, summed, out, steps, all_rows):  # type: ignore[no-untyped-def]
        """All arguments are int64; the first four are addresses: of the row, of the first input, of its sums by group
        and of the result; then steps in a row, and rows of the matrix."""
        builder = emit.b
        sums = sums_type(emit, scheme, tokens)
        with cgutils.for_range(builder, steps) as loop:
            base = emit.add(codes, builder.mul(loop.index, number(step.code_bytes)))
            places = [emit.add(builder.mul(steps, number(t)), loop.index) for t in range(tokens)]
            starts = [emit.add(inputs, builder.mul(i, number(step.input_bytes))) for i in places]
            sums.add(base, starts, [emit.add(summed, builder.mul(i, number(step.sum_bytes))) for i in places])
        for t in range(tokens):
            emit.store(sums.total(t), emit.add(out, builder.mul(all_rows, number(4 * t))), 4)

    return emitted(dot, width)


def _fill(scheme: str, width: int) -> Any:
    """An intrinsic that decodes a part of one row of the matrix to float32."""
    block, decode = BLOCK_TYPES[scheme], DECODERS[scheme]

    def fill(emit, codes, scales, table, panel, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
        """See `_product_kernels._fill`; a step is two vectors of elements. Here scales, table and shift are unused."""
        builder = emit.b
        first, count = (
            builder.udiv(builder.mul(step, number(2 * width)), number(block.elements)) for step in (first, steps)
        )
        start = emit.add(codes, builder.mul(row, row_bytes), builder.mul(first, number(block.nbytes)))
        with cgutils.for_range(builder, count) as loop:
            base = emit.add(start, builder.mul(loop.index, number(block.nbytes)))
            place = emit.add(panel, builder.mul(loop.index, number(block.elements * 4)))
            element = 0
            for group in decode(_BlockInMemory(emit, base)):
                for part, scale in enumerate(group.scales):
                    spread = emit.spread(scale)
                    least = emit.spread(group.minima[part]) if group.minima else None
                    for value in _floats(emit, group, part):
                        product = builder.fmul(value, spread)
                        product = builder.fsub(product, least) if least is not None else product
                        emit.store(product, emit.add(place, 4 * element), 4)
                        element += width

    return emitted(fill, width)


# Templates of kernels; see `_product_kernels.named`.

ONE: Any = None
WIDE = FILL = INPUT_BYTES = SUM_BYTES = ONE


def _by_codes(data):  # type: ignore[no-untyped-def]
    words = pieces(data)
    for piece in range(BEFORE_WORK, len(words), PIECE_WORDS):
        codes, _, inputs, summed, _, out, row_bytes, steps, _, tokens, rows = arguments(words, piece)
        first, last = own_rows(words, rows)
        for row in range(first, last):
            token, base = 0, codes + row * row_bytes
            while token + TOKENS <= tokens:  # two loops: with a branch in one, a single input takes 1.4 times as long
                before, to = token * steps, out + (token * rows + row) * 4
                WIDE(base, inputs + before * INPUT_BYTES, summed + before * SUM_BYTES, to, steps, rows)
                token += TOKENS
            while token < tokens:
                before, to = token * steps, out + (token * rows + row) * 4
                ONE(base, inputs + before * INPUT_BYTES, summed + before * SUM_BYTES, to, steps, rows)
                token += 1


def _by_numbers(data):  # type: ignore[no-untyped-def]
    words = pieces(data)
    for piece in range(BEFORE_WORK, len(words), PIECE_WORDS):
        codes, _, _, _, _, out, row_bytes, steps, columns, _, rows = arguments(words, piece)
        first, last = own_rows(words, rows)
        for row in range(first, last):
            FILL(codes, 0, 0, out + row * columns * 4, row_bytes, steps, 0, row, 0, steps)
