"""Compares two loaded models: one pass over the weights of each, then their heads alternately."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from rabbitllm.errors import QualityError
from rabbitllm.evaluation.divergence import Summary, at_positions, summary_of
from rabbitllm.generation.scoring import Room, ScoredText, score
from rabbitllm.generation.scoring.forward import ScoringForward
from rabbitllm.storage.durable import NamelessFile

# Hidden states of all positions, from one pass of a model over texts: kept in a file, and turned into logits by slices.
#
# Logits of all positions would be larger than most weights: 2,048 positions of a vocabulary of 150,000 take 1.2 GB in
# float32. The hidden states take 2,048 * 4,096 * 2 bytes, 17 MB.


class States:
    """The hidden states that predict the continuations of texts, in a nameless file.

    Args:
        model: a causal model as `AutoModel.from_pretrained` returns it.
        texts: texts with the indices 0, 1, …
        folder: existing folder of the file; None for the system's.
    """

    def __init__(self, model: Any, texts: Sequence[ScoredText], folder: Path | None = None) -> None:
        self._model = model
        self._texts = texts
        self._begins = [0, *accumulate(len(text.continuation) for text in texts)]
        self._file = NamelessFile(folder)
        self._shape: tuple[int, torch.dtype, torch.device] | None = None

    def __enter__(self) -> States:
        return self

    def __exit__(self, *given: object) -> None:
        self._file.close()

    @property
    def positions(self) -> int:
        """Number of tokens of all continuations."""
        return self._begins[-1]

    def fill(self, room: Room, say: Callable[[str], None]) -> None:
        """Take the texts through the model.

        Raises:
            RabbitLLMError: as `score` does, or the error of the first text that has one.
        """
        for done, one in enumerate(score(self._model, self._texts, room, keep=self._put), 1):
            if one.error is not None:
                raise one.error
            say(f"{done:,} of {len(self._texts):,} windows")

    def _put(self, index: int, states: torch.Tensor) -> None:
        self._shape = states.shape[-1], states.dtype, states.device
        whole = states.cpu().contiguous().view(torch.uint8)
        if whole.numel():
            self._file.write_at(whole.numpy().reshape(-1).data, self._begins[index] * whole.shape[-1])

    @contextlib.contextmanager
    def with_head(self) -> Iterator[Callable[[int, int], torch.Tensor]]:
        """Yield a function from the begin and end of positions to their logits, (positions, vocabulary)."""
        forward = ScoringForward(self._model)
        with forward.installed():
            yield lambda begin, end: forward.logits(self._read(begin, end))

    def _read(self, begin: int, end: int) -> torch.Tensor:
        if self._shape is None:
            raise QualityError("There are no hidden states yet, of which logits could be made.")
        hidden, dtype, device = self._shape
        whole = torch.empty((end - begin, hidden * dtype.itemsize), dtype=torch.uint8)
        self._file.read_at(whole.numpy().reshape(-1).data, begin * whole.shape[-1])
        return whole.view(dtype).to(device)


LOGITS_BYTES = 32 << 20
"""Size of the float32 logits of one model that are computed at a time; the peak is about ten times as much."""


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
        reference: the reference model, which may be the same one.
        texts: texts with the indices 0, 1, …; the tokens of their continuations are the positions.
        room: limits and options of scoring.
        say: called with a description of each step.

    Raises:
        QualityError: the models have vocabularies of different sizes, or there are no positions.
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
