"""Attention to prompts in one call: its error is one rounding, and a row has the same bits wherever it is computed."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rabbitllm.quant import _vectors, prompt_attention
from rabbitllm.quant.prompt_attention import attend, attend_in_float32, attends

pytestmark = [pytest.mark.bits, pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used")]
ROUNDING = 2**-8
"""Of a result in bfloat16, relative to its norm: twice the unit roundoff."""


def some(heads: int, keys: int, rows: int, tokens: int, width: int) -> tuple[torch.Tensor, ...]:
    """Queries as a projection leaves them, and keys and values in a cache with room."""
    q = torch.randn(1, rows, heads, width).bfloat16().transpose(1, 2)
    k, v = torch.randn(2, 1, keys, tokens + 9, width).bfloat16()[:, :, :, 3 : tokens + 3]
    return q, k, v


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    repeated = (tensor.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    result: torch.Tensor = scaled_dot_product_attention(q.double(), *repeated, attn_mask=mask, scale=scaling)
    return result.transpose(1, 2)


def causal(rows: int, tokens: int, window: int = 1 << 20) -> torch.Tensor:
    mask = torch.ones(rows, tokens, dtype=torch.bool).tril(tokens - rows)
    return mask & ~mask.tril(tokens - rows - window)


@pytest.mark.parametrize(("heads", "keys", "width"), [(9, 3, 64), (4, 4, 32), (7, 1, 128), (2, 1, 96), (1, 1, 256)])
def test_the_error_is_one_rounding(heads: int, keys: int, width: int) -> None:
    assert attends(width)
    for rows, tokens in ((1, 1), (13, 13), (64, 64), (130, 130), (50, 190), (1, 77)):
        q, k, v = some(heads, keys, rows, tokens, width)
        for scaling in (1e-3, 0.1, 2.0):
            for mask in (None, causal(rows, tokens), causal(rows, tokens, 20)):
                expected = exact(q, k, v, causal(rows, tokens) if mask is None else mask, scaling)
                error = (attend(q, k, v, mask, scaling) - expected).norm() / expected.norm()
                assert error < ROUNDING


@pytest.mark.parametrize("width", [64, 128])
def test_a_row_has_the_same_bits(width: int) -> None:
    """With any number of threads and of rows beside it, and whatever comes after it."""
    q, k, v = some(6, 2, 300, 300, width)
    result, threads = attend(q, k, v, None, 0.125), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(attend(q, k, v, None, 0.125), result)
    finally:
        torch.set_num_threads(threads)
    for begin, end in ((0, 1), (0, 17), (100, 300), (37, 259), (299, 300)):
        part = attend(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], None, 0.125)
        assert torch.equal(part, result[:, begin:end])
    assert torch.equal(attend(q, k, v, causal(300, 300), 0.125), result)
    k[:, :, 200:], v[:, :, 200:] = 3, -7
    assert torch.equal(attend(q, k, v, None, 0.125)[:, :200], result[:, :200])
    v[:, :, 201], v[:, :, 220] = torch.inf, torch.nan  # the rest of a tile
    for mask in (None, causal(300, 300)):
        spoilt = attend(q, k, v, mask, 0.125)
        assert torch.equal(spoilt[:, :200], result[:, :200])
        assert not spoilt[:, 200].isnan().any()
        assert not spoilt[:, 201:].isfinite().all(-1).any()
    v[:, :, 201:] = 1
    one = attend(q[:, 3:6], k[:, 1:], v[:, 1:], None, 0.125)  # the heads of the second of the keys'
    assert torch.equal(one, attend(q, k, v, None, 0.125)[:, :, 3:6])


def test_what_a_row_does_not_see_is_not_part_of_it() -> None:
    q, k, v = some(2, 1, 70, 70, 32)
    mask = causal(70, 70)
    mask[:, 5] = False
    mask[40] = False
    k[0, 0, 5] = torch.nan
    result = attend(q, k, v, mask, 0.2)
    assert not result[0, 40].any()  # it sees nothing
    seen = torch.cat([k[:, :, :5], 0 * k[:, :, :1].nan_to_num(), k[:, :, 6:]], 2)
    assert torch.equal(attend(q, seen, v, mask, 0.2), result)
    k[0, 0, 60] = torch.inf
    result = attend(q, k, v, mask, 0.2)
    assert not result[0, :60].isnan().any()
    assert result[0, 60:].isnan().all()


def test_scores_of_any_size_count() -> None:
    q, k, v = some(2, 1, 70, 70, 32)
    q, k = q * 1e16, k * 1e16
    wide = [x.float() for x in (q, k.expand_as(q), v.expand_as(q))]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=0.2)
    torch.testing.assert_close(attend(q, k, v, None, 0.2).float(), expected.transpose(1, 2), rtol=0.01, atol=0.01)


def test_widths_without_a_kernel() -> None:
    assert not any(map(attends, (0, 16, 80, 512)))


@pytest.mark.parametrize(("most", "softcap"), [(1 << 24, None), (2_000, None), (2_000, 0.5)])
def test_sinks_take_part_in_the_softmax(most: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask for all heads and for each, in parts of rows; a row that sees nothing is zero."""
    monkeypatch.setattr(prompt_attention, "MOST_SCORES", most)
    q, k, v = some(6, 2, 50, 90, 64)
    sinks, seen = torch.tensor([-30.0, -1.0, 0.0, 1.0, 5.0, 40.0]).bfloat16(), causal(50, 90, 30)
    seen[7] = False
    for mask in (None, torch.zeros(1, 50, 90).masked_fill(~seen, -torch.inf), torch.randn(6, 50, 90)):
        scores = 0.125 * q.double() @ k.double().repeat_interleave(3, 1).mT
        scores = (scores if softcap is None else (scores / softcap).tanh() * softcap) + (0 if mask is None else mask)
        whole = torch.cat([scores, sinks.double().view(1, 6, 1, 1).expand(1, 6, 50, 1)], -1)
        expected = (whole.softmax(-1)[..., :-1] @ v.double().repeat_interleave(3, 1)).transpose(1, 2)
        result = attend_in_float32(q, k, v, None if mask is None else mask.bfloat16(), 0.125, sinks, softcap)
        assert (result - expected).norm() <= ROUNDING * expected.norm() * (4 if mask is not None else 1)
    assert torch.equal(attend_in_float32(q, k, v, torch.full((1, 50, 90), -torch.inf), 0.125, sinks), 0 * result)
