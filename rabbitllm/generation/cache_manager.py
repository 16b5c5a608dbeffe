"""Owns the KV caches of all sequences: running, finished (kept as a prefix cache) and swapped out.

The running and the finished ones share a memory limit. Called in the batch's thread, except for `nbytes`.

Some running sequences may have their KV cache in a file, so that more of them share a pass. It pays if a pass reads
more bytes of weights, W, than memory has for KV caches, M. A sequence in memory costs its part of the weights, W / n,
where n = M / k caches fit, each of k bytes. One more sequence in the file costs k bytes read per pass. So it is cheaper
than the others as long as W > M, and more of them lower the cost further:

    bytes read for a token    W k / M                  of n sequences, all of them in memory
                              W / N + (1 - n / N) k    of N sequences, the others in the file; k in the limit

Where W < M the file is not used. Only sequences that are packed into one forward can be in the file.
"""

from __future__ import annotations

import shutil
import time
from collections import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.cache_utils import DynamicCache

from rabbitllm.engine.forwards import make_kernels
from rabbitllm.engine.free_memory import keep_large_apart, trimming
from rabbitllm.engine.placement import Placement
from rabbitllm.generation.cache_file import TAIL_TOKENS, CacheFile
from rabbitllm.generation.kv_cache import (
    WORTH_TOKENS,
    PrefixCache,
    common_prefix,
    copied,
    keeps,
    keeps_every_token,
    usable,
)
from rabbitllm.generation.memory import CacheMemory
from rabbitllm.generation.packed_batch import can_be_packed, shares_keys
from rabbitllm.generation.request import Limits
from rabbitllm.generation.sequence import Sequence, SequenceLength
from rabbitllm.generation.swap import SwapSpace, usual_folder

if TYPE_CHECKING:
    from transformers import Cache

    from rabbitllm.engine.streamed_model import StreamedModel

FILE_SHARE = 4
"""By default the file may take 1 / `FILE_SHARE` of the free space on the disk."""
WORTH = 2
"""A sequence goes to the file only if its memory is more than so many times the memory of a sequence in the file."""
WORTH_WAITING = 64
"""A request waits for a shared prefix of at least so many tokens that another request is computing."""
ASIDE_SHARE = 4
"""By default KV caches of so many times the memory limit may be swapped out. This suffices for up to 80 sequences that
grow at the same rate and are preempted until one of them is left."""
GIVING_BACK_SECONDS = 1.0
"""In bulk, the minimum time between two returns of free memory to the system."""


def read_in_a_pass(placement: Placement) -> int:
    """Bytes of weights that a pass of many sequences reads from the disk; it uses nearly all experts."""
    return placement.streamed_bytes + sum(max(pool.stored - pool.kept, 0) for pool in placement.pools)


def usual_bytes(folder: Path | None) -> int:
    """The default size limit of the file, in bytes.

    Args:
        folder: folder of the file; None for no file.
    """
    return shutil.disk_usage(folder).free // FILE_SHARE if folder is not None else 0


class CachePlace(Enum):
    """The place of the KV cache of a sequence that begins; nowhere if it has to wait."""

    MEMORY = "in memory"
    FILE = "in a file"
    NOWHERE = "nowhere yet"


@dataclass(frozen=True, slots=True)
class RunningLengths:
    """The lengths of the running sequences.

    Attributes:
        near: of sequences with their KV cache in memory.
        filed: of sequences with their KV cache in the file.
        most: maximum size of the file in bytes.
    """

    near: abc.Sequence[SequenceLength]
    filed: abc.Sequence[SequenceLength]
    most: int

    def soon(self, memory: CacheMemory) -> int:
        """Bytes of memory that they take after the next tokens; see `SequenceLength.soon`."""
        in_file = len(self.filed) * memory.filed_bytes() + memory.ahead() if self.filed else 0
        return memory.soon(self.near) + in_file

    def file_has_room(self, length: SequenceLength, memory: CacheMemory) -> bool:
        """Whether the file has room for one more sequence, and saves enough memory by it; see `WORTH`."""
        in_file = sum(memory.bytes_for(one.tokens + one.room + TAIL_TOKENS) for one in (*self.filed, length))
        return in_file <= self.most and memory.soon([length]) > WORTH * memory.filed_bytes()

    def fits(self, length: SequenceLength, memory: CacheMemory) -> bool:
        """Whether memory has room for the KV cache of one more sequence; a single one always may begin."""
        only = not self.near and not self.filed
        return only or replace(self, near=[*self.near, length]).soon(memory) <= memory.limit

    def place(self, length: SequenceLength, others: int, memory: CacheMemory) -> CachePlace:
        """Whether a sequence may begin, and where its KV cache is.

        Args:
            length: length of the waiting sequence.
            others: number of sequences that wait behind it and should run with it.
            memory: the memory limit of KV caches.
        """
        near = [*self.near, length]
        if not self.file_has_room(length, memory):
            return CachePlace.MEMORY if self.fits(length, memory) else CachePlace.NOWHERE
        if not self.filed and memory.soon([*near, *[length] * others]) <= memory.limit:
            return CachePlace.MEMORY
        # the sequences behind it need some memory too
        reserved = (len(self.filed) + others) * memory.filed_bytes() + memory.ahead()
        if memory.soon(near) + reserved <= memory.limit:
            return CachePlace.MEMORY
        if replace(self, filed=[*self.filed, length]).soon(memory) <= memory.limit:
            return CachePlace.FILE
        return CachePlace.MEMORY if not self.near and not self.filed else CachePlace.NOWHERE


