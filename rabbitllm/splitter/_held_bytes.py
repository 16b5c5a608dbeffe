"""A part of a file that was read already, in place of the file."""

from __future__ import annotations


class HeldBytes:
    """A part of a file in memory, by the offsets of the file.

    Args:
        data: the bytes.
        begin: offset of the first one in the file.
    """

    def __init__(self, data: memoryview, begin: int) -> None:
        self._data = data
        self._begin = begin

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """See `tensor_spec.Readable`."""
        held = self._data[offset - self._begin :][: len(buffer)]
        buffer[: len(held)] = held
        return len(held)

    def read_at(self, offset: int, length: int) -> bytes:
        """The bytes of a range, fewer only at the end."""
        return bytes(self._data[offset - self._begin :][:length])
