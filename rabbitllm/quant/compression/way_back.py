"""Dequantization of a tensor, and products with it, from its quantized parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant.compression.library import bitsandbytes, functional
from rabbitllm.quant.compression.nested import expand_scales
from rabbitllm.quant.compression.schemes import INT8_BLOCK, NF4_BLOCK
from rabbitllm.quant.compression.states import Quantized

if TYPE_CHECKING:
    import torch


def operands(
    form: Quantized, parts: Sequence[TensorSpec], read: Callable[[TensorSpec], torch.Tensor]
) -> tuple[Quantized, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands of kernels for a stored tensor: its form, codes, float32 scales and code table.

    Quantized scales are dequantized to n / 64 float32, on the device of the parts; the others are returned as read.

    Args:
        form: from `read_state`.
        parts: in the order of `part_names`.
        read: a part -> its tensor.
    """
    payload, absmax, table = map(read, parts[:3])
    if form.offset is not None:
        absmax = expand_scales(absmax, read(parts[3]), read(parts[4]), form.offset)
    return form.codes, payload, absmax, table


def dequantize(
    form: Quantized, payload: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The dequantized tensor, on the device of its parts.

    Args:
        form: from `read_state`; at 4bit-double from `operands`.
        payload: uint8 codes.
        absmax: float32, one per block.
        table: float32, the value of each code.
        dtype: of the result. At 4bit bitsandbytes dequantizes to the dtype stored with the tensor, and the result is
            cast; at 8bit no dtype is stored, and it dequantizes to `dtype` directly.

    Returns:
        A new tensor of shape `form.shape`.
    """
    assert form.offset is None
    if form.scheme == "4bit":
        whole = replace(form, shape=_in_whole_blocks(form.shape))
        result: torch.Tensor = functional().dequantize_4bit(payload, _nf4_quant_state(whole, absmax, table))
    else:
        state = functional().QuantState(absmax=absmax, code=table, blocksize=INT8_BLOCK, dtype=dtype)
        result = functional().dequantize_blockwise(payload, state)
    return result.to(dtype).view(form.shape)


def _in_whole_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with the same number of elements whose rows are whole blocks, if possible; else one row.

    bitsandbytes' kernel for the CPU (0.50) begins a block with each row, even if the stored blocks cross rows: with
    rows of 80 elements, all but the first would get wrong scales.
    """
    if shape and shape[-1] % NF4_BLOCK == 0:
        return shape
    elements = math.prod(shape)
    return (elements // NF4_BLOCK, NF4_BLOCK) if elements % NF4_BLOCK == 0 else (elements,)


def multiply_4bit(
    form: Quantized, payload: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """`x @ W.T` by bitsandbytes, from the codes if it has a kernel for the device; else it dequantizes.

    `matmul_4bit` is called instead of `gemv_4bit`, which on some CPUs expects the codes in another order.

    Args:
        form: (N, K) at 4bit, K a multiple of 64.
        payload, absmax, table: as for `dequantize`.
        x: (1, K), contiguous, of a floating dtype.

    Returns:
        (1, N), of x's dtype; rounded differently from a product with the dequantized matrix.
    """
    state = _nf4_quant_state(form, absmax, table)
    product: torch.Tensor = bitsandbytes().matmul_4bit(x, payload.view(-1, 1).t(), quant_state=state)
    return product


def _nf4_quant_state(form: Quantized, absmax: torch.Tensor, table: torch.Tensor) -> Any:
    import torch

    assert form.dtype is not None
    return functional().QuantState(
        absmax=absmax,
        shape=torch.Size(form.shape),
        dtype=getattr(torch, form.dtype),
        blocksize=NF4_BLOCK,
        code=table,
        quant_type="nf4",
    )
