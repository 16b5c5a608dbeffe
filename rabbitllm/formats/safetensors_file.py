"""The safetensors file: headers checked completely, headers written, tensors viewed in place.

Format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian length N, N bytes of
JSON header, then the tensors' bytes without holes. A header is used only after all of it has been checked against
the size of the file. Independent of models.

Stricter than the reference reader, which accepts some ambiguity: a repeated name, a header that does not start with
`{`, an unknown field, a name that is not printable text.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rabbitllm.base.collection import uncollected
from rabbitllm.base.rounding import round_up
from rabbitllm.errors import CorruptShardError
from rabbitllm.formats.bounded import COPY_AGAIN, decode_json, no_constant, short
from rabbitllm.formats.tensor_spec import DTYPES, Header, ReadAt, TensorSpec, byte_size, torch_dtype
from rabbitllm.storage.files import CAN_MAP_PRIVATELY, PositionalFile

if TYPE_CHECKING:
    import torch

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 32 << 20
"""Limit of a header. The format allows 100,000,000; 97 % have less than 256 KiB, and 75,000 tensors take 10 MB."""
_FORMATS_LIMIT = 100_000_000
MAX_NAME = 1024
"""Limit of the characters of a tensor's name."""
MAX_DIMENSIONS = 64
"""torch's own limit; a header may declare 100,000."""
DATA_ALIGNMENT = 4096
"""Alignment of the data in files that we write, so that it can be read bypassing the page cache."""

_FIELDS = {"dtype", "shape", "data_offsets"}
_LIMIT = 1 << 63
"""Limit of file offsets and of torch's element counts."""


def read_header(path: Path, file: str | None = None) -> Header:
    """Read and check the header of a local file; the data is not read.

    Args:
        path: the file.
        file: the name for the specs; the file's own name by default.

    Raises:
        CorruptShardError: the header is malformed, or the length of the file contradicts it.
    """
    with PositionalFile(path) as opened:
        return header_at(opened.read_at, opened.size(), file or path.name)


def header_at(read: ReadAt, size: int, file: str) -> Header:
    """The same for any file that can be read in ranges.

    Args:
        read: reads (offset, length), bytes.
        size: size of the whole file in bytes.
        file: name for the specs and error messages.
    """
    return parse_header(read(LENGTH_BYTES, header_length(read(0, LENGTH_BYTES), size, file)), size, file)


def begins_safetensors(head: bytes) -> bool:
    """Whether a file that begins with `head` has this format."""
    return head[8:9] == b"{" and 2 <= int.from_bytes(head[:LENGTH_BYTES], "little") <= _FORMATS_LIMIT


def header_length(prefix: bytes, file_size: int, file: str) -> int:
    """The length of the JSON header, from the first 8 bytes of the file.

    Raises:
        CorruptShardError: the file is too short to have a header of that length.
    """
    if len(prefix) < LENGTH_BYTES:
        raise _corrupt(file, f"it has {len(prefix)} bytes; a safetensors file has at least {LENGTH_BYTES}")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise _corrupt(
            file, f"its first 8 bytes declare a header of {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read"
        )
    if length < 2 or LENGTH_BYTES + length > file_size:
        raise _corrupt(file, f"it declares a header of {length:,} bytes and has {file_size:,} bytes")
    return length


@uncollected()
def parse_header(raw: bytes, file_size: int, file: str) -> Header:
    """Check a complete JSON header against the size of its file and convert it to specs.

    Args:
        raw: the JSON text, `header_length` bytes.
        file_size: size of the whole file, bytes.
        file: name for the specs and error messages.

    Raises:
        CorruptShardError: the header is malformed.
    """
    data_start = LENGTH_BYTES + len(raw)
    entries = _decode(raw, file)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _corrupt(file, "its __metadata__ is not a table of strings")
    try:
        "".join((*metadata, *metadata.values())).encode()
    except UnicodeEncodeError:
        raise _corrupt(file, "its __metadata__ has an unpaired surrogate") from None
    tensors = sorted(
        (_spec(name, entry, data_start, file) for name, entry in entries.items()), key=lambda t: (t.offset, t.nbytes)
    )
    expected = data_start
    for tensor in tensors:
        if tensor.offset != expected:
            problem = "overlaps the tensor before it" if tensor.offset < expected else "leaves a hole before it"
            raise _corrupt(
                file, f"tensor {tensor.name!r} {problem}: it starts at byte {tensor.offset}, expected {expected}"
            )
        expected += tensor.nbytes
    if expected != file_size:
        state = "truncated" if file_size < expected else "followed by bytes that belong to no tensor"
        raise _corrupt(file, f"it is {state}: {file_size:,} bytes found, {expected:,} expected from its header")
    return Header(tuple(tensors), metadata, data_start)


def _decode(raw: bytes, file: str) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise _corrupt(file, f"its header starts with {raw[:1]!r}; a safetensors header starts with '{{'")
    try:
        decoded = decode_json(raw, no_constant, _no_minus_zero if b"-0" in raw else None)
    except ValueError as error:
        raise _corrupt(file, f"its header is not valid JSON ({error})") from None
    assert isinstance(decoded, dict)
    return decoded


def _no_minus_zero(text: str) -> int:
    if text == "-0":  # the reference reader parses it as a float, and refuses it
        raise ValueError("-0 is not a valid integer")
    return int(text)


