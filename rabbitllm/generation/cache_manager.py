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

import logging
import shutil
import time
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import DynamicCache, GenerationMixin

from rabbitllm.engine.forwards import load_kernels
from rabbitllm.engine.free_memory import keep_large_apart, trimming
from rabbitllm.engine.kv_room import angles_change_after, has_states, keeps_every_token
from rabbitllm.engine.placement import Placement
from rabbitllm.generation._cache_file import NO_MEMORY, TAIL_TOKENS, CacheFile
from rabbitllm.generation._packed_batch import can_be_packed, shares_keys
from rabbitllm.generation._prompt_cache import PromptCache
from rabbitllm.generation._sequence import Sequence, SequenceLength
from rabbitllm.generation.kv_cache import (
    MIN_PREFIX_TOKENS,
    Beside,
    PrefixCache,
    beside_of,
    bytes_of,
    cache_layers,
    can_be_cropped,
    common_prefix,
    copied,
    keeps,
    usable,
)
from rabbitllm.generation.memory import CacheMemory
from rabbitllm.generation.request import BatchStats, Limits
from rabbitllm.generation.swap import SwapSpace, default_folder
from rabbitllm.generation.transformers_api import has_dynamic_cache
from rabbitllm.store.locations import home

if TYPE_CHECKING:
    from transformers import Cache

    from rabbitllm.engine.streamed_model import StreamedModel
    from rabbitllm.generation._lookahead import Lookahead

logger = logging.getLogger(__name__)

FILE_SHARE = 4
"""By default the file may take 1 / `FILE_SHARE` of the free space on the disk."""
MIN_SAVING = 2
"""Minimum saving factor: a sequence goes to the file only if it takes more than this times as much memory otherwise."""
MIN_SHARED_TOKENS = 64
"""Minimum length of a shared prefix for which a request waits until another one has computed it."""
PROMPTS_FOLDER = "prompts"
"""Default folder of the prefix cache on disk, in `home()`: for all models, with one size limit."""
SWAP_SHARE = 4
"""Default limit of swapped-out KV caches, in multiples of the memory limit. This suffices for up to 80 sequences that
grow at the same rate and are preempted until one of them is left."""
TRIM_SECONDS = 1.0
"""In batch jobs, the minimum time between two returns of free memory to the system."""


def read_in_a_pass(placement: Placement) -> int:
    """Bytes of weights that a pass of many sequences reads from the disk; it uses nearly all experts."""
    return placement.streamed_bytes + sum(max(pool.stored - pool.kept, 0) for pool in placement.pools)


def default_file_bytes(folder: Path | None) -> int:
    """The default size limit of the file, in bytes.

    Args:
        folder: folder of the file; None for no file.
    """
    return shutil.disk_usage(folder).free // FILE_SHARE if folder is not None else 0


class CacheAllocation(Enum):
    """Where the KV cache of a sequence is allocated when it begins; LATER if it has to wait."""

    MEMORY = "in memory"
    FILE = "in a file"
    LATER = "later"


