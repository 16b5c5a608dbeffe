"""`save_pretrained`: the whole model as a checkpoint, bit for bit, at any budget."""

from __future__ import annotations

import errno
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from rabbitllm import AutoModel
from rabbitllm.errors import DiskFullError, OptionError, RabbitLLMError
from tests.support.builders import build_checkpoint, read_tensors, reference_logits, write_torch
from tests.support.quantized import build_bitsandbytes, build_fp8
from tests.support.splitting import failing
from tests.support.tiny_models import ALL, INPUT, assert_same, dequantized, load, plain_model, run, split

FAMILIES = ["llama", "qwen3_moe", "gpt_oss", "t5", "qwen3_next"]


def assert_holds(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    tensors = read_tensors(folder)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("budget", [ALL, 0])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_uncompressed_model_has_equal_bits(tmp_path: Path, family: str, budget: int) -> None:
    source = build_checkpoint(tmp_path / "source", family, dtype=torch.bfloat16, tied=family == "t5", shards=3)
    model = load(split(source), budget)
    expected = run(model)
    model.save_pretrained(tmp_path / "copy")
    assert_holds(tmp_path / "copy", read_tensors(source))
    assert (tmp_path / "copy" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert_same(reference_logits(tmp_path / "copy", INPUT, torch.bfloat16), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_without_a_split_and_with_shared_weights(tmp_path: Path, tied: bool) -> None:
    source = build_checkpoint(tmp_path / "source", "qwen2", tied=tied, shards=2)
    model = AutoModel.from_pretrained(source, split=False, device="cpu", max_memory={"cpu": 0})
    model.save_pretrained(tmp_path / "copy")
    assert_holds(tmp_path / "copy", read_tensors(source))
    assert torch.equal(plain_model(tmp_path / "copy")(INPUT).logits, plain_model(source)(INPUT).logits)


def test_files_of_torch_become_safetensors(tmp_path: Path) -> None:
    safetensors = build_checkpoint(tmp_path / "made", "llama")
    source = write_torch(tmp_path / "source", {"pytorch_model.bin": read_tensors(safetensors)})
    (source / "config.json").write_bytes((safetensors / "config.json").read_bytes())
    AutoModel.from_pretrained(source, split=False, device="cpu").save_pretrained(tmp_path / "copy")
    assert_holds(tmp_path / "copy", read_tensors(safetensors))


@pytest.mark.parametrize("budget", [ALL, 0])
@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_compressed_weights_are_dequantized(tmp_path: Path, compression: str, budget: int) -> None:
    source = build_checkpoint(tmp_path / "source", "qwen3_moe", dtype=torch.bfloat16)
    model = load(split(source, compression), budget)
    expected = run(model)
    model.save_pretrained(tmp_path / "copy")
    plain = dequantized(source, tmp_path / "meant", compression, torch.bfloat16)
    assert_holds(tmp_path / "copy", read_tensors(plain))
    assert_same(reference_logits(tmp_path / "copy", INPUT, torch.bfloat16), expected)


def test_dequantized_weights_have_the_models_dtype(tmp_path: Path) -> None:
    source = build_checkpoint(tmp_path / "source", "llama", dtype=torch.bfloat16)
    model = load(split(source, "8bit"), 0, dtype="float16")
    model.save_pretrained(tmp_path / "copy")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    assert loaded.dtype == torch.float16
    assert torch.equal(loaded(INPUT).logits, model(INPUT).logits)


@pytest.mark.parametrize("build", [build_fp8, functools.partial(build_bitsandbytes, bits=4)], ids=["fp8", "4bit"])
def test_published_quantized_weights_stay_as_they_are(tmp_path: Path, build: Any) -> None:
    source = build(tmp_path / "source", family="llama")
    load(split(source), 0).save_pretrained(tmp_path / "copy")
    assert_holds(tmp_path / "copy", read_tensors(source))
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


def test_shards_stay_within_the_size(tmp_path: Path) -> None:
    source = build_checkpoint(tmp_path / "source", "llama")
    model = load(split(source), 0)
    model.save_pretrained(tmp_path / "copy", max_shard_size="100KB")
    shards = sorted((tmp_path / "copy").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    for shard in shards:
        with safe_open(shard, "pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= 100_000 or len(sizes) == 1
    assert_holds(tmp_path / "copy", read_tensors(source))
    index = json.loads((tmp_path / "copy" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == model.num_parameters()
    assert torch.equal(plain_model(tmp_path / "copy")(INPUT).logits, model(INPUT).logits)


def test_changed_settings_and_the_tokenizer_are_saved(tmp_path: Path) -> None:
    model = load(split(build_checkpoint(tmp_path / "source", "llama")), 0)
    model.generation_config.max_new_tokens = 7
    model.config.rms_norm_eps = 0.25
    model.save_pretrained(tmp_path / "copy", tokenizer=True)
    again = AutoModel.from_pretrained(tmp_path / "copy", split=False, device="cpu")
    assert again.generation_config.max_new_tokens == 7
    assert again.config.rms_norm_eps == 0.25
    assert again.tokenizer("the and").input_ids == model.tokenizer("the and").input_ids
    saved, original = again.config.to_dict(), model.config.to_dict()
    assert {key for key in saved if saved[key] != original[key]} == {"_name_or_path"}


def test_folder_with_a_model_is_not_overwritten(tmp_path: Path) -> None:
    source = build_checkpoint(tmp_path / "source", "llama")
    model = load(split(source), 0)
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    for folder in (source, source / "splitted_model"):
        with pytest.raises(OptionError, match="already holds a model"):
            model.save_pretrained(folder)
    assert before == {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}


def test_disk_that_fills_up(tmp_path: Path) -> None:
    model = load(split(build_checkpoint(tmp_path / "source", "llama")), 0)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with failing(full, lambda number, step: step.path.suffix == ".safetensors"), pytest.raises(DiskFullError):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_weights_in_stored_form_are_saved_from_memory(tmp_path: Path) -> None:
    source = build_checkpoint(tmp_path / "source", "llama", tied=True)
    model = load(split(source))
    model(INPUT)
    model.tie_weights()  # libraries call it; it changes nothing here
    model.model.norm.weight.data += 1  # its version is none of the parameter's
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path / "copy")
    expected = read_tensors(source)
    expected["model.norm.weight"] += 1
    expected["model.embed_tokens.weight"] *= 2
    assert_holds(tmp_path / "copy", expected)


@pytest.mark.parametrize(
    ("family", "compression", "changed"),
    [
        ("qwen3_moe", None, "model.layers.1.mlp.experts.down_proj"),
        ("llama", "4bit", "model.layers.1.self_attn.q_proj.weight"),
        ("llama", "8bit", "lm_head.weight"),
    ],
)
def test_change_of_a_dequantized_weight_is_refused(
    tmp_path: Path, family: str, compression: str | None, changed: str
) -> None:
    model = load(split(build_checkpoint(tmp_path / "source", family), compression))
    model.get_parameter(changed).data[-1] += 1
    with pytest.raises(RabbitLLMError, match=rf"changed since it was loaded \({changed}\)"):
        model.save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_untied_weights_are_refused(tmp_path: Path) -> None:
    model = load(split(build_checkpoint(tmp_path / "source", "llama", tied=True)))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    with pytest.raises(RabbitLLMError, match="changed since it was loaded"):
        model.save_pretrained(tmp_path / "copy")


def test_new_module_is_refused(tmp_path: Path) -> None:
    model = load(split(build_checkpoint(tmp_path / "source", "llama")), 0)
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(RabbitLLMError, match=r"extra\.bias, extra\.weight"):
        model.save_pretrained(tmp_path / "copy")


@pytest.mark.parametrize(
    "options", [{"push_to_hub": True}, {"state_dict": {}}, {"variant": "fp16"}, {"save_original_format": False}]
)
def test_options_that_change_the_result_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    model = load(split(build_checkpoint(tmp_path / "source", "llama")), 0)
    with pytest.raises(OptionError, match=next(iter(options))):
        model.save_pretrained(tmp_path / "copy", **options)
    with pytest.raises(TypeError, match="shard_size"):
        model.save_pretrained(tmp_path / "copy", shard_size=5)
    model.save_pretrained(tmp_path / "copy", is_main_process=False)
    assert not (tmp_path / "copy").exists()
