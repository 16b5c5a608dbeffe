"""The header of a shard in any format: formats are distinguished by their first bytes and give the same record.

`FORMATS` is the registry: to read another format, add its module and an entry. The extension does not count.
Independent of models and of file names.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.errors import UnreadableFormatError
from rabbitllm.formats.bounded import FETCH_POINTER, is_lfs_pointer
from rabbitllm.formats.gguf import begins_gguf, parse_gguf
from rabbitllm.formats.safetensors_file import begins_safetensors, header_at
from rabbitllm.formats.tensor_spec import Header, ReadAt
from rabbitllm.formats.torch_file import (
    begins_legacy_torch,
    begins_pickle,
    begins_torch_zip,
    parse_legacy_torch,
    parse_torch_zip,
)
from rabbitllm.storage.files import PositionalFile

HEAD_BYTES = 512
"""Bytes of a file that `recognise` needs."""


class Weights(enum.Enum):
    """A format of weights; the value is its name in messages."""

    SAFETENSORS = "safetensors"
    TORCH_ZIP = "a torch zip"
    TORCH_LEGACY = "a torch file from before torch 1.6"
    TORCH_TAR = "a torch file in a tar archive, from before torch 0.1.10"
    PICKLE = "a bare pickle"
    GGUF = "GGUF"
    POINTER = "a git-lfs pointer, not the file itself"
    EMPTY = "empty"
    UNKNOWN = "of no format known here"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Recognises and reads files of one format.

    Attributes:
        kind: the format.
        begins: whether a file that begins with these bytes, `HEAD_BYTES` or all of it, has the format; called only if
            no earlier entry of the registry matches.
        header: its reader, as `parse_shard_header`; None if the format is not read here.
        remedy: advice for a file of a format that is not read.
    """

    kind: Weights
    begins: Callable[[bytes], bool]
    header: Callable[[ReadAt, int, str, bool], Header] | None = None
    remedy: str = ""


FORMATS = (
    WeightFormat(Weights.POINTER, is_lfs_pointer, remedy=FETCH_POINTER),  # its letters may be the length of a header
    # before pickles, since the length of a header may look like the start of a pickle: 128 is 0x80, as is 640
    WeightFormat(
        Weights.SAFETENSORS, begins_safetensors, lambda read, size, file, scattered: header_at(read, size, file)
    ),
    WeightFormat(
        Weights.TORCH_ZIP,
        begins_torch_zip,
        lambda read, size, file, scattered: parse_torch_zip(read, size, file, local_headers=scattered).header(),
    ),
    WeightFormat(Weights.GGUF, begins_gguf, lambda read, size, file, scattered: parse_gguf(read, size, file).header),
    WeightFormat(
        Weights.TORCH_LEGACY,
        begins_legacy_torch,
        lambda read, size, file, scattered: parse_legacy_torch(read, size, file, counts=scattered).header(),
    ),
    WeightFormat(
        Weights.PICKLE,
        begins_pickle,
        remedy="Save the tensors with torch.save or as safetensors, and give the folder of that file.",
    ),
    WeightFormat(
        Weights.TORCH_TAR,
        lambda head: head[257:262] == b"ustar",
        remedy="If you trust the file, load it with torch.load, save the result with safetensors' save_file or with "
        "torch.save under another name, and give the folder of that.",
    ),
    WeightFormat(Weights.EMPTY, lambda head: not head, remedy="Download the file again; it has 0 bytes."),
    WeightFormat(Weights.UNKNOWN, lambda head: True, remedy="Download the file again; it may be a web page."),
)
"""The formats, in the order in which a file is compared with them."""
READABLE = tuple(entry.kind for entry in FORMATS if entry.header is not None)
"""The formats that are read."""
TORCH = (Weights.TORCH_ZIP, Weights.TORCH_LEGACY)
"""The formats of `torch.save`, whose metadata is not all before the data."""


def recognise(head: bytes) -> Weights:
    """The format of a file that begins with `head`, its first `HEAD_BYTES` bytes or all of it.

    Only the beginning is checked; the reader of the format checks the rest.
    """
    return next(entry.kind for entry in FORMATS if entry.begins(head))


def read_shard_header(path: Path, file: str | None = None) -> Header:
    """Read and check the header of a local shard; the data is not read.

    Args:
        path: the shard.
        file: the name for the specs; the file's own name by default.

    Raises:
        CorruptShardError, UnsafePickleError, UnreadableFormatError: see `parse_shard_header`.
    """
    with PositionalFile(path) as opened:
        return parse_shard_header(opened.read_at, opened.size(), file or path.name)


def parse_shard_header(read: ReadAt, size: int, file: str, *, scattered: bool = True) -> Header:
    """The same for any file that can be read in ranges; torch files give a safetensors header with strides.

    Args:
        read: reads (offset, length), bytes.
        size: size of the whole file in bytes.
        file: name for the specs and error messages.
        scattered: also read and compare metadata between the data; if not, another call has to check the offsets
            before the data is used.

    Raises:
        CorruptShardError: it is malformed, or contradicts the length of the file.
        UnsafePickleError: its pickle contains more than tensors and plain values; nothing of it was run.
        UnreadableFormatError: the format is not read here; with the format and a remedy.
    """
    weights = recognise(read(0, min(HEAD_BYTES, size)))
    if weights in (Weights.EMPTY, Weights.UNKNOWN) and file.endswith(".safetensors"):
        weights = Weights.SAFETENSORS  # its reader reports the error
    entry = next(entry for entry in FORMATS if entry.kind is weights)
    if entry.header is None:
        raise UnreadableFormatError(
            f"{file} is {weights.value}; safetensors, GGUF and the files of torch.save are read.", entry.remedy
        )
    return entry.header(read, size, file, scattered)
