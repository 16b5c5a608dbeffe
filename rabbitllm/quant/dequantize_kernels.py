"""Kernels that dequantize on the CPU: our schemes, and published quantizations.

torch takes up to fifty times as long. The results are the same bit for bit: a product of a code's value and its scale
in float32, rounded once to the nearest, or a value from a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rabbitllm.base.compiling import compiled
from rabbitllm.quant import _kernels
from rabbitllm.quant._product_kernels import add_columns
from rabbitllm.quant._vectors import inlined

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]
Bits: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
_WORTH_A_THREAD = 1 << 16
"""Elements per thread; fewer are finished before another thread has started."""
_TILE = 32
"""Rows that are transposed at a time: source and target fit the cache."""
_LINE = 64
"""Columns of sums by which threads share them."""
_WORDS = 16
"""Adjacent int32 that are unpacked at a time: a line of the cache."""


def blocks(
    codes: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    size: tuple[int, int],
    dtype: torch.dtype,
    first: int | None = None,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize codes of one byte, or of half a byte, with a scale for each block of rows and columns.

    Args:
        codes: uint8 (N, K), or (N, K / 2); it and the others are on the CPU.
        values: the value of each code, float32 (256,) or (16,).
        scales: one for each block, float32 (n, k).
        size: rows and columns of a block; blocks at the ends may be smaller.
        dtype: of the result (N, K), a new tensor.
        first: the lowest bit of the first of two codes in a byte, 0 or 4; None if a byte is one code.
        zeros: what is subtracted from the values of each block, like `scales`; None for nothing.
    """
    arrays = (np.require(operand.numpy(), None, ["A", "C"]) for operand in (codes, values, scales))
    columns, is_half = codes.shape[1] * (1 if first is None else 2), dtype == torch.bfloat16
    out = torch.empty(len(codes), columns, dtype=torch.bfloat16 if is_half else torch.float32, device="cpu")
    # numba compiles a kernel for bits of bfloat16 as they are, and one for float32 as floats
    halves, floats = (out.view(torch.uint16).numpy(), None) if is_half else (None, out.numpy())
    less = np.zeros(scales.shape, np.float32) if zeros is None else np.require(zeros.numpy(), None, ["A", "C"])
    operands = *arrays, less, *size, None if first is None else np.uint8(first), halves, floats
    share(lambda begin, end: _blocks(*operands, begin, end), len(codes), out.numel())
    return out.to(dtype)


