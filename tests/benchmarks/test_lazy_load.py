"""The benchmark of lazy loading, in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.split.lazy_load import ROWS, STAGES, LazyRun, ratios, same_bits

ROOT = Path(__file__).parent.parent.parent
OWN_ROWS = [row for row in ROWS if row != "torchhacks"]  # which would be fetched


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks need Linux")
@pytest.mark.long
def test_all_read_the_same_and_the_figures_are_written(tmp_path: Path) -> None:
    base = tmp_path / "found" / "lazy_load"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "split.lazy_load",
        "--turns",
        "2",
        "--scale",
        "tiny",
        "--only",
        *OWN_ROWS,
    ]
    ran = subprocess.run(
        [*command, "--work-dir", str(tmp_path / "work"), "--results", str(base)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    written = json.loads(base.with_suffix(".json").read_text())
    runs = written["runs"]
    assert sorted(run["row"] for run in runs) == sorted(OWN_ROWS * 2)
    assert all(run["error"] is None for run in runs)
    for run in runs:
        assert list(run["seconds"]) == list(run["cpu"]) == list(STAGES)
        assert run["seconds"]["open"] <= run["seconds"]["first"] <= run["seconds"]["all"]
    assert len({run["bits"] for run in runs if run["turn"] == 0}) == 1
    assert len(runs[0]["bits"]) == 64
    text = base.with_suffix(".md").read_text()
    assert "All rows read the same bits: yes." in text
    assert "lazy_load, safetensors, to one tensor, beside safe_open:" in text
    assert list((tmp_path / "work").glob("lazy-*")) == []


def test_ratios_are_of_the_same_turn() -> None:
    runs = [
        LazyRun(row, turn, seconds={"open": seconds}, cpu={"open": 2 * seconds}, bits=str(turn))
        for row, turn, seconds in (("a", 0, 1.0), ("b", 0, 4.0), ("a", 1, 6.0), ("b", 1, 2.0), ("a", 2, 9.0))
    ]
    found = ratios(runs, "a", "b", "open")
    assert found is not None
    assert (found.low, found.high) == (0.25, 3.0)
    assert ratios(runs, "a", "b", "open", "cpu") == found
    assert ratios(runs, "a", "c", "open") is None
    assert not same_bits(runs)
    assert same_bits(runs[:2])