def _spec(name: str, entry: object, data_start: int, file: str) -> TensorSpec:
    if len(name) > MAX_NAME:
        raise _corrupt(file, f"the name {name[:40]!r}... has {len(name):,} characters; at most {MAX_NAME:,} are read")
    if not name or not name.isprintable():
        raise _tensor_error(file, name, "has a name that is empty or not printable")
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise _tensor_error(file, name, f"is described by {short(entry)}; expected dtype, shape and data_offsets only")
    dtype, sizes, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _tensor_error(file, name, f"has dtype {short(dtype)}; expected one of {', '.join(DTYPES)}")
    if not _are_naturals(sizes) or len(sizes) > MAX_DIMENSIONS:
        raise _tensor_error(file, name, f"has shape {short(sizes)}; expected at most {MAX_DIMENSIONS} natural numbers")
    shape = tuple(sizes)
    if not _is_countable(shape):
        raise _tensor_error(file, name, f"has shape {short(sizes)}; no tensor is that large")
    if not _are_naturals(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise _tensor_error(file, name, f"has data_offsets {short(offsets)}; expected [begin, end]")
    nbytes = offsets[1] - offsets[0]
    try:
        expected = byte_size(dtype, shape)
    except ValueError as error:
        raise _corrupt(file, f"tensor {name!r}: {error}") from None
    if nbytes != expected:
        raise _tensor_error(file, name, f"spans {nbytes:,} bytes; {dtype} of shape {short(sizes)} needs {expected:,}")
    return TensorSpec(name, dtype, shape, file, data_start + offsets[0], nbytes)


@functools.lru_cache(maxsize=1024)
def _is_countable(shape: tuple[int, ...]) -> bool:
    """Whether torch could count the elements, and for an empty tensor compute its strides."""
    return math.prod([size or 1 for size in shape]) < _LIMIT


def _tensor_error(file: str, name: str, problem: str) -> CorruptShardError:
    return _corrupt(file, f"tensor {name!r} {problem}")


def _are_naturals(value: object) -> bool:
    if not isinstance(value, list):
        return False
    for number in value:  # noqa: SIM110  a generator would take twice as long, and checkpoints have 100,000 of these
        if type(number) is not int or not 0 <= number < _LIMIT:
            return False
    return True


def _corrupt(file: str, problem: str) -> CorruptShardError:
    return CorruptShardError(f"{file} is not a valid safetensors file: {problem}.", COPY_AGAIN)


class TensorToWrite(NamedTuple):
    """A tensor to be written: its name, dtype and shape. Its offset follows from the order."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return byte_size(self.dtype, self.shape)


def encode_header(tensors: Iterable[TensorToWrite]) -> tuple[bytes, tuple[int, ...]]:
    """The header of a file that holds `tensors` in this order, and the absolute offset of each.

    The header is padded with spaces, which the format allows, so that the data starts on a multiple
    of 4096 bytes.
    """
    entries = ['{"__metadata__":{"format":"pt"}']
    begins, begin = [], 0
    for tensor in tensors:  # inlined, since a layer of hundreds of experts has thousands
        begins.append(begin)
        end = begin + tensor.nbytes
        described = _encode_dtype_and_shape(tensor.dtype, tensor.shape)
        entries.append(f'{_quote(tensor.name)}:{{{described},"data_offsets":[{begin},{end}]}}')
        begin = end
    raw = (",".join(entries) + "}").encode()
    data_start = round_up(LENGTH_BYTES + len(raw), DATA_ALIGNMENT)
    padded = raw.ljust(data_start - LENGTH_BYTES)
    return len(padded).to_bytes(LENGTH_BYTES, "little") + padded, tuple(data_start + begin for begin in begins)


_quote = json.encoder.encode_basestring
"""A JSON string with only the necessary escapes."""


@functools.lru_cache(maxsize=1024)
def _encode_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> str:
    """The dtype and the shape of a tensor, in the syntax of a header."""
    return f'"dtype":{_quote(dtype)},"shape":[{",".join(map(str, shape))}]'


class MappedFile:
    """A memory-mapped file of tensors: its tensors are views, read from the disk on access.

    The views keep the mapping alive; nothing needs closing, and no descriptor is held (on Windows a handle is).

    Args:
        path: the file.
        header: its header, if it is known; else it is read as safetensors.
    """

    def __init__(self, path: Path, header: Header | None = None) -> None:
        self.header = header or read_header(path)
        with PositionalFile(path) as file:
            # copy-on-write, so that a model that scales a weight in place neither changes the file nor crashes;
            # on Windows that would reserve memory for the whole file
            self._bytes = file.map_privately() if CAN_MAP_PRIVATELY else file.map_read_only()
        self._path = path

    def bytes_of(self, spec: TensorSpec) -> memoryview:
        """The tensor's bytes in the file, read on access.

        Raises:
            CorruptShardError: the file was truncated after its header was read.
        """
        data = self._bytes[spec.offset : spec.offset + spec.extent]
        if len(data) != spec.extent:
            raise CorruptShardError(
                f"{self._path} ends within {spec.name!r}: the file was truncated after the model was loaded.",
                "Put the whole file back and load the model again.",
            )
        return data

    def whole(self) -> memoryview:
        """The bytes of the whole file, read on access."""
        return self._bytes

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """The tensor of shape `spec.shape`; a view if its offset is aligned for its dtype, else a copy."""
        return view_bytes(self.bytes_of(spec), spec)


def view_bytes(data: memoryview, spec: TensorSpec) -> torch.Tensor:
    """A tensor over `data` without a copy, or a copy if `data` is misaligned for the dtype.

    Its shape is `spec.shape`; for F4, of which torch packs two into an element, the last dimension is halved.
    """
    import torch

    dtype = torch_dtype(spec.dtype)
    shape = spec.shape if DTYPES[spec.dtype].bits >= 8 else (*spec.shape[:-1], spec.shape[-1] // 2)
    if not spec.nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)
