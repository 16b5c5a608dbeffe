"""Kernels that multiply many rows of input with codes, both as integers of 8 bits, or of 16 bits.

They are kernels by panels, but of integers. A lane of a vector is a row of the matrix: four consecutive bytes, which
are multiplied with four inputs in all lanes. VPDPBUSD, of AVX-512 VNNI and AVX-VNNI, does that in one instruction. On
AVX2 VPMADDUBSW sums products in 16 bits, which is enough for codes of 4 bits, not for others. These, and codes for
which inputs of 8 bits would be too coarse, have two bytes, as have their inputs: a lane has two of them, which
VPMADDWD or VPDPWSSD multiplies, twice as many at a time as of float32.

The sum of a step of 32 elements, or of each half of it, is multiplied by the scales of the inputs and of the rows, and
the rows' minima by the sum of the inputs. Codes of one byte are not negative; what they are off by is part of the
minimum. Rows are decoded one by one, and then turned, some at a time. Sums of integers are exact, and steps are added
one after the other: a product of a width has the same bits on every processor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir

from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant import _block_kernels, _integers, _product_kernels, _vectors
from rabbitllm.quant._block_formats import FORMATS
from rabbitllm.quant._kernel_interface import BYTE_STEP as STEP
from rabbitllm.quant._kernel_interface import BYTE_WIDTH, WORD_WIDTH
from rabbitllm.quant._vectors import CODEBOOKS, F32, I8, I16, I32, Emitter, emitted, every, number, on_stack
from rabbitllm.quant.schemes import SCHEMES

SIZES = {BYTE_WIDTH: 1, WORD_WIDTH: 2}
"""Width -> bytes of a code in a panel, and of an input."""
VECTORS = 2
"""Vectors of rows that are computed together, as far as registers hold."""
INPUTS = {torch.float32: "inputs", torch.bfloat16: "bfloat16_inputs"}
"""Dtype -> in place of a scheme: the kernel that rounds such inputs, which are in place of codes."""
LARGEST_INPUT, _LARGEST_CODE = {1: 127.0, 2: float((1 << 14) - 1)}, (1 << 12) - 1
"""Size -> the largest integer of inputs; that of codes of two bytes: 32 products fit 32 bits."""
_WORDS = ir.VectorType(I16, STEP)
_OFFSET = 128
"""What is added to values that may be negative."""
_PANEL_STEPS = 16
"""Steps of a panel, of which a tile's rows fit the smallest cache."""
_FOUR_BITS = frozenset(
    name
    for name, form in FORMATS.items()
    if form.values is None and form.halves and sum(plane.bits for plane in form.planes) <= 4
)
"""Types of blocks whose 16 products of a code and an input fit 16 bits."""
_LOOKED_UP = frozenset(name for name, form in FORMATS.items() if form.values) | {"4bit"}


def _multiplies_fours() -> bool:
    """Whether there is an instruction for four bytes at a time, in the vectors of panels."""
    return _vectors.multiplies_fours(_vectors.lanes())


def width_of(scheme: str) -> int:
    """The width of a scheme's kernel on this processor, a key of `SIZES`."""
    of_bytes = _FOUR_BITS | _LOOKED_UP if _multiplies_fours() else _FOUR_BITS
    return BYTE_WIDTH if scheme in of_bytes else WORD_WIDTH


def step_bytes(width: int) -> int:
    """Bytes of a step of a row in a panel: codes, then a scale and a negated minimum, float32, of each group of 16 or
    32. And of a step of inputs: integers, then their scale, the sum of all, and those of both halves."""
    return STEP * SIZES[width] + 4 * 4


