"""Encoders of ggml's blocks: errors, bytes, and odd values; blocks are read by the package `gguf`."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from rabbitllm.errors import UnreadableFormatError
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant.block_encoders import ENCODED, encode

ROOT = Path(__file__).parents[2]
WEIGHTS = torch.randn(96, 1024, generator=torch.Generator().manual_seed(0)) ** 3 * 0.02
LLAMA_CPP = {
    "Q8_0": 7.677e-5,
    "Q4_0": 0.01235,
    "Q5_0": 0.003644,
    "Q5_1": 0.003114,
    "IQ4_NL": 0.008424,
    "IQ4_XS": 0.008693,
    "Q6_K": 0.0006137,
    "Q5_K": 0.00249,
    "Q4_K": 0.008129,
    "Q3_K": 0.02334,
    "Q2_K": 0.1518,
}
"""Squared error of llama.cpp's own quantizer for `WEIGHTS` in bfloat16, relative to the squared weights."""
AS_BYTES = "import sys; from tests.quant.test_block_encoders import digest; print(digest(int(sys.argv[1])))"


def decoded(name: str, blocks: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name]))


def error(name: str, values: torch.Tensor) -> float:
    exact = values.double()
    return float((decoded(name, encode(name, values)) - exact).square().sum() / exact.square().sum())


def digest(threads: int) -> str:
    torch.set_num_threads(threads)
    summed = hashlib.sha256()
    for name in ENCODED:
        summed.update(encode(name, WEIGHTS.repeat(8, 1)).numpy().tobytes())
    return summed.hexdigest()


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_error_is_at_most_that_of_llama_cpp(name: str, dtype: torch.dtype) -> None:
    assert error(name, WEIGHTS.to(dtype)) <= 1.001 * LLAMA_CPP[name]


def test_q8_0_has_the_bytes_of_gguf() -> None:
    for values in (WEIGHTS, WEIGHTS * 1e-6, torch.round(WEIGHTS * 500) / 2):
        expected = gguf.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)
        assert np.array_equal(encode("Q8_0", values).numpy(), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("offset", [0, 1, -1])
def test_there_is_less_error_than_in_blocks_of_gguf(name: str, offset: float) -> None:
    values = WEIGHTS + offset
    theirs = torch.from_numpy(gguf.quantize(values.numpy(), gguf.GGMLQuantizationType[name]))
    off = float((decoded(name, theirs) - values).square().sum() / values.square().sum())
    assert error(name, values) < 0.99 * off


@pytest.mark.parametrize("name", ENCODED)
def test_odd_blocks(name: str) -> None:
    """A row of one block each: zeros, one huge value, denormals, constants of both signs, equal up to a sign."""
    size = BLOCK_TYPES[name].elements
    rows = torch.zeros(9, size)
    rows[1] = -0.0
    rows[2, 3], rows[3, 5] = 65504, -65504
    rows[4] = 1e-41
    rows[5], rows[6] = 0.25, -0.25
    rows[7] = torch.arange(size) % 2 - 0.5
    rows[8] = 1e-6
    result = decoded(name, encode(name, rows))
    assert result.isfinite().all()
    assert torch.equal(result[[0, 1, 4]], torch.zeros(3, size))
    off = (result - rows).abs().amax(1) / rows.abs().amax(1)
    assert off[[2, 3, 5, 6]].max() < 0.02
    assert off[7] < (0.2 if name in ("Q2_K", "Q3_K", "Q4_0") else 0.05)
    assert off[8] < 0.2 or name in ("Q8_0", "IQ4_NL", "IQ4_XS")  # the least float16 is 6e-8


@pytest.mark.parametrize("name", ENCODED)
def test_values_up_to_the_largest_stay_finite(name: str) -> None:
    """The minimum that fits a block of Q5_1 best may be below -65504."""
    values = (WEIGHTS.sign() * WEIGHTS.abs().sqrt() * 1e6).clamp(-65504, 65504)
    result = decoded(name, encode(name, values))
    assert (result - values).norm() < 0.3 * values.norm()


@pytest.mark.parametrize("name", ENCODED)
def test_blocks_do_not_depend_on_their_neighbours(name: str) -> None:
    whole = encode(name, WEIGHTS)
    assert torch.equal(whole[5:8], encode(name, WEIGHTS[5:8]))
    assert torch.equal(whole[7], encode(name, WEIGHTS[7].view(-1, BLOCK_TYPES[name].elements)).view(-1))
    assert encode(name, WEIGHTS[:0]).shape == (0, BLOCK_TYPES[name].row_bytes(1024))


def test_bytes_do_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    try:
        assert digest(1) == digest(2) == digest(3)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.long
def test_bytes_do_not_depend_on_the_processor() -> None:
    """Compiled for AVX2, and for no vectors beyond those of every x86-64."""
    for processor, features in (("haswell", "+avx2,+fma"), ("x86-64", "")):
        environment = os.environ | {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features}
        command = [sys.executable, "-c", AS_BYTES, "1"]
        assert subprocess.check_output(command, cwd=ROOT, env=environment, text=True).strip() == digest(1)


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 65536.0])
def test_what_no_scale_holds_is_refused(name: str, value: float) -> None:
    values = WEIGHTS.clone()
    values[50, 7] = value
    with pytest.raises(UnreadableFormatError, match="A magnitude is"):
        encode(name, values)


def test_what_cannot_be_encoded_is_refused() -> None:
    for name, values in (
        ("Q5_K", WEIGHTS[:, :128]),
        ("Q4_1", WEIGHTS),
        ("Q4_K", WEIGHTS.double()),
        ("Q4_K", WEIGHTS[0]),
    ):
        with pytest.raises(UnreadableFormatError, match="cannot be encoded as"):
            encode(name, values)
