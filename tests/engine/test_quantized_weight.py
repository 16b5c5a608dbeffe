"""Models whose Linears are multiplied from their codes: near to what float32 makes of the same matrices, and models."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from rabbitllm.engine import unit_source
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.quantized_weight import QuantizedWeight
from rabbitllm.errors import AbsentWeightError
from rabbitllm.quant import packed_products, vectors
from rabbitllm.quant.packed_products import Matrix
from tests.quant.test_packed_products import error, matrix, meant
from tests.support.builders import FAMILIES, build_checkpoint, reference_logits
from tests.support.rounding import assert_greedy, assert_products
from tests.support.tiny_models import ALL, INPUT, dequantized, load, plain_model, run, split, tiers

pytestmark = pytest.mark.skipif(not vectors.lanes(), reason="no vectors of a kind that is used here")
WIDE = {"hidden_size": 128, "intermediate_size": 192}


def weight(scheme: str = "4bit", rows: int = 32, columns: int = 128) -> QuantizedWeight:
    return QuantizedWeight(Matrix(*matrix(scheme, rows, columns, dtype=torch.float32)), torch.float32)


@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
def test_a_linear_has_it_like_any_other_weight(scheme: str) -> None:
    packed = weight(scheme)
    module = nn.Linear(128, 32)
    module._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
    assert isinstance(module.weight, nn.Parameter)
    assert (module.weight.shape, module.weight.dtype, module.weight.device.type) == ((32, 128), torch.float32, "cpu")
    assert sum(parameter.numel() for parameter in module.parameters()) == 32 * 128 + 32
    x = torch.randn(2, 5, 128)
    with torch.no_grad():
        for got in (module(x), nn.functional.linear(input=x, weight=module.weight, bias=module.bias)):
            assert_products(got.view(10, 32), x.view(10, 128), packed.dequantized(), module.bias)
    assert "PackedWeight((32, 128), torch.float32, stored at " + scheme in repr(module.weight)


def test_whatever_else_is_asked_gets_the_matrix() -> None:
    packed = weight()
    plain = packed.dequantized()
    assert torch.equal(packed + 1, plain + 1)
    assert torch.equal(packed[3:5], plain[3:5])
    assert torch.equal(torch.cat([packed, plain]), torch.cat([plain, plain]))
    assert torch.equal(packed.T @ packed, plain.T @ plain)
    assert torch.equal(packed.to(torch.float64), plain.double())
    assert torch.equal(nn.functional.linear(packed, plain), nn.functional.linear(plain, plain))
    for copied in (copy.deepcopy(packed), packed.clone(), packed.detach()):
        assert isinstance(copied, QuantizedWeight)
        assert torch.equal(copied * 1, plain)


def test_every_way_of_reading_it_gets_the_matrix() -> None:
    packed = weight(rows=128, columns=128)
    plain = packed.dequantized()
    ids, x, projection = torch.tensor([[3, 127, 3]]), torch.randn(5, 2, 128), torch.randn(384, 128)

    def attention(out: torch.Tensor) -> torch.Tensor:
        given = (128, 4, projection, None, None, None, False, 0.0, out, None)
        return nn.functional.multi_head_attention_forward(x, x, x, *given)[0]  # type: ignore[arg-type]

    for read in (
        lambda w: nn.functional.embedding(ids, w),
        attention,
        lambda w: w[torch.tensor([1, 5])],
        lambda w: torch.from_numpy(np.asarray(w)),
        lambda w: torch.from_numpy(w.numpy()),
        lambda w: torch.tensor(w.tolist()),
        lambda w: torch.from_dlpack(w),
        lambda w: w.index_select(0, ids[0]),
        lambda w: torch.zeros(128, 128).copy_(w),
        lambda w: torch.stack(list(w)),
        lambda w: torch.einsum("ij,bj->bi", w, x[0]),
        lambda w: torch.load(saved(w), weights_only=False) * 1,
    ):
        with torch.no_grad():
            assert torch.equal(read(packed), read(plain))
    for address in (torch.Tensor.data_ptr, torch.Tensor.storage, lambda w: safetensors.torch.save({"w": w})):
        with pytest.raises(AbsentWeightError, match="by its codes"):
            address(packed)


def saved(tensor: torch.Tensor) -> io.BytesIO:
    into = io.BytesIO()
    torch.save(tensor, into)
    into.seek(0)
    return into


def test_gradients_of_inputs_and_bias_are_those_of_the_matrix() -> None:
    packed = weight()
    x, bias = torch.randn(3, 128, requires_grad=True), torch.randn(32, requires_grad=True)
    nn.functional.linear(x, packed, bias).square().sum().backward()
    of_x, of_bias = x.grad, bias.grad
    assert of_x is not None
    assert of_bias is not None
    x2, bias2 = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    nn.functional.linear(x2, packed.dequantized(), bias2).square().sum().backward()
    torch.testing.assert_close(of_x, x2.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_bias, bias2.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_near_to_its_dequantized_self(tmp_path: Path, family: str, compression: str) -> None:
    folder = build_checkpoint(tmp_path / "model", family, tied=FAMILIES[family].ties[0], dtype=torch.float32)
    plain = reference_logits(
        dequantized(folder, tmp_path / "reference", compression, torch.float32), INPUT, torch.float32
    )
    directory, model = split(folder, compression), plain_model(tmp_path / "reference", dtype=torch.float32)
    for budget in (ALL, 0):
        found = run(load(directory, budget, exact=False))
        assert error(found.logits, plain.logits.double()) < 1e-4
        assert_greedy(found.tokens, plain.tokens, model, 1e-4 * float(plain.logits.norm()))


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_resident_and_streamed_have_the_same_bits(tmp_path: Path, compression: str) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, **WIDE), compression)
    resident, streamed = load(directory, exact=False), load(directory, 0, exact=False)
    assert Tier.STREAMED in tiers(streamed).values()
    one, other = run(resident), run(streamed)
    assert torch.equal(one.logits, other.logits)
    assert torch.equal(one.tokens, other.tokens)


def test_nothing_is_dequantized_when_a_token_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is kept is what is stored: the model fits where its dense matrices would not."""
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, **WIDE)
    directory = split(folder, "4bit")
    exact = load(directory)
    stored = sum(placed.stored for placed in exact.placement.units)
    embedding = exact.get_input_embeddings().weight.nbytes
    model = load(directory, stored + embedding, exact=False)
    assert model.placement.is_resident

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a matrix was dequantized")

    monkeypatch.setattr(packed_products, "dequantize", refuse)
    monkeypatch.setattr(unit_source, "dequantize", refuse)
    with torch.inference_mode():
        model(INPUT[:, :1])
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert linears
    assert all(isinstance(module._parameters["weight"], QuantizedWeight) for module in linears)


def test_exact_has_the_bits_of_the_dequantized_model(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, **WIDE)
    expected = reference_logits(
        dequantized(folder, tmp_path / "reference", "4bit", torch.bfloat16), INPUT, torch.bfloat16
    )
    exact, default = (run(load(split(folder, "4bit"), exact=exact)) for exact in (True, False))
    assert torch.equal(exact.logits, expected.logits)
    assert not torch.equal(default.logits, expected.logits)


def test_meant_is_what_dequantizing_gives() -> None:
    """The referee of these tests agrees with bitsandbytes."""
    parts = matrix("4bit", 16, 128, dtype=torch.float32)
    assert error(weight("4bit", 16, 128).dequantized(), meant(parts)) < 1e-6
