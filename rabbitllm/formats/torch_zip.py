"""The files of `torch.save` since torch 1.6, read as safetensors files are: every tensor's name, dtype, shape and place
from what stands around the data, and its bytes only when they are used.

Format: a zip of stored entries under one folder, `data.pkl` with the pickle and `data/<key>` with the storages
(https://github.com/pytorch/pytorch, torch/serialization.py; caffe2/serialize/inline_container.cc). The zip is read by
`zip_directory.py`, the pickle by `pickle_reader.py`: nothing is imported, nothing is run, and no size is used before it
has been compared with the size of the file. Knows no models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rabbitllm.errors import CorruptShardError
from rabbitllm.formats.pickle_reader import MAX_PICKLE_BYTES
from rabbitllm.formats.positional import PositionalFile
from rabbitllm.formats.torch_names import name_tensors
from rabbitllm.formats.torch_pickle import Storage, read_torch_pickle
from rabbitllm.formats.torch_tensor import TorchFile, placed
from rabbitllm.formats.zip_directory import ReadAt, ZipEntry, corrupt_zip, read_entries
from rabbitllm.formats.zip_local_headers import check_local_headers

PICKLE = "data.pkl"
_MAX_RECORD_BYTES = 256
_RECORDS = {"version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id"}
"""What else torch writes: small texts, of which only the byte order has a bearing on the tensors."""


def read_torch_zip(path: Path, file: str | None = None) -> TorchFile:
    """Read and check all of a local torch zip but its data.

    Args:
        path: the file.
        file: the name to put into the records; the file's own name by default.

    Raises:
        CorruptShardError: the zip or the pickle is malformed, or a tensor does not lie where it could.
        UnsafePickleError: the pickle asks for more than tensors and plain values.
    """
    with PositionalFile(path) as opened:
        return parse_torch_zip(opened.read_at, opened.size(), file or path.name)


def parse_torch_zip(read: ReadAt, size: int, file: str, *, local_headers: bool = True) -> TorchFile:
    """The same of any file that can be read in ranges.

    Args:
        read: reads (offset, length), bytes.
        size: of the whole file, bytes.
        file: name for the records and for messages.
        local_headers: compare every entry's own header too, a read each; without, the places that follow from the
            directory alone are to be confirmed by `check_local_headers` before the data is believed.
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
    """The pickle of a local torch zip as it stands, for a listing; the zip is checked, the pickle is not.

    Raises:
        CorruptShardError: the zip is malformed, or the pickle too large.
    """
    with PositionalFile(path) as opened:
        entries = read_entries(opened.read_at, opened.size(), path.name)
        check_local_headers(opened.read_at, entries, path.name)
        return read_pickle_bytes(opened.read_at, _records(entries, path.name), path.name)


def _records(entries: tuple[ZipEntry, ...], file: str) -> dict[str, ZipEntry]:
    """The entries by their names within the one folder they must lie in."""
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
    """The bytes of the pickle, whose size is checked first."""
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
    """Where each storage lies in the file (bytes); each must have an entry of its size, and no entry may be left."""
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
