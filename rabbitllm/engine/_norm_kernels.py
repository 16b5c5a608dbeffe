"""RMSNorm of rows as one call of compiled code, with torch's bits.

torch computes it in eight operations. Its sum of squares has an order that depends on its vectors (`cascade_sum`,
SumKernel.cpp): each lane of four vectors adds every so manieth square, in runs whose sums are added; then the vectors
are added, then the lanes. The same order is followed here. A class's own result decides whether this is used.
"""

from __future__ import annotations

import numpy as np

from rabbitllm.base.compiling import float_of, helper, to_array, wide
from rabbitllm.engine._layer_kernels import bfloats, floats, round_values, store_rounded

TWICE, ONCE, SHIFTED = KINDS = 0, 1, 2
"""Norms that also round before they multiply by their weight, that do not, and that multiply by `1 + weight` then."""
_VECTORS, _LEVELS = 4, 4
"""Vectors that are added to side by side, and levels of runs."""


@helper(forceinline=True)
def _load(address, is_bfloat, values):  # type: ignore[no-untyped-def]
    """Read values at an address, bfloat16 or float32."""
    if is_bfloat:
        bits = bfloats(address, len(values))
        for i in range(len(values)):
            values[i] = wide(bits[i])
    else:
        singles = floats(address, len(values))
        for i in range(len(values)):
            values[i] = singles[i]


def norm(data, start, end, parts):  # type: ignore[no-untyped-def]
    """`weight * (x / rms(x))`, in place too: some parts of its rows.

    After the own address those of x, of the weight and of the results; whether these are bfloat16, else float32; rows
    and columns; torch's lanes; the bits of epsilon; the divisor of the sum of squares, which is 1 for rows of length 1;
    one of `KINDS`; and how many rows there are of the weight, which rows of x have by turns.

    Every step is rounded as torch rounds it: to float32, and with bfloat16 the product again, and the quotient if the
    kind is `TWICE`.
    """
    words = to_array(data, 12)
    is_bfloat, rows, columns, lanes, kind, groups = words[4], words[5], words[6], words[7], words[10], words[11]
    epsilon, one, width = float_of(words[8]), np.float32(1), _VECTORS * lanes
    values, factor = np.empty(columns, np.float32), np.empty(columns, np.float32)
    sums = np.empty((_LEVELS, width), np.float32)
    vectors = columns // lanes
    steps = vectors // _VECTORS
    power = 0
    while (1 << power) < steps:
        power += 1
    power = max(4, power // _LEVELS)
    nbytes, first = columns * (2 if is_bfloat else 4), start * rows // parts
    for row in range(first, end * rows // parts):
        if groups > 1 or row == first:
            _load(words[2] + row % groups * nbytes, is_bfloat, factor)
            if kind == SHIFTED:
                factor += one
        begin = row * nbytes
        _load(words[1] + begin, is_bfloat, values)
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
        inverse = one / np.sqrt(total / np.float32(words[9]) + epsilon)
        for i in range(columns):
            values[i] *= inverse
        if is_bfloat and kind == TWICE:
            round_values(values)
        for i in range(columns):
            values[i] *= factor[i]
        if is_bfloat:
            store_rounded(values, bfloats(words[3] + begin, columns))
        else:
            results = floats(words[3] + begin, columns)
            for i in range(columns):
                results[i] = values[i]
