"""Two loaded models side by side: one pass over the weights of each, then their heads in turns. Loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rabbitllm.errors import QualityError
from rabbitllm.evaluation.divergence import Summary, at_positions, summary_of
from rabbitllm.evaluation.states import States
from rabbitllm.generation.scoring import Room, ScoredText

LOGITS_BYTES = 32 << 20
"""Of the logits of one model that are computed at a time, as float32; some ten times as much is needed for a moment."""


def compare(
    model: Any,
    reference: Any,
    texts: Sequence[ScoredText],
    room: Room | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Summary:
    """How far a model's next-token distributions are from those of a reference.

    Args:
        model: a causal model as `AutoModel.from_pretrained` returns it.
        reference: another one, or the same.
        texts: whose continuations are the positions; with the indices 0, 1, …
        room: what may be taken for hidden states.
        say: told what is being done.

    Raises:
        QualityError: the models know different numbers of tokens, or there are no positions.
        RabbitLLMError: as `rabbitllm.generation.scoring.score` does.
    """
    room = room or Room()
    known, other = (one.get_output_embeddings().weight.shape[0] for one in (reference, model))
    if known != other:
        raise QualityError(
            f"The models know different numbers of tokens: {known:,} and {other:,}.",
            "Only models with the same vocabulary can be compared.",
        )
    targets = torch.tensor([token for text in texts for token in text.continuation])
    if not len(targets):
        raise QualityError("There is no token to be predicted in the texts.", "Give a longer text.")
    with States(reference, texts, room.scratch) as expected, States(model, texts, room.scratch) as found:
        expected.fill(room, lambda text: say(f"reference: {text}"))
        found.fill(room, lambda text: say(f"model: {text}"))
        step = max(LOGITS_BYTES // (4 * known), 1)
        parts = []
        with expected.with_head() as true, found.with_head() as compared:
            for begin in range(0, len(targets), step):
                end = min(begin + step, len(targets))
                say(f"distributions: {begin:,} of {len(targets):,}")
                parts.append(at_positions(true(begin, end), compared(begin, end), targets[begin:end]))
    return summary_of(parts)
