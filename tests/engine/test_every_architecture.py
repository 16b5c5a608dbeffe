"""Every causal language model that transformers has and that can be built small: resident and streamed, bit for bit.

The families of `builders` are those that are promised; this sweep finds the others' surprises. A type that cannot be
built from these settings is skipped, and says why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rabbitllm.engine.blueprint import SCALES_IN_PLACE
from rabbitllm.engine.expert_finding import is_routed
from rabbitllm.engine.placement import Tier
from rabbitllm.errors import RabbitLLMError
from tests.support.tiny_models import INPUT, load, plain_model, split, tiers

SHORT = ("cohere2", "falcon_h1", "glm4_moe", "gemma3n_text", "longcat_flash", "qwen3_5_moe_text", "zamba2")
"""What `make test` runs: each has something that no family of the builders has."""
LARGEST = 40_000_000
"""Parameters above which a type is skipped."""

SMALL: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OTHER_NAMES: dict[str, Any] = {
    "head_dim": 16,
    "num_layers": 3,
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 64,
    "d_model": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 80,
    "n_shared_experts": 1,
    "ffn_dim": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "sliding_window": 8,
    "state_size": 16,
    "word_embed_proj_dim": 64,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
}
STATE_SPACE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
ALTERNATING = ["sliding_attention", "full_attention"]
OWN: dict[str, dict[str, Any]] = {
    "bamba": {**STATE_SPACE, "attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": {**LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "falcon_h1": {**STATE_SPACE, "mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 272,
        "layer_types": ALTERNATING * 3,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 272,
        "global_head_dim": 16,
        "layer_types": ALTERNATING * 2,
    },
    "glm4_moe_lite": LATENT,
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**STATE_SPACE, "layer_types": ["mamba", "attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4_text": {"intermediate_size_mlp": 128},
    "longcat_flash": {
        **LATENT,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 80,
        "ffn_hidden_size": 128,
    },
    "minicpm3": LATENT,
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "recurrent_gemma": {"lru_width": 64},
    "zamba2": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "attention_head_dim": 32,
        "n_mamba_heads": 4,
        "mamba_headdim": 32,
        "mamba_d_state": 16,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
    },
}
_auto: Any = transformers.AutoModelForCausalLM


def build(folder: Path, name: str) -> None:
    """Save a small random model of a type, or skip."""
    try:
        try:
            config = transformers.AutoConfig.for_model(name, **(SMALL | OTHER_NAMES | OWN.get(name, {})))
        except Exception:  # some types refuse settings that are not theirs
            config = transformers.AutoConfig.for_model(name, **(SMALL | OWN.get(name, {})))
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in _auto.from_config(config).parameters())
        if size > LARGEST:
            pytest.skip(f"{size:,} parameters")
        torch.manual_seed(0)
        model = _auto.from_config(config, dtype=torch.float32).eval()
        with torch.inference_mode():
            assert model(INPUT).logits.isfinite().all()
    except Exception as error:
        if name in SHORT:
            raise
        pytest.skip(f"{type(error).__name__}: {str(error)[:200]}")
    model.save_pretrained(folder)


def passes(model: Any, generates: bool) -> list[torch.Tensor]:
    with torch.inference_mode():
        found = [model(INPUT).logits]
        if generates:
            found.append(model.generate(INPUT, max_new_tokens=6, do_sample=False))
    return found


def possible_passes(plain: Any) -> tuple[list[torch.Tensor], bool]:
    """What `passes` finds, and whether the model generates: not every type does from such settings."""
    try:
        return passes(plain, True), True
    except Exception:
        return passes(plain, False), False


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SHORT else pytest.mark.long)
        for name in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *SHORT})
    ],
)
def test_every_type_has_the_bits_of_transformers(tmp_path: Path, name: str) -> None:
    build(tmp_path / "model", name)
    plain = plain_model(tmp_path / "model")
    expected, generates = possible_passes(plain)
    for compression in (None, "4bit"):
        directory = split(tmp_path / "model", compression)
        resident = load(directory)
        found = passes(resident, generates)
        if compression is None:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        if name in SCALES_IN_PLACE:
            with pytest.raises(RabbitLLMError, match="rescales its weights in place, so all of them must stay"):
                load(directory, 0)
            continue
        streamed = load(directory, 0)
        assert Tier.STREAMED in tiers(streamed).values()
        routed = {path for path, module in streamed.named_modules() if is_routed(module)}
        assert routed == {placed.unit for placed in streamed.placement.experts}
        assert all(torch.equal(a, b) for a, b in zip(passes(streamed, generates), found, strict=True))
