"""Torch zips made by hand, so that any part of them can say something else than torch would.

`pack` writes a zip byte by byte; `archive` makes the members that torch writes; `tensor_pickle` makes the pickle of one
tensor with any arguments. Where nothing is overridden the result is one that torch itself loads.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch._utils

from rabbitllm.formats.tensor_spec import DTYPES, read_run
from rabbitllm.formats.torch_file import TorchTensor
from rabbitllm.storage.files import PositionalFile


@dataclass(frozen=True)
class Member:
    """An entry of a zip; `local` and `central` override fields of its two headers by name."""

    name: str
    data: bytes
    local: Mapping[str, Any] = field(default_factory=dict)
    central: Mapping[str, Any] = field(default_factory=dict)
    described: bool = False
    descriptor: bytes | None = None


def zip64_extra(*values: int) -> bytes:
    """A zip64 field of these 8-byte values."""
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


def pack(
    members: Sequence[Member],
    *,
    prefix: bytes = b"",
    between: bytes = b"",
    behind_directory: bytes = b"",
    suffix: bytes = b"",
    end: Mapping[str, int] | None = None,
    zip64: Mapping[str, int] | None = None,
    comment: bytes = b"",
) -> bytes:
    """A zip of these members; `end` and `zip64` override fields of the end records, the second of which is only there
    if it is given."""
    out, directory = bytearray(prefix), bytearray()
    for member in members:
        offset = len(out)
        out += _local(member) + member.data + _descriptor(member) + between
        directory += _central(member, offset)
    begin = len(out)
    out += directory + behind_directory
    counts = {"disk": 0, "first": 0, "here": len(members), "count": len(members)}
    known = {**counts, "size": len(directory), "offset": begin}
    if zip64 is not None:
        wide = {"length": 44, "version": 45, **known, "record": len(out), "disks": 1, **zip64}
        out += struct.pack(
            "<4sQ2H2I4Q", b"PK\x06\x06", wide["length"], 0, wide["version"], wide["disk"], wide["first"],
            wide["here"], wide["count"], wide["size"], wide["offset"],
        )  # fmt: skip
        out += struct.pack("<4sIQI", b"PK\x06\x07", 0, wide["record"], wide["disks"])
    last = {**known, **(end or {})}
    out += struct.pack("<4s4H2IH", b"PK\x05\x06", *(last[key] for key in known), len(comment)) + comment
    return bytes(out) + suffix


def _fields(member: Member, changes: Mapping[str, Any]) -> dict[str, Any]:
    size = len(member.data)
    flags = 0x808 if member.described else 0x800
    known = {"name": member.name.encode(), "flags": flags, "method": 0, "crc": zlib.crc32(member.data)}
    known["version"] = 0
    return {**known, "packed": size, "size": size, "extra": b"", "comment": b"", "disk": 0, "attributes": 0, **changes}


def _local(member: Member) -> bytes:
    hidden = {"crc": 0, "packed": 0, "size": 0} if member.described else {}
    f = _fields(member, {**hidden, **member.local})
    head = struct.pack(
        "<4s5H3I2H", b"PK\x03\x04", f["version"], f["flags"], f["method"], 0, 0, f["crc"], f["packed"], f["size"],
        len(f["name"]), len(f["extra"]),
    )  # fmt: skip
    return head + f["name"] + f["extra"]


def _central(member: Member, offset: int) -> bytes:
    f = {"header": offset, **_fields(member, member.central)}
    head = struct.pack(
        "<4s6H3I5H2I", b"PK\x01\x02", 0, f["version"], f["flags"], f["method"], 0, 0, f["crc"], f["packed"], f["size"],
        len(f["name"]), len(f["extra"]), len(f["comment"]), f["disk"], 0, f["attributes"], f["header"],
    )  # fmt: skip
    return head + f["name"] + f["extra"] + f["comment"]


def _descriptor(member: Member) -> bytes:
    if member.descriptor is not None:
        return member.descriptor
    size = len(member.data)
    return struct.pack("<4s3I", b"PK\x07\x08", zlib.crc32(member.data), size, size) if member.described else b""


def write_with_hole(path: Path, members: Sequence[Member], nbytes: int) -> Path:
    """A zip whose last member, which is given without data, has so many bytes of zeros that take no disk."""
    claim = {"crc": 0, "packed": nbytes, "size": nbytes}
    last = replace(members[-1], local=claim, central=claim)
    begin = struct.unpack("<I", pack([*members[:-1], last])[-6:-2])[0]
    raw = pack([*members[:-1], last], end={"offset": begin + nbytes})
    with path.open("wb") as file:
        file.write(raw[:begin])
        file.seek(begin + nbytes)
        file.write(raw[begin:])
    return path


class Call:
    """Pickles as a call of a function that is never made here."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class StorageOf:
    """Pickles as a reference to a storage, with whatever identity it is given."""

    def __init__(self, *identity: Any) -> None:
        self.identity = identity


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, StorageOf) else None


