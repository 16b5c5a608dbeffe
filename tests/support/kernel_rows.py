"""Products by the kernel for rows of bfloat16, also where torch's own are used; fixtures to import."""

from __future__ import annotations

import pytest
import torch

from rabbitllm.quant import _vectors, bfloat_products


@pytest.fixture
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are multiplied with plain matrices of bfloat16 by the kernel, with AMX too."""
    if not _vectors.lanes():
        pytest.skip("no vectors of a kind that is used here")
    if bfloat_products.max_rows() < bfloat_products.FEW_ROWS:
        monkeypatch.setattr(bfloat_products, "max_rows", lambda: bfloat_products.FEW_ROWS)


@pytest.fixture
def kernel_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each product had; the kernel is used even where torch's own products are sooner."""
    if not _vectors.lanes():
        pytest.skip("no vectors of a kind that is used here")
    rows: list[int] = []
    ordinary = bfloat_products.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows.append(x.shape[:-1].numel())
        return ordinary(x, weight, bias)

    monkeypatch.setattr(bfloat_products, "max_rows", lambda: bfloat_products.ALL_ROWS)
    monkeypatch.setattr(bfloat_products, "linear", linear)
    return rows
