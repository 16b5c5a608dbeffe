"""The benchmark of prompts beyond memory, at a scale that says nothing of speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.batch.beyond_memory import main


@pytest.mark.long
def test_a_file_makes_the_texts_that_memory_makes_in_as_few_passes(tmp_path: Path) -> None:
    shape = ["--scale", "tiny", "--sequences", "8", "--prompt-tokens", "160", "--tokens", "6"]
    given = [*shape, "--cache-memory", "400kB", "--weights-memory", "0", "--work-dir", str(tmp_path)]
    assert main([*given, "--results", str(tmp_path / "r")]) == 0
    whole, filed, waiting = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert (whole["passes"], whole["GB from the file"]) == (filed["passes"], "0.00")
    assert int(waiting["passes"]) > 2 * int(filed["passes"])
    assert filed["the same texts"] == "8 of 8"
