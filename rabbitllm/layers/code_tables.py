"""What the codes of 4bit and 8bit mean, laid out as the kernels look it up. Knows no kernels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

PAIRS = 32
"""Stands for the number of lanes of a kernel that multiplies pairs of bfloat16."""


@functools.cache
def table_of(scheme: str, width: int, levels: bytes) -> npt.NDArray[Any]:
    """The table as the kernels want it, from the float32 values that the codes mean.

    For `PAIRS` that is bfloat16 of the values times a factor (16 values twice, so that a fifth bit of an index makes no
    difference), and behind them, in float32, what to multiply sums with.
    """
    values = np.frombuffer(levels, np.float32)
    words = values.view(np.uint32)
    if width == PAIRS:
        # of 256 factors between 1 and 2, the one that leaves the least error: two thirds of it for NF4, half for 8bit
        factors = 1 + np.arange(256, dtype=np.float32) / 256
        errors = [np.square(_nearest_bfloat16(values * factor) / factor - values).sum() for factor in factors]
        factor = factors[int(np.argmin(errors))]
        halves = (_nearest_bfloat16(values * factor).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        back = np.array([1 / factor], np.float32).view(np.uint16)
        return np.concatenate([halves, halves, back] if scheme == "4bit" else [halves, back])
    if scheme == "4bit":
        return values.copy()
    return np.concatenate([(words >> np.uint32(16)).astype(np.uint16), words.astype(np.uint16)])


def _nearest_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """To bfloat16, the nearest, ties to even."""
    words = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((words + 0x7FFF + ((words >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