@dataclass(frozen=True, slots=True)
class RunningLengths:
    """The lengths of the running sequences.

    Attributes:
        in_memory: of sequences with their KV cache in memory.
        in_file: of sequences with their KV cache in the file.
        max_file_bytes: maximum size of the file.
    """

    in_memory: abc.Sequence[SequenceLength]
    in_file: abc.Sequence[SequenceLength]
    max_file_bytes: int

    def reserved(self, memory: CacheMemory) -> int:
        """Bytes of memory that they take after the next tokens; see `SequenceLength.reserved`."""
        in_file = len(self.in_file) * memory.tail_bytes() + memory.prefetch_bytes() if self.in_file else 0
        return memory.reserved(self.in_memory) + in_file

    def file_has_room(self, length: SequenceLength, memory: CacheMemory) -> bool:
        """Whether the file has room for one more sequence, and saves enough memory by it; see `MIN_SAVING`."""
        in_file = sum(memory.bytes_for(other.tokens + other.room + TAIL_TOKENS) for other in (*self.in_file, length))
        return in_file <= self.max_file_bytes and memory.reserved([length]) > MIN_SAVING * memory.tail_bytes()

    def fits(self, length: SequenceLength, memory: CacheMemory) -> bool:
        """Whether memory has room for the KV cache of one more sequence; a single one always may begin."""
        is_single = not self.in_memory and not self.in_file
        return is_single or replace(self, in_memory=[*self.in_memory, length]).reserved(memory) <= memory.limit

    def allocation(self, length: SequenceLength, others: int, memory: CacheMemory) -> CacheAllocation:
        """Whether a sequence may begin, and where its KV cache is.

        Args:
            length: length of the waiting sequence.
            others: number of sequences after it in the queue that should run with it.
            memory: the memory limit of KV caches.
        """
        in_memory = [*self.in_memory, length]
        if not self.file_has_room(length, memory):
            return CacheAllocation.MEMORY if self.fits(length, memory) else CacheAllocation.LATER
        if not self.in_file and memory.reserved([*in_memory, *[length] * others]) <= memory.limit:
            return CacheAllocation.MEMORY
        # the sequences after it need some memory too
        in_file = (len(self.in_file) + others) * memory.tail_bytes() + memory.prefetch_bytes()
        if memory.reserved(in_memory) + in_file <= memory.limit:
            return CacheAllocation.MEMORY
        if replace(self, in_file=[*self.in_file, length]).reserved(memory) <= memory.limit:
            return CacheAllocation.FILE
        return CacheAllocation.LATER if self.in_memory or self.in_file else CacheAllocation.MEMORY


def excess(running: abc.Sequence[SequenceLength], cost: Callable[[int], int], limit: int) -> int:
    """Number of running sequences, counted from the last, that exceed the limit after the next pass.

    Args:
        running: sequences in the order in which they were admitted.
        cost: function from tokens to bytes of the KV cache.
        limit: limit in bytes.
    """
    needed = [cost(length.tokens + 1) for length in running]
    count = 0
    while count < len(running) - 1 and sum(needed[: len(needed) - count]) > limit:
        count += 1
    return count


