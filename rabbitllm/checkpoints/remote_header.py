"""What a shard on a hub says of its tensors, by range requests: its header, or a torch file's directory and pickles.

Nothing is fetched for the sake of the data; what comes with a range that was asked for is thrown away. Knows no
repositories.
"""

from __future__ import annotations

from rabbitllm.checkpoints import fetch
from rabbitllm.formats.recognise import recognise
from rabbitllm.formats.safetensors_file import LENGTH_BYTES, Header, header_length, parse_header
from rabbitllm.formats.shard_header import TORCH, check_readable, parse_torch_header

FIRST_READ_BYTES = 256 << 10
"""Fetched at once from the start of a shard; 97 % of headers are shorter, so one request is enough."""
TAIL_READ_BYTES = 256 << 10
"""Fetched at once from the end of a torch zip, where its directory is; that of 2,000 tensors is shorter."""


def read_remote_header(file: fetch.RemoteFile, shard: str) -> Header:
    """Read and check all that a shard says of its tensors.

    What stands between the storages of a torch file is not asked for: where they are follows without. It is compared
    when the shard is here.

    Args:
        file: where it is.
        shard: name for the specs and for messages.

    Raises:
        CorruptShardError, UnsafePickleError, UnreadableFormatError: see `read_shard_header`.
        HubError: see `fetch.read_range`.
    """
    first = fetch.read_range(file, 0, FIRST_READ_BYTES)
    kind = recognise(first)
    check_readable(kind, shard)
    if kind in TORCH:
        return parse_torch_header(_Ranges(file, first).read_at, file.size, shard, scattered=False)
    length = header_length(first[:LENGTH_BYTES], file.size, shard)
    have = first[LENGTH_BYTES : LENGTH_BYTES + length]
    have += fetch.read_range(file, LENGTH_BYTES + len(have), length - len(have))
    return parse_header(have, file.size, shard)


class _Ranges:
    """Reads a remote file from what has come of its start and its end, and else asks for the range."""

    def __init__(self, file: fetch.RemoteFile, first: bytes) -> None:
        self._file = file
        self._held = [(0, first)]

    def read_at(self, offset: int, length: int) -> bytes:
        """The bytes of a range, fewer only at the end of the file."""
        end = min(offset + length, self._file.size)
        for begin, held in self._held:
            if begin <= offset and end <= begin + len(held):
                return held[offset - begin : end - begin]
        if end == self._file.size:  # the end records, which the directory stands before
            begin = max(0, min(offset, end - TAIL_READ_BYTES))
            self._held.append((begin, fetch.read_range(self._file, begin, end - begin)))
            return self._held[-1][1][offset - begin :]
        return fetch.read_range(self._file, offset, end - offset)
