"""Compares two loaded models: one pass over the weights of each, then their heads alternately.

Logits of all positions would be larger than most weights: 2,048 positions of a vocabulary of 150,000 take 1.2 GB in
float32. So the passes keep hidden states in a file (2,048 * 4,096 * 2 bytes are 17 MB), from which logits are computed
slice by slice. For the distributions of the reference, P, and of the compared model, Q, at each position

    divergence  sum over the vocabulary of p * ln(p / q), in nats (Kullback and Leibler, "On Information and
                Sufficiency", 1951); 0 if both are the same, never negative
    loss        -ln of the probability of the next token of the text; the exponential of its mean is the perplexity
    agrees      whether the same token is most likely in both

Computed in float64: a divergence of 1e-6 is a sum of terms that nearly cancel.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rabbitllm.errors import QualityError
from rabbitllm.generation.scoring import Room, ScoredText, score
from rabbitllm.generation.scoring.forward import ScoringForward
from rabbitllm.storage.durable import NamelessFile

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

PERCENTILE = 99


@dataclass(frozen=True, slots=True)
class Positions:
    """Measures at some positions; each tensor is (positions,).

    Attributes:
        divergence: float64, nats.
        loss: loss of the compared model; float64, nats.
        reference_loss: loss of the reference; float64, nats.
        agrees: bool.
    """

    divergence: torch.Tensor
    loss: torch.Tensor
    reference_loss: torch.Tensor
    agrees: torch.Tensor


@dataclass(frozen=True, slots=True)
class Divergence:
    """The divergence over all positions, in nats.

    Attributes:
        mean: mean.
        error: standard error of the mean, as if positions were independent.
        median: median.
        percentile: 99th percentile.
        largest: maximum.
    """

    mean: float
    error: float
    median: float
    percentile: float
    largest: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The comparison over all positions.

    Attributes:
        positions: number of positions.
        divergence: divergence of the compared model from the reference.
        perplexity: perplexity of the compared model.
        reference_perplexity: perplexity of the reference.
        agreement: share of positions at which the same token is most likely in both.
    """

    positions: int
    divergence: Divergence
    perplexity: float
    reference_perplexity: float
    agreement: float


def compare_logits(reference: torch.Tensor, compared: torch.Tensor, targets: torch.Tensor) -> Positions:
    """Compare logits.

    Args:
        reference: (positions, vocabulary), of any floating dtype.
        compared: logits of the compared model, of the same shape.
        targets: (positions,) int64, the next tokens.
    """
    log_p, log_q = (torch.log_softmax(logits.double(), -1) for logits in (reference, compared.to(reference.device)))
    weights = log_p.exp()
    # tokens with probability 0 add nothing, even if both logarithms are -inf
    terms = torch.where(weights > 0, weights * (log_p - log_q), 0.0)
    column = targets.to(reference.device)[:, None]
    return Positions(
        terms.sum(-1).clamp(min=0).cpu(),
        -log_q.gather(-1, column)[:, 0].cpu(),
        -log_p.gather(-1, column)[:, 0].cpu(),
        (log_p.argmax(-1) == log_q.argmax(-1)).cpu(),
    )


def summarize(parts: Sequence[Positions]) -> Summary:
    """Summarize all positions, of which there must be at least one."""
    divergence = torch.cat([part.divergence for part in parts]).sort().values
    loss, reference_loss, agrees = (
        torch.cat([getattr(part, name) for part in parts]).double().mean().item()
        for name in ("loss", "reference_loss", "agrees")
    )
    count = len(divergence)
    error = divergence.std().item() / math.sqrt(count) if count > 1 else 0.0
    ranks = (count - 1) // 2, max(math.ceil(count * PERCENTILE / 100) - 1, 0), -1
    median, percentile, largest = (divergence[rank].item() for rank in ranks)
    distribution = Divergence(divergence.mean().item(), error, median, percentile, largest)
    return Summary(count, distribution, _perplexity(loss), _perplexity(reference_loss), agrees)


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


class States:
    """The hidden states that predict the continuations of texts, in a nameless file.

    Args:
        model: a causal model as `AutoModel.from_pretrained` returns it.
        texts: texts with the indices 0, 1, …
        folder: existing folder of the file; None for the system's.
    """

    def __init__(self, model: StreamedModel, texts: Sequence[ScoredText], folder: Path | None = None) -> None:
        self._model = model
        self._texts = texts
        self._begins = [0, *accumulate(len(text.continuation) for text in texts)]
        self._file = NamelessFile(folder)
        self._shape: tuple[int, torch.dtype, torch.device] | None = None

    def __enter__(self) -> States:
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()

    @property
    def positions(self) -> int:
        """Number of tokens of all continuations."""
        return self._begins[-1]

    def fill(self, room: Room, say: Callable[[str], None]) -> None:
        """Compute the hidden states of all texts.

        Raises:
            RabbitLLMError: as `score` does, or the error of the first text that has one.
        """
        for count, result in enumerate(score(self._model, self._texts, room, keep=self._put), 1):
            if result.error is not None:
                raise result.error
            say(f"{count:,} of {len(self._texts):,} windows")

    def _put(self, index: int, states: torch.Tensor) -> None:
        self._shape = states.shape[-1], states.dtype, states.device
        raw = states.cpu().contiguous().view(torch.uint8)
        if raw.numel():
            self._file.write_at(raw.numpy().reshape(-1).data, self._begins[index] * raw.shape[-1])

    @contextlib.contextmanager
    def with_head(self) -> Iterator[Callable[[int, int], torch.Tensor]]:
        """Yield a function from the begin and end of positions to their logits, (positions, vocabulary)."""
        forward = ScoringForward(self._model)
        with forward.installed():
            yield lambda begin, end: forward.logits(self._read(begin, end))

    def _read(self, begin: int, end: int) -> torch.Tensor:
        if self._shape is None:
            raise QualityError("There are no hidden states to compute logits from.")
        hidden, dtype, device = self._shape
        raw = torch.empty((end - begin, hidden * dtype.itemsize), dtype=torch.uint8)
        self._file.read_at(raw.numpy().reshape(-1).data, begin * raw.shape[-1])
        return raw.view(dtype).to(device)


LOGITS_BYTES = 32 << 20
"""Size of the float32 logits of one model that are computed at a time; the peak is about ten times as much."""


def compare(
    model: StreamedModel,
    reference: Any,
    texts: Sequence[ScoredText],
    room: Room | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Summary:
    """Compare a model's next-token distributions with those of a reference.

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
    reference_size, model_size = (side.get_output_embeddings().weight.shape[0] for side in (reference, model))
    if reference_size != model_size:
        raise QualityError(
            f"The vocabularies differ in size: {reference_size:,} and {model_size:,}.",
            "Only models with the same vocabulary can be compared.",
        )
    targets = torch.tensor([token for text in texts for token in text.continuation])
    if not len(targets):
        raise QualityError("The texts have no token to predict.", "Use a longer text.")
    with States(reference, texts, room.scratch) as expected, States(model, texts, room.scratch) as actual:
        expected.fill(room, lambda text: say(f"reference: {text}"))
        actual.fill(room, lambda text: say(f"model: {text}"))
        step = max(LOGITS_BYTES // (4 * reference_size), 1)
        parts = []
        with expected.with_head() as true, actual.with_head() as compared:
            for begin in range(0, len(targets), step):
                end = min(begin + step, len(targets))
                say(f"distributions: {begin:,} of {len(targets):,}")
                parts.append(compare_logits(true(begin, end), compared(begin, end), targets[begin:end]))
    return summarize(parts)
