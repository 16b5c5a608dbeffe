"""A product as one call of compiled code: rounds the inputs, runs kernels by codes in a team, and rounds the results.

`_product` takes the address of int64s: `HEAD_WORDS`, then `INPUT_WORDS` for each layout of inputs, then `PRODUCT_WORDS`
for each matrix. Offsets are from the scratch memory that the caller provides. `routed` multiplies matrices that are
chosen for the call, each with rows of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir

from rabbitllm.base.compiling import address_of, to_array, words_at
from rabbitllm.quant._kernel_interface import ARGUMENTS, BEFORE_WORK
from rabbitllm.quant._vectors import I16, I32, I64, Emitter, emitted, narrowed, number

HEAD_WORDS = 12
"""Own address; addresses of the inputs, of the scratch memory, of GOMP_parallel, and of the function for a thread;
threads; address of the function that rounds inputs; how many layouts and matrices follow; whether inputs are bfloat16,
else float32; rows of input, without gaps, and columns."""
INPUT_WORDS = 5
"""Of an `_integers.InputLayout`: its step, group and the address of its order; offsets of rounded inputs and scales."""
BEFORE_PIECE = 4
"""Address of a kernel; number of its layout; offset of its sums, and the address of the result in bfloat16; or -1, and
the address of the sums. `BEFORE_WORK` words and one piece of work follow."""
PRODUCT_WORDS = BEFORE_PIECE + BEFORE_WORK + len(ARGUMENTS)
_OF_WORK = BEFORE_PIECE + BEFORE_WORK
_EVEN, _ODD, _OUT, _TOKENS, _ROWS = (
    _OF_WORK + ARGUMENTS.index(name) for name in ("even", "odd", "out", "tokens", "rows")
)


def _emit_call(emit, function, data):  # type: ignore[no-untyped-def]
    signature = ir.FunctionType(ir.VoidType(), [I64])
    emit.b.call(emit.b.inttoptr(function, signature.as_pointer()), [data])


def _emit_team(emit, parallel, function, data, threads):  # type: ignore[no-untyped-def]
    signature = ir.FunctionType(ir.VoidType(), [I64, I64, I32, I32])
    count = emit.b.trunc(threads, I32)
    emit.b.call(emit.b.inttoptr(parallel, signature.as_pointer()), [function, data, count, ir.Constant(I32, 0)])


def _emit_round(emit, function, x, bfloat, rows, steps, columns, step, group, order, integers, floats):  # type: ignore[no-untyped-def]
    signature = ir.FunctionType(ir.VoidType(), [I64] * 11)
    arguments = [x, x, bfloat, rows, steps, columns, step, group, order, integers, floats]
    emit.b.call(emit.b.inttoptr(function, signature.as_pointer()), arguments)


def _emit_narrow(emit: Emitter, source: Any, target: Any, count: Any) -> None:
    """Round float32 to bfloat16."""
    b = emit.b
    with emit.loop(count) as index:
        value = narrowed(b, emit.load(emit.add(source, b.shl(index, number(2))), I32, 4))
        value = b.trunc(b.lshr(value, ir.Constant(I32, 16)), I16)
        emit.store(value, emit.add(target, b.shl(index, number(1))), 2)


_CALL, _TEAM, _ROUND, _NARROW = (emitted(code, 16) for code in (_emit_call, _emit_team, _emit_round, _emit_narrow))


def _each(data):  # type: ignore[no-untyped-def]
    """The part of one thread: some rows of every matrix."""
    head = to_array(data, HEAD_WORDS)
    own, begin, matrices = head[0], HEAD_WORDS + head[7] * INPUT_WORDS, head[8]
    words = to_array(data, begin + matrices * PRODUCT_WORDS)
    for i in range(begin, begin + matrices * PRODUCT_WORDS, PRODUCT_WORDS):
        _CALL(words[i], own + 8 * (i + BEFORE_PIECE))


def _product(data):  # type: ignore[no-untyped-def]
    head = to_array(data, HEAD_WORDS)
    own, inputs, scratch, team, each, threads, rounding = head[0], head[1], head[2], head[3], head[4], head[5], head[6]
    layouts, matrices, bfloat, rows, columns = head[7], head[8], head[9], head[10], head[11]
    begin = HEAD_WORDS + layouts * INPUT_WORDS
    end = begin + matrices * PRODUCT_WORDS
    words = to_array(data, end)
    for i in range(HEAD_WORDS, begin, INPUT_WORDS):
        step, group, order = words[i], words[i + 1], words[i + 2]
        integers, floats = scratch + words[i + 3], scratch + words[i + 4]
        _ROUND(rounding, inputs, bfloat, rows, columns // step, columns, step, group, order, integers, floats)
    for i in range(begin, end, PRODUCT_WORDS):
        of_layout = HEAD_WORDS + words[i + 1] * INPUT_WORDS
        words[i + _EVEN], words[i + _ODD] = scratch + words[of_layout + 3], scratch + words[of_layout + 4]
        words[i + _OUT] = scratch + words[i + 2] if words[i + 2] >= 0 else words[i + 3]
        words[i + _TOKENS] = rows
    if threads > 1:
        _TEAM(team, each, own, threads)
    else:
        _CALL(each, own)
    for i in range(begin, end, PRODUCT_WORDS):
        if words[i + 2] >= 0:
            _NARROW(words[i + _OUT], words[i + 3], rows * words[i + _ROWS])


ROUTED_WORDS = 25
"""Own address; addresses of the inputs in bfloat16, of the chosen matrices, of the number of each row's input (0: the
row's own), and of the results; of memory for rounded inputs, their scales, sums, and a kernel's words; of the kernel
and of GOMP_parallel; threads; three words of `BEFORE_WORK`; the function that rounds inputs; columns; step, group and
order of their layout; bytes of a row's scales; rows that are rounded, and all; rows of a matrix; its first word.

