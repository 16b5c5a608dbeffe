"""Blockwise quantizers for the CPU, equal to bitsandbytes' bit for bit, by rules derived from the results of 0.50.

- 4bit, blocks of 64: y = x * (1 / max(absmax, 1e-38)) in float32; the code is the number of midpoints between
  neighbouring NF4 values that are below y (NaN: 15). Two codes per byte, the first in the high half. The stored scale
  is absmax itself. A short last block is divided instead of multiplied and stores max(absmax, 1e-38); an odd tail is
  padded with code 7.
- 8bit, blocks of 2048: y = x * (1 / absmax), clamped to [-1, 1], is looked up in 65,536 bins; a block of zeros gives
  code 0.
- 4bit with fitted scales: of a few multiples of the largest magnitude of a block, the one with the least squared error.
  A smaller one clips the largest value and has finer steps for all others; and since the 16 values of NF4 are not
  symmetrical, a negative one mirrors them. y = x * (1 / s) in float32; v is the NF4 value nearest to y after y is
  rounded to the nearest 1024th between -1 and 1; the error is s * s * sum((y - v)**2), where the second half of the
  terms is added to the first until one is left; of equal errors the first in the order of `MULTIPLES` wins. The code is
  the number of midpoints below y. Blocks of zeros, with values that are not finite, or with magnitudes whose squares
  overflow or underflow, keep their largest magnitude as scale.

Every function releases the interpreter lock.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rabbitllm.base.compiling import compiled, inner
from rabbitllm.quant.schemes import DOUBLE, INT8_BLOCK, NF4_BLOCK, SCHEMES, nf4_map

Codes: TypeAlias = npt.NDArray[np.uint8]
Scales: TypeAlias = npt.NDArray[np.float32]

BF16, F16, F32 = 0, 1, 2
_KINDS = {"BF16": BF16, "F16": F16, "F32": F32}
SMALLEST_SCALE = np.float32(1e-38)
SMALLEST_FITTED, LARGEST_FITTED = np.float32(1e-18), np.float32(1e18)
"""Limits of a block's largest magnitude, between which squares neither overflow nor underflow."""
ZERO_CODE = 7
"""The code of NF4's value 0."""


