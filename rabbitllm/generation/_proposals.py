"""What proposes the tokens of a draft, one sequence at a time: the text so far, a model, or the model's own heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import torch
from transformers import DynamicCache

from rabbitllm.generation._mtp import HeadTrack
from rabbitllm.generation._rewind import Rewindable

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList

    from rabbitllm.engine.streamed_model import StreamedModel

Draft: TypeAlias = "StreamedModel | Literal['ngram', 'mtp']"
"""What drafts are made by: a model, the text so far, or the model's own heads."""
NGRAM: Literal["ngram"] = "ngram"
MTP: Literal["mtp"] = "mtp"
NGRAM_TOKENS = 10
"""The most tokens that it proposes."""
NGRAM_LENGTH = 2
"""The last tokens that it looks for in the text before them, or fewer."""
MODEL_TOKENS = 20
"""The most tokens that a model proposes, unless its generation config has `num_assistant_tokens`."""
HEAD_TOKENS = 8
"""The same of a head that is used again for each token; a head of several proposes one token."""
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

    def close(self) -> None:
        """End: the answer is complete, or an error has ended it."""


class FromText:
    """Proposes the tokens that followed the last two, or the last one, when they occurred first."""

    def propose(self, ids: torch.Tensor, most: int) -> Proposal:
        """Propose up to `most` tokens after `ids`, (1, tokens)."""
        text, count = ids[0], min(most, NGRAM_TOKENS)
        for length in range(min(NGRAM_LENGTH, len(text) - 1), 0, -1):
            places = (text[:-1].unfold(0, length, 1) == text[-length:]).all(dim=1).nonzero()
            if len(places):
                begin = int(places[0]) + length
                return Proposal(ids[:, begin : begin + max(count, 0)])
        return Proposal(ids[:, :0])

    def settle(self, tokens: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


class FromModel:
    """Proposes the tokens that a model generates.

    Args:
        draft: the model.
        processors: change its scores as those of the model that checks them.
        config: how tokens are chosen, and which end a text.
        track: it and its KV cache; None for an empty one.
    """

    def __init__(
        self,
        draft: StreamedModel,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        track: Rewindable | HeadTrack | None = None,
    ) -> None:
        self._track = track or Rewindable(draft, DynamicCache(config=draft.config.get_text_config(decoder=True)))
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

    def close(self) -> None:
        """Nothing is kept elsewhere."""


class FromHead(FromModel):
    """Proposes the tokens that the model's own head predicts.

    Args:
        model: loaded with its heads.
        track: the model and its KV cache, as the loop uses them.
        processors, config: see `FromModel`.
    """

    def __init__(
        self, model: StreamedModel, track: Rewindable, processors: LogitsProcessorList, config: GenerationConfig
    ) -> None:
        self._head = HeadTrack(model, track)
        super().__init__(model, processors, config, self._head)
        assert model.heads is not None
        own = model.generation_config.num_assistant_tokens or HEAD_TOKENS
        self._most = own if model.heads.count == 1 else 1

    def propose(self, ids: torch.Tensor, most: int) -> Proposal:
        """Propose up to `most` tokens after `ids`, (1, tokens); none before the model's first pass."""
        return super().propose(ids, most if self._head.is_ready(ids) else 0)

    def close(self) -> None:
        """Take no more hidden states."""
        self._head.close()


def proposals_of(
    draft: Draft, model: StreamedModel, track: Rewindable, processors: LogitsProcessorList, config: GenerationConfig
) -> Proposals:
    """Return the proposals of a draft for one answer.

    Args:
        draft: after `prepare_draft`.
        model: the model that checks them.
        track: it and its KV cache.
        processors, config: see `FromModel`.
    """
    if draft == NGRAM:
        return FromText()
    return FromHead(model, track, processors, config) if draft == MTP else FromModel(draft, processors, config)
