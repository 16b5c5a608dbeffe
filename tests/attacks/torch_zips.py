"""Zips that readers disagree about, that claim what is not so, or that would take more memory than there is."""

from __future__ import annotations

import functools
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace

from rabbitllm.errors import CorruptShardError, UnsafePickleError
from tests.attacks.attack import Attack, listed
from tests.support.torch_files import FOUR, Member, archive, changed, pack, storage, tensor_pickle, zip64_extra

ATTACKS: list[Attack] = []
BYTES = len(FOUR)

attack = functools.partial(listed, ATTACKS)


def evil() -> bytes:
    """A second pickle, that of another tensor."""
    return tensor_pickle(None, 1, (2,), (1,))


# what another reader would see otherwise


@attack("two of its entries are named 'archive/data.pkl'")
def two_pickles() -> bytes:
    return pack([*archive(), Member("archive/data.pkl", evil())])


@attack("two of its entries are named 'archive/data.pkl'")
def two_pickles_the_other_first() -> bytes:
    return pack([Member("archive/data.pkl", evil()), *archive()])


@attack("'archive/DATA.PKL' was not written by torch.save")
def two_pickles_that_differ_in_case() -> bytes:
    return pack([*archive(), Member("archive/DATA.PKL", evil())])


@attack("two of its entries are named 'archive/data/0'")
def one_storage_twice() -> bytes:
    return pack([*archive(), Member("archive/data/0", FOUR)])


@attack("'evil/data.pkl' was not written by torch.save")
def two_folders() -> bytes:
    return pack([*archive(), Member("evil/data.pkl", evil())])


@attack("named b'archive/dato.pkl' in its local header")
def local_name_other_than_central() -> bytes:
    return pack(changed(archive(), "data.pkl", local={"name": b"archive/dato.pkl"}))


@attack("local header|starts at byte")
def local_name_longer_than_central() -> bytes:
    return pack(changed(archive(), "data.pkl", local={"name": b"archive/data.pkl.bak"}))


@attack("first entry starts at byte 8")
def prefix_counted_in_the_offsets() -> bytes:
    return pack(archive(), prefix=b"#!/bin/x")


@attack("its directory should end at byte")
def prefix_not_counted() -> bytes:
    return b"#!/bin/x" + pack(archive())


@attack("does not end with a zip end record")
def suffix() -> bytes:
    return pack(archive(), suffix=b"JUNK")


@attack("does not end with a zip end record|has a comment")
def suffix_as_a_comment() -> bytes:
    return pack(archive(), comment=b"a comment")


@attack("does not end with a zip end record|has a comment|directory should end")
def a_second_zip_in_the_comment() -> bytes:
    return pack(archive(), comment=pack(archive(evil())))


@attack("first entry starts at byte|directory should end at byte")
def a_second_zip_behind_the_first() -> bytes:
    return pack(archive()) + pack(archive(evil()))


@attack("bytes that belong to no entry|starts at byte .* by its local header")
def bytes_between_entries() -> bytes:
    return pack(archive(), between=b"hidden")


@attack("its directory should end at byte")
def bytes_behind_the_directory() -> bytes:
    return pack(archive(), behind_directory=b"hidden")


@attack("has a comment")
def comment_of_an_entry() -> bytes:
    return pack(changed(archive(), "data.pkl", central={"comment": b"x"}))


@attack("extra field of kind 0x7075")
def another_name_in_an_extra_field() -> bytes:
    extra = struct.pack("<2HBI", 0x7075, 5 + 4, 1, zlib.crc32(b"archive/data.pkl")) + b"evil"
    return pack(changed(archive(), "data.pkl", central={"extra": extra}))


@attack("do not end where they say")
def extra_field_beyond_its_end() -> bytes:
    return pack(changed(archive(), "data.pkl", central={"extra": struct.pack("<2H", 0x4246, 9) + b"Z"}))


# compressed, encrypted, or marked so


@attack(r"compressed \(method 8\)")
def deflated_entry() -> bytes:
    packed = zlib.compress(FOUR)[2:-4]
    fields = {"method": 8, "size": BYTES, "crc": zlib.crc32(FOUR)}
    return pack(changed(archive(), "data/0", data=packed, local=fields, central=fields))


