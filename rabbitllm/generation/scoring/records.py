"""Inputs, results and limits of scoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rabbitllm.errors import RabbitLLMError

Pooling = Literal["last", "mean"]


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
        error: why there is no result; concerns this text alone.
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
