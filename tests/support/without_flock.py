"""Splits by several processes at once on a file system without locks: flock fails.

    processes = WithoutFlock(crash_server, folder)
    ended = processes.run(call, Actor(), Actor(stops_at=17))

A process that a `CrashServer` forks, and so imports nothing, forks one for each actor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import mmap
import os
import random
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from rabbitllm.errors import RabbitLLMError
from rabbitllm.storage import durable, leases
from rabbitllm.storage.durable import Step
from tests.support.crashes import CrashServer
from tests.support.splitting import Call, Counter
from tests.support.ticks import observe_ticks

DONE, REFUSED = 0, 3
_STANDS_STILL = mmap.mmap(-1, 1 << 22)
"""Byte of a process, by its id -> whether it has stopped itself. Those that others stop, such as all tests while
something is measured, are no business of a test."""


@dataclass(frozen=True)
class Actor:
    """What befalls a process.

    Attributes:
        seed: of small delays before some steps; none at 0.
        stops_at: the step before which it stands still until the others have ended.
        dies_at: the step before which it is killed.
        begins_last: whether it begins when the others have come to their step, or have ended.
    """

    seed: int = 0
    stops_at: int | None = None
    dies_at: int | None = None
    begins_last: bool = False


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit status, and what it said if it was refused."""

    status: int
    said: str


class WithoutFlock:
    """Runs calls in processes of a server; `folder` is for what they say."""

    def __init__(self, server: CrashServer, folder: Path) -> None:
        self._server, self._answer = server, folder / "ended.json"

    def run(self, call: Call | Sequence[Call], *actors: Actor) -> list[Ended]:
        """Make a call in a process for each actor, or each its own, and return when all have ended."""
        calls = [call] * len(actors) if isinstance(call, Call) else call
        wanted = [
            (dataclasses.asdict(each), dataclasses.asdict(actor)) for each, actor in zip(calls, actors, strict=True)
        ]
        ended = self._server.ask(f"{__name__}:run_all", {"wanted": wanted, "answer": str(self._answer)})
        assert ended.status == 0
        return [Ended(*entry) for entry in json.loads(self._answer.read_text())]


def count_looks() -> None:
    """Have this process take leases over after three looks at a holder that has ended or stands still.

    It counts no seconds: a busy machine holds up one that lives for longer than a test can wait.
    """
    last_file, seconds = leases._last_file, [0.0]

    def look(path: Path) -> leases._LeaseFile | None:
        file = last_file(path)
        seconds[0] += file is not None and _is_at_rest(file.path)
        return file

    leases._last_file = look
    leases.time = SimpleNamespace(**vars(time) | {"monotonic": lambda: seconds[0]})  # type: ignore[assignment]
    leases.BEAT_SECONDS, leases.LATE_SECONDS, leases.STALE_SECONDS = 0.1, math.inf, 3.0


def _is_at_rest(lease: Path) -> bool:
    try:
        process = psutil.Process(json.loads(lease.read_bytes())["pid"])
        return bool(_STANDS_STILL[process.pid]) or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
    except (OSError, ValueError):  # it has been given back, or is being written
        return False


def refuse_locks(code: int = errno.ENOLCK) -> None:
    """Have flock fail in this process, and count looks at leases."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    fcntl.flock = flock
    count_looks()


def run_all(call: Mapping[str, Any]) -> None:
    """For `CrashServer.ask`: have all actors `wanted` make their calls, and write how they ended to `answer`."""
    refuse_locks()
    durable._observer = None  # the server's; each actor has its own
    wanted = [(Call(**arguments), Actor(**actor)) for arguments, actor in call["wanted"]]
    with tempfile.TemporaryDirectory() as folder:
        Path(call["answer"]).write_text(json.dumps(_run_all(wanted, Path(folder))))


def _run_all(wanted: Sequence[tuple[Call, Actor]], folder: Path) -> list[tuple[int, str]]:
    said = [folder / str(number) for number in range(len(wanted))]
    running, stopped, ended = dict[int, int](), dict[int, int](), dict[int, int]()
    for begins_last in (False, True):
        for number, (call, actor) in enumerate(wanted):
            if actor.begins_last is begins_last:
                running[_fork(call, actor, said[number])] = number
        _wait(running, stopped, ended)
    for child in stopped:
        _STANDS_STILL[child] = 0
        os.kill(child, signal.SIGCONT)
    _wait(stopped, {}, ended)
    return [(ended[number], path.read_text() if path.exists() else "") for number, path in enumerate(said)]


def _wait(running: dict[int, int], stopped: dict[int, int], ended: dict[int, int]) -> None:
    """Wait until each process has ended or stands still; the keys are their ids, or their numbers for `ended`."""
    while running:
        child, status = os.waitpid(-1, os.WUNTRACED)
        if child not in running or (os.WIFSTOPPED(status) and not _STANDS_STILL[child]):
            continue
        number = running.pop(child)
        if os.WIFSTOPPED(status):
            stopped[child] = number
        else:
            ended[number] = os.waitstatus_to_exitcode(status)


def _fork(call: Call, actor: Actor, said: Path) -> int:
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            try:
                _act(call, actor)
                status = DONE
            except RabbitLLMError as error:
                said.write_text(f"{type(error).__name__}: {error}")
                status = REFUSED
            except BaseException as error:
                said.write_text(repr(error))
        os._exit(status)
    return child


def _act(call: Call, actor: Actor) -> None:
    chance = random.Random(actor.seed)

    def befall(number: int, step: Step) -> None:
        if number == actor.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == actor.stops_at:
            _STANDS_STILL[os.getpid()] = 1
            os.kill(os.getpid(), signal.SIGSTOP)
        if actor.seed and chance.random() < 0.1:
            time.sleep(chance.random() * 0.05)

    with observe_ticks(Counter(befall)):
        call.make()
