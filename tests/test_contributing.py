"""The examples of CONTRIBUTING.md: each change can be applied to the code of today, and its command is green."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```text\n(--- a/.*?)```\n\n```bash\nmake test-room ROOM=(\S+) K=(\S+)\n```", TEXT, re.DOTALL)
MAX_FILES = 3

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git applies the changes")


def applied(change: str, folder: Path, *options: str) -> None:
    done = subprocess.run(
        ["git", "apply", *options], input=change, text=True, cwd=folder, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_there_are_three() -> None:
    assert len(EXAMPLES) == TEXT.count("\n## Example ") == 3
    assert len(TEXT.split()) <= 1200


@pytest.mark.parametrize(("change", "tests", "name"), EXAMPLES, ids=[one[2] for one in EXAMPLES])
def test_a_change_fits_the_code_of_today(change: str, tests: str, name: str) -> None:
    """If it does not, apply it by hand, and copy `git diff -U1` into the page."""
    applied(change, ROOT, "--check")
    files = [file for file in re.findall(r"^\+\+\+ b/(\S+)$", change, re.MULTILINE) if not file.startswith("tests/")]
    assert 0 < len(files) <= MAX_FILES
    assert (ROOT / "tests" / tests).exists()
    assert name in change


@pytest.mark.long
@pytest.mark.parametrize(("change", "tests", "name"), EXAMPLES, ids=[one[2] for one in EXAMPLES])
def test_its_command_is_green(change: str, tests: str, name: str, tmp_path: Path) -> None:
    for folder in ("rabbitllm", "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    applied(change, tmp_path)
    command = [sys.executable, "-m", "pytest", f"tests/{tests}", "-k", name]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
