"""Codes of published quantisations to the numbers they stand for, on the CPU, compiled by numba.

torch's own operations, one after the other over whole matrices, take up to fifty times as long. The bits are theirs: a
product of a code's value and its scale in float32, rounded once to the nearest, or a value that is looked up. Knows no
formats' names and no files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rabbitllm.layers.compiling import compiled

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]
Bits: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
_WORTH_A_THREAD = 1 << 16
"""Elements; fewer are done before another thread has begun."""
_TILE = 32
"""Rows that are turned into columns at a time: both sides stay in the cache."""


def blocks(codes: Bytes, values: Floats, scales: Floats, out: Bits, threads: int) -> None:
    """Numbers of a byte each, with a scale for each block of rows and columns.

    Args:
        codes: (N, K).
        values: what each byte stands for, (256,).
        scales: (n, k), of blocks of N / n rows and K / k columns.
        out: (N, K); the bits of bfloat16 as uint16, or of float32 as uint32.
        threads: to do it in.
    """
    kernel = _blocks_16 if out.dtype == np.uint16 else _blocks_32
    _share(lambda begin, end: kernel(codes, values, scales, out, begin, end), len(codes), codes.size, threads)


def nibbles(codes: Bytes, scales: Bytes, table: Bits, out: Bits, threads: int) -> None:
    """Two codes a byte, the lower half first, with a scale's byte for each 32, transposed.

    Args:
        codes: (N, G, 16).
        scales: (N, G).
        table: what each scale and code stand for together, (256, 16).
        out: (32 G, N), bits as in `table`.
        threads: to do it in.
    """
    tiles = -(-len(codes) // _TILE)
    _share(lambda begin, end: _nibbles(codes, scales, table, out, begin, end), tiles, 2 * codes.size, threads)


def integers(
    packed: npt.NDArray[np.int32],
    bits: int,
    zeros: npt.NDArray[np.int32],
    scales: Floats,
    group: npt.NDArray[np.int64],
    order: npt.NDArray[np.int64] | None,
    out: Floats,
    threads: int,
) -> None:
    """Integers in int32, less a zero, times a scale, of groups of inputs; transposed.

    Args:
        packed: (K, N bits / 32) where an int32 has several outputs, or (K bits / 32, N) where it has several inputs.
        bits: of an integer.
        zeros, scales: (groups, N).
        group: of each input, (K,).
        order: which output each integer of an int32 belongs to, from the lowest bits on; None where they are inputs.
        out: (N, K).
        threads: to do it in.
    """
    if order is None:
        tiles = -(-out.shape[0] // _TILE)
        _share(lambda a, b: _inputs(packed, bits, zeros, scales, group, out, a, b), tiles, out.size, threads)
    else:
        tiles = -(-packed.shape[1] // 4)
        _share(lambda a, b: _outputs(packed, bits, zeros, scales, group, order, out, a, b), tiles, out.size, threads)


def _share(work: Callable[[int, int], Any], count: int, elements: int, threads: int) -> None:
    """Do `work(begin, end)` for all of `range(count)`, in several threads where that is worth it."""
    threads = min(threads, count, -(-elements // _WORTH_A_THREAD))
    if threads <= 1:
        work(0, count)
        return
    ends = [count * number // threads for number in range(threads + 1)]
    list(_pool().map(work, ends[:-1], ends[1:]))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="dequantise")


@compiled
def _blocks_16(codes, values, scales, out, begin, end):  # type: ignore[no-untyped-def]
    rows, columns = codes.shape[0] // scales.shape[0], codes.shape[1] // scales.shape[1]
    number = np.empty(columns, np.float32)
    word = number.view(np.uint32)
    for row in range(begin, end):
        for block in range(scales.shape[1]):
            scale, first = scales[row // rows, block], block * columns
            for i in range(columns):
                number[i] = values[codes[row, first + i]] * scale
            for i in range(columns):  # to the nearest; of two that are as near, to the even one
                bits = word[i]
                rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
                unordered = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                out[row, first + i] = np.uint16(0x7FC0) if unordered else np.uint16(rounded)


@compiled
def _blocks_32(codes, values, scales, out, begin, end):  # type: ignore[no-untyped-def]
    rows, columns = codes.shape[0] // scales.shape[0], codes.shape[1] // scales.shape[1]
    numbers = out.view(np.float32)
    for row in range(begin, end):
        for block in range(scales.shape[1]):
            scale, first = scales[row // rows, block], block * columns
            for i in range(columns):
                numbers[row, first + i] = values[codes[row, first + i]] * scale


@compiled
def _nibbles(codes, scales, table, out, begin, end):  # type: ignore[no-untyped-def]
    tile = np.empty((32, _TILE), table.dtype)
    for first in range(begin * _TILE, min(end * _TILE, codes.shape[0]), _TILE):
        count = min(_TILE, codes.shape[0] - first)
        for group in range(codes.shape[1]):
            for row in range(count):
                scale = scales[first + row, group]
                for i in range(16):
                    code = codes[first + row, group, i]
                    tile[2 * i, row] = table[scale, code & np.uint8(15)]
                    tile[2 * i + 1, row] = table[scale, code >> np.uint8(4)]
            for i in range(32):
                for row in range(count):
                    out[32 * group + i, first + row] = tile[i, row]


@compiled
def _outputs(packed, bits, zeros, scales, group, order, out, begin, end):  # type: ignore[no-untyped-def]
    several, mask = 32 // bits, (1 << bits) - 1
    tile = np.empty((4 * several, _TILE), np.float32)
    for first in range(begin * 4, min(end * 4, packed.shape[1]), 4):
        words = min(4, packed.shape[1] - first)
        for begin_input in range(0, packed.shape[0], _TILE):
            count = min(_TILE, packed.shape[0] - begin_input)
            for k in range(count):
                of = group[begin_input + k]
                for w in range(words):
                    word = packed[begin_input + k, first + w]
                    for i in range(several):
                        output = w * several + order[i]
                        n = first * several + output
                        code = (word >> (bits * i)) & mask
                        tile[output, k] = np.float32(code - zeros[of, n]) * scales[of, n]
            for output in range(words * several):
                for k in range(count):
                    out[first * several + output, begin_input + k] = tile[output, k]


@compiled
def _inputs(packed, bits, zeros, scales, group, out, begin, end):  # type: ignore[no-untyped-def]
    several, mask = 32 // bits, (1 << bits) - 1
    for first in range(begin * _TILE, min(end * _TILE, packed.shape[1]), _TILE):
        last = min(first + _TILE, packed.shape[1])
        for line in range(packed.shape[0]):
            for n in range(first, last):
                word = packed[line, n]
                for i in range(several):
                    k = line * several + i
                    of = group[k]
                    out[n, k] = np.float32(((word >> (bits * i)) & mask) - zeros[of, n]) * scales[of, n]
