"""Descriptions of the usual types of ggml's blocks, each written once, in operators.

A description is a generator over the groups of up to 32 codes of a block, with their scales and minima.
`gguf_blocks.py` runs it by torch on any device, and `_block_kernels.py` compiles it for a CPU's vectors.

Formats: https://github.com/ggml-org/ggml, `src/ggml-common.h` and `src/ggml-quants.c`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias


class Group(NamedTuple):
    """Consecutive elements of a block: `code * scale - minimum`, multiplied and subtracted in float32.

    Attributes:
        codes: bytes, unsigned unless `signed` says otherwise.
        scales: one or two float32, each of an equal share of the codes.
        minima: as many; none if nothing is subtracted.
        signed: whether the codes are two's complement.
    """

    codes: Any
    scales: tuple[Any, ...]
    minima: tuple[Any, ...] = ()
    signed: bool = False


class BlockReader(Protocol):
    """The fields of a block.

    Byte vectors have the operators & | >> << and -, modulo 256; ints have them too. A float32 has a sign, and a product
    with an int.
    """

    def bytes(self, offset: int, count: int) -> Any:
        """A vector of bytes."""

    def bits(self, offset: int, count: int) -> Any:
        """A vector of bytes that are 0 or 1, from the bits at an offset in bytes, the lowest first."""

    def look_up(self, values: tuple[int, ...], index: Any) -> Any:
        """A vector of bytes: the two's complement of one of 16 values for each index below 16."""

    def byte(self, offset: int) -> Any:
        """An int."""

    def signed(self, value: Any) -> Any:
        """An int from a byte that is two's complement."""

    def half(self, offset: int) -> Any:
        """A float32 from a float16."""

    def half_power(self, exponent: Any) -> Any:
        """2 ** (exponent - 128), float32."""


Decode: TypeAlias = Callable[[BlockReader], Iterator[Group]]


def _halves(block: BlockReader, offset: int, values: tuple[int, ...], scale: Any) -> Iterator[Group]:
    """16 bytes: the lower halves are indices of the first 16 elements, the upper ones of the next."""
    both = block.bytes(offset, 16)
    for index in (both & 15, both >> 4):
        yield Group(block.look_up(values, index), (scale,), signed=True)


def _nibbles(*, has_minimum: bool, has_fifth: bool) -> Decode:
    """A scale, in some types a minimum and the fifth bits of all codes, and 16 bytes with two codes each."""
    first = 4 if has_minimum else 2

    def decode(block: BlockReader) -> Iterator[Group]:
        scale, minima = block.half(0), (-block.half(2),) if has_minimum else ()
        both = block.bytes(first + 4 * has_fifth, 16)
        for part, low in enumerate((both & 15, both >> 4)):
            codes = low | block.bits(first + 2 * part, 16) << 4 if has_fifth else low
            yield Group(codes if has_minimum else codes - (16 if has_fifth else 8), (scale,), minima, not has_minimum)

    return decode


def _q8_0(block: BlockReader) -> Iterator[Group]:
    yield Group(block.bytes(2, 32), (block.half(0),), signed=True)


def _q2_k(block: BlockReader) -> Iterator[Group]:
    scale, least = block.half(80), block.half(82)
    for group in range(8):
        codes = block.bytes(16 + 32 * (group // 4), 32) >> 2 * (group % 4) & 3
        pair = [block.byte(2 * group + part) for part in (0, 1)]
        scales = tuple(scale * (both & 15) for both in pair)
        yield Group(codes, scales, tuple(least * (both >> 4) for both in pair))


def _q3_k(block: BlockReader) -> Iterator[Group]:
    scale, high = block.half(108), block.bytes(0, 32)

    def factor(index: int) -> Any:
        low = block.byte(96 + index % 8) >> 4 * (index // 8) & 15
        return (low | (block.byte(104 + index % 4) >> 2 * (index // 4) & 3) << 4) - 32

    for group in range(8):
        low = block.bytes(32 + 32 * (group // 4), 32) >> 2 * (group % 4) & 3
        scales = tuple(scale * factor(2 * group + part) for part in (0, 1))
        yield Group((low | (high >> group & 1) << 2) - 4, scales, signed=True)


def _six_bits(block: BlockReader, group: int) -> tuple[Any, Any]:
    """The factors of scale and minimum of one of 8 groups, from the 12 bytes at 4."""
    if group < 4:
        return block.byte(4 + group) & 63, block.byte(8 + group) & 63
    both, scale, least = (block.byte(offset + group) for offset in (8, 0, 4))
    return both & 15 | scale >> 6 << 4, both >> 4 | least >> 6 << 4


def _q4_k(block: BlockReader, *, has_fifth: bool = False) -> Iterator[Group]:
    scale, least, high = block.half(0), block.half(2), block.bytes(16, 32) if has_fifth else None
    for group in range(8):
        factors = _six_bits(block, group)
        both = block.bytes((48 if has_fifth else 16) + 32 * (group // 2), 32)
        codes = both >> 4 if group % 2 else both & 15
        codes = codes if high is None else codes | (high >> group & 1) << 4
        yield Group(codes, (scale * factors[0],), (least * factors[1],))


def _q6_k(block: BlockReader) -> Iterator[Group]:
    scale = block.half(208)
    for group in range(8):
        half, part = divmod(group, 4)
        both = block.bytes(64 * half + 32 * (part % 2), 32)
        high = block.bytes(128 + 32 * half, 32) >> 2 * part & 3
        codes = ((both >> 4 if part > 1 else both & 15) | high << 4) - 32
        factors = (block.signed(block.byte(192 + 2 * group + pair)) for pair in (0, 1))
        yield Group(codes, tuple(scale * factor for factor in factors), signed=True)


def _iq4_nl(block: BlockReader) -> Iterator[Group]:
    yield from _halves(block, 2, IQ4_VALUES, block.half(0))


def _iq4_xs(block: BlockReader) -> Iterator[Group]:
    scale = block.half(0)
    for group in range(8):
        low = block.byte(4 + group // 2) >> 4 * (group % 2) & 15
        high = block.byte(2 + group // 4) >> 2 * (group % 4) & 3
        yield from _halves(block, 8 + 16 * group, IQ4_VALUES, scale * ((low | high << 4) - 32))


def _tq2_0(block: BlockReader) -> Iterator[Group]:
    scale = block.half(64)
    for group in range(8):
        yield Group((block.bytes(32 * (group // 4), 32) >> 2 * (group % 4) & 3) - 1, (scale,), signed=True)


def _mxfp4(block: BlockReader) -> Iterator[Group]:
    yield from _halves(block, 1, FP4_VALUES, block.half_power(block.byte(0)))


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of IQ4_NL and IQ4_XS, `kvalues_iq4nl`."""
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of FP4 (E2M1), `kvalues_mxfp4`."""


DECODERS: Mapping[str, Decode] = {
    "Q4_0": _nibbles(has_minimum=False, has_fifth=False),
    "Q4_1": _nibbles(has_minimum=True, has_fifth=False),
    "Q5_0": _nibbles(has_minimum=False, has_fifth=True),
    "Q5_1": _nibbles(has_minimum=True, has_fifth=True),
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": functools.partial(_q4_k, has_fifth=True),
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
}
"""The descriptions of blocks, by type."""
