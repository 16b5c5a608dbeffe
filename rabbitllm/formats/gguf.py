"""The header of a GGUF file: its metadata and the offsets of its tensors. The data is not read.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian): magic, version,
number of tensors, number of metadata entries, the entries, the tensors' names, shapes, types and offsets, and from the
next multiple of the alignment on the data. Shapes are written with the fastest dimension first; here they are in
torch's order.

Nothing is allocated by a number in the file before that number was compared with the size of the file and a limit. Of
long arrays (a vocabulary), which are checked too, only the offset is kept: `GgufArray`. Independent of models.

Stricter than llama.cpp: a repeated name or key, an array of arrays, tensors that overlap, and an offset that is not
aligned are refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.base.rounding import round_up
from rabbitllm.errors import CorruptShardError, UnreadableFormatError
from rabbitllm.formats.bounded import COPY_AGAIN, FETCH_POINTER, POINTER_BYTES, is_lfs_pointer, short
from rabbitllm.formats.gguf_types import BY_NUMBER
from rabbitllm.formats.tensor_spec import Header, ReadAt, StoredBlocks, TensorSpec
from rabbitllm.storage.files import PositionalFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Version 1 counted with 32 bits; no file of it is published any more."""
MAX_HEADER_BYTES = 64 << 20
"""Limit of everything before the data. A vocabulary of 262,144 tokens with scores takes 8 MB."""
MAX_ENTRIES = 1 << 16
"""Limit of metadata entries; models have about 50."""
MAX_TENSORS = 1 << 18
"""Limit of tensors in a file; models of a hundred layers have 2,000."""
MAX_KEY_BYTES = 1 << 12
MAX_NAME_BYTES = 1 << 10
MAX_TEXT_BYTES = 1 << 22
"""Limit of a single text of the metadata, such as a chat template."""
MAX_STRINGS = 1 << 21
"""Limit of texts in all arrays: 262,144 tokens and 600,000 merges are usual."""
MAX_DIMENSIONS = 4
"""As in ggml."""
KEPT_ELEMENTS = 4096
"""Arrays up to this length are values of the metadata; of longer ones only the offset is kept."""
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
READ_BYTES = 1 << 18
MAX_KEPT = 1 << 19
"""Limit of the elements of all arrays that are kept."""
_LIMIT = 1 << 63
_ENTRIES_BEGIN = 24

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata values of a fixed size -> their `struct` format."""
_STRING, _ARRAY = 8, 9
_MIN_STRING_BYTES = 8

Value = bool | int | float | str
"""A single value of the metadata."""


@dataclass(frozen=True, slots=True)
class GgufArray:
    """A long array of the metadata, as a range of the file.

    Attributes:
        count: number of elements.
        entry: offset of its entry in the metadata, bytes from the start of the file.
        offset, nbytes: of the elements, likewise.
    """

    count: int
    entry: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """Offset of its end."""
        return self.offset + self.nbytes


Metadata = Mapping[str, "Value | tuple[Value, ...] | GgufArray"]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The checked header of a file.

    Attributes:
        version: of the format.
        metadata: key -> value, in the order of the file.
        header: the tensors in the order of their data, with the names of the file.
        entries_end: offset of the end of the metadata, where the table of tensors begins.
    """

    version: int
    metadata: Metadata
    header: Header
    entries_end: int


def begins_gguf(head: bytes) -> bool:
    """Whether a file that begins with `head` is GGUF."""
    return head.startswith(MAGIC)


def read_gguf(path: Path, file: str | None = None) -> GgufFile:
    """Read and check the header of a local file.

    Raises:
        CorruptShardError, UnreadableFormatError: see `parse_gguf`.
    """
    with PositionalFile(path) as opened:
        return parse_gguf(opened.read_at, opened.size(), file or path.name)