def kernel(method: str, scheme: str, width: int) -> Callable[[Any], None]:
    """As `_product_kernels.kernel`, by `BYTES`, of a width of `SIZES`; the scheme is one that has it, or `INPUTS`."""
    lanes, size, nbytes = _vectors.lanes(), SIZES[width], step_bytes(width)
    name = f"{method}_{scheme}_{width}_{lanes}"
    if scheme in INPUTS.values():
        is_wide = scheme == INPUTS[torch.float32]
        return _product_kernels.rows_kernel(name, emitted(_round(width, is_wide), lanes), nbytes)
    fill, group, is_moved = (_fill_blocks if scheme in FORMATS else _fill_own)(scheme, width), STEP, size == 1
    if scheme in FORMATS:
        group, is_moved = min(FORMATS[scheme].group, STEP), is_moved or len(FORMATS[scheme].halves) == 2
    dot = functools.partial(_dot, width, group, is_moved)
    tile = VECTORS, 4 if lanes == 16 else 3 if size == 1 and _multiplies_fours() else 2  # as registers allow
    stack_panel: Any = on_stack((_product_kernels.PANEL_ROWS + lanes) * _PANEL_STEPS * nbytes)
    others = {"GROUP": lanes, "MAX_STEPS": _PANEL_STEPS, "stack_panel": stack_panel, "TURN": emitted(emit_turn, lanes)}
    return _product_kernels.panel_kernel(name, emitted(fill, lanes), dot, tile, nbytes, **others)


@functools.cache
def table_of(scheme: str, levels: bytes, width: int) -> npt.NDArray[Any] | None:
    """The table of a scheme of ours, from the float32 values of its codes; None if these do not fit.

    At 4bit it has the lower bytes of 16 integers, the upper ones if codes have two, and the factor of an integer,
    float32. At 8bit it is that of `_vectors`, for codes of two bytes, which are computed.
    """
    values = np.frombuffer(levels, np.float32).astype(np.float64)
    most = np.abs(values).max()
    if not np.isfinite(most) or not most or (scheme == "8bit" and most != 1):  # by its factor
        return None
    if scheme == "8bit":
        return _vectors.table_of(scheme, levels)
    values /= most
    steps = _integers.steps_of_bytes(values) if SIZES[width] == 1 else float(_LARGEST_CODE)
    integers = np.rint(values * steps) + (_OFFSET if SIZES[width] == 1 else 0)
    return _integers.packed(integers, SIZES[width], most / steps)


