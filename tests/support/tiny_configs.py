"""Small models of any type that transformers has, built by introspection of its config class.

Every setting whose name is in a table gets the value of the table, in the config and in those within it (text, vision,
audio), so that sizes that have to agree do. A few types need more: `OWN`. A type that cannot be built from that is
built with its default sizes, and fewer layers, experts and rows of the vocabulary. Knows nothing of rabbitllm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from tests.support.builders import VOCABULARY_SIZE

LARGEST = 50_000_000
"""Parameters above which a model is not small."""
FIRST_TOKEN, LAST_TOKEN = 100, 199
"""Of texts; ids of special tokens lie outside."""
END_TOKEN = 2

FEWER: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("vocab_size", "text_vocab_size", "vocab_size_per_layer_input", "entity_vocab_size"),
            *("pronunciation_vocab_size", "shape_vocab_size", "n_vocab"),
        ),
        VOCABULARY_SIZE,
    ),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 3),
    **dict.fromkeys(
        (
            *("depth", "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
            *("encoder_num_hidden_layers", "decoder_num_hidden_layers", "t2u_encoder_layers", "t2u_decoder_layers"),
            *("speech_encoder_layers", "num_global_layers", "num_blocks", "n_blocks"),
        ),
        2,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_selected_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    "first_k_dense_replace": 1,
    "num_mem_blocks": 1,
    "unpadded_vocab_size": 260,
    "max_window_layers": 1,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
"""Settings that say how many there are of something."""

NARROWER: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "word_embed_proj_dim", "lru_width"),
            *("out_hidden_size", "projection_dim", "encoder_hidden_size", "text_hidden_size", "thinker_hidden_size"),
            *("projector_hidden_size", "projection_hidden_size", "vision_hidden_size", "input_embedding_size"),
            *("output_embedding_size", "emb_dim", "dim", "cross_hidden_size", "decoder_hidden_size", "mamba_d_ssm"),
            *("projector_input_dim", "projector_output_dim", "backbone_feature_size", "vision_output_dim"),
            *("entity_emb_size", "pronunciation_embed_dim", "shape_embed_dim", "d_embed", "audio_hidden_size"),
            "hidden_size_global",
            *("image_token_embed_dim", "mm_embed_dim", "output_proj_dims", "block_size_hidden", "dim_model_base"),
        ),
        64,
    ),
    **dict.fromkeys(
        (
            *("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner", "mlp_dim"),
            *("ffn_hidden_size", "intermediate_size_mlp", "speech_encoder_intermediate_size", "ff_dim", "n_inner"),
            *("feed_forward_size", "projection_intermediate_size", "projector_intermediate_size"),
        ),
        128,
    ),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_hidden_size", "expert_dim"), 80),
    **dict.fromkeys(("shared_expert_intermediate_size", "share_expert_dim", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(
        (
            *("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"),
            *("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"),
            *("encoder_num_attention_heads", "decoder_num_attention_heads", "speech_encoder_attention_heads"),
            *("attention_heads", "mamba_n_heads", "n_mamba_heads", "index_n_heads", "linear_num_value_heads"),
            *("t2u_encoder_attention_heads", "t2u_decoder_attention_heads", "num_self_attention_heads"),
            *("swa_num_attention_heads", "num_linear_attention_heads", "linear_attn_num_heads"),
        ),
        4,
    ),
    **dict.fromkeys(
        (
            *("num_key_value_heads", "n_kv_heads", "linear_num_key_heads", "num_cross_attention_heads"),
            *("encoder_num_key_value_heads", "decoder_num_key_value_heads", "swa_num_key_value_heads"),
        ),
        2,
    ),
    **dict.fromkeys(
        (
            *("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "linear_key_head_dim", "d_kv"),
            *("linear_value_head_dim", "index_head_dim", "global_head_dim", "kv_channels", "attention_head_size"),
            *("state_size", "mamba_d_state", "ssm_state_size", "query_pre_attn_scalar", "swa_head_dim", "d_head"),
            *("hidden_size_per_layer_input", "mamba_chunk_size", "chunk_size", "mamba_headdim", "mamba_head_dim"),
        ),
        16,
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "adapter_rank", "time_step_rank"), 32),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
    **dict.fromkeys(
        (
            *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "block_size_max"),
            *("max_encoder_position_embeddings", "max_decoder_position_embeddings", "max_text_positions"),
            *("max_target_positions", "model_max_length"),
        ),
        256,
    ),
    "mamba_d_head": 32,
    "laurel_rank": 8,
    "sliding_window": 8,
    "index_topk": 8,
    "rotary_dim": 8,
    "image_size": 56,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "max_source_positions": 64,
    "num_mel_bins": 16,
    "conv_channels": 64,
    "output_channels": 64,
    "num_latents": 8,
    "d_latents": 64,
    "initializer_range": 0.08,
}
"""Settings that say how large something is."""

LISTS: dict[str, Any] = {
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "global_attn_indexes": [0],
    "intermediate_layers_indices": [0],
    "deepstack_layer_indexes": [0],
}

LATENT: dict[str, Any] = {"num_key_value_heads": 4}
"""Keys and values of every head are made from one vector."""
LINEAR: dict[str, Any] = {"num_hidden_layers": 4}
STATE_SPACE: dict[str, Any] = {"num_hidden_layers": 4}
KINDS = ("full_attention", "sliding_attention")
ALTERNATING = ["sliding_attention", "full_attention"]
_ANY_SIZE = {"image_grid_pinpoints": [[56, 56], [112, 112]]}
_FOUR_PATCHES = {"mm_tokens_per_image": 4}
_CODES = {f"<|visual token {code:06}|>": 251 + code for code in range(16)}
_PICTURE_VOCABULARY = {"<image>": 250, "<|extra_200|>": 249} | _CODES
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_INDEXER = {
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
}
_OF_WINDOWS = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "head_dim"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16),
}
_TOKENIZED_SOUND = {"num_filters": 4, "downsampling_ratios": [2, 2, 4, 5], "depths": [1] * 5}
_STARTS_OF_MEDIA = {"vision_start_token_id": 240, "audio_start_token_id": 241}
_SAM = {"downsample_channels": [64, 64], "global_attn_indexes": [0], "window_size": 2}
OWN: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 230, "audio_token_offset": 246},
    "apertus1p5_vision_tokenizer": {
        "codebook_size": 16,
        "embed_dim": 8,
        "latent_channels": 8,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1],
        "num_res_blocks": 1,
        "resolution": 64,
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "bailing_hybrid": {"num_hidden_layers": 4, "layer_group_size": 2},
    "bamba": {**STATE_SPACE, "attn_layer_indices": [1, 3]},
    "blt": {"num_hidden_layers": 3, "encoder_hash_byte_group_vocab": 300, "encoder_hash_byte_group_size": [3]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {kind: {"rope_theta": 1e4, "rope_type": "default"} for kind in KINDS}},
    "cosmos3_edge_text": {"rope_parameters": _SECTIONS},
    "cosmos3_edge_vision": {"num_patches": 16},
    "deepseek_ocr2": {
        "vision_config": {"sam_config": _SAM},
        "text_config": {"mlp_layer_types": ["dense", "sparse"] * 2},
    },
    "deepseek_ocr2_text": {"num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse"] * 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 80, "moe_top_k": 2},
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 16},
    "dots3_note_text": {**LATENT, "num_hidden_layers": 4, "head_dim": 32, "shared_experts_intermediate_size": 32}
    | {f"swa_{name}": size for name, size in _OF_WINDOWS.items()},
    "dots3_note_vision_encoder": {
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    "emu3": {"vocabulary_map": _PICTURE_VOCABULARY},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1] * 4, "hidden_size": 32, "codebook_size": 16},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "chameleon": {"vocabulary_map": _PICTURE_VOCABULARY},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [80, 80],
        "rope_parameters": {**_SECTIONS, "mrope_section": [3, 3, 2]},
    },
    "evolla": {
        "protein_encoder_config": {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "max_position_embeddings": 64,
        },
        "aligner_num_add_layers": 1,
        "resampler_depth": 1,
        "resampler_dim_head": 16,
        "resampler_heads": 4,
        "resampler_num_latents": 8,
    },
    "falcon_h1": {**STATE_SPACE, "mamba_d_ssm": 64, "mamba_d_head": 16},
    "florence_vision": {"depths": [1] * 4, "embed_dim": [32] * 4, "num_heads": [4] * 4, "num_groups": [4] * 4},
    "gemma3": _FOUR_PATCHES,
    "shieldgemma2": _FOUR_PATCHES,
    "t5gemma2_encoder": _FOUR_PATCHES,
    "gemma3n_vision": {"hidden_size": 2048},
    "gemma3n_text": {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": ALTERNATING * 3},
    "gemma4": {"vision_config": {}, "audio_config": {}},
    "gemma4_unified_assistant": {"backbone_hidden_size": 64},
    "gemma4_unified": {"vision_config": {}, "audio_config": {}},
    "gemma4_assistant": {
        "backbone_hidden_size": 64,
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    },
    "gemma4_text": {"num_hidden_layers": 4, "layer_types": ALTERNATING * 2},
    "glm4_moe_lite": LATENT,
    "granite4_vision": {**_ANY_SIZE, "deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**STATE_SPACE, "layer_types": ["mamba", "attention"] * 2},
    "glm5_next_text": {**LATENT, "linear_num_heads": 4, "linear_head_dim": 16, "index_kpool": 4},
    "hy_v4_vl_text": {"rope_parameters": _SECTIONS},
    "hunyuan_vl_text": {"rope_parameters": _SECTIONS},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "embed_dim": 8, "num_embeddings": 16},
    "kimi_linear": {
        **LATENT,
        "num_hidden_layers": 5,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    },
    "kosmos-2": {"latent_query_num": 4},
    "kyutai_speech_to_text": {"num_codebooks": 4, "codebook_vocab_size": 250},
    "led": {"attention_window": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4_vision_model": {"intermediate_size": 256},
    "llava_next": _ANY_SIZE,
    "llava_next_video": _ANY_SIZE,
    "llava_onevision": _ANY_SIZE,
    "longcat_flash": {**LATENT, "zero_expert_num": 2},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16},
    "mimi": {"upsample_groups": 64, "num_filters": 8},
    "minicpm3": LATENT,
    "mistral4": LATENT,
    "mistral_large4_text": LATENT,
    "molmo2_adapter": {"vision_feature_layer": [-1, 0]},
    "molmo2_vision": {"image_size": [56, 56], "num_position_embeddings": None},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [32] * 4, "depths": [1] * 4},
    "mllama_vision_model": {"vision_output_dim": 128},
    "nemotron3_5_transcribe_asr_audio": LATENT,
    "nemotron3_5_transcribe_word_timestamp": LATENT,
    "nemotron3_diarization_audio": LATENT,
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl_text": {"rope_parameters": _SECTIONS},
    "pp_formulanet_vision": {"output_channels": 64, "post_conv_in_channels": 64},
    "qwen2_5_omni_thinker": _STARTS_OF_MEDIA,
    "qwen3_omni_moe_thinker": _STARTS_OF_MEDIA,
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": 128},
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_omni_moe": {
        "talker_config": {"spatial_merge_size": 2},
        "code2wav_config": {"decoder_dim": 64, "codebook_size": 64},
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "qwen3_asr_encoder": {"output_dim": 64},
    "qwen4_exp_text": {**LINEAR, **_INDEXER},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "vibevoice_acoustic_tokenizer": _TOKENIZED_SOUND,
    "vibevoice_acoustic_tokenizer_encoder": _TOKENIZED_SOUND,
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 1600},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "wavtokenizer_encoder": {"codebook_size": 16, "codebook_dim": 64, "num_filters": 8, "num_lstm_layers": 1},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "attention_head_dim": 32,
        "mamba_headdim": 32,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Type -> settings that differ from the tables."""


