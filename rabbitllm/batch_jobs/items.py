"""What a line of the input asks for, and what is answered to it: plain facts, that can be pickled and compared.

    line of the input  ->  Item(index, key, asked)  ->  Answer(index, key, line)  ->  line of the output

Knows no files, no tokenizer and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rabbitllm.errors import OptionError

Key = str | int
"""How a line is known in the output: its `id`, its `custom_id`, else its number in the input, from 1."""
Pooling = Literal["last", "mean"]
"""How the last hidden states of a text become one vector: that of its last token, or the mean of all."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds for a line that does not say.

    Attributes:
        max_new_tokens: generated, at most.
        temperature, top_p, seed: see `rabbitllm.generation.answer.Sampling`; greedy without the first two.
            A line that is sampled gets the seed and its place in the input together, so that no two are alike.
        stop: texts at which an answer ends.
        pooling: of embeddings.
        normalise: embeddings to length one.
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
    """Go on with a text, or answer a conversation.

    Attributes:
        given: the text; token ids; or messages, each a mapping with `role` and `content`, for the chat template.
        max_new_tokens: generated, at most.
        temperature, top_p, seed: see `Defaults`; the seed is this line's own.
        stop: texts at which an answer ends; they are not part of it.
        n: how many answers.
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
    """How likely texts are behind a context.

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
    """Which of some texts is the likeliest behind a context.

    Attributes:
        context: may be empty.
        choices: at least one.
    """

    context: str
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Embed:
    """The last hidden state of texts, as one vector each.

    Attributes:
        texts: or token ids; at least one.
        is_listed: whether the line gave a list, and so gets one.
        pooling, normalise: see `Defaults`.
    """

    texts: tuple[str | tuple[int, ...], ...]
    is_listed: bool = False
    pooling: Pooling = "last"
    normalise: bool = False


@dataclass(frozen=True, slots=True)
class BatchCall:
    """A line of OpenAI's batch format, as it is; what its body asks for is looked at where the tokenizer is.

    Attributes:
        url: "/v1/chat/completions", "/v1/completions" or "/v1/embeddings".
        body: of the request.
        defaults: for what the body does not say.
    """

    url: str
    body: Mapping[str, Any]
    defaults: Defaults = field(default_factory=Defaults)


@dataclass(frozen=True, slots=True)
class Refused:
    """A line that cannot be answered; its error is its answer.

    Attributes:
        message: what was found, and what was expected.
        code: a word for programs.
        as_call: whether the answer is in the form of OpenAI's batches.
    """

    message: str
    code: str = "invalid_line"
    as_call: bool = False


Asked = Generate | ScoreItem | Choose | Embed | BatchCall | Refused


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the input.

    Attributes:
        index: its place among the lines that ask for something, from 0; empty lines have none.
        key: see `Key`.
        asked: what it asks for.
    """

    index: int
    key: Key
    asked: Asked


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """One line of the output.

    Attributes:
        index, key: of the item that it answers.
        line: the object of the line; an error among them is in place, under `error`.
        is_error: whether it is one.
        prompt_tokens, new_tokens: that were read, and generated.
    """

    index: int
    key: Key
    line: Mapping[str, Any]
    is_error: bool = False
    prompt_tokens: int = 0
    new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What one model takes on at a time; changes how fast answers come, and (`exact` aside) no greedy fp32 answer.

    Attributes:
        sequences: in one pass, at most.
        cache_bytes: of the KV cache, at most; None for half of what the weights leave free.
        cache_disk: of KV caches that memory has no room for, in a file, at most; None for a quarter of what is free
            where temporary files are, 0 for none.
        exact: compute every sequence's rows by themselves: its tokens are then those that it gets alone in any dtype,
            at the price of speed.
    """

    sequences: int = 256
    cache_bytes: int | None = None
    exact: bool = False
    cache_disk: int | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            OptionError: none at all of something.
        """
        for name in ("sequences", "cache_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value}, which is none at all.", "Give at least 1.")