@attack(r"compressed \(method 8\)")
def deflated_bomb() -> bytes:
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = squeeze.compress(bytes(64 << 20)) + squeeze.flush()
    fields = {"method": 8, "size": 64 << 20}
    made = archive(tensor_pickle(None, 0, (16 << 20,), (1,)))
    return pack(changed(made, "data/0", data=packed, local=fields, central=fields))


@attack("method 8 in its local header; expected")
def deflated_in_the_local_header_only() -> bytes:
    return pack(changed(archive(), "data.pkl", local={"method": 8}))


@attack(r"encrypted \(bit 0\)")
def encrypted() -> bytes:
    return pack(changed(archive(), "data.pkl", local={"flags": 0x801}, central={"flags": 0x801}))


@attack("flags 0x0801 .* in its local header; expected 0x0800")
def encrypted_in_the_local_header_only() -> bytes:
    return pack(changed(archive(), "data.pkl", local={"flags": 0x801}))


@attack(r"patch data \(bit 5\)")
def patch_data() -> bytes:
    return pack(changed(archive(), "data.pkl", central={"flags": 0x820}))


@attack(r"strongly encrypted \(bit 6\)")
def strongly_encrypted() -> bytes:
    return pack(changed(archive(), "data.pkl", central={"flags": 0x840}))


@attack(r"masked local headers \(bit 13\)")
def masked_headers() -> bytes:
    return pack(changed(archive(), "data.pkl", central={"flags": 0x2800}))


@attack(r"unknown flag \(bit 15\)")
def unknown_flag() -> bytes:
    return pack(changed(archive(), "data.pkl", central={"flags": 0x8800}))


@attack(r"'archive/data.pkl' needs a reader of version 8.0 of the format; there is none above 6.3")
def for_a_later_reader() -> bytes:
    return pack(changed(archive(), "data.pkl", central={"version": 80}))


@attack(r"'archive/data/0' needs a reader of version 25.5 of the format")
def for_a_later_reader_in_the_local_header_only() -> bytes:
    return pack(changed(archive(), "data/0", local={"version": 255}))


# entries that are not where they should be


@attack("overlaps what follows it")
def overlapping_entries() -> bytes:
    grown = {"size": BYTES + 8, "packed": BYTES + 8}
    return pack(changed(archive(), "data/0", local=grown, central=grown))


@attack("overlaps what follows it")
def one_range_under_two_names() -> bytes:
    members = archive(storages={"0": FOUR, "1": FOUR})
    at = pack(members).index(b"PK\x03\x04", pack(members).index(b"archive/data/0") - 30)
    return pack(changed(members, "data/1", central={"header": at}))


@attack("is followed by bytes that belong to no entry")
def entry_outside_the_file() -> bytes:
    return pack(changed(archive(), "version", central={"header": 0x7FFFFFF0}))


@attack("has 15 bytes and declares 16|has 16 bytes and declares 15")
def two_sizes() -> bytes:
    return pack(changed(archive(), "data/0", central={"packed": BYTES - 1}))


@attack("by its local header, or another checksum")
def local_size_other_than_central() -> bytes:
    return pack(changed(archive(), "data/0", local={"size": BYTES - 4, "packed": BYTES - 4}))


@attack("by its local header, or another checksum")
def local_checksum_other_than_central() -> bytes:
    return pack(changed(archive(), "data/0", local={"crc": 1}))


@attack("data descriptor after entry 'archive/data/0' differs")
def descriptor_of_another_size() -> bytes:
    lie = struct.pack("<4s3I", b"PK\x07\x08", zlib.crc32(FOUR), BYTES + 4, BYTES + 4)
    return pack(changed(archive(), "data/0", described=True, descriptor=lie))


@attack("overlaps what follows it|data descriptor behind|by its local header")
def descriptor_that_is_not_there() -> bytes:
    return pack(changed(archive(), "data/0", described=True, descriptor=b""))


@attack("declares another disk")
def entry_on_another_disk() -> bytes:
    return pack(changed(archive(), "data/0", central={"disk": 1}))


@attack(r"not marked as a file \(attributes 0x00000010\)")
def storage_marked_as_a_directory() -> bytes:
    """torch reads nothing of it, and gives out memory that was never written."""
    return pack(changed(archive(), "data/0", central={"attributes": 0x10}))


@attack(r"not marked as a file \(attributes 0xa1ff0000\)")
def entry_marked_as_a_symbolic_link() -> bytes:
    return pack(changed(archive(), "data.pkl", central={"attributes": 0o120777 << 16}))


