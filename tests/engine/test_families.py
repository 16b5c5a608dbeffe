"""Whole models of every family: results equal those of transformers with the same weights, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rabbitllm import AutoModel
from rabbitllm.engine.placement import Tier
from rabbitllm.store.layer_store import LayerStore
from tests.support.builders import FAMILIES, INDEX_NAME, build_checkpoint, read_tensors, reference_logits
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_models import (
    ALL,
    INPUT,
    assert_same,
    bytes_when_made,
    dequantized,
    is_compressed,
    load,
    plain_model,
    run,
    split,
    tiers,
)


def variants() -> list[Any]:
    """Every family, tied and untied, in both dtypes; the short run has one dtype of each."""
    params = []
    for index, (name, family) in enumerate(FAMILIES.items()):
        for tied in family.ties:
            for dtype in (torch.float32, torch.bfloat16):
                short = (dtype == torch.bfloat16) == (tied == bool(index % 2))
                params.append(_variant(short, name, tied, dtype))
    return params


def compressed_variants() -> list[Any]:
    """Every variant at both compressions; the short run has each family at both, once tied and once untied."""
    params = []
    for index, (name, family) in enumerate(FAMILIES.items()):
        for tied in family.ties:
            for dtype in (torch.float32, torch.bfloat16):
                for compression in ("4bit", "8bit"):
                    one_dtype = (dtype == torch.bfloat16) == (tied == bool(index // 2 % 2))
                    one_compression = (compression == "4bit") == (tied == bool(index % 2)) or len(family.ties) == 1
                    params.append(_variant(one_dtype and one_compression, name, tied, dtype, compression))
    return params


def _variant(short: bool, family: str, tied: bool, dtype: torch.dtype, *compression: str) -> Any:
    label = "-".join((family, "tied" if tied else "untied", str(dtype).removeprefix("torch."), *compression))
    return pytest.param(family, tied, dtype, *compression, id=label, marks=() if short else pytest.mark.long)


@pytest.mark.parametrize(("family", "tied", "dtype"), variants())
def test_uncompressed_results_equal_transformers(tmp_path: Path, family: str, tied: bool, dtype: torch.dtype) -> None:
    folder = build_checkpoint(tmp_path / "model", family, tied=tied, dtype=dtype, shards=3)
    expected = reference_logits(folder, INPUT, dtype)
    directory = split(folder)

    resident = load(directory)
    assert resident.placement.is_resident
    assert_same(run(resident), expected)

    streamed = load(directory, 0)
    assert set(tiers(streamed).values()) > {Tier.STREAMED}
    assert_same(run(streamed), expected)


@pytest.mark.parametrize(("family", "tied", "dtype", "compression"), compressed_variants())
def test_compressed_results_equal_transformers_with_dequantized_weights(
    tmp_path: Path, family: str, tied: bool, dtype: torch.dtype, compression: str
) -> None:
    more: dict[str, Any] = {}
    if (tied, dtype, compression) == (True, torch.bfloat16, "8bit") and family in ("gpt_oss", "mixtral", "qwen3_moe"):
        # only with so many layers do all codes, and one unit that is made of them, take less than all units made
        more = {"num_hidden_layers": 6}
        more |= {"layer_types": ["sliding_attention", "full_attention"] * 3} if family == "gpt_oss" else {}
    folder = build_checkpoint(tmp_path / "model", family, tied=tied, dtype=dtype, shards=3, **more)
    expected = reference_logits(dequantized(folder, tmp_path / "reference", compression, dtype), INPUT, dtype)
    directory = split(folder, compression)
    stored = LayerStore(directory).tensors
    names = {name for name, tensor in read_tensors(folder).items() if is_compressed(name, tensor)}
    assert names
    assert {name for name, tensor in stored.items() if tensor.quantized} == names

    resident = load(directory)
    assert resident.placement.is_resident
    assert_same(run(resident), expected)

    quantized = load(directory, bytes_when_made(resident) - 1)
    used_tiers = set(tiers(quantized).values())
    assert Tier.PACKED in used_tiers
    assert Tier.STREAMED not in used_tiers
    assert Tier.ROWS in used_tiers
    assert_same(run(quantized), expected)

    for budget in (sum(placed.stored for placed in resident.placement.units) // 2, 0):
        streamed = load(directory, budget)
        assert Tier.STREAMED in tiers(streamed).values()
        assert_same(run(streamed), expected)


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_compressed_weights_that_a_forward_rescales(tmp_path: Path, compression: str) -> None:
    """RWKV divides matrices by powers of two when it first computes: they are dequantized, not multiplied as codes."""
    folder = build_checkpoint(tmp_path / "model", HYBRIDS["rwkv"], dtype=torch.float32, rescale_every=1)
    plain = dequantized(folder, tmp_path / "reference", compression, torch.float32)
    expected = reference_logits(plain, INPUT, torch.float32)
    resident = load(split(folder, compression), exact=False)
    assert_same(run(resident), expected)
    assert_same(run(resident), expected)


@pytest.mark.parametrize("budget", [ALL, 0])
@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
@pytest.mark.parametrize(
    ("family", "stored", "dtype"),
    [
        ("llama", torch.float32, torch.bfloat16),
        ("llama", torch.bfloat16, torch.float32),
        ("qwen3_moe", torch.float32, torch.float16),
        pytest.param("deepseek_v3", torch.bfloat16, torch.float16, marks=pytest.mark.long),
        pytest.param("gpt_oss", torch.float32, torch.bfloat16, marks=pytest.mark.long),
        pytest.param("gemma3", torch.float32, torch.float16, marks=pytest.mark.long),
    ],
)
def test_another_dtype_than_the_stored_one(
    tmp_path: Path, family: str, stored: torch.dtype, dtype: torch.dtype, compression: str | None, budget: int
) -> None:
    folder = plain = build_checkpoint(tmp_path / "model", family, dtype=stored, shards=2)
    if compression is not None:
        plain = dequantized(folder, tmp_path / "reference", compression, dtype)
    model = load(split(folder, compression), budget, dtype=str(dtype).removeprefix("torch."))
    assert model.dtype == dtype
    assert_same(run(model), reference_logits(plain, INPUT, dtype))


@pytest.mark.parametrize("compression", [None, "4bit", "8bit", "q4_k"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_float32_is_so_unless_it_is_tied(tmp_path: Path, tied: bool, compression: str | None) -> None:
    plain = folder = build_checkpoint(
        tmp_path / "model", HYBRIDS["hy_v4"], dtype=torch.bfloat16, tie_word_embeddings=tied
    )
    if compression is not None:
        plain = dequantized(folder, tmp_path / "reference", compression, torch.float32)
    expected, directory = reference_logits(plain, INPUT, torch.bfloat16), split(folder, compression)
    assert expected.logits.dtype == (torch.bfloat16 if tied else torch.float32)
    for budget in (ALL, 0):
        assert_same(run(load(directory, budget)), expected)
    assert_same(run(load(directory, 0, exact=False)), run(load(directory, exact=False)))


@pytest.mark.parametrize("compression", ["4bit", "8bit", "q4_k"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("hy_v4", torch.float16), ("deepseek_v4", torch.bfloat16), ("t5", torch.float16)],
)
def test_matrices_that_a_class_keeps_in_float32(
    tmp_path: Path, family: str, dtype: torch.dtype, compression: str
) -> None:
    """They are rounded neither by a pass nor in a copy."""
    chosen = HYBRIDS.get(family) or FAMILIES[family]
    width = {"d_model" if family == "t5" else "hidden_size": 128}
    folder = build_checkpoint(tmp_path / "model", chosen, tied=chosen.ties[0], dtype=dtype, **width)
    plain = dequantized(folder, tmp_path / "reference", compression, torch.float32)
    expected, directory = reference_logits(plain, INPUT, dtype), split(folder, compression)
    for budget in (ALL, 0):
        model = load(directory, budget)
        assert any(p.dtype == torch.float32 and p.numel() >= 4096 for p in model.parameters())
        assert_same(run(model), expected)
    model.save_pretrained(tmp_path / "copy")
    assert_same(reference_logits(tmp_path / "copy", INPUT, dtype), expected)


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_large_router_is_not_compressed(tmp_path: Path, compression: str) -> None:
    folder = build_checkpoint(tmp_path / "model", "qwen3_moe", num_experts=64, num_hidden_layers=2, shards=2)
    router = "model.layers.1.mlp.gate.weight"
    assert read_tensors(folder)[router].numel() == 4096
    directory = split(folder, compression)
    stored = LayerStore(directory).tensors
    assert stored[router].quantized is None
    assert stored["model.layers.1.mlp.experts.63.up_proj.weight"].quantized is not None
    plain = dequantized(folder, tmp_path / "reference", compression, torch.float32)
    assert_same(run(load(directory, 0)), reference_logits(plain, INPUT, torch.float32))


@pytest.mark.parametrize("budget", [ALL, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_odd_sizes(tmp_path: Path, dtype: torch.dtype, budget: int) -> None:
    """No tensor but the first of a file would lie on a multiple of 16 bytes by itself."""
    folder = build_checkpoint(
        tmp_path / "model",
        "qwen2",
        dtype=dtype,
        shards=2,
        vocab_size=275,
        hidden_size=42,
        intermediate_size=77,
        num_attention_heads=3,
        num_key_value_heads=1,
    )
    directory = split(folder)
    offsets = [part.offset for tensor in LayerStore(directory).tensors.values() for part in tensor.parts]
    assert any(offset % 16 for offset in offsets)
    assert_same(run(load(directory, budget)), reference_logits(folder, INPUT, dtype))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementation(tmp_path: Path, implementation: str) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    model = load(split(folder), 0, attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    plain = plain_model(folder, attn_implementation=implementation)
    with torch.inference_mode():
        assert torch.equal(model(INPUT).logits, plain(INPUT).logits)


def test_long_prompts_in_sliding_windows(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "gemma3")
    ids = torch.randint(3, 270, (2, 60), generator=torch.Generator().manual_seed(0))
    assert_same(run(load(split(folder), 0), ids), reference_logits(folder, ids, torch.float32))


@pytest.mark.parametrize("pattern", ["model-{i}.safetensors", "model-{i}0.safetensors"])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tensor_of_two_shards_that_the_index_lacks(tmp_path: Path, name: str, pattern: str) -> None:
    """transformers takes it from the last file, by the order of letters."""
    folder = build_checkpoint(tmp_path / "model", "llama", shards=2)
    first, second = sorted(folder.glob("model-*"))
    first = first.rename(folder / pattern.format(i=1))
    second = second.rename(folder / "model-2.safetensors")
    tensors = {path: load_file(path) for path in (first, second)}
    owner, other = (first, second) if name in tensors[first] else (second, first)
    tensors[other][name] = tensors[owner][name].flip(0).contiguous()
    save_file(tensors[other], other, metadata={"format": "pt"})
    weight_map = {tensor: path.name for path in tensors for tensor in tensors[path] if tensor != name}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    expected = run(plain_model(folder))
    assert_same(run(AutoModel.from_pretrained(str(folder), device="cpu", split=False)), expected)
    assert_same(run(load(split(folder))), expected)
