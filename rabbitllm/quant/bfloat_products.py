"""Products of rows with a matrix of bfloat16, where torch's are slow.

Without instructions for bfloat16, torch multiplies input by input: 16 rows took six times as long as one. With them it
reads a matrix for one row at two thirds of the memory's speed (see docs/PERFORMANCE.md). Sums are in float32 and
rounded once, as torch's are, but in another order: last bits differ. A row of the result is the same bit for bit alone
and among others, up to `MAX_INPUTS` rows.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rabbitllm.quant import _kernels
from rabbitllm.quant._kernel_interface import BFLOAT16, CODES

if TYPE_CHECKING:
    import torch

MAX_INPUTS = 512
"""Maximum rows for the kernel; for more, it is faster to widen parts of the matrix and multiply them by torch."""
FEW_ROWS = 4
"""Maximum rows for the kernel on a processor with AVX512-BF16. In a pass of an EPYC one row took 0.6 to 0.8 of torch's
time, 2 to 4 rows 0.95, 8 rows 1.06."""
ALL_ROWS = sys.maxsize
CHUNK_ELEMENTS = 1 << 22
"""Elements that are widened at a time: 16 MiB of float32. With smaller parts torch's threads synchronise more often,
which is slow on a busy machine: 256 rows by parts of 4 MiB took three times as long there as by the kernel."""


def multiplies(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` is faster than torch for such inputs (…, K) and such a matrix (N, K).

    Both have to be bfloat16 and on the CPU, with K a multiple of the kernel's width, and the rows at most `max_rows`.
    """
    import torch

    limit = max_rows()
    if (
        not limit
        or weight.dtype != torch.bfloat16
        or x.dtype != torch.bfloat16
        or type(weight) not in (torch.Tensor, torch.nn.Parameter)
    ):
        return False
    if weight.dim() != 2 or weight.device.type != "cpu" or x.device.type != "cpu" or not weight.is_contiguous():
        return False
    from rabbitllm.quant import _vectors

    return not weight.shape[1] % (2 * _vectors.lanes()) and weight.numel() > 0 and x.shape[:-1].numel() <= limit


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ W.T + bias`, for which `multiplies` holds.

    Args:
        x: (..., K), bfloat16.
        weight: (N, K), bfloat16.
        bias: (N,) or None.

    Returns:
        (..., N), bfloat16.
    """
    from rabbitllm.quant import _vectors

    flat = x.reshape(-1, x.shape[-1])
    result = times(_vectors.lanes(), flat, weight) if len(flat) <= MAX_INPUTS else _in_chunks(flat, weight)
    if bias is not None:
        result += bias
    return result.to(x.dtype).view(*x.shape[:-1], len(weight))


def times(width: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ W.T` by the kernel of `width` lanes: (T, K) and (N, K) -> (T, N), float32."""
    import torch

    (count, columns), rows = x.shape, len(weight)
    out = torch.empty(count, rows)
    if count:
        inputs, steps = _kernels.interleaved(width, x), columns // (2 * width)
        arguments = (weight.data_ptr(), 0, inputs.data_ptr(), 0, 0, out.data_ptr(), 2 * columns, steps, 0, count, rows)
        _kernels.run(CODES, BFLOAT16, width, [arguments], 2 * weight.numel())
    return out


def _in_chunks(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same by torch, with parts of the matrix that are widened one after the other."""
    import torch

    wide, (rows, columns) = x.float(), weight.shape
    out = torch.empty(len(x), rows)
    step = max(CHUNK_ELEMENTS // columns, 1)
    for begin in range(0, rows, step):
        part = weight[begin : begin + step].float()
        out[:, begin : begin + step] = wide @ part.T
    return out


@functools.cache
def max_rows() -> int:
    """Rows up to which the kernel is faster than torch here; 0 if none are, or if its result is wrong.

    With AMX nothing was measured, so torch's products are used.
    """
    from rabbitllm.quant import _vectors

    width = _vectors.lanes()
    if not width or "amx-bf16" in _vectors.features() or not _agrees(width):
        return 0
    return FEW_ROWS if _vectors.multiplies_pairs() else ALL_ROWS


def widens() -> bool:
    """Whether many rows are multiplied faster here once they and the matrix are float32."""
    return max_rows() == ALL_ROWS


def _agrees(width: int) -> bool:
    """Whether a kernel's result on a sample agrees with float32."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def products() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for count, rows, columns in ((1, 7, 64), (6, 5, 2048), (5, 70, 1024)):  # the last by several threads
            x, weight = (torch.randn(size, columns, generator=generator).bfloat16() for size in (count, rows))
            yield times(width, x, weight), x.float() @ weight.float().T

    return _kernels.agrees("of bfloat16", products())
