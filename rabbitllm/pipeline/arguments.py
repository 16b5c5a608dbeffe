"""The arguments of a layer's call, as JSON and a list of tensors, and back.

A mask that all layers share is sent once. Only tensors, KV caches, plain values and tuples of these can be sent: a
layer may write into a dict for the layers after it, which may be on another host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from rabbitllm.errors import HostsError

_PLAIN = (bool, int, float, str)


class Packer:
    """Packs the calls of one pass.

    Args:
        number_of: a KV cache -> its number, which is the same in all processes.

    Attributes:
        tensors: the tensors found, each once.
    """

    def __init__(self, number_of: Callable[[Cache], int]) -> None:
        self._number_of = number_of
        self._known: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []

    def pack(self, value: Any) -> Any:
        """A value as JSON.

        Raises:
            HostsError: it cannot be sent.
        """
        if value is None or isinstance(value, _PLAIN):
            return value
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value)}
        if isinstance(value, Cache):
            return {"cache": self._number_of(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if type(value) is tuple:
            return {"tuple": [self.pack(part) for part in value]}
        raise HostsError(
            f"Its layers are given a {type(value).__name__}, which cannot be sent to another host.",
            "Run this model on one host.",
        )

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The arguments of a call as JSON."""
        return [[self.pack(value) for value in args], {name: self.pack(value) for name, value in kwargs.items()}]

    def _tensor(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._known:  # `tensors` keeps it alive, so its id remains unique
            self._known[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._known[id(tensor)]


def unpack(packed: Any, tensors: Sequence[torch.Tensor], cache: Callable[[int], Cache]) -> Any:
    """Restore a value from the result of `Packer.pack`.

    Args:
        packed: JSON.
        tensors: tensors of the pass.
        cache: number -> the KV cache in this process.
    """
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "cache":
        return cache(content)
    if kind == "dtype":
        return getattr(torch, content)
    return tuple(unpack(part, tensors, cache) for part in content)
