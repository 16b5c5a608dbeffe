"""The way out: `save_pretrained` and `convert` give the original's tensors back; `verify` finds damage and mends it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import rabbitllm
from rabbitllm import AutoModel
from tests.frozen.support.command_line import rabbitllm as call
from tests.frozen.support.families import FAMILIES, build, dequantized, plain_model
from tests.frozen.test_families import compressions, layer_digests, load, outcome, split_folder
from tests.support.builders import read_tensors
from tests.support.one_thread import one_thread as one_thread

SHORT = ("llama", "mixtral")


def families(short: tuple[str, ...] = SHORT) -> list[Any]:
    return [pytest.param(name, id=name, marks=() if name in short else pytest.mark.long) for name in FAMILIES]


def assert_tensors(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """A checkpoint has these tensors: names, dtypes, shapes and bytes."""
    found = read_tensors(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


@pytest.mark.parametrize("family", families())
def test_out_of_a_split_whose_shards_are_gone(tmp_path: Path, family: str) -> None:
    """By `save_pretrained` of a streamed model, and by `convert` of its split directory."""
    folder = build(tmp_path / "model", family)
    original = read_tensors(folder)
    expected = outcome(plain_model(folder, family), family)
    model = load(folder, "none", sequential_shard_processing=True, max_memory={"cpu": 0})
    assert not list(folder.glob("model*.safetensors"))

    model.save_pretrained(tmp_path / "saved")
    assert_tensors(tmp_path / "saved", original)
    assert outcome(plain_model(tmp_path / "saved", family), family) == expected

    done = call("convert", folder / "splitted_model", "--output", tmp_path / "converted", "--json")
    assert done.code == 0, done.err
    assert_tensors(tmp_path / "converted", original)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "converted" / name).read_bytes() == (folder / name).read_bytes()
    assert outcome(plain_model(tmp_path / "converted", family), family) == expected


@pytest.mark.parametrize("compression", ["4bit", pytest.param("8bit", marks=pytest.mark.long)])
def test_a_compressed_model_saves_what_its_codes_stand_for(tmp_path: Path, compression: str) -> None:
    folder = build(tmp_path / "model", "qwen3")
    plain = dequantized(folder, tmp_path / "plain", compression)
    model = load(folder, compression, max_memory={"cpu": 0})
    model.save_pretrained(tmp_path / "saved")
    assert_tensors(tmp_path / "saved", read_tensors(plain))


@pytest.mark.parametrize("form", ["safetensors", pytest.param("torch", marks=pytest.mark.long)])
def test_a_checkpoint_is_converted(tmp_path: Path, form: str) -> None:
    """Its files stay unless `--sequential` is given, and then each is gone."""
    folder = build(tmp_path / "model", "gemma3")
    original = read_tensors(folder)
    if form == "torch":
        for path in folder.glob("model*"):
            path.unlink()
        torch.save(original, folder / "pytorch_model.bin")
    before = {path.name for path in folder.iterdir()}
    assert call("convert", folder, "--output", tmp_path / "kept").code == 0
    assert_tensors(tmp_path / "kept", original)
    assert {path.name for path in folder.iterdir()} == before
    assert call("convert", folder, "--output", tmp_path / "moved", "--sequential").code == 0
    assert_tensors(tmp_path / "moved", original)
    assert not [*folder.glob("model-*"), *folder.glob("pytorch_model*")]


def test_tensors_by_themselves(tmp_path: Path) -> None:
    """`lazy_load` reads a checkpoint and an uncompressed split alike."""
    folder = build(tmp_path / "model", "qwen3")
    original = read_tensors(folder)
    load(folder, "none")
    for place in (folder, folder / "splitted_model"):
        weights = rabbitllm.lazy_load(place)
        assert set(weights) == set(original)
        for name, tensor in original.items():
            assert weights[name].dtype == tensor.dtype
            assert torch.equal(torch.empty_like(tensor).copy_(weights[name]), tensor), name


def damage(path: Path) -> None:
    """Flip a bit of the last tensor's data, in place: a thread of an earlier load may still read a mapping of it."""
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))


@pytest.mark.parametrize(
    ("family", "compression"),
    [
        ("llama", "none"),
        pytest.param("llama", "4bit", marks=pytest.mark.long),
        pytest.param("mixtral", "8bit", marks=pytest.mark.long),
        pytest.param("qwen3-fp8", "none", marks=pytest.mark.long),
    ],
)
def test_damage_is_found_and_mended(tmp_path: Path, family: str, compression: str) -> None:
    """The bytes of a repaired layer are those of the first time; a model never computes with damaged ones."""
    assert compression in compressions(family)
    folder = build(tmp_path / "model", family)
    assert call("pull", folder, "--compression", compression).code == 0
    directory = split_folder(folder, compression)
    before = layer_digests(directory)
    assert call("verify", directory, "--json").code == 0
    victims = sorted(directory.glob("*.layers.*.safetensors"))
    damage(victims[0])
    victims[1].unlink()
    assert call("verify", directory, "--json").code == 1
    with pytest.raises(rabbitllm.RabbitLLMError):
        AutoModel.from_pretrained(directory, device="cpu", show_layer_progress=False)
    assert call("verify", directory, "--repair", "--json").code == 0
    assert layer_digests(directory) == before
    assert call("verify", directory, "--json").code == 0


@pytest.mark.parametrize("memory", [None, {"cpu": 0}], ids=["resident", "streamed"])
def test_a_flipped_bit_alone_is_an_error_before_any_answer(tmp_path: Path, memory: dict[str, int] | None) -> None:
    folder = build(tmp_path / "model", "llama")
    load(folder, "none")
    damage(folder / "splitted_model" / "model.layers.1.safetensors")
    limits = {} if memory is None else {"max_memory": memory}
    with pytest.raises(rabbitllm.RabbitLLMError, match=r"model\.layers\.1"):
        outcome(load(folder, "none", **limits), "llama")


@pytest.mark.long
def test_repaired_out_of_the_original_elsewhere(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "llama")
    spare = shutil.copytree(folder, tmp_path / "spare")
    assert call("pull", folder, "--compression", "8bit", "--sequential").code == 0
    assert not list(folder.glob("model*.safetensors"))
    directory = split_folder(folder, "8bit")
    before = layer_digests(directory)
    damage(directory / "model.layers.0.safetensors")
    assert call("verify", directory, "--repair").code != 0
    assert call("verify", directory, "--repair", "--original", spare).code == 0
    assert layer_digests(directory) == before


def test_layer_files_are_safetensors(tmp_path: Path) -> None:
    """An uncompressed layer file has the original's tensors under their names."""
    folder = build(tmp_path / "model", "llama")
    original = read_tensors(folder)
    load(folder, "none")
    found: dict[str, str] = {}
    for path in (folder / "splitted_model").glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            found |= {name: digest(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
    assert found == {name: digest(tensor) for name, tensor in original.items()}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
