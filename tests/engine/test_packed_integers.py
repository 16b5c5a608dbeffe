"""AWQ and GPTQ: bit for bit the model of the matrices that their integers stand for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rabbitllm.engine.packed_integers import awq_weight, gptq_weight
from rabbitllm.errors import IncompleteSplitError, UnknownArchitectureError
from tests.engine.test_published import take_out
from tests.support import quantized
from tests.support.builders import build_checkpoint, reference_logits
from tests.support.tiny_models import ALL, INPUT, assert_same, load, run, split

pytestmark = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21), reason="its quantizers are others"
)

Build = Callable[..., Path]

MODELS: dict[str, tuple[Build, str, dict[str, Any]]] = {
    "awq-llama": (quantized.build_awq, "llama", {}),
    "awq-qwen3_moe": (quantized.build_awq, "qwen3_moe", {}),
    "gptq-qwen2": (quantized.build_gptq, "qwen2", {}),
    "gptq-mixtral-8bit": (quantized.build_gptq, "mixtral", {"bits": 8}),
    "gptq_v2-llama-2bit": (quantized.build_gptq, "llama", {"bits": 2, "form": "gptq_v2"}),
}
SHORT = ("awq-qwen3_moe", "gptq-qwen2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in MODELS]
)
def test_what_transformers_computes_with_the_matrices(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    build, family, options = MODELS[name]
    folder = build(tmp_path / "model", family, tmp_path / "plain", shards=3, **options)
    expected = reference_logits(tmp_path / "plain", INPUT, torch.float16)
    directory = split(folder)
    for room in (ALL, 0):
        with caplog.at_level(logging.WARNING, "rabbitllm"):
            model = load(directory, room)
        assert f"are {name.split('_')[0].split('-')[0]}. On cpu each layer is dequantized to float16" in caplog.text
        assert_same(run(model), expected)


def test_the_matrix_of_awq() -> None:
    tensor = torch.randn(24, 48, generator=torch.Generator().manual_seed(0))
    integers = quantized.integers_of(tensor, 4)
    parts = quantized._awq(integers)
    assert torch.equal(awq_weight(**parts, dtype=torch.float16), integers.matrix)
    assert (integers.matrix - tensor).abs().max() < 0.3


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("disordered", [True, False])
def test_the_matrix_of_gptq(bits: int, offset: int, disordered: bool) -> None:
    tensor = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    integers = quantized.integers_of(tensor, bits, disordered=disordered)
    parts = quantized._gptq(integers, bits, offset)
    assert torch.equal(gptq_weight(**parts, bits=bits, offset=offset, dtype=torch.float16), integers.matrix)
    if not disordered:
        del parts["g_idx"]
        found = gptq_weight(**parts, g_idx=None, bits=bits, offset=offset, dtype=torch.float16)
        assert torch.equal(found, integers.matrix)


def test_another_dtype_than_the_scales(tmp_path: Path) -> None:
    """In float32 the product is exact; it is rounded to the model's dtype, and to none between."""
    integers = quantized.integers_of(torch.randn(24, 48, generator=torch.Generator().manual_seed(0)), 4)
    exact = (integers.codes - integers.zeros[:, integers.group]).float() * integers.scales.float()[:, integers.group]
    parts = quantized._awq(integers)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(awq_weight(**parts, dtype=dtype), exact.to(dtype))
    folder = quantized.build_awq(tmp_path / "model", "llama", tmp_path / "plain")
    model = load(split(folder), 0, dtype="bfloat16")
    assert model(INPUT).logits.dtype == torch.bfloat16
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_a_part_is_missing(tmp_path: Path) -> None:
    folder = quantized.build_awq(tmp_path / "model", "llama", tmp_path / "plain")
    take_out(folder, "layers.1.mlp.up_proj.qzeros")
    with pytest.raises(IncompleteSplitError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(split(folder))


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"quant_method": "gptq", "bits": 3}, "by gptq, in the form gptq at 3 bits; expected gptq or gptq_v2 at 2 or"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in the form marlin at 4 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "by awq, in the form gemv at 4 bits; expected gemm"),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemx"},
            r"quantized already \(awq\), in a way that transformers",
        ),
    ],
)
def test_forms_that_are_not_known(tmp_path: Path, said: dict[str, Any], found: str) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": said}))
    with pytest.raises(UnknownArchitectureError, match=found) as refused:
        load(split(folder))
    assert "unquantized" in refused.value.remedy


def test_awq_of_a_model_whose_activations_are_scaled(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "bloom")
    path = folder / "config.json"
    said = {"quant_method": "awq", "bits": 4, "version": "gemm"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": said}))
    with pytest.raises(UnknownArchitectureError, match="AWQ of a model of type bloom scales its activations too"):
        load(split(folder))
