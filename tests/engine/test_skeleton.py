"""The model without its weights equals that of transformers' own loading."""

from __future__ import annotations

import json
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoTokenizer

from rabbitllm.engine import skeleton
from rabbitllm.errors import CorruptVocabularyError, OptionError, UnknownArchitectureError
from tests.support.builders import FAMILIES, build_checkpoint, read_tensors, reference_logits, reshard
from tests.support.tiny_models import INPUT, assert_same, load, run, split

VARIANTS = [(name, dtype) for name in FAMILIES for dtype in (torch.float32, torch.bfloat16)]
VARIANTS += [("t5", torch.float16)]  # some modules are kept in float32 then


def plain(folder: Path, family: str, dtype: torch.dtype) -> Any:
    return FAMILIES[family].auto_class.from_pretrained(folder, dtype=dtype)


def build(folder: Path, dtype: torch.dtype = torch.float32, attention: str | None = None) -> Any:
    return skeleton.build_skeleton(folder, skeleton.read_config(folder), dtype, attention)


def write_config(folder: Path, **values: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(("family", "dtype"), VARIANTS)
def test_dtypes_and_class_equal_transformers(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    folder = build_checkpoint(tmp_path, family, tied=FAMILIES[family].ties[0], dtype=dtype, tokenizer=False)
    expected = plain(folder, family, dtype)
    model = build(folder, dtype)
    assert type(model) is type(expected)
    assert not model.training
    assert {name: (tuple(value.shape), value.dtype) for name, value in model.state_dict().items()} == {
        name: (tuple(value.shape), value.dtype) for name, value in expected.state_dict().items()
    }
    assert all(value.is_meta for value in model.state_dict().values())
    assert model.config.dtype == dtype


def test_routing_bias_of_deepseek_stays_in_float32(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "deepseek_v3", dtype=torch.bfloat16)
    model = build(folder, torch.bfloat16)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32
    expected = plain(folder, "deepseek_v3", torch.bfloat16).model.layers[1].mlp.gate.weight.dtype
    assert model.model.layers[1].mlp.gate.weight.dtype == expected  # float32 since transformers 5.24
    loaded = load(split(folder), 0)
    assert_same(run(loaded), reference_logits(folder, INPUT, torch.bfloat16))


@pytest.mark.parametrize(("family", "dtype"), VARIANTS)
def test_buffers_equal_transformers_bit_for_bit(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    folder = build_checkpoint(tmp_path, family, tied=FAMILIES[family].ties[0], dtype=dtype, tokenizer=False)
    expected = plain(folder, family, dtype)
    model = build(folder, dtype)
    skeleton.materialise_buffers(model, lambda path: torch.device("cpu"))
    expected_buffers = dict(expected.named_non_persistent_buffers())
    buffers = dict(model.named_non_persistent_buffers())
    assert buffers.keys() == expected_buffers.keys()
    for name, buffer in buffers.items():
        assert buffer.dtype == expected_buffers[name].dtype
        assert torch.equal(buffer, expected_buffers[name]), name
    # and nothing else was given a value
    assert all(value.is_meta for value in model.state_dict().values())


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_scaled_rotary_frequencies(tmp_path: Path, scaling: dict[str, Any]) -> None:
    rope = {"rope_theta": 5000.0, **scaling}
    folder = build_checkpoint(tmp_path, "llama", tokenizer=False, rope_parameters=rope)
    expected = plain(folder, "llama", torch.float32)
    model = load(split(folder), 0)
    assert torch.equal(model.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)
    assert model.model.rotary_emb.attention_scaling == expected.model.rotary_emb.attention_scaling
    assert_same(run(model), reference_logits(folder, INPUT, torch.float32))


def test_generation_config_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "llama")
    config = transformers.GenerationConfig(temperature=0.3, top_k=7, eos_token_id=[2, 9], do_sample=True)
    config.save_pretrained(folder)
    assert (
        build(folder).generation_config.to_dict() == plain(folder, "llama", torch.float32).generation_config.to_dict()
    )
    loaded = load(split(folder))
    assert loaded.generation_config.eos_token_id == [2, 9]
    assert loaded.generation_config.top_k == 7


def test_without_a_generation_config_the_settings_in_the_config_apply(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "llama")
    (folder / "generation_config.json").unlink(missing_ok=True)
    content = json.loads((folder / "config.json").read_text()) | {"num_beams": 3, "no_repeat_ngram_size": 2}
    (folder / "config.json").write_text(json.dumps(content))
    expected = plain(folder, "llama", torch.float32).generation_config
    actual = build(folder).generation_config
    assert actual.to_dict() == expected.to_dict()
    assert (actual.num_beams, actual.no_repeat_ngram_size, actual.eos_token_id) == (3, 2, 2)
    assert load(split(folder)).generation_config.num_beams == 3


def test_without_a_dtype_in_the_config_the_weights_decide(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "llama", dtype=torch.float16, shards=2)
    content = json.loads((folder / "config.json").read_text())
    content.pop("dtype", None)
    content.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(content))
    for compression in (None, "4bit"):
        assert load(split(folder, compression)).dtype == torch.float16


def test_checkpoint_of_the_base_model_has_no_prefix(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "gpt2", tied=True)
    expected = reference_logits(folder, INPUT, torch.float32)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in read_tensors(folder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "h.0.ln_1.weight" in read_tensors(folder)
    reshard(folder, lambda name: int(name.startswith("h.1")))
    assert_same(run(load(split(folder), 0)), expected)


def test_config_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnknownArchitectureError, match="cannot build the model") as refused:
        skeleton.read_config(tmp_path)
    assert str(tmp_path) in refused.value.problem


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError) as caught:
        skeleton.read_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path} has no config.json")
    assert "layer_shards_saving_path" in caught.value.remedy


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "xyzzy_9"}, "xyzzy_9"),
        ({"model_type": "vit"}, "no text-generating model of type 'vit'"),
        ({"architectures": ["LlamaForCausalLM"]}, "model_type"),
    ],
)
def test_unknown_model_type(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    folder = write_config(tmp_path / "model", **values)
    with pytest.raises(UnknownArchitectureError) as caught:
        skeleton.read_config(folder)
    assert message in caught.value.problem
    assert f"transformers {transformers.__version__}" in caught.value.problem
    assert str(folder) in caught.value.problem
    assert "pip install --upgrade transformers" in caught.value.remedy
    assert "trust_remote_code=True" in caught.value.remedy


REMOTE_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_checkpoint_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = build_checkpoint(tmp_path / "model", "llama")
    expected = reference_logits(folder, INPUT, torch.float32)
    content = json.loads((folder / "config.json").read_text())
    content |= {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "own.py").write_text(REMOTE_CODE)
    with pytest.raises(UnknownArchitectureError, match="trust_remote_code=True"):
        skeleton.read_config(folder)
    assert not (tmp_path / "modules").exists()
    model = load(split(folder), 0, trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    assert_same(run(model), expected)


def test_simultaneous_loads_leave_torch_unchanged(tmp_path: Path) -> None:
    """transformers changes torch's default dtype and `torch.nn.init` while it builds and initialises a model."""
    directory = split(build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16))
    load(directory)
    functions, dtype, interval = dict(vars(torch.nn.init)), torch.get_default_dtype(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            models = list(threads.map(lambda _: load(directory), range(12)))
    finally:
        sys.setswitchinterval(interval)
    assert vars(torch.nn.init) == functions
    assert torch.get_default_dtype() == dtype
    assert {model.dtype for model in models} == {torch.bfloat16}


def test_unsupported_attention(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "bloom")
    with pytest.raises(OptionError) as caught:
        build(folder, attention="sdpa")
    assert "attn_implementation='sdpa'" in caught.value.problem
    assert "Remove attn_implementation" in caught.value.remedy


def test_missing_tokenizer_is_none_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = build_checkpoint(tmp_path, "llama", tokenizer=False)
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        assert skeleton.read_tokenizer(folder) is None
    assert str(folder) in caplog.text
    assert "(there is no vocabulary, such as tokenizer.json or tokenizer.model); model.tokenizer is None" in caplog.text
    assert "sentencepiece" not in caplog.text  # a package that would not help, of which transformers writes


@pytest.mark.parametrize("family", ["qwen2", "bert", "gpt2"])
def test_a_tokenizer_without_a_vocabulary_is_none(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers makes one in which every text is empty or unknown."""
    monkeypatch.setattr("transformers.models.canine.tokenization_canine.UNICODE_VOCAB_SIZE", 1 << 10)  # a second of all
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert len(AutoTokenizer.from_pretrained(tmp_path)) < 10
    assert skeleton.read_tokenizer(tmp_path) is None
    assert "there is no vocabulary" in caplog.text
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "canine"}))  # of characters
    assert skeleton.read_tokenizer(tmp_path) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes")
def test_a_path_that_is_not_utf8_is_told_apart_from_a_damaged_tokenizer(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama").rename(tmp_path / os.fsdecode(b"\xff"))
    with pytest.raises(CorruptVocabularyError, match="Rename the folder: its path is not valid UTF-8"):
        skeleton.check_tokenizer(folder)


def test_chat_template_of_the_processor_is_used_for_text(tmp_path: Path) -> None:
    """Older models for pictures have it in chat_template.json."""
    folder = build_checkpoint(tmp_path, "llama")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert not (folder / "chat_template.json").exists()
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer: Any = skeleton.read_tokenizer(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[user]hi"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(CorruptVocabularyError, match=r"chat_template is 5; expected a text"):
        skeleton.check_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("own")
    tokenizer = skeleton.read_tokenizer(folder)
    assert tokenizer.chat_template == "own"
