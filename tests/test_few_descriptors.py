"""A checkpoint of hundreds of layer files, in processes that may have 64 open files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.builders import build_checkpoint
from tests.support.few_descriptors import (
    LAYER_FILES,
    compress,
    convert_it,
    names,
    split_and_load,
    split_until_killed,
    verify_and_repair,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="has no limit of this kind")
ROOT = Path(__file__).parent.parent
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` and its `copy`."""
    folder = tmp_path_factory.mktemp("few")
    model = build_checkpoint(folder / "model", "llama", shards=3, num_hidden_layers=61, **TINY)
    shutil.copytree(model, folder / "copy")
    return folder


def status_of(act: object, folder: Path) -> int:
    name = getattr(act, "__name__", "")
    command = [sys.executable, "-m", "tests.support.few_descriptors", name, str(folder)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **threads}, check=False, timeout=600).returncode


@pytest.mark.long
def test_it_is_split_sequentially_after_a_kill_and_loaded(folder: Path) -> None:
    assert status_of(split_until_killed, folder) == -signal.SIGKILL
    half = folder / "model" / "splitted_model"
    assert len(names(folder / "model")) == 2
    assert len(list(half.glob("*.part"))) > LAYER_FILES // 6
    assert status_of(split_and_load, folder) == 0


@pytest.mark.long
def test_it_is_verified_and_repaired(folder: Path) -> None:
    if not (folder / "model" / "splitted_model" / "split.json").exists():
        assert status_of(split_and_load, folder) == 0
    assert status_of(verify_and_repair, folder) == 0


@pytest.mark.long
def test_it_is_converted_used_unsplit_and_opened_lazily(folder: Path) -> None:
    assert status_of(convert_it, folder) == 0


@pytest.mark.long
def test_it_is_compressed(tmp_path: Path) -> None:
    """Weights are wide enough for scales that are quantized themselves; each layer file then has a scratch file."""
    build_checkpoint(tmp_path / "copy", "llama", shards=3, num_hidden_layers=61, intermediate_size=512)
    assert status_of(compress, tmp_path) == 0