_PLACES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")
"""Ids of tokens whose places a picture or a sound takes; some types leave them open."""


def models(cls: Any, model_type: str, errors: list[Exception]) -> Iterator[Any]:
    """Small random models of a type in float32 and eval mode, each larger than the one before.

    Args:
        cls: the class of transformers that makes them, or an auto class.
        model_type: of transformers.
        errors: gets why others are not to be had.
    """
    build = getattr(cls, "_from_config", None) or cls.from_config
    for config in configs(model_type, errors):
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in build(config).parameters())
            if size > LARGEST:
                raise ValueError(f"it has {size:,} parameters")
            torch.manual_seed(0)
            model = build(config, dtype=torch.float32).eval()
        except Exception as error:
            errors.append(error)
            continue
        yield model


def configs(model_type: str, errors: list[Exception]) -> Iterator[Any]:
    """Small configs of a type; see `models`."""
    tiny = FEWER | NARROWER | LISTS
    for table in (tiny, tiny | LATENT | LINEAR, FEWER | LISTS, FEWER):
        try:
            config = _made(CONFIG_MAPPING[model_type], table, {}, OWN.get(model_type, {}))
            _fit_rotary(config)
        except Exception as error:
            errors.append(error)
            continue
        yield config


def _made(config_class: Any, table: Mapping[str, Any], tokens: dict[str, int], own: Mapping[str, Any]) -> Any:
    """A config whose settings are those of the table, and so those within it."""
    settings: dict[str, Any] = {}
    within = getattr(config_class, "sub_configs_defaults", None) or {}
    names = {inner: outer for outer, inner in getattr(config_class, "attribute_map", {}).items()}
    for field in dataclasses.fields(config_class):
        name, default = field.name, _default_of(field)
        if name in own and name not in within:
            settings[name] = own[name]
        elif name in within:
            if default is not None or not getattr(within[name], "optional", False) or name in own:
                settings[name] = _within(within[name], table, tokens, own.get(name, {}))
        elif (key := name if name in table else names.get(name, "")) in table:
            if _fits(default, table[key]):
                settings[name] = table[key]
        elif _is_token(name, default):
            settings[name] = tokens.setdefault(name, LAST_TOKEN + 1 + len(tokens))
    more = {name: value for name, value in own.items() if name not in within}
    return config_class(**(settings | more))


