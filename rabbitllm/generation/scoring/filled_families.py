"""Which models can have sequences padded at the end without a change of their results: those tested for it.

In such a model no token depends on later ones, by attention or by a state, and nothing depends on the length of the
longest sequence in the batch.
"""

from __future__ import annotations

from typing import Any

from rabbitllm.generation.packed_families import PACKABLE, depends_on_longest

FILLABLE = PACKABLE | frozenset(
    {
        *("axk2", "bailing_hybrid", "bamba", "biogpt", "bloom", "codegen", "ctrl", "deepseek_v4"),
        *("diffllama", "doge", "dots3_note_text", "falcon", "falcon_h1", "falcon_mamba", "fuyu", "gpt_neo"),
        *("gpt_neox_japanese", "gptj", "granitemoehybrid", "hrm_text", "hy_v4", "inkling2_text", "inkling_text"),
        *("jamba", "jetmoe", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "llama4_text", "mamba", "mamba2"),
        *("minimax", "minimax_m3_vl_text", "moshi", "mpt", "nemotron_h", "olmo_hybrid", "openai-gpt", "opt"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "xglm", "xlm"),
        *("xlstm", "zamba", "zamba2", "zaya"),
    }
)
"""Model types (transformers 5.23); their test is `tests/generation/scoring/test_every_family.py`."""


def can_be_filled_up(model: Any) -> bool:
    """Whether sequences of different lengths can go through a model in one padded batch."""
    text = model.config.get_text_config(decoder=True)
    return text.model_type in FILLABLE and not depends_on_longest(text)
