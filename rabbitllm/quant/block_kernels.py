"""Kernels for blocks of GGUF files: the descriptions of `gguf_blocks.py` as code for vectors.

**By codes.** Each group of a block is decoded in registers and multiplied with its inputs; the sum is multiplied by the
group's scale, and the minimum by the sum of the inputs, which is the same for all rows. Fills out[token, row], float32.
With inputs of bfloat16 some types are multiplied in pairs (`block_pairs.py`).

**By panels**, as in `product_kernels.py`, with inputs in their own order.

**Numbers.** Fills out[row, column], float32, with the bits of `gguf_blocks.dequantize`.

A kernel is made when it is first needed. numba keeps compiled functions for the next process only if all that they use
is global, so each one has globals of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant import block_pairs, product_kernels
from rabbitllm.quant.gguf_blocks import DECODERS, Group
from rabbitllm.quant.kernels import BEFORE_WORK, CODES, NUMBERS, PAIRS, PANELS, SUMMED
from rabbitllm.quant.product_kernels import GIVEN, PANEL_TOKENS, own_rows, panel_tiles, pieces
from rabbitllm.quant.vectors import F32, I8, I16, I32, Emitter, Pairs, inlined, number

TOKENS = 4
"""Inputs for each decoded group."""
_HALF = ir.HalfType()


def address(method: str, scheme: str, width: int) -> int:
    """The address of a kernel, which is compiled at the first call, or loaded from numba's cache.

    Args:
        method: `CODES`, `PANELS` or `NUMBERS`.
        scheme: a key of `DECODERS`.
        width: lanes of its vectors; `PAIRS`, by codes, for one that multiplies pairs of bfloat16.
    """
    return product_kernels.address_of(_kernel(method, scheme, width))


@functools.cache
def _kernel(method: str, scheme: str, width: int) -> Callable[[Any], None]:
    if width == PAIRS:
        assert method == CODES
        pair, pairs = (_pair_dot(scheme, tokens) for tokens in (1, TOKENS))
        return _named(
            _by_pairs, f"{method}_{scheme}_{width}", {"ONE": pair, "WIDE": pairs, "SUM_BYTES": _sum_bytes(scheme)}
        )
    if method == CODES:
        one, wide = (_dot(scheme, width, tokens) for tokens in (1, TOKENS))
        return _named(_by_codes, f"{method}_{scheme}_{width}", {"ONE": one, "WIDE": wide})
    fill = _fill(scheme, width)
    if method == NUMBERS:
        return _named(_by_numbers, f"{method}_{scheme}_{width}", {"FILL": fill})
    assert method == PANELS
    one, tall, square = product_kernels.panel_dots(width)
    given = {"FILL": fill, "ONE": one, "TALL": tall, "SQUARE": square}
    return _named(
        _by_panels, f"{method}_{scheme}_{width}", given | {"AT_ONCE": PANEL_TOKENS[width], "VECTOR": 4 * width}
    )


def _named(function: Any, name: str, given: dict[str, Any]) -> Callable[[Any], None]:
    made = FunctionType(function.__code__, {**globals(), **given}, name)
    made.__qualname__, made.__module__ = name, __name__
    return made


class _Number:
    """An LLVM int, or a vector of bytes, with Python's operators."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.b = builder
        self.value = value

    def _other(self, given: _Number | int) -> Any:
        if isinstance(given, _Number):
            return given.value
        kind = self.value.type
        return ir.Constant(kind, [given] * kind.count if isinstance(kind, ir.VectorType) else given)

    def __and__(self, other: _Number | int) -> _Number:
        return _Number(self.b, self.b.and_(self.value, self._other(other)))

    def __or__(self, other: _Number | int) -> _Number:
        return _Number(self.b, self.b.or_(self.value, self._other(other)))

    def __rshift__(self, count: int) -> _Number:
        return _Number(self.b, self.b.lshr(self.value, self._other(count))) if count else self

    def __lshift__(self, count: int) -> _Number:
        return _Number(self.b, self.b.shl(self.value, self._other(count))) if count else self

    def __add__(self, other: _Number | int) -> _Number:
        return _Number(self.b, self.b.add(self.value, self._other(other)))

    def __sub__(self, other: _Number | int) -> _Number:
        return _Number(self.b, self.b.sub(self.value, self._other(other)))