class CacheManager:
    """The KV caches of a batch's sequences.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        limits: limits of the batch.
        running: the running sequences, as the scheduler changes them.
        totals: counts what is swapped in, and what the prefix cache on disk does.

    Attributes:
        memory: the memory limit of KV caches, and the bytes of a token.
        chunk: maximum tokens of a prompt in one pass.
        file: KV caches of running sequences in a file; its limit is 0 if that would not pay.
        swap: KV caches of preempted sequences, swapped out.
        prompts: the prefix cache on disk; None for none.

    Raises:
        OptionError: no memory is left, or the prefix cache on disk cannot be used.
    """

    def __init__(
        self, model: StreamedModel, limits: Limits, running: abc.Sequence[Sequence], totals: BatchStats
    ) -> None:
        if not limits.exact:
            load_kernels(model)
        self.memory = CacheMemory(model, limits.cache_bytes, throughput=limits.throughput, running=limits.running)
        if self.memory.is_tight:
            keep_large_apart()
        self.chunk = min(limits.chunk, self.memory.part or self.memory.max_tokens)
        self._running = running
        self._totals = totals
        self._trim = trimming() if limits.throughput else None
        self._trimmed = time.monotonic()
        self._config = model.config.get_text_config(decoder=True)
        self._keeps = keeps(model)
        layers = cache_layers(model) if has_dynamic_cache(model) else []
        # of others a cache may have what grows in another way, and the config's estimate is kept
        self._is_measurable = all(can_be_cropped(layer) or has_states(layer) for layer in layers) and bool(layers)
        self._waits_for_states = self._is_measurable and any(map(has_states, layers))
        self._shares = self._keeps and not limits.exact
        self._same_angles = angles_change_after(self._config)
        # Phi-3's own code drops the cache where the angles change; transformers' ordinary code goes on with it
        ordinary = GenerationMixin.prepare_inputs_for_generation
        self._has_own_inputs = type(model).prepare_inputs_for_generation is not ordinary
        self._finished = PrefixCache()
        swap_bytes = limits.swap_bytes if limits.swap_bytes is not None else SWAP_SHARE * self.memory.limit
        folder = limits.swap_folder or default_folder()
        if folder is None and all(executor.device.shares_host_memory for executor in model.streamer.executors.values()):
            swap_bytes = 0  # neither other memory nor a disk to swap out to
        self.swap = SwapSpace(swap_bytes, folder)
        self.file = self._file_for(model, folder, limits.file_bytes if self._shares else 0)
        self.prompts = self._prompts_for(model, limits) if limits.prompt_bytes else None

    def _prompts_for(self, model: StreamedModel, limits: Limits) -> PromptCache:
        """The prefix cache on disk."""
        folder = limits.prompt_folder or home() / PROMPTS_FOLDER
        return PromptCache(model, folder, limits.prompt_bytes, lambda: not self._running, self._totals)

    def _file_for(self, model: StreamedModel, folder: Path | None, limit: int | None) -> CacheFile:
        """The file for KV caches of running sequences; with limit 0 where it does not pay or the model forbids it."""
        weight_bytes = read_in_a_pass(model.placement)
        pays = limit != 0 and weight_bytes > self.memory.limit
        can = any(map(keeps_every_token, cache_layers(model))) and not shares_keys(model)
        if folder is None or not pays or not can or not can_be_packed(model):
            return CacheFile(folder, 0, 0)
        max_bytes = default_file_bytes(folder) if limit is None else limit
        return CacheFile(folder, max_bytes, self.memory.prefetch_bytes(), weight_bytes)

    def close(self, until: float = 0.0) -> None:
        """Close the files; until a time in `time.monotonic()` finished sequences are written to disk."""
        self.file.close()
        if self.prompts is not None:
            self.prompts.close(until)

    def nbytes(self) -> int:
        """Bytes of KV caches in memory; may be called from any thread."""
        return self._finished.nbytes + self._running_bytes() + self._copied_bytes()

    def _copied_bytes(self) -> int:
        """Bytes of states that wait to be written to disk."""
        return self.prompts.nbytes if self.prompts is not None else 0

    # memory and file -------------------------------------------------------------------------------------------------

    def by_location(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences with their KV cache in memory, and those with it in the file."""
        in_memory: list[Sequence] = []
        in_file: list[Sequence] = []
        for sequence in self._running:
            (in_file if self.file.stays_in_file(sequence.cache) else in_memory).append(sequence)
        return in_memory, in_file

    def allocation(self, sequence: Sequence, others: int) -> CacheAllocation:
        """Whether a sequence may begin, and where its KV cache is then.

        Args:
            sequence: the waiting sequence.
            others: number of sequences after it in the queue that should run with it.
        """
        if sequence.request.media is not None:  # its first pass is not packed, as sequences in the file are
            fits = self._lengths().fits(sequence.length, self.memory)
            return CacheAllocation.MEMORY if fits else CacheAllocation.LATER
        if self._waits_for_states and not self.memory.is_measured and any(map(self._tells_of_states, self._running)):
            return CacheAllocation.LATER  # the config does not say how large states are
        return self._lengths().allocation(sequence.length, others, self.memory)

    def over_limit(self) -> list[Sequence]:
        """The sequences whose KV cache exceeds the memory limit in the next pass, the last ones first.

        At least one sequence with its KV cache in memory is not among them.
        """
        in_memory, in_file = self.by_location()
        count = excess([sequence.length for sequence in in_memory], self.memory.bytes_for, self._left_by(in_file))
        return in_memory[len(in_memory) - count :][::-1]

    def _left_by(self, in_file: abc.Sequence[Sequence]) -> int:
        """Bytes that sequences with their KV cache in a file leave to those with it in memory."""
        return self.memory.limit - RunningLengths([], [s.length for s in in_file], 0).reserved(self.memory)

    def to_file(self, sequence: Sequence) -> bool:
        """Move the KV cache of a running sequence to the file in the next pass; False if that is not possible."""
        if sequence.cache is None or not self._lengths().file_has_room(sequence.length, self.memory):
            return False
        self.file.add(sequence.cache)
        return True

    def from_file(self) -> None:
        """Move KV caches from the file to memory as far as there is room; called when the request queue is empty."""
        for sequence in self.by_location()[1]:
            if not self._lengths(without=sequence).fits(sequence.length, self.memory):
                break  # the rest are about as long, and may be hundreds
            self.file.return_to_memory(sequence.cache)
        self._finished.shrink(self.memory.limit - self._lengths().reserved(self.memory))

    def evict(self) -> None:
        """Evict finished sequences as far as the running ones need their memory in the next pass."""
        if self.prompts is not None and self._left_by_running() < 0:
            self.prompts.forget_states()
        self._finished.shrink(self._left_by_running())

    def _left_by_running(self) -> int:
        """Bytes that the running sequences leave in the next pass, without drafts."""
        in_memory, in_file = self.by_location()
        return self._left_by(in_file) - self.memory.next_bytes(s.length for s in in_memory) - self._copied_bytes()

    def drafts(
        self, sequences: abc.Sequence[Sequence], tokens: int, rows: int, *, pays: bool
    ) -> list[tuple[Lookahead, list[int], int]]:
        """Choose how many tokens are drafted for the next pass, as far as the running sequences leave memory.

        Args:
            sequences: sequences of the pass.
            tokens: their tokens without drafts.
            rows: maximum number of drafted tokens; divided equally.
            pays: whether tokens that may be wrong are drafted, not forced ones alone.

        Returns:
            The drafts of sequences, each with the sequence's tokens and the number of tokens to draft.
        """
        free, wanting = self._left_by_running(), []
        drafting = [(s.lookahead, s.cache in self.file) for s in self._running if s.lookahead is not None]
        free -= sum(lookahead.nbytes for lookahead, _ in drafting)
        for lookahead, is_in_file in reversed(drafting):  # what drafts keep can be computed again
            if lookahead.nbytes and (free < 0 or is_in_file):
                free += lookahead.nbytes
                lookahead.forget()
        able = [sequence for sequence in sequences if sequence.can_look_ahead and sequence.cache not in self.file]
        for others, sequence in zip(reversed(range(len(able))), able, strict=True):
            source, length = sequence.lookahead, sequence.length
            assert source is not None
            most = min(rows // (others + 1), length.room - 1)
            while most > 0 and self._drafted_bytes(source, length.tokens, most) > free:
                most -= 1
            drafts = pays and sequence.num_new_tokens == 1
            if count := source.choose(sequence.ids, most, tokens, len(sequences), drafts=drafts):
                free -= self._drafted_bytes(source, length.tokens, count)
                rows -= count
                wanting.append((source, sequence.ids, count))
        self._finished.shrink(free)
        return wanting

    def _drafted_bytes(self, lookahead: Lookahead, tokens: int, count: int) -> int:
        """Bytes that `count` drafted tokens take in the next pass of a sequence, and their source."""
        return self.memory.drafted_bytes(tokens, count) + lookahead.bytes_for(tokens + count) - lookahead.nbytes

    def evict_all(self) -> None:
        """Evict all finished sequences."""
        self._finished.shrink(0)

    def lost(self) -> list[Sequence]:
        """The sequences whose KV cache could not be written to the file, or read from it."""
        return [sequence for sequence in self._running if self.file.is_lost(sequence.cache)]

    def measure(self) -> None:
        """Measure the bytes of a token after a pass; for unusual kinds of caches the config's estimate is kept.

        A cache that the model has dropped, to compute all tokens again with other angles, becomes a prefix cache.

        In batch jobs, free memory is returned to the system, at most once in `TRIM_SECONDS`.
        """
        for sequence in self._running:
            if sequence.has_dropped_cache:
                self.keep(sequence)
        if self.prompts is not None and self.prompts.has_states:
            for sequence in self._running:
                self._offer_state(sequence, self.prompts)
        if self._is_measurable and not self.memory.is_measured:
            ended = [s for s in self._running if s.has_ended and s.error is None]
            caches = [s.cache for s in ended if s.num_computed_tokens]
            if self._keeps:
                caches += [s.resumable_cache(continues=True) for s in self._running]
            else:
                caches += [s.waiting_cache for s in self._running]
            if not self._shares:
                self._waits_for_states = False  # if none is left, or modules have states, the next pass has none either
            self.memory.measure(caches)
        if self._trim is not None and time.monotonic() - self._trimmed > TRIM_SECONDS:
            self._trim()
            self._trimmed = time.monotonic()

    def _offer_state(self, sequence: Sequence, prompts: PromptCache) -> None:
        """Offer the windows and states of a sequence to the disk, at lengths from which others may continue.

        These are the end of its prompt, the end of the chunk before it, and of the last chunk that it shares with
        another sequence: often the system prompt.
        """
        cache, prompt = sequence.cache, sequence.request.prompt
        tokens = sequence.num_computed_tokens
        is_last, is_shared = len(prompt) - tokens < self.chunk, 0 <= sequence.num_shared_tokens - tokens < self.chunk
        if not 0 < tokens <= min(len(prompt), self._same_angles) or not (is_last or is_shared):
            return
        if not self.continues(sequence) or sequence.error is not None or sequence.has_dropped_cache:
            return
        lacks = sequence.lookahead.lacks if sequence.lookahead is not None else 0
        if lacks or any(getattr(layer, "record_past", False) for layer in cache.layers):
            return  # the cache is about to go back
        if self._left_by_running() > bytes_of(cache):
            prompts.offer_state(sequence.ids[:tokens], cache)

    # the life of a sequence ------------------------------------------------------------------------------------------

    def _tells_of_states(self, sequence: Sequence) -> bool:
        """Whether a running sequence has a cache that will be measured."""
        return self.continues(sequence) if self._shares else sequence.request.media is None

    def continues(self, sequence: Sequence) -> bool:
        """Whether a sequence that begins may continue a KV cache with several tokens at once, as with a prefix."""
        if sequence.request.media is not None:  # other pictures may have the same ids, so their caches are never shared
            return False
        return self._shares and sequence.length.tokens <= self._same_angles

    def prompt_chunk(self, sequence: Sequence) -> int | None:
        """Maximum tokens of a sequence's prompt in one pass; None if it goes through the model as a whole.

        Args:
            sequence: a sequence that begins, or continues after it was preempted.
        """
        if self.continues(sequence):
            return self.chunk
        was_short = len(sequence.request.prompt) <= self._same_angles < sequence.length.tokens
        # its angles changed while it decoded, and its first tokens kept the earlier ones
        is_mixed = was_short and self._keeps and sequence.request.media is None and not self._has_own_inputs
        return self._same_angles if is_mixed else None

    def allocate(self, sequence: Sequence, *, in_file: bool = False) -> bool:
        """Give a sequence that begins its KV cache; False if another one is computing a prefix that both share.

        Args:
            sequence: the sequence that begins.
            in_file: whether its KV cache goes into the file.
        """
        free = self.memory.limit - self._lengths().reserved(self.memory)
        free -= self.memory.tail_bytes() if in_file else self.memory.reserved([sequence.length])
        if sequence.swapped_out is not None:
            self._finished.shrink(free)
            sequence.cache = self.swap.take(sequence.swapped_out)
            sequence.swapped_out = None
            if sequence.cache is not None:
                self._totals.resumed += 1
                if in_file:
                    self._write(sequence)
                return True
        if not self.continues(sequence):
            return True
        ids = sequence.ids
        candidates = ((usable(ids, prefix[0], prefix[1]), *prefix) for prefix in self._prefixes())
        tokens, prefix, cache, beside = max(candidates, key=itemgetter(0), default=(0, (), None, None))
        stored = self.prompts.find(ids, tokens + MIN_PREFIX_TOKENS) if self.prompts is not None else None
        worth = max((stored.tokens if stored is not None else tokens) + MIN_PREFIX_TOKENS, MIN_SHARED_TOKENS)
        prefilling = (other.prefilling for other in self._running)
        if any(prompt is not None and common_prefix(ids, prompt) >= worth for prompt in prefilling):
            return False
        if tokens:
            self._finished.used(prefix)
        self._finished.shrink(free)  # before the copy, which takes their memory
        if self.prompts is not None and self.prompts.has_states:
            sequence.num_shared_tokens = max((common_prefix(ids, other) for other, *_ in self._prefixes()), default=0)
        if self.prompts is not None and stored is not None:
            sequence.cache = self.prompts.read(stored)
        if sequence.cache is not None and stored is not None:
            tokens = stored.tokens
        else:
            sequence.cache = self._copied(cache, tokens) if tokens else None
            if sequence.cache is not None and not in_file:
                sequence.cache.beside = self._copied_beside(beside, tokens, free)
        if sequence.cache is None:
            sequence.cache, tokens = DynamicCache(config=self._config), 0
        if in_file and not self._write(sequence):
            tokens = 0
        sequence.num_cached_tokens = max(sequence.num_cached_tokens, min(tokens, len(sequence.request.prompt)))
        return True

    def _copied(self, cache: Any, tokens: int) -> Any | None:
        """A copy of a prefix, or None: without memory for it, or after an error of the disk, it is computed again."""
        try:
            return copied(self.file.in_memory(cache), tokens)
        except (OSError, *NO_MEMORY) as error:
            logger.warning("A shared prefix of %d tokens is computed again: %s", tokens, error)
            self._finished.shrink(0)
            return None

    def _copied_beside(self, beside: Beside | None, tokens: int, free: int) -> Beside | None:
        """A copy of what a draft keeps of a prefix, if so many bytes are free."""
        if beside is None or not beside.tokens:
            return None
        nbytes = beside.nbytes * min(tokens, beside.tokens) // beside.tokens
        if nbytes > free - self._draft_bytes():
            return None
        self._finished.shrink(free - nbytes)
        try:
            return beside.copied(tokens)
        except NO_MEMORY:
            return None

    def resumable(self, sequence: Sequence) -> Any:
        """The KV cache to continue a sequence from, see `Sequence.resumable_cache`; None if it is in the file."""
        return None if sequence.cache in self.file else sequence.resumable_cache(continues=self._shares)

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
            if sequence.swapped_out is None and beside_of(cache) is not None:
                cache.beside = None
                sequence.swapped_out = self.swap.put(cache)

    def keep(self, sequence: Sequence) -> None:
        """Put the KV cache of a finished sequence into the prefix cache."""
        cache, sequence.cache = sequence.cache, None
        if self._shares and cache is not None and 0 < (tokens := cache.get_seq_length()) <= self._same_angles:
            self._finished.put(sequence.ids[:tokens], cache)
            if self.prompts is not None and sequence.request.media is None:
                self.prompts.offer(sequence.ids[:tokens], cache)
            self._finished.shrink(self.memory.limit - self._running_bytes())

    def drop(self, sequence: Sequence) -> None:
        """Drop the KV cache, swapped out or in the file, of a sequence that has ended or is preempted."""
        if sequence.cache in self.file:
            self.file.drop(sequence.cache)
            sequence.cache = None
        if sequence.swapped_out is not None:
            self.swap.drop(sequence.swapped_out)
            sequence.swapped_out = None

    def _prefixes(self) -> Iterator[tuple[abc.Sequence[int], Any, Beside | None]]:
        """Ids and KV cache of each sequence whose prefix can be reused, and what a draft keeps of it."""
        for ids, cache in self._finished.entries():
            yield ids, cache, beside_of(cache)
        for sequence in self._running:
            if 0 < (tokens := sequence.num_computed_tokens) <= self._same_angles:
                draft = sequence.lookahead
                yield sequence.ids[:tokens], sequence.cache, draft.beside if draft is not None else None

    def _write(self, sequence: Sequence) -> bool:
        """Write the cache of a sequence that begins to the file; if that fails, give it an empty one in memory."""
        self.file.put(sequence.cache)
        if not self.file.is_lost(sequence.cache):
            return True
        self.file.drop(sequence.cache)
        sequence.cache = DynamicCache(config=self._config)
        return False

    def _lengths(self, without: Sequence | None = None) -> RunningLengths:
        in_memory, in_file = ([s.length for s in part if s is not without] for part in self.by_location())
        return RunningLengths(in_memory, in_file, self.file.buffers.limit)

    def _running_bytes(self) -> int:
        in_memory, in_file = self.by_location()
        # computed from token counts, since the batch's thread may change the tensors meanwhile
        counts = [s.num_computed_tokens if s.cache is not None else s.length.tokens for s in in_memory]
        return self._draft_bytes() + sum(map(self.memory.bytes_for, counts)) + len(in_file) * self.memory.tail_bytes()

    def _draft_bytes(self) -> int:
        """Bytes that the drafts of the running sequences keep."""
        return sum(draft.nbytes for s in list(self._running) if (draft := s.lookahead) is not None)
