"""Splits a repository of the local hub in processes that are killed on the way, and measures what that takes.

Each process makes the same call. One is killed with SIGKILL when the hub has sent so many bytes for the first time;
the next one goes on, until one ends by itself. What a kill cost is what the hub sends once more after it, and the time
until the layer files grow beyond what they were.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib.published import Checkpoint
from benchmarks.split.hub_process import HubProcess
from benchmarks.split.sampler import INTERVAL_SECONDS, Sample, SeriesSampler, cpu_seconds, peak_of
from rabbitllm.splitter.split import STAGING_NAME
from rabbitllm.store.manifest import directory_name

_POLL_SECONDS = 0.005
_JOURNAL_BYTES = 64 << 10
"""By which a split directory may grow without a layer file's doing."""
STALL_SECONDS = 600
"""A process that fetches and computes nothing for so long has failed."""


class RehearsalError(Exception):
    """A split failed; the message says what the process said last."""


@dataclass(frozen=True)
class Setting:
    """What is rehearsed.

    Attributes:
        made: the checkpoint that the hub serves.
        mode: "file" or "stream".
        max_disk: bytes.
        kills: how many.
        seed: of their moments.
        folder: everything is put below it; empty or absent.
    """

    made: Checkpoint
    mode: str
    max_disk: int
    kills: int
    seed: int
    folder: Path

    @property
    def splits(self) -> Path:
        """Where the split directory is made."""
        return self.folder / "splits"

    @property
    def home(self) -> Path:
        """The Hugging Face home."""
        return self.folder / "hf-home"


