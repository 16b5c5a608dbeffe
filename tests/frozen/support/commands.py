"""The `rabbitllm` command in a process of its own, at a terminal and as a server."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.server_process import free_port
from tests.support import terminals
from tests.support.terminals import Terminal

PATIENCE = 600.0
"""Seconds until a test gives up on a process; many times what an idle machine takes."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "HF_HUB_OFFLINE": "1"}


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


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test adds, which end with it."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def at_a_terminal(*arguments: object) -> contextlib.AbstractContextManager[Terminal]:
    """The command at a terminal, where Ctrl-C reaches it; killed at the end if it still runs."""
    return terminals.at_a_terminal(command(*arguments), PATIENCE, ENVIRONMENT)


class Server:
    """`rabbitllm serve` in a process of its own.

    Args:
        folder: of the model.
        log: what it prints goes there.
        options: of the command.
    """

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        port = free_port()
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
