"""Checks shared by chats and completions: lengths, sampling settings and number of answers."""

from __future__ import annotations

from collections.abc import Sequence

from rabbitllm.generation.request import Request, Sampling
from rabbitllm.server.api_error import bad
from rabbitllm.server.schemas import GenerationBody
from rabbitllm.server.settings import ModelLimits, Settings

_SEEDS = (1 << 63) - 1
MAX_STOP_CHARACTERS = 1_000


def checked_length(ids: Sequence[int], asked: int | None, model: ModelLimits, settings: Settings, param: str) -> int:
    """The limit of new tokens after a prompt.

    Args:
        ids: the prompt.
        asked: the request's own limit; None if it has none.
        model: the model's context and vocabulary.
        settings: the default limit.
        param: the request's field with the prompt.

    Raises:
        APIError: an empty prompt, an id outside the vocabulary, or more tokens than the context holds.
    """
    if not ids:
        raise bad("The prompt has no tokens.", param)
    if max(ids) >= model.vocabulary:
        raise bad(f"The prompt has token {max(ids)}; this model has {model.vocabulary:,}.", param)
    if model.context is None:
        return asked if asked is not None else settings.most_new_tokens
    left = model.context - len(ids)
    if left < (asked or 1):
        followed = f", and {asked:,} are to follow" if asked is not None else ""
        raise bad(
            f"The prompt has {len(ids):,} tokens{followed}; the model's context has {model.context:,} in all.",
            param,
            "context_length_exceeded",
        )
    return asked if asked is not None else min(settings.most_new_tokens, left)


def requests_of(
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    length: int | Sequence[int],
    stops: tuple[str, ...],
    likeliest: int | None,
    *,
    model: ModelLimits,
    settings: Settings,
) -> tuple[Request, ...]:
    """A request for each choice: all of the first prompt, then all of the second, and so on.

    Args:
        body: the request's body.
        prompts: token ids of each prompt.
        length: limit of new tokens, for all prompts or for each.
        stops: texts at which answers end.
        likeliest: see `Request`.
        model: defaults for fields the request omits.
        settings: limits of the server.

    Raises:
        APIError: too many choices, or a stop text that is too long.
    """
    count = body.n or 1
    if count * len(prompts) > settings.choices:
        raise bad(f"{len(prompts)} prompts with n={count} are more than {settings.choices} choices.", "n")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise bad(f"A text of stop has more than {MAX_STOP_CHARACTERS:,} characters.", "stop")
    lengths = [length] * len(prompts) if isinstance(length, int) else length
    temperature = body.temperature if body.temperature is not None else model.temperature
    top_p = body.top_p if body.top_p is not None else model.top_p
    found: list[Request] = []
    for prompt, most in zip(prompts, lengths, strict=True):
        ids = tuple(prompt)
        for _ in range(count):
            seed = None if body.seed is None else (body.seed + len(found)) & _SEEDS
            sampling = Sampling(temperature, top_p if temperature else None, seed)
            found.append(Request(ids, most, sampling, stops, likeliest, settings.seconds))
    return tuple(found)
