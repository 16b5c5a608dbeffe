"""`rabbitllm doctor` as a user meets it: what is on stdout, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rabbitllm", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        check=False,
    )


def test_stdout_is_one_json_object(tmp_path: Path) -> None:
    run = doctor("--quick", "--json", RABBITLLM_HOME=str(tmp_path))
    assert run.returncode == 0, run.stderr
    record = json.loads(run.stdout)
    keys = {"version", "machine", "models", "devices", "advice", "failures", "seconds", "can_run"}
    assert record.keys() == keys
    assert record["can_run"] is True
    assert record["failures"] == []
    assert len(record["models"]) >= 10
    assert {"compression", "output_bytes", "needs", "route", "fits", "generation", "problem"} == record["models"][0][
        "at"
    ][0].keys()


@pytest.mark.long
def test_plain_text_without_a_terminal(tmp_path: Path) -> None:
    run = doctor("--quick", RABBITLLM_HOME=str(tmp_path), HF_TOKEN="hf_secret")
    assert run.returncode == 0
    assert "This machine can run models." in run.stdout
    assert "Qwen2.5-0.5B" in run.stdout
    assert "\x1b" not in run.stdout
    assert "secret" not in run.stdout + run.stderr


@pytest.mark.long
def test_exit_code_1_if_no_model_can_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = doctor("--quick", RABBITLLM_HOME=str(tmp_path / "file" / "home"))
    assert run.returncode == 1
    assert "missing: " in run.stdout
    assert "RABBITLLM_HOME" in run.stdout
    assert "Traceback" not in run.stderr


@pytest.mark.long
def test_full_report(tmp_path: Path) -> None:
    """Every model of the list, measured."""
    run = doctor("--json", "--all", RABBITLLM_HOME=str(tmp_path))
    record = json.loads(run.stdout)
    assert record["failures"] == []
    times = [context["generation"]["token_seconds"] for model in record["models"] for context in model["at"]]
    assert all(time > 0 for time in times)
