"""`rabbitllm serve` of a tiny model as a process of its own, and what can be asked of it from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from benchmarks.lib.server_process import free_port

START_SECONDS = 600.0
_SAMPLE = re.compile(r"^(\w+)(\{[^}]*\})? (\S+)$", re.MULTILINE)


class ServedModel:
    """A server; `start` may be called again after `end`, and it is then at the same address.

    Args:
        model: what the command opens.
        log: what it prints goes there, one start after the other.
        options: of the command.
    """

    def __init__(self, model: Path, log: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [sys.executable, "-m", "rabbitllm", "serve", str(model), "--port", str(self.port), *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> psutil.Process:
        """That runs now."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def start(self) -> None:
        """Returns when it answers."""
        with self.log.open("ab") as said:
            variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=variables
            )
        until = time.monotonic() + START_SECONDS
        while not self._is_well():
            assert self._process.poll() is None, f"the server has ended:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.05)

    def end(self, seconds: float = 600.0) -> int:
        """Ask it to end, and wait; its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(seconds)

    def kill(self) -> None:
        """Whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def get(self, path: str) -> str:
        """The answer to a GET.

        Raises:
            OSError: there is none, or it is an error.
        """
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, timeout=600) as answer:
            text: str = answer.read().decode()
            return text

    def metrics(self) -> dict[str, float]:
        """What `/metrics` says: name, with its labels as they are written there -> value."""
        return {name + labels: float(value) for name, labels, value in _SAMPLE.findall(self.get("/metrics"))}

    def _is_well(self) -> bool:
        try:
            self.get("/health")
        except OSError:
            return False
        return True
