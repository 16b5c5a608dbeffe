"""The values of 4bit and 8bit codes, as lookup tables for the kernels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

PAIRS = 32
"""Value of `width` for kernels that multiply pairs of bfloat16."""
ZERO_CODE = 127
"""The 8bit code of 0: lower codes are negative values, higher codes positive ones."""
RAMP_BYTES = 64
"""Bytes of the slopes of ramps, and of their starts: 8 float32, twice, since AVX-512 uses four bits of an index."""
RAMP_STEP = 4
"""The difference in distance from zero of two adjacent codes."""
_RAMP_ERROR = 5e-7
"""Maximum relative error of a value: three or four roundings of float32."""


@functools.cache
def table_of(scheme: str, width: int, levels: bytes) -> npt.NDArray[Any] | None:
    """The table in the kernels' format, from the float32 values of the codes; None if these do not fit the format.

    For `PAIRS` it has the values times a factor, in bfloat16 (16 values twice, so that a fifth bit of an index makes no
    difference), and after them the inverse of the factor, in float32, to multiply sums with. Otherwise it has the
    values for 4bit, and the slopes and starts of ramps, float32 (32,), for 8bit.
    """
    values = np.frombuffer(levels, np.float32)
    if width == PAIRS:
        # of 256 factors between 1 and 2, the one with the least error: two thirds of it for NF4, half for 8bit
        factors = 1 + np.arange(256, dtype=np.float32) / 256
        errors = [np.square(_nearest_bfloat16(values * factor) / factor - values).sum() for factor in factors]
        factor = factors[int(np.argmin(errors))]
        halves = (_nearest_bfloat16(values * factor).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        back = np.array([1 / factor], np.float32).view(np.uint16)
        return np.concatenate([halves, halves, back] if scheme == "4bit" else [halves, back])
    if scheme == "4bit":
        return values.copy()
    return _ramps(values)


def _ramps(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
    """256 values as straight lines; None if they do not lie on lines.

    A dynamic map (T. Dettmers, "8-bit Approximations for Parallelism in Deep Learning", 2015, and bitsandbytes'
    `create_dynamic_map`) has on each side of zero, from distance 2**e to 2**(e + 1), evenly spaced values. So the
    exponent of the distance is the index of the line. Distances are multiplied by four: then 0, whose exponent in
    float32 is 0, has the same lower three bits of the exponent as 128 alone, which has no other value on its line; one
    line through both serves.
    """
    if not np.isfinite(values).all():
        return None
    side = np.arange(256) - ZERO_CODE
    distance = (RAMP_STEP * np.abs(side)).astype(np.float32)
    ramp = distance.view(np.uint32) >> np.uint32(23) & np.uint32(7)
    slopes, starts = np.zeros((2, 8), np.float32)
    for number in range(8):
        own = np.flatnonzero((ramp == number) & (side >= 0))
        first, last = own[0], own[-1]
        if last > first:
            slopes[number] = (values[last] - values[first]) / (distance[last] - distance[first])
        starts[number] = values[first] - np.float64(slopes[number]) * distance[first]  # where values are smallest
    meant = np.copysign(slopes[ramp].astype(np.float64) * distance + starts[ramp], side)
    if (np.abs(meant - values) > _RAMP_ERROR * np.abs(values)).any():
        return None
    return np.concatenate([slopes, slopes, starts, starts])


def _nearest_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The nearest bfloat16 values, as float32; ties to even."""
    words = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((words + 0x7FFF + ((words >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
