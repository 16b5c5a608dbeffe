"""What proposes the tokens of a draft, one sequence at a time: the text so far, or a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import torch
from transformers import DynamicCache

from rabbitllm.generation._rewind import Rewindable

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList

    from rabbitllm.engine.streamed_model import StreamedModel

Draft: TypeAlias = "StreamedModel | Literal['ngram']"
"""What proposes tokens: a model, or the text so far."""
KINDS: tuple[Literal["ngram"], ...] = ("ngram",)
"""Drafts that have a name."""
NGRAM_LENGTH = 2
"""The last tokens that it looks for in the text before them, or fewer."""
MODEL_TOKENS = 20
"""The most tokens that a model proposes, unless its generation config has `num_assistant_tokens`."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow.

    Attributes:
        tokens: ids, int64 of shape (1, count).
        probabilities: those with which a model drew each token from the vocabulary, float32 of shape (count,
            vocabulary); None for tokens that were not drawn.
    """

    tokens: torch.Tensor
    probabilities: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return self.tokens.shape[1]


class Proposals(Protocol):
    """A source of proposals for one sequence."""

    def propose(self, ids: torch.Tensor, most: int) -> Proposal:
        """Propose up to `most` tokens after `ids`, int64 of shape (1, tokens). It may be none."""

    def settle(self, tokens: int) -> None:
        """Drop all that is kept of tokens after the first `tokens`: the model has chosen others."""


class FromText:
    """Proposes the tokens that followed the last two, or the last one, when they occurred first."""

    def propose(self, ids: torch.Tensor, most: int) -> Proposal:
        """Propose up to `most` tokens after `ids`, (1, tokens)."""
        text, count = ids[0], most
        for length in range(min(NGRAM_LENGTH, len(text) - 1), 0, -1):
            places = (text[:-1].unfold(0, length, 1) == text[-length:]).all(dim=1).nonzero()
            if len(places):
                begin = int(places[0]) + length
                return Proposal(ids[:, begin : begin + max(count, 0)])
        return Proposal(ids[:, :0])

    def settle(self, tokens: int) -> None:
        """Nothing is kept."""


class FromModel:
    """Proposes the tokens that a model generates.

    Args:
        draft: the model.
        processors: change its scores as those of the model that checks them.
        config: how tokens are chosen, and which end a text.
        goes_on: called with the probability of each token; False ends the proposal. If the draft's generation config
            has `assistant_confidence_threshold`, this probability decides instead.
    """

    def __init__(
        self,
        draft: StreamedModel,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        goes_on: Callable[[float], bool],
    ) -> None:
        self._track = Rewindable(draft, DynamicCache(config=draft.config.get_text_config(decoder=True)))
        self._device = draft.device
        self._processors = processors
        self._samples = config.do_sample
        ends = config.eos_token_id
        self._ends = {ends} if isinstance(ends, int) else {*(ends or ())}
        own = draft.generation_config
        self._most = own.num_assistant_tokens or MODEL_TOKENS
        threshold = own.assistant_confidence_threshold
        self._goes_on = goes_on if threshold is None else threshold.__le__

    def propose(self, ids: torch.Tensor, most: int) -> Proposal:
        """Propose up to `most` tokens after `ids`, (1, tokens)."""
        count = min(most, self._most)
        if count < 1:
            return Proposal(ids[:, :0])
        known, device, ids = ids.shape[1], ids.device, ids.to(self._device)
        logits, drawn = self._track.logits(ids, 1), []
        self._track.mark()
        while True:
            scores = self._processors(ids, logits)
            probabilities = scores.softmax(dim=-1)
            token = torch.multinomial(probabilities, 1) if self._samples else scores.argmax(dim=-1, keepdim=True)
            ids = torch.cat((ids, token), dim=1)
            drawn.append(probabilities)
            # a token that was drawn is always checked: to leave out unlikely ones would change the distribution
            is_sure = self._goes_on(float(probabilities[0, token[0, 0]]))
            if len(drawn) == count or not is_sure or int(token) in self._ends:
                break
            logits = self._track.logits(ids, 1)
        probabilities = torch.cat(drawn).to(device) if self._samples else None
        return Proposal(ids[:, known:].to(device), probabilities)

    def settle(self, tokens: int) -> None:
        """Drop the tokens after the first `tokens`."""
        self._track.settle(tokens)


def proposals_of(
    draft: Draft, processors: LogitsProcessorList, config: GenerationConfig, goes_on: Callable[[float], bool]
) -> Proposals:
    """Return the proposals of a draft for one answer; for the arguments see `FromModel`."""
    return FromText() if isinstance(draft, str) else FromModel(draft, processors, config, goes_on)
