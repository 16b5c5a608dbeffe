"""The index: which shards there are, in which order, and names that nothing is opened by."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import rabbitllm
from rabbitllm.checkpoints.index import (
    ENTRY_NAMES,
    SINGLE_NAME,
    check_inside,
    check_shard_name,
    entry_of,
    index_of,
    is_index,
    is_meta,
    natural_key,
    read_index,
    shard_names,
)
from rabbitllm.errors import CheckpointError, CheckpointNotFoundError, InvalidIndexError, UnsafePathError
from tests.attacks.folders import ATTACKS, HOSTILE_NAMES, FolderAttack, prepare, read_all
from tests.support.builders import build_checkpoint


def write(folder: Path, content: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(content))
    return path


def test_index_is_read(tmp_path: Path) -> None:
    weight_map = {"b": "model-2.safetensors", "a": "model-10.safetensors", "c": "model-2.safetensors"}
    index = read_index(write(tmp_path, {"metadata": {"total_size": 5}, "weight_map": weight_map}))
    assert list(index.weight_map.items()) == list(weight_map.items())
    assert index.shards == ("model-2.safetensors", "model-10.safetensors")


@pytest.mark.parametrize(
    "content", [{}, {"weight_map": None}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": "x"}, {"metadata": {}}]
)
def test_no_weight_map(tmp_path: Path, content: object) -> None:
    with pytest.raises(InvalidIndexError, match="has no weight_map; expected a table of tensor name to shard"):
        read_index(write(tmp_path, content))


@pytest.mark.parametrize("shard", [None, 5, ["a.safetensors"], {"file": "a.safetensors"}])
def test_shard_name_that_is_no_string(tmp_path: Path, shard: object) -> None:
    with pytest.raises(InvalidIndexError, match=r"puts tensor 'w' into .*; expected the name of a shard"):
        read_index(write(tmp_path, {"weight_map": {"w": shard}}))


@pytest.mark.parametrize("shard", HOSTILE_NAMES)
def test_hostile_shard_name(tmp_path: Path, shard: str) -> None:
    with pytest.raises(UnsafePathError) as refused:
        read_index(write(tmp_path, {"weight_map": {"w": "sound.safetensors", "v": shard}}))
    assert f"names the shard {repr(shard)[:100]}" in str(refused.value)
    assert "; expected a plain file name inside the checkpoint's own folder" in str(refused.value)
    assert len(str(refused.value)) < 500
    assert "Nothing was opened or deleted." in str(refused.value)


@pytest.mark.parametrize(
    "shard",
    [
        "model.safetensors",
        "model-00001-of-00163.safetensors",
        "a/b.safetensors",
        "x..y",
        "0_1",
        "model_v1.2-3",
        "console",
        "x" * 200,
    ],
)
def test_plain_shard_name(shard: str) -> None:
    check_shard_name(shard, "index")


@given(st.text(max_size=20))
def test_names_that_pass_stay_in_their_folder(shard: str) -> None:
    try:
        check_shard_name(shard, "index")
    except UnsafePathError:
        return
    path = Path("/base") / shard
    assert path.parts[:2] == ("/", "base")
    assert ".." not in path.parts
    assert path.as_posix() == f"/base/{shard}"


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_folder_attack(tmp_path: Path, attack: FolderAttack) -> None:
    folder = prepare(tmp_path)
    attack.build(folder)
    with pytest.raises(attack.error, match=attack.message) as caught:
        read_all(folder)
    assert type(caught.value) is attack.error
    assert isinstance(caught.value, CheckpointError)
    assert caught.value.remedy


def test_the_folder_outside_is_sound(tmp_path: Path) -> None:
    """The control of the attacks: what they lead to would be read."""
    prepare(tmp_path)
    read_all(tmp_path / "outside")


# What a checkpoint begins with


def test_shards_without_their_index_lack_it() -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"found the weights model-00001-of-00002\.safetensors") as caught:
        entry_of([*shard_names(2), "config.json"], "here")
    assert caught.value.remedy.startswith("Put the index of these shards (model.safetensors.index.json) next to them")


def test_entries_in_the_order_of_transformers() -> None:
    ignored = ["config.json", "last.ckpt", "consolidated.00.pth", "params.json"]
    for index, name in enumerate(ENTRY_NAMES):
        assert entry_of([*ignored, *reversed(ENTRY_NAMES[index:])], "here") == name
    assert [is_index(name) for name in ENTRY_NAMES] == [False, True, False, True]


def test_single_file_beside_an_index_is_preferred_as_in_transformers(tmp_path: Path) -> None:
    """As after `save_pretrained` onto a sharded checkpoint, which leaves the index."""
    folder = build_checkpoint(tmp_path / "model", "llama", shards=2, seed=1)
    build_checkpoint(tmp_path / "new", "llama", seed=2)
    shutil.copy(tmp_path / "new" / SINGLE_NAME, folder)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
    with rabbitllm.lazy_load(folder) as weights:
        assert torch.equal(weights["lm_head.weight"], expected)
    assert entry_of([path.name for path in folder.iterdir()], "here") == SINGLE_NAME


@pytest.mark.parametrize("name", ["model.bin", "a.pt", "step_100.pth", "last-v1.ckpt", "x.pkl", "consolidated.00.pth"])
def test_single_torch_file_of_any_name_is_a_checkpoint(name: str) -> None:
    ignored = ["optimizer.pt", "optimizer_1.bin", "scheduler.pt", "scaler.pt", "training_args.bin", "rng_state.pth"]
    ignored += ["rng_state_3.pth", "random_states_0.pkl", "adapter_model.bin", "optim.pth", "notes.txt", "sub/other.pt"]
    assert entry_of([*ignored, name], "here") == name


def test_several_torch_files() -> None:
    with pytest.raises(
        CheckpointNotFoundError, match=r"here has several weight files and no index: a-2\.pth, a-10\.pth\."
    ) as bad:
        entry_of(["a-10.pth", "a-2.pth", "optimizer.pt"], "here")
    assert "name it pytorch_model.bin" in bad.value.remedy
    with pytest.raises(CheckpointNotFoundError, match=r"4\.pt and 4 more\."):
        entry_of([f"{n}.pt" for n in range(9)], "here")


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_meta_s_own_format(ranks: int) -> None:
    names = [f"consolidated.{rank:02}.pth" for rank in range(ranks)]
    entry = entry_of([*names, "params.json", "tokenizer.model"], "here")
    assert is_meta(entry)
    assert not is_index(entry)


def test_meta_s_own_format_without_its_parameters() -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"has Meta weights .* but no params\.json") as refused:
        entry_of(["consolidated.00.pth", "consolidated.01.pth"], "here")
    assert "published with them" in refused.value.remedy


@pytest.mark.parametrize("name", ["..pt", ".pt", "-x.pt", " b.bin", "adapter_model.bin", "model.safetensors.bin/x.pt"])
def test_names_without_a_checkpoint(name: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
        entry_of([name], "here")


def test_shards_are_in_numerical_order() -> None:
    for total in (9, 12, 163):
        for pattern in ("model-{:05d}-of-{:05d}.safetensors", "model-{}-of-{}.safetensors", "part{}_{}.st"):
            ordered = [pattern.format(index, total) for index in range(1, total + 1)]
            shuffled = random.Random(total).sample(ordered, total)
            assert list(index_of({str(i): name for i, name in enumerate(shuffled)}).shards) == ordered


@given(st.lists(st.text(max_size=12)))
def test_any_names_can_be_sorted(names: list[str]) -> None:
    assert sorted(sorted(names), key=natural_key) == sorted(sorted(names, reverse=True), key=natural_key)
    assert len({natural_key(name) for name in names}) == len(set(names))


def test_links_that_stay_inside(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "real").touch()
    (folder / "link").symlink_to("real")
    (tmp_path / "alias").symlink_to(folder)
    for inside in (folder / "real", folder / "link", folder / "missing", tmp_path / "alias" / "link"):
        check_inside(inside, inside.parent)


@pytest.mark.parametrize("target", ["../outside", "/etc/passwd", "../missing"])
def test_links_outside_are_refused(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside").touch()
    (folder / "link").symlink_to(target)
    with pytest.raises(UnsafePathError, match="is a link that leads outside its folder"):
        check_inside(folder / "link", folder)


def test_folder_outside_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "sub").symlink_to(tmp_path)
    with pytest.raises(UnsafePathError):
        check_inside(folder / "sub" / "x", folder)


def test_names_of_shards() -> None:
    assert shard_names(2) == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
