"""Products with a matrix that is stored at 4bit or 8bit, on the CPU, without making the matrix.

For few inputs each code is looked up and multiplied on the spot (`packed_kernels.py`): a token then reads a quarter of
the bytes that bfloat16 takes. For many inputs at once, as in a prompt, looking up costs more than it saves, and a few
rows at a time are dequantised into memory that stays in the cache, and multiplied by torch.

What is multiplied is code value times scale in float32, which the dequantised matrix is the rounding of. Knows no
modules.
"""

from __future__ import annotations

import functools
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from rabbitllm.layers.compression import BLOCKS, Quantised, dequantise

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MOST_INPUTS = 16
"""Rows of input from which on dequantising is the faster way (2 cores of an AMD EPYC with AVX-512)."""
CHUNK_ELEMENTS = 1 << 21
"""Elements that are dequantised at a time: 4 MiB of bfloat16."""
WORTH_A_THREAD = 1 << 18
"""Bytes of codes for each thread; handing over takes as long as one needs for as many."""
_TOLERANCE = 1e-5


def multiplies(form: Quantised) -> bool:
    """Whether there is a kernel for this matrix on this machine: 2-D, of rows that are whole segments."""
    if len(form.shape) != 2 or not all(form.shape) or form.shape[1] % 64:
        return False
    return _kernel_agrees(form.scheme)


def linear(
    x: torch.Tensor,
    form: Quantised,
    payload: torch.Tensor,
    absmax: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """`x @ W.T + bias` of a stored matrix W, (N, K), for which `multiplies` is true.

    Args:
        x: (..., K), of a floating dtype.
        form: of W.
        payload: uint8 codes.
        absmax: float32, one a block.
        table: float32, what each code means.
        bias: (N,) or None.

    Returns:
        (..., N) of x's dtype; sums are kept in float32 for up to `MOST_INPUTS` inputs.
    """
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] <= MOST_INPUTS:
        result = _from_codes(flat, form, payload, absmax, table)
        if bias is not None:
            result += bias
        result = result.to(x.dtype)
    else:
        result = _in_chunks(flat, form, payload, absmax, table, bias)
    return result.view(*x.shape[:-1], form.shape[0])


def _from_codes(
    x: torch.Tensor, form: Quantised, payload: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    import torch

    from rabbitllm.layers import packed_kernels

    rows, columns = form.shape
    pairs = x.float().reshape(len(x), columns // 2, 2)
    even, odd = (pairs[..., half].contiguous() for half in (0, 1))
    values = packed_kernels.table_of(form.scheme, table.numpy().tobytes())
    out = torch.empty(len(x), rows)
    row_bytes = columns // (2 if form.scheme == "4bit" else 1)
    shift = (BLOCKS[form.scheme] // packed_kernels.SEGMENT).bit_length() - 1
    walk = packed_kernels.row_range(form.scheme, packed_kernels.lanes(form.scheme))
    run = functools.partial(
        walk,
        *(tensor.data_ptr() for tensor in (payload, absmax, even, odd)),
        values.ctypes.data,
        out.data_ptr(),
        row_bytes,
        columns // packed_kernels.SEGMENT,
        shift,
        len(x),
        rows,
    )
    threads = min(torch.get_num_threads(), -(-rows * row_bytes // WORTH_A_THREAD))
    share = -(-rows // threads // packed_kernels.ROWS) * packed_kernels.ROWS
    others = [_threads().submit(run, begin, min(begin + share, rows)) for begin in range(share, rows, share)]
    run(0, min(share, rows))
    for other in others:
        other.result()
    return out


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(64, thread_name_prefix="product")  # as many as are asked of it, made when they are


def _in_chunks(
    x: torch.Tensor,
    form: Quantised,
    payload: torch.Tensor,
    absmax: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    import torch

    rows, columns = form.shape
    block = BLOCKS[form.scheme]
    step = block // math.gcd(block, columns)  # rows that are whole blocks
    step *= max(CHUNK_ELEMENTS // columns // step, 1)
    out = x.new_empty(len(x), rows)
    codes = payload.view(rows, -1)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        scales = absmax.view(-1)[begin * columns // block : -(-end * columns // block)]
        few = replace(form, shape=(end - begin, columns))
        part = dequantise(few, codes[begin:end].reshape(-1, 1), scales, table, x.dtype)
        out[:, begin:end] = torch.nn.functional.linear(x, part, None if bias is None else bias[begin:end])
    return out


@functools.cache
def _kernel_agrees(scheme: str) -> bool:
    """Whether this machine has a kernel, and it gives on a sample what dequantising does."""
    import torch

    try:
        from rabbitllm.layers import packed_kernels
    except ImportError:
        logger.info("numba is not installed; compressed layers are dequantised for each use.")
        return False
    if not packed_kernels.lanes(scheme):
        return False
    generator = torch.Generator().manual_seed(0)
    count = 16 if scheme == "4bit" else 256
    for inputs, rows, columns in ((1, 7, 192), (6, 5, 4096)):
        blocks = -(-rows * columns // BLOCKS[scheme])
        nbytes = rows * columns // (2 if scheme == "4bit" else 1)
        payload = torch.randint(0, 256, (nbytes, 1), dtype=torch.uint8, generator=generator)
        table = torch.linspace(-1, 1, count)
        absmax = torch.rand(blocks, generator=generator)
        x = torch.randn(inputs, columns, generator=generator)
        form = Quantised(scheme, (rows, columns), "float32")
        codes = torch.stack([payload >> 4, payload & 15], -1) if scheme == "4bit" else payload
        values = table[codes.long().view(-1)]
        scales = absmax.repeat_interleave(BLOCKS[scheme])[: rows * columns]
        expected = x @ (values * scales).view(rows, columns).T
        error = (_from_codes(x, form, payload, absmax, table) - expected).norm() / expected.norm()
        if not error < _TOLERANCE:
            logger.warning("The kernel for products at %s is off by %.1e here and is not used.", scheme, float(error))
            return False
    return True
