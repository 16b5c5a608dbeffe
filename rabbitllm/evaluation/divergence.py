"""The divergence of next-token distributions: at each position, and summarized.

For the distributions of the reference, P, and of the compared model, Q, at each position

    divergence  sum over the vocabulary of p * ln(p / q), in nats (Kullback and Leibler, "On Information and
                Sufficiency", 1951); 0 if both are the same, never negative
    loss        -ln of the probability of the next token of the text; the exponential of its mean is the perplexity
    agrees      whether the same token is most likely in both

Computed in float64: a divergence of 1e-6 is a sum of terms that nearly cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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


def at_positions(reference: torch.Tensor, compared: torch.Tensor, targets: torch.Tensor) -> Positions:
    """Compare logits.

    Args:
        reference: (positions, vocabulary), of any floating dtype.
        compared: logits of the compared model, of the same shape.
        targets: (positions,) int64, the next tokens.
    """
    true, other = (torch.log_softmax(logits.double(), -1) for logits in (reference, compared.to(reference.device)))
    weights = true.exp()
    # tokens with probability 0 add nothing, even if both logarithms are -inf
    terms = torch.where(weights > 0, weights * (true - other), 0.0)
    column = targets.to(reference.device)[:, None]
    return Positions(
        terms.sum(-1).clamp(min=0).cpu(),
        -other.gather(-1, column)[:, 0].cpu(),
        -true.gather(-1, column)[:, 0].cpu(),
        (true.argmax(-1) == other.argmax(-1)).cpu(),
    )


def summary_of(parts: Sequence[Positions]) -> Summary:
    """Summarize all positions, of which there must be at least one."""
    divergence = torch.cat([part.divergence for part in parts]).sort().values
    loss, reference_loss, agrees = (
        torch.cat([getattr(part, name) for part in parts]).double().mean().item()
        for name in ("loss", "reference_loss", "agrees")
    )
    count = len(divergence)
    spread = divergence.std().item() / math.sqrt(count) if count > 1 else 0.0
    rank = max(math.ceil(count * PERCENTILE / 100) - 1, 0)
    return Summary(
        count,
        Divergence(
            divergence.mean().item(),
            spread,
            divergence[(count - 1) // 2].item(),
            divergence[rank].item(),
            divergence[-1].item(),
        ),
        _perplexity(loss),
        _perplexity(reference_loss),
        agrees,
    )


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
