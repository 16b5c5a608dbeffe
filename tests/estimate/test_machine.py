"""Costs of a token other than its products, measured on the model's own sizes and its own skeleton."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.weight_tensors import AbsentWeight
from rabbitllm.estimate import machine, module_calls
from rabbitllm.estimate.machine import LayerSizes, _weightless, overhead, sizes_of
from rabbitllm.estimate.module_calls import _in_small, binding_seconds
from tests.estimate.test_cost_model import drawn

SIZES = LayerSizes(100, 64, 128, 4, 2, 16)


def test_sizes_of_a_config() -> None:
    config = PretrainedConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2
    )
    assert sizes_of(config) == SIZES


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"hidden_size": 96, "num_attention_heads": [4, 8], "intermediate_size": [100, 200]},
        {"hidden_size": 10, "num_attention_heads": 3, "num_key_value_heads": 2},
        {"hidden_size": 64, "num_attention_heads": 64},
        {"vocab_size": None, "head_dim": 7, "intermediate_size": "large"},
    ],
)
def test_a_model_is_run_whatever_a_config_says(said: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TOKENS", 4)
    found = overhead(sizes_of(PretrainedConfig(**said)), torch.bfloat16, CpuDevice())
    assert found.a_pass >= 0
    assert found.a_module >= 0
    assert found.a_pass + found.a_module > 0


def test_the_small_model_has_no_matrices() -> None:
    model = _weightless(2, SIZES, torch.bfloat16, CpuDevice())
    assert all(parameter.dim() == 1 and not parameter.is_meta for parameter in model.parameters())
    logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert (logits.shape, logits.dtype) == ((1, 3, 100), torch.bfloat16)


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_binding_is_what_a_pass_does_and_leaves_nothing(tmp_path: Path, family: str, compression: str | None) -> None:
    found = drawn(tmp_path / "m", family, compression, room=0)
    unit = next(name for name in found.sources if ".layers.1" in name)
    before = {entry.target: entry.shape for entry in found.sources[unit].entries}
    assert binding_seconds(found, unit, CpuDevice()) > 0
    after = {entry.target: entry.table[entry.leaf] for entry in found.sources[unit].entries}
    assert {name: tensor.shape for name, tensor in after.items()} == before
    assert all(isinstance(tensor, AbsentWeight) for tensor in after.values())


def test_of_many_experts_a_few_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = drawn(tmp_path / "m", "qwen3_moe", room=0)
    source = next(source for name, source in found.sources.items() if ".layers.1" in name)
    assert [times for _, times in _in_small(source)] == [1] * len(source.jobs)
    monkeypatch.setattr(module_calls, "MADE_BYTES", 25_000)
    fused = [(job, times) for job, times in _in_small(source) if job.recipe.converter is not None]
    assert {times for _, times in fused} <= {2, 4}
    for job, times in fused:
        whole = next(one for one in source.jobs if one.recipe.key == job.recipe.key)
        assert len(job.recipe.sources) * times == len(whole.recipe.sources)
    assert binding_seconds(found, source.unit.name, CpuDevice()) > 0
