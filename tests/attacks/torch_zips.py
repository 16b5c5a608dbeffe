"""Zips that readers disagree about, that claim what is not so, or that would take more memory than there is."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.attacks.attack import Attack, unsafe
from tests.support.torch_files import FOUR, Member, archive, changed, pack, storage, tensor_pickle, zip64_extra

BYTES = len(FOUR)
DEFLATED = {"method": 8, "size": BYTES, "crc": zlib.crc32(FOUR)}
OTHER_NAME = struct.pack("<2HBI", 0x7075, 5 + 4, 1, zlib.crc32(b"archive/data.pkl")) + b"evil"


def evil() -> bytes:
    """A second pickle, that of another tensor."""
    return tensor_pickle(None, 1, (2,), (1,))


def deflated_bomb(_: Path) -> bytes:
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = squeeze.compress(bytes(64 << 20)) + squeeze.flush()
    fields = {"method": 8, "size": 64 << 20}
    made = archive(tensor_pickle(None, 0, (16 << 20,), (1,)))
    return pack(changed(made, "data/0", data=packed, local=fields, central=fields))


def one_range_under_two_names() -> bytes:
    members = archive(storages={"0": FOUR, "1": FOUR})
    at = pack(members).index(b"PK\x03\x04", pack(members).index(b"archive/data/0") - 30)
    return pack(changed(members, "data/1", central={"header": at}))


def directory_whose_last_entry_has_no_end() -> bytes:
    content = bytearray(pack(archive()))
    at = content.rindex(b"PK\x01\x02") + 32  # the length of its comment
    content[at : at + 2] = b"\xff\xff"
    return bytes(content)


def local_header_without_its_signature() -> bytes:
    content = pack(archive())
    at = content.rindex(b"PK\x03\x04")
    return content[:at] + b"PK\x03\x05" + content[at + 4 :]


def central(entry: str, **fields: Any) -> bytes:
    """An archive in which the directory has other fields of an entry."""
    return pack(changed(archive(), entry, central=fields))


def local(entry: str, **fields: Any) -> bytes:
    """An archive in which a local header has other fields."""
    return pack(changed(archive(), entry, local=fields))


def both(entry: str, **fields: Any) -> bytes:
    """An archive in which an entry has other fields in both headers."""
    return pack(changed(archive(), entry, local=fields, central=fields))


def wide(*sizes: int) -> dict[str, Any]:
    """Fields of an entry that refers to a zip64 field for its sizes."""
    return {"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF, "extra": zip64_extra(*sizes)}


def named(raw: bytes) -> bytes:
    """An archive whose storage has another name in both headers."""
    return both("data/0", name=raw)


ATTACKS = [
    # what another reader would see otherwise
    Attack(
        "two pickles",
        "two of its entries are named 'archive/data.pkl'",
        pack([*archive(), Member("archive/data.pkl", evil())]),
    ),
    Attack(
        "two pickles the other first",
        "two of its entries are named 'archive/data.pkl'",
        pack([Member("archive/data.pkl", evil()), *archive()]),
    ),
    Attack(
        "two pickles that differ in case",
        "'archive/DATA.PKL' was not written by torch.save",
        pack([*archive(), Member("archive/DATA.PKL", evil())]),
    ),
    Attack(
        "one storage twice",
        "two of its entries are named 'archive/data/0'",
        pack([*archive(), Member("archive/data/0", FOUR)]),
    ),
    Attack(
        "two folders",
        "'evil/data.pkl' was not written by torch.save",
        pack([*archive(), Member("evil/data.pkl", evil())]),
    ),
    Attack(
        "local name other than central",
        "named b'archive/dato.pkl' in its local header",
        local("data.pkl", name=b"archive/dato.pkl"),
    ),
    Attack(
        "local name longer than central", "local header|starts at byte", local("data.pkl", name=b"archive/data.pkl.bak")
    ),
    Attack("prefix counted in the offsets", "first entry starts at byte 8", pack(archive(), prefix=b"#!/bin/x")),
    Attack("prefix not counted", "its directory should end at byte", b"#!/bin/x" + pack(archive())),
    Attack("suffix", "does not end with a zip end record", pack(archive(), suffix=b"JUNK")),
    Attack(
        "suffix as a comment", "does not end with a zip end record|has a comment", pack(archive(), comment=b"a comment")
    ),
    Attack(
        "a second zip in the comment",
        "does not end with a zip end record|has a comment|directory should end",
        pack(archive(), comment=pack(archive(evil()))),
    ),
    Attack(
        "a second zip behind the first",
        "first entry starts at byte|directory should end at byte",
        pack(archive()) + pack(archive(evil())),
    ),
    Attack(
        "bytes between entries",
        "bytes that belong to no entry|starts at byte .* by its local header",
        pack(archive(), between=b"hidden"),
    ),
    Attack(
        "bytes behind the directory", "its directory should end at byte", pack(archive(), behind_directory=b"hidden")
    ),
    Attack("comment of an entry", "has a comment", central("data.pkl", comment=b"x")),
    Attack("another name in an extra field", "extra field of kind 0x7075", central("data.pkl", extra=OTHER_NAME)),
    Attack(
        "extra field beyond its end",
        "do not end where they say",
        central("data.pkl", extra=struct.pack("<2H", 0x4246, 9) + b"Z"),
    ),
    # compressed, encrypted, or marked so
    Attack(
        "deflated entry",
        r"compressed \(method 8\)",
        pack(changed(archive(), "data/0", data=zlib.compress(FOUR)[2:-4], local=DEFLATED, central=DEFLATED)),
    ),
    Attack("deflated bomb", r"compressed \(method 8\)", deflated_bomb),
    Attack("deflated in the local header only", "method 8 in its local header; expected", local("data.pkl", method=8)),
    Attack("encrypted", r"encrypted \(bit 0\)", both("data.pkl", flags=0x801)),
    Attack(
        "encrypted in the local header only",
        "flags 0x0801 .* in its local header; expected 0x0800",
        local("data.pkl", flags=0x801),
    ),
    Attack("patch data", r"patch data \(bit 5\)", central("data.pkl", flags=0x820)),
    Attack("strongly encrypted", r"strongly encrypted \(bit 6\)", central("data.pkl", flags=0x840)),
    Attack("masked headers", r"masked local headers \(bit 13\)", central("data.pkl", flags=0x2800)),
    Attack("unknown flag", r"unknown flag \(bit 15\)", central("data.pkl", flags=0x8800)),
    Attack(
        "for a later reader",
        r"'archive/data.pkl' needs a reader of version 8.0 of the format; there is none above 6.3",
        central("data.pkl", version=80),
    ),
    Attack(
        "for a later reader in the local header only",
        r"'archive/data/0' needs a reader of version 25.5 of the format",
        local("data/0", version=255),
    ),
    # entries that are not where they should be
    Attack("overlapping entries", "overlaps what follows it", both("data/0", size=BYTES + 8, packed=BYTES + 8)),
    Attack("one range under two names", "overlaps what follows it", one_range_under_two_names()),
    Attack(
        "entry outside the file", "is followed by bytes that belong to no entry", central("version", header=0x7FFFFFF0)
    ),
    Attack(
        "two sizes", "has 15 bytes and declares 16|has 16 bytes and declares 15", central("data/0", packed=BYTES - 1)
    ),
    Attack(
        "local size other than central",
        "by its local header, or another checksum",
        local("data/0", size=BYTES - 4, packed=BYTES - 4),
    ),
    Attack("local checksum other than central", "by its local header, or another checksum", local("data/0", crc=1)),
    Attack(
        "descriptor of another size",
        "data descriptor after entry 'archive/data/0' differs",
        pack(
            changed(
                archive(),
                "data/0",
                described=True,
                descriptor=struct.pack("<4s3I", b"PK\x07\x08", zlib.crc32(FOUR), BYTES + 4, BYTES + 4),
            )
        ),
    ),
    Attack(
        "descriptor that is not there",
        "overlaps what follows it|data descriptor behind|by its local header",
        pack(changed(archive(), "data/0", described=True, descriptor=b"")),
    ),
    Attack("entry on another disk", "declares another disk", central("data/0", disk=1)),
    # torch reads nothing of it, and gives out memory that was never written.
    Attack(
        "storage marked as a directory",
        r"not marked as a file \(attributes 0x00000010\)",
        central("data/0", attributes=0x10),
    ),
    Attack(
        "entry marked as a symbolic link",
        r"not marked as a file \(attributes 0xa1ff0000\)",
        central("data.pkl", attributes=0o120777 << 16),
    ),
    Attack(
        "entry marked as a directory by its mode",
        r"not marked as a file \(attributes 0x41ed0000\)",
        central("data/0", attributes=0o040755 << 16),
    ),
    Attack("cut off", "does not end with a zip end record", pack(archive())[:-30]),
    Attack("first half missing", "first entry starts at byte|directory should end at byte", pack(archive())[100:]),
    # end records that lie
    Attack("very many entries", "at most 32,768 in", pack(archive(), end={"here": 65_000, "count": 65_000})),
    Attack(
        "more entries than fit any file",
        "at most 32,768 in",
        pack(archive(), zip64={"here": 1 << 60, "count": 1 << 60}, end={"here": 0xFFFF, "count": 0xFFFF}),
    ),
    Attack(
        "a directory larger than memory",
        "at most 32,768 in .* bytes are read",
        pack(archive(), zip64={"size": 1 << 62, "offset": 0}, end={"size": 0xFFFFFFFF, "offset": 0xFFFFFFFF}),
    ),
    Attack(
        "one entry more than there is", "declares 5 entries and has 4", pack(archive(), end={"here": 5, "count": 5})
    ),
    Attack("one entry fewer than there is", "bytes after its last entry", pack(archive(), end={"here": 3, "count": 3})),
    Attack("no entries", "bytes after its last entry", pack(archive(), end={"here": 0, "count": 0})),
    Attack("end record of another disk", "names several disks", pack(archive(), end={"disk": 1})),
    Attack(
        "zip64 of another count",
        "end record says 4 where its zip64 record says 3",
        pack(archive(), zip64={"here": 3, "count": 3}),
    ),
    Attack(
        "zip64 of another directory",
        "end record says .* where its zip64 record says 0",
        pack(archive(), zip64={"offset": 0}),
    ),
    Attack("zip64 record elsewhere", "zip64 locator points to byte 0", pack(archive(), zip64={"record": 0})),
    Attack(
        "zip64 record of another length", "zip64 locator points to byte", pack(archive(), zip64={"length": 1 << 40})
    ),
    Attack("zip64 on many disks", "zip64 record names several disks", pack(archive(), zip64={"disks": 7})),
    Attack(
        "zip64 record missing",
        "refers to a zip64 record, and there is none",
        pack(archive(), end={"offset": 0xFFFFFFFF}),
    ),
    Attack(
        "zip64 field missing",
        "zip64 field of entry 'archive/data/0' has 0 bytes; expected 8",
        central("data/0", size=0xFFFFFFFF),
    ),
    Attack(
        "zip64 field that is not needed",
        "zip64 field of entry 'archive/data/0' has 8 bytes; expected 0",
        central("data/0", extra=zip64_extra(1 << 40)),
    ),
    Attack("zip64 size beyond the file", "overlaps what follows it", central("data/0", **wide(1 << 62, 1 << 62))),
    Attack(
        "zip64 size in the local header only",
        "zip64 field in the local header of entry 'archive/data/0' differs",
        local("data/0", **wide(8, 8)),
    ),
    Attack(
        "two zip64 fields",
        "two zip64 fields, or an empty one",
        central("data/0", size=0xFFFFFFFF, extra=zip64_extra(BYTES) * 2),
    ),
    Attack("zip64 locator at the beginning", "zip64 locator has no room for a zip64 record", pack([], zip64={})[-42:]),
    Attack(
        "directory whose last entry has no end",
        "entry 3 of its directory reaches beyond the directory",
        directory_whose_last_entry_has_no_end(),
    ),
    Attack(
        "local header without its signature", "there is no local header at byte", local_header_without_its_signature()
    ),
    # names
    Attack("name that climbs", "not a plain relative path", named(b"archive/../../../etc/x")),
    Attack("absolute name", "not a plain relative path", named(b"/archive/data/0")),
    Attack("name with backslashes", "not a plain relative path", named(b"archive\\data\\0")),
    Attack("name with a nul", "not a plain relative path", named(b"archive/data/0\0.pkl")),
    Attack("name without end", "not a plain relative path", named(b"archive/data/" + b"0" * 5000)),
    Attack("name that is no utf8", "not valid text", named(b"archive/data/\xff")),
    Attack(
        "storage of a digit that is not ascii",
        "'archive/data/٣' was not written by torch.save",
        named("archive/data/٣".encode()),
    ),
    Attack("no pickle", "no data.pkl among its 3 entries", pack(archive()[1:])),
    Attack(
        "torchscript",
        "'archive/constants.pkl' was not written by torch.save; it may be a TorchScript archive",
        pack([*archive(), Member("archive/constants.pkl", b"\x80\x02).")]),
    ),
    Attack(
        "no folder",
        "'data.pkl' was not written by torch.save",
        pack([Member("data.pkl", tensor_pickle()), Member("data/0", FOUR)]),
    ),
    Attack("name on a drive", "'C:/data/0' was not written by torch.save", named(b"C:/data/0")),
    Attack("name that turns its direction", "not a plain relative path", named("archive/data/0\u202e".encode())),
    Attack("entry that is a folder", "not a plain relative path", pack([*archive(), Member("archive/data/", b"")])),
    # records that contradict the pickle
    Attack(
        "big endian", "byte order b'big'; only 'little' is read", pack(changed(archive(), "byteorder", data=b"big"))
    ),
    Attack(
        "byte order of no machine",
        "byte order b'pdp'; only 'little' is read",
        pack(changed(archive(), "byteorder", data=b"pdp")),
    ),
    Attack(
        "byte order of many words",
        "byteorder has 300 bytes",
        pack(changed(archive(), "byteorder", data=b"little" * 50)),
    ),
    Attack(
        "storage shorter than claimed",
        "storage 0 has 8 bytes; its pickle says 16",
        pack(archive(storages={"0": FOUR[:8]})),
    ),
    Attack(
        "storage longer than claimed",
        "storage 0 has 32 bytes; its pickle says 16",
        pack(archive(storages={"0": FOUR + FOUR})),
    ),
    Attack(
        "storage of 2 to the 62",
        "storage 0 has 16 bytes; its pickle says 18,446,744,073,709,551,616",
        pack(archive(tensor_pickle(storage(elements=1 << 62)))),
    ),
    Attack("storage missing", "names storage 0, but there is no entry data/0", pack(archive(storages={}))),
    Attack(
        "storage without a tensor", "entry data/1 belongs to no tensor", pack(archive(storages={"0": FOUR, "1": FOUR}))
    ),
    Attack("enormous pickle", "data.pkl has .* bytes; at most", lambda _: pack(archive(b"\x80\x02" + bytes(33 << 20)))),
    unsafe(
        "a zip as the pickle", "PROTO is b'PK'|beginning is b'PK'|expected protocol", pack(archive(pack(archive())))
    ),
    Attack("empty file", "does not end with a zip end record", b""),
    Attack("only a signature", "does not end with a zip end record", b"PK\x03\x04"),
    Attack("only an end record", "it has no entries", pack([])),
    # what is sound all the same, and stays readable
]


# what is sound all the same, and stays readable
def filled(*values: float) -> bytes:
    """A storage of other values."""
    return pack(archive(storages={"0": struct.pack("<4f", *values)}))


def empty_tensor() -> bytes:
    return pack(archive(tensor_pickle(storage(elements=0), 0, (0, 3), (3, 1)), {"0": b""}))


def without_checksums() -> bytes:
    """As torch writes them if asked to."""
    return pack([replace(member, local={"crc": 0}, central={"crc": 0}) for member in archive()])


def another_checksum() -> bytes:
    """One that is not the data's; torch does not compare them, and neither is it done here. Scanners stop at it."""
    return both("data/0", crc=7)


