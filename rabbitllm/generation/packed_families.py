"""Which models can run packed batches: those that a test covers.

In such a model only attention combines rows, and attention goes through transformers' attention interface with the
tensors that the cache returned. A setting can break this for a family that satisfies it, for example rotary angles
that depend on the longest sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rabbitllm.generation.packed_attention import OWN

PACKABLE = frozenset(
    {
        *("afmoe", "apertus", "arcee", "aria_text", "beam", "bitnet", "cohere", "cohere2", "cohere2_moe"),
        *("cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe"),
        *("flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text"),
        *("gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode"),
        *("gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"),
        *("helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder"),
        *("jais2", "kolibri1", "laguna", "llama", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3"),
        *("minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "nanochat"),
        *("nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2"),
        *("qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text"),
        *("qwen3_vl_text", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma"),
    }
)
"""Model types (transformers 5.23), tested in `tests/generation/test_packed_families.py`."""
WITH_IMAGES = frozenset({"gemma3", "gemma4", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"})
"""Model types around a text model of `PACKABLE`; calls with images are not packed: their arguments are unknown."""
_BY_LONGEST = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the largest position in a pass."""
_EXTRAS = ("output_attentions", "output_hidden_states", "output_router_logits", "alibi")
"""Config settings that must be off."""


def can_be_packed(model: Any) -> bool:
    """Whether a model can run packed batches."""
    config = model.config
    text = config.get_text_config(decoder=True)
    return (
        text.model_type in PACKABLE
        and (config.model_type in PACKABLE or config.model_type in WITH_IMAGES)
        and config._attn_implementation in OWN
        and getattr(config, "return_dict", True)
        and not model.training
        and not any(getattr(one, extra, False) for one in (config, text) for extra in _EXTRAS)
        and not depends_on_longest(text)
        and all(_is_known(layer) for layer in DynamicCache(config=text).layers)
        and not (shares_keys(model) and len(set(model.hf_device_map.values())) > 1)
    )


def depends_on_longest(config: Any) -> bool:
    """Whether the results of a sequence depend on the longest sequence of the same pass.

    Args:
        config: config of the text model.
    """
    return any(rope in kind for kind in _rope_types(config) for rope in _BY_LONGEST)


def shares_keys(model: Any) -> bool:
    """Whether layers use the KV cache of others."""
    return any(_is_nothing(layer) for layer in DynamicCache(config=model.config.get_text_config(decoder=True)).layers)


def has_known_layers(cache: DynamicCache, kinds: Sequence[type]) -> bool:
    """Whether a cache has the kinds of layers that the model would make, with one sequence in it."""
    layers = cache.layers
    return len(layers) == len(kinds) and all(
        type(layer) is kind and _is_one_text(layer) for layer, kind in zip(layers, kinds, strict=True)
    )


def _is_known(layer: Any) -> bool:
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) or _is_nothing(layer)


def _is_nothing(layer: Any) -> bool:
    """Whether a layer has no attention, or uses another layer's KV cache."""
    return type(layer).__name__ == "DummyLayer"  # not in every version


def _is_one_text(layer: Any) -> bool:
    keys = getattr(layer, "keys", None)
    return keys is None or keys.dim() < 2 or len(keys) == 1


def _rope_types(config: Any) -> Iterator[str]:
    """The rotary embedding types of all layers."""
    given = getattr(config, "rope_parameters", None) or {}
    for one in (given, *(value for value in given.values() if isinstance(value, Mapping))):
        kind = one.get("rope_type", one.get("type"))
        if isinstance(kind, str):
            yield kind
