"""Rows of bfloat16 rounded to codes of 8 or 4 bits and back by one call, with compressed-tensors' bits."""

from __future__ import annotations

import numpy as np

from rabbitllm.base.compiling import bits_of, float_of, helper, shortened, to_array, wide
from rabbitllm.engine._layer_kernels import bfloats, round_values, store_rounded

_OF_INTEGERS, _OF_SMALL = np.float32(1 << 23), np.float32(1 << 14)
"""What is added to a size and subtracted, so that whole numbers are left; or multiples of 2 ** -9."""
_OF_HALVES, _OF_ONES, _OF_TWOS = np.float32(1 << 22), np.float32(1 << 23), np.float32(1 << 24)
"""The same for multiples of a half, of 1 and of 2."""
_LEAST_NORMAL, _LOST_BITS = 121 << 23, 20
"""The bits in float32 of the least number that float8_e4m3fn has with all its bits, and how many of them it lacks."""
_LEAST_SCALE = np.float32(0.125)
"""The scale of a group of zeros by NVFP4, the least step of float8_e4m3fn at 1."""


@helper(forceinline=True)
def _to_float8(size):  # type: ignore[no-untyped-def]
    """The number of float8_e4m3fn nearest to one of 0 to 448, ties to even; what is no number stays so."""
    if size != size:
        return size
    exact = bits_of(size)
    odd = (exact >> np.uint32(_LOST_BITS)) & np.uint32(1)
    shorter = exact + np.uint32((1 << (_LOST_BITS - 1)) - 1) + odd
    shorter &= ~np.uint32((1 << _LOST_BITS) - 1)
    return float_of(shorter) if exact >= np.uint32(_LEAST_NORMAL) else (size + _OF_SMALL) - _OF_SMALL


@helper(forceinline=True)
def _to_float4(size):  # type: ignore[no-untyped-def]
    """The number of FP4 (E2M1) nearest to one of at least 0, ties to even; what is no number stays so."""
    # in steps of a half up to 2, of 1 up to 4, then of 2: the number added is large enough that no finer one is left
    step = _OF_HALVES if size < np.float32(2) else _OF_ONES if size < np.float32(4) else _OF_TWOS
    whole = (size + step) - step
    return whole if whole < np.float32(6) else np.float32(6) if whole == whole else whole


@helper(forceinline=True)
def _power(most, largest, quarter):  # type: ignore[no-untyped-def]
    """The scale of MX formats, a power of two from 2 ** -127 on: that of the largest size, given as its bits, to whose
    mantissa a quarter is added, divided by that of the largest code. It is infinite for what is no number."""
    whole = (min(np.int64(most), 0x8000 - 4 * quarter) + quarter) & ~(4 * quarter - 1)
    exponent = np.int64(bits_of(wide(np.uint16(whole))) >> np.uint32(23))
    if exponent < 255:  # what is infinite stays so
        exponent -= np.int64(bits_of(largest) >> np.uint32(23)) - 127
    return float_of(exponent << 23 if exponent > 0 else 1 << 22)


@helper(forceinline=True)
def _most(x):  # type: ignore[no-untyped-def]
    """The bits of the largest size of some numbers; what is no number is the largest."""
    most = np.uint16(0)
    for i in range(len(x)):
        most = max(most, x[i] & np.uint16(0x7FFF))  # ordered as the sizes are
    return most


def round_rows(data, start, end, parts):  # type: ignore[no-untyped-def]
    """Some parts of the rows, each with a scale of its own.

    After the own address those of x and of the results; rows and columns; the bits of the largest number, by which the
    largest size of a row is divided for its scale: 448 if codes are float8_e4m3fn, 6 if they are FP4, else they are
    int8; the bits of the scale of a row of zeros, of the scale if all rows have one, else 0, and of the zero that is
    added; and a quarter of a mantissa of x if scales are powers of two, else 0.

    Every step is rounded as torch rounds it, to bfloat16.
    """
    words = to_array(data, 10)
    rows, columns, largest, zero = words[3], words[4], float_of(words[5]), float_of(words[8])
    is_float8, is_float4 = largest == np.float32(448), largest == np.float32(6)
    values, scale = np.empty(columns, np.float32), np.empty(1, np.float32)
    bits = values.view(np.uint32)
    low, high = (-largest, largest) if is_float8 or is_float4 else (np.float32(-128), np.float32(127))
    for row in range(start * rows // parts, end * rows // parts):
        x = bfloats(words[1] + 2 * row * columns, columns)
        if words[7] == 0:
            scale[0] = _power(_most(x), largest, words[9]) if words[9] != 0 else wide(_most(x)) / largest
            round_values(scale)
        else:
            scale[0] = float_of(words[7])
        factor = scale[0] if scale[0] != 0 else float_of(words[6])
        for i in range(columns):
            values[i] = wide(x[i]) / factor
        round_values(values)
        for i in range(columns):
            value = values[i] + zero
            value = high if value > high else low if value < low else value
            sign = bits_of(value) & np.uint32(0x80000000)
            size = float_of(bits_of(value) ^ sign)
            if is_float8:
                size = _to_float8(size)
            elif is_float4:
                size = _to_float4(size)
            else:
                size = (size + _OF_INTEGERS) - _OF_INTEGERS
            bits[i] = bits_of(size) | sign
            values[i] *= factor
        store_rounded(values, bfloats(words[2] + 2 * row * columns, columns))


def round_groups(data, start, end, parts):  # type: ignore[no-untyped-def]
    """Some parts of the groups, each rounded to FP4 with a scale of float8_e4m3fn, by NVFP4.

    After the own address those of x and of the results; groups and their numbers; and the bits of the number that
    multiplies all scales before they are rounded. The quotient for a scale is rounded to bfloat16 before that; all else
    is float32 until the result.
    """
    words = to_array(data, 6)
    groups, columns, factor = words[3], words[4], float_of(words[5])
    values = np.empty(columns, np.float32)
    bits = values.view(np.uint32)
    for group in range(start * groups // parts, end * groups // parts):
        x = bfloats(words[1] + 2 * group * columns, columns)
        exact = wide(shortened(wide(_most(x)) / np.float32(6))) * factor
        rounded = _to_float8(min(exact, np.float32(448))) if exact == exact else exact
        scale = (_LEAST_SCALE if rounded == 0 else rounded) / factor
        for i in range(columns):
            value = wide(x[i]) / scale + np.float32(0)  # a zero has no sign
            sign = bits_of(value) & np.uint32(0x80000000)
            size = float_of(bits_of(value) ^ sign)
            bits[i] = bits_of(_to_float4(size)) | sign
            values[i] *= scale
        store_rounded(values, bfloats(words[2] + 2 * group * columns, columns))
