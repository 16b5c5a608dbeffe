"""The direct executor: one sequence at a time, in the caller's thread. A single answer, or a chat.

A session keeps the KV cache from one answer to the next. The prompt of each answer is the whole conversation as ids.
The cache is cut to the longest prefix that it shares with the prompt, and `generate` continues from there. For a
streamed model that is one pass over the new tokens alone. The answer is the same as with an empty cache, except for
rounding. An answer can be stopped between two layers. The cache keeps all tokens before the pass that was stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteriaList

from rabbitllm.base.terminal import harmless
from rabbitllm.engine.kv_room import angles_change_after
from rabbitllm.errors import ChatError, OptionError
from rabbitllm.generation._recommended import check_options, stop_strings
from rabbitllm.generation.draft import Draft, Drafting
from rabbitllm.generation.kv_cache import (
    ConversationCache,
    can_go_back,
    common_prefix,
    empty_cache,
    keeps,
)
from rabbitllm.generation.reasoning import Thinking
from rabbitllm.generation.request import (
    FinishReason,
    ModelLimits,
    Prompt,
    Request,
    Result,
    Sampling,
    Work,
    check_generates,
    generate_arguments,
)
from rabbitllm.generation.streams import TextStream, Think
from rabbitllm.generation.template import REASONING, SYSTEM, USER, ChatTemplate, PromptRefused
from rabbitllm.generation.transformers_api import sample
from rabbitllm.telemetry.passes import EXPERT_TIERS, PINNED_UPLOAD, READ, UPLOAD, Drafts, PassSums

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

MOVED = (READ, UPLOAD, PINNED_UPLOAD)
"""Stages whose bytes are part of an answer's work."""
_GREEDY = Sampling()
WITHOUT_LIMIT = 32_768
"""The most tokens of an answer if neither the caller nor the model's context sets a limit."""

Write = Callable[[str], object]


class Stopped(Exception):
    """Raised between two layers to end the pass of an answer that was stopped."""


def generate(
    model: StreamedModel,
    request: Request,
    write: Write,
    *,
    cache: Any = None,
    drafting: Drafting | None = None,
    prompt_done: Callable[[], object] = lambda: None,
    think: Think | None = None,
) -> Result:
    """Generate the answer to a request. On an interrupt or `Stopped` the answer is the text generated until then.

    Args:
        model: a model with its `tokenizer`.
        request: the request. Random numbers continue the thread's, whatever its seed is.
        write: called with each piece of the text; its exceptions are passed on.
        cache: KV cache to continue; None leaves it to `generate`.
        drafting: the draft; not used for pictures and sounds.
        prompt_done: called once, before the first piece.
        think: called with each piece of reasoning; see `TextStream`.

    Raises:
        OSError: `write` raised it.
        NotANumberError: the model's scores of a token are none.
    """
    grammar = request.grammar.state(model) if request.grammar is not None else None
    arguments = generate_arguments(model, request, cache=cache, grammar=grammar)
    stream = TextStream.of(model, request, write, think=think, prompt_done=prompt_done)
    if drafting is None and grammar is not None and can_go_back(model):
        drafting = Drafting(None)  # for the tokens that the grammar forces
    if drafting is not None and request.media is None:
        arguments["custom_generate"] = drafting = drafting.streaming_to(stream, grammar)
    else:
        drafting = None
        arguments["custom_generate"] = partial(sample, streamer=stream)
    if request.stop or stop_strings(model):
        arguments["stopping_criteria"] = StoppingCriteriaList([partial(_is_at_stop_string, stream)])
    before = model.profiler.sums
    start = time.perf_counter()
    finish = None
    try:
        model.generate(streamer=stream, **arguments)
    except (Stopped, KeyboardInterrupt):
        finish = FinishReason.CANCELLED
        stream.end()
    if finish is None:
        is_over = not stream.tokens or stream.tokens[-1] in arguments["eos_token_id"] or stream.stop is not None
        finish = FinishReason.STOP if is_over else FinishReason.LENGTH
    brought = drafting.brought if drafting is not None else Drafts()
    first = stream.times[0] - start if stream.times else None
    end = stream.times[-1] if stream.times else time.perf_counter()
    work = replace(work_between(before, model.profiler.sums), drafts=brought if brought.passes else None)
    return replace(stream.result(request, grammar, finish, first, end - start), work=work)


