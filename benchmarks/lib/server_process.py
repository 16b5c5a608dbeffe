"""A server in a process with limited memory, and clients that send it requests. Linux only."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
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

from benchmarks.lib.measure import Sampler
from benchmarks.lib.peers import Environment, variables, worker_command
from benchmarks.lib.process import REPOSITORY, Cap, Idle, PeerError, idle_process

START_LIMIT_SECONDS = 300.0
END_LIMIT_SECONDS = 20.0


@dataclass(frozen=True)
class Answer:
    """One request and its answer; seconds since the first request.

    Attributes:
        sent: time of sending.
        pieces: time of each piece of text.
        new_tokens: the server's own count at the end; None if the end did not come.
        text: of all pieces.
        status: of HTTP; None if there was none.
        error: why the answer has no end; None for a whole answer.
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
        """By the server's count, or the number of pieces."""
        return len(self.pieces) if self.new_tokens is None else self.new_tokens


@dataclass(frozen=True)
class Level:
    """A number of clients at once, for a while.

    Attributes:
        at_once: clients.
        answers: of all requests.
        seconds: from the first request to the last piece; to the time limit, if it cut answers short.
    """

    at_once: int
    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens_a_second(self) -> float:
        """Of all clients together; the time includes prompts."""
        return sum(answer.tokens for answer in self.answers) / self.seconds if self.seconds > 0 else 0.0

    @property
    def whole(self) -> int:
        """Requests that were answered to their end."""
        return sum(answer.is_whole for answer in self.answers)

    @property
    def firsts(self) -> list[float]:
        """Seconds to the first piece; infinite for requests without one."""
        return [math.inf if answer.first is None else answer.first for answer in self.answers]

    @property
    def betweens(self) -> list[float]:
        """Seconds between pieces, of all requests."""
        return [later - earlier for answer in self.answers for earlier, later in itertools.pairwise(answer.pieces)]


@dataclass(frozen=True)
class Served:
    """A running server.

    Attributes:
        idle: its process.
        url: without a path.
        sampler: of its memory, since before it loaded the model.
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
        """Processor seconds of all its threads so far.

        Raises:
            PeerError: it has died.
        """
        self.check()
        fields = Path(f"/proc/{self.idle.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def bytes_read(self) -> int:
        """Bytes that it read from the disk so far (proc(5), io).

        Raises:
            PeerError: it has died.
        """
        self.check()
        with open(f"/proc/{self.idle.process.pid}/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def cores() -> tuple[list[int], list[int]]:
    """The server's cores and the clients': disjoint on a machine with three or more."""
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
    """Start a server, limit its memory once its libraries are imported, and wait until it answers.

    Args:
        environment: of the server.
        job: see `lib/worker.py`, without port and cores.
        work: folder of environments and logs.
        label: name of the log.
        cold: folders whose files are out of the page cache when it begins.
        cap: limits its memory once it is idle.
        start_limit_seconds: in which it must answer.

    Raises:
        PeerError: it died, or did not answer in time.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = worker_command(environment, {**job, "task": "serve", "port": port, "cores": cores()[0]}, work)
    of_process = variables(environment, work)
    with idle_process(command, work, label, cold, variables=of_process, cap=cap, stop_seconds=None) as idle:
        try:
            with Sampler((), idle.process.pid) as sampler:
                begun = time.perf_counter()
                idle.go()
                _wait_until_it_answers(idle, url, start_limit_seconds)
                yield Served(idle, url, sampler, time.perf_counter() - begun)
        finally:
            if idle.process.poll() is None:
                idle.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    idle.process.wait(END_LIMIT_SECONDS)


def free_port() -> int:
    """A port without a listener, below those that a system gives to connections: none takes it meanwhile."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.SystemRandom().randrange(10_240, 32_768)
            probe.bind(("127.0.0.1", port))
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


def asked(url: str, bodies: Sequence[Mapping[str, Any]], at_once: int, seconds: float) -> Level:
    """Send requests from another process, on cores of its own where there are enough.

    Args:
        url: of a route that streams.
        bodies: of the requests; each is sent once.
        at_once: clients.
        seconds: after which clients disconnect.

    Raises:
        PeerError: the clients failed.
    """
    job = {"url": url, "bodies": list(bodies), "at_once": at_once, "seconds": seconds, "cores": cores()[1]}
    process = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.lib.clients"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    if process.returncode:
        raise PeerError(f"the clients failed: {process.stderr.strip().splitlines()[-1:]}")
    reply = json.loads(process.stdout)
    return Level(at_once, tuple(Answer.of(noted) for noted in reply["answers"]), reply["seconds"])