def _within(spec: Any, table: Mapping[str, Any], tokens: dict[str, int], own: Mapping[str, Any]) -> Any:
    config_class = spec.config_class
    model_type = own.get("model_type", spec.model_type)
    if config_class is AutoConfig or "model_type" in own:
        config_class = CONFIG_MAPPING[model_type]
    return _made(config_class, table, tokens, {**OWN.get(model_type, {}), **own})


def _fit_rotary(config: Any) -> None:
    """Scale the sections of a multimodal rotary embedding to the size of a head."""
    for name in getattr(config, "sub_configs_defaults", None) or {}:
        if (inner := getattr(config, name, None)) is not None:
            _fit_rotary(inner)
    settings = getattr(config, "rope_parameters", None) or {}
    allowed = getattr(config, "ignore_keys_at_rope_validation", None) or ()
    by_layer_type = [value for value in settings.values() if isinstance(value, dict)]
    for rotary in by_layer_type or [settings]:
        if "mrope_section" in (*rotary, *allowed):
            head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            pairs = int(head * rotary.get("partial_rotary_factor", 1)) // 2
            each = 3 * pairs // 8
            if sum(rotary.get("mrope_section", ())) != pairs:
                rotary["mrope_section"] = [pairs - 2 * each, each, each]


def _default_of(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _fits(default: Any, value: Any) -> bool:
    """Whether a value of the table is of the kind of the default; a size of 0 says that there is nothing."""
    if isinstance(default, list | tuple):
        return isinstance(value, list)
    return not (default == 0 and isinstance(default, int) and isinstance(value, int) and value > 4)


def _is_token(name: str, default: Any) -> bool:
    if name in _PLACES and default is None:
        return True
    is_one = name.endswith(("_token_id", "_token_index", "_start_id", "_end_id", "_patch_id"))
    return is_one and isinstance(default, int) and default >= FIRST_TOKEN