def parse_gguf(read: ReadAt, size: int, file: str) -> GgufFile:
    """The same for any file that can be read in ranges; nothing after the header is read.

    Args:
        read: reads (offset, length), bytes.
        size: size of the whole file in bytes.
        file: name for the specs and error messages.

    Raises:
        CorruptShardError: the header is malformed, or contradicts the size of the file.
        UnreadableFormatError: another version or byte order, a tensor of an unknown type, or a git-lfs pointer.
    """
    cursor = _Cursor(read, size, file)
    if is_lfs_pointer(read(0, min(size, POINTER_BYTES))):
        raise UnreadableFormatError(f"{file} is a git-lfs pointer, not the file itself.", FETCH_POINTER)
    if cursor.take(len(MAGIC)) != MAGIC:
        raise cursor.error("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in VERSIONS:
        raise _version_error(version, file)
    tensors, entries = cursor.number("Q"), cursor.number("Q")
    if tensors > MAX_TENSORS or entries > MAX_ENTRIES:
        raise cursor.error(
            f"it declares {tensors:,} tensors and {entries:,} metadata entries; at most {MAX_TENSORS:,} and "
            f"{MAX_ENTRIES:,} are read"
        )
    metadata = _metadata(cursor, entries)
    entries_end = cursor.at
    table = [_tensor(cursor) for _ in range(tensors)]
    alignment = _alignment(metadata, cursor)
    header = _header(table, alignment, size, cursor)
    end = max([spec.offset + spec.extent for spec in header.tensors], default=cursor.at)
    if size > round_up(end, alignment):
        raise cursor.error(f"its tensors end at byte {end:,}, and it has {size:,} bytes")
    return GgufFile(version, metadata, header, entries_end)


def strings(read: ReadAt, array: GgufArray, file: str) -> Iterator[str]:
    """The texts of a long array, again from the file.

    Raises:
        CorruptShardError: one is not UTF-8.
    """
    cursor = _Cursor(read, array.offset + array.nbytes, file, array.offset)
    for _ in range(array.count):
        yield cursor.text(array.nbytes)


class _Cursor:
    """Reads a header in order, in pieces of `READ_BYTES`, and never past `size`."""

    def __init__(self, read: ReadAt, size: int, file: str, offset: int = 0) -> None:
        self._read = read
        self._size = size
        self.file = file
        self._begin, self._buffer = offset, b""
        self.at = offset
        self.strings = self.kept = 0

    def error(self, reason: str) -> CorruptShardError:
        return CorruptShardError(f"{self.file} is not a valid GGUF file: {reason}.", COPY_AGAIN)

    def require(self, length: int) -> None:
        """Refuse a length that the file, or a header, cannot have."""
        if length > self._size - self.at:
            raise self.error(f"at byte {self.at:,} it declares {length:,} bytes, and it has {self._size:,} in all")
        if self.at + length > MAX_HEADER_BYTES:
            raise self.error(f"its header has more than {MAX_HEADER_BYTES:,} bytes")

    def take(self, length: int) -> bytes:
        """The next bytes."""
        self.require(length)
        start = self.at - self._begin
        if start < 0 or start + length > len(self._buffer):
            nbytes = max(length, min(READ_BYTES, self._size - self.at))
            self._begin, self._buffer, start = self.at, self._read(self.at, nbytes), 0
            if len(self._buffer) < length:
                raise self.error(f"it ends at byte {self.at + len(self._buffer):,}, within its header")
        self.at += length
        return self._buffer[start : start + length]

    def skip(self, length: int) -> None:
        """Skip bytes, without reading them."""
        self.require(length)
        self.at += length

    def number(self, form: str) -> int:
        """The next number; `form` is a format of `struct` for integers."""
        (value,) = struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))
        return int(value)

    def text(self, limit: int) -> str:
        """The next text of at most `limit` bytes."""
        length = self.number("Q")
        if length > limit:
            raise self.error(f"it has a text of {length:,} bytes; at most {limit:,} are read")
        raw = self.take(length)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"the text {short(raw, 60)} is not UTF-8") from None


def _version_error(version: int, file: str) -> UnreadableFormatError:
    if version & 0xFFFF == 0:
        return UnreadableFormatError(
            f"{file} is a GGUF file of a big-endian machine; only little-endian ones are read.",
            "Convert it with gguf-convert-endian of the package gguf.",
        )
    return UnreadableFormatError(
        f"{file} is GGUF of version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are read.",
        "Write the file again with a current llama.cpp.",
    )


def _metadata(cursor: _Cursor, entries: int) -> Metadata:
    metadata: dict[str, Value | tuple[Value, ...] | GgufArray] = {}
    for _ in range(entries):
        begin = cursor.at
        key = cursor.text(MAX_KEY_BYTES)
        if not key or not key.isprintable():
            raise cursor.error(f"the key {short(key, 60)} is not printable text")
        if key in metadata:
            raise cursor.error(f"the key {short(key, 60)} appears twice")
        metadata[key] = _value(cursor, cursor.number("I"), key, begin)
    return metadata


def _value(cursor: _Cursor, value_type: int, key: str, entry: int) -> Value | tuple[Value, ...] | GgufArray:
    if value_type != _ARRAY:
        return _single(cursor, value_type, key)
    element, count = cursor.number("I"), cursor.number("Q")
    if element == _STRING:
        cursor.strings += count
        if cursor.strings > MAX_STRINGS:
            raise cursor.error(f"its arrays have more than {MAX_STRINGS:,} texts")
        cursor.require(count * _MIN_STRING_BYTES)
    elif element in _FORMATS:
        cursor.require(count * struct.calcsize(f"<{_FORMATS[element]}"))
    else:
        raise cursor.error(f"{short(key, 60)} is an array of type {element}; texts, numbers and booleans are read")
    begin = cursor.at
    if count <= KEPT_ELEMENTS and cursor.kept + count <= MAX_KEPT:
        cursor.kept += count
        return tuple(_single(cursor, element, key) for _ in range(count))
    if element == _STRING:
        for _ in range(count):
            cursor.skip(cursor.number("Q"))
    else:
        cursor.skip(count * struct.calcsize(f"<{_FORMATS[element]}"))
    return GgufArray(count, entry, begin, cursor.at - begin)