@attack(r"not marked as a file \(attributes 0x41ed0000\)")
def entry_marked_as_a_directory_by_its_mode() -> bytes:
    return pack(changed(archive(), "data/0", central={"attributes": 0o040755 << 16}))


@attack("does not end with a zip end record")
def cut_off() -> bytes:
    return pack(archive())[:-30]


@attack("first entry starts at byte|directory should end at byte")
def first_half_missing() -> bytes:
    return pack(archive())[100:]


# end records that lie


@attack("at most 32,768 in")
def very_many_entries() -> bytes:
    return pack(archive(), end={"here": 65_000, "count": 65_000})


@attack("at most 32,768 in")
def more_entries_than_fit_any_file() -> bytes:
    huge = {"here": 1 << 60, "count": 1 << 60}
    return pack(archive(), zip64=huge, end={"here": 0xFFFF, "count": 0xFFFF})


@attack("at most 32,768 in .* bytes are read")
def a_directory_larger_than_memory() -> bytes:
    return pack(archive(), zip64={"size": 1 << 62, "offset": 0}, end={"size": 0xFFFFFFFF, "offset": 0xFFFFFFFF})


@attack("declares 5 entries and has 4")
def one_entry_more_than_there_is() -> bytes:
    return pack(archive(), end={"here": 5, "count": 5})


@attack("bytes after its last entry")
def one_entry_fewer_than_there_is() -> bytes:
    return pack(archive(), end={"here": 3, "count": 3})


@attack("bytes after its last entry")
def no_entries() -> bytes:
    return pack(archive(), end={"here": 0, "count": 0})


@attack("names several disks")
def end_record_of_another_disk() -> bytes:
    return pack(archive(), end={"disk": 1})


@attack("end record says 4 where its zip64 record says 3")
def zip64_of_another_count() -> bytes:
    return pack(archive(), zip64={"here": 3, "count": 3})


@attack("end record says .* where its zip64 record says 0")
def zip64_of_another_directory() -> bytes:
    return pack(archive(), zip64={"offset": 0})


@attack("zip64 locator points to byte 0")
def zip64_record_elsewhere() -> bytes:
    return pack(archive(), zip64={"record": 0})


@attack("zip64 locator points to byte")
def zip64_record_of_another_length() -> bytes:
    return pack(archive(), zip64={"length": 1 << 40})


@attack("zip64 record names several disks")
def zip64_on_many_disks() -> bytes:
    return pack(archive(), zip64={"disks": 7})


@attack("refers to a zip64 record, and there is none")
def zip64_record_missing() -> bytes:
    return pack(archive(), end={"offset": 0xFFFFFFFF})


@attack("zip64 field of entry 'archive/data/0' has 0 bytes; expected 8")
def zip64_field_missing() -> bytes:
    return pack(changed(archive(), "data/0", central={"size": 0xFFFFFFFF}))


@attack("zip64 field of entry 'archive/data/0' has 8 bytes; expected 0")
def zip64_field_that_is_not_needed() -> bytes:
    return pack(changed(archive(), "data/0", central={"extra": zip64_extra(1 << 40)}))


