"""The KV caches of the sequences of a packed batch, behind the interface of one transformers cache.

An update is split and appended to the sequences' own caches. It returns only the new keys and values, by which
attention finds the whole keys and values of each sequence (`packed_attention.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from transformers.cache_utils import Cache

from rabbitllm.generation.cache_file import CacheFile
from rabbitllm.generation.room import append


@dataclass(frozen=True, slots=True)
class MaskSpan:
    """The sizes of the mask of one sequence.

    Attributes:
        queries: number of new tokens.
        begins: number of tokens before them.
        keys: number of keys, including those of the new tokens.
        first_key: position of the first key in the sequence.
    """

    queries: int
    begins: int
    keys: int
    first_key: int


@dataclass(frozen=True, slots=True)
class _Layer:
    """The result of a layer's update.

    Attributes:
        number: number of the layer.
        new_keys, new_values: tensors of all sequences, as passed to `update`.
        pairs: the whole KV cache of each sequence; None for a sequence that has it in a file.
    """

    number: int
    new_keys: torch.Tensor
    new_values: torch.Tensor
    pairs: list[tuple[torch.Tensor, torch.Tensor] | None]


class PackedCache(Cache):  # type: ignore[misc]
    """The cache of a packed batch.

    Args:
        caches: KV cache of each sequence; their layers are of the same kinds.
        lengths: number of rows of each sequence.
        shares: whether layers use the KV cache of others.
        file: file in which some sequences may have their KV cache, unless `shares`.
    """

    def __init__(
        self, caches: Sequence[Any], lengths: Sequence[int], shares: bool, file: CacheFile | None = None
    ) -> None:
        super().__init__(layers=[])
        self.lengths = list(lengths)
        self._caches = list(caches)
        self._shares = shares
        self._file = file
        self._asked = 0
        self._given: dict[int, _Layer] = {}
        self._latest: dict[int, int] = {}
        self._unused = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append each sequence's rows to its own cache.

        Args:
            key_states, value_states: (1, heads, rows of all sequences, width).
            layer_idx: number of the layer.

        Returns:
            The same keys and values.
        """
        if not self._shares:
            self._given.clear()
            self._latest.clear()
        pairs: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for cache, (key, value) in zip(self._caches, self._by_text(key_states, value_states), strict=True):
            is_in_file = self._file is not None and self._file.brings(cache, layer_idx)
            pairs.append(None if is_in_file else append(cache.layers[layer_idx], key, value))
        self._given[id(key_states)] = _Layer(layer_idx, key_states, value_states, pairs)
        self._latest[layer_idx] = id(key_states)
        self._unused += 1
        return key_states, value_states

    def of(
        self, key_states: torch.Tensor, value_states: torch.Tensor, module: Any
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """The KV cache of each sequence, as two tensors (1, heads, tokens, width).

        Args:
            key_states, value_states: the keys and values passed to attention: those that `update` returned.
            module: the attention module. With latent attention (DeepSeek's), the cached values of each sequence are
                expanded by its `expand_kv` when they are iterated over.

        Raises:
            NotPackable: attention was given other keys.
        """
        given = self._given.get(id(key_states))
        self._unused -= 1
        if given is not None and given.new_values is value_states:
            return self._pairs(given)
        expand, latest = getattr(module, "expand_kv", None), self._given.get(self._latest.get(module.layer_idx, 0))
        if given is not None or expand is None or latest is None:
            raise NotPackable("attention was given other keys than the cache returned")
        return starmap(expand, self._pairs(latest))

    def _by_text(self, keys: torch.Tensor, values: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        return zip(torch.split(keys, self.lengths, 2), torch.split(values, self.lengths, 2), strict=True)

    def _pairs(self, given: _Layer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each sequence; those in a file are read when yielded, and freed before the next."""
        if None not in given.pairs:
            yield from (pair for pair in given.pairs if pair is not None)
            return
        new = self._by_text(given.new_keys, given.new_values)
        for cache, pair, (key, value) in zip(self._caches, given.pairs, new, strict=True):
            if pair is not None:
                yield pair
                continue
            assert self._file is not None
            yield self._file.joined(cache, given.number, key, value)
            self._file.put_back(cache, given.number, key, value)

    def spans(self) -> list[MaskSpan]:
        """The sizes of each sequence's mask in the layer of the latest `get_mask_sizes` or `get_query_offset`."""
        found = []
        for cache, length in zip(self._caches, self.lengths, strict=True):
            keys, first = cache.get_mask_sizes(length, self._asked)
            found.append(MaskSpan(length, cache.get_query_offset(self._asked), keys, first))
        return found

    def finish(self) -> None:
        """Check that all attention used each sequence's own keys.

        Raises:
            NotPackable: some did not, so that sequences may have attended to each other.
        """
        if self._unused > 0:
            raise NotPackable("attention was computed otherwise than by transformers' attention interface")

    # called by models and mask functions ----------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Record the layer of the mask; its sizes are in `spans`."""
        self._asked = layer_idx
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """See `get_mask_sizes`."""
        self._asked = layer_idx
        return 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not supported, since the sequences have no common length.

        Raises:
            NotPackable: always.
        """
        raise NotPackable("the model asks how long the texts of a pass are, and they have no common length")

    @property
    def is_sliding(self) -> list[bool]:
        """Whether each layer has a sliding window."""
        return list(self._caches[0].is_sliding)

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer has linear attention."""
        return list(self._caches[0].is_linear)

    @property
    def is_dummy(self) -> list[bool]:
        """Whether each layer is a dummy."""
        return list(self._caches[0].is_dummy)

    @property
    def is_compileable(self) -> bool:
        """Always False."""
        return False


class NotPackable(NotImplementedError):
    """A model cannot be run with packed batches."""
