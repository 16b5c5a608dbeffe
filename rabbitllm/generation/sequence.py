"""A request that is being generated: its `generate` with its own random numbers, its events and its KV cache.

Runs in the batch's thread. A stopping criterion of `generate` receives every token as soon as it is chosen. A
generation ends at the model's end tokens, at a stop string or at its maximum length. It leaves `generate` by an
exception, which saves the pass for a token that is not needed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from rabbitllm.generation.joint_pass import Member
from rabbitllm.generation.request import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    Likelihood,
    Request,
    TokenLogprob,
    end_tokens,
)
from rabbitllm.generation.streams import StoppedText, TextStream
from rabbitllm.generation.swap import SwappedOutCache

AHEAD_TOKENS = 64
"""Number of future tokens of every sequence for which room is reserved, so that it is not preempted at once."""


@dataclass(frozen=True, slots=True)
class SequenceMemory:
    """The length of a sequence, which determines its memory.

    Attributes:
        tokens: number of tokens, including generated ones.
        room: number of tokens that may follow.
    """

    tokens: int
    room: int

    @property
    def soon(self) -> int:
        """Number of tokens after the next `AHEAD_TOKENS`, limited by `room`."""
        return self.tokens + min(self.room, AHEAD_TOKENS)


# Cuts text, which is added piece by piece, before the stop string that is complete first.


def _tell_nobody(event: Event) -> None:
    """Replaces the callback at the end, to break the reference cycle between the generation and its caller."""


class _Over(Exception):
    """Raised after the last token, to leave `generate`."""


class Generation:
    """A request that has begun.

    Args:
        model: a causal language model with its `tokenizer`.
        request: the request.
        notify: called with each event; an exception from it ends the generation.
        submitted: `time.monotonic()` of the submission.

    Attributes:
        cache: its KV cache, a `DynamicCache`; None leaves it to `generate`.
        tokens: ids generated so far.
        kept_tokens: number of prompt tokens taken from the prefix cache.
        ended: the finish reason; None until it has ended.
    """

    def __init__(self, model: Any, request: Request, notify: Callable[[Event], None], submitted: float) -> None:
        self.request = request
        self.cache: Any = None
        self.tokens: list[int] = []
        self.kept_tokens = 0
        self.ended: FinishReason | None = None
        self._notify = notify
        self._submitted = submitted
        self._first: float | None = None
        self._model = model
        self._ends = end_tokens(model)
        self._texts = StoppedText(request.stop)
        self._stream = TextStream(model.tokenizer, self._texts.add)
        self._stream.put(torch.empty(0, dtype=torch.long))  # the stream skips the prompt
        self._likelihoods = _Likelihoods() if request.likeliest is not None else None
        self._random = _beginning(request.sampling.seed, model.device) if request.sampling.samples else None

    @property
    def ids(self) -> list[int]:
        """The prompt and the generated tokens."""
        return [*self.request.prompt, *self.tokens]

    @property
    def room(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_new_tokens - len(self.tokens)

    def run(self, chunk: int | None) -> None:
        """Generate to the end; after a preemption it continues behind the tokens of the earlier run.

        Args:
            chunk: tokens of the prompt to prefill in one pass; None for all.
        """
        ids = torch.tensor([self.ids], device=self._model.device)
        pad = self._model.tokenizer.pad_token_id
        given: dict[str, Any] = {
            "max_new_tokens": self.room + 1,  # `made` ends it, not `generate`
            "num_beams": 1,
            "num_return_sequences": 1,
            "use_cache": True,
            "return_dict_in_generate": False,
            "eos_token_id": sorted(self._ends) or None,
            "pad_token_id": pad if pad is not None else next(iter(self._ends), 0),
            "prefill_chunk_size": chunk,
            **self.request.sampling.arguments(),
        }
        if self.cache is not None:
            given |= {"past_key_values": self.cache, "cache_implementation": None}
        if self._likelihoods is not None:
            given["logits_processor"] = LogitsProcessorList([self._likelihoods])
        given["stopping_criteria"] = StoppingCriteriaList([_Watch(self)])
        with contextlib.suppress(_Over):
            self._model.generate(ids, attention_mask=torch.ones_like(ids), **given)

    def made(self, token: int) -> None:
        """Take a token, report the text that it completes, and leave `generate` if it was the last one."""
        if self._first is None:
            self._first = time.monotonic()
        self.tokens.append(token)
        chosen = self._chosen(token)
        self._stream.put(torch.tensor([token]))
        if self._texts.stop is not None or token in self._ends:
            self.ended = FinishReason.STOP
        elif self.room <= 0:
            self.ended = FinishReason.LENGTH
        if self.ended is not None:
            self._stream.end()
        self._notify(Delta(self._texts.take(last=self.ended is not None), (chosen,)))
        if self.ended is not None:
            raise _Over

    def end(self, ended: FinishReason) -> Finished:
        """End it: report the text that was held back, and the result."""
        if self.ended is None:
            self.ended = ended
            self._stream.end()
            held = self._texts.take(last=True)
            if held:
                self._notify(Delta(held, ()))
        finished = Finished(
            self.ended,
            self._texts.stop,
            len(self.request.prompt),
            self.kept_tokens,
            len(self.tokens),
            time.monotonic() - self._submitted,
            None if self._first is None else self._first - self._submitted,
        )
        self._notify(finished)
        self._notify = _tell_nobody
        return finished

    def fail(self, error: Exception) -> None:
        """Report that it has failed."""
        self._notify(Failed(error))
        self._notify = _tell_nobody

    def draw(self, begins: bool) -> None:
        """Swap in the request's own random state around the choice of a token: called before it and after."""
        if self._random is None:
            return
        if begins:
            self._others = _random_state(self._model.device)
            _set_random_state(self._random, self._model.device)
        else:
            self._random = _random_state(self._model.device)
            _set_random_state(self._others, self._model.device)

    def _chosen(self, token: int) -> TokenLogprob:
        if self._likelihoods is None:
            return TokenLogprob(token)
        assert self.request.likeliest is not None
        return self._likelihoods.of(token, self.request.likeliest)


