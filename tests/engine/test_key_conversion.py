"""Renamed and ordered as transformers does it, key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from rabbitllm.engine.weights import KeyRenaming, in_load_order
from tests.support.builders import FAMILIES, build_checkpoint, read_tensors

PIECES = st.sampled_from(["model", "layers", "experts", "0", "1", "10", "2", "shard_2", "shard_11", "w1", "", "01"])


@given(st.lists(st.lists(PIECES, min_size=1, max_size=5).map(".".join)))
def test_keys_are_taken_in_the_order_of_transformers(names: list[str]) -> None:
    assert in_load_order(names) == sorted(names, key=dot_natural_key)


def renamed_by_transformers(name: str, renamings: list[Any], converters: list[Any], prefix: str, expected: Any) -> Any:
    found = rename_source_key(name, renamings, converters, prefix, expected)
    return found if found[0] in expected else rename_source_key(name, [], [], prefix, expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "jamba", "deepseek_v3", "gpt_oss", "llama"])
def test_every_key_of_a_model_goes_where_transformers_puts_it(tmp_path: Path, family: str) -> None:
    folder = build_checkpoint(tmp_path / "model", family, tokenizer=False)
    model: Any = transformers.AutoModelForCausalLM.from_config(FAMILIES[family].config(tied=False))
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, expected = model.base_model_prefix, model.state_dict()
    names = in_load_order(read_tensors(folder))
    renamed = KeyRenaming(renamings, converters, prefix, expected)
    found = {name: renamed(name) for name in names}
    assert found == {name: renamed_by_transformers(name, renamings, converters, prefix, expected) for name in names}
    assert {target for target, _ in found.values()} == set(expected)


def test_experts_that_go_to_places_of_their_own_each_do() -> None:
    renaming = WeightRenaming(r"\.experts\.(\d+)\.w1\.", r".experts.\1.gate_proj.")
    expected = {f"layers.0.experts.{number}.gate_proj.weight": torch.empty(0) for number in range(12)}
    renamed = KeyRenaming([renaming], [], "model", expected)
    for number in range(12):
        assert renamed(f"layers.0.experts.{number}.w1.weight") == (f"layers.0.experts.{number}.gate_proj.weight", None)
