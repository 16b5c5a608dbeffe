"""Items that ask for text, through one batch: as many at a time as it takes, the next ones ready when some are done.

Takes items from an iterator as places are free, so that what is ahead of the model is never more than a few hundred
lines, however many there are.
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
from rabbitllm.generation.limits import Limits as BatchLimits
from rabbitllm.generation.request import BatchStats, Delta, Event, Failed, Finished, FinishReason, TokenLogprob
from rabbitllm.server.api_error import BROKEN, APIError, bad

READY = 2
"""Times as many requests as run at a time are known to the batch: if all end at once, all can be replaced at once."""
WHOLE_PROMPT = 1 << 30
"""Tokens of a prompt in one pass. No client waits for a first token, so a prompt is cut only for lack of memory."""
MAX_REFUSED = 256
"""Lines that are an error, kept before they are told."""
_ENDS_ALL = (OSError, MemoryError, BatchError)
"""What is no fault of the request that it happened to."""

Watch = Callable[[Callable[[], BatchStats]], object]


class _Open:
    """An item whose requests the batch has.

    Args:
        wanted: see there.
        done: is given this when all of them are over.

    Attributes:
        count: of the requests.
        is_refused: whether one of them was refused; then the others are not waited for.
        error: of one of them.
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
        """What the batch calls with the events of one of the requests."""
        return lambda event: self.told(number, event)

    def told(self, number: int, event: Event) -> None:
        """Take an event of one of the requests; in the batch's thread."""
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
        """Whether the batch ended before it was answered."""
        return any(end is not None and end.ended not in (FinishReason.STOP, FinishReason.LENGTH) for end in self._ends)

    def answer(self) -> BatchAnswer:
        """The line."""
        answered = [
            Answered("".join(texts), tuple(tokens), end)
            for texts, tokens, end in zip(self._texts, self._tokens, self._ends, strict=True)
            if end is not None
        ]
        return answer_of(self.wanted.item, self.wanted.answer(answered), answered)


def generated(
    model: Any, name: str, items: Iterator[Item], limits: JobLimits, watch: Watch = lambda facts: None
) -> Iterator[list[BatchAnswer]]:
    """Answers, in the order in which they are complete; those that are so at the same time together.

    Args:
        model: as `AutoModel.from_pretrained` returns it; nothing else may call it meanwhile.
        name: of it, in answers.
        items: that ask for a generation, in a good order; taken as there is room.
        limits: see `JobLimits`.
        watch: is given what tells, from any thread, what the batch does.

    Raises:
        RabbitLLMError, OSError, MemoryError: the weights cannot be read any more, or memory is used up. Those lines
            have no answer then, and can be asked for again.
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
    """What is to be asked next.

    Args:
        desk: makes requests of items.
        items: that there are.

    Attributes:
        at_end: whether there are no more.
    """

    def __init__(self, desk: RequestBuilder, items: Iterator[Item]) -> None:
        self.at_end = False
        self._desk = desk
        self._items = items
        self._next: PreparedItem | None = None
        self._refused: list[BatchAnswer] = []

    def next(self, room: int, *, alone: bool) -> Iterator[PreparedItem]:
        """As many as there is room for.

        Args:
            room: requests.
            alone: nothing else is asked: then one with more of them is taken all the same.
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
        """Those that could not be asked, since this was called last."""
        found, self._refused = self._refused, []
        return found

    def _made(self) -> PreparedItem | None:
        for item in self._items:
            try:
                return self._desk.wanted(item)
            except APIError as error:
                self._refused.append(BatchAnswer(item.index, item.key, error_line(item, error), is_error=True))
                if len(self._refused) >= MAX_REFUSED:  # or they would be kept until one is found that can be asked
                    return None
        self.at_end = True
        return None


def _submit(batch: Batch, begin: list[_Open]) -> list[BatchAnswer]:
    """Submit all at once, so that the first pass is not for the first of them alone; returns those that are refused."""
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
    """Answers, and what ends all of them if something does."""
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
    """Whether an error would happen to any request: the weights cannot be read, or memory is used up."""
    if isinstance(error, (*_ENDS_ALL, torch.OutOfMemoryError)):
        return True
    if isinstance(error, RabbitLLMError):
        return not isinstance(error, OptionError)
    return isinstance(error, RuntimeError) and "memory" in str(error)  # as torch says on the CPU


def _refused(item: Item, error: Exception) -> BatchAnswer:
    told = (
        bad(error.problem) if isinstance(error, OptionError) else APIError(BROKEN, f"{type(error).__name__}: {error}")
    )
    return BatchAnswer(item.index, item.key, error_line(item, told), is_error=True)
