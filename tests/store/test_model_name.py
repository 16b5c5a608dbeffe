"""What a name means, and which names are near one that means nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rabbitllm import prepare
from rabbitllm.errors import CheckpointNotFoundError, HubError, OptionError
from rabbitllm.store import locations
from rabbitllm.store.locations import meant, near
from tests.support.builders import build_checkpoint, cut, llama_tensors, write_shards, write_torch
from tests.support.hub_fixtures import HubEnvironment


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(locations.HOME_VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home"


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
    assert meant(address) == "org/name"


@pytest.mark.parametrize(
    "address", ["hf://", "hf://org/name/file.bin", "hf://../x", "https://huggingface.co/org/name/blob/main/config.json"]
)
def test_addresses_of_something_else_are_refused(address: str) -> None:
    with pytest.raises(OptionError, match=re.escape(address)):
        meant(address)


@pytest.mark.parametrize("name", ["", "gpt2", "no/such/path", "~/nowhere", "../x"])
def test_what_is_no_file_and_no_address_stays_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert meant(name) == name


def test_a_file_stands_for_the_checkpoint_in_its_folder(tmp_path: Path) -> None:
    single = build_checkpoint(tmp_path / "single", "llama")
    sharded = write_shards(tmp_path / "sharded", cut(llama_tensors(), 3))
    torch_file = write_torch(tmp_path / "torch", {"weights.pth": llama_tensors()}, index=False)
    assert meant(str(single / "model.safetensors")) == str(single)
    for path in sharded.glob("model*"):
        assert meant(str(path)) == str(sharded)
    assert meant(str(torch_file / "weights.pth")) == str(torch_file)
    assert meant(str(sharded)) == str(sharded)


def test_a_file_that_is_not_the_checkpoint_of_its_folder(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "m", "llama")
    (folder / "other.bin").write_bytes(b"x")
    with pytest.raises(CheckpointNotFoundError, match=r"begins with: that is model\.safetensors"):
        meant(str(folder / "other.bin"))


def test_a_file_that_its_split_used_up_still_names_it(tmp_path: Path) -> None:
    (tmp_path / "splitted_model.4bit").mkdir()
    assert meant(str(tmp_path / "weights.pth")) == str(tmp_path)


def test_near_names_are_those_that_are_here(home: Path, tmp_path: Path) -> None:
    for repository in ("Qwen--Qwen2.5-7B-Instruct", "Qwen--Qwen2.5-72B-Instruct", "meta-llama--Llama-3.1-8B"):
        (home / f"models--{repository}").mkdir(parents=True)
    (home / "local" / "my-rabbit-0123456789ab").mkdir(parents=True)
    assert locations.known_names()[-1] == "my-rabbit"
    assert near("Qwen/Qwen2.5-7B-Instrct") == ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-72B-Instruct")
    assert near("llama-3.1-8b") == ("meta-llama/Llama-3.1-8B",)
    assert near("my-rabit") == ("my-rabbit",)
    assert near("something-else") == ()
    (tmp_path / "checkpoint").mkdir()
    assert near(str(tmp_path / "chekpoint"))[0] == str(tmp_path / "checkpoint")


def test_a_name_that_is_not_found_is_answered_with_near_ones(hub_environment: HubEnvironment) -> None:
    (locations.home() / "models--org--rabbit").mkdir(parents=True)
    with pytest.raises(CheckpointNotFoundError) as caught:
        prepare.find(prepare.ModelSpec("org/rabit"))
    assert "Did you mean org/rabbit? Else: Check the spelling" in str(caught.value)
    with pytest.raises(CheckpointNotFoundError) as caught:
        prepare.find(prepare.ModelSpec("hf://org/something"))
    assert "Did you mean" not in str(caught.value)


def test_so_is_one_where_the_hub_cannot_be_asked(hub_environment: HubEnvironment, local_hub: object) -> None:
    (locations.home() / "models--org--rabbit").mkdir(parents=True)
    local_hub.stop()  # type: ignore[attr-defined]
    with pytest.raises(HubError, match="Did you mean org/rabbit"):
        prepare.find(prepare.ModelSpec("org/rabit"))
    with pytest.raises(HubError) as caught:
        prepare.find(prepare.ModelSpec("org/rabbit"))
    assert "Did you mean" not in str(caught.value)
