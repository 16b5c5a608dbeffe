"""llama.cpp's file there and back: every tensor bit for bit, under its own name, in whatever order its rows are."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.lib.worker_llama_cpp import renamed, write_gguf
from benchmarks.quality.gguf_weights import named, types, weights

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "llama, heads of another size": (LlamaForCausalLM, LlamaConfig(**SMALL, head_dim=32)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=32)),
    "qwen3, tied": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True)),
}


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made, config = FAMILIES[request.param]
    torch.manual_seed(0)
    model = made(config)
    for parameter in model.parameters():  # norms are all ones otherwise
        torch.nn.init.normal_(parameter)
    folder = tmp_path / "model"
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def written(checkpoint: Path, kind: str) -> Path:
    path = checkpoint.parent / f"{kind}.gguf"
    write_gguf({"checkpoint": str(checkpoint), "path": str(path), "kind": kind})
    return path


def is_llama(checkpoint: Path) -> bool:
    return bool(json.loads((checkpoint / "config.json").read_text())["model_type"] == "llama")


def test_every_tensor_comes_back_bit_for_bit(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    found = {weight.name: weight for weight in weights(written(checkpoint, "BF16"))}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(torch.tensor(found[name].values), tensor.float()), name
        assert (found[name].kind, found[name].nbytes) == (
            ("BF16", 2 * tensor.numel()) if tensor.dim() > 1 else ("F32", 4 * tensor.numel())
        )


def test_quantized_rows_come_back_as_the_reference_dequantizes_them(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    kind = gguf.GGMLQuantizationType.Q4_0
    for weight in weights(written(checkpoint, "Q4_0")):
        if weight.values.ndim > 1:
            packed = gguf.quants.quantize(tensors[weight.name].float().numpy(), kind)
            assert weight.nbytes == packed.nbytes
            assert np.array_equal(weight.values, gguf.quants.dequantize(packed, kind)), weight.name


def test_names_both_ways_and_as_the_package_has_them(checkpoint: Path) -> None:
    """The `gguf` package's own table of names, which is for the checkpoints of transformers, says the same."""
    architecture = (
        gguf.MODEL_ARCH.LLAMA if "Llama" in (checkpoint / "config.json").read_text() else gguf.MODEL_ARCH.QWEN3
    )
    table = gguf.get_tensor_name_map(architecture, SMALL["num_hidden_layers"])
    for name in load_file(checkpoint / "model.safetensors"):
        theirs = renamed(name.removesuffix(".weight"))
        assert theirs == table.get_name(name, try_suffixes=(".weight",))
        assert named(theirs) == name
    for unknown in ("blk.0.ffn_gate_exps.weight", "rope_freqs.weight", "blk.x.attn_q.weight"):
        with pytest.raises(ValueError, match="no tensor of a model"):
            named(unknown)


def test_the_rows_of_a_llama_alone_are_in_another_order(checkpoint: Path) -> None:
    reader = gguf.GGUFReader(written(checkpoint, "BF16"))
    raw = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    tensors = load_file(checkpoint / "model.safetensors")
    for leaf in ("q", "k", "v"):
        rows = tensors[f"model.layers.0.self_attn.{leaf}_proj.weight"].float().numpy()
        assert np.array_equal(raw[f"blk.0.attn_{leaf}.weight"], rows) == (not is_llama(checkpoint) or leaf == "v")


def test_types_for_people(checkpoint: Path) -> None:
    found = list(weights(written(checkpoint, "Q4_0")))
    assert types(found).startswith("Q4_0: embed_tokens, ")
    assert "norm" not in types(found)
    (mixed,) = [weight for weight in found if weight.name.endswith("layers.1.mlp.down_proj.weight")]
    others = [weight for weight in found if weight is not mixed]
    other = type(mixed)(mixed.name, "Q6_K", mixed.nbytes, mixed.values)
    assert "1 Q4_0 and 1 Q6_K: down_proj" in types([*others, other])
