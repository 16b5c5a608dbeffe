"""Locations of split directories.

Resolution of names, and suggestions for unknown ones.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from rabbitllm import prepare
from rabbitllm.errors import CheckpointNotFoundError, HubError, OptionError
from rabbitllm.store import locations
from rabbitllm.store.locations import resolve_name, served_name, similar_names
from tests.support.builders import build_checkpoint, cut, llama_tensors, write_shards, write_torch
from tests.support.fresh_process import python
from tests.support.gguf_files import write_gguf
from tests.support.hub_fixtures import HubEnvironment
from tests.support.splitting import Call, interrupted

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(locations.HOME_VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot in a hub cache, as huggingface_hub lays it out."""
    repo = tmp_path / "cache" / "models--acme--tiny"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots" / COMMIT).mkdir(parents=True)
    return repo / "snapshots" / COMMIT


def test_home_is_next_to_the_hub_cache(hub_environment: HubEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(locations.HOME_VARIABLE, raising=False)
    assert locations.home() == hub_environment.home / "rabbitllm"
    monkeypatch.setenv(locations.HOME_VARIABLE, "~/splits")
    monkeypatch.setenv("HOME", "/somewhere")
    assert locations.home() == Path("/somewhere/splits")


@pytest.mark.parametrize("name", ["acme/tiny", "gpt2", "Qwen/Qwen2.5-0.5B", "a/b_c.d", "0x/1"])
def test_repository_ids(name: str) -> None:
    assert locations.is_repo_id(name)


@pytest.mark.parametrize(
    "name",
    ["", "/abs", "./here", "../up", "a/b/c", "a/..", "a..b/c", "a--b/c", "a/", "~/m", "a b/c", "C:\\m", "-x/y", "a\n"],
)
def test_invalid_repository_ids(name: str) -> None:
    assert not locations.is_repo_id(name)


@pytest.mark.parametrize(("compression", "name"), [(None, "splitted_model"), ("4bit", "splitted_model.4bit")])
def test_local_checkpoint_is_split_in_its_own_folder(tmp_path: Path, compression: str | None, name: str) -> None:
    assert locations.for_local(tmp_path, None, compression) == tmp_path / name
    assert locations.for_local(tmp_path, tmp_path / "there", compression) == tmp_path / "there" / name
    assert locations.for_local(tmp_path, None, compression, "mine") == tmp_path / name.replace("splitted_model", "mine")


def test_snapshot_is_split_outside_the_cache(snapshot: Path, home: Path, tmp_path: Path) -> None:
    expected = home / "models--acme--tiny" / COMMIT / "splitted_model"
    assert locations.for_local(snapshot, None, None) == expected
    (tmp_path / "link").symlink_to(snapshot)
    assert locations.for_local(tmp_path / "link", None, None) == expected
    assert locations.for_repository("acme/tiny", COMMIT, None, None) == expected


def test_layers_in_a_snapshot_are_still_found(snapshot: Path, home: Path) -> None:
    (snapshot / "splitted_model").mkdir()
    assert locations.for_local(snapshot, None, None).is_relative_to(home)  # empty: nothing to find
    (snapshot / "splitted_model" / "lm_head.safetensors.done").touch()
    assert locations.for_local(snapshot, None, None) == snapshot / "splitted_model"


def test_read_only_checkpoint_is_split_elsewhere(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a" / "model", tmp_path / "b" / "model"
    for folder in (first, second):
        folder.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) not in (first, second))
    split_folder = locations.for_local(first, None, "8bit")
    assert split_folder.parent.parent == home / "local"
    assert (split_folder.parent.name.startswith("model-"), split_folder.name) == (True, "splitted_model.8bit")
    assert locations.for_local(second, None, "8bit") != split_folder
    assert locations.for_local(first, None, "8bit") == split_folder
    (second / "splitted_model.8bit").mkdir()
    (second / "splitted_model.8bit" / "split.json").touch()
    assert locations.for_local(second, None, "8bit") == second / "splitted_model.8bit"  # made where it could be written


def test_repository_has_a_folder_for_each_commit(home: Path, tmp_path: Path) -> None:
    other = COMMIT[::-1]
    assert locations.for_repository("acme/tiny", COMMIT, None, "4bit") != locations.for_repository(
        "acme/tiny", other, None, "4bit"
    )
    assert locations.for_repository("gpt2", COMMIT, None, None) == home / "models--gpt2" / COMMIT / "splitted_model"
    assert locations.for_repository("acme/tiny", COMMIT, tmp_path, "4bit") == tmp_path / "splitted_model.4bit"


