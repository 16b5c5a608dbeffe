"""Products with quantized matrices, by each method and by bitsandbytes, against the matrices in double precision."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.base.openmp import PARTS
from rabbitllm.quant import _kernels, _product_kernels, _vectors, bfloat_products, products, quantize
from rabbitllm.quant._kernel_interface import BYTES, CODES, DEQUANTIZED, INTEGERS, WORD_WIDTH
from rabbitllm.quant.products import (
    MAX_AMX_INPUTS,
    MAX_GROUPED,
    MAX_WORD_INPUTS,
    FusedMatrix,
    Matrix,
    can_multiply,
    multiplies,
)
from rabbitllm.quant.quantize import dequantize
from rabbitllm.quant.schemes import SCHEMES as ALL_SCHEMES
from rabbitllm.quant.schemes import Quantized, bitsandbytes
from rabbitllm.quant.turned import FEW_INPUTS, TurnedMatrix, product
from tests.support import integer_products
from tests.support.draws import draws
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.rounding import assert_products

SCHEMES = ("4bit", "8bit")
needs_kernel = pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used here")
Parts = tuple[Quantized, torch.Tensor, torch.Tensor, torch.Tensor]


def matrix(scheme: str, rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Parts:
    """A matrix as bitsandbytes quantizes it."""
    functional = bitsandbytes().functional
    values = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)
    name = str(dtype).removeprefix("torch.")
    if scheme == "4bit":
        codes, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
        return Quantized("4bit", (rows, columns), name), codes, state.absmax, state.code
    codes, state = functional.quantize_blockwise(values, blocksize=2048)
    return Quantized("8bit", (rows, columns), None), codes, state.absmax, state.code


def meant(parts: Parts) -> torch.Tensor:
    """Code value times scale, float64, by indexing alone."""
    form, payload, absmax, table = parts
    codes = payload.view(-1)
    if form.scheme == "4bit":
        codes = torch.stack([codes >> 4, codes & 15], 1).view(-1)
    scales = absmax.double().repeat_interleave(ALL_SCHEMES[form.scheme].block)[: math.prod(form.shape)]
    return (table.double()[codes.long()] * scales).view(form.shape)


def assert_product(
    result: torch.Tensor, x: torch.Tensor, of: Parts | Matrix, bias: torch.Tensor | None = None, rounded: Any = None
) -> None:
    """`linear` gave the product; by codes and by bytes that of integers, but for the rounding of sums."""
    of = of if isinstance(of, Matrix) else Matrix(*of)
    flat = x.reshape(-1, x.shape[-1])
    method, _ = of.method_for(len(flat), x.dtype)
    if method in (CODES, BYTES):
        x, weight, rounded = integer_products.as_multiplied(of, flat), integer_products.meant(of, method), None
    else:
        x, weight = flat, meant((of.form, of.payload, of.absmax, of.table))
    assert_products(result.view(len(flat), -1), x, weight, bias, weights=rounded)


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def inputs(count: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(9)).to(dtype)


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 16, 17, 100])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (3, 192), (37, 1024), (130, 4096), (64, 5120), (37, 12352)])
def test_any_number_of_inputs_and_rows(scheme: str, count: int, rows: int, columns: int) -> None:
    parts = matrix(scheme, rows, columns, dtype=torch.float32)
    x = inputs(count, columns)
    assert multiplies(parts[0])
    result = Matrix(*parts).linear(x, None)
    assert result.shape == (count, rows)
    assert_product(result, x, parts)


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=draws(60), deadline=None)
@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 20), st.integers(0, 1 << 30))
def test_many_shapes(scheme: str, rows: int, segments: int, count: int, seed: int) -> None:
    parts = matrix(scheme, rows, 64 * segments, seed, torch.float32)
    of, x = Matrix(*parts), inputs(count, 64 * segments)
    assert_product(of.linear(x, None), x, parts)
    result = of.times_by(BYTES, integer_products.width_of(BYTES, scheme), x)
    assert_products(result, integer_products.rounded_to_bytes(scheme, x), integer_products.meant(of, BYTES))


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
def test_integers_lose_a_small_part_of_what_the_scheme_loses(scheme: str) -> None:
    """Of inputs like a model's, a few of which are large."""
    parts = matrix(scheme, 256, 4096)
    x = inputs(4, 4096, torch.bfloat16)
    x[:, ::97] *= 30
    values = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0)) * 0.02
    of_scheme = error(x.double() @ meant(parts).T, x.double() @ values.bfloat16().double().T)
    of_integers = error(Matrix(*parts).times_by(CODES, INTEGERS, x), x.double() @ meant(parts).T)
    assert of_integers < (0.15 if integer_products.is_of_bytes(scheme) else 0.03) * of_scheme
    of_bytes = error(
        Matrix(*parts).times_by(BYTES, integer_products.width_of(BYTES, scheme), x), x.double() @ meant(parts).T
    )
    assert of_bytes < 0.15 * of_scheme  # the errors have no common sign: 1 % more


