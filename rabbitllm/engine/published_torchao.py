"""Weights that torchao quantized, dequantized when they are used, without torchao.

transformers writes the parts of a matrix `…weight` (N, K) as `…_weight_qdata` and so on. The values follow from the
parts (https://github.com/pytorch/ao, `torchao/quantization/quantize_/workflows`, `dequantize` of each tensor class):

- Int8Tensor, IntxUnpackedToInt8Tensor: `qdata` I8 (N, K); `scale` (N, groups); `zero_point` I8 (N, groups), absent or
  zeros if symmetric. (qdata - zero_point) * scale.
- Float8Tensor: `qdata` F8_E4M3 (N, K); `scale` F32 (rows of blocks, columns of blocks). qdata * scale.

Products are in float32, rounded once. Inputs are not quantized, also if the settings say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rabbitllm.base.terminal import harmless
from rabbitllm.engine.published_conversions import CPU, IntoPlain, blocks, is_codes
from rabbitllm.errors import UnknownArchitectureError

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
        found = dict.fromkeys(_unknown(getattr(quantization_config, "quant_type", None)))
        if found:
            raise UnknownArchitectureError(
                f"The weights are already quantized by torchao with {harmless(', '.join(found))}; expected "
                f"{', '.join(TYPES)}, with one code in a byte.",
                "Use the model's checkpoint in one of these forms, or its unquantized one.",
            )

    def matrix(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scales, zeros = parts.get(_QDATA), parts.get(_SCALE), parts.get(_ZERO)
        if found := [name for name in _OTHERS if name in parts]:
            raise ValueError(f"{', '.join(found)}, which is not supported")
        if codes is None:
            if scales is not None or not parts["weight"].is_floating_point():
                raise ValueError("scales or codes without the others")
            return parts["weight"].to(dtype)
        if scales is None or codes.dim() != 2 or not (is_codes(codes.dtype) or codes.dtype == torch.int8):
            raise ValueError(f"codes of {codes.dtype} {tuple(codes.shape)}{'' if scales is not None else ', no scale'}")
        if scales.dim() != 2 or any(size % count for size, count in zip(codes.shape, scales.shape, strict=True)):
            raise ValueError(f"codes of shape {tuple(codes.shape)} and scales of shape {tuple(scales.shape)}")
        if zeros is None or (zeros.device == CPU and not zeros.any()):
            return blocks(codes, scales.float(), dtype)
        if zeros.shape != scales.shape:
            raise ValueError(f"scales of shape {tuple(scales.shape)} and zeros of shape {tuple(zeros.shape)}")
        for dim in (0, 1):
            repeats = codes.shape[dim] // scales.shape[dim]
            scales, zeros = scales.repeat_interleave(repeats, dim), zeros.repeat_interleave(repeats, dim)
        return ((codes.float() - zeros.float()) * scales.float()).to(dtype)


def _unknown(settings: Any) -> Iterator[str]:
    """The types in torchao's settings, as transformers writes them, whose parts are not known here."""
    if not isinstance(settings, Mapping):
        yield f"quant_type {settings!r}"
        return
    if "_type" not in settings:  # {"default": {"_type": …}}
        for one in settings.values() or [None]:
            yield from _unknown(one)
        return
    name, data = str(settings["_type"]), settings.get("_data")
    if name in _BY_NAME:
        maps = [one for one in (data or {}).values() if isinstance(one, Mapping)] if isinstance(data, Mapping) else []
        for one in (one for each in maps for one in each.values() if one is not None):
            yield from _unknown(one)
        return
    if name not in TYPES:
        yield name
    for key, value in (data or {}).items() if isinstance(data, Mapping) else ():
        packing = value.get("_data") if isinstance(value, Mapping) else value
        if key.endswith("packing_format") and str(packing).upper() not in _PACKING:
            yield f"{name} ({key} {packing})"
