"""The directory of a zip with stored entries, accepted only if every reader would interpret it alike.

Format: PKWARE's APPNOTE (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT); torch writes it with miniz
(https://github.com/pytorch/pytorch, third_party/miniz-3.0.2/miniz.c and caffe2/serialize/inline_container.cc).

Readers disagree about which end-of-directory record counts, which of two equal names, and what precedes the first
entry. So every byte of a file must be accounted for: entry follows entry from byte 0, each is a local header, its data
and, if a flag says so, a data descriptor; then the central directory; then the end records; then nothing. It follows
that the offset of every entry's data is known from the central directory alone, and `check_local_headers` compares each
with its local header. Python's `zipfile` is not used: it searches for the directory, and skips unknown parts.

Checksums are not compared: torch can be set to write zeros (`torch.serialization.set_crc32_options`).
Independent of torch.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rabbitllm.errors import CorruptShardError
from rabbitllm.formats.tensor_spec import ReadAt

MAX_ENTRIES = 32_768
"""Limit of entries. A shard has hundreds; at most thousands, with experts."""
MAX_DIRECTORY_BYTES = 16 << 20
MAX_NAME_BYTES = 1024

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_DESCRIPTOR = struct.Struct("<4s3I")
_DESCRIPTOR_64 = struct.Struct("<4sI2Q")

_DESCRIBED = 1 << 3
"""Flag: the sizes are in a data descriptor after the data."""
_UTF8 = 1 << 11
_FLAG_MEANINGS = {0: "encrypted", 5: "patch data", 6: "strongly encrypted", 13: "with masked local headers"}
_SENTINEL_16, _SENTINEL_32 = 0xFFFF, 0xFFFFFFFF
_MAX_EXTRA = 0xFFFF

_MAX_VERSION = 63
"""The latest version of the format, times ten."""

_SPECIAL = 0x18
"""Directory or volume label in the DOS attributes: miniz, and so torch, then reads nothing and returns uninitialised
memory as the data."""
_REGULAR = 0o10
"""Regular file in a Unix mode (st_mode >> 12); zero where none is given."""

_ZIP64 = 0x0001
_HARMLESS_EXTRAS = {0x4246, 0x5455, 0x7875}
"""Ids of torch's padding ("FB"), and of times and owners from Info-ZIP. Others can change a name or hide data."""

_REMEDY = (
    "Download or copy the file again. One that another program packed can be written again: load it where it can do no "
    "harm, and save the tensors as safetensors."
)


class ZipFault(ValueError):
    """What is wrong with a zip; `zip_faults_of` adds the name of the file."""


