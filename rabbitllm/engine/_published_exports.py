"""Quantizers for transformers of matrices that ModelOpt and torchao export, into plain Linears, experts and embeddings.

transformers has none for the first, and needs torchao for the second. A matrix is dequantized when it is used, unless
`published_codes.py` finds a kernel for its codes. Activations stay in the model's dtype, also if the settings say that
they are quantized.

The parts of a matrix (N, K) by **NVIDIA's ModelOpt**, and how its values follow from them
(https://github.com/NVIDIA/TensorRT-Model-Optimizer, `modelopt/torch/quantization/qtensor/nvfp4_tensor.py` and
`fp8_tensor.py`, `dequantize`):

- NVFP4: `weight` U8 (N, K / 2), two codes of FP4 a byte, the lower half first; `weight_scale` F8_E4M3 (N, K / 16);
  `weight_scale_2` F32, one number. value * (weight_scale * weight_scale_2), in float32, rounded once.
- FP8: `weight` F8_E4M3 (N, K); `weight_scale`, one number, or one for each row, or for each block of rows and columns.
  Values and scales are cast to the model's dtype, then multiplied.
- MXFP4, MXFP8: codes as above, `weight_scale` U8 (N, K / 32), exponents of powers of two.

Scales of activations (`input_scale`) and of the KV cache are not read.

The parts of `…weight` by **torchao**, as transformers writes them (https://github.com/pytorch/ao,
`torchao/quantization/quantize_/workflows`, `dequantize` of each tensor class):

- Int8Tensor, IntxUnpackedToInt8Tensor: `…_weight_qdata` I8 (N, K); `…_weight_scale` (N, groups);
  `…_weight_zero_point` I8 (N, groups), absent or zeros if symmetric. (qdata - zero_point) * scale.
- Float8Tensor: `…_weight_qdata` F8_E4M3 (N, K); `…_weight_scale` F32 (rows of blocks, columns of blocks).
  qdata * scale.

Products are in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rabbitllm.base.terminal import harmless
from rabbitllm.checkpoints.config import MODELOPT, TORCHAO
from rabbitllm.engine._published_conversions import CPU, IntoPlain, as_factors, blocks, fp4_matrix, is_fp8, scaled
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
        algorithms = _algorithms(vars(quantization_config))
        if unknown := sorted(algorithms - set(ALGORITHMS)):
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
            return fp4_matrix(codes, _fp4_scales(scales, parts.get("weight_scale_2")), dtype)
        if codes.dtype != torch.float8_e4m3fn:
            raise ValueError(f"codes of {codes.dtype}")
        factors = as_factors(scales if scales.dtype == torch.uint8 else scales.to(dtype))
        return blocks(codes, _grid(factors, codes), dtype)


def _algorithms(settings: Mapping[str, Any]) -> set[str]:
    """The algorithms that settings name, in capitals."""
    algorithm = str(settings.get("quant_algo")).upper()
    layers = settings.get("quantized_layers")
    if algorithm != _MIXED:
        return {algorithm}
    if not isinstance(layers, Mapping) or not layers:
        return {f"{_MIXED} without quantized_layers"}
    return {str(layer.get("quant_algo") if isinstance(layer, Mapping) else layer).upper() for layer in layers.values()}


def _fp4_scales(scales: torch.Tensor, of_matrix: torch.Tensor | None) -> torch.Tensor:
    """The scale of each run of FP4 codes, float32."""
    if scales.dtype == torch.uint8 and of_matrix is None:
        return as_factors(scales)
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


TYPES = (
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig",
)
"""Values of `_type` in `quant_type` whose parts are these. Others pack several codes into a byte, for one kernel."""
_BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")
"""Types that have one of the others for each module."""
_PACKING = ("UNPACKED_TO_INT8", "PLAIN")
_QDATA, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_OTHERS = ("_weight_act_pre_scale", "_weight_per_tensor_scale", "_weight_scale_and_zero")


class TorchAo(IntoPlain):
    """A quantizer for transformers that loads torchao's parts into plain Linears and embeddings.

    Raises:
        UnknownArchitectureError: `quant_type` is not supported.
    """

    serialized_names: Mapping[str, list[str]] = {"weight": ["weight", _QDATA, _SCALE, _ZERO, *_OTHERS]}

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        types = dict.fromkeys(_unknown(getattr(quantization_config, "quant_type", None)))
        if types:
            raise UnknownArchitectureError(
                f"The weights are already quantized by torchao with {harmless(', '.join(types))}; expected "
                f"{', '.join(TYPES)}, with one code in a byte.",
                "Use the model's checkpoint in one of these forms, or its unquantized one.",
            )

    def matrix(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scales, zeros = parts.get(_QDATA), parts.get(_SCALE), parts.get(_ZERO)
        if unsupported := [name for name in _OTHERS if name in parts]:
            raise ValueError(f"{', '.join(unsupported)}, which is not supported")
        if codes is None:
            if scales is not None or not parts["weight"].is_floating_point():
                raise ValueError("scales or codes without the others")
            return parts["weight"].to(dtype)
        if scales is None or codes.dim() != 2 or not (is_fp8(codes.dtype) or codes.dtype == torch.int8):
            raise ValueError(f"codes of {codes.dtype} {tuple(codes.shape)}{'' if scales is not None else ', no scale'}")
        if scales.dim() != 2 or any(size % count for size, count in zip(codes.shape, scales.shape, strict=True)):
            raise ValueError(f"codes of shape {tuple(codes.shape)} and scales of shape {tuple(scales.shape)}")
        if zeros is None or (zeros.device == CPU and not zeros.any()):
            return blocks(codes, scales.float(), dtype)
        if zeros.shape != scales.shape:
            raise ValueError(f"scales of shape {tuple(scales.shape)} and zeros of shape {tuple(zeros.shape)}")
        size = codes.shape[0] // scales.shape[0], codes.shape[1] // scales.shape[1]
        return scaled(codes, scales, zeros, size, dtype)


def _unknown(settings: Any) -> Iterator[str]:
    """The types in torchao's settings, as transformers writes them, whose parts are not known here."""
    if not isinstance(settings, Mapping):
        yield f"quant_type {settings!r}"
        return
    if "_type" not in settings:  # {"default": {"_type": …}}
        for part in settings.values() or [None]:
            yield from _unknown(part)
        return
    name, data = str(settings["_type"]), settings.get("_data")
    if name in _BY_NAME:
        maps = [m for m in (data or {}).values() if isinstance(m, Mapping)] if isinstance(data, Mapping) else []
        for part in (part for mapping in maps for part in mapping.values() if part is not None):
            yield from _unknown(part)
        return
    if name not in TYPES:
        yield name
    for key, value in (data or {}).items() if isinstance(data, Mapping) else ():
        packing = value.get("_data") if isinstance(value, Mapping) else value
        if key.endswith("packing_format") and str(packing).upper() not in _PACKING:
            yield f"{name} ({key} {packing})"


QUANTIZERS: Mapping[str, type[IntoPlain]] = {MODELOPT: ModelOpt, TORCHAO: TorchAo}
"""Quantization method -> its quantizer."""
