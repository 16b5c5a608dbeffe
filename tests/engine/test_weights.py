"""Stored tensors and parameters: missing, misshapen, tied, unused; renamed and ordered as in transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from rabbitllm.engine import skeleton
from rabbitllm.engine._weights import KeyRenaming, map_weights
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.store.layer_store import LayerStore
from tests.support.builders import FAMILIES, SINGLE_NAME, build_checkpoint, read_tensors, reference_logits, reshard
from tests.support.tiny_models import ALL, INPUT, assert_same, load, run, split

Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], Tensors | None], shards: int = 1) -> Path:
    """Change the tensors of a checkpoint."""
    tensors = read_tensors(folder)
    tensors = change(tensors) or tensors
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    if shards > 1:
        names = list(read_tensors(folder))
        reshard(folder, lambda name: names.index(name) * shards // len(names))
    return folder


def refused(folder: Path) -> IncompleteSplitError:
    with pytest.raises(IncompleteSplitError) as caught:
        load(split(folder))
    return caught.value


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_missing_tensors_are_named(tmp_path: Path, compression: str | None) -> None:
    gone = ["model.layers.1.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight", "model.norm.weight"]
    folder = build_checkpoint(tmp_path, "llama")
    rewrite(folder, lambda tensors: {name: tensors[name] for name in tensors if name not in gone})
    directory = split(folder, compression)
    with pytest.raises(IncompleteSplitError) as caught:
        load(directory)
    assert caught.value.problem == (
        f"{directory} lacks 3 of the 30 tensors that LlamaForCausalLM needs: {', '.join(gone)}."
    )
    assert "Split the checkpoint again, into another folder" in caught.value.remedy
    assert "the only copy" in caught.value.remedy


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "llama")
    rewrite(folder, lambda tensors: {name: tensors[name] for name in tensors if ".layers.2." not in name})
    error = refused(folder)
    assert "lacks 9 of the 30" in error.problem
    assert error.problem.count("model.layers.2.") == 8
    assert error.problem.endswith(" and 1 more.")


def test_missing_head_is_not_a_tie(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "llama", tied=False)
    rewrite(folder, lambda tensors: {name: tensors[name] for name in tensors if name != "lm_head.weight"})
    assert "lacks 1 of the 30 tensors that LlamaForCausalLM needs: lm_head.weight." in refused(folder).problem


def test_missing_expert(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "qwen3_moe")
    gone = "model.layers.1.mlp.experts.2.down_proj.weight"
    rewrite(folder, lambda tensors: {name: tensors[name] for name in tensors if name != gone})
    error = refused(folder)
    assert "model.layers.1.mlp.experts.down_proj has shape (3, 64, 80)" in error.problem
    assert "needs (4, 64, 80)" in error.problem


def test_expert_without_its_other_half(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "qwen3_moe")
    gone = "model.layers.1.mlp.experts.2.up_proj.weight"
    rewrite(folder, lambda tensors: {name: tensors[name] for name in tensors if name != gone})
    assert "model.layers.1.mlp.experts.gate_up_proj" in refused(folder).problem


def test_shape_differs_from_the_config(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "llama")
    content = json.loads((folder / "config.json").read_text())
    content["intermediate_size"] = 192
    (folder / "config.json").write_text(json.dumps(content))
    error = refused(folder)
    assert "model.layers.0.mlp.down_proj.weight has shape (64, 128)" in error.problem
    assert "needs (64, 192)" in error.problem
    assert "belong to different models" in error.remedy


@pytest.mark.parametrize("budget", [ALL, 0])
def test_tie_stored_under_the_name_of_the_head(tmp_path: Path, budget: int) -> None:
    folder = build_checkpoint(tmp_path, "llama", tied=True)
    expected = reference_logits(folder, INPUT, torch.float32)
    assert "lm_head.weight" not in read_tensors(folder)

    def rename(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    rewrite(folder, rename, shards=2)
    assert_same(run(load(split(folder), budget)), expected)


@pytest.mark.parametrize("budget", [ALL, 0])
def test_tie_stored_on_both_sides(tmp_path: Path, budget: int) -> None:
    folder = build_checkpoint(tmp_path, "llama", tied=True)
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    expected = reference_logits(folder, INPUT, torch.float32)
    assert_same(run(load(split(folder), budget)), expected)


@pytest.mark.parametrize("budget", [ALL, 0])
def test_tie_with_different_weights(tmp_path: Path, budget: int) -> None:
    """Published by mistake, or fine-tuned apart; the result is that of transformers."""
    folder = build_checkpoint(tmp_path, "llama", tied=True)
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 0.1})
    expected = reference_logits(folder, INPUT, torch.float32)
    assert_same(run(load(split(folder), budget)), expected)


def test_resident_tied_units_share_their_memory(tmp_path: Path) -> None:
    model = load(split(build_checkpoint(tmp_path, "llama", tied=True)))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    compressed = load(split(build_checkpoint(tmp_path / "other", "llama", tied=True), "4bit"))
    assert compressed.lm_head.weight.data_ptr() == compressed.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_unused_tensors_are_split_and_listed_but_never_read(tmp_path: Path, compression: str | None) -> None:
    folder = build_checkpoint(tmp_path, "deepseek_v3", shards=3)
    directory = split(folder, compression)
    expected = run(load(directory, 0))
    shutil.rmtree(directory)
    extra = {
        "mtp.layers.0.eh_proj.weight": torch.randn(64, 128),
        "mtp.norm.weight": torch.randn(64),
        "vision_tower.patch.weight": torch.randn(64, 64),
    }
    rewrite(folder, lambda tensors: tensors | extra, shards=4)
    model = load(split(folder, compression), 0)
    assert sorted(model.unused_tensors) == sorted(extra)
    store = LayerStore(directory)
    assert store.tensors.keys() >= extra.keys()
    if compression is None:
        part = store.tensors["mtp.norm.weight"].parts[0]
        assert torch.equal(store.mapped(part.file).tensor(part), extra["mtp.norm.weight"])
    files = {store.tensors[name].parts[0].file for name in extra}
    for file in files:
        (directory / file).unlink()
    assert_same(run(model), expected)


def test_unused_tensors_among_used_ones_are_not_read(tmp_path: Path) -> None:
    """They lie in the same layer file, so the spans that are read must leave them out."""
    folder = build_checkpoint(tmp_path, "llama")
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors | {name: torch.full((4096,), 7.0)})
    directory = split(folder)
    model = load(directory, 0)
    assert model.unused_tensors == (name,)
    store = LayerStore(directory)
    weights = map_weights(
        skeleton.build_skeleton(directory, skeleton.read_config(directory), torch.float32, None),
        store.tensors,
        str(directory),
    )
    assert weights.unused == (name,)
    (part,) = store.tensors[name].parts
    source = model.streamer.executors["cpu"].loader._units["model.layers.1"]
    covered = [(span.offset, span.offset + span.nbytes) for span in source.spans if span.file == part.file]
    assert len(covered) == 2
    assert all(end <= part.offset or begin >= part.offset + part.nbytes for begin, end in covered)
    assert source.buffer_bytes < sum(end - begin for begin, end in covered) + 4096
    assert_same(run(model), reference_logits(folder, INPUT, torch.float32))


def test_old_names_are_renamed_as_in_transformers(tmp_path: Path) -> None:
    """Mixtral's published names differ from its modules' names."""
    folder = build_checkpoint(tmp_path, "mixtral")
    assert any("block_sparse_moe" in name for name in read_tensors(folder))
    directory = split(folder)
    store = LayerStore(directory)
    model: Any = skeleton.build_skeleton(directory, skeleton.read_config(directory), torch.float32, None)
    weights = map_weights(model, store.tensors, str(directory))
    made = weights.recipe("model.layers.0.mlp.experts.gate_up_proj")
    assert made is not None
    fused, _ = made
    assert fused.converter is not None
    assert sorted(name for _, name in fused.sources) == [
        f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight"
        for expert in range(4)
        for part in ("w1", "w3")
    ]
    assert not weights.unused
    assert not weights.absent


def test_experts_are_fused_in_their_numerical_order(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "qwen3_moe", num_experts=12)
    model = load(split(folder))
    tensors = read_tensors(folder)
    fused = model.model.layers[1].mlp.experts.down_proj
    for expert in range(12):
        assert torch.equal(fused[expert], tensors[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"])


def test_optional_weight_gets_its_initial_value(tmp_path: Path) -> None:
    """Allowed by the class; transformers gives it its initial value too."""
    folder = build_checkpoint(tmp_path, "llama")
    directory = split(folder)
    store = LayerStore(directory)
    model: Any = skeleton.build_skeleton(directory, skeleton.read_config(directory), torch.float32, None)
    model._keys_to_ignore_on_load_missing = [r"layers\.1\.input_layernorm"]
    stored = {name: t for name, t in store.tensors.items() if name != "model.layers.1.input_layernorm.weight"}
    weights = map_weights(model, stored, str(directory))
    assert weights.absent == {"model.layers.1.input_layernorm.weight"}
    assert weights.recipe("model.layers.1.input_layernorm.weight") is None
    skeleton.materialise_buffers(model, lambda path: torch.device("cpu"), weights.absent)
    assert torch.equal(model.model.layers[1].input_layernorm.weight, torch.ones(64))
    assert model.model.layers[0].input_layernorm.weight.is_meta


def renamed_by_transformers(name: str, renamings: list[Any], converters: list[Any], prefix: str, expected: Any) -> Any:
    renamed = rename_source_key(name, renamings, converters, prefix, expected)
    return renamed if renamed[0] in expected else rename_source_key(name, [], [], prefix, expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "jamba", "deepseek_v3", "gpt_oss", "llama"])
def test_every_key_has_the_target_of_transformers(tmp_path: Path, family: str) -> None:
    folder = build_checkpoint(tmp_path / "model", family, tokenizer=False)
    model: Any = transformers.AutoModelForCausalLM.from_config(FAMILIES[family].config(tied=False))
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, expected = model.base_model_prefix, model.state_dict()
    names = sorted(read_tensors(folder), key=dot_natural_key)
    renamed = KeyRenaming(renamings, converters, prefix, expected)
    targets = {name: renamed(name) for name in names}
    assert targets == {name: renamed_by_transformers(name, renamings, converters, prefix, expected) for name in names}
    assert {target for target, _ in targets.values()} == set(expected)


def test_experts_with_their_own_targets() -> None:
    renaming = WeightRenaming(r"\.experts\.(\d+)\.w1\.", r".experts.\1.gate_proj.")
    expected = {f"layers.0.experts.{expert}.gate_proj.weight": torch.empty(0) for expert in range(12)}
    renamed = KeyRenaming([renaming], [], "model", expected)
    for expert in range(12):
        assert renamed(f"layers.0.experts.{expert}.w1.weight") == (f"layers.0.experts.{expert}.gate_proj.weight", None)
