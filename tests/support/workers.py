"""Processes that make calls when they are told to, so that two can race, and one can be killed or interrupted.

    with Worker(tmp_path / "a") as a, Worker(tmp_path / "b") as b:
        a.begin(call)
        b.begin(call)
        assert a.result() == b.result()

Each is started again by the interpreter, as a user's would be, and has imported what a call needs before it is told of
one. Knows nothing of hubs: where they are is in the environment that it inherits.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from rabbitllm.storage.durable import Step
from tests.support.splitting import Call, Counter
from tests.support.ticks import observe_ticks

_ROOT = Path(__file__).parent.parent.parent
_PATIENCE = 600.0


class Worker:
    """One such process; a context manager that ends it. ``notes`` is a file that its stderr goes to."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes
        with notes.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.workers"],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert self._read() == "ready"

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def stderr(self) -> str:
        return self._notes.read_text()

    def begin(self, call: Call, pause_at: int | None = None) -> None:
        """Make it make the call; with ``pause_at``, up to that step (counted from 0) and no further."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([dataclasses.asdict(call), pause_at]) + "\n")
        self.process.stdin.flush()

    def result(self) -> Path:
        """The split directory that the call made."""
        answer = self._read()
        assert answer.startswith("made "), f"{answer}\n{self.stderr}"
        return Path(answer.removeprefix("made "))

    def wait_for_pause(self) -> None:
        assert self._read() == "paused"

    def go_on(self) -> None:
        """Let it go on from its pause."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def wait_for_stderr(self, text: str) -> str:
        """The line of stderr in which the text is, as soon as it is there."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            for line in self.stderr.splitlines(keepends=True):
                if text in line and line.endswith("\n"):
                    return line
            time.sleep(0.01)
        raise AssertionError(f"no {text!r} in:\n{self.stderr}")

    def _read(self) -> str:
        assert self.process.stdout is not None
        timer = threading.Timer(_PATIENCE, self.process.kill)  # a test that hangs tells nothing
        timer.start()
        try:
            return self.process.stdout.readline().rstrip("\n")
        finally:
            timer.cancel()


def _serve() -> None:
    print("ready", flush=True)
    while line := sys.stdin.readline():
        fields, pause_at = json.loads(line)
        if fields["compression"]:
            _use_one_thread()
        counter = Counter(lambda number, step, index=pause_at: _pause(number, step, index))  # type: ignore[misc]
        try:
            with observe_ticks(counter):
                print(f"made {Call(**fields).make()}", flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {' '.join(str(error).split())}", flush=True)


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _pause(number: int, step: Step, index: int | None) -> None:
    if number == index:
        print("paused", flush=True)
        sys.stdin.readline()  # until it is told to go on, or is ended


if __name__ == "__main__":
    _serve()
