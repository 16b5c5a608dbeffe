"""Rotary embeddings in one call have the bits of the model's own function, which is used where they have not."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, LlamaConfig
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.phi3 import modeling_phi3

from rabbitllm.engine import _rotary, row_attention
from rabbitllm.engine._attention import relative_error
from rabbitllm.engine._rotary import fuse_rotary
from rabbitllm.engine.row_attention import attended
from rabbitllm.engine.transformers_api import sdpa_attention_forward
from rabbitllm.quant import _vectors
from tests.engine.test_siblings import assert_same_logits, checkpoint
from tests.support.tiny_models import ALL, load

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
    assert fuse_rotary(fused, prompts=False) == 1
    assert fuse_rotary(fused, prompts=False) == 0
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
    fuse_rotary(fused, prompts=False)
    x, angles = torch.randn(1, 3, 64).bfloat16(), torch.randn(1, 3, 32).bfloat16()
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *args: rotated.append(1) or ORDINARY(*args))
        fused(x, position_embeddings=(angles, angles))
        assert rotated == [1]
        patch.setattr(LlamaAttention, "forward", lambda self, *args, **named: "patched")
        assert fused(x, position_embeddings=(angles, angles)) == "patched"


def test_a_function_that_rotates_otherwise_is_not_replaced() -> None:
    assert _rotary.rotating_forward(CohereAttention, prompts=False) is None  # neighbours are pairs
    assert _rotary.rotating_forward(torch.nn.Linear, prompts=True) is None
    assert not _rotary._has_bits(lambda q, k, cos, sin: ORDINARY(q, k, cos, -sin))
    assert not _rotary._has_bits(lambda q, k, cos: (q, k))


@pytest.mark.parametrize("budget", [ALL, 0], ids=["resident", "streamed"])
def test_a_model_has_the_same_logits(
    tmp_path: Path, budget: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path, "gemma3", "4bit", layer_types=["sliding_attention", "full_attention"])
    assert_same_logits(directory, budget, "fuse_rotary", "Attention", monkeypatch)
    assert len(calls) >= 2 * 4  # of 2 layers, 4 steps


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """The mask of each attention to a prompt in one call."""
    assert row_attention.prompt_attention.attends(32)  # whose trial attends, too
    monkeypatch.setattr(row_attention.bfloat_products, "torch_has_tiles", lambda: False)
    masks, compute = list[Any](), row_attention.prompt_attention.attend

    def counted(*args: Any) -> torch.Tensor:
        masks.append(args[3])
        return compute(*args)

    monkeypatch.setattr(row_attention.prompt_attention, "attend", counted)
    return masks


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@torch.no_grad()
def test_prompts_of_a_model(family: str, tmp_path: Path, prompts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in parts, and with a window; the same rows have the same keys in each layer's cache."""
    window = {"sliding_window": 20} if family == "mistral" else {}
    directory = checkpoint(tmp_path, family, "q8_0", head_dim=32, **window)
    ids = torch.randint(1, 100, (1, 90), generator=torch.Generator().manual_seed(1))
    model = load(directory, ALL, exact=False)
    whole, caches = model(ids).logits, [DynamicCache(config=model.config) for _ in range(2)]
    layers = model.config.num_hidden_layers
    assert len(prompts) == layers
    assert all((mask is None) == (not window) for mask in prompts)
    model(ids, past_key_values=caches[0])
    for part in (ids[:, :50], ids[:, 50:]):
        model(part, past_key_values=caches[1])
    assert len(prompts) == 4 * layers
    assert prompts[-1].shape[0] == 40
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        last = min(one.keys.shape[2], other.keys.shape[2])
        assert torch.equal(one.keys[:, :, -last:], other.keys[:, :, -last:])
    monkeypatch.setattr(_rotary, "attended", sdpa_attention_forward)
    assert 0 < relative_error(whole, model(ids).logits) < 0.02
    assert len(prompts) == 4 * layers


def test_uncompressed_models_keep_the_attention_of_torch(tmp_path: Path, prompts: list[Any]) -> None:
    model = load(checkpoint(tmp_path, "llama", None, head_dim=32), ALL, exact=False)
    with torch.no_grad():
        model(torch.arange(1, 60)[None])
    assert not prompts


@torch.no_grad()
def test_which_attention_is_left_to_transformers(prompts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    config._attn_implementation = "sdpa"
    module = LlamaAttention(config, 0).bfloat16().eval()
    q, keys = torch.randn(1, 2, 40, 32).bfloat16(), torch.randn(2, 1, 1, 50, 32).bfloat16()
    k, v = keys[:, :, :, :40]
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()

    def error(*tensors: torch.Tensor, mask: torch.Tensor | None = None, **named: Any) -> float:
        named = {"dropout": 0.0, "scaling": 0.2} | named
        return relative_error(*(f(module, *tensors, mask, **named)[0] for f in (attended, sdpa_attention_forward)))

    assert 0 < error(q, k, v) < 2**-7
    assert error(q, k, v, sliding_window=3, position_ids=None) < 2**-7  # a mask would say so
    assert error(q, k, v, mask=mask) < 2**-7
    assert error(q, *keys) < 2**-7  # a cache that has its room in advance
    assert len(prompts) == 4
    seen = torch.where(mask, 0.0, -torch.inf).bfloat16()
    assert error(q, k, v, mask=seen) == 0
    assert error(q, k, v, mask=mask.expand(1, 2, 40, 40)) == 0
    assert error(q, k, v, position_bias=torch.randn(1, 2, 40, 40).bfloat16()) == 0
    assert error(q, k, v, is_causal=False) == 0
    assert error(q, k, v, scaling=None) == 0
    assert error(q.float(), k.float(), v.float()) == 0
    assert error(*(x.expand(2, *x.shape[1:]) for x in (q, k, v))) == 0
    assert error(q, k, v[..., :16]) == 0
    assert error(q[:, :, :3], k[:, :, :3], v[:, :, :3]) == 0
    with pytest.raises(ValueError, match="softcap"):
        attended(module, q, k, v, None, scaling=0.2, softcap=30.0)
    with torch.enable_grad():
        attended(module, q.clone().requires_grad_(), k, v, None, scaling=0.2)[0].sum().backward()
    monkeypatch.setattr(module, "is_causal", False)
    assert error(q, k, v) == 0
    assert len(prompts) == 4


@torch.no_grad()
def test_another_attention_of_a_config_is_used(prompts: list[Any]) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    config._attn_implementation = "sdpa"
    module = LlamaAttention(config, 0).bfloat16().eval()
    assert fuse_rotary(module, prompts=True) == 1
    x, angles = torch.randn(1, 30, 64).bfloat16(), torch.randn(1, 30, 32).bfloat16()
    module(x, position_embeddings=(angles, angles))
    assert len(prompts) == 1
    AttentionInterface.register("nothing", lambda module, query, *args, **named: (0 * query.transpose(1, 2), None))
    config._attn_implementation = "nothing"
    assert not module(x, position_embeddings=(angles, angles))[0].any()
    assert len(prompts) == 1
