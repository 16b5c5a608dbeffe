"""A server of some project as a process of its own, its memory bounded, and clients that ask it. Linux only."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.idle_process import REPOSITORY, Cap, Idle, PeerError, idle_process
from benchmarks.lib.measure import Sampler
from benchmarks.lib.peers import WORKER, Environment, interpreter, variables

START_LIMIT_SECONDS = 300.0
END_LIMIT_SECONDS = 20.0


@dataclass(frozen=True)
class Answer:
    """What a client noted of one request.

    Attributes:
        sent: when.
        pieces: when each piece of text came.
        new_tokens: as the server counted them at the end; None if the end did not come.
        text: what came.
        status: of HTTP; None if there was none.
        error: why it was not answered to its end; None if it was.
    """

    sent: float
    pieces: tuple[float, ...]
    new_tokens: int | None
    text: str
    status: int | None
    error: str | None

    @classmethod
    def of(cls, noted: Mapping[str, Any]) -> Answer:
        """From the clients' JSON."""
        return cls(**{**noted, "pieces": tuple(noted["pieces"])})

    @property
    def is_whole(self) -> bool:
        return self.error is None and self.new_tokens is not None

    @property
    def first(self) -> float | None:
        """Seconds from sending to the first piece."""
        return self.pieces[0] - self.sent if self.pieces else None

    @property
    def tokens(self) -> int:
        """That came; without the server's count, one a piece."""
        return len(self.pieces) if self.new_tokens is None else self.new_tokens


@dataclass(frozen=True)
class Level:
    """So many requests at once, for a while.

    Attributes:
        at_once: requests under way at the same time.
        answers: all that were sent.
        seconds: from the first that was sent to the last piece of any; to the limit, where that cut some short.
    """

    at_once: int
    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens_a_second(self) -> float:
        """Of all together, prompts included in the time."""
        return sum(answer.tokens for answer in self.answers) / self.seconds if self.seconds > 0 else 0.0

    @property
    def whole(self) -> int:
        """Requests that were answered to their end."""
        return sum(answer.is_whole for answer in self.answers)

    @property
    def firsts(self) -> list[float]:
        """Waits for first pieces; infinite for the requests that got none."""
        return [math.inf if answer.first is None else answer.first for answer in self.answers]

    @property
    def betweens(self) -> list[float]:
        """Waits for further pieces, of all requests."""
        return [later - earlier for answer in self.answers for earlier, later in itertools.pairwise(answer.pieces)]


@dataclass(frozen=True)
class Served:
    """A server that answers.

    Attributes:
        idle: the process that it runs in, no longer idle.
        url: without a path.
        sampler: of its memory, from before it loads the model on.
        load_seconds: until it answered.
    """

    idle: Idle
    url: str
    sampler: Sampler
    load_seconds: float

    def check(self) -> None:
        """
        Raises:
            PeerError: it has died.
        """
        if self.idle.process.poll() is not None:
            self.idle.message()

    def core_seconds(self) -> float:
        """That all its threads have computed so far.

        Raises:
            PeerError: it has died.
        """
        self.check()
        fields = Path(f"/proc/{self.idle.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def bytes_read(self) -> int:
        """From the disk so far (proc(5), io).

        Raises:
            PeerError: it has died.
        """
        self.check()
        with open(f"/proc/{self.idle.process.pid}/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def cores() -> tuple[list[int], list[int]]:
    """Those of the server, and those of the clients: apart where there are three or more."""
    here = sorted(os.sched_getaffinity(0))
    return (here[:-1], here[-1:]) if len(here) > 2 else (here, here)


@contextlib.contextmanager
def served(
    environment: Environment,
    job: Mapping[str, Any],
    work: Path,
    label: str,
    cold: Sequence[Path],
    *,
    cap: Cap | None = None,
    start_limit_seconds: float = START_LIMIT_SECONDS,
) -> Iterator[Served]:
    """Start a server, bound its memory once it has imported its libraries, and wait until it answers.

    Args:
        environment: what it runs in.
        job: see `lib/worker.py`; port and cores are put in here.
        work: holds environments and logs.
        label: names the log.
        cold: folders whose files are to be in no cache when it begins.
        cap: bounds its memory from when it is idle.
        start_limit_seconds: in which it must answer.

    Raises:
        PeerError: it died, or did not answer in time.
    """
    python = interpreter(environment, work)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with idle_process(
        python,
        WORKER,
        {**job, "task": "serve", "port": port, "cores": cores()[0]},
        work,
        label,
        cold,
        variables=variables(environment, work),
        cap=cap,
        stop_seconds=None,
    ) as idle:
        try:
            with Sampler((), idle.process.pid) as sampler:
                begun = time.perf_counter()
                idle.go()
                _wait_until_it_answers(idle, url, start_limit_seconds)
                yield Served(idle, url, sampler, time.perf_counter() - begun)
        finally:
            _end(idle.process)


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _wait_until_it_answers(idle: Idle, url: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not _is_well(url):
        if idle.process.poll() is not None:
            idle.message()  # says why, by raising
        if time.monotonic() > until:
            raise PeerError(f"does not answer within {seconds:g} s")
        time.sleep(0.1)


def _is_well(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):  # not yet: refused, or 503 while the model is loaded
        return False


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT_SECONDS)


def asked(url: str, bodies: Sequence[Mapping[str, Any]], at_once: int, seconds: float) -> Level:
    """Let so many clients at once ask, from another process, on other cores where there are some.

    Args:
        url: of a route that streams.
        bodies: of the requests; each goes out once.
        at_once: clients.
        seconds: after so long they hang up.

    Raises:
        PeerError: the clients failed.
    """
    job = {"url": url, "bodies": list(bodies), "at_once": at_once, "seconds": seconds, "cores": cores()[1]}
    made = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.lib.clients"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    if made.returncode:
        raise PeerError(f"the clients failed: {made.stderr.strip().splitlines()[-1:]}")
    found = json.loads(made.stdout)
    return Level(at_once, tuple(Answer.of(noted) for noted in found["answers"]), found["seconds"])
