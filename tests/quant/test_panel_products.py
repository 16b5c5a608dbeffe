"""Products by panels of made values, against the matrices that the codes stand for, in double precision."""

from __future__ import annotations

import pytest
import torch

from rabbitllm.quant import packed_products, panel_kernels, panel_products, row_team, vectors
from rabbitllm.quant.packed_products import Matrix, ProductMethod, linear
from rabbitllm.quant.panel_products import LEAST_INPUTS, MAX_INPUTS
from tests.quant.test_packed_products import SCHEMES, inputs, matrix, meant, needs_kernel
from tests.support.rounding import assert_products

KERNELS = list(panel_kernels._FUNCTIONS)


def by_panels(scheme: str, width: int, rows: int, columns: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, and the matrix."""
    if vectors.lanes() < width:
        pytest.skip("needs other vectors")
    parts = matrix(scheme, rows, columns, dtype=torch.float32)
    return Matrix(*parts).by_panels(width, x), meant(parts)


@pytest.mark.parametrize(("scheme", "width"), KERNELS)
@pytest.mark.parametrize("count", [1, 5, 6, 7, 13, 64])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (3, 192), (37, 2048), (130, 2112), (70, 5632)])
def test_any_number_of_inputs_rows_and_columns(scheme: str, width: int, count: int, rows: int, columns: int) -> None:
    x = inputs(count, columns)
    got, weight = by_panels(scheme, width, rows, columns, x)
    assert got.shape == (count, rows)
    assert_products(got, x, weight)


@pytest.mark.parametrize(("scheme", "width"), KERNELS)
def test_a_row_has_the_same_bits_alone_and_among_others(scheme: str, width: int) -> None:
    x = inputs(41, 4160)
    together, _ = by_panels(scheme, width, 70, 4160, x)
    for begin, end in ((0, 1), (3, 10), (40, 41)):
        alone, _ = by_panels(scheme, width, 70, 4160, x[begin:end])
        assert torch.equal(alone, together[begin:end])


@pytest.mark.parametrize(("scheme", "width"), KERNELS)
@pytest.mark.parametrize("team", [True, False])
def test_any_number_of_threads_gives_the_same_bits(
    scheme: str, width: int, team: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs(9, 2048)
    monkeypatch.setattr(panel_products, "WORTH_A_THREAD", 1 << 30)
    alone, _ = by_panels(scheme, width, 131, 2048, x)
    monkeypatch.setattr(panel_products, "WORTH_A_THREAD", 1 << 10)
    if not team:
        monkeypatch.setattr(row_team, "torchs_team", lambda: None)
    threads = torch.get_num_threads()
    try:
        for count in (2, 3, 5):
            torch.set_num_threads(count)
            assert torch.equal(by_panels(scheme, width, 131, 2048, x)[0], alone)
    finally:
        torch.set_num_threads(threads)


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_as_many_as_it_is_for_goes_this_way(
    scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_products, "kernel_for", lambda scheme, dtype: vectors.lanes())
    counts: list[int] = []
    ordinary = Matrix.by_panels

    def by_panels(self: Matrix, width: int, x: torch.Tensor) -> torch.Tensor:
        counts.append(len(x))
        return ordinary(self, width, x)

    monkeypatch.setattr(Matrix, "by_panels", by_panels)
    parts, most = matrix(scheme, 70, 512), MAX_INPUTS[vectors.lanes()]
    for count in (LEAST_INPUTS - 1, LEAST_INPUTS, most, most + 1):
        x = inputs(count, 512, dtype)
        got = linear(x, Matrix(*parts), None)
        assert got.dtype == dtype
        if count <= most:
            assert_products(got, x, meant(parts))
    assert counts == [LEAST_INPUTS, most]


@needs_kernel
def test_what_is_not_a_number_stays_so() -> None:
    x = inputs(8, 256)
    x[2, 3] = torch.nan
    x[5, 6] = torch.inf
    got = linear(x, Matrix(*matrix("4bit", 20, 256)), None)
    assert bool(got[2].isnan().all())
    assert not bool(got[5].isfinite().any())
    assert bool(got[[0, 1, 3, 4, 6, 7]].isfinite().all())


@needs_kernel
def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    right = panel_products.times
    monkeypatch.setattr(panel_products, "times", lambda *given: right(*given) * 1.001)
    panel_products._agrees.cache_clear()
    try:
        assert packed_products._way(Matrix(*matrix("8bit", 20, 256)), vectors.lanes(), 8) is ProductMethod.CODES
        assert "are off by 1.0e-03 here and are not used" in caplog.text
    finally:
        panel_products._agrees.cache_clear()
