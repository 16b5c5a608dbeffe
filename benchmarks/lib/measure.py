"""Disk, memory and time of a process, measured from outside, and control of the page cache. Linux only.

A thread samples every 10 ms:

* disk: the blocks of the files below the given folders, each inode once. An unlinked file counts while the process
  holds it open or mapped, since its blocks are not free before.
* anonymous memory: RssAnon + RssShmem of the process, from /proc; pages of mapped files (RssFile) are separate.

A sampler can miss a peak that is shorter than `Sampler.longest_gap`.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rabbitllm.storage.files import page_aligned

INTERVAL_SECONDS = 0.01
BLOCK_BYTES = 512
CACHE_STATE = (
    "cold: before each timing, and after the process has imported its libraries, the files concerned are synced and "
    "their pages dropped (POSIX_FADV_DONTNEED)"
)


@dataclass(frozen=True)
class Spread:
    """The median of some figures, and their extremes."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread | None:
    """None for no values."""
    known = list(values)
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The least value that at least so many percent of the values do not exceed; None for no values."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


def files_below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Regular files below a folder, without links and files that vanish meanwhile."""
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))
                    elif entry.is_file(follow_symlinks=False):
                        yield Path(entry.path), os.stat(entry.path, follow_symlinks=False)
        except FileNotFoundError:
            continue


class DiskWatch:
    """Allocated bytes below folders, over time."""

    def __init__(self, folders: Sequence[Path], pid: int | None = None) -> None:
        self.folders = folders
        self.pid = pid
        self._known: dict[tuple[int, int], int] = {}

    def allocated(self) -> int:
        """Bytes allocated now, to files with a name and to unlinked ones that the process holds."""
        sizes = {
            (status.st_dev, status.st_ino): status.st_blocks * BLOCK_BYTES
            for folder in self.folders
            for _, status in files_below(folder)
        }
        gone = self._known.keys() - sizes.keys()
        if gone and self.pid is not None:
            held = _held_inodes(self.pid)
            sizes |= {key: self._known[key] for key in gone if key[1] in held}
        self._known = sizes
        return sum(sizes.values())


def _held_inodes(pid: int) -> set[int]:
    """Inodes that a process has open or mapped."""
    held = set()
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            try:
                held.add(os.stat(f"/proc/{pid}/fd/{descriptor}").st_ino)
            except OSError:  # closed meanwhile
                continue
        with open(f"/proc/{pid}/maps") as maps:
            held |= {int(line.split(maxsplit=5)[4]) for line in maps}
    except (FileNotFoundError, ProcessLookupError):
        pass
    return held


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a process: anonymous (private and shared), and pages of mapped files."""

    anonymous: int
    file: int


def memory_of(pid: int) -> Memory | None:
    """None once the process is gone."""
    fields = {}
    try:
        with open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith("Rss"):
                    name, value, _ = line.split()
                    fields[name] = int(value) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Memory(fields["RssAnon:"] + fields["RssShmem:"], fields["RssFile:"]) if fields else None


class Sampling:
    """Takes samples from the opening to the closing of its context, in a thread.

    Attributes:
        longest_gap: seconds between two samples, the most.

    Args:
        interval: seconds from the end of one sample to the next.
    """

    def __init__(self, interval: float) -> None:
        self.longest_gap = 0.0
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._stop.wait(self._interval):
            self._sample()
            now = time.perf_counter()
            self.longest_gap, last = max(self.longest_gap, now - last), now

    def _sample(self) -> None:
        raise NotImplementedError


class Sampler(Sampling):
    """Samples of disk and memory, in bytes; `idle` and `start` are of the first sample.

    Attributes:
        disk_start, disk_peak, disk_end: allocated below the folders.
        anonymous_idle, anonymous_peak, file_peak: of the process; 0 without one.
        samples: their number.
    """

    def __init__(self, folders: Sequence[Path], pid: int | None = None) -> None:
        super().__init__(INTERVAL_SECONDS)
        self.disk_start = self.disk_peak = self.disk_end = 0
        self.anonymous_idle = self.anonymous_peak = self.file_peak = 0
        self.samples = 0
        self._pid = pid
        self._disk = DiskWatch(folders, pid)

    def _sample(self) -> None:
        self.samples += 1
        self.disk_end = self._disk.allocated()
        self.disk_peak = max(self.disk_peak, self.disk_end)
        memory = memory_of(self._pid) if self._pid is not None else None
        if memory is not None:
            self.anonymous_peak = max(self.anonymous_peak, memory.anonymous)
            self.file_peak = max(self.file_peak, memory.file)
        if self.samples == 1:
            self.disk_start, self.anonymous_idle = self.disk_end, self.anonymous_peak


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below a folder, and the folder itself."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def drop_cached(folder: Path) -> None:
    """Drop every file below a folder from the page cache; this needs no privilege."""
    sync_tree(folder)
    for path, _ in files_below(folder):
        drop_pages(path)


def drop_pages(path: Path) -> None:
    """Drop a file from the page cache, except what is mapped or not written yet."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_files(source: Path, target: Path) -> None:
    """Copy a folder with `cp`, every byte, without fsync."""
    command = ["cp", "-r", "--reflink=never", str(source), str(target)]
    process = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"cp -r --reflink=never failed (it must be that of GNU coreutils): {process.stderr.strip()}")


def fresh_copy(source: Path, target: Path) -> None:
    """Replace `target` by a copy of a folder, on the disk and out of the page cache."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    copy_files(source, target)
    drop_cached(target)


@contextlib.contextmanager
def fresh_folder(path: Path, *, keep: bool = False) -> Iterator[Path]:
    """A folder that is empty at the start and removed at the end, unless `keep`."""
    if not keep:
        shutil.rmtree(path, ignore_errors=True)
    path.mkdir(exist_ok=True)
    try:
        yield path
    finally:
        if not keep:
            shutil.rmtree(path, ignore_errors=True)


THREADS = 4
CHUNK_BYTES = 4 << 20


def memory_speed(nbytes: int = 1 << 29, tries: int = 5) -> float:
    """Bytes a second that all cores read from memory together: the fastest of some sums of int64."""
    import numpy as np  # workers import this module, and should be small

    cores = len(os.sched_getaffinity(0))
    parts, seconds = np.array_split(np.ones(nbytes // 8, np.int64), cores), list[float]()
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(tries):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            seconds.append(time.perf_counter() - start)
    return nbytes / min(seconds)


def read_speed(files: Sequence[Path], most: int) -> float:
    """Bytes a second of `O_DIRECT` reads of 4 MiB in 4 threads, over the whole chunks of the first `most` bytes.

    0 where no file has a whole chunk.
    """
    chunks = [
        (path, offset) for path in files for offset in range(0, path.stat().st_size - CHUNK_BYTES + 1, CHUNK_BYTES)
    ]
    chunks = chunks[: max(most // CHUNK_BYTES, 1)]
    descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _ in chunks}

    def read(part: int) -> int:
        buffer = page_aligned(CHUNK_BYTES)
        return sum(os.preadv(descriptors[path], [buffer], offset) for path, offset in chunks[part::THREADS])

    try:
        start = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            done = sum(pool.map(read, range(THREADS)))
        return done / (time.perf_counter() - start)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
