"""What the programs of `joint.py` call as compiled code: parts of products, and the rounding of their results."""

from __future__ import annotations

import numpy as np

from rabbitllm.base.compiling import (
    call_parts,
    floats_at,
    helper,
    integers_at,
    shared,
    shortened,
    to_array,
    wide,
    words_at,
)
from rabbitllm.base.openmp import PARTS
from rabbitllm.base.parts import RUN
from rabbitllm.quant._kernel_interface import ARGUMENTS, BEFORE_WORK

PRODUCT_WORDS = 1 + BEFORE_WORK + len(ARGUMENTS)
"""The address of a kernel, and its int64s for one piece of work."""
_EVEN, _ODD, _OUT, _TOKENS = (ARGUMENTS.index(name) for name in ("even", "odd", "out", "tokens"))


@helper()
def _narrow(source, target, count):  # type: ignore[no-untyped-def]
    """Round float32 at an address to bfloat16 at another one."""
    sums, results = to_array(floats_at(source), count), to_array(words_at(target), count)
    for i in range(count):
        results[i] = shortened(sums[i])


def multiply(data, first, end, parts):  # type: ignore[no-untyped-def]
    """Some parts of the rows of each matrix: after the own address the number of these, and `PRODUCT_WORDS` of each."""
    head = to_array(data, 2)
    words = to_array(data, 2 + head[1] * PRODUCT_WORDS)
    for i in range(2, len(words), PRODUCT_WORDS):
        call_parts(words[i], words[0] + 8 * (i + 1), first, end, parts)


def narrow(data):  # type: ignore[no-untyped-def]
    """Round sums to bfloat16: after the own address those of sums and results, and their count."""
    words = to_array(data, 4)
    _narrow(words[1], words[2], words[3])


ROUTED_WORDS, ROUNDING_WORDS = 26, 11
"""Own address; addresses of the inputs in bfloat16, of the chosen matrices, of the number of each row's input (0: the
row's own; -1: all have the first), and of the results (0: the sums are these); of memory for prepared inputs, what is
with them, sums, and for words; of the kernel and of what threads share; threads; the rows of a tile; the function that
prepares inputs; columns; three of its words (for integers step, group and order of their layout); bytes of a prepared
row, and of what is with it; rows that are prepared, and all; rows of a matrix; its first word; and the addresses of
`prepare_rows` and `narrow_rows`.

The chosen matrices: their number, and for each the address of words (`ARGUMENTS` from the first of them), the begin and
number of its rows, and a number that is not used here. Other rows are left as they are. If one row is prepared, it is
the input of all. In place of the even inputs the words of a matrix have the address of the order of its inputs, 0 for
none. The second number is that of the words of `_integers.round_inputs`, which `widen_inputs` takes too."""
_WORK = len(ARGUMENTS)


