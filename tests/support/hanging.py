"""A test that hangs between two that do not; see `test_hangs.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

NUMBERS = "RABBITLLM_HANGING"
"""Variable of the environment with a file, to which numbers of processes are written."""


@pytest.mark.long
def test_that_takes_long() -> None:
    time.sleep(3)


def test_that_hangs() -> None:
    if not (child := os.fork()):
        time.sleep(3600)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    Path(os.environ[NUMBERS]).write_text(f"{child} {other.pid}")
    threading.Event().wait()


def test_that_passes() -> None:
    pass
