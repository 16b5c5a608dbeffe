"""Dot products with rows of 4bit and 8bit codes, compiled for this processor's vectors by numba and LLVM.

What 16 (AVX-512) or 8 (AVX2) codes mean is found at a time, multiplied by their inputs and summed in float32; a block's
sum is multiplied by the block's scale. Nothing is made of the weights on the way, so the memory read is that of the
codes. Codes of 4bit are looked up in a table that stays in registers (VPERMPS, asked for by name, since LLVM would
gather from memory). The 256 values of 8bit are too many for that: looking them up took twice as long as reckoning
them, from the slopes and starts of eight ramps (see `code_tables.py`).

Even and odd inputs come in two arrays, because two codes of 4bit share a byte, and those of 8bit are read in words.

Inputs of bfloat16 come as they are, where the processor multiplies pairs of them (VDPBF16PS): a table of bfloat16 then
needs half the looking up and half the multiplying, and 256 of them are looked up, by VPERMI2W. What a code means is
rounded for it, after multiplication by the factor that makes the rounding least (see `code_tables.py`); sums are kept
in float32 as before.

Every function releases the interpreter lock. Knows no tensors. All of it is in one file because numba tells by a file's
time whether what it kept of its functions is still good.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from rabbitllm.layers.code_tables import PAIRS, RAMP_BYTES, RAMP_STEP, ZERO_CODE
from rabbitllm.layers.compiling import compiled
from rabbitllm.layers.row_team import BEFORE_WORK, RowRange, address_of
from rabbitllm.layers.vectors import F32, FOR_A_THREAD, I8, I16, I32, Emitter, asked, inlined, number, to_array

SEGMENT = 64
"""Codes that are summed before their scale is applied: a block of 4bit, and the smallest part of one of 8bit."""
PREFETCHED = 2048
"""How many bytes ahead codes are asked for; the processor by itself does not follow four rows at a time."""
HALF_BYTES = SEGMENT // 2 * 4
"""Of the even inputs of a segment, or the odd ones, float32; and of both together, bfloat16."""
ROWS, TOKENS = 4, 4
"""Rows of codes that share the reading of an input, and inputs that share the looking up of a code."""

_LARGE, _LARGE_VALUE = 0x4C000000, float(1 << 25)
"""The bits of 2**25 in float32: a code in the lowest of them adds `RAMP_STEP` times as much, without a conversion."""


class _BFloat(ir.Type):  # type: ignore[misc]
    """bfloat16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_WORDS = ir.VectorType(I16, 32)

ARGUMENTS = ("codes", "scales", "even", "odd", "table", "out", "row_bytes", "segments", "shift", "tokens", "rows")
"""Of every function here, all int64: addresses up to `out`; bytes of codes a row, segments a row, the logarithm of
segments a block, inputs, rows in all."""
GIVEN = len(ARGUMENTS)


def row_range(scheme: str, width: int) -> RowRange:
    """Fills out[token, row], float32, for a range of rows, by so many lanes; takes `ARGUMENTS`, first row, last row.

    Compiled when it is first called, or loaded from numba's cache."""
    return _FUNCTIONS[scheme, width][0]


@functools.cache
def in_a_team(scheme: str, width: int) -> int:
    """The address of a function for every thread of an OpenMP team; see `row_team.py`."""
    return address_of(_FUNCTIONS[scheme, width][1], FOR_A_THREAD)


