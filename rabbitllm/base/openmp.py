"""torch's OpenMP team: functions that run in it, and how its threads wait for each other.

Threads of our own would compete with those of the team for the same cores, which took more than twice as long; and
submitting work to the team takes 2 microseconds, to a thread of Python 13 to 19. The interface is libgomp's, as
compilers use it (https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html). If torch uses another
library, there is no team.

Between two operations the threads wait actively, for up to a millisecond: waking them would take as long as a small
model's products. But where other work has the core of one of them, the others wait for it, each with a core of its own,
and a token takes many times as long. libgomp reads once how long to wait. While it has more threads than processors it
takes the time for that case, some microseconds (GOMP_SPINCOUNT in its manual). So while threads of this process lack a
core, a sleeping thread has a team, too; torch's threads sleep then, and helpers of our own compute (`parts.py`).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import logging
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rabbitllm.base.forks import DaemonThread, in_child, own_lock

logger = logging.getLogger(__name__)

_MAPS = Path("/proc/self/maps")
_TASKS = Path("/proc/self/task")
_NUMBERS = itertools.count(1)
PARTS = 4
"""Parts of work for each thread; helpers claim them one by one, so that one that comes late computes fewer."""
SPINS = "20000"
"""GOMP_SPINCOUNT unless the user sets it or OMP_WAIT_POLICY: less than a millisecond. By default threads wait for
milliseconds."""
_Result = TypeVar("_Result")


@dataclass(eq=False)
class Team:
    """The OpenMP library that torch computes with, and helpers in place of its threads (see `parts.py`).

    Attributes:
        library: libgomp.
    """

    library: ctypes.CDLL
    _helpers: list[DaemonThread] = field(default_factory=list)

    @functools.cached_property
    def address(self) -> int:
        """The address of the words that threads share."""
        from rabbitllm.base import parts
        from rabbitllm.base.compiling import address_of

        address, words = unfreed_words(parts.WORDS)
        words[parts.OWN] = address
        words[parts.RUN], words[parts.CLAIM] = map(address_of, (parts.run_parts, parts.claim_parts))
        functions = self.library.GOMP_parallel, ctypes.CDLL(None).syscall
        words[parts.PARALLEL], words[parts.SYSCALL] = map(c_address, functions)
        words[parts.EACH] = PARTS
        atexit.register(self.end_helpers)
        in_child(self._reset)
        return address

    @property
    def words(self) -> Any:
        """Those words, by their places in `parts.py`."""
        from rabbitllm.base import parts

        return (ctypes.c_int64 * parts.WORDS).from_address(self.address)

    @functools.cached_property
    def _run(self) -> Callable[..., None]:
        from rabbitllm.base import parts

        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(self.words[parts.RUN])

    def run(self, function: int, data: int, threads: int) -> None:
        """Call `function(data, first, end, parts)`, both given as addresses, for parts that make up all; return then.

        There are `PARTS` for each thread. The calling thread takes part, and the interpreter lock is released.

        Args:
            threads: there may be fewer.
        """
        self._run(self.address, function, data, threads)

    def start_helpers(self, count: int) -> None:
        """Have threads of our own compute parts in place of libgomp's, as far as they get cores."""
        from rabbitllm.base import parts
        from rabbitllm.base.compiling import address_of

        if platform.machine() != "x86_64":
            return
        self.words[parts.HELPED] = next(_NUMBERS)
        compute = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address_of(parts.help_with_parts))
        for _ in range(count):
            thread = DaemonThread(compute, "helper", self.address)
            thread.start()
            self._helpers.append(thread)

    def end_helpers(self) -> None:
        """End them; libgomp's threads compute parts again."""
        from rabbitllm.base import parts

        helpers, self._helpers, words = self._helpers, [], self.words
        if words[parts.HELPED]:
            words[parts.HELPED] = 0
            words[parts.EPOCH] += 1
            numbers = parts.FUTEX, self.address + 8 * parts.EPOCH, parts.WAKE, len(helpers)
            ctypes.CDLL(None).syscall(*map(ctypes.c_long, numbers))
        for thread in helpers:
            thread.join()

    def _reset(self) -> None:
        """In a forked child: there are no helpers, and no caller has them."""
        from rabbitllm.base import parts

        self._helpers, words = [], self.words
        words[parts.HELPED] = words[parts.OWNER] = 0
        words[parts.CLAIMS] = words[parts.CLAIMS] >> 32 << 32  # what a caller in the parent left is not computed here


