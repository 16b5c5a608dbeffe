"""Keys and values of running texts in a file: each layer's are brought when its attention comes, and not before.

    a pass    layer 0: text 1, text 2, …   layer 1: text 1, text 2, …   …
    the file        ahead of the attention, in that order, as much as may be in memory at a time
    a text    |  in the file: all up to some token  |  in memory: the last few  |  the pass's own

So one pass over the weights serves more texts than memory has room for. What is read for a text is its keys and values
once a pass; what is written, all of it when the last few in memory have become `TAIL_TOKENS`. Only layers that keep
every token go there; windows are small.

A text whose layer cannot be written (a full disk) is lost, and has to be computed anew: the pass that goes on is right
all the same, since it has looked at what was to be written. What users wrote is for this user alone, in a file without
a name. Called in the batch's thread; what is ahead is read by others.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import DynamicLayer

from rabbitllm import durable
from rabbitllm.batching.cache_image import Form, Image, image_of, image_over, new_image
from rabbitllm.batching.places import Places
from rabbitllm.batching.room import append

logger = logging.getLogger(__name__)

TAIL_TOKENS = 32
"""Of a text, at most, that are in memory and not in the file; as many more are written, and read, as zeros."""
READERS = 2
"""A disk that is asked for one thing at a time is slower."""


@dataclass(slots=True)
class _Layer:
    """A layer that is in the file.

    Attributes:
        place, nbytes: there; the image takes no more.
        device: where the model computes it.
        tokens: of these, so many are in the file.
        tail_keys, tail_values: (1, heads, `TAIL_TOKENS`, width), the next ones; None before the first.
        tail: how many.
        form: shapes, the room behind them included, and dtype.
    """

    place: int
    nbytes: int
    device: torch.device
    tokens: int
    form: Form
    tail_keys: torch.Tensor | None = None
    tail_values: torch.Tensor | None = None
    tail: int = 0


@dataclass(slots=True)
class _Text:
    """A text of which layers are in the file, or will be.

    Attributes:
        layers: by number.
        returns: whether they are to be in memory again, each when it is brought.
        is_lost: whether one could not be written.
        now: what attention is looking at.
    """

    layers: dict[int, _Layer] = field(default_factory=dict)
    returns: bool = False
    is_lost: bool = False
    now: Image | None = None


class CacheFile:
    """The file of a batch.

    Args:
        folder: where it may be.
        limit: bytes that it may have.
        ahead: bytes that may be in memory before their attention comes; the next one always.

    Attributes:
        error: why nothing can be written any more; None as long as all is well.
        written, read: bytes.
    """

    def __init__(self, folder: Path, limit: int, ahead: int) -> None:
        self.error: OSError | None = None
        self.written = self.read = 0
        self._places = Places(limit)
        self._limit = limit
        self._folder = folder
        self._file: durable.NamelessFile | None = None
        self._texts: WeakKeyDictionary[Any, _Text] = WeakKeyDictionary()
        self._threads: ThreadPoolExecutor | None = None
        self._most_ahead = ahead
        self._ahead = 0
        self._next: deque[tuple[Any, int]] = deque()
        self._coming: dict[tuple[int, int], tuple[Image, Future[None]]] = {}

    @property
    def limit(self) -> int:
        """Bytes that texts in it may be reckoned with; none if it cannot be written to."""
        return self._limit if self.error is None else 0

    @property
    def nbytes(self) -> int:
        """That are in it."""
        return self._places.taken

    def close(self) -> None:
        """Forget all of it."""
        self._forget_what_comes()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        self._texts.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    # between passes --------------------------------------------------------------------------------------------------

    def holds(self, cache: Any) -> bool:
        """Whether layers of a cache are here, or will be after the next pass."""
        return cache is not None and cache in self._texts

    def keeps(self, cache: Any) -> bool:
        """Whether a cache is not to return into memory with the next pass."""
        return self.holds(cache) and not self._texts[cache].returns

    def is_lost(self, cache: Any) -> bool:
        """Whether a cache lacks what could not be written."""
        return self.holds(cache) and self._texts[cache].is_lost

    def add(self, cache: Any) -> None:
        """From its next pass on a cache is in the file.

        Args:
            cache: of one text.
        """
        self._texts.setdefault(cache, _Text()).returns = False

    def put(self, cache: Any) -> None:
        """Put a cache with some tokens into the file now; it may be lost then.

        Args:
            cache: of one text.
        """
        self.add(cache)
        for number, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer and layer.is_initialized:
                self._write(self._texts[cache], layer, number, layer.keys, layer.values)

    def let_return(self, cache: Any) -> None:
        """In its next pass a cache comes back into memory."""
        text = self._texts[cache]
        text.returns = True
        if not text.layers:
            del self._texts[cache]

    def drop(self, cache: Any) -> None:
        """Forget a cache, of which nothing can be used any more."""
        text = self._texts.pop(cache, None) if cache is not None else None
        for layer in text.layers.values() if text is not None else ():
            self._places.give_back(layer.place, layer.nbytes)

    def whole_copy(self, cache: Any) -> Any:
        """A cache that is here, whole and in memory; what was not in the file is its own.

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
        """Begin to read what a pass will look at.

        Args:
            caches: of its texts, in the order in which each layer comes to them.
            others: caches of texts that go through the layers by themselves, or None; they are brought back whole.

        Raises:
            OSError: they cannot be.
        """
        self._forget_what_comes()
        for cache in others:
            if self.holds(cache):
                self._restore(cache)
        held = [(cache, self._texts[cache].layers) for cache in caches if cache in self._texts]
        numbers = sorted({number for _, layers in held for number in layers})
        self._next = deque((cache, number) for number in numbers for cache, layers in held if number in layers)
        self._read_ahead()

    def brings(self, cache: Any, number: int) -> bool:
        """Whether a layer's keys and values go through this file.

        Args:
            cache: of a text in the pass.
            number: of the layer.
        """
        return cache in self._texts and type(cache.layers[number]) is DynamicLayer

    def joined(
        self, cache: Any, number: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer for its attention, after which `put_back` is to be called.

        Args:
            cache, number: see `brings`.
            keys, values: new ones, (1, heads, tokens, width).

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
        """Have a layer that was looked at out of memory.

        Args:
            cache, number: see `brings`.
            keys, values: the new ones again.
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
            self._places.give_back(kept.place, kept.nbytes)
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
        """Write a layer whole, and empty it; a text that cannot be written is lost."""
        tokens = keys.shape[2]
        image = image_of(keys, values, TAIL_TOKENS)
        before = text.layers.pop(number, None)
        if before is not None:
            self._places.give_back(before.place, before.nbytes)
        _empty(layer, keys, values, tokens)
        nbytes = len(image.whole)
        is_wanted = self.error is None and not text.is_lost
        place = self._places.take(nbytes) if is_wanted else None
        if is_wanted and place is None:
            self._limit -= self._limit // 8  # holes between places take more than was thought
        try:
            if place is not None:
                if self._file is None:
                    self._file = durable.NamelessFile(self._folder)
                self._file.write_at(image.whole.numpy().data, place)
                self.written += nbytes
        except OSError as error:
            logger.warning("Keys and values cannot be written to a file in %s any more: %s.", self._folder, error)
            self.error = error
            assert place is not None
            self._places.give_back(place, nbytes)
            place = None
        if place is None:
            text.is_lost = True
        else:
            text.layers[number] = _Layer(place, nbytes, keys.device, tokens, image.form)

    def _restore(self, cache: Any) -> None:
        for layer, whole in zip(cache.layers, self.whole_copy(cache).layers, strict=True):
            if type(layer) is DynamicLayer:
                layer.keys, layer.values = whole.keys, whole.values
        self.drop(cache)

    def _whole(self, cache: Any, number: int, more: int) -> tuple[Image, int]:
        """A layer with all its tokens where it is computed, with room for some more; and how many it has."""
        kept = self._texts[cache].layers[number]
        image = self._taken(cache, number, kept)
        if kept.device != image.whole.device:
            image = image_over(image.whole.to(kept.device), *kept.form)
        end = kept.tokens + kept.tail
        if kept.tail_keys is not None and kept.tail_values is not None:
            image.keys[:, :, kept.tokens : end] = kept.tail_keys[:, :, : kept.tail]
            image.values[:, :, kept.tokens : end] = kept.tail_values[:, :, : kept.tail]
        if end + more > image.keys.shape[2]:
            image = image_of(image.keys[:, :, :end], image.values[:, :, :end], more + TAIL_TOKENS, kept.device)
        return image, end

    def _taken(self, cache: Any, number: int, kept: _Layer) -> Image:
        found = self._coming.pop((id(cache), number), None)
        if found is None:
            with contextlib.suppress(ValueError):
                self._next.remove((cache, number))
            image = new_image(*kept.form)
            self._read(image, kept.place)
            self.read += len(image.whole)
            return image
        image, future = found
        future.result()
        self.read += len(image.whole)
        self._ahead -= len(image.whole)
        self._read_ahead()
        return image

    def _read_ahead(self) -> None:
        while self._next:
            cache, number = self._next[0]
            text = self._texts.get(cache)
            kept = text.layers.get(number) if text is not None else None
            if kept is not None:
                image = new_image(*kept.form)
                if self._ahead and self._ahead + len(image.whole) > self._most_ahead:
                    return
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(READERS, "rabbitllm-cache-file")
                self._ahead += len(image.whole)
                self._coming[id(cache), number] = image, self._threads.submit(self._read, image, kept.place)
            self._next.popleft()

    def _read(self, image: Image, place: int) -> None:
        assert self._file is not None
        self._file.read_at(image.whole.numpy().data, place)

    def _forget_what_comes(self) -> None:
        """A pass that has failed leaves some."""
        self._next.clear()
        for _, future in self._coming.values():
            if not future.cancel():
                with contextlib.suppress(OSError):
                    future.result()
        self._coming.clear()
        self._ahead = 0


def goes_to_a_file(layers: Iterable[Any]) -> bool:
    """Whether layers of a cache are such that something of it would be in a file."""
    return any(type(layer) is DynamicLayer for layer in layers)


def _empty(layer: Any, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
    """Leave of a layer how long it is; whoever looks at it all the same sees that these are no keys and values."""
    vars(layer).pop("_room", None)  # see `room.py`
    for name, like in (("keys", keys), ("values", values)):
        nothing = like.new_full((1, 1, 1, 1), float("nan"))
        setattr(layer, name, nothing.expand(*like.shape[:2], tokens, like.shape[3]))
