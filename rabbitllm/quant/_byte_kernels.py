"""Kernels that multiply many rows of input, rounded to 8 bits, with codes that stand for integers of 8 bits.

They are kernels by panels, but of bytes. A lane of a vector is a row of the matrix: four consecutive codes, which are
multiplied with four inputs in all lanes. VPDPBUSD, of AVX-512 VNNI and AVX-VNNI, does that in one instruction. On AVX2
VPMADDUBSW sums products in 16 bits, which is enough for codes of 4 bits, not for others. The sum of a step of 32
elements, or of each half of it, is multiplied by the scales of the inputs and of the rows, and the rows' minima by the
sum of the inputs. Codes are not negative; what they are off by is part of the minimum. Sums of integers are exact, and
steps are added one after the other, so a product has the same bits on every processor that has its kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir

from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant import _block_kernels, _integers, _product_kernels
from rabbitllm.quant._block_formats import FORMATS
from rabbitllm.quant._kernel_interface import BYTE_STEP as STEP
from rabbitllm.quant._vectors import F32, I8, I16, I32, Emitter, emitted, every, features, number, on_stack
from rabbitllm.quant.schemes import NF4_BLOCK

STEP_BYTES = STEP + 4 * 4
"""Of a step of a row in a panel: codes, then a scale and a negated minimum, float32, of each group of 16 or 32. Of a
step of inputs: integers, then their scale, the sum of all, and those of both halves."""
ROWS = 32
"""Rows of the matrix that are computed together, as far as registers hold."""
INPUTS = "inputs"
"""In place of a scheme: the kernel that rounds inputs, which are float32 and in place of codes."""
_LARGEST, _NEAREST, _NEAREST_BITS = 127.0, float(3 << 22), 0x4B400000
"""The largest integer of inputs; a float32 that, added to a small one, leaves the nearest integer in its last bits."""
_WORDS = ir.VectorType(I16, 16)
_OFFSET = 128
"""What is added to values that may be negative."""
_PANEL_STEPS = 16
"""Steps of a panel, of which a tile's rows fit the smallest cache."""
_stack_panel: Any = on_stack(_product_kernels.PANEL_ROWS * _PANEL_STEPS * STEP_BYTES)
_FOUR_BITS = frozenset(
    name
    for name, form in FORMATS.items()
    if form.values is None and form.halves and sum(plane.bits for plane in form.planes) <= 4
)
"""Types of blocks whose 16 products of a code and an input fit 16 bits."""
_LOOKED_UP = frozenset(name for name, form in FORMATS.items() if form.values) | {"4bit"}


@functools.cache
def lanes() -> int:
    """Rows of the matrix in a vector: 16 or 8."""
    return 16 if {"avx512f", "avx512bw", "avx512vnni"} <= features() else 8


@functools.cache
def _multiplies_fours() -> bool:
    """Whether there is an instruction for four bytes at a time."""
    return lanes() == 16 or "avxvnni" in features()


def types() -> frozenset[str]:
    """The schemes that have a kernel on this processor."""
    return _FOUR_BITS | _LOOKED_UP if _multiplies_fours() else _FOUR_BITS


@functools.cache
def pays() -> bool:
    """Whether these kernels are the fastest here.

    With AMX torch's product of bfloat16 is faster, with AVX-512 without VNNI panels of float32 are as fast.
    """
    return "amx-tile" not in features() and (_multiplies_fours() or "avx512f" not in features())


