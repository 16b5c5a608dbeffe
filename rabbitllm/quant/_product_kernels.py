"""Kernels of products (`_kernel_interface.py`), compiled for this processor's vectors by numba and LLVM.

**By codes.** Weights are never written to memory, so only the bytes of the codes are read: segments of them are
multiplied by their inputs in registers (`_vectors.py`), and summed in float32; a block's sum is multiplied by the
block's scale. Fills out[token, row], float32.

**Numbers.** Fills out[row, column], float32 or bfloat16.

**By panels.** A panel, a few rows of the matrix or parts of long ones, is decoded to float32 once, in memory that stays
in a core's cache, and multiplied with all inputs before the next panel. With many inputs the decoding then costs almost
nothing. A panel's row consists of steps of two vectors, one of the values at even indices and one at odd ones, as codes
are separated; the inputs have the same order, and are multiplied by the value of a code times its block's scale. Adds
to out[token, row], float32.

**bfloat16**, for processors that have no instructions for that type. A bfloat16 is the upper half of a float32. 32 bits
of a row are two of its values: shifted up they are the even one, with the lower half cleared the odd one. For many
inputs they are widened so into panels; for few of them in registers, with the same sums. Adds to out[token, row].

Every sum adds its products in the same order, for any number of inputs and any tile: a row of the result is the same
bit for bit alone and among others. Functions release the interpreter lock, and take addresses, not tensors.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from rabbitllm.base.compiling import address_of, to_array
from rabbitllm.quant import _integers
from rabbitllm.quant._kernel_interface import ARGUMENTS, BEFORE_WORK, BFLOAT16, BFLOATS, CODES, INTEGERS, PANELS
from rabbitllm.quant._vectors import CODEBOOKS, F32, HALF_BYTES, Emitter, emitted, inlined, narrowed, number, on_stack

ROWS, CODE_ROWS = 4, 2
"""Rows of the matrix for each load of an input, of a panel and by codes. More rows of codes are no faster in the cache,
and read from memory they are slower: the processor's own prefetcher does not follow so many."""
TOKENS = 4
"""Inputs for each lookup of a code."""
LEAST_WIDE, LEAST_SLOW = 3, 2
"""Inputs for which `TOKENS` are multiplied, some of them twice: code by code they take longer. The second is for codes
that are slow to decode."""
PANEL_TOKENS = {16: 6, 8: 3}
"""Lanes -> inputs for each load of a panel's value; limited by the registers for sums."""
PREFETCHED = 8192
"""How many bytes ahead codes are prefetched."""
PANEL_ROWS, PANEL_COLUMNS = 128, 1024
"""Size of a panel: 512 KiB, of which `ROWS` rows and their inputs fit the smallest cache. With half the rows all inputs
are read twice as often: 512 of them took 1.06 times as long."""
INPUT_BYTES = 1 << 17
"""Bytes of the inputs that are processed together, which fit a core's cache beside the panel."""
STEP_BYTES = {"4bit": 1, "8bit": 2, BFLOAT16: 4}
"""Scheme -> bytes of two codes, of which a panel's step has as many pairs as a vector has lanes."""
PIECE_WORDS = len(ARGUMENTS)
SCALE_SHIFT = 5
"""A segment of integers has 128 bytes of inputs and a scale of 4: a 2**5th."""


def address(method: str, scheme: str, width: int) -> int:
    """The address of a kernel, which is compiled at the first call, or loaded from numba's cache.

    Args:
        method: `CODES`, `PANELS` or `BFLOATS`.
        scheme: "4bit" or "8bit"; `BFLOAT16` by codes.
        width: lanes of its vectors; `INTEGERS` for our own schemes by codes.
    """
    return address_of(KERNELS[method, scheme, width])


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
def own_rows(words, start, end, rows):  # type: ignore[no-untyped-def]
    """The first row of some parts and the one after their last."""
    return start * words[0], min(end * words[0], rows)


