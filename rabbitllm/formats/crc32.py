"""The CRC-32 of a whole from those of its pieces, in whatever order they were made.

zlib makes the sums (at several GB/s); putting two together is arithmetic on polynomials over GF(2), after
https://github.com/madler/zlib (crc32.c, `crc32_combine`): the sum of A followed by B is A's multiplied by
x^(8 * len(B)), plus B's.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from pathlib import Path

_POLYNOMIAL = 0xEDB88320
"""CRC-32's, with the highest power in the lowest bit."""
READ_BYTES = 4 << 20
"""Of a file at a time."""
_ONE = 1 << 31
_X8 = 1 << 23


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two runs of bytes, one after the other, from the CRC-32 of each and the length of the second."""
    if not first:
        return second
    lowest, low, high, highest = _shifted(second_bytes)
    shifted = lowest[first & 255] ^ low[first >> 8 & 255] ^ high[first >> 16 & 255] ^ highest[first >> 24]
    return shifted ^ second


def combine_all(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of runs of bytes in their order, each given as (CRC-32, length in bytes)."""
    total = 0
    for crc, nbytes in pieces:
        total = combine(total, crc, nbytes)
    return total


def crc32_of_file(path: Path) -> int:
    """The CRC-32 of a file's bytes, all of which are read."""
    total, buffer = 0, bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as stream:
        while got := stream.readinto(buffer):
            total = zlib.crc32(memoryview(buffer)[:got], total)
    return total


@functools.lru_cache(maxsize=256)
def _shifted(nbytes: int) -> tuple[tuple[int, ...], ...]:
    """What each value of each byte of a sum, the lowest first, becomes with so many bytes behind it.

    Multiplying is linear, so a sum is the exclusive or of what becomes of its bytes. Layers of hundreds of experts have
    thousands of runs of a few lengths.
    """
    power = _shift(nbytes)
    tables = []
    for byte in range(4):
        table = [0]
        for bit in range(8):
            of_bit = _multiply(power, 1 << 8 * byte + bit)
            table += [value ^ of_bit for value in table]
        tables.append(tuple(table))
    return tuple(tables)


def _shift(nbytes: int) -> int:
    """x^(8 * nbytes) modulo the polynomial, by repeated squaring."""
    power, square = _ONE, _X8
    while nbytes:
        if nbytes & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        nbytes >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
