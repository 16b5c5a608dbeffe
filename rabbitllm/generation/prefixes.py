"""The prefix cache: KV caches of finished sequences, and copies of their prefixes.

A system prompt that many requests share is computed once. A conversation with one more question continues from the
cache of its last answer. Requests get copies, so that no sequence can change the cache of another one. For which
caches can be cut, and which can only be used whole, see `rabbitllm.generation.kept_cache`.
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
"""A shorter prefix is computed again."""
MAX_TEXTS = 256
"""Finished sequences in the cache, at most. A new request compares itself with each of them, in some 40 microseconds
(1,000 tokens, 80 layers)."""


class PrefixCache:
    """KV caches of finished sequences, the latest used last; at most `MAX_TEXTS`.

    Attributes:
        nbytes: of all of them.
    """

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[int, ...], tuple[Any, int]] = OrderedDict()
        self.nbytes = 0

    def put(self, ids: Sequence[int], cache: Any) -> None:
        """Keep the cache of a finished sequence; those of its prefixes are dropped.

        Args:
            ids: the tokens that are in it.
            cache: belongs to this from now on.
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
        """Note that a text was of use, if it is one of these."""
        if tuple(ids) in self._texts:
            self._texts.move_to_end(tuple(ids))

    def shrink(self, nbytes: int) -> None:
        """Drop what was not used for the longest time, until no more than so many bytes are held."""
        while self._texts and self.nbytes > max(nbytes, 0):
            self._drop(next(iter(self._texts)))

    def texts(self) -> Iterable[tuple[Sequence[int], Any]]:
        """Ids and cache of each."""
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
    """How many tokens of a text a cache can give it.

    At least one token is left to be computed: from it comes the first of the answer.

    Args:
        wanted: the text.
        ids: the tokens that are in the cache.
        cache: see `rabbitllm.generation.kept_cache`.
    """
    common = min(beginning(wanted, ids), len(wanted) - 1)
    if common < WORTH_TOKENS:
        return 0
    if common == len(ids) or all(can_be_cut(layer) for layer in cache.layers):
        return common
    return 0


def copied(cache: Any, tokens: int) -> Any:
    """A cache of its own with the first tokens of another one.

    Args:
        cache: with at least so many.
        tokens: as `usable` says.
    """
    made = copy(cache)
    made.layers = [_copied_layer(layer, tokens) for layer in cache.layers]
    return made


def _copied_layer(layer: Any, tokens: int) -> Any:
    made = copy(layer)
    vars(made).pop("_room", None)  # belongs to the other one; see `room.py`
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
