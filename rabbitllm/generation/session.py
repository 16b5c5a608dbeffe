"""Generation in the caller's thread, one sequence at a time: a single answer, or a chat session.

A session keeps the KV cache from one answer to the next. The prompt of each answer is the whole conversation as ids.
The cache goes back to the longest prefix that it shares with the prompt, and `generate` continues from there. For a
streamed model that is one pass over the new tokens alone. The answer is the same as with an empty cache, except for
rounding. An answer can be stopped between two layers. The cache keeps all tokens before the pass that was stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import ChatError
from rabbitllm.generation.kv_cache import CACHE_ARGUMENT, KeptCache, common_prefix, keeps
from rabbitllm.generation.media import has_media, media_prompt
from rabbitllm.generation.request import (
    Answer,
    AnswerWork,
    FinishReason,
    Prompt,
    PromptMedia,
    Sampling,
    check_generates,
    context_of,
    end_tokens,
    generate_arguments,
    tokenizer_of,
)
from rabbitllm.generation.streams import TextStream
from rabbitllm.generation.template import PLAIN_END, has_template, prompt_ids
from rabbitllm.telemetry.passes import EXPERT_TIERS, PINNED_UPLOAD, READ, UPLOAD, PassSums

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

MOVED = (READ, UPLOAD, PINNED_UPLOAD)
"""Stages whose bytes are part of an answer's work."""
_GREEDY = Sampling()
WITHOUT_LIMIT = 32_768
"""The most tokens of an answer if neither the caller nor the model's context sets a limit."""


class _Stopped(Exception):
    """Raised between two layers to end the pass of an answer that was stopped."""


