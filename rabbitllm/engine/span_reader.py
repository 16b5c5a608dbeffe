"""Reads runs of bytes of layer files into buffers, through the page cache or past it.

A model that is streamed because it does not fit would evict itself, and the resident layers, from the page cache on
every pass. So it is read past the cache (O_DIRECT), in whole blocks, or through it and dropped piece by piece, if that
is clearly faster on this disk. Experts whose bytes are not whole blocks are read in whole sectors where they lie alike
in these and in memory, and else copied from blocks to their memory. If all streamed bytes fit into the memory that is
left, they are read through the cache, and come from memory the next time. The first read of a run compares it with its
checksums.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import heapq
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from rabbitllm.base.forks import Workers, direct_read
from rabbitllm.base.grouping import grouped
from rabbitllm.base.rounding import round_up
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.storage.files import PositionalFile, leaves_descriptors, page_aligned
from rabbitllm.store.checksums import LayerChecks

logger = logging.getLogger(__name__)

BLOCK = 4096
"""Offsets, lengths and addresses of reads past the cache are multiples of this."""
SECTOR = 512
"""The same of reads of experts, on most disks."""
READ_BYTES = 32 << 20
"""Maximum bytes of one read; each read ends at a multiple of this."""
CHECKED_BYTES = 4 << 20
"""The same while bytes are compared with their checksums: one piece is summed while the next is read."""
PROBE_BYTES = 32 << 20
PROBES = 4
"""Bytes and number of the reads that time each of two modes: 80 to 250 ms of a fast disk."""
TABLE_FILES = 8
"""Files that a `ReadTable` holds open, at most."""
PAST_IS_WORTH = 1.25
"""How much faster reads through the page cache must be: they take memory, which is still free when they are timed."""
_SHARE_OF_ROOM = 0.8
"""The share of the free memory that streamed bytes in the page cache may fill."""


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A run of bytes of one layer file, and its offset `at` in a buffer; both offsets are equal modulo `BLOCK`, unless
    its reader `is_exact`."""

    file: str
    offset: int
    nbytes: int
    at: int

    @property
    def lead(self) -> int:
        """Bytes before it in its first block, in the file and in the buffer."""
        return self.offset % BLOCK

    @property
    def end(self) -> int:
        """The end of its last block, as an offset in the buffer."""
        return round_up(self.at + self.nbytes, BLOCK)


@dataclass(frozen=True, slots=True)
class ReadMode:
    """How to read: `direct`, past the page cache; or through it, and with `drop` evicted from it afterwards."""

    direct: bool = False
    drop: bool = False


THROUGH_THE_CACHE = ReadMode()


class Paths(Protocol):
    """The part of a store that a reader uses."""

    def path(self, file: str) -> Path:
        """A file's path."""


class _Copied(threading.local):
    """Memory of each thread for bytes that are copied to their place, made with the first of them."""

    @functools.cached_property
    def memory(self) -> memoryview:
        return page_aligned(CHECKED_BYTES)