def quantize(scheme: str, data: memoryview, dtype: str, *, fitted: bool = False) -> tuple[memoryview, memoryview]:
    """Quantize floats of a dtype to codes of 4 or 8 bits, with the scales of bitsandbytes, or at 4 bits fitted ones.

    Returns:
        The bytes of the codes, at 4 bits two a byte, and of one scale per block, float32.
    """
    entry, kind = SCHEMES[scheme], _KINDS[dtype]
    words = np.frombuffer(data, np.uint32 if kind == F32 else np.uint16)
    codes = np.empty(-(-words.size // entry.codes_a_byte), np.uint8)
    scales = np.empty(-(-words.size // entry.block), np.float32)
    operands = pair(words, kind), kind
    if fitted:
        _fit_blocks(*operands, *fitting_tables(), np.array(MULTIPLES[scheme], np.float32), codes, scales)
    elif entry.codes == "4bit":
        _nf4_blocks(*operands, _midpoints(entry.values()), codes, scales)
    else:
        _int8_blocks(*operands, _bins(entry.values()), codes, scales)
    return codes.data.cast("B"), scales.data.cast("B")


def _midpoints(levels: bytes) -> Scales:
    """Those between neighbouring levels, float32."""
    values = np.frombuffer(levels, np.float32)
    return (values[1:] + values[:-1]) / np.float32(2)


@functools.cache
def _bins(levels: bytes) -> Codes:
    """The code of each of the 65,536 bins that [-1, 1] is divided into."""
    centres = np.float32(-1) + (np.float32(2) * np.arange(65536, dtype=np.float32)) / np.float32(65535)
    return np.searchsorted(_midpoints(levels), centres, side="left").astype(np.uint8)


POSITIVE = (0.78, 0.84, 0.9, 0.96, 1.02)
"""Multiples of the largest magnitude that are tried. Twice as many found 1 to 2 % less error."""
MULTIPLES = {"4bit": (*POSITIVE, *(-multiple for multiple in POSITIVE)), DOUBLE: POSITIVE}
"""Scheme -> multiples; at 4bit-double, scales of both signs lose more when they are quantized than they gain."""
STEPS = 1024
"""Steps from 0 to 1 to which y is rounded."""


@functools.cache
def fitting_tables() -> tuple[Scales, Scales]:
    """The midpoints between the NF4 values, and the value nearest to each 1024th from -1 to 1."""
    levels, midpoints = np.frombuffer(nf4_map(), np.float32), _midpoints(nf4_map())
    steps = np.arange(-STEPS, STEPS + 1, dtype=np.float32) / np.float32(STEPS)
    return midpoints, levels[np.searchsorted(midpoints, steps, side="left")]


def pair(words: npt.NDArray[Any], kind: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
    """Floats of 16 and of 32 bits, none of one of them, to read: kernels get both, and are compiled once for all kinds,
    and for what may be written and what may not."""
    words = words.view()
    words.flags.writeable = False
    return (words[:0].view(np.uint16), words) if kind == F32 else (words, words[:0].view(np.uint32))


# Blocks are slices: numba checks an index with a variable start for being negative, and does not vectorize its loop.


@inner
def load(both, kind, first, count, values, bits):  # type: ignore[no-untyped-def]
    """Load some floats of a `pair` as float32, whose bits are `bits`; returns the bits of the largest magnitude."""
    words, wide = both[0][first : first + count], both[1][first : first + count]
    if kind == F32:
        for i in range(len(wide)):
            bits[i] = wide[i]
    elif kind == BF16:
        for i in range(len(words)):
            bits[i] = np.uint32(np.uint32(words[i]) << np.uint32(16))
    else:
        for i in range(len(words)):
            bits[i] = (np.uint32(words[i]) & np.uint32(0x7FFF)) << np.uint32(13)
        for i in range(len(words)):  # 2**112, the distance of the two exponents' biases; exact for subnormal ones too
            values[i] *= np.float32(5.192296858534828e33)
        for i in range(len(words)):
            half = np.uint32(words[i])
            if (half & np.uint32(0x7C00)) == np.uint32(0x7C00):
                bits[i] |= np.uint32(0x7F800000)
            bits[i] |= (half & np.uint32(0x8000)) << np.uint32(16)
    largest = np.uint32(0)
    for i in range(count):  # magnitudes have the order of their bits, and comparisons of these are vectorized
        largest = np.uint32(max(largest, np.uint32(bits[i] & np.uint32(0x7FFFFFFF))))
    return largest


@compiled
def _nf4_blocks(both, kind, midpoints, codes, scales):  # type: ignore[no-untyped-def]
    values, ranks, edges = np.empty(NF4_BLOCK, np.float32), np.empty(NF4_BLOCK, np.int16), np.empty(15, np.float32)
    bits = values.view(np.uint32)
    pairs = ranks.view(np.uint32)  # the even one in the low half: every machine that numba supports is little-endian
    for i in range(15):
        edges[i] = midpoints[i]
    size = both[0].size + both[1].size
    for block in range(scales.size):
        first = block * NF4_BLOCK
        count = min(NF4_BLOCK, size - first)
        largest = load(both, kind, first, count, values, bits)
        scale = np.uint32(largest).view(np.float32)
        if largest > np.uint32(0x7F800000):
            for i in range(count - 1, -1, -1):
                if values[i] != values[i]:
                    scale = abs(values[i])
        divisor = SMALLEST_SCALE if scale < SMALLEST_SCALE else scale
        inverse = np.float32(1) / divisor
        if count < NF4_BLOCK:  # divided, and filled with zeros, of which one may be in the last byte
            for i in range(count):
                values[i] /= divisor
            values[count:] = np.float32(0)
            scale, inverse = divisor, np.float32(1)
        scales[block] = scale
        for i in range(NF4_BLOCK):
            y, rank = values[i] * inverse, np.float32(15)
            for j in range(15):  # unrolled, so that a value stays in its register; float32, which has as many lanes
                rank -= np.float32(1) if y <= edges[j] else np.float32(0)  # not for NaN, which keeps 15
            ranks[i] = np.int16(np.int32(rank))
        some = codes[first // 2 : (first + count + 1) // 2]
        for i in range(len(some)):
            some[i] = np.uint8((pairs[i] << np.uint32(4)) | (pairs[i] >> np.uint32(16)))


@compiled
def _int8_blocks(both, kind, bins, codes, scales):  # type: ignore[no-untyped-def]
    values, places = np.empty(INT8_BLOCK, np.float32), np.empty(INT8_BLOCK, np.uint16)
    bits, size = values.view(np.uint32), both[0].size + both[1].size
    for block in range(scales.size):
        first, last = block * INT8_BLOCK, min((block + 1) * INT8_BLOCK, size)
        largest, some = load(both, kind, first, last - first, values, bits), values[: last - first]
        scale = np.uint32(largest).view(np.float32)
        if largest >= np.uint32(0x7F800000):  # with infinities or NaNs the scale is the result of these comparisons
            scale = np.float32(0)
            for i in range(some.size):
                scale = max(scale, abs(some[i]))
        scales[block], few = scale, codes[first:last]
        inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
        for i in range(some.size):
            y = min(max(some[i] * inverse, np.float32(-1)), np.float32(1))
            places[i] = np.uint16(np.int32((y + np.float32(1)) * np.float32(0.5) * np.float32(65535) + np.float32(0.5)))
        for i in range(some.size):
            few[i] = bins[places[i]] if scale != 0 else np.uint8(0)


@inner
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
    for half in (32, 16, 8, 4, 2, 1):
        for i in range(half):
            squares[i] = squares[i] + squares[i + half]
    return scale * scale * squares[0]


@compiled
def _fit_blocks(both, kind, midpoints, nearest, multiples, codes, scales):  # type: ignore[no-untyped-def]
    values = np.empty(NF4_BLOCK, np.float32)
    bits = values.view(np.uint32)
    ys = np.empty(NF4_BLOCK, np.float32)
    places = np.empty(NF4_BLOCK, np.uint16)
    squares = np.empty(NF4_BLOCK, np.float32)
    ranks = np.empty(NF4_BLOCK, np.uint8)
    size = both[0].size + both[1].size
    for block in range(scales.size):
        first = block * NF4_BLOCK
        count = min(NF4_BLOCK, size - first)
        values[count:] = np.float32(0)
        largest = np.uint32(load(both, kind, first, count, values, bits)).view(np.float32)
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
