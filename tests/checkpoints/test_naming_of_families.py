"""Tensor name -> layer, with the names of a checkpoint of every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from rabbitllm.checkpoints.naming import assign_layers
from tests.support.builders import FAMILIES, build_checkpoint, read_tensors

PLAIN = ["embed_tokens", "norm", "lm_head"]
OTHERS: dict[str, tuple[list[str], str]] = {
    "opt": (
        ["decoder.embed_tokens", "decoder.embed_positions", "decoder.final_layer_norm", "lm_head"],
        "decoder.layers.{}",
    ),
    "gpt2": (["wte", "wpe", "ln_f", "lm_head"], "h.{}"),
    "bloom": (["word_embeddings", "word_embeddings_layernorm", "ln_f", "lm_head"], "h.{}"),
    "falcon": (["word_embeddings", "ln_f", "lm_head"], "h.{}"),
    "mamba2": (["embeddings", "norm_f", "lm_head"], "layers.{}"),
    "jamba": (["embed_tokens", "final_layernorm", "lm_head"], "layers.{}"),
    "t5": (
        ["shared", "encoder.final_layer_norm", "decoder.final_layer_norm"]
        + [f"encoder.block.{layer}" for layer in range(3)],
        "decoder.block.{}",
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_a_real_checkpoint(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    family = FAMILIES[name]
    build_checkpoint(tmp_path, name, tied=family.ties[0], tokenizer=False)
    tensors = list(read_tensors(tmp_path))
    caplog.clear()
    assigned = assign_layers(tensors, family.model_type)
    others, stack = OTHERS.get(name, (PLAIN, "layers.{}"))
    layers = family.config(family.ties[0]).num_hidden_layers
    assert {layer.id for layer in assigned.values()} == {*others, *(stack.format(n) for n in range(layers))}
    for tensor, layer in assigned.items():
        assert tensor.startswith(layer.stem + ".")
        assert layer.stem.endswith(layer.id)
    assert not [record for record in caplog.records if record.name.startswith("rabbitllm")]