@dataclass
class Kill:
    """One kill; bytes of shards, seconds since the start.

    Attributes:
        planned: bytes sent for the first time at which it was due.
        sent: that were when it came.
        seconds: when it came.
        again_at: when the next process was started.
        used_shards: that the next process found used up.
        again: bytes that were sent once more after it, until the next kill or the end.
        lost_seconds: until the layer files had more than at the kill.
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
    """What came of it; bytes and seconds.

    Attributes:
        folder: the finished split directory.
        kills: those that came; one that was due after the end did not.
        seconds: wall time of everything.
        cpu_seconds: of the processes that split.
        hub_cpu_seconds: of the hub meanwhile.
        sent, again, probed: by the hub, see `counters.Sent`.
        planned_peak: what the first process said that it would add to the disk.
        added_memory: anonymous memory of the last process, above that when its split began.
        stages: of the last process, as the profiler has them.
        samples: disk is of (split directory, Hugging Face home), the part is that of fetched shards.
        longest_gap: between two samples.
    """

    folder: Path
    kills: list[Kill]
    seconds: float
    cpu_seconds: float
    hub_cpu_seconds: float
    sent: int
    again: int
    probed: int
    planned_peak: int
    added_memory: int
    stages: dict[str, dict[str, float]]
    samples: list[Sample]
    longest_gap: float


def moments(total: int, kills: int, seed: int) -> list[int]:
    """When to kill, in bytes: at random, one in each of as many equal parts of the whole."""
    chance = random.Random(seed)
    return [int(total * (part + chance.uniform(0.05, 0.95)) / kills) for part in range(kills)]


def rehearse(setting: Setting, hub: HubProcess) -> Rehearsal:
    """Split, kill, go on, until it is whole.

    Raises:
        RehearsalError: a process that was not killed failed.
    """
    setting.splits.mkdir(parents=True)
    setting.home.mkdir()
    before, hub_before = hub.sent(), hub.cpu_seconds()
    due = moments(setting.made.nbytes, setting.kills, setting.seed)
    done = _Progress(setting, hub, due)
    staged = setting.splits / directory_name("4bit") / STAGING_NAME
    with SeriesSampler([setting.splits, setting.home], staged, lambda: hub.sent().new - before.new) as sampler:
        while done.folder is None:
            done.run_once(sampler, before.new)
        seconds = sampler.now()
    after = hub.sent()
    for kill in done.kills:
        kill.lost_seconds = _grown_at(sampler.samples, kill.again_at) - kill.seconds
    return Rehearsal(
        done.folder,
        done.kills,
        seconds,
        done.cpu_seconds,
        hub.cpu_seconds() - hub_before,
        after.sent - before.sent,
        after.again - before.again,
        after.probed - before.probed,
        done.planned_peak,
        done.added_memory,
        done.stages,
        sampler.samples,
        sampler.longest_gap,
    )


@dataclass
class _Progress:
    """What is known so far."""

    setting: Setting
    hub: HubProcess
    due: Sequence[int]
    kills: list[Kill] = field(default_factory=list)
    cpu_seconds: float = 0.0
    planned_peak: int = 0
    added_memory: int = 0
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    folder: Path | None = None
    _runs: int = 0

    def run_once(self, sampler: SeriesSampler, sent_before: int) -> None:
        """One process, to its kill or its end."""
        at_start, last = self.hub.quiet(), self.kills[-1] if self.kills else None
        if last is not None:  # what was on its way to the process that was killed counts as well
            last.sent, last.again_at = at_start.new - sent_before, sampler.now()
        said, errors = self.setting.folder / f"said-{self._runs}", self.setting.folder / f"errors-{self._runs}"
        self._runs += 1
        process = _start(self.setting, self.hub, said, errors)
        sampler.follow(process.pid)
        try:
            kill = self._watch(process.pid, sampler, sent_before)
            self.cpu_seconds += cpu_seconds(process.pid)
        finally:
            sampler.follow(None)
            process.kill()
            process.wait()
        events = [json.loads(line) for line in said.read_text().splitlines() if line.endswith("}")]
        begun: dict[str, int] = next((event["SplitStarted"] for event in events if "SplitStarted" in event), {})
        if last is not None:
            last.again, last.used_shards = self.hub.sent().again - at_start.again, begun.get("resumed", 0)
        else:
            self.planned_peak = begun.get("peak_bytes", 0)
        if kill is not None and process.returncode == -signal.SIGKILL:
            print(f"{self.setting.mode}: killed at {kill.sent / 1e9:.3f} GB", file=sys.stderr, flush=True)
            self.kills.append(kill)
        elif process.returncode:
            said_last = _last_words(errors.read_text(errors="replace"))
            raise RehearsalError(f"the split ended with exit status {process.returncode}; last said: {said_last}")
        else:
            self.folder, self.stages = Path(events[-1]["folder"]), events[-1]["stages"]
            self.added_memory = next(e["SplitDone"]["peak_memory_bytes"] for e in events if "SplitDone" in e)

    def _watch(self, pid: int, sampler: SeriesSampler, sent_before: int) -> Kill | None:
        """Wait until a process has ended, and kill it when that is due."""
        due, kill = self.due[len(self.kills)] if len(self.kills) < len(self.due) else None, None
        stall = _Stall(pid)
        while not _has_ended(pid):
            sent = self.hub.sent().new - sent_before
            if kill is None and due is not None and sent >= due:
                kill = Kill(due, sent, sampler.now())
                os.kill(pid, signal.SIGKILL)
            if stall.is_so(sent):
                raise RehearsalError(f"the split has done nothing for {STALL_SECONDS} s")
            time.sleep(_POLL_SECONDS)
        return kill


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
    """The last line of a process's errors that is not indented, and what is below it: of a traceback, the error."""
    lines = text.strip().splitlines() or ["nothing"]
    begin = max((number for number, line in enumerate(lines) if not line[:1].isspace()), default=0)
    return " ".join(line.strip() for line in lines[begin:])


def _has_ended(pid: int) -> bool:
    """Whether a child has; it stays to be waited for, so that its CPU time can still be read."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _grown_at(samples: Sequence[Sample], since: float) -> float:
    """When after a moment the layer files had more than they had at it; the end, if they never had."""
    before = peak_of((sample for sample in samples if sample.seconds <= since + INTERVAL_SECONDS), layer_bytes)
    later = (s.seconds for s in samples if s.seconds > since and layer_bytes(s) > before + _JOURNAL_BYTES)
    return next(later, samples[-1].seconds)


def layer_bytes(sample: Sample) -> int:
    """Of the split directory, without fetched shards."""
    return sample.disk[0] - sample.part


class _Stall:
    """Notes when a process last did something."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: tuple[int, float] = (0, 0.0)
        self._since = self._looked = time.monotonic()

    def is_so(self, sent: int) -> bool:
        now = time.monotonic()
        if now - self._looked < 1:
            return False
        self._looked = now
        seen = (sent, cpu_seconds(self._pid))
        if seen[0] != self._seen[0] or seen[1] > self._seen[1] + 0.1:
            self._seen, self._since = seen, now
        return now - self._since > STALL_SECONDS
