"""Families whose cache is not keys and values of every token: small settings in which every kind of state is used.

Windows are shorter than the prompts, so that they roll in the first pass already, and chunks are shorter than what is
generated. Settings only; `builders` makes the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.builders import DELTA, EXPERTS, FAMILIES, LATENT, ROUTED, SLIDING, VOCABULARY_SIZE, WINDOW, Family

_MOE: Mapping[str, object] = {
    **EXPERTS,
    **ROUTED,
    "num_local_experts": 4,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
}
_INDEXED: Mapping[str, object] = {
    **_MOE,
    **LATENT,
    "head_dim": 16,
    "index_topk": WINDOW,
    "index_head_dim": 16,
    "index_n_heads": 32,  # with few heads scores are equal
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_STATE_SPACE: Mapping[str, object] = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_RELATIVE: Mapping[str, object] = {
    **_MOE,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": WINDOW,
    "d_rel": 8,
    "rel_extent": 64,
    "unpadded_vocab_size": VOCABULARY_SIZE,
    "conv_kernel_size": 4,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
}
_NARROW: Mapping[str, object] = {"head_dim": 16, **SLIDING}
_ATTENDING = ["linear_attention", "full_attention", "linear_attention"]

HYBRIDS: Mapping[str, Family] = {
    # windows
    "afmoe": Family("afmoe", {**_NARROW, **_MOE}),
    "beam": Family("beam", {**_NARROW, **_MOE, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "cohere2": Family("cohere2", SLIDING),
    "cohere2_moe": Family("cohere2_moe", {**_NARROW, **_MOE}),
    "cwm": Family("cwm", _NARROW),
    "dots1": Family("dots1", {**_NARROW, **_MOE, "first_k_dense_replace": 1}),
    "exaone4": Family("exaone4", SLIDING),
    "exaone_moe": Family("exaone_moe", {**SLIDING, **_MOE, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "flint": Family("flint", {**_NARROW, **_MOE}),
    "gemma2": FAMILIES["gemma2"],
    "gemma3": FAMILIES["gemma3"],
    "gemma3n": Family(
        "gemma3n_text",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY_SIZE,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY_SIZE,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "gemma4_unified": Family("gemma4_unified_text", {**_NARROW, "global_head_dim": 16}),
    "gpt_neo": Family(
        "gpt_neo",
        {
            "num_layers": 2,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "window_size": WINDOW,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "gpt_oss": FAMILIES["gpt_oss"],
    "granite_swa": Family("granite_swa", SLIDING),
    "granitemoe_swa": Family("granitemoe_swa", {**SLIDING, **_MOE}),
    "kolibri1": Family("kolibri1", {**_NARROW, **_MOE}),
    "laguna": Family("laguna", {**_NARROW, **_MOE}),
    "llama4": Family(
        "llama4_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": 16,
            "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
        },
    ),
    "mellum": Family("mellum", {**_NARROW, **_MOE}),
    "mimo_v2_flash": Family("mimo_v2_flash", {**_NARROW, **_MOE, "v_head_dim": 16}),
    "ministral": Family("ministral", _NARROW),
    "ministral3": Family("ministral3", {"head_dim": 16, "sliding_window": WINDOW}),
    "mistral": FAMILIES["mistral"],
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "modernbert_decoder": Family(
        "modernbert-decoder",
        {"num_key_value_heads": 4, "local_attention": WINDOW, "layer_types": SLIDING["layer_types"]},
    ),
    "olmo3": Family("olmo3", SLIDING),
    "phi3": Family("phi3", {"sliding_window": WINDOW}),
    "phimoe": Family("phimoe", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen2": Family("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}),
    "qwen2_moe": Family(
        "qwen2_moe", {**_MOE, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}
    ),
    "qwen3": Family("qwen3", {**_NARROW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3_moe": Family("qwen3_moe", {**_MOE, "head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW}),
    "smollm3": Family("smollm3", {**SLIDING, "use_sliding_window": True}),
    "starcoder2": Family("starcoder2", {"sliding_window": WINDOW}),
    "vaultgemma": Family("vaultgemma", {**_NARROW, "query_pre_attn_scalar": 16}),
    # tokens chosen by an index
    "axk2": Family("axk2", _INDEXED),
    "deepseek_v32": Family("deepseek_v32", _INDEXED),
    "deepseek_v4": Family(
        "deepseek_v4",
        {
            **_MOE,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "q_lora_rank": 32,
            "o_groups": 2,
            "o_lora_rank": 32,
            "index_topk": WINDOW,
            "index_head_dim": 32,
            "index_n_heads": 4,
            "sliding_window": WINDOW,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
            "compress_rates": {"heavily_compressed_attention": 16, "compressed_sparse_attention": 4},
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "num_nextn_predict_layers": 0,
        },
    ),
    "dots3_note": Family(
        "dots3_note_text",
        {
            **_INDEXED,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "layer_types": ["indexed_attention", "sliding_attention"] * 2,
            "sliding_window": WINDOW,
            "shared_experts_intermediate_size": 32,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 32,
            "swa_kv_lora_rank": 32,
            "swa_head_dim": 32,
            "swa_qk_nope_head_dim": 16,
            "swa_qk_rope_head_dim": 16,
            "swa_v_head_dim": 16,
        },
    ),
    "glm_moe_dsa": Family("glm_moe_dsa", _INDEXED),
    "hy_v4": Family("hy_v4", _INDEXED),
    # states
    "bailing_hybrid": Family(
        "bailing_hybrid", {**_MOE, **LATENT, "head_dim": 16, "layer_types": _ATTENDING, "num_mtp_layers": 0}
    ),
    "bamba": Family("bamba", {**_STATE_SPACE, "attn_layer_indices": [1, 3]}),
    "falcon_h1": Family("falcon_h1", {**_STATE_SPACE, "mamba_d_ssm": 128}),
    "falcon_mamba": Family("falcon_mamba", {"state_size": 16}),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {**_STATE_SPACE, **_MOE, "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"] * 2},
    ),
    "inkling": Family("inkling_text", _RELATIVE),
    "inkling2": Family("inkling2_text", _RELATIVE),
    "jamba": FAMILIES["jamba"],
    "kimi_linear": Family(
        "kimi_linear",
        {
            **_MOE,
            **LATENT,
            "q_lora_rank": None,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "layer_types": _ATTENDING,
        },
    ),
    "lfm2": Family("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2_moe": Family("lfm2_moe", {**_MOE, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}),
    "lfm3": Family(
        "lfm3",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["conv", "full_attention", "sliding_attention"]},
    ),
    "mamba": Family("mamba", {"state_size": 16}),
    "mamba2": FAMILIES["mamba2"],
    "minimax": Family("minimax", {**_MOE, "head_dim": 16, "block_size": 16, "layer_types": _ATTENDING}),
    "nemotron_h": Family(
        "nemotron_h",
        {
            **_MOE,
            "layers_block_type": ["mamba", "attention", "mamba", "moe"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "use_mamba_kernels": False,
        },
    ),
    "olmo_hybrid": Family("olmo_hybrid", {**DELTA, "num_hidden_layers": 3, "layer_types": _ATTENDING}),
    "qwen3_5": Family("qwen3_5_text", DELTA),
    "qwen3_5_moe": Family("qwen3_5_moe_text", {**_MOE, **DELTA}),
    "qwen3_next": FAMILIES["qwen3_next"],
    "qwen4_exp": Family(
        "qwen4_exp_text",
        {
            **_MOE,
            **DELTA,
            "hc_lowrank": 16,
            "ple_layer_ids": [1],
            "ple_embed_dim": 64,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 300,
            "split_ngram_parts": 2,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": WINDOW,
            "indexer_compress_ratio": 2,
        },
    ),
    "recurrent_gemma": Family("recurrent_gemma", {"lru_width": 64, "attention_window_size": WINDOW}),
    "rwkv": Family("rwkv"),
    "xlstm": Family("xlstm", {"hidden_size": 128, "num_heads": 4, "chunk_size": 16}),
    "zamba": Family(
        "zamba",
        {
            "num_hidden_layers": 6,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 16,
            "use_mamba_kernels": False,
        },
    ),
    "zamba2": Family(
        "zamba2",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "attention_head_dim": 32,
            "n_mamba_heads": 4,
            "mamba_headdim": 32,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "hybrid_layer_ids": [1, 3],
        },
    ),
    "zaya": Family(
        "zaya",
        {
            **_MOE,
            "head_dim": 16,
            "num_experts_per_tok": 1,
            "router_hidden_size": 32,
            "sliding_window": WINDOW,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        },
    ),
}
