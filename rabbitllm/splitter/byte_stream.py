"""Copies the bytes of a shard that arrives in order into buffers. Independent of shards and layers."""

from __future__ import annotations

from collections.abc import Iterator


class ByteStream:
    """Reads the bytes of a shard in order, from chunks of any size."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._chunk = memoryview(b"")
        self._at = 0

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer` with the next bytes; the stream must have enough of them."""
        while buffer:
            piece = self._next(len(buffer))
            buffer[: len(piece)] = piece
            buffer = buffer[len(piece) :]

    def skip_to(self, offset: int) -> None:
        """Skip to an offset that is not behind the current one."""
        while self._at < offset:
            self._next(offset - self._at)

    def finish(self) -> None:
        """Read the rest of the stream, so that the sender reaches its end."""
        for _ in self._chunks:
            pass

    def _next(self, most: int) -> memoryview:
        while not self._chunk:
            self._chunk = memoryview(next(self._chunks))
        piece, self._chunk = self._chunk[:most], self._chunk[most:]
        self._at += len(piece)
        return piece
