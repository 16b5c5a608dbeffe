"""How far one next-token distribution is from another: for each position, and of all. Pure; knows no models.

Of logits of the reference, P, and of what is compared with it, Q, at each position

    divergence  sum over the vocabulary of p * ln(p / q), in nats (Kullback and Leibler, "On Information and
                Sufficiency", 1951); 0 where both are the same, never negative
    loss        -ln of the probability of the token that the text goes on with; the exponential of its mean is the
                perplexity
    agrees      whether both find the same token most likely

In float64: a divergence of 1e-6 is a sum of terms that cancel each other nearly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

PERCENTILE = 99


@dataclass(frozen=True, slots=True)
class Positions:
    """Numbers of some positions, each tensor (positions,).

    Attributes:
        divergence: float64, nats.
        loss: of the compared one; float64, nats.
        reference_loss: of the reference.
        agrees: bool.
    """

    divergence: torch.Tensor
    loss: torch.Tensor
    reference_loss: torch.Tensor
    agrees: torch.Tensor


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of all positions; nats.

    Attributes:
        mean: of the divergences.
        error: standard error of the mean, as if positions were independent of each other.
        median: of them.
        percentile: that 99 in 100 do not exceed.
        largest: of them.
    """

    mean: float
    error: float
    median: float
    percentile: float
    largest: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all positions.

    Attributes:
        positions: how many.
        divergence: of the compared one from the reference.
        perplexity: of the compared one.
        reference_perplexity: of the reference.
        agreement: the share of positions at which both find the same token most likely.
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
        compared: the same.
        targets: (positions,) int64: the tokens that follow.
    """
    true, other = (torch.log_softmax(logits.double(), -1) for logits in (reference, compared.to(reference.device)))
    weights = true.exp()
    # what has no probability adds nothing, even where its logarithm is -inf on both sides
    terms = torch.where(weights > 0, weights * (true - other), 0.0)
    column = targets.to(reference.device)[:, None]
    return Positions(
        terms.sum(-1).clamp(min=0).cpu(),
        -other.gather(-1, column)[:, 0].cpu(),
        -true.gather(-1, column)[:, 0].cpu(),
        (true.argmax(-1) == other.argmax(-1)).cpu(),
    )


def summary_of(parts: Sequence[Positions]) -> Summary:
    """All positions in a few numbers; at least one position."""
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
