"""Activation and product of a gated MLP in one call have the bits of the model's own class."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from rabbitllm.engine import _gates, _layer_kernels
from rabbitllm.engine._gates import MAX_ELEMENTS, fuse_gates
from rabbitllm.quant import _vectors
from tests.engine.test_siblings import assert_same_logits, checkpoint
from tests.support.tiny_models import ALL

pytestmark = [pytest.mark.bits, pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used")]


def mlp(kind: Any = LlamaMLP, act: str = "silu", width: int = 128) -> Any:
    config = LlamaConfig(hidden_size=64, intermediate_size=width, hidden_act=act)
    config.hidden_activation = act
    return kind(config).bfloat16()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of each call."""
    counts, compute = list[int](), _layer_kernels.gate()

    def counted(*arguments: int) -> None:
        counts.append(arguments[-1])
        compute(*arguments)

    monkeypatch.setattr(_layer_kernels, "gate", lambda: counted)
    return counts


@pytest.mark.parametrize("kind", [LlamaMLP, Qwen3MLP])
@pytest.mark.parametrize("act", ["silu", "relu2"])
@torch.no_grad()
def test_bits_of_the_class(kind: Any, act: str, calls: list[int]) -> None:
    for width in (64, 192, 1536, 8192):
        plain = mlp(kind, act, width)
        fused = copy.deepcopy(plain)
        assert fuse_gates(fused) == 1
        del calls[:]
        for rows in (1, 3):
            for scale in (1e-6, 1, 1e4, 1e19):
                x = (torch.randn(1, rows, 64) * scale).bfloat16()
                assert torch.equal(fused(x).nan_to_num(7), plain(x).nan_to_num(7))
        assert calls == [width] * 4 + [3 * width] * 4


@torch.no_grad()
def test_every_gate() -> None:
    module = mlp()
    fuse_gates(module)
    act = module.act_fn
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for gate in every.view(8, -1):
        for factor in (1, -3.7, 1e-30):
            up = torch.full_like(gate, factor)
            assert torch.equal(_gates._gated(act, gate, up).nan_to_num(7), (act(gate) * up).nan_to_num(7))


@torch.no_grad()
def test_what_is_left_to_the_class(calls: list[int]) -> None:
    plain = mlp(width=100)
    fused = copy.deepcopy(plain)
    fuse_gates(fused)
    del calls[:]
    x = torch.randn(1, 1, 64).bfloat16()
    large = torch.randn(1, MAX_ELEMENTS // 64, 64).bfloat16()
    assert torch.equal(fused(x), plain(x))  # torch computes the last elements in another way
    wide = mlp()
    fuse_gates(wide)
    del calls[:]
    for value in (large, x.float()):
        other = copy.deepcopy(wide).to(value.dtype)
        assert torch.equal(other(value), LlamaMLP.forward(other, value))
    assert torch.equal(wide(x=x), LlamaMLP.forward(wide, x))
    with torch.enable_grad():
        wide(x).sum().backward()
    assert wide.gate_proj.weight.grad is not None
    seen = list[torch.Tensor]()
    hook = wide.act_fn.register_forward_hook(lambda module, args, output: seen.append(output))
    assert torch.equal(wide(x), LlamaMLP.forward(wide, x))
    assert len(seen) == 2
    hook.remove()
    wide.act_fn = nn.Tanh()
    assert torch.equal(wide(x), LlamaMLP.forward(wide, x))
    assert not calls


def test_a_layer_that_computes_another_gate_by_its_own_number_is_not_replaced() -> None:
    class ShiftedMLP(LlamaMLP):
        shift = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) + self.shift)  # type: ignore[no-any-return]

    layers = nn.ModuleList(mlp(ShiftedMLP) for _ in range(3))
    layers[1].shift = 1.0
    assert fuse_gates(layers) == 2
    assert "forward" not in vars(layers[1])


def test_a_class_that_computes_another_gate_is_not_replaced() -> None:
    class Limited(LlamaMLP):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            gate, up = self.gate_proj(x), self.up_proj(x).clamp(-7, 7)
            return self.down_proj(self.act_fn(gate) * up)

    assert fuse_gates(mlp(Limited)) == 0
    assert fuse_gates(mlp(Gemma3MLP, "gelu_pytorch_tanh")) == 0  # its activation has attributes


@pytest.mark.parametrize("budget", [ALL, 0], ids=["resident", "streamed"])
def test_a_model_has_the_same_logits(
    tmp_path: Path, budget: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path, "llama", "4bit")
    assert_same_logits(directory, budget, "fuse_gates", "MLP", monkeypatch)
    assert calls.count(512) >= 2 * 4  # of 2 layers, 4 steps