def widen_inputs(data):  # type: ignore[no-untyped-def]
    """Rows of inputs as kernels take them that do not multiply integers.

    The words are those of `_integers.round_inputs`. Of each step the even ones become float32 and then the odd ones:
    behind them, or at the other address if the word of the order is not 0. With a group of 0, bfloat16 is copied.
    """
    words = to_array(data, ROUNDING_WORDS)
    is_bfloat, steps, step = words[2] != 0, words[4], words[6]
    half = step // 2
    for n in range(words[3] * steps):
        x = words[1] + (2 if is_bfloat else 4) * (n // steps * words[5] + n % steps * step)
        bfloats, singles = to_array(words_at(x), step), to_array(floats_at(x), step)
        if words[7] == 0:
            copy = to_array(words_at(words[9] + 2 * step * n), step)
            for i in range(step):
                copy[i] = bfloats[i]
            continue
        even = words[9] + 4 * step * n
        odd = even + 4 * half
        if words[8] != 0:
            even, odd = words[9] + 2 * step * n, words[10] + 2 * step * n
        evens, odds = to_array(floats_at(even), half), to_array(floats_at(odd), half)
        for i in range(half):
            evens[i] = wide(bfloats[2 * i]) if is_bfloat else singles[2 * i]
            odds[i] = wide(bfloats[2 * i + 1]) if is_bfloat else singles[2 * i + 1]


def widen_in_order(data):  # type: ignore[no-untyped-def]
    """The same of the program's dtype alone, in the order of the inputs."""
    words = to_array(data, ROUNDING_WORDS)
    columns = words[4] * words[6]
    for row in range(words[3]):
        x = to_array(words_at(words[1] + 2 * row * words[5]), columns)
        widened = to_array(floats_at(words[9] + 4 * row * columns), columns)
        for i in range(columns):
            widened[i] = wide(x[i])


def reorder(data):  # type: ignore[no-untyped-def]
    """Rows of inputs in an order: after the own address that of x; whether it is bfloat16, else float32; rows, columns;
    and the addresses of the input of each column, int64, and of the results."""
    words = to_array(data, 7)
    order = to_array(integers_at(words[5]), words[4])
    for row in range(words[3]):
        place = words[4] * row
        if words[2] != 0:
            halves = to_array(words_at(words[1] + 2 * place), words[4])
            ordered_halves = to_array(words_at(words[6] + 2 * place), words[4])
            for i in range(len(order)):
                ordered_halves[i] = halves[order[i]]
        else:
            singles = to_array(floats_at(words[1] + 4 * place), words[4])
            ordered = to_array(floats_at(words[6] + 4 * place), words[4])
            for i in range(len(order)):
                ordered[i] = singles[order[i]]


_SHARED_ROWS = 16
"""Rows from which on several threads prepare them, and round their sums."""


@helper()
def _own_rows(begin, tokens, before, first, last):  # type: ignore[no-untyped-def]
    """The first and the one after the last row of a matrix that are among some of all rows, of which so many are before
    it."""
    return begin + min(max(first - before, 0), tokens), begin + min(max(last - before, 0), tokens)


@helper()
def _all_rows(chosen):  # type: ignore[no-untyped-def]
    """How many rows chosen matrices have."""
    rows = 0
    for i in range(2, len(chosen), 4):
        rows += chosen[i]
    return rows


def prepare_rows(data, start, end, parts):  # type: ignore[no-untyped-def]
    """Some parts of the rows of `routed`, prepared for its kernel."""
    head = to_array(data, ROUTED_WORDS)
    chosen, columns = to_array(integers_at(head[2] + 8), 4 * to_array(integers_at(head[2]), 1)[0]), head[14]
    rounding, ordered, before = np.empty(ROUNDING_WORDS, np.int64), np.empty(columns, np.uint16), 0
    rounding[2], rounding[3], rounding[4], rounding[5] = 1, 1, columns // head[15], columns
    rounding[6], rounding[7], rounding[8] = head[15], head[16], head[17]
    rows = _all_rows(chosen) if head[20] > 1 else 1
    first, last = rows * start // parts, rows * end // parts
    for i in range(len(chosen) // 4 if head[20] > 1 else 1):
        begin, tokens = (chosen[4 * i + 1], chosen[4 * i + 2]) if head[20] > 1 else (0, 1)
        top, bottom = _own_rows(begin, tokens, before, first, last)
        order_at = to_array(integers_at(chosen[4 * i] + 8 * head[23]), _WORK)[_EVEN]
        for row in range(top, bottom):
            source = row if head[3] == 0 else 0
            if head[3] > 0:
                source = to_array(integers_at(head[3] + 8 * row), 1)[0]
            rounding[1] = head[1] + 2 * columns * source
            if order_at != 0:
                order, halves = to_array(integers_at(order_at), columns), to_array(words_at(rounding[1]), columns)
                for k in range(columns):
                    ordered[k] = halves[order[k]]
                rounding[1] = ordered.ctypes.data
            rounding[9], rounding[10] = head[5] + head[18] * row, head[6] + head[19] * row
            call_parts(head[13], rounding.ctypes.data, 0, 1, 1)
        before += tokens
    rounding[1] = ordered[0] = 0  # numba frees memory after its last use


def narrow_rows(data, start, end, parts):  # type: ignore[no-untyped-def]
    """Some parts of the rows of `routed`, whose sums are rounded."""
    head = to_array(data, ROUTED_WORDS)
    chosen, width, before = to_array(integers_at(head[2] + 8), 4 * to_array(integers_at(head[2]), 1)[0]), head[22], 0
    rows = _all_rows(chosen)
    for i in range(0, len(chosen), 4):
        place = chosen[i + 1], chosen[i + 2], before, rows * start // parts, rows * end // parts
        top, bottom = _own_rows(*place)
        if bottom > top:
            _narrow(head[7] + 4 * width * top, head[4] + 2 * width * top, (bottom - top) * width)
        before += chosen[i + 2]


@helper()
def _share(head, function, data, rows):  # type: ignore[no-untyped-def]
    """Call a function for all of so many rows, in some threads if they are many; see `parts.run_parts`."""
    if head[11] > 1 and rows >= _SHARED_ROWS:
        call_parts(shared(head[10] + 8 * RUN), head[10], function, data, head[11])
    else:
        call_parts(function, data, 0, PARTS, PARTS)


def routed(data):  # type: ignore[no-untyped-def]
    """Multiply chosen matrices, all of one form, each with rows of its own; the results are bfloat16, or their sums."""
    head = to_array(data, ROUTED_WORDS)
    inputs, others, sums, work_at = head[5], head[6], head[7], head[8]
    input_bytes, other_bytes, prepared, width, first = head[18], head[19], head[20], head[22], head[23]
    count = to_array(integers_at(head[2]), 1)[0]
    if count == 0:
        return
    chosen = to_array(integers_at(head[2] + 8), 4 * count)
    rows = _all_rows(chosen)
    _share(head, head[24], head[0], min(rows, prepared))
    work = to_array(integers_at(work_at), BEFORE_WORK + count * _WORK)
    work[0], work[1] = head[12], count
    for i in range(count):
        begin, tokens = chosen[4 * i + 1], chosen[4 * i + 2]
        words = to_array(integers_at(chosen[4 * i] + 8 * first), _WORK)
        piece = BEFORE_WORK + i * _WORK
        for j in range(_WORK):
            work[piece + j] = words[j]
        source = begin if prepared > 1 else 0
        work[piece + _EVEN], work[piece + _ODD] = inputs + input_bytes * source, others + other_bytes * source
        work[piece + _OUT], work[piece + _TOKENS] = sums + 4 * width * begin, tokens
    _share(head, head[9], work_at, _SHARED_ROWS)
    if head[4] != 0:
        _share(head, head[25], head[0], rows)
