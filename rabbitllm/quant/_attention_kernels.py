"""Attention of the rows of a prompt as compiled code, in float32, with one rounding: of the results.

Scores and sums are made of blocks of keys that begin at multiples of `KEYS`. So a row of the result has the same bits
in a prompt's pass and in one of its last part, for any number of threads, and where rows after it are others, also NaN.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from rabbitllm.base.compiling import POWERS_OF_2, bits_of, bytes_at, floats_at, to_array
from rabbitllm.quant import _byte_kernels, _product_kernels, _vectors
from rabbitllm.quant._vectors import F32, I16, I32, NEAREST, NEAREST_BITS, emitted, every, narrowed, number, on_stack

KEYS, QUERIES, HEADS = 64, 48, 4
"""Keys of a block; rows and heads that are multiplied with a block while it is in the processor's cache."""
WORDS = 18
"""Int64s that the kernel gets: see `attend`."""
_NONE, _HIDDEN = -1.7e38, -3.4e38
"""The largest score before there is one, and the score of what a row does not see."""


def _tile(rows: int, pitch: int, is_first: bool) -> Any:
    """An intrinsic: the products of rows, so many floats apart, with two vectors of columns, added to `out` or not."""

    def multiply(emit, left, right, out, depth, step_bytes, vector_bytes, out_bytes):  # type: ignore[no-untyped-def]
        b, nbytes = emit.b, 4 * emit.width
        sums = [[emit.variable() for _ in range(2)] for _ in range(rows)]
        places = [[emit.add(out, b.mul(out_bytes, number(r)), nbytes * v) for v in range(2)] for r in range(rows)]
        totals = [*zip(itertools.chain(*sums), itertools.chain(*places), strict=True)]
        for total, place in () if is_first else totals:
            b.store(emit.load(place, emit.floats, 4), total)
        with emit.loop(depth) as index:
            at = emit.add(right, b.mul(index, step_bytes))
            vectors = [emit.load(place, emit.floats, 4) for place in (at, emit.add(at, vector_bytes))]
            begin = emit.add(left, b.mul(index, number(4)))
            for r, of_row in enumerate(sums):
                value = emit.spread(emit.load(emit.add(begin, 4 * pitch * r), F32, 4))
                for total, vector in zip(of_row, vectors, strict=True):
                    b.store(emit.fma(value, vector, b.load(total)), total)
        for total, place in totals:
            emit.store(b.load(total), place, 4)

    return multiply


def _weigh(width, emit, scores, seen, mask, state, total):  # type: ignore[no-untyped-def]
    """Turn a row's scores of a block into weights: of the first `seen` keys, as far as their byte of a mask is not 0.

    `state` has the largest score so far and the sum of weights, which are relative to it, as are the row's `total`.
    """
    b, lanes = emit.b, emit.width
    vectors, index_type = KEYS // lanes, ir.VectorType(I32, lanes)
    lowest = ir.Constant(I32, 0)
    limit = b.insert_element(ir.Constant(index_type, ir.Undefined), b.trunc(seen, I32), lowest)
    limit = emit.pick(limit, limit, [0] * lanes)
    shown = []
    for v in range(vectors):
        value = emit.load(emit.add(scores, 4 * lanes * v), emit.floats, 4)
        is_seen = b.icmp_signed("<", ir.Constant(index_type, [v * lanes + i for i in range(lanes)]), limit)
        byte = emit.load(emit.add(mask, lanes * v), emit.bytes, 1)
        is_seen = b.and_(is_seen, b.icmp_unsigned("!=", byte, every(emit.bytes, 0)))
        shown.append(b.select(is_seen, value, every(emit.floats, _HIDDEN)))

    def larger(one: Any, other: Any) -> Any:
        return b.select(b.fcmp_ordered(">", one, other), one, other)

    def power(x: Any) -> Any:
        x = larger(x, every(x.type, -127.0))  # whose power is 0
        moved = b.fadd(x, every(x.type, NEAREST))
        rest, result = b.fsub(x, b.fsub(moved, every(x.type, NEAREST))), every(x.type, POWERS_OF_2[0])
        for coefficient in POWERS_OF_2[1:]:
            result = emit.fma(result, rest, every(x.type, coefficient))
        bits = b.sub(b.bitcast(moved, emit.ints), emit.every(NEAREST_BITS - 127))
        return b.fmul(result, b.bitcast(b.shl(bits, emit.every(23)), emit.floats))

    before, most = emit.spread(emit.load(state, F32, 4)), functools.reduce(larger, shown)
    most = larger(before, emit.spread(emit.reduced(most, larger)))
    weights = [power(b.fsub(value, most)) for value in shown]
    for v, weight in enumerate(weights):
        emit.store(weight, emit.add(scores, 4 * lanes * v), 4)
    # NaN for a score that is NaN or infinite
    summed = [emit.fma(value, emit.zero, weight) for value, weight in zip(shown, weights, strict=True)]
    summed = emit.spread(emit.reduced(functools.reduce(b.fadd, summed), b.fadd))
    factor = power(b.fsub(before, most))
    of_state = emit.spread(emit.load(emit.add(state, 4), F32, 4))
    emit.store(b.extract_element(most, lowest), state, 4)
    emit.store(b.extract_element(emit.fma(of_state, factor, summed), lowest), emit.add(state, 4), 4)
    for offset in range(0, 4 * width, 4 * lanes):
        place = emit.add(total, offset)
        emit.store(b.fmul(emit.load(place, emit.floats, 4), factor), place, 4)


