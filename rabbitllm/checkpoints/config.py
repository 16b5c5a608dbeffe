"""Facts of a model by its config.json: experts per token, and whether and how its weights are published quantized.

transformers writes the latter under `quantization_config`, in the config itself or in that of its language model.
Independent of torch and tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_topk", "moe_k")


def experts_a_token(config: Mapping[str, Any]) -> int | None:
    """Experts per token by the content of a config.json; None for models without experts, and if absent."""
    text = config.get("text_config")
    return (_first(text.get) if isinstance(text, Mapping) else None) or _first(config.get)


def picked_by(config: object) -> int | None:
    """The same for a transformers config, by its text model; also by aliases that it maps to its own names."""
    return _first(lambda name: getattr(config, name, None))


def _first(value_of: Callable[[str], object]) -> int | None:
    return next((found for name in NAMES if type(found := value_of(name)) is int and found > 0), None)


BITSANDBYTES = "bitsandbytes"
LEFTOVER = "gguf"
"""The method that transformers leaves in the config of a model that it dequantized: its weights are plain."""


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization settings in a config; None for plain weights."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        found = part.get("quantization_config")
        if isinstance(found, Mapping) and found and method_of(found) != LEFTOVER:
            return found
    return None


def quantized_as(config: Mapping[str, Any]) -> str | None:
    """The quantization of the weights in a word or two: "fp8", "mxfp4", "bitsandbytes 4bit"; None for plain weights."""
    found = settings_of(config)
    return method_of(found) if found is not None else None


def method_of(settings: Mapping[str, Any]) -> str:
    """The quantization method of settings; old configs only have `load_in_4bit` for bitsandbytes."""
    for bits in ("4bit", "8bit"):
        if settings.get(f"load_in_{bits}"):
            return f"{BITSANDBYTES} {bits}"
    named = settings.get("quant_method") or "by an unnamed method"
    return str(getattr(named, "value", named))  # in transformers' own settings it is a member of an enumeration