class _Floats:
    """Multiplies segments in float32; even and odd inputs are apart."""

    codes_a_step: int
    has_factor = False

    def __init__(self, emit: Emitter, scheme: str) -> None:
        self._emit = emit
        self._codes_a_byte = 2 if scheme == "4bit" else 1

    def weights(self, address: Any) -> tuple[Any, Any]:
        """Even and odd weights of the codes at an address."""
        raise NotImplementedError

    def inputs(self, even: Any, odd: Any, begin: Any) -> list[Any]:
        """Vectors of a segment's inputs, from bytes `begin` on."""
        emit = self._emit
        places = range(0, HALF_BYTES, emit.width * 4)
        return [emit.load(emit.add(half, begin, at), emit.floats, 4) for at in places for half in (even, odd)]

    def products(self, address: Any, inputs: list[list[Any]]) -> list[Any]:
        """Sums of a segment's codes times the inputs of each token, still apart in lanes."""
        emit = self._emit
        parts: list[Any] = [emit.zero] * len(inputs)
        for step in range(SEGMENT // self.codes_a_step):
            both = self.weights(emit.add(address, step * self.codes_a_step // self._codes_a_byte))
            for t, vectors in enumerate(inputs):
                for weight, value in zip(both, vectors[2 * step :], strict=False):
                    parts[t] = emit.fma(weight, value, parts[t])
        return parts


class _Nibbles(_Floats):
    """Looks up codes of 4bit: `width` bytes give as many even and odd weights."""

    def __init__(self, emit: Emitter, table: Any) -> None:
        super().__init__(emit, "4bit")
        self.codes_a_step = 2 * emit.width
        self._tables = [
            emit.load(emit.add(table, 32 * half), emit.floats, 4) for half in range(1 if emit.width == 16 else 2)
        ]

    def weights(self, address: Any) -> tuple[Any, Any]:
        emit = self._emit
        wide = emit.b.zext(emit.load(address, emit.bytes, 1), emit.ints)
        return self._look_up(emit.b.lshr(wide, emit.every(4))), self._look_up(wide)  # the first in the high half

    def _look_up(self, index: Any) -> Any:
        emit = self._emit
        if emit.width == 16:
            return emit.look_up(self._tables[0], index)
        low, high = (emit.look_up(table, index) for table in self._tables)
        is_high = emit.b.icmp_unsigned("!=", emit.b.and_(index, emit.every(8)), emit.every(0))
        return emit.b.select(is_high, high, low)


def _of_256(emit: Emitter, vectors: list[Any], index: Any) -> Any:
    """Words from a table of 256 of them in 8 vectors, by indices in words."""
    permute = emit.function("llvm.x86.avx512.vpermi2var.hi.512", _WORDS, _WORDS, _WORDS, _WORDS)
    quarters = [emit.b.call(permute, [vectors[2 * q], index, vectors[2 * q + 1]]) for q in range(4)]

    def bit(value: int) -> Any:
        masked = emit.b.and_(index, ir.Constant(_WORDS, [value] * 32))
        return emit.b.icmp_unsigned("!=", masked, ir.Constant(_WORDS, [0] * 32))

    low, high = (emit.b.select(bit(64), quarters[2 * h + 1], quarters[2 * h]) for h in range(2))
    return emit.b.select(bit(128), high, low)


class _Bytes(_Floats):
    """Reckons what codes of 8bit mean: `width` words give as many even and odd weights."""

    def __init__(self, emit: Emitter, table: Any) -> None:
        super().__init__(emit, "8bit")
        self.codes_a_step = 2 * emit.width
        self._slopes, self._starts = (emit.load(emit.add(table, at), emit.floats, 4) for at in (0, RAMP_BYTES))

    def weights(self, address: Any) -> tuple[Any, Any]:
        emit = self._emit
        wide = emit.b.zext(emit.load(address, ir.VectorType(I16, emit.width), 1), emit.ints)
        return self._meant(emit.b.and_(wide, emit.every(255))), self._meant(emit.b.lshr(wide, emit.every(8)))

    def _meant(self, code: Any) -> Any:
        """On the ramp that the exponent of its distance from zero says, on its side; looking up ignores the sign."""
        emit = self._emit
        large = emit.b.bitcast(emit.b.or_(code, emit.every(_LARGE)), emit.floats)
        distance = emit.b.fsub(large, ir.Constant(emit.floats, [_LARGE_VALUE + RAMP_STEP * ZERO_CODE] * emit.width))
        bits = emit.b.bitcast(distance, emit.ints)
        ramp = emit.b.lshr(bits, emit.every(23))
        start = emit.b.bitcast(emit.look_up(self._starts, ramp), emit.ints)
        start = emit.b.bitcast(emit.b.xor(start, emit.b.and_(bits, emit.every(-(1 << 31)))), emit.floats)
        return emit.fma(emit.look_up(self._slopes, ramp), distance, start)


class _Pairs:
    """Multiplies pairs of bfloat16; inputs are as they come, 64 to a segment. The table ends with a factor."""

    has_factor = True
    _PAIRED = ir.VectorType(_BFloat(), 32)

    def __init__(self, emit: Emitter, scheme: str, table: Any) -> None:
        self._emit = emit
        self._scheme = scheme
        vectors = 1 if scheme == "4bit" else 8
        self._tables = [emit.load(emit.add(table, 64 * at), _WORDS, 2) for at in range(vectors)]
        self.factor = emit.load(emit.add(table, 64 * vectors), F32, 2)

    def inputs(self, even: Any, odd: Any, begin: Any) -> list[Any]:
        """Two vectors of a segment's inputs; for 4bit the even ones first, since a byte's codes come apart so."""
        emit = self._emit
        one, two = (emit.load(emit.add(even, begin, at), _WORDS, 2) for at in (0, 64))
        if self._scheme == "8bit":
            return [one, two]
        order = ir.VectorType(I32, 32)
        return [emit.b.shuffle_vector(one, two, ir.Constant(order, list(range(odd, 64, 2)))) for odd in (0, 1)]

    def products(self, address: Any, inputs: list[list[Any]]) -> list[Any]:
        """Sums of a segment's codes times the inputs of each token, still apart in lanes."""
        emit, paired = self._emit, self._PAIRED
        multiply = emit.function("llvm.x86.avx512bf16.dpbf16ps.512", emit.floats, emit.floats, paired, paired)
        both = [emit.b.bitcast(words, paired) for words in self._weights(address)]
        parts: list[Any] = [emit.zero] * len(inputs)
        for t, vectors in enumerate(inputs):
            for weight, value in zip(both, vectors, strict=True):
                parts[t] = emit.b.call(multiply, [parts[t], weight, emit.b.bitcast(value, paired)])
        return parts

    def _weights(self, address: Any) -> tuple[Any, Any]:
        emit = self._emit
        if self._scheme == "8bit":
            indices = (emit.load(emit.add(address, at), ir.VectorType(I8, 32), 1) for at in (0, 32))
            first, second = (_of_256(emit, self._tables, emit.b.zext(index, _WORDS)) for index in indices)
            return first, second
        permute = emit.function("llvm.x86.avx512.permvar.hi.512", _WORDS, _WORDS, _WORDS)
        wide = emit.b.zext(emit.load(address, ir.VectorType(I8, 32), 1), _WORDS)
        nibbles = (emit.b.lshr(wide, ir.Constant(_WORDS, [4] * 32)), wide)  # the first is in the high half
        first, second = (emit.b.call(permute, [self._tables[0], index]) for index in nibbles)
        return first, second


def _dots(scheme: str, width: int) -> tuple[Any, ...]:
    """For one row and one input, for `ROWS` rows, for `TOKENS` inputs, and for both."""
    return tuple(_dot(scheme, width, rows, tokens) for rows, tokens in ((1, 1), (ROWS, 1), (1, TOKENS), (ROWS, TOKENS)))


def codebook(emit: Emitter, scheme: str, table: Any) -> Any:
    """What finds the float32 values of codes, by the table at an address."""
    return _Nibbles(emit, table) if scheme == "4bit" else _Bytes(emit, table)


def _dot(scheme: str, width: int, rows: int, tokens: int) -> Any:
    """An intrinsic that multiplies `rows` consecutive rows of codes by `tokens` consecutive inputs."""

    @intrinsic
    def dot(context, codes, scales, even, odd, table, out, row_bytes, segments, shift, all_rows, row):  # type: ignore[no-untyped-def]
        """All are int64; the first six are addresses, `row` is the first row."""
        signature = types.void(*[types.int64] * 11)

        def emit_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, scales, even, odd, table, out, row_bytes, segments, shift, all_rows, row = arguments
            emit = Emitter(builder, 16 if width == PAIRS else width)
            meant = _Pairs(emit, scheme, table) if width == PAIRS else codebook(emit, scheme, table)
            segment_bytes = SEGMENT // (2 if scheme == "4bit" else 1)
            input_bytes = builder.mul(segments, number(HALF_BYTES))
            sums = [[emit.variable() for _ in range(tokens)] for _ in range(rows)]
            with cgutils.for_range(builder, segments) as loop:
                at = loop.index
                begins = [builder.mul(input_bytes, number(t)) for t in range(tokens)]
                begins = [emit.add(begin, builder.mul(at, number(HALF_BYTES))) for begin in begins]
                inputs = [meant.inputs(even, odd, begin) for begin in begins]
                # what follows the end of a row is read already; the rows after these come next
                beyond = emit.add(builder.mul(at, number(segment_bytes)), PREFETCHED)
                is_beyond = builder.icmp_unsigned(">=", beyond, row_bytes)
                skipped = builder.select(is_beyond, builder.mul(row_bytes, number(rows - 1)), number(0))
                ahead = emit.add(skipped, PREFETCHED)
                for r in range(rows):
                    here = emit.add(row, r)
                    base = emit.add(codes, builder.mul(here, row_bytes), builder.mul(at, number(segment_bytes)))
                    emit.prefetch(emit.add(base, ahead))
                    parts = meant.products(base, inputs)
                    block = builder.lshr(emit.add(builder.mul(here, segments), at), shift)
                    scale = emit.spread(emit.load(emit.add(scales, builder.mul(block, number(4))), F32, 4))
                    for t in range(tokens):
                        builder.store(emit.fma(parts[t], scale, builder.load(sums[r][t])), sums[r][t])
            for r in range(rows):
                for t in range(tokens):
                    place = emit.add(row, r, builder.mul(all_rows, number(t)))
                    pointer = builder.inttoptr(emit.add(out, builder.mul(place, number(4))), F32.as_pointer())
                    total = emit.sum(builder.load(sums[r][t]))
                    builder.store(builder.fmul(total, meant.factor) if meant.has_factor else total, pointer)
            return context.get_dummy_value()

        return signature, emit_code

    return dot


@inlined
def _tiles(dots, codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    """The loops over rows and inputs, in tiles of `ROWS` and `TOKENS` and what is left of them."""
    one, tall, wide, square = dots
    token = 0
    input_bytes = segments * HALF_BYTES
    while token < tokens:
        e, o, to = even + token * input_bytes, odd + token * input_bytes, out + token * rows * 4
        row = first
        if tokens - token >= TOKENS:
            while row + ROWS <= last:
                square(codes, scales, e, o, table, to, row_bytes, segments, shift, rows, row)
                row += ROWS
            while row < last:
                wide(codes, scales, e, o, table, to, row_bytes, segments, shift, rows, row)
                row += 1
            token += TOKENS
            continue
        while row + ROWS <= last:
            tall(codes, scales, e, o, table, to, row_bytes, segments, shift, rows, row)
            row += ROWS
        while row < last:
            one(codes, scales, e, o, table, to, row_bytes, segments, shift, rows, row)
            row += 1
        token += 1


@inlined
def _part(walk, data):  # type: ignore[no-untyped-def]
    """What one thread of a team does; see `in_a_team`."""
    matrices = to_array(data, BEFORE_WORK)[3]
    given = to_array(data, BEFORE_WORK + GIVEN * matrices)
    number, threads, share = asked(given[0]), asked(given[1]), given[2]
    first = number * share
    for at in range(BEFORE_WORK, BEFORE_WORK + GIVEN * matrices, GIVEN):
        rows = given[at + 10]
        last = rows if number + 1 == threads else min(first + share, rows)
        if first < last:
            walk(
                given[at], given[at + 1], given[at + 2], given[at + 3], given[at + 4], given[at + 5], given[at + 6],
                given[at + 7], given[at + 8], given[at + 9], rows, first, last,
            )  # fmt: skip


# Functions of the module with a name each, since numba keeps no others from one process to the next.

_N16_ONE, _N16_TALL, _N16_WIDE, _N16_SQUARE = _dots("4bit", 16)
_N8_ONE, _N8_TALL, _N8_WIDE, _N8_SQUARE = _dots("4bit", 8)
_B16_ONE, _B16_TALL, _B16_WIDE, _B16_SQUARE = _dots("8bit", 16)
_B8_ONE, _B8_TALL, _B8_WIDE, _B8_SQUARE = _dots("8bit", 8)
_NP_ONE, _NP_TALL, _NP_WIDE, _NP_SQUARE = _dots("4bit", PAIRS)
_BP_ONE, _BP_TALL, _BP_WIDE, _BP_SQUARE = _dots("8bit", PAIRS)


@compiled
def _nibbles_16(codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    dots = (_N16_ONE, _N16_TALL, _N16_WIDE, _N16_SQUARE)
    _tiles(dots, codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows, first, last)


@compiled
def _nibbles_8(codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    dots = (_N8_ONE, _N8_TALL, _N8_WIDE, _N8_SQUARE)
    _tiles(dots, codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows, first, last)


@compiled
def _bytes_16(codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    dots = (_B16_ONE, _B16_TALL, _B16_WIDE, _B16_SQUARE)
    _tiles(dots, codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows, first, last)


@compiled
def _bytes_8(codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    dots = (_B8_ONE, _B8_TALL, _B8_WIDE, _B8_SQUARE)
    _tiles(dots, codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows, first, last)


@compiled
def _nibbles_in_pairs(codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    dots = (_NP_ONE, _NP_TALL, _NP_WIDE, _NP_SQUARE)
    _tiles(dots, codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows, first, last)


@compiled
def _bytes_in_pairs(codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    dots = (_BP_ONE, _BP_TALL, _BP_WIDE, _BP_SQUARE)
    _tiles(dots, codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows, first, last)


def _part_of_nibbles_16(data):  # type: ignore[no-untyped-def]
    _part(_nibbles_16, data)


def _part_of_nibbles_8(data):  # type: ignore[no-untyped-def]
    _part(_nibbles_8, data)


def _part_of_bytes_16(data):  # type: ignore[no-untyped-def]
    _part(_bytes_16, data)


def _part_of_bytes_8(data):  # type: ignore[no-untyped-def]
    _part(_bytes_8, data)


def _part_of_nibbles_in_pairs(data):  # type: ignore[no-untyped-def]
    _part(_nibbles_in_pairs, data)


def _part_of_bytes_in_pairs(data):  # type: ignore[no-untyped-def]
    _part(_bytes_in_pairs, data)


_FUNCTIONS: dict[tuple[str, int], tuple[RowRange, Callable[..., None]]] = {
    ("4bit", 16): (_nibbles_16, _part_of_nibbles_16),
    ("4bit", 8): (_nibbles_8, _part_of_nibbles_8),
    ("8bit", 16): (_bytes_16, _part_of_bytes_16),
    ("8bit", 8): (_bytes_8, _part_of_bytes_8),
    ("4bit", PAIRS): (_nibbles_in_pairs, _part_of_nibbles_in_pairs),
    ("8bit", PAIRS): (_bytes_in_pairs, _part_of_bytes_in_pairs),
}
