"""The prefix cache: KV caches of finished sequences, and copies of their prefixes.

A system prompt that many requests share is computed once. A conversation with one more question continues from the
cache of its last answer. Requests get copies, so that no sequence can change the cache of another one.
`rabbitllm.generation.kept_cache` states which caches can be cut, and which can only be used whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import torch

from rabbitllm.generation.cache_cost import bytes_of
from rabbitllm.generation.kept_cache import can_be_cut

WORTH_TOKENS = 16
"""Shorter prefixes are recomputed."""
MAX_TEXTS = 256
"""The most finished sequences in the cache. A new request is compared with each of them, in about 40 microseconds
(1,000 tokens, 80 layers)."""


class PrefixCache:
    """KV caches of up to `MAX_TEXTS` finished sequences; evicts the least recently used.

    Attributes:
        nbytes: bytes of all of them.
    """

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[int, ...], tuple[Any, int]] = OrderedDict()
        self.nbytes = 0

    def put(self, ids: Sequence[int], cache: Any) -> None:
        """Keep the cache of a finished sequence; entries that are its prefixes are dropped.

        Args:
            ids: ids of the tokens in the cache.
            cache: KV cache; must not be used elsewhere afterwards.
        """
        text = tuple(ids)
        for known in [known for known in self._texts if known == text[: len(known)]]:
            self._drop(known)
        nbytes = bytes_of(cache)
        self._texts[text] = cache, nbytes
        self.nbytes += nbytes
        if len(self._texts) > MAX_TEXTS:
            self._drop(next(iter(self._texts)))

    def used(self, ids: Sequence[int]) -> None:
        """Mark an entry as recently used; other ids are ignored."""
        if tuple(ids) in self._texts:
            self._texts.move_to_end(tuple(ids))

    def shrink(self, nbytes: int) -> None:
        """Evict the least recently used entries until at most so many bytes are held."""
        while self._texts and self.nbytes > max(nbytes, 0):
            self._drop(next(iter(self._texts)))

    def texts(self) -> Iterable[tuple[Sequence[int], Any]]:
        """Ids and cache of each entry."""
        return [(ids, cache) for ids, (cache, _) in self._texts.items()]

    def _drop(self, ids: tuple[int, ...]) -> None:
        self.nbytes -= self._texts.pop(ids)[1]


def beginning(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix; compares slices, which is a hundred times faster than single ids."""
    low, high = 0, min(len(first), len(second))
    one, other = tuple(first[:high]), tuple(second[:high])
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def usable(wanted: Sequence[int], ids: Sequence[int], cache: Any) -> int:
    """How many tokens of a cache can be reused for a sequence.

    At least one token is left to compute, since it yields the first generated one.

    Args:
        wanted: ids of the new sequence.
        ids: ids of the tokens in the cache.
        cache: see `rabbitllm.generation.kept_cache`.
    """
    common = min(beginning(wanted, ids), len(wanted) - 1)
    if common < WORTH_TOKENS:
        return 0
    if common == len(ids) or all(can_be_cut(layer) for layer in cache.layers):
        return common
    return 0


def copied(cache: Any, tokens: int) -> Any:
    """An independent copy of the first tokens of a cache.

    Args:
        cache: KV cache with at least so many tokens.
        tokens: number of tokens, as `usable` returned it.
    """
    made = copy(cache)
    made.layers = [_copied_layer(layer, tokens) for layer in cache.layers]
    return made


def _copied_layer(layer: Any, tokens: int) -> Any:
    made = copy(layer)
    vars(made).pop("_room", None)  # belongs to the original; see `room.py`
    whole = not can_be_cut(layer)
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            cut = name in ("keys", "values") and not whole and value.dim() == 4
            vars(made)[name] = (value[..., :tokens, :] if cut else value).clone()
        elif isinstance(value, dict):
            vars(made)[name] = {
                key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in value.items()
            }
    if not whole and hasattr(made, "cumulative_length") and made.is_initialized:
        made.cumulative_length = min(made.cumulative_length, tokens)
    return made
