"""A process at a terminal, of which a test is the other end."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest


class Terminal:
    """A process at a terminal of 80 columns, of which this is the other end.

    Args:
        process: the process.
        descriptor: this end.
        patience: seconds until it gives up on the process.
    """

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int, patience: float) -> None:
        self.process = process
        self.text = ""
        self._descriptor = descriptor
        self._patience = patience

    def send(self, text: str) -> None:
        """Type; a line ends with a carriage return."""
        os.write(self._descriptor, text.encode())

    def until(self, pattern: str) -> str:
        """Wait for a pattern, and return what came since the last one up to its end."""
        limit = time.monotonic() + self._patience
        while (match := re.search(pattern, self.text)) is None:
            ready, _, _ = select.select([self._descriptor], [], [], max(limit - time.monotonic(), 0))
            assert ready, f"{pattern!r} did not come in {self.text!r}"
            try:
                data = os.read(self._descriptor, 4096)
            except OSError:  # the process has ended
                data = b""
            assert data, f"it ended before {pattern!r}: {self.text!r}"
            self.text += data.decode(errors="replace")
        came, self.text = self.text[: match.end()], self.text[match.end() :]
        return came

    def interrupt_until(self, pattern: str) -> None:
        """Press Ctrl-C, and again if it was in the instant in which `input` is there and does not wait yet."""
        for _ in range(int(self._patience) // 2):
            self.send("\x03")
            limit = time.monotonic() + 2
            while time.monotonic() < limit and not re.search(pattern, self.text):
                if select.select([self._descriptor], [], [], 0.1)[0]:
                    self.text += os.read(self._descriptor, 4096).decode(errors="replace")
            if re.search(pattern, self.text):
                break
        self.until(pattern)


@contextlib.contextmanager
def at_a_terminal(
    command: Sequence[str], patience: float, environment: Mapping[str, str] = os.environ
) -> Iterator[Terminal]:
    """A command at a terminal, where Ctrl-C reaches it; killed at the end if it still runs."""
    pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x1e\x00\x50\x00\x00\x00\x00\x00")
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**environment, "TERM": "xterm-256color", "COLUMNS": "80"},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours, patience)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(ours)