def kernel(method: str, scheme: str, width: int) -> Callable[[Any], None]:
    """As `_product_kernels.kernel`, by `BYTES`, of any width; the scheme is one of `types`, or `INPUTS`."""
    name, width = f"{method}_{scheme}", lanes()
    if scheme == INPUTS:
        return _product_kernels.rows_kernel(name, emitted(_round, width), STEP_BYTES)
    fill = _fill_nibbles if scheme == "4bit" else _fill_blocks(scheme)
    dot = functools.partial(_dot, min(FORMATS[scheme].group, STEP) if scheme in FORMATS else STEP)
    tile = 2, 6 if width == 16 else 3 if _multiplies_fours() else 2  # as registers allow
    others = {"GROUP": width, "MAX_STEPS": _PANEL_STEPS, "stack_panel": _stack_panel}
    return _product_kernels.panel_kernel(name, emitted(fill, width), dot, tile, STEP_BYTES, **others)


@functools.cache
def table_of(scheme: str, levels: bytes) -> npt.NDArray[np.uint8] | None:
    """The table of 4bit, from the float32 values of its codes: 16 bytes, and the factor of an integer, float32.

    The factor is that of 112 to 127 steps to the largest value which is off least.
    """
    if scheme != "4bit":
        return None
    values = np.frombuffer(levels, np.float32).astype(np.float64)
    most = np.abs(values).max()
    if not np.isfinite(most) or not most:
        return None
    values /= most
    steps = min(np.arange(112.0, 127.25, 0.25), key=lambda n: np.square(np.rint(values * n) / n - values).sum())
    integers = (np.rint(values * steps) + _OFFSET).astype(np.uint8)
    return np.concatenate([integers, np.array([most / steps], np.float32).view(np.uint8)])


