"""Split directories as they are found and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from rabbitllm.errors import CheckpointNotFoundError, OptionError, SplitMismatchError
from rabbitllm.models.library import (
    DAMAGED,
    UNFINISHED,
    WHOLE,
    SplitEntry,
    as_record,
    below,
    compression_here,
    folders_of,
    known,
    look,
    of_model,
    one_of_model,
)
from rabbitllm.store import locations
from rabbitllm.store.manifest import JOURNAL_NAME, MANIFEST_NAME
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.gguf_files import write_gguf
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.splitting import Call, interrupted, occupied

REPO = "org/rabbit"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "models" / "hare", cut(llama_tensors(), 3))


def seen(folder: Path) -> SplitEntry:
    entry = look(folder)
    assert entry is not None
    return entry


def test_finished_split(folder: Path) -> None:
    split_folder = Call(str(folder), compression="4bit", sequential=False).make()
    entry = seen(split_folder)
    files = len([*split_folder.glob("*.safetensors")])
    assert (entry.name, entry.state, entry.compression, entry.folder) == ("hare", WHOLE, "4bit", split_folder)
    assert (entry.layers, entry.layers_of) == (files, files)
    assert entry.nbytes == occupied(split_folder)
    assert (entry.problem, entry.legacy, entry.commit) == (None, False, None)
    assert set(as_record(entry)) == {
        *("name", "folder", "state", "source", "commit", "compression", "bytes", "layers", "layers_of", "shards"),
        *("shards_used", "changed_at", "problem", "rabbitllm_1", "gguf"),
    }
    json.dumps(as_record(entry))


def test_unfinished_split(folder: Path) -> None:
    split_folder = interrupted(Call(str(folder), compression="8bit", sequential=False), shards=2)
    entry = seen(split_folder)
    assert (entry.state, entry.name, entry.compression) == (UNFINISHED, "hare", "8bit")
    assert (entry.shards, entry.shards_used) == (3, 2)
    assert 0 < entry.layers < entry.layers_of
    whole = seen(Call(str(folder), compression="8bit", sequential=False).make())
    assert (whole.state, whole.layers) == (WHOLE, entry.layers_of)


def test_damaged_splits_are_listed(folder: Path) -> None:
    split_folder = Call(str(folder), sequential=False).make()
    layer = next(iter(sorted(split_folder.glob("*.safetensors"))))
    content = layer.read_bytes()
    layer.write_bytes(content[:-1])
    assert (seen(split_folder).state, seen(split_folder).problem) == (
        DAMAGED,
        f"{layer.name} has {len(content) - 1:,} bytes instead of {len(content):,}",
    )
    layer.unlink()
    assert seen(split_folder).problem == f"{layer.name} is missing"
    (split_folder / MANIFEST_NAME).write_text("{")
    assert seen(split_folder).state == DAMAGED
    assert MANIFEST_NAME in (seen(split_folder).problem or "")
    (split_folder / MANIFEST_NAME).unlink()
    (split_folder / JOURNAL_NAME).write_text("nonsense\n")
    assert (seen(split_folder).state, seen(split_folder).problem) == (DAMAGED, f"{JOURNAL_NAME} cannot be read")


def test_split_of_rabbitllm_1(tmp_path: Path) -> None:
    folder = tmp_path / "hare" / "splitted_model.8bit"
    folder.mkdir(parents=True)
    for layer in ("model.norm", "lm_head"):
        (folder / f"{layer}.safetensors").write_bytes(b"x" * 100)
        (folder / f"{layer}.safetensors.done").touch()
    entry = seen(folder)
    assert (entry.name, entry.state, entry.compression, entry.layers, entry.legacy) == ("hare", WHOLE, "8bit", 2, True)
    (folder / "lm_head.safetensors.done").unlink()
    assert seen(folder).problem == "lm_head.safetensors has no .done marker"


@pytest.mark.parametrize("case", ["nothing", "checkpoint", "file"])
def test_folders_that_are_no_split(tmp_path: Path, folder: Path, case: str) -> None:
    place = {"nothing": tmp_path / "no", "checkpoint": folder, "file": folder / "config.json"}[case]
    assert look(place) is None


def test_split_behind_a_link(folder: Path, tmp_path: Path) -> None:
    """A user's way to put the layers on another disk."""
    (tmp_path / "disk").mkdir()
    link = folder / "splitted_model.4bit"
    link.symlink_to(tmp_path / "disk")
    assert Call(str(folder), compression="4bit", sequential=False).make() == link
    assert seen(link).state == WHOLE
    for entries in (of_model(str(folder)), below(folder), below(folder.parent)):
        assert [entry.folder for entry in entries] == [link]


def test_splits_below_a_folder(folder: Path) -> None:
    folders = [Call(str(folder), compression=c, sequential=False).make() for c in ("8bit", "4bit")]
    assert [entry.folder for entry in below(folder.parent)] == folders
    assert [entry.folder for entry in below(folder)] == folders
    assert [entry.folder for entry in below(folders[1])] == folders[1:]
    (folder.parent / "again").symlink_to(folder)
    assert len(below(folder.parent)) == 2
    with pytest.raises(CheckpointNotFoundError, match="There is no folder"):
        below(folder / "nowhere")


