"""Data of scoring: texts, results, limits, and the tasks that the texts need.

    context  a b c   continuation  d e      inputs  a b c d     logits of the rows of c and d, at d and e

The last token of a continuation is only predicted. It is not an input unless an embedding is requested. Texts with the
same inputs, such as alternatives of a single token, are one task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.errors import OptionError, RabbitLLMError
from rabbitllm.generation.request import POOLINGS, ModelLimits, Pooling


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A token sequence to score: the likelihood of its continuation, its embedding, or both.

    Attributes:
        index: number chosen by the caller; its result has the same.
        context: tokens before the continuation, at least one (the beginning-of-sequence token if there are no others).
        continuation: the tokens whose probabilities are computed; empty for an embedding alone.
        pooling: how the hidden states of context and continuation become one vector: that of the "last" token or the
            "mean" of all; None for no embedding.
    """

    index: int
    context: Sequence[int]
    continuation: Sequence[int] = ()
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of a text.

    Attributes:
        index: see `ScoredText`.
        logprob: sum of the natural log probabilities of the continuation's tokens, each given all tokens before it;
            None without a continuation, or after an error.
        tokens: number of tokens of the continuation.
        greedy: whether each of them is the most likely one at its position; None if `logprob` is None.
        embedding: (hidden size,) as float32 numbers; None if not requested, or after an error.
        error: the error that concerns this text alone, instead of a result.
    """

    index: int
    logprob: float | None = None
    tokens: int = 0
    greedy: bool | None = None
    embedding: tuple[float, ...] | None = None
    error: RabbitLLMError | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """Limits and options of scoring.

    Attributes:
        memory_bytes: memory for activations of waiting texts; None for half of the free memory.
        disk_bytes: disk space for the same if memory is too small; None for half of the free space in `scratch`, 0 for
            none. Texts for which both are too small go through the model in a further pass.
        scratch: existing folder of that file; None for the model's folder if writable, else the system's. The file has
            no name and ends with the process.
        tokens: maximum tokens that go through a layer at a time, unless one text has more; None to choose by memory.
        exact: compute each text by itself, so that its numbers are bitwise those of plain transformers; slower, since
            nothing is shared.
        truncate: cut the beginning of texts that are longer than the model's context, instead of rejecting them.
    """

    memory_bytes: int | None = None
    disk_bytes: int | None = None
    scratch: Path | None = None
    tokens: int | None = None
    exact: bool = False
    truncate: bool = False


@dataclass(frozen=True, slots=True)
class TextRequest:
    """The results of a task that one text asks for.

    Attributes:
        number: position of the text in the given ones.
        first: input row whose logits predict the first of `targets`; the next rows predict the others.
        targets: tokens whose probabilities are computed.
        pooling: see `ScoredText`.
    """

    number: int
    first: int
    targets: tuple[int, ...]
    pooling: str | None


@dataclass(frozen=True, slots=True)
class Task:
    """Tokens that go through the model once.

    Attributes:
        ids: ids of the inputs.
        asked: the results that each of its texts asks for.
    """

    ids: tuple[int, ...]
    asked: tuple[TextRequest, ...]


def check_text(text: ScoredText, limits: ModelLimits, *, has_head: bool = True, truncate: bool) -> None:
    """Check that a text can be scored.

    Args:
        text: the text.
        limits: bounds of the model.
        has_head: whether the model has an output head, and so computes probabilities.
        truncate: whether its beginning may be cut off.

    Raises:
        OptionError: it cannot.
    """
    name = f"The text with index {text.index}"
    if not text.continuation and text.pooling is None:
        raise OptionError(
            f"{name} has no continuation and no pooling.", "Set a continuation, or pooling for an embedding."
        )
    if text.pooling is not None and text.pooling not in POOLINGS:
        raise OptionError(f"{name} has pooling={text.pooling!r}; expected one of {', '.join(POOLINGS)}.")
    if not text.context and text.continuation:
        raise OptionError(
            f"{name} has an empty context, so the first token of its continuation has no prediction.",
            "Use at least one token as context: the tokenizer's beginning-of-sequence or end-of-sequence token.",
        )
    if text.continuation and not has_head:
        raise OptionError(f"{name} has a continuation, and the model gives no probabilities, only embeddings.")
    limits.check_ids((*text.context, *text.continuation), name)
    inputs = len(_inputs(text))
    if limits.context is None or inputs <= limits.context:
        return
    if not truncate:
        raise OptionError(
            f"{name} has {inputs:,} tokens; the model's context has {limits.context:,}.",
            "Shorten it, or use truncate, which removes its beginning.",
        )
    if inputs - len(text.context) >= limits.context:  # the first token needs one before it
        raise OptionError(
            f"{name} has a continuation of {len(text.continuation):,} tokens; the model's context has "
            f"{limits.context:,}, and it needs a token before it.",
            "Score it in parts, each with the text before it as context.",
        )


def tasks_of(
    texts: Sequence[ScoredText], positions: Iterable[int], context: int | None, *, shared: bool = True
) -> list[Task]:
    """The tasks of valid texts.

    Args:
        texts: all texts.
        positions: positions of the valid ones.
        context: context of the model; the beginning of longer texts is cut off. None for no limit.
        shared: whether texts with the same inputs become one task.
    """
    by_inputs: dict[tuple[int, tuple[int, ...]], list[TextRequest]] = {}
    for position in positions:
        text = texts[position]
        whole = _inputs(text)
        ids = whole if context is None else whole[-context:]
        targets = tuple(text.continuation)
        last = len(ids) - (text.pooling is not None)  # one after the row that predicts the last target
        request = TextRequest(position, last - len(targets), targets, text.pooling)
        by_inputs.setdefault((0 if shared else position, ids), []).append(request)
    return [Task(ids, tuple(requests)) for (_, ids), requests in by_inputs.items()]


def _inputs(text: ScoredText) -> tuple[int, ...]:
    whole = (*text.context, *text.continuation)
    return whole if text.pooling is not None else whole[:-1]
