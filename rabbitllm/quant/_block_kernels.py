"""Kernels for blocks of GGUF files: the descriptions of `_gguf_decoders.py` as code for vectors.

**By codes.** Codes are decoded in registers to integers (`_integer_blocks.py`), and multiplied with rounded inputs; the
sums are multiplied by the scales, and minima by the sums of the inputs, which are the same for all rows. Fills
out[token, row], float32.

**By panels**, as in `_product_kernels.py`, with inputs in their own order.

**Numbers.** Fills out[row, column], float32, with the bits of `gguf_blocks.dequantize`.

A kernel is made when it is first needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant import _integer_blocks, _integers, _product_kernels
from rabbitllm.quant._gguf_decoders import DECODERS, Group
from rabbitllm.quant._integer_blocks import LAYOUTS
from rabbitllm.quant._kernel_interface import BEFORE_WORK, CODES, NUMBERS, PANELS
from rabbitllm.quant._product_kernels import PIECE_WORDS, arguments, named, own_rows, pieces
from rabbitllm.quant._vectors import F32, I8, I16, I32, Emitter, emitted, half_power, number

TOKENS = 4
"""Inputs for each decoded group."""
PREFETCHED = 8192
"""How many bytes ahead codes are prefetched: one row at a time hides less of the memory's latency than four."""


def address(method: str, scheme: str, width: int) -> int:
    """The address of a kernel, which is compiled at the first call, or loaded from numba's cache.

    Args:
        method: `CODES`, `PANELS` or `NUMBERS`.
        scheme: a key of `DECODERS`.
        width: lanes of its vectors; by codes `INTEGERS`.
    """
    return _product_kernels.address_of(_kernel(method, scheme, width))


@functools.cache
def _kernel(method: str, scheme: str, width: int) -> Callable[[Any], None]:
    name = f"{method}_{scheme}_{width}"
    if method == CODES:
        single, wide = (_dot(scheme, tokens) for tokens in (1, TOKENS))
        layout = LAYOUTS[scheme]
        sizes = {"INPUT_BYTES": 2 * layout.step, "FLOAT_BYTES": 4 + 4 * layout.groups}
        least = _product_kernels.LEAST_SLOW if scheme == "Q8_0" else _product_kernels.LEAST_WIDE
        return named(_by_codes, name, ONE=single, WIDE=wide, LEAST=least, **sizes)
    if method == NUMBERS:
        return named(_by_numbers, name, FILL=_fill(scheme, width))
    assert method == PANELS
    return _product_kernels.panel_kernel(scheme, width, _fill(scheme, width))


def _operator(instruction: str) -> Callable[[_Number, _Number | int], _Number]:
    def apply(self: _Number, operand: _Number | int) -> _Number:
        return _Number(self.b, getattr(self.b, instruction)(self.value, self._other(operand)))

    return apply


class _Number:
    """An LLVM int or float32, or a vector of bytes, with Python's operators."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.b = builder
        self.value = value

    def _other(self, operand: _Number | int) -> Any:
        if isinstance(operand, _Number):
            return operand.value
        int_type = self.value.type
        return ir.Constant(int_type, [operand] * int_type.count if isinstance(int_type, ir.VectorType) else operand)

    def __rshift__(self, count: int) -> _Number:
        return _Number(self.b, self.b.lshr(self.value, self._other(count))) if count else self

    def __lshift__(self, count: int) -> _Number:
        return _Number(self.b, self.b.shl(self.value, self._other(count))) if count else self

    def __mul__(self, factor: _Number) -> _Number:
        return _Number(self.b, self.b.fmul(self.value, self.b.sitofp(factor.value, F32)))

    def __neg__(self) -> _Number:
        return _Number(self.b, self.b.fneg(self.value))

    __and__, __or__, __sub__ = map(_operator, ("and_", "or_", "sub"))


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

    def half(self, offset: int) -> _Number:
        return _Number(self._emit.b, self._emit.b.fpext(self._read(offset, ir.HalfType()).value, F32))

    def half_power(self, exponent: _Number) -> _Number:
        return _Number(self._emit.b, half_power(self._emit.b, exponent.value))

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


class _RowSums:
    """The sums of a row's products with some inputs, float32, in lanes."""

    def __init__(self, emit: Emitter, scheme: str, tokens: int) -> None:
        self._emit, self._scheme, self._layout = emit, scheme, LAYOUTS[scheme]
        self._totals, self._least = ([emit.variable() for _ in range(tokens)] for _ in range(2))

    def add(self, base: Any, inputs: list[Any], floats: list[Any]) -> None:
        """Add the products of the step at an address with each input; `floats` has the scale and sums of each."""
        emit, offset = self._emit, 0
        for line in range(0, _code_bytes(self._scheme), 64):
            emit.prefetch(emit.add(base, PREFETCHED + line))
        parts, minima = _integer_blocks.parts(emit, self._scheme, base)
        products = [emit.zero] * len(inputs)
        for part in parts:
            for t, place in enumerate(inputs):
                places = (emit.add(place, offset + 64 * n) for n in range(len(part.words)))
                loaded = (emit.load(address, _integers.WORDS, 2) for address in places)
                total = _integers.summed_products(emit, part.words, loaded)
                products[t] = emit.fma(total, part.scale, products[t])
            offset += 64 * len(part.words)
        for t, place in enumerate(floats):
            scale = emit.spread(emit.load(place, F32, 4))
            emit.b.store(emit.fma(products[t], scale, emit.b.load(self._totals[t])), self._totals[t])
            if minima is not None:
                groups = self._layout.groups
                of_inputs = emit.load(emit.add(place, 4), ir.VectorType(F32, groups), 4)
                if groups < 16:  # zeros follow
                    order = [*range(groups), *[groups] * (16 - groups)]
                    of_inputs = emit.pick(of_inputs, ir.Constant(of_inputs.type, None), order)
                emit.b.store(emit.fma(minima, of_inputs, emit.b.load(self._least[t])), self._least[t])

    def total(self, t: int) -> Any:
        """The result for one input."""
        total, least = (self._emit.b.load(lanes[t]) for lanes in (self._totals, self._least))
        return self._emit.sum(self._emit.b.fsub(total, least) if self._layout.group else total)


