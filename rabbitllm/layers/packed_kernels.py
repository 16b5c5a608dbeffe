"""Dot products with rows of 4bit and 8bit codes, compiled for this processor's vectors by numba and LLVM.

A code is looked up in a table that stays in registers, 16 (AVX-512) or 8 (AVX2) codes at a time, multiplied by its
input and summed in float32; a block's sum is multiplied by the block's scale. Nothing is made of the weights on the
way, so the memory read is that of the codes. LLVM does not find these instructions in plain code (it would gather
from memory), so they are asked for by name: VPERMPS for the 16 values of 4bit, VPERMI2W for the upper and lower halves
of the 256 values of 8bit.

Even and odd inputs come in two arrays, because two codes of 4bit share a byte, and so do the halves of 8bit.
Every function releases the interpreter lock. Knows no tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from rabbitllm.layers.compiling import c_function, compiled

SEGMENT = 64
"""Codes that are summed before their scale is applied: a block of 4bit, and the smallest part of one of 8bit."""
PREFETCHED = 512
"""How many bytes ahead codes of 4bit are asked for: four rows at a time are more streams than the processor follows by
itself (28 GB/s without, 31 to 38 with it; at 8bit looking up takes longer than reading)."""
HALF_BYTES = SEGMENT // 2 * 4
"""Of the even inputs of a segment, or the odd ones, float32."""
ROWS, TOKENS = 4, 4
"""Rows of codes that share the reading of an input, and inputs that share the looking up of a code."""

_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)

RowRange = Callable[..., None]
"""Fills out[token, row], float32, for a range of rows. Takes `ARGUMENTS`, first row, last row."""
ARGUMENTS = ("codes", "scales", "even", "odd", "table", "out", "row_bytes", "segments", "shift", "tokens", "rows")
"""Of every function here, all int64: addresses up to `out`; bytes of codes a row, segments a row, the logarithm of
segments a block, inputs, rows in all."""
GIVEN = 2 + len(ARGUMENTS)
"""What a thread of a team is given; see `in_a_team`."""


@functools.cache
def features() -> frozenset[str]:
    """What the processor can do, in LLVM's words."""
    return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)


def lanes(scheme: str) -> int:
    """Codes that are looked up at a time at "4bit" or "8bit"; 0 where there is no kernel for this processor."""
    found = features()
    if scheme == "4bit":
        return 16 if "avx512f" in found else 8 if {"avx2", "fma"} <= found else 0
    return 16 if {"avx512f", "avx512bw"} <= found else 0


def row_range(scheme: str, width: int) -> RowRange:
    """The function for a scheme and so many lanes; compiled when it is first called, or loaded from numba's cache."""
    return _FUNCTIONS[scheme, width][0]


@functools.cache
def in_a_team(scheme: str, width: int) -> int:
    """The address of a function for every thread of an OpenMP team: it is given the address of int64s, which are the
    address of the function that tells its number, rows for each thread, and then `ARGUMENTS`."""
    pointer: Any = types.CPointer
    made = c_function(types.void(pointer(types.int64)), _FUNCTIONS[scheme, width][1])
    _KEPT.append(made)
    return int(made.address)


_KEPT: list[Any] = []
"""Compiled functions whose addresses are in use."""


@intrinsic
def _thread_number(context, address):  # type: ignore[no-untyped-def]
    """What `omp_get_thread_num` says, which is at an address."""

    def emit_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.inttoptr(arguments[0], ir.FunctionType(_I32, []).as_pointer())
        return builder.sext(builder.call(function, []), _I64)

    return types.int64(types.int64), emit_code


@functools.cache
def table_of(scheme: str, levels: bytes) -> npt.NDArray[Any]:
    """The table as the kernels want it, from the float32 values that the codes mean."""
    values = np.frombuffer(levels, np.float32)
    if scheme == "4bit":
        return values.copy()
    words = values.view(np.uint32)
    return np.concatenate([(words >> np.uint32(16)).astype(np.uint16), words.astype(np.uint16)])


