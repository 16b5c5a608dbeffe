"""Logits of Meta's checkpoints equal those of the published architecture, written out here, and of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import rabbitllm
from tests.support.hub_fixtures import HubEnvironment
from tests.support.meta_files import ranks_of_model, tiktoken_file, tiny_llama, write_as_transformers, write_meta

TOKENS = torch.randint(0, 320, (2, 23), generator=torch.Generator().manual_seed(1))
SCALED = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def angles(dim: int, length: int, base: float, scale: float | None) -> torch.Tensor:
    """The unit complex number of every position and frequency.

    Scaled as Llama 3.1's are (llama_models, models/llama3/model.py): waves longer than 8192 tokens by the whole factor,
    those shorter than a quarter of it not at all, and between the two in proportion.
    """
    frequencies = base ** -(torch.arange(0, dim, 2).float() / dim)
    if scale is not None:
        turns = 8192 * frequencies / (2 * math.pi)
        share = ((turns - 1) / (4 - 1)).clamp(0, 1)
        frequencies = frequencies * (share + (1 - share) / scale)
    turned = torch.outer(torch.arange(length).float(), frequencies)
    return torch.polar(torch.ones_like(turned), turned)


def published(weights: Mapping[str, torch.Tensor], params: Mapping[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Logits by the architecture of Llama (https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2307.09288) from
    Meta's own tensors: norms before, neighbouring elements turned as complex numbers, grouped heads, gated SiLU."""
    heads, kv_heads = params["n_heads"], params["n_kv_heads"]
    dim = params["dim"] // heads
    length = tokens.shape[1]
    turn = angles(dim, length, params.get("rope_theta", 10_000.0), params.get("rope_scaling_factor"))
    mask = torch.full((length, length), -torch.inf).triu(1)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]) * weights[name]

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn[:, None]).flatten(3)

    x = weights["tok_embeddings.weight"][tokens]
    for layer in range(params["n_layers"]):
        lead = f"layers.{layer}."
        h = norm(x, lead + "attention_norm.weight")
        q, k, v = (
            (h @ weights[f"{lead}attention.{name}.weight"].T).view(*tokens.shape, count, dim)
            for name, count in (("wq", heads), ("wk", kv_heads), ("wv", kv_heads))
        )
        q, k = turned(q), turned(k)
        k, v = (part.repeat_interleave(heads // kv_heads, dim=2) for part in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(dim) + mask
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        x = x + mixed @ weights[lead + "attention.wo.weight"].T
        h = norm(x, lead + "ffn_norm.weight")
        gate = torch.nn.functional.silu(h @ weights[lead + "feed_forward.w1.weight"].T)
        x = x + (gate * (h @ weights[lead + "feed_forward.w3.weight"].T)) @ weights[lead + "feed_forward.w2.weight"].T
    head = weights.get("output.weight", weights["tok_embeddings.weight"])
    return norm(x, "norm.weight") @ head.T


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        output: torch.Tensor = model(TOKENS).logits
    return output


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 1": ({"kv_heads": 8}, {"n_kv_heads": None}),
    "grouped heads": ({"kv_heads": 2}, {}),
    "Llama 3": ({"kv_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}),
    "Llama 3.2": (
        {"kv_heads": 2, "rope_parameters": {**SCALED, "rope_theta": 5e5}, "tie_word_embeddings": True},
        {"rope_theta": 5e5, "use_scaled_rope": True},
    ),
}
"""Settings of transformers' model, and what Meta's params.json says of the same."""


@pytest.mark.parametrize("sequential", [True, False], ids=["sequential", "standard"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits(tmp_path: Path, shape: str, ranks: int, sequential: bool) -> None:
    settings, says = SHAPES[shape]
    plain = tiny_llama(dtype=torch.float32, **settings)
    source = write_meta(tmp_path, plain, ranks, 0 if "3" in shape else 1, **says)
    params = json.loads((source / "params.json").read_text())
    params.setdefault("n_kv_heads", params["n_heads"])
    if params.get("use_scaled_rope"):
        params["rope_scaling_factor"] = 32.0
    computed = published(ranks_of_model(plain)[0], params, TOKENS)
    loaded = rabbitllm.AutoModel.from_pretrained(source, device="cpu", sequential_shard_processing=sequential)
    actual = logits(loaded)
    assert torch.equal(actual, logits(plain))
    torch.testing.assert_close(actual, computed, rtol=1e-4, atol=1e-4)
    swapped = {**ranks_of_model(plain)[0], "layers.0.attention.wq.weight": plain.state_dict()[QUERY]}
    assert (published(swapped, params, TOKENS) - computed).abs().max() > 0.01  # the order of rows does show
    assert not loaded.unused_tensors


QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_compressed_logits_equal_those_of_safetensors(tmp_path: Path, compression: str) -> None:
    plain = tiny_llama(kv_heads=4, heads=8, hidden=128, intermediate=256)
    ways = write_as_transformers(tmp_path / "hf", plain), write_meta(tmp_path / "meta", plain, 4, 1)
    of_safetensors, of_meta = (
        logits(rabbitllm.AutoModel.from_pretrained(way, device="cpu", compression=compression)) for way in ways
    )
    assert torch.equal(of_safetensors, of_meta)


def test_repository_and_then_its_split_directory(
    tmp_path: Path, hub_environment: HubEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    plain = tiny_llama(kv_heads=2, vocabulary=640, dtype=torch.float32, rope_parameters=rope)
    write_meta(tmp_path / "hub" / "acme/llama", plain, 2, tokenizer=tiktoken_file(), rope_theta=5e5)
    first = rabbitllm.AutoModel.from_pretrained("acme/llama", device="cpu", sequential_shard_processing=True)
    assert torch.equal(logits(first), logits(plain))
    directory = Path(first.config.name_or_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    alone = rabbitllm.AutoModel.from_pretrained(directory, device="cpu")
    assert torch.equal(logits(alone), logits(plain))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
    assert tokenizer("the end").input_ids == alone.tokenizer("the end").input_ids
    assert tokenizer.decode(tokenizer("the end").input_ids, skip_special_tokens=True) == "the end"
    assert alone.generation_config.eos_token_id == [first.config.bos_token_id + offset for offset in (1, 9)]
