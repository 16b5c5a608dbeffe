"""The built checkpoints as transformers, tokenizers and safetensors see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from tests.support import builders
from tests.support.builders import (
    FAMILIES,
    INDEX_NAME,
    SINGLE_NAME,
    SLIDING,
    build_checkpoint,
    make_tokenizer,
    read_tensors,
    reference_logits,
    reshard,
)
from tests.support.hub_fixtures import HubEnvironment
from tests.support.hybrid_families import HYBRIDS
from tests.support.local_hub import LocalHub
from tests.support.one_thread import one_thread as one_thread

INPUT = torch.tensor([[1, 40, 81, 7, 200, 33, 160, 5, 92, 11, 64]])
REQUIRED = (
    "llama mistral qwen2 qwen3 gemma2 gemma3 phi3 gpt_oss qwen3_moe mixtral deepseek_v3 qwen3_next opt "
    "gpt2 bloom falcon mamba2 jamba t5"
)
VARIANTS = [(name, tied) for name, family in FAMILIES.items() for tied in family.ties]


def layout(folder: Path) -> dict[str, list[str]]:
    """The tensor names of each weight file, from the files themselves."""
    names: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            names[path.name] = list(opened.keys())
    return names


def test_every_required_family_is_there() -> None:
    assert set(FAMILIES) >= set(REQUIRED.split())


@pytest.mark.parametrize(("name", "tied"), VARIANTS)
def test_family_loads_and_generates(tmp_path: Path, name: str, tied: bool) -> None:
    folder = build_checkpoint(tmp_path / "model", name, tied=tied, shards=3, tokenizer=False)
    model, info = FAMILIES[name].auto_class.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings == tied
    shared = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert shared == tied
    tokens = model.generate(INPUT, max_new_tokens=3, do_sample=False)
    assert tokens.shape[1] > (1 if FAMILIES[name].encoder_decoder else INPUT.shape[1])
    check_weights(read_tensors(folder))
    files = layout(folder)
    assert len(files) == 3
    assert all(files.values())


def check_weights(tensors: dict[str, torch.Tensor]) -> None:
    """Large and small matrices, and nothing constant, which a test could take for something else."""
    sizes = [tensor.numel() for tensor in tensors.values() if tensor.ndim > 1]
    assert sum(size > 4096 for size in sizes) >= 3
    assert any(size <= 4096 for size in sizes)
    assert [name for name, tensor in tensors.items() if tensor.numel() > 1 and tensor.float().std() == 0] == []
    assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.parametrize("shards", [1, 2, 7, 30])
def test_number_of_shards_is_exact(tmp_path: Path, shards: int) -> None:
    folder = build_checkpoint(tmp_path, "llama", shards=shards, tokenizer=False)
    files = layout(folder)
    assert len(files) == shards
    if shards == 1:
        assert list(files) == [SINGLE_NAME]
        assert not (folder / INDEX_NAME).exists()
        return
    assert list(files) == [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    index = json.loads((folder / INDEX_NAME).read_text())
    assert index["weight_map"] == {name: file for file, names in files.items() for name in names}
    total = sum(tensor.numel() * tensor.element_size() for tensor in read_tensors(folder).values())
    assert index["metadata"]["total_size"] == total


def test_more_shards_than_tensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="30 tensors cannot fill 31 shards"):
        build_checkpoint(tmp_path, "llama", shards=31, tokenizer=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_rounds_the_same_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    exact = read_tensors(build_checkpoint(tmp_path / "exact", "qwen2", tokenizer=False))
    rounded = read_tensors(build_checkpoint(tmp_path / "rounded", "qwen2", dtype=dtype, tokenizer=False))
    assert exact.keys() == rounded.keys()
    assert all(torch.equal(exact[name].to(dtype), rounded[name]) for name in exact)
    assert {tensor.dtype for tensor in rounded.values()} == {dtype}
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert all(tensor.shape[-1] * tensor.element_size() % 16 == 0 for tensor in rounded.values())


def test_what_transformers_holds_in_float32_is_stored_so(tmp_path: Path) -> None:
    tensors = read_tensors(build_checkpoint(tmp_path, "deepseek_v3", dtype=torch.bfloat16, tokenizer=False))
    in_float32 = {name.rpartition(".")[2] for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert in_float32 == {"e_score_correction_bias"}


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """What is wanted is built, not copied from an earlier test's."""
    monkeypatch.setattr(builders, "_built", built := dict[str, Path]())
    return built


def test_seed_decides_the_weights(tmp_path: Path, nothing_built: dict[str, Path]) -> None:
    tensors = []
    for run, seed in enumerate((0, 0, 1)):
        tensors.append(read_tensors(build_checkpoint(tmp_path / str(run), "llama", seed=seed, tokenizer=False)))
        nothing_built.clear()
    first, again, other = tensors
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.norm.weight"], other["model.norm.weight"])
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_changes_of_a_checkpoint_stay_in_it(tmp_path: Path) -> None:
    first = build_checkpoint(tmp_path / "first", "llama")
    whole = {path.name: path.read_bytes() for path in first.iterdir()}
    for path in first.iterdir():
        path.write_bytes(b"")
    again = build_checkpoint(tmp_path / "again", "llama")
    assert {path.name: path.read_bytes() for path in again.iterdir()} == whole


def test_building_leaves_the_random_state_alone(tmp_path: Path, nothing_built: dict[str, Path]) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_checkpoint(tmp_path, "llama", tokenizer=False)
    assert torch.equal(torch.rand(3), expected)