def numbers_to(emit: Emitter, count: int, tokens: Any) -> list[Any]:
    """0 to `count` - 1, but at most `tokens` - 1: a tile with fewer inputs computes the last one again."""
    numbers, last = [number(t) for t in range(count)], emit.b.sub(tokens, number(1))
    return numbers[:1] + [emit.b.select(emit.b.icmp_signed("<", t, last), t, last) for t in numbers[1:]]


def _store_sums(
    emit: Emitter, sums: list[list[Any]], out: Any, all_rows: Any, row: Any, numbers: Iterable[Any], finish: Any
) -> None:
    """Store `finish(totals, place)` of the sums of all rows with each input at out[token, row], by its number."""
    builder = emit.b
    for t, of_token in zip(numbers, zip(*sums, strict=True), strict=True):
        totals = emit.sum(*(builder.load(lanes) for lanes in of_token))
        place = emit.add(out, builder.mul(emit.add(row, builder.mul(all_rows, t)), number(4)))
        emit.store(finish(totals, place), place, 4)


def add_sums(emit: Emitter, sums: list[list[Any]], out: Any, all_rows: Any) -> None:
    """Add the sums of consecutive rows to those at out[token]."""

    def finish(totals: Any, place: Any) -> Any:
        return emit.b.fadd(emit.load(place, totals.type, 4), totals)

    _store_sums(emit, sums, out, all_rows, number(0), map(number, range(len(sums[0]))), finish)


# By codes.


class CodeSegment(ABC):
    """Emits how segments of codes, `SEGMENT` at a time, are decoded, multiplied and scaled.

    Attributes:
        segment_bytes: bytes of the codes of a segment.
        factor: of the sums of scaled products.
    """

    segment_bytes: int
    factor: Any

    def __init__(self, emit: Emitter) -> None:
        self._emit = emit

    def inputs(self, even: Any, odd: Any, begin: Any) -> list[Any]:
        """Vectors of a segment's inputs, from bytes `begin` on: of integers two, and their scale in all lanes."""
        emit = self._emit
        words = [emit.load(emit.add(even, begin, offset), _integers.WORDS, 2) for offset in (0, 64)]
        scale = emit.add(odd, emit.b.lshr(begin, number(SCALE_SHIFT)))
        return [*words, emit.spread(emit.load(scale, F32, 4))]

    @abstractmethod
    def products(self, address: Any, inputs: list[list[Any]]) -> list[list[Any]]:
        """Sums of parts of a segment times the inputs of each token, still apart in lanes."""

    @abstractmethod
    def scales(self, scales: Any, row: Any, segments: Any, segment: Any, shift: Any) -> list[Any]:
        """The scales of the lanes of each part of a segment of a row of so many segments."""


def integer_products(emit: Emitter, codes: Iterable[Any], inputs: list[list[Any]]) -> list[Any]:
    """Sums of two vectors of codes times the integers of each token, float32, still apart in lanes."""
    pair = [*codes]
    return [emit.b.fmul(_integers.summed_products(emit, pair, vectors), scale) for *vectors, scale in inputs]


class _OwnSegment(CodeSegment):
    """A segment of our own schemes, of which all codes have one scale."""

    def __init__(self, scheme: str, emit: Emitter, table: Any) -> None:
        super().__init__(emit)
        self._decoder = _integers.OWN_DECODERS[scheme](emit, table)
        self.segment_bytes, self.factor = self._decoder.segment_bytes, self._decoder.factor

    def products(self, address: Any, inputs: list[list[Any]]) -> list[list[Any]]:
        return [integer_products(self._emit, self._decoder.words(address), inputs)]

    def scales(self, scales: Any, row: Any, segments: Any, segment: Any, shift: Any) -> list[Any]:
        emit = self._emit
        block = emit.b.lshr(emit.add(emit.b.mul(row, segments), segment), shift)
        return [emit.spread(emit.load(emit.add(scales, emit.b.mul(block, number(4))), F32, 4))]