class _Emitter:
    """Shorthand over an LLVM builder, for vectors of one width."""

    def __init__(self, builder: Any, width: int) -> None:
        self.b = builder
        self.width = width
        self.floats = ir.VectorType(_F32, width)
        self.ints = ir.VectorType(_I32, width)
        self.bytes = ir.VectorType(_I8, width)
        self.zero = ir.Constant(self.floats, [0.0] * width)

    def function(self, name: str, result: ir.Type, *arguments: ir.Type) -> Any:
        declared = ir.FunctionType(result, arguments)
        return cgutils.get_or_insert_function(self.b.module, declared, name)  # type: ignore[no-untyped-call]

    def variable(self) -> Any:
        """Place for a vector, zero at first, that ends up in a register."""
        return cgutils.alloca_once_value(self.b, self.zero)  # type: ignore[no-untyped-call]

    def load(self, address: Any, kind: ir.Type, alignment: int) -> Any:
        loaded = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        loaded.align = alignment
        return loaded

    def prefetch(self, address: Any) -> None:
        """Ask for the bytes there; harmless where there are none."""
        pointer, read, keep, data = _I8.as_pointer(), *(ir.Constant(_I32, value) for value in (0, 3, 1))
        ask = self.function("llvm.prefetch.p0i8", ir.VoidType(), pointer, _I32, _I32, _I32)
        self.b.call(ask, [self.b.inttoptr(address, pointer), read, keep, data])

    def add(self, *terms: Any) -> Any:
        return functools.reduce(self.b.add, (number(term) for term in terms))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.b.call(
            self.function(f"llvm.fma.v{self.width}f32", self.floats, self.floats, self.floats, self.floats), [a, b, c]
        )

    def every(self, value: int) -> Any:
        return ir.Constant(self.ints, [value] * self.width)

    def spread(self, scalar: Any) -> Any:
        nothing = ir.Constant(self.floats, ir.Undefined)
        first = self.b.insert_element(nothing, scalar, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_I32, self.width), [0] * self.width))

    def sum(self, vector: Any) -> Any:
        add = self.function(f"llvm.vector.reduce.fadd.v{self.width}f32", _F32, _F32, self.floats)
        return self.b.call(add, [ir.Constant(_F32, -0.0), vector], fastmath=("reassoc",))


def number(value: Any) -> Any:
    """An LLVM value, or a Python number as one."""
    return ir.Constant(_I64, value) if isinstance(value, int) else value


class _Nibbles:
    """Looks up codes of 4bit: `width` bytes give as many even and odd weights."""

    def __init__(self, emit: _Emitter, table: Any) -> None:
        self._emit = emit
        self.codes_a_step = 2 * emit.width
        self._tables = [
            emit.load(emit.add(table, 32 * half), emit.floats, 4) for half in range(1 if emit.width == 16 else 2)
        ]

    def weights(self, address: Any) -> tuple[Any, Any]:
        emit = self._emit
        wide = emit.b.zext(emit.load(address, emit.bytes, 1), emit.ints)
        return self._look_up(emit.b.lshr(wide, emit.every(4))), self._look_up(wide)  # the first in the high half

    def _look_up(self, index: Any) -> Any:
        """The instructions look at the lowest 4 bits (of 16 lanes) or 3 (of 8) alone."""
        emit = self._emit
        if emit.width == 16:
            permute = emit.function("llvm.x86.avx512.permvar.sf.512", emit.floats, emit.floats, emit.ints)
            return emit.b.call(permute, [self._tables[0], index])
        permute = emit.function("llvm.x86.avx2.permps", emit.floats, emit.floats, emit.ints)
        low, high = (emit.b.call(permute, [table, index]) for table in self._tables)
        is_high = emit.b.icmp_unsigned("!=", emit.b.and_(index, emit.every(8)), emit.every(0))
        return emit.b.select(is_high, high, low)


class _Bytes:
    """Looks up codes of 8bit: 32 of them give 16 even and 16 odd weights."""

    codes_a_step = 32

    def __init__(self, emit: _Emitter, table: Any) -> None:
        self._emit = emit
        self._words = ir.VectorType(_I16, 32)
        vectors = [emit.load(emit.add(table, 64 * at), self._words, 2) for at in range(16)]
        self._upper, self._lower = vectors[:8], vectors[8:]

    def weights(self, address: Any) -> tuple[Any, Any]:
        emit = self._emit
        index = emit.b.zext(emit.load(address, ir.VectorType(_I8, 32), 1), self._words)
        upper = emit.b.bitcast(self._look_up(self._upper, index), emit.ints)
        lower = emit.b.bitcast(self._look_up(self._lower, index), emit.ints)
        sixteen, low_half = emit.every(16), emit.every(0xFFFF)
        high_half = emit.every(-0x10000)
        even = emit.b.or_(emit.b.shl(upper, sixteen), emit.b.and_(lower, low_half))
        odd = emit.b.or_(emit.b.and_(upper, high_half), emit.b.lshr(lower, sixteen))
        return emit.b.bitcast(even, emit.floats), emit.b.bitcast(odd, emit.floats)

    def _look_up(self, vectors: list[Any], index: Any) -> Any:
        emit, words = self._emit, self._words
        permute = emit.function("llvm.x86.avx512.vpermi2var.hi.512", words, words, words, words)
        quarters = [emit.b.call(permute, [vectors[2 * q], index, vectors[2 * q + 1]]) for q in range(4)]

        def bit(value: int) -> Any:
            masked = emit.b.and_(index, ir.Constant(words, [value] * 32))
            return emit.b.icmp_unsigned("!=", masked, ir.Constant(words, [0] * 32))

        low, high = (emit.b.select(bit(64), quarters[2 * h + 1], quarters[2 * h]) for h in range(2))
        return emit.b.select(bit(128), high, low)


