"""Small operations of a layer in bfloat16 as one call of compiled code each, with torch's bits.

torch rounds the result of each operation, and so do these. The calls keep the interpreter lock: they take microseconds.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numba
import numpy as np
from numba import types

from rabbitllm.base.compiling import c_function, to_array


def _call(function: Any, pointers: int, numbers: int) -> Any:
    """A function of Python that calls a compiled one with addresses of words, and then with numbers."""
    words = types.CPointer(types.uint16)  # type: ignore[no-untyped-call]
    compiled = c_function(types.void(*[words] * pointers, *[types.int64] * numbers), function)
    form = ctypes.PYFUNCTYPE(None, *[ctypes.c_void_p] * pointers, *[ctypes.c_int64] * numbers)
    call: Any = form(compiled.address)
    call.kept = compiled
    return call


@functools.cache
def rotate() -> Any:
    """A function of Python that calls the compiled `_rotate`."""
    return _call(_rotate, 6, 5)


@functools.cache
def gate() -> Any:
    """A function of Python that calls the compiled `_gate`."""
    return _call(_gate, 4, 1)


@numba.njit(nogil=True, inline="always")
def _nearest(bits):  # type: ignore[no-untyped-def]
    """The bits of a float32 rounded to bfloat16, to nearest, ties to even; the lower half is left over."""
    if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return np.uint32(0x7FC00000)
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))


def _rotate(queries, keys, cosines, sines, query_out, key_out, rows, query_heads, key_heads, width, step):  # type: ignore[no-untyped-def]
    """`x * cos + rotate_half(x) * sin` for the heads of each row; `step` words on are the angles of the next row."""
    half = width // 2
    cos, sin = np.empty(width, np.float32), np.empty(width, np.float32)
    x, turned = np.empty(width, np.float32), np.empty(width, np.float32)
    cos_bits, sin_bits = cos.view(np.uint32), sin.view(np.uint32)
    bits, turned_bits = x.view(np.uint32), turned.view(np.uint32)
    angles = step * (rows - 1) + width
    cos_words, sin_words = to_array(cosines, angles), to_array(sines, angles)
    for row in range(rows):
        for i in range(width):
            cos_bits[i] = np.uint32(cos_words[row * step + i]) << np.uint32(16)
            sin_bits[i] = np.uint32(sin_words[row * step + i]) << np.uint32(16)
        for is_key in range(2):
            heads = key_heads if is_key else query_heads
            words = to_array(keys if is_key else queries, rows * heads * width)
            results = to_array(key_out if is_key else query_out, rows * heads * width)
            for begin in range(row * heads * width, (row + 1) * heads * width, width):
                for i in range(width):
                    bits[i] = np.uint32(words[begin + i]) << np.uint32(16)
                for i in range(half):
                    turned[i] = -x[half + i] * sin[i]
                    turned[half + i] = x[i] * sin[half + i]
                for i in range(width):
                    x[i] *= cos[i]
                for i in range(width):
                    bits[i] = _nearest(bits[i]) & np.uint32(0xFFFF0000)
                    turned_bits[i] = _nearest(turned_bits[i]) & np.uint32(0xFFFF0000)
                for i in range(width):
                    x[i] += turned[i]
                for i in range(width):
                    results[begin + i] = np.uint16(_nearest(bits[i]) >> np.uint32(16))


def _gate(table, gates, factors, out, count):  # type: ignore[no-untyped-def]
    """`table[gates] * factors`."""
    results = to_array(table, 1 << 16)
    gate_words, factor_words, out_words = to_array(gates, count), to_array(factors, count), to_array(out, count)
    product, factor = np.empty(count, np.float32), np.empty(count, np.float32)
    bits, factor_bits = product.view(np.uint32), factor.view(np.uint32)
    for i in range(count):
        bits[i] = np.uint32(results[gate_words[i]]) << np.uint32(16)
    for i in range(count):
        factor_bits[i] = np.uint32(factor_words[i]) << np.uint32(16)
    for i in range(count):
        product[i] *= factor[i]
    for i in range(count):
        out_words[i] = np.uint16(_nearest(bits[i]) >> np.uint32(16))
