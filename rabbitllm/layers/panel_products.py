"""When many rows are multiplied with a matrix of codes by panels, and how. Knows no modules.

On a Xeon with AVX-512, one thread, 5632 x 2048 at 4bit, milliseconds of the processor: 16 rows 7 by panels and 8 code
by code, 64 rows 22 and 36, 256 rows 88 and 163; dequantised and multiplied by torch 22, 45 and 92. With fewer than 6
rows code by code is sooner, and beyond 256 torch is.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from rabbitllm.layers import kernel_trial
from rabbitllm.layers.code_tables import table_of
from rabbitllm.layers.compression import BLOCKS, Quantised
from rabbitllm.layers.row_team import over_rows

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LEAST_INPUTS = 6
MOST_INPUTS = {16: 256, 8: 64}
"""Rows of input for which panels are the fastest way, by lanes."""
WORTH_A_THREAD = 1 << 14
"""Bytes of codes for each thread."""


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

    table = table_of(scheme, width, kernel_trial.meaning(scheme).numpy().tobytes())
    if table is None:
        return False

    def product(form: Quantised, codes: Any, scales: Any, values: Any, x: torch.Tensor) -> torch.Tensor:
        return times(width, scheme, (codes.data_ptr(), scales.data_ptr()), table.ctypes.data, x, form.shape[0])

    shapes = ((7, 5, 192), (13, 70, 4096))  # the last by several threads, in two parts a row
    off = kernel_trial.first_error(kernel_trial.of_codes(scheme, torch.float32, shapes, product))
    if off is not None:
        logger.warning("Products by panels at %s are off by %.1e here and are not used.", scheme, off)
    return off is None


@functools.cache
def _kernels() -> Any:
    """The module of the kernels, which takes a second to import."""
    from rabbitllm.layers import panel_kernels

    return panel_kernels
