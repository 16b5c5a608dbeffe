"""Weights under the names of a module around the model, and weights that are something else than the model."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from rabbitllm import AutoModel
from rabbitllm.errors import IncompleteCheckpointError, UnreadableFormatError
from tests.support.builders import INDEX_NAME, SINGLE_NAME, build_checkpoint, read_tensors
from tests.support.gguf_files import write_gguf
from tests.support.splitting import names_in
from tests.support.tiny_models import INPUT

BUDGETS = [None, {"cpu": "1MiB"}]


def renamed(folder: Path, prefix: str, family: str = "llama") -> tuple[Path, torch.Tensor]:
    """A checkpoint with a prefix before each name, and the logits of the one without."""
    build_checkpoint(folder, family)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    expected = plain(INPUT).logits
    tensors = read_tensors(folder)
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / SINGLE_NAME, {"format": "pt"})
    return folder, expected


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_module_around_the_model(tmp_path: Path, prefix: str, family: str) -> None:
    folder, expected = renamed(tmp_path / "model", prefix, family)
    for limits in BUDGETS:
        model = AutoModel.from_pretrained(folder, device="cpu", max_memory=limits)
        assert torch.equal(model(INPUT).logits, expected)
    assert "layers.0.safetensors" in {
        name.removeprefix(f"{prefix}model.") for name in names_in(folder / "splitted_model")
    }
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert torch.equal(again(INPUT).logits, expected)


def test_save_of_peft_is_said(tmp_path: Path) -> None:
    folder, _ = renamed(tmp_path / "model", "base_model.model.")
    with pytest.raises(IncompleteCheckpointError, match=r"PEFT has put 'base_model\.model\.' before the names"):
        AutoModel.from_pretrained(folder, device="cpu", sequential_shard_processing=True)
    assert (folder / SINGLE_NAME).exists()
    tensors = {f"base_model.model.{name}": tensor for name, tensor in read_tensors(folder).items()}
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file({**tensors, f"{name}.lora_A.weight": torch.ones(2, 2)}, folder / SINGLE_NAME, {"format": "pt"})
    with pytest.raises(IncompleteCheckpointError, match=r"an adapter \(LoRA\), alone or not merged .*merge_and_unload"):
        AutoModel.from_pretrained(folder, device="cpu")


def test_adapter_as_gguf_is_said(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "lora.gguf", changed=lambda writer: writer.add_string("general.type", "adapter"))
    with pytest.raises(UnreadableFormatError, match=r"lora\.gguf is an adapter \(LoRA\), not a model"):
        AutoModel.from_pretrained(file, device="cpu", sequential_shard_processing=True)
    assert file.exists()


def test_files_beside_the_weights_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", shards=2)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")(INPUT).logits
    tensors = read_tensors(folder)
    save_file(tensors, folder / SINGLE_NAME, {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    assert (folder / INDEX_NAME).exists()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            logits = AutoModel.from_pretrained(folder, device="cpu")(INPUT).logits
    assert torch.equal(logits, expected)
    assert (
        caplog.text.count("has an adapter (adapter_config.json) in the folder of the weights. It is not applied") == 1
    )
    assert caplog.text.count(f"has both {SINGLE_NAME} and {INDEX_NAME}. The single file is used") == 1
