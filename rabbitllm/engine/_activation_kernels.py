"""Rows of bfloat16 rounded to codes of 8 bits and back as one call of compiled code, with compressed-tensors' bits."""

from __future__ import annotations

import numpy as np

from rabbitllm.base.compiling import bits_of, float_of, to_array, wide
from rabbitllm.engine._layer_kernels import bfloats, round_values, store_rounded

_OF_INTEGERS, _OF_SMALL = np.float32(1 << 23), np.float32(1 << 14)
"""What is added to a size and subtracted, so that whole numbers are left; or multiples of 2 ** -9."""
_LEAST_NORMAL, _LOST_BITS = 121 << 23, 20
"""The bits in float32 of the least number that float8_e4m3fn has with all its bits, and how many of them it lacks."""


def round_rows(data, start, end, parts):  # type: ignore[no-untyped-def]
    """Some parts of the rows, each with a scale of its own.

    After the own address those of x and of the results; rows and columns; the bits of the largest number, by which the
    largest size of a row is divided for its scale; whether codes are float8_e4m3fn, else int8; and the bits of the
    scale of a row of zeros.

    Every step is rounded as torch rounds it, to bfloat16.
    """
    words = to_array(data, 8)
    rows, columns, is_float8 = words[3], words[4], words[6] != 0
    largest = float_of(words[5])
    values, scale = np.empty(columns, np.float32), np.empty(1, np.float32)
    bits = values.view(np.uint32)
    low, high = (-largest, largest) if is_float8 else (np.float32(-128), np.float32(127))
    for row in range(start * rows // parts, end * rows // parts):
        x, most = bfloats(words[1] + 2 * row * columns, columns), np.uint16(0)
        for i in range(columns):
            most = max(most, x[i] & np.uint16(0x7FFF))  # ordered as the sizes are, and what is no number comes last
        scale[0] = wide(most) / largest
        round_values(scale)
        factor = scale[0] if scale[0] != 0 else float_of(words[7])
        for i in range(columns):
            values[i] = wide(x[i]) / factor
        round_values(values)
        for i in range(columns):
            value = values[i] + np.float32(0)  # a zero is added: it has no sign
            value = high if value > high else low if value < low else value
            sign = bits_of(value) & np.uint32(0x80000000)
            size = float_of(bits_of(value) ^ sign)
            if is_float8:
                exact = bits_of(size)
                odd = (exact >> np.uint32(_LOST_BITS)) & np.uint32(1)
                shorter = exact + np.uint32((1 << (_LOST_BITS - 1)) - 1) + odd
                shorter &= ~np.uint32((1 << _LOST_BITS) - 1)
                is_normal = exact >= np.uint32(_LEAST_NORMAL)
                size = float_of(shorter) if is_normal else (size + _OF_SMALL) - _OF_SMALL
            else:
                size = (size + _OF_INTEGERS) - _OF_INTEGERS
            bits[i] = bits_of(size) | sign
            values[i] *= factor
        store_rounded(values, bfloats(words[2] + 2 * row * columns, columns))