def _store_step(emit: Emitter, place: Any, codes: Any, groups: list[tuple[Any, Any]]) -> None:
    """Store a row's step, which begins at a lane: 32 bytes, and a scale and what is added of each group."""
    fours = emit.b.bitcast(codes, ir.VectorType(I32, STEP // 4))
    values = [emit.b.extract_element(fours, ir.Constant(I32, v)) for v in range(STEP // 4)]
    for v, value in enumerate(itertools.chain(values, *groups)):
        emit.store(value, emit.add(place, 4 * emit.width * v), 4)


def _fill_blocks(scheme: str) -> Any:
    """See `_product_kernels._fill`."""
    block, stored = BLOCK_TYPES[scheme], FORMATS[scheme]
    form = replace(stored, least=0)  # codes as they are stored
    offset = -_OFFSET if stored.values else stored.least
    steps_of_block = block.elements // STEP

    def fill(emit, codes, scales, table, panel, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
        b = emit.b
        first, count = (b.udiv(step, number(steps_of_block)) for step in (first, steps))
        start = emit.add(codes, b.mul(row, row_bytes), b.mul(first, number(block.nbytes)))
        with emit.loop(count) as index:
            base = emit.add(start, b.mul(index, number(block.nbytes)))
            place = emit.add(panel, b.mul(index, number(steps_of_block * STEP_BYTES * emit.width)))
            halves = _block_kernels.halves_of(emit, form, base)
            # what is loaded again after a store, LLVM loads again
            load = functools.cache(lambda offset, ir_type, base=base: emit.load(emit.add(base, offset), ir_type, 1))
            for begin in range(0, block.elements, STEP):
                runs = range(begin, begin + STEP, form.run)
                code = emit.joined(*(_block_kernels.codes_of(emit, form, load, run) for run in runs))
                if form.values:
                    code = b.xor(code, every(code.type, _OFFSET))
                groups = []
                for element in range(begin, begin + STEP, form.group):
                    scale, *least = _block_kernels.scale_and_minimum(emit, form, base, halves, element // form.group)
                    added = b.fneg(*least) if least else b.fmul(scale, ir.Constant(F32, float(offset)))
                    groups.append((scale, added))
                _store_step(emit, emit.add(place, begin // STEP * STEP_BYTES * emit.width), code, groups)

    return fill


def _fill_nibbles(emit, codes, scales, table, panel, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
    """The same of 4bit; two steps have one scale."""
    b, block_bytes, half = emit.b, NF4_BLOCK // 2, ir.VectorType(I8, STEP)
    values = emit.load(table, ir.VectorType(I8, 16), 1)
    factor = emit.load(emit.add(table, 16), F32, 1)
    start = emit.add(codes, b.mul(row, row_bytes))
    before = b.mul(row, b.udiv(all_steps, number(2)))
    first, count = (b.udiv(step, number(2)) for step in (first, steps))
    with emit.loop(count) as index:
        block = emit.add(first, index)
        bytes_ = emit.load(emit.add(start, b.mul(block, number(block_bytes))), half, 1)
        nibbles = b.lshr(bytes_, every(half, 4)), b.and_(bytes_, every(half, 15))  # the first is in the high half
        code = emit.pick(*nibbles, [i // 2 + i % 2 * STEP for i in range(2 * STEP)])
        code = _integers.look_up(emit, values, code)
        scale = emit.load(emit.add(scales, b.mul(emit.add(before, block), number(4))), F32, 4)
        scale = b.fmul(scale, factor)
        group = scale, b.fmul(scale, ir.Constant(F32, float(-_OFFSET)))
        for part in range(2):
            place = emit.add(panel, b.mul(index, number(2 * STEP_BYTES * emit.width)), part * STEP_BYTES * emit.width)
            _store_step(emit, place, emit.pick(code, code, range(part * STEP, (part + 1) * STEP)), [group])


def _dot(group: int, vectors: int, tokens: int) -> Any:
    """See `_product_kernels._panel_dot`: of the rows of so many vectors, and groups of so many elements.

    With one vector there may be fewer rows left.
    """

    def dot(emit, panel, inputs, out, steps, panel_bytes, input_bytes, all_rows, left):  # type: ignore[no-untyped-def]
        b, width = emit.b, emit.width
        sums = [[emit.variable() for _ in range(tokens)] for _ in range(vectors)]
        with emit.loop(steps) as index:
            place = emit.add(panel, b.mul(index, number(STEP_BYTES * width)))
            matrix = [emit.add(place, b.mul(panel_bytes, number(width * r))) for r in range(vectors)]
            place = emit.add(inputs, b.mul(index, number(STEP_BYTES)))
            of_tokens = [emit.add(place, b.mul(input_bytes, number(t))) for t in range(tokens)]

            def in_lanes(offset: int, of_tokens: list[Any] = of_tokens) -> list[Any]:
                return [emit.spread(emit.load(emit.add(token, offset), F32, 4)) for token in of_tokens]

            for part in range(STEP // group):
                products: list[list[Any]] = [[None] * tokens for _ in range(vectors)]
                for offset in range(part * group, (part + 1) * group, 4):
                    fours = in_lanes(offset)
                    for row, of_row in zip(matrix, products, strict=True):
                        codes = emit.load(emit.add(row, offset * width), emit.floats, 4)
                        of_row[:] = [_add_products(emit, *pair, codes) for pair in zip(of_row, fours, strict=True)]
                input_scales = in_lanes(STEP)
                input_sums = in_lanes(STEP + 4 if group == STEP else STEP + 8 + 4 * part)
                for row, of_row, totals in zip(matrix, products, sums, strict=True):
                    places = (emit.add(row, (STEP + 8 * part + offset) * width) for offset in (0, 4))
                    scale, added = (emit.load(place, emit.floats, 4) for place in places)
                    of_inputs = zip(of_row, input_scales, input_sums, totals, strict=True)
                    for product, input_scale, input_sum, total in of_inputs:
                        value = b.fmul(b.sitofp(_in_ints(emit, product), emit.floats), input_scale)
                        value = emit.fma(value, scale, b.load(total))
                        b.store(emit.fma(added, input_sum, value), total)
        for (r, of_row), t in itertools.product(enumerate(sums), range(tokens)):
            to, total = emit.add(out, 4 * width * r, b.mul(all_rows, number(4 * t))), b.load(of_row[t])
            if vectors > 1:
                emit.store(b.fadd(emit.load(to, emit.floats, 4), total), to, 4)
                continue
            for lane in range(width):
                with b.if_then(b.icmp_signed("<", number(lane), left)):
                    place, value = emit.add(to, 4 * lane), b.extract_element(total, ir.Constant(I32, lane))
                    emit.store(b.fadd(emit.load(place, F32, 4), value), place, 4)

    return emitted(dot, lanes())


def _add_products(emit: Emitter, total: Any, inputs: Any, codes: Any) -> Any:
    """`total`, which is nothing at first, and the products of four codes and four inputs in each lane."""
    b, of_bytes = emit.b, ir.VectorType(I8, 4 * emit.width)
    if _multiplies_fours():
        name = f"llvm.x86.avx512.vpdpbusd.{32 * emit.width}"
        operand = of_bytes if binding.llvm_version_info >= (22,) else emit.ints
        multiply = emit.function(name, emit.ints, emit.ints, operand, operand)
        return b.call(multiply, [total or emit.every(0), b.bitcast(codes, operand), b.bitcast(inputs, operand)])
    multiply = emit.function("llvm.x86.avx2.pmadd.ub.sw", _WORDS, of_bytes, of_bytes)
    products = b.call(multiply, [b.bitcast(codes, of_bytes), b.bitcast(inputs, of_bytes)])
    return b.add(total, products) if total else products


def _in_ints(emit: Emitter, total: Any) -> Any:
    """Sums of products in 32 bits."""
    if _multiplies_fours():
        return total
    return emit.b.call(emit.function("llvm.x86.avx2.pmadd.wd", emit.ints, _WORDS, _WORDS), [total, every(_WORDS, 1)])


def _round(emit, x, scales, table, out, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
    """Rounds a row of inputs, as a row of a matrix is decoded."""
    b, ints, floats = emit.b, ir.VectorType(I32, STEP), ir.VectorType(F32, STEP)

    def reduced(vector: Any, join: Callable[[Any, Any], Any]) -> Any:
        """The only lane of a vector whose halves are joined until it has one."""
        while (count := vector.type.count // 2) > 0:
            vector = join(*halves(vector, count))
        return b.extract_element(vector, ir.Constant(I32, 0))

    def halves(vector: Any, count: int) -> list[Any]:
        return [emit.pick(vector, vector, range(begin, begin + count)) for begin in (0, count)]

    def larger(one: Any, other: Any) -> Any:
        return b.select(b.icmp_signed(">", one, other), one, other)

    start = emit.add(x, b.mul(row, row_bytes))
    with emit.loop(steps) as index:
        step = emit.add(out, b.mul(index, number(STEP_BYTES)))
        bits = emit.load(emit.add(start, b.mul(index, number(4 * STEP))), ints, 4)
        largest = b.bitcast(reduced(b.and_(bits, every(ints, 0x7FFFFFFF)), larger), F32)  # ordered as the floats are
        factor = b.fdiv(ir.Constant(F32, _LARGEST), largest)
        is_small = b.fcmp_ordered("<", largest, ir.Constant(F32, 1e-30))
        factor = emit.spread(b.select(is_small, ir.Constant(F32, 0.0), factor), STEP)
        moved = b.fadd(b.fmul(b.bitcast(bits, floats), factor), every(floats, _NEAREST))
        integers = b.sub(b.bitcast(moved, ints), every(ints, _NEAREST_BITS))
        emit.store(b.trunc(integers, ir.VectorType(I8, STEP)), step, 4)
        scale = b.fmul(largest, ir.Constant(F32, 1 / _LARGEST))
        sums = [reduced(half, b.add) for half in halves(integers, STEP // 2)]
        values = [b.fmul(b.sitofp(total, F32), scale) for total in (b.add(*sums), *sums)]
        for place, value in enumerate([scale, *values]):
            emit.store(value, emit.add(step, STEP + 4 * place), 4)
