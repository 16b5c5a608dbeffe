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

import contextlib
import logging
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import DynamicLayer

from rabbitllm.engine.free_memory import available_ram
from rabbitllm.engine.span_reader import stays_cached
from rabbitllm.generation.kv_cache import append
from rabbitllm.storage import durable
from rabbitllm.storage.files import DIRECT_ALIGNMENT

LEAST_BLOCKS = 16
"""Smaller images are not padded to whole blocks, which could add more than a sixteenth."""

Form = tuple[torch.Size, torch.Size, torch.dtype]
"""Shapes of the key and the value tensor, including the room for more tokens, and their dtype."""


@dataclass(slots=True)
class Image:
    """The KV cache of one layer of one sequence, in one piece of memory, with room for more tokens.

    Attributes:
        keys, values: (1, heads, tokens and room, width), views of `whole`.
        whole: (bytes,) uint8, the whole memory up to the end of the last block.
    """

    keys: torch.Tensor
    values: torch.Tensor
    whole: torch.Tensor

    @property
    def is_aligned(self) -> bool:
        """Whether its memory is aligned to blocks and made of whole blocks."""
        return self.whole.data_ptr() % DIRECT_ALIGNMENT == 0 and len(self.whole) % DIRECT_ALIGNMENT == 0

    @property
    def form(self) -> Form:
        """The shapes and the dtype, from which `new_image` makes an image like it."""
        return self.keys.shape, self.values.shape, self.keys.dtype