class CacheManager:
    """The KV caches of a batch's sequences.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        limits: limits of the batch.
        running: the running sequences, as the scheduler changes them.

    Attributes:
        memory: the memory limit of KV caches, and the bytes of a token.
        chunk: maximum tokens of a prompt in one pass.
        prompt_chunk: the same; None if a prompt goes through the model as a whole.
        resumed: how often a sequence was swapped in.
        file: KV caches of running sequences in a file; its limit is 0 if that would not pay.
        swap: KV caches of preempted sequences, swapped out.

    Raises:
        OptionError: there is no memory left.
    """

    def __init__(self, model: StreamedModel, limits: Limits, running: abc.Sequence[Sequence]) -> None:
        if not limits.exact:
            make_kernels(model)
        self.memory = CacheMemory(model, limits.cache_bytes, in_bulk=limits.in_bulk, running=limits.running)
        if self.memory.is_tight:
            keep_large_apart()
        self.chunk = min(limits.chunk, self.memory.part or self.memory.max_tokens)
        self.resumed = 0
        self._running = running
        self._gives_back = trimming() if limits.in_bulk else None
        self._gave_back = time.monotonic()
        self._config = model.config.get_text_config(decoder=True)
        self._keeps = keeps(model)
        self._shares = self._keeps and not limits.exact
        self.prompt_chunk = self.chunk if self._shares else None
        self._kept = PrefixCache()
        swap_bytes = limits.aside_bytes if limits.aside_bytes is not None else ASIDE_SHARE * self.memory.limit
        folder = limits.aside_folder or usual_folder()
        if folder is None and all(executor.device.shares_host_memory for executor in model.streamer.executors.values()):
            swap_bytes = 0  # neither other memory nor a disk to swap out to
        self.swap = SwapSpace(swap_bytes, folder)
        self.file = self._file_for(model, folder, limits.file_bytes if self._shares else 0)

    def _file_for(self, model: StreamedModel, folder: Path | None, limit: int | None) -> CacheFile:
        """The file for KV caches of running sequences; with limit 0 where it does not pay or the model forbids it."""
        weight_bytes = read_in_a_pass(model.placement)
        pays = limit != 0 and weight_bytes > self.memory.limit
        can = any(map(keeps_every_token, DynamicCache(config=self._config).layers)) and not shares_keys(model)
        if folder is None or not pays or not can or not can_be_packed(model):
            return CacheFile(folder, 0, 0)
        return CacheFile(folder, usual_bytes(folder) if limit is None else limit, self.memory.ahead(), weight_bytes)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def nbytes(self) -> int:
        """Bytes of KV caches in memory; may be called from any thread."""
        return self._kept.nbytes + self._running_bytes()

    # places ----------------------------------------------------------------------------------------------------------

    def parted(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences with their KV cache in memory, and those with it in the file."""
        near: list[Sequence] = []
        filed: list[Sequence] = []
        for one in self._running:
            (filed if self.file.keeps(one.cache) else near).append(one)
        return near, filed

    def place(self, sequence: Sequence, others: int) -> CachePlace:
        """Whether a sequence may begin, and where its KV cache is then.

        Args:
            sequence: the waiting sequence.
            others: number of sequences that wait behind it and should run with it.
        """
        if sequence.request.media is not None:  # its first pass is not packed, as sequences in the file are
            return CachePlace.MEMORY if self._lengths().fits(sequence.length, self.memory) else CachePlace.NOWHERE
        return self._lengths().place(sequence.length, others, self.memory)

    def left_to_near(self, filed: abc.Sequence[Sequence]) -> int:
        """Bytes that sequences with their KV cache in a file leave to those with it in memory."""
        return self.memory.limit - RunningLengths([], [one.length for one in filed], 0).soon(self.memory)

    def to_file(self, sequence: Sequence) -> bool:
        """Move the KV cache of a running sequence to the file in the next pass; False if that is not possible."""
        if sequence.cache is None or not self._lengths().file_has_room(sequence.length, self.memory):
            return False
        self.file.add(sequence.cache)
        return True

    def from_file(self) -> None:
        """Move KV caches from the file to memory as far as there is room; called when the request queue is empty."""
        for sequence in self.parted()[1]:
            if not self._lengths(without=sequence).fits(sequence.length, self.memory):
                break  # the rest are about as long, and may be hundreds
            self.file.let_return(sequence.cache)
        self._kept.shrink(self.memory.limit - self._lengths().soon(self.memory))

    def evict(self) -> None:
        """Evict finished sequences as far as the running ones need their memory in the next pass."""
        near, filed = self.parted()
        self._kept.shrink(self.left_to_near(filed) - self.memory.now(one.length for one in near))

    def forget_finished(self) -> None:
        """Evict all finished sequences."""
        self._kept.shrink(0)

    def lost(self) -> list[Sequence]:
        """The sequences whose KV cache could not be written to the file."""
        return [one for one in self._running if self.file.is_lost(one.cache)]

    def measure(self) -> None:
        """Measure the bytes of a token after a pass; for unusual kinds of caches the config's estimate is kept.

        In bulk, free memory is returned to the system, at most once in `GIVING_BACK_SECONDS`.
        """
        if self._keeps:
            self.memory.measure(one.resumable_cache(continues=True) for one in self._running)
        if self._gives_back is not None and time.monotonic() - self._gave_back > GIVING_BACK_SECONDS:
            self._gives_back()
            self._gave_back = time.monotonic()

    # the life of a sequence ------------------------------------------------------------------------------------------

    def allocate(self, sequence: Sequence, *, in_file: bool = False) -> bool:
        """Give a sequence that begins its KV cache; False if another one is computing a prefix that both share.

        Args:
            sequence: the sequence that begins.
            in_file: whether its KV cache goes into the file.
        """
        left = self.memory.limit - self._lengths().soon(self.memory)
        left -= self.memory.filed_bytes() if in_file else self.memory.soon([sequence.length])
        if sequence.swapped_out is not None:
            self._kept.shrink(left)
            sequence.cache = self.swap.take(sequence.swapped_out)
            sequence.swapped_out = None
            if sequence.cache is not None:
                self.resumed += 1
                if in_file:
                    self._put(sequence)
                return True
        if not self._shares or sequence.request.media is not None:
            return True  # other pictures may have the same ids, so their caches are never shared
        ids = sequence.ids
        candidates = ((usable(ids, known, cache), known, cache) for known, cache in self._sources())
        tokens, known, cache = max(candidates, key=itemgetter(0), default=(0, (), None))
        worth = max(tokens + WORTH_TOKENS, WORTH_WAITING)
        if any(common_prefix(ids, prompt) >= worth for prompt in self._prefilling()):
            return False
        if tokens:
            sequence.cache = copied(self.file.whole_copy(cache), tokens)
            self._kept.used(known)
        else:
            sequence.cache = DynamicCache(config=self._config)
        if in_file and not self._put(sequence):
            tokens = 0
        sequence.kept_tokens = max(sequence.kept_tokens, min(tokens, len(sequence.request.prompt)))
        self._kept.shrink(left)
        return True

    def resumable(self, sequence: Sequence) -> Any:
        """The KV cache to continue a sequence from, see `Sequence.resumable_cache`; None if it is in the file."""
        return None if self.file.holds(sequence.cache) else sequence.resumable_cache(continues=self._shares)

    def swap_out(self, sequence: Sequence, cache: Cache) -> None:
        """Swap out the KV cache of a preempted sequence.

        Args:
            sequence: the preempted sequence.
            cache: KV cache of all its computed tokens; None if there is none to continue from.
        """
        self.drop(sequence)
        sequence.cache = None
        if cache is not None:
            sequence.swapped_out = self.swap.put(cache)

    def keep(self, sequence: Sequence) -> None:
        """Put the KV cache of a finished sequence into the prefix cache."""
        cache, sequence.cache = sequence.cache, None
        if self._shares and cache is not None and (tokens := cache.get_seq_length()):
            self._kept.put(sequence.ids[:tokens], cache)
            self._kept.shrink(self.memory.limit - self._running_bytes())

    def drop(self, sequence: Sequence) -> None:
        """Drop the KV cache, swapped out or in the file, of a sequence that has ended or is preempted."""
        if self.file.holds(sequence.cache):
            self.file.drop(sequence.cache)
            sequence.cache = None
        if sequence.swapped_out is not None:
            self.swap.drop(sequence.swapped_out)
            sequence.swapped_out = None

    def _sources(self) -> Iterator[tuple[abc.Sequence[int], Any]]:
        """Ids and KV cache of each sequence whose prefix can be reused."""
        yield from self._kept.entries()
        for one in self._running:
            if tokens := one.cached_tokens:
                yield one.ids[:tokens], one.cache

    def _prefilling(self) -> Iterable[abc.Sequence[int]]:
        return (prompt for one in self._running if (prompt := one.prefilling) is not None)

    def _put(self, sequence: Sequence) -> bool:
        """Put the cache of a sequence that begins into the file; if that fails, give it an empty one in memory."""
        self.file.put(sequence.cache)
        if not self.file.is_lost(sequence.cache):
            return True
        self.file.drop(sequence.cache)
        sequence.cache = DynamicCache(config=self._config)
        return False

    def _lengths(self, without: Sequence | None = None) -> RunningLengths:
        near, filed = ([one.length for one in part if one is not without] for part in self.parted())
        return RunningLengths(near, filed, self.file.images.limit)

    def _running_bytes(self) -> int:
        near, filed = self.parted()
        # computed from token counts, since the batch's thread may change the tensors meanwhile
        counts = [one.cached_tokens if one.cache is not None else one.length.tokens for one in near]
        return sum(map(self.memory.bytes_for, counts)) + len(filed) * self.memory.filed_bytes()