def test_commits_are_remembered_by_revision(home: Path) -> None:
    assert locations.remembered_commit("acme/tiny", None) is None
    locations.remember_commit("acme/tiny", None, COMMIT)
    locations.remember_commit("acme/tiny", "refs/pr/1", COMMIT[::-1])
    assert locations.remembered_commit("acme/tiny", None) == locations.remembered_commit("acme/tiny", "main") == COMMIT
    assert locations.remembered_commit("acme/tiny", "refs/pr/1") == COMMIT[::-1]
    assert locations.remembered_commit("acme/tiny", "v2") is None
    assert locations.remembered_commit("acme/other", None) is None
    locations.remember_commit("acme/tiny", None, COMMIT[::-1])
    assert locations.remembered_commit("acme/tiny", None) == COMMIT[::-1]


def test_commit_needs_no_lookup(home: Path) -> None:
    assert locations.remembered_commit("acme/tiny", COMMIT) == COMMIT
    assert locations.remembered_commit("acme/tiny", COMMIT[:8]) is None
    assert locations.is_commit(COMMIT)
    assert not locations.is_commit("main")


def test_known_commit_is_not_written_again(home: Path) -> None:
    locations.remember_commit("acme/tiny", None, COMMIT)
    path = next(home.rglob("main"))
    before = path.stat().st_mtime_ns, path.stat().st_ino
    locations.remember_commit("acme/tiny", None, COMMIT)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


@pytest.mark.parametrize(
    "address",
    [
        "org/name",
        "hf://org/name",
        "hf://models/org/name",
        "https://huggingface.co/org/name",
        "https://huggingface.co/org/name/",
        "https://huggingface.co/org/name/tree/main",
        "https://hf.co/org/name?library=transformers",
    ],
)
def test_addresses_on_the_hub(address: str) -> None:
    assert resolve_name(address) == "org/name"


