"""Kernels that multiply many rows of input, rounded to 8 bits, with blocks whose codes have at most 4 bits.

They are kernels by panels, but of bytes: one instruction of AVX2 (VPMADDUBSW) multiplies 32 codes, which are not
negative, with 32 inputs, where one in float32 multiplies 8. A step of 256 elements is 8 lanes of 32, and a lane two
parts, each with a scale of its inputs. Vector v of a step, of 8, has bytes 4 v to 4 v + 3 of each lane. So vectors v =
0 to 3, the first parts, are summed in 16 bits; the sums of 8 lanes are multiplied by scales at once, and their minima
by the sums of inputs. Vectors have 256 bits on every processor, so the results have the same bits on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llvmlite import ir

from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant import _block_kernels, _product_kernels
from rabbitllm.quant._block_formats import FORMATS
from rabbitllm.quant._vectors import F32, I8, I16, I32, Emitter, emitted, every, number

STEP = 256
"""Elements of a step."""
INPUTS = "inputs"
"""In place of a scheme: the kernel that rounds inputs, which are float32 and in place of codes."""
_LANES = 8
_PART = STEP // _LANES // 2
STEP_BYTES = STEP + 4 * 4 * _LANES
"""Of a step in a panel: codes, then scales and negated minima of both parts of all lanes, float32. Of a step of inputs:
integers, then scales and sums."""
_LARGEST, _NEAREST, _NEAREST_BITS = 127.0, float(3 << 22), 0x4B400000
"""The largest integer of inputs; a float32 that, added to a small one, leaves the nearest integer in its last bits."""
_BYTES, _WORDS = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
_TOKENS = 2
TYPES = tuple(
    name
    for name, form in FORMATS.items()
    if form.values is None and form.halves and sum(plane.bits for plane in form.planes) <= 4
)
"""The types that have such a kernel: eight products of a code and an input fit 16 bits."""


def kernel(method: str, scheme: str, width: int) -> Callable[[Any], None]:
    """As `_product_kernels.kernel`, by `BYTES`, of any width; the scheme is one of `TYPES`, or `INPUTS`."""
    name = f"{method}_{scheme}"
    if scheme == INPUTS:
        return _product_kernels.rows_kernel(name, emitted(_round, _LANES), STEP_BYTES)
    return _product_kernels.panel_kernel(name, _fill(scheme), _dot, _TOKENS, STEP_BYTES // 2)


def _store_bytes(emit: Emitter, place: Any, lanes: Sequence[Any]) -> None:
    """Store the 32 bytes of each lane as vectors: a matrix of 8 x 8 ints is transposed, in blocks of 1, 2 and 4."""
    vectors = [emit.b.bitcast(lane, emit.ints) for lane in lanes]
    for size in (1, 2, 4):
        left = [k if not k & size else _LANES + k - size for k in range(_LANES)]
        for v in range(_LANES):
            if not v & size:
                pair = vectors[v], vectors[v + size]
                vectors[v], vectors[v + size] = emit.pick(*pair, left), emit.pick(*pair, [k + size for k in left])
    for v, vector in enumerate(vectors):
        emit.store(vector, emit.add(place, 32 * v), 4)


def _store_pair(emit: Emitter, step: Any, lane: int, part: int, pair: Sequence[Any]) -> None:
    """Store a scale and what belongs to it, of a part of a lane."""
    for offset, value in zip(_offsets(part), pair, strict=True):
        emit.store(value, emit.add(step, offset + 4 * lane), 4)


def _offsets(part: int) -> tuple[int, int]:
    """Where a step has the scales, and the minima or sums, of a part of all lanes."""
    return STEP + 4 * _LANES * part, STEP + 4 * _LANES * (part + 2)


def _fill(scheme: str) -> Any:
    """See `_product_kernels._fill`."""
    block, stored = BLOCK_TYPES[scheme], FORMATS[scheme]
    form = replace(stored, least=0)  # codes as they are stored
    step_bytes = block.row_bytes(STEP)

    def fill(emit, codes, scales, table, panel, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
        b = emit.b
        start = emit.add(codes, b.mul(row, row_bytes), b.mul(first, number(step_bytes)))
        with emit.loop(steps) as index:
            step, lanes = emit.add(panel, b.mul(index, number(STEP_BYTES))), []
            for lane in range(_LANES):
                blocks, begin = divmod(2 * _PART * lane, block.elements)
                if begin == 0:
                    base = emit.add(start, b.mul(index, number(step_bytes)), blocks * block.nbytes)
                    halves = _block_kernels.halves_of(emit, form, base)
                    # what is loaded again after a store, LLVM loads again
                    load = functools.cache(lambda offset, kind, base=base: emit.load(emit.add(base, offset), kind, 1))
                runs = range(begin, begin + 2 * _PART, form.run)
                lanes.append(emit.joined(*(_block_kernels.codes_of(emit, form, load, run) for run in runs)))
                for part in range(2):
                    group = (begin + part * _PART) // form.group
                    scale, *least = _block_kernels.scale_and_minimum(emit, form, base, halves, group)
                    added = b.fneg(*least) if least else b.fmul(scale, ir.Constant(F32, float(stored.least)))
                    _store_pair(emit, step, lane, part, (scale, added))
            _store_bytes(emit, step, lanes)

    return emitted(fill, _LANES)


def _dot(rows: int, tokens: int) -> Any:
    """See `_product_kernels._panel_dot`."""

    def dot(emit, panel, inputs, out, steps, panel_bytes, input_bytes, all_rows):  # type: ignore[no-untyped-def]
        b = emit.b
        multiply = emit.function("llvm.x86.avx2.pmadd.ub.sw", _WORDS, _BYTES, _BYTES)
        add_pairs = emit.function("llvm.x86.avx2.pmadd.wd", emit.ints, _WORDS, _WORDS)
        sums = [[emit.variable() for _ in range(tokens)] for _ in range(rows)]

        def pair(step: Any, part: int) -> list[Any]:
            return [emit.load(emit.add(step, offset), emit.floats, 4) for offset in _offsets(part)]

        with emit.loop(steps) as index:
            before = b.mul(index, number(STEP_BYTES))
            matrix = [emit.add(panel, b.mul(panel_bytes, number(r)), before) for r in range(rows)]
            given = [emit.add(inputs, b.mul(input_bytes, number(t)), before) for t in range(tokens)]
            for part in range(2):
                products: list[list[Any]] = [[every(_WORDS, 0)] * tokens for _ in range(rows)]
                for offset in range(part * STEP // 2, (part + 1) * STEP // 2, 32):
                    values = [emit.load(emit.add(step, offset), _BYTES, 4) for step in given]
                    for step, of_row in zip(matrix, products, strict=True):
                        codes = emit.load(emit.add(step, offset), _BYTES, 4)
                        of_row[:] = [
                            b.add(total, b.call(multiply, [codes, value]))
                            for total, value in zip(of_row, values, strict=True)
                        ]
                of_inputs = [pair(step, part) for step in given]
                for step, of_row, totals in zip(matrix, products, sums, strict=True):
                    scale, least = pair(step, part)
                    for product, (input_scale, input_sum), total in zip(of_row, of_inputs, totals, strict=True):
                        ints = b.call(add_pairs, [product, every(_WORDS, 1)])
                        value = emit.fma(b.fmul(b.sitofp(ints, emit.floats), input_scale), scale, b.load(total))
                        b.store(emit.fma(least, input_sum, value), total)
        _product_kernels.add_sums(emit, sums, out, all_rows)

    return emitted(dot, _LANES)


def _round(emit, x, scales, table, out, row_bytes, all_steps, shift, row, first, steps):  # type: ignore[no-untyped-def]
    """Rounds a row of inputs, as a row of a matrix is decoded."""
    b, ints, floats = emit.b, ir.VectorType(I32, _PART), ir.VectorType(F32, _PART)

    def reduced(vector: Any, join: Callable[[Any, Any], Any]) -> Any:
        """The only lane of a vector whose halves are joined until it has one."""
        for count in (8, 4, 2, 1):
            vector = join(*(emit.pick(vector, vector, range(begin, begin + count)) for begin in (0, count)))
        return b.extract_element(vector, ir.Constant(I32, 0))

    def larger(one: Any, other: Any) -> Any:
        return b.select(b.icmp_signed(">", one, other), one, other)

    start = emit.add(x, b.mul(row, row_bytes))
    with emit.loop(steps) as index:
        place = emit.add(start, b.mul(index, number(4 * STEP)))
        step = emit.add(out, b.mul(index, number(STEP_BYTES)))
        parts = []
        for number_of_part in range(2 * _LANES):
            lane, part = divmod(number_of_part, 2)
            bits = emit.load(emit.add(place, 4 * _PART * number_of_part), ints, 4)
            size = b.and_(bits, every(ints, 0x7FFFFFFF))  # ordered as the floats are
            largest = b.bitcast(reduced(size, larger), F32)
            factor = b.fdiv(ir.Constant(F32, _LARGEST), largest)
            is_small = b.fcmp_ordered("<", largest, ir.Constant(F32, 1e-30))
            factor = emit.spread(b.select(is_small, ir.Constant(F32, 0.0), factor), _PART)
            moved = b.fadd(b.fmul(b.bitcast(bits, floats), factor), every(floats, _NEAREST))
            integers = b.sub(b.bitcast(moved, ints), every(ints, _NEAREST_BITS))
            scale = b.fmul(largest, ir.Constant(F32, 1 / _LARGEST))
            total = b.fmul(b.sitofp(reduced(integers, b.add), F32), scale)
            _store_pair(emit, step, lane, part, (scale, total))
            parts.append(b.trunc(integers, ir.VectorType(I8, _PART)))
        _store_bytes(emit, step, [emit.joined(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)])
