"""A request that is being generated: its tokens, its KV cache, its random numbers and its events.

Runs in the batch's thread. A stopping criterion of `generate` receives every token once it is chosen. A sequence
ends at the model's end tokens, at a stop string or at its maximum length. It leaves `generate` by an exception, which
saves the pass for a token that is not needed. A preempted sequence keeps its tokens and continues after them.
"""

from __future__ import annotations

import enum
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from rabbitllm.generation._coroutines import Coroutine, Coroutines
from rabbitllm.generation._lookahead import Lookahead
from rabbitllm.generation._rewind import MAX_CARRIED
from rabbitllm.generation.request import (
    Delta,
    Event,
    Failed,
    FinishReason,
    Request,
    Result,
    TokenLogprob,
    generate_arguments,
)
from rabbitllm.generation.streams import TextStream
from rabbitllm.generation.swap import SwappedOutCache
from rabbitllm.generation.transformers_api import sample

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel
    from rabbitllm.generation.grammar import GrammarState

logger = logging.getLogger(__name__)

RESERVED_TOKENS = 64
"""Number of future tokens for which each sequence reserves memory, so that it is not preempted at once."""


@dataclass(frozen=True, slots=True)
class SequenceLength:
    """The length of a sequence, which determines its memory.

    Attributes:
        tokens: number of tokens, including generated ones.
        room: number of tokens that may follow.
    """

    tokens: int
    room: int

    @property
    def reserved(self) -> int:
        """Number of tokens after the next `RESERVED_TOKENS`, limited by `room`."""
        return self.tokens + min(self.room, RESERVED_TOKENS)