def _code_dot(make: Callable[[Emitter, Any], CodeSegment], width: int, rows: int, tokens: int) -> Any:
    """An intrinsic that multiplies `rows` consecutive rows of codes by up to `tokens` consecutive inputs."""

    def dot(emit, codes, scales, even, odd, table, out, row_bytes, segments, shift, all_rows, row, left):  # type: ignore[no-untyped-def]
        """All arguments are int64; the first six are addresses, `row` is the first row, `left` the number of inputs."""
        builder = emit.b
        numbers = numbers_to(emit, tokens, left)
        segment = make(emit, table)
        input_bytes = builder.mul(segments, number(HALF_BYTES))
        sums = [[emit.variable() for _ in range(tokens)] for _ in range(rows)]
        with emit.loop(segments) as index:
            begins = [builder.mul(input_bytes, t) for t in numbers]
            begins = [emit.add(begin, builder.mul(index, number(HALF_BYTES))) for begin in begins]
            inputs = [segment.inputs(even, odd, begin) for begin in begins]
            # the bytes after the end of a row are in the cache already; the next tile's rows are needed next
            code_bytes = number(segment.segment_bytes)
            beyond = emit.add(builder.mul(index, code_bytes), PREFETCHED)
            is_beyond = builder.icmp_unsigned(">=", beyond, row_bytes)
            skipped = builder.select(is_beyond, builder.mul(row_bytes, number(rows - 1)), number(0))
            ahead = emit.add(skipped, PREFETCHED)
            for r in range(rows):
                here = emit.add(row, r)
                base = emit.add(codes, builder.mul(here, row_bytes), builder.mul(index, code_bytes))
                emit.prefetch(emit.add(base, ahead))
                parts = segment.products(base, inputs)
                for part, scale in zip(parts, segment.scales(scales, here, segments, index, shift), strict=True):
                    for total, value in zip(sums[r], part, strict=True):
                        builder.store(emit.fma(value, scale, builder.load(total)), total)

        def finish(totals: Any, place: Any) -> Any:
            return builder.fmul(totals, emit.spread(segment.factor, totals.type.count))

        _store_sums(emit, sums, out, all_rows, row, numbers, finish)

    return emitted(dot, width)


# By panels.


stack_panel: Any = on_stack(PANEL_ROWS * PANEL_COLUMNS * 4)


