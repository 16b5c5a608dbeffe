"""What a generation is asked for, and what comes of it: plain facts, without a model.

A request is answered by events, in this order: any number of `Delta`, then one of `Finished` and `Failed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rabbitllm.generation.answer import Sampling


class FinishReason(StrEnum):
    """Why a generation is over."""

    STOP = "stop"
    """The model ended it, or one of the stop texts came."""
    LENGTH = "length"
    """As many tokens as were asked for, or the model's context, are used up."""
    CANCELLED = "cancelled"
    """The client cancelled it, or the batch was closed."""
    TIMEOUT = "timeout"
    """Its time was over."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation.

    Attributes:
        prompt: token ids; at least one.
        max_new_tokens: at most so many are generated.
        sampling: how tokens are chosen; greedily, if its temperature is 0.
        stop: texts at which the answer ends; they are not part of it.
        likeliest: None for no probabilities; else for each token its own, and those of so many of the likeliest.
        seconds: from submission to the end, at most; None for no limit.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    likeliest: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token and its natural logarithm of probability, before temperature and the like."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability, before temperature and the like; None if not requested.
        likeliest: the likeliest tokens in its place, in falling order; as many as were asked for.
    """

    token: int
    logprob: float | None = None
    likeliest: tuple[Likelihood, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Something new of an answer.

    Attributes:
        text: never half a character, never part of a stop text; may be empty.
        tokens: generated since the last piece, special ones such as the end of the text included.
    """

    text: str
    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer.

    Attributes:
        ended: why.
        stop: the stop text that came, if one did.
        prompt_tokens: of the request.
        kept_tokens: of these, those that the prefix cache had already.
        new_tokens: generated, the last one included.
        seconds: from submission to the end.
        first: seconds from submission to the first token; None if none came.
    """

    ended: FinishReason
    stop: str | None
    prompt_tokens: int
    kept_tokens: int
    new_tokens: int
    seconds: float
    first: float | None


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing came, or nothing more.

    Attributes:
        error: what happened; only this request is concerned, unless the weights could not be read.
    """

    error: Exception


Event = Delta | Finished | Failed


@dataclass(frozen=True, slots=True)
class BatchStats:
    """What a batch has done so far, and does now.

    Attributes:
        running: requests that take part in passes.
        waiting: requests that have not begun.
        most_running, most_waiting: the limits.
        cache_bytes: size of all KV caches in memory now, the prefix cache included.
        cache_limit_bytes: how many they may be.
        passes: that were made.
        prompt_tokens, kept_tokens, new_tokens: of all requests so far; see `Finished`.
        pass_seconds: time that passes took, in all.
        disk_seconds, copy_seconds: of these, spent waiting for the disk, and for copies from host memory.
        streamed_bytes: of weights, that were brought for passes.
        ended: reason -> requests that ended so far; "failed" among the reasons.
        preempted: times that a request was preempted.
        resumed: times that a preempted request continued with its KV cache swapped in.
        aside_bytes: KV caches that are swapped out now, to RAM or to a file.
        aside_limit_bytes: how many they may be.
        file_bytes: KV caches of running requests in a file.
        file_read_bytes: that were read from it.
    """

    running: int = 0
    waiting: int = 0
    most_running: int = 0
    most_waiting: int = 0
    cache_bytes: int = 0
    cache_limit_bytes: int = 0
    passes: int = 0
    prompt_tokens: int = 0
    kept_tokens: int = 0
    new_tokens: int = 0
    pass_seconds: float = 0
    disk_seconds: float = 0
    copy_seconds: float = 0
    streamed_bytes: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    preempted: int = 0
    resumed: int = 0
    aside_bytes: int = 0
    aside_limit_bytes: int = 0
    file_bytes: int = 0
    file_read_bytes: int = 0
