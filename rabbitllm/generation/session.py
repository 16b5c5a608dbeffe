"""Generation in the caller's thread, one sequence at a time: a single answer, or a chat session.

A session keeps the KV cache from one answer to the next. The prompt of each answer is the whole conversation as ids.
The cache goes back to the longest prefix that it shares with the prompt, and `generate` continues from there. For a
streamed model that is one pass over the new tokens alone. The answer is the same as with an empty cache, except for
rounding. An answer can be stopped between two layers. The cache keeps all tokens before the pass that was stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from rabbitllm.errors import ChatError
from rabbitllm.generation.kv_cache import KeptCache, keeps
from rabbitllm.generation.request import (
    END,
    INTERRUPTED,
    LENGTH,
    Answer,
    Sampling,
    check_generates,
    context_of,
    end_tokens,
)
from rabbitllm.generation.streams import AnswerStream, TextStream
from rabbitllm.generation.template import PLAIN_END, common_length, has_template, prompt_ids
from rabbitllm.telemetry.passes import EXPERT_TIERS, NOTHING, PINNED_UPLOAD, READ, UPLOAD, PassSums


class EndOfText(StoppingCriteria):  # type: ignore[misc]
    """Stops a generation whose text was cut at a stop string."""

    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        # called before the streamer receives the token, so one more than needed is generated
        return torch.full((input_ids.shape[0],), self._stream.cut, device=input_ids.device, dtype=torch.bool)


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


PLACES: Mapping[str, str] = {
    READ: "from the disk",
    UPLOAD: "of that copied to the device",
    PINNED_UPLOAD: "from page-locked RAM to the device",
}
"""Stage -> source of its bytes, in words."""


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
            _sum(self.moved, other.moved),
            _sum(self.experts, other.experts),
        )


def work_between(before: Mapping[str, PassSums], after: Mapping[str, PassSums]) -> AnswerWork:
    """The work between two states of a profiler.

    Args:
        before, after: kind of pass -> sums, as in `Profiler.sums`.
    """
    found = AnswerWork()
    for kind, total in after.items():
        earlier = before.get(kind, PassSums())
        since = {
            stage: (spent.nbytes - then.nbytes, spent.count - then.count)
            for stage, spent in total.stages.items()
            for then in (earlier.stages.get(stage, NOTHING),)
        }
        found = found.plus(
            AnswerWork(
                total.passes - earlier.passes,
                total.tokens - earlier.tokens,
                {stage: nbytes for stage, (nbytes, _) in since.items() if stage in PLACES and nbytes},
                {stage: count for stage, (_, count) in since.items() if stage in EXPERT_TIERS and count},
            )
        )
    return found


def _sum(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


WITHOUT_LIMIT = 32_768
"""The most tokens of an answer if neither the caller nor the model's context sets a limit."""
BY_THE_MODEL = "end"
BY_THE_USER = "stopped"
BY_THE_CONTEXT = "context"
BY_THE_LIMIT = "limit"


class _Stopped(Exception):
    """Raised between two layers to end the pass of an answer that was stopped."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How answers are generated.

    Attributes:
        max_new_tokens: maximum tokens of an answer; None for as many as the model's settings or its context allow.
        sampling: how tokens are chosen; its seed is set once, at the start of the session.
    """

    max_new_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to a question.

    Attributes:
        text: text of the answer.
        tokens: number of generated tokens, the last one included.
        prompt_tokens: number of tokens of the conversation with the question.
        kept_tokens: how many of these were in the cache.
        ended: `BY_THE_MODEL`, `BY_THE_USER`, `BY_THE_CONTEXT` or `BY_THE_LIMIT`.
        first: seconds to the first token, or to the end if it was stopped before.
        seconds: total seconds.
        work: passes and bytes; all zero for a model without a profiler.
    """

    text: str
    tokens: int
    prompt_tokens: int
    kept_tokens: int
    ended: str
    first: float
    seconds: float
    work: AnswerWork

    @property
    def computed_tokens(self) -> int:
        """Number of prompt tokens that were not in the cache."""
        return self.prompt_tokens - self.kept_tokens

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first token; None if there was no further one."""
        further = self.seconds - self.first
        return (self.tokens - 1) / further if self.tokens > 1 and further > 0 else None


