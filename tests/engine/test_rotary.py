"""Rotary embeddings in one call have the bits of the model's own function, which is used where they have not."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.phi3 import modeling_phi3

from rabbitllm.engine import _rotary
from rabbitllm.engine._rotary import fuse_rotary
from rabbitllm.quant import _vectors
from tests.engine.test_siblings import assert_same_logits, checkpoint
from tests.support.tiny_models import ALL

pytestmark = [pytest.mark.bits, pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used")]
ORDINARY = modeling_llama.apply_rotary_pos_emb
FUSED = functools.partial(_rotary._rotated, ORDINARY)


def values(rows: int, heads: int, keys: int, width: int, angles: int, tokens: int = 1) -> tuple[torch.Tensor, ...]:
    q, k = (torch.randn(rows, tokens, count, width).bfloat16().transpose(1, 2) for count in (heads, keys))
    return q, k, *(torch.randn(angles, tokens, width).cos().bfloat16() for _ in range(2))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The heads of each rotation in one call."""
    heads, compute = list[int](), _rotary._rotate

    def counted(q: torch.Tensor, *more: Any) -> Any:
        heads.append(q.shape[1])
        return compute(q, *more)

    monkeypatch.setattr(_rotary, "_rotate", counted)
    return heads


@pytest.mark.parametrize("width", [2, 6, 64, 80, 128, 256])
@torch.no_grad()
def test_bits_of_the_function(width: int, calls: list[int]) -> None:
    for heads, keys in ((9, 3), (1, 4)):
        given = values(1, heads, keys, width, 1)
        for scale in (1e-38, 1, 1e37):
            q, k, cos, sin = given[0] * scale, given[1] * scale, *given[2:]
            for got, expected in zip(FUSED(q, k, cos, sin), ORDINARY(q, k, cos, sin), strict=True):
                assert torch.equal(got, expected)
                assert got.is_contiguous()
    assert calls == [9] * 3 + [1] * 3
    for tokens in (3, 700):  # the last in several threads
        given = values(1, 9, 3, width, 1, tokens)
        for got, expected in zip(FUSED(*given), ORDINARY(*given), strict=True):
            assert torch.equal(got, expected)
            assert got.stride() == expected.stride()
        assert calls.pop() == 9
    q, k, cos, sin = values(1, 9, 3, width, 1)
    part = values(1, 9, 3, 2 * width, 1)[:2]  # of which as much is rotated
    of_part = functools.partial(_rotary._rotated, modeling_phi3.apply_rotary_pos_emb)
    assert all(map(torch.equal, of_part(*part, cos, sin), modeling_phi3.apply_rotary_pos_emb(*part, cos, sin)))
    assert calls.pop() == 9
    q, k, cos, sin = values(1, 2, 1, width, 1)
    q[..., 0], k[..., -1] = torch.inf, torch.nan
    for got, expected in zip(FUSED(q, k, cos, sin), ORDINARY(q, k, cos, sin), strict=True):
        assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))


@torch.no_grad()
def test_what_is_left_to_the_function(calls: list[int]) -> None:
    q, k, cos, sin = values(1, 4, 2, 64, 1)
    others = [
        values(2, 4, 2, 64, 1),
        values(2, 4, 2, 64, 2),
        tuple(value.contiguous() for value in values(1, 4, 2, 64, 1, tokens=3)),  # the tokens of a head together
        tuple(value.float() for value in (q, k, cos, sin)),
        (q[:, ::2], k, cos, sin),
        (q, k, cos.float(), sin.float()),
    ]
    for given in others:
        assert all(map(torch.equal, FUSED(*given), ORDINARY(*given)))
    assert all(map(torch.equal, FUSED(q, k, cos, sin, unsqueeze_dim=1), ORDINARY(q, k, cos, sin)))
    assert all(map(torch.equal, FUSED(q=q, k=k, cos=cos, sin=sin), ORDINARY(q, k, cos, sin)))
    # Qwen4-Exp's index rotates one tensor, by the function that rotates two
    one = functools.partial(_rotary._rotated, lambda q, k=None, cos=None, sin=None: ORDINARY(q, q, cos, sin)[0])
    assert torch.equal(one(q, cos=cos, sin=sin), ORDINARY(q, k, cos, sin)[0])
    with torch.enable_grad():
        FUSED(q.requires_grad_(), k, cos, sin)[0].sum().backward()
    assert q.grad is not None
    assert not calls


def test_the_forward_is_that_of_the_class() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    config._attn_implementation = "sdpa"
    plain = LlamaAttention(config, 0).bfloat16().eval()
    fused = copy.deepcopy(plain)
    assert fuse_rotary(fused) == 1
    assert fuse_rotary(fused) == 0
    assert modeling_llama.apply_rotary_pos_emb is ORDINARY
    x, angles = torch.randn(1, 1, 64).bfloat16(), torch.randn(1, 1, 32).bfloat16()
    with torch.no_grad():
        expected, _ = plain(x, position_embeddings=(angles, angles))
        for module in (fused, copy.deepcopy(fused)):
            assert module.forward.__self__ is module
            assert torch.equal(module(x, position_embeddings=(angles, angles))[0], expected)
        with pytest.warns(FutureWarning, match="Use `cache`"):  # the class's decorators are around it too
            fused(x, position_embeddings=(angles, angles), past_key_values=None)


def test_what_others_patch_later_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    config._attn_implementation = "sdpa"
    fused, rotated = LlamaAttention(config, 0).bfloat16().eval(), list[int]()
    fuse_rotary(fused)
    x, angles = torch.randn(1, 3, 64).bfloat16(), torch.randn(1, 3, 32).bfloat16()
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *args: rotated.append(1) or ORDINARY(*args))
        fused(x, position_embeddings=(angles, angles))
        assert rotated == [1]
        patch.setattr(LlamaAttention, "forward", lambda self, *args, **named: "patched")
        assert fused(x, position_embeddings=(angles, angles)) == "patched"


def test_a_function_that_rotates_otherwise_is_not_replaced() -> None:
    assert _rotary.rotating_forward(CohereAttention) is None  # neighbours are pairs
    assert _rotary.rotating_forward(torch.nn.Linear) is None
    assert not _rotary._has_bits(lambda q, k, cos, sin: ORDINARY(q, k, cos, -sin))
    assert not _rotary._has_bits(lambda q, k, cos: (q, k))


@pytest.mark.parametrize("budget", [ALL, 0], ids=["resident", "streamed"])
def test_a_model_has_the_same_logits(
    tmp_path: Path, budget: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path, "gemma3", "4bit", layer_types=["sliding_attention", "full_attention"])
    assert_same_logits(directory, budget, "fuse_rotary", "Attention", monkeypatch)
    assert len(calls) >= 2 * 4  # of 2 layers, 4 steps
