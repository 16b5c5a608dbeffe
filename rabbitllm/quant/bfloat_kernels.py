"""Dot products with rows of bfloat16, summed in float32, for processors that have no instructions for that type.

A bfloat16 is the upper half of a float32. 32 bits of a row are two of its values: shifted up they are the even one,
with the lower half cleared the odd one. Inputs are float32 in the same order: a vector of even ones before one of odd
ones. So a value is widened once for all inputs of a tile, in registers, where a library widens the whole matrix into
memory or multiplies it input by input.

Every sum adds its products in the same order, for any number of inputs and any tile: a row of the result is the same
bit for bit alone and among others. Functions release the interpreter lock, and take addresses, not tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from rabbitllm.quant.compiling import compiled
from rabbitllm.quant.row_team import BEFORE_WORK, RowRange, address_of
from rabbitllm.quant.vectors import F32, FOR_A_THREAD, Emitter, asked, inlined, number, to_array

ROWS, INPUTS = 4, 4
"""Rows of the matrix for each load of an input, and inputs for each widened value."""
INPUT_BYTES, MATRIX_BYTES = 1 << 17, 1 << 19
"""Bytes of the inputs and of the rows that are processed together: both fit a core's cache."""
ARGUMENTS = ("matrix", "inputs", "out", "row_bytes", "steps", "tokens", "rows")
"""The arguments of every function here, all int64: three addresses; bytes of a row, steps of two vectors in a row,
inputs, rows of the whole matrix."""
GIVEN = len(ARGUMENTS)


def row_range(width: int) -> RowRange:
    """The function for `width` lanes: fills out[token, row], float32, for a range of rows.

    It takes `ARGUMENTS`, first row, last row.
    """
    return _FUNCTIONS[width][0]


@functools.cache
def in_a_team(width: int) -> int:
    """The address of a function for every thread of an OpenMP team; see `row_team.py`."""
    return address_of(_FUNCTIONS[width][1], FOR_A_THREAD)


def _dot(width: int, rows: int, tokens: int) -> Any:
    """An intrinsic that multiplies `rows` consecutive rows by `tokens` consecutive inputs."""

    @intrinsic
    def dot(context, matrix, inputs, out, row_bytes, steps, all_rows, row):  # type: ignore[no-untyped-def]
        """All arguments are int64; the first three are addresses, `row` is the first row."""
        signature = types.void(*[types.int64] * 7)

        def emit_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            matrix, inputs, out, row_bytes, steps, all_rows, row = arguments
            emit = Emitter(builder, width)
            vector_bytes = 4 * width
            sums = [[emit.variable() for _ in range(tokens)] for _ in range(rows)]
            input_bytes = builder.mul(steps, number(2 * vector_bytes))
            begins = [emit.add(inputs, builder.mul(input_bytes, number(t))) for t in range(tokens)]
            bases = [emit.add(matrix, builder.mul(emit.add(row, r), row_bytes)) for r in range(rows)]
            with cgutils.for_range(builder, steps) as loop:
                at = builder.mul(loop.index, number(vector_bytes))
                places = [emit.add(begin, at, at) for begin in begins]
                given = [
                    [emit.load(emit.add(place, odd), emit.floats, 4) for odd in (0, vector_bytes)] for place in places
                ]
                for r in range(rows):
                    both = emit.load(emit.add(bases[r], at), emit.ints, 2)
                    halves = builder.shl(both, emit.every(16)), builder.and_(both, emit.every(-(1 << 16)))
                    for t in range(tokens):
                        total = builder.load(sums[r][t])
                        for half, value in zip(halves, given[t], strict=True):
                            total = emit.fma(builder.bitcast(half, emit.floats), value, total)
                        builder.store(total, sums[r][t])
            for r in range(rows):
                for t in range(tokens):
                    place = emit.add(row, r, builder.mul(all_rows, number(t)))
                    pointer = builder.inttoptr(emit.add(out, builder.mul(place, number(4))), F32.as_pointer())
                    builder.store(emit.sum(builder.load(sums[r][t])), pointer)
            return context.get_dummy_value()

        return signature, emit_code

    return dot


@inlined
def _tiles(dots, vector_bytes, matrix, inputs, out, row_bytes, steps, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    """The loops over rows and inputs: over parts that fit the cache, in tiles of `ROWS` and `INPUTS`."""
    one, tall, square = dots
    input_bytes = steps * 2 * vector_bytes
    many_inputs = max(INPUT_BYTES // input_bytes // INPUTS, 1) * INPUTS
    many_rows = max(MATRIX_BYTES // row_bytes // ROWS, 1) * ROWS
    for top in range(first, last, many_rows):
        bottom = min(top + many_rows, last)
        for begin in range(0, tokens, many_inputs):
            end = min(begin + many_inputs, tokens)
            row = top
            while row < bottom:
                token = begin
                tall_enough = row + ROWS <= bottom
                while token < end:
                    given, to = inputs + token * input_bytes, out + token * rows * 4
                    if tall_enough and token + INPUTS <= end:
                        square(matrix, given, to, row_bytes, steps, rows, row)
                        token += INPUTS
                    elif tall_enough:
                        tall(matrix, given, to, row_bytes, steps, rows, row)
                        token += 1
                    else:
                        one(matrix, given, to, row_bytes, steps, rows, row)
                        token += 1
                row += ROWS if tall_enough else 1


@inlined
def _part(walk, data):  # type: ignore[no-untyped-def]
    """The share of one thread of a team; there is one piece of work."""
    given = to_array(data, BEFORE_WORK + GIVEN)
    thread, threads, share, rows = asked(given[0]), asked(given[1]), given[2], given[10]
    first = thread * share
    last = rows if thread + 1 == threads else min(first + share, rows)
    if first < last:
        walk(given[4], given[5], given[6], given[7], given[8], given[9], rows, first, last)


# Functions with a name in the module, since numba caches no others for the next process.

_16_ONE, _16_TALL, _16_SQUARE = (_dot(16, rows, tokens) for rows, tokens in ((1, 1), (ROWS, 1), (ROWS, INPUTS)))
_8_ONE, _8_TALL, _8_SQUARE = (_dot(8, rows, tokens) for rows, tokens in ((1, 1), (ROWS, 1), (ROWS, INPUTS)))


@compiled
def _rows_16(matrix, inputs, out, row_bytes, steps, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    dots = (_16_ONE, _16_TALL, _16_SQUARE)
    _tiles(dots, 64, matrix, inputs, out, row_bytes, steps, tokens, rows, first, last)


@compiled
def _rows_8(matrix, inputs, out, row_bytes, steps, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    dots = (_8_ONE, _8_TALL, _8_SQUARE)
    _tiles(dots, 32, matrix, inputs, out, row_bytes, steps, tokens, rows, first, last)


def _part_of_rows_16(data):  # type: ignore[no-untyped-def]
    _part(_rows_16, data)


def _part_of_rows_8(data):  # type: ignore[no-untyped-def]
    _part(_rows_8, data)


_FUNCTIONS: dict[int, tuple[RowRange, Callable[..., None]]] = {
    16: (_rows_16, _part_of_rows_16),
    8: (_rows_8, _part_of_rows_8),
}
