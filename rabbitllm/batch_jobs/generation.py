"""Items that ask for text, run through one batch: as many at a time as it admits, with the next ones ready.

Items are taken from an iterator as requests finish, so that only a few hundred lines are in memory, however long the
input is.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rabbitllm.batch_jobs.asking import Answered, PreparedItem, RequestBuilder, answer_of, error_line
from rabbitllm.batch_jobs.items import BatchAnswer, Item, JobLimits
from rabbitllm.batch_jobs.lines import MAX_ANSWERS
from rabbitllm.errors import BatchError, OptionError, RabbitLLMError
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.request import BatchStats, Delta, Event, Failed, Finished, FinishReason, TokenLogprob
from rabbitllm.generation.request import Limits as BatchLimits
from rabbitllm.server.api_error import BROKEN, APIError, bad

READY = 2
"""Factor of submitted to running requests: if all end at once, all can be replaced at once."""
WHOLE_PROMPT = 1 << 30
"""Tokens of a prompt in one pass. No client waits for a first token, so prompts are chunked only for lack of memory."""
MAX_REFUSED = 256
"""Limit of error lines that are collected before they are returned."""
_ENDS_ALL = (OSError, MemoryError, BatchError)
"""Errors that are not the fault of the request in which they occur."""

Watch = Callable[[Callable[[], BatchStats]], object]


class _Open:
    """An item whose requests have been submitted.

    Args:
        wanted: the prepared item.
        done: receives this object when all requests have ended.

    Attributes:
        count: number of requests.
        is_refused: whether one of them was refused; then the others are not waited for.
        error: error of one of them.
    """

    def __init__(self, wanted: PreparedItem, done: queue.SimpleQueue[_Open]) -> None:
        self.wanted = wanted
        self.error: Exception | None = None
        count = len(wanted.requests)
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._tokens: list[list[TokenLogprob]] = [[] for _ in range(count)]
        self._ends: list[Finished | None] = [None] * count
        self._left = count
        self._done = done
        self.count = count
        self.is_refused = False

    def taker(self, number: int) -> Callable[[Event], None]:
        """The callback for the events of one request."""
        return lambda event: self.told(number, event)

    def told(self, number: int, event: Event) -> None:
        """Handle an event of one request; runs in the batch's thread."""
        if isinstance(event, Delta):
            self._texts[number].append(self.wanted.text_of(event))
            if self.wanted.keeps_tokens:
                self._tokens[number] += event.tokens
            return
        if isinstance(event, Failed):
            self.error = event.error
        else:
            self._ends[number] = event
        self._left -= 1
        if not self._left and not self.is_refused:
            self._done.put(self)

    @property
    def is_cut(self) -> bool:
        """Whether the batch ended before the item was answered."""
        return any(end is not None and end.ended not in (FinishReason.STOP, FinishReason.LENGTH) for end in self._ends)

    def answer(self) -> BatchAnswer:
        """The answer to the item."""
        answered = [
            Answered("".join(texts), tuple(tokens), end)
            for texts, tokens, end in zip(self._texts, self._tokens, self._ends, strict=True)
            if end is not None
        ]
        return answer_of(self.wanted.item, self.wanted.answer(answered), answered)


