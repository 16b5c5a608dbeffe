"""Continuous batching: a thread that owns the model, and a queue (`scheduler.py`) from which requests join its passes.

`submit` may be called from any thread. Callbacks run in the batch's thread, so they must not block.

    waiting ── begins at a pass ── runs ── Finished | Failed
       └─────────── is preempted ─────┘      its tokens are kept; its KV cache is swapped out or dropped
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from rabbitllm.base.forks import ForkGuard
from rabbitllm.base.terminal import size
from rabbitllm.errors import BatchError, OptionError
from rabbitllm.generation.cache_manager import Begins, TextCaches
from rabbitllm.generation.joint_pass import JointPasses
from rabbitllm.generation.memory import CacheMemory
from rabbitllm.generation.request import BatchStats, Event, FinishReason, Limits, Request, check_generates, context_of
from rabbitllm.generation.scheduler import AdmissionQueue, TokenBudget, take_part, too_many
from rabbitllm.generation.sequence import Generation, RequestHandle


def check_answerable(request: Request, model: Any, memory: CacheMemory) -> None:
    """Check that a request can be answered at all.

    Args:
        request: the request.
        model: the causal model.
        memory: the memory limit of KV caches.

    Raises:
        OptionError: the prompt is empty or no token is to be generated; the request is longer than the model's
            context; the prompt has a token that is not in the vocabulary; or its KV cache needs more memory than
            there is.
    """
    tokens = len(request.prompt)
    if not tokens or request.max_new_tokens < 1:
        raise OptionError("An empty prompt, or no token to generate.", "Give at least one of each.")
    known = model.get_input_embeddings().num_embeddings
    if not all(0 <= token < known for token in request.prompt):
        raise OptionError(f"The prompt has a token that the model does not know; it has {known:,}.")
    context = context_of(model)
    if context is not None and tokens + request.max_new_tokens > context:
        raise OptionError(
            f"The prompt has {tokens:,} tokens and {request.max_new_tokens:,} may follow; the model's context is "
            f"{context:,}.",
            "Shorten the prompt, or ask for fewer tokens.",
        )
    needed = memory.bytes_for(tokens + 1)
    if needed > memory.limit:
        raise OptionError(
            f"The prompt's KV cache needs {size(needed)}; {size(memory.limit)} may be used.",
            "Shorten the prompt, or give the server more memory for it.",
        )


__all__ = ["FAILED", "Batch", "Limits", "RequestHandle"]

logger = logging.getLogger(__name__)

FAILED = "failed"
"""Key in `BatchStats.ended` of requests that raised an error; the other keys are the values of `FinishReason`."""

_DEFAULT = Limits()


@dataclass(slots=True)
class _Sums:
    """Totals since the start."""

    passes: int = 0
    prompt_tokens: int = 0
    kept_tokens: int = 0
    new_tokens: int = 0
    pass_seconds: float = 0.0
    preempted: int = 0
    ended: Counter[str] = field(default_factory=Counter)


class Batch:
    """Answers requests on one model, all in the same passes.

    Args:
        model: as `AutoModel.from_pretrained` returns it. Until the batch is closed, other threads may call it only
            for whole passes, which alternate with those of the batch.
        limits: see `Limits`.

    Attributes:
        error: the error that ended the batch's thread early; None otherwise.

    Raises:
        OptionError: the model is not a causal language model or has no tokenizer, or no memory is left.
    """

    def __init__(self, model: Any, limits: Limits = _DEFAULT) -> None:
        check_generates(model)
        if model.config.is_encoder_decoder:
            raise OptionError("The model has an encoder; requests are texts to go on with.", "Use a causal model.")
        if model.tokenizer is None:
            raise OptionError(
                "The model came without a tokenizer.", "Put the tokenizer's files into the folder of its config.json."
            )
        self.error: BaseException | None = None
        self._model = model
        self._limits = limits
        self._caches = TextCaches(model, limits)
        self._pace = TokenBudget()
        self._admission = AdmissionQueue(limits.running, limits.waiting)
        self._sums = _Sums()
        self._waited_before = model.streamer.waited()
        self._passes = JointPasses(model, exact=limits.exact, max_rows=self._caches.memory.rows, file=self._caches.file)
        self._home = ForkGuard()
        self._thread = threading.Thread(target=self._work, name="rabbitllm-batch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def submit(self, request: Request, notify: Callable[[Event], None]) -> RequestHandle:
        """Append a request to the queue.

        Args:
            request: the request.
            notify: called with each event, in the batch's thread; an exception from it cancels the request.

        Raises:
            BusyError: the request queue is full.
            ClosedError: the batch accepts no more requests.
            OptionError: the request can never be answered; see `check_answerable`.
            ForkedError: this process was forked from the one that made the batch.
        """
        self._home.refuse("The batch", "Submit requests in that process, or make a batch in this one.")
        check_answerable(request, self._model, self._caches.memory)
        now = time.monotonic()
        handle = RequestHandle(self._admission.wake, Generation(self._model, request, lambda event: told(event), now))
        if request.seconds is not None:
            handle.deadline = now + request.seconds

        def told(event: Event) -> None:
            try:
                notify(event)
            except Exception:
                logger.debug("the client is gone", exc_info=True)
                handle.is_cancelled = True

        self._admission.come_in(handle)
        return handle

    def held(self) -> AbstractContextManager[None]:
        """Start no pass while the context is open: requests submitted in it share a pass."""
        return self._admission.held()

    def close(self, seconds: float | None = None) -> None:
        """Accept no more requests, finish the running and waiting ones, and end the thread; blocks until done.

        Args:
            seconds: time after which unfinished requests are cancelled; None for no limit, 0 for at once.
        """
        self._admission.close(seconds)
        self._thread.join()

    @property
    def facts(self) -> BatchStats:
        """Totals so far and the current state."""
        disk, copies = self._model.streamer.waited()
        disk_before, copies_before = self._waited_before
        sums = self._sums
        with self._admission.still():
            return BatchStats(
                running=len(self._admission.running),
                waiting=len(self._admission.waiting),
                most_running=self._limits.running,
                most_waiting=self._limits.waiting,
                cache_bytes=self._caches.nbytes(self._admission.running),
                cache_limit_bytes=self._caches.memory.limit,
                passes=sums.passes,
                prompt_tokens=sums.prompt_tokens,
                kept_tokens=sums.kept_tokens,
                new_tokens=sums.new_tokens,
                pass_seconds=sums.pass_seconds,
                disk_seconds=disk - disk_before,
                copy_seconds=copies - copies_before,
                streamed_bytes=sums.passes * self._model.placement.streamed_bytes,
                ended=dict(sums.ended),
                preempted=sums.preempted,
                resumed=self._caches.resumed,
                aside_bytes=self._caches.aside.nbytes,
                aside_limit_bytes=self._caches.aside.limit,
                file_bytes=self._caches.file.nbytes if self._caches.file is not None else 0,
                file_read_bytes=self._caches.file.read if self._caches.file is not None else 0,
            )

    # in the batch's thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        # members leave their own no_grad in another order than they entered it, which would enable gradients again
        torch.set_grad_enabled(False)
        try:
            while self._admission.wait():
                self._drop_unwanted()
                self._give_places_back()
                self._begin()
                self._pass()
        except BaseException as error:
            logger.exception("the batch has ended before its time")
            self.error = error
        finally:
            self._admission.close(0.0)
            for handle in (*self._admission.running, *self._admission.waiting):
                self._over(handle, self.error or FinishReason.CANCELLED)
            self._passes.close()
            self._caches.close()

    def _drop_unwanted(self) -> None:
        for handle, why in self._admission.unwanted():
            self._over(handle, why)

    def _give_places_back(self) -> None:
        """Preempt requests whose KV caches exceed the memory limit."""
        memory = self._caches.memory
        self._caches.shrink(self._admission.running)
        near = self._caches.near(self._admission.running)
        filed = [handle for handle in self._admission.running if handle not in near]
        count = too_many([handle.text for handle in near], memory.bytes_for, self._caches.left_to_near(filed))
        for handle in reversed(near[len(near) - count :]):
            if not self._caches.to_file(handle, self._admission.running):
                self._give_place_back(handle)
        near = self._caches.near(self._admission.running)
        if len(self._admission.running) == 1 and near and memory.now([near[0].text]) > memory.limit:
            self._over(self._admission.running[0], FinishReason.LENGTH)  # no other request is left to preempt

    def _give_place_back(self, handle: RequestHandle) -> None:
        cache = self._caches.whole_cache(handle)
        self._take_out(handle)
        self._caches.drop(handle)
        self._caches.set_aside(handle, cache, self._pace)
        self._sums.preempted += 1
        self._admission.make_way(handle)

    def _begin(self) -> None:
        """Start waiting requests in their order, as far as memory allows."""
        waiting = self._admission.waiting
        if not waiting:
            self._caches.from_file(self._admission.running)
        for number, handle in enumerate(waiting):
            places = self._caches.memory.max_texts - len(self._admission.running)
            if places <= 0:
                return
            where = self._caches.where(handle, self._admission.running, min(places, len(waiting) - number) - 1)
            if where is Begins.LATER:
                return  # admitting smaller requests behind it would keep it waiting for ever
            if self._caches.give(handle, self._admission.running, in_file=where is Begins.FILED):
                self._start(handle)
                self._admission.begin(handle)

    def _start(self, handle: RequestHandle) -> None:
        generation, chunk = handle.generation, self._caches.prompt_chunk
        handle.member = self._passes.add(lambda: generation.run(chunk), generation.draw)

    def _pass(self) -> None:
        """Run one pass for the requests whose turn it is, then remove those that have ended."""
        members = [handle.member for handle in self._admission.running if handle.member is not None]
        there = [member for member in members if member.is_outside]
        if there:
            start = time.perf_counter()
            made = sum(len(handle.generation.tokens) for handle in self._admission.running)
            tokens = [member.tokens for member in there]
            most = self._caches.memory.max_tokens
            if not self._limits.in_bulk:
                most = min(self._pace.prompt_tokens(self._caches.chunk), most)
            chosen = take_part(tokens, most)
            self._passes.run([there[place] for place in chosen])
            seconds = time.perf_counter() - start
            self._pace = self._pace.after(sum(tokens[place] for place in chosen), seconds)
            self._sums.passes += 1
            self._sums.pass_seconds += seconds
            self._sums.new_tokens += sum(len(handle.generation.tokens) for handle in self._admission.running) - made
            self._caches.measure(self._admission.running)
            for handle in reversed(self._caches.lost(self._admission.running)):
                if handle.member is not None and not handle.member.dead:
                    self._give_place_back(handle)
        over = [handle for handle in self._admission.running if handle.member is None or handle.member.dead]
        for handle in over:
            error = handle.member.error if handle.member is not None else None
            self._over(handle, error or handle.generation.ended or FinishReason.LENGTH)

    def _over(self, handle: RequestHandle, how: BaseException | FinishReason) -> None:
        """Remove a request, report its end, and keep its KV cache as a prefix cache."""
        self._take_out(handle)
        self._admission.leave(handle)
        self._caches.drop(handle)
        generation = handle.generation
        if isinstance(how, BaseException):
            if isinstance(how, Exception):
                logger.info("a request has failed", exc_info=how)
            generation.fail(how if isinstance(how, Exception) else BatchError("The server has ended."))
            self._sums.ended[FAILED] += 1
        else:
            finished = generation.end(how)
            self._sums.ended[str(finished.ended)] += 1
            self._admission.took(finished.seconds)
            self._caches.keep(handle, self._admission.running)
        self._sums.prompt_tokens += len(generation.request.prompt)
        self._sums.kept_tokens += generation.kept_tokens

    def _take_out(self, handle: RequestHandle) -> None:
        if handle.member is not None and not handle.member.dead:
            self._passes.take_out(handle.member)
        handle.member = None  # its stack holds much memory, and the caller may keep the handle
