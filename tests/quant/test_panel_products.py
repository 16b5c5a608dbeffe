"""Products by panels of made values, against the matrices that the codes stand for, in double precision."""

from __future__ import annotations

import pytest
import torch

from rabbitllm.quant import kernels, product_kernels, products, vectors
from rabbitllm.quant.kernels import PANELS
from rabbitllm.quant.products import LEAST_PANEL_INPUTS, MAX_PANEL_INPUTS, Matrix, ProductMethod, linear
from tests.quant.test_packed_products import SCHEMES, inputs, matrix, meant, needs_kernel
from tests.support.rounding import assert_products

KERNELS = [key[1:] for key in product_kernels.KERNELS if key[0] == PANELS]


def by_panels(scheme: str, width: int, rows: int, columns: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, and the matrix."""
    if vectors.lanes() < width:
        pytest.skip("needs other vectors")
    parts = matrix(scheme, rows, columns, dtype=torch.float32)
    return Matrix(*parts).times_by(ProductMethod.PANELS, width, x), meant(parts)


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
    monkeypatch.setitem(kernels.WORTH_A_THREAD, PANELS, 1 << 30)
    alone, _ = by_panels(scheme, width, 131, 2048, x)
    monkeypatch.setitem(kernels.WORTH_A_THREAD, PANELS, 1 << 10)
    if not team:
        monkeypatch.setattr(kernels, "torchs_team", lambda: None)
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
    monkeypatch.setattr(products, "kernel_for", lambda scheme, dtype: vectors.lanes())
    counts: list[int] = []
    ordinary = Matrix.times_by

    def counted(self: Matrix, method: ProductMethod, width: int, x: torch.Tensor) -> torch.Tensor:
        if method is ProductMethod.PANELS:
            counts.append(len(x))
        return ordinary(self, method, width, x)

    products._agrees(ProductMethod.PANELS, scheme, vectors.lanes())  # whose trial multiplies too
    monkeypatch.setattr(Matrix, "times_by", counted)
    parts, most = matrix(scheme, 70, 512), MAX_PANEL_INPUTS[vectors.lanes()]
    for count in (LEAST_PANEL_INPUTS - 1, LEAST_PANEL_INPUTS, most, most + 1):
        x = inputs(count, 512, dtype)
        got = linear(x, Matrix(*parts), None)
        assert got.dtype == dtype
        if count <= most:
            assert_products(got, x, meant(parts))
    assert counts == [LEAST_PANEL_INPUTS, most]


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
    right = Matrix.times_by
    monkeypatch.setattr(Matrix, "times_by", lambda *given: right(*given) * 1.001)
    products._agrees.cache_clear()
    try:
        assert products.method_for(Matrix(*matrix("8bit", 20, 256)), vectors.lanes(), 8) is ProductMethod.CODES
        assert "are off by 1.0e-03 here and are not used" in caplog.text
    finally:
        products._agrees.cache_clear()
