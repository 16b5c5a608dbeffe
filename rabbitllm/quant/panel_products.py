"""Products of many rows with a quantized matrix by panels, and the numbers of rows for which panels are used.

On a Xeon with AVX-512, one thread, 5632 x 2048 at 4bit, milliseconds of the processor: 16 rows 7 by panels and 8 code
by code, 64 rows 22 and 36, 256 rows 88 and 163; dequantized and multiplied by torch 22, 45 and 92. Below 6 rows code by
code is faster, and above 256 torch is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rabbitllm.quant import kernel_trial
from rabbitllm.quant.code_tables import table_of
from rabbitllm.quant.compression import BLOCKS, Quantized
from rabbitllm.quant.row_team import over_rows

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LEAST_INPUTS = 6
MAX_INPUTS = {16: 256, 8: 64}
"""Rows of input for which panels are the fastest way, by lanes."""
WORTH_A_THREAD = 1 << 14
"""Bytes of codes per thread; larger matrices use more threads."""


def multiplies(scheme: str, width: int, count: int) -> bool:
    """Whether panels are the fastest way for `count` rows, with the kernel of `width` lanes."""
    return LEAST_INPUTS <= count <= MAX_INPUTS.get(width, 0) and _agrees(scheme, width)


class PanelInputs:
    """Rows (T, K) of any floating dtype, in the format of the kernel of `width` lanes; K is a multiple of 64."""

    def __init__(self, width: int, x: torch.Tensor) -> None:
        import torch

        count, self.columns = x.shape
        self.steps = self.columns // (2 * width)
        self._ready = torch.empty(count, self.steps, 2, width)  # in each step the even ones first
        self._ready.copy_(x.view(count, self.steps, width, 2).transpose(2, 3))

    def of(self, row: int) -> int:
        """The address of a row."""
        return self._ready.data_ptr() + row * self.columns * 4


Piece = tuple[tuple[int, int], int, int, int]
"""The addresses of a matrix's codes and scales; the address of the kernel's lookup table (see `code_tables.py`); the
begin and the end of the rows of inputs that it is multiplied with."""


def add_products(width: int, scheme: str, inputs: PanelInputs, work: Sequence[Piece], out: torch.Tensor) -> None:
    """Add to `out` each matrix's products with its rows, as one job for all threads.

    Args:
        width: lanes of the kernel.
        scheme: "4bit" or "8bit".
        inputs: (T, K).
        work: matrices (N, K) of one form.
        out: (T, N), float32.
    """
    import torch

    kernels, rows = _kernels(), out.shape[1]
    row_bytes = inputs.columns // (2 if scheme == "4bit" else 1)
    shift = (BLOCKS[scheme] // (2 * width)).bit_length() - 1
    given = [
        (*stored, table, inputs.of(begin), out.data_ptr() + begin * rows * 4)
        + (row_bytes, inputs.steps, shift, end - begin, rows)
        for stored, table, begin, end in work
    ]
    threads = min(torch.get_num_threads(), -(-rows * row_bytes * len(work) // WORTH_A_THREAD))
    over_rows(kernels.row_range(scheme, width), lambda: kernels.in_a_team(scheme, width), given, threads, kernels.ROWS)


def times(width: int, scheme: str, stored: tuple[int, int], table: int, x: torch.Tensor, rows: int) -> torch.Tensor:
    """`x @ W.T` from the codes, in float32: (T, K) of any floating dtype and (N, K) -> (T, N).

    Args:
        width, scheme: as for `add_products`.
        stored, table: see `Piece`.
        x: K is a multiple of 64.
        rows: N.
    """
    import torch

    out = torch.zeros(len(x), rows)
    add_products(width, scheme, PanelInputs(width, x), [(stored, table, 0, len(x))], out)
    return out


@functools.cache
def _agrees(scheme: str, width: int) -> bool:
    """Whether a kernel's result on a sample agrees with indexing and float32."""
    import torch

    table = table_of(scheme, width, kernel_trial.meaning(scheme).numpy().tobytes())
    if table is None:
        return False

    def product(form: Quantized, codes: Any, scales: Any, values: Any, x: torch.Tensor) -> torch.Tensor:
        return times(width, scheme, (codes.data_ptr(), scales.data_ptr()), table.ctypes.data, x, form.shape[0])

    shapes = ((7, 5, 192), (13, 70, 4096))  # the last by several threads, with two panels for each row
    off = kernel_trial.first_error(kernel_trial.of_codes(scheme, torch.float32, shapes, product))
    if off is not None:
        logger.warning("Products by panels at %s are off by %.1e here and are not used.", scheme, off)
    return off is None


@functools.cache
def _kernels() -> Any:
    """The module of the kernels, which takes a second to import."""
    from rabbitllm.quant import panel_kernels

    return panel_kernels
