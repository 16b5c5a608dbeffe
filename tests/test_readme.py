"""Every code block of the README runs: Python as it stands, against a hub that serves the repositories it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.builders import build_checkpoint
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.quick_measuring import quick_measuring  # noqa: F401  a fixture that applies by itself
from tests.support.tiny_models import one_thread  # noqa: F401  another one

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
KAGGLE_FOLDER = "/kaggle/tmp"


def test_only_known_languages() -> None:
    assert {language for language, _ in BLOCKS} <= {"python", "bash", "text"}
    assert PYTHON
    assert SHELL


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.strip().splitlines()[-1][:40])
def test_python_block_runs(
    code: str, hub_environment: HubEnvironment, local_hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for repository in re.findall(r'"([\w.-]+/[\w.-]+)"', code):
        build_checkpoint(tmp_path / "hub" / repository, "qwen2", dtype=torch.bfloat16, shards=3)
    work = tmp_path / "work"
    work.mkdir()
    build_checkpoint(work / "my-checkpoint", "qwen3", dtype=torch.bfloat16, shards=2)
    monkeypatch.chdir(work)
    # the one path of another machine; everything else runs as it stands
    exec(compile(code.replace(KAGGLE_FOLDER, str(work)), "README.md", "exec"), {})


def test_kaggle_block_leaves_no_shard(
    hub_environment: HubEnvironment, local_hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(tmp_path / "hub" / "Qwen/Qwen2.5-72B-Instruct", "qwen2", dtype=torch.bfloat16, shards=3)
    exec(PYTHON[0].replace(KAGGLE_FOLDER, str(tmp_path)), {})
    assert (tmp_path / "layers" / "splitted_model.4bit" / "split.json").exists()
    left = [path for path in (*hub_environment.home.rglob("*"), *tmp_path.glob("layers/**/*")) if "-of-" in path.name]
    assert left == []


@pytest.mark.parametrize("line", SHELL)
def test_shell_line_exists(line: str) -> None:
    """`make` targets exist; `make test` is what runs this, and `make demo` has a test of its own."""
    words = line.split()
    if words[0] == "make":
        dry_run = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert dry_run.returncode == 0, dry_run.stderr
    else:
        assert words == ["pip", "install", "."]


@pytest.mark.long
def test_pip_install_gives_the_command(tmp_path: Path) -> None:
    """`pip install .`, without what it depends on: that is here already."""
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(ROOT)]
    subprocess.run(install, check=True)
    run = subprocess.run(
        [target / "bin" / "rabbitllm", "--version"],
        env={"PYTHONPATH": str(target), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "rabbitllm 2.0.0"
    assert (target / "rabbitllm" / "demo" / "score.json").exists()