@attack("overlaps what follows it")
def zip64_size_beyond_the_file() -> bytes:
    lie = {"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF, "extra": zip64_extra(1 << 62, 1 << 62)}
    return pack(changed(archive(), "data/0", central=lie))


@attack("zip64 field in the local header of entry 'archive/data/0' differs")
def zip64_size_in_the_local_header_only() -> bytes:
    lie = {"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF, "extra": zip64_extra(8, 8)}
    return pack(changed(archive(), "data/0", local=lie))


@attack("two zip64 fields, or an empty one")
def two_zip64_fields() -> bytes:
    twice = zip64_extra(BYTES) + zip64_extra(BYTES)
    return pack(changed(archive(), "data/0", central={"size": 0xFFFFFFFF, "extra": twice}))


@attack("zip64 locator has no room for a zip64 record")
def zip64_locator_at_the_beginning() -> bytes:
    return pack([], zip64={})[-42:]


@attack("entry 3 of its directory reaches beyond the directory")
def directory_whose_last_entry_has_no_end() -> bytes:
    content = bytearray(pack(archive()))
    at = content.rindex(b"PK\x01\x02") + 32  # the length of its comment
    content[at : at + 2] = b"\xff\xff"
    return bytes(content)


@attack("there is no local header at byte")
def local_header_without_its_signature() -> bytes:
    content = pack(archive())
    at = content.rindex(b"PK\x03\x04")
    return content[:at] + b"PK\x03\x05" + content[at + 4 :]


# names


def named(raw: bytes) -> bytes:
    """An archive whose storage has another name in both headers."""
    return pack(changed(archive(), "data/0", local={"name": raw}, central={"name": raw}))


@attack("not a plain relative path")
def name_that_climbs() -> bytes:
    return named(b"archive/../../../etc/x")


@attack("not a plain relative path")
def absolute_name() -> bytes:
    return named(b"/archive/data/0")


@attack("not a plain relative path")
def name_with_backslashes() -> bytes:
    return named(b"archive\\data\\0")


@attack("not a plain relative path")
def name_with_a_nul() -> bytes:
    return named(b"archive/data/0\0.pkl")


@attack("not a plain relative path")
def name_without_end() -> bytes:
    return named(b"archive/data/" + b"0" * 5000)


@attack("not valid text")
def name_that_is_no_utf8() -> bytes:
    return named(b"archive/data/\xff")


@attack("'archive/data/٣' was not written by torch.save")
def storage_of_a_digit_that_is_not_ascii() -> bytes:
    return named("archive/data/٣".encode())


@attack("no data.pkl among its 3 entries")
def no_pickle() -> bytes:
    return pack(archive()[1:])


@attack("'archive/constants.pkl' was not written by torch.save; it may be a TorchScript archive")
def torchscript() -> bytes:
    return pack([*archive(), Member("archive/constants.pkl", b"\x80\x02).")])


@attack("'data.pkl' was not written by torch.save")
def no_folder() -> bytes:
    return pack([Member("data.pkl", tensor_pickle()), Member("data/0", FOUR)])


@attack("'C:/data/0' was not written by torch.save")
def name_on_a_drive() -> bytes:
    return named(b"C:/data/0")


@attack("not a plain relative path")
def name_that_turns_its_direction() -> bytes:
    return named("archive/data/0\u202e".encode())


@attack("not a plain relative path")
def entry_that_is_a_folder() -> bytes:
    return pack([*archive(), Member("archive/data/", b"")])


# records that contradict the pickle


@attack("byte order b'big'; only 'little' is read")
def big_endian() -> bytes:
    return pack(changed(archive(), "byteorder", data=b"big"))


@attack("byte order b'pdp'; only 'little' is read")
def byte_order_of_no_machine() -> bytes:
    return pack(changed(archive(), "byteorder", data=b"pdp"))


@attack("byteorder has 300 bytes")
def byte_order_of_many_words() -> bytes:
    return pack(changed(archive(), "byteorder", data=b"little" * 50))


@attack("storage 0 has 8 bytes; its pickle says 16")
def storage_shorter_than_claimed() -> bytes:
    return pack(archive(storages={"0": FOUR[:8]}))


@attack("storage 0 has 32 bytes; its pickle says 16")
def storage_longer_than_claimed() -> bytes:
    return pack(archive(storages={"0": FOUR + FOUR}))


@attack("storage 0 has 16 bytes; its pickle says 18,446,744,073,709,551,616")
def storage_of_2_to_the_62() -> bytes:
    return pack(archive(tensor_pickle(storage(elements=1 << 62))))


@attack("names storage 0, but there is no entry data/0")
def storage_missing() -> bytes:
    return pack(archive(storages={}))


@attack("entry data/1 belongs to no tensor")
def storage_without_a_tensor() -> bytes:
    return pack(archive(storages={"0": FOUR, "1": FOUR}))


@attack("data.pkl has .* bytes; at most", CorruptShardError)
def enormous_pickle() -> bytes:
    return pack(archive(b"\x80\x02" + bytes(33 << 20)))


@attack("PROTO is b'PK'|beginning is b'PK'|expected protocol", UnsafePickleError)
def a_zip_as_the_pickle() -> bytes:
    return pack(archive(pack(archive())))


@attack("does not end with a zip end record")
def empty_file() -> bytes:
    return b""


@attack("does not end with a zip end record")
def only_a_signature() -> bytes:
    return b"PK\x03\x04"


@attack("it has no entries")
def only_an_end_record() -> bytes:
    return pack([])


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
    return pack(changed(archive(), "data/0", local={"crc": 7}, central={"crc": 7}))


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
