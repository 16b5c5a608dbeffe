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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from transformers.cache_utils import DynamicCache

from rabbitllm.engine.forwards import make_kernels
from rabbitllm.engine.free_memory import keep_large_apart, trimming
from rabbitllm.engine.placement import Placement
from rabbitllm.generation.cache_file import TAIL_TOKENS, CacheFile, goes_to_a_file
from rabbitllm.generation.kv_cache import WORTH_TOKENS, PrefixCache, beginning, copied, keeps, usable
from rabbitllm.generation.memory import CacheMemory
from rabbitllm.generation.packed_batch import can_be_packed, shares_keys
from rabbitllm.generation.request import Limits
from rabbitllm.generation.scheduler import TokenBudget, fits
from rabbitllm.generation.sequence import Generation, RequestHandle, SequenceMemory
from rabbitllm.generation.swap import SwapSpace, usual_folder

FILE_SHARE = 4
"""By default the file may take 1 / `FILE_SHARE` of the free space on the disk."""
WORTH = 2
"""A sequence goes to the file only if its memory is more than so many times the memory of a sequence in the file."""


def file_for(model: Any, memory: CacheMemory, folder: Path | None, limit: int | None) -> CacheFile | None:
    """A file for KV caches of running sequences; None if it would not pay or the model does not allow it.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        memory: the memory limit of KV caches.
        folder: folder of the file; None for no file.
        limit: maximum size of the file in bytes; None for a part of the free space, 0 for no file.
    """
    if limit == 0 or folder is None or read_in_a_pass(model.placement) <= memory.limit:
        return None
    if not can_be_packed(model) or shares_keys(model):
        return None
    if not goes_to_a_file(DynamicCache(config=model.config.get_text_config(decoder=True)).layers):
        return None
    most = usual_bytes(folder) if limit is None else limit
    return CacheFile(folder, most, memory.ahead(), read_in_a_pass(model.placement))


def read_in_a_pass(placement: Placement) -> int:
    """Bytes of weights that a pass of many sequences reads from the disk; it uses nearly all experts."""
    return placement.streamed_bytes + sum(max(pool.stored - pool.kept, 0) for pool in placement.pools)


def usual_bytes(folder: Path | None) -> int:
    """The default size limit of the file, in bytes.

    Args:
        folder: folder of the file; None for no file.
    """
    return shutil.disk_usage(folder).free // FILE_SHARE if folder is not None else 0


@dataclass(frozen=True, slots=True)
class Running:
    """The running sequences.

    Attributes:
        near: sequences with their KV cache in memory.
        filed: sequences with their KV cache in the file.
        most: maximum size of the file in bytes.
    """

    near: Sequence[SequenceMemory]
    filed: Sequence[SequenceMemory]
    most: int

    def soon(self, memory: CacheMemory) -> int:
        """Bytes of memory that they take after the next tokens; see `SequenceMemory.soon`."""
        in_file = len(self.filed) * memory.beside_file() + memory.ahead() if self.filed else 0
        return memory.soon(self.near) + in_file

    def has_place(self, text: SequenceMemory, memory: CacheMemory) -> bool:
        """Whether the file has room for one more sequence, and saves enough memory by it; see `WORTH`."""
        in_file = sum(memory.bytes_for(one.tokens + one.room + TAIL_TOKENS) for one in (*self.filed, text))
        return in_file <= self.most and memory.soon([text]) > WORTH * memory.beside_file()

    def fits(self, text: SequenceMemory, memory: CacheMemory) -> bool:
        """Whether memory has room for the KV cache of one more sequence; see `scheduler.fits`."""
        if not self.filed:
            return fits(text, self.near, memory.bytes_for, memory.limit)
        return replace(self, near=[*self.near, text]).soon(memory) <= memory.limit


class Begins(Enum):
    """The place of the KV cache of a sequence that begins: memory, the file, or neither because it has to wait."""

    NEAR = "in memory"
    FILED = "in a file"
    LATER = "nowhere yet"


