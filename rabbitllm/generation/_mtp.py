"""The head for multi-token prediction as a model that goes back: its KV cache, and the hidden states that it needs.

The head has a row for each token but the first: the token, and the model's last hidden state of the token before it,
which a hook takes from the model's own passes. Further tokens are proposed by the same head, from its own hidden state;
those rows are dropped when the model has checked the tokens, and computed again from the model's states. A row whose
state was computed before the answer began, as in a kept conversation, is left out: the head then attends to fewer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rabbitllm.generation._rewind import Rewindable

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel


class HeadTrack:
    """The head of a model, for one sequence, with the interface of `Rewindable`.

    Args:
        model: loaded with its heads.
        track: the model and its KV cache.
    """

    def __init__(self, model: StreamedModel, track: Rewindable) -> None:
        assert model.heads is not None
        self._head: Any = model.heads
        self._track = track
        self._cache = self._head.empty_cache()
        self._rows = 0  # the row after the last one in the cache: of token `_rows`, and the state of the one before
        self._states: torch.Tensor | None = None  # for the rows from there on
        self._passed: tuple[int, torch.Tensor] | None = None  # first token and states of the model's last pass
        self._mark: int | None = None
        self._hook = model.get_decoder().register_forward_hook(self._take)

    def close(self) -> None:
        """Take no more hidden states."""
        self._hook.remove()

    def _take(self, module: Any, inputs: Any, output: Any) -> None:
        self._passed = self._track.tokens, output[0].detach()

    def is_ready(self, ids: torch.Tensor) -> bool:
        """Whether it has the state of the token before the last one of `ids`, (1, tokens)."""
        return self._states is not None and self._rows + self._states.shape[1] == ids.shape[1] - 1

    def logits(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        """Compute the rows that the cache lacks.

        Args:
            ids: all tokens of the sequence, int64 of shape (1, tokens).
            count: 1.

        Returns:
            Logits, float32 of shape (1, vocabulary).
        """
        assert self._states is not None
        begin, end = self._rows + 1, ids.shape[1]
        positions = torch.arange(begin, end, device=ids.device)[None]
        logits: torch.Tensor
        hidden, logits = self._head(ids[:, begin:], self._states, positions, self._cache)
        self._rows, self._states = end - 1, hidden[:, -1:]
        return logits

    def mark(self) -> None:
        """Remember the rows. Those after them may be dropped."""
        self._mark = self._rows

    def settle(self, tokens: int) -> None:
        """Drop the rows after the mark, and keep the model's states of the first `tokens` for the next ones."""
        if self._mark is not None:
            self._cache.crop(self._mark - self._rows)
            self._rows, self._states, self._mark = self._mark, None, None
        if self._passed is None:
            return
        begin, states = self._passed
        self._passed = None
        if self._states is None or begin > self._rows + self._states.shape[1]:
            self._rows, self._states = max(self._rows, begin), states[:, :0]
        earlier = self._states[:, : max(begin - self._rows, 0)]
        states = torch.cat((earlier, states[:, max(self._rows - begin, 0) :]), dim=1)
        self._states = states[:, : tokens - self._rows]
