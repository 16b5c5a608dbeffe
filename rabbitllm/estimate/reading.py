"""Measures how fast streamed layers are read, from the disk or the page cache, and copied to a device.

Uses the engine's own reader, in pieces as large as the units that it will stream, on files that are on that disk
already; if there are none, on an unnamed temporary file that is written for it.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import shutil
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rabbitllm.engine.devices import Device
from rabbitllm.engine.placement import SLOTS
from rabbitllm.engine.prefetch import HostBuffers
from rabbitllm.engine.span_reader import BLOCK, READ_BYTES, THROUGH_THE_CACHE, FileSpan, ReadMode, SpanReader
from rabbitllm.storage import durable
from rabbitllm.storage.files import PositionalFile, page_aligned

SAMPLE_BYTES = 256 << 20
"""The most that is read to find a rate."""
WRITTEN_BYTES = 128 << 20
"""The most that is written if there are no files to read."""
SECONDS = 0.25
"""Duration of a measurement; the rest of the sample is then skipped."""
APART_BYTES = 128 << 20
"""The most memory that is filled in turns."""
WRITE_SECONDS = 1.0
UPLOADED_BYTES = 64 << 20
"""Bytes that are copied to a device at a time."""


class FileSample:
    """Runs of bytes of files on a disk.

    Args:
        files: existing files.
        unit: bytes of the largest unit that is streamed, which the engine reads at once.
        whole: whether runs always have the length `unit`, as for an expert; else at most that of one system call.
    """

    def __init__(self, files: Sequence[Path], unit: int, *, whole: bool = False) -> None:
        self._files = {str(number): path for number, path in enumerate(files)}
        sizes = {name: path.stat().st_size for name, path in self._files.items()}
        self.spans = tuple(_pieces(sizes, max(unit if whole else min(unit, READ_BYTES), BLOCK)))
        longest = max((span.end for span in self.spans), default=BLOCK)
        # as much memory in turns as the engine fills: less might be found in the processor's caches
        count = min(SLOTS * -(-unit // longest), max(APART_BYTES // longest, SLOTS))
        self._buffers = itertools.cycle([page_aligned(longest) for _ in range(count)])

    def path(self, file: str) -> Path:
        """Return a file's path, for `SpanReader`."""
        return self._files[file]

    def rate(self, way: ReadMode) -> float | None:
        """Measure bytes per second from the disk; None if it cannot be read in this mode, or not at all."""
        self.forget()
        found = self._rate(way)
        self.forget()
        return found

    def cached_rate(self) -> float | None:
        """Measure bytes per second from the page cache, which keeps the sample afterwards."""
        if self._rate(THROUGH_THE_CACHE) is None:
            return None
        found: list[float] = []
        start = time.perf_counter()
        while len(found) < 3 or time.perf_counter() - start < SECONDS / 2:
            rate = self._rate(THROUGH_THE_CACHE)
            if rate is None:
                return None
            found.append(rate)
        return statistics.median(found)

    def mapped_rate(self) -> float | None:
        """Measure bytes per second from the disk of mapped files that are touched page by page, in scattered pieces.

        None if they cannot be mapped.
        """
        self.forget()
        done, start = 0, time.perf_counter()
        try:
            for span in self.spans:
                with self.path(span.file).open("rb") as file:
                    at = span.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
                    length = span.offset + span.nbytes - at
                    with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=at) as mapped:
                        sum(mapped[0 : length : mmap.PAGESIZE])
                done += span.nbytes
                if time.perf_counter() - start > SECONDS:
                    break
        except (OSError, ValueError):
            return None
        self.forget()
        return done / (time.perf_counter() - start) if done else None

    def forget(self) -> None:
        """Drop the sample from the page cache."""
        for span in self.spans:
            with contextlib.suppress(OSError), PositionalFile(self.path(span.file)) as file:
                file.drop_cache(span.offset, span.nbytes)

    def _rate(self, way: ReadMode) -> float | None:
        reader, done = SpanReader(self, way), 0
        start = time.perf_counter()
        try:
            for span in self.spans:
                reader.read([span], next(self._buffers))
                done += span.nbytes
                if time.perf_counter() - start > SECONDS:
                    break
        except OSError:
            return None
        return done / (time.perf_counter() - start) if done and reader.way == way else None

    @contextlib.contextmanager
    def going_on(self, way: ReadMode) -> Iterator[BackgroundReading]:
        """Read repeatedly in a thread while the context is open."""
        background = BackgroundReading(self, way)
        thread = threading.Thread(target=background.run, name="background-read", daemon=True)
        thread.start()
        try:
            yield background
        finally:
            background.stop.set()
            thread.join()


