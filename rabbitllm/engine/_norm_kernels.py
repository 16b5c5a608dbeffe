"""RMSNorm of rows as one call of compiled code, with torch's bits.

torch computes it in eight operations. Its sum of squares has an order that depends on its vectors (`cascade_sum`,
SumKernel.cpp): each lane of four vectors adds every so manieth square, in runs whose sums are added; then the vectors
are added, then the lanes. The same order is followed here. A class's own result decides whether this is used.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numba import types

from rabbitllm.base.compiling import c_function, to_array

_VECTORS, _LEVELS = 4, 4
"""Vectors that are added to side by side, and levels of runs."""


@functools.cache
def norm() -> Any:
    """A function of Python that calls the compiled `_norm`, and keeps the interpreter lock: it takes microseconds."""
    floats, words = (types.CPointer(dtype) for dtype in (types.float32, types.int16))  # type: ignore[no-untyped-call]
    signature = types.void(floats, words, floats, words, floats, words, *[types.int64] * 4, types.float32)
    compiled = c_function(signature, _norm)
    form = ctypes.PYFUNCTYPE(None, *[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 4, ctypes.c_float)
    call: Any = form(compiled.address)
    call.kept = compiled
    return call


def _norm(x, x_words, weight, weight_words, out, out_words, is_bfloat, rows, columns, lanes, epsilon):  # type: ignore[no-untyped-def]
    """`weight * (x / rms(x))`; addresses are given as those of float32 and as those of words of bfloat16.

    Every step is rounded as torch rounds it: to float32, and with bfloat16 the quotient and the product again.
    """
    one, width = np.float32(1), _VECTORS * lanes
    singles, words = to_array(x, rows * columns), to_array(x_words, rows * columns)
    factors, factor_words = to_array(weight, columns), to_array(weight_words, columns)
    results, result_words = to_array(out, rows * columns), to_array(out_words, rows * columns)
    values, factor = np.empty(columns, np.float32), np.empty(columns, np.float32)
    bits, factor_bits = values.view(np.int32), factor.view(np.int32)
    sums = np.empty((_LEVELS, width), np.float32)
    vectors = columns // lanes
    steps = vectors // _VECTORS
    power = 0
    while (1 << power) < steps:
        power += 1
    power = max(4, power // _LEVELS)
    for i in range(columns):
        if is_bfloat:
            factor_bits[i] = np.int32(factor_words[i]) << 16
        else:
            factor[i] = factors[i]
    for row in range(rows):
        begin = row * columns
        for i in range(columns):
            if is_bfloat:
                bits[i] = np.int32(words[begin + i]) << 16
            else:
                values[i] = singles[begin + i]
        sums[:] = 0
        for step in range(steps):
            for i in range(width):
                value = values[step * width + i]
                sums[0, i] += value * value
            if (step + 1) & ((1 << power) - 1) != 0:
                continue
            for level in range(1, _LEVELS):
                for i in range(width):
                    sums[level, i] += sums[level - 1, i]
                    sums[level - 1, i] = 0
                if (step + 1) & (((1 << power) - 1) << (level * power)) != 0:
                    break
        for level in range(1, _LEVELS):
            for i in range(width):
                sums[0, i] += sums[level, i]
        for i in range(steps * width, vectors * lanes):
            sums[0, i % lanes] += values[i] * values[i]
        for vector in range(1, _VECTORS):
            for i in range(lanes):
                sums[0, i] += sums[0, vector * lanes + i]
        total = np.float32(0)
        for i in range(vectors * lanes, columns):
            total += values[i] * values[i]
        for i in range(lanes):
            total += sums[0, i]
        inverse = one / np.sqrt(total / np.float32(columns) + epsilon)
        if is_bfloat:
            for i in range(columns):
                values[i] *= inverse
            for i in range(columns):
                bits[i] = (bits[i] + 0x7FFF + ((bits[i] >> 16) & 1)) & -0x10000
            for i in range(columns):
                values[i] *= factor[i]
            for i in range(columns):
                result_words[begin + i] = np.int16((bits[i] + 0x7FFF + ((bits[i] >> 16) & 1)) >> 16)
        else:
            for i in range(columns):
                results[begin + i] = factor[i] * (values[i] * inverse)
