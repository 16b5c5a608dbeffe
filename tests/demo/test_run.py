"""`rabbitllm demo` as `make demo` runs it, and how it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from rabbitllm.demo import run as demo

SHARDS = sorted(p.name for p in (files("rabbitllm.demo") / "model").iterdir() if p.name.endswith(".safetensors"))


def test_bundled_model_is_in_at_least_six_shards_of_at_most_8_mb() -> None:
    assert len(SHARDS) >= 6
    folder = files("rabbitllm.demo") / "model"
    weights = sum(len((folder / name).read_bytes()) for name in SHARDS)
    assert weights < 8.1e6


def test_recorded_scores_are_what_the_issue_asks() -> None:
    record = json.loads((files("rabbitllm.demo") / "score.json").read_text())
    assert record["bf16"]["exact_match"] >= 0.99
    assert {"loss", "exact_match"} <= set(record["8bit"]) & set(record["4bit"])


def test_demo_passes_and_shows_every_shard(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rabbitllm", "demo", "--dir", str(tmp_path), "--problems", "40"]
    environment = os.environ | {"COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = re.findall(r"^ *(\d+)/(\d+) .*?([\d.]+) MB .*?([\d.]+) MB *$", result.stdout, re.MULTILINE)
    assert [int(number) for number, *_ in lines] == list(range(1, len(SHARDS) + 1))
    in_use = [float(now) for _, _, now, _ in lines]
    standard = [float(other) for *_, other in lines]
    assert in_use == sorted(in_use, reverse=True)
    assert all(now < other for now, other in zip(in_use, standard, strict=True))
    for row in ("peak disk", "peak RAM", "tokens/s", "exact match", "shards left  0"):
        assert row in result.stdout
    split = tmp_path / demo.CHECKPOINT / "splitted_model.4bit"
    assert (split / "split.json").exists()
    assert not list((tmp_path / demo.CHECKPOINT).glob("*.safetensors"))


def test_demo_fails_when_the_score_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_recorded_score", lambda: 1.03)  # 3 points above a perfect score
    assert not demo.run(tmp_path, 8)


def test_demo_fails_when_a_shard_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rabbitllm.checkpoints.checkpoint import Disposal, Release
    from rabbitllm.checkpoints.local import LocalCheckpoint

    monkeypatch.setattr(LocalCheckpoint, "release", lambda self, shard: Release(shard, Disposal.KEPT))
    assert not demo.run(tmp_path, 8)
