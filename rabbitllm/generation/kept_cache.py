"""A KV cache that is kept between answers, and how far it can go back.

The next prompt is seldom an exact continuation of the last one: a template strips the model's reasoning, and a
tokenizer may split the text of the answer differently from the model. So the cache goes back to their common prefix.
How depends on the kind of layer (transformers 5, `cache_utils`):

    the KV cache of every token           cut at any length
    a sliding window                      cut as long as it has not slid; after that older tokens are gone
    a state (linear attention, Mamba, …)  cannot be cut: it sums up all tokens

Windows and states are copied at the beginning of a turn and at the end of its prompt, and the cache goes back to the
longest copy that is short enough. A copy is as large as the window or the state, whatever the length of the sequence.

A cache is kept only if it continues exactly: the results for further tokens are then the same as for all tokens at
once, except for rounding. This holds for full attention and sliding windows. With states it depends on the model's own
code, which in some models resets the state at every prompt (Jamba, RecurrentGemma). `CONTINUING` names the models that
continue, each with a test. For all others nothing is kept, and each prompt is computed whole: other models with states,
caches of other kinds (indexes that choose tokens, where rounding changes the choice) and models without attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

CONTINUING = frozenset(
    {
        *("bailing_hybrid", "falcon_h1", "granitemoehybrid", "inkling_text", "inkling2_text", "kimi_linear"),
        *("lfm2", "lfm2_moe", "lfm3", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
        *("zamba2", "zaya"),
    }
)
"""Model types whose states continue with further prompts (transformers 5.23), tested in
`tests/generation/test_kept_cache.py`."""
MAX_MARKS = 2
"""The most marks kept: the beginning of a turn and the end of its prompt."""


def keeps(model: Any) -> bool:
    """Whether a model's cache continues exactly, so that it can be kept."""
    if model.config.is_encoder_decoder or not model._supports_default_dynamic_cache():
        return False
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    plain = [layer for layer in layers if _holds_every_token(layer) or _is_window(layer) or _is_nothing(layer)]
    if not any(isinstance(layer, DynamicLayer) for layer in layers):
        return False  # the number of its tokens would be unknown
    if getattr(model, "hosts", None) is not None and not all(map(_holds_every_token, layers)):
        return False  # a mark restores the layers of this host only
    states = [layer for layer in layers if hasattr(layer, "conv_states")]
    return len(plain) == len(layers) or (config.model_type in CONTINUING and len(states) + len(plain) == len(layers))


def _holds_every_token(layer: Any) -> bool:
    return type(layer) is DynamicLayer


def _is_window(layer: Any) -> bool:
    return type(layer) is DynamicSlidingWindowLayer


def _is_nothing(layer: Any) -> bool:
    """Whether a layer has no attention, or uses another layer's KV cache."""
    return type(layer).__name__ == "DummyLayer"  # not in every version


@dataclass(frozen=True, slots=True)
class Mark:
    """A length to which a cache can go back.

    Attributes:
        length: number of tokens.
        layers: number of a layer -> its attributes to restore.
    """

    length: int
    layers: Mapping[int, Mapping[str, Any]]


class KeptCache:
    """The KV cache of one conversation.

    Args:
        model: one for which `keeps` holds.

    Attributes:
        ids: ids of the tokens in the cache.
        cache: the `past_key_values` for `generate`.
    """

    def __init__(self, model: Any) -> None:
        self._config = model.config.get_text_config(decoder=True)
        self.clear()

    def clear(self) -> None:
        """Empty the cache and drop its marks."""
        self.ids: list[int] = []
        self.cache = DynamicCache(config=self._config)
        self._marks: list[Mark] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of the cache and its marks."""
        tensors = [tensor for layer in self.cache.layers for tensor in _tensors(vars(layer))]
        tensors += [tensor for mark in self._marks for layer in mark.layers.values() for tensor in _tensors(layer)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def go_back(self, length: int) -> int:
        """Shorten the cache to at most so many tokens, and return its new length.

        Args:
            length: number of tokens; no change if the cache has no more than that.
        """
        return len(self.ids) if length >= len(self.ids) else self._shorten(length)

    def mark(self, ids: list[int]) -> None:
        """Record that the cache holds exactly these tokens now, and keep a mark to go back here."""
        self.ids = list(ids)
        layers = {
            number: _copied(_what_cutting_spoils(layer))
            for number, layer in enumerate(self.cache.layers)
            if not _holds_every_token(layer) and not _is_nothing(layer)
        }
        if layers and ids:
            self._marks = [mark for mark in self._marks if mark.length < len(ids)][1 - MAX_MARKS :]
            self._marks.append(Mark(len(ids), layers))

    def hold(self, ids: list[int]) -> None:
        """Record that the cache holds exactly these tokens now."""
        self.ids = list(ids)

    def recover(self, length: int, ids: list[int]) -> int:
        """Make the cache consistent after an interrupted pass, in which some layers got further than others.

        Args:
            length: number of tokens in every layer before that pass.
            ids: those tokens, and possibly more.

        Returns:
            The new length of the cache.
        """
        self.ids = ids[:length]
        return self._shorten(length)

    def _shorten(self, length: int) -> int:
        if length and all(can_be_cut(layer) for layer in self.cache.layers):
            return self._cut(length)
        return self._put_back(length)

    def _cut(self, length: int) -> int:
        for layer in self.cache.layers:
            if not _is_nothing(layer):
                _cut_layer(layer, length)
        self._marks = [mark for mark in self._marks if mark.length <= length]
        self.ids = self.ids[:length]
        return length

    def _put_back(self, length: int) -> int:
        self._marks = [mark for mark in self._marks if mark.length <= length]
        if not self._marks:
            self.clear()
            return 0
        mark = self._marks[-1]
        for number, layer in enumerate(self.cache.layers):
            if number in mark.layers:
                if _grows(layer):
                    _cut_layer(layer, mark.length)
                vars(layer).update(_copied(mark.layers[number]))
            elif not _is_nothing(layer):
                _cut_layer(layer, mark.length)
        self.ids = self.ids[: mark.length]
        return mark.length


def can_be_cut(layer: Any) -> bool:
    """Whether the layer in its current state can be cut at any length."""
    if _is_window(layer):
        return bool(layer.get_seq_length() < layer.sliding_window)
    return _holds_every_token(layer) or _is_nothing(layer)


def _grows(layer: Any) -> bool:
    """Whether the layer keeps the KV cache of every token; it may also have a state."""
    return isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)


def _cut_layer(layer: Any, length: int) -> None:
    """Cut a layer's key and value tensor, (batch, heads, tokens, width), to so many tokens."""
    if layer.is_initialized and layer.keys is not None:
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
        if _is_window(layer):
            layer.cumulative_length = min(layer.cumulative_length, length)


def _what_cutting_spoils(layer: Any) -> dict[str, Any]:
    own: dict[str, Any] = dict(vars(layer))
    if _grows(layer):
        del own["keys"], own["values"]
    return own


def _copied(value: Any) -> Any:
    """A copy with tensors of its own; of a view only the viewed part."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {name: _copied(one) for name, one in value.items()} if isinstance(value, dict) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [found for one in value.values() for found in _tensors(one)] if isinstance(value, Mapping) else []
