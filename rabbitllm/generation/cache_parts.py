"""A cache taken apart into tensors and what holds them, and put together again: bit for bit the same.

Walks any cache of transformers: attention layers, sliding windows, states, and a family's own kinds of layers, as long
as everything in them is tensors and plain values. A tensor that is a view comes back without its base.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import cache_utils

_HOLDERS = tuple(
    getattr(cache_utils, name)
    for name in ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
    if hasattr(cache_utils, name)  # not every version has all of them
)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, type)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor was."""

    number: int


class _Unknown(Exception):
    """Something that is neither tensors nor plain."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A cache.

    Attributes:
        shell: it, with places for its tensors.
        tensors: by the numbers of their places.
    """

    shell: Any
    tensors: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def taken_apart(cache: Any) -> Parts | None:
    """The parts of a cache, which stays as it is; None if it has something that is not known."""
    tensors: list[torch.Tensor] = []
    places: dict[int, _Place] = {}

    def emptied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            raise _Unknown
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            raise _Unknown
        if id(value) not in places:
            places[id(value)] = _Place(len(tensors))
            tensors.append(value)
        return places[id(value)]

    try:
        return Parts(_walked(cache, emptied, {}), tensors)
    except _Unknown:
        return None


def put_together(shell: Any, tensors: list[torch.Tensor]) -> Any:
    """The cache again.

    Args:
        shell: see `Parts`.
        tensors: like those that were taken out of it.
    """
    return _walked(shell, lambda value: tensors[value.number], {})


def _walked(value: Any, replaced: Callable[[Any], Any], seen: dict[int, Any]) -> Any:
    """A copy in which everything that is neither plain nor holds something else is replaced."""
    if isinstance(value, _PLAIN):
        return value
    if type(value) is dict:
        return {key: _walked(one, replaced, seen) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_walked(one, replaced, seen) for one in value)
    if not isinstance(value, _HOLDERS):
        return replaced(value)
    if id(value) not in seen:
        seen[id(value)] = made = copy(value)
        vars(made).pop("_room", None)  # the base of the key and value views; see `room.py`
        for name, one in vars(made).items():
            vars(made)[name] = _walked(one, replaced, seen)
    return seen[id(value)]
