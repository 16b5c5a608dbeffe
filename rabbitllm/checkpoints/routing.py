"""How many experts a router picks for a token, by what a config says. Knows no tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_topk", "moe_k")


def experts_a_token(config: Mapping[str, Any]) -> int | None:
    """Of a mixture of experts, by the content of its config.json; None for other models, and where it does not say."""
    text = config.get("text_config")
    return (_first(text.get) if isinstance(text, Mapping) else None) or _first(config.get)


def picked_by(config: object) -> int | None:
    """The same of a config of transformers, of the text model; also by names that it only maps to its own."""
    return _first(lambda name: getattr(config, name, None))


def _first(value_of: Callable[[str], object]) -> int | None:
    return next((found for name in NAMES if type(found := value_of(name)) is int and found > 0), None)