def pickled(value: Any, protocol: int = 2) -> bytes:
    """A pickle, with `Call` and `StorageOf` as what they stand for."""
    stream = io.BytesIO()
    _Pickler(stream, protocol).dump(value)
    return stream.getvalue()


def storage(key: Any = "0", elements: Any = 4, cls: Any = torch.FloatStorage, place: Any = "cpu") -> StorageOf:
    """A reference to a storage as torch makes it."""
    return StorageOf("storage", cls, key, place, elements)


def tensor(held: Any = None, first: Any = 0, shape: Any = (4,), strides: Any = (1,), *more: Any) -> Call:
    """A tensor over a storage, with any arguments."""
    rest = more or (False, OrderedDict())
    return Call(torch._utils._rebuild_tensor_v2, held if held is not None else storage(), first, shape, strides, *rest)


def tensor_pickle(*arguments: Any, **named: Any) -> bytes:
    """The pickle of `{"w": tensor(...)}`."""
    return pickled({"w": tensor(*arguments, **named)})


FOUR = struct.pack("<4f", 0, 1, 2, 3)
"""The bytes of the storage that `storage()` refers to."""


def archive(
    data_pkl: bytes | None = None, storages: Mapping[str, bytes] | None = None, root: str = "archive", **more: bytes
) -> list[Member]:
    """The members of a torch zip; `more` are further records by name."""
    records = {"data.pkl": tensor_pickle() if data_pkl is None else data_pkl, "byteorder": b"little"}
    records |= {f"data/{key}": data for key, data in ({"0": FOUR} if storages is None else storages).items()}
    records |= {"version": b"3\n", **more}
    return [Member(f"{root}/{name}", data) for name, data in records.items()]


def changed(members: Sequence[Member], which: str, **changes: Any) -> list[Member]:
    """The members, with one (the one whose name ends with `which`) changed."""
    return [replace(member, **changes) if member.name.endswith(which) else member for member in members]


def chunks_of(file: PositionalFile, tensor: TorchTensor, chunk: int = 4 << 20) -> Iterator[memoryview]:
    """A tensor's bytes in row-major order, contiguous or not, in pieces of so many bytes, a multiple of 8."""
    spec = tensor.spec()
    for begin in range(0, tensor.nbytes, chunk):
        piece = memoryview(bytearray(min(chunk, tensor.nbytes - begin)))
        assert read_run(file, spec, begin, piece) == len(piece)
        yield piece


def bits(value: torch.Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    flat = torch.empty(value.numel(), dtype=value.dtype)
    flat.view(value.shape).copy_(value.detach())
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def every_dtype() -> dict[str, torch.Tensor]:
    """A tensor of every dtype that safetensors has too, of all kinds of bits (NaN among them)."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, entry in DTYPES.items():
        raw = torch.randint(0, 2 if name == "BOOL" else 256, (96,), dtype=torch.uint8, generator=generator)
        tensors[f"t.{name}"] = raw.view(getattr(torch, entry.torch_name)).reshape(3, -1)
    return tensors


def views() -> dict[str, torch.Tensor]:
    """Tensors that share a storage, and such that are not row-major or have no elements."""
    whole = torch.arange(2 * 3 * 40.0).reshape(2, 3, 40)
    half = whole.to(torch.bfloat16)
    return {
        "whole": whole,
        "transposed": half.transpose(0, 2),
        "slice": whole[1],
        "column": half[:, 1, 5],
        "steps": whole[:, ::2, 3::7],
        "again": whole,
        "reshaped": whole.view(6, 40).t(),
        "scalar": whole[1, 2, 3],
        "none": whole[:0],
        "expanded": torch.arange(6.0)[None].expand(1, 6),
        "diagonal": torch.arange(16).reshape(4, 4).diagonal(),
        "overlapping": torch.arange(12, dtype=torch.int16).as_strided((3, 4), (2, 1)),
        "empty": torch.empty(0, 5),
    }
