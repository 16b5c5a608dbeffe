"""Scales that fit their block: the rule by numpy and by numba, and less error than with bitsandbytes' own."""

from __future__ import annotations

from typing import TypeAlias

import bitsandbytes.functional as functional
import numpy as np
import numpy.typing as npt
import pytest
import torch

from rabbitllm.errors import OptionError
from rabbitllm.quant.quantize import (
    dequantize,
    quantize_blocks,
)
from rabbitllm.quant.quantize_kernels import (
    LARGEST_FITTED,
    MULTIPLES,
    SMALLEST_FITTED,
    STEPS,
    ZERO_CODE,
    fitting_tables,
    quantize,
)
from rabbitllm.quant.schemes import Quantized, check_fitting, nf4_map

SCHEMES = ("4bit", "4bit-double")
Floats: TypeAlias = npt.NDArray[np.float32]
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


def by_numpy(scheme: str, data: memoryview, dtype: str) -> tuple[bytes, Floats]:
    """The rule of `quantize.py` in NumPy: codes and scales."""
    flat = torch.frombuffer(data, dtype=DTYPES[dtype]).float().numpy()
    midpoints, nearest = fitting_tables()
    values = np.zeros((-(-flat.size // 64), 64), np.float32)
    values.reshape(-1)[: flat.size] = flat
    largest = (values.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=1).view(np.float32)
    scales, least = largest.copy(), np.full(len(values), np.inf, np.float32)
    with np.errstate(all="ignore"):
        usual = (largest > SMALLEST_FITTED) & (largest < LARGEST_FITTED)
        for multiple in MULTIPLES[scheme]:
            scale = np.where(usual, np.float32(multiple) * largest, np.float32(1))
            error = np.where(usual, _fitted_errors(values, scale, nearest), np.float32(np.inf))
            scales = np.where(error < least, scale, scales)
            least = np.minimum(error, least)
        ys = values * (np.float32(1) / scales)[:, None]
    ranks = np.where(scales[:, None] == 0, ZERO_CODE, (ys[..., None] > midpoints).sum(axis=-1)).astype(np.uint8)
    ranks.reshape(-1)[flat.size :] = ZERO_CODE
    pairs = ranks.reshape(-1, 2)
    codes = ((pairs[:, 0] << 4) | pairs[:, 1]).astype(np.uint8)
    return codes[: (flat.size + 1) // 2].tobytes(), scales.astype(np.float32)


def _fitted_errors(values: Floats, scale: Floats, nearest: Floats) -> Floats:
    ys = values * (np.float32(1) / scale)[:, None]
    places = (np.clip(ys, -1, 1) + np.float32(1)) * np.float32(STEPS) + np.float32(0.5)
    off = ys - nearest[np.where(np.isfinite(places), places, 0).astype(np.int32)]
    squares = off * off
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    errors: Floats = scale * scale * squares[:, 0]
    return errors


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_numba_and_numpy_agree(case: str, dtype: str, scheme: str) -> None:
    data = data_of(CASES[case], dtype)
    codes, scales = quantize(scheme, data, dtype, fitted=True)
    expected_codes, expected_scales = by_numpy(scheme, data, dtype)
    fitted = np.frombuffer(scales, np.float32)
    assert np.array_equal(fitted.view(np.uint32), expected_scales.view(np.uint32))
    assert bytes(codes) == expected_codes


def error(values: torch.Tensor, codes: memoryview, scales: memoryview) -> float:
    """Squared, relative, of what bitsandbytes itself dequantizes."""
    form = Quantized("4bit", (len(values) // 64, 64), "float32")
    parts = (torch.frombuffer(codes, dtype=torch.uint8), torch.frombuffer(scales, dtype=torch.float32))
    table = torch.frombuffer(bytearray(nf4_map()), dtype=torch.float32)
    restored = dequantize(form, *parts, table, torch.float32).view(-1)
    return float((restored - values).square().sum() / values.square().sum())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("case", "share"), [("normal", 0.9), ("long tails", 0.95)])
def test_fitted_scales_reduce_the_error(case: str, share: float, scheme: str) -> None:
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
        quantize_blocks(scheme, data[i : i + step], "BF16", "cpu", fitted=True) for i in range(0, len(data), step)
    ]
    for part, content in enumerate(whole):
        assert bytes(content) == b"".join(bytes(piece[part]) for piece in pieces)


def test_8bit_ignores_fitting() -> None:
    data = data_of(normal(4096), "BF16")
    assert quantize_blocks("8bit", data, "BF16", "cpu", fitted=True) == quantize_blocks("8bit", data, "BF16", "cpu")
    for compression in (None, "8bit"):
        with pytest.raises(OptionError, match="fit_scales=True has no effect at compression="):
            check_fitting(compression, fit_scales=True)
        assert not check_fitting(compression, fit_scales=False)
    assert check_fitting("4bit", fit_scales=True)


def test_quantized_scales_are_positive() -> None:
    _, scales = quantize("4bit-double", data_of(normal(64 * 64), "F32"), "F32", fitted=True)
    assert (np.frombuffer(scales, np.float32) > 0).all()


def test_bitsandbytes_reads_scales_of_either_sign() -> None:
    values = normal(64 * 64)
    codes, scales = quantize("4bit", data_of(values, "F32"), "F32", fitted=True)
    signed = torch.frombuffer(scales, dtype=torch.float32)
    assert (signed < 0).any()
    assert (signed > 0).any()
    state = functional.QuantState(
        absmax=signed,
        shape=torch.Size((64, 64)),
        dtype=torch.float32,
        blocksize=64,
        code=torch.frombuffer(bytearray(nf4_map()), dtype=torch.float32),
        quant_type="nf4",
    )
    restored = functional.dequantize_4bit(torch.frombuffer(codes, dtype=torch.uint8), state)
    assert error(values, codes, scales) == pytest.approx(
        float((restored.view(-1) - values).square().sum() / values.square().sum()), rel=1e-6
    )
