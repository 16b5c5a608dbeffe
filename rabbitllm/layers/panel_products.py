"""When many rows are multiplied with a matrix of codes by panels, and how. Knows no modules.

On a Xeon with AVX-512, one thread, 5632 x 2048 at 4bit, milliseconds of the processor: 16 rows 7 by panels and 8 code
by code, 64 rows 22 and 36, 256 rows 88 and 163; dequantised and multiplied by torch 22, 45 and 92. With fewer than 6
rows code by code is sooner, and beyond 256 torch is.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from rabbitllm.layers.code_tables import table_of
from rabbitllm.layers.compression import BLOCKS
from rabbitllm.layers.row_team import over_rows

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LEAST_INPUTS = 6
MOST_INPUTS = {16: 256, 8: 64}
"""Rows of input for which panels are the fastest way, by lanes."""
WORTH_A_THREAD = 1 << 14
"""Bytes of codes for each thread."""
_TOLERANCE = 1e-5


def multiplies(scheme: str, width: int, count: int) -> bool:
    """Whether this is the way for so many rows, with a kernel of so many lanes."""
    return LEAST_INPUTS <= count <= MOST_INPUTS.get(width, 0) and _agrees(scheme, width)


def times(width: int, scheme: str, stored: tuple[int, int], table: int, x: torch.Tensor, rows: int) -> torch.Tensor:
    """`x @ W.T` from the codes, in float32.

    Args:
        width: lanes of the kernel.
        scheme: "4bit" or "8bit".
        stored: addresses of the codes and of their scales.
        table: address of what a kernel of so many lanes looks codes up in; see `code_tables.py`.
        x: (T, K) of any floating dtype, K a multiple of 64.
        rows: N.

    Returns:
        (T, N).
    """
    import torch

    kernels, (count, columns) = _kernels(), x.shape
    steps = columns // (2 * width)
    inputs = torch.empty(count, steps, 2, width)  # of each step the even ones first
    inputs.copy_(x.view(count, steps, width, 2).transpose(2, 3))
    out = torch.zeros(count, rows)
    row_bytes = columns // (2 if scheme == "4bit" else 1)
    shift = (BLOCKS[scheme] // (2 * width)).bit_length() - 1
    given = (*stored, table, inputs.data_ptr(), out.data_ptr(), row_bytes, steps, shift, count, rows)
    threads = min(torch.get_num_threads(), -(-rows * row_bytes // WORTH_A_THREAD))
    over_rows(
        kernels.row_range(scheme, width), lambda: kernels.in_a_team(scheme, width), [given], threads, kernels.ROWS
    )
    return out


@functools.cache
def _agrees(scheme: str, width: int) -> bool:
    """Whether a kernel gives on a sample what indexing and float32 do."""
    import torch

    generator = torch.Generator().manual_seed(0)
    meaning = torch.linspace(-1, 1, 16) if scheme == "4bit" else _meaning_of_bytes()
    table = table_of(scheme, width, meaning.numpy().tobytes())
    if table is None:
        return False
    for count, rows, columns in ((7, 5, 192), (13, 70, 4096)):  # the last by several threads, in two parts a row
        payload = torch.randint(0, 256, (rows * columns // (2 if scheme == "4bit" else 1),), dtype=torch.uint8)
        absmax = torch.rand(-(-rows * columns // BLOCKS[scheme]), generator=generator)
        x = torch.randn(count, columns, generator=generator)
        codes = torch.stack([payload >> 4, payload & 15], -1).view(-1) if scheme == "4bit" else payload
        values = meaning[codes.long()] * absmax.repeat_interleave(BLOCKS[scheme])[: rows * columns]
        expected = x @ values.view(rows, columns).T
        got = times(width, scheme, (payload.data_ptr(), absmax.data_ptr()), table.ctypes.data, x, rows)
        error = (got - expected).norm() / expected.norm()
        if not error < _TOLERANCE:
            logger.warning("Products by panels at %s are off by %.1e here and are not used.", scheme, float(error))
            return False
    return True


def _meaning_of_bytes() -> torch.Tensor:
    """The code of 8bit, whose ramps the kernel knows."""
    from rabbitllm.layers.compression import code_values

    return code_values("8bit")


@functools.cache
def _kernels() -> Any:
    """The module of the kernels, which takes a second to import."""
    from rabbitllm.layers import panel_kernels

    return panel_kernels