def generated(
    model: Any, name: str, items: Iterator[Item], limits: JobLimits, watch: Watch = lambda facts: None
) -> Iterator[list[BatchAnswer]]:
    """Answers in the order of their completion, in groups that are complete at the same time.

    Args:
        model: a model from `AutoModel.from_pretrained`; nothing else may call it meanwhile.
        name: the model's name in answers.
        items: items that ask for a generation, in an efficient order; taken from the iterator as there is room.
        limits: see `JobLimits`.
        watch: called with a function that returns the statistics of the batch, from any thread.

    Raises:
        RabbitLLMError, OSError, MemoryError: the weights cannot be read, or memory is exhausted. Unanswered lines can
            be submitted again.
    """
    desk = RequestBuilder(model, name)
    done: queue.SimpleQueue[_Open] = queue.SimpleQueue()
    most = READY * limits.sequences
    waiting = most + MAX_ANSWERS
    batch_limits = BatchLimits(
        *(limits.sequences, waiting, limits.cache_bytes, WHOLE_PROMPT, limits.exact),
        in_bulk=True,
        file_bytes=limits.cache_disk,
    )
    batch = Batch(model, batch_limits)
    watch(lambda: batch.facts)
    asking = _Asking(desk, items)
    open_requests = 0
    try:
        while True:
            begin = [_Open(wanted, done) for wanted in asking.next(most - open_requests, alone=not open_requests)]
            refused = [*asking.refused(), *_submit(batch, begin)]
            if refused:
                yield refused
            open_requests += sum(one.count for one in begin if not one.is_refused)
            if not open_requests:
                if asking.at_end:
                    return
                continue
            over = [done.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    over.append(done.get_nowait())
            open_requests -= sum(one.count for one in over)
            made, failed = _answered(over, batch)
            if made:
                yield made
            if failed is not None:
                raise failed
    finally:
        batch.close(0)


class _Asking:
    """The next requests.

    Args:
        desk: makes requests of items.
        items: the remaining items.

    Attributes:
        at_end: whether no items remain.
    """

    def __init__(self, desk: RequestBuilder, items: Iterator[Item]) -> None:
        self.at_end = False
        self._desk = desk
        self._items = items
        self._next: PreparedItem | None = None
        self._refused: list[BatchAnswer] = []

    def next(self, room: int, *, alone: bool) -> Iterator[PreparedItem]:
        """The next items that fit.

        Args:
            room: number of requests that may be added.
            alone: whether no other requests are open: then an item with more requests is taken nevertheless.
        """
        while True:
            if self._next is None:
                self._next = self._made()
            if self._next is None or (len(self._next.requests) > room and not alone):
                return
            room -= len(self._next.requests)
            alone = False
            found, self._next = self._next, None
            yield found

    def refused(self) -> list[BatchAnswer]:
        """Answers to the items refused since the last call."""
        found, self._refused = self._refused, []
        return found

    def _made(self) -> PreparedItem | None:
        for item in self._items:
            try:
                return self._desk.wanted(item)
            except APIError as error:
                self._refused.append(BatchAnswer(item.index, item.key, error_line(item, error), is_error=True))
                if len(self._refused) >= MAX_REFUSED:  # otherwise they would collect until a valid item comes
                    return None
        self.at_end = True
        return None


def _submit(batch: Batch, begin: list[_Open]) -> list[BatchAnswer]:
    """Submit all at once, so that they share the first pass; returns the answers to refused ones."""
    refused = []
    with batch.held():
        for one in begin:
            handles = []
            try:
                for number, request in enumerate(one.wanted.requests):
                    handles.append(batch.submit(request, one.taker(number)))
            except OptionError as error:
                for handle in handles:
                    handle.cancel()
                one.is_refused = True
                refused.append(_refused(one.wanted.item, error))
    return refused


def _answered(over: list[_Open], batch: Batch) -> tuple[list[BatchAnswer], BaseException | None]:
    """Answers, and the error that ends the whole run, if any."""
    made: list[BatchAnswer] = []
    failed: BaseException | None = None
    for one in over:
        if one.error is not None and not (batch.error or _ends_all(one.error)):
            made.append(_refused(one.wanted.item, one.error))
        elif one.error is not None:
            failed = batch.error or one.error
        elif one.is_cut:
            failed = batch.error or BatchError("The batch was closed before all was answered.")
        else:
            made.append(one.answer())
    return made, failed


def _ends_all(error: Exception) -> bool:
    """Whether an error would occur in any request: the weights cannot be read, or memory is exhausted."""
    if isinstance(error, (*_ENDS_ALL, torch.OutOfMemoryError)):
        return True
    if isinstance(error, RabbitLLMError):
        return not isinstance(error, OptionError)
    return isinstance(error, RuntimeError) and "memory" in str(error)  # torch's error on the CPU


def _refused(item: Item, error: Exception) -> BatchAnswer:
    told = (
        bad(error.problem) if isinstance(error, OptionError) else APIError(BROKEN, f"{type(error).__name__}: {error}")
    )
    return BatchAnswer(item.index, item.key, error_line(item, told), is_error=True)
