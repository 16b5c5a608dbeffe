"""Decides which sequences compute in the next pass, are admitted, or are preempted, and keeps them in two queues.

    order      by priority; then preempted sequences, keys with fewer running ones, and first come, first served
    ageing     the first sequence that waits is overtaken `MAX_OVERTAKEN` times at most, for whatever reason
    a pass     every sequence in decode, and as many prompt tokens as keep the pass short (chunked prefill): half of
               them for the first prompt, the rest for the shortest ones
    memory     a sequence is admitted if the running ones leave room for its KV cache and some more tokens;
               if the caches exceed the limit afterwards, the sequence admitted last is preempted, of the
               lowest priority

    waiting ── admitted ── running ── finished
       └────── preempted ─────┘         its tokens are kept; its KV cache is swapped out or dropped

Any thread may submit a request. Only the batch's thread moves sequences, so it may read `running` at any time.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import threading
import time
from collections import Counter, abc, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rabbitllm.base.building import BUILDING
from rabbitllm.base.forks import own_lock
from rabbitllm.base.openmp import rest
from rabbitllm.base.terminal import size
from rabbitllm.engine.devices import OutOfDeviceMemory
from rabbitllm.errors import BatchError, BusyError, ClosedError, OptionError
from rabbitllm.generation._batch_drafts import BatchDrafts
from rabbitllm.generation._coroutines import Coroutine, copy_of
from rabbitllm.generation._model_runner import ModelRunner
from rabbitllm.generation._proposals import NGRAM, Draft
from rabbitllm.generation._sequence import Sequence, SequenceStatus
from rabbitllm.generation.cache_manager import CacheAllocation, CacheManager
from rabbitllm.generation.draft import chosen_draft
from rabbitllm.generation.kv_cache import can_go_back, keeps
from rabbitllm.generation.request import MEDIA_BYTES, BatchStats, FinishReason, Limits

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

logger = logging.getLogger(__name__)

FAILED = "failed"
"""Key in `BatchStats.ended` of requests that raised an error; the other keys are the values of `FinishReason`."""
MANY_TOKENS = 64
"""The time of a pass with fewer tokens counts as the time to stream the weights."""
TOKENS_EACH = 4
"""A sequence in decode, whose KV cache is read by itself, counts as so many prompt tokens."""
TIMES, MOST_TIMES = 2, 8
"""The least and the most times that prompts take as long as the sequences in decode beside them."""
FIRST_TOKENS = 1024
"""Prompt tokens in a pass before their cost is measured."""
PASSES_FOR_ONE_MORE = 64
"""Passes without an out-of-memory error after which one sequence more may run, if there was such an error."""
MAX_TOKENS = 8192
"""The most prompt tokens in a pass: their activations need memory too."""
MAX_OVERTAKEN = 16
"""How many others may be admitted before a sequence that has waited longer."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The measured time of passes, and from it the budget of prompt tokens, which take a multiple of it.

    A pass over streamed weights has a minimum time for any number of tokens; up to the budget, tokens cost little.

    Attributes:
        least: seconds of the shortest recent pass; None before the first.
        each: seconds that a token adds; None until a pass with many tokens was measured.
        tokens: of the pass of `least`.
    """

    least: float | None = None
    each: float | None = None
    tokens: int = 0

    def after(self, tokens: int, seconds: float) -> TokenBudget:
        """The budget updated by one more pass."""
        if self.least is None:
            return TokenBudget(seconds, None, tokens)
        if seconds >= self.least and tokens >= MANY_TOKENS + self.tokens:
            rate = (seconds - self.least) / (tokens - self.tokens)
            return TokenBudget(self.least, rate if self.each is None else 0.5 * (self.each + rate), self.tokens)
        # the minimum rises slowly, so that a short pass long ago does not count for ever
        if seconds < 1.05 * self.least:
            return TokenBudget(seconds, self.each, tokens)
        return TokenBudget(1.05 * self.least, self.each, self.tokens)

    def prompt_tokens(self, chunk: int, prompts: int = 1, decoding: int = 0) -> int:
        """Budget of prompt tokens in the next pass; at least a chunk, unless sequences in decode wait for them.

        Beside these, prompts take as much time as they are of the sequences, within bounds: fewer tokens in each of
        more passes would keep most sequences waiting for the sake of a few.

        Args:
            chunk: tokens of one prompt in a pass.
            prompts, decoding: number of sequences that have prompt tokens left, and of those in decode.
        """
        free = MANY_TOKENS if decoding else FIRST_TOKENS
        if self.least is not None and self.each is not None:
            free = int(self.least / max(self.each, 1e-9))
        if not decoding:
            return min(max(chunk, free), MAX_TOKENS)
        times = min(max(prompts / decoding, TIMES), MOST_TIMES)
        return min(int(times * (max(free, MANY_TOKENS) + TOKENS_EACH * decoding)), MAX_TOKENS)


def batch_draft(
    model: StreamedModel, draft: StreamedModel | Literal["auto", "mtp", "ngram", "self", "none"] | None, *, exact: bool
) -> Draft | None:
    """The draft of a batch as `chosen_draft` says; "auto" is none where there are no drafts.

    Args:
        model: the model.
        draft: see `Limits`.
        exact: whether each sequence is computed by itself.

    Raises:
        OptionError: the draft does not suit the model, or the model's KV caches do not go on.
    """
    can = keeps(model) and not exact
    if draft is None or draft == "none" or (draft == "auto" and not can):
        return None
    if not can:
        raise OptionError(
            f"This draft cannot be used for many requests of a {type(model).__name__}: it needs KV caches that go on "
            "with further tokens, and passes of all requests together, without --exact.",
            "Leave the draft out.",
        )
    chosen = chosen_draft(model, draft)
    # experts that are streamed one by one are others for each row, and rows that cost little are often wrong
    rarely = draft == "auto" and chosen == NGRAM and any(pool.kept < pool.stored for pool in model.placement.pools)
    return None if rarely else chosen


def rows_of(ready: abc.Sequence[tuple[int, int, bool]], budget: int, most: int) -> list[int]:
    """Tokens of each sequence in the next pass; 0 for a prompt that waits for another one.

    Half of the budget is for the first prompt, so that it never starves; the rest for those with the fewest tokens
    left, so that a short prompt does not wait for a long one.

    Args:
        ready: of each sequence the tokens that it brings, one in decode; all tokens of its prompt that are left; and
            whether some of the former may be left to the next pass.
        budget: prompt tokens in a pass. A first prompt that is not divisible may take all of it and leave a half to
            others.
        most: their maximum, unless the first prompt alone has more.
    """
    rows = [count if count == 1 else 0 for count, _, _ in ready]
    prompts = [index for index, (count, _, _) in enumerate(ready) if count > 1]
    if not prompts:
        return rows
    first = prompts[0]
    count, _, is_divisible = ready[first]
    rows[first] = min(count, -(-budget // 2)) if is_divisible else count
    free = min(max(budget - rows[first], budget // 2), most - rows[first])
    for index in sorted(prompts, key=lambda index: ready[index][1]):
        count, _, is_divisible = ready[index]
        rest = count - rows[index]
        added = min(rest, max(free, 0)) if is_divisible or rest <= free else 0
        rows[index] += added
        free -= added
    return rows


def retry_after(waiting: int, max_running: int, seconds: float) -> float:
    """Estimated seconds until a new request can be accepted, from 1 to 600.

    Args:
        waiting: number of waiting requests.
        max_running: maximum number of running requests.
        seconds: recent duration of a request.
    """
    return min(max(1.0, seconds * max(waiting, 1) / max(max_running, 1)), 600.0)


def _is_next(sequence: Sequence) -> bool:
    """Whether no other one may be admitted before a waiting sequence that lacks memory."""
    return sequence.overtaken >= MAX_OVERTAKEN or sequence.status is SequenceStatus.PREEMPTED


def _by_owner(sequences: abc.Iterable[Sequence]) -> Counter[str | None]:
    """Owner -> number of its sequences."""
    return Counter(sequence.request.owner for sequence in sequences)


@dataclass(frozen=True, slots=True)
class ScheduledPass:
    """What the next pass computes: its sequences, in the order in which they run, and their new tokens together."""

    sequences: tuple[Sequence, ...]
    num_tokens: int


class Scheduler:
    """The waiting and the running sequences of a batch, with their KV caches and their passes.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        limits: see `Limits`; requests that can begin at once do not count as waiting.

    Attributes:
        running: sequences by priority, and in the order in which they were admitted.
        caches: their KV caches.
        totals: totals since the start; other fields have their defaults.
        has_failed: whether an error ended the batch's thread.
    """

    def __init__(self, model: StreamedModel, limits: Limits) -> None:
        draft = batch_draft(model, limits.draft, exact=limits.exact)
        self.running: list[Sequence] = []
        self.totals = BatchStats()
        self.caches = CacheManager(model, limits, self.running, self.totals)
        self._runner = ModelRunner(model, exact=limits.exact, max_rows=self.caches.memory.rows, file=self.caches.file)
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._budget = TokenBudget()
        self._max_running = float(limits.running)  # sequences for which devices had enough memory recently
        self._recent_seconds = 1.0  # moving average of the seconds that a request took
        looks_ahead = draft is not None or (keeps(model) and not limits.exact and can_go_back(model))
        self._drafts = BatchDrafts(model, draft, self.totals, self._runner) if looks_ahead else None
        self._closing: float | None = None  # time at which unfinished requests are cancelled
        self.has_failed = False
        self._pauses = 0
        self._change = own_lock(threading.Condition())

    # in any thread ---------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Append a sequence to the queue.

        Raises:
            BusyError: the request queue is full.
            ClosedError: the queue is closed.
            BatchError: the batch's thread has failed.
        """
        with self._change:
            if self.has_failed:
                raise BatchError("The server has failed; its log has the reason.", "Start the server again.")
            if self._closing is not None:
                raise ClosedError("The server is shutting down.", "Start the server again.")
            self._check_queue(sequence.request.owner)
            self._check_media(sequence)
            self._waiting.append(sequence)
            self._change.notify_all()

    def _check_queue(self, owner: str | None) -> None:
        limits, running, waiting = self._limits, _by_owner(self.running), _by_owner(self._waiting)
        free = max(limits.running - len(self.running), 0)  # requests with a free slot begin at once
        if len(self._waiting) >= limits.waiting + free:
            raise BusyError(f"The request queue is full ({len(self._waiting):,} waiting).", *self._try_again())
        if owner is None or limits.waiting_of_key is None:
            return
        if limits.running_of_key is not None:
            free = min(free, max(limits.running_of_key - running[owner], 0))
        if waiting[owner] >= limits.waiting_of_key + free:
            raise BusyError(
                f"The request queue of this API key is full ({waiting[owner]:,} waiting).", *self._try_again()
            )

    def _check_media(self, sequence: Sequence) -> None:
        new = sequence.request.media
        media_by_id = {id(other.request.media): other.request.media for other in (*self.running, *self._waiting)}
        waiting_bytes = sum(media.nbytes for media in media_by_id.values() if media is not None and media is not new)
        if new is not None and waiting_bytes and waiting_bytes + new.nbytes > MEDIA_BYTES:
            raise BusyError(
                f"The pictures of the requests before this one take {size(waiting_bytes)}.", *self._try_again()
            )

    def _try_again(self) -> tuple[str, float]:
        """The remedy of a `BusyError`, and its seconds."""
        after = retry_after(len(self._waiting), self._limits.running, self._recent_seconds)
        return f"Try again in {after:.0f} s.", after

    def wake(self) -> None:
        """Wake the batch's thread because the state of a request has changed."""
        with self._change:
            self._change.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Start no pass while the context is open; new requests wait."""
        with self._change:
            self._pauses += 1
        try:
            yield
        finally:
            with self._change:
                self._pauses -= 1
                self._change.notify_all()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Move no sequence while the context is open."""
        with self._change:
            yield

    def close(self, seconds: float | None = None) -> None:
        """Accept no more requests.

        Args:
            seconds: time after which unfinished requests are cancelled; None for never.
        """
        with self._change:
            until = time.monotonic() + seconds if seconds is not None else float("inf")
            self._closing = until if self._closing is None else min(until, self._closing)
            self._change.notify_all()

    @property
    def waiting(self) -> list[Sequence]:
        """The waiting sequences, in their order."""
        with self._change:
            return list(self._waiting)

    # in the batch's thread -------------------------------------------------------------------------------------------

    def wait(self) -> bool:
        """Wait while there are no requests or the queue is paused; False once it is closed and empty."""
        with self._change:
            while self._pauses or not (self.running or self._waiting):
                if self._closing is not None and not self._pauses:
                    return False
                rest()  # other threads may compute meanwhile, as those of another model
                self._change.wait()
        return True

    def step(self) -> None:
        """Run one pass, for the sequences that `schedule` chooses, and finish those that have ended."""
        scheduled = self.schedule()
        if scheduled.sequences:
            before = self._num_generated_tokens()
            start = time.perf_counter()
            self._run([s.coroutine for s in scheduled.sequences if s.coroutine is not None])
            seconds = time.perf_counter() - start
            if self._drafts is not None:
                lookaheads = [s.lookahead for s in scheduled.sequences if s.lookahead is not None]
                self._drafts.learn(lookaheads, scheduled.num_tokens, seconds)
            self._budget = self._budget.after(scheduled.num_tokens, seconds)
            self.totals.passes += 1
            self.totals.pass_seconds += seconds
            self.totals.new_tokens += self._num_generated_tokens() - before
            self.caches.measure()
            for sequence in reversed(self.caches.lost()):
                if not sequence.has_ended or sequence.error is not None:
                    self.preempt(sequence)
            self._fit_memory(scheduled.sequences)
        for sequence in [sequence for sequence in self.running if sequence.has_ended]:
            self.finish(sequence, sequence.error or sequence.finish_reason or FinishReason.LENGTH)

    def _num_generated_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.running)

    def _run(self, coroutines: list[Coroutine]) -> None:
        """Run one pass; an error outside of the coroutines ends those of this pass, and none that come later."""
        try:
            with BUILDING.a_pass():
                self._runner.run(coroutines)
        except Exception as error:
            logger.exception("a pass has failed")
            for coroutine in coroutines:
                if not coroutine.dead:
                    self._runner.coroutines.throw(coroutine, copy_of(error))

    def _fit_memory(self, chosen: abc.Sequence[Sequence]) -> None:
        """After a pass that needed more memory than a device has left, compute its sequences again, half at a time."""
        failed = [sequence for sequence in chosen if isinstance(sequence.error, OutOfDeviceMemory)]
        if not failed:
            self._max_running = min(self._max_running + 1 / PASSES_FOR_ONE_MORE, self._limits.running)
        elif len(self.running) > 1:
            self._max_running = max(len(chosen) // 2, 1)
            logger.warning(
                "A pass with %d sequences ran out of memory; the limit is now %d.", len(chosen), self._max_running
            )
            for sequence in reversed(failed):
                self.preempt(sequence)
            self.caches.evict_all()

    def schedule(self) -> ScheduledPass:
        """Finish unwanted sequences, preempt and admit others, and choose those that compute in the next pass."""
        for sequence, why in self.unwanted():
            self.finish(sequence, why)
        self._preempt_excess()
        self._admit()
        for sequence in self.running:
            sequence.limit_rows(None)
        ready = [sequence for sequence in self.running if sequence.num_new_tokens]
        budget = most = self.caches.memory.max_tokens
        if not self._limits.throughput:
            decoding = sum(sequence.num_new_tokens == 1 for sequence in ready)
            budget = min(self._budget.prompt_tokens(self.caches.chunk, len(ready) - decoding, decoding), most)
        rows = rows_of([(s.num_new_tokens, s.num_uncomputed_tokens, s.is_divisible) for s in ready], budget, most)
        for sequence, number in zip(ready, rows, strict=True):
            sequence.limit_rows(number)
        sequences, tokens = tuple(s for s, number in zip(ready, rows, strict=True) if number), sum(rows)
        if self._drafts is not None:
            free = self.caches.memory.logits - len(sequences)
            pays = len(sequences) == tokens or tokens < MANY_TOKENS  # not beside long prompts
            tokens += sum(sequence.lookahead.lacks for sequence in sequences if sequence.lookahead is not None)
            tokens += self._drafts.propose(self.caches.drafts(sequences, tokens, free, pays=pays))
        return ScheduledPass(sequences, tokens)

    def unwanted(self) -> list[tuple[Sequence, FinishReason]]:
        """Sequences that are cancelled or past their deadline, each with its finish reason."""
        now = time.monotonic()
        with self._change:
            closing = self._closing is not None and now >= self._closing
            return [
                (sequence, FinishReason.CANCELLED if sequence.is_cancelled or closing else FinishReason.TIMEOUT)
                for sequence in (*self.running, *self._waiting)
                if sequence.is_cancelled or closing or (sequence.deadline is not None and now >= sequence.deadline)
            ]

    def _preempt_excess(self) -> None:
        """Preempt sequences whose KV caches exceed the memory limit."""
        self.caches.evict()
        for sequence in self.caches.over_limit():
            if not self.caches.to_file(sequence):
                self.preempt(sequence)
        in_memory, _ = self.caches.by_location()
        memory = self.caches.memory
        if len(self.running) == 1 and in_memory and memory.next_bytes([in_memory[0].length]) > memory.limit:
            self.finish(self.running[0], FinishReason.LENGTH)  # no other request is left to preempt

    def _admit(self) -> None:
        """Start waiting sequences in their order, as far as memory allows; smaller ones may overtake a large one."""
        if not self.waiting:
            self.caches.from_file()
        passed: list[Sequence] = []  # without room, or waiting for a prefix
        while self._admit_next(passed):
            pass

    def _admit_next(self, passed: list[Sequence]) -> bool:
        """Admit the next sequence that is not in `passed`, and add to these; False if nothing more can be admitted."""
        free = min(self.caches.memory.max_sequences, int(self._max_running)) - len(self.running)
        queue = [sequence for sequence in self._queue() if sequence not in passed] if free > 0 else []
        large: list[Sequence] = []
        for index, sequence in enumerate(queue):
            allocation = self.caches.allocation(sequence, min(free, len(queue) - index) - 1)
            if allocation is CacheAllocation.LATER:
                large.append(sequence)
                if _is_next(sequence) or len(large) > MAX_OVERTAKEN:
                    return False  # if others went on taking the memory that becomes free, it might wait for ever
                continue
            try:
                if self.caches.allocate(sequence, in_file=allocation is CacheAllocation.FILE):
                    overtaken = large[0] if large else next(other for other in self.waiting if other in queue)
                    overtaken.overtaken += overtaken is not sequence
                    self.resume(sequence)
                    return True
            except Exception as error:  # such as a lack of memory: of this sequence, and of no other one
                self.finish(sequence, error)
            passed.append(sequence)
        return False

    def _queue(self) -> list[Sequence]:
        """The waiting sequences whose key may run more of them, in the order in which they are admitted."""
        waiting, running, most = self.waiting, _by_owner(self.running), self._limits.running_of_key
        first = min((sequence.request.priority for sequence in waiting), default=0)

        def order(sequence: Sequence) -> tuple[int, bool, bool, int]:
            is_aged = sequence.overtaken >= MAX_OVERTAKEN
            priority = first if is_aged else sequence.request.priority
            is_new = sequence.status is not SequenceStatus.PREEMPTED
            return priority, is_new, not is_aged, running[sequence.request.owner]

        able = (s for s in waiting if None in (most, s.request.owner) or running[s.request.owner] < (most or 0))
        return sorted(able, key=order)

    def resume(self, sequence: Sequence) -> None:
        """Move a waiting sequence, which may have been preempted, to the running ones."""
        lookahead = None
        sequence.is_divisible = not self._limits.throughput and self._runner.packs and self.caches.continues(sequence)
        if self._drafts is not None:
            lookahead = self._drafts.begin(sequence)
        sequence.start(self._runner.coroutines, self.caches.prompt_chunk(sequence), lookahead)
        with self._change:
            self._waiting.remove(sequence)
            bisect.insort(self.running, sequence, key=lambda other: other.request.priority)
            sequence.status = SequenceStatus.RUNNING

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence to the front of the queue, and swap out its KV cache."""
        cache = self.caches.resumable(sequence)
        sequence.stop(self._runner.coroutines)
        self.caches.swap_out(sequence, cache)
        self.totals.preempted += 1
        with self._change:
            self.running.remove(sequence)
            self._waiting.appendleft(sequence)
            sequence.status = SequenceStatus.PREEMPTED

    def finish(self, sequence: Sequence, how: BaseException | FinishReason) -> None:
        """Remove a sequence, report its end, and keep its KV cache as a prefix cache."""
        sequence.stop(self._runner.coroutines)
        with self._change:
            (self.running if sequence.status is SequenceStatus.RUNNING else self._waiting).remove(sequence)
            sequence.status = SequenceStatus.FINISHED
        self.caches.drop(sequence)
        # before the end is reported: a client that then asks for the totals finds its request
        reason = FAILED if isinstance(how, BaseException) else str(sequence.finish_reason or how)
        self.totals.ended[reason] = self.totals.ended.get(reason, 0) + 1
        self.totals.prompt_tokens += len(sequence.request.prompt)
        self.totals.kept_tokens += sequence.num_cached_tokens
        self.totals.forced_tokens += sequence.grammar.saved if sequence.grammar is not None else 0
        if isinstance(how, BaseException):
            if isinstance(how, Exception):
                logger.info("a request has failed", exc_info=how)
            sequence.fail(how if isinstance(how, Exception) else BatchError("The server has stopped."))
            sequence.cache = None  # the caller may keep the sequence
            return
        try:
            finished = sequence.finish(how)
        except Exception as error:  # from the tokenizer
            sequence.fail(error)
        else:
            self._recent_seconds = 0.8 * self._recent_seconds + 0.2 * finished.seconds
            self.caches.keep(sequence)

    def end(self, how: BaseException | FinishReason) -> None:
        """Finish all sequences, restore the model, and close the files."""
        self.has_failed = isinstance(how, BaseException)
        until = 0.0 if self.has_failed or self._closing is None else self._closing
        self.close(0.0)
        for sequence in (*self.running, *self.waiting):
            try:
                self.finish(sequence, how)
            except Exception as error:  # of this sequence: those after it need their end, too
                logger.exception("a request could not be finished")
                sequence.fail(error)
        self._runner.coroutines.close()
        if self._drafts is not None:
            self._drafts.close()
        self.caches.close(until)
