"""The usual types of ggml's blocks as tables, from which torch, kernels and encoders have the places of all bits.

Formats: https://github.com/ggml-org/ggml, `src/ggml-common.h` and `src/ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Plane(NamedTuple):
    """Some bits of all codes.

    Attributes:
        offset: of the first byte in the block.
        first: the first of these bits in a code.
        bits: how many; 8 are two's complement.
        run: a byte has those of elements that are 16 * run apart, the first in its lowest bits; if run is 0, those of
            consecutive elements.
    """

    offset: int
    first: int
    bits: int
    run: int

    def at(self, element: int) -> tuple[int, int]:
        """The byte that has the bits of an element, and which of its bits is their first."""
        run = 16 * self.run or 1
        high, low = divmod(element, run * 8 // self.bits)
        return self.offset + run * high + low % run, self.bits * (low // run)


class Field(NamedTuple):
    """Some bits of a number: in the byte at `offset` those from `shift` on, in the number those from `first` on."""

    offset: int
    shift: int
    bits: int
    first: int = 0


Fields = tuple[tuple[Field, ...], ...]
"""Of each number one or two."""


@dataclass(frozen=True)
class BlockFormat:
    """A type of blocks. An element is code * scale - minimum, multiplied and subtracted in float32.

    Attributes:
        group: elements that share a scale.
        planes: of the codes.
        halves: offsets of the block's scale and minimum, float16; none if byte 0 is e of the scale 2 ** (e - 128).
        least: the code that is stored as 0.
        values: the values of the codes, if these are indices.
        factors, least_factor: the fields of what the scale of each group is multiplied by, 8 bits in two's complement,
            and the factor that is stored as 0; no fields if a block is one group.
        minima: the fields of what the block's minimum is multiplied by; without them a minimum is added.
    """

    group: int
    planes: Sequence[Plane]
    halves: Sequence[int]
    least: int = 0
    values: tuple[int, ...] | None = None
    factors: Fields = ()
    least_factor: int = 0
    minima: Fields = ()

    @property
    def run(self) -> int:
        """Consecutive elements, 16 or 32, whose bits are in consecutive bytes of all planes, or in consecutive bits."""
        return 16 * min(plane.run for plane in self.planes if plane.run)


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of IQ4_NL and IQ4_XS, `kvalues_iq4nl`."""
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of FP4 (E2M1), `kvalues_mxfp4`."""

_FOUR_BITS, _TWO_BITS = (Plane(16, 0, bits, 2) for bits in (4, 2))
_SIX_BITS, _SIX_BIT_MINIMA = (
    tuple((Field(4 + at + g, 0, 6),) for g in range(4))
    + tuple((Field(8 + g, at, 4), Field(at + g, 6, 2, 4)) for g in range(4, 8))
    for at in (0, 4)
)
_OF_Q3_K = tuple((Field(96 + g % 8, g // 8 * 4, 4), Field(104 + g % 4, g // 4 * 2, 2, 4)) for g in range(16))
_OF_IQ4_XS = tuple((Field(4 + g // 2, g % 2 * 4, 4), Field(2 + g // 4, g % 4 * 2, 2, 4)) for g in range(8))
_LOW, _HIGH, _BYTES = (
    tuple((Field(first + g, shift, bits),) for g in range(16))
    for first, shift, bits in ((0, 0, 4), (0, 4, 4), (192, 0, 8))
)
FORMATS: Mapping[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, [Plane(2, 0, 4, 1)], [0], -8),
    "Q4_1": BlockFormat(32, [Plane(4, 0, 4, 1)], [0, 2]),
    "Q5_0": BlockFormat(32, [Plane(6, 0, 4, 1), Plane(2, 4, 1, 0)], [0], -16),
    "Q5_1": BlockFormat(32, [Plane(8, 0, 4, 1), Plane(4, 4, 1, 0)], [0, 2]),
    "Q8_0": BlockFormat(32, [Plane(2, 0, 8, 2)], [0]),
    "Q2_K": BlockFormat(16, [_TWO_BITS], [80, 82], factors=_LOW, minima=_HIGH),
    "Q3_K": BlockFormat(16, [Plane(32, 0, 2, 2), Plane(0, 2, 1, 2)], [108], -4, factors=_OF_Q3_K, least_factor=-32),
    "Q4_K": BlockFormat(32, [_FOUR_BITS], [0, 2], factors=_SIX_BITS, minima=_SIX_BIT_MINIMA),
    "Q5_K": BlockFormat(
        32, [Plane(48, 0, 4, 2), Plane(16, 4, 1, 2)], [0, 2], factors=_SIX_BITS, minima=_SIX_BIT_MINIMA
    ),
    "Q6_K": BlockFormat(16, [Plane(0, 0, 4, 4), Plane(128, 4, 2, 2)], [208], -32, factors=_BYTES),
    "IQ4_NL": BlockFormat(32, [Plane(2, 0, 4, 1)], [0], values=IQ4_VALUES),
    "IQ4_XS": BlockFormat(32, [Plane(8, 0, 4, 1)], [0], values=IQ4_VALUES, factors=_OF_IQ4_XS, least_factor=-32),
    "TQ2_0": BlockFormat(256, [Plane(0, 0, 2, 2)], [64], -1),
    "MXFP4": BlockFormat(32, [Plane(1, 0, 4, 1)], [], values=FP4_VALUES),
}
"""By type."""
