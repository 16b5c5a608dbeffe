"""Blockwise quantizers for the CPU, compiled by numba: faster than bitsandbytes' CPU kernels, equal bit for bit.

The rules, derived from the results of bitsandbytes 0.50 (the reference in the tests):

- 4bit, blocks of 64: y = x * (1 / max(absmax, 1e-38)) in float32; the code is the number of midpoints between
  neighbouring NF4 values that are below y (NaN: 15). Two codes per byte, the first in the high half. The stored scale
  is absmax itself. A short last block is divided instead of multiplied and stores max(absmax, 1e-38); an odd tail is
  padded with code 7.
- 8bit, blocks of 2048: y = x * (1 / absmax), clamped to [-1, 1], is looked up in 65,536 bins; a block of zeros gives
  code 0.
- 4bit with fitted scales: see `quantize.py`.

A block of bfloat16 or float16 has one of 32,768 possible scales. So the 15 thresholds of 4bit are tabulated once for
each scale, as keys of that type, and a block takes 16-bit integer comparisons only. Every function releases the
interpreter lock.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rabbitllm.quant._compiling import compiled
from rabbitllm.quant.schemes import INT8_BLOCK, NF4_BLOCK

Codes: TypeAlias = npt.NDArray[np.uint8]
Scales: TypeAlias = npt.NDArray[np.float32]
Values: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.float32]

BF16, F16, F32 = 0, 1, 2
KINDS = {"BF16": BF16, "F16": F16, "F32": F32}
SMALLEST_SCALE = np.float32(1e-38)
SMALLEST_FITTED, LARGEST_FITTED = np.float32(1e-18), np.float32(1e18)
"""Limits of a block's largest magnitude, between which squares neither overflow nor underflow."""
ZERO_CODE = 7
"""The code of NF4's value 0."""
_INFINITY = {BF16: 0x7F80, F16: 0x7C00}
"""Bits of infinity; larger magnitudes are NaN."""
_KEYS = 1 << 15
"""Magnitudes of a 16-bit float."""


