"""What the programs of `joint.py` call as compiled code: the loop over their functions, and parts of a product."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from rabbitllm.base.compiling import to_array
from rabbitllm.quant._kernel_interface import ARGUMENTS, BEFORE_WORK
from rabbitllm.quant._vectors import I16, I32, I64, Emitter, emitted, narrowed, number

PRODUCT_WORDS = 1 + BEFORE_WORK + len(ARGUMENTS)
"""The address of a kernel, and its int64s for one piece of work."""


def _emit_call(emit, function, data):  # type: ignore[no-untyped-def]
    signature = ir.FunctionType(ir.VoidType(), [I64])
    emit.b.call(emit.b.inttoptr(function, signature.as_pointer()), [data])


def _emit_team(emit, parallel, function, data, threads):  # type: ignore[no-untyped-def]
    signature = ir.FunctionType(ir.VoidType(), [I64, I64, I32, I32])
    count = emit.b.trunc(threads, I32)
    emit.b.call(emit.b.inttoptr(parallel, signature.as_pointer()), [function, data, count, ir.Constant(I32, 0)])


def _emit_narrow(emit: Emitter, source: Any, target: Any, count: Any) -> None:
    """Round float32 to bfloat16."""
    b = emit.b
    with emit.loop(count) as index:
        value = narrowed(b, emit.load(emit.add(source, b.shl(index, number(2))), I32, 4))
        value = b.trunc(b.lshr(value, ir.Constant(I32, 16)), I16)
        emit.store(value, emit.add(target, b.shl(index, number(1))), 2)


_CALL, _TEAM, _NARROW = (emitted(code, 16) for code in (_emit_call, _emit_team, _emit_narrow))


def multiply(data):  # type: ignore[no-untyped-def]
    """A thread's rows of each matrix: after the own address the number of these, and `PRODUCT_WORDS` of each."""
    head = to_array(data, 2)
    words = to_array(data, 2 + head[1] * PRODUCT_WORDS)
    for i in range(2, len(words), PRODUCT_WORDS):
        _CALL(words[i], words[0] + 8 * (i + 1))


def narrow(data):  # type: ignore[no-untyped-def]
    """Round sums to bfloat16: after the own address those of sums and results, and their count."""
    given = to_array(data, 4)
    _NARROW(given[1], given[2], given[3])


def run_program(data):  # type: ignore[no-untyped-def]
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
