"""KV caches of running sequences in a file: each layer's part is read just before its attention.

    a pass      layer 0: sequence 1, sequence 2, …   layer 1: sequence 1, sequence 2, …   …
    reads       ahead of the attention, in that order, limited by the memory for them
    a sequence  |  in the file: the first tokens  |  in memory: the last few  |  new tokens of the pass

So one pass over the weights serves more sequences than memory has room for. A sequence's KV cache is read once a pass.
It is written whole when more than `TAIL_TOKENS` of its tokens are in memory. Only layers that keep every token are in
the file; sliding windows are small.

If a layer cannot be written (a full disk), its sequence is lost and has to be recomputed. The current pass remains
correct, since its attention has used the data already. The file has no name, so that no other user of the machine can
read the text of users from it. Called in the batch's thread; other threads read ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import DynamicLayer

from rabbitllm.generation.cache_image import Image, image_of, image_over
from rabbitllm.generation.image_file import ImageFile, StoredImage
from rabbitllm.generation.images_ahead import ImagesAhead, Key
from rabbitllm.generation.room import append

TAIL_TOKENS = 32
"""The most tokens of a sequence in memory and not in the file; images have room for so many more, written as zeros."""


@dataclass(slots=True)
class _Layer:
    """A layer of one sequence that is in the file.

    Attributes:
        stored: its image in the file.
        device: device that computes the layer.
        tokens: number of tokens in the file.
        tail_keys, tail_values: (1, heads, `TAIL_TOKENS`, width), the tokens after those; None before the first.
        tail: number of tokens in them.
    """

    stored: StoredImage
    device: torch.device
    tokens: int
    tail_keys: torch.Tensor | None = None
    tail_values: torch.Tensor | None = None
    tail: int = 0


@dataclass(slots=True)
class _Text:
    """A sequence with layers in the file, now or after its next pass.

    Attributes:
        layers: its layers in the file, by layer number.
        returns: whether its layers return to memory in the next pass.
        is_lost: whether a layer could not be written.
        now: the image that attention is using.
    """

    layers: dict[int, _Layer] = field(default_factory=dict)
    returns: bool = False
    is_lost: bool = False
    now: Image | None = None


class CacheFile:
    """The sequences of a batch whose KV caches are in a file.

    Args:
        folder: folder of the file.
        limit: maximum size of the file in bytes.
        ahead: bytes that may be read ahead into memory; one layer is always allowed.
        weight_bytes: bytes of weights that a pass reads.
    """

    def __init__(self, folder: Path, limit: int, ahead: int, weight_bytes: int = 0) -> None:
        self._file = ImageFile(folder, limit, weight_bytes)
        self._ahead = ImagesAhead(self._file, ahead, self._find)
        self._texts: WeakKeyDictionary[Any, _Text] = WeakKeyDictionary()

    @property
    def limit(self) -> int:
        """Estimate of the bytes that KV caches may take in the file; 0 if it cannot be written to."""
        return self._file.limit

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self._file.nbytes

    @property
    def written(self) -> int:
        """Bytes written so far."""
        return self._file.written

    @property
    def read(self) -> int:
        """Bytes read for attention so far."""
        return self._ahead.read

    def close(self) -> None:
        """Drop all sequences and delete the file."""
        self._ahead.close()
        self._texts.clear()
        self._file.close()

    # between passes --------------------------------------------------------------------------------------------------

    def holds(self, cache: Any) -> bool:
        """Whether layers of a cache are in the file, now or after its next pass."""
        return cache is not None and cache in self._texts

    def keeps(self, cache: Any) -> bool:
        """Whether a cache is in the file and remains there after the next pass."""
        return self.holds(cache) and not self._texts[cache].returns

    def is_lost(self, cache: Any) -> bool:
        """Whether a cache is incomplete because a layer could not be written."""
        return self.holds(cache) and self._texts[cache].is_lost

    def add(self, cache: Any) -> None:
        """Keep a cache in the file from its next pass on.

        Args:
            cache: KV cache of one sequence.
        """
        self._texts.setdefault(cache, _Text()).returns = False

    def put(self, cache: Any) -> None:
        """Write a cache with some tokens to the file now; check `is_lost` afterwards.

        Args:
            cache: KV cache of one sequence.
        """
        self.add(cache)
        for number, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer and layer.is_initialized:
                self._write(self._texts[cache], layer, number, layer.keys, layer.values)

    def let_return(self, cache: Any) -> None:
        """Return a cache to memory in its next pass."""
        text = self._texts[cache]
        text.returns = True
        if not text.layers:
            del self._texts[cache]

    def drop(self, cache: Any) -> None:
        """Drop a cache, which cannot be used afterwards."""
        text = self._texts.pop(cache, None) if cache is not None else None
        for layer in text.layers.values() if text is not None else ():
            self._file.give_back(layer.stored)

    def whole_copy(self, cache: Any) -> Any:
        """A copy of a cache, whole and in memory; layers that were not in the file are shared with the cache.

        Raises:
            OSError: it cannot be read.
        """
        made = copy(cache)
        made.layers = list(cache.layers)
        for number in self._texts[cache].layers:
            image, end = self._whole(cache, number, 0)
            layer = made.layers[number] = copy(made.layers[number])
            layer.keys, layer.values = image.keys[:, :, :end], image.values[:, :, :end]
        return made

    # in a pass -------------------------------------------------------------------------------------------------------

    def begin(self, caches: Sequence[Any], others: Sequence[Any] = ()) -> None:
        """Begin to read the KV caches that a pass needs.

        Args:
            caches: caches of its packed sequences, in the order in which each layer attends to them.
            others: caches (or None) of sequences that go through the layers by themselves; they return to memory whole.

        Raises:
            OSError: a cache of `others` cannot be read.
        """
        self._ahead.forget()
        self._file.look_around()
        for cache in others:
            if self.holds(cache):
                self._restore(cache)
        held = [(cache, self._texts[cache].layers) for cache in caches if cache in self._texts]
        numbers = sorted({number for _, layers in held for number in layers})
        self._ahead.begin((cache, number) for number in numbers for cache, layers in held if number in layers)

    def brings(self, cache: Any, number: int) -> bool:
        """Whether the KV cache of a layer goes through this file.

        Args:
            cache: KV cache of a sequence in the pass.
            number: number of the layer.
        """
        return cache in self._texts and type(cache.layers[number]) is DynamicLayer

    def joined(
        self, cache: Any, number: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole KV cache of a layer for its attention, after which `put_back` must be called.

        Args:
            cache, number: see `brings`.
            keys, values: of the new tokens, (1, heads, tokens, width).

        Raises:
            OSError: they cannot be read.
        """
        text, layer = self._texts[cache], cache.layers[number]
        if number not in text.layers:
            return append(layer, keys, values)
        text.now, begin = self._whole(cache, number, keys.shape[2])
        end = begin + keys.shape[2]
        text.now.keys[:, :, begin:end] = keys
        text.now.values[:, :, begin:end] = values
        return text.now.keys[:, :, :end], text.now.values[:, :, :end]

    def put_back(self, cache: Any, number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Move a layer out of memory after its attention, writing it if its tail is full; or return it to memory.

        Args:
            cache, number: see `brings`.
            keys, values: the same as in `joined`.
        """
        text, layer = self._texts[cache], cache.layers[number]
        kept, image, text.now = text.layers.get(number), text.now, None
        if kept is None:
            if not text.returns:
                self._write(text, layer, number, layer.keys, layer.values)
            return
        assert image is not None
        begin, rows = kept.tokens + kept.tail, keys.shape[2]
        if text.returns:
            layer.keys, layer.values = image.keys[:, :, : begin + rows], image.values[:, :, : begin + rows]
            self._file.give_back(kept.stored)
            del text.layers[number]
            if not text.layers:
                del self._texts[cache]
        elif kept.tail + rows > TAIL_TOKENS:
            self._write(text, layer, number, image.keys[:, :, : begin + rows], image.values[:, :, : begin + rows])
        else:
            if kept.tail_keys is None or kept.tail_values is None:
                kept.tail_keys = keys.new_empty((*keys.shape[:2], TAIL_TOKENS, keys.shape[3]))
                kept.tail_values = values.new_empty((*values.shape[:2], TAIL_TOKENS, values.shape[3]))
            kept.tail_keys[:, :, kept.tail : kept.tail + rows] = keys
            kept.tail_values[:, :, kept.tail : kept.tail + rows] = values
            kept.tail += rows
            _empty(layer, keys, values, begin + rows)

    # the file itself -------------------------------------------------------------------------------------------------

    def _write(self, text: _Text, layer: Any, number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a layer whole, and empty it; if it cannot be written, the sequence is lost."""
        image = image_of(keys, values, TAIL_TOKENS)
        before = text.layers.pop(number, None)
        if before is not None:
            self._file.give_back(before.stored)
        _empty(layer, keys, values, keys.shape[2])
        stored = self._file.put(image) if not text.is_lost else None
        if stored is None:
            text.is_lost = True
        else:
            text.layers[number] = _Layer(stored, keys.device, keys.shape[2])

    def _find(self, key: Key) -> StoredImage | None:
        cache, number = key
        text = self._texts.get(cache)
        layer = text.layers.get(number) if text is not None else None
        return layer.stored if layer is not None else None

    def _restore(self, cache: Any) -> None:
        for layer, whole in zip(cache.layers, self.whole_copy(cache).layers, strict=True):
            if type(layer) is DynamicLayer:
                layer.keys, layer.values = whole.keys, whole.values
        self.drop(cache)

    def _whole(self, cache: Any, number: int, more: int) -> tuple[Image, int]:
        """A layer with all its tokens on its device and room for `more`, and the number of its tokens."""
        kept = self._texts[cache].layers[number]
        image = self._ahead.take((cache, number), kept.stored)
        if kept.device != image.whole.device:
            image = image_over(image.whole.to(kept.device), *kept.stored.form)
        end = kept.tokens + kept.tail
        if kept.tail_keys is not None and kept.tail_values is not None:
            image.keys[:, :, kept.tokens : end] = kept.tail_keys[:, :, : kept.tail]
            image.values[:, :, kept.tokens : end] = kept.tail_values[:, :, : kept.tail]
        if end + more > image.keys.shape[2]:
            image = image_of(image.keys[:, :, :end], image.values[:, :, :end], more + TAIL_TOKENS, kept.device)
        return image, end


def goes_to_a_file(layers: Iterable[Any]) -> bool:
    """Whether any layer of a cache is of the kind that can be in the file."""
    return any(type(layer) is DynamicLayer for layer in layers)


def _empty(layer: Any, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
    """Replace a layer's keys and values by NaN of the same shape, which takes no memory and makes any use visible."""
    vars(layer).pop("_room", None)  # see `room.py`
    for name, like in (("keys", keys), ("values", values)):
        nothing = like.new_full((1, 1, 1, 1), float("nan"))
        setattr(layer, name, nothing.expand(*like.shape[:2], tokens, like.shape[3]))
