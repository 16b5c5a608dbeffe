"""Tiny checkpoints whose bytes are the same on every machine: weights from an integer generator, few values each.

Few values, so that archives of them are small; and multiples of 1/64, so that every dtype holds them exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.builders import make_tokenizer

SHARD = "model-{:05}-of-{:05}.safetensors"
INDEX = "model.safetensors.index.json"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 320,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Matrices of the MLP have 32,768 elements, so that 4bit-double applies to them."""
MIXTURE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "intermediate_size": 64,
}


def weights(config: Mapping[str, Any], seed: int = 1) -> dict[str, torch.Tensor]:
    """Tensors by name, bfloat16, for a config like those above."""
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        lead = f"model.layers.{layer}."
        shapes[lead + "input_layernorm.weight"] = (hidden,)
        shapes |= {f"{lead}self_attn.{part}_proj.weight": (number * head, hidden) for part, number in heads.items()}
        shapes[lead + "self_attn.o_proj.weight"] = (hidden, heads["q"] * head)
        shapes[lead + "post_attention_layernorm.weight"] = (hidden,)
        if "num_experts" in config:
            shapes |= {f"{lead}self_attn.{part}_norm.weight": (head,) for part in "qk"}
            shapes[lead + "mlp.gate.weight"] = (config["num_experts"], hidden)
            of_experts = [f"{lead}mlp.experts.{number}." for number in range(config["num_experts"])]
        else:
            of_experts = [lead + "mlp."]
        width = config.get("moe_intermediate_size", middle)
        for expert in of_experts:
            shapes |= {f"{expert}{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
            shapes[expert + "down_proj.weight"] = (hidden, width)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
    return {name: _values(shape, seed + number) for number, (name, shape) in enumerate(shapes.items())}


def _values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Multiples of 1/64 from -7/64 to 7/64, drawn by a congruential generator; of vectors about 1."""
    count = int(torch.Size(shape).numel())
    state, drawn = seed * 2654435761 % 2**32, []
    for _ in range(count):
        state = (state * 1664525 + 1013904223) % 2**32
        drawn.append((state >> 16) % 15 - 7)
    made = torch.tensor(drawn, dtype=torch.float32) / 64
    return (made + 1 if len(shape) == 1 else made).reshape(shape).bfloat16()


def write(folder: Path, config: Mapping[str, Any] = LLAMA, shards: int = 3, seed: int = 1) -> Path:
    """Write a checkpoint with its tokenizer; its layers span shards."""
    folder.mkdir(parents=True)
    tensors = weights(config, seed)
    groups: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    for number, (name, tensor) in enumerate(tensors.items()):
        groups[number * shards // len(tensors)][name] = tensor
    files = {SHARD.format(number + 1, shards): group for number, group in enumerate(groups)}
    for file, group in files.items():
        save_file(group, folder / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    weight_map = {name: file for file, group in files.items() for name in group}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    make_tokenizer().save_pretrained(folder)
    return folder
