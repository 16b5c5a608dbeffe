"""Kernels of products (`_kernel_interface.py`), compiled for this processor's vectors by numba and LLVM.

**By codes.** Only the bytes of the codes are read: steps of them are multiplied by their inputs in registers, and the
products by their scales, summed in float32. Fills out[token, row], float32.

**Numbers.** Fills out[row, column], float32 or bfloat16.

**By panels.** A panel, a few rows of the matrix or parts of long ones, is decoded once, to integers
(`_byte_kernels.py`), or bfloat16 to float32, in memory that stays in a core's cache, and multiplied with all inputs
before the next panel. Fills out[token, row], float32, and then the same in bfloat16 if the address of that is given.

**Turned.** Rows of a matrix (K, N), some columns of them, are multiplied by an input each and added, in their order;
some are decoded before, to bfloat16. Fills out[token, column], float32.

**bfloat16**, for processors that have no instructions for that type: the upper half of a float32. 32 bits are two
values: shifted up they are the even one, with the lower half cleared the odd one. Steps are two vectors, one of each;
inputs have the same order. For many inputs panels are made of them; for few the matrix is the panel, and they are
widened in registers.

Every sum adds its products in the same order, for any number of inputs and any tile: a row of the result is the same
bit for bit alone and among others. Functions release the interpreter lock, and take addresses, not tensors.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir

from rabbitllm.base.compiling import compiled, floats_at, to_array, wide, words_at
from rabbitllm.quant._integers import OWN_STEPS, TOGETHER, CodeSteps
from rabbitllm.quant._kernel_interface import (
    ARGUMENTS,
    BEFORE_WORK,
    BFLOAT16,
    BFLOATS,
    FLOAT16,
    NUMBERS,
    PANELS,
    PLAIN,
    TURNED,
)
from rabbitllm.quant._vectors import (
    CODEBOOKS,
    F32,
    Emitter,
    emit_narrow,
    emitted,
    inlined,
    is_zen,
    lanes,
    narrowed,
    number,
    on_stack,
)

ROWS, CODE_ROWS = 4, max(lanes() // 8, 1)
"""Rows of the matrix for each load of an input, of a panel and by codes. More rows of codes are no faster in the cache,
and read from memory they are slower: the processor's own prefetcher does not follow so many. AVX2 has too few registers
for sums of two rows with several inputs."""
LONG_BYTES = 6144
"""Bytes of a row's codes from which one input, too, is loaded for two rows at a time: with 14,336 and 28,672 columns it
no longer fits the smallest cache, and 4bit is read at 1.1 and 1.4 times the rate. Shorter rows are read one by one: of
2,048 columns at 1 to 1.15 times the rate, 8bit of 768 at 1.18 times (Zen 4)."""
LONG_ROW = 16384
"""Bytes of a row of plain values from which one input is loaded for `ROWS` rows: of 14,336 columns they are read at 1.2
times the rate of one row, of 768 to 4,096 at 0.7 to 0.8 times, of 8,192 alike (Zen 5; AVX2 0.75 to 0.9)."""
NEAR_ROWS = 32
"""Rows whose codes stay in a core's cache until they are multiplied with all inputs."""
TOKENS = 4
"""Inputs for each lookup of a code."""
LEAST_WIDE, LEAST_SLOW = 3, 2
"""Inputs for which `TOKENS` are multiplied, some of them twice: code by code they take longer. The second is for codes
that are slow to decode, or of which several segments are multiplied together."""
PANEL_TOKENS = {16: 6, 8: 3}
"""Lanes -> inputs for each load of a panel's value; limited by the registers for sums."""
PREFETCHED, CACHES = 8192, 2 if is_zen() else 3
"""How many bytes ahead codes are prefetched, and in how many caches they stay. On Zen 4 the smallest cache is left to
inputs: a token takes 0.83 to 0.87 of its time with codes there alone, which take 3 times as long on an Intel Xeon."""
PANEL_ROWS, PANEL_COLUMNS = 128, 1024
"""Size of a panel: 512 KiB, of which `ROWS` rows and their inputs fit the smallest cache. With half the rows all inputs
are read twice as often: 512 of them took 1.06 times as long."""
INPUT_BYTES = 1 << 17
"""Bytes of the inputs that are processed together, which fit a core's cache beside the panel."""
SUMMED, DECODED = 4096, 8
"""Columns whose sums stay in the cache while rows of a turned matrix are added, and rows that are decoded at a time."""
STEP_BYTES = {"4bit": 1, "8bit": 2, BFLOAT16: 4, FLOAT16: 4}
"""Scheme -> bytes of two codes, of which a panel's step has as many pairs as a vector has lanes."""
PIECE_WORDS = len(ARGUMENTS)


