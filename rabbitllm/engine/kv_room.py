"""Layers of a KV cache that grow in place, in tensors with spare room.

transformers' `DynamicLayer` copies its whole tensors for every token, and a layer with a sliding window all of the
window.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, DynamicLayer

from rabbitllm.engine.transformers_api import (
    DynamicIndexedLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

if TYPE_CHECKING:
    from transformers import CacheLayerMixin, PretrainedConfig

NEVER = sys.maxsize
"""More tokens than any sequence has."""
MIN_ROOM_BYTES = 1 << 16
"""Minimum bytes of keys for spare room; below it a copy (11 microseconds) takes as long as two views (8)."""


def spare(tokens: int) -> int:
    """Tokens of spare room for so many tokens."""
    return tokens // 8 + 32


def keeps_every_token(layer: CacheLayerMixin) -> bool:
    """Whether a layer has the KV cache of every token and nothing else."""
    return type(layer) is DynamicLayer


def is_window(layer: CacheLayerMixin) -> bool:
    """Whether a layer has the KV cache of the last tokens and nothing else."""
    return type(layer) is DynamicSlidingWindowLayer


def is_indexed(layer: CacheLayerMixin) -> bool:
    """Whether a layer has the KV cache of every token, keys of an index, and nothing else."""
    return type(layer) is DynamicIndexedLayer


def has_states(layer: CacheLayerMixin) -> bool:
    """Whether a layer has states of linear attention or the like, alone or beside a KV cache."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def has_states_alone(layer: CacheLayerMixin) -> bool:
    """Whether a layer has such states, as transformers keeps them, and nothing else."""
    return type(layer) is LinearAttentionLayer


CACHED = 7
"""Words of a row's keys and values, for compiled code: see `cached`."""


def cached(keys: torch.Tensor, values: torch.Tensor) -> tuple[int, ...]:
    """Addresses of keys and values (1, heads, tokens, width), their tokens, and bytes to the next head and token."""
    _, of_head, of_token, of_key = keys.stride()
    _, of_value_head, of_value_token, of_value = values.stride()
    assert of_key == of_value == 1
    size = keys.element_size()
    steps = size * of_head, size * of_token, size * of_value_head, size * of_value_token
    return keys.data_ptr(), values.data_ptr(), keys.shape[2], *steps


class _CacheRoom:
    """Key and value tensors with spare room; those of a layer are views of some of their tokens.

    Attributes:
        keys, values: (1, heads, tokens, width).
        begin, used: the layer's tokens: the first one, which is 0 if it has no window, and the end.
        form: their dtype and device, 1, heads, and widths.
        views: the keys and values that `give` gave to a layer.
        index: keys of an index, as long as these.
    """

    __slots__ = ("_places", "_steps", "_width", "_words", "begin", "form", "index", "keys", "used", "values", "views")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
        self.used, self.begin = keys.shape[2], 0
        self.keys = _longer(keys, tokens)
        self.values = _longer(values, tokens)
        self._words = cached(self.keys, self.values)
        self._places, self._width = self._words[:2], self.keys[:, :, 0].numel()
        self._steps = self.keys.stride(), self.values.stride()
        self.form = keys.dtype, keys.device, len(keys), keys.shape[1], keys.shape[3], values.shape[3]
        self.views: tuple[torch.Tensor, ...] | tuple[None, None] = None, None
        self.index: IndexRoom | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None: a deep copy of a layer, or one that is read from a file, gets its own."""
        return type(None), ()

    def belongs_to(self, layer: CacheLayerMixin) -> bool:
        """Whether the layer has still the tensors that `give` gave to it, with all used tokens."""
        keys, values = layer.keys, layer.values
        if keys is not self.views[0] or values is not self.views[1] or keys is None or values is None:
            return False
        # other `data` of the same tensors
        places, elements = (keys.data_ptr(), values.data_ptr()), (self.used - self.begin) * self._width
        is_own = places == self._places and keys.numel() == elements
        return is_own and (torch.is_inference_mode_enabled() or not self.keys.is_inference())

    def cached(self, layer: CacheLayerMixin, end: int) -> tuple[int, ...]:
        """`cached` of the tokens up to `end` that the last of them sees."""
        keys, values, _, *steps = self._words
        begin = max(end - layer.sliding_window, 0) if is_window(layer) else 0
        return keys + begin * steps[1], values + begin * steps[3], end - begin, *steps

    def grow(self, layer: CacheLayerMixin, tokens: int) -> None:
        """Let the layer have so many more tokens."""
        self.used += tokens
        begin = self.begin
        if is_window(layer):
            layer.cumulative_length += tokens
            self.begin = max(self.used - layer.sliding_window + 1, begin)
        self.give(layer)
        if self.begin > begin:
            self._places = layer.keys.data_ptr(), layer.values.data_ptr()

    def give(self, layer: CacheLayerMixin) -> None:
        """Let the layer have all used tokens that it has not lost."""
        layer.keys, layer.values = self.views = self.tokens_from(self.begin)

    def tokens_from(self, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of used tokens."""
        *_, count, heads, width, value_width = self.form
        (of_keys, of_values), tokens = self._steps, self.used - begin
        # half the time of `narrow`
        keys = self.keys.as_strided((count, heads, tokens, width), of_keys, begin * of_keys[2])
        return keys, self.values.as_strided((count, heads, tokens, value_width), of_values, begin * of_values[2])


