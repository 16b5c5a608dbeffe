"""Families in which one module reads the weight of another that is not called: small settings and inputs that reach it.

Position embeddings, learned queries, a codebook, the output matrix of torch's own attention. `builders` makes the
checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from tests.support.builders import COMMON, VOCABULARY_SIZE, Family

TOKEN = 250
"""Stands for a piece of an image or a sound."""

_TEXT: Mapping[str, Any] = {**COMMON, "num_hidden_layers": 2, "max_position_embeddings": 512}
_TOWER: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.08,
}


@dataclass(frozen=True)
class Reading(Family):
    """A family whose model takes more than ids."""

    architecture: str = ""
    inputs: Callable[[torch.Generator], dict[str, torch.Tensor]] = lambda random: {}

    def config(self, tied: bool, **settings: object) -> Any:
        return transformers.AutoConfig.for_model(self.model_type, **copy.deepcopy({**self.settings, **settings}))

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.architecture)

    @property
    def auto_class(self) -> Any:
        return SimpleNamespace(from_config=self.model_class._from_config)

    def made(self) -> dict[str, torch.Tensor]:
        """Its inputs, always the same."""
        return self.inputs(torch.Generator().manual_seed(1))


def _ids(pieces: int) -> torch.Tensor:
    return torch.tensor([[1, 40, *[TOKEN] * pieces, 7, 200, 33]])


def _glm4v(random: torch.Generator) -> dict[str, torch.Tensor]:
    ids = _ids(4)
    pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=random)
    grid = torch.tensor([[1, 4, 4]])
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == TOKEN).int()}


def _lfm2_vl(random: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "input_ids": _ids(4),
        "pixel_values": torch.randn(1, 16, 3 * 14 * 14, generator=random),
        "spatial_shapes": torch.tensor([[4, 4]]),
        "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
    }


def _qwen2_audio(random: torch.Generator) -> dict[str, torch.Tensor]:
    sound = torch.randn(1, 16, 160, generator=random)
    return {"input_ids": _ids(40), "input_features": sound, "feature_attention_mask": torch.ones(1, 160).long()}


def _voxtral(random: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(20), "input_features": torch.randn(1, 16, 160, generator=random)}


def _aria(random: torch.Generator) -> dict[str, torch.Tensor]:
    image = torch.randn(1, 3, 56, 56, generator=random)
    return {"input_ids": _ids(8), "pixel_values": image, "pixel_mask": torch.ones(1, 56, 56, dtype=torch.bool)}


def _emu3(random: torch.Generator) -> dict[str, torch.Tensor]:
    image = torch.randn(1, 3, 8, 8, generator=random)
    return {"input_ids": _ids(20), "pixel_values": image, "image_sizes": torch.tensor([[8, 8]])}


def _deepseek_ocr2(random: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(145), "pixel_values": torch.randn(1, 3, 64, 64, generator=random)}


def _prophetnet(random: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[1, 40, 81, 7, 200, 33]])
    return {"input_ids": ids, "decoder_input_ids": ids}


READING: Mapping[str, Reading] = {
    "glm4v": Reading(
        "glm4v",
        {
            "text_config": {
                **_TEXT,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [4, 2, 2],
                    "partial_rotary_factor": 1.0,
                },
            },
            "vision_config": {**_TOWER, "depth": 2, "num_heads": 4, "image_size": 56, "out_hidden_size": 64},
            "image_token_id": TOKEN,
            "video_token_id": TOKEN + 1,
            "image_start_token_id": TOKEN + 2,
            "image_end_token_id": TOKEN + 3,
            "video_start_token_id": TOKEN + 4,
            "video_end_token_id": TOKEN + 5,
        },
        (False,),
        architecture="Glm4vForConditionalGeneration",
        inputs=_glm4v,
    ),
    "lfm2_vl": Reading(
        "lfm2_vl",
        {
            "text_config": {
                **_TEXT,
                "model_type": "lfm2",
                "layer_types": ["conv", "full_attention"],
                "block_auto_adjust_ff_dim": False,
            },
            "vision_config": {
                **_TOWER,
                "model_type": "siglip2_vision_model",
                "num_patches": 64,
                "patch_size": 14,
                "vision_use_head": False,
            },
            "image_token_id": TOKEN,
            "projector_hidden_size": 96,
            "tie_word_embeddings": True,
        },
        (True,),
        architecture="Lfm2VlForConditionalGeneration",
        inputs=_lfm2_vl,
    ),
    "qwen2_audio": Reading(
        "qwen2_audio",
        {
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 128,
                "d_model": 64,
                "max_source_positions": 80,
                "initializer_range": 0.08,
            },
            "audio_token_index": TOKEN,
        },
        (False,),
        architecture="Qwen2AudioForConditionalGeneration",
        inputs=_qwen2_audio,
    ),
    "voxtral": Reading(
        "voxtral",
        {
            "text_config": {**_TEXT, "model_type": "llama", "head_dim": 16},
            "audio_config": {
                **_TOWER,
                "vocab_size": 100,
                "intermediate_size": 256,
                "num_mel_bins": 16,
                "max_source_positions": 80,
            },
            "audio_token_id": TOKEN,
        },
        (False,),
        architecture="VoxtralForConditionalGeneration",
        inputs=_voxtral,
    ),
    "aria": Reading(
        "aria",
        {
            "text_config": {**_TEXT, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
            "vision_config": {**_TOWER, "model_type": "idefics3_vision", "image_size": 56, "patch_size": 14},
            "projector_patch_to_query_dict": {16: 8},
            "image_token_index": TOKEN,
        },
        (False,),
        architecture="AriaForConditionalGeneration",
        inputs=_aria,
    ),
    "emu3": Reading(
        "emu3",
        {
            "text_config": _TEXT,
            "vq_config": {
                "codebook_size": 64,
                "embed_dim": 16,
                "latent_channels": 16,
                "base_channels": 32,
                "channel_multiplier": [1, 2],
                "num_res_blocks": 1,
                "hidden_size": 64,
                "temporal_downsample_factor": 2,
                "attn_resolutions": [],
            },
            "vocabulary_map": {
                **{f"<|visual token {number:06d}|>": 100 + number for number in range(64)},
                "<image>": TOKEN,
                "<|extra_200|>": TOKEN + 1,
            },
        },
        (False,),
        architecture="Emu3ForConditionalGeneration",
        inputs=_emu3,
    ),
    "deepseek_ocr2": Reading(
        "deepseek_ocr2",
        {
            "text_config": {
                **_TEXT,
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 80,
                "n_shared_experts": 1,
                "mlp_layer_types": ["dense", "sparse"],
            },
            "vision_config": {
                "sam_config": {
                    **_TOWER,
                    "output_channels": 32,
                    "image_size": 64,
                    "window_size": 2,
                    "global_attn_indexes": [1],
                    "mlp_dim": 128,
                    "downsample_channels": [48, 64],
                },
                "encoder_config": {**_TOWER, "vocab_size": 32, "num_key_value_heads": 4},
            },
            "image_token_id": TOKEN,
        },
        (False,),
        architecture="DeepseekOcr2ForConditionalGeneration",
        inputs=_deepseek_ocr2,
    ),
    "prophetnet": Reading(
        "prophetnet",
        {
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 64,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "max_position_embeddings": 128,
            "init_std": 0.08,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        (True,),
        encoder_decoder=True,
        architecture="ProphetNetForConditionalGeneration",
        inputs=_prophetnet,
    ),
}
