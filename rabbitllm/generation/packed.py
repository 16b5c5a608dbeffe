"""A pass with a packed batch: the rows of several sequences go through the model in one forward, without padding.

    ids of sequence 1, ids of sequence 2, …  ->  (1, all rows)  ->  logits of the requested rows  ->  an output for each

Only attention combines rows, and there each sequence has its own keys and its own mask. Whether a call can be packed
is decided from its arguments; with an unknown argument it is not packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from rabbitllm.generation.cache_file import CacheFile
from rabbitllm.generation.packed_attention import attention_by_text, packed_attention
from rabbitllm.generation.packed_cache import NotPackable, PackedCache
from rabbitllm.generation.packed_families import can_be_packed, has_known_layers, shares_keys

_READ = frozenset({"input_ids", "position_ids", "attention_mask", "past_key_values", "logits_to_keep"})
_EXPECTED: Mapping[str, Any] = {"use_cache": True, "return_dict": True}
_NOTHING: Mapping[str, Any] = {"mm_encoder_outputs": {}}
"""Arguments that `generate` passes without images."""


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """The sequence of a request in a packed batch.

    Attributes:
        ids: (1, rows).
        positions: (1, rows); (kinds, 1, rows) if the model has several kinds.
        cache: its KV cache.
        kept: number of last rows whose logits are computed.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    cache: Any
    kept: int


class PackedForward:
    """Computes passes with packed batches.

    Args:
        model: a model for which `can_be_packed` holds.
        file: file in which some sequences have their KV cache; None for none.
    """

    def __init__(self, model: Any, file: CacheFile | None = None) -> None:
        self._model = model
        self._file = file
        config = model.config.get_text_config(decoder=True)
        seen = {id(one): one for module in model.modules() if (one := getattr(module, "config", None)) is not None}
        self._configs = [one for one in seen.values() if getattr(one, "_attn_implementation", None) is not None]
        self._layers = [type(layer) for layer in DynamicCache(config=config).layers]
        self._windows = [number for number, kind in enumerate(self._layers) if kind is DynamicSlidingWindowLayer]
        self._known: WeakSet[DynamicCache] = WeakSet()
        self._shares = shares_keys(model)
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._positions = getattr(config, "max_position_embeddings", None) or 1 << 62

    @staticmethod
    def of(model: Any, file: CacheFile | None = None) -> PackedForward | None:
        """A `PackedForward` for a model; None if the model cannot be packed."""
        return PackedForward(model, file) if can_be_packed(model) else None

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PackedSequence | None:
        """The sequence in a call of the model's forward; None if the call cannot be packed.

        Args:
            args, kwargs: arguments of the call.
        """
        if args or not all(name in _READ or _says_nothing(name, value) for name, value in kwargs.items()):
            return None
        ids, cache, kept = kwargs.get("input_ids"), kwargs.get("past_key_values"), kwargs.get("logits_to_keep", 0)
        if not _is_row(ids) or type(kept) is not int or kept < 0 or not self._knows(cache):
            return None
        before, rows = cache.get_seq_length(), ids.shape[1]
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if positions is None:
            positions = torch.arange(before, before + rows, device=ids.device)[None]
        if positions.shape[-2:] != ids.shape or positions.dim() > 3 or positions.device != ids.device:
            return None
        if mask is not None and (mask.shape != (1, before + rows) or not bool(mask.all())):
            return None
        return PackedSequence(ids, positions, cache, min(kept, rows) or rows)

    def fitting(self, texts: Sequence[PackedSequence]) -> list[bool]:
        """Whether each sequence matches the first one and has valid ids and positions.

        The others are computed by themselves, so that an error ends only one of them.
        """
        kinds = texts[0].positions.shape[:-1]
        least = torch.stack([torch.minimum(text.ids.min(), text.positions.min()) for text in texts])
        most = torch.stack([torch.stack([text.ids.max(), text.positions.max()]) for text in texts])
        return [
            low >= 0 and token < self._vocabulary and position < self._positions and text.positions.shape[:-1] == kinds
            for text, low, (token, position) in zip(texts, least.tolist(), most.tolist(), strict=True)
        ]

    def attending(self) -> AbstractContextManager[None]:
        """The context for several forwards that take turns."""
        return attention_by_text(self._configs)

    def __call__(self, texts: Sequence[PackedSequence]) -> list[Any]:
        """Run one pass; returns for each sequence the output that the model's forward would return for it alone.

        Raises:
            NotPackable: the model deviates from the tested behaviour of its family.
        """
        lengths = [text.ids.shape[1] for text in texts]
        cache = PackedCache([text.cache for text in texts], lengths, self._shares, self._file)
        with packed_attention(self._configs, cache):
            # bypasses the model's own call, which would wait for this very pass
            output = nn.Module.__call__(
                self._model,
                input_ids=torch.cat([text.ids for text in texts], 1),
                position_ids=torch.cat([text.positions for text in texts], -1),
                past_key_values=cache,
                logits_to_keep=_kept_rows(texts, lengths),
                **_EXPECTED,
            )
        cache.finish()
        kind, logits = type(output), output.logits
        unknown = output.keys() - {"logits", "past_key_values"}
        if unknown:
            raise NotPackable(f"the model returned {', '.join(sorted(unknown))}, and nothing is known of it")
        parts = logits.split([text.kept for text in texts], 1)
        return [kind(logits=part, past_key_values=text.cache) for text, part in zip(texts, parts, strict=True)]

    def _knows(self, cache: Any) -> TypeGuard[DynamicCache]:
        if type(cache) is not DynamicCache or cache.offloading:
            return False
        if cache not in self._known:
            if not has_known_layers(cache, self._layers):
                return False
            self._known.add(cache)
        return not any(getattr(cache.layers[number], "record_past", False) for number in self._windows)


def _is_row(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and len(value) == 1 and value.shape[1] > 0


def _says_nothing(name: str, value: Any) -> bool:
    """Whether an argument has the same effect as its absence."""
    if isinstance(value, torch.Tensor):
        return False
    return value is None or (name in _EXPECTED and value is _EXPECTED[name]) or (name in _NOTHING and value == {})


def _kept_rows(texts: Sequence[PackedSequence], lengths: Sequence[int]) -> torch.Tensor:
    """Indices of the rows whose logits are computed."""
    rows: list[int] = []
    end = 0
    for text, length in zip(texts, lengths, strict=True):
        end += length
        rows += range(end - text.kept, end)
    return torch.tensor(rows)