@contextlib.contextmanager
def zip_faults_of(file: str) -> Iterator[None]:
    """Report faults that are found inside the context as those of a file."""
    try:
        yield
    except ZipFault as fault:
        raise CorruptShardError(f"{file} is not a valid torch zip: {fault}.", _REMEDY) from None


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One stored entry.

    Attributes:
        name: with `/` between the parts; relative, and without `.` and `..`.
        header: offset of its local header from the start of the file.
        begin: offset of its data.
        end: offset of the end of its data.
        crc: the declared checksum; not compared with the data.
        flags: bit 3 and bit 11 at most.
        zip64: its zip64 field in the central directory, undecoded.
    """

    name: str
    header: int
    begin: int
    end: int
    crc: int
    flags: int
    zip64: bytes

    @property
    def size(self) -> int:
        """Length of the data in bytes."""
        return self.end - self.begin

    @property
    def descriptor(self) -> int:
        """Bytes of the data descriptor that follows."""
        if not self.flags & _DESCRIBED:
            return 0
        return _DESCRIPTOR_64.size if self.zip64 else _DESCRIPTOR.size


def read_entries(read: ReadAt, file_size: int) -> tuple[ZipEntry, ...]:
    """The entries in the order of their data, from the end records and the central directory alone.

    Args:
        read: reads the file; at most `MAX_DIRECTORY_BYTES` at once.
        file_size: bytes.

    Raises:
        ZipFault: the file is not a zip, is one that readers may interpret differently, or has entries that are
            not stored uncompressed.
    """
    count, begin, end = _directory_span(read, file_size)
    listed = list(_read_directory(read(begin, end - begin), count))
    names: set[str] = set()
    for entry in listed:
        if entry.name in names:
            raise ZipFault(f"two of its entries are named {entry.name!r}")
        names.add(entry.name)
    return tuple(_place_entries(sorted(listed, key=lambda entry: entry.header), begin))


def _directory_span(read: ReadAt, file_size: int) -> tuple[int, int, int]:
    """The number of entries, and the offsets of the begin and end of the central directory."""
    tail_bytes = _END.size + _LOCATOR.size + _END_64.size
    start = max(0, file_size - tail_bytes)
    tail = read(start, file_size - start)
    if file_size < _END.size or len(tail) != file_size - start or tail[-_END.size :][:4] != b"PK\x05\x06":
        raise ZipFault("it does not end with a zip end record: it is truncated, or has bytes after its end")
    _, disk, first_disk, disk_count, count, size, offset, comment = _END.unpack(tail[-_END.size :])
    if comment or disk or first_disk or disk_count != count:
        raise ZipFault("its end record has a comment, or names several disks; a checkpoint has neither")
    end = file_size - _END.size
    locator = tail[-_END.size - _LOCATOR.size : -_END.size]
    if locator[:4] == b"PK\x06\x07":
        end -= _LOCATOR.size + _END_64.size
        claimed = (count, size, offset)
        count, size, offset = _read_end_64(tail[: -_END.size], end)
        limits = (_SENTINEL_16, _SENTINEL_32, _SENTINEL_32)
        for old, new, limit in zip(claimed, (count, size, offset), limits, strict=True):
            if old not in (new, limit):
                raise ZipFault(f"its end record says {old:,} where its zip64 record says {new:,}")
    elif count == _SENTINEL_16 or _SENTINEL_32 in (size, offset):
        raise ZipFault("its end record refers to a zip64 record, and there is none before it")
    if count > MAX_ENTRIES or size > MAX_DIRECTORY_BYTES:
        raise ZipFault(
            f"its directory declares {count:,} entries in {size:,} bytes; "
            f"at most {MAX_ENTRIES:,} in {MAX_DIRECTORY_BYTES:,} bytes are read"
        )
    if offset + size != end:
        raise ZipFault(f"its directory should end at byte {end:,} and declares bytes {offset:,} to {offset + size:,}")
    return count, offset, end


def _read_end_64(tail: bytes, end: int) -> tuple[int, int, int]:
    """Count, size and offset of the central directory from the zip64 record, which must be at `end`."""
    if len(tail) < _LOCATOR.size + _END_64.size:
        raise ZipFault("its zip64 locator has no room for a zip64 record before it")
    _, disk, record_at, disks = _LOCATOR.unpack(tail[-_LOCATOR.size :])
    record = tail[-_LOCATOR.size - _END_64.size : -_LOCATOR.size]
    signature, length, _, _, record_disk, first_disk, disk_count, count, size, offset = _END_64.unpack(record)
    if record_at != end or signature != b"PK\x06\x06" or length != _END_64.size - 12:
        raise ZipFault(f"its zip64 locator points to byte {record_at:,}; expected the record at byte {end:,}")
    if disk or disks > 1 or record_disk or first_disk or disk_count != count:
        raise ZipFault("its zip64 record names several disks")
    return count, size, offset


def _read_directory(raw: bytes, count: int) -> Iterator[ZipEntry]:
    """The records of the central directory, which must be exactly `count` and fill it; their data as if at byte 0."""
    offset = 0
    for index in range(count):
        if len(raw) - offset < _CENTRAL.size or raw[offset : offset + 4] != b"PK\x01\x02":
            raise ZipFault(f"its directory declares {count:,} entries and has {index:,}")
        fields = _CENTRAL.unpack_from(raw, offset)
        _, _, needed, flags, method, _, _, crc, packed, size, *lengths, disk, _, attributes, header = fields
        offset += _CENTRAL.size
        ends = [offset := offset + length for length in lengths]
        if ends[-1] > len(raw):
            raise ZipFault(f"entry {index:,} of its directory reaches beyond the directory")
        name = _entry_name(raw[ends[0] - lengths[0] : ends[0]], flags)
        zip64 = _zip64_field(raw[ends[0] : ends[1]], name)
        if lengths[2]:
            raise ZipFault(f"entry {name!r} has a comment")
        _check_version(needed, name)
        _check_stored(flags, method, name)
        if attributes & _SPECIAL or attributes >> 28 not in (0, _REGULAR):
            raise ZipFault(f"entry {name!r} is not marked as a file (attributes {attributes:#010x})")
        wide = _widen_sizes((size, packed, header, disk), zip64, name)
        if wide[0] != wide[1]:
            raise ZipFault(f"entry {name!r} has {wide[1]:,} bytes and declares {wide[0]:,}")
        if wide[3]:
            raise ZipFault(f"entry {name!r} declares another disk")
        yield ZipEntry(name, wide[2], 0, wide[0], crc, flags, zip64)
    if offset != len(raw):
        raise ZipFault(f"its directory has {len(raw) - offset:,} bytes after its last entry")


def _place_entries(listed: Sequence[ZipEntry], directory: int) -> Iterator[ZipEntry]:
    """The entries with the spans of their data, which must be adjacent."""
    if not listed:
        raise ZipFault("it has no entries")
    if listed[0].header:
        raise ZipFault(f"its first entry starts at byte {listed[0].header:,}; expected byte 0")
    ends = [entry.header for entry in listed[1:]] + [directory]
    for entry, following in zip(listed, ends, strict=True):
        end = following - entry.descriptor
        begin = end - entry.size
        extra = begin - entry.header - _LOCAL.size - len(entry.name.encode())
        if not 0 <= extra <= _MAX_EXTRA:
            problem = "overlaps what follows it" if extra < 0 else "is followed by bytes that belong to no entry"
            raise ZipFault(
                f"entry {entry.name!r} of {entry.size:,} bytes {problem}: it starts at byte {entry.header:,}, "
                f"the next one at byte {following:,}"
            )
        yield replace(entry, begin=begin, end=end)


def _check_version(needed: int, name: str) -> None:
    """Refuse an entry that needs a later version of the format (low byte): torch reads it, zipfile does not."""
    if needed & 0xFF > _MAX_VERSION:
        raise ZipFault(
            f"entry {name!r} needs a reader of version {(needed & 0xFF) / 10} of the format; there is none above "
            f"{_MAX_VERSION / 10}"
        )


def _check_stored(flags: int, method: int, name: str) -> None:
    if method:
        raise ZipFault(f"entry {name!r} is compressed (method {method}); torch.save compresses nothing")
    for bit in range(16):
        if flags >> bit & 1 and 1 << bit not in (_DESCRIBED, _UTF8):
            raise ZipFault(f"entry {name!r} is {_FLAG_MEANINGS.get(bit, 'marked with an unknown flag')} (bit {bit})")


def _entry_name(raw: bytes, flags: int) -> str:
    """An entry's name, which must be an unambiguous relative path."""
    try:
        name = raw.decode("utf-8" if flags & _UTF8 else "ascii")
    except UnicodeDecodeError:
        raise ZipFault(f"the name {raw[:80]!r} of an entry is not valid text") from None
    parts = name.split("/")
    if len(raw) > MAX_NAME_BYTES or not name.isprintable() or "\\" in name or {"", ".", ".."} & set(parts):
        raise ZipFault(f"the name {name[:80]!r} of an entry is not a plain relative path")
    return name


