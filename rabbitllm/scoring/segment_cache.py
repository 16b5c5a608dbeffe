"""Keys and values of segments that go through the model side by side, each read by those that come after it.

To the model it is a cache of transformers'. It keeps nothing: keys and values of a layer are there until its attention
has used them, unless the family's later layers use them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from rabbitllm.batching.packed_cache import NotPackable, PackedCache, Span
from rabbitllm.scoring.segments import Segments


class SegmentCache(PackedCache):
    """For one forward.

    Args:
        segments: whose rows lie one after the other.
        config: of the text model.
        shares: whether layers use the keys and values of others.
    """

    def __init__(self, segments: Segments, config: Any, shares: bool) -> None:
        super().__init__([DynamicCache(config=config)], [len(part.ids) for part in segments.parts], shares)
        self._parts = segments.parts
        self._spans = [Span(len(part.ids), part.begins, part.begins + len(part.ids), 0) for part in segments.parts]
        self._new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take note of a layer's keys and values.

        Args:
            key_states, value_states: (1, heads, rows of all, width).
            layer_idx: whose they are.

        Returns:
            The same ones.
        """
        if not self._shares:
            self._new.clear()
        self._new[layer_idx] = key_states, value_states
        self._unused += 1
        return key_states, value_states

    def of(
        self, key_states: torch.Tensor, value_states: torch.Tensor, module: Any
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values that each segment may look at, (1, heads, tokens, width).

        Args:
            key_states, value_states: what attention is given, which is what `update` returned.
            module: where; see `PackedCache.of`.

        Raises:
            NotPackable: these are no such keys.
        """
        self._unused -= 1
        expand = None
        if not any(key_states is keys and value_states is values for keys, values in self._new.values()):
            expand, latest = getattr(module, "expand_kv", None), self._new.get(module.layer_idx)
            if expand is None or latest is None:
                raise NotPackable("attention was given other keys than the cache returned")
            key_states, value_states = latest
        if not self._shares:
            self._new.clear()
        return self._by_segment(key_states, value_states, expand)

    def _by_segment(self, keys: torch.Tensor, values: torch.Tensor, expand: Any) -> Iterator[Any]:
        own = list(zip(torch.split(keys, self.lengths, 2), torch.split(values, self.lengths, 2), strict=True))
        for number, part in enumerate(self._parts):
            chain = [own[one] for one in (*part.after, number)]
            joined = tuple(torch.cat(one, 2) for one in zip(*chain, strict=True)) if part.after else own[number]
            yield expand(*joined) if expand is not None else joined

    def spans(self) -> list[Span]:
        """What the mask of each segment covers, in any layer: windows are the mask's business."""
        return self._spans
