"""Products of many rows with a matrix of 4bit or 8bit codes, summed in float32: a panel of the matrix at a time.

A panel, a few rows of the matrix or parts of long ones, is decoded to float32 once, in memory that stays in a core's
cache, and multiplied with all inputs before the next panel. With many inputs the decoding then costs almost nothing,
while `packed_kernels.py` decodes again for every few inputs. A panel's row consists of steps of two vectors, one of the
values at even indices and one at odd ones, as codes are separated; the inputs have the same order.

Inputs are multiplied by the value of a code times its block's scale, in float32. Every sum adds its products in the
same order, for any number of inputs: a row of the result is the same bit for bit alone and among others. Functions
release the interpreter lock, and take addresses, not tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from rabbitllm.quant.compiling import compiled
from rabbitllm.quant.packed_codes import codebook
from rabbitllm.quant.row_team import BEFORE_WORK, RowRange, address_of
from rabbitllm.quant.vectors import F32, FOR_A_THREAD, I8, Emitter, asked, inlined, number, to_array

ROWS = 4
"""Rows of the matrix for each load of an input."""
INPUTS = {16: 6, 8: 2}
"""Lanes -> inputs for each load of a panel's value; limited by the registers for sums."""
PANEL_ROWS, PANEL_COLUMNS = 32, 2048
"""Size of a panel: 256 KiB, of which `ROWS` rows and their inputs fit a smaller cache."""
PANEL_BYTES = PANEL_ROWS * PANEL_COLUMNS * 4
INPUT_BYTES = 1 << 17
"""Bytes of the inputs that are processed together."""
ARGUMENTS = ("codes", "scales", "table", "inputs", "out", "row_bytes", "steps", "shift", "tokens", "rows")
"""The arguments of every function here, all int64: five addresses; bytes of codes in a row, steps of two vectors in a
row, the logarithm of steps in a block, inputs, rows of the whole matrix."""
GIVEN = len(ARGUMENTS)


def row_range(scheme: str, width: int) -> RowRange:
    """The function for a scheme and `width` lanes: adds to out[token, row], float32, for a range of rows.

    It takes `ARGUMENTS`, first row, last row.
    """
    return _FUNCTIONS[scheme, width][0]


@functools.cache
def in_a_team(scheme: str, width: int) -> int:
    """The address of a function for every thread of an OpenMP team; see `row_team.py`."""
    return address_of(_FUNCTIONS[scheme, width][1], FOR_A_THREAD)


@intrinsic
def _on_the_stack(context):  # type: ignore[no-untyped-def]
    """The address of a panel on the stack, valid until the calling function returns."""

    def emit_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():  # numba's own way would fill it with zeros, value by value
            place = builder.alloca(I8, size=number(PANEL_BYTES))
        place.align = 64
        return builder.ptrtoint(place, ir.IntType(64))

    return types.int64(), emit_code


scratch: Any = _on_the_stack


