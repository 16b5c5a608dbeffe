"""A folder that holds files of something else is no place for a split: it is refused, and they stay."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rabbitllm.errors import InvalidIndexError, SplitMismatchError, StorageError, UnsafePathError
from rabbitllm.store.manifest import JOURNAL_NAME
from tests.support.builders import INDEX_NAME, cut, llama_tensors, write_shards
from tests.support.forked import in_a_fork
from tests.support.splitting import Call, layer_files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "model", cut(llama_tensors(), 2))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(model: Path, saving_path: Path, file: str) -> None:
    folder = saving_path / "splitted_model"
    before = contents(folder), contents(model)
    with pytest.raises(SplitMismatchError, match=f"{file} exists, .*Nothing was changed"):
        Call(str(model), str(saving_path)).make()
    assert {name: raw for name, raw in contents(folder).items() if not name.startswith(".lock")} == before[0]
    assert contents(model) == before[1]


def test_another_checkpoint(model: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "X" / "splitted_model", cut(llama_tensors(), 3), "mistral")
    refused(model, tmp_path / "X", "config.json")


@pytest.mark.parametrize("name", ["lm_head.safetensors", "model.norm.safetensors.part"])
def test_a_file_with_the_name_of_a_layer_file(model: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "X" / "splitted_model"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(b"the only copy")
    refused(model, tmp_path / "X", name)


LAYER = "model.embed_tokens.safetensors"


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("linked", [True, False])
def test_a_shard_with_the_name_of_a_layer_file(tmp_path: Path, linked: bool, sequential: bool) -> None:
    """It has the layer's tensors, and would be taken for what an earlier split left, and be deleted unread."""
    tensors = llama_tensors()
    embeddings = {name: tensor for name, tensor in tensors.items() if "embed" in name}
    others = {name: tensor for name, tensor in tensors.items() if "embed" not in name}
    shard = "a.safetensors" if linked else f"splitted_model/{LAYER}"
    model = write_shards(tmp_path / "model", {"a.safetensors": embeddings, "b.safetensors": others})
    (model / "splitted_model").mkdir()
    (model / "a.safetensors").rename(model / "splitted_model" / LAYER)
    if linked:
        (model / "a.safetensors").symlink_to(f"splitted_model/{LAYER}")
    index = model / INDEX_NAME
    index.write_text(index.read_text().replace("a.safetensors", shard))
    before = contents(model)
    with pytest.raises(SplitMismatchError, match=f"{shard} exists, as a shard in the split directory itself"):
        Call(str(model), sequential=sequential).make()
    assert contents(model) == before


def test_a_checkpoint_in_the_split_directory_itself(tmp_path: Path) -> None:
    """After a crash its folder would be a split directory, whose original is named nowhere."""
    model = write_shards(tmp_path / "splitted_model", cut(llama_tensors(), 2))
    before = contents(model)
    with pytest.raises(SplitMismatchError, match="exists, as a shard in the split directory itself"):
        Call(str(model), str(tmp_path)).make()
    assert contents(model) == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused_at_once(model: Path, tmp_path: Path) -> None:
    before = contents(model)
    for name in ("config.json", "lm_head.safetensors", "lm_head.safetensors.done", JOURNAL_NAME):
        folder = tmp_path / name / "splitted_model"
        folder.mkdir(parents=True)
        os.mkfifo(folder / name)

        def refused(saving_path: str = str(tmp_path / name)) -> str:
            with pytest.raises(StorageError) as error:
                Call(str(model), saving_path, sequential=False).make()
            return error.value.problem

        assert name in in_a_fork(refused)
    assert contents(model) == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_in_the_place_of_a_tokenizer_is_refused_before_a_shard_is_deleted(model: Path, tmp_path: Path) -> None:
    before = contents(model)
    for name in ("tokenizer.json", "tokenizer.model"):
        os.mkfifo(model / name)

        def refused() -> str:
            with pytest.raises(UnsafePathError) as error:
                Call(str(model), str(tmp_path / "X")).make()
            return error.value.problem

        assert f"{model / name} is a pipe" in in_a_fork(refused)
        (model / name).unlink()
    assert contents(model) == before


def test_an_editors_lock_is_no_side_file(model: Path, tmp_path: Path) -> None:
    """Emacs makes one, a link to nothing, while a file has changes that are not saved."""
    (model / ".#config.json").symlink_to("rabbit@burrow.1234:5678")
    folder = Call(str(model), str(tmp_path / "X")).make()
    assert (folder / "config.json").is_file()
    assert not list(folder.glob(".#*"))


def test_same_config_and_tokenizer_are_accepted(model: Path, tmp_path: Path) -> None:
    """A call that was killed before its first record has left them."""
    folder = tmp_path / "X" / "splitted_model"
    folder.mkdir(parents=True)
    for path in model.glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, folder)
    split_folder = Call(str(model), str(tmp_path / "X"), sequential=False).make()
    assert layer_files(split_folder)


def test_layers_whose_files_differ_only_in_case(tmp_path: Path) -> None:
    """On macOS and Windows one file would be written for both, and the shards deleted."""
    tensors = llama_tensors()
    model = write_shards(tmp_path / "model", cut(tensors | {"model.Norm.weight": tensors["model.norm.weight"] + 1}, 2))
    before = contents(model)
    with pytest.raises(InvalidIndexError, match="would be the same file on some disks"):
        Call(str(model)).make()
    assert contents(model) == before
