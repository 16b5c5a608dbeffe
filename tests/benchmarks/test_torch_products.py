"""The benchmark of products that torch brings itself, in small."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.decode.products import INPUTS, main


def test_every_way_is_right_and_the_figures_are_written(tmp_path: Path) -> None:
    base = tmp_path / "found" / "products"
    assert main(["--turns", "2", "--megabytes", "0", "--results", str(base)]) == 0
    rows = json.loads(base.with_suffix(".json").read_text())["runs"]
    assert {row["inputs"] for row in rows} == set(INPUTS)
    assert {"bfloat16", "torch, int4", "torch, int8", "gguf, Q4_K"} <= {row["way"] for row in rows}
    assert all(row["is_right"] and len(row["seconds"]) == 2 for row in rows)
    assert "| torch, int4 |" in base.with_suffix(".md").read_text()
