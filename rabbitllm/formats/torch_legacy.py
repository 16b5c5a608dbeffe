"""The files of `torch.save` before torch 1.6, read like later ones: every tensor's name, dtype, shape and offset from
the metadata before the data, and its bytes only when they are used.

Format: five pickles (a magic number, the version, information on the machine, the saved value, the keys of its
storages), and then each storage in the order of the keys: the number of its elements, 8 bytes, and their bytes
(https://github.com/pytorch/pytorch, torch/serialization.py, `_legacy_save` and `_legacy_load`). torch itself reads
such a file whole, which the format does not require. The pickles are read by `pickle_reader.py`: nothing is imported,
and nothing is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rabbitllm.errors import CorruptShardError
from rabbitllm.formats.pickle_machine import describe
from rabbitllm.formats.pickle_reader import MAX_PICKLE_BYTES
from rabbitllm.formats.positional import PositionalFile
from rabbitllm.formats.recognise import LEGACY_NUMBER
from rabbitllm.formats.torch_names import NamedTensors, name_tensors
from rabbitllm.formats.torch_pickle import (
    Storage,
    element_bytes,
    read_legacy_torch_pickle,
    read_plain_pickle,
)
from rabbitllm.formats.torch_tensor import TorchFile, placed
from rabbitllm.formats.zip_directory import ReadAt

PROTOCOL = 1001
"""The only version that exists."""
COUNT_BYTES = 8
READS = (256 << 10, 4 << 20, MAX_PICKLE_BYTES)
"""Bytes of the beginning that are read in turn until they contain all pickles. A tensor takes about 200 bytes."""


def read_legacy_torch(path: Path, file: str | None = None) -> TorchFile:
    """Read and check all of a local file but its data.

    Args:
        path: the file.
        file: the name for the records; the file's own name by default.

    Raises:
        CorruptShardError: a pickle is malformed, or the storages are incomplete or not those that it names.
        UnsafePickleError: a pickle contains more than tensors and plain values.
    """
    with PositionalFile(path) as opened:
        return parse_legacy_torch(opened.read_at, opened.size(), file or path.name)


def parse_legacy_torch(read: ReadAt, size: int, file: str, *, counts: bool = True) -> TorchFile:
    """The same for any file that can be read in ranges.

    Args:
        read: reads (offset, length), bytes.
        size: size of the whole file in bytes.
        file: name for the records and error messages.
        counts: also compare the number before each storage with the pickle, a read each; if not, another call has to
            check the offsets before the data is used.
    """
    named, storages, keys, at = _pickles(read, size, file)
    places = _places(storages, keys, at, file)
    end = max((place[1] for place in places.values()), default=at)
    if end != size:
        raise corrupt_legacy(file, f"its storages end at byte {end:,}, and it has {size:,}")
    if counts:
        for key, (begin, _) in places.items():
            _check_count(read(begin - COUNT_BYTES, COUNT_BYTES), storages[key], file)
    tensors = tuple(placed(name, tensor, *places[tensor.storage.key], file) for name, tensor in named.tensors.items())
    return TorchFile(tensors, named.left_out, size)


def corrupt_legacy(file: str, what: str) -> CorruptShardError:
    """The error for a malformed file of this format."""
    return CorruptShardError(
        f"{file} is no sound torch file from before torch 1.6: {what}.", "Fetch or copy the file again."
    )


def _pickles(read: ReadAt, size: int, file: str) -> tuple[NamedTensors, Mapping[str, Storage], tuple[str, ...], int]:
    """The content of the pickles: the tensors, their storages, the storages' order, and the offset of the first one."""
    for length in READS:
        data = read(0, min(length, size))
        try:
            return _parse(data, file)
        except CorruptShardError:
            if length >= size or length == READS[-1]:
                raise
    raise AssertionError("the last length returns or raises")


def _parse(data: bytes, file: str) -> tuple[NamedTensors, Mapping[str, Storage], tuple[str, ...], int]:
    number, at = read_plain_pickle(data, 0, file)
    version, at = read_plain_pickle(data, at, file)
    if number != LEGACY_NUMBER or version != PROTOCOL:
        raise corrupt_legacy(file, f"its version is {describe(version)}; expected {PROTOCOL}")
    machine, at = read_plain_pickle(data, at, file)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise CorruptShardError(
            f"{file} was not written on a little-endian machine, or does not say so; only that byte order is read.",
            "Load it with torch and save it again on a little-endian machine.",
        )
    root, storages, at = read_legacy_torch_pickle(data, at, file)
    keys, at = read_plain_pickle(data, at, file)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise corrupt_legacy(file, "the keys of its storages are no list of text")
    if len(set(keys)) != len(keys) or set(keys) != storages.keys():
        raise corrupt_legacy(file, f"it lists {len(keys):,} storages that are not the {len(storages):,} it refers to")
    return name_tensors(root, file), storages, tuple(keys), at


def _places(
    storages: Mapping[str, Storage], keys: tuple[str, ...], at: int, file: str
) -> Mapping[str, tuple[int, int]]:
    """The span of each storage, bytes from the start of the file, in the order of the file."""
    places = {}
    for key in keys:
        begin = at + COUNT_BYTES
        at = begin + storages[key].nbytes
        places[key] = (begin, at)
    return places


def _check_count(count: bytes, storage: Storage, file: str) -> None:
    elements = storage.nbytes // (element_bytes(storage.dtype) if storage.dtype else 1)
    found = int.from_bytes(count, "little", signed=True)
    if found != elements:
        raise corrupt_legacy(file, f"storage {storage.key} has {found:,} elements; its pickle says {elements:,}")