def _is_at_stop_string(stream: TextStream, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    """A stopping criterion; it is asked before the stream gets a token, so one more than needed is generated."""
    return torch.full((len(input_ids),), stream.stop is not None, device=input_ids.device, dtype=torch.bool)


def answer(
    model: StreamedModel,
    request: Request,
    write: Write,
    prompt_done: Callable[[], object] = lambda: None,
    draft: Draft | None = None,
    think: Think | None = None,
) -> Result:
    """Generate a single answer; see `generate`. Random numbers begin at the request's seed.

    Raises:
        OptionError: the model generates no text, or its generation config demands what cannot be had.
    """
    check_generates(model)
    check_options(model)
    if request.sampling.seed is not None:
        torch.manual_seed(request.sampling.nth(0).seed)
    cache = empty_cache(model) if request.media is None and keeps(model) else None
    drafting = None if draft is None else Drafting(draft)
    return generate(model, request, write, cache=cache, drafting=drafting, prompt_done=prompt_done, think=think)


def work_between(before: Mapping[str, PassSums], after: Mapping[str, PassSums]) -> Work:
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
    return Work(passes, tokens, dict(+moved), dict(+experts))


class Session:
    """Answers of one model, one at a time.

    Args:
        model: as `AutoModel.from_pretrained` returns it; with `profiling_mode=True` answers have `work`.
        max_new_tokens: maximum tokens of an answer; None for as many as the model's settings or its context allow.
        sampling: how tokens are chosen; its seed is set once, at the start of the session.
        draft: what proposes tokens, after `prepare_draft`.
        stop: stop strings, at which an answer ends; they are not part of it.
        context: limit of the tokens of prompt and answer together; None for the model's.
        thinking: whether the model thinks, and how much.

    Attributes:
        sampling: how the tokens of the next answer are chosen.
        template: the model's chat template.
        cache: the KV cache; None if it cannot be reused, so that each prompt is computed whole.

    Raises:
        ChatError: the model has no tokenizer, or is not a causal language model.
        OptionError: the model generates no text, its generation config demands what cannot be had, or its chat template
            does not read `thinking`.
    """

    def __init__(
        self,
        model: StreamedModel,
        max_new_tokens: int | None = None,
        sampling: Sampling = _GREEDY,
        draft: Draft | None = None,
        stop: tuple[str, ...] = (),
        context: int | None = None,
        thinking: Thinking = Thinking(),  # noqa: B008  immutable
    ) -> None:
        if model.tokenizer is None:
            files = f"Put its tokenizer files into {model.name_or_path}, where its config.json is."
            raise ChatError("The model has no tokenizer.", files)
        check_generates(model)
        if model.config.is_encoder_decoder:
            raise ChatError(
                "The model has an encoder; chat needs a decoder-only model.", "Use model.generate from Python."
            )
        check_options(model)
        self._model = model
        self.template = ChatTemplate(model)
        self._limits = ModelLimits.of(model, context)
        self._limits.check_bias(sampling)
        self._stop = stop
        self._max_new_tokens = max_new_tokens
        self.sampling = sampling
        self._drafting = None if draft is None else Drafting(draft)
        if self._drafting is not None:
            self._drafting.prepare(model)  # what one answer teaches, the next one knows
        self._variables = self.template.thinking(thinking)
        self.cache = ConversationCache(model) if keeps(model) else None
        self._same_angles = angles_change_after(model.config.get_text_config(decoder=True))
        self._is_consistent = True
        if sampling.seed is not None:
            torch.manual_seed(sampling.nth(0).seed)

    @property
    def context(self) -> int | None:
        """Maximum tokens of prompt and answer together; None if the model sets no limit."""
        return self._limits.context

    @property
    def drafts(self) -> bool:
        """Whether answers have drafts, unless there are pictures."""
        return self._drafting is not None

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on this model for the user; usually none."""
        remarks = []
        if not self.template.is_there:
            remarks.append("the model has no chat template; the prompt is made of User: and Assistant: lines")
        if self.cache is None:
            remarks.append(f"{self.uncached}; each answer reads the full conversation")
        return tuple(remarks)

    @property
    def uncached(self) -> str:
        """Why there is no `cache`."""
        return "this model type has no reusable KV cache"

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the cache."""
        return len(self.cache.ids) if self.cache is not None else 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache, including copies of windows and states."""
        return self.cache.nbytes if self.cache is not None else 0

    def forget(self) -> None:
        """Empty the cache."""
        if self.cache is not None:
            self.cache.clear()

    def answer(
        self,
        messages: list[dict[str, Any]],
        write: Write,
        *,
        stopped: Callable[[], bool] = lambda: False,
        at_unit: Callable[[int, int], object] = lambda done, units: None,
        think: Think = lambda text, tokens: None,
    ) -> Result:
        """Generate an answer.

        Args:
            messages: the conversation; its last message is a question. With pictures (see `media`) no cache is kept.
                Answers may have `reasoning_content`; the template gets it if it reads it.
            write: called with each piece of the text.
            stopped: called before each unit of the model; True ends the answer, as a KeyboardInterrupt does.
            at_unit: called before each unit of the first pass, with the number of units done and the number of all.
            think: called with each piece of reasoning.

        Raises:
            ChatError: no room is left in the context, or the chat template refuses the messages.
            MediaError: a picture cannot be used.
        """
        prompt = self._prompt(messages)
        ids, media = list(prompt.ids), prompt.media
        stops = (*self._stop, *self.template.stops)
        request = Request(
            prompt.ids,
            self._new_tokens(len(ids), messages),
            self.sampling,
            stops,
            media=media,
            thoughts=self.template.thoughts(ids),
        )
        run = partial(generate, self._model, request, write, drafting=self._drafting, think=think)
        if not self._is_consistent or media is not None:
            self.forget()
        # other pictures may have the same ids, and a longer prompt has other angles than the tokens in the cache
        cache = self.cache if media is None and len(ids) <= self._same_angles else None
        if cache is None:
            with self._watched(stopped, at_unit) as prompt_done:
                return run(prompt_done=prompt_done)
        # at least one token is computed, since it yields the first one of the answer
        cached = cache.crop(min(common_prefix(ids, cache.ids), len(ids) - 1))
        cache.snapshot(ids[:cached])
        self._is_consistent = False
        with self._watched(stopped, at_unit) as prompt_done:

            def snapshot() -> None:
                prompt_done()
                cache.snapshot(ids)

            result = run(cache=cache.cache, prompt_done=snapshot)
        tokens = [*ids, *result.tokens]
        if result.finish is FinishReason.CANCELLED:
            cache.recover(len(tokens) - 1 if result.tokens else cached, tokens)
        else:  # all tokens but the last, which was not fed to the model
            cache.ids = tokens[: cache.cache.get_seq_length()]
        cache.crop(self._same_angles)
        self._is_consistent = True
        return replace(result, kept_tokens=cached)

    def _prompt(self, messages: list[dict[str, Any]]) -> Prompt:
        """The whole conversation, up to the beginning of the model's answer.

        Raises:
            ChatError: the template refuses these messages.
        """
        earlier = [dict(message) for message in messages]
        for message in earlier:
            message |= self.template.of_reasoning(message.pop(REASONING, ""))
        try:
            return self.template.prompt(earlier, **self._variables)
        except PromptRefused as error:
            reset = "/reset starts a new conversation."
            if messages[0]["role"] == SYSTEM and not error.by_processor:
                reset = "Try without a system prompt (/system -), or /reset."
            problem = f"The model's {error.program} refuses this conversation: {harmless(str(error), 300)}."
            raise ChatError(problem, reset) from error
        except OptionError as error:
            raise ChatError(error.problem, _shorter(messages)) from None

    def _new_tokens(self, prompt: int, messages: list[dict[str, Any]]) -> int:
        """Maximum tokens of the answer."""
        requested = self._max_new_tokens or self._model.generation_config.max_new_tokens
        try:
            return self._limits.new_tokens(prompt, requested, self.context or WITHOUT_LIMIT, cut=True)
        except OptionError:
            raise ChatError(
                f"The conversation has {prompt:,} tokens with this question; {self._limits.words_for(prompt)}.",
                _shorter(messages),
            ) from None

    @contextlib.contextmanager
    def _watched(
        self, stopped: Callable[[], bool], at_unit: Callable[[int, int], object]
    ) -> Iterator[Callable[[], None]]:
        """Call `stopped` and `at_unit` before each unit, before any of its weights are loaded.

        Yields:
            A function to call after the first pass.
        """
        names = [placed.unit for placed in self._model.placement.units]
        done: int | None = 0

        def before(module: Any, args: Any) -> None:
            nonlocal done
            if stopped():
                raise Stopped
            if done is not None:
                at_unit(done, len(names))
                done += 1

        def prompt_done() -> None:
            nonlocal done
            done = None
            if self._model.placement.is_resident:  # a hook of a layer would keep layers from one call
                for hook in hooks[1:]:
                    hook.remove()

        hooks = [self._model.get_submodule(name).register_forward_pre_hook(before, prepend=True) for name in names]
        try:
            yield prompt_done
        finally:
            for hook in hooks:
                hook.remove()


def _shorter(messages: list[dict[str, Any]]) -> str:
    """What to do about a conversation that is too long."""
    if sum(message["role"] == USER for message in messages) == 1:
        return "Shorten the message."
    return "/drop removes the oldest exchange, /drop 3 the oldest three, and /reset all exchanges."
