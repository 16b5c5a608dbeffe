"""A process that has imported its libraries and waits: its memory is bounded now, and it starts when told. Linux only.

It says what it has to say in lines of JSON on its stdout. Knows neither what the process does nor how its environment
came to be.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.control_group import ControlGroup
from benchmarks.lib.measure import drop_cached

REPOSITORY = Path(__file__).resolve().parent.parent.parent


class PeerError(Exception):
    """A peer could not be installed, or failed at its job; the message is what the table shows."""


def run_tool(command: Sequence[str], failed: str) -> None:
    """Run a program to its end.

    Raises:
        PeerError: `failed`, and the last line that it said.
    """
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        lines = (made.stderr or made.stdout).strip().splitlines()
        raise PeerError(f"{failed}: {lines[-1] if lines else f'exit status {made.returncode}'}")


@dataclass(frozen=True)
class Cap:
    """A group that a process is in, and what it may take in addition to what it takes when it is idle (bytes)."""

    group: ControlGroup
    nbytes: int


@dataclass(frozen=True)
class Idle:
    """A process that waits.

    Attributes:
        process: itself.
        log: what it prints except its messages.
        work: folder that messages are to show no path of.
        stop_seconds: after which it is killed; None for never.
        versions: of what it runs with.
        limit_bytes: of its group; None without one.
    """

    process: subprocess.Popen[str]
    log: Path
    work: Path
    stop_seconds: float | None
    versions: Mapping[str, str]
    limit_bytes: int | None

    def go(self) -> None:
        """Let it begin."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def message(self) -> dict[str, Any]:
        """The next thing that it says.

        Raises:
            PeerError: it says that it failed, or has died.
        """
        return _message(self.process, self.log, self.work, self.stop_seconds)


@contextlib.contextmanager
def idle_process(
    python: Path,
    script: Path,
    job: Mapping[str, Any],
    work: Path,
    label: str,
    cold: Sequence[Path],
    *,
    variables: Mapping[str, str],
    cap: Cap | None,
    stop_seconds: float | None,
) -> Iterator[Idle]:
    """Start a script that says `ready` when it has imported all it needs, and end it in any case.

    Args:
        python: interpreter.
        script: gets the job as its only argument.
        job: what the script does.
        work: where it runs, and where logs are.
        label: names the log.
        cold: folders whose files are in no cache once it is ready.
        variables: of its environment.
        cap: bounds its memory from when it is ready.
        stop_seconds: after which it is killed; None for never.

    Raises:
        PeerError: it died before it was ready.
    """
    log = work / "logs" / f"{label}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    within = [] if cap is None else cap.group.entering()
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*within, str(python), "-P", str(script), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=work,
            env=variables,
        )
        end = threading.Timer(stop_seconds or 0.0, process.kill)
        if stop_seconds is not None:
            end.start()
        try:
            versions = _message(process, log, work, stop_seconds)["ready"]
            for folder in cold:
                drop_cached(folder)
            limit = None if cap is None else cap.group.limit_to_idle_and(cap.nbytes)
            yield Idle(process, log, work, stop_seconds, versions, limit)
        finally:
            end.cancel()
            process.kill()
            process.communicate()


def _message(process: subprocess.Popen[str], log: Path, work: Path, stop_seconds: float | None) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.wait()
        said = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
        too_long = "" if stop_seconds is None else f", or more than {stop_seconds:g} s"
        killed = f" (killed: memory{too_long})" if process.returncode == -signal.SIGKILL else ""
        raise PeerError(_tidy(f"died with exit status {process.returncode}{killed}; last said: {said[-1]}", work))
    message: dict[str, Any] = json.loads(line)
    if "error" in message:
        raise PeerError(_tidy(message["error"], work))
    return message


def _tidy(text: str, work: Path) -> str:
    """One line without this machine's paths."""
    line = " ".join(text.replace(str(work), "<work>").replace(str(REPOSITORY), "<repository>").split())
    return line if len(line) <= 200 else line[:199] + "…"