def _widen(emit, source, target, count, factor):  # type: ignore[no-untyped-def]
    """Store bfloat16 values times a factor, the bits of a float32, as float32."""
    b = emit.b
    factor = emit.spread(b.bitcast(b.trunc(factor, I32), F32))
    with emit.loop(b.udiv(count, number(emit.width))) as index:
        bits = emit.load(emit.add(source, b.mul(index, number(2 * emit.width))), ir.VectorType(I16, emit.width), 2)
        value = b.bitcast(b.shl(b.zext(bits, emit.ints), emit.every(16)), emit.floats)
        emit.store(b.fmul(value, factor), emit.add(target, b.mul(index, number(4 * emit.width))), 4)


def _finish(emit, source, target, count, state):  # type: ignore[no-untyped-def]
    """Store a row divided by its sum of weights as bfloat16; 0 if it saw nothing."""
    b = emit.b
    total = emit.load(emit.add(state, 4), F32, 4)
    total = emit.spread(b.select(b.fcmp_ordered("==", total, ir.Constant(F32, 0.0)), ir.Constant(F32, 1.0), total))
    with emit.loop(b.udiv(count, number(emit.width))) as index:
        value = b.fdiv(emit.load(emit.add(source, b.mul(index, number(4 * emit.width))), emit.floats, 4), total)
        value = narrowed(b, b.bitcast(value, emit.ints))
        value = b.trunc(b.lshr(value, emit.every(16)), ir.VectorType(I16, emit.width))
        emit.store(value, emit.add(target, b.mul(index, number(2 * emit.width))), 2)


ONE = 0x3F800000
_INFINITE = np.uint32(0x7F800000)
"""The exponent's bits of a float32 that is not finite."""
SCORES: Any = None
PRODUCTS = ADD = WEIGH = WIDEN = FINISH = TURN = room = SCORES
WIDTH = LANES = TILE = 0