def step_size(method: str, width: int) -> int:
    """Bytes of the numbers of a step of two vectors."""
    return (4 if method == BFLOATS else 8) * width


@inlined
def pieces(data):  # type: ignore[no-untyped-def]
    """The int64s at an address; each piece of work begins at a multiple of `PIECE_WORDS` after `BEFORE_WORK`."""
    return to_array(data, BEFORE_WORK + PIECE_WORDS * to_array(data, BEFORE_WORK)[1])


@inlined
def arguments(words, i):  # type: ignore[no-untyped-def]
    """The piece of work at an index, as `_kernel_interface.ARGUMENTS`."""
    return (
        words[i], words[i + 1], words[i + 2], words[i + 3], words[i + 4], words[i + 5],
        words[i + 6], words[i + 7], words[i + 8], words[i + 9], words[i + 10],
    )  # fmt: skip


@inlined
def own_rows(words, start, end, parts, rows):  # type: ignore[no-untyped-def]
    """The first row of some of so many parts, which are as even as whole tiles allow, and the one after their last."""
    last = rows if end == parts else rows * end // parts // words[0] * words[0]
    return rows * start // parts // words[0] * words[0], last


# By codes.


@inlined
def _row_after(words, products, tokens, rows):  # type: ignore[no-untyped-def]
    """The first row after so many products, at a tile's begin. Parts of chosen experts are long runs of a few of them,
    read at 1.03 times the rate of some rows of each (Zen 5)."""
    row = max(products, 0) // max(tokens, 1)
    return rows if row >= rows else row // words[0] * words[0]