The chosen matrices: their number, and for each the address of words (`ARGUMENTS` from the first of them), and the
begin and number of its rows. If one row is rounded, it is the input of all."""
_WORK = len(ARGUMENTS)


def routed(data):  # type: ignore[no-untyped-def]
    """Multiply chosen matrices, all of one form, each with rows of its own; the results are bfloat16."""
    head = to_array(data, ROUTED_WORDS)
    integers, floats, sums, work_at = head[5], head[6], head[7], head[8]
    columns, float_bytes, rounded, rows, width, first = head[16], head[20], head[21], head[22], head[23], head[24]
    count = to_array(words_at(head[2]), 4).view(np.int64)[0]
    chosen = to_array(words_at(head[2] + 8), 12 * count).view(np.int64)
    for i in range(rounded):
        source = i
        if head[3] != 0:
            source = to_array(words_at(head[3] + 8 * i), 4).view(np.int64)[0]
        place = head[1] + 2 * columns * source
        to, others = integers + 2 * columns * i, floats + float_bytes * i
        _ROUND(head[15], place, 1, 1, columns // head[17], columns, head[17], head[18], head[19], to, others)
    work = to_array(words_at(work_at), 4 * (BEFORE_WORK + count * _WORK)).view(np.int64)
    work[0], work[1], work[2], work[3] = head[12], head[13], head[14], count
    for i in range(count):
        begin, tokens = chosen[3 * i + 1], chosen[3 * i + 2]
        words = to_array(words_at(chosen[3 * i] + 8 * first), 4 * _WORK).view(np.int64)
        piece = BEFORE_WORK + i * _WORK
        for j in range(_WORK):
            work[piece + j] = words[j]
        source, at = begin if rounded > 1 else 0, piece - _OF_WORK
        work[at + _EVEN], work[at + _ODD] = integers + 2 * columns * source, floats + float_bytes * source
        work[at + _OUT], work[at + _TOKENS] = sums + 4 * width * begin, tokens
    if head[11] > 1:
        _TEAM(head[10], head[9], work_at, head[11])
    else:
        _CALL(head[9], work_at)
    _NARROW(sums, head[4], rows * width)


def _program(data):  # type: ignore[no-untyped-def]
    """Set the words that are addresses, and call each function; see `joint.Program`."""
    head = to_array(data, 6)
    begin, places, calls, team = head[2], head[3], head[4], head[5]
    words = to_array(data, head[1])
    end = begin + 3 * places
    for i in range(begin, end, 3):
        words[words[i]] = words[words[i + 1]] + words[i + 2]
    for i in range(end, end + 3 * calls, 3):
        if words[i + 2] > 1:
            _TEAM(team, words[i], words[i + 1], words[i + 2])
        else:
            _CALL(words[i], words[i + 1])


@functools.cache
def addresses() -> tuple[int, int, int]:
    """The address of the whole product, of its function for a thread, and of `_program`."""
    return address_of(_product), address_of(_each), address_of(_program)