def _attend(data, start, end, parts):  # type: ignore[no-untyped-def]
    """Some parts of the rows and heads.

    After the own address those of queries, keys, values, results and of a mask, a byte for each row and key, or 0 for
    what is causal; rows and keys; bytes from a head to the next and from a row to the next, of queries, of keys and of
    values; bytes from a row of the mask to the next; heads, heads for each of the keys', and the bits of the factor of
    scores in powers of 2.
    """
    words = to_array(data, WORDS)
    mask_at, rows, tokens, heads, group = words[5], words[6], words[7], words[15], words[16]
    bundles = -(-group // HEADS)
    heads_each = -(-group // bundles)
    blocks = -(-rows // QUERIES)
    count = heads // group * bundles * blocks
    pitch = 4 * WIDTH
    queries = room()
    totals = queries + HEADS * QUERIES * pitch
    keys = totals + HEADS * QUERIES * pitch
    values = keys + KEYS * pitch
    scores = values + KEYS * pitch
    lines = scores + TILE * KEYS * 4
    shown = lines + LANES * pitch
    states = shown + KEYS
    state = to_array(floats_at(states), 2 * HEADS * QUERIES)
    bytes_shown = to_array(bytes_at(shown), KEYS)
    bytes_shown[:] = 1
    sums = to_array(floats_at(totals), HEADS * QUERIES * WIDTH)
    widened = to_array(floats_at(queries), HEADS * QUERIES * WIDTH)
    for item in range(start * count // parts, end * count // parts):
        bundle, turn = item // blocks, item % blocks
        block = turn // 2 if turn % 2 == 0 else blocks - 1 - turn // 2  # cheap and expensive ones in turns
        of_keys, head = bundle // bundles, bundle % bundles * heads_each
        many_heads = min(heads_each, group - head)
        head += of_keys * group
        first = block * QUERIES
        many = min(QUERIES, rows - first)
        before = tokens - rows + first + 1  # keys that the first row sees
        sums[:] = 0
        widened[:] = 0
        for i in range(many_heads):
            for row in range(many):
                source = words[1] + (head + i) * words[8] + (first + row) * words[9]
                WIDEN(source, queries + (i * QUERIES + row) * pitch, WIDTH, words[17])
            for row in range(QUERIES):
                state[2 * (i * QUERIES + row)] = _NONE
                state[2 * (i * QUERIES + row) + 1] = 0
        last = tokens if mask_at != 0 else before + many - 1
        singles = to_array(floats_at(values), KEYS * WIDTH)
        for begin in range(0, last, KEYS):
            here = min(KEYS, last - begin)
            is_hidden = mask_at == 0 and before < begin + here
            if mask_at != 0:
                is_seen = False
                for row in range(first, first + many):
                    of_row = to_array(bytes_at(mask_at + row * words[14] + begin), KEYS)
                    for j in range(here):
                        is_seen |= of_row[j] != 0
                        is_hidden |= of_row[j] == 0
                if not is_seen:
                    continue
            at, values_at = words[2] + of_keys * words[10], words[3] + of_keys * words[12]
            for key in range(0, here, LANES):
                for lane in range(min(LANES, here - key)):
                    WIDEN(at + (begin + key + lane) * words[11], lines + lane * pitch, WIDTH, ONE)
                TURN(lines, keys + key * pitch, pitch)
            for key in range(here):
                WIDEN(values_at + (begin + key) * words[13], values + key * pitch, WIDTH, ONE)
            largest = np.uint32(0)
            if is_hidden:
                for j in range(here * WIDTH):
                    largest = max(largest, bits_of(singles[j]) & _INFINITE)
            is_finite = largest < _INFINITE  # else a weight of 0 hides nothing
            for i in range(many_heads):
                for row in range(0, many, TILE):
                    seen = here if mask_at != 0 else min(here, before + min(row + TILE, many) - 1 - begin)
                    if seen <= 0:
                        continue
                    line = i * QUERIES + row
                    for key in range(0, seen, 2 * LANES):
                        SCORES(
                            queries + line * pitch, keys + key * pitch, scores + 4 * key,
                            WIDTH, 4 * LANES, LANES * pitch, 4 * KEYS,
                        )  # fmt: skip
                    for r in range(TILE):
                        of_row = here
                        if mask_at == 0:
                            of_row = max(min(here, before + row + r - begin), 0)
                        elif row + r < many:
                            source = bytes_at(mask_at + (first + row + r) * words[14] + begin)
                            of_mask = to_array(source, KEYS)
                            for j in range(here):
                                bytes_shown[j] = of_mask[j]
                        WEIGH(
                            scores + 4 * KEYS * r, of_row, shown, states + 8 * (line + r), totals + (line + r) * pitch
                        )
                        for key in range(0 if is_finite else of_row):
                            for column in range(0, WIDTH if bytes_shown[key] else 0, 2 * LANES):
                                ADD(
                                    scores + 4 * (KEYS * r + key), values + key * pitch + 4 * column,
                                    totals + (line + r) * pitch + 4 * column, 1, pitch, 4 * LANES, pitch,
                                )  # fmt: skip
                    for column in range(0, WIDTH if is_finite else 0, 2 * LANES):
                        PRODUCTS(
                            scores, values + 4 * column, totals + line * pitch + 4 * column,
                            seen, pitch, 4 * LANES, pitch,
                        )  # fmt: skip
        for i in range(many_heads):
            for row in range(many):
                line = i * QUERIES + row
                target = words[4] + 2 * WIDTH * ((first + row) * heads + head + i)
                FINISH(totals + line * pitch, target, WIDTH, states + 8 * line)


@functools.cache
def attend(width: int) -> Callable[..., None]:
    """The kernel for heads of a width, a multiple of 32; see `_attend`."""
    lanes = _vectors.lanes()
    tile = 12 if lanes == 16 else 6
    nbytes = 4 * width * (2 * HEADS * QUERIES + 2 * KEYS + lanes) + 4 * tile * KEYS + KEYS + 8 * HEADS * QUERIES

    return _product_kernels.named(
        _attend,
        f"attend_{width}_{lanes}",
        WIDTH=width,
        LANES=lanes,
        TILE=tile,
        SCORES=emitted(_tile(tile, width, True), lanes),
        PRODUCTS=emitted(_tile(tile, KEYS, False), lanes),
        ADD=emitted(_tile(1, KEYS, False), lanes),
        WEIGH=emitted(functools.partial(_weigh, width), lanes),
        WIDEN=emitted(_widen, lanes),
        FINISH=emitted(_finish, lanes),
        TURN=emitted(_byte_kernels.emit_turn, lanes),
        room=on_stack(nbytes),
    )
