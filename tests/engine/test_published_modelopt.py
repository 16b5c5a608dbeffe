"""Checkpoints of NVIDIA's ModelOpt: read as published, equal to the plain model of its formula, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rabbitllm import AutoModel
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
def test_the_formula_of_modelopt(tmp_path: Path, form: str, family: str) -> None:
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


def test_settings_in_a_file_of_their_own_are_those_of_the_config(tmp_path: Path) -> None:
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
def test_an_algorithm_that_is_not_known_is_refused_by_name(tmp_path: Path, form: str, alone: bool) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    said = {"quant_algo": form}
    if alone:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    refused(folder, UnknownArchitectureError, form)


def refused(folder: Path, error: type[RabbitLLMError], said: str) -> None:
    """By a load that would delete each shard after use, before it has touched any."""
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    with pytest.raises(error, match=said):
        AutoModel.from_pretrained(folder, sequential_shard_processing=True, device="cpu", show_layer_progress=False)
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "hf_quant_config.json"),
        ('{"quantization": 1}', "quant_algo"),
        ('{"quantization": {"quant_algo": 8}}', "a text"),
    ],
)
def test_a_damaged_file_of_settings(tmp_path: Path, text: str, said: str) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    (folder / "hf_quant_config.json").write_text(text)
    refused(folder, RabbitLLMError, said)


def test_settings_of_the_cache_alone_leave_weights_plain(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    expected = expected_of(folder)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    assert_same(run(load(split(folder))), expected)


@pytest.mark.parametrize(
    ("form", "gone", "said"),
    [
        ("NVFP4", "layers.1.mlp.up_proj.weight_scale_2", "without weight_scale_2"),
        ("NVFP4", "layers.1.mlp.up_proj.weight_scale", "without weight_scale"),
        ("FP8", "layers.1.mlp.up_proj.weight_scale", "without weight_scale|no scales"),
    ],
)
def test_codes_without_a_part(tmp_path: Path, form: str, gone: str, said: str) -> None:
    folder = quantized.build_modelopt(tmp_path / "model", "llama", form, tmp_path / "plain", intermediate_size=96)
    tensors = {name: tensor for name, tensor in read_tensors(folder).items() if not name.endswith(gone)}
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    refused(folder, IncompleteCheckpointError, said)


def test_inputs_that_would_be_scaled(tmp_path: Path) -> None:
    folder = quantized.build_modelopt(tmp_path / "model", "llama", "NVFP4", tmp_path / "plain", intermediate_size=96)
    scaled = {"model.layers.0.mlp.up_proj.pre_quant_scale": torch.ones(64, dtype=torch.bfloat16)}
    save_file(read_tensors(folder) | scaled, folder / SINGLE_NAME, metadata={"format": "pt"})
    refused(folder, IncompleteCheckpointError, "pre_quant_scale")
