"""Where things go in a notebook: folders, limits, and what is attached."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rabbitllm import notebooks
from rabbitllm.notebooks import ELSEWHERE, HF_HOME, KAGGLE_BYTES, Places
from rabbitllm.store.locations import HOME_VARIABLE, LOCAL_FOLDER, local_folder_name
from tests.support.builders import build_checkpoint
from tests.support.hub_fixtures import HubEnvironment
from tests.support.splitting import split

NOWHERE = {"PATH": ""}


@pytest.fixture
def kaggle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kaggle" / "working").mkdir(parents=True)
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    return tmp_path / "kaggle"


def test_kaggle(kaggle: Path) -> None:
    places = notebooks.find(NOWHERE)
    assert places.kind == "Kaggle"
    assert (places.layers, places.hub) == (kaggle / "tmp" / "rabbitllm", kaggle / "tmp" / "huggingface")
    assert (places.room, places.attached) == (KAGGLE_BYTES, ())


def test_what_is_set_already_is_kept(kaggle: Path) -> None:
    places = notebooks.find({HOME_VARIABLE: "/elsewhere/layers", HF_HOME: "/elsewhere/hub"})
    assert (places.layers, places.hub) == (Path("/elsewhere/layers"), Path("/elsewhere/hub"))


def test_where_the_scratch_folder_cannot_be_made_another_is_taken(kaggle: Path) -> None:
    (kaggle / "tmp").write_text("a file")
    (kaggle.parent / "tmp").mkdir()
    assert notebooks.find(NOWHERE).layers == kaggle.parent / "tmp" / "rabbitllm"


def test_colab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    places = notebooks.find({"COLAB_RELEASE_TAG": "release-colab"})
    assert (places.kind, places.layers, places.room) == ("Colab", tmp_path / "content" / "rabbitllm", None)
    assert places.max_disk("org/name") is None


def test_elsewhere_nothing_changes(
    tmp_path: Path, hub_environment: HubEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebooks, "ROOT", tmp_path / "machine")
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    before = dict(os.environ)
    places = notebooks.settle()
    assert (places.kind, places.layers, places.hub) == (
        ELSEWHERE,
        hub_environment.home / "rabbitllm",
        hub_environment.home,
    )
    assert dict(os.environ) == before
    assert not (tmp_path / "machine").exists()


def test_settling_sets_variables_and_makes_folders(
    kaggle: Path, hub_environment: HubEnvironment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(HOME_VARIABLE, "")  # so that what is set below is taken back after the test
    monkeypatch.delenv(HOME_VARIABLE)
    monkeypatch.delenv(HF_HOME)
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        places = notebooks.settle()
    assert places.layers.is_dir()
    assert places.hub.is_dir()
    assert (os.environ[HOME_VARIABLE], os.environ[HF_HOME]) == (str(places.layers), str(places.hub))
    assert notebooks.find() == places
    assert "huggingface_hub was imported before" in caplog.text  # by these tests


def test_the_module_itself_imports_no_hub() -> None:
    code = "import sys; from rabbitllm import notebooks; print('huggingface_hub' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"


def test_attached_checkpoints_are_found(kaggle: Path) -> None:
    inputs = kaggle / "input"
    model = build_checkpoint(inputs / "models" / "owner" / "name" / "transformers" / "7b" / "1", "llama", shards=2)
    data = build_checkpoint(inputs / "a-dataset", "qwen2", tokenizer=False)
    (inputs / "pictures").mkdir()
    (inputs / "pictures" / "config.json").write_text("{}")
    build_checkpoint(inputs / "a-dataset" / "copy", "qwen2", tokenizer=False)
    assert notebooks.find(NOWHERE).attached == (data, model)
    assert f"  attached  {data}\n  attached  {model}" in str(notebooks.find(NOWHERE))


def test_an_attached_split_is_found(tmp_path: Path, kaggle: Path) -> None:
    made = split(build_checkpoint(tmp_path / "m", "llama", shards=2))
    (kaggle / "input").mkdir()
    attached = made.rename(kaggle / "input" / "layers")
    assert notebooks.find(NOWHERE).attached == (attached,)


def test_what_other_models_occupy_is_not_there_for_this_one(tmp_path: Path) -> None:
    places = Places("Kaggle", tmp_path / "layers", tmp_path, 1 << 20)
    mine = build_checkpoint(tmp_path / "mine", "llama")
    own = f"{LOCAL_FOLDER}/{local_folder_name(mine)}"
    occupied = {}
    for folder in ("models--org--name", "models--org--other", own, "local/mine-of-another-place", "local/theirs-4567"):
        file = tmp_path / "layers" / folder / "splitted_model" / "weights"
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(100_000))
        occupied[folder] = sum(one.stat().st_blocks * 512 for one in (file, file.parent))
    everything = sum(occupied.values())
    assert places.max_disk("org/name") == (1 << 20) - (everything - occupied["models--org--name"])
    assert places.max_disk("org/new") == (1 << 20) - everything
    assert places.max_disk(mine) == (1 << 20) - (everything - occupied[own])
    assert Places("Kaggle", tmp_path / "layers", tmp_path, 1000).max_disk("org/new") == 0
