"""From the body of `/v1/completions` to requests for the batch. Needs a tokenizer, but no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rabbitllm.generation.request import Request
from rabbitllm.server.api_error import bad
from rabbitllm.server.generation_requests import checked_length, requests_of
from rabbitllm.server.schemas import CompletionBody
from rabbitllm.server.settings import ModelLimits, Settings
from rabbitllm.server.unsupported import refuse_unsupported


@dataclass(frozen=True, slots=True)
class CompletionAsked:
    """A checked completion request.

    Attributes:
        requests: one for each choice.
        likeliest: see `Request`; None for no probabilities.
        echoes: the prompt's text that each choice begins with; empty if `echo` is off.
    """

    requests: tuple[Request, ...]
    likeliest: int | None = None
    echoes: tuple[str, ...] = ()


def completion_asked(body: CompletionBody, tokenizer: Any, model: ModelLimits, settings: Settings) -> CompletionAsked:
    """Check the body and make its requests.

    Raises:
        APIError: the body asks for something unsupported or invalid.
    """
    refuse_unsupported(body)
    if body.suffix:
        raise bad("suffix is not supported here.", "suffix", "unsupported_parameter")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad("best_of is not supported here, unless it is n.", "best_of", "unsupported_parameter")
    if body.echo and body.logprobs is not None:
        raise bad("echo with logprobs is not supported here.", "echo", "unsupported_parameter")
    given = listed(body.prompt)
    if not given:
        raise bad("There is no prompt.", "prompt")
    if len(given) * (body.n or 1) > settings.choices:  # before any of them becomes tokens
        raise bad(f"{len(given)} prompts with n={body.n or 1} are more than {settings.choices} choices.", "prompt")
    prompts = [token_ids(one, tokenizer) for one in given]
    asked = body.max_tokens if body.max_tokens is not None else settings.completion_new_tokens
    if body.max_tokens is None and model.context is not None:
        asked = min(asked, max(model.context - max(map(len, prompts)), 1))
    lengths = [checked_length(ids, asked, model, settings, "prompt") for ids in prompts]
    requests = requests_of(body, prompts, lengths, body.stops, body.logprobs, model=model, settings=settings)
    echoes: tuple[str, ...] = ()
    if body.echo:
        texts = [one if isinstance(one, str) else str(tokenizer.decode(one)) for one in given]
        echoes = tuple(text for text in texts for _ in range(body.n or 1))
    return CompletionAsked(requests, body.logprobs, echoes)


def listed(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Each prompt by itself, as text or as ids."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [one for one in prompt if isinstance(one, int)]
    return [ids] if ids else [one for one in prompt if not isinstance(one, int)]


def token_ids(prompt: str | list[int], tokenizer: Any) -> list[int]:
    """The token ids of a prompt; ids are returned unchanged."""
    return [int(token) for token in tokenizer(prompt)["input_ids"]] if isinstance(prompt, str) else prompt
