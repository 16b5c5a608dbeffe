"""Splits by several processes at once on a file system without locks: flock fails, and leases are short.

    with WithoutFlock() as processes:
        ended = processes.run(call, Actor(), Actor(stops_at=17))

A server process imports everything once and forks for every process, since an import takes longer than a tiny split.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.errors import RabbitLLMError
from rabbitllm.storage import leases
from rabbitllm.storage.durable import Step
from tests.support.crashes import ForkServer, import_everything
from tests.support.splitting import Call, Counter
from tests.support.ticks import observe_ticks

_ROOT = Path(__file__).parent.parent.parent
DONE, REFUSED = 0, 3
SECONDS = {"BEAT_SECONDS": 0.1, "LATE_SECONDS": 1.5, "STALE_SECONDS": 3.0}
PATIENT = {name: getattr(leases, name) for name in ("LATE_SECONDS", "STALE_SECONDS")}
"""The package's own, where no test waits for them: a busy machine holds a process up for seconds."""


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


class WithoutFlock(ForkServer):
    """The server process; a context manager."""

    def __init__(self) -> None:
        super().__init__("tests.support.without_flock")

    def run(self, call: Call | Sequence[Call], *actors: Actor) -> list[Ended]:
        """Make a call in a process for each actor, or each its own, and return when all have ended."""
        calls = [call] * len(actors) if isinstance(call, Call) else call
        wanted = [
            (dataclasses.asdict(one), dataclasses.asdict(actor)) for one, actor in zip(calls, actors, strict=True)
        ]
        return [Ended(*entry) for entry in self.answer(wanted)]


def refuse_locks(code: int = errno.ENOLCK) -> None:
    """Have flock fail in this process, and make leases short."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    fcntl.flock = flock
    for name, seconds in SECONDS.items():
        setattr(leases, name, seconds)


def _serve() -> None:
    import_everything()
    refuse_locks()
    for line in sys.stdin:
        wanted = [(Call(**call), Actor(**actor)) for call, actor in json.loads(line)]
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(_run_all(wanted, Path(folder))), flush=True)


def _run_all(wanted: Sequence[tuple[Call, Actor]], folder: Path) -> list[tuple[int, str]]:
    said = [folder / str(number) for number in range(len(wanted))]
    running, stopped, ended = dict[int, int](), dict[int, int](), dict[int, int]()
    all_live = len(wanted) > 1 and all(actor.stops_at is actor.dies_at is None for _, actor in wanted)
    for begins_last in (False, True):
        for number, (call, actor) in enumerate(wanted):
            if actor.begins_last is begins_last:
                leases.LATE_SECONDS = (PATIENT if actor.stops_at is None else SECONDS)["LATE_SECONDS"]
                leases.STALE_SECONDS = (PATIENT if all_live else SECONDS)["STALE_SECONDS"]
                running[_fork(call, actor, said[number])] = number
        _wait(running, stopped, ended)
    for child in stopped:
        os.kill(child, signal.SIGCONT)
    _wait(stopped, {}, ended)
    return [(ended[number], path.read_text() if path.exists() else "") for number, path in enumerate(said)]


def _wait(running: dict[int, int], stopped: dict[int, int], ended: dict[int, int]) -> None:
    """Wait until each process has ended or stands still; the keys are their ids, or their numbers for `ended`."""
    while running:
        child, status = os.waitpid(-1, os.WUNTRACED)
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
            os.kill(os.getpid(), signal.SIGSTOP)
        if actor.seed and chance.random() < 0.1:
            time.sleep(chance.random() * 0.05)

    with observe_ticks(Counter(befall)):
        call.make()


if __name__ == "__main__":
    _serve()
