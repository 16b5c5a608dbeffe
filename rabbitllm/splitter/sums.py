"""What has been written of each stored part, and the CRC-32 of the whole, from those of its pieces in any order.

Threads may add at the same time to tensors that were expected before. Knows no files.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from rabbitllm.formats.crc32 import combine_all
from rabbitllm.formats.safetensors_file import Placed
from rabbitllm.layers.compression import Settling, StoredForm


class Sums:
    """Of the tensors that are being written, by name."""

    def __init__(self) -> None:
        self._pieces: dict[str, tuple[list[_Piece], ...]] = {}

    def expect(self, forms: Iterable[StoredForm | Settling]) -> None:
        """Make room for tensors, before threads that must not race for it add to them."""
        for form in forms:
            if form.source.name not in self._pieces:
                self._pieces[form.source.name] = tuple([] for _ in form.parts)

    def forget(self, forms: Iterable[StoredForm | Settling]) -> None:
        """Drop what was added of these tensors, which are going to be written again."""
        for form in forms:
            self._pieces.pop(form.source.name, None)

    def add(self, form: StoredForm | Settling, part: int, begin: int, data: memoryview) -> None:
        """Note a run of a stored part that was written, `begin` bytes into it."""
        self._pieces[form.source.name][part].append(_Piece(begin, len(data), zlib.crc32(data)))

    def take(self, forms: Iterable[StoredForm | Settling]) -> dict[str, tuple[int, ...]]:
        """The sum of each stored part of these tensors, which are forgotten: name -> one a part.

        Raises:
            AssertionError: a part was not written whole.
        """
        return {
            form.source.name: tuple(map(_whole_sum, self._pieces.pop(form.source.name), form.parts)) for form in forms
        }


@dataclass(frozen=True, slots=True, order=True)
class _Piece:
    """A run of a stored part that was written: where it begins in it, bytes, and its CRC-32."""

    begin: int
    nbytes: int
    crc: int


def _whole_sum(pieces: list[_Piece], part: Placed) -> int:
    """The sum of a part from those of its pieces, which must leave nothing out."""
    at = 0
    for piece in sorted(pieces):
        if piece.begin != at:
            break
        at += piece.nbytes
    if at != part.nbytes:  # the shard is deleted on the strength of this
        raise AssertionError(f"{part.name} was written up to byte {at} of {part.nbytes}")
    return combine_all((piece.crc, piece.nbytes) for piece in sorted(pieces))
