"""Checkpoints of torchao, written by transformers: equal to the plain model of torchao's own matrices, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rabbitllm import AutoModel
from rabbitllm.engine.published_torchao import TYPES, TorchAo
from rabbitllm.errors import IncompleteCheckpointError, RabbitLLMError, UnknownArchitectureError
from tests.support import quantized, splitting
from tests.support.builders import SINGLE_NAME, build_checkpoint, read_tensors, reference_logits
from tests.support.tiny_models import ALL, INPUT, assert_same, load, run, split


@pytest.mark.long
@pytest.mark.parametrize("form", quantized.TORCHAO_FORMS)
def test_the_matrices_are_those_of_torchao(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    folder = quantized.build_torchao(tmp_path / "model", form, tmp_path / "plain")
    assert len(list(folder.glob("*.safetensors"))) > 2
    expected = reference_logits(tmp_path / "plain", INPUT, "auto")  # type: ignore[arg-type]
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.setitem(sys.modules, name, None)  # reading needs no torchao
    directory = split(folder)
    for budget in (ALL, 60_000, 0):
        assert_same(run(load(directory, budget)), expected)
    assert_same(run(load(splitting.split(folder, sequential=True))), expected)


def test_the_formula(tmp_path: Path) -> None:
    """Without torchao: int8 with zeros for groups of inputs, in shards."""
    plain, folder = (build_checkpoint(tmp_path / name, "llama", dtype=torch.bfloat16) for name in ("plain", "model"))

    def parts_of(name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        path, groups = name.removesuffix("weight"), tensor.float().unflatten(1, (-1, 16))
        scales = ((groups.amax(2) - groups.amin(2)) / 255).bfloat16()
        zeros = (-128 - groups.amin(2) / scales.float()).round().clamp(-128, 127).to(torch.int8)
        shifted = groups / scales.float()[:, :, None] + zeros.float()[:, :, None]
        codes = shifted.round().clamp(-128, 127).to(torch.int8)
        matrix = (codes.float() - zeros.float()[:, :, None]) * scales.float()[:, :, None]
        parts = {"qdata": codes.flatten(1), "scale": scales, "zero_point": zeros}
        return {f"{path}_weight_{part}": value for part, value in parts.items()}, matrix.flatten(1).bfloat16()

    def published(name: str, tensor: torch.Tensor) -> quantized.Named:
        yield from parts_of(name, tensor)[0].items() if name.endswith("_proj.weight") else [(name, tensor)]

    def meant(name: str, tensor: torch.Tensor) -> quantized.Named:
        yield name, parts_of(name, tensor)[1] if name.endswith("_proj.weight") else tensor

    quantized.rewrite(plain, meant, None, 1)
    quantized.rewrite(folder, published, config_of(_type="IntxWeightOnlyConfig", _data={}), 3)
    expected = reference_logits(plain, INPUT, "auto")  # type: ignore[arg-type]
    directory = splitting.split(folder, sequential=True)
    for budget in (ALL, 0):
        assert_same(run(load(directory, budget)), expected)


def config_of(**data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": data}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (config_of(_type="Int4WeightOnlyConfig", _data={}), "Int4WeightOnlyConfig"),
        (
            config_of(_type="IntxWeightOnlyConfig", _data={"intx_packing_format": {"_data": "OPAQUE_ATEN_KLEIDIAI"}}),
            "intx_packing_format OPAQUE_ATEN_KLEIDIAI",
        ),
        (
            config_of(
                _type="FqnToConfig", _data={"fqn_to_config": {"_default": {"_type": "NVFP4Config"}, "lm_head": None}}
            ),
            "NVFP4Config",
        ),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "int4_weight_only"),
        ({"quant_method": "torchao"}, "quant_type None"),
        (config_of(_type="\x1b[2J", _data=7), "expected"),
    ],
)
def test_another_form_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    refused(folder, UnknownArchitectureError, said)


def refused(folder: Path, error: type[RabbitLLMError], said: str) -> None:
    """By a load that would delete each shard after use, before it has touched any."""
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    with pytest.raises(error, match=said) as caught:
        AutoModel.from_pretrained(folder, sequential_shard_processing=True, device="cpu", show_layer_progress=False)
    assert "\x1b" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == before


LAYER = "model.layers.1.mlp.up_proj._weight_"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale": None}, "no scale"),
        ({"qdata": None}, "without"),
        ({"scale": torch.ones(5, 1)}, "scales of shape"),
        ({"zero_point": torch.ones(3, 1, dtype=torch.int8)}, "zeros of shape"),
        ({"qdata": torch.ones(4, 4, dtype=torch.uint8)}, "codes of torch.uint8"),
        ({"act_pre_scale": torch.ones(64)}, "act_pre_scale"),
    ],
)
def test_parts_that_do_not_belong_together(tmp_path: Path, change: dict[str, torch.Tensor | None], said: str) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16)

    def as_torchao(name: str, tensor: torch.Tensor) -> quantized.Named:
        if name != "model.layers.1.mlp.up_proj.weight":
            yield name, tensor
            return
        yield f"{LAYER}qdata", torch.ones(tensor.shape, dtype=torch.int8)
        yield f"{LAYER}scale", torch.ones(len(tensor), 1)
        yield f"{LAYER}zero_point", torch.zeros(len(tensor), 1, dtype=torch.int8)

    quantized.rewrite(folder, as_torchao, config_of(_type=TYPES[0], _data={}), 1)
    tensors = read_tensors(folder) | {f"{LAYER}{part}": value for part, value in change.items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / SINGLE_NAME, metadata={"format": "pt"})
    refused(folder, IncompleteCheckpointError, said)


def test_zeros_are_subtracted_exactly() -> None:
    """By the formula in float64, which no product here exceeds."""
    codes = torch.arange(-128, 128, dtype=torch.int8).view(4, 64)
    scales, zeros = torch.rand(4, 2).bfloat16(), torch.tensor([[-128, 127], [0, 1], [-7, 7], [0, 0]], dtype=torch.int8)
    parts = {"_weight_qdata": codes, "_weight_scale": scales, "_weight_zero_point": zeros}
    made = TorchAo.matrix(object.__new__(TorchAo), parts, torch.float32)
    wide = [tensor.double().repeat_interleave(32, 1) for tensor in (scales, zeros)]
    assert torch.equal(made.double(), (codes.double() - wide[1]) * wide[0])
