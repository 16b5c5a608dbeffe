"""What proposes the tokens of a draft, one sequence at a time: the text so far, or a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from transformers import DynamicCache

from rabbitllm.generation._rewind import Rewindable

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList

    from rabbitllm.engine.streamed_model import StreamedModel

NGRAM_TOKENS = 10
"""The most tokens that it proposes."""
NGRAM_LENGTH = 2
"""The last tokens that it looks for in the text before them, or fewer."""
MODEL_TOKENS = 20
"""The most tokens that a model proposes, unless its generation config has `num_assistant_tokens`."""
LEAST_SURE = 0.4
"""A model stops after a token to which it gives less than this probability, unless its generation config has
`assistant_confidence_threshold`."""


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
    """Proposes the tokens that followed the last ones when they occurred first.

    Args:
        longest, least: the number of last tokens that it looks for, from the first one down to the second one.
    """

    def __init__(self, longest: int = NGRAM_LENGTH, least: int = 1) -> None:
        self.longest = longest
        self.least = least

    def propose(self, ids: torch.Tensor, most: int) -> Proposal:
        """Propose up to `most` tokens after `ids`, (1, tokens)."""
        text, count = ids[0], min(most, NGRAM_TOKENS)
        for length in range(min(self.longest, len(text) - 1), self.least - 1, -1):
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
    """

    def __init__(self, draft: StreamedModel, processors: LogitsProcessorList, config: GenerationConfig) -> None:
        self._track = Rewindable(draft, DynamicCache(config=draft.config.get_text_config(decoder=True)))
        self._device = draft.device
        self._processors = processors
        self._samples = config.do_sample
        ends = config.eos_token_id
        self._ends = {ends} if isinstance(ends, int) else {*(ends or ())}
        own = draft.generation_config
        self._most = own.num_assistant_tokens or MODEL_TOKENS
        threshold = own.assistant_confidence_threshold
        self._least_sure = LEAST_SURE if threshold is None else threshold

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
            is_unsure = probabilities[0, token[0, 0]] < self._least_sure
            if len(drawn) == count or is_unsure or int(token) in self._ends:
                break
            logits = self._track.logits(ids, 1)
        probabilities = torch.cat(drawn).to(device) if self._samples else None
        return Proposal(ids[:, known:].to(device), probabilities)

    def settle(self, tokens: int) -> None:
        """Drop the tokens after the first `tokens`."""
        self._track.settle(tokens)


def proposals_of(
    draft: StreamedModel | Literal["ngram"], processors: LogitsProcessorList, config: GenerationConfig
) -> Proposals:
    """Return the proposals of a draft for one answer; for the arguments see `FromModel`."""
    return FromText() if isinstance(draft, str) else FromModel(draft, processors, config)
