"""Our compiled quantizers against bitsandbytes, the referee: the same codes and the same scales, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.quant import quantize, quantize_kernels
from rabbitllm.quant.quantize import (
    _bytes_of,
    _compiled_kernels_agree,
    _quantize_with_bitsandbytes,
    quantize_blocks,
)
from rabbitllm.quant.schemes import SCHEMES as ALL_SCHEMES
from rabbitllm.quant.schemes import bitsandbytes
from tests.support.draws import draws

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
SCHEMES = ("4bit", "8bit")

RANDOM = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0))


def levels() -> torch.Tensor:
    values: torch.Tensor = bitsandbytes().functional.get_4bit_type("nf4", device="cpu")
    return values


def ties() -> torch.Tensor:
    """Blocks whose values lie on the midpoints between the codes, as exactly as the dtype can."""
    middle = (levels()[1:] + levels()[:-1]) / 2
    scale = torch.rand(2048, 1, generator=torch.Generator().manual_seed(1)) * 3 + 0.1
    values = middle.repeat(5)[:64].repeat(2048, 1) * scale
    values[:, 0] = scale[:, 0]
    return values


def with_zero_blocks() -> torch.Tensor:
    return torch.where(torch.arange(512)[:, None] % 3 == 0, 0.0, RANDOM)


def not_finite() -> torch.Tensor:
    values = RANDOM[:8].clone()
    values[0, 5], values[1, 70], values[2, 0], values[3, 9] = torch.inf, -torch.inf, torch.nan, -torch.nan
    values[4, :64] = torch.nan
    return values


CASES: dict[str, Callable[[], torch.Tensor]] = {
    "random": lambda: RANDOM,
    "weights": lambda: RANDOM * 0.02,
    "blocks of zeros": with_zero_blocks,
    "ties": ties,
    "small": lambda: RANDOM * 1e-6,
    "tiny": lambda: RANDOM * 1e-37,
    "subnormal": lambda: RANDOM * 1e-41,
    "large": lambda: RANDOM * 1e3,
    "a short end": lambda: RANDOM.reshape(-1)[:5001],
    "an odd end": lambda: RANDOM.reshape(-1)[: 64 * 5 + 33],
    "one value": lambda: RANDOM.reshape(-1)[:1],
    "zeros at the end": lambda: torch.zeros(70),
}


def same(scheme: str, values: torch.Tensor, dtype: str) -> None:
    data = _bytes_of(values.to(DTYPES[dtype]).contiguous().view(torch.uint8))
    ours, theirs = (
        quantize_kernels.quantize(scheme, data, dtype),
        _quantize_with_bitsandbytes(scheme, data, dtype, "cpu"),
    )
    codes, scales = (np.frombuffer(part, np.uint8) for part in ours)
    assert np.flatnonzero(codes != np.frombuffer(theirs[0], np.uint8)).tolist() == []
    assert np.flatnonzero(scales.view(np.uint32) != np.frombuffer(theirs[1], np.uint32)).tolist() == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_kernels_have_the_bits_of_bitsandbytes(scheme: str, dtype: str, case: str) -> None:
    same(scheme, CASES[case](), dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity(scheme: str, dtype: str) -> None:
    same(scheme, not_finite(), dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("dtype", "infinity"), [("BF16", 0x7F80), ("F16", 0x7C00)])
def test_every_16_bit_value_under_many_scales(scheme: str, dtype: str, infinity: int) -> None:
    """All values that a block with this largest one can hold, so that every threshold is met from both sides."""
    chance = np.random.default_rng(2)
    every = np.arange(1 << 16, dtype=np.uint16)
    for largest in [1, 2, infinity - 1, *chance.integers(1, infinity, 12).tolist()]:
        values = every[(every & 0x7FFF) <= largest]
        rest = ALL_SCHEMES[scheme].block - 1
        rows = np.concatenate([values, np.zeros(-values.size % rest, np.uint16)]).reshape(-1, rest)
        blocks = np.concatenate([np.full((len(rows), 1), largest, np.uint16), rows], axis=1).ravel()
        same(scheme, torch.from_numpy(blocks.view(np.int16)).view(DTYPES[dtype]), dtype)


def test_every_8bit_bin_at_its_edges() -> None:
    edges = (torch.arange(65536)[:, None] - 0.5 + torch.tensor([-1e-3, 0.0, 1e-3])) / 65535 * 2 - 1
    values = edges.reshape(-1)[: 2048 * 96].reshape(96, 2048).clone()
    values[:, 0] = 1
    same("8bit", values, "F32")


@settings(max_examples=draws(60), deadline=None)
@given(
    scheme=st.sampled_from(SCHEMES),
    dtype=st.sampled_from(sorted(DTYPES)),
    values=st.lists(st.floats(-60000, 60000, width=16), min_size=1, max_size=200),
)
def test_any_values(scheme: str, dtype: str, values: list[float]) -> None:
    same(scheme, torch.tensor(values), dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantizing_uses_the_kernels(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("bitsandbytes was asked")

    assert _compiled_kernels_agree(scheme)
    monkeypatch.setattr(quantize, "_quantize_with_bitsandbytes", refuse)
    codes, scales = quantize_blocks(scheme, memoryview(bytearray(4096 * 2)), "BF16", "cpu")
    assert (len(codes), len(scales)) == ((2048, 256) if scheme == "4bit" else (4096, 8))


@pytest.fixture
def asked_again() -> object:
    _compiled_kernels_agree.cache_clear()
    yield
    _compiled_kernels_agree.cache_clear()


@pytest.mark.usefixtures("asked_again")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bitsandbytes_is_used_if_its_rules_differ(
    scheme: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version, or another processor's path, may round otherwise; what it gives is what is written."""
    theirs = quantize._quantize_with_bitsandbytes

    def otherwise(scheme: str, data: memoryview, dtype: str, device: str) -> tuple[memoryview, memoryview]:
        codes, scales = theirs(scheme, data, dtype, device)
        return memoryview(bytes([codes[0] ^ 1]) + bytes(codes[1:])), scales

    monkeypatch.setattr(quantize, "_quantize_with_bitsandbytes", otherwise)
    data = memoryview(bytearray(8192))
    assert quantize_blocks(scheme, data, "F16", "cpu") == otherwise(scheme, data, "F16", "cpu")
    assert [record.message for record in caplog.records] == [
        f"This bitsandbytes quantizes to {scheme} differently from RabbitLLM's kernels; bitsandbytes is used instead."
    ]
