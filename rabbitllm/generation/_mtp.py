"""The heads for multi-token prediction as a model that goes back: their KV cache, and the hidden states that they need.

A head has a row for each token but the first: the token, and a hidden state of the token before it. The first head
takes the model's last one, by a hook from the model's own passes; each further head what the one before it returned for
that token. The first head predicts the token after the last one, each further head one more. A single head is repeated,
on its own hidden states. Rows of proposed tokens are dropped when the model has checked them, and computed again from
the model's states. A row whose state was computed before the heads began, as of a shared prefix, is left out: a head
then attends to fewer.

The heads of several sequences are computed as one call where a test covers their class (`PackedHeads`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from greenlet import getcurrent, greenlet

from rabbitllm.engine.kv_room import keeps_every_token
from rabbitllm.engine.transformers_api import attention_of
from rabbitllm.generation._packed_batch import (
    OWN,
    PACKABLE,
    NotPackable,
    PackedCache,
    attending_configs,
    attention_by_sequence,
    grouped,
    sequences_of,
)
from rabbitllm.generation.kv_cache import CACHE_ARGUMENT, Beside

if TYPE_CHECKING:
    from rabbitllm.engine.heads import Heads
    from rabbitllm.engine.streamed_model import StreamedModel

_PACKED = PACKABLE | {"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
"""Model types whose heads are packed, if they are attention; tested in `tests/generation/test_batch_drafts.py`."""
_ROWS = 512
"""The most rows of a call of packed heads, if it has several sequences: more are no faster."""


class HeadTrack:
    """The heads of a model, for one sequence, with the interface of `Rewindable`.

    Args:
        model: loaded with its heads.
        cache: the model's KV cache of the sequence.
    """

    def __init__(self, model: StreamedModel, cache: Any) -> None:
        assert model.heads is not None
        self._heads: Any = model.heads
        self._of = cache
        self._cache = self._heads.empty_cache()
        self._levels = [_Level() for _ in range(self._heads.count)]
        self._text: int | None = None  # tokens that are known, while further ones are proposed
        self._passed: tuple[int, torch.Tensor] | None = None  # first token and states of the model's last pass
        self._hook = model.get_decoder().register_forward_hook(self._take, with_kwargs=True)

    def close(self) -> None:
        """Take no more hidden states."""
        self._hook.remove()

    def resume(self, earlier: Beside | None, tokens: int) -> None:
        """Go on with what the heads have kept of the first `tokens`, if there is something."""
        if earlier is None or earlier.of() is not self._heads or not earlier.can_be_cut(tokens):
            return
        self._cache = earlier.cache
        for level, (rows, states) in zip(self._levels, earlier.levels, strict=True):
            level.rows, level.states = rows, states
        self._cut(tokens)

    @property
    def beside(self) -> Beside:
        """What is kept of the sequence for a later answer."""
        self.settle(self._of.get_seq_length())
        levels = [(level.rows, level.states) for level in self._levels]
        return Beside(ref(self._heads), self._cache, self.tokens, levels)

    @property
    def tokens(self) -> int:
        """Tokens of which it has rows or states."""
        states = self._levels[0].states
        return self._levels[0].rows + (0 if states is None else states.shape[1])

    def _take(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        cache = kwargs.get(CACHE_ARGUMENT, self._of)
        rows = cache.rows_of(self._of) if isinstance(cache, PackedCache) else slice(None) if cache is self._of else None
        if rows is None:
            return
        states = output[0][:, rows].detach()
        begin = self._of.get_seq_length() - states.shape[1]
        self.settle(begin)
        self._passed = begin, states

    def is_ready(self, ids: torch.Tensor) -> bool:
        """Whether it has the state of the token before the last one of `ids`, (1, tokens)."""
        return self._levels[0].states is not None and self.tokens == ids.shape[1] - 1

    def logits(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        """Compute the rows that the cache lacks, by the head for the token after the last one.

        Args:
            ids: all tokens of the sequence, int64 of shape (1, tokens).
            count: 1.

        Returns:
            Logits, float32 of shape (1, vocabulary).
        """
        end, text = ids.shape[1], self._text or ids.shape[1]
        depth = min(end - text, len(self._levels) - 1)
        level = self._levels[depth]
        assert level.states is not None
        begin = level.rows + 1
        positions = torch.arange(begin, end, device=ids.device)[None]
        logits: torch.Tensor
        hidden, logits = _called(self._heads, ids[:, begin:], level.states, positions, self._cache, depth)
        # the state of the last token that is known, for the first row after it
        last = text - 1 - level.rows
        level.kept = level.states[:, last : last + 1] if depth and last >= 0 else None
        level.rows, level.states = end - 1, hidden[:, -1:] if len(self._levels) == 1 else hidden[:, :0]
        if depth + 1 < len(self._levels):
            self._levels[depth + 1].add(begin, hidden)
        return logits

    def mark(self) -> None:
        """Remember the rows. Those after them may be dropped."""
        self._text = self._levels[0].rows + 1

    def settle(self, tokens: int) -> None:
        """Drop the rows after the mark, and keep the model's states of the first `tokens` for the next ones."""
        if self._text is not None:
            self._cut(self._text)
            self._levels[0].states = self._text = None
        if self._passed is not None:
            self._levels[0].add(*self._passed)
            self._passed = None
            self._cut(tokens)

    def _cut(self, tokens: int) -> None:
        """Drop all rows and states of tokens after the first `tokens`."""
        for level, layer in zip(self._levels, self._cache.layers, strict=True):
            last, has = max(tokens - 1, 0), layer.get_seq_length()
            if (surplus := level.rows - last) > 0:
                layer.crop(-min(surplus, has))
                level.rows, level.states = (last, level.kept) if surplus <= has else (0, None)
            elif level.states is not None:
                level.states = level.states[:, : tokens - level.rows]
            level.kept = None


