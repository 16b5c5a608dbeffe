"""The formulas give the same as torch's own, and as numbers that can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rabbitllm.evaluation.divergence import Positions, at_positions, summary_of


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def targets(count: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(9))


def test_by_hand() -> None:
    """Of a half each against a quarter and three quarters: ln 2 / 2 + ln (2/3) / 2."""
    reference = torch.tensor([[0.5, 0.5]]).log()
    other = torch.tensor([[0.25, 0.75]]).log()
    found = at_positions(reference, other, torch.tensor([0]))
    assert found.divergence.item() == pytest.approx(math.log(2) / 2 + math.log(2 / 3) / 2, abs=1e-7)
    assert found.loss.item() == pytest.approx(math.log(4), abs=1e-7)
    assert found.reference_loss.item() == pytest.approx(math.log(2), abs=1e-7)


def test_as_torch_computes_it() -> None:
    reference, other, follows = logits(40, 30), logits(40, 30, seed=1), targets(40, 30)
    found = at_positions(reference, other, follows)
    true, got = (torch.log_softmax(one.double(), -1) for one in (reference, other))
    expected = torch.nn.functional.kl_div(got, true, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(found.divergence, expected)
    losses = torch.nn.functional.cross_entropy(other.double(), follows, reduction="none")
    torch.testing.assert_close(found.loss, losses)
    summary = summary_of([found])
    assert summary.agreement == (reference.argmax(-1) == other.argmax(-1)).double().mean().item()
    assert 0 < summary.agreement < 1
    assert summary.perplexity == pytest.approx(losses.mean().exp().item())


def test_nothing_against_itself_and_never_less() -> None:
    """Also where a model forbids tokens, whose logits are -inf."""
    same = logits(20, 50)
    same[:, 7] = -math.inf
    follows = torch.zeros(20, dtype=torch.long)
    assert at_positions(same, same.clone(), follows).divergence.tolist() == [0.0] * 20
    assert summary_of([at_positions(same, same, follows)]).agreement == 1
    near = same * (1 + 1e-7)
    assert (at_positions(same, near, follows).divergence >= 0).all()


def test_small_divergences_are_not_lost_in_rounding() -> None:
    """Of logits that differ by d in one of two tokens it is d²/8 but for higher powers; float32 would give noise."""
    d = 1e-5
    reference, other = (torch.tensor([[3.0, 3.0 + more]], dtype=torch.float64) for more in (0, d))
    found = at_positions(reference, other, torch.tensor([0]))
    assert found.divergence.item() == pytest.approx(d * d / 8, rel=1e-3)


def positions(*divergences: float) -> Positions:
    count = len(divergences)
    nothing = torch.zeros(count, dtype=torch.float64)
    return Positions(torch.tensor(divergences, dtype=torch.float64), nothing, nothing, torch.ones(count).bool())


def test_of_all_positions() -> None:
    found = summary_of([positions(*range(1, 100)), positions(1000)])
    assert found.positions == 100
    assert found.divergence.mean == pytest.approx((99 * 100 / 2 + 1000) / 100)
    assert (found.divergence.median, found.divergence.percentile, found.divergence.largest) == (50, 99, 1000)
    values = torch.tensor([*range(1, 100), 1000.0])
    assert found.divergence.error == pytest.approx((values.std() / 10).item())
    assert (found.perplexity, found.reference_perplexity) == (1, 1)


def test_of_one_position() -> None:
    found = summary_of([positions(0.25)]).divergence
    assert (found.mean, found.error, found.median, found.percentile, found.largest) == (0.25, 0, 0.25, 0.25, 0.25)


def test_who_knows_nothing_is_as_perplexed_as_the_vocabulary_is_large() -> None:
    found = summary_of([at_positions(torch.zeros(9, 32), torch.zeros(9, 32), targets(9, 32))])
    assert found.perplexity == pytest.approx(32)
