"""Appends to a layer of a KV cache without copying its contents, into room that is reserved ahead.

transformers' `DynamicLayer` copies its whole key and value tensor for every token. Here a layer's tensors are views of
larger ones, with the same values. The layer can be cut, copied and put back as before, and then gets new room. Only
room that no other layer uses is written to: layers that share room are separated at the next token.

Values are those of `DynamicLayer.update`; a layer takes up to an eighth and 32 tokens more memory.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

WORTH_BYTES = 1 << 18
"""Bytes of keys; below this a copy is faster than making two views of larger tensors."""
SPARE_SHARE, SPARE_TOKENS = 8, 32


class _Room:
    """The larger tensors; a layer's keys and values are views of their first tokens.

    Attributes:
        keys, values: (1, heads, tokens, width).
        used: number of tokens in use.
    """

    __slots__ = ("keys", "used", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
        self.used = keys.shape[2]
        self.keys = _longer(keys, tokens)
        self.values = _longer(values, tokens)


def append(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Append to a layer; equivalent to `layer.update(keys, values)`.

    Args:
        layer: layer of the KV cache of one sequence.
        keys, values: of the new tokens, (1, heads, tokens, width).

    Returns:
        The layer's whole key and value tensor.
    """
    before = layer.keys
    if type(layer) is not DynamicLayer or before is None or before.nbytes < WORTH_BYTES:
        found: tuple[torch.Tensor, torch.Tensor] = layer.update(keys, values)
        return found
    begin = before.shape[2]
    end = begin + keys.shape[2]
    room = vars(layer).get("_room")
    if room is None or room.used != begin or not _is_beginning(layer, room) or room.keys.shape[2] < end:
        room = layer._room = _Room(before, layer.values, end + end // SPARE_SHARE + SPARE_TOKENS)
    room.keys[:, :, begin:end] = keys
    room.values[:, :, begin:end] = values
    room.used = end
    layer.keys, layer.values = room.keys[:, :, :end], room.values[:, :, :end]
    return layer.keys, layer.values


def _is_beginning(layer: Any, room: _Room) -> bool:
    return bool(
        layer.keys.data_ptr() == room.keys.data_ptr()
        and layer.values.data_ptr() == room.values.data_ptr()
        and layer.keys.stride() == room.keys.stride()
    )


def _longer(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    made = tensor.new_empty((*tensor.shape[:2], tokens, tensor.shape[3]))
    made[:, :, : tensor.shape[2]] = tensor
    return made