@needs_kernel
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_get_the_same_share_of_rows_but_for_a_tile(threads: int) -> None:
    parts = threads * PARTS
    for rows, tile in itertools.product((1, 31, 192, 576, 1537, 8960), (4, 16, 32)):
        bounds = [
            _product_kernels.own_rows(np.array([tile]), part, part + PARTS, parts, rows)
            for part in range(0, parts, PARTS)
        ]
        assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
        assert bounds[-1][1] == rows
        assert all(begin % tile == 0 and abs(end - begin - rows / threads) < tile for begin, end in bounds)


def test_which_processors_have_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_features(*names: str) -> int:
        monkeypatch.setattr(_vectors, "features", lambda: frozenset(names))
        return _vectors.lanes()

    assert with_features("avx512f", "avx512bw") == 16
    assert with_features("avx512f", "avx2", "fma", "f16c") == with_features("avx2", "fma", "f16c") == 8
    assert with_features("avx2", "fma") == with_features("neon") == 0
    assert not _vectors.multiplies_pairs()
    with_features("avx512f", "avx512bw", "avx512bf16")
    assert _vectors.multiplies_pairs()


@pytest.mark.parametrize("given", [{"NUMBA_CPU_NAME": "generic"}, {"NUMBA_CPU_FEATURES": "+sse4.2,-avx2,-fma"}])
def test_a_compiler_with_fewer_instructions(given: dict[str, str], tmp_path: Path) -> None:
    """Asked for instructions that it may not use, it would end the process."""
    code = (
        "from rabbitllm.quant import _vectors, products; from rabbitllm.quant.schemes import Quantized; "
        "print(_vectors.lanes(), products.multiplies(Quantized('4bit', (64, 64), 'float32')))"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CPU_")}
    environment = {**inherited, **given, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 False\n"), done.stderr


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 6, 16, 17, 300])
def test_inputs_of_every_dtype_and_a_bias(scheme: str, dtype: torch.dtype, count: int) -> None:
    parts = matrix(scheme, 48, 512)
    x = inputs(count, 512, dtype)
    bias = torch.linspace(-1, 1, 48).to(dtype)
    result = Matrix(*parts).linear(x, bias)
    assert result.dtype == dtype
    assert_product(result, x, parts, bias, torch.bfloat16 if count == 300 else None)


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
def test_few_inputs_are_more_precise_than_the_rounded_matrix(scheme: str) -> None:
    if integer_products.is_of_bytes(scheme):
        pytest.skip("inputs have 8 bits here")
    parts = matrix(scheme, 256, 4096)
    x = inputs(1, 4096, torch.bfloat16)
    expected = x.double() @ meant(parts).T
    rounded = torch.nn.functional.linear(x, dequantize(*parts, torch.bfloat16))
    assert error(Matrix(*parts).linear(x, None), expected) < error(rounded, expected)


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_number_of_threads_gives_the_same_bits(
    scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = matrix(scheme, 777, 1024)
    x = inputs(3, 1024, dtype)
    before = torch.get_num_threads()
    monkeypatch.setitem(_kernels.WORTH_A_THREAD, CODES, 1 << 10)
    try:
        results = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(Matrix(*parts).linear(x, None))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_own_threads_give_the_same_bits(scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = matrix(scheme, 777, 1024)
    x = inputs(3, 1024, dtype)
    monkeypatch.setitem(_kernels.WORTH_A_THREAD, CODES, 1 << 10)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        in_a_team = Matrix(*parts).linear(x, None)
        monkeypatch.setattr(_kernels, "torchs_team", lambda: None)
        assert torch.equal(Matrix(*parts).linear(x, None), in_a_team)
    finally:
        torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("in_a_team", [True, False])
def test_grouped_products_have_the_bits_of_single_ones(
    scheme: str, dtype: torch.dtype, in_a_team: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = [Matrix(*matrix(scheme, 70, 256, seed)) for seed in range(5)]
    # some by codes and several by panels; of rows 7 and 8 nothing is asked
    groups = [(0, 1), (1, 7), (9, 75), (78, 85), (85, 86)]
    x = inputs(90, 256, dtype)
    if not in_a_team:
        monkeypatch.setattr(_kernels, "torchs_team", lambda: None)
    for method in _kernels.WORTH_A_THREAD:
        monkeypatch.setitem(_kernels.WORTH_A_THREAD, method, 1 << 12)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            product = matrices[0].grouped(x)
            assert product is not None
            product.multiply(matrices[:1], groups[:1])
            product.multiply(matrices[1:], groups[1:])
            result = product.result()
            assert result.dtype == dtype
            for weight, (begin, end) in zip(matrices, groups, strict=True):
                assert torch.equal(result[begin:end], weight.linear(x[begin:end], None))
            assert not result[7:9].any()
            assert not result[86:].any()
    finally:
        torch.set_num_threads(before)


@needs_kernel
def test_many_rows_are_not_grouped() -> None:
    weight = Matrix(*matrix("4bit", 8, 64))
    assert weight.grouped(inputs(MAX_GROUPED, 64)) is not None
    assert weight.grouped(inputs(MAX_GROUPED + 1, 64)) is None
    assert weight.grouped(inputs(MAX_GROUPED + 1, 64), 40) is not None


@needs_kernel
def test_unknown_tables_are_dequantized() -> None:
    """Alone and among others of a group; in float32, whose kernels reckon the values of 8bit from ramps."""
    ordinary, x = matrix("8bit", 64, 256), inputs(6, 256)
    form, payload, absmax, table = matrix("8bit", 64, 256, seed=1)
    foreign = (form, payload, absmax, table.flip(0).contiguous())
    assert_product(Matrix(*foreign).linear(x[:1], None), x[:1], foreign)
    assert Matrix(*foreign).grouped(x) is None
    product = Matrix(*ordinary).grouped(x)
    assert product is not None
    product.multiply([Matrix(*ordinary), Matrix(*foreign)], [(0, 2), (2, 5)])
    result = product.result()
    assert_product(result[:2], x[:2], ordinary)
    assert_product(result[2:5], x[2:5], foreign)
    assert not result[5].any()


@needs_kernel
@pytest.mark.parametrize("largest", [2.0**-10, 2.0**-100, 2.0])
def test_tables_of_8bit_with_another_largest_value(largest: float) -> None:
    """Integers of two bytes are parts of 1: of smaller values nothing would be left."""
    form, payload, absmax, table = matrix("8bit", 64, 256)
    of, x = Matrix(form, payload, absmax, table * largest), inputs(40, 256)
    assert error(of.linear(x, None), x.double() @ meant((form, payload, absmax, table * largest)).T) < 1e-3


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_kernel_rounds_the_matrix_once(scheme: str) -> None:
    parts = matrix(scheme, 70, 192)
    assert torch.equal(Matrix(*parts).bfloats(_vectors.lanes()), meant(parts).float().bfloat16())


@needs_kernel
def test_several_python_threads_at_once() -> None:
    parts = Matrix(*matrix("4bit", 512, 1024))
    batches = [inputs(count, 1024) for count in (1, 2, 3, 4, 5, 6, 7, 8)]
    alone = [parts.linear(x, None) for x in batches]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda x: parts.linear(x, None), batches * 4))
    assert all(torch.equal(result, alone[index % 8]) for index, result in enumerate(together))


@needs_kernel
def test_inputs_of_other_forms() -> None:
    parts = matrix("4bit", 32, 128)
    x = torch.randn(2, 3, 256)[..., ::2]
    assert_product(Matrix(*parts).linear(x, None), x, parts)
    assert Matrix(*parts).linear(x[:0], None).shape == (0, 3, 32)
    assert Matrix(*parts).linear(x[0, 0], None).shape == (32,)


@needs_kernel
def test_nan_and_infinity_are_kept() -> None:
    form, payload, absmax, table = matrix("4bit", 8, 128)
    absmax = absmax.clone()
    absmax[5] = math.nan  # of the second block of the third row
    result = Matrix(form, payload, absmax, table).linear(torch.ones(1, 128), None)[0]
    assert torch.isnan(result).tolist() == [False, False, True, False, False, False, False, False]


def test_matrices_without_a_kernel() -> None:
    for shape in ((8, 100), (8, 32), (128,), (2, 8, 64), (0, 64), (8, 0)):
        assert not multiplies(Quantized("4bit", shape, "bfloat16"))


def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    right = Matrix.times_by
    monkeypatch.setattr(Matrix, "times_by", lambda *args: right(*args) * 1.01)
    products.agrees.cache_clear()
    try:
        assert not multiplies(Quantized("8bit", (8, 64), "bfloat16"))
        if _vectors.lanes():
            assert "is off by 1.0e-02 here and is not used" in caplog.text
    finally:
        products.agrees.cache_clear()


_IN_A_PROCESS = """
import sys
import torch
from tests.quant.test_products import CODES, assert_product, inputs, matrix
from rabbitllm.quant import _kernels
from rabbitllm.quant.products import Matrix
for key in sys.argv[1:]:
    scheme, width = key.split("-")
    for worth in (1 << 10, 1 << 30):  # by threads of a team, and by one
        _kernels.WORTH_A_THREAD = {CODES: worth}
        parts, x = matrix(scheme, 70, 704), inputs(3, 704)
        assert_product(Matrix(*parts).times_by(CODES, int(width), x), x, parts)
"""


@pytest.mark.long
@needs_kernel
def test_kernels_compiled_by_separate_processes_load_together(tmp_path: Path) -> None:
    """numba links what it kept by name, and processes that compile a kernel each count their functions alike."""
    keys = [f"{scheme}-{INTEGERS}" for scheme in SCHEMES]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for chosen in (keys[1:], keys[:1], keys, keys[::-1]):
        subprocess.run([sys.executable, "-c", _IN_A_PROCESS, *chosen], env=environment, check=True, timeout=600)
    assert list(tmp_path.rglob("*.nbc"))


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("count", [1, 300])
def test_bfloat16_without_bfloat16_instructions(scheme: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no kernel multiplies is multiplied in float32; the result is rounded once."""
    monkeypatch.setattr(bfloat_products, "widens", lambda: True)
    monkeypatch.setattr(products, "max_panel_inputs", lambda width, dtype: 0)
    multiplied: list[torch.dtype] = []
    ordinary = torch.nn.functional.linear

    def product(x: torch.Tensor, *more: torch.Tensor | None) -> torch.Tensor:
        multiplied.append(x.dtype)
        return ordinary(x, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    parts, x, bias = matrix(scheme, 130, 1024), inputs(count, 1024, torch.bfloat16), torch.ones(130).bfloat16()
    result = Matrix(*parts).linear(x, bias)
    assert result.dtype == torch.bfloat16
    assert set(multiplied) == ({torch.float32} if count > 1 else set())
    assert_product(result, x, parts, bias, torch.bfloat16 if count > 1 else None)


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("count", [1, 5, 6, 7, 13, 64])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (3, 192), (37, 2048), (130, 2112), (70, 5632)])
def test_any_number_of_inputs_rows_and_columns_by_bytes(scheme: str, count: int, rows: int, columns: int) -> None:
    of, x = Matrix(*matrix(scheme, rows, columns, dtype=torch.float32)), inputs(count, columns)
    result = of.times_by(BYTES, integer_products.width_of(BYTES, scheme), x)
    assert result.shape == (count, rows)
    assert_products(result, integer_products.rounded_to_bytes(scheme, x), integer_products.meant(of, BYTES))


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_has_the_same_bits_in_any_batch_by_codes(scheme: str) -> None:
    of, x = Matrix(*matrix(scheme, 70, 1024)), inputs(13, 1024)
    together = of.times_by(CODES, INTEGERS, x)
    for begin, end in ((0, 1), (1, 3), (2, 5), (3, 10), (12, 13)):
        assert torch.equal(of.times_by(CODES, INTEGERS, x[begin:end]), together[begin:end])


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_has_the_same_bits_in_any_batch_by_bytes(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat_products, "torch_has_tiles", lambda: False)  # which multiplies so many rows faster
    of, x, width = Matrix(*matrix(scheme, 70, 4160)), inputs(41, 4160), integer_products.width_of(BYTES, scheme)
    together = of.times_by(BYTES, width, x)
    for begin, end in ((0, 1), (3, 10), (40, 41)):
        assert torch.equal(of.times_by(BYTES, width, x[begin:end]), together[begin:end])
    x = x.bfloat16()  # whose results the kernel rounds
    assert of.method_for(len(x), x.dtype) == (BYTES, width)
    assert torch.equal(of.linear(x, None), of.times_by(BYTES, width, x).bfloat16())


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("team", [True, False])
def test_any_number_of_threads_gives_the_same_bits_by_bytes(
    scheme: str, team: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, x, width = Matrix(*matrix(scheme, 131, 2048)), inputs(9, 2048), integer_products.width_of(BYTES, scheme)
    monkeypatch.setitem(_kernels.WORTH_A_THREAD, BYTES, 1 << 30)
    alone = of.times_by(BYTES, width, x)
    monkeypatch.setitem(_kernels.WORTH_A_THREAD, BYTES, 1 << 10)
    if not team:
        monkeypatch.setattr(_kernels, "torchs_team", lambda: None)
    threads = torch.get_num_threads()
    try:
        for count in (2, 3, 5):
            torch.set_num_threads(count)
            assert torch.equal(of.times_by(BYTES, width, x), alone)
    finally:
        torch.set_num_threads(threads)


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("limit", [MAX_AMX_INPUTS, MAX_WORD_INPUTS])
def test_torch_multiplies_many_rows_where_it_is_faster(
    scheme: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bfloat_products, "torch_has_instructions", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: limit == MAX_AMX_INPUTS)
    of = Matrix(*matrix(scheme, 70, 512))
    is_limited = limit == MAX_AMX_INPUTS or integer_products.width_of(BYTES, scheme) == WORD_WIDTH
    for count, dtype in itertools.product((limit, limit + 1, 10_000), (torch.bfloat16, torch.float16, torch.float32)):
        is_by_torch = dtype is torch.bfloat16 and is_limited and count > limit
        assert of.method_for(count, dtype)[0] == (DEQUANTIZED if is_by_torch else BYTES)


@needs_kernel
@pytest.mark.parametrize("count", [8, 20])
def test_nan_and_infinity_of_few_and_of_many_inputs_are_kept(count: int) -> None:
    x = inputs(count, 256)
    x[2, 3] = torch.nan
    x[5, 6] = torch.inf
    result = Matrix(*matrix("4bit", 20, 256)).linear(x, None)
    assert bool(result[2].isnan().all())
    assert not bool(result[5].isfinite().any())
    assert bool(result[[0, 1, 3, 4, 6, 7]].isfinite().all())


@needs_kernel
def test_a_wrong_panel_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    right = Matrix.times_by
    monkeypatch.setattr(Matrix, "times_by", lambda *args: right(*args) * 1.01)
    products.agrees.cache_clear()
    try:
        assert Matrix(*matrix("8bit", 20, 256)).method_for(13, torch.float32)[0] == DEQUANTIZED
        assert "is off by 1.0e-02 here and is not used" in caplog.text
    finally:
        products.agrees.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (37, 128), (128, 192), (64, 64), (130, 1024)])
def test_one_input_is_multiplied_from_the_codes(
    rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = matrix("4bit", rows, columns, dtype=dtype)
    x, bias = inputs(1, columns, dtype), inputs(1, rows, dtype)[0]
    exact = x.double() @ meant(parts).T
    dense = torch.nn.functional.linear(x, FusedMatrix(*parts).dequantized(dtype), bias)

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("the matrix was made")

    monkeypatch.setattr(products, "dequantize", refuse)
    fused = FusedMatrix(*parts)
    assert error(fused.linear(x, None), exact) < 4 * torch.finfo(dtype).eps
    assert error(fused.linear(x, bias), dense.double()) < 4 * torch.finfo(dtype).eps
    for shape in ((columns,), (1, columns), (1, 1, columns)):
        product = fused.linear(x.view(shape), bias)
        assert product.shape == (*shape[:-1], rows)
        assert product.dtype == dtype
        assert torch.equal(product.view(-1), fused.linear(x, bias).view(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 2, 7])
def test_more_inputs_are_multiplied_by_bitsandbytes_in_row_slices(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = matrix("4bit", 37, 128)
    x, bias = inputs(count, 128, dtype), inputs(1, 37, dtype)[0]
    multiply, shapes = products.multiply_4bit, []

    def noted(form: Quantized, *operands: Any) -> torch.Tensor:
        shapes.append(form.shape)
        return multiply(form, *operands)

    monkeypatch.setattr(products, "multiply_4bit", noted)
    monkeypatch.setattr(products, "dequantize", lambda *_: pytest.fail("the matrix was made"))
    monkeypatch.setattr(products, "FUSED_ELEMENTS", 10 * 128)
    result = FusedMatrix(*parts).linear(x.view(1, count, 128), bias)
    exact = x.double() @ meant(parts).T + bias.double()
    assert result.shape == (1, count, 37)
    assert count == 0 or error(result[0], exact) < 8 * torch.finfo(dtype).eps
    assert shapes == ([(10, 128)] * 3 + [(7, 128)] if count > products.FEW_INPUTS else [(37, 128)])


def test_products_of_bitsandbytes_stay_below_its_element_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, x = matrix("4bit", 37, 128), inputs(1, 128, torch.bfloat16)
    expected, multiply, rows = FusedMatrix(*parts).linear(x, None), products.multiply_4bit, []

    def noted(form: Quantized, *operands: Any) -> torch.Tensor:
        rows.append(form.shape[0])
        return multiply(form, *operands)

    monkeypatch.setattr(products, "multiply_4bit", noted)
    monkeypatch.setattr(products, "MAX_ELEMENTS", 20 * 128 + 1)
    assert error(FusedMatrix(*parts).linear(x, None), expected.double()) < 8 * torch.finfo(x.dtype).eps
    assert rows == [20, 17]


def test_inputs_that_are_views() -> None:
    parts = matrix("4bit", 16, 128)
    wide = inputs(128, 3, torch.bfloat16)
    row = wide.T[1:2]
    assert not row.is_contiguous()
    assert torch.equal(FusedMatrix(*parts).linear(row, None), FusedMatrix(*parts).linear(row.contiguous(), None))


@pytest.mark.parametrize(
    ("scheme", "shape", "can"),
    [
        ("4bit", (8, 64), True),
        ("4bit", (1, 128), True),
        ("4bit", (8, 96), False),
        ("4bit", (8, 0), False),
        ("4bit", (2, 8, 64), False),
        ("8bit", (8, 64), False),
    ],
)
def test_matrices_that_the_kernel_supports(scheme: str, shape: tuple[int, ...], can: bool) -> None:
    assert can_multiply(Quantized(scheme, shape, "bfloat16")) == can


@pytest.mark.parametrize("columns", [64, 96, 33])
def test_a_cast_matrix_is_not_in_memory_in_both_dtypes(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    form, *parts = matrix("4bit", 200, columns, dtype=torch.bfloat16)
    whole = dequantize(form, *parts, torch.bfloat16).half()
    monkeypatch.setattr(quantize, "RUN_ELEMENTS", 1 << 10)
    gpu = FakeGpu(0, capacity=1 << 30)
    with watched():
        there = [part.to(gpu.torch_device) for part in parts]
        before = gpu.peak = gpu.used
        result = dequantize(form, *there, torch.float16)
    assert torch.equal(result, whole)
    assert gpu.peak - before <= result.nbytes + 5 * (1 << 10)


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("inputs", [0, 1, 5, FEW_INPUTS + 1])
def test_products_from_the_left(scheme: str, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several strips, the last of an odd number of rows, and in tiles of columns that are no whole ones."""
    parts = matrix(scheme, 359, 576 if scheme == "4bit" else 640)
    turned, x = TurnedMatrix(*parts), torch.randn(inputs, 359).bfloat16()
    whole = turned.times(x)
    monkeypatch.setattr("rabbitllm.quant.turned.STRIP_ELEMENTS", 1 << 16)
    result, expected = turned.times(x), x.double() @ turned.dequantized(torch.bfloat16).double()
    assert result.dtype == torch.bfloat16
    assert (result.double() - expected).norm() <= 4e-3 * expected.norm()
    if inputs <= FEW_INPUTS:  # sums have the order of the rows
        assert torch.equal(result, whole)
        assert all(torch.equal(turned.times(x[i : i + 1])[0], row) for i, row in enumerate(result))
        if not bfloat_products.torch_has_instructions():
            assert torch.equal(product(x, turned.decoded(0, 359, torch.bfloat16)), result)


@pytest.mark.parametrize("columns", [128, 512])
@pytest.mark.parametrize("count", [1, 40])
def test_rows_of_another_width_are_refused(columns: int, count: int) -> None:
    with pytest.raises(RuntimeError, match=str(columns)):
        Matrix(*matrix("4bit", 7, 256)).linear(inputs(count, columns), None)


def test_rows_of_bfloat16_have_few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch compiles code for each; the results are those of the rows."""
    monkeypatch.setattr(products.bfloat_products, "widens", lambda: False)
    monkeypatch.setattr(products.bfloat_products, "torch_has_tiles", lambda: True)
    weight, lengths = torch.randn(24, 64).bfloat16(), set[int]()
    linear = torch.nn.functional.linear

    def see(x: torch.Tensor, *others: Any) -> torch.Tensor:
        lengths.add(len(x))
        return linear(x, *others)

    monkeypatch.setattr(torch.nn.functional, "linear", see)
    for count in range(1, 1040, 3):
        x = torch.randn(count, 64).bfloat16()
        result = products.dense_product(x, None, (24, 64), 1, lambda begin, end, dtype: weight[begin:end])
        assert result.shape == (count, 24)
        assert torch.allclose(result.float(), linear(x.float(), weight.float()), rtol=0.01, atol=0.1)
    assert lengths - {*range(17)} - {*range(1025, 1040)} == {*range(32, 1025, 16)}
