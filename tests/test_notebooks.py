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
    folders = notebooks.find(NOWHERE)
    assert folders.kind == "Kaggle"
    assert (folders.layers, folders.hub) == (kaggle / "tmp" / "rabbitllm", kaggle / "tmp" / "huggingface")
    assert (folders.room, folders.attached) == (KAGGLE_BYTES, ())


def test_set_variables_are_kept(kaggle: Path) -> None:
    folders = notebooks.find({HOME_VARIABLE: "/elsewhere/layers", HF_HOME: "/elsewhere/hub"})
    assert (folders.layers, folders.hub) == (Path("/elsewhere/layers"), Path("/elsewhere/hub"))


def test_fallback_scratch_folder(kaggle: Path) -> None:
    (kaggle / "tmp").write_text("a file")
    (kaggle.parent / "tmp").mkdir()
    assert notebooks.find(NOWHERE).layers == kaggle.parent / "tmp" / "rabbitllm"


def test_colab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    folders = notebooks.find({"COLAB_RELEASE_TAG": "release-colab"})
    assert (folders.kind, folders.layers, folders.room) == ("Colab", tmp_path / "content" / "rabbitllm", None)
    assert folders.max_disk("org/name") is None


def test_other_machines_are_unchanged(
    tmp_path: Path, hub_environment: HubEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebooks, "ROOT", tmp_path / "machine")
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    before = dict(os.environ)
    folders = notebooks.settle()
    assert (folders.kind, folders.layers, folders.hub) == (
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
        folders = notebooks.settle()
    assert folders.layers.is_dir()
    assert folders.hub.is_dir()
    assert (os.environ[HOME_VARIABLE], os.environ[HF_HOME]) == (str(folders.layers), str(folders.hub))
    assert notebooks.find() == folders
    assert "huggingface_hub was imported before" in caplog.text  # by these tests


def test_the_module_itself_imports_no_hub() -> None:
    code = "import sys; from rabbitllm import notebooks; print('huggingface_hub' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


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
    split_folder = split(build_checkpoint(tmp_path / "m", "llama", shards=2))
    (kaggle / "input").mkdir()
    attached = split_folder.rename(kaggle / "input" / "layers")
    assert notebooks.find(NOWHERE).attached == (attached,)


def test_splits_of_other_models_reduce_max_disk(tmp_path: Path) -> None:
    folders = Places("Kaggle", tmp_path / "layers", tmp_path, 1 << 20)
    checkpoint = build_checkpoint(tmp_path / "mine", "llama")
    ours = f"{LOCAL_FOLDER}/{local_folder_name(checkpoint)}"
    occupied = {}
    for folder in ("models--org--name", "models--org--other", ours, "local/mine-of-another-place", "local/theirs-4567"):
        file = tmp_path / "layers" / folder / "splitted_model" / "weights"
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(100_000))
        occupied[folder] = sum(path.stat().st_blocks * 512 for path in (file, file.parent))
    total = sum(occupied.values())
    assert folders.max_disk("org/name") == (1 << 20) - (total - occupied["models--org--name"])
    assert folders.max_disk("org/new") == (1 << 20) - total
    assert folders.max_disk(checkpoint) == (1 << 20) - (total - occupied[ours])
    assert Places("Kaggle", tmp_path / "layers", tmp_path, 1000).max_disk("org/new") == 0
