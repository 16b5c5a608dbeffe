"""Settings of the server and limits of its model: plain values for all modules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """How requests are treated.

    Attributes:
        name: the model's name in answers; requests that name another one are refused.
        api_key: the key that requests must carry; None for none.
        origins: origins of other hosts that may send requests; "*" for all.
        hosts: names in lower case by which the server may be called, in addition to addresses; None for any.
        body_bytes: limit of a request's body.
        body_seconds: time limit for receiving a body.
        seconds: time limit from a request's submission to its end; None for no limit.
        most_new_tokens: default limit of new tokens.
        completion_new_tokens: likewise in `/v1/completions`, where OpenAI has its own default.
        choices: limit of answers to one request.
        heartbeat_seconds: an idle stream sends a comment after this time.
        stall_seconds: a client that reads nothing for this time is disconnected.
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
    """Limits of a model that requests are checked against.

    Attributes:
        context: tokens of prompt and answer together that the model was made for; None if its config does not say.
        vocabulary: token ids are below this number.
        temperature, top_p: defaults.
    """

    context: int | None
    vocabulary: int
    temperature: float = 1.0
    top_p: float | None = None
