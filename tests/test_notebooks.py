"""Where things go in a notebook: folders, limits, and what is attached."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from rabbitllm import AutoModel, notebooks
from rabbitllm.notebooks import ELSEWHERE, HF_HOME, HF_HUB_CACHE, KAGGLE_BYTES, Places
from rabbitllm.store.locations import HOME_VARIABLE, LOCAL_FOLDER, local_folder_name
from tests.support.builders import build_checkpoint
from tests.support.fresh_process import python
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.splitting import split

NOWHERE = {"PATH": ""}


@pytest.fixture
def kaggle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kaggle" / "working").mkdir(parents=True)
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    for variable in (HOME_VARIABLE, HF_HOME, "HF_TOKEN"):  # so that what `settle` sets is taken back after the test
        value = os.environ.get(variable)
        monkeypatch.setenv(variable, value or "")
        if value is None or variable == HOME_VARIABLE:
            monkeypatch.delenv(variable)
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
    monkeypatch.delenv(HF_HOME, raising=False)
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        folders = notebooks.settle()
    assert folders.layers.is_dir()
    assert folders.hub.is_dir()
    assert (os.environ[HOME_VARIABLE], os.environ[HF_HOME]) == (str(folders.layers), str(folders.hub))
    assert notebooks.find() == folders
    assert "huggingface_hub was imported before" in caplog.text  # by these tests


def test_the_module_itself_imports_no_hub() -> None:
    code = "import sys; from rabbitllm import notebooks; print('huggingface_hub' in sys.modules)"
    result = python(code)
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


def test_the_hub_cache_reduces_max_disk_of_other_models(
    tmp_path: Path, hub_environment: HubEnvironment, local_hub: LocalHub
) -> None:
    draft = build_checkpoint(tmp_path / "hub" / "org" / "draft", "llama", shards=2)
    folders = Places("Kaggle", tmp_path / "layers", hub_environment.home, 1 << 24)
    assert folders.max_disk("org/large") == 1 << 24
    AutoModel.from_pretrained("org/draft", split=False)
    left = folders.max_disk("org/large")
    assert left is not None
    weights = sum(file.stat().st_size for file in draft.glob("*.safetensors"))
    assert weights < (1 << 24) - left < weights + 200_000  # config and tokenizer
    [snapshot] = hub_environment.home.glob("hub/models--org--draft/snapshots/*")
    for name in ("org/draft", "hf://org/draft", snapshot):
        assert folders.max_disk(name) == 1 << 24
    AutoModel.from_pretrained("org/draft", split=False)
    assert folders.max_disk("org/large") == left  # else an interrupted split would go on with another limit


def test_the_hub_cache_may_be_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HF_HUB_CACHE, str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--org--draft" / "blobs").mkdir(parents=True)
    (tmp_path / "cache" / "models--org--draft" / "blobs" / "weights").write_bytes(bytes(1000))
    assert Places("Kaggle", tmp_path / "layers", tmp_path / "home", 5000).max_disk("org/large") == 4000


# Kaggle's own client (docker-python, patches/kaggle_secrets.py) needs its service; the same names and errors here
SECRETS = """
class BackendError(Exception):
    pass

class UserSecretsClient:
    def get_secret(self, label):
        if label not in SECRETS:
            raise BackendError(f"Unexpected response from the service. Response: {label}.")
        return SECRETS[label]
"""


@pytest.mark.parametrize(
    ("secrets", "before", "after"),
    [
        ({"HF_TOKEN": "hf_secret"}, None, "hf_secret"),
        ({"HF_TOKEN": "hf_secret"}, "hf_own", "hf_own"),
        ({"OTHER": "x"}, None, None),
        (None, None, None),
    ],
    ids=["secret", "variable is kept", "no such secret", "no client"],
)
def test_a_secret_of_kaggle_is_the_token(
    kaggle: Path,
    tmp_path: Path,
    hub_environment: HubEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    secrets: dict[str, str] | None,
    before: str | None,
    after: str | None,
) -> None:
    from huggingface_hub import get_token

    if secrets is not None:
        (tmp_path / "kaggle_secrets.py").write_text(f"SECRETS = {secrets!r}\n{SECRETS}")
        monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kaggle_secrets", raising=False)
    monkeypatch.setenv("HF_TOKEN", before) if before else monkeypatch.delenv("HF_TOKEN", raising=False)
    notebooks.settle()
    assert os.environ.get("HF_TOKEN") == after
    assert get_token() == after
    sys.modules.pop("kaggle_secrets", None)