class Session:
    """Answers of one model, one at a time.

    Args:
        model: as `AutoModel.from_pretrained` returns it; with `profiling_mode=True` answers have `work`.
        choices: how to generate.
        keep: keep the cache between answers if the kind of model allows it.

    Attributes:
        kept: the cache; None if each prompt is computed whole.

    Raises:
        ChatError: the model has no tokenizer, or is not a causal language model.
        OptionError: the model generates no text.
    """

    def __init__(self, model: Any, choices: ChatOptions = ChatOptions(), *, keep: bool = True) -> None:
        if model.tokenizer is None:
            raise ChatError(
                "The model came without a tokenizer.", "Put the tokenizer's files into the folder of its config.json."
            )
        check_generates(model)
        if model.config.is_encoder_decoder:
            raise ChatError(
                "The model has an encoder, which reads a text again each time: it is none to chat with.",
                "Use model.generate from Python.",
            )
        self._model = model
        self._tokenizer = model.tokenizer
        self._choices = choices
        self.kept = KeptCache(model) if keep and keeps(model) else None
        self._sound = True
        self._ends = end_tokens(model)
        if choices.sampling.seed is not None:
            torch.manual_seed(choices.sampling.seed)

    @property
    def context(self) -> int | None:
        """Maximum tokens of prompt and answer together; None if the model sets no limit."""
        return context_of(self._model)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on this model for the user; usually none."""
        found = []
        if not has_template(self._tokenizer):
            found.append("the model has no chat template: it is given User: and Assistant: lines to go on with")
        if self.kept is None:
            found.append("of this kind of model no cache is kept: each answer reads the whole conversation again")
        return tuple(found)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the cache."""
        return len(self.kept.ids) if self.kept is not None else 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache, including copies of windows and states."""
        return self.kept.nbytes if self.kept is not None else 0

    def forget(self) -> None:
        """Empty the cache."""
        if self.kept is not None:
            self.kept.clear()

    def answer(
        self,
        messages: list[dict[str, str]],
        write: Callable[[str], object],
        *,
        stopped: Callable[[], bool] = lambda: False,
        at_unit: Callable[[int, int], object] = lambda done, units: None,
    ) -> ChatAnswer:
        """Generate an answer.

        Args:
            messages: the conversation; its last message is a question.
            write: called with each piece of the text.
            stopped: called before each unit of the model; True ends the answer, as a KeyboardInterrupt does.
            at_unit: called before each unit of the first pass, with the number of units done and the number of all.

        Raises:
            ChatError: no room is left in the context, or the chat template refuses the messages.
        """
        ids = prompt_ids(self._tokenizer, messages)
        room = self._room(len(ids))
        if not self._sound:
            self.forget()
        start_of_cache = self._go_back(ids)
        stream = AnswerStream(self._tokenizer, write, self._end_of_prompt(ids), ends=self._marks_of_the_end)
        before = self._model.profiler.sums
        start = time.perf_counter()
        self._sound = False
        try:
            with self._watched(stream, stopped, at_unit):
                made = self._generate(ids, room, stream)
            self._settle(made)
            ended = self._limit(room, len(ids))
            if not stream.tokens or stream.tokens[-1] in self._ends or stream.cut:
                ended = BY_THE_MODEL
        except (_Stopped, KeyboardInterrupt):
            stream.end()
            if self.kept is not None:
                done = len(ids) + len(stream.tokens) - 1 if stream.tokens else start_of_cache
                self.kept.recover(done, [*ids, *stream.tokens])
            ended = BY_THE_USER
        self._sound = True
        seconds = time.perf_counter() - start
        return ChatAnswer(
            text=stream.answer,
            tokens=len(stream.tokens),
            prompt_tokens=len(ids),
            kept_tokens=start_of_cache,
            ended=ended,
            first=stream.times[0] - start if stream.times else seconds,
            seconds=seconds,
            work=work_between(before, self._model.profiler.sums),
        )

    def _room(self, prompt: int) -> int:
        """Maximum tokens of the answer."""
        own = self._choices.max_new_tokens or self._model.generation_config.max_new_tokens
        left = self.context - prompt if self.context is not None else None
        if left is not None and left < 1:
            raise ChatError(
                f"The conversation has {prompt:,} tokens with this question, and the model's context {self.context:,}.",
                "/drop forgets the oldest exchange, /drop 3 the oldest three, and /reset all of them.",
            )
        return min(limit for limit in (own, left, None if own or left else WITHOUT_LIMIT) if limit)

    def _limit(self, room: int, prompt: int) -> str:
        return BY_THE_CONTEXT if self.context is not None and prompt + room >= self.context else BY_THE_LIMIT

    def _go_back(self, ids: list[int]) -> int:
        """Cut the cache to the longest possible prefix of the prompt, and return its length."""
        if self.kept is None:
            return 0
        # at least one token is computed, since it yields the first one of the answer
        length = self.kept.go_back(min(common_length(ids, self.kept.ids), len(ids) - 1))
        self.kept.mark(ids[:length])
        return length

    def _end_of_prompt(self, ids: list[int]) -> Callable[[], None]:
        return lambda: self.kept.mark(ids) if self.kept is not None else None

    @property
    def _marks_of_the_end(self) -> tuple[str, ...]:
        return () if has_template(self._tokenizer) else (PLAIN_END,)

    def _generate(self, ids: list[int], room: int, stream: AnswerStream) -> list[int]:
        """Generate, and return the ids of prompt and answer."""
        prompt = torch.tensor([ids], device=self._model.device)
        pad = self._tokenizer.pad_token_id
        given: dict[str, Any] = {
            "max_new_tokens": room,
            "num_beams": 1,
            "tokenizer": self._tokenizer,
            "use_cache": True,
            "return_dict_in_generate": False,
            "eos_token_id": self._ends or None,
            "pad_token_id": pad if pad is not None else next(iter(self._ends), 0),
            **self._choices.sampling.arguments(),
        }
        if self.kept is not None:
            given |= {"past_key_values": self.kept.cache, "cache_implementation": None}
        if stream.ends:
            given["stopping_criteria"] = StoppingCriteriaList([EndOfText(stream)])
        made = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=stream, **given)
        return [int(token) for token in made[0]]

    def _settle(self, made: Sequence[int]) -> None:
        """Record the contents of the cache after an answer: all tokens but the last, which was not fed to the model."""
        if self.kept is not None:
            self.kept.hold(list(made[: self.kept.cache.get_seq_length()]))

    @contextlib.contextmanager
    def _watched(
        self, stream: AnswerStream, stopped: Callable[[], bool], at_unit: Callable[[int, int], object]
    ) -> Iterator[None]:
        """Call `stopped` and `at_unit` before each unit, before any of its weights are loaded."""
        names = [placed.unit for placed in self._model.placement.units]
        done = 0

        def before(module: Any, args: Any) -> None:
            nonlocal done
            if stopped():
                raise _Stopped
            if not stream.tokens:
                at_unit(done, len(names))
                done += 1

        hooks = [self._model.get_submodule(name).register_forward_pre_hook(before, prepend=True) for name in names]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
