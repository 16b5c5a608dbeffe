"""Checksums of layer files by block: computed while a file is written, compared when bytes of it are first read.

A layer file is cut at every multiple of `BLOCK_BYTES`, at the end of its header, and at the start of each stored
part of at least `OWN_BLOCK_BYTES`; `split.json` has the CRC-32 of each block. The cuts follow from the header, so only
the checksums are stored: four bytes for 128 KiB. Any range of a file can be checked by reading less than one more
block at either end, be it an expert, a row of an embedding or a slice of a fused tensor.

A file of an older split has one checksum, and so is one block: all of it is read at its first use. Independent of
models, journal and manifest.

zlib-ng computes a CRC-32 with the processor's own instructions and without the interpreter's lock, four times as fast
as CPython's zlib (docs/PERFORMANCE.md), and that of A followed by B from both and the length of B.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import mmap
import os
import shlex
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from zlib_ng.zlib_ng import crc32, crc32_combine

from rabbitllm.base.forks import in_child, own_lock
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.tensor_spec import Header
from rabbitllm.storage.files import begin_to_read, file_opener, identity_of

__all__ = ["combine_all", "crc32", "crc32_combine", "crc32_of_file"]

READ_BYTES = 4 << 20
"""Bytes of a file that are read at a time."""


def combine_all(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of consecutive runs of bytes, each given as (CRC-32, length in bytes)."""
    total = 0
    for crc, nbytes in pieces:
        total = crc32_combine(total, crc, nbytes)
    return total


def crc32_of_file(path: Path) -> int:
    """The CRC-32 of a file, which is read completely."""
    total, buffer = 0, bytearray(READ_BYTES)
    with open(path, "rb", buffering=0, opener=file_opener) as stream:
        while count := stream.readinto(buffer):
            total = crc32(memoryview(buffer)[:count], total)
    return total


BLOCK_BYTES = 128 << 10
"""Size of a block, a power of two. Linux reads as much around a page of a mapped file, so checking a row of an
embedding costs no extra read."""
OWN_BLOCK_BYTES = 64 << 10
"""A stored part of at least this size begins a block, so that an expert is whole blocks; smaller ones share."""
SUM_BYTES = 4
"""Size of a checksum, which is little-endian."""
GROUP_BYTES = 8 << 20
"""Bytes summed in one call and mapped at a time: each call releases and reacquires the interpreter's lock."""


def is_cut(offset: int) -> bool:
    """Whether every layer file is cut at this offset."""
    return offset % BLOCK_BYTES == 0


