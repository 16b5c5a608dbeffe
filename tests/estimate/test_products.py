"""Matrices that are measured: the model's shapes, in the model's proportions, in the form they are multiplied from."""

from __future__ import annotations

import pytest
import torch

from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.estimate import products
from rabbitllm.estimate.bitsandbytes_products import matrix, nbytes_of
from rabbitllm.estimate.products import working_set
from rabbitllm.quant import vectors
from rabbitllm.quant.packed_products import Matrix, kernel_for
from tests.support.fake_gpu import FakeGpu, watched

ALL = 1 << 40
SHAPES = {(512, 256): 3_000_000, (64, 512): 1_000_000}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SET_BYTES", 4 << 20)
    monkeypatch.setattr(products, "SECONDS", 0.0)


@pytest.mark.parametrize("form", ["bfloat16", "float32", "4bit", "8bit"])
def test_shapes_and_proportions(form: str) -> None:
    made = working_set(form, SHAPES, torch.bfloat16, CpuDevice(), ALL)
    rows = [weight.shape[0] for weight in made.weights]
    assert set(rows) == {512, 64}
    large = sum(weight.numel() for weight in made.weights if weight.shape[0] == 512)
    assert large / sum(weight.numel() for weight in made.weights) == pytest.approx(0.75, abs=0.05)
    assert made.nbytes == pytest.approx(4 << 20, rel=0.2)
    assert all(isinstance(weight, QuantizedWeight) == (form in ("4bit", "8bit")) for weight in made.weights)


@pytest.mark.skipif(not vectors.lanes(), reason="no vectors of a kind that is used here")
@pytest.mark.parametrize("form", ["4bit", "8bit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_measured_is_the_kernel(form: str, dtype: torch.dtype) -> None:
    """Made-up codes with a meaning that no kernel knows would be dequantized."""
    for weight in working_set(form, SHAPES, dtype, CpuDevice(), ALL).weights:
        assert isinstance(weight, QuantizedWeight)
        assert isinstance(weight.matrix, Matrix)
        assert weight.matrix.is_known_to(kernel_for(form, dtype))


def test_of_a_large_matrix_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MATRIX_BYTES", 1 << 16)
    made = working_set("bfloat16", {(100_000, 256): 1}, torch.bfloat16, CpuDevice(), ALL)
    assert {tuple(weight.shape) for weight in made.weights} == {(128, 256)}


def test_of_a_small_model_no_more_than_it_has() -> None:
    made = working_set("bfloat16", SHAPES, torch.bfloat16, CpuDevice(), 1 << 20)
    assert made.nbytes == pytest.approx(1 << 20, rel=0.3)


@pytest.mark.parametrize("form", ["float32", "4bit", "8bit"])
@pytest.mark.parametrize("inputs", [1, 16])
def test_rate_is_of_all_bytes(form: str, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = working_set(form, SHAPES, torch.float32, CpuDevice(), ALL)
    monkeypatch.setattr(products, "_rounds", lambda work, device: [sum(one() is None for one in work) + 2.0, 1.0, 9.0])
    assert made.rate(inputs) == made.nbytes / 2
    assert made.rate(inputs, disturbed=True) == made.nbytes / 4
    monkeypatch.undo()
    assert made.rate(inputs) > 0


def test_on_a_device_nothing_is_elsewhere() -> None:
    gpu = FakeGpu(0)
    with watched():
        made = working_set("bfloat16", SHAPES, torch.bfloat16, gpu, ALL)
        assert {weight.device for weight in made.weights} == {gpu.torch_device}
        assert made.rate(1) > 0


def test_weights_that_stay_are_in_small_pages() -> None:
    made = working_set("4bit", SHAPES, torch.bfloat16, CpuDevice(), ALL, mapped=True)
    other = working_set("4bit", SHAPES, torch.bfloat16, CpuDevice(), ALL)
    x = torch.randn(1, 256)
    for one, two in zip(made.weights, other.weights, strict=True):
        if one.shape[1] == 256:
            assert torch.equal(torch.nn.functional.linear(x, one), torch.nn.functional.linear(x, two))


@pytest.mark.parametrize("form", ["bitsandbytes 8bit", "bitsandbytes 4bit in float32", "bitsandbytes 4bit in bfloat16"])
def test_products_of_bitsandbytes_own_modules(form: str) -> None:
    """The very modules that such a checkpoint computes with, around made-up codes."""
    made = matrix(form, 64, 128, lambda nbytes: torch.full((nbytes,), 0x3C, dtype=torch.uint8))
    found = made.linear(torch.ones(1, 3, 128, dtype=torch.bfloat16), None)
    assert found.shape == (1, 3, 64)
    # at 8bit a code is a 127th of the scale; at 4bit 3 and 12 are the codes, in turns
    table = torch.tensor([-0.3949, 0.4407])
    wanted = 128 * (0x3C / 127 if "8bit" in form else float(table.mean()))
    assert torch.allclose(found.float(), torch.full((1, 3, 64), wanted), rtol=0.05)
    chosen = working_set(form, {(64, 128): 1}, torch.bfloat16, CpuDevice(), 5 * nbytes_of(form, 64, 128))
    assert chosen.nbytes == 5 * nbytes_of(form, 64, 128)
    assert chosen.rate(1) > 0
