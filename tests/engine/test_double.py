"""4bit-double in the engine: the bits of weights that bitsandbytes dequantizes, at every tier."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.engine.placement import Tier
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.quant import _vectors
from rabbitllm.store.layer_store import LayerStore
from tests.engine.test_fake_gpu import load_on
from tests.support.builders import build_checkpoint, reference_logits
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.rounding import assert_as_near, exact_logits
from tests.support.tiny_models import (
    ALL,
    INPUT,
    assert_same,
    budget_that_keeps,
    bytes_when_made,
    dequantized,
    load,
    run,
    split,
    tiers,
)

DOUBLE = "4bit-double"
LARGE = {"hidden_size": 192, "intermediate_size": 256}
"""Matrices of 32,768 elements and more, except the key and value projections, which are then at 4bit."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LARGE,
    "qwen3_moe": {**LARGE, "head_dim": 48, "moe_intermediate_size": 192, "num_experts": 24},
    "gpt_oss": {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_local_experts": 24},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A split, and transformers' results with its dequantized weights."""

    folder: Path
    directory: Path
    expected: Any


def case(root: Path, family: str, dtype: torch.dtype, **more: Any) -> Case:
    folder = build_checkpoint(root / "model", family, dtype=dtype, shards=3, **{**FAMILIES[family], **more})
    expected = reference_logits(dequantized(folder, root / "reference", DOUBLE, dtype), INPUT, dtype)
    return Case(folder, split(folder, DOUBLE), expected)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("qwen3_moe", torch.float32),
        ("gpt_oss", torch.bfloat16),
        pytest.param("llama", torch.float32, marks=pytest.mark.long),
        pytest.param("qwen3_moe", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("gpt_oss", torch.float32, marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_every_tier_has_the_bits_of_bitsandbytes(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    built = case(tmp_path, family, dtype)
    kinds = {t.quantized.scheme for t in LayerStore(built.directory).tensors.values() if t.quantized}
    assert DOUBLE in kinds
    resident = load(built.directory)
    assert_same(run(resident), built.expected)
    seen = set(tiers(resident).values())
    whole = bytes_when_made(resident)
    for budget in (whole - 1, whole // 3, 0):
        model = load(built.directory, budget)
        assert_same(run(model), built.expected)
        seen |= set(tiers(model).values())
    assert {Tier.RESIDENT, Tier.STREAMED} <= seen
    assert Tier.ROWS in seen or family == "gpt_oss"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("exact", [True, False])
def test_streamed_experts(tmp_path: Path, family: str, exact: bool) -> None:
    """In a pool that keeps some of them, whose slots are filled again and again; multiplied from their codes they have
    the bits of those that stay."""
    built = case(tmp_path, family, torch.bfloat16)
    model = load(built.directory, budget_that_keeps(built.directory, 0.25, exact=exact), exact=exact)
    assert Tier.ROUTED in tiers(model).values()
    expected = built.expected if exact else run(load(built.directory, exact=False))
    for _ in range(2):
        assert_same(run(model), expected)


def test_products_from_codes(tmp_path: Path) -> None:
    """The kernels are given the scales as float32, made once where a layer stays. What they multiply are the weights
    that the codes stand for, which bfloat16 has not rounded."""
    built = case(tmp_path, "llama", torch.bfloat16)
    results, exact = [], exact_logits(built.folder, INPUT, DOUBLE)
    for budget in (ALL, 0):
        model = load(built.directory, budget, exact=False)
        results.append(run(model))
        assert_as_near(results[-1].logits, built.expected.logits, exact, scheme="4bit")
    assert torch.equal(results[0].logits, results[1].logits)
    if not _vectors.lanes():
        return  # codes are dequantized for each use
    resident = load(built.directory, exact=False)
    weight = resident.model.layers[0].self_attn.q_proj.weight
    assert isinstance(weight, QuantizedWeight)
    assert (weight.matrix.form.scheme, weight.matrix.absmax.dtype) == ("4bit", torch.float32)


@pytest.mark.skipif(not _vectors.lanes(), reason="codes are dequantized for each use")
def test_dequantized_scales_count_as_memory(tmp_path: Path) -> None:
    """Resident weights take 4.5 bits, stored ones 4.13."""
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, **LARGE)
    plain, double = (load(split(folder, how), exact=False) for how in ("4bit", DOUBLE))
    stored = [sum(placed.stored for placed in model.placement.units) for model in (plain, double)]
    assert stored[1] < stored[0]
    scale_bytes = sum(
        tensor.parts[1].elements * 4
        for name, tensor in LayerStore(Path(double.name_or_path)).tensors.items()
        if tensor.quantized is not None and tensor.quantized.scheme == DOUBLE and "embed_tokens" not in name
    )
    less = sum(p.stored - d.stored for p, d in zip(plain.placement.units, double.placement.units, strict=True))
    less -= plain.placement.units[0].stored - double.placement.units[0].stored  # the embedding is made, as ever
    assert plain.get_memory_footprint() - double.get_memory_footprint() == less - scale_bytes
    least = stored[1] + scale_bytes
    assert load(split(folder, DOUBLE), least + 100_000, exact=False).placement.is_resident
    assert not load(split(folder, DOUBLE), stored[1] + 1, exact=False).placement.is_resident


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.long
def test_devices_with_memory_of_their_own(tmp_path: Path, family: str) -> None:
    directory = split(build_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16, **FAMILIES[family]), DOUBLE)
    on_cpu = load(directory)
    expected = run(on_cpu)
    for budget, host in ((ALL, 0), (bytes_when_made(on_cpu) - 1, 0), (0, 0), (0, ALL)):
        gpu = FakeGpu(0)
        with watched():
            model = load_on([gpu], directory, budget, host)
            result = run(model)
        assert_same(result, expected)
