"""Models that speak: only the part that generates text is loaded, and equals transformers' class of that part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.load_plan import LoadPlanner
from rabbitllm.store.layer_store import LayerStore
from tests.support import quantized, tiny_configs, tiny_inputs
from tests.support.builders import make_tokenizer, read_tensors
from tests.support.one_thread import one_thread as one_thread
from tests.support.picture_models import picture
from tests.support.tiny_models import ALL, load, split

TYPES = {"qwen2_5_omni": "Qwen2_5Omni", "qwen3_omni_moe": "Qwen3OmniMoe"}
PIECES = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}


def build(folder: Path, model_type: str) -> Any:
    """A checkpoint of the whole model, as it is published; returns the model."""
    whole = getattr(transformers, f"{TYPES[model_type]}ForConditionalGeneration")
    model: Any = next(tiny_configs.models(whole, model_type, []))
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=drawn)
    model.save_pretrained(folder, max_shard_size=4_000_000)
    make_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.bits
@pytest.mark.parametrize("model_type", TYPES)
def test_text_equals_transformers(tmp_path: Path, model_type: str, one_thread: None) -> None:
    whole = build(tmp_path / "model", model_type)
    thinker = getattr(transformers, f"{TYPES[model_type]}ThinkerForConditionalGeneration")
    plain = thinker.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    for parameter in plain.parameters():
        parameter.data = parameter.data.clone()
    cases = [tiny_inputs.inputs_of(whole.thinker, media) for media in ((), ("image",), ("audio",))]
    assert [inputs.kinds for inputs in cases] == [("text",), ("text", "image"), ("text", "audio")]
    directory = split(tmp_path / "model")
    for budget in (ALL, 0):
        model = load(directory, budget)
        assert type(model).__name__ == thinker.__name__
        for inputs in cases:
            expected = tiny_inputs.results(plain, inputs.arguments)
            assert tiny_inputs.same(tiny_inputs.results(model, inputs.arguments), expected)
            tokens = tiny_inputs.generated(plain, inputs.arguments)
            assert torch.equal(tiny_inputs.generated(model, inputs.arguments), tokens)


@pytest.mark.parametrize("model_type", TYPES)
def test_talker_is_kept_and_never_read(tmp_path: Path, model_type: str) -> None:
    build(tmp_path / "model", model_type)
    before = read_tensors(tmp_path / "model")
    directory = split(tmp_path / "model")
    assert LayerStore(directory).tensors.keys() == before.keys()
    model = load(directory, 0)
    speaking = {name for name in before if not name.startswith("thinker.")}
    assert set(model.unused_tensors) == speaking
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["model_type"] == model_type
    saved = read_tensors(tmp_path / "saved")
    assert all(torch.equal(saved[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)


def test_published_quantized(tmp_path: Path) -> None:
    """The settings are in the config of the whole model, where transformers' class of the part does not see them."""
    for name in ("model", "plain"):
        build(tmp_path / name, "qwen2_5_omni")
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    unconverted = ["visual", "audio_tower", "talker", "token2wav", "lm_head"]

    def change(name: str, tensor: torch.Tensor, *, plain: bool) -> quantized.Named:
        parts = dict(quantized.fp8_blocks(name, tensor, 16) if name.startswith("thinker.model.layers.") else [])
        if plain and len(parts) == 2:
            codes, scales = parts.values()
            yield name, codes.float() * scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
        else:
            yield from parts.items() or [(name, tensor)]

    quantized.rewrite(tmp_path / "plain", lambda *args: change(*args, plain=True), None, 1)
    settings = {**config, "modules_to_not_convert": unconverted}
    quantized.rewrite(tmp_path / "model", lambda *args: change(*args, plain=False), settings, 2)
    plain = transformers.Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(tmp_path / "plain").eval()
    ids = torch.tensor([[1, 40, 81, 7, 200, 33, 160]])
    with torch.inference_mode():
        expected = plain(ids).logits
        for budget in (ALL, 0):
            assert torch.equal(load(split(tmp_path / "model"), budget)(ids).logits, expected)


def test_config_without_weights(tmp_path: Path) -> None:
    build(tmp_path / "model", "qwen2_5_omni")
    LoadPlanner(RunOptions(device="cpu"), [CpuDevice()], tmp_path / "model").check_config()


def test_processor_of_the_whole_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build(folder, "qwen2_5_omni")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(PIECES.values())})
    tokenizer._set_model_specific_special_tokens(special_tokens=PIECES)
    tokenizer.save_pretrained(folder)
    pictures = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "patch_size": 14,
        "feature_size": 16,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5OmniProcessor"}))
    model = load(split(folder), 0)
    assert type(model.processor).__name__ == "Qwen2_5OmniProcessor"
    inputs = model.processor(images=[picture()], text=["<|IMAGE|> What is this?"], return_tensors="pt")
    assert {"input_ids", "pixel_values", "image_grid_thw"} <= inputs.keys()