class IndexRoom:
    """Keys of an index with spare room, and behind them those of blocks of tokens, and what blocks score.

    Attributes:
        keys, blocks, scores: addresses.
        done: how many blocks have keys.
    """

    __slots__ = ("_facts", "_memory", "_view", "blocks", "done", "keys", "scores")

    def __init__(self, keys: torch.Tensor, tokens: int, ratio: int, facts: Sequence[object]) -> None:
        _, used, width = keys.shape
        count, nbytes = tokens // ratio, width * keys.element_size()
        # in one tensor: what a cache holds is counted by the storages of its tensors
        self._memory = keys.new_empty(1, tokens + count + 4 * count // nbytes + 1, width)
        self._memory[:, :used] = keys
        self.keys, self._view, self._facts, self.done = self._memory.data_ptr(), keys, facts, 0
        self.blocks = self.keys + tokens * nbytes
        self.scores = self.blocks + count * nbytes

    @classmethod
    def of(cls, layer: Any, room: _CacheRoom, ratio: int, facts: Sequence[object]) -> IndexRoom:
        """That of a layer's index, whose blocks have so many tokens; made again if the layer has other keys than
        `give` gave to it, or keys of blocks depend on other objects."""
        own, keys = room.index, layer.indexer_keys
        is_own = own is not None and keys is own._view and all(map(operator.is_, facts, own._facts))
        if own is None or not is_own or keys.data_ptr() != own.keys or keys.shape[1] != room.used:
            own = room.index = cls(keys, room.keys.shape[2], ratio, facts)
        return own

    def give(self, layer: Any, tokens: int) -> None:
        """Let the layer have the keys of so many tokens."""
        layer.indexer_keys = self._view = self._memory[:, :tokens]


def room_for(layer: CacheLayerMixin, end: int) -> _CacheRoom:
    """Room for so many tokens in a layer with keys and values."""
    room = vars(layer).get("_room")
    if room is None or not room.belongs_to(layer) or room.keys.shape[2] < end + room.begin:
        room = layer._room = _CacheRoom(layer.keys, layer.values, end + spare(end))
    return room  # type: ignore[no-any-return]


def updated(cache: Any, keys: torch.Tensor, values: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `cache.update` returns for tokens without gradients; transformers' own cache of one sequence grows in place.

    Args:
        cache: any KV cache.
        keys, values: as for `append`.
        index: of the layer.
    """
    pair = _grown(cache, keys, values, index) if is_ordinary(cache) else None
    return pair or cache.update(keys, values, index)


class GrowingCache(DynamicCache):  # type: ignore[misc]
    """The KV cache of one sequence, whose layers grow by `append`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DynamicCache.update`."""
        pair = None if torch.is_grad_enabled() else _grown(self, key_states, value_states, layer_idx)
        return pair or super().update(key_states, value_states, layer_idx, *args, **kwargs)


def can_grow(layer: CacheLayerMixin) -> bool:
    """Whether a layer has every token, or the last ones, of which it records none that have left the window."""
    return keeps_every_token(layer) or (is_window(layer) and layer.sliding_window > 1 and not layer.record_past)


def _grown(
    cache: Any, keys: torch.Tensor, values: torch.Tensor, index: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Append to a layer of a cache of one sequence, alike the new tokens; None if it is another."""
    layer = cache.layers[index] if index < len(cache.layers) else None
    if layer is None or not can_grow(layer) or (before := layer.keys) is None or len(keys) != 1:
        return None
    is_like = (before.dtype, before.device) == (keys.dtype, keys.device) and before.shape[:2] == keys.shape[:2]
    return append(layer, keys, values) if is_like else None


def sequences_in(cache: Any) -> list[tuple[Any, int]]:
    """The KV cache of each sequence in a pass that is to be one call, and its rows there; a cache of one gets one."""
    return getattr(cache, "sequences", None) or [(cache, 1)]


class NotTogetherError(Exception):
    """Layers were to be one call, and cannot be; nothing has changed."""


def is_ordinary(cache: Any) -> bool:
    """Whether a cache is transformers' own or a `GrowingCache`, in memory, whose `update` nothing replaced."""
    return type(cache) in (DynamicCache, GrowingCache) and not cache.offloading and "update" not in vars(cache)


def append(layer: CacheLayerMixin, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Append to a layer, with the values of `layer.update(keys, values)`.

    Its tensors are views of larger ones, up to `spare` tokens longer, where tokens that have left a window stay until
    there is no room. The layer can be cut, copied and put back as before, and then gets new room. Only room that no
    other layer uses is written to: layers that share room are separated at the next token.

    Args:
        layer: layer of the KV cache of one sequence.
        keys, values: of the new tokens, (1, heads, tokens, width).

    Returns:
        The layer's whole key and value tensor; of a window all that the first of the new tokens sees, and these.
    """
    before = layer.keys
    has_room = before is not None and (before.nbytes >= MIN_ROOM_BYTES or vars(layer).get("_room") is not None)
    if not can_grow(layer) or not has_room:
        result: tuple[torch.Tensor, torch.Tensor] = layer.update(keys, values)
        return result
    room = room_for(layer, before.shape[2] + keys.shape[2])
    begin, end = room.used, room.used + keys.shape[2]
    room.keys[:, :, begin:end] = keys
    room.values[:, :, begin:end] = values
    first = room.begin
    room.grow(layer, keys.shape[2])
    return (layer.keys, layer.values) if room.begin == first else room.tokens_from(first)


def _longer(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    longer = tensor.new_empty((*tensor.shape[:2], tokens, tensor.shape[3]))
    longer[:, :, : tensor.shape[2]] = tensor
    return longer


def angles_change_after(config: PretrainedConfig) -> int:
    """Number of tokens after which the rotary angles of all tokens are other ones; `NEVER` if they never change.

    The angles of a pass follow from its largest position with some kinds of rotary embeddings. What was computed up to
    this number of tokens is right for longer sequences only if transformers' own `generate` goes on from it, too.

    Args:
        config: config of the text model.
    """
    of_all = getattr(config, "rope_parameters", None) or {}  # or those of each kind of layers
    ropes = [rope for rope in (of_all, *of_all.values()) if isinstance(rope, Mapping)]
    return min((_angles_change_after(config, rope) for rope in ropes), default=NEVER)


def _angles_change_after(config: PretrainedConfig, rope: Mapping[str, Any]) -> int:
    rope_type = str(rope.get("rope_type", rope.get("type")))
    if "dynamic" in rope_type:
        return int(config.max_position_embeddings)
    if "longrope" not in rope_type:
        return NEVER
    # the rotary embedding reads the first one, and Phi-3's code that drops the cache the second one
    both = (rope.get("original_max_position_embeddings"), getattr(config, "original_max_position_embeddings", None))
    return min((tokens for tokens in both if isinstance(tokens, int)), default=0)