def new_image(keys: torch.Size, values: torch.Size, dtype: torch.dtype, device: torch.device | None = None) -> Image:
    """An uninitialized image of this form; on the host unless a device is given."""
    nbytes = (keys.numel() + values.numel()) * dtype.itemsize
    if nbytes < LEAST_BLOCKS * DIRECT_ALIGNMENT:
        return image_over(torch.empty(nbytes, dtype=torch.uint8, device=device), keys, values, dtype)
    nbytes = -(-nbytes // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
    room = torch.empty(nbytes + DIRECT_ALIGNMENT, dtype=torch.uint8, device=device)
    begin = -room.data_ptr() % DIRECT_ALIGNMENT
    return image_over(room[begin : begin + nbytes], keys, values, dtype)


def image_over(whole: torch.Tensor, keys: torch.Size, values: torch.Size, dtype: torch.dtype) -> Image:
    """An image of this form over existing bytes."""
    parts, middle = whole.view(dtype), keys.numel()
    return Image(parts[:middle].view(keys), parts[middle : middle + values.numel()].view(values), whole)


def image_of(keys: torch.Tensor, values: torch.Tensor, more: int, device: torch.device | None = None) -> Image:
    """A copy of keys and values with room for `more` tokens, all zeros; on the host unless a device is given."""
    tokens = keys.shape[2]
    room = tokens + more
    shapes = (torch.Size((*one.shape[:2], room, one.shape[3])) for one in (keys, values))
    image = new_image(next(shapes), next(shapes), keys.dtype, device)
    for target, source in ((image.keys, keys), (image.values, values)):
        target[:, :, :tokens] = source
        target[:, :, tokens:] = 0
    return image


# Slots of a file: taken, given back, and reused.
#
# The first free slot that is large enough is used, and adjacent free slots are merged, so that there are never more
# holes than slots in use.


class FileSlots:
    """The slots of a file.

    Args:
        limit: maximum size of the file in bytes.

    Attributes:
        limit: see above.
        taken: bytes of the slots in use.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._end = 0
        self._free: list[tuple[int, int]] = []  # (begin, bytes), sorted; not adjacent to each other or to the end

    def take(self, nbytes: int) -> int | None:
        """Reserve a slot and return its offset; None if there is no room.

        Args:
            nbytes: size of the slot, at least one.
        """
        for number, (begin, room) in enumerate(self._free):
            if room >= nbytes:
                self._free[number : number + 1] = [(begin + nbytes, room - nbytes)] if room > nbytes else []
                break
        else:
            begin = self._end
            if begin + nbytes > self.limit:
                return None
            self._end += nbytes
        self.taken += nbytes
        return begin

    def give_back(self, begin: int, nbytes: int) -> None:
        """Free a slot.

        Args:
            begin: as `take` returned it.
            nbytes: as passed to `take`.
        """
        self.taken -= nbytes
        insort(self._free, (begin, nbytes))
        joined: list[tuple[int, int]] = []
        for one in self._free:
            if joined and sum(joined[-1]) == one[0]:
                joined[-1] = (joined[-1][0], joined[-1][1] + one[1])
            else:
                joined.append(one)
        if sum(joined[-1]) == self._end:
            self._end = joined.pop()[0]
        self._free = joined


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image that is in the file.

    Attributes:
        place: offset of its slot in the file.
        nbytes: bytes of its slot.
        form: form of the image.
    """

    place: int
    nbytes: int
    form: Form


class ImageFile:
    """The file of a batch.

    Args:
        folder: folder of the file.
        limit: maximum size of the file in bytes.
        weight_bytes: bytes of weights that are read between two reads of an image.

    Attributes:
        error: the error after which nothing is written any more, or None.
        written: bytes written so far.
        is_past_the_cache: whether images that are not small bypass the page cache.
    """

    def __init__(self, folder: Path, limit: int, weight_bytes: int) -> None:
        self.error: OSError | None = None
        self.written = 0
        self.is_past_the_cache = False
        self._places = FileSlots(limit)
        self._limit = limit
        self._folder = folder
        self._weight_bytes = weight_bytes
        self._room = available_ram()
        self._file: durable.NamelessFile | None = None

    @property
    def limit(self) -> int:
        """Estimate of the bytes that images may take in the file; 0 if it cannot be written to."""
        return self._limit if self.error is None else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the images in the file."""
        return self._places.taken

    def close(self) -> None:
        """Close the file, which deletes it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def look_around(self) -> None:
        """Measure the free memory; called between passes, while nothing is computed."""
        if not self.is_past_the_cache:
            self._room = available_ram()

    def put(self, image: Image) -> StoredImage | None:
        """Write an image; None if that is not possible.

        Args:
            image: an image on the host.
        """
        if self.error is not None:
            return None
        nbytes = len(image.whole)
        place = self._places.take(nbytes)
        if place is None:
            self._limit -= self._limit // 8  # holes between slots take more than estimated
            return None
        if not self.is_past_the_cache and not stays_cached(self.nbytes + self._weight_bytes, self._room):
            self.is_past_the_cache = True  # and remains so; cached images are dropped when they are read
        try:
            if self._file is None:
                self._file = durable.NamelessFile(self._folder)
            self._file.write_at(image.whole.numpy().data, place, aligned=self._goes_past(image, place))
        except OSError as error:
            logger.warning("KV caches cannot be written to a file in %s any more: %s.", self._folder, error)
            self.error = error
            self._places.give_back(place, nbytes)
            return None
        self.written += nbytes
        return StoredImage(place, nbytes, image.form)

    def fill(self, image: Image, stored: StoredImage) -> None:
        """Read an image; may be called in any thread.

        Args:
            image: an image of its form, overwritten.
            stored: as `put` returned it, and not given back.

        Raises:
            OSError: it cannot be read.
        """
        assert self._file is not None
        self._file.read_at(image.whole.numpy().data, stored.place, aligned=self._goes_past(image, stored.place))

    def get(self, stored: StoredImage) -> Image:
        """Read an image into new memory; see `fill`."""
        image = new_image(*stored.form)
        self.fill(image, stored)
        return image

    def give_back(self, stored: StoredImage) -> None:
        """Free the slot of an image.

        Args:
            stored: as `put` returned it.
        """
        self._places.give_back(stored.place, stored.nbytes)

    def _goes_past(self, image: Image, place: int) -> bool:
        return self.is_past_the_cache and image.is_aligned and place % DIRECT_ALIGNMENT == 0


READERS = 2
"""Number of reading threads: a disk is slower with a single read in flight."""

Key = tuple[Any, int]
"""The KV cache of a sequence, and the number of a layer."""


class ImagesAhead:
    """Prefetches images from one file.

    Args:
        file: file of the images.
        most: bytes that may be in memory ahead of their use; the next image is always allowed.
        find: returns the stored image of a key; None if it is no longer in the file.

    Attributes:
        read: bytes of the images taken so far.
        nbytes: bytes that are read ahead now.
    """

    def __init__(self, file: ImageFile, most: int, find: Callable[[Key], StoredImage | None]) -> None:
        self.read = 0
        self.nbytes = 0
        self._file = file
        self._most = most
        self._find = find
        self._threads: ThreadPoolExecutor | None = None
        self._next: deque[Key] = deque()
        self._coming: dict[tuple[int, int], tuple[Image, Future[None]]] = {}

    def begin(self, keys: Iterable[Key]) -> None:
        """Begin to read for a pass.

        Args:
            keys: images that the pass takes, in this order.
        """
        self.forget()
        self._next = deque(keys)
        self._go_on()

    def take(self, key: Key, stored: StoredImage) -> Image:
        """An image, after waiting for its read; one that is not being prefetched is read now.

        Args:
            key: key of the image.
            stored: the image in the file.

        Raises:
            OSError: it cannot be read.
        """
        cache, number = key
        found = self._coming.pop((id(cache), number), None)
        if found is None:
            with contextlib.suppress(ValueError):
                self._next.remove(key)
            image = self._file.get(stored)
        else:
            image, future = found
            future.result()
            self.nbytes -= len(image.whole)
            self._go_on()
        self.read += len(image.whole)
        return image

    def forget(self) -> None:
        """Drop all prefetched images; a failed pass leaves some."""
        self._next.clear()
        for _, future in self._coming.values():
            if not future.cancel():
                with contextlib.suppress(OSError):
                    future.result()
        self._coming.clear()
        self.nbytes = 0

    def close(self) -> None:
        """Drop all images and end the threads."""
        self.forget()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None

    def _go_on(self) -> None:
        while self._next:
            cache, number = self._next[0]
            stored = self._find((cache, number))
            if stored is not None:
                if self.nbytes and self.nbytes + stored.nbytes > self._most:
                    return
                image = new_image(*stored.form)
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(READERS, "rabbitllm-cache-file")
                self.nbytes += stored.nbytes
                self._coming[id(cache), number] = image, self._threads.submit(self._file.fill, image, stored)
            self._next.popleft()


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
    vars(layer).pop("_room", None)  # see `kv_cache.append`
    for name, like in (("keys", keys), ("values", values)):
        nothing = like.new_full((1, 1, 1, 1), float("nan"))
        setattr(layer, name, nothing.expand(*like.shape[:2], tokens, like.shape[3]))