def _single(cursor: _Cursor, value_type: int, key: str) -> Value:
    if value_type == _STRING:
        return cursor.text(MAX_TEXT_BYTES)
    if value_type not in _FORMATS:
        raise cursor.error(f"{short(key, 60)} has the type {value_type}, which does not exist")
    raw = cursor.take(struct.calcsize(f"<{_FORMATS[value_type]}"))
    if _FORMATS[value_type] == "?":
        return raw != b"\0"
    (value,) = struct.unpack(f"<{_FORMATS[value_type]}", raw)
    return value if isinstance(value, float) else int(value)


def _tensor(cursor: _Cursor) -> TensorSpec:
    """The next row of the table of tensors, plain or as dequantized to float32; its offset is from the data's start."""
    name = cursor.text(MAX_NAME_BYTES)
    if not name or not name.isprintable():
        raise cursor.error(f"the tensor name {short(name, 60)} is not printable text")
    dimensions = cursor.number("I")
    if dimensions > MAX_DIMENSIONS:
        raise cursor.error(f"{short(name, 60)} has {dimensions:,} dimensions; at most {MAX_DIMENSIONS} are read")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    type_id, offset = cursor.number("I"), cursor.number("Q")
    ggml = BY_NUMBER.get(type_id)
    if ggml is None:
        raise UnreadableFormatError(
            f"The tensor {short(name, 60)} in {cursor.file} has the ggml type {type_id}, which is not supported.",
            "Use a file of a usual type such as Q4_K_M or Q8_0, or the model's original weights.",
        )
    if math.prod(shape) >= _LIMIT or (shape and shape[-1] % ggml.elements):
        raise cursor.error(f"{short(name, 60)} has the shape {shape}, which blocks of {ggml.elements} cannot have")
    if not shape and ggml.elements != 1:
        raise cursor.error(f"{short(name, 60)} is a single value of {ggml.name}, which has blocks of {ggml.elements}")
    elements = math.prod(shape)
    nbytes = elements // ggml.elements * ggml.nbytes
    if ggml.dtype is not None:
        return TensorSpec(name, ggml.dtype, shape, cursor.file, offset, nbytes)
    return TensorSpec(name, "F32", shape, cursor.file, offset, elements * 4, blocks=StoredBlocks(ggml, nbytes))


def _alignment(metadata: Metadata, cursor: _Cursor) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    valid = isinstance(alignment, int) and not isinstance(alignment, bool) and 0 < alignment <= MAX_ALIGNMENT
    if not (valid and alignment & (alignment - 1) == 0):  # type: ignore[operator]
        raise cursor.error(f"its alignment is {short(alignment, 60)}; expected a power of two")
    assert isinstance(alignment, int)
    return alignment


def _header(table: Iterable[TensorSpec], alignment: int, size: int, cursor: _Cursor) -> Header:
    """The header with a table of tensors, at whose end `cursor` is."""
    specs, names, data_start = [], set[str](), round_up(cursor.at, alignment)
    for spec in table:
        name, begin = short(spec.name, 60), spec.offset
        if spec.name in names:
            raise cursor.error(f"the tensor {name} appears twice")
        names.add(spec.name)
        if begin % alignment:
            raise cursor.error(f"{name} begins at byte {begin:,} of the data, not at {alignment:,}")
        specs.append(spec._replace(offset=data_start + begin))
    specs.sort(key=lambda spec: (spec.offset, spec.extent))
    end = data_start
    for spec in specs:
        if spec.offset < end:
            raise cursor.error(f"{short(spec.name, 60)} overlaps another tensor")
        end = spec.offset + spec.extent
        if end > size:
            raise cursor.error(f"{short(spec.name, 60)} ends at byte {end:,}, and the file has {size:,}")
    return Header(tuple(specs), {}, data_start)


def outline(file: GgufFile, read: ReadAt, names: Iterable[str], *, long_arrays: bool = True) -> Iterator[bytes]:
    """The content of a GGUF file with the metadata of `file`, and tensors of these names without their data.

    transformers makes a config and a tokenizer of it.

    Args:
        file: the checked header.
        read: reads (offset, length) of the same file.
        names: of the tensors of all files of the checkpoint. Each becomes one float32, zero.
        long_arrays: whether it has the arrays that are `GgufArray` here.
    """
    tensors, written = list(names), 0
    left_out = [] if long_arrays else [value for value in file.metadata.values() if isinstance(value, GgufArray)]
    alignment = file.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    assert isinstance(alignment, int)
    head = MAGIC + struct.pack("<IQQ", file.version, len(tensors), len(file.metadata) - len(left_out))
    begins = [_ENTRIES_BEGIN, *(value.end for value in left_out)]
    ends = [*(value.entry for value in left_out), file.entries_end]
    entries = (read(begin, end - begin) for begin, end in zip(begins, ends, strict=True))
    table = (
        struct.pack("<Q", len(name.encode())) + name.encode() + struct.pack("<IQIQ", 1, 1, 0, index * max(alignment, 4))
        for index, name in enumerate(tensors)
    )
    for piece in (head, *entries, *table):
        written += len(piece)
        yield piece
    yield bytes(-written % alignment + len(tensors) * max(alignment, 4))
