"""4bit with scales fitted to their block, instead of its largest magnitude: the same codes, kernels, keys and sizes.

A few multiples of the largest magnitude of a block of 64 are tried, and the one with the least squared error is taken.
A smaller one clips the largest value and has finer steps for all others; and since the 16 values of NF4 are not
symmetrical, a negative one mirrors them. At 4bit-double, where scales are quantized less their mean, all are positive.

The rule, in float32: y = x * (1 / s); v is the NF4 value nearest to y after y is rounded to the nearest 1024th between
-1 and 1; the error is s * s * sum((y - v)**2), where the second half of the terms is added to the first until one is
left; of equal errors the first in the order of `MULTIPLES` wins. The code is the number of midpoints below y. So every
processor has the same result, with numba or, many times more slowly, without. Blocks of zeros, with values that are not
finite, or with magnitudes whose squares overflow or underflow, keep their largest magnitude as scale.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from rabbitllm.quant.compression.library import nf4_map
from rabbitllm.quant.compression.schemes import DOUBLE, NF4_BLOCK

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

POSITIVE = (0.78, 0.84, 0.9, 0.96, 1.02)
"""Multiples of the largest magnitude that are tried. Twice as many found 1 to 2 % less error."""
MULTIPLES = {"4bit": (*POSITIVE, *(-multiple for multiple in POSITIVE)), DOUBLE: POSITIVE}
"""Scheme -> multiples; at 4bit-double, scales of both signs lose more when they are quantized than they gain."""
STEPS = 1024
"""Steps from 0 to 1 to which y is rounded."""
SMALLEST, LARGEST = 1e-18, 1e18
"""Limits of a block's largest magnitude, between which squares neither overflow nor underflow."""
ZERO_CODE = 7
"""The code of NF4's value 0."""


def quantize_fitted(scheme: str, data: memoryview, dtype: str) -> tuple[memoryview, memoryview]:
    """Quantize a run of blocks; see `quantize.quantize_blocks`."""
    import numpy as np

    try:
        from rabbitllm.quant import cpu_kernels, fitted_kernels
    except ImportError:
        codes, scales = by_numpy(scheme, data, dtype)
    else:
        values: cpu_kernels.Values = (
            np.frombuffer(data, np.float32) if dtype == "F32" else np.frombuffer(data, np.uint16)
        )
        midpoints, nearest = _tables()
        multiples = np.array(MULTIPLES[scheme], np.float32)
        usual = np.array([SMALLEST, LARGEST], np.float32)
        codes, scales = fitted_kernels.quantize_fitted(
            values, cpu_kernels.KINDS[dtype], midpoints, nearest, multiples, usual, ZERO_CODE
        )
    return codes.data.cast("B"), scales.data.cast("B")


@functools.cache
def _tables() -> tuple[Floats, Floats]:
    """The midpoints between the NF4 values, and the value nearest to each 1024th from -1 to 1."""
    import numpy as np

    levels = np.frombuffer(nf4_map(), np.float32)
    midpoints = ((levels[1:] + levels[:-1]) / np.float32(2)).astype(np.float32)
    steps = np.arange(-STEPS, STEPS + 1, dtype=np.float32) / np.float32(STEPS)
    return midpoints, levels[np.searchsorted(midpoints, steps, side="left")]


def by_numpy(scheme: str, data: memoryview, dtype: str) -> tuple[npt.NDArray[np.uint8], Floats]:
    """The rule of the module's docstring in NumPy: two codes per byte, ((n + 1) // 2,), and one float32 per block."""
    import numpy as np
    import torch

    from rabbitllm.formats.tensor_spec import torch_dtype

    flat = torch.frombuffer(data, dtype=torch_dtype(dtype)).float().numpy()
    midpoints, nearest = _tables()
    values = np.zeros((-(-flat.size // NF4_BLOCK), NF4_BLOCK), np.float32)
    values.reshape(-1)[: flat.size] = flat
    largest = (values.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=1).view(np.float32)
    scales, least = largest.copy(), np.full(len(values), np.inf, np.float32)
    with np.errstate(all="ignore"):
        usual = (np.float32(SMALLEST) < largest) & (largest < np.float32(LARGEST))
        for multiple in MULTIPLES[scheme]:
            scale = np.where(usual, np.float32(multiple) * largest, np.float32(1))
            error = np.where(usual, _errors(values, scale, nearest), np.float32(np.inf))
            scales = np.where(error < least, scale, scales)
            least = np.minimum(error, least)
        ys = values * (np.float32(1) / scales)[:, None]
    ranks = np.where(scales[:, None] == 0, ZERO_CODE, (ys[..., None] > midpoints).sum(axis=-1)).astype(np.uint8)
    ranks.reshape(-1)[flat.size :] = ZERO_CODE
    pairs = ranks.reshape(-1, 2)
    codes = ((pairs[:, 0] << 4) | pairs[:, 1]).astype(np.uint8)
    return codes[: (flat.size + 1) // 2], scales.astype(np.float32)


def _errors(values: Floats, scale: Floats, nearest: Floats) -> Floats:
    import numpy as np

    ys = values * (np.float32(1) / scale)[:, None]
    places = (np.clip(ys, -1, 1) + np.float32(1)) * np.float32(STEPS) + np.float32(0.5)
    off = ys - nearest[np.where(np.isfinite(places), places, 0).astype(np.int32)]
    squares = off * off
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    found: Floats = scale * scale * squares[:, 0]
    return found