def _zip64_field(extra: bytes, name: str) -> bytes:
    """The payload of the zip64 field among extra fields, empty if there is none; others must be harmless."""
    zip64, offset = b"", 0
    while offset < len(extra):
        field_id, length = struct.unpack_from("<2H", extra, offset) if len(extra) - offset >= 4 else (0, _MAX_EXTRA)
        payload = extra[offset + 4 : offset + 4 + length]
        if len(payload) != length:
            raise ZipFault(f"the extra fields of entry {name!r} do not end where they say")
        if field_id == _ZIP64:
            if zip64 or not payload:
                raise ZipFault(f"entry {name!r} has two zip64 fields, or an empty one")
            zip64 = payload
        elif field_id not in _HARMLESS_EXTRAS:
            raise ZipFault(f"entry {name!r} has an extra field of kind {field_id:#06x}, which could change its meaning")
        offset += 4 + length
    return zip64


def _widen_sizes(fields: tuple[int, int, int, int], zip64: bytes, name: str) -> tuple[int, ...]:
    """Size, packed size, header and disk, replaced by the zip64 field where it has them; it must hold exactly those."""
    limits = (_SENTINEL_32, _SENTINEL_32, _SENTINEL_32, _SENTINEL_16)
    replaced = [index for index, limit in enumerate(limits) if fields[index] == limit]
    layout = struct.Struct("<" + "".join("I" if index == 3 else "Q" for index in replaced))
    if layout.size != len(zip64):
        raise ZipFault(f"the zip64 field of entry {name!r} has {len(zip64)} bytes; expected {layout.size}")
    values = dict(zip(replaced, layout.unpack(zip64), strict=True))
    return tuple(values.get(index, field) for index, field in enumerate(fields))


