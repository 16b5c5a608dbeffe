"""The number of experts per token, by a config. Independent of tensors."""

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
