"""How a config says that its weights are quantized."""

from __future__ import annotations

from typing import Any

import pytest

from rabbitllm.checkpoints.config import quantized_as


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "mxfp4"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes 4bit"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes 8bit"),
        ({"quantization_config": {"bits": 3}}, "by an unnamed method"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "modelopt"),
        ({"quantization_config": {"quant_method": "modelopt_fp4"}}, "modelopt"),
        ({"quantization_config": None, "text_config": None}, None),
        ({"quantization_config": {}}, None),
        ({"quantization_config": "fp8"}, None),
        ({}, None),
    ],
)
def test_properties_read_from_a_config(config: dict[str, Any], said: str | None) -> None:
    assert quantized_as(config) == said