def unfreed_words(count: int) -> tuple[int, Any]:
    """The address of int64s that are 0, and these. They are never freed: a thread may outlive what Python frees."""
    library = ctypes.CDLL(None)
    library.aligned_alloc.restype, library.aligned_alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 2
    address = int(library.aligned_alloc(64, 8 * count))
    ctypes.memset(address, 0, 8 * count)
    return address, (ctypes.c_int64 * count).from_address(address)


def c_address(function: Any) -> int:
    """The address of a function of a C library."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def torchs_team() -> Team | None:
    """The team of the libgomp that torch uses; None if there is none, or if it cannot be identified."""
    import torch

    home = Path(torch.__file__).resolve().parent  # mapped files have their real names
    try:
        mapped = {Path(line.split()[-1]) for line in _MAPS.read_text().splitlines() if "/libgomp" in line}
    except OSError:
        return None
    libraries = [path for path in mapped if home in path.parents] or [*mapped]
    if len(libraries) != 1 or "OpenMP" not in torch.__config__.parallel_info():
        return None
    library = ctypes.CDLL(str(libraries[0]))
    library.GOMP_parallel.restype = None
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return Team(library)


def rest() -> bool:
    """End the team of the calling thread, until it computes again; another thread is to compute, or it waits for work.
    Whether torch's library can.

    libgomp counts the threads of all teams. If they are more than processors, none of them spins: a call of a small
    model's layers then took 5.7 ms in place of 2.4.
    """
    team = torchs_team()
    pause = getattr(team.library, "omp_pause_resource_all", None) if team is not None else None
    if pause is not None:
        pause(1)
    return pause is not None


def compute_in_a_fork() -> None:
    """In a forked child: have torch compute on one thread, unless the parent's team has ended before."""
    import torch

    if not rest() and torch.get_num_threads() > 1:
        logger.warning(
            "The model is used in a forked process (%d), and computes on one thread there: OpenMP's threads do not "
            "survive a fork. For full speed, load the model in the process that uses it.",
            os.getpid(),
        )
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # a child would wait for the team of the thread that forks, or crash
    os.register_at_fork(before=rest)


def computed(work: Callable[..., _Result], *args: Any) -> _Result:
    """What work returns, in a thread that then waits for other work: its team ends."""
    try:
        return work(*args)
    finally:
        rest()


_WINDOW_SECONDS = 0.1
_WAITED_SHARE = 0.1
"""Seconds that threads waited for a core, per second, above which cores are taken. Quiet machines have 0.01; 0.4 with a
busy process on each core, even if the team's threads sleep."""


class _Waiting:
    """Chooses how the team's threads wait, by how long threads of this process waited for cores."""

    def __init__(self) -> None:
        self._lock = own_lock(threading.Lock())
        self._seen, self._waited = time.monotonic(), 0.0
        self._over: threading.Event | None = None

    def look(self) -> None:
        """Choose anew, a few times a second; called before each pass."""
        if time.monotonic() - self._seen < _WINDOW_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            now, waited = time.monotonic(), _waited_seconds()
            is_taken = waited - self._waited > _WAITED_SHARE * (now - self._seen)
            self._seen, self._waited = now, waited
            if is_taken and self._over is None and os.environ.get("GOMP_SPINCOUNT") == SPINS:
                self._over = _second_team()
            elif not is_taken and self._over is not None:
                self._over.set()
                self._over = None
        finally:
            self._lock.release()


look = _Waiting().look
_HOLDING = own_lock(threading.Lock())


def _waited_seconds() -> float:
    """Seconds for which threads of this process were ready and had no core (sched-stats in Linux's documentation)."""
    total = 0
    for task in os.listdir(_TASKS) if _TASKS.exists() else ():
        try:
            with open(f"{_TASKS}/{task}/schedstat", "rb", 0) as file:  # a sixth of the time of `Path.read_text`
                total += int(file.read(64).split()[1])
        except OSError:  # the thread has ended, or the system does not count
            continue
    return total / 1e9


def _second_team() -> threading.Event | None:
    """Have so large a second team that there are more threads than processors, until the event; None without a team."""
    import torch

    if (team := torchs_team()) is None or torch.get_num_threads() == 1:
        return None
    over, count = threading.Event(), max(team.library.omp_get_num_procs() - torch.get_num_threads(), 0) + 2

    def hold() -> None:
        with _HOLDING:  # an earlier team may be about to end its helpers
            team.library.GOMP_parallel(team.library.omp_get_thread_num, 0, count, 0)  # a function without effect
            try:
                team.start_helpers(torch.get_num_threads() - 1)
            except (MemoryError, RuntimeError):  # no room for a thread
                team.end_helpers()
            over.wait()  # libgomp ends the team with this thread
            team.end_helpers()

    DaemonThread(hold, "second-team").start()
    return over
