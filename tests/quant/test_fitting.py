"""Scales that fit their block: the rule by numpy and by numba, and less error than with bitsandbytes' own."""

from __future__ import annotations

import sys

import bitsandbytes.functional as functional
import numpy as np
import pytest
import torch

from rabbitllm.errors import OptionError
from rabbitllm.quant.library import nf4_map
from rabbitllm.quant.quantize import by_numpy, dequantize, quantize_blocks, quantize_fitted
from rabbitllm.quant.schemes import Quantized, check_fitting

SCHEMES = ("4bit", "4bit-double")
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def data_of(values: torch.Tensor, dtype: str) -> memoryview:
    return memoryview(bytearray(values.to(DTYPES[dtype]).view(torch.uint8).numpy()))


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02


CASES = {
    "normal": normal(64 * 300),
    "long tails": normal(64 * 200) ** 3 * 1e3,
    "a short end": normal(64 * 5 + 33),
    "one value": normal(1),
    "zeros": torch.zeros(64 * 3 + 1),
    "ties": torch.tensor([-1.0, 0.5, 0.25, 1.0]).repeat(64),
    "tiny and huge": torch.cat([normal(64) * 1e-30, normal(64) * 1e30, normal(64)]),
    "no numbers": torch.where(torch.arange(256) % 70 == 3, torch.nan, normal(256)),
    "infinite": torch.where(torch.arange(256) % 70 == 3, -torch.inf, normal(256)),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_numba_and_numpy_find_the_same(case: str, dtype: str, scheme: str) -> None:
    data = data_of(CASES[case], dtype)
    codes, scales = quantize_fitted(scheme, data, dtype)
    expected_codes, expected_scales = by_numpy(scheme, data, dtype)
    found = np.frombuffer(scales, np.float32)
    assert np.array_equal(found.view(np.uint32), expected_scales.view(np.uint32))
    assert bytes(codes) == expected_codes.tobytes()


def test_without_numba_it_is_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_of(normal(6400), "BF16")
    expected = [bytes(part) for part in quantize_fitted("4bit", data, "BF16")]
    monkeypatch.setitem(sys.modules, "rabbitllm.quant.quantize_kernels", None)
    monkeypatch.delattr("rabbitllm.quant.quantize_kernels", raising=False)
    assert [bytes(part) for part in quantize_fitted("4bit", data, "BF16")] == expected


def error(values: torch.Tensor, codes: memoryview, scales: memoryview) -> float:
    """Squared, relative, of what bitsandbytes itself dequantizes."""
    form = Quantized("4bit", (len(values) // 64, 64), "float32")
    parts = (torch.frombuffer(codes, dtype=torch.uint8), torch.frombuffer(scales, dtype=torch.float32))
    table = torch.frombuffer(bytearray(nf4_map()), dtype=torch.float32)
    made = dequantize(form, *parts, table, torch.float32).view(-1)
    return float((made - values).square().sum() / values.square().sum())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("case", "share"), [("normal", 0.9), ("long tails", 0.95)])
def test_there_is_less_error(case: str, share: float, scheme: str) -> None:
    values = CASES[case]
    plain, fitted = (
        error(values, *quantize_blocks(scheme, data_of(values, "F32"), "F32", "cpu", fitted=fit))
        for fit in (False, True)
    )
    assert fitted < share * plain


@pytest.mark.parametrize("scheme", ["4bit", "4bit-double"])
def test_chunks_of_whole_blocks_give_the_same(scheme: str) -> None:
    data = data_of(normal(64 * 40 + 5), "BF16")
    whole = quantize_blocks(scheme, data, "BF16", "cpu", fitted=True)
    step = 64 * 7 * 2
    pieces = [
        quantize_blocks(scheme, data[at : at + step], "BF16", "cpu", fitted=True) for at in range(0, len(data), step)
    ]
    for part, found in enumerate(whole):
        assert bytes(found) == b"".join(bytes(piece[part]) for piece in pieces)


def test_8bit_has_nothing_to_fit() -> None:
    data = data_of(normal(4096), "BF16")
    assert quantize_blocks("8bit", data, "BF16", "cpu", fitted=True) == quantize_blocks("8bit", data, "BF16", "cpu")
    for compression in (None, "8bit"):
        with pytest.raises(OptionError, match="fit_scales=True has nothing to fit at compression="):
            check_fitting(compression, fit_scales=True)
        assert not check_fitting(compression, fit_scales=False)
    assert check_fitting("4bit", fit_scales=True)


def test_scales_that_are_quantized_have_one_sign() -> None:
    _, scales = quantize_fitted("4bit-double", data_of(normal(64 * 64), "F32"), "F32")
    assert (np.frombuffer(scales, np.float32) > 0).all()


def test_bitsandbytes_reads_scales_of_either_sign() -> None:
    values = normal(64 * 64)
    codes, scales = quantize_fitted("4bit", data_of(values, "F32"), "F32")
    found = torch.frombuffer(scales, dtype=torch.float32)
    assert (found < 0).any()
    assert (found > 0).any()
    state = functional.QuantState(
        absmax=found,
        shape=torch.Size((64, 64)),
        dtype=torch.float32,
        blocksize=64,
        code=torch.frombuffer(bytearray(nf4_map()), dtype=torch.float32),
        quant_type="nf4",
    )
    made = functional.dequantize_4bit(torch.frombuffer(codes, dtype=torch.uint8), state)
    assert error(values, codes, scales) == pytest.approx(
        float((made.view(-1) - values).square().sum() / values.square().sum()), rel=1e-6
    )
