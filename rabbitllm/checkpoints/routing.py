"""How many experts a router picks for a token, by what a config says. Knows no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_topk", "moe_k")


def experts_a_token(config: Mapping[str, Any]) -> int | None:
    """Of a mixture of experts; None for other models, and where the config does not say."""
    text = config.get("text_config")
    for part in (text if isinstance(text, Mapping) else {}, config):
        for name in NAMES:
            if type(found := part.get(name)) is int and found > 0:
                return found
    return None
