"""Every model type whose texts go through the model side by side has the logits that each text has alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rabbitllm.generation.packed_batch import PACKABLE, WITH_IMAGES, can_be_packed
from tests.engine.test_every_architecture import build
from tests.generation.together import LENGTHS, alone, assert_alike, forwards, prompts, together
from tests.support.builders import FAMILIES, SMALL, WINDOW, Family, build_checkpoint
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_models import load, split

ALONE = PACKABLE - {name + "_text" for name in WITH_IMAGES if name.startswith("qwen")}
"""Types that stand by themselves; the others are only parts of models that see, too."""
SHORT = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3")
"""Full attention alone, with sliding windows, attention by the model's own function, and latent attention."""
SETTINGS: dict[str, Family] = {family.model_type: family for family in (*FAMILIES.values(), *HYBRIDS.values())}
"""Where there are some in which windows are shorter than prompts; of the others those of the sweep are taken."""


def checkpoint(folder: Path, name: str) -> Path:
    family = SETTINGS.get(name)
    if family is None:
        build(folder, name)
        return folder
    return build_checkpoint(folder, family, tied=family.ties[0])


def test_prompts_are_longer_than_windows() -> None:
    assert sorted(LENGTHS)[1] > WINDOW


_TEXT: dict[str, Any] = SMALL | {"head_dim": 16, "initializer_range": 0.08}
_WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_ROTARY = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
_QWEN: dict[str, Any] = {"text_config": _TEXT | {"rope_parameters": _ROTARY}, "vision_config": _QWEN_VISION}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80}
IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": _TEXT | _WINDOWS | {"num_hidden_layers": 4, "model_type": "gemma3_text"},
        "vision_config": _VISION | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": _TEXT
        | _WINDOWS
        | {"num_hidden_layers": 4, "model_type": "gemma4_text", "global_head_dim": 16, "num_kv_shared_layers": 2}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": SMALL["vocab_size"]},
        "vision_config": None,
        "audio_config": None,
    },
    "llava": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _VISION | {"model_type": "clip_vision_model"},
    },
    "mistral3": {
        "text_config": _TEXT | {"model_type": "mistral", "sliding_window": WINDOW},
        "vision_config": _VISION | {"model_type": "pixtral"},
    },
    "qwen2_vl": _QWEN | {"vision_config": _QWEN_VISION | {"hidden_size": 64}},
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN | {"text_config": _QWEN["text_config"] | _MOE},
}
"""Settings of models that see, too."""


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(WITH_IMAGES))
def test_texts_of_models_that_see(tmp_path: Path, name: str) -> None:
    tokens = {"image_token_id": 270, "image_token_index": 270, "video_token_id": 271}
    config = transformers.AutoConfig.for_model(name, **IMAGES[name], **tokens)
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForImageTextToText
    auto.from_config(config, dtype=torch.float32).eval().save_pretrained(tmp_path / "model")
    model = load(split(tmp_path / "model"), 0)
    assert can_be_packed(model)
    given = prompts()
    expected = alone(model, given)
    with forwards(model) as rows:
        assert_alike(together(model, given), expected)
    assert rows[1] == 1 + 6 + 1


def test_every_type_is_tried() -> None:
    assert IMAGES.keys() == WITH_IMAGES
    assert {name + "_text" for name in IMAGES if name.startswith("qwen")} <= PACKABLE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in sorted(ALONE)]
)
def test_side_by_side(tmp_path: Path, name: str) -> None:
    directory = split(checkpoint(tmp_path / "model", name))
    for budget in (0,) if name in SHORT else (0, 1 << 34):
        model = load(directory, budget)
        assert can_be_packed(model)
        given = prompts()
        expected = alone(model, given)
        with forwards(model) as rows:
            assert_alike(together(model, given), expected)
        assert rows[:2] == [LENGTHS[0] + 6 + LENGTHS[2], 1 + 6 + 1]
