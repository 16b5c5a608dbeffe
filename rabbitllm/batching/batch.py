"""Generations that come and go while passes go on: the thread that owns the model, and the door to it.

`submit` may be called from any thread, and events are handed out in the batch's own: who takes them must not wait.

    waiting ── begins at a pass ── runs ── Finished | Failed
       └────── gives its place back ──┘      what it has generated stays, its keys and values are computed anew
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from rabbitllm.ask.answer import context_of
from rabbitllm.batching.beside_weights import tokens_of_a_pass
from rabbitllm.batching.cache_cost import CacheCost, cost_by_cache, cost_by_config
from rabbitllm.batching.generation import Generation
from rabbitllm.batching.joint_pass import JointPasses, Member
from rabbitllm.batching.picking import Pace, Text, fits, retry_after, take_part, too_many
from rabbitllm.batching.prefixes import WORTH_TOKENS, Kept, beginning, copied, usable
from rabbitllm.batching.request import Ended, Event, Facts, Request
from rabbitllm.chat.kept_cache import keeps
from rabbitllm.errors import BatchError, BusyError, ClosedError, OptionError

logger = logging.getLogger(__name__)

FAILED = "failed"
"""Beside the values of `Ended`, how a request ends."""
LEAST_CACHE_TOKENS = 64
"""A server whose keys and values have room for less would refuse nearly everything."""
WORTH_WAITING = 64
"""A beginning of so many tokens that another request computes just now is waited for, rather than computed twice."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch takes on.

    Attributes:
        running: requests in one pass, at most.
        waiting: requests that wait for a place, at most, beside those for whom there is one at the next pass.
        cache_bytes: keys and values of all requests, and those kept for later prompts; None for half of the
            memory that is free when the batch begins, on the devices that compute.
        chunk: tokens of one prompt in a pass, so that a long one does not keep the others waiting; of several
            together it may be more, see `picking.Pace`.
        exact: compute each request's rows by themselves: its tokens are then those that it gets alone in any dtype,
            at the price of speed.
    """

    running: int = 64
    waiting: int = 256
    cache_bytes: int | None = None
    chunk: int = 512
    exact: bool = False

    def __post_init__(self) -> None:
        """
        Raises:
            OptionError: a number below one.
        """
        for name in ("running", "waiting", "cache_bytes", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value}, which is none at all.", "Give at least 1.")


@dataclass(eq=False, slots=True)
class Ticket:
    """A request that was taken on."""

    _wake: Callable[[], None]
    _generation: Generation
    _member: Member | None = None
    _cancelled: bool = False
    _deadline: float | None = None

    def cancel(self) -> None:
        """End it with the pass that is going on; may be called from any thread, any number of times."""
        self._cancelled = True
        self._wake()


@dataclass(slots=True)
class _Sums:
    """What has been so far."""

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
        model: as `AutoModel.from_pretrained` returns it; nobody else may call it until the batch is closed, but for
            whole passes from other threads, which take turns with those of the batch.
        limits: see `Limits`.

    Attributes:
        error: what ended the batch's thread before its time; None as long as all is well.

    Raises:
        OptionError: the model is none that goes on with a text, or has no tokenizer; or there is no memory left.
    """

    def __init__(self, model: Any, limits: Limits = Limits()) -> None:
        if model.config.is_encoder_decoder:
            raise OptionError("The model has an encoder; requests are texts to go on with.", "Use a causal model.")
        if model.tokenizer is None:
            raise OptionError(
                "The model came without a tokenizer.", "Put the tokenizer's files beside its config.json."
            )
        self.error: BaseException | None = None
        self._model = model
        self._limits = limits
        self._keeps = keeps(model)
        self._config = model.config.get_text_config(decoder=True)
        self._cost: CacheCost = cost_by_config(self._config, model.dtype)
        self._cost_is_measured = False
        free = _free_memory(model)
        self._cache_limit = limits.cache_bytes if limits.cache_bytes is not None else free // 2
        if limits.cache_bytes is None and self._cache_limit < self._cost.bytes_for(LEAST_CACHE_TOKENS):
            raise OptionError(
                f"Beside the weights {free:,} bytes are free, which is too little to answer anybody.",
                "Give the weights less (--max-memory), or the machine fewer other things to do.",
            )
        left = max(free - self._cache_limit, 0)  # both are there at once
        self._most_tokens = tokens_of_a_pass(self._config, model.dtype.itemsize, left)
        self._chunk = min(limits.chunk, self._most_tokens)
        self._kept = Kept()
        self._pace = Pace()
        self._waiting: deque[Ticket] = deque()
        self._running: list[Ticket] = []
        self._sums = _Sums()
        self._waited_before = model.streamer.waited()
        self._lately = 1.0  # seconds that a request took
        self._closing: float | None = None  # when what is not finished is cancelled
        self._change = threading.Condition()
        self._passes = JointPasses(model, exact=limits.exact)
        self._thread = threading.Thread(target=self._work, name="rabbitllm-batch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def submit(self, request: Request, notify: Callable[[Event], None]) -> Ticket:
        """Take a request on.

        Args:
            request: what is asked for.
            notify: is given each event as it happens, in the batch's thread; what it raises cancels the request.

        Raises:
            BusyError: as many wait as may.
            ClosedError: the batch takes on nothing more.
            OptionError: no pass could ever answer it: its prompt is longer than the model's context, or needs more
                memory for keys and values than there is.
        """
        self._check(request)
        now = time.monotonic()
        ticket = Ticket(self._wake, Generation(self._model, request, lambda event: told(event), now))
        if request.seconds is not None:
            ticket._deadline = now + request.seconds

        def told(event: Event) -> None:
            try:
                notify(event)
            except Exception:
                logger.debug("who asked is gone", exc_info=True)
                ticket._cancelled = True

        with self._change:
            if self.error is not None or self._closing is not None:
                raise ClosedError("No more requests are taken on.", "Start the server again.")
            free = max(self._limits.running - len(self._running), 0)
            if len(self._waiting) >= self._limits.waiting + free:  # those for whom there is a place begin at once
                after = retry_after(len(self._waiting), self._limits.running, self._lately)
                raise BusyError(
                    f"{len(self._waiting):,} requests wait already, as many as may.",
                    f"Try again in {after:.0f} s.",
                    after,
                )
            self._waiting.append(ticket)
            self._change.notify_all()
        return ticket

    def close(self, seconds: float | None = None) -> None:
        """Take on nothing more, finish what runs and waits, and end; returns when that is done.

        Args:
            seconds: after so long, what is not finished is cancelled; None for no limit, 0 for at once.
        """
        with self._change:
            until = time.monotonic() + seconds if seconds is not None else float("inf")
            self._closing = until if self._closing is None else min(until, self._closing)
            self._change.notify_all()
        self._thread.join()

    @property
    def facts(self) -> Facts:
        """What it has done so far, and does now."""
        disk, copies = self._model.streamer.waited()
        disk_before, copies_before = self._waited_before
        sums = self._sums
        with self._change:
            return Facts(
                running=len(self._running),
                waiting=len(self._waiting),
                most_running=self._limits.running,
                most_waiting=self._limits.waiting,
                cache_bytes=self._kept.nbytes + sum(self._bytes_of(ticket) for ticket in self._running),
                cache_limit_bytes=self._cache_limit,
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
            )

    # in any thread ---------------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        tokens = len(request.prompt)
        if not tokens or request.max_new_tokens < 1:
            raise OptionError("An empty prompt, or no token to generate.", "Give at least one of each.")
        size = self._model.get_input_embeddings().num_embeddings
        if not all(0 <= token < size for token in request.prompt):
            raise OptionError(f"The prompt has a token that the model does not know; it has {size:,}.")
        context = context_of(self._model)
        if context is not None and tokens + request.max_new_tokens > context:
            raise OptionError(
                f"The prompt has {tokens:,} tokens and {request.max_new_tokens:,} may follow; the model's context is "
                f"{context:,}.",
                "Shorten the prompt, or ask for fewer tokens.",
            )
        needed = self._cost.bytes_for(tokens + 1)
        if needed > self._cache_limit:
            raise OptionError(
                f"The prompt's keys and values need {needed:,} bytes; {self._cache_limit:,} may be used.",
                "Shorten the prompt, or give the server more memory for them.",
            )

    def _wake(self) -> None:
        with self._change:
            self._change.notify_all()

    # in the batch's thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        # members leave their own no_grad in another order than they came in, which would switch gradients on again
        torch.set_grad_enabled(False)
        try:
            while self._wait():
                self._drop_unwanted()
                self._give_places_back()
                self._begin()
                self._pass()
        except BaseException as error:
            logger.exception("the batch has ended before its time")
            self.error = error
        finally:
            with self._change:
                self._closing = 0.0
                left = [*self._running, *self._waiting]
            for ticket in left:
                self._over(ticket, self.error or Ended.CANCELLED)
            self._passes.close()

    def _wait(self) -> bool:
        """Until there is something to do; False when the end has come."""
        with self._change:
            while not self._running and not self._waiting:
                if self._closing is not None:
                    return False
                self._change.wait()
        return True

    def _drop_unwanted(self) -> None:
        now = time.monotonic()
        with self._change:
            closing = self._closing is not None and now >= self._closing
            unwanted = [
                (ticket, Ended.CANCELLED if ticket._cancelled or closing else Ended.TIMEOUT)
                for ticket in (*self._running, *self._waiting)
                if ticket._cancelled or closing or (ticket._deadline is not None and now >= ticket._deadline)
            ]
        for ticket, why in unwanted:
            self._over(ticket, why)

    def _give_places_back(self) -> None:
        """Where keys and values outgrow the limit."""
        texts = [_text(ticket) for ticket in self._running]
        needed = sum(self._cost.bytes_for(text.tokens + 1) for text in texts)
        self._kept.shrink(self._cache_limit - needed)
        count = too_many(texts, self._cost.bytes_for, self._cache_limit)
        for ticket in reversed(self._running[len(self._running) - count :]):
            self._take_out(ticket)
            ticket._generation.cache = None
            self._sums.preempted += 1
            with self._change:
                self._running.remove(ticket)
                self._waiting.appendleft(ticket)
        if len(self._running) == 1 and self._cost.bytes_for(texts[0].tokens + 1) > self._cache_limit:
            self._over(self._running[0], Ended.LENGTH)  # nobody else's place would help

    def _begin(self) -> None:
        """Let those begin for whom there is room, in their order."""
        with self._change:
            waiting = list(self._waiting)
        for ticket in waiting:
            if len(self._running) >= self._limits.running:
                return
            texts = [_text(one) for one in self._running]
            if not fits(_text(ticket), texts, self._cost.bytes_for, self._cache_limit):
                return  # those behind it may be smaller, but would keep it waiting for ever
            if self._start(ticket):
                with self._change:
                    self._waiting.remove(ticket)
                    self._running.append(ticket)

    def _start(self, ticket: Ticket) -> bool:
        """Let a request begin, unless another one just computes what it begins with too."""
        generation = ticket._generation
        if self._keeps and not self._limits.exact:
            ids = generation.ids
            best, source = 0, None
            for known, cache in self._sources():
                if (tokens := usable(ids, known, cache)) > best:
                    best, source = tokens, (known, cache)
            worth = max(best + WORTH_TOKENS, WORTH_WAITING)
            if any(beginning(ids, one._generation.request.prompt) >= worth for one in self._prefilling()):
                return False
            if source is not None:
                known, cache = source
                generation.cache = copied(cache, best)
                self._kept.used(known)
            else:
                generation.cache = DynamicCache(config=self._config)
            generation.kept_tokens = max(generation.kept_tokens, min(best, len(generation.request.prompt)))
            self._kept.shrink(
                self._cache_limit - sum(self._cost.bytes_for(_text(one).soon) for one in (*self._running, ticket))
            )
        chunk = self._chunk if self._keeps and not self._limits.exact else None
        ticket._member = self._passes.add(lambda: generation.run(chunk), generation.draw)
        return True

    def _sources(self) -> Iterable[tuple[Any, Any]]:
        """Ids and caches that hold their keys and values."""
        yield from self._kept.texts()
        for ticket in self._running:
            cache = ticket._generation.cache
            if cache is not None and (tokens := cache.get_seq_length()):
                yield ticket._generation.ids[:tokens], cache

    def _prefilling(self) -> Iterable[Ticket]:
        for ticket in self._running:
            cache = ticket._generation.cache
            if cache is not None and cache.get_seq_length() < len(ticket._generation.request.prompt):
                yield ticket

    def _pass(self) -> None:
        """One pass for those whose turn it is; then see who has ended."""
        members = [ticket._member for ticket in self._running if ticket._member is not None]
        there = [member for member in members if member.is_outside]
        if there:
            start = time.perf_counter()
            made = sum(len(ticket._generation.tokens) for ticket in self._running)
            tokens = [member.tokens for member in there]
            chosen = take_part(tokens, min(self._pace.prompt_tokens(self._chunk), self._most_tokens))
            self._passes.run([there[place] for place in chosen])
            seconds = time.perf_counter() - start
            self._pace = self._pace.after(sum(tokens[place] for place in chosen), seconds)
            self._sums.passes += 1
            self._sums.pass_seconds += seconds
            self._sums.new_tokens += sum(len(ticket._generation.tokens) for ticket in self._running) - made
            self._measure()
        over = [ticket for ticket in self._running if ticket._member is None or ticket._member.dead]
        for ticket in over:
            error = ticket._member.error if ticket._member is not None else None
            self._over(ticket, error or ticket._generation.ended or Ended.LENGTH)

    def _over(self, ticket: Ticket, how: BaseException | Ended) -> None:
        """Free a request's place, say that it is over, and keep its cache."""
        self._take_out(ticket)
        with self._change:
            if ticket in self._running:
                self._running.remove(ticket)
            else:
                self._waiting.remove(ticket)
        generation = ticket._generation
        if isinstance(how, BaseException):
            if isinstance(how, Exception):
                logger.info("a request has failed", exc_info=how)
            generation.fail(how if isinstance(how, Exception) else BatchError("The server has ended."))
            self._sums.ended[FAILED] += 1
        else:
            finished = generation.end(how)
            self._sums.ended[str(finished.ended)] += 1
            self._lately = 0.8 * self._lately + 0.2 * finished.seconds
            self._keep(generation)
        self._sums.prompt_tokens += len(generation.request.prompt)
        self._sums.kept_tokens += generation.kept_tokens

    def _keep(self, generation: Generation) -> None:
        if generation.cache is None or not (tokens := generation.cache.get_seq_length()):
            return
        self._kept.put(generation.ids[:tokens], generation.cache)
        generation.cache = None
        self._kept.shrink(self._cache_limit - sum(self._bytes_of(ticket) for ticket in self._running))

    def _take_out(self, ticket: Ticket) -> None:
        if ticket._member is not None and not ticket._member.dead:
            self._passes.take_out(ticket._member)
        ticket._member = None  # its stack holds much, and who asked may hold the ticket

    def _measure(self) -> None:
        """Once there is a cache to measure, what tokens cost is known."""
        if self._cost_is_measured:
            return
        for ticket in self._running:
            cache = ticket._generation.cache
            if cache is not None and cache.get_seq_length() and (found := cost_by_cache(cache)) is not None:
                self._cost, self._cost_is_measured = found, True
                return

    def _bytes_of(self, ticket: Ticket) -> int:
        generation = ticket._generation
        # not of its tensors: another thread changes them meanwhile
        tokens = generation.cache.get_seq_length() if generation.cache is not None else len(generation.ids)
        return self._cost.bytes_for(tokens)


def _text(ticket: Ticket) -> Text:
    generation = ticket._generation
    return Text(len(generation.request.prompt) + len(generation.tokens), generation.room)


def _free_memory(model: Any) -> int:
    """Bytes on all devices together, beside the weights."""
    free: list[int] = [lane.device.free_bytes() for lane in model.streamer.lanes.values()]
    return len(free) * min(free)
