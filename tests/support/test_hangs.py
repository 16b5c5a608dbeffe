"""A test that hangs is named, with what each thread did; the others are run, and nothing that it started is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import hanging
from tests.support.fresh_process import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_test_that_hangs(tmp_path: Path) -> None:
    options = "-p", "no:cacheprovider", "-o", "faulthandler_timeout=2", "-n", "2", "--dist", "loadfile"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--basetemp={tmp_path / 'pytest'}", hanging.__file__],
        cwd=ROOT,
        env={**os.environ, hanging.NUMBERS: str(tmp_path / "numbers")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 1
    assert "Timeout (0:00:02)!" in ran.stderr
    assert "in test_that_hangs" in ran.stderr
    assert "crashed while running 'tests/support/hanging.py::test_that_hangs'" in ran.stdout
    assert "1 failed, 2 passed" in ran.stdout
    started = [Path("/proc", number, "stat") for number in (tmp_path / "numbers").read_text().split()]
    end = time.monotonic() + 600
    while any(map(is_running, started)):
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(stat: Path) -> bool:
    """A process that has ended may still be there, until its new parent asks for its status."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_hangs_are_looked_for(pytestconfig: pytest.Config) -> None:
    assert 0 < pytestconfig.getini("faulthandler_timeout") <= 600
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
