"""What a shard holds, in whichever format it is: the formats are told apart by their first bytes and give one record.

Knows no models, and no names of files.
"""

from __future__ import annotations

from pathlib import Path

from rabbitllm.errors import UnreadableFormatError
from rabbitllm.formats.recognise import Weights, recognise_file
from rabbitllm.formats.safetensors_file import Header, read_header
from rabbitllm.formats.torch_zip import TorchZip, read_torch_zip

_RESAVE = (
    "If you trust the file, load it with torch.load(path, weights_only=True), save the result with safetensors' "
    "save_file or with torch.save under another name, and give the folder of that."
)
_REMEDIES = {
    Weights.TORCH_LEGACY: _RESAVE,
    Weights.TORCH_TAR: _RESAVE,
    Weights.PICKLE: "Save the tensors with torch.save or as safetensors, and give the folder of that file.",
    Weights.GGUF: "Give the original weights: safetensors, or files of torch.save.",
    Weights.UNKNOWN: "Fetch the file again; what is there may be a web page, or the pointer of a large file.",
}


def read_shard_header(path: Path, file: str | None = None) -> Header:
    """Read and check all that a local shard says of its tensors; their data is not touched.

    Args:
        path: the shard.
        file: the name to put into the specs; the file's own name by default.

    Raises:
        CorruptShardError: what it says is malformed, or contradicts the length of the file.
        UnsafePickleError: its pickle asks for more than tensors and plain values; nothing of it was run.
        UnreadableFormatError: see `check_readable`.
    """
    name = file or path.name
    kind = recognise_file(path)
    check_readable(kind, name)
    return header_of_torch_zip(read_torch_zip(path, name)) if kind is Weights.TORCH_ZIP else read_header(path, name)


def check_readable(kind: Weights, file: str) -> None:
    """Refuse a format that no reader here is for.

    A file that is named as safetensors and begins like nothing known is left to the reader of that format, which says
    what is wrong with it.

    Raises:
        UnreadableFormatError: with what the file is, and what to do about it.
    """
    named = kind is Weights.UNKNOWN and file.endswith(".safetensors")
    if kind not in (Weights.SAFETENSORS, Weights.TORCH_ZIP) and not named:
        raise UnreadableFormatError(
            f"{file} is {kind.value}; safetensors and the files of torch.save since torch 1.6 are read.",
            _REMEDIES[kind],
        )


def header_of_torch_zip(read: TorchZip) -> Header:
    """What a torch zip holds, as the header of a safetensors file has it, its strides apart.

    Raises:
        CorruptShardError: see `TorchTensor.spec`.
    """
    specs = sorted((tensor.spec() for tensor in read.tensors), key=lambda spec: (spec.offset, spec.nbytes))
    return Header(tuple(specs), {}, specs[0].offset if specs else read.size, comes_first=False)
