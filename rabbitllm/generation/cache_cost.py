"""How many bytes KV caches take: measured for caches that exist, estimated for future tokens.

    a layer that keeps every token     bytes of a token times tokens
    a sliding window                   the same, with at most the tokens of the window
    a state                            constant, for any number of tokens

Until a cache has been measured, all layers count as the first kind, with the sizes in the config. Layers that keep
every token have spare room once they are large enough (`room.py`), which counts too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rabbitllm.generation.room import SPARE_SHARE, SPARE_TOKENS, WORTH_BYTES


@dataclass(frozen=True, slots=True)
class CacheCost:
    """The size of the KV cache of one sequence.

    Attributes:
        every_token: bytes of a token in all layers that keep every token.
        layers: number of those layers.
        windows: of each sliding layer: the tokens of its window, and the bytes of one.
        fixed: bytes of states.
    """

    every_token: int
    layers: int = 1
    windows: tuple[tuple[int, int], ...] = ()
    fixed: int = 0

    def bytes_for(self, tokens: int) -> int:
        """Bytes of the KV cache of a sequence with so many tokens."""
        has_room = tokens * self.every_token >= 2 * self.layers * WORTH_BYTES
        held = tokens + (tokens // SPARE_SHARE + SPARE_TOKENS if has_room else 0)
        return self.fixed + held * self.every_token + sum(min(tokens, most) * each for most, each in self.windows)

    def beside_file(self, tokens: int) -> int:
        """Bytes in memory of a sequence in a file: its last tokens, with sliding windows and states."""
        return self.fixed + tokens * self.every_token + sum(most * each for most, each in self.windows)


def layer_configs(config: Any) -> Sequence[Any]:
    """The config of each layer where layers differ in sizes (transformers' heterogeneous configs), else the config."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def cost_by_config(config: Any, dtype: torch.dtype) -> CacheCost:
    """The cost according to the config: the KV cache of all heads in all layers.

    Args:
        config: config of the text model.
        dtype: dtype of the KV cache.
    """
    layers = layer_configs(config)
    values = sum(map(_values_of_a_token, layers)) * (config.num_hidden_layers // len(layers))
    return CacheCost(values * dtype.itemsize, config.num_hidden_layers)


def _values_of_a_token(config: Any) -> int:
    """How many numbers a layer keeps for a token."""
    heads = config.num_attention_heads
    keyed = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    both = 2 * keyed * width
    if getattr(config, "kv_lora_rank", None) and getattr(config, "v_head_dim", None):  # DeepSeek's latent attention
        both = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return int(both)


def cost_by_cache(cache: Any) -> CacheCost | None:
    """The cost measured on a cache with some tokens in it; None if it cannot be derived."""
    every_token = fixed = layers = 0
    windows = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        tensors = sum(tensor.nbytes for tensor in _tensors(vars(layer)))
        if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.dim() == 4 and keys.shape[-2]:
            each = (keys.nbytes + values.nbytes) // keys.shape[-2]
            window = getattr(layer, "sliding_window", None)
            if isinstance(window, int):
                windows.append((window, each))
            else:
                every_token += each
                layers += 1
            tensors -= keys.nbytes + values.nbytes
        elif tensors == 0 and getattr(layer, "is_initialized", True) and type(layer).__name__ != "DummyLayer":
            return None
        fixed += tensors
    return CacheCost(every_token, max(layers, 1), tuple(windows), fixed)


def bytes_of(cache: Any) -> int:
    """Bytes that a cache holds now: each storage once, whole even if the cache has only a view of it."""
    tensors = (tensor for layer in cache.layers for tensor in _tensors(vars(layer)))
    return sum(
        {found.data_ptr(): found.nbytes() for found in (tensor.untyped_storage() for tensor in tensors)}.values()
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