def begins(text: SequenceMemory, running: Running, others: int, memory: CacheMemory) -> Begins:
    """Whether a sequence may begin, and where its KV cache is.

    Args:
        text: the waiting sequence.
        running: the running sequences.
        others: number of sequences that wait behind it and should run with it.
        memory: the memory limit of KV caches.
    """
    near = [*running.near, text]
    if not running.has_place(text, memory):
        return Begins.NEAR if running.fits(text, memory) else Begins.LATER
    if not running.filed and memory.soon([*near, *[text] * others]) <= memory.limit:
        return Begins.NEAR
    # the sequences behind it need some memory too
    reserved = (len(running.filed) + others) * memory.beside_file() + memory.ahead()
    if memory.soon(near) + reserved <= memory.limit:
        return Begins.NEAR
    if replace(running, filed=[*running.filed, text]).soon(memory) <= memory.limit:
        return Begins.FILED
    return Begins.NEAR if not running.near and not running.filed else Begins.LATER


# Finds the KV cache whose prefix a new request can reuse, and decides whether to wait for a longer one.

WORTH_WAITING = 64
"""A request waits for a shared prefix of at least so many tokens that another request is computing."""


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A sequence that shares a prefix with another one.

    Attributes:
        ids: ids of the tokens in its cache.
        cache: its KV cache.
        tokens: number of its first tokens that can be reused.
    """

    ids: Sequence[int]
    cache: Any
    tokens: int


def best_source(wanted: Sequence[int], texts: Iterable[tuple[Sequence[int], Any]]) -> PrefixSource | None:
    """The source with the longest usable prefix; None if there is none.

    Args:
        wanted: ids of the new request.
        texts: ids and KV cache of each candidate.
    """
    found = (PrefixSource(ids, cache, usable(wanted, ids, cache)) for ids, cache in texts)
    best = max(found, key=lambda source: source.tokens, default=None)
    return best if best is not None and best.tokens else None


def should_wait(wanted: Sequence[int], tokens: int, computed: Iterable[Sequence[int]]) -> bool:
    """Whether a request should wait until another one has computed their shared prefix.

    Args:
        wanted: ids of the new request.
        tokens: length of the prefix that is cached already.
        computed: prompts in prefill.
    """
    worth = max(tokens + WORTH_TOKENS, WORTH_WAITING)
    return any(beginning(wanted, prompt) >= worth for prompt in computed)


ASIDE_SHARE = 4
"""By default KV caches of so many times the memory limit may be swapped out. This suffices for up to 80 sequences that
grow at the same rate and are preempted until one of them is left."""

GIVING_BACK_SECONDS = 1.0
"""In bulk, the minimum time between two returns of free memory to the system."""


class TextCaches:
    """The KV caches of a batch's sequences.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        limits: limits of the batch.

    Attributes:
        memory: the memory limit of KV caches, and the bytes of a token.
        chunk: maximum tokens of a prompt in one pass.
        resumed: how often a sequence was swapped in.
        file: file for KV caches of running sequences, or None.
        aside: KV caches of preempted sequences, swapped out.

    Raises:
        OptionError: there is no memory left.
    """

    def __init__(self, model: Any, limits: Limits) -> None:
        if not limits.exact:
            make_kernels(model)
        self.memory = CacheMemory(model, limits.cache_bytes, in_bulk=limits.in_bulk, running=limits.running)
        if self.memory.is_tight:
            keep_large_apart()
        self.chunk = min(limits.chunk, self.memory.part or self.memory.max_tokens)
        self.resumed = 0
        self._gives_back = trimming() if limits.in_bulk else None
        self._gave_back = time.monotonic()
        self._config = model.config.get_text_config(decoder=True)
        self._exact = limits.exact
        self._keeps = keeps(model)
        self._shares = self._keeps and not limits.exact
        self._kept = PrefixCache()
        aside_bytes = limits.aside_bytes if limits.aside_bytes is not None else ASIDE_SHARE * self.memory.limit
        folder = limits.aside_folder or usual_folder()
        if folder is None and all(lane.device.shares_host_memory for lane in model.streamer.lanes.values()):
            aside_bytes = 0  # neither other memory nor a disk to swap out to
        self.aside = SwapSpace(aside_bytes, folder)
        file_bytes = limits.file_bytes if self._shares else 0
        self.file = file_for(model, self.memory, folder, file_bytes)

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()

    @property
    def prompt_chunk(self) -> int | None:
        """Tokens of a prompt in one pass; None if a prompt goes through the model as a whole."""
        return self.chunk if self._shares else None

    def nbytes(self, running: Iterable[RequestHandle]) -> int:
        """Bytes of KV caches in memory; may be called from any thread."""
        return self._kept.nbytes + self._held_by(running)

    def shrink(self, running: Sequence[RequestHandle]) -> None:
        """Evict finished sequences as far as the running ones need their memory in the next pass."""
        near, filed = self._parted(running)
        self._kept.shrink(self.left_to_near(filed) - self.memory.now(handle.text for handle in near))

    def where(self, handle: RequestHandle, running: Sequence[RequestHandle], others: int) -> Begins:
        """Whether a sequence may begin, and where its KV cache is then.

        Args:
            handle: the waiting request.
            running: the running requests.
            others: number of requests that wait behind it and should run with it.
        """
        return begins(handle.text, self._running(running), others, self.memory)

    def near(self, running: Sequence[RequestHandle]) -> Sequence[RequestHandle]:
        """The requests with their KV cache in memory."""
        return self._parted(running)[0]

    def left_to_near(self, filed: Sequence[RequestHandle]) -> int:
        """Bytes that sequences with their KV cache in a file leave to those with it in memory."""
        running = self._running(filed)
        return self.memory.limit - (running.soon(self.memory) if running.filed else 0)

    def to_file(self, handle: RequestHandle, running: Sequence[RequestHandle]) -> bool:
        """Move the KV cache of a running sequence to the file in the next pass; False if that is not possible."""
        cache = handle.generation.cache
        if self.file is None or cache is None or not self._running(running).has_place(handle.text, self.memory):
            return False
        self.file.add(cache)
        return True

    def from_file(self, running: Sequence[RequestHandle]) -> None:
        """Move KV caches from the file to memory as far as there is room; called when the request queue is empty."""
        for handle in self._parted(running)[1]:
            others = [one for one in running if one is not handle]
            assert self.file is not None
            if not self._running(others).fits(handle.text, self.memory):
                break  # the rest are about as long, and may be hundreds
            self.file.let_return(handle.generation.cache)
        self._kept.shrink(self.memory.limit - self._running(running).soon(self.memory))

    def lost(self, running: Sequence[RequestHandle]) -> list[RequestHandle]:
        """The requests whose KV cache could not be written to the file."""
        file = self.file
        return [one for one in running if file.is_lost(one.generation.cache)] if file is not None else []

    def measure(self, running: Iterable[RequestHandle]) -> None:
        """Measure the bytes of a token after a pass; for unusual kinds of caches the config's estimate is kept.

        In bulk, free memory is returned to the system, at most once in `GIVING_BACK_SECONDS`.
        """
        if self._keeps:
            self.memory.measure(handle.whole_cache(continues=True) for handle in running)
        if self._gives_back is not None and time.monotonic() - self._gave_back > GIVING_BACK_SECONDS:
            self._gives_back()
            self._gave_back = time.monotonic()

    def give(self, handle: RequestHandle, running: Sequence[RequestHandle], *, in_file: bool = False) -> bool:
        """Give a sequence that begins its KV cache; False if another one is computing a prefix that both share.

        Args:
            handle: the request that begins.
            running: the running requests.
            in_file: whether its KV cache goes into the file.
        """
        left = self.memory.limit - self._running(running).soon(self.memory)
        left -= self.memory.beside_file() if in_file else self.memory.soon([handle.text])
        if handle.held is not None:
            self._kept.shrink(left)
            handle.generation.cache = self.aside.take(handle.held)
            handle.held = None
            if handle.generation.cache is not None:
                self.resumed += 1
                if in_file:
                    self._put(handle.generation)
                return True
        if not self._shares:
            return True
        generation = handle.generation
        source = best_source(generation.ids, self._sources(running))
        tokens = source.tokens if source is not None else 0
        if should_wait(generation.ids, tokens, _computed_prompts(running)):
            return False
        if source is not None:
            generation.cache = copied(self._in_memory(source.cache), tokens)
            self._kept.used(source.ids)
        else:
            generation.cache = DynamicCache(config=self._config)
        if in_file and not self._put(generation):
            tokens = 0
        generation.kept_tokens = max(generation.kept_tokens, min(tokens, len(generation.request.prompt)))
        self._kept.shrink(left)
        return True

    def set_aside(self, handle: RequestHandle, cache: Any, pace: TokenBudget) -> None:
        """Swap out the KV cache of a preempted sequence.

        Args:
            handle: the preempted request.
            cache: KV cache of all its computed tokens; None if there is none to continue from.
            pace: measured time of passes.
        """
        handle.generation.cache = None
        if cache is None:
            return
        tokens = cache.get_seq_length()
        # recomputed values could differ in their bits
        recompute_seconds = None if self._exact else pace.recompute_seconds(tokens, self.prompt_chunk or tokens)
        handle.held = self.aside.put(cache, recompute_seconds)

    def whole_cache(self, handle: RequestHandle) -> Any:
        """The KV cache to continue a sequence from, see `RequestHandle.whole_cache`; None if it is in the file."""
        if self.file is not None and self.file.holds(handle.generation.cache):
            return None
        return handle.whole_cache(continues=self._shares)

    def keep(self, handle: RequestHandle, running: Iterable[RequestHandle]) -> None:
        """Put the KV cache of a finished sequence into the prefix cache."""
        cache, handle.generation.cache = handle.generation.cache, None
        if self._shares and cache is not None and (tokens := cache.get_seq_length()):
            self._kept.put(handle.generation.ids[:tokens], cache)
            self._kept.shrink(self.memory.limit - self._held_by(running))

    def drop(self, handle: RequestHandle) -> None:
        """Drop the KV cache, swapped out or in the file, of a sequence that has ended or is preempted."""
        if self.file is not None and self.file.holds(handle.generation.cache):
            self.file.drop(handle.generation.cache)
            handle.generation.cache = None
        if handle.held is not None:
            self.aside.drop(handle.held)
            handle.held = None

    def _sources(self, running: Iterable[RequestHandle]) -> Iterable[tuple[Sequence[int], Any]]:
        """Ids and KV cache of each sequence whose prefix can be reused."""
        yield from self._kept.texts()
        for handle in running:
            if tokens := handle.cached_tokens:
                yield handle.generation.ids[:tokens], handle.generation.cache

    def _put(self, generation: Generation) -> bool:
        """Put the cache of a sequence that begins into the file; if that fails, give it an empty one in memory."""
        assert self.file is not None
        self.file.put(generation.cache)
        if not self.file.is_lost(generation.cache):
            return True
        self.file.drop(generation.cache)
        generation.cache = DynamicCache(config=self._config)
        return False

    def _in_memory(self, cache: Any) -> Any:
        file = self.file
        return file.whole_copy(cache) if file is not None and file.holds(cache) else cache

    def _parted(self, running: Iterable[RequestHandle]) -> tuple[list[RequestHandle], list[RequestHandle]]:
        """The requests with their KV cache in memory, and those with it in the file."""
        near: list[RequestHandle] = []
        filed: list[RequestHandle] = []
        for one in running:
            is_filed = self.file is not None and self.file.keeps(one.generation.cache)
            (filed if is_filed else near).append(one)
        return near, filed

    def _running(self, running: Iterable[RequestHandle]) -> Running:
        near, filed = self._parted(running)
        most = self.file.limit if self.file is not None else 0
        return Running([one.text for one in near], [one.text for one in filed], most)

    def _held_by(self, running: Iterable[RequestHandle]) -> int:
        near, filed = self._parted(running)
        # computed from token counts, since the batch's thread may change the tensors meanwhile
        counts = [
            handle.cached_tokens if handle.generation.cache is not None else handle.text.tokens for handle in near
        ]
        return sum(map(self.memory.bytes_for, counts)) + len(filed) * self.memory.beside_file()


def _computed_prompts(running: Iterable[RequestHandle]) -> Iterable[Sequence[int]]:
    """Prompts in prefill, which are not completely in their caches yet."""
    for handle in running:
        prompt = handle.generation.request.prompt
        if handle.generation.cache is not None and handle.cached_tokens < len(prompt):
            yield prompt