def _fill(scheme: str, width: int) -> Any:
    """An intrinsic that decodes a part of one row of the matrix to float32."""

    @intrinsic
    def fill(context, codes, scales, table, panel, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
        """All arguments are int64: addresses, `panel` that of a row in the panel; bytes of a row, steps in a row and
        the logarithm of steps in a block of the matrix; the row, its first step, and the number of steps."""
        signature = types.void(*[types.int64] * 10)

        def emit_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, scales, table, panel, row_bytes, all_steps, shift, row, first, steps = arguments
            emit = Emitter(builder, width)
            step_bytes = width * (2 if scheme == "8bit" else 1)
            base = emit.add(codes, builder.mul(row, row_bytes), builder.mul(first, number(step_bytes)))
            before = emit.add(builder.mul(row, all_steps), first)
            meant = codebook(emit, scheme, table)
            with cgutils.for_range(builder, steps) as loop:
                block = builder.lshr(emit.add(before, loop.index), shift)
                scale = emit.spread(emit.load(emit.add(scales, builder.mul(block, number(4))), F32, 4))
                both = meant.weights(emit.add(base, builder.mul(loop.index, number(step_bytes))))
                place = emit.add(panel, builder.mul(loop.index, number(8 * width)))
                for at, value in zip((0, 4 * width), both, strict=True):
                    pointer = builder.inttoptr(emit.add(place, at), emit.floats.as_pointer())
                    builder.store(builder.fmul(value, scale), pointer, align=4)
            return context.get_dummy_value()

        return signature, emit_code

    return fill


def _dot(width: int, rows: int, tokens: int) -> Any:
    """An intrinsic that multiplies `rows` consecutive rows of a panel by `tokens` consecutive inputs."""

    @intrinsic
    def dot(context, panel, inputs, out, steps, panel_bytes, input_bytes, all_rows):  # type: ignore[no-untyped-def]
        """All arguments are int64: addresses of the first row, the first input and the first sum; steps of two vectors;
        bytes from one row to the next, and from one input to the next; rows of the whole matrix."""
        signature = types.void(*[types.int64] * 7)

        def emit_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            panel, inputs, out, steps, panel_bytes, input_bytes, all_rows = arguments
            emit = Emitter(builder, width)
            sums = [[emit.variable() for _ in range(tokens)] for _ in range(rows)]
            begins = [emit.add(inputs, builder.mul(input_bytes, number(t))) for t in range(tokens)]
            bases = [emit.add(panel, builder.mul(panel_bytes, number(r))) for r in range(rows)]
            with cgutils.for_range(builder, builder.mul(steps, number(2))) as loop:
                at = builder.mul(loop.index, number(4 * width))
                given = [emit.load(emit.add(begin, at), emit.floats, 4) for begin in begins]
                for r in range(rows):
                    weight = emit.load(emit.add(bases[r], at), emit.floats, 4)
                    for t in range(tokens):
                        builder.store(emit.fma(weight, given[t], builder.load(sums[r][t])), sums[r][t])
            for r in range(rows):
                for t in range(tokens):
                    place = emit.add(builder.mul(all_rows, number(t)), r)
                    pointer = builder.inttoptr(emit.add(out, builder.mul(place, number(4))), F32.as_pointer())
                    builder.store(builder.fadd(builder.load(pointer), emit.sum(builder.load(sums[r][t]))), pointer)
            return context.get_dummy_value()

        return signature, emit_code

    return dot


@inlined
def _panels(  # type: ignore[no-untyped-def]
    does, at_once, vector_bytes, codes, scales, table, inputs, out, row_bytes, steps, shift, tokens, rows, first, last
):
    """The loops over panels, over inputs that fit the cache, and over tiles of rows and inputs."""
    fill, one, tall, square = does
    panel = scratch()
    step_bytes = 2 * vector_bytes
    input_bytes = steps * step_bytes
    max_steps = PANEL_COLUMNS * 4 // step_bytes
    for top in range(first, last, PANEL_ROWS):
        bottom = min(top + PANEL_ROWS, last)
        for left in range(0, steps, max_steps):
            count = min(max_steps, steps - left)
            panel_bytes = count * step_bytes
            many_inputs = max(INPUT_BYTES // panel_bytes // at_once, 1) * at_once
            for row in range(top, bottom):
                place = panel + (row - top) * panel_bytes
                fill(codes, scales, table, place, row_bytes, steps, shift, row, left, count)
            for begin in range(0, tokens, many_inputs):
                end = min(begin + many_inputs, tokens)
                row = top
                while row < bottom:
                    here, token = panel + (row - top) * panel_bytes, begin
                    is_tall = row + ROWS <= bottom
                    while token < end:
                        given = inputs + token * input_bytes + left * step_bytes
                        to = out + (token * rows + row) * 4
                        if is_tall and token + at_once <= end:
                            square(here, given, to, count, panel_bytes, input_bytes, rows)
                            token += at_once
                        elif is_tall:
                            tall(here, given, to, count, panel_bytes, input_bytes, rows)
                            token += 1
                        else:
                            one(here, given, to, count, panel_bytes, input_bytes, rows)
                            token += 1
                    row += ROWS if is_tall else 1


@inlined
def _part(walk, data):  # type: ignore[no-untyped-def]
    """The share of one thread of a team; see `row_team.py`."""
    matrices = to_array(data, BEFORE_WORK)[3]
    given = to_array(data, BEFORE_WORK + GIVEN * matrices)
    thread, threads, share = asked(given[0]), asked(given[1]), given[2]
    first = thread * share
    for at in range(BEFORE_WORK, BEFORE_WORK + GIVEN * matrices, GIVEN):
        rows = given[at + 9]
        last = rows if thread + 1 == threads else min(first + share, rows)
        if first < last:
            walk(
                given[at], given[at + 1], given[at + 2], given[at + 3], given[at + 4], given[at + 5], given[at + 6],
                given[at + 7], given[at + 8], rows, first, last,
            )  # fmt: skip


# Functions with a name in the module, since numba caches no others for the next process.

_16_ONE, _16_TALL, _16_SQUARE = (_dot(16, *shape) for shape in ((1, 1), (ROWS, 1), (ROWS, INPUTS[16])))
_8_ONE, _8_TALL, _8_SQUARE = (_dot(8, *shape) for shape in ((1, 1), (ROWS, 1), (ROWS, INPUTS[8])))
_N16_FILL, _B16_FILL = (_fill(scheme, 16) for scheme in ("4bit", "8bit"))
_N8_FILL, _B8_FILL = (_fill(scheme, 8) for scheme in ("4bit", "8bit"))


@compiled
def _nibbles_16(codes, scales, table, inputs, out, row_bytes, steps, shift, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    does = (_N16_FILL, _16_ONE, _16_TALL, _16_SQUARE)
    _panels(does, 6, 64, codes, scales, table, inputs, out, row_bytes, steps, shift, tokens, rows, first, last)


@compiled
def _bytes_16(codes, scales, table, inputs, out, row_bytes, steps, shift, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    does = (_B16_FILL, _16_ONE, _16_TALL, _16_SQUARE)
    _panels(does, 6, 64, codes, scales, table, inputs, out, row_bytes, steps, shift, tokens, rows, first, last)


@compiled
def _nibbles_8(codes, scales, table, inputs, out, row_bytes, steps, shift, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    does = (_N8_FILL, _8_ONE, _8_TALL, _8_SQUARE)
    _panels(does, 2, 32, codes, scales, table, inputs, out, row_bytes, steps, shift, tokens, rows, first, last)


@compiled
def _bytes_8(codes, scales, table, inputs, out, row_bytes, steps, shift, tokens, rows, first, last):  # type: ignore[no-untyped-def]
    does = (_B8_FILL, _8_ONE, _8_TALL, _8_SQUARE)
    _panels(does, 2, 32, codes, scales, table, inputs, out, row_bytes, steps, shift, tokens, rows, first, last)


def _part_of_nibbles_16(data):  # type: ignore[no-untyped-def]
    _part(_nibbles_16, data)


def _part_of_bytes_16(data):  # type: ignore[no-untyped-def]
    _part(_bytes_16, data)


def _part_of_nibbles_8(data):  # type: ignore[no-untyped-def]
    _part(_nibbles_8, data)


def _part_of_bytes_8(data):  # type: ignore[no-untyped-def]
    _part(_bytes_8, data)


_FUNCTIONS: dict[tuple[str, int], tuple[RowRange, Callable[..., None]]] = {
    ("4bit", 16): (_nibbles_16, _part_of_nibbles_16),
    ("8bit", 16): (_bytes_16, _part_of_bytes_16),
    ("4bit", 8): (_nibbles_8, _part_of_nibbles_8),
    ("8bit", 8): (_bytes_8, _part_of_bytes_8),
}
