"""Requests, their events, and statistics of a batch.

A request is answered by events, in this order: any number of `Delta`, then one of `Finished` and `Failed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rabbitllm.generation.answer import Sampling


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """An end token or a stop string was generated."""
    LENGTH = "length"
    """The maximum number of tokens, or the model's context, is used up."""
    CANCELLED = "cancelled"
    """The client cancelled it, or the batch was closed."""
    TIMEOUT = "timeout"
    """Its deadline passed."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation.

    Attributes:
        prompt: token ids; at least one.
        max_new_tokens: maximum number of tokens to generate.
        sampling: how tokens are chosen; greedily if its temperature is 0.
        stop: stop strings, at which the answer ends; they are not part of it.
        likeliest: number of likeliest tokens whose log probabilities are reported beside the chosen token's; None for
            no probabilities at all.
        seconds: time limit from submission to the end; None for no limit.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    likeliest: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token and the natural logarithm of its probability, before temperature and the like."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability, before temperature and the like; None if not requested.
        likeliest: the likeliest tokens at its position, in descending order; see `Request.likeliest`.
    """

    token: int
    logprob: float | None = None
    likeliest: tuple[Likelihood, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A new piece of an answer.

    Attributes:
        text: never half a character, never part of a stop string; may be empty.
        tokens: generated since the last piece, special ones such as the end of the text included.
    """

    text: str
    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer.

    Attributes:
        ended: the finish reason.
        stop: the stop string that was generated, or None.
        prompt_tokens: number of tokens of the prompt.
        kept_tokens: how many of these were taken from the prefix cache.
        new_tokens: number of generated tokens, the last one included.
        seconds: time from submission to the end.
        first: seconds from submission to the first token; None if none was generated.
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
    """The end of an answer by an error.

    Attributes:
        error: the error; it concerns only this request, unless the weights could not be read.
    """

    error: Exception


Event = Delta | Finished | Failed


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Totals of a batch so far and its current state.

    Attributes:
        running: number of running requests.
        waiting: number of waiting requests.
        most_running, most_waiting: the limits of these.
        cache_bytes: size of all KV caches in memory now, the prefix cache included.
        cache_limit_bytes: limit of `cache_bytes`.
        passes: number of passes.
        prompt_tokens, kept_tokens, new_tokens: totals of all requests; see `Finished`.
        pass_seconds: total time of passes.
        disk_seconds, copy_seconds: part of it spent waiting for the disk, and for copies from host memory.
        streamed_bytes: bytes of weights streamed for passes.
        ended: reason -> number of requests that ended so far; "failed" is one of the reasons.
        preempted: how often a request was preempted.
        resumed: how often a preempted request continued with its KV cache swapped in.
        aside_bytes: size of KV caches that are swapped out now, to RAM or to a file.
        aside_limit_bytes: limit of `aside_bytes`.
        file_bytes: size of KV caches of running requests in a file.
        file_read_bytes: bytes read from that file.
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
