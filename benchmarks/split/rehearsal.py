"""Splits a repository of the local hub in processes that are killed on the way, and measures disk, memory and time.

Each process makes the same call. It is killed with SIGKILL once the hub has sent a number of new bytes; the next one
goes on, until one ends by itself. Disk and memory are sampled ten times a second. The cost of a kill is the bytes that
the hub sends again after it, and the time until the layer files outgrow their size at the kill.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.lib.measure import DiskWatch, Sampling, memory_of
from benchmarks.lib.published import Checkpoint
from benchmarks.split.hub import HubProcess
from rabbitllm.splitter.split import STAGING_NAME
from rabbitllm.store.manifest import directory_name

INTERVAL_SECONDS = 0.1
_POLL_SECONDS = 0.02
_JOURNAL_BYTES = 64 << 10
"""By which a split directory may grow while its layer files do not."""


class RehearsalError(Exception):
    """A split failed; the message has the last words of its process."""


@dataclass(frozen=True)
class Sample:
    """One moment; seconds since the start, and bytes.

    Attributes:
        splits: on the disk below the split directory.
        home: on the disk below the Hugging Face home.
        staged: of `splits`, fetched shards.
        anonymous, resident: memory of the running process; 0 between two.
    """

    seconds: float
    splits: int
    home: int
    staged: int
    anonymous: int = 0
    resident: int = 0

    @property
    def disk(self) -> int:
        return self.splits + self.home

    @property
    def layers(self) -> int:
        """The split directory without fetched shards."""
        return self.splits - self.staged


class SeriesSampler(Sampling):
    """Samples of processes that follow each other.

    Args:
        splits, home, staged: folders; the last one is within the first.
    """

    def __init__(self, splits: Path, home: Path, staged: Path) -> None:
        super().__init__(INTERVAL_SECONDS)
        self.samples: list[Sample] = []
        self._watches = [DiskWatch([folder]) for folder in (splits, home, staged)]
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        return super().__enter__()

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def follow(self, pid: int | None) -> None:
        """Watch this process from now on, with the unlinked files that it holds open."""
        for watch in self._watches:
            watch.pid = pid

    def _sample(self) -> None:
        pid = self._watches[0].pid
        disk = [watch.allocated() for watch in self._watches]
        memory = memory_of(pid) if pid is not None else None
        used = (memory.anonymous, memory.anonymous + memory.file) if memory is not None else (0, 0)
        self.samples.append(Sample(self.now(), disk[0], disk[1], disk[2], *used))


def peak_of(samples: Iterable[Sample], which: Callable[[Sample], int]) -> int:
    """The largest value of a figure."""
    return max((which(sample) for sample in samples), default=0)


def thinned(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most so many samples: of each stretch of equal length the one with the most disk in use."""
    if len(samples) <= most:
        return list(samples)
    bounds = [len(samples) * number // most for number in range(most + 1)]
    return [max(samples[begin:end], key=lambda sample: sample.disk) for begin, end in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Setting:
    """One rehearsal.

    Attributes:
        made: the checkpoint that the hub serves.
        mode: "file", "stream" or "auto".
        max_disk: bytes.
        kills: their number.
        seed: of their moments.
        folder: of all files; empty or absent at the start.
    """

    made: Checkpoint
    mode: str
    max_disk: int
    kills: int
    seed: int
    folder: Path

    @property
    def splits(self) -> Path:
        return self.folder / "splits"

    @property
    def home(self) -> Path:
        return self.folder / "hf-home"


@dataclass
class Kill:
    """One kill; bytes of shards, seconds since the start.

    Attributes:
        planned: new bytes sent at which it was due.
        sent: new bytes sent when it came.
        seconds: when it came.
        again_at: when the next process started.
        used_shards: used up by then.
        again: bytes that the hub sent again after it, until the next kill or the end.
        lost_seconds: until the layer files outgrew their size at the kill.
    """

    planned: int
    sent: int
    seconds: float
    again_at: float = 0.0
    used_shards: int = 0
    again: int = 0
    lost_seconds: float = 0.0


@dataclass
class Rehearsal:
    """The figures of a rehearsal; bytes and seconds.

    Attributes:
        folder: the finished split directory; None until then.
        kills: those that came before the end.
        seconds: wall time of the whole.
        cpu_seconds: of the splitting processes.
        hub_cpu_seconds: of the hub meanwhile.
        sent, again, probed: by the hub, see `hub.Sent`.
        planned_peak: added to the disk at most, as the first process announced.
        added_memory: anonymous memory of the last process, on top of that when its split began.
        stages: of the last process, from the profiler.
        longest_gap: between two samples.
    """

    folder: Path | None = None
    kills: list[Kill] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    hub_cpu_seconds: float = 0.0
    sent: int = 0
    again: int = 0
    probed: int = 0
    planned_peak: int = 0
    added_memory: int = 0
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    longest_gap: float = 0.0


def moments(total: int, kills: int, seed: int) -> list[int]:
    """Moments of kills, in bytes: random, one in each of `kills` equal parts of the whole."""
    chance = random.Random(seed)
    return [int(total * (part + chance.uniform(0.05, 0.95)) / kills) for part in range(kills)]


def rehearse(setting: Setting, hub: HubProcess) -> Rehearsal:
    """Split, kill and go on until the split is whole.

    Raises:
        RehearsalError: a process that was not killed failed.
    """
    setting.splits.mkdir(parents=True)
    setting.home.mkdir()
    before, hub_before = hub.sent(), hub.cpu_seconds()
    due, rehearsal = moments(setting.made.nbytes, setting.kills, setting.seed), Rehearsal()
    staged = setting.splits / directory_name("4bit") / STAGING_NAME
    with SeriesSampler(setting.splits, setting.home, staged) as sampler:
        for number in itertools.count():
            _run_once(number, setting, hub, rehearsal, sampler, due, before.new)
            if rehearsal.folder is not None:
                break
        rehearsal.seconds = sampler.now()
    after = hub.sent()
    rehearsal.sent, rehearsal.again = after.sent - before.sent, after.again - before.again
    rehearsal.probed, rehearsal.hub_cpu_seconds = after.probed - before.probed, hub.cpu_seconds() - hub_before
    rehearsal.samples, rehearsal.longest_gap = sampler.samples, sampler.longest_gap
    for kill in rehearsal.kills:
        kill.lost_seconds = _grown_at(sampler.samples, kill.again_at) - kill.seconds
    return rehearsal


def _run_once(
    number: int,
    setting: Setting,
    hub: HubProcess,
    rehearsal: Rehearsal,
    sampler: SeriesSampler,
    due: Sequence[int],
    sent_before: int,
) -> None:
    """One process, to its kill or its end."""
    at_start, last = hub.quiet(), rehearsal.kills[-1] if rehearsal.kills else None
    if last is not None:  # bytes on their way to the killed process count
        last.sent, last.again_at = at_start.new - sent_before, sampler.now()
    said, errors = setting.folder / f"said-{number}", setting.folder / f"errors-{number}"
    wanted = due[len(rehearsal.kills)] if len(rehearsal.kills) < len(due) else None
    process, kill = _start(setting, hub, said, errors), None
    sampler.follow(process.pid)
    try:
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            sent = hub.sent().new - sent_before
            if kill is None and wanted is not None and sent >= wanted:
                kill = Kill(wanted, sent, sampler.now())
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        times = psutil.Process(process.pid).cpu_times()  # the process has ended but was not waited for
        rehearsal.cpu_seconds += times.user + times.system
    finally:
        sampler.follow(None)
        process.kill()
        process.wait()
    events: list[dict[str, Any]] = [json.loads(line) for line in said.read_text().splitlines() if line.endswith("}")]
    begun: dict[str, Any] = next((event["SplitStarted"] for event in events if "SplitStarted" in event), {})
    if last is not None:
        last.again, last.used_shards = hub.sent().again - at_start.again, begun.get("resumed", 0)
    else:
        rehearsal.planned_peak = begun.get("peak_bytes", 0)
    if kill is not None and process.returncode == -signal.SIGKILL:
        print(f"{setting.mode}: killed at {kill.sent / 1e9:.3f} GB", file=sys.stderr, flush=True)
        rehearsal.kills.append(kill)
    elif process.returncode:
        words = _last_words(errors.read_text(errors="replace"))
        raise RehearsalError(f"the split ended with exit status {process.returncode}; last said: {words}")
    else:
        rehearsal.folder, rehearsal.stages = Path(events[-1]["folder"]), events[-1]["stages"]
        rehearsal.added_memory = next(e["SplitDone"]["peak_memory_bytes"] for e in events if "SplitDone" in e)


def _start(setting: Setting, hub: HubProcess, said: Path, errors: Path) -> subprocess.Popen[bytes]:
    job = {
        "repository": setting.made.model.repository,
        "folder": str(setting.splits),
        "mode": setting.mode,
        "max_disk": setting.max_disk,
    }
    with said.open("wb") as out, errors.open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.split.child", json.dumps(job)],
            cwd=setting.folder,
            env=hub.variables(setting.home),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )


def _last_words(text: str) -> str:
    """The last line that is not indented, and the lines below it: of a traceback, the error."""
    lines = text.strip().splitlines() or ["nothing"]
    begin = max((number for number, line in enumerate(lines) if not line[:1].isspace()), default=0)
    return " ".join(line.strip() for line in lines[begin:])


def _grown_at(samples: Sequence[Sample], since: float) -> float:
    """The time after a moment at which the layer files outgrew their size at it; the end, if they never did."""
    before = peak_of(
        (sample for sample in samples if sample.seconds <= since + INTERVAL_SECONDS), lambda sample: sample.layers
    )
    later = (sample.seconds for sample in samples if sample.seconds > since and sample.layers > before + _JOURNAL_BYTES)
    return next(later, samples[-1].seconds)
