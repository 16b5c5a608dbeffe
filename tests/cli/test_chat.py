"""`rabbitllm chat` as a user meets it: over a pipe, and at a terminal with the bundled model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rabbitllm.cli.main import app
from rabbitllm.errors import OptionError
from tests.support.demo_models import demo_model, endless_model

OF_AN_ANSWER = r"(?<![\d\[?;])(1[2-9]|[2-9]\d)"
"""Digits that are neither a count of the model's 11 units, while it is waited for, nor part of an escape sequence."""
PATIENCE = 120
"""Seconds until a test gives up on a process."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model(tmp_path_factory.mktemp("chat") / "demo-model")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model without an end: it goes on until it is stopped."""
    return endless_model(tmp_path_factory.mktemp("chat") / "endless")


def piped(folder: Path, lines: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    command = [
        sys.executable,
        "-m",
        "rabbitllm",
        "chat",
        str(folder),
        "--device",
        "cpu",
        "--temperature",
        "0",
        *options,
    ]
    return subprocess.run(command, input=lines.encode(), capture_output=True, timeout=PATIENCE, check=False)


@pytest.mark.long
def test_lines_over_a_pipe(demo: Path, tmp_path: Path) -> None:
    """Answers alone are on stdout; what went wrong is in the exit code, and the talk went on after it."""
    talk = tmp_path / "talk.json"
    lines = f"What is 12 + 7?\n/save {talk}\n/stats\n/load nowhere.json\nWhat is 20 + 22?\n"
    process = piped(demo, lines, "--max-memory", "cpu=0")
    notes = process.stderr.decode()
    assert (process.returncode, process.stdout.decode()) == (1, "19\n42\n"), notes
    assert re.search(r"moved +[\d.]+ MB from the disk", notes)
    assert "error: nowhere.json cannot be read" in notes
    assert "Traceback" not in notes
    assert json.loads(talk.read_text())["messages"][0]["content"] == "What is 12 + 7?"
    assert (demo / "model-00001-of-00012.safetensors").exists()


class Terminal:
    """A process at a terminal of 80 columns, of which this is the other end."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self.text = ""

    def send(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def until(self, pattern: str) -> str:
        """Wait for a text (a pattern), and return what came since the last one up to its end."""
        limit = time.monotonic() + PATIENCE
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
        for _ in range(PATIENCE // 2):
            self.send("\x03")
            limit = time.monotonic() + 2
            while time.monotonic() < limit and not re.search(pattern, self.text):
                if select.select([self._descriptor], [], [], 0.1)[0]:
                    self.text += os.read(self._descriptor, 4096).decode(errors="replace")
            if re.search(pattern, self.text):
                break
        self.until(pattern)


@contextlib.contextmanager
def at_a_terminal(folder: Path, *options: str) -> Iterator[Terminal]:
    pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x1e\x00\x50\x00\x00\x00\x00\x00")
    process = subprocess.Popen(
        [sys.executable, "-m", "rabbitllm", "chat", str(folder), "--device", "cpu", "--temperature", "0", *options],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(ours)


@pytest.mark.long
def test_with_a_draft_model(demo: Path) -> None:
    plain, drafted = (piped(demo, "1 + 2 =\nAnd 2 + 2 =\n", *draft) for draft in ((), ("--draft", str(demo))))
    assert (drafted.returncode, drafted.stdout) == (0, plain.stdout)
    assert b"no reusable KV cache" not in drafted.stderr


@pytest.mark.long
def test_at_a_terminal(endless: Path, tmp_path: Path) -> None:
    """Ctrl-C stops an answer and not the conversation; at the prompt it says how to leave."""
    talk = tmp_path / "talk.json"
    with at_a_terminal(endless, "--max-memory", "cpu=0") as terminal:
        terminal.until(r"Ctrl-D")
        terminal.until(r">>> ")
        terminal.interrupt_until(r"/exit or Ctrl-D exits")
        terminal.until(r">>> ")
        for first, last in (("What is 12 + 7?", ""), ('"""What is', '12 + 7?"""')):
            terminal.send(f"{first}\r")
            if last:
                terminal.until(r"\.\.\. ")
                terminal.send(f"{last}\r")
            terminal.until(r"\?(\"\"\")?\r\n(?s:.*?)" + OF_AN_ANSWER)
            terminal.send("\x03")
            terminal.until(r"stopped; the partial answer stays")
            terminal.until(r">>> ")
        terminal.send(f"/save {talk}\r")
        terminal.until(r"wrote 2 exchanges")
        terminal.until(r">>> ")
        terminal.send("\x04")
        assert terminal.process.wait(PATIENCE) == 0
    messages = json.loads(talk.read_text())["messages"]
    assert [message.get("stopped", False) for message in messages] == [False, True, False, True]
    assert messages[1]["content"].strip().startswith("1")
    assert messages[2]["content"] == "What is\n12 + 7?"


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--max-memory", "24GiB"], "names no device"), (["--compression", "3bit"], "does not exist")],
)
def test_wrong_options_are_refused(demo: Path, options: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CliRunner().invoke(app, ["chat", str(demo), *options], catch_exceptions=False)