def _fill(method: str, scheme: str, width: int) -> Any:
    """An intrinsic that decodes a part of one row of the matrix, to float32, or to bfloat16 by `BFLOATS`."""
    step_bytes = width * STEP_BYTES[scheme]

    def fill(emit, codes, scales, table, panel, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
        """All arguments are int64: addresses, `panel` that of a row in the panel; bytes of a row, steps in a row and
        the logarithm of steps in a block of the matrix; the row, its first step, and the number of steps."""
        builder = emit.b
        base = emit.add(codes, builder.mul(row, row_bytes), builder.mul(first, number(step_bytes)))
        before = emit.add(builder.mul(row, all_steps), first)
        decode = CODEBOOKS[scheme](emit, table)
        with emit.loop(steps) as index:
            both = decode(emit.add(base, builder.mul(index, number(step_bytes))))
            if scheme != BFLOAT16:
                block = builder.lshr(emit.add(before, index), shift)
                scale = emit.spread(emit.load(emit.add(scales, builder.mul(block, number(4))), F32, 4))
                both = builder.fmul(both[0], scale), builder.fmul(both[1], scale)
            if method == BFLOATS:
                even, odd = (narrowed(builder, builder.bitcast(value, emit.ints)) for value in both)
                upper = builder.and_(odd, emit.every(-(1 << 16)))
                stored = builder.or_(upper, builder.lshr(even, emit.every(16)))  # two bfloat16, in their order
            else:
                stored = emit.joined(*both)
            emit.store(stored, emit.add(panel, builder.mul(index, number(step_size(method, width)))), 2)

    return emitted(fill, width)


def _panel_dot(width: int, rows: int, tokens: int) -> Any:
    """An intrinsic that multiplies `rows` consecutive rows of a panel by `tokens` consecutive inputs."""

    def dot(emit, panel, inputs, out, steps, panel_bytes, input_bytes, all_rows):  # type: ignore[no-untyped-def]
        """All arguments are int64: addresses of the first row, the first input and the first sum; steps of two vectors;
        bytes from one row to the next, and from one input to the next; rows of the whole matrix."""
        builder = emit.b
        sums = [[emit.variable() for _ in range(tokens)] for _ in range(rows)]
        begins = [emit.add(inputs, builder.mul(input_bytes, number(t))) for t in range(tokens)]
        bases = [emit.add(panel, builder.mul(panel_bytes, number(r))) for r in range(rows)]
        with emit.loop(builder.mul(steps, number(2))) as index:
            offset = builder.mul(index, number(4 * width))
            vectors = [emit.load(emit.add(begin, offset), emit.floats, 4) for begin in begins]
            for r in range(rows):
                weight = emit.load(emit.add(bases[r], offset), emit.floats, 4)
                for t in range(tokens):
                    builder.store(emit.fma(weight, vectors[t], builder.load(sums[r][t])), sums[r][t])
        add_sums(emit, sums, out, all_rows)

    return emitted(dot, width)


# bfloat16.


def _bfloat_dot(width: int, rows: int) -> Any:
    """An intrinsic that multiplies `rows` consecutive rows by an input."""

    def dot(emit, matrix, inputs, out, steps, row_bytes):  # type: ignore[no-untyped-def]
        """All arguments are int64, the first three addresses: of the first row, the input and the first sum."""
        builder = emit.b
        sums = [[emit.variable()] for _ in range(rows)]
        bases = [emit.add(matrix, builder.mul(row_bytes, number(r))) for r in range(rows)]
        decode = CODEBOOKS[BFLOAT16](emit, None)
        with emit.loop(steps) as index:
            offset = builder.mul(index, number(4 * width))
            place = emit.add(inputs, offset, offset)
            vectors = [emit.load(emit.add(place, odd), emit.floats, 4) for odd in (0, 4 * width)]
            for base, (total,) in zip(bases, sums, strict=True):
                for value, vector in zip(decode(emit.add(base, offset)), vectors, strict=True):
                    builder.store(emit.fma(value, vector, builder.load(total)), total)
        add_sums(emit, sums, out, number(0))

    return emitted(dot, width)


# The kernels. numba keeps a compiled function for the next process only if it has a name in a module and all that it
# uses is global. So each kernel is a template with a name and globals of its own.

ONE: Any = None
TALL = WIDE = SQUARE = LEAST = FILL = AT_ONCE = VECTOR = ODD_SHIFT = ONE


def _by_codes(data, start, end, parts):  # type: ignore[no-untyped-def]
    """The loops over rows and inputs, in tiles of `CODE_ROWS` and `TOKENS` and smaller ones at the ends."""
    words = pieces(data)
    for piece in range(BEFORE_WORK, len(words), PIECE_WORDS):
        codes, scales, even, odd, table, out, row_bytes, segments, shift, tokens, rows = arguments(words, piece)
        first, last = own_rows(words, start, end, rows)
        token, input_bytes = 0, segments * HALF_BYTES
        while token < tokens:
            e, o = even + token * input_bytes, odd + (token * input_bytes >> ODD_SHIFT)
            to = out + token * rows * 4
            row, left = first, tokens - token
            is_wide = left >= LEAST
            while row < last:
                is_tall = row + CODE_ROWS <= last
                if is_wide and is_tall:
                    SQUARE(codes, scales, e, o, table, to, row_bytes, segments, shift, rows, row, left)
                elif is_wide:
                    WIDE(codes, scales, e, o, table, to, row_bytes, segments, shift, rows, row, left)
                elif is_tall:
                    TALL(codes, scales, e, o, table, to, row_bytes, segments, shift, rows, row, left)
                else:
                    ONE(codes, scales, e, o, table, to, row_bytes, segments, shift, rows, row, left)
                row += CODE_ROWS if is_tall else 1
            token += TOKENS if is_wide else 1


def _by_numbers(data, start, end, parts):  # type: ignore[no-untyped-def]
    words = pieces(data)
    for piece in range(BEFORE_WORK, len(words), PIECE_WORDS):
        codes, scales, _, _, table, out, row_bytes, steps, shift, _, rows = arguments(words, piece)
        first, last = own_rows(words, start, end, rows)
        for row in range(first, last):
            FILL(codes, scales, table, out + row * steps * VECTOR, row_bytes, steps, shift, row, 0, steps)


def _by_panels(data, start, stop, parts):  # type: ignore[no-untyped-def]
    """The loops over panels, over inputs that fit the cache, and over tiles of rows and inputs."""
    panel = stack_panel()
    step_bytes = 2 * VECTOR
    max_steps = PANEL_COLUMNS * 4 // step_bytes
    words = pieces(data)
    for piece in range(BEFORE_WORK, len(words), PIECE_WORDS):
        codes, scales, inputs, _, table, out, row_bytes, steps, shift, tokens, rows = arguments(words, piece)
        first, last = own_rows(words, start, stop, rows)
        input_bytes = steps * step_bytes
        for top in range(first, last, PANEL_ROWS):
            bottom = min(top + PANEL_ROWS, last)
            for step in range(0, steps, max_steps):
                count = min(max_steps, steps - step)
                panel_bytes = count * step_bytes
                many_inputs = max(INPUT_BYTES // panel_bytes // AT_ONCE, 1) * AT_ONCE
                for row in range(top, bottom):
                    place = panel + (row - top) * panel_bytes
                    FILL(codes, scales, table, place, row_bytes, steps, shift, row, step, count)
                for begin in range(0, tokens, many_inputs):
                    end = min(begin + many_inputs, tokens)
                    row = top
                    while row < bottom:
                        here, token = panel + (row - top) * panel_bytes, begin
                        is_tall = row + ROWS <= bottom
                        while token < end:
                            of_token = inputs + token * input_bytes + step * step_bytes
                            to = out + (token * rows + row) * 4
                            if is_tall and token + AT_ONCE <= end:
                                SQUARE(here, of_token, to, count, panel_bytes, input_bytes, rows)
                                token += AT_ONCE
                            elif is_tall:
                                TALL(here, of_token, to, count, panel_bytes, input_bytes, rows)
                                token += 1
                            else:
                                ONE(here, of_token, to, count, panel_bytes, input_bytes, rows)
                                token += 1
                        row += ROWS if is_tall else 1


def _of_bfloat16(data, start, end, parts):  # type: ignore[no-untyped-def]
    """The loops over tiles of rows, parts of long ones, and inputs."""
    max_steps = PANEL_COLUMNS * 2 // VECTOR
    words = pieces(data)
    for piece in range(BEFORE_WORK, len(words), PIECE_WORDS):
        matrix, _, inputs, _, _, out, row_bytes, steps, _, tokens, rows = arguments(words, piece)
        first, last = own_rows(words, start, end, rows)
        row = first
        while row < last:
            is_tall = row + ROWS <= last
            for step in range(0, steps, max_steps):
                here, count = matrix + row * row_bytes + step * VECTOR, min(max_steps, steps - step)
                for token in range(tokens):
                    of_token = inputs + (token * steps + step) * 2 * VECTOR
                    to = out + (token * rows + row) * 4
                    if is_tall:
                        TALL(here, of_token, to, count, row_bytes)
                    else:
                        ONE(here, of_token, to, count, row_bytes)
            row += ROWS if is_tall else 1


def named(template: Any, name: str, **constants: Any) -> Callable[[Any], None]:
    """A kernel of this name from a template, which uses the globals of its module and these instead of some."""
    kernel = FunctionType(template.__code__, {**template.__globals__, **constants}, name)
    kernel.__qualname__, kernel.__module__ = name, template.__module__
    return kernel


def filling_kernel(method: str, scheme: str, width: int, fill: Any) -> Callable[[Any], None]:
    """The kernel by panels that `fill` decodes, an intrinsic like that of `_fill`, or of the numbers."""
    if method != PANELS:
        return rows_kernel(f"{method}_{scheme}_{width}", fill, step_size(method, width))
    dot = functools.partial(_panel_dot, width)
    return panel_kernel(f"{PANELS}_{scheme}_{width}", fill, dot, PANEL_TOKENS[width], 4 * width)


def panel_kernel(
    name: str, fill: Any, dot: Callable[[int, int], Any], tokens: int, vector_bytes: int
) -> Callable[[Any], None]:
    """A kernel by panels: of intrinsics like those of `_fill` and `_panel_dot`, for tiles of so many inputs; a step of
    a panel and of inputs has twice so many bytes."""
    single, tall, square = (dot(*shape) for shape in ((1, 1), (ROWS, 1), (ROWS, tokens)))
    constants = {"ONE": single, "TALL": tall, "SQUARE": square, "AT_ONCE": tokens, "VECTOR": vector_bytes}
    return named(_by_panels, name, FILL=fill, **constants)


def rows_kernel(name: str, fill: Any, step_bytes: int) -> Callable[[Any], None]:
    """A kernel that stores what `fill` makes of each row, which has so many bytes a step."""
    return named(_by_numbers, name, FILL=fill, VECTOR=step_bytes)


def code_kernel(
    name: str, make: Callable[[Emitter, Any], CodeSegment], width: int, least: int = LEAST_WIDE
) -> Callable[[Any], None]:
    """The kernel by codes of segments that `make` returns for an emitter and the address of a table; for `least`, see
    `LEAST_WIDE`."""
    shapes = (1, 1), (CODE_ROWS, 1), (1, TOKENS), (CODE_ROWS, TOKENS)
    single, tall, wide, square = (_code_dot(make, width, *shape) for shape in shapes)
    shift = SCALE_SHIFT if width == INTEGERS else 0
    return named(_by_codes, name, ONE=single, TALL=tall, WIDE=wide, SQUARE=square, LEAST=least, ODD_SHIFT=shift)


def _kernel(method: str, scheme: str, width: int) -> Callable[[Any], None]:
    if method != CODES:
        return filling_kernel(method, scheme, width, _fill(method, scheme, width))
    name = f"{method}_{scheme}_{width}"
    if scheme == BFLOAT16:
        return named(_of_bfloat16, name, ONE=_bfloat_dot(width, 1), TALL=_bfloat_dot(width, ROWS), VECTOR=4 * width)
    least = LEAST_SLOW if scheme == "8bit" else LEAST_WIDE
    return code_kernel(name, functools.partial(_OwnSegment, scheme), width, least)


_KEYS = [(CODES, scheme, INTEGERS) for scheme in ("4bit", "8bit")]
_KEYS += [(PANELS, scheme, width) for scheme in STEP_BYTES for width in (16, 8)]
_KEYS += [(BFLOATS, scheme, width) for scheme in ("4bit", "8bit") for width in (16, 8)]
_KEYS += [(CODES, BFLOAT16, width) for width in (16, 8)]
KERNELS: dict[tuple[str, str, int], Callable[[Any], None]] = {key: _kernel(*key) for key in _KEYS}
"""Method, scheme and width of a kernel (see `address`) -> the kernel."""
