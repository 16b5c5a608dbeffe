"""The heads for multi-token prediction as a model that goes back: their KV cache, and the hidden states that they need.

A head has a row for each token but the first: the token, and a hidden state of the token before it. The first head
takes the model's last one, by a hook from the model's own passes; each further head what the one before it returned for
that token. The first head predicts the token after the last one, each further head one more. A single head is repeated,
on its own hidden states. Rows of proposed tokens are dropped when the model has checked them, and computed again from
the model's states. A row whose state was computed before the heads began, as of a shared prefix, is left out: a head
then attends to fewer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rabbitllm.generation._packed_batch import PackedCache
from rabbitllm.generation.kv_cache import CACHE_ARGUMENT, Beside

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel


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
        hidden, logits = self._heads(ids[:, begin:], level.states, positions, self._cache, depth)
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


class _Level:
    """A head.

    Attributes:
        rows: the row after the last one in the cache is of the token after `rows`, and the state of that one.
        states: for the rows from there on, (1, tokens, width); None if there are none yet.
        kept: the state to go back to, while tokens are proposed.
    """

    __slots__ = ("kept", "rows", "states")

    def __init__(self) -> None:
        self.rows = 0
        self.states: torch.Tensor | None = None
        self.kept: torch.Tensor | None = None

    def add(self, begin: int, states: torch.Tensor) -> None:
        """Add the states of the tokens from `begin` on; those that it has are replaced."""
        if self.states is None or begin > self.rows + self.states.shape[1]:
            self.rows, self.states = max(self.rows, begin), states[:, :0]
        earlier = self.states[:, : max(begin - self.rows, 0)]
        self.states = torch.cat((earlier, states[:, max(self.rows - begin, 0) :]), dim=1)
