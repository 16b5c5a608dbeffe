"""Requests and their results, and the bounds that a model sets to them.

Both executors take a `Request` and give a `Result`: `session` runs one sequence in the caller's thread, `batch` runs
many. A batch reports a request by events: any number of `Delta`, then a `Result`, or `Failed` after an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rabbitllm.checkpoints.local import is_writable
from rabbitllm.errors import OptionError
from rabbitllm.generation._recommended import end_tokens as end_tokens
from rabbitllm.generation._recommended import neutral_arguments
from rabbitllm.generation._recommended import tokenizer_of as tokenizer_of
from rabbitllm.telemetry.passes import Drafts

if TYPE_CHECKING:
    import torch
    from transformers import LogitsProcessor

    from rabbitllm.engine.streamed_model import StreamedModel
    from rabbitllm.generation.grammar import Grammar, GrammarState
    from rabbitllm.generation.reasoning import Thoughts

MAX_TOKENS = 512
"""Default number of tokens to generate."""
SEEDS = (1 << 63) - 1
"""The largest seed; larger ones and negative ones are cut to these bits."""
NO_TOKEN = (1 << 31) - 1
"""An id that no token has."""
COLDEST = 1e-30
"""The least temperature to sample with: logits divided by less overflow float32, and the most likely token has all of
the probability long before."""
LETTERS_OF_A_TOKEN = 16
"""Letters of a token in a text of extremely long ones; in English it has 4 or 5."""
SMALL_CONTEXT = 1 << 14
"""Tokens; the letters of a prompt are limited as for a context of at least this size."""
MAX_LETTERS = 8 << 20
"""Limit of the letters of any prompt: a tokenizer takes some hundred bytes for each."""
_OF_SAMPLES = ("temperature", "top_p", "top_k", "min_p")
"""Fields of `Sampling` that have no effect on greedy decoding."""
_OF_ANSWERS = ("presence_penalty", "frequency_penalty")
"""Those that look at the answer alone."""
PENALTIES = (0.01, 100)
"""Range of `Sampling.repetition_penalty`: far beyond it scores become infinite."""
MAX_CHOICES = 128
"""The most answers to one prompt."""
Pooling = Literal["last", "mean"]
"""Pooling of last hidden states to one vector: that of the last token, or the mean of all."""
POOLINGS: tuple[Pooling, ...] = ("last", "mean")
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
    """The choice of tokens: greedy or sampled.

    Attributes:
        temperature: 0, or less than `COLDEST`, for greedy decoding; None is greedy too, unless `top_p`, `top_k` or
            `min_p` is given.
        top_p: choose among the most likely tokens whose probabilities add up to this.
        seed: seed of the random numbers.
        top_k: choose among this many of the most likely tokens; 0 for all, None for the number that the model
            recommends, else transformers' 50.
        min_p: choose among tokens that are at least this share as likely as the most likely one.
        repetition_penalty: divides the scores of tokens that are in the prompt or the answer; also if greedy. 1 for
            none, None for what the model recommends.
        presence_penalty: subtracted from the scores of tokens that are in the answer; also if greedy.
        frequency_penalty: likewise, times the number of their occurrences there.
        logit_bias: pairs of a token and what is added to its score; also if greedy.
        min_tokens: tokens before which no end token is chosen; None for what the model recommends.
        ignore_eos: whether the answer goes on after an end token.
    """

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            OptionError: a number out of its range.
        """
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise OptionError(f"temperature={self.temperature} is out of range.", "Use 0 for greedy decoding, or more.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError(f"top_p={self.top_p} is out of range.", "It must be above 0 and at most 1.")
        if self.top_k is not None and not (isinstance(self.top_k, int) and self.top_k >= 0):
            raise OptionError(f"top_k={self.top_k} is out of range.", "Use a whole number; 0 is for all tokens.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise OptionError(f"min_p={self.min_p} is out of range.", "It must be from 0 to 1.")
        least, most = PENALTIES
        if self.repetition_penalty is not None and not least <= self.repetition_penalty <= most:
            problem = f"repetition_penalty={self.repetition_penalty} is out of range."
            raise OptionError(problem, f"Use 1 for none, or another from {least} to {most}.")
        for name in _OF_ANSWERS:
            if not -2 <= (getattr(self, name) or 0) <= 2:
                raise OptionError(f"{name}={getattr(self, name)} is out of range.", "It must be from -2 to 2.")

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled, not chosen greedily."""
        if self.temperature is None:
            return any(value is not None for value in (self.top_p, self.top_k, self.min_p))
        return self.temperature >= COLDEST

    def over(self, usual: Sampling) -> Sampling:
        """These options where they are given, and those of `usual` where not."""
        return replace(usual, **{name: value for name, value in asdict(self).items() if value is not None})

    def nth(self, index: int) -> Sampling:
        """The sampling of one of several requests with the same options: each has its own seed, counted from 0."""
        return self if self.seed is None else replace(self, seed=(self.seed + index) & SEEDS)

    def arguments(self) -> dict[str, Any]:
        """Arguments for `generate`."""
        given = {name: getattr(self, name) for name in (*_OF_SAMPLES, "repetition_penalty")}
        # transformers takes no int where a float may stand
        options = {n: value if n == "top_k" else float(value) for n, value in given.items() if value is not None}
        greedy = {} if self.samples else dict.fromkeys(_OF_SAMPLES)
        return {"do_sample": self.samples, **options, **greedy}

    def in_use(self) -> dict[str, float]:
        """Option -> value, of those that have an effect; no temperature or 0 if greedy."""
        names = (*(_OF_SAMPLES if self.samples else ()), "repetition_penalty", *_OF_ANSWERS)
        neutral = {"top_p": 1, "min_p": 0, "repetition_penalty": 1, **dict.fromkeys(_OF_ANSWERS, 0)}
        return {name: value for name in names if (value := getattr(self, name)) not in (None, neutral.get(name))}

    def words(self, recommended: Sampling) -> str:
        """`temperature 0.6, top_p 0.95, from the model`."""
        options, usual = self.in_use(), recommended.in_use()
        if not options and not usual and not recommended.samples:
            return "greedy: the model recommends no sampling"
        lead = () if self.samples else ("greedy",)
        source = ("from the model",) if options == usual and self.samples == recommended.samples else ()
        return ", ".join((*lead, *(f"{name} {value:g}" for name, value in options.items()), *source))


def biases_of(by_token: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """Pairs for `Sampling.logit_bias`, from ids of tokens as texts.

    Raises:
        ValueError: a key is no id, or a bias no number from -100 to 100.
    """
    for name, bias in by_token.items():
        if not (name.isdecimal() and len(name) < 10):
            raise ValueError(f"expected ids of tokens as keys, found {name[:100]!r}")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"expected biases from -100 to 100, found {str(bias)[:100]}")
    return tuple((int(name), float(bias)) for name, bias in by_token.items())


@dataclass(frozen=True, slots=True)
class AnswerPenalties:
    """Lowers the scores of tokens that the answer has already: a logits processor for `generate`.

    Attributes:
        prompt: number of tokens before the answer.
        presence, frequency: see `Sampling`.
    """

    prompt: int
    presence: float
    frequency: float

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores of shape (1, vocabulary) after `input_ids` of shape (1, tokens)."""
        answer = input_ids[:, self.prompt :]
        counts = scores.new_zeros(scores.shape).scatter_add_(1, answer, scores.new_ones(answer.shape))
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Closes the reasoning after a number of its tokens: a logits processor for `generate`.

    Attributes:
        tokens: that number.
        opening, closing: tokens of the marks of reasoning.
        prompt: number of tokens before the answer.
        is_open: whether the prompt opens the reasoning.
    """

    tokens: int
    opening: int
    closing: int
    prompt: int
    is_open: bool

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores of shape (1, vocabulary) after `input_ids` of shape (1, tokens)."""
        answer = input_ids[0, self.prompt :].tolist()
        if self.closing in answer or not (self.is_open or self.opening in answer):
            return scores
        if len(answer) - (0 if self.is_open else answer.index(self.opening) + 1) < self.tokens:
            return scores
        forced = scores.new_full(scores.shape, -math.inf)
        forced[:, self.closing] = 0
        return forced


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """Pictures or sounds of a prompt, as its processor made them; equal to itself only.

    Attributes:
        tensors: arguments of `generate` in addition to the token ids; floating-point ones in the model's dtype.
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
        inputs: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            if name.endswith("token_type_ids") and tensor.dim() == 2 and tensor.shape[1] < tokens:
                longer = tensor.new_zeros(1, tokens)
                longer[:, : tensor.shape[1]] = tensor
                tensor = longer
            inputs[name] = tensor.to(device)
        return inputs


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a model reads it.

    Attributes:
        ids: token ids, including the placeholders of pictures and sounds.
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
        top_logprobs: number of most likely tokens whose log probabilities are reported with that of the chosen token;
            None for no probabilities at all. Only in a batch.
        seconds: time limit from submission to the end; None for no limit. Only in a batch.
        media: pictures and sounds of the prompt; None for text alone.
        shown: special tokens that are part of the text, and so of the text in which stop strings are looked for; others
            are left out.
        thoughts: how reasoning is told from the answer; None where all text is the answer.
        thinking_budget: closes the reasoning; None for no limit.
        grammar: what the answer must be; None for anything.
        priority: requests with lower numbers go first. Only in a batch.
        owner: whose request it is, such as a digest of an API key; owners take turns. None for nobody's. Only in a
            batch.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    seconds: float | None = None
    media: PromptMedia | None = None
    shown: frozenset[int] = frozenset()
    thoughts: Thoughts | None = None
    thinking_budget: ThinkingBudget | None = None
    grammar: Grammar | None = None
    priority: int = 0
    owner: str | None = None

    def __post_init__(self) -> None:
        """Let an answer end where its grammar does, also with `ignore_eos`: nothing can follow."""
        if self.grammar is not None and self.sampling.ignore_eos:
            object.__setattr__(self, "sampling", replace(self.sampling, ignore_eos=None))

    def ends(self, model: StreamedModel) -> list[int]:
        """The tokens that end its answer."""
        return self.grammar.ends(model) if self.grammar else end_tokens(model, ignored=self.sampling.ignore_eos)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its probability.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability, before temperature and top_p; None if not requested.
        top_logprobs: of a generated token, the most likely tokens at its position in descending order; see
            `Request.top_logprobs`.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A new piece of an answer.

    Attributes:
        text: never half a character, never part of a stop string; may be empty. With the reasoning and its marks.
        tokens: generated since the last piece, special ones such as the end of the text included.
    """

    text: str
    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an answer.

    Attributes:
        passes: number of passes over all layers.
        tokens: number of tokens in those passes.
        moved: stage -> bytes moved.
        experts: stage -> number of experts found there.
        drafts: what drafts brought; None without any.
    """

    passes: int = 0
    tokens: int = 0
    moved: Mapping[str, int] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)
    drafts: Drafts | None = None

    def plus(self, other: Work) -> Work:
        """The sum of both."""
        return Work(
            self.passes + other.passes,
            self.tokens + other.tokens,
            dict(Counter(self.moved) + Counter(other.moved)),
            dict(Counter(self.experts) + Counter(other.experts)),
            (self.drafts or Drafts()).plus(other.drafts or Drafts()) if self.drafts or other.drafts else None,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The whole answer to a request.

    Attributes:
        text: the generated text, without reasoning, special tokens and the stop string.
        tokens: ids that were generated, special ones included.
        prompt_tokens: number of tokens of the prompt.
        finish: why it ended.
        first_seconds: time to the first token; None if none was generated.
        seconds: time to the last token; in a batch, to the end.
        kept_tokens: how many tokens of the prompt were in the KV cache already.
        stop: the stop string that was generated, or None.
        work: passes and bytes; all zero for a model without a profiler, and in a batch.
        reasoning: the text between marks of reasoning; see `Request.thoughts`.
        reasoning_tokens: how many of the tokens are reasoning or its marks.
        forced_tokens: how many of them the grammar forced, so that they had no pass of their own.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish: FinishReason
    first_seconds: float | None
    seconds: float
    kept_tokens: int = 0
    stop: str | None = None
    work: Work = field(default_factory=Work)
    reasoning: str = ""
    reasoning_tokens: int = 0
    forced_tokens: int = 0

    @property
    def is_cut_off_in_thoughts(self) -> bool:
        """Whether the limit of tokens was reached before the answer began."""
        return self.finish is FinishReason.LENGTH and bool(self.reasoning) and not self.text.strip()

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate after the first token; None for fewer than two tokens."""
        if self.first_seconds is None or len(self.tokens) < 2 or self.seconds <= self.first_seconds:
            return None
        return (len(self.tokens) - 1) / (self.seconds - self.first_seconds)


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of an answer by an error.

    Attributes:
        error: the error; it concerns only this request, unless the weights could not be read.
    """

    error: Exception


Event = Delta | Result | Failed


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
        prompt_tokens, kept_tokens, new_tokens: totals of all requests.
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
        drafted_tokens: number of tokens that drafts proposed in passes.
        accepted_tokens: how many of them were the model's own choice, so that they took no pass.
        drafts: what drafts brought: its passes are those of each sequence that might have had a draft.
        undrafted: number of answers to pictures and sounds, for which the draft was not used.
        forced_tokens: number of tokens that grammars forced, so that they took no pass; of requests that ended.
        prompt_hits: number of requests that continued a prefix from disk.
        prompt_saved_tokens: tokens of these prefixes, which were not computed.
        prompt_bytes: size of the prefix cache on disk, other models' included.
        prompt_limit_bytes: limit of `prompt_bytes`.
        prompt_read_bytes, prompt_written_bytes: bytes read from it and written to it.
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
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafts: Drafts = field(default_factory=Drafts)
    undrafted: int = 0
    forced_tokens: int = 0
    prompt_hits: int = 0
    prompt_saved_tokens: int = 0
    prompt_bytes: int = 0
    prompt_limit_bytes: int = 0
    prompt_read_bytes: int = 0
    prompt_written_bytes: int = 0


def check_counts(limits: object, *names: str) -> None:
    """Refuse limits of these names that are neither None nor 1 or more.

    Raises:
        OptionError: one is less.
    """
    for name in names:
        value = getattr(limits, name)
        if value is not None and value < 1:
            raise OptionError(f"{name}={value}; expected at least 1.", "Use 1 or more.")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a batch.

    Attributes:
        running: maximum number of requests in one pass.
        waiting: maximum number of requests in the queue; those that begin at the next pass do not count.
        cache_bytes: limit of the KV caches of all requests, including the prefix cache; None for half of the memory
            that is free when the batch begins, on the devices that compute.
        chunk: tokens of one prompt in a pass, so that a long prompt does not block other requests; several prompts
            together may have more, see `_scheduler.TokenBudget`.
        exact: compute each request's rows separately: in any dtype it gets the same tokens as alone, but slower.
        swap_bytes: limit of KV caches of preempted requests, swapped out to RAM or a file until there is room again;
            None for four times `cache_bytes`, 0 to recompute them each time. See `swap.py`.
        swap_folder: folder of such files; None for a folder of temporary files that is not in memory.
        file_bytes: limit of KV caches of running requests in a file in `swap_folder`, used if a pass reads more bytes
            of weights than memory has for KV caches; None for a quarter of the free space there, 0 for none. See
            `_cache_file.py`.
        throughput: optimize throughput, not the latency of single answers: a pass takes as many prompt tokens as memory
            allows, and its sequences go through each layer in parts.
        draft: what proposes tokens for each request, which are checked in the same pass: a model with the same tokens,
            "mtp", "ngram" or "self"; "none" or None; or "auto", where each pass moves weights: "mtp" if the model has
            heads, else "ngram" if they are the same weights for any number of rows.
        prompt_bytes: limit of the prefix cache on disk, which survives restarts; 0 for none. See `_prompt_cache.py`.
        prompt_folder: folder of that cache; None for `prompts` in `locations.home()`.
        running_of_key, waiting_of_key: like `running` and `waiting`, of each `Request.owner`; None for no limit.
    """

    running: int = 64
    waiting: int = 256
    cache_bytes: int | None = None
    chunk: int = 512
    exact: bool = False
    swap_bytes: int | None = None
    swap_folder: Path | None = None
    throughput: bool = False
    file_bytes: int | None = 0
    draft: StreamedModel | Literal["auto", "mtp", "ngram", "self", "none"] | None = "auto"
    prompt_bytes: int = 0
    prompt_folder: Path | None = None
    running_of_key: int | None = None
    waiting_of_key: int | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            OptionError: a number below its minimum, a folder that takes no file, or exact with a prompt cache.
        """
        check_counts(self, "running", "waiting", "cache_bytes", "chunk", "running_of_key", "waiting_of_key")
        for name in ("swap_bytes", "file_bytes", "prompt_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise OptionError(f"{name}={value}; expected 0 or more.", "Use 0 for none.")
        if self.exact and self.prompt_bytes:
            raise OptionError(
                "The prompt cache shares prefixes among requests; exact=True computes each request by itself.",
                "Leave --exact or --prompt-cache out.",
            )
        if self.swap_folder is not None and not (self.swap_folder.is_dir() and is_writable(self.swap_folder)):
            raise OptionError(
                f"No swap file for KV caches can be created in {self.swap_folder}.",
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


OF_THE_MODEL = ("typical_p", "min_length", "min_new_tokens", "no_repeat_ngram_size", "suppress_tokens")
"""Options of `generate` that a checkpoint may recommend, and a request cannot change."""


def options_of(model: StreamedModel) -> dict[str, float]:
    """Those of `OF_THE_MODEL` that the model's generation config sets."""
    config = model.generation_config if model.can_generate() else None
    return {name: value for name in OF_THE_MODEL if (value := getattr(config, name, None)) is not None}


def recommended_sampling(model: StreamedModel) -> Sampling:
    """The sampling that the model's generation config recommends; greedy if it sets no `do_sample`, as transformers.

    Numbers without effect are left out.
    """
    if not model.can_generate():
        return Sampling()
    config = model.generation_config
    greedy = Sampling(repetition_penalty=config.repetition_penalty)
    if not config.do_sample:
        return greedy
    temperature, top_p, top_k, min_p = config.temperature, config.top_p, config.top_k, config.min_p
    return replace(
        greedy,
        temperature=1.0 if temperature is None else float(temperature),
        top_p=top_p if top_p is not None and 0 < top_p < 1 else None,
        top_k=None if top_k is None else max(int(top_k), 0),
        min_p=min_p if min_p is not None and 0 < min_p <= 1 else None,
    )


def generate_arguments(
    model: StreamedModel,
    request: Request,
    tokens: Sequence[int] = (),
    cache: Any = None,
    grammar: GrammarState | None = None,
) -> dict[str, Any]:
    """Arguments for transformers' `generate`, as both executors call it for one sequence; `eos_token_id` has the tokens
    that end the answer.

    Args:
        model: a model with its `tokenizer`.
        request: the request.
        tokens: tokens that were generated before this call.
        cache: KV cache to continue; None leaves it to `generate`.
        grammar: the state of the request's grammar.
    """
    import torch

    from rabbitllm.generation.kv_cache import CACHE_ARGUMENT

    ids = torch.tensor([[*request.prompt, *tokens]], device=model.device)
    sampling, pad = request.sampling, tokenizer_of(model).pad_token_id
    ends = end_tokens(model, ignored=sampling.ignore_eos) if grammar is None else grammar.end_tokens
    limits: dict[str, Any] = {"eos_token_id": ends or [NO_TOKEN]}  # None would be the model's own
    if sampling.min_tokens is not None:
        limits["min_new_tokens"] = max(sampling.min_tokens - len(tokens), 0)
    if sampling.logit_bias:
        own = model.generation_config.sequence_bias or ()
        biases = Counter({tuple(ids): bias for ids, bias in (own.items() if isinstance(own, Mapping) else own)})
        biases.update({(token,): bias for token, bias in sampling.logit_bias})
        limits["sequence_bias"] = [[[*ids], float(bias)] for ids, bias in biases.items()]
    processors: list[LogitsProcessor] = []
    if sampling.presence_penalty or sampling.frequency_penalty:
        before = 1 if model.config.is_encoder_decoder else len(request.prompt)
        penalties = sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0
        processors.append(AnswerPenalties(before, *penalties))
    processors += [each for each in (request.thinking_budget, grammar) if each is not None]
    return {
        "inputs": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": request.max_new_tokens - len(tokens),
        **neutral_arguments(model),
        "num_return_sequences": 1,
        "return_dict_in_generate": False,
        "use_cache": True,
        "pad_token_id": pad if pad is not None else next(iter(ends), 0),
        **({} if cache is None else {CACHE_ARGUMENT: cache}),
        **({"logits_processor": processors} if processors else {}),
        **({} if request.media is None else request.media.arguments(ids.shape[1], ids.device)),
        **sampling.arguments(),
        **limits,
    }


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Bounds that a model sets to prompts.

    Attributes:
        context: maximum tokens of a prompt and its answer together; None if the model sets no limit.
        vocabulary: number of token ids.
        is_set: whether `context` is less than the model's.
    """

    context: int | None
    vocabulary: int
    is_set: bool = False

    @classmethod
    def of(cls, model: StreamedModel, at_most: int | None = None) -> ModelLimits:
        """The bounds of a model.

        Args:
            model: the model.
            at_most: a limit of `context`; the model's holds if that is less.
        """
        context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)  # the positions of RoBERTa's kind begin after this row
        skipped = 0 if padding is None else padding + 1
        tokens = context - skipped if isinstance(context, int) and context > 0 else None
        is_set = at_most is not None and (tokens is None or at_most < tokens)
        return cls(at_most if is_set else tokens, model.get_input_embeddings().num_embeddings, is_set)

    @property
    def context_words(self) -> str:
        """`the model's context has 8,192`: the limit of tokens, for messages."""
        lead = "the context is limited to" if self.is_set else "the model's context has"
        return f"{lead} {self.context or 0:,}"

    def words_for(self, prompt_tokens: int) -> str:
        """The same, for a prompt that leaves no room for an answer."""
        return self.context_words + (", and an answer needs one" if prompt_tokens == self.context else "")

    @property
    def letters(self) -> int:
        """Maximum letters of a prompt; a longer text cannot fit into the context."""
        return min(max(self.context or MAX_LETTERS, SMALL_CONTEXT) * LETTERS_OF_A_TOKEN, MAX_LETTERS)

    def check_letters(self, letters: int, name: str = "The prompt") -> None:
        """Check the length of a text before it is tokenized.

        Args:
            letters: the length.
            name: name of the text in messages.

        Raises:
            OptionError: it cannot fit into the context, or is too long to tokenize.
        """
        if letters > self.letters:
            raise self.too_many_letters(letters, name)

    def too_many_letters(self, letters: int, name: str = "The prompt") -> OptionError:
        """The error for a text that is too long."""
        limit = f"expected at most {self.letters:,}"
        if self.context:
            limit = f"{self.context_words} tokens"
        return OptionError(f"{name} has {letters:,} letters; {limit}.", "Use a shorter text.")

    def check_ids(self, ids: Sequence[int], name: str = "The prompt") -> None:
        """Check token ids.

        Args:
            ids: the ids.
            name: name of the text in messages.

        Raises:
            OptionError: there are none, or one is not in the vocabulary.
        """
        if not ids:
            raise OptionError(f"{name} has no tokens.", "Use a longer text.")
        wrong = min(ids) if min(ids) < 0 else max(ids)
        if not 0 <= wrong < self.vocabulary:
            raise OptionError(f"{name} has the token {wrong}; the model's vocabulary has {self.vocabulary:,} tokens.")

    def check_bias(self, sampling: Sampling) -> None:
        """Check the tokens of `logit_bias`.

        Raises:
            OptionError: one is not in the vocabulary.
        """
        if wrong := [token for token, _ in sampling.logit_bias or () if token >= self.vocabulary]:
            raise OptionError(f"logit_bias has the token {wrong[0]}; the vocabulary has {self.vocabulary:,}.")

    def new_tokens(self, prompt_tokens: int, count: int | None, usual: int = MAX_TOKENS, *, cut: bool = False) -> int:
        """Maximum tokens after a prompt: `count`, by default `usual` limited by the rest of the context.

        Args:
            prompt_tokens: number of tokens of the prompt.
            count: number of tokens that the request wants; None for the default.
            usual: the default.
            cut: whether a larger `count` is cut to the rest of the context, and not refused.

        Raises:
            OptionError: prompt and answer exceed the model's context.
        """
        if self.context is None:
            return usual if count is None else count
        free = self.context - prompt_tokens
        if free < (min(count or 1, 1) if cut or count is None else count):
            new = f" and {count:,} new tokens were requested" if count is not None and not cut else ""
            raise OptionError(
                f"The prompt has {prompt_tokens:,} tokens{new}; {self.words_for(prompt_tokens)}.",
                "Shorten the prompt." if free < 1 else f"Shorten the prompt, or request at most {free:,} new tokens.",
            )
        return min(usual if count is None else count, free)
