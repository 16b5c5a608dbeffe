"""RABBITLLM_LOG, as a process meets it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.fresh_process import python

ROOT = Path(__file__).parent.parent
SPLIT = "import rabbitllm, sys; rabbitllm.split_and_save_layers(sys.argv[1])"
LINE = r"\d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO   |WARNING) ?.* rabbitllm\.[a-z_.]+: .+"


def split(folder: Path, log: str | None, code: str = SPLIT) -> list[str]:
    """stderr of a process that splits a small checkpoint."""
    source = write_shards(folder, cut(llama_tensors(), 2))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("RABBITLLM_LOG", None)
    if log is not None:
        environment["RABBITLLM_LOG"] = log
    result = python(code, source, env=environment)
    return result.stderr.splitlines()


@pytest.mark.parametrize(("level", "shards", "layers"), [("info", 2, 0), ("DEBUG", 2, 6), ("warning", 0, 0)])
def test_levels(tmp_path: Path, level: str, shards: int, layers: int) -> None:
    *lines, last = split(tmp_path / "model", level)
    assert last.startswith("split into 6 layer files")
    assert sum("Shard " in line for line in lines) == shards
    assert sum(" is finished: " in line for line in lines) == layers
    assert all(re.fullmatch(LINE, line) for line in lines)


def test_into_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rabbit.log"
    (line,) = split(tmp_path / "model", f"info:{file}")
    assert line.startswith("split into 6 layer files")
    logged = file.read_text().splitlines()
    assert len([line for line in logged if "Shard " in line]) == 2
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO ", line) for line in logged)
    split(tmp_path / "other", f"info:{file}")
    assert len(file.read_text().splitlines()) == 2 * len(logged)


def test_records_appear_once_in_a_program_that_logs(tmp_path: Path) -> None:
    code = "import logging; logging.basicConfig(level=logging.INFO);" + SPLIT
    assert sum("Shard 1 of 2" in line for line in split(tmp_path / "a", "info", code)) == 1
    without = split(tmp_path / "b", None, code)  # its own set-up has them, without any variable
    assert sum(line.startswith("INFO:rabbitllm.splitter._shard_loop:Shard 1 of 2") for line in without) == 1


def test_no_setup_without_the_variable(tmp_path: Path) -> None:
    (line,) = split(tmp_path / "model", None)
    assert line.startswith("split into 6 layer files")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("loud", "RABBITLLM_LOG=loud has no effect: it takes debug, info, warning, error, and after a colon a file."),
        ("info:/nowhere/at/all", "RABBITLLM_LOG=info:/nowhere/at/all: /nowhere/at/all cannot be written to (No such"),
    ],
)
def test_invalid_values_are_reported(tmp_path: Path, value: str, message: str) -> None:
    lines = split(tmp_path / "model", value)
    assert lines[0].startswith(message)
    assert lines[-1].startswith("split into 6 layer files")
