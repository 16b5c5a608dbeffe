"""The bounds for rounding: kept by sums in any order, and not by what is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.rounding import assert_as_near, assert_greedy, assert_products, unit


def some(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def one_by_one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Summed in float32 in the worst order: one term after the other."""
    out = torch.zeros(len(x), len(weight))
    for column in range(x.shape[1]):
        out += torch.outer(x[:, column], weight[:, column])
    return out


@pytest.mark.parametrize("columns", [1, 7, 64, 640, 5632])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (5, 40)])
def test_sums_in_any_order_are_right(tokens: int, rows: int, columns: int) -> None:
    for seed in range(20):
        x, weight = some(tokens, columns, seed), some(rows, columns, seed + 100)
        assert_products(one_by_one(x, weight), x, weight)
        assert_products(x @ weight.T, x, weight)
        assert_products(one_by_one(x.flip(1), weight.flip(1)).bfloat16(), x, weight)


def test_what_is_wrong_is_seen() -> None:
    x, weight = some(4, 640, 0), some(96, 640, 1)
    right = x @ weight.T
    other = weight.clone()
    other[3, 5] *= 1.001
    twice = (x.bfloat16() @ weight.bfloat16().T).bfloat16()
    for wrong in (right * (1 + 2e-5), x @ other.T, right.bfloat16().float(), twice):
        with pytest.raises(AssertionError):
            assert_products(wrong, x, weight)


def test_one_bit_more_may_be_lost_and_no_more() -> None:
    exact = some(11, 272, 0).double()
    plain = exact.bfloat16()
    assert_as_near(plain, plain, exact)
    assert_as_near((exact * (1 + unit(torch.bfloat16) / 2)).bfloat16(), plain, exact)
    for wrong in (exact * 1.02, exact + 0.02, exact.roll(1, 0)):
        for routed in (False, True):
            with pytest.raises(AssertionError):
                assert_as_near(wrong.bfloat16(), plain, exact, routed=routed)


def test_a_position_that_went_to_other_experts() -> None:
    exact = some(11, 272, 0).double()
    plain, computed = exact.bfloat16(), exact.bfloat16()
    computed[4] *= -1
    assert_as_near(computed, plain, exact, routed=True)
    with pytest.raises(AssertionError):
        assert_as_near(computed, plain, exact)


def test_tokens_may_differ_where_two_are_as_good() -> None:
    scores = torch.tensor([0.0, 2.0, 1.999, 1.0])

    def model(ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=scores.expand(1, ids.shape[1], 4))

    plain = torch.tensor([[3, 0, 1, 1, 0]])
    for tokens, off in ((plain, 0.0), (torch.tensor([[3, 0, 2, 3, 3]]), 1e-3)):
        assert_greedy(tokens, plain, model, off)
    for tokens in (torch.tensor([[3, 0, 2, 3, 3]]), torch.tensor([[3, 0, 3, 1, 0]])):
        with pytest.raises(AssertionError):
            assert_greedy(tokens, plain, model, 1e-4)
