"""Small random models that take pictures or sounds, each with the processor of its family, a tokenizer and a template.

Knows nothing of rabbitllm.
"""

from __future__ import annotations

import importlib.util
import io
import json
import wave
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support import tiny_configs
from tests.support.builders import VOCABULARY_SIZE, make_tokenizer

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
RATE = 16_000
_TEMPLATE = (
    "{%- for message in messages %}{{ message['role'] + ': ' }}"
    "{%- if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] in ('image', 'audio') %}{{ 'PLACE' }}{%- else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """How a family is built.

    Attributes:
        files: name of a file of its processor -> content.
        tokens: special token -> settings of the config that are its id.
        place: of a picture or a sound in the chat template.
        named: name of a token for the tokenizer -> the token.
        settings: of the config.
        model_type: empty if it is the family's name.
        text_type: type of the text config; empty for the usual one.
        needs_torchvision: whether its processor cannot be made without.
        auto: the auto class of the model.
        kind: of its inputs.
    """

    files: Mapping[str, Any]
    tokens: Mapping[str, tuple[str, ...]]
    place: str
    named: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    model_type: str = ""
    text_type: str = ""
    needs_torchvision: bool = False
    auto: str = "AutoModelForImageTextToText"
    kind: str = "image"


WHOLE, PICTURES, VIDEOS = "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"


def _qwen(processor: str, video: str, patch: int = 14) -> dict[str, Any]:
    size = {"shortest_edge": 4 * patch * patch, "longest_edge": 64 * patch * patch}
    pictures = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "size": size}
    return {
        WHOLE: {"processor_class": processor},
        PICTURES: pictures,
        VIDEOS: {"video_processor_type": video, "patch_size": patch},
    }


_QWEN_TOKENS = {
    "<|image_pad|>": ("image_token_id",),
    "<|video_pad|>": ("video_token_id",),
    "<|vision_start|>": ("vision_start_token_id",),
    "<|vision_end|>": ("vision_end_token_id",),
}
_QWEN_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN3 = {"vision_config": {"patch_size": 16}}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_SQUARE = {"height": 56, "width": 56}
_PIXTRAL = {
    WHOLE: {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
    PICTURES: {"image_processor_type": "PixtralImageProcessor", "patch_size": 14, "size": {"longest_edge": 112}},
}
_PIXTRAL_TOKENS = {"[IMG]": ("image_token_index", "image_token_id"), "[IMG_BREAK]": (), "[IMG_END]": ()}


FAMILIES: dict[str, Family] = {
    "llava": Family(
        {
            WHOLE: {
                "processor_class": "LlavaProcessor",
                "patch_size": 14,
                "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default",
            },
            PICTURES: {
                "image_processor_type": "CLIPImageProcessor",
                "size": {"shortest_edge": 56},
                "crop_size": _SQUARE,
            },
        },
        {"<image>": ("image_token_index", "image_token_id")},
        "<image>",
    ),
    "qwen2_vl": Family(_qwen("Qwen2VLProcessor", "Qwen2VLVideoProcessor"), _QWEN_TOKENS, _QWEN_PLACE),
    "qwen2_5_vl": Family(_qwen("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"), _QWEN_TOKENS, _QWEN_PLACE),
    "qwen3_vl": Family(
        _qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16),
        _QWEN_TOKENS,
        _QWEN_PLACE,
        settings=_QWEN3,
    ),
    "qwen3_5": Family(
        _qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16),
        _QWEN_TOKENS,
        _QWEN_PLACE,
        settings=_QWEN3,
    ),
    "gemma3": Family(
        {
            WHOLE: {"processor_class": "Gemma3Processor", "image_seq_length": 4},
            PICTURES: {"image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE},
        },
        {
            "<start_of_image>": ("boi_token_index",),
            "<end_of_image>": ("eoi_token_index",),
            "<image_soft_token>": ("image_token_index", "image_token_id"),
        },
        "<start_of_image>",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        {
            "tie_word_embeddings": False,
            "text_config": {"tie_word_embeddings": False, "layer_types": _ALTERNATING},
        },
    ),
    "gemma4": Family(
        {
            WHOLE: {
                "processor_class": "Gemma4Processor",
                "image_processor": {
                    "image_processor_type": "Gemma4ImageProcessor",
                    "patch_size": 14,
                    "max_soft_tokens": 70,
                    "pooling_kernel_size": 3,
                },
                "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
                "video_processor": {"video_processor_type": "Gemma4VideoProcessor"},
            }
        },
        {
            "<|image>": ("boi_token_id",),
            "<image|>": ("eoi_token_id",),
            "<|image|>": ("image_token_id",),
            "<|audio>": ("boa_token_id",),
            "<audio|>": ("eoa_token_index",),
            "<|audio|>": ("audio_token_id",),
            "<|video|>": ("video_token_id",),
        },
        "<|image|>",
        {
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
        },
    ),
    "llama4": Family(
        {
            WHOLE: {"processor_class": "Llama4Processor", "patch_size": 14, "pixel_shuffle_ratio": 0.5},
            PICTURES: {"image_processor_type": "Llama4ImageProcessor", "size": _SQUARE, "max_patches": 4},
        },
        {
            "<|image_start|>": ("boi_token_index",),
            "<|image_end|>": ("eoi_token_index",),
            "<|patch|>": ("image_token_index",),
            **{f"<|{name}|>": () for name in ("image", "tile_x_separator", "tile_y_separator")},
        },
        "<|image|>",
        needs_torchvision=True,
    ),
    "mistral3": Family(
        _PIXTRAL,
        _PIXTRAL_TOKENS,
        "[IMG]",
        settings={"text_config": {"sliding_window": None}},
        needs_torchvision=True,
    ),
    "mistral_small_4": Family(
        _PIXTRAL,
        _PIXTRAL_TOKENS,
        "[IMG]",
        model_type="mistral3",
        text_type="mistral4",
        needs_torchvision=True,
    ),
    "internvl": Family(
        {
            WHOLE: {"processor_class": "InternVLProcessor", "image_seq_length": 4},
            PICTURES: {
                "image_processor_type": "GotOcr2ImageProcessor",
                "size": _SQUARE,
                "max_patches": 4,
                "crop_to_patches": True,
            },
            VIDEOS: {"video_processor_type": "InternVLVideoProcessor"},
        },
        {"<IMG_CONTEXT>": ("image_token_id",), "<img>": (), "</img>": (), "<video>": ()},
        "<IMG_CONTEXT>",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        {"vision_config": {"image_size": [56, 56]}, "image_seq_length": 4},
    ),
    "qwen2_audio": Family(
        {
            WHOLE: {"processor_class": "Qwen2AudioProcessor"},
            PICTURES: {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": 1},
        },
        {"<|AUDIO|>": ("audio_token_index", "audio_token_id"), "<|audio_bos|>": (), "<|audio_eos|>": ()},
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
        settings={"audio_config": {"max_source_positions": 50}},
        auto="AutoModelForSeq2SeqLM",
        kind="audio",
    ),
}
"""Name -> how to build it; the name is the model type, unless the family says another one."""


def cases(names: Iterable[str] = tuple(FAMILIES), short: Iterable[str] = ()) -> list[Any]:
    """Families as parameters of a test; the long run has all.

    The short run has those that need torchvision, if it is installed; else they are skipped.

    Args:
        names: of `FAMILIES`.
        short: others that the short run has.
    """
    skip = pytest.mark.skipif(not HAS_TORCHVISION, reason="torchvision is not installed")
    marks = {name: skip if FAMILIES[name].needs_torchvision else pytest.mark.long for name in names}
    return [name if name in short else pytest.param(name, marks=mark) for name, mark in marks.items()]


def build(folder: Path, name: str, *, dtype: torch.dtype = torch.float32, shards: int = 3) -> Path:
    """Write a checkpoint with its processor, tokenizer and chat template.

    Args:
        folder: made if it is not there.
        name: of `FAMILIES`.
        dtype: of the weights.
        shards: approximate number.
    """
    family = FAMILIES[name]
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens)})
    tokenizer._set_model_specific_special_tokens(special_tokens=dict(family.named))
    tokenizer.model_max_length = 4096
    tokenizer.chat_template = None
    model = _model(name, tokenizer)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    model.to(dtype).save_pretrained(folder, max_shard_size=size // shards)
    tokenizer.chat_template = _TEMPLATE.replace("PLACE", family.place)
    tokenizer.save_pretrained(folder)
    for file, content in family.files.items():
        (folder / file).write_text(json.dumps(content))
    return folder


def plain_with_media(folder: Path, name: str) -> Any:
    """The model of plain transformers in float32 and eval mode.

    The forward of Llama 4 in transformers 5.24.0 reads `image_outputs` of its text model's output, which lacks it. It
    only passes it on, so with an empty one logits and tokens are what transformers computes.
    """
    model: Any = getattr(transformers, FAMILIES[name].auto).from_pretrained(folder, dtype=torch.float32).eval()
    if name == "llama4":
        model.language_model.register_forward_hook(add_image_outputs)
    return model


def add_image_outputs(module: Any, args: Any, output: Any) -> None:
    """A hook for the text model of Llama 4; see `plain_with_media`."""
    output.image_outputs = None


def _model(name: str, tokenizer: Any) -> Any:
    family = FAMILIES[name]
    model_type = family.model_type or name
    settings = _settings(model_type)
    if family.text_type:
        settings["text_config"] = _settings(family.text_type)
    _merge(settings, family.settings)
    for token, names in family.tokens.items():
        settings |= {name: tokenizer.convert_tokens_to_ids(token) for name in names if name in settings}
    text = settings.get("text_config", settings)
    text |= {"vocab_size": VOCABULARY_SIZE + len(family.tokens), "max_position_embeddings": 4096}
    if "vocab_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = text["vocab_size"]
    config = CONFIG_MAPPING[model_type].from_dict(settings)
    torch.manual_seed(0)
    model: Any = getattr(transformers, family.auto).from_config(config, dtype=torch.float32).eval()
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.15 * torch.randn(parameter.shape, generator=drawn)
            if "projector" in name:  # else pictures change no token
                parameter *= 8
    model.generation_config.eos_token_id = None
    return model


def _settings(model_type: str) -> dict[str, Any]:
    """Of a small config."""
    errors: list[Exception] = []
    config = next(tiny_configs.configs(model_type, errors), None)
    if config is None:
        raise errors[0]
    settings: dict[str, Any] = config.to_dict()
    return settings


def _merge(settings: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping):
            _merge(settings[name], value)
        else:
            settings[name] = value


def picture(seed: int = 0, size: tuple[int, int] = (90, 70)) -> Image.Image:
    """Random colours in large squares, RGB."""
    drawn = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(drawn).resize(size, Image.Resampling.NEAREST)


def encoded(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def tone(seed: int, samples: int) -> Any:
    """A tone, int16; another height for each seed."""
    return (8000 * np.sin(np.arange(samples) * (seed + 1) * 0.07)).astype(np.int16)


def sound(seed: int = 0, seconds: float = 0.5, rate: int = RATE) -> bytes:
    """A WAV file of a tone, with one channel of 16 bits."""
    drawn = tone(seed, int(seconds * rate))
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(rate)
        written.writeframes(drawn.tobytes())
    return file.getvalue()
