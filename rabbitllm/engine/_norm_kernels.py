"""RMSNorm of rows as one call of compiled code, with torch's bits.

torch computes it in eight operations. Its sum of squares has an order that depends on its vectors (`cascade_sum`,
SumKernel.cpp): each lane of four vectors adds every so manieth square, in runs whose sums are added; then the vectors
are added, then the lanes. The same order is followed here. A class's own result decides whether this is used.
"""

from __future__ import annotations

import numpy as np

from rabbitllm.base.compiling import to_array, words_at

_VECTORS, _LEVELS = 4, 4
"""Vectors that are added to side by side, and levels of runs."""


def norm(data):  # type: ignore[no-untyped-def]
    """`weight * (x / rms(x))`, in place too.

    After the own address those of x, of the weight and of the results; whether these are bfloat16, else float32; rows
    and columns; torch's lanes, negative for the factor `1 + weight`; the bits of epsilon; and the divisor of the sum of
    squares, which is 1 for rows of length 1.

    Every step is rounded as torch rounds it: to float32, and with bfloat16 the product again, and the quotient unless
    the factor is `1 + weight`.
    """
    given = to_array(data, 10)
    is_bfloat, rows, columns, lanes, is_shifted = given[4], given[5], given[6], abs(given[7]), given[7] < 0
    epsilon_bits = np.empty(1, np.uint32)
    epsilon_bits[0] = np.uint32(given[8])
    epsilon = epsilon_bits.view(np.float32)[0]
    one, width = np.float32(1), _VECTORS * lanes
    words, factor_words, result_words = words_at(given[1]), words_at(given[2]), words_at(given[3])
    singles = to_array(words, 2 * rows * columns).view(np.float32)
    factors = to_array(factor_words, 2 * columns).view(np.float32)
    results = to_array(result_words, 2 * rows * columns).view(np.float32)
    words, factor_words = to_array(words, rows * columns).view(np.int16), to_array(factor_words, columns).view(np.int16)
    result_words = to_array(result_words, rows * columns).view(np.int16)
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
    if is_shifted:
        for i in range(columns):
            factor[i] += one
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
        inverse = one / np.sqrt(total / np.float32(given[9]) + epsilon)
        if is_bfloat:
            for i in range(columns):
                values[i] *= inverse
            if not is_shifted:
                for i in range(columns):
                    bits[i] = (bits[i] + 0x7FFF + ((bits[i] >> 16) & 1)) & -0x10000
            for i in range(columns):
                values[i] *= factor[i]
            for i in range(columns):
                result_words[begin + i] = np.int16((bits[i] + 0x7FFF + ((bits[i] >> 16) & 1)) >> 16)
        else:
            for i in range(columns):
                results[begin + i] = factor[i] * (values[i] * inverse)