@pytest.mark.parametrize(
    "address", ["hf://", "hf://org/name/file.bin", "hf://../x", "https://huggingface.co/org/name/blob/main/config.json"]
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(OptionError, match=re.escape(address)):
        resolve_name(address)


@pytest.mark.parametrize("name", ["", "gpt2", "no/such/path", "~/nowhere", "../x"])
def test_other_names_are_unchanged(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve_name(name) == name


def test_file_resolves_to_the_checkpoint_in_its_folder(tmp_path: Path) -> None:
    single = build_checkpoint(tmp_path / "single", "llama")
    sharded = write_shards(tmp_path / "sharded", cut(llama_tensors(), 3))
    torch_file = write_torch(tmp_path / "torch", {"weights.pth": llama_tensors()}, index=False)
    assert resolve_name(str(single / "model.safetensors")) == str(single)
    for path in sharded.glob("model*"):
        assert resolve_name(str(path)) == str(sharded)
    assert resolve_name(str(torch_file / "weights.pth")) == str(torch_file)
    assert resolve_name(str(sharded)) == str(sharded)


def test_file_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "m", "llama")
    (folder / "other.bin").write_bytes(b"x")
    with pytest.raises(CheckpointNotFoundError, match=r"which is model\.safetensors"):
        resolve_name(str(folder / "other.bin"))


def test_used_file_still_resolves_to_its_split(tmp_path: Path) -> None:
    single = build_checkpoint(tmp_path / "single", "llama")
    Call(str(single), compression="4bit", delete_original=True).make()
    sharded = write_shards(tmp_path / "sharded", cut(llama_tensors(), 3))
    interrupted(Call(str(sharded)), 2)
    old = tmp_path / "old"
    (old / "splitted_model").mkdir(parents=True)
    (old / "splitted_model" / "lm_head.safetensors.done").touch()
    for file in (single / "model.safetensors", sharded / "model-00001-of-00003.safetensors", old / "weights.pth"):
        assert not file.exists()
        assert resolve_name(str(file)) == str(file.parent)


@pytest.mark.parametrize("sequential", [True, False])
def test_missing_file_does_not_resolve_to_another_split(tmp_path: Path, sequential: bool) -> None:
    folder = write_shards(tmp_path / "m", cut(llama_tensors(), 3))
    begun = interrupted(Call(str(folder), sequential=sequential), 1)
    for _ in range(2):  # of an unfinished split, then of a finished one
        for name in ("other.safetensors", "other.gguf", "model-00004-of-00004.safetensors"):
            assert resolve_name(str(folder / name)) == str(folder / name)
        assert Call(str(folder), sequential=sequential).make() == begun


def test_similar_names_are_local_ones(home: Path, tmp_path: Path) -> None:
    for repository in ("Qwen--Qwen2.5-7B-Instruct", "Qwen--Qwen2.5-72B-Instruct", "meta-llama--Llama-3.1-8B"):
        (home / f"models--{repository}").mkdir(parents=True)
    (home / "local" / "my-rabbit-0123456789ab").mkdir(parents=True)
    assert locations.known_names()[-1] == "my-rabbit"
    assert similar_names("Qwen/Qwen2.5-7B-Instrct") == ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-72B-Instruct")
    assert similar_names("llama-3.1-8b") == ("meta-llama/Llama-3.1-8B",)
    assert similar_names("my-rabit") == ("my-rabbit",)
    assert similar_names("something-else") == ()
    (tmp_path / "checkpoint").mkdir()
    assert similar_names(str(tmp_path / "chekpoint"))[0] == str(tmp_path / "checkpoint")


def test_error_of_a_missing_name_proposes_similar_names(hub_environment: HubEnvironment) -> None:
    (locations.home() / "models--org--rabbit").mkdir(parents=True)
    with pytest.raises(CheckpointNotFoundError) as caught:
        prepare.find(prepare.ModelSpec("org/rabit"))
    assert "Did you mean org/rabbit? Else: Check the spelling" in str(caught.value)
    with pytest.raises(CheckpointNotFoundError) as caught:
        prepare.find(prepare.ModelSpec("hf://org/something"))
    assert "Did you mean" not in str(caught.value)


def test_error_without_a_hub_proposes_similar_names(hub_environment: HubEnvironment, local_hub: object) -> None:
    (locations.home() / "models--org--rabbit").mkdir(parents=True)
    local_hub.stop()  # type: ignore[attr-defined]
    with pytest.raises(HubError, match="Did you mean org/rabbit"):
        prepare.find(prepare.ModelSpec("org/rabit"))
    with pytest.raises(HubError) as caught:
        prepare.find(prepare.ModelSpec("org/rabbit"))
    assert "Did you mean" not in str(caught.value)


def test_a_file_that_is_no_model_is_named_itself(tmp_path: Path) -> None:
    """Not its folder, which the user did not name."""
    file = tmp_path / "README.md"
    file.write_text("# A model\n")
    for others in ((), ("a.gguf", "b.gguf")):  # with two models the folder's own error asks to name one
        for name in others:
            (tmp_path / name).touch()
        with pytest.raises(
            CheckpointNotFoundError, match=r"README\.md is no file of weights: those are GGUF"
        ) as caught:
            resolve_name(str(file))
        assert caught.value.remedy == "Use the folder or file that holds the weights, or a repository id."


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("name", ["63", "a.gguf"])
def test_a_pipe_is_called_one(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointNotFoundError, match=rf"{name} is neither a file nor a folder, but a pipe"):
        resolve_name(str(tmp_path / name))


def test_served_name(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "my-model", "llama")
    (folder / "splitted_model.4bit").mkdir()
    for name in (folder, folder / "splitted_model.4bit", folder / "model.safetensors"):
        assert served_name(str(name)) == "my-model"
    assert served_name("org/name") == served_name("hf://org/name") == "org/name"
    (tmp_path / "files").mkdir()
    write_gguf(tmp_path / "files" / "Tiny-Q4_K_M.gguf")
    assert served_name(str(tmp_path / "files" / "Tiny-Q4_K_M.gguf")) == "Tiny-Q4_K_M"
    assert served_name("org/name:Q4_K_M") == "org/name:Q4_K_M"


def test_split_directories_are_served_as_their_models(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    (tmp_path / "files").mkdir()
    for file in (tmp_path / "files" / "Tiny-Q4_0.gguf", tmp_path / "hub" / "acme" / "tiny" / "Tiny-Q4_0.gguf"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(file)
    write_shards(tmp_path / "hub" / "acme" / "plain", cut(llama_tensors(), 2))
    names, splits = (str(tmp_path / "files" / "Tiny-Q4_0.gguf"), "acme/tiny:Q4_0", "acme/plain"), []
    for name in names:
        source = prepare.find(prepare.ModelSpec(name))
        prepare.ensure_split(source, prepare.split_options(None, min_free_disk=0))
        splits.append(source.split_folder)
    assert [served_name(str(folder)) for folder in splits] == ["Tiny-Q4_0", "acme/tiny:Q4_0", "acme/plain"]


def test_empty_variables_count_as_not_set(tmp_path: Path) -> None:
    empty = dict.fromkeys(("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_ETAG_TIMEOUT", "XDG_CACHE_HOME"), "")
    code = (
        "from rabbitllm.store.locations import home; from huggingface_hub import constants as c\n"
        "print(home(), c.HF_HUB_CACHE, c.ENDPOINT, sep='\\n')"
    )
    environment = {**os.environ, **empty, "RABBITLLM_HOME": "", "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    cache = tmp_path / ".cache/huggingface"
    expected = [str(cache / "rabbitllm"), str(cache / "hub"), "https://huggingface.co"]
    assert python(code, env=environment).stdout.split() == expected
