"""The files of `torch.save`, of both formats, read like safetensors files: every tensor's name, dtype, shape and offset
from the metadata around the data, and its bytes only when they are used.

Since torch 1.6: a zip of stored entries under one folder, `data.pkl` with the pickle and `data/<key>` with the storages
(https://github.com/pytorch/pytorch, torch/serialization.py; caffe2/serialize/inline_container.cc).

Before: five pickles (a magic number, the version, information on the machine, the saved value, the keys of its
storages), and then each storage in the order of the keys: the number of its elements, 8 bytes, and their bytes
(torch/serialization.py, `_legacy_save` and `_legacy_load`). torch itself reads such a file whole, which the format does
not require.

The zip is read by `_zip_directory.py`, pickles by `pickle_reader.py`: nothing is imported, nothing is run, and no size
is used before it has been compared with the size of the file. Independent of models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.errors import CorruptShardError
from rabbitllm.formats._torch_pickle import (
    PickledTensor,
    Storage,
    element_bytes,
    name_tensors,
    read_legacy_torch_pickle,
    read_plain_pickle,
    read_torch_pickle,
)
from rabbitllm.formats._zip_directory import ZipEntry, ZipFault, check_local_headers, read_entries, zip_faults_of
from rabbitllm.formats.bounded import COPY_AGAIN
from rabbitllm.formats.pickle_reader import MAX_PICKLE_BYTES, describe
from rabbitllm.formats.tensor_spec import DTYPES, Header, LeftOut, ReadAt, TensorSpec, byte_size, is_contiguous
from rabbitllm.storage.files import PositionalFile


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """One tensor of such a file.

    Attributes:
        name: its name in the checkpoint. Never a path.
        dtype: a key of `DTYPES`.
        shape: elements along each dimension as torch counts them (two F4 values are one element).
        strides: in elements, one per dimension.
        file: name of the shard, relative to the checkpoint.
        storage: the key of its storage; tensors with one key share bytes.
        storage_begin, storage_end: the storage, bytes from the start of the file.
        offset: of its first element, bytes from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    file: str
    storage: str
    storage_begin: int
    storage_end: int
    offset: int

    @property
    def elements(self) -> int:
        """Number of elements, as torch counts them."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Length in bytes, in row-major order."""
        return self.elements * element_bytes(self.dtype)

    @property
    def contiguous(self) -> bool:
        """Whether its bytes are in row-major order in the file: `nbytes` bytes from `offset`."""
        return is_contiguous(self.shape, self.strides)

    def spec(self) -> TensorSpec:
        """The same tensor as in a safetensors file, but with strides if it is not contiguous.

        Raises:
            CorruptShardError: a scalar or a strided tensor of a dtype smaller than a byte, which cannot be represented.
        """
        shape = self.shape
        if DTYPES[self.dtype].bits < 8:
            if not shape or not self.contiguous:
                form = "strided" if shape else "a scalar"
                raise CorruptShardError(
                    f"{self.file} has a tensor {self.name!r} of {self.dtype} that is {form}; elements smaller than a "
                    "byte are only read where they lie one after the other.",
                    "Save it again as a contiguous tensor of one dimension or more.",
                )
            shape = (*shape[:-1], shape[-1] * 8 // DTYPES[self.dtype].bits)
        assert byte_size(self.dtype, shape) == self.nbytes
        strides = None if self.contiguous else self.strides
        return TensorSpec(self.name, self.dtype, shape, self.file, self.offset, self.nbytes, strides)


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The tensors of such a file.

    Attributes:
        tensors: in the pickle's order.
        left_out: keys of a training checkpoint other than its state dict; they hold no weights of the model.
        size: size of the file in bytes.
        left_tensors: the tensors that they hold.
    """

    tensors: tuple[TorchTensor, ...]
    left_out: tuple[str, ...]
    size: int
    left_tensors: tuple[LeftOut, ...] = ()

    def header(self) -> Header:
        """The same as a safetensors header, but with strides.

        Raises:
            CorruptShardError: see `TorchTensor.spec`.
        """
        specs = sorted((tensor.spec() for tensor in self.tensors), key=lambda spec: (spec.offset, spec.nbytes))
        start = specs[0].offset if specs else self.size
        return Header(tuple(specs), {}, start, comes_first=False, left_out=self.left_tensors)


def _file_of(root: object, spans: Mapping[str, tuple[int, int]], size: int, file: str) -> TorchFile:
    """The tensors of a saved value; `spans` are the bytes of each storage, from the start of the file."""
    named, left_out = name_tensors(root, file)
    tensors = []
    for name, t in named.items():
        begin, end = spans[t.storage.key]
        offset = begin + t.first * element_bytes(t.dtype)
        tensors.append(TorchTensor(name, t.dtype, t.shape, t.strides, file, t.storage.key, begin, end, offset))
    keys = tuple(key for key, _ in left_out)
    return TorchFile(tuple(tensors), keys, size, _left_tensors(named.values(), left_out, spans))


def _left_tensors(
    named: Iterable[PickledTensor],
    other_keys: Sequence[tuple[str, Iterable[PickledTensor]]],
    spans: Mapping[str, tuple[int, int]],
) -> tuple[LeftOut, ...]:
    """What a file has besides its state dict: other values, and tensors unless they are the same elements as one there.

    Args:
        named: those of the state dict.
        other_keys: those below each other key.
        spans: the bytes of each storage; of one that no tensor above refers to, all of it is left out.
    """
    weights = set(named)
    keys, left_out = {tensor.storage.key for tensor in weights}, []
    for key, tensors in other_keys:
        keys |= {tensor.storage.key for tensor in tensors}
        unnamed = set(tensors) - weights
        if unnamed or not tensors:  # other values, such as hyperparameters, are nowhere else either
            nbytes = sum(math.prod(tensor.shape) * element_bytes(tensor.dtype) for tensor in unnamed)
            left_out.append(LeftOut(key, nbytes, len(unnamed)))
    if unused := [end - begin for key, (begin, end) in spans.items() if key not in keys]:
        left_out.append(LeftOut("tensors without a name", sum(unused), len(unused)))
    return tuple(left_out)


PICKLE = "data.pkl"
_MAX_RECORD_BYTES = 256
_RECORDS = {"version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id"}
"""Names of torch's other entries: small texts, of which only the byte order matters for the tensors."""


def read_torch_zip(path: Path) -> TorchFile:
    """Read and check all of a local torch zip but its data.

    Raises:
        CorruptShardError: the zip or the pickle is malformed, or a tensor exceeds its storage.
        UnsafePickleError: the pickle contains more than tensors and plain values.
    """
    with PositionalFile(path) as opened:
        return parse_torch_zip(opened.read_at, opened.size(), path.name)


def parse_torch_zip(read: ReadAt, size: int, file: str, *, local_headers: bool = True) -> TorchFile:
    """The same for any file that can be read in ranges.

    Args:
        read: reads (offset, length), bytes.
        size: size of the whole file in bytes.
        file: name for the records and error messages.
        local_headers: also compare every entry's own header, a read each; if not, `check_local_headers` has to check
            the offsets before the data is used.
    """
    with zip_faults_of(file):
        entries = read_entries(read, size)
        if local_headers:
            check_local_headers(read, entries)
        records = _records(entries)
        _check_byte_order(read, records, file)
        root, storages = read_torch_pickle(_pickle_bytes(read, records), file)
        return _file_of(root, _spans(records, storages), size, file)


def pickle_of(path: Path) -> bytes:
    """The unchecked pickle of a local torch zip, for a listing; the zip itself is checked.

    Raises:
        CorruptShardError: the zip is malformed, or the pickle too large.
    """
    with PositionalFile(path) as opened, zip_faults_of(path.name):
        entries = read_entries(opened.read_at, opened.size())
        check_local_headers(opened.read_at, entries)
        return _pickle_bytes(opened.read_at, _records(entries))


def _records(entries: tuple[ZipEntry, ...]) -> dict[str, ZipEntry]:
    """The entries by their names within their common folder."""
    root = entries[0].name.partition("/")[0] if entries else ""
    records = {}
    for entry in entries:
        folder, _, name = entry.name.partition("/")
        key = name.removeprefix("data/")
        is_storage = key != name and key.isascii() and key.isdigit()
        if folder != root or not (is_storage or name == PICKLE or name in _RECORDS):
            raise ZipFault(
                f"entry {entry.name!r} was not written by torch.save; it may be a TorchScript archive or another zip"
            )
        records[name] = entry
    if PICKLE not in records:
        raise ZipFault(f"it has no {PICKLE} among its {len(entries):,} entries")
    return records


def _check_byte_order(read: ReadAt, records: Mapping[str, ZipEntry], file: str) -> None:
    for name in _RECORDS & records.keys():
        if records[name].size > _MAX_RECORD_BYTES:
            raise ZipFault(f"its {name} has {records[name].size:,} bytes; expected a few")
    if entry := records.get("byteorder"):
        order = read(entry.begin, entry.size)
        if order != b"little":
            raise CorruptShardError(
                f"{file} was written with byte order {order[:20]!r}; only 'little' is read.",
                "Load it with torch and save it again on a little-endian machine.",
            )


def _pickle_bytes(read: ReadAt, records: Mapping[str, ZipEntry]) -> bytes:
    """The bytes of the pickle, after a check of its size."""
    entry = records[PICKLE]
    if entry.size > MAX_PICKLE_BYTES:
        raise ZipFault(f"its {PICKLE} has {entry.size:,} bytes; at most {MAX_PICKLE_BYTES:,} are read")
    data = read(entry.begin, entry.size)
    if len(data) != entry.size:
        raise ZipFault(f"it ended inside its {PICKLE}")
    return data


def _spans(records: Mapping[str, ZipEntry], storages: Mapping[str, Storage]) -> Mapping[str, tuple[int, int]]:
    """The span of each storage in bytes; each must have an entry of its size, and all entries must be used."""
    spans = {}
    for key, storage in storages.items():
        entry = records.get(f"data/{key}")
        if entry is None:
            raise ZipFault(f"its pickle names storage {key}, but there is no entry data/{key}")
        if entry.size != storage.nbytes:
            raise ZipFault(f"storage {key} has {entry.size:,} bytes; its pickle says {storage.nbytes:,}")
        spans[key] = (entry.begin, entry.end)
    for name in records:
        if name.startswith("data/") and name.removeprefix("data/") not in spans:
            raise ZipFault(f"entry {name} belongs to no tensor")
    return spans


LEGACY_NUMBER = 0x1950A86A20F9469CFC6C
"""Before torch 1.6, files of `torch.save` began with a pickle of this (torch/serialization.py, MAGIC_NUMBER)."""
_LEGACY_BEGIN = b"\x8a\x0a" + LEGACY_NUMBER.to_bytes(10, "little") + b"."
PROTOCOL = 1001
"""The only version that exists."""
COUNT_BYTES = 8
READS = (256 << 10, 4 << 20, MAX_PICKLE_BYTES)
"""Bytes of the beginning that are read in turn until they contain all pickles. A tensor takes about 200 bytes."""


def begins_torch_zip(head: bytes) -> bool:
    """Whether a file that begins with `head` is a zip."""
    return head.startswith(b"PK\x03\x04")


def begins_legacy_torch(head: bytes) -> bool:
    """Whether a file that begins with `head` was written by `torch.save` before torch 1.6."""
    return begins_pickle(head) and _LEGACY_BEGIN in head[2:32]  # protocols 4 and 5 put a frame before the number


def begins_pickle(head: bytes) -> bool:
    """Whether a file that begins with `head` is a pickle of protocols 0 to 5."""
    return len(head) >= 2 and head[0] == 0x80 and head[1] <= 5


def read_legacy_torch(path: Path) -> TorchFile:
    """Read and check all of a local file but its data.

    Raises:
        CorruptShardError: a pickle is malformed, or the storages are incomplete or not those that it names.
        UnsafePickleError: a pickle contains more than tensors and plain values.
    """
    with PositionalFile(path) as opened:
        return parse_legacy_torch(opened.read_at, opened.size(), path.name)


def parse_legacy_torch(read: ReadAt, size: int, file: str, *, counts: bool = True) -> TorchFile:
    """The same for any file that can be read in ranges.

    Args:
        read: reads (offset, length), bytes.
        size: size of the whole file in bytes.
        file: name for the records and error messages.
        counts: also compare the number before each storage with the pickle, a read each; if not, another call has to
            check the offsets before the data is used.
    """
    root, storages, keys, data_start = _pickles(read, size, file)
    spans, end = {}, data_start
    for key in keys:
        begin = end + COUNT_BYTES
        end = begin + storages[key].nbytes
        spans[key] = (begin, end)
    if end != size:
        raise corrupt_legacy(file, f"its storages end at byte {end:,}, and it has {size:,}")
    if counts:
        for key, (begin, _) in spans.items():
            _check_count(read(begin - COUNT_BYTES, COUNT_BYTES), storages[key], file)
    return _file_of(root, spans, size, file)


def corrupt_legacy(file: str, reason: str) -> CorruptShardError:
    """The error for a malformed file of this format."""
    return CorruptShardError(f"{file} is not a valid torch file of a version before torch 1.6: {reason}.", COPY_AGAIN)


def _pickles(read: ReadAt, size: int, file: str) -> tuple[object, Mapping[str, Storage], tuple[str, ...], int]:
    """The content of the pickles: the saved value, its storages, their order, and the offset of the first one."""
    for length in READS:
        data = read(0, min(length, size))
        try:
            return _parse(data, file)
        except CorruptShardError:
            if length >= size or length == READS[-1]:
                raise
    raise AssertionError("the last length returns or raises")


def _parse(data: bytes, file: str) -> tuple[object, Mapping[str, Storage], tuple[str, ...], int]:
    magic, offset = read_plain_pickle(data, 0, file)
    version, offset = read_plain_pickle(data, offset, file)
    if magic != LEGACY_NUMBER or version != PROTOCOL:
        raise corrupt_legacy(file, f"its version is {describe(version)}; expected {PROTOCOL}")
    machine, offset = read_plain_pickle(data, offset, file)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise CorruptShardError(
            f"{file} was not written on a little-endian machine, or does not say so; only that byte order is read.",
            "Load it with torch and save it again on a little-endian machine.",
        )
    root, storages, offset = read_legacy_torch_pickle(data, offset, file)
    keys, offset = read_plain_pickle(data, offset, file)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise corrupt_legacy(file, "the keys of its storages are not a list of text")
    if len(set(keys)) != len(keys) or set(keys) != storages.keys():
        raise corrupt_legacy(file, f"it lists {len(keys):,} storages that are not the {len(storages):,} it refers to")
    return root, storages, tuple(keys), offset


def _check_count(count: bytes, storage: Storage, file: str) -> None:
    elements = storage.nbytes // (element_bytes(storage.dtype) if storage.dtype else 1)
    stored = int.from_bytes(count, "little", signed=True)
    if stored != elements:
        raise corrupt_legacy(file, f"storage {storage.key} has {stored:,} elements; its pickle says {elements:,}")
