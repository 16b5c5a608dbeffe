"""The caches of several texts as one, for a pass in which their rows go through the model side by side.

To the model it is a cache of transformers'. What it is given is dealt out to the texts' own caches; what it returns are
the new keys and values alone, by which the attention finds those of each text (`packed_attention.py`).
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
    """What the mask of one text covers.

    Attributes:
        queries: tokens that go in.
        begins: how many came before them.
        keys: tokens that they may look at, these included.
        first_key: the number of the first of those in the text.
    """

    queries: int
    begins: int
    keys: int
    first_key: int


@dataclass(frozen=True, slots=True)
class _Layer:
    """What came of a layer's update.

    Attributes:
        number: of the layer.
        new_keys, new_values: of all texts, as they came.
        pairs: the whole KV cache of each sequence; None for a sequence that has it in a file.
    """

    number: int
    new_keys: torch.Tensor
    new_values: torch.Tensor
    pairs: list[tuple[torch.Tensor, torch.Tensor] | None]


class PackedCache(Cache):  # type: ignore[misc]
    """Stands for the caches of texts whose rows lie one after the other.

    Args:
        caches: of each text; their layers are of the same kinds.
        lengths: how many rows each has.
        shares: whether layers use the KV cache of others.
        file: in which some of the texts may have theirs, where no layer does.
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
        """Append each text's rows to its own cache.

        Args:
            key_states, value_states: (1, heads, rows of all, width).
            layer_idx: whose they are.

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
            key_states, value_states: what attention is given, which is what `update` returned.
            module: where. Of latent attention (DeepSeek's), what is kept has to be expanded, by `expand_kv`; each
                text's is, when it is asked for.

        Raises:
            NotPackable: these are no such keys.
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
        """Of each text; what is in a file is brought when it is asked for, and gone when the next one is."""
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
        """What the mask has to cover that is being made, of each text."""
        found = []
        for cache, length in zip(self._caches, self.lengths, strict=True):
            keys, first = cache.get_mask_sizes(length, self._asked)
            found.append(MaskSpan(length, cache.get_query_offset(self._asked), keys, first))
        return found

    def finish(self) -> None:
        """Make sure that all attention went by each text's keys.

        Raises:
            NotPackable: some did not, so that texts may have seen each other.
        """
        if self._unused > 0:
            raise NotPackable("attention was computed otherwise than by transformers' attention interface")

    # what models and the makers of masks ask ------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Of which layer a mask is made; the sizes are in `spans`."""
        self._asked = layer_idx
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """See `get_mask_sizes`."""
        self._asked = layer_idx
        return 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Has no answer.

        Raises:
            NotPackable: always.
        """
        raise NotPackable("the model asks how long the texts of a pass are, and they have no common length")

    @property
    def is_sliding(self) -> list[bool]:
        """Of each layer."""
        return list(self._caches[0].is_sliding)

    @property
    def is_linear(self) -> list[bool]:
        """Of each layer."""
        return list(self._caches[0].is_linear)

    @property
    def is_dummy(self) -> list[bool]:
        """Of each layer."""
        return list(self._caches[0].is_dummy)

    @property
    def is_compileable(self) -> bool:
        """Never."""
        return False


class NotPackable(NotImplementedError):
    """A model does something with what goes through it that rows of several texts side by side cannot bear."""
