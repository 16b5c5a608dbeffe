"""From a name to a source and its split directory: found, with and without the hub, or refused."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from rabbitllm import plan, prepare
from rabbitllm.auto_model import AutoModel
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.errors import CheckpointNotFoundError, DeviceError, HubError, IncompleteSplitError, SplitMismatchError
from tests.prepare.conftest import REPO
from tests.support.fresh_process import python
from tests.support.gguf_files import write_gguf
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import Faults, LocalHub
from tests.support.splitting import Call, contents, layer_files, names_in, split

GOLDEN = Path(__file__).parents[1] / "golden"


# Found


def test_folder(model: Path) -> None:
    source = Call(str(model)).find()
    assert (source.local, source.split_folder) == (model, model / "splitted_model")
    assert (source.config_folder, source.finished, source.repository) == (model, False, None)


def test_home_is_expanded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    assert split("~/model") == model / "splitted_model"


def test_repository(repository: Path, local_hub: LocalHub, hub_environment: HubEnvironment) -> None:
    source = Call(REPO).find()
    commit = local_hub.commit(REPO)
    assert source.split_folder == hub_environment.home / "rabbitllm" / "models--acme--tiny" / commit / "splitted_model"
    assert not source.finished
    assert (source.config_folder / "config.json").exists()
    assert local_hub.body_bytes(".safetensors") == 0


def test_revision(repository: Path, other: Path, local_hub: LocalHub) -> None:
    commit = local_hub.add_revision(REPO, "v2", other)
    for revision in ("v2", commit):
        source = prepare.find(prepare.ModelSpec(REPO, access=HubAccess(revision)))
        assert source.split_folder.parent.name == commit


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "~/nowhere", "acme--tiny", ""])
def test_neither_folder_nor_repository(name: str, local_hub: LocalHub, hub_environment: HubEnvironment) -> None:
    with pytest.raises(CheckpointNotFoundError) as refused:
        Call(name).find()
    assert f"There is no folder {name!r}, and it is not a repository id." in str(refused.value)
    assert "'organisation/name'" in str(refused.value)
    assert local_hub.requests == []


def test_no_such_repository(hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no folder 'acme/nothing' here and no repository 'acme/nothing'"):
        Call("acme/nothing").find()


def test_a_name_without_an_organisation(hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    """As in programs with a list of their own; some old repositories have such names."""
    with pytest.raises(CheckpointNotFoundError) as refused:
        Call("llama3").find()
    assert refused.value.remedy.startswith("A repository is 'organisation/name', such as 'Qwen/")
    assert "Check the spelling" in refused.value.remedy


def test_a_device_that_does_not_exist_is_refused_before_a_request(repository: Path, local_hub: LocalHub) -> None:
    with pytest.raises(DeviceError, match="cuda:99"):
        AutoModel.from_pretrained(REPO, device="cuda:99")
    assert local_hub.requests == []


# Without the hub


@pytest.mark.parametrize("where", ["default", "saving path"])
def test_local_files_only(repository: Path, local_hub: LocalHub, tmp_path: Path, where: str) -> None:
    saving_path = tmp_path / "splits" if where == "saving path" else None
    folder = split(REPO, saving_path)
    local_hub.forget_requests()
    assert split(REPO, saving_path, local_files_only=True) == folder
    assert local_hub.requests == []


def test_offline_by_environment(
    repository: Path, local_hub: LocalHub, hub_environment: HubEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = split(REPO, compression="8bit")
    local_hub.stop()
    code = f"from tests.support.splitting import split; print(split({REPO!r}, compression='8bit'))"
    process = python(code, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert process.stdout.strip() == str(folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert split(REPO, compression="8bit") == folder


def test_offline_and_never_split(repository: Path, local_hub: LocalHub) -> None:
    with pytest.raises(HubError) as refused:
        split(REPO, local_files_only=True)
    assert "acme/tiny has no split here and is not in the hub cache" in str(refused.value)
    assert "Unset HF_HUB_OFFLINE" in str(refused.value)
    assert local_hub.requests == []


def test_offline_split_from_the_users_cache(
    repository: Path, model: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    snapshot_download(REPO)
    local_hub.forget_requests()
    folder = split(REPO, local_files_only=True)
    assert local_hub.requests == []
    assert folder.is_relative_to(hub_environment.home / "rabbitllm")
    assert layer_files(folder) == layer_files(split(model))
    assert list(hub_environment.cache.rglob("*.safetensors")) == []
    assert split(REPO) == folder  # the same directory as with a connection


def test_offline_with_another_models_split(repository: Path, other: Path, local_hub: LocalHub, tmp_path: Path) -> None:
    split(REPO, tmp_path / "splits")
    for name in ("acme/other", "other/tiny"):
        with pytest.raises(SplitMismatchError, match=rf"was split from {REPO}; requested was {name}"):
            split(name, tmp_path / "splits", local_files_only=True)
    commit = local_hub.commit(REPO)
    for revision, fits in ((commit, True), ("main", True), ("f" * 40, False)):
        sought = prepare.ModelSpec(REPO, None, tmp_path / "splits", HubAccess(revision, local_files_only=True))
        if fits:
            assert prepare.find(sought).finished
        else:
            with pytest.raises(SplitMismatchError, match=f"its commit is .*, not {'f' * 40}"):
                prepare.find(sought)


def test_finished_split_loads_without_the_hub(
    repository: Path, local_hub: LocalHub, caplog: pytest.LogCaptureFixture
) -> None:
    folder = split(REPO)
    local_hub.stop()
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        assert split(REPO) == folder
    (message,) = [record.message for record in caplog.records if "has no tokenizer" not in record.message]
    assert message.startswith("The hub did not answer for acme/tiny")
    assert message.endswith(f"Using the existing split in {folder}.")
    with pytest.raises(HubError, match="The hub did not answer"):
        split(REPO, compression="4bit")


def test_finished_split_needs_no_repository_for_missing_shards(
    repository: Path, model: Path, local_hub: LocalHub
) -> None:
    (model / "model-00002-of-00003.safetensors").unlink()
    folder = split(model, repo_id=REPO)
    local_hub.stop()
    assert split(model, repo_id=REPO) == folder


def test_refusal_of_the_hub_is_raised(repository: Path, local_hub: LocalHub) -> None:
    folder = split(REPO)
    local_hub.faults = Faults(gated=True)
    assert split(REPO) == folder  # nothing but the listing is needed, and a gate leaves that open
    local_hub.faults, local_hub.token = Faults(), "hf_right"
    with pytest.raises(CheckpointNotFoundError, match="for a private repository pass token="):
        split(REPO)
    assert split(REPO, local_files_only=True) == folder


# RabbitLLM 1.1's


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_legacy_folder_in_the_folder_of_its_checkpoint(tmp_path: Path, compression: str | None) -> None:
    model = Path(shutil.copytree(GOLDEN / "model-2-shards", tmp_path / "model"))
    name = "splitted_model" + (f".{compression}" if compression else "")
    shutil.copytree(GOLDEN / f"rabbitllm-1.1.0-{compression or 'none'}" / name, model / name)
    before = contents(model)
    source = Call(str(model), compression=compression).find()
    assert source.finished
    assert (source.split_folder, source.config_folder) == (model / name, model)
    assert split(model, compression=compression) == model / name
    assert contents(model) == before


def test_legacy_folder_in_a_snapshot(
    repository: Path, local_hub: LocalHub, hub_environment: HubEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Path(snapshot_download(REPO, allow_patterns="config.json"))
    legacy = GOLDEN / "rabbitllm-1.1.0-4bit" / "splitted_model.4bit"
    shutil.copytree(legacy, snapshot / "splitted_model.4bit")
    local_hub.forget_requests()
    for options in ({}, {"local_files_only": True}):
        source = Call(REPO, compression="4bit", **options).find()  # type: ignore[arg-type]
        assert source.finished
        assert (source.split_folder, source.config_folder) == (snapshot / "splitted_model.4bit", snapshot)
    assert Call(str(snapshot), compression="4bit").find().finished
    assert not Call(REPO).find().finished
    assert local_hub.body_bytes(".safetensors") == 0


def interrupted_legacy(folder: Path, after: str, compression: str | None = None) -> tuple[Path, Path]:
    """A checkpoint, and the split of it that RabbitLLM 1.1 would leave if it is killed after this layer's file."""
    model = Path(shutil.copytree(GOLDEN / "model-2-shards", folder / "model"))
    name = "splitted_model" + (f".{compression}" if compression else "")
    legacy = Path(shutil.copytree(GOLDEN / f"rabbitllm-1.1.0-{compression or 'none'}" / name, model / name))
    order = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    for stem in order[order.index(after) + 1 :]:
        for path in legacy.glob(f"{stem}.safetensors*"):
            path.unlink()
    return model, legacy


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("after", ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "torn"])
def test_interrupted_legacy_folder_is_split_again(tmp_path: Path, after: str, compression: str | None) -> None:
    """The layers that are there have their markers, as RabbitLLM 1.1 leaves them."""
    model, legacy = interrupted_legacy(tmp_path, "model.layers.1" if after == "torn" else after, compression)
    if after == "torn":
        (legacy / "model.layers.1.safetensors.done").unlink()
        (legacy / "model.layers.1.safetensors").write_bytes(b"torn")
    shards = contents(model)
    assert not Call(str(model), compression=compression).find().finished
    forecast = plan(model, compression=compression).at(compression)
    assert forecast is not None
    assert not forecast.finished
    folder = split(model, sequential=False, compression=compression)
    assert folder == legacy
    assert {name: raw for name, raw in contents(model).items() if name in shards and "splitted" not in name} == {
        name: raw for name, raw in shards.items() if "splitted" not in name
    }
    clean = Path(shutil.copytree(GOLDEN / "model-2-shards", tmp_path / "clean" / "model"))
    assert contents(folder) == contents(split(clean, sequential=False, compression=compression))