def flipped_bit_of_the_data() -> bytes:
    """Which no checksum is there to notice but the hub's sha256."""
    content = bytearray(pack(archive()))
    content[content.index(FOUR)] ^= 1
    return bytes(content)


LEGAL: dict[str, Callable[[], bytes]] = {
    "NaN": lambda: filled(math.nan, -math.nan, 0, 1),
    "infinities": lambda: filled(math.inf, -math.inf, 0, 1),
    "denormal numbers": lambda: filled(1e-45, -0.0, 0, 1),
    "empty tensor": empty_tensor,
    "empty record": lambda: pack([*archive(), Member("archive/.data/serialization_id", b"")]),
    "without checksums": without_checksums,
    "another checksum": another_checksum,
    "flipped bit of the data": flipped_bit_of_the_data,
    "without a byte order": lambda: pack([member for member in archive() if "byteorder" not in member.name]),
    "a root of another name": lambda: pack(archive(root="model.ckpt")),
}


"""torch reads all of them too."""
ACCEPTED_BY_TORCH = {
    "two pickles",
    "two pickles the other first",
    "two pickles that differ in case",
    "one storage twice",
    "local name other than central",
    "local name longer than central",
    "suffix",
    "suffix as a comment",
    "a second zip in the comment",
    "a second zip behind the first",
    "bytes between entries",
    "bytes behind the directory",
    "comment of an entry",
    "another name in an extra field",
    "extra field beyond its end",
    "deflated entry",
    "deflated in the local header only",
    "encrypted in the local header only",
    "unknown flag",
    "for a later reader",
    "for a later reader in the local header only",
    "one range under two names",
    "local size other than central",
    "local checksum other than central",
    "descriptor of another size",
    "descriptor that is not there",
    "entry on another disk",
    "storage marked as a directory",
    "entry marked as a symbolic link",
    "entry marked as a directory by its mode",
    "zip64 record elsewhere",
    "zip64 record of another length",
    "zip64 field that is not needed",
    "zip64 size in the local header only",
    "two zip64 fields",
    "entry that is a folder",
    "big endian",
    "storage without a tensor",
}


"""What `torch.load(weights_only=True)` of torch 2.13 and 2.14 loads; each is stricter here on purpose."""
