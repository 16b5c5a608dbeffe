"""transformers' operations that dequantize FP8 and MXFP4, by compiled kernels if the codes are on the CPU.

The result is the same bit for bit, in a fraction of the time, and without float32 or index tensors as large as the
matrix. On other devices, and for formats without a kernel, transformers' own operations are used.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers.integrations import mxfp4
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import Mxfp4Dequantize

from rabbitllm.quant import published_kernels as kernels

_BITS = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32}
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_CPU = torch.device("cpu")
"""The CPU without an index; a test's stand-in for another device has an index."""


class QuickFp8(Fp8Dequantize):  # type: ignore[misc]
    """See `Fp8Dequantize`, which divides a matrix into equal blocks, one for each scale.

    A matrix that is not a whole number of the config's blocks (DeepSeek-V3 has some of 576 rows, with blocks of 128)
    has smaller blocks at its ends instead. transformers' FP8 product handles these, but its dequantization does not: it
    refuses such a matrix, or divides it differently.
    """

    def _dequantize_one(
        self, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        size = self._block(quantized, scales)
        if size is None or output_dtype is None:
            whole: torch.Tensor = super()._dequantize_one(quantized, scales, output_dtype)
            return whole
        factors = torch.exp2(scales.float() - 127.0) if scales.dtype == torch.uint8 else scales.float()
        if quantized.device != _CPU or output_dtype not in (torch.bfloat16, torch.float32):
            for dim in (0, 1):
                factors = factors.repeat_interleave(size[dim], dim).narrow(dim, 0, quantized.shape[dim])
            return (quantized.float() * factors).to(output_dtype)
        codes = quantized.view(torch.uint8).numpy()
        made = torch.empty(quantized.shape, dtype=output_dtype)
        kernels.blocks(codes, _values(quantized.dtype), factors.numpy(), size, _bits(made), torch.get_num_threads())
        return made

    def _block(self, quantized: torch.Tensor, scales: torch.Tensor) -> tuple[int, int] | None:
        """Rows and columns of a block; None for formats that are not supported here."""
        if quantized.dtype not in _CODES or quantized.dim() != 2 or scales.dim() != 2 or not quantized.is_contiguous():
            return None
        if scales.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.uint8):
            return None
        (rows, columns), (n, k) = quantized.shape, scales.shape
        said = getattr(getattr(self.hf_quantizer, "quantization_config", None), "weight_block_size", None)
        if said is not None and (-(-rows // said[0]), -(-columns // said[1])) == (n, k):
            return int(said[0]), int(said[1])
        return (rows // n, columns // k) if n and k and not (rows % n or columns % k) else None


class QuickMxfp4(Mxfp4Dequantize):  # type: ignore[misc]
    """See `Mxfp4Dequantize`."""

    def convert(
        self, input_dict: Mapping[str, Any], model: Any = None, full_layer_name: str = "", **others: Any
    ) -> dict[str, torch.Tensor]:
        """Parts by pattern (`…_blocks`, `…_scales`) -> experts (E, in, out) under the parameter's name."""
        parts = {pattern.rpartition("_")[2]: tensors for pattern, tensors in input_dict.items()}
        blocks, scales = (tensors[0] if isinstance(tensors, list) else tensors for tensors in map(parts.get, _PARTS))
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        if blocks is None or scales is None or blocks.device != _CPU or dtype not in _BITS or blocks.shape[-1] != 16:
            return super().convert(  # type: ignore[no-any-return]
                dict(input_dict), model=model, full_layer_name=full_layer_name, **others
            )
        experts, outputs, groups = scales.shape
        made = torch.empty(experts, 32 * groups, outputs, dtype=dtype)
        for codes, factors, out in zip(blocks.numpy(), scales.numpy(), _bits(made), strict=True):
            kernels.nibbles(codes, factors, _table(dtype), out, torch.get_num_threads())
        return {full_layer_name: made}


_PARTS = ("blocks", "scales")


def _bits(tensor: torch.Tensor) -> Any:
    """A tensor's memory as unsigned integers of its element size."""
    kind = _BITS[tensor.dtype]
    return tensor.view(torch.int16 if kind is np.uint16 else torch.int32).numpy().view(kind)


@functools.cache
def _values(dtype: torch.dtype) -> Any:
    """The value of each byte, float32 (256,)."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()


@functools.cache
def _table(dtype: torch.dtype) -> Any:
    """The value of each pair of scale and code of MXFP4, (256, 16), computed by transformers itself."""
    codes = torch.arange(16, dtype=torch.uint8).expand(1, 256, 1, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    made = mxfp4.convert_moe_packed_tensors(codes.contiguous(), scales, dtype=dtype)  # (1, 32, 256)
    return _bits(made[0, ::2].t().contiguous())
