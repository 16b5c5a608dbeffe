"""`rabbitllm quality` as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import Result

from tests.support.builders import build_checkpoint
from tests.support.commands import invoke
from tests.support.tiny_models import one_thread, split  # noqa: F401  a fixture that applies by itself

SHORT = ["--device", "cpu", "--tokens", "64", "--window", "32"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(build_checkpoint(tmp_path_factory.mktemp("quality") / "model", "llama", shards=2), "4bit")


def quality(*arguments: str) -> Result:
    return invoke("quality", *arguments, *SHORT)


def test_table_equals_record(packed: Path) -> None:
    record = json.loads(quality(str(packed), "--json").stdout)
    shown = quality(str(packed)).stdout
    assert record["model"]["compression"] == "4bit"
    assert record["positions"] == 64
    rows = dict(re.findall(r"^(reference|model) +(.+)$", shown, re.MULTILINE))
    assert rows["model"].split()[0] == "4bit"
    assert f"{record['model']['perplexity']:,.4f}" in rows["model"]
    assert f"{record['against']['perplexity']:,.4f}" in rows["reference"]
    assert f"mean              {record['divergence']['mean']:.4f}"[:24] in shown
    assert f"{record['agreement']:.2%}" in shown
    assert max(map(len, shown.splitlines())) < 200


def test_model_has_no_divergence_from_itself(packed: Path) -> None:
    record = json.loads(quality(str(packed), "--against", str(packed), "--json").stdout)
    assert record["divergence"]["largest"] == 0
    assert record["agreement"] == 1
    assert "100%" in quality(str(packed), "--against", str(packed)).stdout


@pytest.mark.long
def test_errors_are_one_message(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("A hare.", encoding="utf-8")
    command = [sys.executable, "-m", "rabbitllm", "quality", str(packed), "--text", str(tmp_path / "short.txt"), *SHORT]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 1
    assert "error: The text has" in process.stderr
    assert "What to do: Use a longer text." in process.stderr
    assert "Traceback" not in process.stderr
    assert process.stdout == ""
