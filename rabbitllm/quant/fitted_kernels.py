"""4bit quantization with fitted scales, compiled by numba; the rule is in `compression/fitting.py`.

Every function releases the interpreter lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rabbitllm.quant.compiling import compiled
from rabbitllm.quant.cpu_kernels import F32, KINDS, NF4_BLOCK, Codes, Scales, Values, _widen


def quantize_fitted(
    values: Values, kind: int, midpoints: Scales, nearest: Scales, multiples: Scales, usual: Scales, zero_code: int
) -> tuple[Codes, Scales]:
    """Quantize to 4bit with fitted scales.

    Args:
        values: the bits of bfloat16 or float16 as uint16, or float32; one-dimensional.
        kind: one of `cpu_kernels.KINDS`.
        midpoints: between the 16 NF4 values, ascending.
        nearest: the NF4 value nearest to each of an odd number of evenly spaced numbers from -1 to 1.
        multiples: the multiples of a block's largest magnitude to try.
        usual: limits of the largest magnitude; outside them no multiples are tried.
        zero_code: the code of the NF4 value 0.

    Returns:
        Two codes per byte, ((n + 1) // 2,), and one scale per block of 64.
    """
    codes = np.empty((values.size + 1) // 2, np.uint8)
    scales = np.empty(-(-values.size // NF4_BLOCK), np.float32)
    words: Any = values.view(np.uint32) if kind == KINDS["F32"] else values
    _quantize(words, kind, midpoints, nearest, multiples, usual, zero_code, codes, scales)
    return codes, scales


@compiled
def _load(words, kind, first, count, values):  # type: ignore[no-untyped-def]
    """Load a block as float32, padded with zeros."""
    values[:] = np.float32(0)
    if kind == F32:
        bits = values.view(np.uint32)
        for i in range(count):
            bits[i] = np.uint32(words[first + i])
    else:
        _widen(words, kind, first, count, values)


@compiled
def _error(values, scale, nearest, ys, places, squares):  # type: ignore[no-untyped-def]
    inverse = np.float32(1) / scale
    steps = np.float32(nearest.size // 2)
    for i in range(NF4_BLOCK):
        ys[i] = values[i] * inverse
    for i in range(NF4_BLOCK):
        inside = min(max(ys[i], np.float32(-1)), np.float32(1))
        places[i] = np.uint16(np.int32((inside + np.float32(1)) * steps + np.float32(0.5)))
    for i in range(NF4_BLOCK):
        squares[i] = nearest[places[i]]
    for i in range(NF4_BLOCK):
        off = ys[i] - squares[i]
        squares[i] = off * off
    for i in range(32):
        squares[i] = squares[i] + squares[i + 32]
    for i in range(16):
        squares[i] = squares[i] + squares[i + 16]
    for i in range(8):
        squares[i] = squares[i] + squares[i + 8]
    for i in range(4):
        squares[i] = squares[i] + squares[i + 4]
    return scale * scale * ((squares[0] + squares[2]) + (squares[1] + squares[3]))


@compiled
def _quantize(words, kind, midpoints, nearest, multiples, usual, zero_code, codes, scales):  # type: ignore[no-untyped-def]
    values = np.empty(NF4_BLOCK, np.float32)
    bits = values.view(np.uint32)
    ys = np.empty(NF4_BLOCK, np.float32)
    places = np.empty(NF4_BLOCK, np.uint16)
    squares = np.empty(NF4_BLOCK, np.float32)
    ranks = np.empty(NF4_BLOCK, np.uint8)
    for block in range(scales.size):
        first = block * NF4_BLOCK
        count = min(NF4_BLOCK, words.size - first)
        _load(words, kind, first, count, values)
        largest_bits = np.uint32(0)
        for i in range(NF4_BLOCK):  # magnitudes have the order of their bits
            largest_bits = max(largest_bits, bits[i] & np.uint32(0x7FFFFFFF))
        largest = np.uint32(largest_bits).view(np.float32)
        best = largest
        least = np.float32(np.inf)
        if usual[0] < largest and largest < usual[1]:
            for m in range(multiples.size):
                scale = multiples[m] * largest
                error = _error(values, scale, nearest, ys, places, squares)
                if error < least:
                    least = error
                    best = scale
        scales[block] = best
        ranks[:] = zero_code
        if best != 0:
            inverse = np.float32(1) / best
            ranks[:count] = 0
            for j in range(15):
                edge = midpoints[j]
                for i in range(count):
                    ranks[i] += np.uint8(values[i] * inverse > edge)
        for i in range((count + 1) // 2):
            codes[first // 2 + i] = (ranks[2 * i] << np.uint8(4)) | ranks[2 * i + 1]
