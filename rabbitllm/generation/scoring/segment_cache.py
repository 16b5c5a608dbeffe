"""The KV cache of segments that go through the model in one forward; later segments read that of earlier ones.

It has the interface of a transformers cache. The tensors of a layer are dropped after its attention, unless later
layers of the family use them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from rabbitllm.generation.packed_batch import MaskSpan, NotPackable, PackedCache
from rabbitllm.generation.scoring.segments import Segment, Segments


class Relay:
    """Hands the KV cache of a prefix from one micro-batch to the next, layer by layer."""

    def __init__(self) -> None:
        self._layer = -1
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None

    def give(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the keys and values that the next micro-batch needs in a layer, (1, heads, tokens, width)."""
        self._layer, self._given = layer, (keys, values)

    def take(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values from the micro-batch before.

        Raises:
            NotPackable: it has stored nothing for this layer, for example after an error.
        """
        given, self._given = self._given, None
        if given is None or self._layer != layer:
            raise NotPackable("the micro-batch before has not computed what this one begins with")
        return given


class SegmentCache(PackedCache):
    """The cache of one forward.

    Args:
        segments: segments of the micro-batch.
        config: config of the text model.
        shares: whether layers use the KV cache of others.
        before: source of the KV cache of known segments; None if there are none.
        behind: target of the KV cache that the next micro-batch needs; None if it needs none.
        hands_on: number of tokens of that prefix, which is one of the last text.
    """

    def __init__(
        self,
        segments: Segments,
        config: Any,
        shares: bool,
        before: Relay | None = None,
        behind: Relay | None = None,
        hands_on: int = 0,
    ) -> None:
        computed = segments.computed
        super().__init__([DynamicCache(config=config)], [len(part.ids) for part in computed], shares)
        self._segments = segments
        self._knows = len(computed) < len(segments.parts)
        self._before, self._behind, self._hands_on = before, behind, hands_on
        self._spans = [MaskSpan(len(part.ids), part.begins, part.begins + len(part.ids), 0) for part in computed]
        self._new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._known: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the new key and value tensor of a layer, and hand a prefix on.

        Args:
            key_states, value_states: (1, heads, rows of all segments, width).
            layer_idx: number of the layer.

        Returns:
            The same tensors.
        """
        if not self._shares:
            self._new.clear()
        self._new[layer_idx] = key_states, value_states
        self._unused += 1
        if self._knows:
            assert self._before is not None
            self._known = self._before.take(layer_idx)
        if self._behind is not None and self._hands_on:
            path = self._segments.path(len(self._segments.ends) - 1)
            handed = [
                self._joined(path, self._of_each(new), known)[:, :, : self._hands_on]
                for new, known in (
                    (key_states, self._known[0] if self._known else None),
                    (value_states, self._known[1] if self._known else None),
                )
            ]
            self._behind.give(layer_idx, handed[0].clone(), handed[1].clone())
        return key_states, value_states

    def of(
        self, key_states: torch.Tensor, value_states: torch.Tensor, module: Any
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The KV cache that each segment may attend to, as two tensors (1, heads, tokens, width).

        Args:
            key_states, value_states: the keys and values passed to attention: those that `update` returned.
            module: the attention module; see `PackedCache.of`.

        Raises:
            NotPackable: attention was given other keys.
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
        own_keys, own_values = self._of_each(keys), self._of_each(values)
        known_keys, known_values = self._known if self._known is not None else (None, None)
        self._known = None
        for part in self._segments.computed:
            chain = [*(self._segments.parts[number] for number in part.after), part]
            joined = self._joined(chain, own_keys, known_keys), self._joined(chain, own_values, known_values)
            yield expand(*joined) if expand is not None else joined

    def _of_each(self, new: torch.Tensor) -> dict[int, torch.Tensor]:
        """First row of a segment -> its keys or values."""
        parts = torch.split(new, self.lengths, 2)
        return {part.row: own for part, own in zip(self._segments.computed, parts, strict=True)}

    def _joined(
        self, chain: Sequence[Segment], own: Mapping[int, torch.Tensor], known: torch.Tensor | None
    ) -> torch.Tensor:
        """The keys or values of a chain of segments, concatenated."""
        end = sum(len(part.ids) for part in chain if part.is_known)
        found = [own[part.row] for part in chain if not part.is_known]
        if end:
            assert known is not None
            found.insert(0, known[:, :, :end])
        return torch.cat(found, 2) if len(found) > 1 else found[0]

    def spans(self) -> list[MaskSpan]:
        """The sizes of each segment's mask, the same in all layers; the mask function applies sliding windows."""
        return self._spans
