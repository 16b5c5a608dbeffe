"""Zips that are read as Python's zipfile reads them, and every one of which readers could disagree is refused."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.formats._zip_directory import (
    MAX_DIRECTORY_BYTES,
    ZipEntry,
    ZipFault,
    check_local_headers,
    read_entries,
)
from tests.support.draws import draws
from tests.support.torch_files import Member, archive, changed, pack, zip64_extra


def reader(content: bytes, reads: list[int] | None = None) -> Callable[[int, int], bytes]:
    """Reads ranges of these bytes, and notes how many were asked for each time."""

    def read(offset: int, length: int) -> bytes:
        assert offset >= 0
        assert length >= 0
        if reads is not None:
            reads.append(length)
        return content[offset : offset + length]

    return read


def entries_of(content: bytes, reads: list[int] | None = None) -> tuple[ZipEntry, ...]:
    read = reader(content, reads)
    entries = read_entries(read, len(content))
    check_local_headers(read, entries)
    return entries


def agrees_with_zipfile(content: bytes) -> tuple[ZipEntry, ...]:
    entries = entries_of(content)
    with zipfile.ZipFile(io.BytesIO(content)) as zip_file:
        infos = sorted(zip_file.infolist(), key=lambda info: info.header_offset)
        assert [(e.name, e.header, e.size, e.crc) for e in entries] == [
            (info.filename, info.header_offset, info.file_size, info.CRC) for info in infos
        ]
        for entry in entries:
            assert content[entry.begin : entry.end] == zip_file.read(entry.name)
    return entries


def test_files_of_torch() -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.arange(5), "empty": torch.empty(0), "b": torch.ones(3, 3)}, stream)
    entries = agrees_with_zipfile(stream.getvalue())
    assert len(entries) == 9
    assert {entry.descriptor for entry in entries} == {0, 16}  # an empty entry has none
    assert all(entry.begin % 64 == 0 for entry in entries if "/data/" in entry.name)


def test_zips_of_zipfile() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as zip_file:
        zip_file.writestr("archive/data.pkl", b"abc")
        zip_file.writestr("archive/ä", b"")
        with zip_file.open("archive/data/0", "w", force_zip64=True) as entry:
            entry.write(b"0123")
    entries = agrees_with_zipfile(stream.getvalue())
    assert [entry.name for entry in entries] == ["archive/data.pkl", "archive/ä", "archive/data/0"]


def test_zips_that_zipfile_writes_to_a_pipe() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise OSError

    stream = Pipe()
    with zipfile.ZipFile(stream, "w") as zip_file:
        zip_file.writestr("archive/data.pkl", b"abc")
    assert agrees_with_zipfile(stream.getvalue())[0].descriptor == 16


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("zip64", [None, {}])
def test_zips_of_our_builder(described: bool, zip64: dict[str, int] | None) -> None:
    members = [Member("a/x", b"abc", described=described), Member("a/y", b"", described=described), Member("a/z", b"z")]
    entries = agrees_with_zipfile(pack(members, zip64=zip64))
    assert [entry.size for entry in entries] == [3, 0, 1]


@pytest.mark.parametrize("attributes", [0, 0x20, 0o600 << 16, 0o100644 << 16])
def test_attributes_of_ordinary_files(attributes: int) -> None:
    agrees_with_zipfile(pack(changed(archive(), "data/0", central={"attributes": attributes})))


def test_directory_in_another_order_than_the_file() -> None:
    content = pack(archive())
    begin = content.index(b"PK\x01\x02")
    second = content.index(b"PK\x01\x02", begin + 1)
    end = content.index(b"PK\x05\x06")
    turned = content[:begin] + content[second:end] + content[begin:second] + content[end:]
    assert entries_of(turned) == entries_of(content)


def test_zip64_fields_as_torch_writes_them() -> None:
    """Beyond 4 GiB torch leaves the sizes of a local header at zero and adds a zip64 field to it."""
    directory = {"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF, "extra": zip64_extra(16, 16)}
    data = archive()[2].data
    descriptor = struct.pack("<4sI2Q", b"PK\x07\x08", zlib.crc32(data), 16, 16)
    members = changed(
        archive(),
        "data/0",
        described=True,
        local={"extra": zip64_extra(16, 0)},
        central=directory,
        descriptor=descriptor,
    )
    entries = entries_of(pack(members))
    assert (entries[2].size, entries[2].descriptor) == (16, 24)


def test_only_headers_are_read(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.zeros(1 << 18), "b": torch.zeros(1 << 18)}, stream)
    reads: list[int] = []
    entries_of(stream.getvalue(), reads)
    assert sum(reads) < 5000


def test_no_size_is_read_before_it_is_checked() -> None:
    for lie in ({"size": 1 << 62}, {"offset": 1 << 62}, {"size": MAX_DIRECTORY_BYTES + 1}, {"here": 9, "count": 9}):
        reads: list[int] = []
        content = pack(
            archive(), zip64=lie, end={"size": 0xFFFFFFFF, "offset": 0xFFFFFFFF, "here": 65535, "count": 65535}
        )
        with pytest.raises(ZipFault):
            entries_of(content, reads)
        assert max(reads) < len(content)


def test_offsets_follow_from_the_directory() -> None:
    """Which is what a repository is asked for: one range instead of one a tensor."""
    stream = io.BytesIO()
    torch.save({f"t{index}": torch.full((index,), index) for index in range(40)}, stream)
    content = stream.getvalue()
    reads: list[int] = []
    entries = read_entries(reader(content, reads), len(content))
    assert len(reads) == 2
    with zipfile.ZipFile(io.BytesIO(content)) as zip_file:
        for entry in entries:
            assert content[entry.begin : entry.end] == zip_file.read(entry.name)


def test_file_that_shrinks_during_the_read() -> None:
    content = pack(archive())
    entries = read_entries(reader(content), len(content))
    for length in (0, 20, entries[2].begin - 1):
        with pytest.raises(ZipFault, match="it ended before byte"):
            check_local_headers(reader(content[:length]), entries)


SOUND = [pack(archive()), pack(changed(archive(), "data/0", described=True), zip64={})]


@settings(max_examples=draws(800), deadline=2000)
@given(
    st.sampled_from(SOUND),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 4), st.binary(max_size=8)), min_size=1, max_size=4),
)
def test_only_our_errors(content: bytes, changes: list[tuple[int, int, bytes]]) -> None:
    """And what is accepted still has every byte accounted for, and is the same to zipfile."""
    data = bytearray(content)
    for offset, cut, new in changes:
        data[offset % len(data) : offset % len(data) + cut] = new
    try:
        entries = entries_of(bytes(data))
    except ZipFault:
        return
    with zipfile.ZipFile(io.BytesIO(bytes(data))) as zip_file:
        assert {e.name: (e.header, e.size) for e in entries} == {
            info.filename: (info.header_offset, info.file_size) for info in zip_file.infolist()
        }
