"""Inputs that a published scheme rounds: one call of compiled code has the bits of compressed-tensors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rabbitllm.engine import _activations
from rabbitllm.engine._activations import Rounding, fuse_activations
from rabbitllm.engine._fusing import MAX_ELEMENTS
from tests.support import quantized
from tests.support.tiny_models import ALL, INPUT, load, split

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.bits
SETTINGS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}


def settings_of(kind: str, **others: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(**{**SETTINGS, "type": kind, **others})


def expected_of(x: torch.Tensor, args: Any) -> torch.Tensor:
    from compressed_tensors.quantization import QuantizationStatus
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    module: Any = nn.Linear(1, 1)
    module.quantization_status = QuantizationStatus.DECOMPRESSED
    return forward_quantize(module, x, "input", args)


@pytest.mark.parametrize("kind", ["int", "float"])
@torch.no_grad()
def test_bits_of_compressed_tensors(kind: str) -> None:
    """Of a token's own scale; of one for all, of rows without a batch; of many rows by several threads."""
    args = settings_of(kind)
    rounding = Rounding.of(args)
    assert rounding is not None
    assert _activations._has_bits(rounding, copy.copy(_module(args)))
    for shape in ((1, 1, 100), (2, 3, 64), (5, 64), (64,), (2, 3, 4, 16), (1, 2 * MAX_ELEMENTS // 64, 64)):
        for scale in (1e-39, 1e-30, 1, 1e5):
            x = (torch.randn(shape) * scale).bfloat16()
            assert torch.equal(rounding.rounded(x), expected_of(x, args))
    x = torch.randn(1, 6, 64).bfloat16()
    x[0, :, 3] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, 0, -0.0]).bfloat16()
    result, expected = rounding.rounded(x), expected_of(x, args)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))


def _module(args: Any) -> Any:
    from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus

    module: Any = nn.Linear(1, 1)
    module.quantization_status = QuantizationStatus.DECOMPRESSED
    module.quantization_scheme = QuantizationScheme(targets=["Linear"], input_activations=args)
    return module


@pytest.mark.parametrize(
    "others",
    [
        {"num_bits": 4},
        {"symmetric": False},
        {"strategy": "tensor"},
        {"strategy": "tensor", "dynamic": False},
        {"strategy": "group", "group_size": 16},
    ],
    ids=str,
)
def test_other_settings_are_left_to_compressed_tensors(others: dict[str, Any]) -> None:
    assert Rounding.of(settings_of("int", **others)) is None


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(quantized.build_compressed_tensors(tmp_path_factory.mktemp("w8a8") / "model", "llama", "W8A8"))


@torch.no_grad()
def test_the_linears_of_a_model(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of its copies; not where a program changes the settings, wants gradients or has other dtypes."""
    rounded, ordinary = list[int](), Rounding.rounded

    def counted(self: Rounding, x: torch.Tensor) -> torch.Tensor:
        rounded.append(x.numel())
        return ordinary(self, x)

    with monkeypatch.context() as patch:
        patch.setattr("rabbitllm.engine.fusions.fuse_activations", lambda model: 0)
        plain = load(directory, ALL, exact=False)
    model = load(directory, ALL, exact=False)
    monkeypatch.setattr(Rounding, "rounded", counted)
    expected = plain(INPUT).logits
    assert not rounded
    assert torch.equal(model(INPUT).logits, expected)
    assert len(rounded) == 7 * model.config.num_hidden_layers
    linear, other = model.model.layers[0].mlp.up_proj, plain.model.layers[0].mlp.up_proj
    rounded.clear()
    x = torch.randn(1, 3, linear.in_features).bfloat16()
    assert torch.equal(copy.deepcopy(linear)(x), other(x))
    assert len(rounded) == 1
    with torch.enable_grad():
        assert torch.equal(linear(x), other(x))
    for module in (linear, other):
        module.quantization_enabled = False
    assert torch.equal(linear(x), other(x))
    for module in (linear, other):
        module.quantization_enabled = True
        module.quantization_scheme = module.quantization_scheme.model_copy(
            update={"input_activations": settings_of("int", num_bits=4)}
        )
    assert torch.equal(linear(x), other(x))
    for part in (model, plain):  # in place, for all of its Linears
        down = part.model.layers[0].mlp.down_proj
        down.quantization_scheme.input_activations.num_bits = 4
    x = torch.randn(1, 3, down.in_features).bfloat16()
    assert torch.equal(model.model.layers[0].mlp.down_proj(x), down(x))
    assert len(rounded) == 1


def test_a_rounding_without_their_bits_is_not_used(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(directory, ALL, exact=False)
    count = 7 * model.config.num_hidden_layers
    assert fuse_activations(model) == count
    ordinary = Rounding.rounded
    monkeypatch.setattr(Rounding, "rounded", lambda self, x: ordinary(self, x) * (1 + 2**-7))
    assert fuse_activations(model) == 0