class ReadTable:
    """Rows of spans as the requests of compiled code have them (`storage.readers`), and their files, which stay open.

    Attributes:
        spans: int64 (rows, spans, 4).
        is_compared: of each row, whether its bytes were compared with their checksums.
    """

    def __init__(
        self,
        files: Mapping[str, PositionalFile],
        rows: Sequence[Sequence[FileSpan]],
        checks: LayerChecks | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self._files, self._checks = files, checks
        self._identities = {name: file.identity() for name, file in files.items()}
        words = [[(files[span.file].descriptor, span.offset, span.nbytes, span.at) for span in row] for row in rows]
        self.spans = np.array(words, np.int64)
        self.is_compared = [checks is None] * len(rows)
        weakref.finalize(self, stack.close)

    @property
    def is_valid(self) -> bool:
        """Whether the files are still those that were opened last, and have not changed."""
        for name, file in self._files.items():
            identity = self._identities[name]
            if file.identity() != identity or not (self._checks is None or self._checks.identity(name) == identity):
                return False
        return True


class SpanReader:
    """Reads spans of a split directory's files.

    Args:
        store: provides the paths of the files.
        mode: how to read; replaced permanently if the file system does not support direct reads.
        checks: compares bytes that are read for the first time with their checksums; None for no comparison.
        is_exact: whether nothing but the bytes of a span is written, and not its first and last blocks.
    """

    def __init__(
        self, store: Paths, mode: ReadMode, checks: LayerChecks | None = None, *, is_exact: bool = False
    ) -> None:
        self._store = store
        self.mode = mode
        self._checks = checks
        self._is_exact, self._sector = is_exact, SECTOR
        self._copied = _Copied()

    def read(self, spans: Iterable[FileSpan], buffer: memoryview) -> None:
        """Fill `buffer`, which begins on a page and ends at or after the end of the last span's block.

        Raises:
            OSError: a file ended early, or could not be read.
            IncompleteSplitError: a checksum differs.
        """
        for span in spans:
            sector = self._sector  # another thread may be the one that learns of larger sectors
            try:
                self._read(span, buffer)
            except OSError as error:
                if not self.mode.direct or error.errno != errno.EINVAL:
                    raise
                if self._is_exact and sector < BLOCK:
                    self._sector = BLOCK
                    self.read([span], buffer)
                    continue
                logger.info("%s does not support direct I/O; it is read through the page cache.", span.file)
                self.mode = ReadMode(drop=True)
                self._read(span, buffer)

    @property
    def compiled_block(self) -> int:
        """What offsets and addresses are multiples of where compiled code reads; 0 if it reads nothing: only what is
        read past the page cache, with nothing but the bytes of spans written."""
        return self._sector if self.mode.direct and self._is_exact else 0

    def table(self, rows: Sequence[Sequence[FileSpan]]) -> ReadTable | None:
        """Rows of spans, as many in each, for compiled code; None if there are too many files, here or in this process.

        Raises:
            OSError: a file cannot be opened.
        """
        names = {span.file for row in rows for span in row}
        if len(names) > TABLE_FILES or not leaves_descriptors(len(names)):
            return None
        with contextlib.ExitStack() as stack:
            paths = {name: self._store.path(name) for name in names}
            files = {name: stack.enter_context(PositionalFile(path, direct=True)) for name, path in paths.items()}
            return ReadTable(files, rows, self._checks, stack.pop_all())

    def _read(self, span: FileSpan, buffer: memoryview) -> None:
        is_whole = not any(number % BLOCK for number in (span.at, span.offset, span.nbytes))
        if is_whole or not (self.mode.direct and self._is_exact):
            self._read_in_place(span, buffer)
            return
        if (span.at - span.offset) % self._sector == 0:
            end, last = span.at + span.nbytes, round_up(span.at + span.nbytes, self._sector)
            first = span.at - span.at % self._sector
            others = bytes(buffer[first : span.at]), bytes(buffer[end:last])
            try:
                self._read_in_place(span, buffer, self._sector)
            finally:
                buffer[first : span.at], buffer[end:last] = others
            return
        offset, end, memory = span.offset, span.offset + span.nbytes, self._copied.memory
        while offset < end:
            stop = min((offset // CHECKED_BYTES + 1) * CHECKED_BYTES, end)
            piece = FileSpan(span.file, offset, stop - offset, offset % BLOCK)
            self._read_in_place(piece, memory)
            place, source = buffer[span.at + offset - span.offset :][: piece.nbytes], memory[piece.at :][: piece.nbytes]
            np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(source, np.uint8))  # other threads run meanwhile
            offset = stop

    def _read_in_place(self, span: FileSpan, buffer: memoryview, block: int = BLOCK) -> None:
        mode = self.mode
        lead = span.offset % block if mode.direct else 0
        first, end = span.offset - lead, span.offset + span.nbytes
        shift = span.at - span.offset  # from an offset in the file to one in the buffer
        last = round_up(span.at + span.nbytes, block) - shift if mode.direct else end
        summed: list[Future[None]] = []
        try:
            with PositionalFile(self._store.path(span.file), direct=mode.direct) as file:
                if (checks := self._checks) is not None:
                    checks.opened(span.file, file.identity())
                    checks = None if checks.is_done(span.file) else checks
                piece, offset = READ_BYTES if checks is None else CHECKED_BYTES, first
                while offset < last:
                    stop = last if last - offset <= piece else (offset // piece + 1) * piece
                    read = functools.partial(direct_read, file.read_into) if mode.direct else file.read_into
                    nbytes = read(buffer[offset + shift : stop + shift], offset)
                    if nbytes < min(stop, end) - offset:
                        raise OSError(f"{file.path} ends at byte {offset + nbytes:,}")
                    if checks is not None:
                        begin = max(offset, span.offset)
                        data = buffer[begin + shift : min(stop, end) + shift]
                        if stop < last:
                            summed.append(self._summers.submit(checks.read, span.file, begin, data))
                        else:
                            checks.read(span.file, begin, data)
                    if mode.drop:  # now: a whole layer in the page cache would evict mapped weights
                        file.drop_cache(offset, stop - offset)
                    offset = stop
        finally:
            wait(summed)  # after an error the caller may fill the buffer again
        for future in summed:
            future.result()

    @functools.cached_property
    def _summers(self) -> Workers:
        """The thread that sums one piece while the next is read."""
        return Workers(1, "checksums")


def compare(checks: LayerChecks, runs: Iterable[FileSpan | TensorSpec]) -> None:
    """Compare stored runs of bytes with their checksums, file by file.

    Raises:
        IncompleteSplitError: a checksum differs.
    """
    for file, spans in grouped((run.file, (run.offset, run.nbytes)) for run in runs).items():
        checks.stored(file, spans)


def choose_read_mode(store: Paths, spans: Iterable[FileSpan], room: int, nbytes: int | None = None) -> ReadMode:
    """Choose the mode to read these spans again and again on this machine: the faster one, see `PAST_IS_WORTH`.

    Args:
        store: provides the paths of the files.
        spans: all that are streamed, or a sample; may be empty.
        room: bytes of host memory that are left to the page cache.
        nbytes: the total of all streamed spans, if `spans` is a sample.
    """
    chosen = list(spans)
    if not chosen or stays_cached(sum(span.nbytes for span in chosen) if nbytes is None else nbytes, room):
        return THROUGH_THE_CACHE
    longest = heapq.nlargest(PROBES, chosen, key=lambda span: span.nbytes)
    # the beginning of each, read to the beginning of a buffer
    probes = [FileSpan(span.file, span.offset, min(span.nbytes, PROBE_BYTES), span.lead) for span in longest]
    buffer = page_aligned(max(probe.end for probe in probes))
    buffer[:] = bytes(len(buffer))  # else the first touch of its pages would be timed as reading
    modes = (ReadMode(direct=True), ReadMode(drop=True))
    # the minimum of several: a single time is easily disturbed, and a wrong choice is permanent
    past = min(_seconds(store, probe, modes[0], buffer) for probe in probes)
    through = min((_seconds(store, probe, modes[1], buffer) for probe in drop_cached(store, probes)), default=math.inf)
    logger.info("A byte past the page cache takes %.3f ns, through it %.3f ns.", past * 1e9, through * 1e9)
    return modes[past > through * PAST_IS_WORTH]


def stays_cached(nbytes: int, room: int) -> bool:
    """Whether `nbytes` bytes, read cyclically, remain in a page cache of at most `room` bytes."""
    return nbytes <= room * _SHARE_OF_ROOM


def drop_cached(store: Paths, spans: Iterable[FileSpan]) -> list[FileSpan]:
    """Drop spans from the page cache; return those that left it: what a model in memory maps stays."""
    dropped = []
    for span in spans:
        with PositionalFile(store.path(span.file)) as file:
            file.drop_cache(span.offset, span.nbytes)
            if not any(map(file.is_cached, (span.offset, span.offset + span.nbytes // 2))):
                dropped.append(span)
    return dropped


def _seconds(store: Paths, probe: FileSpan, mode: ReadMode, buffer: memoryview) -> float:
    """Seconds per byte of a span; infinite if it cannot be read in this mode."""
    reader = SpanReader(store, mode)
    begun = time.perf_counter()
    reader.read([probe], buffer)
    taken = time.perf_counter() - begun
    return taken / probe.nbytes if reader.mode == mode else math.inf
