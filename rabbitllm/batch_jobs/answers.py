"""Answers to items of all kinds: shared by the command line, the API and the workers of a cluster.

Items that ask for text run through one batch; some more than it admits are prepared and wait. Items are taken from an
iterator as requests finish, so that only a few hundred lines are in memory.

Items that ask for likelihoods or embeddings go through `rabbitllm.generation.scoring`, many in one pass:

    {"id": …, "logprob": …, "tokens": …, "greedy": …}              of one continuation
    {"id": …, "scores": [{"logprob": …, "tokens": …, "greedy": …}, …]}    of a list of them
    {"id": …, "choice": …, "choice_by_length": …, "logprobs": […], "tokens": […]}
    {"id": …, "embedding": […]} or {"id": …, "embeddings": [[…], …]}

Their texts are tokenized as in lm-evaluation-harness: context and continuation together, and the tokens after those of
the context alone belong to the continuation (https://github.com/EleutherAI/lm-evaluation-harness, `_encode_pair`).
Spaces at the end of a context belong to the continuation too. An empty context becomes the model's first token.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rabbitllm.batch_jobs._requests import PreparedItem, RequestBuilder, call_line, refused_answer, unreadable_answer
from rabbitllm.batch_jobs.inputs import ERRORS, GENERATIONS, kind_of
from rabbitllm.batch_jobs.items import BatchAnswer, BatchCall, Choose, Embed, Item, JobLimits, Key, ScoreItem
from rabbitllm.engine.devices import OutOfDeviceMemory
from rabbitllm.errors import BatchError, NotANumberError, OptionError, RabbitLLMError, ScoringError
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.request import (
    MAX_CHOICES,
    MEDIA_BYTES,
    BatchStats,
    Delta,
    Event,
    Failed,
    FinishReason,
    Result,
    TokenLogprob,
)
from rabbitllm.generation.request import Limits as BatchLimits
from rabbitllm.generation.scoring import Room, Scored, ScoredText, score
from rabbitllm.server.api_error import BROKEN, NOT_A_NUMBER, APIError, bad
from rabbitllm.server.embeddings import checked_embedding
from rabbitllm.server.schemas import Embedding, parsed

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel


def answered(
    model: StreamedModel, name: str, items: Iterable[Item], limits: JobLimits, watch: Watch = lambda stats: None
) -> Generator[list[BatchAnswer]]:
    """Answers, in groups that are complete at the same time.

    Args:
        model: a model from `AutoModel.from_pretrained`; nothing else may call it meanwhile.
        name: the model's name in answers of OpenAI's form.
        items: in an efficient order, as `inputs.ordered` makes it; taken from the iterator as there is room.
        limits: limits of the batch.
        watch: called with a function that returns the statistics of the generating batch, from any thread.

    Raises:
        RabbitLLMError, OSError, MemoryError: the run cannot continue; the remaining items have no answer.
    """
    for line_kind, group in groupby(items, lambda item: kind_of(item.task)):
        if line_kind == ERRORS:
            yield from ([unreadable_answer(item)] for item in group)
        elif line_kind == GENERATIONS:
            yield from generated(model, name, group, limits, watch)
        else:
            yield from scored(model, name, group, limits)


READY = 2
"""Ratio of submitted to running requests: if all end at once, all can be replaced at once."""
WHOLE_PROMPT = 1 << 30
"""Tokens of a prompt in one pass. No client waits for a first token, so prompts are chunked only for lack of memory."""
MAX_REFUSED = 256
"""Limit of error lines that are collected before they are returned."""
_FATAL = (OSError, MemoryError, BatchError)
"""Errors that any request would cause."""

Watch = Callable[[Callable[[], BatchStats]], object]


class _OpenGeneration:
    """An item whose requests have been submitted.

    Args:
        prepared: the prepared item.
        finished: receives this object when all requests have ended.

    Attributes:
        prepared: see above.
        results: of each request; None while it runs.
        is_refused: whether one of them was refused; then the others are cancelled.
        error: error of one of them.
    """

    def __init__(self, prepared: PreparedItem, finished: queue.SimpleQueue[_OpenGeneration]) -> None:
        count = len(prepared.requests)
        self.prepared = prepared
        self.results: list[Result | None] = [None] * count
        self.error: Exception | None = None
        self.is_refused = False
        self._texts = [""] * count
        self._tokens: list[list[TokenLogprob]] = [[] for _ in range(count)]
        self._running = count
        self._done = finished

    def put(self, index: int, event: Event) -> None:
        """Handle an event of one request; runs in the batch's thread."""
        if isinstance(event, Delta):
            self._texts[index] += event.text
            if self.prepared.keeps_tokens:
                self._tokens[index] += event.tokens
            return
        if isinstance(event, Failed):
            self.error = event.error
        else:
            self.results[index] = event
        self._running -= 1
        if not self._running and not self.is_refused:
            self._done.put(self)

    @property
    def is_unanswered(self) -> bool:
        """Whether the batch ended before the item was answered."""
        ends = (FinishReason.STOP, FinishReason.LENGTH)
        return any(result is not None and result.finish not in ends for result in self.results)

    def answer(self) -> BatchAnswer:
        """The answer to the item."""
        item, results = self.prepared.item, [result for result in self.results if result is not None]
        deltas = [Delta(text, tuple(tokens)) for text, tokens in zip(self._texts, self._tokens, strict=True)]
        line = self.prepared.line_of(deltas, results)
        new_tokens = sum(len(result.tokens) for result in results)
        return BatchAnswer(item.index, item.key, line, False, results[0].prompt_tokens, new_tokens)


