"""Chosen matrices (K, N) by one call have the bits of single products with them, or are left to these."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from rabbitllm.base.programs import Program
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.quant import _kernels, _vectors, turned
from rabbitllm.quant._kernel_interface import BFLOAT16
from rabbitllm.quant.joint import RoutedProduct
from rabbitllm.quant.products import sample
from rabbitllm.quant.turned import TurnedMatrix

pytestmark = [pytest.mark.bits, pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used")]
SCHEMES = "4bit", "8bit", BFLOAT16
GROUPS = (1, 1), (0, 3)
"""The number of a chosen matrix, and its rows of input."""


def matrix_of(scheme: str, rows: int, columns: int, random: RandomTensors) -> Any:
    """A matrix (K, N); a plain one of bfloat16 is given by its transpose."""
    if scheme == BFLOAT16:
        return random.normal(rows, columns).t()
    own = sample(scheme, (rows, columns), random)
    return TurnedMatrix(own.form, own.payload, own.absmax, own.table)


def single(x: torch.Tensor, matrix: Any) -> torch.Tensor:
    if isinstance(matrix, TurnedMatrix):
        return matrix.times(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turned, "is_faster", lambda: True)
        return turned.product(x, matrix.t())


def multiplied(matrices: list[Any], x: torch.Tensor) -> torch.Tensor:
    """The products of `GROUPS`."""
    product, known = RoutedProduct.of(matrices[0])[0], [RoutedProduct.of(matrix) for matrix in matrices]  # type: ignore[index]
    assert all(each is not None and each[0] == product for each in known)
    words, begin = [array("q", each[1]) for each in known if each is not None], 0
    chosen = array("q", [len(GROUPS)])
    for number, count in GROUPS:
        chosen.extend([words[number].buffer_info()[0], begin, count, number])
        begin += count
    out = torch.empty(begin, product.shape[0], dtype=torch.bfloat16)
    program = Program.of(lambda to, *at: product.add_to(to, begin, at[0], at[1], at[2], 0, 0), 3)
    program(x.data_ptr(), chosen.buffer_info()[0], out.data_ptr())
    return out


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("rows", "columns"), [(36, 192), (512, 4224)])  # the last by several threads, in two parts
def test_chosen_matrices_have_the_bits_of_single_products(scheme: str, rows: int, columns: int) -> None:
    random = RandomTensors()
    matrices, x = [matrix_of(scheme, rows, columns, random) for _ in range(2)], random.normal(4, rows)
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        expected = torch.cat([single(x[:1], matrices[1]), single(x[1:], matrices[0])])
        assert torch.equal(multiplied(matrices, x), expected)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "matrix",
    [
        torch.zeros(36, 192).bfloat16()[:, :128].t(),  # with gaps
        torch.zeros(36, 192).t(),
        torch.zeros(36, 96).bfloat16().t(),
        torch.zeros(35, 192).bfloat16().t(),
        matrix_of("4bit", 35, 192, RandomTensors()) if _vectors.lanes() else None,
    ],
)
def test_others_have_no_kernel(matrix: Any) -> None:
    assert RoutedProduct.of(matrix) is None


@pytest.mark.parametrize("scheme", ["Q4_K", "Q5_0", "Q8_0"])
def test_blocks_have_no_kernel(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nor are any tried: one for other methods would write behind its results."""
    matrix = matrix_of(scheme, 36, 256, RandomTensors())
    assert RoutedProduct.of(matrix) is None
    assert not caplog.records


def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    random, run = RandomTensors(), _kernels.run

    def wrong(method: str, scheme: str, width: int, work: Any, nbytes: int) -> None:
        run(method, scheme, width, [(*piece[:-2], piece[-2] - 1, piece[-1]) for piece in work], nbytes)

    turned._agrees.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(_kernels, "run", wrong)
        assert RoutedProduct.of(matrix_of("4bit", 36, 192, random)) is None
    turned._agrees.cache_clear()
    assert RoutedProduct.of(matrix_of("4bit", 36, 192, random)) is not None
