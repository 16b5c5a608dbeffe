"""The benchmark of a large table, in small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from benchmarks.decode.tables import build, measure


@pytest.mark.long
def test_rows_of_a_small_table(tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.qwen4_exp")
    table_bytes = build(tmp_path, 30)
    with safe_open(tmp_path / "model-00002-of-00002.safetensors", "pt") as file:
        names = list(file.keys())
        rows = sum(file.get_slice(name).get_shape()[0] for name in names)
        assert torch.isfinite(file.get_tensor(names[-1])[-1]).all()
    assert table_bytes == rows * 64 * 2
    for split in (None, tmp_path / "split"):
        row = measure(tmp_path, table_bytes, 3, 20, split)
        assert 0 < row.rows <= 3 * 16
        assert 0 < row.prompt_rows <= 20 * 16
        assert len(row.read) == len(row.seconds) == 3