def nibbles(codes: Bytes, scales: Bytes, table: Bits, out: Bits) -> None:
    """Dequantize two codes per byte, the lower half first, with a scale of one byte for each 32 codes; transposed.

    Args:
        codes: (N, G, 16).
        scales: (N, G).
        table: the value of each pair of scale and code, (256, 16).
        out: (32 G, N), bits as in `table`.
    """
    tiles = -(-len(codes) // _TILE)
    share(lambda begin, end: _nibbles(codes, scales, table, out, begin, end), tiles, 2 * codes.size)


def integers(
    packed: npt.NDArray[np.int32],
    bits: int,
    zeros: npt.NDArray[np.int32],
    scales: Floats,
    group: npt.NDArray[np.int64],
    order: npt.NDArray[np.int64] | None,
    out: Floats,
) -> None:
    """Dequantize integers in int32: (integer - zero) * scale, both for groups of inputs; transposed.

    Args:
        packed: (K, N bits / 32) if an int32 has several outputs, or (K bits / 32, N) if it has several inputs.
        bits: of an integer.
        zeros, scales: (groups, N).
        group: of each input, (K,).
        order: the output of each integer of an int32, from the lowest bits on; None if an int32 has several inputs.
        out: (N, K).
    """
    places = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    if order is None:
        several, shifts = None, np.repeat(places[:, None], 8 * _WORDS, 1)
    else:
        several, shifts = len(places), np.tile(places[np.argsort(order)], (1, _WORDS))
    words, mask = packed.view(np.uint32), np.uint32((1 << bits) - 1)
    tiles = -(-len(out) // shifts.shape[1])
    lines_and_places = np.divmod(np.arange(out.shape[1]), len(shifts))
    operands = words, *lines_and_places, mask, shifts, several, zeros, scales, group, out
    share(lambda begin, end: _integers(*operands, begin, end), tiles, out.size)


def by_rows(
    packed: npt.NDArray[np.int32],
    zeros: npt.NDArray[np.int32],
    scales: npt.NDArray[np.int16],
    bits: int,
    order: tuple[int, ...] | None,
    offset: int,
    codes: npt.NDArray[np.int32],
    words: npt.NDArray[np.int16],
    inputs: npt.NDArray[np.int64] | None = None,
    threads: int | None = None,
) -> None:
    """Rearrange integers of 4 or 8 bits, n in an int32, as in `integers`, to rows for `coded.WITH_ZEROS`.

    Args:
        packed: (K, N / 8) if an int32 has several outputs, of 4 bits, or (K / n, N) if it has several inputs.
        zeros: of groups of inputs, (groups, N / n), with outputs in the same order.
        scales: the bits of float16 or bfloat16, (groups, N).
        bits: of an integer.
        order: the output of each integer of an int32, from the lowest bits on; None if an int32 has several inputs.
        offset: the number that was subtracted from each stored zero.
        codes: (N, K / n), n inputs in each, the first in the lowest bits.
        words: (N, groups, 2): the bits of a scale, and twice the zero less 8 or 128; a view of both in their order.
        inputs: the input of each column, (K,), where an int32 has several inputs; None if they are in their order.
        threads: see `share`.
    """
    outputs = np.array(range(32 // bits) if order is None else order)
    stored, form = (packed.view(np.uint32), zeros.view(np.uint32)), (outputs, bits, order is None, offset)
    operands = *stored, scales, *form, inputs, codes.view(np.uint32), words
    share(lambda begin, end: _by_rows(*operands, begin, end), -(-zeros.shape[1] // _WORDS), 8 * codes.size, threads)


def with_zeros(
    scales: npt.NDArray[np.int16], zeros: npt.NDArray[Any], bits: int, upper: int, words: npt.NDArray[np.int16]
) -> None:
    """Bring scales and zeros that lie by rows together for `coded.WITH_ZEROS`.

    Args:
        scales: their bits, (N, groups).
        zeros: int8 (N, groups), or several in an int32 (N bits / 32, groups), the first in the lowest bits, larger by
            half of their range.
        bits: of a zero in an int32.
        upper: which half of a word is its zero: 0, or 1 for the upper one.
        words: (N, groups, 2), both halves of each.
    """
    _with_zeros(scales, zeros, bits, zeros.dtype == np.int32, upper, words)


def add_rows(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Add `x @ rows` to `out`, in the order of the rows: float32 (T, k), bfloat16 (k, N), float32 (T, N)."""
    operands = x.contiguous().numpy(), rows.view(torch.uint16).numpy(), out.numpy()
    lines = -(-out.shape[1] // _LINE)
    share(lambda begin, end: add_columns(*operands, begin * _LINE, end * _LINE), lines, rows.numel())


def share(work: Callable[[int, int], Any], count: int, elements: int, threads: int | None = None) -> None:
    """Run `work(begin, end)` for all of `range(count)`, in several threads if there are enough elements.

    There are at most `threads`, by default as many as torch has.
    """
    parts = max(min(threads or torch.get_num_threads(), count, -(-elements // _WORTH_A_THREAD)), 1)
    _kernels.in_threads(lambda part: work(count * part // parts, count * (part + 1) // parts), parts)


# Rows are sliced before the innermost loops: numba does not check a plain loop index for being negative, and
# vectorises the loops. One of `halves` and `floats` is None, and numba leaves out what is not for the other; where that
# is decided as the loop runs, FP4 took 2 to 3 times as long.


@inlined
def _round(words, halves, count):  # type: ignore[no-untyped-def]
    """Float32 as bfloat16, both as bits, to the nearest, ties to even."""
    for i in range(count):
        bits = words[i]
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        unordered = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        halves[i] = np.uint16(0x7FC0) if unordered else np.uint16(rounded)


@compiled
def _blocks(codes, values, scales, zeros, rows, columns, first, halves, floats, begin, end):  # type: ignore[no-untyped-def]
    nbytes = columns if first is None else columns // 2
    line = np.empty(columns, np.float32)
    words = line.view(np.uint32)
    for row in range(begin, end):
        for block in range(scales.shape[1]):
            scale, code = scales[row // rows, block], codes[row, block * nbytes : (block + 1) * nbytes]
            zero = zeros[row // rows, block]
            weights = line if floats is None else floats[row, block * columns : (block + 1) * columns]
            if first is None:
                for i in range(len(code)):
                    weights[i] = (values[code[i]] - zero) * scale
            else:
                for i in range(len(code)):
                    weights[2 * i] = (values[(code[i] >> first) & np.uint8(15)] - zero) * scale
                    weights[2 * i + 1] = (values[(code[i] >> (np.uint8(4) - first)) & np.uint8(15)] - zero) * scale
            if halves is not None:
                some = halves[row, block * columns : (block + 1) * columns]
                _round(words, some, len(some))


@compiled
def _by_rows(packed, zeros, scales, outputs, bits, has_inputs, offset, inputs, codes, words, begin, end):  # type: ignore[no-untyped-def]
    """A line of the cache of `packed` at a time is written to whole lines of `codes`; some lines of `zeros`."""
    turned, first_zero, last_zero = np.empty((8, _WORDS), np.uint32), begin * _WORDS, min(end * _WORDS, zeros.shape[1])
    together = len(outputs)
    of_zero, mask, half = together if has_inputs else 1, np.uint32((1 << bits) - 1), 1 << (bits - 1)
    for first in range(first_zero * of_zero, last_zero * of_zero, _WORDS):
        count = min(_WORDS, packed.shape[1] - first)
        for k in range(codes.shape[1]):
            if has_inputs and inputs is None:
                line, targets = packed[k, first : first + count], codes[first : first + count, k]
                for i in range(count):
                    targets[i] = line[i]
                continue
            turned[:] = np.uint32(0)
            if inputs is not None:
                some, targets = turned[0, :count], codes[first : first + count, k]
                for i in range(together):
                    line = packed[inputs[together * k + i] // together, first : first + count]
                    place = np.uint32(bits * (inputs[together * k + i] % together))
                    for c in range(count):
                        some[c] |= ((line[c] >> place) & mask) << np.uint32(bits * i)
                for c in range(count):
                    targets[c] = some[c]
                continue
            for i in range(8):
                line = packed[8 * k + i, first : first + count]
                for j in range(8):
                    some = turned[j, :count]
                    for c in range(count):
                        some[c] |= ((line[c] >> np.uint32(4 * j)) & np.uint32(15)) << np.uint32(4 * i)
            for j in range(8):
                targets, some = codes[8 * first + outputs[j] : 8 * (first + count) : 8, k], turned[j, :count]
                for c in range(count):
                    targets[c] = some[c]
    for group in range(len(scales)):
        own_zeros = zeros[group, first_zero:last_zero]
        for j in range(together):
            place = together * first_zero + outputs[j]
            own, targets = scales[group, place::together], words[place::together, group]
            for c in range(len(own_zeros)):
                zero = np.int32((own_zeros[c] >> np.uint32(bits * j)) & mask) + offset - half
                targets[c, 0], targets[c, 1] = own[c], 2 * zero


@compiled
def _with_zeros(scales, zeros, bits, is_packed, upper, words):  # type: ignore[no-untyped-def]
    together, mask, half = 32 // bits, np.int32((1 << bits) - 1), np.int32(1 << (bits - 1))
    for row in range(scales.shape[0]):
        shift, some = np.int32(bits * (row % together)), zeros[row // together if is_packed else row]
        for group in range(scales.shape[1]):
            zero = np.int32(some[group])
            if is_packed:
                zero = ((zero >> shift) & mask) - half
            words[row, group, upper], words[row, group, 1 - upper] = 2 * zero, scales[row, group]


@compiled
def _nibbles(codes, scales, table, out, begin, end):  # type: ignore[no-untyped-def]
    tile = np.empty((32, _TILE), table.dtype)
    for first in range(begin * _TILE, min(end * _TILE, codes.shape[0]), _TILE):
        count = min(_TILE, codes.shape[0] - first)
        for group in range(codes.shape[1]):
            for row in range(count):
                values, code = table[scales[first + row, group]], codes[first + row, group]
                for i in range(16):
                    tile[2 * i, row] = values[code[i] & np.uint8(15)]
                    tile[2 * i + 1, row] = values[code[i] >> np.uint8(4)]
            for i in range(32):
                turned, target = tile[i], out[32 * group + i, first : first + count]
                for row in range(count):
                    target[row] = turned[row]


@compiled
def _integers(packed, lines, places, mask, shifts, several, zeros, scales, group, out, begin, end):  # type: ignore[no-untyped-def]
    """See `integers`.

    `lines` and `places` say where the integers of an input are: in which row of `packed`, at which shift of an int32.
    `shifts` is (inputs of an int32, outputs of a tile), and `several` the adjacent outputs of an int32, None for one.
    """
    width, outputs = shifts.shape[1], 1 if several is None else several
    columns = width // outputs
    spread, floats = np.empty(width, np.uint32), np.empty(width, np.float32)
    tile = np.empty((width, _TILE), np.float32)
    for first in range(begin * columns, min(end * columns, packed.shape[1]), columns):
        count = min(columns, packed.shape[1] - first)
        n, filled = first * outputs, count * outputs
        for begin_input in range(0, out.shape[1], _TILE):
            inputs = min(_TILE, out.shape[1] - begin_input)
            for k in range(inputs):
                of, line_number, place = group[begin_input + k], lines[begin_input + k], places[begin_input + k]
                line, shift = packed[line_number, first : first + count], shifts[place]
                zero, scale = zeros[of, n : n + filled], scales[of, n : n + filled]
                words = line if several is None else spread
                if several is not None:
                    for w in range(count):
                        for i in range(several):
                            spread[w * several + i] = line[w]
                for j in range(filled):
                    floats[j] = np.float32(np.int32((words[j] >> shift[j]) & mask) - zero[j]) * scale[j]
                for j in range(filled):
                    tile[j, k] = floats[j]
            for j in range(filled):
                turned, target = tile[j], out[n + j, begin_input : begin_input + inputs]
                for k in range(inputs):
                    target[k] = turned[k]