class _Watch(StoppingCriteria):  # type: ignore[misc]
    """Passes every token to its generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._generation.made(int(input_ids[0, -1]))
        return torch.zeros(1, dtype=torch.bool, device=input_ids.device)


class _Likelihoods(LogitsProcessor):  # type: ignore[misc]
    """Keeps the log probabilities before temperature and the like; `generate` calls it first."""

    def __init__(self) -> None:
        self._logprobs: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._logprobs = torch.log_softmax(scores[0].float(), dim=-1)
        return scores

    def of(self, token: int, likeliest: int) -> TokenLogprob:
        assert self._logprobs is not None
        best = self._logprobs.topk(min(likeliest, len(self._logprobs)))
        return TokenLogprob(
            token,
            float(self._logprobs[token]),
            tuple(Likelihood(*pair) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)),
        )


def _beginning(seed: int | None, device: torch.device) -> torch.Tensor:
    """The random state that `torch.manual_seed` would set; without a seed, a random one."""
    generator = torch.Generator(device="cuda" if device.type == "cuda" else "cpu")
    generator.manual_seed(seed if seed is not None else int.from_bytes(os.urandom(7), "little"))
    return generator.get_state()


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@dataclass(eq=False, slots=True)
class RequestHandle:
    """A submitted request. Its caller uses only `cancel`, the batch the rest.

    Attributes:
        wake: wakes the batch after a change.
        generation: its generation.
        member: its member of the joint passes, while it runs.
        is_cancelled: whether it was cancelled.
        deadline: deadline in `time.monotonic()`; None for no limit.
        held: its KV cache, if it was preempted and the cache is swapped out.
    """

    wake: Callable[[], None]
    generation: Generation
    member: Member | None = None
    is_cancelled: bool = False
    deadline: float | None = None
    held: SwappedOutCache | None = None

    def cancel(self) -> None:
        """End it after the current pass; may be called from any thread, any number of times."""
        self.is_cancelled = True
        self.wake()

    @property
    def text(self) -> SequenceMemory:
        """Its current and maximum length."""
        generation = self.generation
        return SequenceMemory(len(generation.request.prompt) + len(generation.tokens), generation.room)

    @property
    def cached_tokens(self) -> int:
        """How many tokens its cache has; 0 without one."""
        cache = self.generation.cache
        return cache.get_seq_length() if cache is not None else 0

    def whole_cache(self, continues: bool) -> Any | None:
        """The KV cache from which `generate` can continue: of all tokens except those of the next pass.

        None if the request has just begun, or if its cache does not report its number of tokens.

        Args:
            continues: whether the model can continue the cache with several tokens at once; otherwise the next pass
                must have one token.
        """
        if self.member is None or not self.member.is_outside:
            return None
        entry, cache = self.member.brings
        if not entry.past or entry.past >= self.text.tokens or not (continues or entry.length == 1):
            return None
        return cache