def test_splits_of_a_repository(tmp_path: Path, hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(), 2))
    folders = [Call(REPO, compression=c).make() for c in (None, "4bit")]
    elsewhere = Call(REPO, str(tmp_path / "elsewhere"), compression="8bit").make()
    assert [entry.folder for entry in known()] == folders
    commit = local_hub.commit(REPO)
    assert {(entry.name, entry.commit) for entry in known()} == {(REPO, commit)}
    local_hub.stop()  # from here on the hub cannot be reached
    for name in (REPO, f"hf://{REPO}"):
        assert [entry.folder for entry in of_model(name)] == folders
        assert folders_of(name)[:2] == folders
        assert [folder.parent.name for folder in folders_of(name)[2:]] == ["snapshots"]
    assert [entry.folder for entry in of_model(REPO, "none")] == folders[:1]
    assert [entry.folder for entry in of_model(REPO, saving_path=tmp_path / "elsewhere")] == [elsewhere]
    assert one_of_model(REPO, "4bit").folder == folders[1]
    with pytest.raises(OptionError, match=r"has 2 split directories: none in .*; 4bit in"):
        one_of_model(REPO)
    with pytest.raises(OptionError, match="does not exist"):
        of_model(REPO, "2bit")
    with pytest.raises(CheckpointNotFoundError, match=f"Did you mean {REPO}"):
        one_of_model("org/rabit")


def test_splits_of_a_folder(folder: Path, tmp_path: Path) -> None:
    split_folder = Call(str(folder), compression="4bit", sequential=False).make()
    elsewhere = Call(str(folder), str(tmp_path / "out"), sequential=False).make()
    shard = next(folder.glob("*-of-*"))
    assert [entry.folder for entry in of_model(str(folder))] == [split_folder]
    assert [entry.folder for entry in of_model(str(shard))] == [split_folder]
    assert [entry.folder for entry in of_model(str(split_folder))] == [split_folder]
    assert [entry.folder for entry in of_model(str(folder), saving_path=tmp_path / "out")] == [elsewhere]


def test_a_folder_for_splits_may_have_those_of_another_model(
    folder: Path, tmp_path: Path, hub_environment: HubEnvironment
) -> None:
    out = tmp_path / "out"
    split_folder = Call(str(folder), str(out), sequential=False).make()
    namesake = write_shards(tmp_path / "others" / "hare", cut(llama_tensors(seed=1), 3))
    for other in (namesake, write_shards(tmp_path / "others" / "fox", cut(llama_tensors(seed=2), 3)), REPO):
        assert of_model(str(other), saving_path=out) == []
        assert compression_here(str(other), out) is None
        with pytest.raises(SplitMismatchError, match=r"out/splitted_model was split from .*hare"):
            one_of_model(str(other), saving_path=out)
    renamed = folder.rename(folder.with_name("rabbit"))
    assert [entry.folder for entry in of_model(str(renamed), saving_path=out)] == [split_folder]
    assert [entry.folder for entry in of_model(str(split_folder), saving_path=out)] == [split_folder]
    used_up = renamed.rename(folder)
    for shard in used_up.glob("*.safetensors"):
        shard.unlink()
    assert [entry.folder for entry in of_model(str(used_up), saving_path=out)] == [split_folder]


def test_splits_of_one_of_several_models(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    hub = tmp_path / "hub" / REPO
    for place in (tmp_path, hub):
        place.mkdir(parents=True, exist_ok=True)
        for seed, name in enumerate(("a-Q8_0", "b-Q4_K_M")):
            write_gguf(place / f"{name}.gguf", seed=seed)
    for file, name in ((tmp_path / "b-Q4_K_M.gguf", "b-Q4_K_M"), (f"{REPO}:q4_k_m", "Q4_K_M")):
        folders = [Call(str(file), compression=c, sequential=False).make() for c in ("8bit", "4bit")]
        assert [path.name for path in folders] == [f"splitted_model-{name}.8bit", f"splitted_model-{name}.4bit"]
        assert [entry.folder for entry in of_model(str(file))] == folders
        assert compression_here(str(file)) == "8bit"
    for name_of_model in (tmp_path / "a-Q8_0.gguf", f"{REPO}:Q8_0"):
        assert of_model(str(name_of_model)) == []


@pytest.mark.parametrize("first", ["", ":Q4_K_M"])
@pytest.mark.parametrize("compression", [None, "8bit"])
def test_a_repositorys_only_gguf_model_has_one_split(
    tmp_path: Path,
    hub_environment: HubEnvironment,
    local_hub: LocalHub,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    compression: str | None,
) -> None:
    hub = tmp_path / "hub" / REPO
    hub.mkdir(parents=True, exist_ok=True)
    write_gguf(hub / "b-Q4_K_M.gguf")
    made = Call(f"{REPO}{first}", compression=compression, sequential=False).make()
    for name in (REPO, f"{REPO}:q4_k_m"):
        source = Call(name, compression=compression, sequential=False).find()
        assert (source.split_folder, source.finished) == (made, True)
    other = "4bit" if compression is None else None
    assert not Call(REPO, compression=other, sequential=False).find().finished
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in (REPO, f"{REPO}:q4_k_m"):
        assert [entry.folder for entry in of_model(name)] == [made]
        source = Call(name, compression=compression, sequential=False).find()
        assert (source.split_folder, source.finished) == (made, True)
    assert of_model(f"{REPO}:Q8_0") == []


def test_a_name_without_quantization_means_no_one_of_several(
    tmp_path: Path, hub_environment: HubEnvironment, local_hub: LocalHub
) -> None:
    hub = tmp_path / "hub" / REPO
    hub.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(("a-Q8_0", "b-Q4_K_M")):
        write_gguf(hub / f"{name}.gguf", seed=seed)
        Call(f"{REPO}:{name[2:]}", sequential=False).make()
    assert of_model(REPO) == []


def test_split_of_a_read_only_folder_is_known_by_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(locations.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setattr(locations, "is_writable", lambda path: False)
    split_folder = Call(str(folder), sequential=False).make()
    assert split_folder.is_relative_to(tmp_path / "home")
    assert [entry.folder for entry in of_model("hare")] == [split_folder]
    assert [entry.folder for entry in of_model(str(folder))] == [split_folder]
    assert of_model("har") == []
