"""What fails is tried again only if the process was stopped meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.fresh_process import ROOT
from tests.support.stops import unless_stopped

STOPPED_ONCE = """
import os, signal
from tests.support import stops

stops.NOTICED = 1.0
attempts = iter(range(2))

def attempt():
    if next(attempts) == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        raise ValueError("late")
    return "done"

print(stops.unless_stopped(attempt))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="nothing stops a process there")
def test_a_stopped_attempt_is_repeated() -> None:
    with subprocess.Popen([sys.executable, "-c", STOPPED_ONCE], cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        time.sleep(2)
        child.send_signal(signal.SIGCONT)
        output, _ = child.communicate()
    assert (output, child.returncode) == ("done\n", 0)


def test_what_fails_by_itself_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.stops.NOTICED", 3600.0)
    attempts = list[int]()

    def attempt() -> None:
        attempts.append(1)
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        unless_stopped(attempt)
    assert len(attempts) == 1
    assert unless_stopped(lambda: 5) == 5
