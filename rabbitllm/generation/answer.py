"""One generation: takes ids, passes on text as it is generated, and returns an `Answer` with its timing.

Greedy by default. Stops at the end tokens of the model and of the tokenizer. On an interrupt the answer is the text
generated until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rabbitllm.errors import OptionError
from rabbitllm.generation.generation_stream import TextStream

END, LENGTH, INTERRUPTED = "end", "length", "interrupted"
"""The finish reasons of an answer."""
MAX_TOKENS = 512
"""Default number of tokens to generate."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 for greedy decoding; None is greedy too, unless `top_p` is given.
        top_p: choose among the likeliest tokens whose probabilities add up to this.
        seed: seed of the random numbers.
    """

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            OptionError: a number out of its range.
        """
        if self.temperature is not None and self.temperature < 0:
            raise OptionError(f"temperature={self.temperature} is negative.", "0 takes the likeliest token each time.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError(f"top_p={self.top_p} is no probability.", "Give more than 0 and at most 1.")

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled, not chosen greedily."""
        return self.temperature != 0 and (self.temperature is not None or self.top_p is not None)

    def arguments(self) -> dict[str, Any]:
        """Arguments for `generate`."""
        if not self.samples:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        given = {"temperature": self.temperature, "top_p": self.top_p}
        return {"do_sample": True, **{name: value for name, value in given.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a prompt.

    Attributes:
        text: the generated text, without special tokens.
        tokens: ids that were generated, special ones included.
        prompt_tokens: number of tokens of the prompt.
        finish: `END`, `LENGTH` or `INTERRUPTED`.
        first_seconds: time to the first token; None if none was generated.
        seconds: time to the last token.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish: str
    first_seconds: float | None
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate after the first token; None for fewer than two tokens."""
        if self.first_seconds is None or len(self.tokens) < 2 or self.seconds <= self.first_seconds:
            return None
        return (len(self.tokens) - 1) / (self.seconds - self.first_seconds)


def answer(
    model: Any,
    ids: Any,
    max_tokens: int,
    sampling: Sampling,
    write: Callable[[str], object],
    first: Callable[[], object] = lambda: None,
) -> Answer:
    """Generate an answer to a prompt.

    Args:
        model: a causal language model with its `tokenizer`.
        ids: the prompt, int64 of shape (1, tokens).
        max_tokens: maximum number of tokens to generate.
        sampling: how tokens are chosen.
        write: called with each piece of the text; its exceptions are passed on.
        first: called once, before the first piece.

    Raises:
        OptionError: the model generates no text.
        OSError: `write` raised it.
    """
    import torch

    check_generates(model)
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    begun = False

    def write_on(piece: str) -> None:
        nonlocal begun
        if not begun:
            begun = True
            first()
        write(piece)

    stream = TextStream(model.tokenizer, write_on)
    ends = end_tokens(model)
    pad = model.tokenizer.pad_token_id if model.tokenizer.pad_token_id is not None else next(iter(ends), 0)
    inputs = ids.to(model.device)
    start = time.perf_counter()
    interrupted = False
    try:
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_tokens,
            eos_token_id=ends or None,
            pad_token_id=pad,
            streamer=stream,
            num_beams=1,  # a checkpoint may recommend more, which cannot be streamed
            tokenizer=model.tokenizer,  # for stop strings in the checkpoint's generation config
            **sampling.arguments(),
        )
    except KeyboardInterrupt:
        interrupted = True
        stream.end()
    ended = bool(stream.tokens) and stream.tokens[-1] in ends
    return Answer(
        stream.text,
        tuple(stream.tokens),
        ids.shape[-1],
        INTERRUPTED if interrupted else END if ended else LENGTH,
        stream.times[0] - start if stream.times else None,
        (stream.times[-1] if stream.times else time.perf_counter()) - start,
    )


def check_generates(model: Any) -> None:
    """Refuse a model of a class that generates no text: a base model, an encoder, a classifier.

    Raises:
        OptionError: the model is of such a class.
    """
    if not model.can_generate():
        raise OptionError(
            f"The model is a {type(model).__name__}, as its config.json says, and generates no text.",
            "Call it for its outputs, or serve its embeddings. Text needs a checkpoint with a language-model head.",
        )


def end_tokens(model: Any) -> list[int]:
    """The tokens that end a text: those of the model's generation config and of its tokenizer.

    Raises:
        OptionError: the model has no tokenizer, or none that could be read.
    """
    if model.tokenizer is None:
        raise OptionError(
            "This model has no tokenizer, so text cannot be made of it.",
            "Put its tokenizer files into the folder that has its config.json.",
        )
    said = model.generation_config.eos_token_id if model.can_generate() else None
    ends = [] if said is None else [said] if isinstance(said, int) else [*said]
    own = model.tokenizer.eos_token_id
    return list(dict.fromkeys([*ends, *([own] if own is not None else [])]))


def context_of(model: Any) -> int | None:
    """Tokens that a prompt and its answer may have together; None if the model sets no limit."""
    found = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def most_new_tokens(model: Any, prompt_tokens: int, asked: int | None) -> int:
    """How many tokens may follow a prompt: `asked`, by default `MAX_TOKENS` limited by the rest of the context.

    Raises:
        OptionError: prompt and answer exceed the model's context.
    """
    context = context_of(model)
    if context is None:
        return asked if asked is not None else MAX_TOKENS
    left = context - prompt_tokens
    if left < (asked or 1):
        followed = f", with {asked:,} to follow" if asked is not None else ""
        raise OptionError(
            f"The prompt has {prompt_tokens:,} tokens{followed}; the model was made for {context:,} in all.",
            "Shorten it." if left < 1 else f"Shorten it, or ask for at most {left:,}.",
        )
    return asked if asked is not None else min(MAX_TOKENS, left)