def check_local_headers(read: ReadAt, entries: Sequence[ZipEntry]) -> None:
    """Compare each local header and data descriptor with the central directory. Reads no data.

    A reader that starts at the front of a file uses the former, one that starts at its end the latter.

    Args:
        read: reads the file.
        entries: all entries, from `read_entries`.

    Raises:
        ZipFault: a header differs.
    """
    position, pending = 0, None
    for entry in entries:
        between = read(position, entry.begin - position)
        if len(between) != entry.begin - position:
            raise ZipFault(f"it ended before byte {entry.begin:,}, where {entry.name!r} starts")
        if pending is not None:
            _check_descriptor(between[: pending.descriptor], pending)
        _check_local(between[entry.header - position :], entry)
        position, pending = entry.end, entry
    if pending is not None:
        _check_descriptor(read(position, pending.descriptor), pending)


def _check_local(raw: bytes, entry: ZipEntry) -> None:
    """Check an entry; `raw` reaches from the local header to the data."""
    signature, needed, flags, method, _, _, crc, packed, size, name_length, extra_length = _LOCAL.unpack_from(raw)
    name = raw[_LOCAL.size : _LOCAL.size + name_length]
    if signature != b"PK\x03\x04":
        raise ZipFault(f"there is no local header at byte {entry.header:,}, where {entry.name!r} should start")
    if name != entry.name.encode():
        raise ZipFault(f"entry {entry.name!r} is named {name[:80]!r} in its local header")
    _check_version(needed, entry.name)
    if (flags, method) != (entry.flags, 0):
        raise ZipFault(
            f"entry {entry.name!r} has flags {flags:#06x} and method {method} in its local header; "
            f"expected {entry.flags:#06x} and 0"
        )
    length = _LOCAL.size + name_length + extra_length
    if length != len(raw):
        raise ZipFault(
            f"the data of entry {entry.name!r} starts at byte {entry.header + length:,} by its local header; "
            f"expected byte {entry.begin:,}"
        )
    zip64 = _zip64_field(raw[_LOCAL.size + name_length :], entry.name)
    # torch writes the size, nothing for the packed size, and the rest as in the directory; zipfile both sizes
    as_torch = entry.zip64[:8] + bytes(8) + entry.zip64[16:]
    if zip64 not in (b"", entry.zip64, as_torch, struct.pack("<2Q", entry.size, entry.size)):
        raise ZipFault(f"the zip64 field in the local header of entry {entry.name!r} differs from the directory's")
    narrow = _SENTINEL_32 if zip64 and not entry.flags & _DESCRIBED else min(entry.size, _SENTINEL_32)
    expected = [(entry.crc, narrow, narrow), (entry.crc, entry.size, entry.size)]
    if entry.flags & _DESCRIBED:
        expected.append((0, 0, 0))
    if (crc, packed, size) not in expected:
        raise ZipFault(
            f"entry {entry.name!r} has {size:,} bytes by its local header, or another checksum; "
            f"the directory says {entry.size:,} bytes"
        )


def _check_descriptor(raw: bytes, entry: ZipEntry) -> None:
    layout = {0: None, _DESCRIPTOR.size: _DESCRIPTOR, _DESCRIPTOR_64.size: _DESCRIPTOR_64}[entry.descriptor]
    if layout is not None and raw != layout.pack(b"PK\x07\x08", entry.crc, entry.size, entry.size):
        raise ZipFault(f"the data descriptor after entry {entry.name!r} differs from the directory")
