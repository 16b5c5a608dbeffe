"""What is asked of a text, and what comes of it. Records alone; knows no models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rabbitllm.errors import RabbitLLMError

Pooling = Literal["last", "mean"]


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A text as tokens, and what is to be known of it: how likely its continuation is, its embedding, or both.

    Attributes:
        index: the caller's number of it; its result has the same.
        context: what comes first; at least one token (the text's beginning-of-sequence token, where there is nothing
            else).
        continuation: the tokens whose probabilities are wanted; none, if only an embedding is.
        pooling: how the hidden states of context and continuation become one vector: that of the "last" token or the
            "mean" of all; None for no embedding.
    """

    index: int
    context: Sequence[int]
    continuation: Sequence[int] = ()
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """What came of a text.

    Attributes:
        index: of the text.
        logprob: sum of the natural logarithms of the probabilities of the continuation's tokens, each after all that
            comes before it; None where there is no continuation, or an error.
        tokens: of the continuation.
        greedy: whether each of them is the most likely one where it is; None where `logprob` is.
        embedding: (hidden size,) as float32 numbers; None where none was asked for, or an error.
        error: why there is no result, which concerns this text alone.
    """

    index: int
    logprob: float | None = None
    tokens: int = 0
    greedy: bool | None = None
    embedding: tuple[float, ...] | None = None
    error: RabbitLLMError | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """What scoring may take.

    Attributes:
        memory_bytes: for activations of texts that wait for their turn; None for half of the free memory.
        disk_bytes: for the same, where memory is too small; None for half of what is free where `scratch` is, 0 for
            none. Texts for which both are too small go through the model in a further pass.
        scratch: an existing folder for it; None for the system's. Files there have no name, and are gone with the
            process, whatever ends it.
        tokens: that go through a layer at a time, unless one text has more; None for as many as memory allows.
        exact: each text goes through the model by itself, so that its numbers have the bits that plain transformers
            gives them; slower, and nothing is shared.
        truncate: a text that is longer than the model's context loses its beginning, rather than being refused.
    """

    memory_bytes: int | None = None
    disk_bytes: int | None = None
    scratch: Path | None = None
    tokens: int | None = None
    exact: bool = False
    truncate: bool = False
