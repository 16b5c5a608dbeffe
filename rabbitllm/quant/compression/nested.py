"""Quantization and dequantization of 4bit scales: bitsandbytes' `compress_statistics`.

All scales of a tensor less their mean are quantized in blocks of 256 by the 256 values of 8bit. The mean is summed in
the order in which torch (2.13) sums as many float32 on x86-64 in one thread: 32 parallel sums, of rows, of groups of
rows, of groups of groups and of groups of those. With several threads and more than 32,768 scales, torch sums the share
of each thread, so the last bit of the mean depends on the number of threads; a layer file must not.

A tensor of any size is processed in runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from rabbitllm.quant.compression.forms import Settling
from rabbitllm.quant.compression.library import functional, int8_table
from rabbitllm.quant.compression.schemes import NESTED_BLOCK, NF4_BLOCK, SCALE_BYTES
from rabbitllm.quant.compression.states import Quantized, nested_state

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Scales: TypeAlias = npt.NDArray[np.float32]
    ReadScales: TypeAlias = Callable[[int, int], Scales]
    """Index of the first scale, number of scales -> the scales, float32."""

LANES = 8
"""Lanes of a vector of AVX2, with which torch sums also on processors with AVX-512."""
SUMS = 4 * LANES
"""Parallel sums: four vectors."""
LEVELS = 4
"""Levels of sums: rows, groups of rows, groups of groups, and groups of those."""
LEAST_GROUP = 16


def settled(form: Settling, read: ReadScales) -> Iterator[tuple[int, int, memoryview]]:
    """The stored bytes of a tensor's scales: (index in `form.parts`, offset in that part, bytes).

    Reads the scales twice, one to four megabytes at a time.
    """
    import numpy as np
    import torch

    count = form.source.elements
    offset = mean_of(read, count)
    for first, length in _runs(count):
        with np.errstate(invalid="ignore"):  # for infinite weights
            values = torch.from_numpy(read(first, length) - offset)
        codes, state = functional().quantize_blockwise(values, int8_table(values.device), blocksize=NESTED_BLOCK)
        yield 0, first, codes.numpy().data.cast("B")
        yield 1, first // NESTED_BLOCK * SCALE_BYTES, state.absmax.numpy().data.cast("B")
    yield 2, 0, memoryview(nested_state(form.of.dtype, form.of.shape, float(offset)))


def mean_of(read: ReadScales, count: int) -> np.float32:
    """The mean of `count` scales, at least 8, equal to torch's bit for bit."""
    import numpy as np

    group, above = _group(count), np.zeros(SUMS, np.float32)
    for first, length in _runs(count):
        run = read(first, length)
        rows = length // SUMS
        items = run[: rows * SUMS].reshape(rows, SUMS)
        total = np.zeros(SUMS, np.float32)
        for _ in range(LEVELS - 1):
            whole = len(items) // group * group
            total = total + np.add.reduce(items[whole:], axis=0)
            items = np.add.reduce(items[:whole].reshape(-1, group, SUMS), axis=1)
        above = _one_by_one(items, above)
    total = total + above  # the levels below are those of the last run: all others are whole groups
    vectors = length // LANES * LANES
    first_lanes = _one_by_one(run[rows * SUMS : vectors].reshape(-1, LANES), total[:LANES])
    lanes = _one_by_one(total[LANES:].reshape(-1, LANES), first_lanes)
    added = _one_by_one(lanes, _one_by_one(run[vectors:], np.zeros((), np.float32)))
    return np.float32(added / np.float32(count))


def _group(count: int) -> int:
    rows = count // SUMS
    ceil_log2 = (rows - 1).bit_length() if rows > 2 else 1
    return max(LEAST_GROUP, 1 << ceil_log2 // LEVELS)


def _runs(count: int) -> Iterator[tuple[int, int]]:
    """First index and length of runs; all but the last are whole groups of groups of groups of rows."""
    step = _group(count) ** (LEVELS - 1) * SUMS
    for first in range(0, count, step):
        yield first, min(step, count - first)


def _one_by_one(items: Scales, begin: Scales) -> Scales:
    """`begin` plus the first item, plus the second, and so on."""
    for item in items:
        begin = begin + item
    return begin


def expanded_bytes(form: Quantized) -> int:
    """Bytes of a tensor's dequantized scales, float32; 0 if its scales are not quantized."""
    if form.offset is None:
        return 0
    return math.ceil(math.prod(form.shape) / NF4_BLOCK) * SCALE_BYTES


def expand_scales(codes: torch.Tensor, nested: torch.Tensor, table: torch.Tensor, offset: float) -> torch.Tensor:
    """Dequantize quantized scales; the result equals bitsandbytes' bit for bit.

    Args:
        codes: uint8 (blocks,); all of a tensor's, or a run that begins with a block of 256; on any device.
        nested: float32, the scales of these blocks.
        table: float32 (256,).
        offset: the mean of all scales.

    Returns:
        float32 (blocks,), a new tensor.
    """
    import torch

    state = functional().QuantState(absmax=nested, code=table, blocksize=NESTED_BLOCK, dtype=torch.float32)
    made: torch.Tensor = functional().dequantize_blockwise(codes, state)
    return made.add_(offset)


def scales_at(
    codes: torch.Tensor, nested: torch.Tensor, table: torch.Tensor, offset: float, within: torch.Tensor
) -> torch.Tensor:
    """The same for any codes: `within` is the index of each one's block of 256, int64 of their shape."""
    made: torch.Tensor = table[codes.long()] * nested[within]
    return made.add_(offset)