def run_lengths(offset: int, nbytes: int) -> Iterator[int]:
    """Lengths of the runs of a range of a file between multiples of `BLOCK_BYTES`."""
    end = offset + nbytes
    while offset < end:
        stop = min(end, (offset // BLOCK_BYTES + 1) * BLOCK_BYTES)
        yield stop - offset
        offset = stop


def run_sums(data: bytes | memoryview, offset: int) -> bytes:
    """The CRC-32 of each of these runs of `data`, which is at `offset` of a file."""
    view, done, sums = memoryview(data), 0, bytearray()
    for length in run_lengths(offset, len(view)):
        sums += crc32(view[done : done + length]).to_bytes(SUM_BYTES, "little")
        done += length
    return bytes(sums)


def numbers(sums: bytes) -> list[int]:
    """Checksums as integers."""
    return [int.from_bytes(sums[offset : offset + SUM_BYTES], "little") for offset in range(0, len(sums), SUM_BYTES)]


def block_starts(size: int, header_bytes: int, parts: Iterable[tuple[int, int]]) -> list[int]:
    """The offsets of the blocks of a layer file, ascending.

    Args:
        size: bytes of the file.
        header_bytes: offset of its data.
        parts: offset in the file and bytes of each stored part.
    """
    cuts = {offset for offset, nbytes in parts if nbytes >= OWN_BLOCK_BYTES}
    cuts.update(range(0, size, BLOCK_BYTES), [header_bytes] if header_bytes < size else [])
    return sorted(cuts)


def lengths_of(starts: Sequence[int], size: int) -> list[int]:
    """Bytes of each block of a file of this size."""
    return [end - begin for begin, end in itertools.pairwise([*starts, size])]


def block_sums(runs: Iterable[tuple[int, int, int]], starts: Iterable[int]) -> bytes:
    """The CRC-32 of each block of a file, from (offset, bytes, CRC-32) of consecutive runs that fill it, none of which
    crosses a cut."""
    begins, sums = set(starts), list[int]()
    for offset, nbytes, crc in runs:
        if offset in begins:
            sums.append(crc)
        else:
            sums[-1] = crc32_combine(sums[-1], crc, nbytes)
    return b"".join(crc.to_bytes(SUM_BYTES, "little") for crc in sums)


def sums_of_file(path: Path, starts: Sequence[int]) -> tuple[int, bytes]:
    """The CRC-32 of a file, which is read completely, and of each of its blocks."""
    whole, sums, buffer = 0, bytearray(), memoryview(bytearray(BLOCK_BYTES))
    with open(path, "rb", opener=file_opener) as file:
        for nbytes in lengths_of(starts, path.stat().st_size):
            count = file.readinto(buffer[:nbytes])
            crc = crc32(buffer[:count])
            whole = crc32_combine(whole, crc, count)
            sums += crc.to_bytes(SUM_BYTES, "little")
    return whole, bytes(sums)


def damaged(path: Path, problem: str) -> IncompleteSplitError:
    """The error for a layer file that differs from what was written; `problem` ends the sentence."""
    return IncompleteSplitError(f"{path} is damaged: {problem}.", how_to_repair(path))


def how_to_repair(path: Path) -> str:
    """The remedy for a layer file that is missing or damaged."""
    return (
        f"`rabbitllm verify {shlex.quote(str(path.parent))} --repair` writes damaged layer files again from the "
        "original shards; add --original CHECKPOINT_FOLDER if the model was split from a folder. Then load the model "
        "again."
    )


class LayerChecks:
    """Compares bytes read from the layer files of a split directory with their checksums.

    A block is compared the first time that bytes of it are read in this process, by whichever model; a file that was
    replaced or modified since counts as a new one, also while a model is loaded (`opened`). Safe to use from several
    threads.

    Args:
        folder: the split directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _FileChecks] = {}

    def open(
        self, file: str, header: Header, mapped: Callable[[], memoryview], crc32: int, blocks: bytes | None
    ) -> None:
        """Add a layer file; its header is compared at once.

        Args:
            file: its name.
            header: its header.
            mapped: returns the mapped file; called when bytes are compared.
            crc32: of the whole file.
            blocks: checksum of each block; None if the split has none.

        Raises:
            IncompleteSplitError: the header differs from what was written.
        """
        self._files[file] = _FileChecks(self._folder / file, header, mapped, crc32 if blocks is None else blocks)

    def opened(self, file: str, identity: tuple[int, ...]) -> None:
        """Take note of the identity of a file that is open; all of another one is to be compared."""
        self._files[file].opened(identity)

    def read(self, file: str, offset: int, data: memoryview) -> None:
        """Compare bytes that were read from a file at `offset`.

        Raises:
            IncompleteSplitError: they differ from what was written.
            OSError: adjacent bytes, which their checksum covers, cannot be read.
        """
        checks = self._files[file]
        if len(data) and not checks.is_done:
            checks.check([(offset, len(data))], (offset, data))

    def stored(self, file: str, ranges: Iterable[tuple[int, int]], *, unmapped: bool = False) -> None:
        """Read ranges (offset, bytes) of a file and compare them; `unmapped` leaves no mapping of the file.

        Raises:
            IncompleteSplitError, OSError: see `read`.
        """
        checks = self._files[file]
        if not checks.is_done:
            checks.check((span for span in ranges if span[1]), None, unmapped=unmapped)

    def is_done(self, file: str) -> bool:
        """Whether all of a file has been compared."""
        return self._files[file].is_done

    def identity(self, file: str) -> tuple[int, ...]:
        """The identity of the file that was opened last."""
        return self._files[file].identity

    def by_block(self, file: str) -> bool:
        """Whether parts of a file can be compared separately."""
        return self._files[file].by_block


BytesRead = tuple[int, memoryview]
"""Bytes read from a file, and their offset."""


class _State:
    """Blocks of a file that were compared in this process: `done` by block, and the number left."""

    def __init__(self, blocks: int) -> None:
        self.done = bytearray(blocks)
        self.left = blocks
        self.lock = own_lock(threading.Lock())
        in_child(self._recount)

    def _recount(self) -> None:
        """Recount in a forked child: a thread of the parent may have been between two steps."""
        self.left = self.done.count(0)

    def mark(self, begin: int, end: int) -> None:
        """Mark blocks as intact."""
        with self.lock:
            self.left -= self.done.count(0, begin, end)
            self.done[begin:end] = b"\1" * (end - begin)


_STATES: dict[tuple[object, ...], _State] = {}
"""States by the identity of a file, its version, and its checksums."""


class _FileChecks:
    """The checks of one file: of its blocks, or by its only checksum."""

    def __init__(self, path: Path, header: Header, mapped: Callable[[], memoryview], sums: bytes | int) -> None:
        self._path, self._header, self._mapped = path, header, mapped
        self.by_block = isinstance(sums, bytes)
        starts = self._starts_of(sums) if isinstance(sums, bytes) else [0]
        status = path.stat()
        self._starts = array("q", [*starts, status.st_size])
        self._sums = array("I", numbers(sums) if isinstance(sums, bytes) else [sums])
        self._key, self._is_other = crc32(sums) if isinstance(sums, bytes) else sums, False
        self.identity, self._state = self._state_of(identity_of(status))

    def _state_of(self, identity: tuple[int, ...]) -> tuple[tuple[int, ...], _State]:
        """The identity of the file and its state, with its header as intact."""
        count = len(self._starts) - 1
        state = _STATES.setdefault((*identity, self._key), _State(count))
        if self.by_block:
            state.mark(0, bisect.bisect_left(self._starts, self._header.data_start, 0, count))
        return identity, state

    def opened(self, identity: tuple[int, ...]) -> None:
        if identity != self.identity:
            self._is_other = True  # than the mapped one
            self.identity, self._state = self._state_of(identity)

    def _starts_of(self, blocks: bytes) -> list[int]:
        """Return where the blocks begin; the header is compared."""
        path, header = self._path, self._header
        heads = len([*run_lengths(0, header.data_start)])
        with _map_range(path, 0, header.data_start) as head:
            if run_sums(head, 0) != blocks[: SUM_BYTES * heads]:
                raise damaged(path, "its header differs from what was written")
        size = path.stat().st_size
        starts = block_starts(size, header.data_start, ((part.offset, part.nbytes) for part in header.tensors))
        if len(blocks) != SUM_BYTES * len(starts):
            count = len(blocks) // SUM_BYTES
            raise damaged(path, f"split.json has {count:,} checksums for its {len(starts):,} blocks")
        return starts

    @property
    def is_done(self) -> bool:
        return not self._state.left

    @property
    def _is_replaced(self) -> bool:
        """Whether another file has the path now, whose bytes say nothing of those that are mapped or were read."""
        return identity_of(self._path.stat())[:2] != self.identity[:2]

    def check(self, ranges: Iterable[tuple[int, int]], bytes_read: BytesRead | None, *, unmapped: bool = False) -> None:
        state = self._state  # of another file from the moment at which a thread opens that
        runs: Iterator[tuple[int, int]] = (
            run for offset, nbytes in ranges for run in self._waiting(state, offset, offset + nbytes)
        )
        if bytes_read is None and self.by_block and not unmapped:
            runs = self._read_ahead(runs)
        for begin, end in runs:
            if state.done.find(0, begin, end) < 0:  # compared since, for another range
                continue
            low, high, written = self._starts[begin], self._starts[end], self._expected(begin, end)
            # mapped pages may have been written to, as private copies
            if self._crc(low, high, bytes_read, reread=unmapped or self._is_other) != written and (
                self._is_replaced or self._crc(low, high, bytes_read, reread=True) != written
            ):
                raise self._damaged(begin, end, bytes_read)
            state.mark(begin, end)

    def _read_ahead(self, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The same runs of blocks, while the system reads the next ones: what is mapped for random reads would be read
        page by page."""
        mapped, starts, ahead, nbytes = self._mapped(), self._starts, deque[tuple[int, int]](), 0
        for begin, end in runs:
            begin_to_read(mapped, [(starts[begin], starts[end])])
            ahead.append((begin, end))
            nbytes += starts[end] - starts[begin]
            while nbytes > GROUP_BYTES:
                first, last = ahead.popleft()
                nbytes -= starts[last] - starts[first]
                yield first, last
        yield from ahead

    def _waiting(self, state: _State, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Runs of blocks, from one up to another, that a range touches and that are not compared yet; a run is summed
        at once."""
        done, starts = state.done, self._starts
        begin, last = bisect.bisect_right(starts, low) - 1, bisect.bisect_left(starts, high)
        while (begin := done.find(0, begin, last)) >= 0:
            limit = bisect.bisect_right(starts, starts[begin] + GROUP_BYTES) - 1
            limit = min(max(limit, begin + 1), last)
            compared = done.find(1, begin, limit)
            end = limit if compared < 0 else compared
            yield begin, end
            begin = end

    def _expected(self, begin: int, end: int) -> int:
        lengths = lengths_of(self._starts[begin:end], self._starts[end])
        return combine_all(zip(self._sums[begin:end], lengths, strict=True))

    def _crc(self, begin: int, end: int, bytes_read: BytesRead | None, *, reread: bool = False) -> int:
        """The CRC-32 of a range of the file: of the bytes read, and around them of mapped bytes or the file."""
        offset, data = bytes_read if bytes_read is not None else (end, memoryview(b""))
        low, high = max(begin, offset), min(end, offset + len(data))
        if low >= high:
            return self._crc_around(begin, end, 0, reread)
        crc = crc32(data[low - offset : high - offset], self._crc_around(begin, low, 0, reread))
        return self._crc_around(high, end, crc, reread)

    def _crc_around(self, begin: int, end: int, crc: int, reread: bool) -> int:
        return _crc_of_file(self._path, begin, end, crc) if reread else _crc_of_mapped(self._mapped(), begin, end, crc)

    def _damaged(self, begin: int, end: int, bytes_read: BytesRead | None) -> IncompleteSplitError:
        """The error that names the first of these blocks that differs, and the tensor in it."""
        if not self.by_block:
            crc, written = _crc_of_file(self._path, 0, self._starts[1]), self._sums[0]
            return damaged(self._path, f"its checksum is {crc:08x}; {written:08x} was written")
        for block in range(begin, end):
            low, high = self._starts[block], self._starts[block + 1]
            crc, written = self._crc(low, high, bytes_read, reread=True), self._sums[block]
            if crc != written:
                names = [
                    part.name for part in self._header.tensors if part.offset < high and part.offset + part.nbytes > low
                ]
                where = f" (in {names[0]!r}{f' and {len(names) - 1} more' * (len(names) > 1)})" if names else ""
                return damaged(
                    self._path,
                    f"the checksum of its bytes {low:,} to {high:,}{where} is {crc:08x}; {written:08x} was written",
                )
        return damaged(self._path, "it changed while it was read")


def _crc_of_mapped(mapped: memoryview, begin: int, end: int, crc: int) -> int:
    """The CRC-32 of a range of a mapped file, continuing from `crc`; this also loads it for its next use."""
    return crc32(mapped[begin:end], crc) if begin < end else crc


def _crc_of_file(path: Path, begin: int, end: int, crc: int = 0) -> int:
    """The CRC-32 of a range of a file, continuing from `crc`."""
    while begin < end:
        stop = min(end, begin + GROUP_BYTES)
        with _map_range(path, begin, stop) as data:
            crc = crc32(data, crc)
        begin = stop
    return crc


@contextlib.contextmanager
def _map_range(path: Path, begin: int, end: int) -> Iterator[memoryview]:
    """A separate mapping of a range of a file."""
    start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    descriptor = file_opener(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        mapped = mmap.mmap(descriptor, end - start, access=mmap.ACCESS_READ, offset=start)
    finally:
        os.close(descriptor)
    with mapped, memoryview(mapped) as whole, whole[begin - start :] as part:
        yield part
