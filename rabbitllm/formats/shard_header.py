"""The header of a shard in any format: formats are distinguished by their first bytes and give the same record.

Independent of models and of file names.
"""

from __future__ import annotations

from pathlib import Path

from rabbitllm.errors import UnreadableFormatError
from rabbitllm.formats.positional import PositionalFile
from rabbitllm.formats.recognise import HEAD_BYTES, Weights, recognise, recognise_file
from rabbitllm.formats.safetensors_file import Header, read_header
from rabbitllm.formats.torch_legacy import parse_legacy_torch
from rabbitllm.formats.torch_tensor import TorchFile
from rabbitllm.formats.torch_zip import parse_torch_zip
from rabbitllm.formats.zip_directory import ReadAt

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