def _code_dot(make: Callable[[Emitter, Any], CodeSteps], width: int, together: int, rows: int, tokens: int) -> Any:
    """An intrinsic that multiplies `rows` consecutive rows of codes by up to `tokens` consecutive inputs.

    So many rows `together` share each load of an input; the sums of all are added up at the end.
    """

    def dot(emit, codes, scales, even, odd, table, out, row_bytes, steps, shift, count, all_rows, row, token):  # type: ignore[no-untyped-def]
        """All arguments are int64: `ARGUMENTS`, then the first row and the first input."""
        b, of_steps = emit.b, make(emit, table)
        floats = ir.VectorType(F32, of_steps.accumulators[0] * of_steps.turns)
        nbytes = 4 * floats.count
        last, numbers = b.sub(count, number(1)), [emit.add(token, t) for t in range(tokens)]
        # a tile with fewer inputs computes the last one again
        numbers[1:] = [b.select(b.icmp_signed("<", t, last), t, last) for t in numbers[1:]]
        sizes = (even, of_steps.input_bytes), (odd, of_steps.other_bytes)
        before = [b.mul(steps, t) for t in numbers]
        totals = emit.memory(rows * tokens * nbytes)
        with emit.loop(number(rows // together)) as group:
            first = b.mul(group, number(together))
            sums = [[[*map(emit.variable, of_steps.accumulators)] for _ in numbers] for _ in range(together)]

            def add(some: CodeSteps, step: Any, turn: int = 0, first: Any = first, sums: Any = sums) -> None:
                """Add the products of the steps that are multiplied together, from one on."""
                places = [emit.add(steps_before, step) for steps_before in before]
                inputs = [some.inputs(*(emit.add(at, b.mul(n, number(m))) for at, m in sizes)) for n in places]
                begin = b.mul(step, number(some.code_bytes))
                # the bytes after the end of a row are in the cache already; the next rows are needed next
                is_beyond = b.icmp_unsigned(">=", emit.add(begin, PREFETCHED), row_bytes)
                ahead = emit.add(b.select(is_beyond, b.mul(row_bytes, number(together - 1)), number(0)), PREFETCHED)
                for r, of_row in enumerate(sums):
                    position = scales, emit.add(row, first, r), steps, step, shift
                    address = emit.add(codes, b.mul(position[1], row_bytes), begin)
                    for line in range(0, some.code_bytes * some.together, 64):
                        emit.prefetch(emit.add(address, ahead, line), CACHES)
                    for accumulator, values, scales_of in some.products(address, inputs, position):
                        for variables, value, scale in zip(of_row, values, scales_of, strict=False):
                            total = variables[accumulator + turn]
                            b.store(emit.fma(value, scale, b.load(total)), total)

            at_once = number(of_steps.together * of_steps.turns)
            with emit.loop(b.udiv(steps, at_once)) as index:
                for turn in range(of_steps.turns):
                    add(of_steps, emit.add(b.mul(index, at_once), turn * of_steps.together), turn)
            if of_steps.rest is not None:
                left = b.urem(steps, at_once)
                with emit.loop(left) as index:
                    add(of_steps.rest, emit.add(b.sub(steps, left), index))
            for (r, of_row), t in itertools.product(enumerate(sums), range(tokens)):
                place = emit.add(totals, b.mul(emit.add(first, r + rows * t), number(nbytes)))
                emit.store(of_steps.total(*map(b.load, of_row[t])), place, 4)
        for n, t in zip(range(0, rows * tokens, rows), numbers, strict=True):
            of_rows = emit.sum(*(emit.load(emit.add(totals, nbytes * r), floats, 4) for r in range(n, n + rows)))
            if of_steps.factor is not None:
                of_rows = b.fmul(of_rows, emit.spread(of_steps.factor, of_rows.type.count))
            emit.store(of_rows, emit.add(out, b.mul(emit.add(row, b.mul(all_rows, t)), number(4))), 4)

    return emitted(dot, width)


# By panels.


stack_panel: Any = on_stack(PANEL_ROWS * PANEL_COLUMNS * 4)


def _fill(scheme: str, width: int) -> Any:
    """An intrinsic that decodes a part of one row of the matrix, to bfloat16, or plain values to float32."""
    step_bytes, is_coded = width * STEP_BYTES[scheme], scheme not in PLAIN.values()
    nbytes = step_size(BFLOATS if is_coded else PANELS, width)

    def fill(emit, codes, scales, table, panel, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
        """All arguments are int64: addresses, `panel` that of a row in the panel; bytes of a row, steps in a row and
        the logarithm of steps in a block of the matrix; the row, its first step, and the number of steps."""
        builder = emit.b
        base = emit.add(codes, builder.mul(row, row_bytes), builder.mul(first, number(step_bytes)))
        before = emit.add(builder.mul(row, all_steps), first)
        decode = CODEBOOKS[scheme](emit, table)
        with emit.loop(steps) as index:
            both = decode(emit.add(base, builder.mul(index, number(step_bytes))))
            if is_coded:
                block = builder.lshr(emit.add(before, index), shift)
                scale = emit.spread(emit.load(emit.add(scales, builder.mul(block, number(4))), F32, 4))
                both = builder.fmul(both[0], scale), builder.fmul(both[1], scale)
                even, odd = (narrowed(builder, builder.bitcast(value, emit.ints)) for value in both)
                upper = builder.and_(odd, emit.every(-(1 << 16)))
                stored = builder.or_(upper, builder.lshr(even, emit.every(16)))  # two bfloat16, in their order
            else:
                stored = emit.joined(*both)
            emit.store(stored, emit.add(panel, builder.mul(index, number(nbytes))), 2)

    return emitted(fill, width)


def _panel_dot(width: int, rows: int, tokens: int, scheme: str | None = None) -> Any:
    """An intrinsic that multiplies `rows` consecutive rows of a panel by `tokens` consecutive inputs.

    Plain values of a `scheme` are widened in registers: then the matrix itself is the panel.
    """

    def dot(emit, panel, inputs, out, steps, panel_bytes, input_bytes, all_rows, left):  # type: ignore[no-untyped-def]
        """All arguments are int64: addresses of the first row, the first input and the first sum; steps of two vectors;
        bytes from one row to the next, and from one input to the next; rows of the whole matrix."""
        b, nbytes = emit.b, 4 * width
        sums = [[emit.variable() for _ in range(tokens)] for _ in range(rows)]
        begins = [emit.add(inputs, b.mul(input_bytes, number(t))) for t in range(tokens)]
        bases = [emit.add(panel, b.mul(panel_bytes, number(r))) for r in range(rows)]
        widen = CODEBOOKS[scheme](emit, None) if scheme is not None else None

        def both(address: Any) -> list[Any]:
            return [emit.load(emit.add(address, offset), emit.floats, 4) for offset in (0, nbytes)]

        with emit.loop(steps) as step:
            offset = b.mul(step, number(2 * nbytes))
            at = b.mul(step, number(nbytes)) if widen else offset
            weights = [(widen or both)(emit.add(base, at)) for base in bases]
            ahead = number(PREFETCHED) if rows == 1 else b.mul(panel_bytes, number(rows))
            for base in bases if widen else ():  # of several rows the next tile, which no prefetcher expects
                emit.prefetch(emit.add(base, at, ahead), CACHES)
            vectors = [both(emit.add(begin, offset)) for begin in begins]
            for half, of_row, t in itertools.product(range(2), range(rows), range(tokens)):
                total = sums[of_row][t]
                b.store(emit.fma(weights[of_row][half], vectors[t][half], b.load(total)), total)
        for t, of_token in enumerate(zip(*sums, strict=True)):  # of consecutive rows
            totals = emit.sum(*map(b.load, of_token))
            place = emit.add(out, b.mul(all_rows, number(4 * t)))
            emit.store(b.fadd(emit.load(place, totals.type, 4), totals), place, 4)

    return emitted(dot, width)


@compiled
def add_columns(x, rows, out, begin, end):  # type: ignore[no-untyped-def]
    """Add `x @ rows` to `out`, some columns of it, in the order of the rows: float32 (T, k), bits of bfloat16 (k, N),
    float32 (T, N).

    Eight rows at a time: sums are loaded and stored once for them, and each row is read in long runs.
    """
    eights = len(rows) // 8 * 8
    for first in range(begin, min(end, rows.shape[1]), SUMMED):
        last = min(first + SUMMED, end, rows.shape[1])
        for k in range(0, eights, 8):
            a, b, c, d = rows[k, first:last], rows[k + 1, first:last], rows[k + 2, first:last], rows[k + 3, first:last]
            i = k + 4
            e, f, g, h = rows[i, first:last], rows[i + 1, first:last], rows[i + 2, first:last], rows[i + 3, first:last]
            for t in range(len(out)):
                sums, factors = out[t, first:last], x[t, k : k + 8]
                for n in range(len(sums)):
                    total = sums[n] + factors[0] * wide(a[n])
                    total = total + factors[1] * wide(b[n])
                    total = total + factors[2] * wide(c[n])
                    total = total + factors[3] * wide(d[n])
                    total = total + factors[4] * wide(e[n])
                    total = total + factors[5] * wide(f[n])
                    total = total + factors[6] * wide(g[n])
                    sums[n] = total + factors[7] * wide(h[n])
        for k in range(eights, len(rows)):
            row = rows[k, first:last]
            for t in range(len(out)):
                sums, factor = out[t, first:last], x[t, k]
                for n in range(len(sums)):
                    sums[n] += factor * wide(row[n])


# The kernels. numba keeps a compiled function for the next process only if it has a name in a module and all that it
# uses is global. So each kernel is a template with a name and globals of its own.

ONE: Any = None
SHORT = TALL = WIDE = SQUARE = LEAST = TILE = FILL = AT_ONCE = NBYTES = MAX_STEPS = STEP = ONE
NARROW = emitted(emit_narrow, 16)
IN_PLACE, IS_SHARED, GROUP, TURN = False, False, 1, emitted(lambda emit, rows, panel, row_bytes: None, 8)


def _by_codes(data, start, end, parts):  # type: ignore[no-untyped-def]
    """The loops over rows and inputs, in tiles of `TILE` and `TOKENS` and smaller ones at the ends."""
    words, all_work = pieces(data), 0
    for piece in range(BEFORE_WORK, len(words), PIECE_WORDS):
        all_work += words[piece + 9] * words[piece + 10]
    begin, stop = all_work * start // parts, all_work * end // parts
    for piece in range(BEFORE_WORK, len(words), PIECE_WORDS):
        work = arguments(words, piece)
        tokens, rows, is_long = work[9], work[10], work[6] >= LONG_BYTES
        first, last = _row_after(words, begin, tokens, rows), _row_after(words, stop, tokens, rows)
        begin, stop = begin - tokens * rows, stop - tokens * rows
        for top in range(first, last, NEAR_ROWS):
            bottom, token = min(top + NEAR_ROWS, last), 0
            while token < tokens:
                row, is_wide = top, tokens - token >= LEAST
                while row < bottom:
                    is_tall = row + TILE <= bottom
                    if is_wide and is_tall:
                        SQUARE(*work, row, token)
                    elif is_wide:
                        WIDE(*work, row, token)
                    elif is_tall and (is_long or not IS_SHARED):
                        TALL(*work, row, token)
                    elif is_tall:
                        SHORT(*work, row, token)
                    else:
                        ONE(*work, row, token)
                    row += TILE if is_tall else 1
                token += TOKENS if is_wide else 1


def _by_numbers(data, start, end, parts):  # type: ignore[no-untyped-def]
    words = pieces(data)
    for piece in range(BEFORE_WORK, len(words), PIECE_WORDS):
        codes, scales, _, _, table, out, row_bytes, steps, shift, _, rows = arguments(words, piece)
        first, last = own_rows(words, start, end, parts, rows)
        for row in range(first, last):
            FILL(codes, scales, table, out + row * steps * NBYTES, row_bytes, steps, shift, row, 0, steps)


def _by_panels(data, start, stop, parts):  # type: ignore[no-untyped-def]
    """The loops over panels, over inputs that fit the cache, and over tiles of rows and inputs."""
    panel = stack_panel()
    words = pieces(data)
    for piece in range(BEFORE_WORK, len(words), PIECE_WORDS):
        codes, scales, inputs, rounded, table, out, row_bytes, steps, shift, tokens, rows = arguments(words, piece)
        first, last = own_rows(words, start, stop, parts, rows)
        input_bytes, height = steps * NBYTES, PANEL_ROWS
        if IN_PLACE and tokens == 1 and row_bytes < LONG_ROW:
            height = 1
        for top in range(first, last, height):
            bottom = min(top + height, last)
            for step in range(0, steps, MAX_STEPS):
                count = min(MAX_STEPS, steps - step)
                panel_bytes = count * NBYTES
                many_inputs = max(INPUT_BYTES // panel_bytes // AT_ONCE, 1) * AT_ONCE
                if IN_PLACE:
                    panel, panel_bytes = codes + top * row_bytes + step * NBYTES // 2, row_bytes
                else:
                    for row in range(top, bottom):
                        lane = (row - top) % GROUP
                        group = panel + (row - top - lane) * panel_bytes
                        rows_of_group = panel + PANEL_ROWS * MAX_STEPS * NBYTES if GROUP > 1 else group
                        place = rows_of_group + lane * panel_bytes
                        FILL(codes, scales, table, place, row_bytes, steps, shift, row, step, count)
                        if GROUP > 1 and (lane == GROUP - 1 or row == bottom - 1):
                            TURN(rows_of_group, group, panel_bytes)
                for begin in range(0, tokens, many_inputs):
                    end = min(begin + many_inputs, tokens)
                    for token in range(begin, end if step == 0 else begin):
                        to_array(words_at(out + (token * rows + top) * 4), 2 * (bottom - top))[:] = 0
                    row = top
                    while row < bottom:
                        here, token = panel + (row - top) * panel_bytes, begin
                        is_tall = row + TILE <= bottom
                        while token < end:
                            of_token = inputs + token * input_bytes + step * NBYTES
                            to = out + (token * rows + row) * 4
                            if is_tall and token + AT_ONCE <= end:
                                SQUARE(here, of_token, to, count, panel_bytes, input_bytes, rows, bottom - row)
                                token += AT_ONCE
                            elif is_tall:
                                TALL(here, of_token, to, count, panel_bytes, input_bytes, rows, bottom - row)
                                token += 1
                            else:
                                ONE(here, of_token, to, count, panel_bytes, input_bytes, rows, bottom - row)
                                token += 1
                        row += TILE if is_tall else GROUP
                    is_rounded = not IN_PLACE and rounded != 0 and step + count == steps
                    for token in range(begin, end if is_rounded else begin):
                        place = token * rows + top
                        NARROW(out + 4 * place, rounded + 2 * place, bottom - top)


def _by_turned(data, start, end, parts):  # type: ignore[no-untyped-def]
    """The loops over columns and rows; of `STEP` columns is a step of what is decoded."""
    words = pieces(data)
    for piece in range(BEFORE_WORK, len(words), PIECE_WORDS):
        codes, scales, inputs, _, table, out, row_bytes, count, shift, tokens, columns = arguments(words, piece)
        first, last = own_rows(words, start, end, parts, columns)
        x, sums = to_array(floats_at(inputs), (tokens, count)), to_array(floats_at(out), (tokens, columns))
        sums[:, first:last] = np.float32(0)
        if IN_PLACE:
            add_columns(x, to_array(words_at(codes), (count, columns)), sums, first, last)
            continue
        rows, factors = np.empty((DECODED, columns), np.uint16), np.empty((tokens, DECODED), np.float32)
        for begin in range(first, last, SUMMED):
            steps = (min(begin + SUMMED, last) - begin) // STEP
            for k in range(0, count, DECODED):
                some = min(DECODED, count - k)
                for i in range(some):
                    place = np.int64(rows.ctypes.data) + 2 * (i * columns + begin)
                    FILL(codes, scales, table, place, row_bytes, columns // STEP, shift, k + i, begin // STEP, steps)
                    for token in range(tokens):
                        factors[token, i] = x[token, k + i]
                add_columns(factors, rows[:some], sums, begin, begin + steps * STEP)


def named(template: Any, name: str, **constants: Any) -> Callable[[Any], None]:
    """A kernel of this name from a template, which uses the globals of its module and these instead of some."""
    kernel = FunctionType(template.__code__, {**template.__globals__, **constants}, name)
    kernel.__qualname__, kernel.__module__ = name, template.__module__
    return kernel


def panel_kernel(
    name: str, fill: Any, dot: Callable[[int, int], Any], tile: tuple[int, int], step_bytes: int, **others: Any
) -> Callable[[Any], None]:
    """A kernel by panels: of intrinsics like those of `_fill` and `_panel_dot`, for tiles of so many rows, or groups of
    `GROUP` rows, and inputs; a step of a panel and of inputs has so many bytes."""
    rows, tokens = tile
    single, tall, square = (dot(*shape) for shape in ((1, 1), (rows, 1), tile))
    constants = {"ONE": single, "TALL": tall, "SQUARE": square, "AT_ONCE": tokens, "FILL": fill, "NBYTES": step_bytes}
    sizes = {"TILE": rows * others.get("GROUP", GROUP), "MAX_STEPS": PANEL_COLUMNS * 4 // step_bytes}
    return named(_by_panels, name, **{**constants, **sizes, **others})


def rows_kernel(name: str, fill: Any, step_bytes: int) -> Callable[[Any], None]:
    """A kernel that stores what `fill` makes of each row, which has so many bytes a step."""
    return named(_by_numbers, name, FILL=fill, NBYTES=step_bytes)


def code_kernel(
    name: str, make: Callable[[Emitter, Any], CodeSteps], width: int, least: int = LEAST_WIDE, rows: int = CODE_ROWS
) -> Callable[[Any], None]:
    """The kernel by codes of steps that `make` returns for an emitter and the address of a table, with so many rows
    for each load of inputs; for `least`, see `LEAST_WIDE`."""
    shapes = (1, 1, 1), (1, ROWS, 1), (rows, ROWS, 1), (1, 1, TOKENS), (rows, ROWS, TOKENS)
    single, short, tall, wide, square = (_code_dot(make, width, *shape) for shape in shapes)
    dots = {"ONE": single, "SHORT": short, "TALL": tall, "WIDE": wide, "SQUARE": square}
    return named(_by_codes, name, LEAST=least, TILE=ROWS, IS_SHARED=rows > 1, **dots)


def kernel(method: str, scheme: str, width: int) -> Callable[[Any], None]:
    """The kernel of a method and a scheme of ours or of `PLAIN`, with so many lanes; by codes `INTEGERS` of ours, and
    `NUMBERS` of plain values alone, in the order of its steps."""
    name = f"{method}_{scheme}_{width}"
    if method in (BFLOATS, NUMBERS):
        return rows_kernel(name, _fill(scheme, width), step_size(method, width))
    if method == TURNED:
        return named(_by_turned, name, FILL=_fill(scheme, width), STEP=2 * width, IN_PLACE=scheme == BFLOAT16)
    if scheme in PLAIN.values():
        fill, dot, tile = _fill(scheme, width), functools.partial(_panel_dot, width), (ROWS, PANEL_TOKENS[width])
        if method == PANELS:
            return panel_kernel(name, fill, dot, tile, step_size(PANELS, width))
        dot = functools.partial(dot, scheme=scheme)
        return panel_kernel(name, fill, dot, (ROWS, 1), step_size(PANELS, width), IN_PLACE=True, PANEL_ROWS=ROWS)
    is_slow = scheme == "8bit" or TOGETHER > 1
    return code_kernel(name, OWN_STEPS[scheme], width, LEAST_SLOW if is_slow else LEAST_WIDE)
