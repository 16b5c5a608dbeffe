"""How far results may be apart that differ by rounding alone, from the roundoff of their dtype; nothing of a processor.

Equal bits are promised under equal conditions (docs/reference/equal-bits.md); where the conditions differ, or a product
is made in another way, a result is compared with one in double precision, never two results by a fixed figure.

Rounding to nearest changes a number by at most the part u of it, half of `torch.finfo(dtype).eps`. The errors of a sum
of n terms have no common sign. In the worst order, one term after the other, their root mean square is 0.4 u sqrt(n)
times the root of the sum of the terms' squares; every other order has a smaller one. The error has no bound in terms of
the sum itself, which may be near zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.integer_products import is_of_bytes, tolerated

_ONE = 4.0
"""How many times `u sqrt(n)` a single number may be off: ten times the standard deviation of the worst order. The bound
for many numbers together is narrower."""


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff: half the distance from 1 to the next larger number."""
    return torch.finfo(dtype).eps / 2


def assert_products(
    got: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    sums: torch.dtype = torch.float32,
    weights: torch.dtype | None = None,
) -> None:
    """`got` is `x @ weight.T + bias` but for rounding: element by element, and more narrowly all of them together.

    Args:
        got: (T, N); summed in `sums`, rounded once to its own dtype.
        x: (T, K).
        weight: (N, K), as it is meant; best in float64.
        bias: (N,) or None.
        weights: a dtype that the weights may have been rounded to before; None if none.
    """
    x, weight = x.double(), weight.double()
    exact, squares = x @ weight.T, x.square() @ weight.square().T
    if bias is not None:
        exact, squares = exact + bias.double(), squares + bias.double().square()
    # with each term roundings of its own: of the product, of the scale, and two where a code's meaning is reckoned
    of_terms = unit(sums) * (x.shape[-1] + 4 + (bias is not None)) ** 0.5 + (unit(weights) if weights else 0)
    off, size = (got.double() - exact).abs(), squares.sqrt()
    once = unit(got.dtype) if got.dtype != sums else 0.0
    assert bool((off <= _ONE * of_terms * size + once * (exact.abs() + _ONE * of_terms * size)).all())
    allowed = (of_terms**2 * squares.sum() + once**2 * exact.square().sum()).sqrt()
    assert off.norm() <= (1 + _ONE / max(off.numel(), 1) ** 0.5) * allowed


def assert_rounded_once(result: torch.Tensor, exact: torch.Tensor) -> None:
    """Each number is the nearest of its dtype to one that a sum in float32 may be off from the exact one."""
    nearest = exact.to(result.dtype).double()
    assert bool(((result.double() - exact).abs() <= (nearest - exact).abs() + 1e-5 * exact.abs().max()).all())


def assert_as_near(
    computed: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, *, routed: bool = False, scheme: str | None = None
) -> None:
    """A model's numbers have at most twice the error (one bit) of transformers' in the same dtype.

    In float32 they have at most a thousandth: products of codes round their inputs to 15 bits of the largest near them.
    For those of a scheme whose inputs have 8 bits see `tolerated`.

    Args:
        computed: as the package computes them.
        plain: as transformers does.
        exact: as transformers does in float64, of the weights that those of `computed` stand for.
        scheme: of codes that are multiplied; None if there are none of a scheme of ours.
        routed: whether rounding may send a position to other experts, in either of the two. Numbers of shape (...,
            positions, vocabulary) are then compared position by position, and the median of these counts.
    """
    assert computed.dtype == plain.dtype
    assert computed.shape == plain.shape == exact.shape

    def off(from_exact: torch.Tensor) -> torch.Tensor:
        return from_exact.norm(dim=-1).median() if routed else from_exact.norm()

    assert 0 < off(plain.double() - exact) < unit(plain.dtype) ** 0.5 * off(exact)  # else it tells nothing
    allowed = 1e-3 * off(exact) if plain.dtype == torch.float32 else 2 * off(plain.double() - exact)
    if scheme is not None and is_of_bytes(scheme):
        allowed = max(allowed, tolerated(scheme) * off(exact))
    assert off(computed.double() - exact) <= allowed


def exact_logits(folder: Path, ids: torch.Tensor, compression: str | None = None) -> torch.Tensor:
    """What plain transformers computes in double precision (of norms a part stays in float32, as it has them).

    Args:
        folder: a checkpoint. Of a compressed one the weights are those that the codes stand for, which no dtype has
            rounded; they are written into a folder near it.
    """
    from tests.support.tiny_models import dequantized, plain_model  # 3 s, which processes that multiply need not take

    if compression is not None:
        folder = dequantized(folder, folder.parent / f"exact-{compression}", compression, torch.float64)
    model = plain_model(folder, dtype=torch.float64, experts_implementation="eager").eval()
    for parameter in model.parameters():  # transformers 5.23 leaves a part of published FP8 models in bfloat16
        if parameter.is_floating_point():
            parameter.data = parameter.data.double()
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, **decoder).logits
    return logits


def assert_greedy(tokens: torch.Tensor, plain: torch.Tensor, model: Any, off: float) -> None:
    """The same tokens, up to a place where two are so close that rounding decides; there the comparison ends.

    Args:
        tokens: (1, T), a prompt and what was generated greedily.
        plain: the same by another computation.
        model: gives the logits, in the best precision at hand.
        off: by how much a logit may be off in each of the two.
    """
    assert tokens.shape == plain.shape
    differs = (tokens != plain)[0].nonzero()
    if not len(differs):
        return
    position = int(differs[0])
    assert position > 0
    with torch.inference_mode():
        scores = model(plain[:, :position]).logits[0, -1].double()
    assert float(scores[plain[0, position]] - scores[tokens[0, position]]) <= 2 * off
    assert float(scores.max() - scores[tokens[0, position]]) <= 2 * off