@dataclass(eq=False, slots=True)
class _Level:
    """A head.

    Attributes:
        rows: the row after the last one in the cache is of the token after `rows`, and the state of that one.
        states: for the rows from there on, (1, tokens, width); None if there are none yet.
        kept: the state to go back to, while tokens are proposed.
    """

    rows: int = 0
    states: torch.Tensor | None = None
    kept: torch.Tensor | None = None

    def add(self, begin: int, states: torch.Tensor) -> None:
        """Add the states of the tokens from `begin` on; those that it has are replaced."""
        if self.states is None or begin > self.rows + self.states.shape[1]:
            self.rows, self.states = max(self.rows, begin), states[:, :0]
        earlier = self.states[:, : max(begin - self.rows, 0)]
        self.states = torch.cat((earlier, states[:, max(self.rows - begin, 0) :]), dim=1)


class _Proposing(greenlet):  # type: ignore[misc]
    """A function that is suspended in each of its calls of heads.

    Attributes:
        call: arguments of the call; None once the function has ended.
        error: the error that ended it, if any.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(self._run)
        self._work = work
        self.call: Any = None
        self.error: Exception | None = None

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self.error = error
        self.call = None


def _called(heads: Heads, *call: Any) -> Any:
    current = getcurrent()
    if not isinstance(current, _Proposing):
        return heads(*call)
    current.call = call
    return current.parent.switch()


class PackedHeads:
    """The heads of a model for several sequences at once, as `PackedForward` computes a model."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads
        self._configs = attending_configs(heads.module)
        can = heads.config.model_type in _PACKED and all(map(keeps_every_token, heads.empty_cache().layers))
        self._limit = _ROWS if can and attention_of(heads.config) in OWN else 1

    def run(self, works: Sequence[Callable[[], None]]) -> list[Exception | None]:
        """Run functions that propose by these heads; returns the error of each that has failed."""
        proposing = [_Proposing(work) for work in works]
        for each in proposing:
            each.switch()
        while waiting := [each for each in proposing if each.call is not None]:
            head = waiting[0].call[-1]
            waiting = [each for each in waiting if each.call[-1] == head]
            for part in grouped([each.call[0].shape[1] for each in waiting], self._limit):
                self._answer(waiting[part])
        return [each.error for each in proposing]

    def _answer(self, waiting: Sequence[_Proposing]) -> None:
        try:
            results = self._compute([each.call for each in waiting])
        except Exception as error:
            if isinstance(error, NotPackable):
                self._limit = 1
            for each in waiting:
                each.throw(error)
            return
        for each, result in zip(waiting, results, strict=True):
            each.switch(result)

    def _compute(self, calls: Sequence[Any]) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        if len(calls) == 1:
            return [self._heads(*calls[0])]
        ids, hidden, positions, caches, (head, *_) = zip(*calls, strict=True)
        lengths = [part.shape[1] for part in ids]
        cache = PackedCache(caches, lengths, shares=False)
        inputs, states, places = (torch.cat(parts, dim=1) for parts in (ids, hidden, positions))
        with attention_by_sequence(self._configs), sequences_of(cache):
            states, logits = self._heads(inputs, states, places, cache, head, [end - 1 for end in accumulate(lengths)])
        cache.finish()
        return list(zip(torch.split(states, lengths, dim=1), torch.split(logits, 1), strict=True))
