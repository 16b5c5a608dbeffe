"""The files of `torch.save` since torch 1.6, read like safetensors files: every tensor's name, dtype, shape and offset
from the metadata around the data, and its bytes only when they are used.

Format: a zip of stored entries under one folder, `data.pkl` with the pickle and `data/<key>` with the storages
(https://github.com/pytorch/pytorch, torch/serialization.py; caffe2/serialize/inline_container.cc). The zip is read by
`zip_directory.py`, the pickle by `pickle_reader.py`: nothing is imported, nothing is run, and no size is used before it
has been compared with the size of the file. Independent of models.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from rabbitllm.errors import CorruptShardError
from rabbitllm.formats.pickle_reader import MAX_PICKLE_BYTES
from rabbitllm.formats.positional import PositionalFile
from rabbitllm.formats.torch_names import name_tensors
from rabbitllm.formats.torch_pickle import Storage, read_torch_pickle
from rabbitllm.formats.torch_tensor import TorchFile, placed
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
    read_entries,
    zip64_field,
)

# The local headers of a zip, each compared with the entry in the central directory.
#
# A reader that starts at the front of a file uses the former, one that starts at its end the latter; both must agree.


def check_local_headers(read: ReadAt, entries: Sequence[ZipEntry], file: str) -> None:
    """Compare each local header and data descriptor with the central directory. Reads no data.

    Args:
        read: reads the file.
        entries: all entries, from `read_entries`.
        file: name for messages.

    Raises:
        CorruptShardError: a header differs.
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
    """Check an entry; `raw` reaches from the local header to the data."""
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


PICKLE = "data.pkl"
_MAX_RECORD_BYTES = 256
_RECORDS = {"version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id"}
"""Names of torch's other entries: small texts, of which only the byte order matters for the tensors."""


def read_torch_zip(path: Path, file: str | None = None) -> TorchFile:
    """Read and check all of a local torch zip but its data.

    Args:
        path: the file.
        file: the name for the records; the file's own name by default.

    Raises:
        CorruptShardError: the zip or the pickle is malformed, or a tensor exceeds its storage.
        UnsafePickleError: the pickle contains more than tensors and plain values.
    """
    with PositionalFile(path) as opened:
        return parse_torch_zip(opened.read_at, opened.size(), file or path.name)


def parse_torch_zip(read: ReadAt, size: int, file: str, *, local_headers: bool = True) -> TorchFile:
    """The same for any file that can be read in ranges.

    Args:
        read: reads (offset, length), bytes.
        size: size of the whole file in bytes.
        file: name for the records and error messages.
        local_headers: also compare every entry's own header, a read each; if not, `check_local_headers` has to check
            the offsets before the data is used.
    """
    entries = read_entries(read, size, file)
    if local_headers:
        check_local_headers(read, entries, file)
    records = _records(entries, file)
    _check_byte_order(read, records, file)
    root, storages = read_torch_pickle(read_pickle_bytes(read, records, file), file)
    places = _places(records, storages, file)
    named = name_tensors(root, file)
    tensors = tuple(placed(name, tensor, *places[tensor.storage.key], file) for name, tensor in named.tensors.items())
    return TorchFile(tensors, named.left_out, size)


def pickle_of(path: Path) -> bytes:
    """The unchecked pickle of a local torch zip, for a listing; the zip itself is checked.

    Raises:
        CorruptShardError: the zip is malformed, or the pickle too large.
    """
    with PositionalFile(path) as opened:
        entries = read_entries(opened.read_at, opened.size(), path.name)
        check_local_headers(opened.read_at, entries, path.name)
        return read_pickle_bytes(opened.read_at, _records(entries, path.name), path.name)


def _records(entries: tuple[ZipEntry, ...], file: str) -> dict[str, ZipEntry]:
    """The entries by their names within their common folder."""
    root = entries[0].name.partition("/")[0] if entries else ""
    records = {}
    for entry in entries:
        folder, _, name = entry.name.partition("/")
        if folder != root or not _is_torchs(name):
            raise corrupt_zip(
                file, f"entry {entry.name!r} is none that torch.save writes; a TorchScript archive or another zip?"
            )
        records[name] = entry
    if PICKLE not in records:
        raise corrupt_zip(file, f"it has no {PICKLE} among its {len(entries):,} entries")
    return records


def _is_torchs(name: str) -> bool:
    key = name.removeprefix("data/")
    return name == PICKLE or name in _RECORDS or (key != name and key.isascii() and key.isdigit())


def _check_byte_order(read: ReadAt, records: Mapping[str, ZipEntry], file: str) -> None:
    for name in _RECORDS & records.keys():
        if records[name].size > _MAX_RECORD_BYTES:
            raise corrupt_zip(file, f"its {name} has {records[name].size:,} bytes; expected a few")
    if entry := records.get("byteorder"):
        order = read(entry.begin, entry.size)
        if order != b"little":
            raise CorruptShardError(
                f"{file} was written with byte order {order[:20]!r}; only 'little' is read.",
                "Load it with torch and save it again on a little-endian machine.",
            )


def read_pickle_bytes(read: ReadAt, records: Mapping[str, ZipEntry], file: str) -> bytes:
    """The bytes of the pickle, after a check of its size."""
    entry = records[PICKLE]
    if entry.size > MAX_PICKLE_BYTES:
        raise corrupt_zip(file, f"its {PICKLE} has {entry.size:,} bytes; at most {MAX_PICKLE_BYTES:,} are read")
    data = read(entry.begin, entry.size)
    if len(data) != entry.size:
        raise corrupt_zip(file, f"it ended inside its {PICKLE}")
    return data


def _places(
    records: Mapping[str, ZipEntry], storages: Mapping[str, Storage], file: str
) -> Mapping[str, tuple[int, int]]:
    """The span of each storage in bytes; each must have an entry of its size, and all entries must be used."""
    places = {}
    for key, storage in storages.items():
        entry = records.get(f"data/{key}")
        if entry is None:
            raise corrupt_zip(file, f"its pickle names storage {key}, and there is no entry data/{key}")
        if entry.size != storage.nbytes:
            raise corrupt_zip(file, f"storage {key} has {entry.size:,} bytes; its pickle says {storage.nbytes:,}")
        places[key] = (entry.begin, entry.end)
    for name in records:
        if name.startswith("data/") and name.removeprefix("data/") not in places:
            raise corrupt_zip(file, f"entry {name} belongs to no tensor")
    return places
