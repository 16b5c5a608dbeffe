"""Checkpoints of ModelOpt and torchao: read as published, equal to the plain model of their formulas, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rabbitllm import AutoModel
from rabbitllm.engine._published_exports import TYPES, TorchAo
from rabbitllm.errors import IncompleteCheckpointError, RabbitLLMError, UnknownArchitectureError
from tests.support import quantized, splitting
from tests.support.builders import SINGLE_NAME, build_checkpoint, read_tensors, reference_logits
from tests.support.tiny_models import ALL, INPUT, assert_same, load, run, split

EXPERTS = {"moe_intermediate_size": 64}


def expected_of(folder: Path) -> Any:
    return reference_logits(folder, INPUT, "auto")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "family"),
    [
        ("NVFP4", "qwen3_moe"),
        ("MIXED_PRECISION", "llama"),
        *(
            pytest.param(form, "llama", marks=pytest.mark.long)
            for form in quantized.MODELOPT_FORMS
            if form not in ("MIXED_PRECISION", "MXFP4")
        ),
        pytest.param("MXFP4", "qwen3_moe", marks=pytest.mark.long),
        pytest.param("FP8", "qwen3_moe", marks=pytest.mark.long),
    ],
)
def test_formula_of_modelopt(tmp_path: Path, form: str, family: str) -> None:
    settings = EXPERTS if family == "qwen3_moe" else {"intermediate_size": 96}
    folder = quantized.build_modelopt(
        tmp_path / "model", family, form, tmp_path / "plain", shards=3, alone=form == "NVFP4", **settings
    )
    expected = expected_of(tmp_path / "plain")
    published = read_tensors(folder)
    directory = split(folder)
    for budget in (ALL, 60_000, 0):
        assert_same(run(load(directory, budget)), expected)
    kept = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in _read(path).items()}
    assert kept.keys() == published.keys()
    assert all(torch.equal(_bytes(kept[name]), _bytes(published[name])) for name in published)


def _read(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_settings_in_their_own_file_equal_those_in_the_config(tmp_path: Path) -> None:
    """Without them FP8 codes would be used as numbers."""
    folder = quantized.build_modelopt(tmp_path / "model", "llama", "FP8", tmp_path / "plain", alone=True)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    expected = expected_of(tmp_path / "plain")
    assert_same(run(load(splitting.split(folder, sequential=True))), expected)
    unsplit_folder = quantized.build_modelopt(tmp_path / "again", "llama", "FP8", tmp_path / "plain2", alone=True)
    unsplit = AutoModel.from_pretrained(
        unsplit_folder, split=False, device="cpu", exact=True, show_layer_progress=False
    )
    assert_same(run(unsplit), expected)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("form", ["NVFP4_AWQ", "W4A16_AWQ", "W8A8_SQ_PER_CHANNEL", "INT8", "NVFP4_SVDQUANT"])
def test_unknown_algorithm_is_refused_by_name(tmp_path: Path, form: str, alone: bool) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    settings = {"quant_algo": form}
    if alone:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    refused(folder, UnknownArchitectureError, form)


def refused(folder: Path, error: type[RabbitLLMError], message: str) -> None:
    """A sequential load is an error before any shard is changed."""
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    with pytest.raises(error, match=message) as caught:
        AutoModel.from_pretrained(folder, sequential_shard_processing=True, device="cpu", show_layer_progress=False)
    assert "\x1b" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "hf_quant_config.json"),
        ('{"quantization": 1}', "quant_algo"),
        ('{"quantization": {"quant_algo": 8}}', "a text"),
    ],
)
def test_damaged_settings_file(tmp_path: Path, text: str, message: str) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    (folder / "hf_quant_config.json").write_text(text)
    refused(folder, RabbitLLMError, message)


def test_settings_only_for_the_cache_leave_weights_plain(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    expected = expected_of(folder)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    assert_same(run(load(split(folder))), expected)


@pytest.mark.parametrize(
    ("form", "gone", "message"),
    [
        ("NVFP4", "layers.1.mlp.up_proj.weight_scale_2", "without weight_scale_2"),
        ("NVFP4", "layers.1.mlp.up_proj.weight_scale", "without weight_scale"),
        ("FP8", "layers.1.mlp.up_proj.weight_scale", "without weight_scale|no scales"),
    ],
)
def test_codes_without_a_part(tmp_path: Path, form: str, gone: str, message: str) -> None:
    folder = quantized.build_modelopt(tmp_path / "model", "llama", form, tmp_path / "plain", intermediate_size=96)
    tensors = {name: tensor for name, tensor in read_tensors(folder).items() if not name.endswith(gone)}
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    refused(folder, IncompleteCheckpointError, message)


def test_scaled_inputs_are_refused(tmp_path: Path) -> None:
    folder = quantized.build_modelopt(tmp_path / "model", "llama", "NVFP4", tmp_path / "plain", intermediate_size=96)
    scaled = {"model.layers.0.mlp.up_proj.pre_quant_scale": torch.ones(64, dtype=torch.bfloat16)}
    save_file(read_tensors(folder) | scaled, folder / SINGLE_NAME, metadata={"format": "pt"})
    refused(folder, IncompleteCheckpointError, "pre_quant_scale")


@pytest.mark.long
@pytest.mark.parametrize("form", quantized.TORCHAO_FORMS)
def test_matrices_equal_torchao(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    folder = quantized.build_torchao(tmp_path / "model", form, tmp_path / "plain")
    assert len(list(folder.glob("*.safetensors"))) > 2
    expected = expected_of(tmp_path / "plain")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.setitem(sys.modules, name, None)  # reading needs no torchao
    directory = split(folder)
    for budget in (ALL, 60_000, 0):
        assert_same(run(load(directory, budget)), expected)
    assert_same(run(load(splitting.split(folder, sequential=True))), expected)


@pytest.mark.parametrize("group", [0, 16])
def test_formula_of_torchao(tmp_path: Path, group: int) -> None:
    """Without torchao: int8 with a scale for each row, or zeros for groups of inputs, in shards."""
    folder = quantized.build_torchao_int8(tmp_path / "model", tmp_path / "plain", group)
    expected = expected_of(tmp_path / "plain")
    directory = splitting.split(folder, sequential=True)
    for budget in (ALL, 0):
        assert_same(run(load(directory, budget)), expected)


def config_of(**data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": data}}


@pytest.mark.parametrize(
    ("settings", "message"),
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
def test_unknown_form_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    refused(folder, UnknownArchitectureError, message)


LAYER = "model.layers.1.mlp.up_proj._weight_"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scale": None}, "no scale"),
        ({"qdata": None}, "without"),
        ({"scale": torch.ones(5, 1)}, "scales of shape"),
        ({"zero_point": torch.ones(3, 1, dtype=torch.int8)}, "zeros of shape"),
        ({"qdata": torch.ones(4, 4, dtype=torch.uint8)}, "codes of torch.uint8"),
        ({"act_pre_scale": torch.ones(64)}, "act_pre_scale"),
    ],
)
def test_mismatched_parts(tmp_path: Path, change: dict[str, torch.Tensor | None], text: str) -> None:
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
    refused(folder, IncompleteCheckpointError, text)


def test_zeros_are_subtracted_exactly() -> None:
    """By the formula in float64, which no product here exceeds."""
    codes = torch.arange(-128, 128, dtype=torch.int8).view(4, 64)
    scales, zeros = torch.rand(4, 2).bfloat16(), torch.tensor([[-128, 127], [0, 1], [-7, 7], [0, 0]], dtype=torch.int8)
    parts = {"_weight_qdata": codes, "_weight_scale": scales, "_weight_zero_point": zeros}
    matrix = TorchAo.matrix(object.__new__(TorchAo), parts, torch.float32)
    wide = [tensor.double().repeat_interleave(32, 1) for tensor in (scales, zeros)]
    assert torch.equal(matrix.double(), (codes.double() - wide[1]) * wide[0])