class _Feed:
    """Prepares items as there is room for their requests.

    Args:
        builder: prepares an item.
        items: the items, taken from the iterator as there is room.
        limit: maximum number of open requests; a single item may have more.

    Attributes:
        open_requests, open_bytes: requests that are open, and bytes of their pictures and sounds.
        is_empty: whether all items have been taken.
    """

    def __init__(self, builder: RequestBuilder, items: Iterator[Item], limit: int) -> None:
        self._builder = builder
        self._items = items
        self._limit = limit
        self.open_requests = self.open_bytes = 0
        self._next = self._prepared()

    @property
    def is_empty(self) -> bool:
        return self._next is None

    def _prepared(self) -> PreparedItem | BatchAnswer | None:
        """The next item, or the answer to one that is refused; None after the last one."""
        item = next(self._items, None)
        try:
            return None if item is None else self._builder.prepared(item)
        except APIError as error:
            assert item is not None
            return refused_answer(item, error)

    def take(self) -> tuple[list[PreparedItem], list[BatchAnswer]]:
        """The items to submit now, and the answers to refused ones."""
        ready: list[PreparedItem] = []
        refused: list[BatchAnswer] = []
        while self._next is not None and len(refused) < MAX_REFUSED:
            if isinstance(self._next, BatchAnswer):
                refused.append(self._next)
            elif not self.open_requests or self._fits(self._next):
                ready.append(self._next)
                self._count(self._next, 1)
            else:
                break
            self._next = self._prepared()
        return ready, refused

    def _fits(self, item: PreparedItem) -> bool:
        bytes_fit = self.open_bytes + item.media_bytes <= MEDIA_BYTES
        return self.open_requests + len(item.requests) <= self._limit and bytes_fit

    def release(self, items: Iterable[_OpenGeneration]) -> None:
        """Count items as ended."""
        for item in items:
            self._count(item.prepared, -1)

    def _count(self, item: PreparedItem, sign: int) -> None:
        self.open_requests += sign * len(item.requests)
        self.open_bytes += sign * item.media_bytes


