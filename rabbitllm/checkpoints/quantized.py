"""Whether a checkpoint is published quantized, and how, by what its config.json says. Knows neither torch nor tensors.

transformers writes it under `quantization_config`, in the config itself or in that of its language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BITSANDBYTES = "bitsandbytes"
LEFTOVER = "gguf"
"""A method that transformers leaves in the config of a model that it dequantized: its weights are plain."""


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config says of its weights' quantization; None where they are plain."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        found = part.get("quantization_config")
        if isinstance(found, Mapping) and found and method_of(found) != LEFTOVER:
            return found
    return None


def quantized_as(config: Mapping[str, Any]) -> str | None:
    """How the weights are quantized, in a word or two: "fp8", "mxfp4", "bitsandbytes 4bit"; None for plain ones."""
    found = settings_of(config)
    return method_of(found) if found is not None else None


def method_of(settings: Mapping[str, Any]) -> str:
    """The same of the settings themselves; configs of old say no more of bitsandbytes than `load_in_4bit`."""
    for bits in ("4bit", "8bit"):
        if settings.get(f"load_in_{bits}"):
            return f"{BITSANDBYTES} {bits}"
    named = settings.get("quant_method") or "by an unnamed method"
    return str(getattr(named, "value", named))  # in transformers' own settings it is a member of an enumeration