def _dots(scheme: str, width: int) -> tuple[Any, ...]:
    """For one row and one input, for `ROWS` rows, for `TOKENS` inputs, and for both."""
    return tuple(_dot(scheme, width, rows, tokens) for rows, tokens in ((1, 1), (ROWS, 1), (1, TOKENS), (ROWS, TOKENS)))


def _dot(scheme: str, width: int, rows: int, tokens: int) -> Any:
    """An intrinsic that multiplies `rows` consecutive rows of codes by `tokens` consecutive inputs."""

    @intrinsic
    def dot(context, codes, scales, even, odd, table, out, row_bytes, segments, shift, all_rows, row):  # type: ignore[no-untyped-def]
        """All are int64; the first six are addresses, `row` is the first row."""
        signature = types.void(*[types.int64] * 11)

        def emit_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, scales, even, odd, table, out, row_bytes, segments, shift, all_rows, row = arguments
            emit = _Emitter(builder, width)
            codebook = _Nibbles(emit, table) if scheme == "4bit" else _Bytes(emit, table)
            steps = SEGMENT // codebook.codes_a_step
            step_bytes = codebook.codes_a_step // (2 if scheme == "4bit" else 1)
            input_bytes = builder.mul(segments, number(HALF_BYTES))
            sums = [[emit.variable() for _ in range(tokens)] for _ in range(rows)]
            with cgutils.for_range(builder, segments) as loop:
                at = loop.index
                for r in range(rows):
                    here = emit.add(row, r)
                    base = emit.add(codes, builder.mul(here, row_bytes), builder.mul(at, number(steps * step_bytes)))
                    if scheme == "4bit":
                        emit.prefetch(emit.add(base, PREFETCHED))
                    parts: list[Any] = [None] * tokens
                    for step in range(steps):
                        weights = codebook.weights(emit.add(base, step * step_bytes))
                        for t in range(tokens):
                            begin = emit.add(builder.mul(input_bytes, number(t)), builder.mul(at, number(HALF_BYTES)))
                            for weight, half in zip(weights, (even, odd), strict=True):
                                value = emit.load(emit.add(half, begin, step * width * 4), emit.floats, 4)
                                parts[t] = emit.fma(weight, value, emit.zero if parts[t] is None else parts[t])
                    block = builder.lshr(emit.add(builder.mul(here, segments), at), shift)
                    scale = emit.spread(emit.load(emit.add(scales, builder.mul(block, number(4))), _F32, 4))
                    for t in range(tokens):
                        builder.store(emit.fma(parts[t], scale, builder.load(sums[r][t])), sums[r][t])
            for r in range(rows):
                for t in range(tokens):
                    place = emit.add(row, r, builder.mul(all_rows, number(t)))
                    pointer = builder.inttoptr(emit.add(out, builder.mul(place, number(4))), _F32.as_pointer())
                    builder.store(emit.sum(builder.load(sums[r][t])), pointer)
            return context.get_dummy_value()

        return signature, emit_code

    return dot


_compiled: Any = numba.njit(nogil=True)
_to_array: Any = getattr(numba, "carray")  # noqa: B009 - numba does not say that it exports it


@_compiled
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


_number: Any = _thread_number


@_compiled
def _part(walk, data):  # type: ignore[no-untyped-def]
    """What one thread of a team does; see `in_a_team`."""
    given = _to_array(data, GIVEN)
    number, share, rows = _number(given[0]), given[1], given[12]
    if number * share < rows:
        walk(
            given[2], given[3], given[4], given[5], given[6], given[7], given[8], given[9], given[10], given[11], rows,
            number * share, min(number * share + share, rows),
        )  # fmt: skip


# Functions of the module with a name each, since numba keeps no others from one process to the next.

_N16_ONE, _N16_TALL, _N16_WIDE, _N16_SQUARE = _dots("4bit", 16)
_N8_ONE, _N8_TALL, _N8_WIDE, _N8_SQUARE = _dots("4bit", 8)
_B16_ONE, _B16_TALL, _B16_WIDE, _B16_SQUARE = _dots("8bit", 16)


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


def _part_of_nibbles_16(data):  # type: ignore[no-untyped-def]
    _part(_nibbles_16, data)


def _part_of_nibbles_8(data):  # type: ignore[no-untyped-def]
    _part(_nibbles_8, data)


def _part_of_bytes_16(data):  # type: ignore[no-untyped-def]
    _part(_bytes_16, data)


_FUNCTIONS: dict[tuple[str, int], tuple[RowRange, Callable[..., None]]] = {
    ("4bit", 16): (_nibbles_16, _part_of_nibbles_16),
    ("4bit", 8): (_nibbles_8, _part_of_nibbles_8),
    ("8bit", 16): (_bytes_16, _part_of_bytes_16),
}
