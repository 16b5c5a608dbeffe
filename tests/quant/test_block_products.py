"""Products with blocks of GGUF files, by each method, against the numbers of the `gguf` package in double precision."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.quant import _kernels, _vectors, gguf_blocks, products
from rabbitllm.quant._block_formats import FORMATS
from rabbitllm.quant._kernel_interface import BYTES, CODES, DEQUANTIZED
from rabbitllm.quant.gguf_blocks import sample
from rabbitllm.quant.products import Matrix, multiplies
from rabbitllm.quant.schemes import Quantized
from tests.quant import test_coded, test_products
from tests.support.draws import draws
from tests.support.forked import in_a_fork
from tests.support.integer_products import as_multiplied, is_of_bytes, rounded_inputs, rounded_to_bytes, width_of
from tests.support.rounding import assert_products

pytestmark = pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used here")
NOTHING = torch.empty(0)
COUNTS = (1, 3, 4, 5, 6, 17, 64, 300)
"""Inputs: by codes, by panels where these are used, and dequantized."""


def matrix(scheme: str, rows: int, columns: int, seed: int = 0) -> Matrix:
    blocks = sample(scheme, rows * columns, RandomTensors(seed))
    return Matrix(Quantized(scheme, (rows, columns), None), blocks, NOTHING, NOTHING)


def meant(of: Matrix) -> torch.Tensor:
    """Float64."""
    rows = of.payload.view(of.form.shape[0], -1).numpy()
    return torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[of.form.scheme])).double()


def assert_product(
    result: torch.Tensor,
    x: torch.Tensor,
    of: Matrix,
    bias: torch.Tensor | None = None,
    rounded: torch.dtype | None = None,
) -> None:
    """`linear` gave the product, of inputs as its method rounds them, but for the rounding of sums."""
    assert_products(result, as_multiplied(of, x), meant(of), bias, weights=rounded)


def inputs(count: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(9)).to(dtype)


FEW = ("Q4_K", "Q8_0")
"""Compiling the kernels of a type takes a few seconds, so the others are for the long tests."""
ALL = [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in FORMATS]


@pytest.mark.parametrize("scheme", ALL)
def test_any_number_of_inputs(scheme: str) -> None:
    of = matrix(scheme, 37, 1024)
    assert multiplies(of.form)
    for count in COUNTS:
        x = inputs(count, 1024)
        assert_product(of.linear(x, None), x, of)


@pytest.mark.parametrize("scheme", FEW)
@settings(max_examples=draws(40), deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 20), st.integers(0, 1 << 30))
def test_many_shapes(scheme: str, rows: int, blocks: int, count: int, seed: int) -> None:
    columns = blocks * (256 if scheme == "Q4_K" else 64)
    of = matrix(scheme, rows, columns, seed)
    x = inputs(count, columns)
    assert_products(of.times_by(CODES, width_of(CODES), x), rounded_inputs(scheme, x), meant(of))
    assert_products(of.times_by(BYTES, width_of(BYTES, scheme), x), rounded_to_bytes(scheme, x), meant(of))


@pytest.mark.parametrize("scheme", ALL)
def test_a_kernel_rounds_the_matrix_once(scheme: str) -> None:
    of = matrix(scheme, 70, 512)
    assert torch.equal(of.bfloats(_vectors.lanes()), of.dequantized(torch.float32).bfloat16())


@pytest.mark.parametrize("scheme", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_inputs_and_a_bias(scheme: str, dtype: torch.dtype) -> None:
    of, bias = matrix(scheme, 70, 512), inputs(1, 70)[0].to(dtype)
    for count in COUNTS:
        x = inputs(count, 512, dtype)
        result = of.linear(x.view(1, count, 512), bias)[0]
        assert result.dtype == dtype
        dequantized = of.method_for(count, dtype)[0] == DEQUANTIZED
        assert_product(result, x, of, bias, dtype if dequantized else None)


@pytest.mark.parametrize(("scheme", "method"), [*itertools.product(FEW, (CODES, BYTES))])
@pytest.mark.parametrize("team", [True, False])
def test_a_row_has_the_same_bits_in_any_batch_and_thread_count(
    scheme: str, method: str, team: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, x, width = matrix(scheme, 131, 2048), inputs(13, 2048), width_of(method, scheme)
    monkeypatch.setitem(_kernels.WORTH_A_THREAD, method, 1 << 30)
    together = of.times_by(method, width, x)
    for begin, end in ((0, 1), (1, 3), (2, 5), (3, 10), (12, 13)):
        assert torch.equal(of.times_by(method, width, x[begin:end]), together[begin:end])
    monkeypatch.setitem(_kernels.WORTH_A_THREAD, method, 1 << 10)
    if not team:
        monkeypatch.setattr(_kernels, "torchs_team", lambda: None)
    threads = torch.get_num_threads()
    try:
        for count in (2, 5):
            torch.set_num_threads(count)
            assert torch.equal(of.times_by(method, width, x), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("scheme", ALL)
def test_each_code_of_a_block_is_multiplied_with_its_input(scheme: str) -> None:
    """One input is not zero at a time, so each product is a single weight."""
    of, ones = matrix(scheme, 3, 512), torch.eye(512, dtype=torch.bfloat16)
    expected = meant(of)
    blocks = expected.view(3, -1, gguf_blocks.BLOCK_TYPES[scheme].elements)
    largest = blocks.abs().amax(-1, keepdim=True)  # a weight may be the small difference of code and minimum
    for method in (CODES, BYTES):
        result = of.times_by(method, width_of(method, scheme), ones).T.double()
        assert bool(((result - expected).view_as(blocks).abs() <= 4e-7 * largest).all())


@pytest.mark.parametrize(("scheme", "columns"), [("Q4_K", 512), ("Q8_0", 512), ("Q4_0", 192)])
def test_methods_by_the_number_of_inputs(scheme: str, columns: int) -> None:
    of, counts = matrix(scheme, 7, columns), (1, 16, 17, 1000)
    assert [of.method_for(count, torch.float32)[0] for count in counts] == [CODES, CODES, BYTES, BYTES]
    x = inputs(17, columns, torch.bfloat16)
    assert_product(of.linear(x, None), x, of)


@pytest.mark.parametrize("scheme", ["Q4_K", "Q8_0"])
def test_nan_and_infinity_stay_in_their_row_by_bytes(scheme: str) -> None:
    of, x = matrix(scheme, 20, 512), inputs(20, 512)
    x[2, 3], x[5, 300], x[7] = torch.nan, -torch.inf, 0.0
    result = of.times_by(BYTES, width_of(BYTES, scheme), x)
    assert bool(result[2].isnan().all())
    assert not bool(result[5].isfinite().any())
    rest = [row for row in range(20) if row not in (2, 5)]
    assert_products(result[rest], rounded_to_bytes(scheme, x[rest]), meant(of))
    assert not bool(result[7].any())


def test_a_row_with_a_partial_step_is_multiplied_by_bytes() -> None:
    of, x = matrix("Q4_0", 7, 96), inputs(2, 96, torch.bfloat16)
    assert of.method_for(2, torch.float32)[0] == BYTES
    assert_product(of.linear(x, None), x, of)


def test_inputs_that_are_slices() -> None:
    of, wide = matrix("Q4_K", 7, 512), inputs(3, 1024, torch.bfloat16)
    x = wide[:, 256:768]
    assert torch.equal(of.linear(x, None), of.linear(x.contiguous(), None))


def digests(kernels: Sequence[tuple[str, str]]) -> list[str]:
    """Of products by kernels, by the method and the codes of each."""
    sums = []
    for method, name in kernels:
        of: Any
        if name in FEW:
            of = matrix(name, 37, 1024)
        elif name in test_products.SCHEMES:
            # one segment more than whole vectors of 4bit codes
            of = test_products.Matrix(*test_products.matrix(name, 37, 1088))
        else:
            of = test_coded.matrix(name, 37, 1024)
        width = width_of(method, name) if method == BYTES else width_of(CODES) if name not in test_coded.FORMS else 64
        product = of.times_by(method, width, inputs(5 if method == CODES else 7, of.form.shape[1]))
        sums.append(hashlib.sha256(product.numpy().tobytes()).hexdigest())
    return sums


KERNELS = [
    pytest.param(((CODES, "Q4_K"), (CODES, "4bit"), (BYTES, "Q8_0")), id="some"),
    pytest.param(
        ((CODES, "Q8_0"), (CODES, "8bit"), (BYTES, "Q4_K"), (CODES, "fp4 U8 1x32")), id="others", marks=pytest.mark.long
    ),
]
"""Those of each process; compiling one takes a second and more."""


@pytest.mark.skipif(
    _vectors.lanes() < 16 and "avxvnni" not in _vectors.features(), reason="kernels use AVX2 alone here"
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_same_bits_with_other_instructions(kernels: Sequence[tuple[str, str]]) -> None:
    """A process that may use AVX2 alone multiplies as this one does."""
    # inputs of 4bit have more bits with AVX-512 and no VNNI
    kernels = [kernel for kernel in kernels if kernel[1] != "4bit" or is_of_bytes("4bit")]
    code = f"from tests.quant.test_block_products import digests; print(*digests({kernels}))"
    features = "+avx2,+avx,+fma,+f16c,+sse4.2,+ssse3,+popcnt"
    environment = os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == digests(kernels)


def test_bytes_need_little_stack() -> None:
    """Too little of it would end the process, so it is a fork's."""
    products: list[torch.Tensor] = []

    def multiply() -> None:
        products.append(matrix("Q8_0", 130, 1024).times_by(BYTES, width_of(BYTES, "Q8_0"), inputs(7, 1024)))

    def multiply_with_little_stack() -> bool:
        threading.stack_size(256 << 10)
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
        return torch.equal(*products)

    multiply()
    assert in_a_fork(multiply_with_little_stack)


