"""Requests, their options, events and results, and what of a model bounds them.

A request is answered by events, in this order: any number of `Delta`, then one of `Finished` and `Failed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rabbitllm.checkpoints.local import is_writable
from rabbitllm.errors import OptionError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from rabbitllm.engine.streamed_model import StreamedModel

MAX_TOKENS = 512
"""Default number of tokens to generate."""


MEDIA_BYTES = 1 << 30
"""Limit of the tensors of pictures and sounds of all requests that wait or run; a single request may have more."""


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
            raise OptionError(f"temperature={self.temperature} is negative.", "Use 0 for greedy decoding, or more.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError(f"top_p={self.top_p} is not a probability.", "Use a value above 0 and up to 1.")

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


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """Pictures or sounds of a prompt, as its processor made them; equal to itself only.

    Attributes:
        tensors: arguments of `generate` besides the token ids; floating-point ones in the model's dtype.
    """

    tensors: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def arguments(self, tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Arguments for `generate`.

        Args:
            tokens: number of tokens of the prompt and those generated so far. Tensors that have one number for each
                token of the prompt, its kind, are extended by 0, the kind of text.
            device: device of the inputs.
        """
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            if name.endswith("token_type_ids") and tensor.dim() == 2 and tensor.shape[1] < tokens:
                longer = tensor.new_zeros(1, tokens)
                longer[:, : tensor.shape[1]] = tensor
                tensor = longer
            found[name] = tensor.to(device)
        return found


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a model reads it.

    Attributes:
        ids: token ids, with the places of pictures and sounds.
        media: pictures and sounds; None for text alone.
    """

    ids: tuple[int, ...]
    media: PromptMedia | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One generation.

    Attributes:
        prompt: token ids; at least one.
        max_new_tokens: maximum number of tokens to generate.
        sampling: how tokens are chosen; greedily if its temperature is 0.
        stop: stop strings, at which the answer ends; they are not part of it.
        likeliest: number of likeliest tokens whose log probabilities are reported with the chosen token's; None for
            no probabilities at all.
        seconds: time limit from submission to the end; None for no limit.
        media: pictures and sounds of the prompt; None for text alone.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    likeliest: int | None = None
    seconds: float | None = None
    media: PromptMedia | None = None


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
class AnswerWork:
    """The work of an answer.

    Attributes:
        passes: number of passes over all layers.
        tokens: number of tokens in those passes.
        moved: stage -> bytes moved.
        experts: stage -> number of experts found there.
    """

    passes: int = 0
    tokens: int = 0
    moved: Mapping[str, int] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)

    def plus(self, other: AnswerWork) -> AnswerWork:
        """The sum of both."""
        return AnswerWork(
            self.passes + other.passes,
            self.tokens + other.tokens,
            dict(Counter(self.moved) + Counter(other.moved)),
            dict(Counter(self.experts) + Counter(other.experts)),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole answer to a prompt.

    Attributes:
        text: the generated text, without special tokens.
        tokens: ids that were generated, special ones included.
        prompt_tokens: number of tokens of the prompt.
        finish: why it ended.
        first_seconds: time to the first token; None if none was generated.
        seconds: time to the last token.
        kept_tokens: how many tokens of the prompt were in the KV cache already.
        work: passes and bytes; all zero for a model without a profiler.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish: FinishReason
    first_seconds: float | None
    seconds: float
    kept_tokens: int = 0
    work: AnswerWork = field(default_factory=AnswerWork)

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate after the first token; None for fewer than two tokens."""
        if self.first_seconds is None or len(self.tokens) < 2 or self.seconds <= self.first_seconds:
            return None
        return (len(self.tokens) - 1) / (self.seconds - self.first_seconds)