def generated(
    model: StreamedModel, name: str, items: Iterator[Item], limits: JobLimits, watch: Watch = lambda stats: None
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
    builder = RequestBuilder(model, name)
    finished: queue.SimpleQueue[_OpenGeneration] = queue.SimpleQueue()
    max_open = READY * limits.sequences
    batch_limits = BatchLimits(
        *(limits.sequences, max_open + MAX_CHOICES, limits.cache_bytes, WHOLE_PROMPT, limits.exact),
        throughput=True,
        file_bytes=limits.cache_disk,
        draft=limits.draft,
    )
    batch = Batch(model, batch_limits)
    watch(lambda: batch.stats)
    try:
        feed = _Feed(builder, items, max_open)
        while not feed.is_empty or feed.open_requests:
            ready, refused = feed.take()
            generations = [_OpenGeneration(item, finished) for item in ready]
            refused += _submit(batch, generations)
            if refused:
                yield refused
            feed.release(generation for generation in generations if generation.is_refused)
            if not feed.open_requests:
                continue
            ended = [finished.get()]
            while not finished.empty():
                ended.append(finished.get())
            feed.release(ended)
            answers, failed = _answered(ended, batch)
            if answers:
                yield answers
            if failed is not None:
                raise failed
    finally:
        batch.close(0)


def _submit(batch: Batch, generations: list[_OpenGeneration]) -> list[BatchAnswer]:
    """Submit all at once, so that they share the first pass; returns the answers to refused ones."""
    refused = []
    with batch.paused():
        for generation in generations:
            sequences = []
            try:
                for index, request in enumerate(generation.prepared.requests):
                    sequences.append(batch.submit(request, partial(generation.put, index)))
            except OptionError as error:
                for sequence in sequences:
                    sequence.cancel()
                generation.is_refused = True
                refused.append(refused_answer(generation.prepared.item, bad(error.problem)))
    return refused


def _answered(ended: list[_OpenGeneration], batch: Batch) -> tuple[list[BatchAnswer], BaseException | None]:
    """Answers, and the error that ends the whole run, if any."""
    answers: list[BatchAnswer] = []
    failed: BaseException | None = None
    for generation in ended:
        if generation.error is not None and not (batch.error or _is_fatal(generation.error)):
            answers.append(refused_answer(generation.prepared.item, _api_error(generation.error)))
        elif generation.error is not None:
            failed = batch.error or generation.error
        elif generation.is_unanswered:
            failed = batch.error or BatchError("The batch was closed before all lines were answered.")
        else:
            answers.append(generation.answer())
    return answers, failed


def _is_fatal(error: Exception) -> bool:
    """Whether an error would occur in any request: the weights cannot be read, or memory is exhausted.

    Not if a GPU has no memory for one request alone: others may be shorter.
    """
    if isinstance(error, OutOfDeviceMemory):
        return False
    if isinstance(error, _FATAL):
        return True
    if isinstance(error, RabbitLLMError):
        return not isinstance(error, OptionError | NotANumberError)
    return isinstance(error, RuntimeError) and "memory" in str(error)  # torch's error on the CPU


def _api_error(error: Exception) -> APIError:
    """The error of a line that cannot be answered."""
    if isinstance(error, NotANumberError):
        return APIError(BROKEN, error.problem, code=NOT_A_NUMBER)
    if isinstance(error, OptionError | ScoringError):
        return bad(error.problem)
    return APIError(BROKEN, f"{type(error).__name__}: {error}")


MAX_TOKENS = 1 << 22
"""Tokens per call of scoring, which makes as few passes of them as memory allows; more would only occupy memory."""
MAX_TEXTS = 1 << 16


Line = Mapping[str, Any]


@dataclass(slots=True)
class _OpenScores:
    """An item with texts that are not scored yet.

    Attributes:
        item: the item.
        texts: the texts to score.
        line_of: makes the output line from their results.
        results: those so far, by text.
    """

    item: Item
    texts: Sequence[ScoredText]
    line_of: Callable[[Sequence[Scored]], Line]
    results: dict[int, Scored] = field(default_factory=dict)

    def answer(self) -> BatchAnswer:
        """The answer to the item."""
        results = [self.results[text.index] for text in self.texts]
        if (error := next((result.error for result in results if result.error is not None), None)) is not None:
            return refused_answer(self.item, _api_error(error))
        if any(result.logprob == -math.inf for result in results):
            return refused_answer(
                self.item, bad("A token of the continuation has the probability 0.", code=NOT_A_NUMBER)
            )
        return BatchAnswer(self.item.index, self.item.key, self.line_of(results), False, self.tokens, 0)

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(text.context) + len(text.continuation) for text in self.texts)


