"""RMSNorm in one call has the bits of the model's own classes, which are used where it has not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from rabbitllm.engine import _norms
from rabbitllm.engine._fusing import MAX_ELEMENTS
from rabbitllm.engine._norms import fuse_norms
from rabbitllm.quant import _vectors
from tests.engine.test_siblings import assert_same_logits, checkpoint
from tests.support.tiny_models import ALL

pytestmark = [pytest.mark.bits, pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used")]
SIZES = (64, 100, 128, 576, 896, 2048, 5120, 8191, 16384)


def norm(norm_type: Any, columns: int, dtype: torch.dtype) -> Any:
    made = norm_type(columns)
    made.weight.data = torch.rand(columns, generator=torch.Generator().manual_seed(columns)) + 0.5
    return made.to(dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each norm in one call."""
    rows, compute = list[int](), _norms._norm

    def counted(x: torch.Tensor, weight: torch.Tensor, count: int, *more: Any) -> torch.Tensor:
        rows.append(count)
        return compute(x, weight, count, *more)

    monkeypatch.setattr(_norms, "_norm", counted)
    return rows


@pytest.mark.parametrize("norm_type", [LlamaRMSNorm, Qwen3RMSNorm, Gemma3RMSNorm, Qwen3NextRMSNorm, GptOssRMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.no_grad()
def test_bits_of_the_class(norm_type: Any, dtype: torch.dtype, calls: list[int]) -> None:
    for columns in SIZES:
        plain = norm(norm_type, columns, dtype)
        fused = copy.deepcopy(plain)
        assert fuse_norms(fused) == 1
        del calls[:]
        for rows in (1, 2, 5, 3 * MAX_ELEMENTS // columns + 2):  # the last in several threads
            for scale in (1e-12, 1, 300):
                x = (torch.randn(1, rows, columns) * scale).to(dtype)
                x[..., -1, : columns // 2] = 0
                assert torch.equal(fused(x), plain(x))
        assert len(calls) == 12
        x = torch.full((1, columns), torch.inf, dtype=dtype)
        assert torch.equal(fused(x).isnan(), plain(x).isnan())


@torch.no_grad()
def test_what_is_left_to_the_class(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = norm(LlamaRMSNorm, 64, torch.bfloat16)
    fused = copy.deepcopy(plain)
    fuse_norms(fused)
    del calls[:]
    x = torch.randn(2, 3, 64).bfloat16()
    for value in (x.float(), x.transpose(0, 1), x[:0]):
        assert torch.equal(fused(value), plain(value))
    assert torch.equal(fused(hidden_states=x), plain(x))
    with torch.enable_grad():
        fused(x).sum().backward()
    assert fused.weight.grad is not None
    assert not calls
    fused(x)
    assert calls == [6]
    copied = copy.deepcopy(fused)
    copied.weight = nn.Parameter(2 * plain.weight)
    assert torch.equal(copied(x), 2 * plain(x))
    assert calls == [6, 6]
    halves = torch.randn(2, 3, 128).bfloat16().chunk(2, -1)  # rows of 64 in rows of 128
    assert all(torch.equal(fused(half), plain(half)) for half in halves)
    assert calls == [6] * 4
    fused.weight = nn.Parameter(torch.stack([plain.weight, plain.weight], 1)[:, 0])  # with gaps
    assert torch.equal(fused(x), plain(x))
    assert calls == [6] * 4
    plain = norm(Gemma3RMSNorm, 64, torch.bfloat16)
    fused = copy.deepcopy(plain)
    fuse_norms(fused)
    monkeypatch.setattr(Gemma3RMSNorm, "_norm", lambda norm, x: x * 2)
    assert torch.equal(fused(x), plain(x))


@torch.no_grad()
def test_compilers_and_transforms_get_the_class() -> None:
    plain = norm(LlamaRMSNorm, 64, torch.bfloat16)
    fused = copy.deepcopy(plain)
    assert fuse_norms(fused) == 1
    x = torch.randn(2, 3, 64).bfloat16()
    assert torch.equal(torch.compile(fused, backend="eager")(x), plain(x))
    assert torch.equal(torch.func.vmap(fused)(x), plain(x))
    gated, gate = norm(Qwen3NextRMSNormGated, 64, torch.bfloat16), torch.randn(2, 3, 64).bfloat16()
    fused = copy.deepcopy(gated)
    assert fuse_norms(fused) == 1
    assert torch.equal(torch.compile(fused, backend="eager")(x, gate), gated(x, gate))


def test_a_norm_that_may_divide_by_zero_is_left_to_its_class() -> None:
    assert fuse_norms(LlamaRMSNorm(64, eps=0.0).bfloat16()) == 0


def test_a_class_that_computes_another_norm_is_not_replaced() -> None:
    assert fuse_norms(norm(LlamaRMSNorm, 64, torch.float64)) == 0
    assert fuse_norms(norm(LlamaRMSNorm, 7, torch.float32)) == 0

    class ShiftedRMSNorm(LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> Any:
            return super().forward(hidden_states + 2**-20)

    assert fuse_norms(norm(ShiftedRMSNorm, 64, torch.bfloat16)) == 0


@pytest.mark.parametrize(("family", "budget"), [("qwen3", ALL), ("qwen3", 0), ("gemma3", ALL)])
def test_a_model_has_the_same_logits(
    tmp_path: Path, family: str, budget: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path, family, "4bit")
    assert_same_logits(directory, budget, "fuse_norms", "Norm", monkeypatch)
    assert len(calls) > 4 * 2 * 5  # of 2 layers with 4 norms, 5 steps, and those that were tried


@pytest.mark.parametrize("norm_type", [Qwen3NextRMSNormGated, Qwen3_5RMSNormGated, KimiLinearRMSNormGated])
@torch.no_grad()
def test_norms_with_a_gate(norm_type: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have the results of their class; those that round between norm and gate by one call."""
    calls, compute = list[int](), _norms._norm
    for columns in (64, 128):
        plain = norm(norm_type, columns, torch.bfloat16)
        fused = copy.deepcopy(plain)
        assert fuse_norms(fused) == (norm_type is not KimiLinearRMSNormGated)
        monkeypatch.setattr(_norms, "_norm", lambda *given: calls.append(given[2]) or compute(*given))
        for rows in (1, 32):
            x, gate = (torch.randn(rows, columns).bfloat16() * 4 for _ in range(2))
            assert torch.equal(fused(x, gate), plain(x, gate))
        wide = torch.randn(2, columns, 2).bfloat16()[..., 0]  # not one after the other in memory
        assert torch.equal(fused(wide, gate[:2]), plain(wide, gate[:2]))
        assert torch.equal(fused(x.float(), gate), plain(x.float(), gate))
        monkeypatch.undo()
    assert calls == ([1, 32] * 2 if norm_type is not KimiLinearRMSNormGated else [])


@pytest.mark.parametrize("norm_type", [GptOssRMSNorm, LlamaRMSNorm])
def test_a_norm_that_is_cast_later_rounds_as_its_class(norm_type: Any, calls: list[int]) -> None:
    """In float32 both kinds have the same bits, so that alone does not say which one it is."""
    module = norm(norm_type, 256, torch.float32)
    ordinary, x = copy.deepcopy(module).bfloat16(), torch.randn(40, 256).bfloat16()
    assert fuse_norms(module) == 1
    with torch.no_grad():
        assert torch.equal(module.bfloat16()(x), ordinary(x))
    assert calls
