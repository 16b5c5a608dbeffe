"""KV caches of running sequences in a file: each layer's part is read just before its attention.

    a pass      layer 0: sequence 1, sequence 2, …   layer 1: sequence 1, sequence 2, …   …
    reads       before the attention, in that order, limited by the memory for them
    a sequence  |  in the file: the first tokens  |  in memory: the last few  |  new tokens of the pass

So one pass over the weights serves more sequences than memory has room for. A sequence's KV cache is read once a pass.
It is written whole when more than `TAIL_TOKENS` of its tokens are in memory. Only layers that keep every token are in
the file; sliding windows are small.

If a layer cannot be written (a full disk), its sequence is lost and has to be recomputed. The current pass remains
correct, since its attention has used the data already. The file has no name, so that no other user of the machine can
read the text of users from it. Called in the batch's thread; other threads prefetch.

    through the page cache    as long as the whole file and the weights that a pass reads remain cached
    past it (direct I/O)      from then on: data that is read once a pass would evict other pages

With a memory limit of a control group the page cache counts against that limit. I/O through it costs a copy, and the
kernel has to reclaim other pages for it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from rabbitllm.base.rounding import round_up
from rabbitllm.engine.free_memory import available_ram
from rabbitllm.engine.kv_room import append, keeps_every_token
from rabbitllm.engine.span_reader import stays_cached
from rabbitllm.generation._slot_file import Slot, SlotFile
from rabbitllm.generation.kv_cache import without_room
from rabbitllm.storage.files import DIRECT_ALIGNMENT

if TYPE_CHECKING:
    from transformers import Cache, CacheLayerMixin

logger = logging.getLogger(__name__)

TAIL_TOKENS = 32
"""Maximum tokens of a sequence in memory and not in the file; buffers have room for as many, written as zeros."""
MIN_BLOCKS = 16
"""Smaller buffers are not padded to whole blocks, which could add more than a sixteenth."""
NO_MEMORY = (MemoryError, RuntimeError)
"""How a lack of memory is reported; torch has no class of its own for the host's."""
READERS = 2
"""Number of reading threads: a disk is slower with a single read in flight."""

Form = tuple[torch.Size, torch.Size, torch.dtype]
"""Shapes of the key and the value tensor, including the room for more tokens, and their dtype."""


@dataclass(slots=True)
class KVBuffer:
    """The KV cache of one layer of one sequence, in one piece of memory, with room for more tokens.

    Attributes:
        keys, values: (1, heads, tokens and room, width), views of `whole`.
        whole: (bytes,) uint8, the whole memory up to the end of the last block.
    """

    keys: torch.Tensor
    values: torch.Tensor
    whole: torch.Tensor

    @staticmethod
    def over(whole: torch.Tensor, form: Form) -> KVBuffer:
        """A buffer of this form over existing bytes."""
        keys, values, dtype = form
        parts, middle = whole.view(dtype), keys.numel()
        return KVBuffer(parts[:middle].view(keys), parts[middle : middle + values.numel()].view(values), whole)

    @staticmethod
    def new(form: Form, device: torch.device | None = None) -> KVBuffer:
        """An uninitialized buffer of this form; on the host unless a device is given.

        Unless it is small, its memory is aligned to blocks and made of whole blocks: its I/O can bypass the page cache.
        """
        keys, values, dtype = form
        nbytes = (keys.numel() + values.numel()) * dtype.itemsize
        if nbytes < MIN_BLOCKS * DIRECT_ALIGNMENT:
            return KVBuffer.over(torch.empty(nbytes, dtype=torch.uint8, device=device), form)
        nbytes = round_up(nbytes, DIRECT_ALIGNMENT)
        room = torch.empty(nbytes + DIRECT_ALIGNMENT, dtype=torch.uint8, device=device)
        begin = -room.data_ptr() % DIRECT_ALIGNMENT
        return KVBuffer.over(room[begin : begin + nbytes], form)

    @staticmethod
    def of(keys: torch.Tensor, values: torch.Tensor, more: int, device: torch.device | None = None) -> KVBuffer:
        """A copy of a key and a value tensor with room for `more` tokens, all zeros; on the host by default."""
        tokens = keys.shape[2]
        shapes = [torch.Size((*tensor.shape[:2], tokens + more, tensor.shape[3])) for tensor in (keys, values)]
        buffer = KVBuffer.new((shapes[0], shapes[1], keys.dtype), device)
        for target, source in ((buffer.keys, keys), (buffer.values, values)):
            target[:, :, :tokens] = source
            target[:, :, tokens:] = 0
        return buffer

    @property
    def form(self) -> Form:
        """The shapes and the dtype."""
        return self.keys.shape, self.values.shape, self.keys.dtype

    @property
    def is_aligned(self) -> bool:
        """Whether its memory is aligned to blocks and made of whole blocks."""
        return self.whole.data_ptr() % DIRECT_ALIGNMENT == 0 and len(self.whole) % DIRECT_ALIGNMENT == 0


