"""The `rabbitllm` command, in this process or in one of its own, at a terminal and as a server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

PATIENCE = 600.0
"""Seconds until a test gives up on a process; many times what an idle machine takes."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def object(self) -> Any:
        """The JSON object on stdout."""
        assert self.code == 0, self.err
        return json.loads(self.out)


def call(*arguments: object, stdin: str = "") -> Done:
    """Run the command in this process, as `python -m rabbitllm` runs it."""
    out, err = io.StringIO(), io.StringIO()
    with (
        tempfile.TemporaryFile("w+") as piped,
        mock.patch.object(sys, "argv", ["rabbitllm", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", piped),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        piped.write(stdin)
        piped.seek(0)
        code: Any = 0
        try:
            runpy.run_module("rabbitllm", run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
    return Done(code, out.getvalue(), err.getvalue())


def command(*arguments: object) -> list[str]:
    """The command line of a process of its own."""
    return [sys.executable, "-m", "rabbitllm", *map(str, arguments)]


def begin(*arguments: object) -> subprocess.Popen[str]:
    """Start the command in a process of its own; the caller ends it."""
    return subprocess.Popen(
        command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


class Terminal:
    """A process at a terminal of 80 columns, of which this is the other end."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self.text = ""
        self._descriptor = descriptor

    def send(self, text: str) -> None:
        """Type; a line ends with a carriage return."""
        os.write(self._descriptor, text.encode())

    def until(self, wanted: str) -> str:
        """Wait for a pattern, and return what came since the last one up to its end."""
        limit = time.monotonic() + PATIENCE
        while (found := re.search(wanted, self.text)) is None:
            ready, _, _ = select.select([self._descriptor], [], [], max(limit - time.monotonic(), 0))
            assert ready, f"{wanted!r} did not come in {self.text!r}"
            try:
                data = os.read(self._descriptor, 4096)
            except OSError:  # the process has ended
                data = b""
            assert data, f"it ended before {wanted!r}: {self.text!r}"
            self.text += data.decode(errors="replace")
        came, self.text = self.text[: found.end()], self.text[found.end() :]
        return came


@contextlib.contextmanager
def at_a_terminal(*arguments: object) -> Iterator[Terminal]:
    """The command at a terminal, where Ctrl-C reaches it; killed at the end if it still runs."""
    pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x1e\x00\x50\x00\x00\x00\x00\x00")
    process = subprocess.Popen(
        command(*arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**ENVIRONMENT, "TERM": "xterm-256color", "COLUMNS": "80"},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(ours)


class Server:
    """`rabbitllm serve` in a process of its own.

    Args:
        folder: of the model.
        log: what it prints goes there.
        options: of the command.
    """

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("wb") as said:
            self._process = subprocess.Popen(
                command("serve", folder, "--port", port, *options),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT,
            )

    def wait(self) -> None:
        """Return when it answers."""
        limit = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < limit, "the server does not answer"
            time.sleep(0.05)

    def get(self, path: str) -> str:
        """The answer to a GET.

        Raises:
            OSError: there is none, or it is an error.
        """
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, timeout=PATIENCE) as answer:
            text: str = answer.read().decode()
            return text

    def metrics(self) -> dict[str, float]:
        """What `/metrics` says: name with its labels -> value."""
        found = re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", self.get("/metrics"), re.MULTILINE)
        return {name: float(value) for name, value in found}

    def end(self) -> int:
        """Ask it to end, and wait; its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(PATIENCE)

    def kill(self) -> None:
        """End it whatever it does."""
        self._process.kill()
        self._process.wait()
