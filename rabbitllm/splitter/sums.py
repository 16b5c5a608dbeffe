"""Checksums of stored parts: the CRC-32 of each, combined from those of its pieces in any order.

There is one CRC-32 of the whole part, and one of each run of it between the offsets at which a layer file is cut into
blocks (`store/checksums.py`). Threads may add at the same time to tensors that were announced with `Sums.expect`.
Independent of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rabbitllm.formats.safetensors_file import TensorToWrite
from rabbitllm.store.checksums import (
    SUM_BYTES,
    combine_all,
    crc32,
    crc32_combine,
    is_cut,
    numbers,
    run_lengths,
    run_sums,
)
from rabbitllm.store.stored_form import ScalesForm, StoredForm

PartSums = bytes
"""The CRC-32 of a stored part, followed by that of each of its runs if it has several; `SUM_BYTES` each."""
TensorSums = Mapping[str, tuple[PartSums, ...]]
"""Tensor -> the sums of each of its stored parts."""
FileSums = Mapping[str, tuple[int, bytes | None]]
"""Layer -> the sum of its file, and those of its blocks, as the manifest has them."""


def part_sums(whole: int, runs: bytes = b"") -> PartSums:
    """Encode the sums of a stored part; `runs` only where it has several."""
    return whole.to_bytes(SUM_BYTES, "little") + runs


def whole_sum(sums: PartSums) -> int:
    """Return the CRC-32 of a stored part."""
    return int.from_bytes(sums[:SUM_BYTES], "little")


def sums_of(data: bytes, offset: int) -> PartSums:
    """Compute the sums of a stored part at `offset` in its layer file."""
    return _part_sums(_runs(offset, len(data), run_sums(data, offset)))


def runs_of(sums: PartSums, offset: int, nbytes: int) -> list[tuple[int, int, int]] | None:
    """Return offset, bytes and CRC-32 of each run of a stored part at `offset` in its layer file.

    None if it has several runs and only the sum of the whole is known.
    """
    runs = sums if len(sums) == SUM_BYTES else sums[SUM_BYTES:]
    if len(runs) != SUM_BYTES * sum(1 for _ in run_lengths(offset, nbytes)):
        return None
    return [*_runs(offset, nbytes, runs)]


@dataclass(frozen=True, slots=True)
class ShardChecksums:
    """Checksums of the tensors of one shard.

    Attributes:
        stored: of the stored parts of each tensor.
        sources: tensor -> CRC-32 of its data in the shard, in row-major order; without the quantized tensors of a
            shard that has a digest.
    """

    stored: TensorSums
    sources: Mapping[str, int]


class Sums:
    """The checksums of tensors that are being written, by name."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[_Part, ...]] = {}
        self._sources: dict[str, list[tuple[int, int, int]]] = {}

    def expect(self, forms: Iterable[StoredForm | ScalesForm], *, sources: bool = False) -> None:
        """Announce tensors, before several threads add to them.

        Args:
            forms: the tensors.
            sources: also compute the checksums of the data before quantization.
        """
        for form in forms:
            if form.source.name not in self._parts:
                self._parts[form.source.name] = tuple(_Part() for _ in form.parts)
                if sources and isinstance(form, StoredForm) and form.scheme is not None:
                    self._sources[form.source.name] = []

    def forget(self, forms: Iterable[StoredForm | ScalesForm]) -> None:
        """Drop the checksums of these tensors, which are going to be written again."""
        for form in forms:
            self._parts.pop(form.source.name, None)
            self._sources.pop(form.source.name, None)

    def add(self, form: StoredForm | ScalesForm, part: int, begin: int, data: memoryview, offset: int | None) -> None:
        """Add a written run of a stored part.

        Args:
            form: the tensor.
            part: the number of its part.
            begin: offset of the run in the part, bytes.
            data: the run.
            offset: of the part in its layer file; None if it is in the scratch file.
        """
        noted = self._parts[form.source.name][part]
        noted.offset = offset
        noted.pieces.append((begin, len(data), run_sums(data, (offset or 0) + begin)))

    def sums_source(self, form: StoredForm) -> bool:
        """Return whether `expect` requested the checksum of a tensor before quantization."""
        return form.source.name in self._sources

    def add_source(self, form: StoredForm, begin: int, data: memoryview) -> None:
        """Add a run of a tensor before quantization, at `begin` bytes into it, if `expect` requested it."""
        pieces = self._sources.get(form.source.name)
        if pieces is not None:
            pieces.append((begin, len(data), crc32(data)))

    def take_with_sources(self, forms: Sequence[StoredForm]) -> ShardChecksums:
        """As `take`, with the checksums of the data in the shard."""
        stored = self.take(forms)
        sources = {form.source.name: whole_sum(stored[form.source.name][0]) for form in forms if form.scheme is None}
        for form in forms:
            if (read := self._sources.pop(form.source.name, None)) is not None:
                _require_whole(sorted(read), form.source.name, form.source.nbytes)
                sources[form.source.name] = combine_all((crc, nbytes) for _, nbytes, crc in sorted(read))
        return ShardChecksums(stored, sources)

    def take(self, forms: Iterable[StoredForm | ScalesForm]) -> dict[str, tuple[PartSums, ...]]:
        """Return the sums of each stored part of these tensors, and drop them.

        Raises:
            AssertionError: a part was not written completely.
        """
        return {
            form.source.name: tuple(
                noted.sums(part) for noted, part in zip(self._parts.pop(form.source.name), form.parts, strict=True)
            )
            for form in forms
        }


class _Part:
    """The written pieces of a stored part: offset in it, bytes, and the CRC-32 of each of its runs."""

    __slots__ = ("offset", "pieces")

    def __init__(self) -> None:
        self.offset: int | None = None
        self.pieces: list[tuple[int, int, bytes]] = []

    def sums(self, part: TensorToWrite) -> PartSums:
        """Combine the sums of its pieces, which must be complete."""
        origin, pieces = self.offset or 0, sorted(self.pieces)
        _require_whole(pieces, part.name, part.nbytes)
        runs = [run for begin, nbytes, sums in pieces for run in _runs(origin + begin, nbytes, sums)]
        if self.offset is None:
            return part_sums(combine_all((crc, nbytes) for _, nbytes, crc in runs))
        return _part_sums(runs)


def _require_whole(pieces: Iterable[tuple[int, int, object]], name: str, expected: int) -> None:
    """Check that sorted pieces (offset, bytes, and their sums) are all: shards are deleted because of this."""
    end = 0
    for begin, nbytes, _ in pieces:
        if begin != end:
            raise AssertionError(f"{name} was written up to byte {end} of {expected}, and then from byte {begin}")
        end += nbytes
    if end != expected:
        raise AssertionError(f"{name} was written up to byte {end} of {expected}")


def _runs(offset: int, nbytes: int, sums: bytes) -> Iterator[tuple[int, int, int]]:
    for length, crc in zip(run_lengths(offset, nbytes), numbers(sums), strict=True):
        yield offset, length, crc
        offset += length


def _part_sums(runs: Iterable[tuple[int, int, int]]) -> PartSums:
    """Combine the sum of all, and that of each run between two cuts, from pieces of them in order."""
    cuts, whole = list[int](), 0
    for offset, nbytes, crc in runs:
        whole = crc32_combine(whole, crc, nbytes)
        if not cuts or is_cut(offset):
            cuts.append(crc)
        else:
            cuts[-1] = crc32_combine(cuts[-1], crc, nbytes)
    return part_sums(whole, b"".join(map(part_sums, cuts)) if len(cuts) > 1 else b"")
