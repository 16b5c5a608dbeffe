"""The first seconds of a command: a line before the slow imports, and Ctrl-C while they go on."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rabbitllm.base import progress
from rabbitllm.cli import _start
from rabbitllm.cli.main import STARTING, app
from tests.support.screen import TerminalStream, run_on_terminal

pytestmark = pytest.mark.skipif(os.name == "nt", reason="terminals and signals of POSIX")

DEMO = Path(_start.__file__).parents[1] / "demo" / "model"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
LOOK = [sys.executable, "-m", "rabbitllm", "pull", str(DEMO), "--dry-run"]


def test_a_terminal_shows_the_line_until_something_else_comes() -> None:
    output = run_on_terminal(LOOK, 80, ENVIRONMENT, seconds=120)
    assert output.startswith(f"{STARTING}\r\x1b[K")
    assert output.count(STARTING) == 1


@pytest.mark.parametrize(
    ("words", "stream", "shown"),
    [([], TerminalStream, True), (["--json"], TerminalStream, False), ([], io.StringIO, False)],
    ids=["terminal", "JSON", "pipe"],
)
def test_json_and_pipes_have_no_such_line(
    monkeypatch: pytest.MonkeyPatch, words: list[str], stream: type[io.StringIO], shown: bool
) -> None:
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    app([*LOOK[3:], *words], standalone_mode=False)
    assert (STARTING in stderr.getvalue()) == shown
    assert bool(stderr.getvalue()) == stderr.isatty()


@pytest.mark.parametrize("name", ["stderr", "stdout"])
def test_the_line_goes_once_and_writes_are_those_of_before(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    streams = {other: TerminalStream() for other in ("stderr", "stdout")}
    for other, stream in streams.items():
        monkeypatch.setattr(sys, other, stream)
    monkeypatch.setenv("TERM", "xterm")
    with _start.shown("starting"):
        assert streams["stderr"].getvalue() == "starting"
        for line in ("a\n", "b\n"):
            getattr(sys, name).write(line)
        assert streams["stderr"].screen(80) == (["a", "b"] if name == "stderr" else [])
    assert not any("write" in vars(stream) for stream in streams.values())
    assert "".join(stream.getvalue() for stream in streams.values()).count("\x1b[K") == 1


def test_ctrl_c_at_the_line_ends_at_once() -> None:
    leader, follower = pty.openpty()
    program = subprocess.Popen(LOOK, stdin=follower, stdout=follower, stderr=follower, env=ENVIRONMENT)
    os.close(follower)
    output = b""
    while STARTING.encode() not in output:
        output += os.read(leader, 1 << 16)
    program.send_signal(signal.SIGINT)
    assert program.wait(600) == 130
    output += os.read(leader, 1 << 16)
    os.close(leader)
    assert output.decode().splitlines()[-1] == "interrupted"
    assert b"Traceback" not in output


# A module that catches whatever is raised while it is imported, as some do.
STUBBORN = """
import time
print("begun", flush=True)
while True:
    try:
        time.sleep(600)
    except BaseException:
        print("caught", flush=True)
"""
IMPORTS = """
from rabbitllm.base.interrupts import answer_interrupts
answer_interrupts()
import stubborn
"""
RESUMES = IMPORTS.replace(
    "import stubborn",
    """
from rabbitllm.base.interrupts import resumable
with resumable():
    import stubborn
""",
)
COMPUTES = """
import time
from rabbitllm.base.interrupts import answer_interrupts, resumable
answer_interrupts()
try:
    with resumable():
        print("begun", flush=True)
        time.sleep(600)
except KeyboardInterrupt as interrupt:
    print(f"answered: {interrupt}")
"""
# A thread or a module outlives the command: what Python then waits for is no part of it any more.
ENDS = """
import atexit, contextlib, io, sys, threading, time
from rabbitllm.__main__ import main

def last():
    print("begun", flush=True)
    time.sleep(600)

sys.argv = ["rabbitllm", "--version"]
with contextlib.redirect_stdout(io.StringIO()):
    try:
        main()
    finally:
"""
THREADS = f"""{ENDS}
        threading.Thread(target=lambda: (threading.main_thread().join(), last())).start()
"""
MODULES = f"""{ENDS}
        atexit.register(last)
"""


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (IMPORTS, (130, "", "interrupted\n")),
        (RESUMES, (130, "", "interrupted; run the same command to resume\n")),
        (COMPUTES, (0, "answered: interrupted; run the same command to resume\n", "")),
        (THREADS, (130, "", "")),
        (MODULES, (130, "", "")),
    ],
    ids=["import", "import in a command that resumes", "work", "wait for threads at the end", "end of modules"],
)
def test_only_imports_and_the_end_are_ended_at_once(tmp_path: Path, code: str, end: tuple[int, str, str]) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "begun\n"
        program.send_signal(signal.SIGINT)
        out, errors = program.communicate(timeout=600)
    assert (program.returncode, out, errors) == end


@pytest.mark.parametrize(
    ("stream", "is_told"), [(io.StringIO, True), (TerminalStream, False)], ids=["pipe", "terminal"]
)
def test_a_pipe_is_told_of_a_long_compilation(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], is_told: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setattr(progress, "LONG_SECONDS", 0.0)
    with _start.kernels_told():
        progress.tell(progress.KernelsCompiling())
        told = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert told == (f"{progress.COMPILING} …\n" if is_told else "")