class _BlockInMemory:
    """Reads the fields of the block at an address; see `gguf_blocks.BlockReader`."""

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
        kind = ir.VectorType(I8, 16)
        shuffle = self._emit.function("llvm.x86.ssse3.pshuf.b.128", kind, kind, kind)
        table = ir.Constant(kind, [value & 255 for value in values])
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

    def _read(self, offset: int, kind: ir.Type) -> _Number:
        return _Number(self._emit.b, self._emit.load(self._emit.add(self._base, offset), kind, 1))


def _floats(emit: Emitter, group: Group, part: int) -> list[Any]:
    """The codes that share the scale `part`, as vectors of float32."""
    codes = group.codes.value
    share = codes.type.count // len(group.scales)
    found = []
    for begin in range(part * share, (part + 1) * share, emit.width):
        order = ir.Constant(ir.VectorType(I32, emit.width), list(range(begin, begin + emit.width)))
        few = emit.b.shuffle_vector(codes, codes, order)
        wide = (emit.b.sext if group.signed else emit.b.zext)(few, emit.ints)
        found.append(emit.b.sitofp(wide, emit.floats))
    return found


def _dot(scheme: str, width: int, tokens: int) -> Any:
    """An intrinsic that multiplies a row of blocks by `tokens` consecutive inputs."""
    kind, decode = BLOCK_TYPES[scheme], DECODERS[scheme]

    @intrinsic
    def dot(context, codes, inputs, summed, out, blocks, all_rows):  # type: ignore[no-untyped-def]
        """All arguments are int64; the first four are addresses: of the row, of the first input, of the sums of its
        groups of `SUMMED` and of the result; then blocks in a row, and rows of the matrix."""
        signature = types.void(*[types.int64] * 6)

        def emit_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, inputs, summed, out, blocks, all_rows = arguments
            emit = Emitter(builder, width)
            totals = [emit.variable() for _ in range(tokens)]
            nothing = ir.Constant(F32, 0.0)
            least = [cgutils.alloca_once_value(builder, nothing) for _ in range(tokens)]  # type: ignore[no-untyped-call]
            row_bytes = builder.mul(blocks, number(kind.elements * 4))
            sum_bytes = builder.mul(blocks, number(kind.elements // SUMMED * 4))
            with cgutils.for_range(builder, blocks) as loop:
                base = emit.add(codes, builder.mul(loop.index, number(kind.nbytes)))
                starts = [
                    emit.add(
                        inputs, builder.mul(row_bytes, number(t)), builder.mul(loop.index, number(kind.elements * 4))
                    )
                    for t in range(tokens)
                ]
                sums = [
                    emit.add(
                        summed,
                        builder.mul(sum_bytes, number(t)),
                        builder.mul(loop.index, number(kind.elements // SUMMED * 4)),
                    )
                    for t in range(tokens)
                ]
                emit.prefetch(emit.add(base, product_kernels.PREFETCHED))
                at = 0
                for group in decode(_BlockInMemory(emit, base)):
                    for part, scale in enumerate(group.scales):
                        values = _floats(emit, group, part)
                        spread = emit.spread(scale)
                        for t in range(tokens):
                            product = emit.zero
                            for n, value in enumerate(values):
                                place = emit.add(starts[t], 4 * (at + n * width))
                                product = emit.fma(value, emit.load(place, emit.floats, 4), product)
                            builder.store(emit.fma(product, spread, builder.load(totals[t])), totals[t])
                            if group.minima:
                                of_inputs = _sum_at(emit, sums[t], at, len(values) * width)
                                product = builder.fmul(group.minima[part], of_inputs)
                                builder.store(builder.fadd(builder.load(least[t]), product), least[t])
                        at += len(values) * width
            for t in range(tokens):
                place = emit.add(out, builder.mul(all_rows, number(4 * t)))
                total = emit.sum(builder.load(totals[t]))
                builder.store(
                    builder.fsub(total, builder.load(least[t])), builder.inttoptr(place, F32.as_pointer()), align=4
                )
            return context.get_dummy_value()

        return signature, emit_code

    return dot


def _sum_at(emit: Emitter, sums: Any, begin: int, count: int) -> Any:
    """The sum of an input's elements from `begin` on."""
    parts = [emit.load(emit.add(sums, 4 * at), F32, 4) for at in range(begin // SUMMED, (begin + count) // SUMMED)]
    return functools.reduce(emit.b.fadd, parts)


def _sum_bytes(scheme: str) -> int:
    """Bytes of the sums of an input's step."""
    return 4 * block_pairs.LAYOUTS[scheme].groups


def _pair_dot(scheme: str, tokens: int) -> Any:
    """An intrinsic that multiplies a row of blocks by `tokens` consecutive inputs of bfloat16."""
    layout = block_pairs.LAYOUTS[scheme]
    step_bytes = BLOCK_TYPES[scheme].row_bytes(layout.step)

    @intrinsic
    def dot(context, codes, inputs, summed, out, steps, all_rows):  # type: ignore[no-untyped-def]
        """As that of `_dot`; inputs and sums are those of a `PairLayout`, and a row has so many steps of it."""
        signature = types.void(*[types.int64] * 6)

        def emit_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, inputs, summed, out, steps, all_rows = arguments
            emit = Emitter(builder, 16)
            totals, least = ([emit.variable() for _ in range(tokens)] for _ in range(2))
            multiply = emit.function("llvm.x86.avx512bf16.dpbf16ps.512", emit.floats, emit.floats, *[Pairs.PAIRED] * 2)
            with cgutils.for_range(builder, steps) as loop:
                here = loop.index
                base = emit.add(codes, builder.mul(here, number(step_bytes)))
                each = [emit.add(builder.mul(steps, number(t)), here) for t in range(tokens)]
                starts = [emit.add(inputs, builder.mul(at, number(layout.step * 2))) for at in each]
                for line in range(0, step_bytes, 64):
                    emit.prefetch(emit.add(base, product_kernels.PREFETCHED + line))
                at = 0
                found, minima = block_pairs.parts(emit, scheme, base)
                for part in found:
                    for t in range(tokens):
                        product = emit.zero
                        for n, words in enumerate(part.words):
                            value = emit.load(emit.add(starts[t], at + 64 * n), Pairs.PAIRED, 2)
                            product = builder.call(multiply, [product, builder.bitcast(words, Pairs.PAIRED), value])
                        builder.store(emit.fma(product, part.scale, builder.load(totals[t])), totals[t])
                    at += 64 * len(part.words)
                if minima is not None:
                    for t in range(tokens):
                        place = emit.add(summed, builder.mul(each[t], number(_sum_bytes(scheme))))
                        of_inputs = emit.load(place, ir.VectorType(F32, layout.groups), 4)
                        if layout.groups < 16:  # zeros follow, at no cost
                            order = ir.Constant(ir.VectorType(I32, 16), [*range(8), *[8] * 8])
                            of_inputs = builder.shuffle_vector(of_inputs, ir.Constant(of_inputs.type, None), order)
                        builder.store(emit.fma(minima, of_inputs, builder.load(least[t])), least[t])
            for t in range(tokens):
                place = emit.add(out, builder.mul(all_rows, number(4 * t)))
                total = emit.sum(builder.fsub(builder.load(totals[t]), builder.load(least[t])))
                builder.store(total, builder.inttoptr(place, F32.as_pointer()), align=4)
            return context.get_dummy_value()

        return signature, emit_code

    return dot


def _fill(scheme: str, width: int) -> Any:
    """An intrinsic that decodes a part of one row of the matrix to float32."""
    kind, decode = BLOCK_TYPES[scheme], DECODERS[scheme]

    @intrinsic
    def fill(context, codes, scales, table, panel, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
        """See `product_kernels.fills`; a step is two vectors of elements. Here scales, table and shift are unused."""
        signature = types.void(*[types.int64] * 10)

        def emit_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, _, _, panel, row_bytes, _, _, row, first, steps = arguments
            emit = Emitter(builder, width)
            first, count = (
                builder.udiv(builder.mul(given, number(2 * width)), number(kind.elements)) for given in (first, steps)
            )
            start = emit.add(codes, builder.mul(row, row_bytes), builder.mul(first, number(kind.nbytes)))
            with cgutils.for_range(builder, count) as loop:
                base = emit.add(start, builder.mul(loop.index, number(kind.nbytes)))
                place = emit.add(panel, builder.mul(loop.index, number(kind.elements * 4)))
                at = 0
                for group in decode(_BlockInMemory(emit, base)):
                    for part, scale in enumerate(group.scales):
                        spread = emit.spread(scale)
                        least = emit.spread(group.minima[part]) if group.minima else None
                        for value in _floats(emit, group, part):
                            made = builder.fmul(value, spread)
                            made = builder.fsub(made, least) if least is not None else made
                            pointer = builder.inttoptr(emit.add(place, 4 * at), emit.floats.as_pointer())
                            builder.store(made, pointer, align=4)
                            at += width
            return context.get_dummy_value()

        return signature, emit_code

    return fill


@inlined
def _code_rows(one, wide, data):  # type: ignore[no-untyped-def]
    """The loops over rows and inputs."""
    given = pieces(data)
    for at in range(BEFORE_WORK, len(given), GIVEN):
        codes, inputs, summed, out = given[at], given[at + 2], given[at + 3], given[at + 5]
        row_bytes, blocks, block, tokens, rows = (
            given[at + 6], given[at + 7], given[at + 8], given[at + 9], given[at + 10],
        )  # fmt: skip
        first, last = own_rows(given, rows)
        input_bytes = blocks * block * 4
        for row in range(first, last):
            token, base = 0, codes + row * row_bytes
            while token + TOKENS <= tokens:
                x, s, to = (
                    inputs + token * input_bytes,
                    summed + token * (input_bytes // SUMMED),
                    out + token * rows * 4,
                )
                wide(base, x, s, to + row * 4, blocks, rows)
                token += TOKENS
            while token < tokens:
                x, s, to = (
                    inputs + token * input_bytes,
                    summed + token * (input_bytes // SUMMED),
                    out + token * rows * 4,
                )
                one(base, x, s, to + row * 4, blocks, rows)
                token += 1


@inlined
def _pair_rows(one, wide, sum_size, data):  # type: ignore[no-untyped-def]
    """The loops over rows and inputs."""
    given = pieces(data)
    for at in range(BEFORE_WORK, len(given), GIVEN):
        codes, inputs, summed, out = given[at], given[at + 2], given[at + 3], given[at + 5]
        row_bytes, steps, step, tokens, rows = (
            given[at + 6], given[at + 7], given[at + 8], given[at + 9], given[at + 10],
        )  # fmt: skip
        first, last = own_rows(given, rows)
        input_bytes, sum_bytes = steps * step * 2, steps * sum_size
        for row in range(first, last):
            token, base = 0, codes + row * row_bytes
            while token + TOKENS <= tokens:
                x, s, to = inputs + token * input_bytes, summed + token * sum_bytes, out + token * rows * 4
                wide(base, x, s, to + row * 4, steps, rows)
                token += TOKENS
            while token < tokens:
                x, s, to = inputs + token * input_bytes, summed + token * sum_bytes, out + token * rows * 4
                one(base, x, s, to + row * 4, steps, rows)
                token += 1


@inlined
def _number_rows(fill, data):  # type: ignore[no-untyped-def]
    """The loop over rows."""
    given = pieces(data)
    for at in range(BEFORE_WORK, len(given), GIVEN):
        codes, out, row_bytes, steps, columns, rows = (
            given[at], given[at + 5], given[at + 6], given[at + 7], given[at + 8], given[at + 10],
        )  # fmt: skip
        first, last = own_rows(given, rows)
        for row in range(first, last):
            fill(codes, 0, 0, out + row * columns * 4, row_bytes, steps, 0, row, 0, steps)


# Templates: `_named` gives each kernel its own.

ONE = WIDE = TALL = SQUARE = FILL = AT_ONCE = VECTOR = SUM_BYTES = None


def _by_codes(data):  # type: ignore[no-untyped-def]
    _code_rows(ONE, WIDE, data)


def _by_pairs(data):  # type: ignore[no-untyped-def]
    _pair_rows(ONE, WIDE, SUM_BYTES, data)


def _by_panels(data):  # type: ignore[no-untyped-def]
    panel_tiles(FILL, (ONE, TALL, SQUARE), AT_ONCE, VECTOR, data)


def _by_numbers(data):  # type: ignore[no-untyped-def]
    _number_rows(FILL, data)
