"""Products of bfloat16 against double precision, and against themselves in other company."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.quant import _kernels, _product_kernels, _vectors, bfloat_products, plain
from rabbitllm.quant.bfloat_products import ALL_ROWS, AMX_ROWS, FEW_ROWS, MAX_INPUTS, linear, multiplies, times
from tests.support.draws import draws
from tests.support.fresh_process import python
from tests.support.rounding import assert_products

WIDTHS = [width for width in (8, 16) if width <= _vectors.lanes()]
OF_EACH_WIDTH = [
    pytest.param(width, marks=[pytest.mark.long] * (width != WIDTHS[-1]), id=str(width)) for width in WIDTHS
]
"""The short run compiles kernels for the vectors that this processor would choose."""
pytestmark = pytest.mark.skipif(not WIDTHS, reason="no vectors of a kind that is used here")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Used here even where torch's own products are sooner."""
    monkeypatch.setattr(bfloat_products, "max_rows", lambda: ALL_ROWS)


def some(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


EITHER = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@pytest.mark.parametrize("width", OF_EACH_WIDTH)
@settings(max_examples=draws(80), deadline=None)
@given(st.integers(1, 40), st.integers(1, 90), st.integers(1, 40), st.integers(0, 1 << 30), st.sampled_from([1, 3]))
@EITHER
def test_any_number_of_rows_inputs_and_columns(
    width: int, dtype: torch.dtype, tokens: int, rows: int, steps: int, seed: int, threads: int
) -> None:
    x, weight = some(tokens, steps * 2 * width, seed, dtype), some(rows, steps * 2 * width, seed + 1, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_products(times(width, x, weight), x, weight)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("width", OF_EACH_WIDTH)
@EITHER
def test_a_row_has_the_same_bits_in_any_batch(width: int, dtype: torch.dtype) -> None:
    """Also where a row takes several panels, and inputs are more than are multiplied together."""
    x, weight = some(MAX_INPUTS + 7, 5632, 0, dtype), some(_product_kernels.PANEL_ROWS + 7, 5632, 1, dtype)
    together = times(width, x, weight)
    assert_products(together, x, weight)
    for begin in (0, 1, 16, MAX_INPUTS - 1, MAX_INPUTS):
        for count in (1, FEW_ROWS, FEW_ROWS + 1, 7):
            assert torch.equal(times(width, x[begin : begin + count], weight), together[begin : begin + count])


@pytest.mark.parametrize("width", OF_EACH_WIDTH)
def test_own_threads_give_the_same_bits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = some(5, 1024), some(301, 1024, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        in_a_team = times(width, x, weight)
        monkeypatch.setattr(_kernels, "torchs_team", lambda: None)
        assert torch.equal(times(width, x, weight), in_a_team)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, MAX_INPUTS, MAX_INPUTS + 1])
@EITHER
def test_a_layer_rounds_once(kernel: None, dtype: torch.dtype, count: int) -> None:
    x, weight, bias = some(count, 256, 0, dtype), some(96, 256, 1, dtype), some(1, 96, 2, dtype)[0]
    result = linear(x, weight, bias)
    assert result.dtype == dtype
    assert_products(linear(x, weight, None), x, weight)
    assert_products(result, x, weight, bias)
    assert torch.equal(result, linear(x.view(1, count, 256), weight, bias)[0])


def test_inputs_of_other_forms(kernel: None) -> None:
    weight = some(32, 128, 1)
    x = some(6, 256).view(2, 3, 256)[..., ::2]
    assert multiplies(x, weight)
    assert_products(linear(x, weight, None).view(6, 32), x.reshape(6, 128), weight)
    assert linear(x[:0], weight, None).shape == (0, 3, 32)
    assert linear(x[0, 0], weight, None).shape == (32,)


def test_nan_and_infinity_are_kept(kernel: None) -> None:
    weight = some(8, 128)
    weight[2, 77] = math.nan
    weight[5, 3] = math.inf
    result = linear(torch.ones(1, 128).bfloat16(), weight, None)[0]
    assert torch.isnan(result).tolist() == [False, False, True, False, False, False, False, False]
    assert torch.isinf(result).tolist() == [False, False, False, False, False, True, False, False]


def test_unaligned_addresses(kernel: None) -> None:
    """Weights lie in a file as they lie."""
    store = torch.empty(9 * 128 + 1, dtype=torch.bfloat16)
    weight = store[1:].view(9, 128)
    weight.copy_(some(9, 128))
    x = some(4, 128, 1)
    assert torch.equal(linear(x, weight, None), linear(x, weight.clone(), None))


def test_unsupported_tensors_are_multiplied_by_torch(kernel: None) -> None:
    x, weight = some(2, 128), some(8, 128)
    assert multiplies(x, weight)
    assert multiplies(x, torch.nn.Parameter(weight, requires_grad=False))
    assert multiplies(x.half(), weight.half())
    assert not multiplies(x.half(), weight)
    assert not multiplies(x.float(), weight)
    assert not multiplies(x, weight.float())
    assert not multiplies(x, weight[:, ::2])
    assert not multiplies(some(2, 100), some(8, 100))
    assert not multiplies(x, weight[:0])
    assert not multiplies(x, weight.to("meta"))


@pytest.fixture
def no_cache() -> Iterator[None]:
    """`max_rows` is found by each test for its own processor."""
    bfloat_products.max_rows.cache_clear()
    bfloat_products._agrees.cache_clear()
    yield
    bfloat_products.max_rows.cache_clear()
    bfloat_products._agrees.cache_clear()


@pytest.mark.parametrize(
    ("more", "rows"), [((), ALL_ROWS), (("avx512bf16",), FEW_ROWS), (("avx512bf16", "amx-bf16"), AMX_ROWS)], ids=str
)
def test_the_number_of_rows_depends_on_the_instructions(
    more: tuple[str, ...], rows: int, monkeypatch: pytest.MonkeyPatch, no_cache: None
) -> None:
    if more and _vectors.lanes() < 16:
        pytest.skip("no AVX-512 here")
    here = _vectors.features() - {"avx512bf16", "amx-bf16"}
    monkeypatch.setattr(_vectors, "features", lambda: here | {"avx512bw", *more} if more else here)
    monkeypatch.setattr(bfloat_products, "torch_has_instructions", lambda: bool(more))
    assert bfloat_products.max_rows() == rows
    assert bfloat_products.widens() == (rows == ALL_ROWS)
    weight = some(8, 128)
    counts = 1, AMX_ROWS, AMX_ROWS + 1, FEW_ROWS, FEW_ROWS + 1
    assert [multiplies(some(count, 128), weight) for count in counts] == [rows >= count for count in counts]
    halves = multiplies(some(FEW_ROWS + 1, 128, 0, torch.float16), weight.half())
    assert halves is (rows == ALL_ROWS or "avx512fp16" not in here)


@pytest.mark.parametrize("limit", ["avx2", pytest.param("", marks=pytest.mark.long)])
def test_commands_use_it_where_torch_lacks_instructions(limit: str) -> None:
    """Without numba, which takes long to import, where torch has them."""
    code = """
import sys, torch
from rabbitllm.quant import bfloat_products
lacks = bfloat_products.widens()
has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
print(lacks, "numba" in sys.modules, has)
"""
    compiled = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+avx,+fma,+f16c,+sse4.2,+ssse3,+popcnt"}
    environment = os.environ | ({"ATEN_CPU_CAPABILITY": limit, **compiled} if limit else {})
    ran = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    lacks, has_numba, has = ran.stdout.split()
    if limit:
        assert (lacks, has_numba) == ("True", "True")
    elif has == "True" and torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert (lacks, has_numba) == ("False", "False")


def test_a_wrong_kernel_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_cache: None
) -> None:
    right = times
    monkeypatch.setattr(bfloat_products, "times", lambda width, x, weight: right(width, x, weight) * 1.001)
    here = _vectors.features() - {"amx-bf16"}
    monkeypatch.setattr(_vectors, "features", lambda: here)
    assert not bfloat_products.max_rows()
    assert "is off by 1.0e-03 here and is not used" in caplog.text


