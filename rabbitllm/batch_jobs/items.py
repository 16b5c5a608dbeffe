"""Items of the input and their answers: plain data that can be pickled and compared.

    line of the input  ->  Item(index, key, asked)  ->  BatchAnswer(index, key, line)  ->  line of the output

Independent of files, tokenizers and models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rabbitllm.errors import OptionError

Key = str | int
"""The identity of a line in the output: its `id`, its `custom_id`, else its number in the input, from 1."""
Pooling = Literal["last", "mean"]
"""Pooling of last hidden states to one vector: that of the last token, or the mean of all."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Default values for lines.

    Attributes:
        max_new_tokens: limit of generated tokens.
        temperature, top_p, seed: see `rabbitllm.generation.request.Sampling`; greedy without the first two.
            A sampled line combines the seed with its index in the input, so that all lines differ.
        stop: texts at which an answer ends.
        pooling: pooling of embeddings.
        normalise: whether to scale embeddings to length one.
    """

    max_new_tokens: int = 512
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    pooling: Pooling = "last"
    normalise: bool = False


@dataclass(frozen=True, slots=True)
class Generate:
    """Continue a text, or answer a conversation.

    Attributes:
        given: the text; token ids; or messages, each a mapping with `role` and `content`, for the chat template.
        max_new_tokens: limit of generated tokens.
        temperature, top_p, seed: see `Defaults`; the seed is that of this line.
        stop: texts at which an answer ends; the answer excludes them.
        n: number of answers.
    """

    given: str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
    max_new_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1


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
    """The likeliest of some texts after a context.

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


Asked = Generate | ScoreItem | Choose | Embed | BatchCall | Refused


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the input.

    Attributes:
        index: among the lines that are not empty, from 0.
        key: see `Key`.
        asked: the request in it.
    """

    index: int
    key: Key
    asked: Asked


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
            the price of speed.
    """

    sequences: int = 256
    cache_bytes: int | None = None
    exact: bool = False
    cache_disk: int | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            OptionError: a limit is below its minimum.
        """
        for name in ("sequences", "cache_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value}, which is none at all.", "Give at least 1.")
