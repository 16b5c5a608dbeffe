"""Items of the input and their answers, plain data that can be pickled and compared; and items from JSON. Pure.

    line of the input  ->  Item(index, key, task)  ->  BatchAnswer(index, key, line)  ->  line of the output

    {"prompt": …} | {"messages": […]} | {"tokens": […]}      generate; temperature, seed, stop, n, …
    {"context": …, "continuation": … or […]}                 score
    {"context": …, "choices": […]}                           choose
    {"input": … or […]}                                      embed; pooling, normalise
    {"custom_id": …, "method": "POST", "url": …, "body": {…}}    as in OpenAI's batches
    https://platform.openai.com/docs/api-reference/batch/request-input

Other keys belong to the user (a label, a column of a data set) and are ignored. Checks that need the tokenizer,
such as whether a prompt fits the model's context, come later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import AliasChoices, Field

from rabbitllm.errors import OptionError
from rabbitllm.generation.reasoning import Thinking
from rabbitllm.generation.request import POOLINGS, Pooling, Sampling, check_counts
from rabbitllm.server.api_error import APIError
from rabbitllm.server.schemas import NO_LIMIT, Count, GenerationBody, parsed

Key = str | int
"""The identity of a line in the output: its `id`, its `custom_id`, else its number in the input, from 1."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Default values for lines.

    Attributes:
        max_new_tokens: limit of generated tokens.
        sampling: how tokens are chosen. A sampled line combines the seed with its index in the input, so that all lines
            differ.
        stop: texts at which an answer ends.
        pooling: pooling of embeddings.
        normalise: whether to scale embeddings to length one.
        thinking: whether the model thinks before it answers a conversation, and how much.
    """

    max_new_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    pooling: Pooling = "last"
    normalise: bool = False
    thinking: Thinking = Thinking()  # noqa: RUF009  immutable


@dataclass(frozen=True, slots=True)
class Generate:
    """Continue a text, or answer a conversation.

    Attributes:
        prompt: a text; token ids; or messages for the chat template, each with `role` and `content` (a text, or a list
            of parts in OpenAI's form).
        max_new_tokens: limit of generated tokens.
        sampling: see `Defaults`; the seed is that of this line.
        stop: texts at which an answer ends; the answer excludes them.
        n: number of answers.
        thinking: see `Defaults`.
        may_cut: whether the limit is a default, which is cut to the rest of the context; a line's own is refused.
    """

    prompt: str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    n: int = 1
    thinking: Thinking = Thinking()  # noqa: RUF009  immutable
    may_cut: bool = False


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """The likelihood of texts after a context.

    Attributes:
        context: may be empty.
        continuations: at least one, each scored by itself.
        is_listed: whether the line gave a list, and so gets one.
    """

    context: str
    continuations: tuple[str, ...]
    is_listed: bool = False


@dataclass(frozen=True, slots=True)
class Choose:
    """The most likely of some texts after a context.

    Attributes:
        context: may be empty.
        choices: at least one.
    """

    context: str
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Embed:
    """The last hidden states of texts, pooled to one vector each.

    Attributes:
        texts: texts or token ids; at least one.
        is_listed: whether the line gave a list, and so gets one.
        pooling, normalise: see `Defaults`.
    """

    texts: tuple[str | tuple[int, ...], ...]
    is_listed: bool = False
    pooling: Pooling = "last"
    normalise: bool = False


@dataclass(frozen=True, slots=True)
class BatchCall:
    """A line of OpenAI's batch format, unchanged; its body is checked later, where the tokenizer is available.

    Attributes:
        url: "/v1/chat/completions", "/v1/completions" or "/v1/embeddings".
        body: the body of the request.
        defaults: for values that the body omits.
    """

    url: str
    body: Mapping[str, Any]
    defaults: Defaults = field(default_factory=Defaults)


@dataclass(frozen=True, slots=True)
class Refused:
    """An invalid line; its error is its answer.

    Attributes:
        message: the value found, and the value expected.
        code: a machine-readable word.
        as_call: whether to answer in OpenAI's batch format.
    """

    message: str
    code: str = "invalid_line"
    as_call: bool = False


Task = Generate | ScoreItem | Choose | Embed | BatchCall | Refused


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the input.

    Attributes:
        index: among the lines that are not empty, from 0.
        key: see `Key`.
        task: what it asks for.
    """

    index: int
    key: Key
    task: Task


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """One line of the output.

    Attributes:
        index, key: of the answered item.
        line: the output object; an error is in it under `error`.
        is_error: whether it is an error.
        prompt_tokens, new_tokens: numbers of tokens read and generated.
    """

    index: int
    key: Key
    line: Mapping[str, Any]
    is_error: bool = False
    prompt_tokens: int = 0
    new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of one model's batch; they change speed, but (except `exact`) no greedy fp32 answer.

    Attributes:
        sequences: limit of sequences in one pass.
        cache_bytes: limit of the KV cache; None for half of the memory that the weights leave free.
        cache_disk: limit of the file for KV caches that memory has no room for; None for a quarter of the free space
            in the folder of temporary files, 0 for none.
        exact: compute each sequence's rows separately: its tokens are then those that it gets alone in any dtype, at
            the cost of speed.
        draft: see `Limits` of a batch; a request to load a model for a draft model.
    """

    sequences: int = 256
    cache_bytes: int | None = None
    exact: bool = False
    cache_disk: int | None = None
    draft: Any = "auto"

    def __post_init__(self) -> None:
        """
        Raises:
            OptionError: a limit is below its minimum.
        """
        check_counts(self, "sequences", "cache_bytes")


URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
PARTS = ("text", "image_url", "input_audio")
"""Kinds of parts of a message."""
MAX_KEY_CHARACTERS = 1_000
_KINDS = ("prompt", "messages", "tokens", "continuation", "choices", "input")
_OF_CALLS: Mapping[str, type] = {
    **dict.fromkeys(("tools", "tool_choice", "response_format", "reasoning_effort", "chat_template_kwargs"), object),
    # also false and 0 change an answer where the model thinks
    **dict.fromkeys(("best_of", "echo", "logprobs", "top_logprobs", "enable_thinking", "thinking_token_budget"), int),
    **dict.fromkeys(("structured_outputs", "schema"), Mapping),
    "max_completion_tokens": object,
}
"""Options that change an answer, and are read in OpenAI's batch format only, if at all; of other types than these they
are columns of the user."""
_NAMES = {bool: "true or false", str: "a text", int: "a number", float: "a number", list: "a list", dict: "an object"}


class LineError(ValueError):
    """An invalid line; the message has the value found and the value expected."""


def pooling_of(word: str) -> Pooling:
    """The pooling method of an option.

    Raises:
        OptionError: the method is unknown.
    """
    for pooling in POOLINGS:
        if word == pooling:
            return pooling
    raise OptionError(f"pooling {word!r} does not exist.", f"Expected {' or '.join(POOLINGS)}.")


def key_of(value: Any, number: int) -> Key:
    """The key of a line: its `id`, its `custom_id`, else its number.

    Args:
        value: the JSON object of the line.
        number: number of the line, from 1.

    Raises:
        LineError: the id is invalid.
    """
    if not isinstance(value, Mapping):
        return number
    for name in ("id", "custom_id"):
        key = value.get(name)
        if key is None:
            continue
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise LineError(f"{name} is {_type_name(key)}; expected a text or a whole number")
        if isinstance(key, str) and not 0 < len(key) <= MAX_KEY_CHARACTERS:
            raise LineError(f"{name} has {len(key):,} characters; expected 1 to {MAX_KEY_CHARACTERS:,}")
        return key
    return number


def is_call(value: Any) -> bool:
    """Whether a line is in OpenAI's batch format, or attempts to be."""
    return isinstance(value, Mapping) and ("body" in value or ("url" in value and "custom_id" in value))


def parse_task(value: Any, index: int, defaults: Defaults) -> Task:
    """The request in a line; `Refused` if it is invalid.

    Args:
        value: the JSON object of the line.
        index: index of the line.
        defaults: for values that it omits.
    """
    try:
        return _parse_call(value, defaults) if is_call(value) else _parse_native(value, index, defaults)
    except LineError as error:
        return Refused(f"{error}.", as_call=is_call(value))
    except APIError as error:
        return Refused(error.message)


def _parse_call(value: Mapping[str, Any], defaults: Defaults) -> BatchCall:
    method, url, body = value.get("method", "POST"), value.get("url"), value.get("body")
    if method != "POST":
        raise LineError(f"method is {_shown(method)}; expected POST")
    if url not in URLS:
        raise LineError(f"url is {_shown(url)}; expected {', '.join(URLS)}")
    if not isinstance(body, Mapping):
        raise LineError(f"body is {_type_name(body)}; expected an object")
    if body.get("stream"):
        raise LineError("stream is not supported in batches; omit it")
    return BatchCall(url, body, defaults)


def _parse_native(value: Any, index: int, defaults: Defaults) -> Task:
    if not isinstance(value, Mapping):
        raise LineError(
            f'The line is {"null" if value is None else _type_name(value)}; expected an object, as {{"prompt": …}}'
        )
    names = [name for name in _KINDS if value.get(name) is not None]
    if len(names) != 1:
        listing = " and ".join(names) if names else "none of them"
        raise LineError(f"Expected one of {', '.join(_KINDS)}; the line has {listing}")
    field = names[0]
    if field in ("continuation", "choices"):
        return _parse_likelihood(value, field)
    if field == "input":
        return _parse_embedding(value, defaults)
    return _parse_generation(value, field, index, defaults)


def _parse_generation(value: Mapping[str, Any], field: str, index: int, defaults: Defaults) -> Generate:
    raw: Any = value[field]
    for name, type_ in _OF_CALLS.items():
        if isinstance(option := value.get(name), type_) and (option or "thinking" in name):
            raise LineError(f"{name} is not supported here; omit it, or write the line in OpenAI's batch format")
    if field == "prompt" and isinstance(raw, str):
        prompt: Any = raw
    elif field == "messages":
        prompt = _messages(raw)
    else:
        prompt = _tokens(raw, field)
    if not prompt:
        raise LineError(f"{field} is empty")
    options = parsed(LineOptions, {name: value[name] for name in _OPTIONS if value.get(name) is not None})
    limit = defaults.max_new_tokens
    if not (may_cut := options.max_tokens in (None, NO_LIMIT)):
        limit = options.max_tokens or 0
    if (options.min_tokens or 0) > limit:
        raise LineError(f"min_tokens is {options.min_tokens}, and the limit of new tokens {limit}")
    sampling = options.sampling.over(defaults.sampling.nth(index))
    stops = defaults.stop if options.stop is None else options.stops
    return Generate(prompt, limit, sampling, stops, options.n or 1, defaults.thinking, may_cut)


def _messages(messages: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(messages, list | tuple):
        raise LineError(f"messages is {_type_name(messages)}; expected a list")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise LineError(f"messages.{index} is not a message; expected an object with role and content")
        content = message.get("content")
        if isinstance(content, list | tuple):
            _check_parts(content, f"messages.{index}.content")
        elif not isinstance(content, str):
            raise LineError(f"messages.{index}.content is {_type_name(content)}; expected a text, or a list of parts")
    return tuple(dict(message) for message in messages)


def _check_parts(parts: Sequence[Any], where: str) -> None:
    for index, part in enumerate(parts):
        part_type = part.get("type") if isinstance(part, Mapping) else None
        if part_type not in PARTS or (part_type == "text" and not isinstance(part.get("text"), str)):
            raise LineError(f"{where}.{index} is not a message part; expected the type {' or '.join(PARTS)}")


def text_of_messages(messages: Any) -> tuple[str, int]:
    """The texts of messages of any form, and the number of their pictures and sounds."""
    if not isinstance(messages, list | tuple):
        return str(messages), 0
    texts, media = [], 0
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else message
        for part in content if isinstance(content, list | tuple) else [content]:
            is_media = isinstance(part, Mapping) and part.get("type") in PARTS[1:]
            media += is_media
            texts.append("" if is_media else str(part.get("text") if isinstance(part, Mapping) else part))
    return "".join(texts), media


def _tokens(ids: Any, field: str) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or not all(type(token) is int and token >= 0 for token in ids):
        expected = "a text" if field == "prompt" else "a list of token ids"
        raise LineError(f"{field} is {_type_name(ids)}; expected {expected}")
    return tuple(ids)


def _parse_likelihood(value: Mapping[str, Any], field: str) -> ScoreItem | Choose:
    context, raw = value.get("context", ""), value[field]
    if not isinstance(context, str):
        raise LineError(f"context is {_type_name(context)}; expected a text")
    listed = isinstance(raw, list | tuple)
    texts = tuple(raw) if listed else (raw,)
    if not texts or not all(isinstance(text, str) and text for text in texts) or (field == "choices" and not listed):
        expected = "a list of texts" if field == "choices" else "a text, or a list of texts"
        actual = _type_name(raw) if raw or not listed else "an empty list"
        raise LineError(f"{field} is {actual}; expected {expected}, none of them empty")
    return Choose(context, texts) if field == "choices" else ScoreItem(context, texts, listed)


def _parse_embedding(value: Mapping[str, Any], defaults: Defaults) -> Embed:
    raw = value["input"]
    if isinstance(raw, str):
        texts: tuple[Any, ...] = (raw,)
    elif isinstance(raw, list | tuple) and raw and all(type(token) is int for token in raw):
        texts, raw = (_tokens(raw, "input"),), ""
    elif isinstance(raw, list | tuple):
        texts = tuple(text if isinstance(text, str) else _tokens(text, "input") for text in raw)
    else:
        raise LineError(f"input is {_type_name(raw)}; expected a text, token ids, or a list of those")
    if not texts or not all(texts):
        raise LineError("input is empty, or has an empty text")
    pooling, normalise = value.get("pooling", defaults.pooling), value.get("normalise", defaults.normalise)
    if pooling not in POOLINGS:
        raise LineError(f"pooling is {_shown(pooling)}; expected {' or '.join(POOLINGS)}")
    if not isinstance(normalise, bool):
        raise LineError(f"normalise is {_type_name(normalise)}; expected true or false")
    return Embed(texts, not isinstance(raw, str), pooling, normalise)


class LineOptions(GenerationBody):
    """The options of a line in this package's format, with the types and bounds of a request to the server."""

    max_tokens: Count | None = Field(None, validation_alias=AliasChoices("max_tokens", "max_new_tokens"))


_OPTIONS = ("max_tokens", "max_new_tokens", "repeat_penalty", "n", "stop", *(field.name for field in fields(Sampling)))
KEYS = frozenset(
    {"id", "custom_id", "method", "url", "body", "context", *_KINDS, *_OPTIONS, *_OF_CALLS, "pooling", "normalise"}
)
"""All keys that are read; others are columns of the user."""


def _type_name(value: Any) -> str:
    return "missing" if value is None else _NAMES.get(type(value), f"of type {type(value).__name__}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
