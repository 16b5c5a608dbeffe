"""CRC-32 checksums, and their combination: that of a whole from those of its pieces, computed in any order.

zlib-ng computes them with the processor's own instructions and without the interpreter's lock, four times as fast as
CPython's zlib (docs/PERFORMANCE.md), which gives the same results where zlib-ng is not installed. Combining two is
arithmetic on polynomials over GF(2), after https://github.com/madler/zlib (crc32.c, `crc32_combine`): the CRC of A
followed by B is A's multiplied by x^(8 * len(B)), plus B's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["combine", "combine_all", "crc32", "crc32_of_file"]

_POLYNOMIAL = 0xEDB88320
"""CRC-32's polynomial, with the highest power in the lowest bit."""
READ_BYTES = 4 << 20
"""Bytes of a file that are read at a time."""
_ONE = 1 << 31
_X8 = 1 << 23


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two consecutive runs of bytes, from the CRC-32 of each and the length of the second."""
    while first and second_bytes:
        bit = second_bytes & -second_bytes
        lowest, low, high, highest = _shifted(bit)
        first = lowest[first & 255] ^ low[first >> 8 & 255] ^ high[first >> 16 & 255] ^ highest[first >> 24]
        second_bytes ^= bit
    return first ^ second


def combine_all(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of consecutive runs of bytes, each given as (CRC-32, length in bytes)."""
    total = 0
    for crc, nbytes in pieces:
        total = combine(total, crc, nbytes)
    return total


def crc32_of_file(path: Path) -> int:
    """The CRC-32 of a file, which is read completely."""
    total, buffer = 0, bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as stream:
        while got := stream.readinto(buffer):
            total = crc32(memoryview(buffer)[:got], total)
    return total


@functools.cache
def _shifted(nbytes: int) -> tuple[tuple[int, ...], ...]:
    """Tables of the CRC after `nbytes` zero bytes, a power of two: for each byte of a CRC, lowest first, by its value.

    Multiplication is linear, so the result for a CRC is the exclusive or of the entries of its bytes.
    """
    power = _X8
    for _ in range(nbytes.bit_length() - 1):
        power = _multiply(power, power)
    tables = []
    for byte in range(4):
        table = [0]
        for bit in range(8):
            of_bit = _multiply(power, 1 << 8 * byte + bit)
            table += [value ^ of_bit for value in table]
        tables.append(tuple(table))
    return tuple(tables)


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