def _store_step(emit: Emitter, place: Any, codes: Any, groups: list[tuple[Any, Any]]) -> None:
    """Store a row's step: 32 codes, and a scale and what is added of each group."""
    emit.store(codes, place, 4)
    for v, value in enumerate(itertools.chain(*groups)):
        emit.store(value, emit.add(place, STEP * codes.type.element.width // 8 + 4 * v), 4)


def emit_turn(emit, rows, panel, row_bytes):  # type: ignore[no-untyped-def]
    """Store as many rows as a vector has lanes, one behind the other, so that each has a lane; four lanes at a time."""
    b, width, four = emit.b, emit.width, ir.VectorType(I32, 4)

    def crossed(first: Any, second: Any, *order: int) -> Any:
        """Of each four lanes of two vectors those with these numbers, from 4 on of the second one."""
        return emit.pick(first, second, [n % 4 + begin + n // 4 * width for begin in range(0, width, 4) for n in order])

    with emit.loop(b.udiv(row_bytes, number(16))) as index:
        begin = emit.add(rows, b.mul(index, number(16)))
        loaded = [emit.load(emit.add(begin, b.mul(row_bytes, number(lane))), four, 4) for lane in range(width)]
        quads = [emit.joined(*loaded[lane::4]) for lane in range(4)]
        pairs = [crossed(*quads[n : n + 2], *order) for order in ((0, 4, 1, 5), (2, 6, 3, 7)) for n in (0, 2)]
        for n, order in enumerate(((0, 1, 4, 5), (2, 3, 6, 7)) * 2):
            of_both = pairs[n // 2 * 2 : n // 2 * 2 + 2]
            place = emit.add(panel, b.mul(index, number(16 * width)), 4 * width * n)
            emit.store(crossed(*of_both, *order), place, 4)


def _fill_blocks(scheme: str, width: int) -> Any:
    """See `_product_kernels._fill`."""
    block, form, nbytes = BLOCK_TYPES[scheme], FORMATS[scheme], step_bytes(width)
    is_byte, offset = SIZES[width] == 1, 0
    if is_byte:  # codes as they are stored
        form, offset = replace(form, least=0), -_OFFSET if form.values else form.least

    def fill(emit, codes, scales, table, panel, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
        b, part = emit.b, (row, first, steps, STEP)
        with _block_kernels.each_block(emit, scheme, codes, row_bytes, *part) as (index, base, halves, load):
            place = emit.add(panel, b.mul(index, number(block.elements // STEP * nbytes)))
            for begin in range(0, block.elements, STEP):
                runs = range(begin, begin + STEP, form.run)
                code = emit.joined(*(_block_kernels.codes_of(emit, form, load, run) for run in runs))
                if not is_byte:
                    code = b.sext(code, _WORDS)
                elif form.values:
                    code = b.xor(code, every(code.type, _OFFSET))
                groups = []
                for element in range(begin, begin + STEP, form.group):
                    scale, *least = _block_kernels.scale_and_minimum(emit, form, base, halves, element // form.group)
                    added = b.fneg(*least) if least else b.fmul(scale, ir.Constant(F32, float(offset)))
                    groups.append((scale, added))
                _store_step(emit, emit.add(place, begin // STEP * nbytes), code, groups)

    return fill


def _fill_own(scheme: str, width: int) -> Any:
    """The same of a scheme of ours."""
    size, nbytes, code_bytes = SIZES[width], step_bytes(width), STEP // SCHEMES[scheme].codes_a_byte

    def fill(emit, codes, scales, table, panel, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
        b = emit.b
        decode, factor = (_nibbles if scheme == "4bit" else _ramps)(emit, table, size)
        start = emit.add(codes, b.mul(row, row_bytes), b.mul(first, number(code_bytes)))
        before = emit.add(b.mul(row, all_steps), first)
        with emit.loop(steps) as index:
            code = decode(emit.add(start, b.mul(index, number(code_bytes))))
            block = b.lshr(emit.add(before, index), shift)
            scale = b.fmul(emit.load(emit.add(scales, b.mul(block, number(4))), F32, 4), factor)
            added = b.fmul(scale, ir.Constant(F32, float(-_OFFSET if size == 1 else 0)))
            _store_step(emit, emit.add(panel, b.mul(index, number(nbytes))), code, [(scale, added)])

    return fill


def _nibbles(emit: Emitter, table: Any, size: int) -> tuple[Callable[[Any], Any], Any]:
    """What looks up a step of 4bit codes at an address, the first of a byte in its high half; and their factor."""
    b, half, whole = emit.b, ir.VectorType(I8, STEP // 2), ir.VectorType(I8, STEP)
    values = [emit.load(emit.add(table, 16 * part), half, 1) for part in range(size)]

    def decode(address: Any) -> Any:
        both = emit.load(address, half, 1)
        nibbles = b.lshr(both, every(half, 4)), b.and_(both, every(half, 15))
        index = emit.pick(*nibbles, [i // 2 + i % 2 * STEP // 2 for i in range(STEP)])
        look_up = emit.function("llvm.x86.avx2.pshuf.b", whole, whole, whole)
        planes = [b.call(look_up, [emit.joined(plane, plane), index]) for plane in values]
        order = [i + STEP * plane for i in range(STEP) for plane in range(size)]
        return b.bitcast(emit.pick(planes[0], planes[-1], order), ir.VectorType(ir.IntType(8 * size), STEP))

    return decode, emit.load(emit.add(table, 16 * size), F32, 1)


def _ramps(emit: Emitter, table: Any, size: int) -> tuple[Callable[[Any], Any], Any]:
    """The same for 8bit codes, as words."""
    b, weights = emit.b, CODEBOOKS["8bit"](emit, table)

    def decode(address: Any) -> Any:
        pairs = [weights(emit.add(address, offset)) for offset in range(0, STEP, 2 * emit.width)]
        even, odd = (emit.joined(*(pair[parity] for pair in pairs)) for parity in (0, 1))
        value = emit.pick(even, odd, [i // 2 + i % 2 * STEP // 2 for i in range(STEP)])
        return b.trunc(_nearest(emit, value, every(value.type, _LARGEST_CODE)), _WORDS)

    return decode, ir.Constant(F32, 1 / _LARGEST_CODE)


def _nearest(emit: Emitter, values: Any, factor: Any) -> Any:
    """The integers nearest to float32 times a factor, which are small."""
    b, ints = emit.b, ir.VectorType(I32, values.type.count)
    moved = b.fadd(b.fmul(values, factor), every(values.type, _vectors.NEAREST))
    return b.sub(b.bitcast(moved, ints), every(ints, _vectors.NEAREST_BITS))


def _dot(width: int, group: int, is_moved: bool, vectors: int, tokens: int) -> Any:
    """See `_product_kernels._panel_dot`: of the rows of so many vectors, and groups of so many elements.

    With one vector there may be fewer rows left.
    """
    size, nbytes = SIZES[width], step_bytes(width)

    def dot(emit, panel, inputs, out, steps, panel_bytes, input_bytes, all_rows, left):  # type: ignore[no-untyped-def]
        b, all_lanes = emit.b, emit.width
        sums = [[emit.variable() for _ in range(tokens)] for _ in range(vectors)]
        with emit.loop(steps) as index:
            place = emit.add(panel, b.mul(index, number(nbytes * all_lanes)))
            matrix = [emit.add(place, b.mul(panel_bytes, number(all_lanes * r))) for r in range(vectors)]
            place = emit.add(inputs, b.mul(index, number(nbytes)))
            of_tokens = [emit.add(place, b.mul(input_bytes, number(t))) for t in range(tokens)]

            def in_lanes(offset: int, of_tokens: list[Any] = of_tokens) -> list[Any]:
                return [emit.spread(emit.load(emit.add(token, offset), F32, 4)) for token in of_tokens]

            for part in range(STEP // group):
                products: list[list[Any]] = [[None] * tokens for _ in range(vectors)]
                for offset in range(part * group * size, (part + 1) * group * size, 4):
                    values = in_lanes(offset)
                    for row, of_row in zip(matrix, products, strict=True):
                        codes = emit.load(emit.add(row, offset * all_lanes), emit.floats, 4)
                        pairs = zip(of_row, values, strict=True)
                        of_row[:] = [_add_products(emit, size, total, value, codes) for total, value in pairs]
                input_scales = in_lanes(STEP * size)
                input_sums = in_lanes(STEP * size + (4 if group == STEP else 8 + 4 * part))
                for row, of_row, totals in zip(matrix, products, sums, strict=True):
                    places = (emit.add(row, (STEP * size + 8 * part + offset) * all_lanes) for offset in (0, 4))
                    scale, least = (emit.load(place, emit.floats, 4) for place in places)
                    of_inputs = zip(of_row, input_scales, input_sums, totals, strict=True)
                    for product, input_scale, input_sum, total in of_inputs:
                        value = b.fmul(b.sitofp(_in_ints(emit, size, product), emit.floats), input_scale)
                        value = emit.fma(value, scale, b.load(total))
                        b.store(emit.fma(least, input_sum, value) if is_moved else value, total)
        for (r, of_row), t in itertools.product(enumerate(sums), range(tokens)):
            to, total = emit.add(out, 4 * all_lanes * r, b.mul(all_rows, number(4 * t))), b.load(of_row[t])
            if vectors > 1:
                emit.store(b.fadd(emit.load(to, emit.floats, 4), total), to, 4)
                continue
            for lane in range(all_lanes):
                with b.if_then(b.icmp_signed("<", number(lane), left)):
                    place, value = emit.add(to, 4 * lane), b.extract_element(total, ir.Constant(I32, lane))
                    emit.store(b.fadd(emit.load(place, F32, 4), value), place, 4)

    return emitted(dot, _vectors.lanes())


def _add_products(emit: Emitter, size: int, total: Any, inputs: Any, codes: Any) -> Any:
    """`total`, which is nothing at first, and the products of codes and inputs of so many bytes in each lane."""
    b, bytes_, words = emit.b, ir.VectorType(I8, 4 * emit.width), ir.VectorType(I16, 2 * emit.width)
    if size == 2:
        products = _of_words(emit, b.bitcast(codes, words), b.bitcast(inputs, words))
    elif _multiplies_fours():
        return emit.fours(total, b.bitcast(codes, bytes_), b.bitcast(inputs, bytes_))
    else:
        name = "llvm.x86.avx512.pmaddubs.w.512" if emit.width == 16 else "llvm.x86.avx2.pmadd.ub.sw"
        multiply = emit.function(name, words, bytes_, bytes_)
        products = b.call(multiply, [b.bitcast(codes, bytes_), b.bitcast(inputs, bytes_)])
    return b.add(total, products) if total else products


def _in_ints(emit: Emitter, size: int, total: Any) -> Any:
    """Sums of products in 32 bits."""
    return total if size == 2 or _multiplies_fours() else _of_words(emit, total, every(total.type, 1))


def _of_words(emit: Emitter, *words: Any) -> Any:
    """The sums of the products of pairs of words."""
    name = "llvm.x86.avx512.pmaddw.d.512" if emit.width == 16 else "llvm.x86.avx2.pmadd.wd"
    return emit.b.call(emit.function(name, emit.ints, words[0].type, words[0].type), words)


def _round(width: int, is_wide: bool) -> Any:
    """Rounds a row of inputs, of float32 or bfloat16, as a row of a matrix is decoded."""
    size, nbytes = SIZES[width], step_bytes(width)
    largest_input = LARGEST_INPUT[size]

    def fill(emit, x, scales, table, out, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
        b, ints, floats = emit.b, ir.VectorType(I32, STEP), ir.VectorType(F32, STEP)
        start = emit.add(x, b.mul(row, row_bytes))
        with emit.loop(steps) as index:
            step = emit.add(out, b.mul(index, number(nbytes)))
            if is_wide:
                bits = emit.load(emit.add(start, b.mul(index, number(4 * STEP))), ints, 4)
            else:
                bits = b.zext(emit.load(emit.add(start, b.mul(index, number(2 * STEP))), _WORDS, 2), ints)
                bits = b.shl(bits, every(ints, 16))
            sizes = b.and_(bits, every(ints, 0x7FFFFFFF))  # ordered as the floats are
            largest = emit.reduced(sizes, lambda one, other: b.select(b.icmp_signed(">", one, other), one, other))
            largest = b.bitcast(largest, F32)
            factor = b.fdiv(ir.Constant(F32, largest_input), largest)
            is_small = b.fcmp_ordered("<", largest, ir.Constant(F32, 1e-30))
            factor = emit.spread(b.select(is_small, ir.Constant(F32, 0.0), factor), STEP)
            integers = _nearest(emit, b.bitcast(bits, floats), factor)
            emit.store(b.trunc(integers, ir.VectorType(ir.IntType(8 * size), STEP)), step, 4)
            scale = b.fmul(largest, ir.Constant(F32, 1 / largest_input))
            sums = [emit.reduced(half, b.add) for half in emit.halves(integers)]
            values = [b.fmul(b.sitofp(total, F32), scale) for total in (b.add(*sums), *sums)]
            for place, value in enumerate([scale, *values]):
                emit.store(value, emit.add(step, STEP * size + 4 * place), 4)

    return fill
