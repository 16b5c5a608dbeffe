"""What has been written of each stored part, and the CRC-32 of the whole, from those of its pieces in any order.

Threads may add at the same time to tensors that were expected before. Knows no files.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rabbitllm.formats.crc32 import combine_all
from rabbitllm.layers.compression import Settling, StoredForm


@dataclass(frozen=True, slots=True)
class ShardChecksums:
    """Checksums of the tensors of one shard.

    Attributes:
        stored: tensor -> CRC-32 of each of its stored parts.
        sources: tensor -> CRC-32 of its data in the shard, in row-major order; without the quantized tensors of a
            shard that has a digest.
    """

    stored: Mapping[str, tuple[int, ...]]
    sources: Mapping[str, int]


class Sums:
    """Of the tensors that are being written, by name."""

    def __init__(self) -> None:
        self._pieces: dict[str, tuple[list[_Piece], ...]] = {}
        self._sources: dict[str, list[_Piece]] = {}

    def expect(self, forms: Iterable[StoredForm | Settling], *, sources: bool = False) -> None:
        """Make room for tensors, before threads that must not race for it add to them.

        Args:
            forms: the tensors.
            sources: also compute the checksums of the data before quantization.
        """
        for form in forms:
            if form.source.name not in self._pieces:
                self._pieces[form.source.name] = tuple([] for _ in form.parts)
                if sources and isinstance(form, StoredForm) and form.scheme is not None:
                    self._sources[form.source.name] = []

    def forget(self, forms: Iterable[StoredForm | Settling]) -> None:
        """Drop what was added of these tensors, which are going to be written again."""
        for form in forms:
            self._pieces.pop(form.source.name, None)
            self._sources.pop(form.source.name, None)

    def add(self, form: StoredForm | Settling, part: int, begin: int, data: memoryview) -> None:
        """Note a run of a stored part that was written, `begin` bytes into it."""
        self._pieces[form.source.name][part].append(_Piece(begin, len(data), zlib.crc32(data)))

    def add_source(self, form: StoredForm, begin: int, data: memoryview) -> None:
        """Add a run of a tensor before quantization, `begin` bytes into it, if `expect` asked for it."""
        pieces = self._sources.get(form.source.name)
        if pieces is not None:
            pieces.append(_Piece(begin, len(data), zlib.crc32(data)))

    def take_with_sources(self, forms: Sequence[StoredForm]) -> ShardChecksums:
        """As `take`, together with the checksums of the data in the shard."""
        stored = self.take(forms)
        sources = {form.source.name: stored[form.source.name][0] for form in forms if form.scheme is None}
        for form in forms:
            if (read := self._sources.pop(form.source.name, None)) is not None:
                sources[form.source.name] = _whole_sum(read, form.source.name, form.source.nbytes)
        return ShardChecksums(stored, sources)

    def take(self, forms: Iterable[StoredForm | Settling]) -> dict[str, tuple[int, ...]]:
        """The sum of each stored part of these tensors, which are forgotten: name -> one a part.

        Raises:
            AssertionError: a part was not written whole.
        """
        return {form.source.name: self._taken(form) for form in forms}

    def _taken(self, form: StoredForm | Settling) -> tuple[int, ...]:
        pieces = self._pieces.pop(form.source.name)
        return tuple(_whole_sum(own, part.name, part.nbytes) for own, part in zip(pieces, form.parts, strict=True))


@dataclass(frozen=True, slots=True, order=True)
class _Piece:
    """A run of a stored part that was written: where it begins in it, bytes, and its CRC-32."""

    begin: int
    nbytes: int
    crc: int


def _whole_sum(pieces: list[_Piece], name: str, nbytes: int) -> int:
    """The sum of so many bytes from those of their pieces, which must leave nothing out."""
    at = 0
    for piece in sorted(pieces):
        if piece.begin != at:
            break
        at += piece.nbytes
    if at != nbytes:  # the shard is deleted on the strength of this
        raise AssertionError(f"{name} was written up to byte {at} of {nbytes}")
    return combine_all((piece.crc, piece.nbytes) for piece in sorted(pieces))
