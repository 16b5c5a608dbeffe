"""A process that has imported its libraries and waits: its memory is limited then, and it starts on demand. Linux only.

Such a process writes its messages as lines of JSON on stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.measure import drop_cached

REPOSITORY = Path(__file__).resolve().parent.parent.parent
_REMOVAL_SECONDS = 5.0


class PeerError(Exception):
    """A peer could not be installed, or its job failed; the table shows the message."""


def run_tool(command: Sequence[str], failed: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a program to its end; `environment` replaces this process's.

    Raises:
        PeerError: `failed`, and the last line of the program's output.
    """
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if process.returncode:
        lines = (process.stderr or process.stdout).strip().splitlines()
        raise PeerError(f"{failed}: {lines[-1] if lines else f'exit status {process.returncode}'}")


@dataclass(frozen=True)
class ControlGroup:
    """A control group that limits memory; the page cache that its processes fill counts, as in a container.

    Attributes:
        folder: in the file system of control groups.
        limit_file, usage_file: names of files that hold bytes.
        reclaim: file and text that ask the system to take unused page cache back.
    """

    folder: Path
    limit_file: str
    usage_file: str
    reclaim: tuple[str, str]

    def entering(self) -> list[str]:
        """The start of a command line that runs the rest of it in the group from its first allocation on."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs")]

    def limit_to_idle_and(self, nbytes: int) -> int:
        """Limit the group to its present use, without unused page cache, and `nbytes`; return the limit."""
        name, text = self.reclaim
        with contextlib.suppress(OSError):  # "busy" means that all that could be reclaimed has been
            (self.folder / name).write_text(text)
        limit = int((self.folder / self.usage_file).read_text()) + nbytes
        (self.folder / self.limit_file).write_text(str(limit))
        return limit


@contextlib.contextmanager
def control_group(name: str, mount: Path = Path("/sys/fs/cgroup")) -> Iterator[ControlGroup]:
    """A new group, of version 1 or 2; its processes must have ended at the end.

    Raises:
        SystemExit: no group can be made (only root may).
    """
    v1 = mount / "memory"
    group = (
        ControlGroup(v1 / name, "memory.limit_in_bytes", "memory.usage_in_bytes", ("memory.force_empty", "0"))
        if v1.is_dir()
        else ControlGroup(mount / name, "memory.max", "memory.current", ("memory.reclaim", str(1 << 40)))
    )
    try:
        group.folder.mkdir(exist_ok=True)
    except OSError as error:
        raise SystemExit(f"No control group can be made in {mount} ({error}): memory cannot be limited.") from error
    try:
        yield group
    finally:
        begun = time.monotonic()
        while True:
            try:
                os.rmdir(group.folder)
                break
            except OSError:  # the last of its processes is not gone yet
                if time.monotonic() - begun > _REMOVAL_SECONDS:
                    raise
                time.sleep(0.05)


def can_limit_memory() -> bool:
    """Whether a group with a limit of memory can be made on this machine."""
    try:
        with control_group(f"rabbitllm-benchmark-{os.getpid()}") as group:
            return (group.folder / group.limit_file).exists()
    except SystemExit:
        return False


@dataclass(frozen=True)
class Cap:
    """A limit of a process's memory: its group, and the bytes that it may take on top of its idle use."""

    group: ControlGroup
    nbytes: int


@dataclass(frozen=True)
class Idle:
    """A process that waits.

    Attributes:
        log: file with its stderr.
        work: folder whose path messages must not show.
        stop_seconds: after which the process is killed; None for never.
        versions: of its packages.
        limit_bytes: of its group; None without one.
    """

    process: subprocess.Popen[str]
    log: Path
    work: Path
    stop_seconds: float | None
    versions: Mapping[str, str]
    limit_bytes: int | None

    def go(self) -> None:
        """Start the job."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def message(self) -> dict[str, Any]:
        """The process's next message.

        Raises:
            PeerError: it is an error, or the process died.
        """
        return _message(self.process, self.log, self.work, self.stop_seconds)


@contextlib.contextmanager
def idle_process(
    command: Sequence[str | Path],
    work: Path,
    label: str,
    cold: Sequence[Path],
    *,
    variables: Mapping[str, str],
    cap: Cap | None,
    stop_seconds: float | None,
) -> Iterator[Idle]:
    """Start a process that says `ready` once its libraries are imported; end it in any case.

    Args:
        command: the process.
        work: its working folder; logs are below it.
        label: name of the log.
        cold: folders whose files are out of the page cache once it is ready.
        variables: its environment.
        cap: limits its memory once it is ready.
        stop_seconds: after which it is killed; None for never.

    Raises:
        PeerError: it died before it was ready.
    """
    log = work / "logs" / f"{label}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*(cap.group.entering() if cap is not None else ()), *map(str, command)],
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
        printed = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
        too_long = "" if stop_seconds is None else f", or more than {stop_seconds:g} s"
        killed = f" (killed: memory{too_long})" if process.returncode == -signal.SIGKILL else ""
        raise PeerError(_tidy(f"died with exit status {process.returncode}{killed}; last said: {printed[-1]}", work))
    message: dict[str, Any] = json.loads(line)
    if "error" in message:
        raise PeerError(_tidy(message["error"], work))
    return message


def _tidy(text: str, work: Path) -> str:
    """One line without this machine's paths."""
    line = " ".join(text.replace(str(work), "<work>").replace(str(REPOSITORY), "<repository>").split())
    return line if len(line) <= 200 else line[:199] + "…"
