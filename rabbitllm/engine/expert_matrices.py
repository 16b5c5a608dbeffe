"""Experts of compressed-tensors that transformers does not decompress, decompressed matrix by matrix.

A module of its own, since only recent versions of transformers have the class that it extends. Reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.integrations.compressed_tensors import CompressedTensorsDequantize, get_experts_scheme

_ROWWISE = ("tensor", "channel", "QuantizationStrategy.TENSOR", "QuantizationStrategy.CHANNEL")


class ExpertMatrices(CompressedTensorsDequantize):  # type: ignore[misc]
    """See `CompressedTensorsDequantize`, which handles packed experts, and FP8 with a scale per row or matrix.

    Experts of another format (int8, FP8 with a scale per block) are decompressed matrix by matrix, by the compressor
    that compressed-tensors has for dense matrices of that format.
    """

    def convert(
        self, input_dict: Mapping[str, Any], source_patterns: Any, target_patterns: Any, **others: Any
    ) -> dict[str, Any]:
        """Parts by pattern (`…weight`, `…weight_scale`), a list with one for each expert -> experts (E, out, in)."""
        settings = self.hf_quantizer.compressor.quantization_config
        scheme = self.scheme or get_experts_scheme(settings)
        weights, form = scheme.weights, scheme.format or settings.format
        rowwise = weights.type == "float" and weights.num_bits == 8 and str(weights.strategy) in _ROWWISE
        dense = "weight" in input_dict or "weight_scale" in input_dict
        if dense or rowwise or any(pattern.endswith("weight_packed") for pattern in input_dict):
            return super().convert(input_dict, source_patterns, target_patterns, **others)  # type: ignore[no-any-return]
        from compressed_tensors.compressors import BaseCompressor

        compressor = BaseCompressor.get_value_from_registry(form)
        dtype = others["model"].get_parameter(others["full_layer_name"]).dtype
        projections: dict[str, dict[str, Any]] = {}
        for pattern, tensors in input_dict.items():
            projection, _, part = pattern.rpartition("weight")
            projections.setdefault(projection, {})[f"weight{part}"] = tensors
        made = {}
        for projection, parts in projections.items():
            each = [dict(zip(parts, own, strict=True)) for own in zip(*parts.values(), strict=True)]
            matrices = [compressor.decompress(one, scheme)["weight"].to(dtype) for one in each]
            made[f"{projection}weight"] = torch.stack(matrices)
        return made
