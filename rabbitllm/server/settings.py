"""What the server was told, and what it knows of its model: plain facts that every part may look at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """How requests are treated.

    Attributes:
        name: of the model, in answers; requests that name another one are refused.
        api_key: that requests must bring; None for none.
        origins: of pages on other hosts that may ask; "*" for all.
        hosts: names in lower case by which the server may be called, in addition to addresses; None for any.
        body_bytes: of a request's body, at most.
        body_seconds: until it is there, at most.
        seconds: from a request's submission to its end, at most; None for no limit.
        most_new_tokens: of an answer whose request does not say.
        completion_new_tokens: likewise in `/v1/completions`, where OpenAI has a number of its own.
        choices: answers to one request, at most.
        heartbeat_seconds: after so long without anything to say a stream says that it is still there.
        stall_seconds: a reader that takes nothing for so long is gone.
    """

    name: str
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    seconds: float | None = None
    most_new_tokens: int = 4096
    completion_new_tokens: int = 16
    choices: int = 128
    heartbeat_seconds: float = 15.0
    stall_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are checked against.

    Attributes:
        context: tokens that the model was made for, prompt and answer together; None if it does not say.
        vocabulary: ids are below this.
        temperature, top_p: where a request says nothing.
    """

    context: int | None
    vocabulary: int
    temperature: float = 1.0
    top_p: float | None = None
