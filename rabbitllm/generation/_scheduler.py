"""Decides which sequences compute in the next pass, are admitted, or are preempted, and keeps them in two queues.

    order      first come, first served; preempted sequences come first
    a pass     every sequence in decode, and as many prompt tokens as keep the pass short (chunked prefill)
    memory     a sequence is admitted if the running ones leave room for its KV cache and some more tokens;
               if the caches exceed the limit afterwards, the sequence admitted last is preempted

    waiting ── admitted ── running ── finished
       └────── preempted ─────┘         its tokens are kept; its KV cache is swapped out or dropped

Any thread may submit a request. Only the batch's thread moves sequences, so it may read `running` at any time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import abc, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rabbitllm.base.forks import own_lock
from rabbitllm.base.terminal import size
from rabbitllm.engine.devices import OutOfDeviceMemory
from rabbitllm.errors import BatchError, BusyError, ClosedError, OptionError
from rabbitllm.generation._batch_drafts import BatchDrafts
from rabbitllm.generation._coroutines import Coroutine, copy_of
from rabbitllm.generation._model_runner import ModelRunner
from rabbitllm.generation._proposals import NGRAM, Draft
from rabbitllm.generation._sequence import Sequence, SequenceStatus
from rabbitllm.generation.cache_manager import CacheAllocation, CacheManager
from rabbitllm.generation.draft import prepare_draft
from rabbitllm.generation.kv_cache import can_go_back, keeps
from rabbitllm.generation.request import MEDIA_BYTES, BatchStats, FinishReason, Limits

if TYPE_CHECKING:
    from rabbitllm.engine.placement import Placement
    from rabbitllm.engine.streamed_model import StreamedModel

logger = logging.getLogger(__name__)

FAILED = "failed"
"""Key in `BatchStats.ended` of requests that raised an error; the other keys are the values of `FinishReason`."""
MANY_TOKENS = 64
"""The time of a pass with fewer tokens counts as the time to stream the weights."""
FIRST_TOKENS = 1024
"""Prompt tokens in a pass before their cost is measured."""
PASSES_FOR_ONE_MORE = 64
"""Passes without an out-of-memory error after which one sequence more may run, if there was such an error."""
MAX_TOKENS = 8192
"""The most prompt tokens in a pass: their activations need memory too."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The measured time of passes, and from it the budget of prompt tokens: as many as double the time of a pass.

    A pass over streamed weights has a minimum time for any number of tokens; up to the budget, tokens cost little.

    Attributes:
        least: seconds of the shortest recent pass; None before the first.
        each: seconds that a token adds; None until a pass with many tokens was measured.
    """

    least: float | None = None
    each: float | None = None

    def after(self, tokens: int, seconds: float) -> TokenBudget:
        """The budget updated by one more pass."""
        if tokens >= MANY_TOKENS and self.least is not None:
            rate = max(seconds - self.least, 0.0) / tokens
            return TokenBudget(self.least, rate if self.each is None else 0.5 * (self.each + rate))
        # the minimum rises slowly, so that a short pass long ago does not count for ever
        return TokenBudget(seconds if self.least is None else min(seconds, 1.05 * self.least), self.each)

    def prompt_tokens(self, chunk: int) -> int:
        """Budget of prompt tokens in the next pass; at least a chunk.

        Args:
            chunk: tokens of one prompt in a pass.
        """
        if self.least is None or self.each is None:
            return max(chunk, FIRST_TOKENS)
        return min(max(chunk, int(self.least / max(self.each, 1e-9))), MAX_TOKENS)


def moves_weights(placement: Placement) -> bool:
    """Whether each pass moves weights, the same ones for any number of rows.

    Experts that are streamed one by one are others for each row.
    """
    moved = placement.moved_bytes
    return moved > 0 and all(pool.kept >= pool.stored for pool in placement.pools)


def draft_of(
    model: StreamedModel, draft: StreamedModel | Literal["auto", "mtp", "ngram", "none"], *, exact: bool
) -> Draft | None:
    """The draft of a batch, prepared; "auto" and "ngram" are none where there are no drafts.

    Args:
        model: the model.
        draft: see `Limits`.
        exact: whether each sequence is computed by itself.

    Raises:
        OptionError: the draft does not suit the model, or the model's KV caches do not go on.
    """
    can = keeps(model) and not exact
    if draft == "auto" or draft == NGRAM:
        is_wanted = draft == NGRAM or moves_weights(model.placement)
        return NGRAM if is_wanted and can and can_go_back(model) else None
    if draft == "none":
        return None
    if not can:
        raise OptionError(
            f"This draft cannot be used for many requests of a {type(model).__name__}: it needs KV caches that go on "
            "with further tokens, and passes of all requests together, without --exact.",
            "Leave the draft out, or use --draft ngram.",
        )
    prepare_draft(model, draft)
    return draft


def within_budget(tokens: abc.Sequence[int], budget: int) -> list[int]:
    """Indices of the sequences that compute in the next pass, in ascending order.

    Args:
        tokens: number of tokens that each sequence brings; one for a sequence in decode.
        budget: maximum prompt tokens in a pass; the first prompt is computed in any case.
    """
    chosen = []
    remaining = budget
    for index, count in enumerate(tokens):
        if count <= 1:
            chosen.append(index)
        elif remaining == budget or count <= remaining:
            chosen.append(index)
            remaining -= count
    return chosen


def retry_after(waiting: int, max_running: int, seconds: float) -> float:
    """Estimated seconds until a new request can be accepted, from 1 to 600.

    Args:
        waiting: number of waiting requests.
        max_running: maximum number of running requests.
        seconds: recent duration of a request.
    """
    return min(max(1.0, seconds * max(waiting, 1) / max(max_running, 1)), 600.0)


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
        running: sequences in the order in which they were admitted.
        caches: their KV caches.
        totals: totals since the start; other fields have their defaults.
    """

    def __init__(self, model: StreamedModel, limits: Limits) -> None:
        draft = draft_of(model, limits.draft, exact=limits.exact)
        self.running: list[Sequence] = []
        self.caches = CacheManager(model, limits, self.running)
        self.totals = BatchStats()
        self._runner = ModelRunner(model, exact=limits.exact, max_rows=self.caches.memory.rows, file=self.caches.file)
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._budget = TokenBudget()
        self._max_running = float(limits.running)  # sequences for which devices had enough memory recently
        self._recent_seconds = 1.0  # moving average of the seconds that a request took
        looks_ahead = draft is not None or (keeps(model) and not limits.exact and can_go_back(model))
        self._drafts = BatchDrafts(model, draft, self.totals) if looks_ahead else None
        self._closing: float | None = None  # time at which unfinished requests are cancelled
        self._pauses = 0
        self._change = own_lock(threading.Condition())

    # in any thread ---------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Append a sequence to the queue.

        Raises:
            BusyError: the request queue is full.
            ClosedError: the queue is closed.
        """
        with self._change:
            if self._closing is not None:
                raise ClosedError("The server is shutting down.", "Start the server again.")
            free = max(self._limits.running - len(self.running), 0)
            if len(self._waiting) >= self._limits.waiting + free:  # requests with a free slot begin at once
                raise BusyError(f"The request queue is full ({len(self._waiting):,} waiting).", *self._try_again())
            self._check_media(sequence)
            self._waiting.append(sequence)
            self._change.notify_all()

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
        ready = [(sequence, count) for sequence in self.running if (count := sequence.num_new_tokens)]
        budget = self.caches.memory.max_tokens
        if not self._limits.throughput:
            budget = min(self._budget.prompt_tokens(self.caches.chunk), budget)
        chosen = [ready[index] for index in within_budget([count for _, count in ready], budget)]
        sequences, tokens = tuple(sequence for sequence, _ in chosen), sum(count for _, count in chosen)
        if self._drafts is not None:
            rows = self.caches.memory.logits - len(sequences)
            pays = len(sequences) == tokens or tokens < MANY_TOKENS  # not beside long prompts
            tokens += sum(sequence.lookahead.lacks for sequence in sequences if sequence.lookahead is not None)
            tokens += self._drafts.propose(self.caches.drafts(sequences, tokens, rows, pays=pays))
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
        """Start waiting sequences in their order, as far as memory allows."""
        waiting = self.waiting
        if not waiting:
            self.caches.from_file()
        for index, sequence in enumerate(waiting):
            free = min(self.caches.memory.max_sequences, int(self._max_running)) - len(self.running)
            if free <= 0:
                return
            allocation = self.caches.allocation(sequence, min(free, len(waiting) - index) - 1)
            if allocation is CacheAllocation.LATER:
                return  # if smaller requests were admitted first, it might wait for ever
            try:
                if self.caches.allocate(sequence, in_file=allocation is CacheAllocation.FILE):
                    self.resume(sequence)
            except Exception as error:  # such as a lack of memory: of this sequence, and of no other one
                self.finish(sequence, error)

    def resume(self, sequence: Sequence) -> None:
        """Move a waiting sequence, which may have been preempted, to the running ones."""
        lookahead = None
        if self._drafts is not None and sequence.cache is not None and sequence.request.media is None:
            lookahead = self._drafts.begin(sequence)
        sequence.start(self._runner.coroutines, self.caches.prompt_chunk(sequence), lookahead)
        with self._change:
            self._waiting.remove(sequence)
            self.running.append(sequence)
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
        until = 0.0 if isinstance(how, BaseException) or self._closing is None else self._closing
        self.close(0.0)
        for sequence in (*self.running, *self.waiting):
            self.finish(sequence, how)
        self._runner.coroutines.close()
        if self._drafts is not None:
            self._drafts.close()
        self.caches.close(until)