class BackgroundReading:
    """Reading in the background of other work; `rate` is set at its end, bytes per second."""

    def __init__(self, sample: FileSample, way: ReadMode) -> None:
        self.stop = threading.Event()
        self.rate: float | None = None
        self._sample = sample
        self._way = way

    def run(self) -> None:
        """Read until `stop` is set."""
        reader, done = SpanReader(self._sample, self._way), 0
        start = time.perf_counter()
        with contextlib.suppress(OSError):
            while not self.stop.is_set():
                for span in self._sample.spans:
                    reader.read([span], next(self._sample._buffers))
                    done += span.nbytes
                    if self.stop.is_set():
                        break
        self.rate = done / (time.perf_counter() - start) if done else None


def _pieces(sizes: dict[str, int], piece: int) -> Iterator[FileSpan]:
    """Yield spans that are spread evenly over files, of at most `SAMPLE_BYTES` in all."""
    whole = [
        FileSpan(file, at, min(piece, size - at), 0)
        for file, size in sizes.items()
        for at in range(0, size, _up(piece))
    ]
    count = max(SAMPLE_BYTES // piece, 1)
    yield from whole[:: max(-(-len(whole) // count), 1)]


def _up(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


@contextlib.contextmanager
def something_to_read(folder: Path, files: Sequence[Path], min_free: int) -> Iterator[Sequence[Path]]:
    """Yield files on the disk of a folder: those of `files` that are on it, or one that is written for this.

    Args:
        folder: the folder; if it does not exist, its nearest existing parent.
        files: files that may be on the same disk.
        min_free: bytes of it to keep free; without room nothing is written, and no file is yielded.
    """
    at = next(place for place in (folder, *folder.parents) if place.is_dir())
    disk = at.stat().st_dev
    here = [path for path in files if path.is_file() and path.stat().st_dev == disk]
    if sum(path.stat().st_size for path in here):
        yield here
        return
    room = shutil.disk_usage(at).free - min_free
    if room < WRITTEN_BYTES or not Path("/proc/self/fd").exists():
        yield []
        return
    with contextlib.ExitStack() as stack:
        try:
            descriptor = stack.enter_context(durable.nameless_file(at, _noise()))
        except OSError:  # a folder that cannot be written to
            yield []
            return
        yield [Path(f"/proc/self/fd/{descriptor}")]


def _noise() -> Iterator[bytes]:
    """Yield incompressible data, for a second at most."""
    generator, start = np.random.default_rng(0), time.perf_counter()
    for _ in range(WRITTEN_BYTES // READ_BYTES):
        yield generator.bytes(READ_BYTES)
        if time.perf_counter() - start > WRITE_SECONDS:
            return


def upload_rate(device: Device) -> float:
    """Measure bytes per second from host memory to a device that does not share it, copied as in the engine."""
    memory = HostBuffers(device)  # unpins the memory before it is freed
    host, buffer = memory.take_anyhow(UPLOADED_BYTES).fill_(0), device.device_buffer(UPLOADED_BYTES)
    times, start = 0, 0.0
    while times < 2 or time.perf_counter() - start < SECONDS / 2:
        if times == 1:
            start = time.perf_counter()  # the first round touches the memory and is not counted
        ticket = device.upload(host, buffer, device.leave())
        device.landed(ticket)
        device.arrive(ticket)
        device.synchronise()
        times += 1
    return (times - 1) * UPLOADED_BYTES / (time.perf_counter() - start)