def _code_bytes(scheme: str) -> int:
    """Bytes of the codes of a step."""
    return BLOCK_TYPES[scheme].row_bytes(LAYOUTS[scheme].step)


def _dot(scheme: str, tokens: int) -> Any:
    """An intrinsic that multiplies a row by up to `tokens` consecutive inputs."""
    layout, code_bytes = LAYOUTS[scheme], _code_bytes(scheme)

    def dot(emit, codes, inputs, floats, out, steps, all_rows, left):  # type: ignore[no-untyped-def]
        """All arguments are int64; the first four are addresses: of the row, of the first input, of its scales and
        sums, and of the result; then steps in a row, rows of the matrix, and the number of inputs."""
        builder = emit.b
        numbers = _product_kernels.numbers_to(emit, tokens, left)
        sums = _RowSums(emit, scheme, tokens)
        with emit.loop(steps) as index:
            base = emit.add(codes, builder.mul(index, number(code_bytes)))
            places = [emit.add(builder.mul(steps, t), index) for t in numbers]
            starts = [emit.add(inputs, builder.mul(i, number(2 * layout.step))) for i in places]
            sums.add(base, starts, [emit.add(floats, builder.mul(i, number(4 + 4 * layout.groups))) for i in places])
        for t, place in enumerate(numbers):
            emit.store(sums.total(t), emit.add(out, builder.mul(all_rows, builder.mul(place, number(4)))), 4)

    return emitted(dot, 16)


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
        with emit.loop(count) as index:
            base = emit.add(start, builder.mul(index, number(block.nbytes)))
            place = emit.add(panel, builder.mul(index, number(block.elements * 4)))
            element = 0
            for group in decode(_BlockInMemory(emit, base)):
                for part, scale in enumerate(group.scales):
                    spread = emit.spread(scale.value)
                    least = emit.spread(group.minima[part].value) if group.minima else None
                    for value in _floats(emit, group, part):
                        product = builder.fmul(value, spread)
                        product = builder.fsub(product, least) if least is not None else product
                        emit.store(product, emit.add(place, 4 * element), 4)
                        element += width

    return emitted(fill, width)


# Templates of kernels; see `_product_kernels.named`.

ONE: Any = None
WIDE = LEAST = FILL = INPUT_BYTES = FLOAT_BYTES = ONE


def _by_codes(data):  # type: ignore[no-untyped-def]
    words = pieces(data)
    for piece in range(BEFORE_WORK, len(words), PIECE_WORDS):
        codes, _, inputs, floats, _, out, row_bytes, steps, _, tokens, rows = arguments(words, piece)
        first, last = own_rows(words, rows)
        for row in range(first, last):
            token, base = 0, codes + row * row_bytes
            while tokens - token >= LEAST:  # two loops: with a branch in one, a single input takes 1.4 times as long
                before, to, left = token * steps, out + (token * rows + row) * 4, tokens - token
                WIDE(base, inputs + before * INPUT_BYTES, floats + before * FLOAT_BYTES, to, steps, rows, left)
                token += TOKENS
            while token < tokens:
                before, to = token * steps, out + (token * rows + row) * 4
                ONE(base, inputs + before * INPUT_BYTES, floats + before * FLOAT_BYTES, to, steps, rows, 1)
                token += 1


def _by_numbers(data):  # type: ignore[no-untyped-def]
    words = pieces(data)
    for piece in range(BEFORE_WORK, len(words), PIECE_WORDS):
        codes, _, _, _, _, out, row_bytes, steps, columns, _, rows = arguments(words, piece)
        first, last = own_rows(words, rows)
        for row in range(first, last):
            FILL(codes, 0, 0, out + row * columns * 4, row_bytes, steps, 0, row, 0, steps)
