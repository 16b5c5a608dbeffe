"""Joint products have the bits of separate ones, for any mix of matrices that are plain or multiplied as integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._activations import Rounding
from rabbitllm.quant import _vectors, gguf_blocks
from rabbitllm.quant._kernel_interface import CODES
from rabbitllm.quant.bfloat_products import FEW_ROWS, max_rows, times, torch_has_tiles
from rabbitllm.quant.joint import JointProduct
from rabbitllm.quant.plain import PlainMatrix
from rabbitllm.quant.products import Matrix
from rabbitllm.quant.schemes import Quantized
from tests.quant.test_coded import matrix as coded_matrix
from tests.quant.test_products import inputs, matrix

pytestmark = [pytest.mark.bits, pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used")]
COLUMNS = 512


def blocks(scheme: str, rows: int, columns: int = COLUMNS) -> Matrix:
    """A matrix of GGUF's blocks."""
    empty = torch.empty(0)
    stored = gguf_blocks.sample(scheme, rows * columns, RandomTensors(rows))
    return Matrix(Quantized(scheme, (rows, columns), None), stored, empty, empty)


def own(scheme: str, rows: int, columns: int = COLUMNS) -> Matrix:
    """A matrix of a scheme of ours."""
    return Matrix(*matrix(scheme, rows, columns, seed=rows))


def plain_matrix(rows: int, columns: int = COLUMNS) -> PlainMatrix:
    """A plain matrix, which is kept."""
    KEPT[rows] = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()
    return PlainMatrix(KEPT[rows])


KEPT = dict[int, torch.Tensor]()
MIXES: dict[str, list[Any]] = {
    "4bit": [own("4bit", rows) for rows in (300, 70, 70)],
    "q4_k_m": [blocks("Q4_K", 300), blocks("Q4_K", 70), blocks("Q6_K", 70)],
    "all": [
        own("4bit", 33),
        own("8bit", 5),
        blocks("Q8_0", 64),
        blocks("Q4_1", 1),
        coded_matrix("fp4 U8 1x32", 41, COLUMNS),
    ],
    "one": [blocks("Q5_K", 9)],
}
PLAIN_MIXES: dict[str, list[Any]] = {
    "plain": [plain_matrix(300), plain_matrix(1), plain_matrix(70)],
    "plain and codes": [plain_matrix(33), own("4bit", 5), blocks("Q4_1", 64)],
}


FLOAT8_MIXES: dict[str, list[Any]] = {
    "float8": [coded_matrix("fp8 F32 128x128", 300, COLUMNS), coded_matrix("fp8 BF16 1x0", 70, COLUMNS)],
    "float8 and others": [coded_matrix("fp8 F32 0x0", 33, COLUMNS), own("4bit", 5), plain_matrix(64)],
}


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bits_of_separate_products(name: str, dtype: torch.dtype, threads: int) -> None:
    matrices = MIXES[name]
    is_wide = [index % 2 == 1 for index in range(len(matrices))]
    product = JointProduct.of(matrices, is_wide)
    assert product is not None
    has_tiles, schemes = torch_has_tiles(), {of.form.scheme for of in matrices}
    limits = {"4bit": 16, "8bit": 8, "Q8_0": 16} if has_tiles else {"4bit": 32, "8bit": 12, "Q8_0": 24}
    assert product.max_inputs == min(limits.get(scheme, 16) for scheme in schemes)
    for count in (1, 2, 4, 5, 1):
        x = 30 * inputs(count, COLUMNS, dtype)
        x[-1, 64:200] = 0
        results = product(x.view(count, 1, COLUMNS), count)
        for result, of, wide in zip(results, matrices, is_wide, strict=True):
            expected = of.linear(x.float(), None)  # float32
            assert result.dtype == (torch.float32 if wide else dtype)
            assert torch.equal(result.view(count, -1), expected if wide else expected.to(dtype))