@dataclass(slots=True)
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


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a batch.

    Attributes:
        running: maximum number of requests in one pass.
        waiting: maximum number of requests in the queue; those that begin at the next pass do not count.
        cache_bytes: limit of the KV caches of all requests, including the prefix cache; None for half of the memory
            that is free when the batch begins, on the devices that compute.
        chunk: tokens of one prompt in a pass, so that a long prompt does not block other requests; several prompts
            together may have more, see `scheduler.TokenBudget`.
        exact: compute each request's rows separately: in any dtype it gets the same tokens as alone, but slower.
        aside_bytes: limit of KV caches of preempted requests, swapped out to RAM or a file until there is room again;
            None for four times `cache_bytes`, 0 to recompute them each time. See `swap.py`.
        aside_folder: folder of such files; None for a folder of temporary files that is not in memory.
        file_bytes: limit of KV caches of running requests in a file in `aside_folder`, used if a pass reads more bytes
            of weights than memory has for KV caches; None for a quarter of the free space there, 0 for none. See
            `cache_file.py`.
        in_bulk: optimize throughput, not the latency of single answers: a pass takes as many prompt tokens as memory
            allows, and its sequences go through each layer in parts.
    """

    running: int = 64
    waiting: int = 256
    cache_bytes: int | None = None
    chunk: int = 512
    exact: bool = False
    aside_bytes: int | None = None
    aside_folder: Path | None = None
    in_bulk: bool = False
    file_bytes: int | None = 0

    def __post_init__(self) -> None:
        """
        Raises:
            OptionError: a number below its minimum, or a folder in which no file can be made.
        """
        for name in ("running", "waiting", "cache_bytes", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value}; expected at least 1.", "Use 1 or more.")
        for name in ("aside_bytes", "file_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise OptionError(f"{name}={value}; expected 0 or more.", "Use 0 for none.")
        if self.aside_folder is not None and not (self.aside_folder.is_dir() and is_writable(self.aside_folder)):
            raise OptionError(
                f"No swap file for KV caches can be created in {self.aside_folder}.",
                "Use an existing folder that is writable.",
            )


def check_generates(model: StreamedModel) -> None:
    """Refuse a model of a class that generates no text: a base model, an encoder, a classifier.

    Raises:
        OptionError: the model is of such a class.
    """
    if not model.can_generate():
        raise OptionError(
            f"The model is a {type(model).__name__} by its config.json, which does not generate text.",
            "Call it for its outputs, or serve its embeddings. Text needs a checkpoint with a language-model head.",
        )


def tokenizer_of(model: StreamedModel) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        OptionError: the model has no tokenizer, or none that could be read.
    """
    if model.tokenizer is None:
        raise OptionError(
            "This model has no tokenizer, so text cannot be tokenized.",
            "Put its tokenizer files into the folder with its config.json.",
        )
    return model.tokenizer


def end_tokens(model: StreamedModel) -> list[int]:
    """The tokens that end a text: those of the model's generation config and of its tokenizer.

    Raises:
        OptionError: see `tokenizer_of`.
    """
    said = model.generation_config.eos_token_id if model.can_generate() else None
    ends = [] if said is None else [said] if isinstance(said, int) else [*said]
    own = tokenizer_of(model).eos_token_id
    return list(dict.fromkeys([*ends, *([own] if own is not None else [])]))


def generate_arguments(
    model: StreamedModel, ends: list[int], sampling: Sampling, max_new_tokens: int
) -> dict[str, Any]:
    """Arguments for `generate`, for one answer with the model's tokenizer.

    Args:
        model: a model with its `tokenizer`.
        ends: see `end_tokens`.
        sampling: how tokens are chosen.
        max_new_tokens: maximum number of tokens to generate.
    """
    pad = tokenizer_of(model).pad_token_id
    return {
        "max_new_tokens": max_new_tokens,
        "num_beams": 1,  # a checkpoint may recommend more, which cannot be streamed
        "eos_token_id": ends or None,
        "pad_token_id": pad if pad is not None else next(iter(ends), 0),
        **sampling.arguments(),
    }


def context_of(model: StreamedModel) -> int | None:
    """Tokens that a prompt and its answer may have together; None if the model sets no limit."""
    found = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def most_new_tokens(context: int | None, prompt_tokens: int, asked: int | None, usual: int = MAX_TOKENS) -> int:
    """How many tokens may follow a prompt: `asked`, by default `usual` limited by the rest of the context.

    Raises:
        OptionError: prompt and answer exceed the model's context.
    """
    if context is None:
        return asked if asked is not None else usual
    left = context - prompt_tokens
    if left < (asked or 1):
        new = f" and {asked:,} new tokens were requested" if asked is not None else ""
        raise OptionError(
            f"The prompt has {prompt_tokens:,} tokens{new}; the model's context has {context:,}.",
            "Shorten the prompt." if left < 1 else f"Shorten the prompt, or request at most {left:,} new tokens.",
        )
    return asked if asked is not None else min(usual, left)