class _EndOfText(StoppingCriteria):  # type: ignore[misc]
    """Stops a generation whose text was cut at a stop string."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        # called before the streamer receives the token, so one more than needed is generated
        is_over = self._stream.stop is not None
        return torch.full((input_ids.shape[0],), is_over, device=input_ids.device, dtype=torch.bool)


def answer(
    model: StreamedModel,
    ids: Any,
    max_tokens: int,
    sampling: Sampling,
    write: Callable[[str], object],
    first: Callable[[], object] = lambda: None,
    media: PromptMedia | None = None,
) -> Answer:
    """Generate an answer to a prompt. On an interrupt the answer is the text generated until then.

    Args:
        model: a model with its `tokenizer`.
        ids: the prompt, int64 of shape (1, tokens).
        max_tokens: maximum number of tokens to generate.
        sampling: how tokens are chosen.
        write: called with each piece of the text; its exceptions are passed on.
        first: called once, before the first piece.
        media: pictures and sounds of the prompt.

    Raises:
        OptionError: the model generates no text.
        OSError: `write` raised it.
    """
    check_generates(model)
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    ends = end_tokens(model)
    stream = TextStream(tokenizer_of(model), write, prompt_done=first)
    start = time.perf_counter()
    is_stopped = False
    try:
        _generate(model, ids, stream, generate_arguments(model, ends, sampling, max_tokens), media)
    except KeyboardInterrupt:
        is_stopped = True
        stream.end()
    return _answer(stream, ids.shape[-1], start, _finish_reason(stream, ends, is_stopped=is_stopped))


def _generate(
    model: StreamedModel,
    ids: torch.Tensor,
    stream: TextStream,
    arguments: Mapping[str, Any],
    media: PromptMedia | None = None,
) -> None:
    ids = ids.to(model.device)
    more = media.arguments(ids.shape[-1], model.device) if media is not None else {}
    mask = torch.ones_like(ids)
    # the tokenizer is for stop strings in the checkpoint's generation config
    model.generate(ids, attention_mask=mask, streamer=stream, tokenizer=model.tokenizer, **more, **arguments)


def _finish_reason(stream: TextStream, ends: list[int], *, is_stopped: bool) -> FinishReason:
    if is_stopped:
        return FinishReason.CANCELLED
    is_over = not stream.tokens or stream.tokens[-1] in ends or stream.stop is not None
    return FinishReason.STOP if is_over else FinishReason.LENGTH


def _answer(
    stream: TextStream,
    prompt_tokens: int,
    start: float,
    finish: FinishReason,
    kept: int = 0,
    work: AnswerWork | None = None,
) -> Answer:
    return Answer(
        stream.text,
        tuple(stream.tokens),
        prompt_tokens,
        finish,
        stream.times[0] - start if stream.times else None,
        (stream.times[-1] if stream.times else time.perf_counter()) - start,
        kept,
        work or AnswerWork(),
    )


def work_between(before: Mapping[str, PassSums], after: Mapping[str, PassSums]) -> AnswerWork:
    """The work between two states of a profiler.

    Args:
        before, after: kind of pass -> sums, as in `Profiler.sums`.
    """
    passes = tokens = 0
    moved, experts = Counter[str](), Counter[str]()
    for sign, sums in ((1, after), (-1, before)):
        for total in sums.values():
            passes += sign * total.passes
            tokens += sign * total.tokens
            moved.update({stage: sign * total.stages[stage].nbytes for stage in MOVED if stage in total.stages})
            experts.update({stage: sign * total.stages[stage].count for stage in EXPERT_TIERS if stage in total.stages})
    return AnswerWork(passes, tokens, dict(+moved), dict(+experts))


class Session:
    """Answers of one model, one at a time.

    Args:
        model: as `AutoModel.from_pretrained` returns it; with `profiling_mode=True` answers have `work`.
        max_new_tokens: maximum tokens of an answer; None for as many as the model's settings or its context allow.
        sampling: how tokens are chosen; its seed is set once, at the start of the session.

    Attributes:
        kept: the cache; None if the kind of model does not allow it, and each prompt is computed whole.

    Raises:
        ChatError: the model has no tokenizer, or is not a causal language model.
        OptionError: the model generates no text.
    """

    def __init__(self, model: StreamedModel, max_new_tokens: int | None = None, sampling: Sampling = _GREEDY) -> None:
        if model.tokenizer is None:
            raise ChatError(
                "The model has no tokenizer.", "Put the tokenizer files into the folder with its config.json."
            )
        check_generates(model)
        if model.config.is_encoder_decoder:
            raise ChatError(
                "The model has an encoder; chat needs a decoder-only model.",
                "Use model.generate from Python.",
            )
        self._model = model
        self._tokenizer = model.tokenizer
        self._max_new_tokens = max_new_tokens
        self._sampling = sampling
        self.kept = KeptCache(model) if keeps(model) else None
        self._sound = True
        self._ends = end_tokens(model)
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)

    @property
    def context(self) -> int | None:
        """Maximum tokens of prompt and answer together; None if the model sets no limit."""
        return context_of(self._model)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on this model for the user; usually none."""
        found = []
        if not has_template(self._tokenizer):
            found.append("the model has no chat template; the prompt is made of User: and Assistant: lines")
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
        messages: list[dict[str, Any]],
        write: Callable[[str], object],
        *,
        stopped: Callable[[], bool] = lambda: False,
        at_unit: Callable[[int, int], object] = lambda done, units: None,
    ) -> Answer:
        """Generate an answer.

        Args:
            messages: the conversation; its last message is a question. With pictures (see `media`) no cache is kept.
            write: called with each piece of the text.
            stopped: called before each unit of the model; True ends the answer, as a KeyboardInterrupt does.
            at_unit: called before each unit of the first pass, with the number of units done and the number of all.

        Raises:
            ChatError: no room is left in the context, or the chat template refuses the messages.
            MediaError: a picture cannot be used.
        """
        prompt = self._prompt(messages)
        ids, media = list(prompt.ids), prompt.media
        kept = self.kept if media is None else None  # other pictures may have the same ids
        arguments = generate_arguments(self._model, self._ends, self._sampling, self._room(len(ids)))
        arguments |= {"use_cache": True, "return_dict_in_generate": False}
        if not self._sound or media is not None:
            self.forget()
        held = self._go_back(ids) if kept is not None else 0
        stops = () if has_template(self._tokenizer) else (PLAIN_END,)
        stream = TextStream(
            self._tokenizer, write, stops=stops, prompt_done=lambda: self._mark(ids) if kept is not None else None
        )
        if kept is not None:
            arguments |= {CACHE_ARGUMENT: kept.cache, "cache_implementation": None}
        if stops:
            arguments["stopping_criteria"] = StoppingCriteriaList([_EndOfText(stream)])
        before = self._model.profiler.sums
        start = time.perf_counter()
        is_stopped = False
        self._sound = False
        try:
            with self._watched(stream, stopped, at_unit):
                _generate(self._model, torch.tensor([ids]), stream, arguments, media)
            if kept is not None:  # all tokens but the last, which was not fed to the model
                kept.hold([*ids, *stream.tokens][: kept.cache.get_seq_length()])
        except (_Stopped, KeyboardInterrupt):
            is_stopped = True
            stream.end()
            if kept is not None:
                done = len(ids) + len(stream.tokens) - 1 if stream.tokens else held
                kept.recover(done, [*ids, *stream.tokens])
        self._sound = True
        finish = _finish_reason(stream, self._ends, is_stopped=is_stopped)
        return _answer(stream, len(ids), start, finish, held, work_between(before, self._model.profiler.sums))

    def _prompt(self, messages: list[dict[str, Any]]) -> Prompt:
        if not has_media(messages):
            return Prompt(tuple(prompt_ids(self._tokenizer, messages)))

        def refused(error: Exception) -> ChatError:
            said = harmless(str(error), 300)
            return ChatError(
                f"The model's processor refuses this conversation: {said}.", "/reset removes all exchanges."
            )

        return media_prompt(self._model, messages, refused)

    def _room(self, prompt: int) -> int:
        """Maximum tokens of the answer."""
        own = self._max_new_tokens or self._model.generation_config.max_new_tokens
        left = self.context - prompt if self.context is not None else None
        if left is not None and left < 1:
            raise ChatError(
                f"The conversation has {prompt:,} tokens with this question, and the model's context {self.context:,}.",
                "/drop removes the oldest exchange, /drop 3 the oldest three, and /reset all exchanges.",
            )
        return min(limit for limit in (own, left, None if own or left else WITHOUT_LIMIT) if limit)

    def _go_back(self, ids: list[int]) -> int:
        """Cut the cache to the longest possible prefix of the prompt, and return its length."""
        if self.kept is None:
            return 0
        # at least one token is computed, since it yields the first one of the answer
        length = self.kept.go_back(min(common_prefix(ids, self.kept.ids), len(ids) - 1))
        self.kept.mark(ids[:length])
        return length

    def _mark(self, ids: list[int]) -> None:
        if self.kept is not None:
            self.kept.mark(ids)

    @contextlib.contextmanager
    def _watched(
        self, stream: TextStream, stopped: Callable[[], bool], at_unit: Callable[[int, int], object]
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
