"""Reads at any offset by several threads, and memory that starts on a page."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rabbitllm.storage.files import CAN_MAP_PRIVATELY, HUGE_PAGE, PositionalFile, identity_of, page_aligned
from tests.support.leftovers import none_left, open_files

CONTENT = bytes(range(256)) * 400


@pytest.fixture(params=["preadv", "seek"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file, on a system that has positional reads and on one that has none."""
    if request.param == "seek":
        monkeypatch.delattr(os, "preadv")
    (tmp_path / "f").write_bytes(CONTENT)
    return tmp_path / "f"


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, 1), (5, 1000), (0, len(CONTENT)), (len(CONTENT) - 3, 3)])
def test_read(file: Path, offset: int, length: int) -> None:
    buffer = bytearray(length)
    with PositionalFile(file) as opened:
        assert opened.read_into(memoryview(buffer), offset) == length
    assert buffer == CONTENT[offset : offset + length]


@pytest.mark.parametrize(("offset", "got"), [(len(CONTENT) - 3, 3), (len(CONTENT), 0), (len(CONTENT) + 50, 0)])
def test_read_past_the_end_says_how_much_came(file: Path, offset: int, got: int) -> None:
    buffer = bytearray(b"\xaa" * 10)
    with PositionalFile(file) as opened:
        assert opened.read_into(memoryview(buffer), offset) == got
    assert buffer == CONTENT[offset:] + b"\xaa" * (10 - got)


def test_bytes_of_a_range(file: Path) -> None:
    with PositionalFile(file) as opened:
        assert opened.size() == len(CONTENT)
        assert opened.read_at(7, 20) == CONTENT[7:27]
        assert opened.read_at(len(CONTENT) - 3, 20) == CONTENT[-3:]


def test_threads_do_not_disturb_each_other(file: Path) -> None:
    with PositionalFile(file) as opened, ThreadPoolExecutor(8) as pool:

        def read(offset: int) -> bool:
            buffer = bytearray(300)
            opened.read_into(memoryview(buffer), offset)
            return buffer == CONTENT[offset : offset + 300]

        assert all(pool.map(read, range(0, len(CONTENT) - 300, 37)))


def test_short_reads_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(CONTENT)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:100]], offset))
    buffer = bytearray(1000)
    with PositionalFile(tmp_path / "f") as opened:
        assert opened.read_into(memoryview(buffer), 7) == 1000
    assert buffer == CONTENT[7:1007]


def test_descriptor_is_closed_and_advice_is_harmless(file: Path) -> None:
    with PositionalFile(file) as opened:
        opened.advise_sequential()
        opened.drop_cache(0, 4096)
        descriptor = opened._descriptor
        assert opened.read_into(memoryview(bytearray(1)), 0) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, HUGE_PAGE + 1])
def test_memory_starts_on_a_page_and_is_zero(nbytes: int) -> None:
    memory = page_aligned(nbytes)
    assert len(memory) == nbytes
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 4096 == 0
    assert not any(memory[:5000])
    memory[-1] = 7
    assert memory[-1] == 7


@pytest.mark.skipif(not CAN_MAP_PRIVATELY, reason="the system has no private mappings")
def test_a_private_mapping(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(CONTENT)
    with PositionalFile(tmp_path / "f") as opened:
        mapped = opened.map_privately()
    assert mapped[:] == CONTENT
    mapped[5:8] = b"abc"
    assert mapped[4:9] == CONTENT[4:5] + b"abc" + CONTENT[8:9]
    assert (tmp_path / "f").read_bytes() == CONTENT


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the mappings of the process")
def test_a_private_mapping_holds_no_descriptor_and_goes_with_its_last_view(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(CONTENT)
    with none_left(tmp_path):
        with PositionalFile(tmp_path / "f") as opened:
            mapped = opened.map_privately()
        assert not list(open_files(tmp_path))
        view = np.frombuffer(mapped[3:9], np.uint8)
        del mapped
        assert bytes(view) == CONTENT[3:9]
        assert str(tmp_path / "f") in Path("/proc/self/maps").read_text()
        del view


@pytest.mark.skipif(not CAN_MAP_PRIVATELY, reason="the system has no private mappings")
def test_what_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with PositionalFile(tmp_path / "empty") as opened, pytest.raises(ValueError, match="is empty"):
        opened.map_privately()
    with (tmp_path / "huge").open("wb") as made:
        made.truncate((1 << 43) - 4096)
    with PositionalFile(tmp_path / "huge") as opened, pytest.raises(OSError, match="Cannot allocate memory"):
        [opened.map_privately() for _ in range(1 << 20)]  # until there are no addresses left


@pytest.mark.skipif(not CAN_MAP_PRIVATELY, reason="the system has no private mappings")
def test_a_file_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as made:
        made.truncate(1 << 40)
    with PositionalFile(tmp_path / "f") as opened:
        mapped = opened.map_privately()
    mapped[1 << 39] = 7
    assert mapped[(1 << 39) - 1 : (1 << 39) + 2] == b"\0\7\0"


def test_identity(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(CONTENT)
    with PositionalFile(path) as opened:
        before = opened.identity()
        assert before == identity_of(path.stat()) == opened.identity()
        os.utime(path, ns=(0, 0))
        changed = opened.identity()
        assert changed != before
        os.truncate(path, 5)
        assert opened.identity() not in (before, changed)
        path.rename(tmp_path / "g")
        path.write_bytes(CONTENT)
        assert opened.identity() != identity_of(path.stat())