def test_several_python_threads_at_once() -> None:
    weight = some(256, 1024)
    batches = [some(count, 1024, count) for count in range(1, 9)]
    alone = [times(WIDTHS[-1], x, weight) for x in batches]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda x: times(WIDTHS[-1], x, weight), batches * 4))
    assert all(torch.equal(result, alone[index % 8]) for index, result in enumerate(together))


@pytest.mark.parametrize("columns", [128, 512])
def test_rows_of_another_width_are_refused(columns: int) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        plain.product(some(3, columns), some(70, 256), None)


@pytest.mark.skipif(not bfloat_products.torch_has_instructions(), reason="torch has no compiled products of bfloat16")
@pytest.mark.parametrize(
    ("capacity", "last"), [(None, "cache_miss"), pytest.param("1024", "cache_hit", marks=pytest.mark.long)]
)
def test_torch_keeps_few_compiled_products(capacity: str | None, last: str) -> None:
    """300 lengths are more than the package lets it keep; what the user says is kept."""
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    environment = {key: value for key, value in os.environ.items() if key != name}
    environment |= {"ONEDNN_VERBOSE": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {name: capacity} if capacity is not None else {}
    code = """
import rabbitllm, torch
matrix, inputs = torch.ones(32, 64).bfloat16(), torch.ones(304, 64).bfloat16()
for length in (*range(4, 304), 4):
    torch.nn.functional.linear(inputs[:length], matrix)
"""
    created = [line for line in python(code, env=environment).stdout.splitlines() if ",create:cache_" in line]
    assert f"create:{last}," in created[-1]
    assert sum("create:cache_miss," in line for line in created) >= 300