def quantize_nf4(values: Values, kind: int, levels: Scales) -> tuple[Codes, Scales]:
    """Quantize to 4bit.

    Args:
        values: the bits of bfloat16 or float16 as uint16, or float32; one-dimensional.
        kind: `BF16`, `F16` or `F32`.
        levels: the 16 NF4 values, ascending.

    Returns:
        Two codes per byte, ((n + 1) // 2,), and one scale per block of 64.
    """
    codes = np.empty((values.size + 1) // 2, np.uint8)
    scales = np.empty(-(-values.size // NF4_BLOCK), np.float32)
    midpoints = nf4_midpoints(levels.tobytes())
    if kind == F32:
        _nf4_floats(values, midpoints, codes, scales)
    else:
        thresholds = nf4_thresholds(kind, levels.tobytes())
        _nf4_halves(values, kind, _INFINITY[kind], midpoints, thresholds, codes, scales)
    return codes, scales


def quantize_int8(values: Values, kind: int, levels: Scales) -> tuple[Codes, Scales]:
    """Quantize to 8bit.

    Args:
        values: the bits of bfloat16 or float16 as uint16, or float32; one-dimensional.
        kind: `BF16`, `F16` or `F32`.
        levels: the 256 values of the codes, ascending.

    Returns:
        One code per element, (n,), and one scale per block of 2048.
    """
    codes = np.empty(values.size, np.uint8)
    scales = np.empty(-(-values.size // INT8_BLOCK), np.float32)
    bins = int8_bins(levels.tobytes())
    if kind == F32:
        _int8_floats(values, bins, codes, scales)
    else:
        _int8_halves(values, kind, _INFINITY[kind], bins, codes, scales)
    return codes, scales


@functools.cache
def nf4_midpoints(levels: bytes) -> Scales:
    """The 15 midpoints between neighbouring levels, float32."""
    values = np.frombuffer(levels, np.float32)
    return ((values[1:] + values[:-1]) / np.float32(2)).astype(np.float32)


@functools.cache
def nf4_thresholds(kind: int, levels: bytes) -> npt.NDArray[np.int16]:
    """For each possible scale, the largest key whose value does not exceed each midpoint: (32768, 16), int16.

    A key is a 16-bit float's bits as an integer in the order of the floats. x -> x * (1 / scale) is monotonic, so
    "y is above the midpoint" is equivalent to "the key is above the threshold"; found by bisection with the rule above.
    """
    midpoints = nf4_midpoints(levels)
    magnitudes = np.arange(_KEYS, dtype=np.uint16)
    with np.errstate(divide="ignore", invalid="ignore"):  # blocks with infinities or NaNs do not use the table
        inverse = np.float32(1) / np.maximum(_widened(magnitudes, kind), SMALLEST_SCALE)
    finite = _INFINITY[kind]
    low = np.full((_KEYS, 15), -finite, np.int32)  # one below the lowest finite key
    high = np.full((_KEYS, 15), finite - 1, np.int32)
    while np.any(low < high):
        middle = (low + high + 1) // 2
        bits = np.where(middle < 0, -middle | 0x8000, middle).astype(np.uint16)
        with np.errstate(over="ignore", invalid="ignore"):
            above = _widened(bits, kind) * inverse[:, None] > midpoints
        low, high = np.where(above, low, middle), np.where(above, middle - 1, high)
    table = np.zeros((_KEYS, 16), np.int16)
    table[:, :15] = low
    return table


@functools.cache
def int8_bins(levels: bytes) -> Codes:
    """The code of each of the 65,536 bins that [-1, 1] is divided into."""
    values = np.frombuffer(levels, np.float32)
    midpoints = np.float32(0.5) * (values[:-1] + values[1:])
    centres = np.float32(-1) + (np.float32(2) * np.arange(65536, dtype=np.float32)) / np.float32(65535)
    return np.searchsorted(midpoints, centres, side="left").astype(np.uint8)


def _widened(bits: npt.NDArray[np.uint16], kind: int) -> Scales:
    if kind == BF16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


@compiled
def widen(bits, kind, first, count, values):  # type: ignore[no-untyped-def]
    """The 16-bit floats `bits[first : first + count]` as float32, into `values`."""
    words = values.view(np.uint32)
    if kind == BF16:
        for i in range(count):
            words[i] = np.uint32(bits[first + i]) << np.uint32(16)
        return
    for i in range(count):
        words[i] = (np.uint32(bits[first + i]) & np.uint32(0x7FFF)) << np.uint32(13)
    for i in range(count):  # 2**112, the distance of the two exponents' biases; exact for subnormal ones too
        values[i] *= np.float32(5.192296858534828e33)
    for i in range(count):
        half = np.uint32(bits[first + i])
        if (half & np.uint32(0x7C00)) == np.uint32(0x7C00):
            words[i] |= np.uint32(0x7F800000)
        words[i] |= (half & np.uint32(0x8000)) << np.uint32(16)


@compiled
def _nf4_block(values, midpoints, ranks, codes, begin):  # type: ignore[no-untyped-def]
    """One whole block of float32, changed in place; returns its scale."""
    scale = np.float32(0)
    unordered = False
    for i in range(NF4_BLOCK):
        scale = max(scale, abs(values[i]))
        unordered |= values[i] != values[i]
    if unordered:
        for i in range(NF4_BLOCK - 1, -1, -1):
            if values[i] != values[i]:
                scale = abs(values[i])
    inverse = np.float32(1) / (SMALLEST_SCALE if scale < SMALLEST_SCALE else scale)
    for i in range(NF4_BLOCK):
        values[i] *= inverse
        ranks[i] = 15
    for j in range(15):
        edge = midpoints[j]
        for i in range(NF4_BLOCK):
            ranks[i] -= np.uint8(values[i] <= edge)  # false for NaN, which keeps 15
    for i in range(NF4_BLOCK // 2):
        codes[begin + i] = (ranks[2 * i] << np.uint8(4)) | ranks[2 * i + 1]
    return scale


@compiled
def _nf4_tail(values, count, midpoints, ranks, codes, begin):  # type: ignore[no-untyped-def]
    """The last, short block of float32; returns its scale."""
    scale = np.float32(0)
    for i in range(count):
        if abs(values[i]) > scale or values[i] != values[i]:
            scale = abs(values[i])
        if scale != scale:
            break
    divisor = SMALLEST_SCALE if scale < SMALLEST_SCALE else scale
    ranks[:] = ZERO_CODE
    for i in range(count):
        ranks[i] = 15
        for j in range(15):
            ranks[i] -= np.uint8(values[i] / divisor <= midpoints[j])
    for i in range((count + 1) // 2):
        codes[begin + i] = (ranks[2 * i] << np.uint8(4)) | ranks[2 * i + 1]
    return divisor


@compiled
def _nf4_floats(floats, midpoints, codes, scales):  # type: ignore[no-untyped-def]
    values = np.empty(NF4_BLOCK, np.float32)
    ranks = np.empty(NF4_BLOCK, np.uint8)
    whole = floats.size // NF4_BLOCK
    for block in range(whole):
        for i in range(NF4_BLOCK):
            values[i] = floats[block * NF4_BLOCK + i]
        scales[block] = _nf4_block(values, midpoints, ranks, codes, block * (NF4_BLOCK // 2))
    count = floats.size - whole * NF4_BLOCK
    if count:
        for i in range(count):
            values[i] = floats[whole * NF4_BLOCK + i]
        scales[whole] = _nf4_tail(values, count, midpoints, ranks, codes, whole * (NF4_BLOCK // 2))


@compiled
def _nf4_halves(bits, kind, infinity, midpoints, thresholds, codes, scales):  # type: ignore[no-untyped-def]
    values = np.empty(NF4_BLOCK, np.float32)
    ranks = np.empty(NF4_BLOCK, np.uint8)
    above = np.empty(NF4_BLOCK, np.int16)
    pairs = above.view(np.uint32)  # the even one in the low half: every machine that numba supports is little-endian
    edges = np.empty(15, np.int16)
    largest_bits = np.empty(1, np.uint16)
    scale = np.empty(1, np.float32)
    whole = bits.size // NF4_BLOCK
    for block in range(whole):
        first = block * NF4_BLOCK
        largest = np.uint16(0)
        for i in range(NF4_BLOCK):
            largest = max(largest, bits[first + i] & np.uint16(0x7FFF))
        if largest >= infinity:
            widen(bits, kind, first, NF4_BLOCK, values)
            scales[block] = _nf4_block(values, midpoints, ranks, codes, block * (NF4_BLOCK // 2))
            continue
        for j in range(15):
            edges[j] = thresholds[largest, j]
        for i in range(NF4_BLOCK):
            magnitude = np.int16(bits[first + i] & np.uint16(0x7FFF))
            key = np.int16(-magnitude) if bits[first + i] >> np.uint16(15) else magnitude
            rank = np.int16(0)
            for j in range(15):  # unrolled, so that a value stays in its register for all of them
                rank = np.int16(rank + np.int16(key > edges[j]))
            above[i] = rank
        for i in range(NF4_BLOCK // 2):
            codes[block * (NF4_BLOCK // 2) + i] = np.uint8((pairs[i] << np.uint32(4)) | (pairs[i] >> np.uint32(16)))
        largest_bits[0] = largest
        widen(largest_bits, kind, 0, 1, scale)
        scales[block] = scale[0]
    count = bits.size - whole * NF4_BLOCK
    if count:
        widen(bits, kind, whole * NF4_BLOCK, count, values)
        scales[whole] = _nf4_tail(values, count, midpoints, ranks, codes, whole * (NF4_BLOCK // 2))


@compiled
def _int8_place(value, inverse):  # type: ignore[no-untyped-def]
    """The bin of a number times the inverse of its block's scale."""
    y = min(max(value * inverse, np.float32(-1)), np.float32(1))
    return np.uint16(np.int32((y + np.float32(1)) * np.float32(0.5) * np.float32(65535) + np.float32(0.5)))


# Blocks are slices: numba checks an index with a variable start for being negative, and does not vectorize its loop.


@compiled
def _int8_block(values, words, bins, codes, places):  # type: ignore[no-untyped-def]
    """One block of float32, whole or short, and the same as bits; returns its scale."""
    largest = np.uint32(0)
    for i in range(values.size):  # magnitudes have the order of their bits, and integer comparisons are vectorized
        largest = max(largest, words[i] & np.uint32(0x7FFFFFFF))
    scale = np.uint32(largest).view(np.float32)
    if largest >= np.uint32(0x7F800000):  # with infinities or NaNs the scale is the result of these comparisons
        scale = np.float32(0)
        for i in range(values.size):
            scale = max(scale, abs(values[i]))
    if scale == 0:
        codes[:] = 0
        return scale
    inverse = np.float32(1) / scale
    for i in range(values.size):
        places[i] = _int8_place(values[i], inverse)
    for i in range(values.size):
        codes[i] = bins[places[i]]
    return scale


@compiled
def _int8_floats(floats, bins, codes, scales):  # type: ignore[no-untyped-def]
    words = floats.view(np.uint32)
    places = np.empty(INT8_BLOCK, np.uint16)
    for block in range(scales.size):
        first, last = block * INT8_BLOCK, min((block + 1) * INT8_BLOCK, floats.size)
        scales[block] = _int8_block(floats[first:last], words[first:last], bins, codes[first:last], places)


@compiled
def _int8_places(bits, kind, scale, places):  # type: ignore[no-untyped-def]
    """The bins of a block of 16-bit floats, all finite and not all zero, widened in registers."""
    inverse = np.float32(1) / scale
    if kind == BF16:
        for i in range(bits.size):
            places[i] = _int8_place(np.uint32(np.uint32(bits[i]) << np.uint32(16)).view(np.float32), inverse)
        return
    for i in range(bits.size):  # like `widen`
        half = np.uint32(bits[i])
        shifted = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32)
        magnitude = np.float32(shifted * np.float32(5.192296858534828e33)).view(np.uint32)
        signed = np.uint32(magnitude | ((half & np.uint32(0x8000)) << np.uint32(16)))
        places[i] = _int8_place(signed.view(np.float32), inverse)


@compiled
def _int8_halves(bits, kind, infinity, bins, codes, scales):  # type: ignore[no-untyped-def]
    values = np.empty(INT8_BLOCK, np.float32)
    words = values.view(np.uint32)
    places = np.empty(INT8_BLOCK, np.uint16)
    largest_bits = np.empty(1, np.uint16)
    scale = np.empty(1, np.float32)
    for block in range(scales.size):
        first, last = block * INT8_BLOCK, min((block + 1) * INT8_BLOCK, bits.size)
        block_bits, block_codes = bits[first:last], codes[first:last]
        largest = np.uint16(0)
        for i in range(block_bits.size):
            largest = max(largest, block_bits[i] & np.uint16(0x7FFF))
        if largest == 0 or largest >= infinity:
            widen(block_bits, kind, 0, block_bits.size, values)
            scales[block] = _int8_block(values[: block_bits.size], words[: block_bits.size], bins, block_codes, places)
            continue
        largest_bits[0] = largest
        widen(largest_bits, kind, 0, 1, scale)
        scales[block] = scale[0]
        _int8_places(block_bits, kind, scale[0], places)
        for i in range(block_bits.size):
            block_codes[i] = bins[places[i]]


def quantize_fitted(
    values: Values, kind: int, midpoints: Scales, nearest: Scales, multiples: Scales
) -> tuple[Codes, Scales]:
    """Quantize to 4bit with fitted scales.

    Args:
        values: the bits of bfloat16 or float16 as uint16, or float32; one-dimensional.
        kind: one of `KINDS`.
        midpoints: between the 16 NF4 values, ascending.
        nearest: the NF4 value nearest to each of an odd number of evenly spaced numbers from -1 to 1.
        multiples: the multiples of a block's largest magnitude to try.

    Returns:
        Two codes per byte, ((n + 1) // 2,), and one scale per block of 64.
    """
    codes = np.empty((values.size + 1) // 2, np.uint8)
    scales = np.empty(-(-values.size // NF4_BLOCK), np.float32)
    words: Any = values.view(np.uint32) if kind == F32 else values
    _fit_blocks(words, kind, midpoints, nearest, multiples, codes, scales)
    return codes, scales


@compiled
def _load_block(words, kind, first, count, values):  # type: ignore[no-untyped-def]
    """Load a block as float32, padded with zeros."""
    values[:] = np.float32(0)
    if kind == F32:
        bits = values.view(np.uint32)
        for i in range(count):
            bits[i] = np.uint32(words[first + i])
    else:
        widen(words, kind, first, count, values)


@compiled
def _fit_error(values, scale, nearest, ys, places, squares):  # type: ignore[no-untyped-def]
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
def _fit_blocks(words, kind, midpoints, nearest, multiples, codes, scales):  # type: ignore[no-untyped-def]
    values = np.empty(NF4_BLOCK, np.float32)
    bits = values.view(np.uint32)
    ys = np.empty(NF4_BLOCK, np.float32)
    places = np.empty(NF4_BLOCK, np.uint16)
    squares = np.empty(NF4_BLOCK, np.float32)
    ranks = np.empty(NF4_BLOCK, np.uint8)
    for block in range(scales.size):
        first = block * NF4_BLOCK
        count = min(NF4_BLOCK, words.size - first)
        _load_block(words, kind, first, count, values)
        largest_bits = np.uint32(0)
        for i in range(NF4_BLOCK):  # magnitudes have the order of their bits
            largest_bits = max(largest_bits, bits[i] & np.uint32(0x7FFFFFFF))
        largest = np.uint32(largest_bits).view(np.float32)
        best = largest
        least = np.float32(np.inf)
        if SMALLEST_FITTED < largest < LARGEST_FITTED:
            for m in range(multiples.size):
                scale = multiples[m] * largest
                error = _fit_error(values, scale, nearest, ys, places, squares)
                if error < least:
                    least = error
                    best = scale
        scales[block] = best
        ranks[:] = ZERO_CODE
        if best != 0:
            inverse = np.float32(1) / best
            ranks[:count] = 0
            for j in range(15):
                edge = midpoints[j]
                for i in range(count):
                    ranks[i] += np.uint8(values[i] * inverse > edge)
        for i in range((count + 1) // 2):
            codes[first // 2 + i] = (ranks[2 * i] << np.uint8(4)) | ranks[2 * i + 1]