@dataclass(frozen=True, eq=False, slots=True)
class StoredBuffer(Slot):
    """The slot of a buffer.

    Attributes:
        form: form of the buffer.
    """

    form: Form


class BufferFile:
    """A nameless file of buffers, which prefetches those of a pass.

    Args:
        folder: folder of the file; None only with a limit of 0.
        limit: maximum size of the file in bytes.
        max_prefetch: maximum prefetched bytes in memory; the next buffer is always allowed.
        weight_bytes: bytes of weights that are read between two reads of a buffer.

    Attributes:
        read: bytes of the buffers taken so far.
        prefetched_bytes: bytes that are prefetched now.
        is_past_the_cache: whether buffers that are not small bypass the page cache.
    """

    def __init__(self, folder: Path | None, limit: int, max_prefetch: int = 0, weight_bytes: int = 0) -> None:
        self.read = 0
        self.prefetched_bytes = 0
        self.is_past_the_cache = False
        self._file = SlotFile(folder, limit, READERS)
        self._limit = limit
        self._max_prefetch = max_prefetch
        self._folder = folder
        self._weight_bytes = weight_bytes
        self._free_ram = available_ram()
        self._has_failed = False  # after an error nothing is written any more
        self._next: deque[StoredBuffer] = deque()
        self._prefetched: dict[StoredBuffer, tuple[KVBuffer, Future[None]]] = {}

    @property
    def limit(self) -> int:
        """Estimate of the bytes that buffers may take in the file; 0 if it cannot be written to."""
        return 0 if self._has_failed else self._limit

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers in the file."""
        return self._file.nbytes

    def close(self) -> None:
        """Close the file, which deletes it, and end the threads."""
        self.forget()
        self._file.close()

    def put(self, buffer: KVBuffer) -> StoredBuffer | None:
        """Write a buffer; None if that is not possible.

        Args:
            buffer: a buffer on the host.
        """
        if self._has_failed:
            return None
        nbytes = len(buffer.whole)
        if not self.is_past_the_cache and not stays_cached(self.nbytes + nbytes + self._weight_bytes, self._free_ram):
            self.is_past_the_cache = True  # and remains so; cached buffers are dropped when they are read
        try:
            slot = self._file.write(buffer.whole.numpy().data, nbytes, aligned=self._is_direct(buffer))
        except OSError as error:
            self.fail(error)
            return None
        if slot is None:
            self._limit -= self._limit // 8  # holes between slots take more than estimated
            return None
        return StoredBuffer(slot.offset, slot.nbytes, buffer.form)

    def fail(self, error: OSError) -> None:
        """Write nothing any more, since the disk has failed."""
        if not self._has_failed:
            logger.warning("KV caches cannot be written to a file in %s any more: %s.", self._folder, error)
        self._has_failed = True

    def release(self, stored: StoredBuffer) -> None:
        """Free the slot of a buffer.

        Args:
            stored: as `put` returned it.
        """
        self._file.release(stored)

    def prefetch(self, buffers: Iterable[StoredBuffer]) -> None:
        """Begin to read for a pass, in which none of the buffers is released before it is taken.

        Args:
            buffers: buffers that the pass takes, in this order.
        """
        self.forget()
        if not self.is_past_the_cache:
            self._free_ram = available_ram()
        self._next = deque(buffers)
        self._prefetch_next()

    def take(self, stored: StoredBuffer) -> KVBuffer:
        """A buffer, once its read has finished; one that is not prefetched is read now.

        Args:
            stored: the buffer in the file.

        Raises:
            OSError: it cannot be read.
        """
        prefetched = self._prefetched.pop(stored, None)
        if prefetched is None:
            with contextlib.suppress(ValueError):
                self._next.remove(stored)
            buffer = KVBuffer.new(stored.form)
            self._file.fill(stored, buffer.whole.numpy().data, aligned=self._is_direct(buffer))
        else:
            buffer, future = prefetched
            future.result()
            self.prefetched_bytes -= len(buffer.whole)
            self._prefetch_next()
        self.read += len(buffer.whole)
        return buffer

    def forget(self) -> None:
        """Drop all prefetched buffers; a failed pass leaves some."""
        self._next.clear()
        for _, future in self._prefetched.values():
            if not future.cancel():
                with contextlib.suppress(OSError):
                    future.result()
        self._prefetched.clear()
        self.prefetched_bytes = 0

    def _prefetch_next(self) -> None:
        while self._next and not (
            self.prefetched_bytes and self.prefetched_bytes + self._next[0].nbytes > self._max_prefetch
        ):
            stored = self._next.popleft()
            try:
                buffer = KVBuffer.new(stored.form)
                future = self._file.prefetch(stored, buffer.whole.numpy().data, aligned=self._is_direct(buffer))
            except NO_MEMORY:
                self._next.clear()  # `take` reads each of them when it is needed
                return
            self.prefetched_bytes += stored.nbytes
            self._prefetched[stored] = buffer, future

    def _is_direct(self, buffer: KVBuffer) -> bool:
        return self.is_past_the_cache and buffer.is_aligned


@dataclass(slots=True)
class _FiledLayer:
    """A layer of one sequence that is in the file.

    Attributes:
        stored: its buffer in the file.
        device: device that computes the layer.
        tokens: number of tokens in the file.
        tail_keys, tail_values: (1, heads, `TAIL_TOKENS`, width), the tokens after those; None before the first.
        tail: number of tokens in them.
    """

    stored: StoredBuffer
    device: torch.device
    tokens: int
    tail_keys: torch.Tensor | None = None
    tail_values: torch.Tensor | None = None
    tail: int = 0


@dataclass(slots=True)
class _FiledSequence:
    """A sequence with layers in the file, now or after its next pass.

    Attributes:
        layers: its layers in the file, by layer number.
        returns: whether its layers return to memory in the next pass.
        is_lost: whether a layer could not be written.
        current: the buffer that attention is using.
    """

    layers: dict[int, _FiledLayer] = field(default_factory=dict)
    returns: bool = False
    is_lost: bool = False
    current: KVBuffer | None = None


class CacheFile:
    """The sequences of a batch whose KV caches are in a file.

    Args:
        folder: folder of the file; None only with a limit of 0.
        limit: maximum size of the file in bytes; 0 if no sequence has its cache there.
        max_prefetch: maximum prefetched bytes in memory; one layer is always allowed.
        weight_bytes: bytes of weights that a pass reads.

    Attributes:
        buffers: the file itself.
    """

    def __init__(self, folder: Path | None, limit: int, max_prefetch: int, weight_bytes: int = 0) -> None:
        self.buffers = BufferFile(folder, limit, max_prefetch, weight_bytes)
        self._sequences: WeakKeyDictionary[Any, _FiledSequence] = WeakKeyDictionary()

    def close(self) -> None:
        """Drop all sequences and delete the file."""
        self._sequences.clear()
        self.buffers.close()

    # between passes --------------------------------------------------------------------------------------------------

    def __contains__(self, cache: object) -> bool:
        """Whether layers of a cache are in the file, now or after its next pass."""
        return cache is not None and cache in self._sequences

    def stays_in_file(self, cache: Cache) -> bool:
        """Whether a cache is in the file and remains there after the next pass."""
        return cache in self and not self._sequences[cache].returns

    def is_lost(self, cache: Cache) -> bool:
        """Whether a cache is incomplete because a layer could not be written or read."""
        return cache in self and self._sequences[cache].is_lost

    def add(self, cache: Cache) -> None:
        """Keep a cache in the file from its next pass on.

        Args:
            cache: KV cache of one sequence.
        """
        self._sequences.setdefault(cache, _FiledSequence()).returns = False

    def put(self, cache: Cache) -> None:
        """Write a cache with some tokens to the file now; check `is_lost` afterwards.

        Args:
            cache: KV cache of one sequence.
        """
        self.add(cache)
        for index, layer in enumerate(cache.layers):
            if keeps_every_token(layer) and layer.is_initialized:
                self._write(self._sequences[cache], layer, index, layer.keys, layer.values)

    def return_to_memory(self, cache: Cache) -> None:
        """Return a cache to memory in its next pass."""
        filed = self._sequences[cache]
        filed.returns = True
        if not filed.layers:
            del self._sequences[cache]

    def drop(self, cache: Cache) -> None:
        """Drop a cache, which cannot be used afterwards."""
        filed = self._sequences.pop(cache, None) if cache is not None else None
        for layer in filed.layers.values() if filed is not None else ():
            self.buffers.release(layer.stored)

    def in_memory(self, cache: Cache) -> Any:
        """A cache, or a copy of it that is whole in memory; layers that were not in the file are shared with the cache.

        Raises:
            OSError: it cannot be read.
        """
        if cache not in self:
            return cache
        whole = copy(cache)
        whole.layers = list(cache.layers)
        for index in self._sequences[cache].layers:
            buffer, end = self._whole(cache, index, 0)
            layer = whole.layers[index] = copy(whole.layers[index])
            layer.keys, layer.values = buffer.keys[:, :, :end], buffer.values[:, :, :end]
        return whole

    # in a pass -------------------------------------------------------------------------------------------------------

    def lose(self, cache: Cache, error: Exception) -> None:
        """Record that a cache cannot be read: after an error of the disk it is lost.

        Args:
            cache: KV cache of a sequence in the file.
            error: the error, which ends the sequence's pass.
        """
        if isinstance(error, OSError):
            self.buffers.fail(error)
            self._sequences[cache].is_lost = True

    def take_back(self, cache: Any) -> None:
        """Return a cache (or None) to memory whole, before a pass in which its sequence is not packed.

        Raises:
            OSError: it cannot be read.
            MemoryError, RuntimeError: there is no memory for it.
        """
        if cache not in self:
            return
        for layer, whole in zip(cache.layers, self.in_memory(cache).layers, strict=True):
            if keeps_every_token(layer):
                layer.keys, layer.values = whole.keys, whole.values
        self.drop(cache)

    def begin(self, caches: Sequence[Any]) -> None:
        """Begin to read the KV caches that a pass needs.

        Args:
            caches: caches of its packed sequences, in the order in which each layer attends to them.
        """
        self.buffers.forget()
        if not self._sequences and not self.buffers.limit:
            return
        filed = [self._sequences[cache].layers for cache in caches if cache in self._sequences]
        indices = sorted({index for layers in filed for index in layers})
        self.buffers.prefetch(layers[index].stored for index in indices for layers in filed if index in layers)

    def covers(self, cache: Cache, index: int) -> bool:
        """Whether the KV cache of a layer goes through this file.

        Args:
            cache: KV cache of a sequence in the pass.
            index: index of the layer.
        """
        return cache in self._sequences and keeps_every_token(cache.layers[index])

    def load(
        self, cache: Cache, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole KV cache of a layer for its attention, after which `store` must be called.

        Args:
            cache, index: see `covers`.
            keys, values: of the new tokens, (1, heads, tokens, width).

        Raises:
            OSError: they cannot be read.
        """
        filed = self._sequences[cache]
        if index not in filed.layers:
            return append(cache.layers[index], keys, values)
        filed.current, begin = self._whole(cache, index, keys.shape[2])
        end = begin + keys.shape[2]
        filed.current.keys[:, :, begin:end] = keys
        filed.current.values[:, :, begin:end] = values
        return filed.current.keys[:, :, :end], filed.current.values[:, :, :end]

    def store(self, cache: Cache, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Move a layer out of memory after its attention, writing it if its tail is full; or return it to memory.

        Args:
            cache, index: see `covers`.
            keys, values: the same as in `load`.
        """
        filed, layer = self._sequences[cache], cache.layers[index]
        stored, buffer, filed.current = filed.layers.get(index), filed.current, None
        if stored is None:
            if not filed.returns:
                self._write(filed, layer, index, layer.keys, layer.values)
            return
        assert buffer is not None
        rows = keys.shape[2]
        end = stored.tokens + stored.tail + rows
        if filed.returns:
            layer.keys, layer.values = buffer.keys[:, :, :end], buffer.values[:, :, :end]
            self.buffers.release(stored.stored)
            del filed.layers[index]
            if not filed.layers:
                del self._sequences[cache]
        elif stored.tail + rows > TAIL_TOKENS:
            self._write(filed, layer, index, buffer.keys[:, :, :end], buffer.values[:, :, :end])
        else:
            if stored.tail_keys is None or stored.tail_values is None:
                stored.tail_keys = keys.new_empty((*keys.shape[:2], TAIL_TOKENS, keys.shape[3]))
                stored.tail_values = values.new_empty((*values.shape[:2], TAIL_TOKENS, values.shape[3]))
            stored.tail_keys[:, :, stored.tail : stored.tail + rows] = keys
            stored.tail_values[:, :, stored.tail : stored.tail + rows] = values
            stored.tail += rows
            _empty(layer, keys, values, end)

    def _write(
        self, filed: _FiledSequence, layer: CacheLayerMixin, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write a layer whole, and empty it; if it cannot be written, the sequence is lost."""
        before = filed.layers.pop(index, None)
        if before is not None:
            self.buffers.release(before.stored)
        _empty(layer, keys, values, keys.shape[2])
        stored = None
        with contextlib.suppress(*NO_MEMORY):
            stored = self.buffers.put(KVBuffer.of(keys, values, TAIL_TOKENS)) if not filed.is_lost else None
        if stored is None:
            filed.is_lost = True
        else:
            filed.layers[index] = _FiledLayer(stored, keys.device, keys.shape[2])

    def _whole(self, cache: Cache, index: int, more: int) -> tuple[KVBuffer, int]:
        """A layer with all its tokens on its device and room for `more`, and the number of its tokens."""
        stored = self._sequences[cache].layers[index]
        buffer = self.buffers.take(stored.stored)
        if stored.device != buffer.whole.device:
            buffer = KVBuffer.over(buffer.whole.to(stored.device), stored.stored.form)
        end = stored.tokens + stored.tail
        if stored.tail_keys is not None and stored.tail_values is not None:
            buffer.keys[:, :, stored.tokens : end] = stored.tail_keys[:, :, : stored.tail]
            buffer.values[:, :, stored.tokens : end] = stored.tail_values[:, :, : stored.tail]
        if end + more > buffer.keys.shape[2]:
            buffer = KVBuffer.of(buffer.keys[:, :, :end], buffer.values[:, :, :end], more + TAIL_TOKENS, stored.device)
        return buffer, end


def _empty(layer: CacheLayerMixin, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
    """Replace a layer's tensors by NaN of the same shape, which takes no memory and makes any use visible."""
    without_room(layer)
    for name, like in (("keys", keys), ("values", values)):
        element = like.new_full((1, 1, 1, 1), float("nan"))
        setattr(layer, name, element.expand(*like.shape[:2], tokens, like.shape[3]))