def test_row_groups_with_separate_matrices() -> None:
    """As experts are multiplied."""
    matrices, x = [matrix("Q4_K", 40, 512, seed) for seed in range(3)], inputs(12, 512, torch.bfloat16)
    product = matrices[0].grouped(x)
    assert product is not None
    product.multiply(matrices, [(0, 1), (1, 3), (3, 11)])
    result = product.result()
    for of, begin, end in zip(matrices, (0, 1, 3), (1, 3, 11), strict=True):
        assert_product(result[begin:end], x[begin:end], of)
    assert not bool(result[11].any())


@pytest.mark.parametrize("scheme", ["IQ3_S", "TQ1_0", "NVFP4"])
def test_types_without_a_kernel_are_dequantized(scheme: str) -> None:
    form = Quantized(scheme, (8, 256), None)
    assert not multiplies(form)


def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    right, by_kernel = Matrix.times_by, gguf_blocks._by_kernel
    monkeypatch.setattr(Matrix, "times_by", lambda *args: right(*args) * 1.001)

    def wrong(name: str, blocks: torch.Tensor, out: torch.Tensor) -> None:
        by_kernel(name, blocks, out)
        out *= 2

    monkeypatch.setattr(gguf_blocks, "_by_kernel", wrong)
    products.agrees.cache_clear()
    gguf_blocks._kernel_agrees.cache_clear()
    try:
        of = matrix("Q4_K", 300, 256)
        assert not multiplies(of.form)
        assert torch.equal(of.dequantized(torch.float32).double(), meant(of))
        assert "at Q4_K is off by 1." in caplog.text
        assert "by numbers at Q4_K is off by 1.0e+00 here" in caplog.text
    finally:
        products.agrees.cache_clear()
        gguf_blocks._kernel_agrees.cache_clear()
