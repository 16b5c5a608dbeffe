"""Splits at a compression of blocks: transformers' bits with the numbers that the blocks stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.models.convert import convert
from rabbitllm.quant.schemes import BLOCKS
from rabbitllm.store.layer_store import LayerStore
from tests.engine.test_fake_gpu import run_on
from tests.support.builders import build_checkpoint, reference_logits
from tests.support.fake_gpu import FakeGpu
from tests.support.rounding import assert_as_near, exact_logits
from tests.support.tiny_models import ALL, INPUT, assert_same, load, run, split

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 320}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3_moe": {**SIZES, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_local_experts": 8},
    "phi3": SIZES,
}


@pytest.mark.parametrize(
    ("family", "compression", "dtype"),
    [
        ("llama", "q4_k_m", torch.bfloat16),
        ("qwen3_moe", "q4_k", torch.float32),
        ("gpt_oss", "q6_k", torch.bfloat16),
        pytest.param("phi3", "q5_k_m", torch.bfloat16, marks=pytest.mark.long),
        *(pytest.param("llama", name, torch.float32, marks=pytest.mark.long) for name in BLOCKS),
    ],
)
def test_every_budget_has_the_bits_of_the_dequantized_model(
    tmp_path: Path, family: str, compression: str, dtype: torch.dtype
) -> None:
    folder = build_checkpoint(tmp_path / "model", family, dtype=dtype, shards=3, **FAMILIES[family])
    directory = split(folder, compression)
    kinds = {t.quantized.scheme for t in LayerStore(directory).tensors.values() if t.quantized}
    assert kinds
    assert kinds <= set(BLOCKS.values()) | {"Q5_1", "Q5_0", "IQ4_NL"}
    convert(directory, tmp_path / "plain")
    expected = reference_logits(tmp_path / "plain", INPUT, dtype)
    for budget in (ALL, 0):
        assert_same(run(load(directory, budget)), expected)
    assert_same(run_on([FakeGpu(0)], directory), expected)  # a GPU dequantizes them
    if dtype == torch.bfloat16:  # products with codes round their inputs to integers
        logits, is_routed = run(load(directory, ALL, exact=False)).logits, family != "llama"
        assert_as_near(logits, expected.logits, exact_logits(tmp_path / "plain", INPUT), routed=is_routed)
