"""The benchmark of open questions on a GPU: what it says without one, its processes, and every step rehearsed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import commands, gpu
from benchmarks.gpu.child import Place
from benchmarks.gpu.gpu import STEPS, Step, is_right, main, page, run
from benchmarks.lib import peers
from benchmarks.lib.process import REPOSITORY

LIGHT = "tests.benchmarks.gpu_steps"
"""The module of steps that need no torch."""


def step(name: str, seconds: float = 60) -> Step:
    return Step(name, f"The step {name}", seconds, f"{LIGHT}:{name}")


def test_without_a_gpu_it_ends_with_a_sentence_and_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said[:3]] == ["Found no GPU", "Needed", "What to do"]
    assert f"torch {torch.__version__}" in said[0]
    assert said[3] == "--rehearse takes the device of the tests."
    assert not (tmp_path / "out").exists()
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [step.name for step in STEPS]


def test_the_page_is_made_from_the_results() -> None:
    rows = [{"GPU": "a", "GB/s": 12.3456, "ok": True}, {"GPU": "b", "GB/s": None, "ok": False}, {"blocks": 1234567}]
    results = {
        "is_rehearsal": False,
        "machine": {"ram_gib": 30.0},
        "versions": {"torch": "2.13"},
        "steps": {
            "link": {"title": "The link", "seconds": 1.25, "rows": rows, "error": None},
            "kernels": {"title": "Kernels", "seconds": 2, "rows": [], "error": "Traceback\nValueError: it"},
        },
    }
    text = page(json.loads(json.dumps(results)))
    assert text.startswith("# On a GPU\n\nram gib: 30.0; torch: 2.13\n\n")
    assert "| link | The link | 1.25 | NO |\n| kernels | Kernels | 2 | failed |" in text
    assert "| GPU | GB/s | ok |\n| --- | ---: | ---: |\n| a | 12.35 | yes |\n| b | - | NO |\n\n| blocks |" in text
    assert "## kernels: Kernels\n\n```text\nTraceback\nValueError: it\n```" in text


def test_a_step_that_has_a_result_is_not_repeated(tmp_path: Path) -> None:
    base = tmp_path / "gpu"
    for _ in range(2):
        found = run([step("counts")], base, is_rehearsal=False, again=False, seconds=600)
        assert found["steps"]["counts"]["rows"] == [{"runs": 1}]
    assert json.loads(base.with_suffix(".json").read_text()) == found


@pytest.mark.long
def test_a_step_that_fails_in_any_way_costs_no_other_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["two_rows", "raises", "dies", "lacks_a_package", "is_wrong", "two_rows_again"]
    steps = [*map(step, names)]
    base = tmp_path / "out" / "gpu"
    run(steps, base, is_rehearsal=False, again=False, seconds=600)
    found = json.loads(base.with_suffix(".json").read_text())["steps"]
    assert list(found) == [one.name for one in steps]
    assert [is_right(one) for one in found.values()] == [True, False, False, False, False, True]
    assert found["two_rows"]["rows"] == found["two_rows_again"]["rows"] == [{"number": 1}, {"number": 2}]
    assert "ValueError: this went wrong" in found["raises"]["error"]
    assert "in raises" in found["raises"]["error"]
    assert found["dies"]["error"].startswith(f"The process died, exit status {-signal.SIGKILL}.\n")
    assert "last words" in found["dies"]["error"]
    assert found["lacks_a_package"]["error"] == "This step needs the package no_such_package, which is not installed."
    assert all(found[name]["rows"] == [{"number": 1}] for name in ("raises", "dies", "lacks_a_package"))
    assert base.with_suffix(".md").read_text() == page(json.loads(base.with_suffix(".json").read_text()))


@pytest.mark.long
def test_a_step_that_hangs_keeps_its_rows_and_costs_no_other_step(tmp_path: Path) -> None:
    """Its limit is longer where no process has begun in a shorter one."""
    steps: dict[str, Any] = {"hangs": {"rows": []}}
    for seconds in (3, 30, 300):
        if not steps["hangs"]["rows"]:
            base = tmp_path / str(seconds) / "gpu"
            chosen = [step("hangs", seconds), step("two_rows")]
            steps = run(chosen, base, is_rehearsal=False, again=False, seconds=600)["steps"]
            assert steps["hangs"]["error"] == f"Not over after {seconds} s."
    assert steps["hangs"]["rows"] == [{"number": 1}]
    assert is_right(steps["two_rows"])


@pytest.mark.long
def test_after_a_kill_it_goes_on_with_the_step_that_was_not_over(tmp_path: Path) -> None:
    """Its processes end with it. What has a result is not repeated, unless it is asked for."""
    code = (
        "import sys; from pathlib import Path; from benchmarks.gpu.gpu import run, Step\n"
        f"steps = [Step(name, name, 60, '{LIGHT}:' + name) for name in ('two_rows', 'hangs_once', 'counts')]\n"
        "run(steps, Path(sys.argv[1]), is_rehearsal=False, again='--again' in sys.argv, seconds=600)"
    )
    base = tmp_path / "out" / "gpu"
    command = [sys.executable, "-c", code, str(base)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=environment)
    waiting = base.parent / "gpu" / "hanging"
    end = time.monotonic() + 600
    while not waiting.exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.kill()
    process.wait()
    child = int(waiting.read_text())
    assert list(json.loads(base.with_suffix(".json").read_text())["steps"]) == ["two_rows"]
    while time.monotonic() < end and Path(f"/proc/{child}/cmdline").exists():
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists()
    for arguments, counted in (([], 1), ([], 1), (["--again"], 2)):
        subprocess.run([*command, *arguments], env=environment, check=True)
        found = json.loads(base.with_suffix(".json").read_text())["steps"]
        assert found["hangs_once"]["rows"] == [{"number": 2}]
        assert found["counts"]["rows"] == [{"runs": counted}]


@pytest.mark.long
def test_a_step_that_the_limit_of_all_cuts_short_has_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 2)
    given: dict[str, Any] = {"is_rehearsal": False, "again": False}
    base = tmp_path / "out" / "gpu"
    steps = [step("hangs"), step("two_rows")]
    assert run(steps, base, **given, seconds=3)["steps"] == {}
    assert list(run(steps[1:], base, **given, seconds=600)["steps"]) == ["two_rows"]


@pytest.mark.long
def test_every_step_runs_on_the_device_of_the_tests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "gpu", "--rehearse", "--out", str(tmp_path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=True)
    steps = json.loads((tmp_path / "rehearsal.json").read_text())["steps"]
    assert list(steps) == list(EXPECTED) == [one.name for one in STEPS]
    for name, expected in EXPECTED.items():
        found = steps[name]
        assert found["error"] is None
        assert all(row.get("ok", True) for row in found["rows"])
        assert {key: sum(key in row for row in found["rows"]) for key in expected} == expected


def test_a_slow_command_fails_on_the_device_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal shares its processor with other tests."""
    monkeypatch.setattr(commands, "LIMIT", 0)
    for is_rehearsal in (True, False):
        assert commands.ended(Place(tmp_path, is_rehearsal), "--version")["ok"] is is_rehearsal


EXPECTED = {
    "versions": {"package": 10, "GB/s to it": 4},
    "kernels": {"quantized to": 2, "dequantized": 13, "product": 20},
    "families": {"types": 1},
    "commands": {"command": 9, "different answers": 1},
    "pinned": {"blocks": 1, "copies to": 3, "process": 1},
    "attention": {"kernel": 20},
    "races": {"late": 18, "Ctrl-C in each wait of": 2},
    "pace": {"of its limit": 3},
    "overhead": {"ms a layer": 4},
    "wide": {"case": 12},
    "whole": {"GB a pass": 2},
    "forms": {"form": 15, "load s": 15, "s/token": 15},
    "vram": {"runner": 5},
}
"""Rows that have a column."""


def test_a_worker_in_this_interpreter_sees_what_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that lie in a folder of their own, too."""
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    assert peers.variables(peers.THIS, Path())["PYTHONPATH"] == f"{REPOSITORY}{os.pathsep}/somewhere/else"
    monkeypatch.delenv("PYTHONPATH")
    assert peers.variables(peers.THIS, Path())["PYTHONPATH"] == str(REPOSITORY)
