"""The main facts of a config. Pure: a mapping in, facts out; values of an unexpected type are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rabbitllm.checkpoints.config import experts_a_token, quantized_as


@dataclass(frozen=True, slots=True)
class ConfigSummary:
    """A summary of a model; None for facts that its config lacks.

    Attributes:
        architecture: name of the class in transformers.
        family: `model_type`.
        layers: decoder layers.
        hidden_size, heads, key_value_heads, vocabulary: sizes.
        context: limit of positions.
        dtype: of the published weights.
        experts, experts_a_token: of a mixture of experts.
        quantized: quantization method of the published weights.
    """

    architecture: str | None
    family: str | None
    layers: int | None
    hidden_size: int | None
    heads: int | None
    key_value_heads: int | None
    vocabulary: int | None
    context: int | None
    dtype: str | None
    experts: int | None
    experts_a_token: int | None
    quantized: str | None


def config_facts(config: Mapping[str, Any]) -> ConfigSummary:
    """The facts of a `config.json`; a multimodal model has them in its `text_config`."""
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else {}

    def first(*names: str) -> Any:
        return next((place[name] for name in names for place in (text, config) if place.get(name) is not None), None)

    def number(*names: str) -> int | None:
        found = first(*names)
        return found if type(found) is int else None

    def word(*names: str) -> str | None:
        found = first(*names)
        return found if isinstance(found, str) else None

    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    family = config.get("model_type")
    return ConfigSummary(
        architecture=architecture,
        family=family if isinstance(family, str) else None,
        layers=number("num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=number("hidden_size", "n_embd", "d_model"),
        heads=number("num_attention_heads", "n_head"),
        key_value_heads=number("num_key_value_heads"),
        vocabulary=number("vocab_size"),
        context=number("max_position_embeddings", "n_positions", "max_seq_len"),
        dtype=word("dtype", "torch_dtype"),
        experts=number("num_experts", "num_local_experts", "n_routed_experts"),
        experts_a_token=experts_a_token(config),
        quantized=quantized_as(config),
    )