def test_experts_are_stored_one_by_one(tmp_path: Path) -> None:
    names = read_tensors(build_checkpoint(tmp_path, "qwen3_moe", tokenizer=False))
    assert {f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(4)} <= names.keys()


def test_settings_override_the_family(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "llama", tokenizer=False, num_hidden_layers=11)
    layers = [name.split(".")[2] for name in read_tensors(folder) if name.endswith("q_proj.weight")]
    assert layers == [str(layer) for layer in range(11)]


def test_impossible_tie(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="t5 cannot be built with tied=False"):
        build_checkpoint(tmp_path, "t5", tied=False)


# Other layouts


def test_reshard_one_tensor_each_and_back(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "qwen3_moe", tokenizer=False, num_hidden_layers=6)
    before = read_tensors(folder)
    names = list(before)
    assert len(names) > 120
    files = reshard(folder, [[name] for name in names])
    assert len(files) == len(names)
    assert layout(folder) == {file.name: [name] for file, name in zip(files, names, strict=True)}
    assert FAMILIES["qwen3_moe"].auto_class.from_pretrained(folder).num_parameters() > 0
    assert [path.name for path in reshard(folder, lambda _: 0, "weights-{i}.safetensors")] == ["weights-1.safetensors"]
    after = read_tensors(folder)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_reshard_spreads_one_layer_over_three_shards(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "llama", tokenizer=False)
    shard_of_part = {"self_attn": 0, "mlp": 1}
    reshard(folder, lambda name: shard_of_part.get((name.split(".") + [""] * 4)[3], 2))
    holding = [file for file, names in layout(folder).items() if any(".layers.1." in name for name in names)]
    assert len(holding) == 3
    assert reference_logits(folder, INPUT, torch.float32, new_tokens=1).logits.isfinite().all()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (lambda name: 0 if "norm" in name else 2, "empty"),
        ([["lm_head.weight"]], "exactly once"),
        ([["lm_head.weight", "lm_head.weight"]], "exactly once"),
    ],
)
def test_reshard_refuses_and_changes_nothing(tmp_path: Path, assignment: Any, message: str) -> None:
    folder = build_checkpoint(tmp_path, "llama", tokenizer=False)
    with pytest.raises(ValueError, match=message):
        reshard(folder, assignment)
    assert list(layout(folder)) == [SINGLE_NAME]


# Tokenizer


def test_tokenizer_covers_any_text_and_the_whole_vocabulary(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "llama")
    auto: Any = transformers.AutoTokenizer
    tokenizer = auto.from_pretrained(folder)
    text = "the cat and the naïve 猫\n\t"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) == transformers.AutoConfig.from_pretrained(folder).vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.chat_template == make_tokenizer().chat_template


@pytest.mark.parametrize("name", list(FAMILIES))
def test_tokenizer_loads_for_every_family(tmp_path: Path, name: str) -> None:
    FAMILIES[name].config(FAMILIES[name].ties[0]).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    auto: Any = transformers.AutoTokenizer
    tokenizer = auto.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("the 猫")["input_ids"], skip_special_tokens=True) == "the 猫"


# Reference


def test_reference_is_what_transformers_computes(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "qwen2", dtype=torch.bfloat16, tied=True, shards=2, tokenizer=False)
    reference = reference_logits(folder, INPUT, torch.bfloat16)
    assert reference.logits.dtype == torch.bfloat16
    assert reference.logits.shape == (1, INPUT.shape[1], 272)
    assert torch.equal(reference.tokens[:, : INPUT.shape[1]], INPUT)
    assert reference.tokens[0, INPUT.shape[1]] == reference.logits[0, -1].argmax()
    assert torch.equal(reference_logits(folder, INPUT, torch.bfloat16).logits, reference.logits)


def test_reference_with_changed_weights(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "llama", tied=True, tokenizer=False)
    seen = []

    def silence_the_head(name: str, tensor: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return torch.zeros_like(tensor) if name == "model.norm.weight" else tensor

    reference = reference_logits(folder, INPUT, torch.float32, silence_the_head, new_tokens=1)
    assert sorted(seen) == sorted(read_tensors(folder))
    assert reference.logits.abs().max() == 0


def test_reference_of_an_encoder_decoder(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "t5", tied=True, tokenizer=False)
    assert reference_logits(folder, INPUT, torch.float32, new_tokens=2).logits.shape[1] == INPUT.shape[1]


def test_transformers_loads_it_from_the_local_hub(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    folder = build_checkpoint(tmp_path / "hub" / "acme" / "built", "llama", shards=3)
    model = FAMILIES["llama"].auto_class.from_pretrained("acme/built")
    assert model.num_parameters() == sum(tensor.numel() for tensor in read_tensors(folder).values())
    auto: Any = transformers.AutoTokenizer
    assert auto.from_pretrained("acme/built").bos_token_id == 1
    assert local_hub.body_bytes(".safetensors") == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert (hub_environment.cache / "models--acme--built").is_dir()


def test_a_config_that_changes_its_lists_leaves_those_of_other_families_alone() -> None:
    """Gemma 4's makes the last layer one of full attention."""
    assert HYBRIDS["gemma4_unified"].config(tied=False).layer_types[-1] == "full_attention"
    assert HYBRIDS["gpt_oss"].config(tied=False).layer_types == SLIDING["layer_types"]
    assert SLIDING["layer_types"][-1] == "sliding_attention"