class SequenceStatus(enum.Enum):
    """Where a sequence is: in the queue, in passes, in the queue again with its tokens, or reported as ended."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class _Over(Exception):
    """Raised after the last token, to leave `generate`."""


class Sequence:
    """A request that was submitted to a batch. Its caller uses only `cancel`, the batch the rest.

    Args:
        model: a causal language model with its `tokenizer`.
        request: the request.
        notify: called with each event; an exception from it cancels the request.
        wake: wakes the batch after a change.

    Attributes:
        request: see above.
        status: set by the scheduler, when it moves the sequence.
        tokens: ids generated so far.
        num_cached_tokens: prompt tokens taken from the prefix cache.
        num_shared_tokens: tokens that another sequence in memory begins with too.
        cache: its KV cache, a `DynamicCache`; None leaves it to `generate`.
        swapped_out: its KV cache, if it was preempted and the cache is swapped out.
        coroutine: its suspended call of `generate`, while it runs.
        lookahead: its drafts and forced tokens, while it runs; None if it has none.
        grammar: the state of its grammar; None if it has none.
        is_divisible: whether some of the tokens that it brings into a pass may be left to the next one.
        overtaken: how many others were admitted before it, although it has waited longest or first lacked memory.
        is_cancelled: whether it was cancelled.
        deadline: deadline in `time.monotonic()`; None for no limit.
        finish_reason: None until it has ended.
    """

    def __init__(
        self, model: StreamedModel, request: Request, notify: Callable[[Event], object], wake: Callable[[], object]
    ) -> None:
        self.request = request
        self.status = SequenceStatus.WAITING
        self.num_cached_tokens = 0
        self.num_shared_tokens = 0
        self.cache: Any = None
        self.swapped_out: SwappedOutCache | None = None
        self.coroutine: Coroutine | None = None
        self.lookahead: Lookahead | None = None
        self.grammar = request.grammar.state(model) if request.grammar is not None else None
        self.is_divisible = False
        self.overtaken = 0
        self.is_cancelled = False
        self._submitted = time.monotonic()
        self.deadline = self._submitted + request.seconds if request.seconds is not None else None
        self.finish_reason: FinishReason | None = None
        self._model = model
        self._notify: Callable[[Event], object] | None = notify
        self._wake = wake
        self._first: float | None = None
        self._ends: list[int] = []
        self._pieces: list[str] = []
        self._stream = TextStream.of(model, request, self._pieces.append)
        self.tokens = self._stream.tokens
        self._logprobs = _Logprobs() if request.top_logprobs is not None else None
        self._processors: LogitsProcessorList | None = None
        self._random = _seeded(request.sampling.seed, model.device) if request.sampling.samples else None

    def cancel(self) -> None:
        """End it after the current pass; may be called from any thread, any number of times."""
        self.is_cancelled = True
        self._wake()

    @property
    def ids(self) -> list[int]:
        """The prompt and the generated tokens."""
        return [*self.request.prompt, *self.tokens]

    @property
    def length(self) -> SequenceLength:
        """Its current and maximum length."""
        new = len(self.tokens)
        return SequenceLength(len(self.request.prompt) + new, self.request.max_new_tokens - new)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens in its KV cache; 0 without one."""
        return self.cache.get_seq_length() if self.cache is not None else 0

    @property
    def prefilling(self) -> tuple[int, ...] | None:
        """Its prompt, if that is not completely in its cache yet."""
        prompt = self.request.prompt
        return prompt if self.cache is not None and self.num_computed_tokens < len(prompt) else None

    @property
    def num_new_tokens(self) -> int:
        """Tokens that it brings into the next pass; 0 if it does not wait for one."""
        return self.coroutine.tokens if self.coroutine is not None and self.coroutine.is_outside else 0

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that its KV cache lacks."""
        return self.length.tokens - self.num_computed_tokens

    def limit_rows(self, rows: int | None) -> None:
        """Leave all but so many of the tokens that it brings into the next pass to later ones; None for no limit."""
        if self.coroutine is not None:
            self.coroutine.rows = rows

    @property
    def has_ended(self) -> bool:
        """Whether it has left `generate`."""
        return self.coroutine is None or bool(self.coroutine.dead)

    @property
    def error(self) -> BaseException | None:
        """The error by which it has left `generate`, if any."""
        return self.coroutine.error if self.coroutine is not None else None

    @property
    def has_dropped_cache(self) -> bool:
        """Whether the model goes on with another KV cache than `cache`, as Phi-3 does from some length on."""
        if self.cache is None or self.coroutine is None or not self.coroutine.is_outside:
            return False
        return self.coroutine.inputs[1] is not self.cache

    def resumable_cache(self, *, continues: bool) -> Any | None:
        """The KV cache from which `generate` can continue: of all tokens except those of the next pass.

        None if the request has just begun, if its cache does not report its number of tokens, or has no state.

        Args:
            continues: whether the model can continue the cache with several tokens at once; otherwise the next pass
                must have one token.
        """
        cache = self.waiting_cache
        if self.coroutine is None or cache is None or self.request.media is not None:
            return None  # positions after pictures depend on these, so it begins again with them
        entry, _ = self.coroutine.inputs
        if not entry.past or entry.past >= self.length.tokens or not (continues or entry.length == 1):
            return None
        return cache

    @property
    def waiting_cache(self) -> Any | None:
        """The KV cache with which it waits for its next pass, also one of `generate`, if that is all it keeps."""
        if self.coroutine is None or not self.coroutine.is_outside or self.coroutine.has_state:
            return None
        return self.coroutine.inputs[1]

    @property
    def can_look_ahead(self) -> bool:
        """Whether its next pass may have further rows: if that computes its last token."""
        if self.lookahead is None or not self.num_new_tokens or self.has_dropped_cache:
            return False
        more, is_prompt = self.lookahead, self.num_new_tokens > 1
        if more.lacks > MAX_CARRIED or (is_prompt and not more.takes_prompts):
            return False
        return self.num_computed_tokens + more.lacks + self.num_new_tokens == self.length.tokens

    def start(self, coroutines: Coroutines, chunk: int | None, lookahead: Lookahead | None = None) -> None:
        """Begin to generate, or continue after the tokens of an earlier run; it stops before its first pass.

        Args:
            coroutines: the coroutines of its batch.
            chunk: tokens of the prompt to prefill in one pass; None for all.
            lookahead: its drafts; None for none.
        """
        self.lookahead = lookahead
        self.coroutine = coroutines.add(
            lambda: self._generate(chunk),
            self._swap_random_state,
            reads_media=self.request.media is not None,
            lookahead=lookahead,
        )

    def stop(self, coroutines: Coroutines) -> None:
        """Stop generating, between two passes."""
        if self.coroutine is not None and not self.has_ended:
            coroutines.cancel(self.coroutine)
        if self.lookahead is not None:
            self.lookahead.close()
            self.lookahead = None
        self.coroutine = None  # its stack holds much memory, and the caller may keep the sequence

    def finish(self, reason: FinishReason) -> Result:
        """Report the text that was withheld, and the result."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._stream.end()
            if self._pieces:
                self._report(Delta("".join(self._pieces), ()))
        first = None if self._first is None else self._first - self._submitted
        seconds = time.monotonic() - self._submitted
        result = self._stream.result(self.request, self.grammar, self.finish_reason, first, seconds)
        result = replace(result, kept_tokens=self.num_cached_tokens)
        self._report(result)
        self._notify = None  # breaks the reference cycle with the caller
        return result

    def fail(self, error: Exception) -> None:
        """Report that it has failed."""
        self._report(Failed(error))
        self._notify = None

    def _report(self, event: Event) -> None:
        try:
            if self._notify is not None:
                self._notify(event)
        except Exception:
            logger.debug("The client has disconnected.", exc_info=True)
            self.is_cancelled = True

    def _generate(self, chunk: int | None) -> None:
        arguments = generate_arguments(self._model, self.request, self.tokens, self.cache, self.grammar)
        self._ends = arguments["eos_token_id"]
        arguments["stopping_criteria"] = StoppingCriteriaList([self._take])
        arguments |= {"prefill_chunk_size": chunk, "custom_generate": self._choose_tokens}
        try:
            self._model.generate(**arguments)
        except _Over:
            if self.lookahead is not None:
                self.lookahead.end()

    def _choose_tokens(
        self, model: Any, input_ids: torch.Tensor, logits_processor: LogitsProcessorList, **options: Any
    ) -> Any:
        """transformers' loop of one token after the other, called by `generate`.

        The processors are those of the first run: some count from the end of the prompt, which for a later run is the
        end of the tokens so far, or remember what they have seen.
        """
        if self._processors is None:
            before = [] if self._logprobs is None else [self._logprobs]
            self._processors = LogitsProcessorList([*before, *logits_processor])
        return sample(model, input_ids, logits_processor=self._processors, **options)

    def _take(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """A stopping criterion that takes each token, reports the text that it completes, and leaves after the last."""
        token = int(input_ids[0, -1])
        if self._first is None:
            self._first = time.monotonic()
        chosen = TokenLogprob(token)
        if self._logprobs is not None:
            chosen = self._logprobs.of(token, self.request.top_logprobs or 0)
        self._add(chosen)  # not earlier: without memory for the line above, the token is chosen again
        if self.finish_reason is None and self.grammar is not None:
            forced = self.grammar.forced(self.ids)  # its thread begins with the mask after them
            if self._logprobs is None and self.grammar.ends(forced):
                self._add_all(forced, self.grammar)
        if self.finish_reason is not None:
            raise _Over
        return torch.zeros(1, dtype=torch.bool, device=input_ids.device)

    def _add_all(self, forced: list[int], grammar: GrammarState) -> None:
        """Add the last tokens of an answer, which need no pass."""
        for token in forced:
            if self.finish_reason is None:
                self._add(TokenLogprob(token))
                grammar.saved += 1

    def _add(self, chosen: TokenLogprob) -> None:
        """Add a token, and report the text that it completes."""
        self._stream.add([chosen.token])
        if self._stream.stop is not None or chosen.token in self._ends:
            self.finish_reason = FinishReason.STOP
        elif self.length.room <= 0:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            self._stream.end()
        text = "".join(self._pieces)
        self._pieces.clear()
        self._report(Delta(text, (chosen,)))

    def _swap_random_state(self, begins: bool) -> None:
        """Swap in the random state of the request around the choice of a token: called before it and after."""
        device, state = self._model.device, self._random
        if state is not None and device.type == "cuda":
            self._random = torch.cuda.get_rng_state(device)
            torch.cuda.set_rng_state(state, device)
        elif state is not None:
            self._random = torch.get_rng_state()
            torch.set_rng_state(state)


class _Logprobs(LogitsProcessor):  # type: ignore[misc]
    """Keeps the log probabilities of the model itself: it is called before all other processors."""

    def __init__(self) -> None:
        self._logprobs: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._logprobs = torch.log_softmax(scores[0].float(), dim=-1)
        return scores

    def of(self, token: int, count: int) -> TokenLogprob:
        """The probability of a token, and those of the `count` most likely ones."""
        assert self._logprobs is not None
        return ranked(self._logprobs, token, count)


def ranked(logprobs: torch.Tensor, token: int, count: int) -> TokenLogprob:
    """The probability of a token, and those of the `count` most likely ones; `logprobs` of shape (vocabulary,)."""
    best = logprobs.topk(min(count, len(logprobs)))
    top = map(TokenLogprob, best.indices.tolist(), best.values.tolist())
    return TokenLogprob(token, float(logprobs[token]), tuple(top))


def _seeded(seed: int | None, device: torch.device) -> torch.Tensor:
    """The random state that `torch.manual_seed` would set; without a seed, a random one."""
    generator = torch.Generator(device="cuda" if device.type == "cuda" else "cpu")
    generator.manual_seed(seed if seed is not None else int.from_bytes(os.urandom(7), "little"))
    return generator.get_state()
