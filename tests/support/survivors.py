"""Kills what tests have started, and what these have started, once the process of the tests has ended, however it did.

A test that hangs ends its process (`faulthandler_exit_on_timeout` of pytest). What it waited for would run on, and hold
the output of the run open. This file is also the program that waits for the end. It knows those processes by a variable
of their environment, or, if they were forked and run no other program, by the end of a pipe that they have from there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_MARK = "RABBITLLM_STARTED_BY_TESTS"
_STARTED = list["subprocess.Popen[bytes]"]()


def end_with_this_process() -> None:
    """Have processes killed that this one starts from now on, once it has ended; under Linux."""
    if sys.platform != "linux":
        return
    reading, _ = os.pipe()  # of the other end a fork has a copy
    mark = f"{_MARK}={os.getpid()}"
    command = [sys.executable, "-S", "-E", __file__, str(os.getpid()), mark]
    silent = subprocess.DEVNULL
    _STARTED.append(
        subprocess.Popen(command, stdin=reading, stdout=silent, stderr=silent, env={}, start_new_session=True)
    )
    os.close(reading)
    os.environ.update([mark.split("=")])


def _is_survivor(process: Path, mark: bytes, pipe: str) -> bool:
    if mark in (process / "environ").read_bytes().split(b"\0"):
        return True
    return any(os.readlink(descriptor) == pipe for descriptor in (process / "fd").iterdir())


def _kill_survivors(mark: str) -> bool:
    """Kill all that are there; whether there were any."""
    pipe, has_killed = os.readlink("/proc/self/fd/0"), False
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if process.name != str(os.getpid()) and _is_survivor(process, mark.encode(), pipe):
                os.kill(int(process.name), signal.SIGKILL)
                has_killed = True
    return has_killed


def _main(process: str, mark: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(int(process))], [], [])
    while _kill_survivors(mark):
        time.sleep(0.05)


if __name__ == "__main__":
    _main(*sys.argv[1:])
