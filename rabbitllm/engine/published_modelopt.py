"""Weights that NVIDIA's ModelOpt published, dequantized when they are used; transformers has no quantizer for them.

The parts of a matrix (N, K), and how its values follow from them (https://github.com/NVIDIA/TensorRT-Model-Optimizer,
`modelopt/torch/quantization/qtensor/nvfp4_tensor.py` and `fp8_tensor.py`, `dequantize`):

- NVFP4: `weight` U8 (N, K / 2), two codes of FP4 a byte, the lower half first; `weight_scale` F8_E4M3 (N, K / 16);
  `weight_scale_2` F32, one number. value * (weight_scale * weight_scale_2), in float32, rounded once.
- FP8: `weight` F8_E4M3 (N, K); `weight_scale`, one number, or one for each row, or for each block of rows and columns.
  Values and scales are cast to the model's dtype, then multiplied.
- MXFP4, MXFP8: codes as above, `weight_scale` U8 (N, K / 32), exponents of powers of two.

ModelOpt also stores scales for the quantization of activations (`input_scale`) and of the KV cache. These are not
applied: activations stay in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rabbitllm.engine.published_conversions import IntoPlain, blocks, fours
from rabbitllm.errors import UnknownArchitectureError

_MIXED = "MIXED_PRECISION"
ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "FP8_PB_REAL",
    "NVFP4",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "MXFP4",
    "W4A8_MXFP4_FP8",
    "MXFP8",
)
"""Values of `quant_algo` whose parts are these. Others scale inputs too (AWQ, SmoothQuant), or are integers."""


class ModelOpt(IntoPlain):
    """A quantizer for transformers that loads ModelOpt's parts into plain Linears and experts.

    Raises:
        UnknownArchitectureError: `quant_algo` is not supported.
    """

    serialized_names: Mapping[str, list[str]] = {
        "weight": ["weight", "weight_scale", "weight_scale_2", "pre_quant_scale", "input_scale"]
    }
    unread = ("input_scale",)

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        found = _algorithms(vars(quantization_config))
        if unknown := sorted(found - set(ALGORITHMS)):
            raise UnknownArchitectureError(
                f"The weights are already quantized by ModelOpt with quant_algo {', '.join(unknown)}; expected "
                f"{', '.join(ALGORITHMS)}, or {_MIXED} of these.",
                "Use the model's checkpoint in one of these forms, or its unquantized one.",
            )

    def matrix(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scales = parts["weight"], parts.get("weight_scale")
        if "pre_quant_scale" in parts:
            raise ValueError("pre_quant_scale, by which inputs would be multiplied, is not supported")
        if scales is None:
            if codes.element_size() == 1:
                raise ValueError(f"codes ({codes.dtype}) without weight_scale")
            return codes.to(dtype)
        if codes.dtype == torch.uint8:
            return fours(codes, _scales_of_fours(scales, parts.get("weight_scale_2")), dtype)
        if codes.dtype != torch.float8_e4m3fn:
            raise ValueError(f"codes of {codes.dtype}")
        if scales.dtype == torch.uint8:
            factors = torch.exp2(scales.float() - 127.0)
        else:
            factors = scales.to(dtype).float()
        return blocks(codes, _grid(factors, codes), dtype)


def _algorithms(settings: Mapping[str, Any]) -> set[str]:
    """The algorithms that settings name, in capitals."""
    said = str(settings.get("quant_algo")).upper()
    layers = settings.get("quantized_layers")
    if said != _MIXED:
        return {said}
    if not isinstance(layers, Mapping) or not layers:
        return {f"{_MIXED} without quantized_layers"}
    return {str(layer.get("quant_algo") if isinstance(layer, Mapping) else layer).upper() for layer in layers.values()}


def _scales_of_fours(scales: torch.Tensor, of_matrix: torch.Tensor | None) -> torch.Tensor:
    """The scale of each run of FP4 codes, float32."""
    if scales.dtype == torch.uint8 and of_matrix is None:
        return torch.exp2(scales.float() - 127.0)
    if scales.dtype != torch.float8_e4m3fn or of_matrix is None or of_matrix.numel() != 1:
        raise ValueError(f"scales of {scales.dtype}, {'without' if of_matrix is None else 'with'} weight_scale_2")
    return scales.float() * of_matrix.float().reshape(())


def _grid(factors: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Scales of a matrix, of its rows or of its blocks, as (rows of blocks, columns of blocks)."""
    if factors.numel() == 1:
        return factors.reshape(1, 1)
    if factors.dim() == 1:
        return factors[:, None]
    if factors.dim() == 4:  # (n, 1, k, 1)
        return factors.flatten(2).flatten(0, 1)
    if factors.dim() != 2 or codes.dim() != 2:
        raise ValueError(f"codes of shape {tuple(codes.shape)} and scales of shape {tuple(factors.shape)}")
    return factors