def scored(model: StreamedModel, name: str, items: Iterator[Item], limits: JobLimits) -> Iterator[list[BatchAnswer]]:
    """Answers in the order of their completion.

    Args:
        model: a model from `AutoModel.from_pretrained`; nothing else may call it meanwhile.
        name: the model's name in answers.
        items: items that ask for likelihoods or embeddings.
        limits: see `JobLimits`.
    """
    builder = RequestBuilder(model, name)
    room = Room(memory_bytes=limits.cache_bytes, exact=limits.exact)
    is_full = True
    while is_full:
        by_text: list[_OpenScores] = []  # item of each text
        texts: list[ScoredText] = []
        refused: list[BatchAnswer] = []
        tokens, is_full = 0, False
        for item in items:
            try:
                pending = _open_scores(builder, item, len(by_text))
            except APIError as error:
                refused.append(refused_answer(item, error))
                continue
            tokens += pending.tokens
            by_text += [pending] * len(pending.texts)
            texts += pending.texts
            if is_full := tokens >= MAX_TOKENS or len(by_text) >= MAX_TEXTS:
                break
        if refused:
            yield refused
        if texts:
            for result in score(model, texts, room):
                pending = by_text[result.index]
                pending.results[result.index] = result
                if len(pending.results) == len(pending.texts):
                    yield [pending.answer()]


def _open_scores(builder: RequestBuilder, item: Item, first: int) -> _OpenScores:
    """
    Args:
        builder: tokenizes texts.
        item: the item.
        first: index of its first text.

    Raises:
        APIError: it cannot be answered.
    """
    match item.task:
        case ScoreItem(context, texts) | Choose(context, texts):
            pairs = [_pair(builder, context, text) for text in texts]
            scored = [ScoredText(first + index, *pair) for index, pair in enumerate(pairs)]
            return _OpenScores(item, scored, partial(_likelihoods, item.key, item.task))
        case Embed(texts, _, pooling):
            inputs = tuple(builder.ids_of(text) for text in texts)
            is_listed, normalise = item.task.is_listed, item.task.normalise

            def line_of(results: Sequence[Scored]) -> Line:
                vectors = [_vector(result, normalise=normalise) for result in results]
                return {"id": item.key} | ({"embeddings": vectors} if is_listed else {"embedding": vectors[0]})

        case BatchCall(_, body, defaults):
            request = parsed(Embedding, {name: value for name, value in body.items() if value is not None})
            checked = checked_embedding(request, builder.tokenizer, builder.limits, builder.width, max_inputs=None)
            inputs, pooling = checked.inputs, defaults.pooling

            def line_of(results: Sequence[Scored]) -> Line:
                from rabbitllm.server.embeddings import embedding_object

                vectors = [_vector(result, normalise=defaults.normalise) for result in results]
                return call_line(item, 200, embedding_object(checked, vectors, builder.name))

        case _:
            raise AssertionError(f"{item.task} is not an item to score")
    return _OpenScores(item, [ScoredText(first + index, ids, (), pooling) for index, ids in enumerate(inputs)], line_of)


def _pair(builder: RequestBuilder, context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    if not bare:
        ids = tuple(int(token) for token in builder.tokenizer(continuation, add_special_tokens=False)["input_ids"])
        first = builder.tokenizer.bos_token_id
        first = builder.tokenizer.eos_token_id if first is None else first
        if first is None:
            raise bad("The context is empty, and the model has no beginning-of-sequence token.")
        continuation_ids = ids[1:] if ids[:1] == (first,) else ids
        context_ids: tuple[int, ...] = (int(first),)
    else:
        context_ids = builder.ids_of(bare)
        continuation_ids = builder.ids_of(bare + continuation)[len(context_ids) :]
    if not continuation_ids:
        raise bad("The continuation adds no token to the context.")
    return context_ids, continuation_ids


def _likelihoods(key: Key, task: ScoreItem | Choose, results: Sequence[Scored]) -> Line:
    if isinstance(task, ScoreItem):
        scores = [{"logprob": result.logprob, "tokens": result.tokens, "greedy": result.greedy} for result in results]
        return {"id": key, "scores": scores} if task.is_listed else {"id": key, **scores[0]}
    logprobs = [result.logprob for result in results if result.logprob is not None]
    by_length = [value / len(text) for value, text in zip(logprobs, task.choices, strict=True)]
    return {
        "id": key,
        "choice": logprobs.index(max(logprobs)),
        "choice_by_length": by_length.index(max(by_length)),
        "logprobs": logprobs,
        "tokens": [result.tokens for result in results],
    }


def _vector(result: Scored, *, normalise: bool) -> list[float]:
    assert result.embedding is not None
    if not normalise:
        return list(result.embedding)
    length = sum(value * value for value in result.embedding) ** 0.5
    return [value / length for value in result.embedding] if length else list(result.embedding)
