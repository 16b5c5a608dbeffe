"""The header of a shard in any format: formats are distinguished by their first bytes and give the same record.

The extension does not count. Independent of models and of file names.
"""

from __future__ import annotations

import enum
from pathlib import Path

from rabbitllm.errors import UnreadableFormatError
from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.formats.tensor_spec import Header
from rabbitllm.formats.torch_file import LEGACY_NUMBER, TorchFile, parse_legacy_torch, parse_torch_zip
from rabbitllm.formats.zip_directory import ReadAt
from rabbitllm.storage.files import PositionalFile

HEAD_BYTES = 512
"""Bytes of a file that `recognise` needs."""

_LEGACY_PICKLE = b"\x8a\x0a" + LEGACY_NUMBER.to_bytes(10, "little") + b"."
_MAX_HEADER_BYTES = 100_000_000


class Weights(enum.Enum):
    """A format of weights; the value is its name in messages."""

    SAFETENSORS = "safetensors"
    TORCH_ZIP = "a torch zip"
    TORCH_LEGACY = "a torch file from before torch 1.6"
    TORCH_TAR = "a torch file in a tar archive, from before torch 0.1.10"
    PICKLE = "a bare pickle"
    GGUF = "GGUF"
    UNKNOWN = "of no format known here"


def recognise(head: bytes) -> Weights:
    """The format of a file that begins with `head`, its first `HEAD_BYTES` bytes or all of it."""
    # first, since the length of a header may look like the start of a pickle: 128 is 0x80, as is 640
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= _MAX_HEADER_BYTES:
        return Weights.SAFETENSORS
    if head.startswith(b"PK\x03\x04"):
        return Weights.TORCH_ZIP
    if head.startswith(b"GGUF"):
        return Weights.GGUF
    if len(head) >= 2 and head[0] == 0x80 and head[1] <= 5:
        # protocols 4 and 5 put a frame before the number
        return Weights.TORCH_LEGACY if _LEGACY_PICKLE in head[2:32] else Weights.PICKLE
    if head[257:262] == b"ustar":
        return Weights.TORCH_TAR
    return Weights.UNKNOWN


def recognise_file(path: Path) -> Weights:
    """The format of a local file."""
    with path.open("rb") as stream:
        return recognise(stream.read(HEAD_BYTES))


TORCH = (Weights.TORCH_ZIP, Weights.TORCH_LEGACY)
"""The formats of `torch.save`, whose metadata is not all before the data."""
_REMEDIES = {
    Weights.TORCH_TAR: "If you trust the file, load it with torch.load, save the result with safetensors' save_file or "
    "with torch.save under another name, and give the folder of that.",
    Weights.PICKLE: "Save the tensors with torch.save or as safetensors, and give the folder of that file.",
    Weights.GGUF: "Give the original weights: safetensors, or files of torch.save.",
    Weights.UNKNOWN: "Fetch the file again; what is there may be a web page, or the pointer of a large file.",
}


def read_shard_header(path: Path, file: str | None = None) -> Header:
    """Read and check the header of a local shard; the data is not read.

    Args:
        path: the shard.
        file: the name for the specs; the file's own name by default.

    Raises:
        CorruptShardError: it is malformed, or contradicts the length of the file.
        UnsafePickleError: its pickle contains more than tensors and plain values; nothing of it was run.
        UnreadableFormatError: see `check_readable`.
    """
    name = file or path.name
    kind = recognise_file(path)
    check_readable(kind, name)
    if kind not in TORCH:
        return read_header(path, name)
    with PositionalFile(path) as opened:
        return parse_torch_header(opened.read_at, opened.size(), name)


def parse_torch_header(read: ReadAt, size: int, file: str, *, scattered: bool = True) -> Header:
    """The tensors in a file of `torch.save`, of either format, as a safetensors header, but with strides.

    Args:
        read: reads (offset, length), bytes.
        size: size of the whole file in bytes.
        file: name for the specs and error messages.
        scattered: also read and compare the metadata between the storages; if not, another call has to check the
            offsets before the data is used.

    Raises:
        CorruptShardError, UnsafePickleError: see `read_shard_header`.
    """
    if recognise(read(0, min(HEAD_BYTES, size))) is Weights.TORCH_LEGACY:
        return _header(parse_legacy_torch(read, size, file, counts=scattered))
    return _header(parse_torch_zip(read, size, file, local_headers=scattered))


def check_readable(kind: Weights, file: str) -> None:
    """Refuse a format that cannot be read here.

    A file named as safetensors with an unknown beginning is left to that format's reader, which reports the problem.

    Raises:
        UnreadableFormatError: with the format and a remedy.
    """
    named = kind is Weights.UNKNOWN and file.endswith(".safetensors")
    if kind is not Weights.SAFETENSORS and kind not in TORCH and not named:
        raise UnreadableFormatError(
            f"{file} is {kind.value}; safetensors and the files of torch.save are read.",
            _REMEDIES[kind],
        )


def _header(read: TorchFile) -> Header:
    specs = sorted((tensor.spec() for tensor in read.tensors), key=lambda spec: (spec.offset, spec.nbytes))
    return Header(tuple(specs), {}, specs[0].offset if specs else read.size, comes_first=False)
