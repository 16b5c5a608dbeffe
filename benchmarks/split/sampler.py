"""Disk and memory of a job over time, sampled ten times a second, through several processes that follow each other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from benchmarks.lib.measure import DiskWatch, Sampling, memory_of

INTERVAL_SECONDS = 0.1


@dataclass(frozen=True)
class Sample:
    """One moment; bytes.

    Attributes:
        seconds: since the start.
        disk: allocated below each of the folders.
        part: of that, what is below the part that is looked at by itself.
        progress: as the job's own count has it.
        anonymous, resident: of the process that runs; 0 between two.
    """

    seconds: float
    disk: tuple[int, ...]
    part: int
    progress: int
    anonymous: int
    resident: int

    @property
    def disk_total(self) -> int:
        return sum(self.disk)


class SeriesSampler(Sampling):
    """Samples in a thread while its context is open.

    Args:
        folders: that the disk is watched below; none within another.
        part: a folder within them that is looked at by itself.
        progress: asked at every sample.

    Attributes:
        samples: in order.
    """

    def __init__(self, folders: Sequence[Path], part: Path, progress: Callable[[], int]) -> None:
        super().__init__(INTERVAL_SECONDS)
        self.samples: list[Sample] = []
        self._watches = [DiskWatch([folder]) for folder in folders]
        self._part = DiskWatch([part])
        self._progress = progress
        self._pid: int | None = None
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        return super().__enter__()

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def follow(self, pid: int | None) -> None:
        """Watch this process from now on; files that it holds open count though they have no name any more."""
        self._pid = pid
        for watch in (*self._watches, self._part):
            watch.pid = pid

    def _sample(self) -> None:
        pid = self._pid
        disk = tuple(watch.allocated() for watch in self._watches)
        memory = memory_of(pid) if pid is not None else None
        anonymous, resident = (memory.anonymous, memory.anonymous + memory.file) if memory is not None else (0, 0)
        self.samples.append(Sample(self.now(), disk, self._part.allocated(), self._progress(), anonymous, resident))


def cpu_seconds(pid: int) -> float:
    """Of a process and all its threads so far; of one that has ended too, as long as no process has waited for it."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def peak_of(samples: Iterable[Sample], which: Callable[[Sample], int]) -> int:
    """The largest value of something."""
    return max((which(sample) for sample in samples), default=0)


def thinned(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most so many of them: of each stretch of equal length the one with the most disk in use."""
    if len(samples) <= most:
        return list(samples)
    bounds = [len(samples) * number // most for number in range(most + 1)]
    return [max(samples[begin:end], key=lambda sample: sample.disk_total) for begin, end in itertools.pairwise(bounds)]
