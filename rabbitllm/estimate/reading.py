"""How fast streamed layers come: from the disk or out of the page cache, and from there to a device.

Read by the engine's own reader, in pieces as large as the units that it will stream, from files that are on that disk
already; where there are none, from a nameless file that is written for it and gone when this is over.
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
from rabbitllm.engine.pinned_memory import HostBuffers
from rabbitllm.engine.placement import SLOTS
from rabbitllm.engine.span_reader import BLOCK, READ_BYTES, THROUGH_THE_CACHE, FileSpan, ReadMode, SpanReader
from rabbitllm.formats.positional import PositionalFile, page_aligned
from rabbitllm.storage import durable

SAMPLE_BYTES = 256 << 20
"""What is read to find a rate, at most."""
WRITTEN_BYTES = 128 << 20
"""What is written where nothing is there to be read, at most."""
SECONDS = 0.25
"""A measurement stops then, whatever of the sample is left."""
APART_BYTES = 128 << 20
"""More memory than that need not be filled in turns."""
WRITE_SECONDS = 1.0
UPLOADED_BYTES = 64 << 20
"""What is copied to a device at a time."""


class FileSample:
    """Runs of bytes of files on a disk.

    Args:
        files: that are there.
        unit: bytes of the largest unit that is streamed, which the engine reads at once.
        whole: whether runs are as long as that however long it is, as those of an expert are; else at most as long as
            one call of the system reads.
    """

    def __init__(self, files: Sequence[Path], unit: int, *, whole: bool = False) -> None:
        self._files = {str(number): path for number, path in enumerate(files)}
        sizes = {name: path.stat().st_size for name, path in self._files.items()}
        self.spans = tuple(_pieces(sizes, max(unit if whole else min(unit, READ_BYTES), BLOCK)))
        longest = max((span.end for span in self.spans), default=BLOCK)
        # as much memory in turns as the engine fills: less might stay in the processor's caches
        count = min(SLOTS * -(-unit // longest), max(APART_BYTES // longest, SLOTS))
        self._buffers = itertools.cycle([page_aligned(longest) for _ in range(count)])

    def path(self, file: str) -> Path:
        """A file's path, for `SpanReader`."""
        return self._files[file]

    def rate(self, way: ReadMode) -> float | None:
        """Bytes a second from the disk; None where it cannot be read this way, or not at all."""
        self.forget()
        found = self._rate(way)
        self.forget()
        return found

    def cached_rate(self) -> float | None:
        """Bytes a second out of the page cache, where this leaves the sample."""
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
        """Bytes a second from the disk of files that are mapped and touched page by page, in pieces here and there;
        None where they cannot be mapped."""
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
        """Read over and over in a thread while the context is open."""
        background = BackgroundReading(self, way)
        thread = threading.Thread(target=background.run, name="background-read", daemon=True)
        thread.start()
        try:
            yield background
        finally:
            background.stop.set()
            thread.join()


class BackgroundReading:
    """Reading in the background of other work; `rate` when it is over, bytes a second."""

    def __init__(self, sample: FileSample, way: ReadMode) -> None:
        self.stop = threading.Event()
        self.rate: float | None = None
        self._sample = sample
        self._way = way

    def run(self) -> None:
        """Until `stop`."""
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
    """Spans that are spread evenly over files, of at most `SAMPLE_BYTES` in all."""
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
    """Files on the disk of a folder: those of `files` that are on it, or one that is written for this.

    Args:
        folder: the nearest one that exists counts.
        files: that may be on the same disk.
        min_free: bytes that are to stay free of it; without room nothing is written, and there is nothing to read.
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
    """What no file system can shrink, for a second at most."""
    generator, start = np.random.default_rng(0), time.perf_counter()
    for _ in range(WRITTEN_BYTES // READ_BYTES):
        yield generator.bytes(READ_BYTES)
        if time.perf_counter() - start > WRITE_SECONDS:
            return


def upload_rate(device: Device) -> float:
    """Bytes a second from host memory to a device that does not share it, as the engine copies."""
    memory = HostBuffers(device)  # unlocks the memory before it goes
    host, buffer = memory.take_anyhow(UPLOADED_BYTES).fill_(0), device.device_buffer(UPLOADED_BYTES)
    times, start = 0, 0.0
    while times < 2 or time.perf_counter() - start < SECONDS / 2:
        if times == 1:
            start = time.perf_counter()  # the first one touches the memory
        ticket = device.upload(host, buffer, device.leave())
        device.landed(ticket)
        device.arrive(ticket)
        device.synchronise()
        times += 1
    return (times - 1) * UPLOADED_BYTES / (time.perf_counter() - start)
