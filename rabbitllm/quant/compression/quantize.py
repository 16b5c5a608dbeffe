"""Quantizes runs of blocks, by our own kernels, whose results equal those of bitsandbytes, or by bitsandbytes itself.

Blocks are independent, so a tensor of any size is processed in chunks of whole blocks.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from rabbitllm.formats.tensor_spec import torch_dtype
from rabbitllm.quant.compression.fitting import quantize_fitted
from rabbitllm.quant.compression.library import functional, int8_code, int8_table, nf4_map
from rabbitllm.quant.compression.schemes import CODES, INT8_BLOCK, NF4_BLOCK

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def quantize_blocks(
    scheme: str, data: memoryview, dtype: str, device: str, *, fitted: bool = False
) -> tuple[memoryview, memoryview]:
    """Quantize a run of blocks.

    Args:
        scheme: one of `BLOCKS`.
        data: the elements' bytes; a whole number of blocks, unless it is the tensor's end.
        dtype: F32, F16 or BF16.
        device: the device that computes, "cpu" or "cuda:N".
        fitted: fit 4bit scales to their block, always on the CPU (`fitting.py`).

    Returns:
        The payload (uint8: two elements per byte at 4bit, one at 8bit) and the scales (float32, one per block), as
        bytes; at 4bit-double the scales are not quantized yet (`nested.py`).
    """
    if fitted and CODES[scheme] == "4bit":
        return quantize_fitted(scheme, data, dtype)
    scheme = CODES[scheme]
    if device == "cpu" and _compiled_kernels_agree(scheme):
        return _quantize_compiled(scheme, data, dtype)
    return _quantize_with_bitsandbytes(scheme, data, dtype, device)


def _quantize_with_bitsandbytes(
    scheme: str, data: memoryview, dtype: str, device: str
) -> tuple[memoryview, memoryview]:
    import torch

    values = torch.frombuffer(data, dtype=torch_dtype(dtype)).to(device)
    if scheme == "4bit":
        codes, state = functional().quantize_4bit(values, blocksize=NF4_BLOCK, quant_type="nf4")
    else:
        codes, state = functional().quantize_blockwise(values, int8_table(values.device), blocksize=INT8_BLOCK)
    return _bytes_of(codes), _bytes_of(state.absmax)


def _quantize_compiled(scheme: str, data: memoryview, dtype: str) -> tuple[memoryview, memoryview]:
    import numpy as np

    from rabbitllm.quant import cpu_kernels

    values: cpu_kernels.Values = np.frombuffer(data, np.float32) if dtype == "F32" else np.frombuffer(data, np.uint16)
    quantize = cpu_kernels.quantize_nf4 if scheme == "4bit" else cpu_kernels.quantize_int8
    levels = np.frombuffer(nf4_map() if scheme == "4bit" else int8_code(), np.float32)
    codes, scales = quantize(values, cpu_kernels.KINDS[dtype], levels)
    return codes.data.cast("B"), scales.data.cast("B")


@functools.cache
def _compiled_kernels_agree(scheme: str) -> bool:
    """Whether our compiled kernels are available and agree with the installed bitsandbytes on a sample.

    Another version of it, or another processor (its ARM path rounds differently), may follow other rules.
    """
    import torch

    try:
        import numba  # noqa: F401
    except ImportError:
        logger.info("numba is not installed; bitsandbytes quantizes, at a fraction of the speed.")
        return False
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(8 * INT8_BLOCK + 33, generator=generator) * 0.02
    sample[:NF4_BLOCK] = 0
    for dtype in ("BF16", "F16", "F32"):
        data = _bytes_of(sample.to(torch_dtype(dtype)).view(torch.uint8))
        if _quantize_compiled(scheme, data, dtype) != _quantize_with_bitsandbytes(scheme, data, dtype, "cpu"):
            logger.warning("This bitsandbytes quantizes to %s otherwise than our kernels; it is used instead.", scheme)
            return False
    return True


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.cpu().contiguous().view(-1).numpy().data.cast("B")