@pytest.mark.parametrize("lost", ["a shard", "the end of a shard"])
def test_interrupted_legacy_folder_that_may_be_the_only_copy_stays(tmp_path: Path, lost: str) -> None:
    model, _ = interrupted_legacy(tmp_path, "model.layers.0")
    shard = sorted(model.glob("*.safetensors"))[0]
    if lost == "a shard":
        shard.unlink()
    else:
        os.truncate(shard, shard.stat().st_size - 1)
    before = contents(model)
    assert Call(str(model)).find().finished
    with pytest.raises(IncompleteSplitError, match=r"layers\.1"):
        AutoModel.from_pretrained(model, device="cpu")
    assert contents(model) == before


def test_unfinished_legacy_folder_is_split_again(tmp_path: Path) -> None:
    """Layer files without a single marker, and every shard still there."""
    model = Path(shutil.copytree(GOLDEN / "model-2-shards", tmp_path / "model"))
    legacy = Path(shutil.copytree(GOLDEN / "rabbitllm-1.1.0-none" / "splitted_model", model / "splitted_model"))
    for marker in legacy.glob("*.done"):
        marker.unlink()
    (legacy / "model.layers.1.safetensors").write_bytes(b"torn")
    folder = split(model, sequential=False)
    assert folder == legacy
    assert json.loads((folder / "split.json").read_text())["source"]["name"] == "model"
    assert len(names_in(folder, "*.done")) == 5
    clean = Path(shutil.copytree(GOLDEN / "model-2-shards", tmp_path / "clean" / "model"))
    assert contents(folder) == contents(split(clean, sequential=False))


def test_file_of_weights_that_does_not_exist_is_told_by_its_neighbours(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "gemma-3-270m-q4_k_m.gguf")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointNotFoundError) as refused:
        prepare.find(prepare.ModelSpec(str(tmp_path / "gemma.gguf")))
    assert refused.value.problem == f"{tmp_path / 'gemma.gguf'} does not exist."
    assert refused.value.remedy == f"Did you mean {path}? Else: Check the path."
