"""Dot products with rows of 4bit and 8bit codes, compiled for this processor's vectors by numba and LLVM.

Weights are never written to memory, so only the bytes of the codes are read: segments of them are multiplied by their
inputs by code of `packed_codes.py`, and summed in float32; a block's sum is multiplied by the block's scale. This
module has the loops over segments and over tiles of rows and inputs, and a function for every scheme and width.

Every function releases the interpreter lock, and takes addresses, not tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from rabbitllm.quant.code_tables import PAIRS
from rabbitllm.quant.compiling import compiled
from rabbitllm.quant.packed_codes import HALF_BYTES, SEGMENT, Pairs, codebook
from rabbitllm.quant.row_team import BEFORE_WORK, RowRange, address_of
from rabbitllm.quant.vectors import F32, FOR_A_THREAD, Emitter, asked, inlined, number, to_array

PREFETCHED = 2048
"""How many bytes ahead codes are prefetched; the processor's own prefetcher does not follow four rows at a time."""
ROWS, TOKENS = 4, 4
"""Rows of codes for each load of an input, and inputs for each lookup of a code."""
ARGUMENTS = ("codes", "scales", "even", "odd", "table", "out", "row_bytes", "segments", "shift", "tokens", "rows")
"""The arguments of every function here, all int64: addresses up to `out`; bytes of codes in a row, segments in a row,
the logarithm of segments in a block, inputs, rows of the whole matrix."""
GIVEN = len(ARGUMENTS)


def row_range(scheme: str, width: int) -> RowRange:
    """The function for `width` lanes: fills out[token, row], float32, for a range of rows.

    It takes `ARGUMENTS`, first row, last row, and is compiled when it is first called, or loaded from numba's cache.
    """
    return _FUNCTIONS[scheme, width][0]


@functools.cache
def in_a_team(scheme: str, width: int) -> int:
    """The address of a function for every thread of an OpenMP team; see `row_team.py`."""
    return address_of(_FUNCTIONS[scheme, width][1], FOR_A_THREAD)


def _dots(scheme: str, width: int) -> tuple[Any, ...]:
    """Intrinsics for one row and one input, for `ROWS` rows, for `TOKENS` inputs, and for both."""
    return tuple(_dot(scheme, width, rows, tokens) for rows, tokens in ((1, 1), (ROWS, 1), (1, TOKENS), (ROWS, TOKENS)))


def _dot(scheme: str, width: int, rows: int, tokens: int) -> Any:
    """An intrinsic that multiplies `rows` consecutive rows of codes by `tokens` consecutive inputs."""

    @intrinsic
    def dot(context, codes, scales, even, odd, table, out, row_bytes, segments, shift, all_rows, row):  # type: ignore[no-untyped-def]
        """All arguments are int64; the first six are addresses, `row` is the first row."""
        signature = types.void(*[types.int64] * 11)

        def emit_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, scales, even, odd, table, out, row_bytes, segments, shift, all_rows, row = arguments
            emit = Emitter(builder, 16 if width == PAIRS else width)
            meant = Pairs(emit, scheme, table) if width == PAIRS else codebook(emit, scheme, table)
            segment_bytes = SEGMENT // (2 if scheme == "4bit" else 1)
            input_bytes = builder.mul(segments, number(HALF_BYTES))
            sums = [[emit.variable() for _ in range(tokens)] for _ in range(rows)]
            with cgutils.for_range(builder, segments) as loop:
                at = loop.index
                begins = [builder.mul(input_bytes, number(t)) for t in range(tokens)]
                begins = [emit.add(begin, builder.mul(at, number(HALF_BYTES))) for begin in begins]
                inputs = [meant.inputs(even, odd, begin) for begin in begins]
                # the bytes after the end of a row are in the cache already; the next tile's rows are needed next
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
    """The loops over rows and inputs, in tiles of `ROWS` and `TOKENS` and smaller ones at the ends."""
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
    """The share of one thread of a team; see `in_a_team`."""
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


# Functions with a name in the module, since numba caches no others for the next process.

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