@pytest.mark.parametrize("name", PLAIN_MIXES)
def test_plain_matrices_take_bfloat16(name: str, threads: int) -> None:
    matrices = PLAIN_MIXES[name]
    product = JointProduct.of(matrices, [True, *[False] * (len(matrices) - 1)])
    assert product is not None
    assert product.max_inputs == min(FEW_ROWS, max_rows())
    assert product.takes(inputs(1, COLUMNS, torch.bfloat16), 1)
    assert not product.takes(inputs(1, COLUMNS), 1)
    for count in (1, 2, product.max_inputs, 1):
        x = 30 * inputs(count, COLUMNS, torch.bfloat16)
        first, *others = product(x.view(count, 1, COLUMNS), count)
        assert torch.equal(first.view(count, -1), times(_vectors.lanes(), x, KEPT[matrices[0].form.shape[0]]))
        for result, of in zip(others, matrices[1:], strict=True):
            assert torch.equal(result.view(count, -1), of.linear(x, None))


@pytest.mark.parametrize("name", FLOAT8_MIXES)
def test_float8_takes_bfloat16(name: str, threads: int) -> None:
    """By the kernel that this processor has for bfloat16."""
    matrices = FLOAT8_MIXES[name]
    product = JointProduct.of(matrices, [True, *[False] * (len(matrices) - 1)])
    assert product is not None
    assert not product.takes(inputs(1, COLUMNS), 1)
    for count in (1, 2, product.max_inputs, 1):
        x = 30 * inputs(count, COLUMNS, torch.bfloat16)
        assert product.takes(x, count)
        first, *others = product(x.view(count, 1, COLUMNS), count)
        width = matrices[0].method_for(1, torch.bfloat16)[1]
        assert torch.equal(first.view(count, -1), matrices[0].times_by(CODES, width, x))
        for result, of in zip(others, matrices[1:], strict=True):
            assert torch.equal(result.view(count, -1), of.linear(x, None))


@pytest.mark.parametrize("scheme", ["int8 BF16 1x0", "fp8 BF16 1x0"])
def test_rounded_inputs(scheme: str, threads: int) -> None:
    """Rows of three dimensions are rounded each by itself, as `linear` does, for those matrices that say so."""
    plain = coded_matrix(scheme, 70, COLUMNS)
    roundings = Rounding(127.5), Rounding(448.0, group=128), None
    matrices = [dataclasses.replace(plain, rounding=rounding) for rounding in roundings]
    product = JointProduct.of([*matrices, matrices[0]], [False] * 4)
    assert product is not None
    for count in (1, 2, 5):
        x = inputs(count, COLUMNS, torch.bfloat16) * torch.logspace(0, 2, count)[:, None].bfloat16()
        assert product.takes(x, count) is (count == 1)
        assert product.takes(x[None], count)
        assert not product.takes(x[None].float(), count)
        for result, of in zip(product(x[None], count), [*matrices, matrices[0]], strict=True):
            rounded = x[None] if of.rounding is None else of.rounding.rounded(x[None])
            assert torch.equal(result, plain.linear(rounded, None))
            assert torch.equal(result, of.linear(x[None], None))


def test_a_plain_matrix_with_one_step_a_row() -> None:
    weight, x = (inputs(rows, 2 * _vectors.lanes(), torch.bfloat16) for rows in (9, 3))
    product = JointProduct.of([PlainMatrix(weight)], [True])
    assert product is not None
    assert torch.equal(product(x, 3)[0], times(_vectors.lanes(), x, weight))


def test_infinite_inputs_give_no_number(threads: int) -> None:
    (of,) = MIXES["one"]
    product = JointProduct.of([of], [False])
    assert product is not None
    x = inputs(1, COLUMNS, torch.bfloat16)
    x[0, 3] = torch.inf
    assert torch.equal(product(x, 1)[0].isfinite(), of.linear(x, None).isfinite())


def test_results_stay_when_scratch_memory_is_used_again() -> None:
    (of,) = MIXES["one"]
    product = JointProduct.of([of], [False])
    assert product is not None
    first, second = inputs(1, COLUMNS, torch.bfloat16), inputs(2, COLUMNS, torch.bfloat16)
    kept = product(first, 1)[0]
    product(second, 2)
    assert torch.equal(kept, of.linear(first, None))


def test_matrices_that_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert JointProduct.of([own("4bit", 3), own("4bit", 3, 256)], [False] * 2) is None
    monkeypatch.setattr("rabbitllm.quant.joint.torchs_team", lambda: None)
    assert JointProduct.of([own("4bit", 3)], [False]) is None
