"""The benchmark of the quantizers, in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.split.quantizers import measure

ROOT = Path(__file__).parent.parent.parent

pytest.importorskip("numba")


def test_a_turn_of_each() -> None:
    row = measure("8bit", "BF16", 1 << 16, 1)
    assert row.same
    assert len(row.ratios) == 1


@pytest.mark.long
def test_both_give_the_same_bytes_and_the_figures_are_written(tmp_path: Path) -> None:
    base = tmp_path / "found" / "quantizers"
    command = [sys.executable, "-m", "benchmarks", "split.quantizers", "--turns", "2", "--megabytes", "4"]
    ran = subprocess.run(
        [*command, "--results", str(base)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(base.with_suffix(".json").read_text())["runs"]
    assert [(row["scheme"], row["dtype"]) for row in rows] == [
        (scheme, dtype) for scheme in ("4bit", "8bit") for dtype in ("BF16", "F16", "F32")
    ]
    assert all(row["same"] and len(row["ours"]) == len(row["theirs"]) == 2 for row in rows)
    assert "| 4bit, BF16 |" in base.with_suffix(".md").read_text()
    assert "8bit of BF16, times:" in ran.stdout
