"""The local headers of a zip, each compared with what the central directory says of the entry.

A reader that walks a file from its front believes these, one that looks at its end the other; both must see the same.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from rabbitllm.formats.zip_directory import (
    DESCRIBED,
    DESCRIPTOR,
    DESCRIPTOR_64,
    LOCAL,
    SENTINEL_32,
    ReadAt,
    ZipEntry,
    check_version,
    corrupt_zip,
    zip64_field,
)


def check_local_headers(read: ReadAt, entries: Sequence[ZipEntry], file: str) -> None:
    """Compare each local header and data descriptor with the central directory. Reads no data.

    Args:
        read: reads the file.
        entries: all of them, from `read_entries`.
        file: name for messages.

    Raises:
        CorruptShardError: one differs.
    """
    at, pending = 0, None
    for entry in entries:
        between = read(at, entry.begin - at)
        if len(between) != entry.begin - at:
            raise corrupt_zip(file, f"it ended before byte {entry.begin:,}, where {entry.name!r} starts")
        if pending is not None:
            _check_descriptor(between[: pending.descriptor], pending, file)
        _check_local(between[entry.header - at :], entry, file)
        at, pending = entry.end, entry
    if pending is not None:
        _check_descriptor(read(at, pending.descriptor), pending, file)


def _check_local(raw: bytes, entry: ZipEntry, file: str) -> None:
    """`raw` reaches from the local header to the data."""
    signature, needed, flags, method, _, _, crc, packed, size, name_length, extra_length = LOCAL.unpack_from(raw)
    name = raw[LOCAL.size : LOCAL.size + name_length]
    if signature != b"PK\x03\x04":
        raise corrupt_zip(file, f"there is no local header at byte {entry.header:,}, where {entry.name!r} should start")
    if name != entry.name.encode():
        raise corrupt_zip(file, f"entry {entry.name!r} is named {name[:80]!r} in its local header")
    check_version(needed, entry.name, file)
    if (flags, method) != (entry.flags, 0):
        raise corrupt_zip(
            file,
            f"entry {entry.name!r} has flags {flags:#06x} and method {method} in its local header; "
            f"expected {entry.flags:#06x} and 0",
        )
    length = LOCAL.size + name_length + extra_length
    if length != len(raw):
        raise corrupt_zip(
            file,
            f"the data of entry {entry.name!r} starts at byte {entry.header + length:,} by its local header; "
            f"expected byte {entry.begin:,}",
        )
    zip64 = zip64_field(raw[LOCAL.size + name_length :], entry.name, file)
    # torch writes the size, nothing for the packed size, and the rest as in the directory; zipfile both sizes
    as_torch = entry.zip64[:8] + bytes(8) + entry.zip64[16:]
    if zip64 not in (b"", entry.zip64, as_torch, struct.pack("<2Q", entry.size, entry.size)):
        raise corrupt_zip(
            file, f"the zip64 field in the local header of entry {entry.name!r} differs from the directory's"
        )
    narrow = SENTINEL_32 if zip64 and not entry.flags & DESCRIBED else min(entry.size, SENTINEL_32)
    known = [(entry.crc, narrow, narrow), (entry.crc, entry.size, entry.size)]
    if entry.flags & DESCRIBED:
        known.append((0, 0, 0))
    if (crc, packed, size) not in known:
        raise corrupt_zip(
            file, f"entry {entry.name!r} has {size:,} bytes by its local header, or another checksum; "
            f"the directory says {entry.size:,} bytes"
        )  # fmt: skip


def _check_descriptor(raw: bytes, entry: ZipEntry, file: str) -> None:
    layout = {0: None, DESCRIPTOR.size: DESCRIPTOR, DESCRIPTOR_64.size: DESCRIPTOR_64}[entry.descriptor]
    if layout is not None and raw != layout.pack(b"PK\x07\x08", entry.crc, entry.size, entry.size):
        raise corrupt_zip(file, f"the data descriptor behind entry {entry.name!r} differs from the directory")
