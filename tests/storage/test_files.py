"""Reads at any offset by several threads, and memory that starts on a page.

The pool of open files: its limit, the order in which files are closed, and that they are settled before.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rabbitllm.storage import files
from rabbitllm.storage.durable import Log
from rabbitllm.storage.files import (
    CAN_MAP_PRIVATELY,
    HUGE_PAGE,
    MAX_FILES,
    OpenFiles,
    PositionalFile,
    identity_of,
    page_aligned,
    read_whole,
)
from tests.support.forked import in_a_fork
from tests.support.leftovers import none_left, open_files
from tests.support.swift_disk import real_disk  # noqa: F401  a fixture that applies by itself

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
def test_read_past_the_end_returns_the_count(file: Path, offset: int, got: int) -> None:
    buffer = bytearray(b"\xaa" * 10)
    with PositionalFile(file) as opened:
        assert opened.read_into(memoryview(buffer), offset) == got
    assert buffer == CONTENT[offset:] + b"\xaa" * (10 - got)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("use", [PositionalFile, read_whole, Log])
def test_a_pipe_is_refused_at_once(tmp_path: Path, use: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")

    def refused() -> str:
        with pytest.raises(OSError, match="device") as error:
            use(tmp_path / "pipe")
        assert error.value.filename == str(tmp_path / "pipe")
        return error.value.strerror

    message = "No such device or address" if use is Log else "a pipe, a device or a folder is in the place of a file"
    assert in_a_fork(refused) == message


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


def test_descriptor_is_closed_after_advice(file: Path) -> None:
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
def test_private_mapping_holds_no_descriptor_and_ends_with_its_last_view(tmp_path: Path) -> None:
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
def test_unmappable_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with PositionalFile(tmp_path / "empty") as opened, pytest.raises(ValueError, match="is empty"):
        opened.map_privately()
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate((1 << 43) - 4096)
    with PositionalFile(tmp_path / "huge") as opened, pytest.raises(OSError, match="Cannot allocate memory"):
        [opened.map_privately() for _ in range(1 << 20)]  # until there are no addresses left


@pytest.mark.skipif(not CAN_MAP_PRIVATELY, reason="the system has no private mappings")
def test_a_file_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as large:
        large.truncate(1 << 40)
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


class RecordedFile:
    """A file that logs its calls to a shared list."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name = name
        self.is_open = False
        self.is_settled = True
        self.error: OSError | None = None
        self._done = done

    def reopen(self) -> None:
        assert not self.is_open
        if self.error is not None:
            raise self.error
        self.is_open = True
        self._done.append(f"open {self.name}")

    def settle(self) -> None:
        assert self.is_open
        if self.is_settled:
            return
        self._done.append(f"settle {self.name}")
        if self.error is not None:
            raise self.error
        self.is_settled = True

    def release(self) -> None:
        assert self.is_open
        self.is_open = False
        self._done.append(f"close {self.name}")


@pytest.fixture
def done() -> list[str]:
    return []


def use(pool: OpenFiles, *files: RecordedFile) -> None:
    for file in files:
        with pool.using(file):
            assert file.is_open


def test_least_recently_used_file_is_closed(done: list[str]) -> None:
    a, b, c = (RecordedFile(name, done) for name in "abc")
    pool = OpenFiles(2)
    use(pool, a, b, a, c, a, b)
    assert done == ["open a", "open b", "close b", "open c", "close c", "open b"]


def test_a_file_is_settled_before_it_is_closed(done: list[str]) -> None:
    a, b = RecordedFile("a", done), RecordedFile("b", done)
    pool = OpenFiles(1)
    use(pool, a)
    a.is_settled = False
    use(pool, b)
    assert done == ["open a", "settle a", "close a", "open b"]


def test_file_that_cannot_be_settled_stays_open_and_raises(done: list[str]) -> None:
    a, b = RecordedFile("a", done), RecordedFile("b", done)
    pool = OpenFiles(1)
    use(pool, a)
    a.is_settled, a.error = False, OSError("the disk is gone")
    with pytest.raises(OSError, match="the disk is gone"):
        use(pool, b)
    assert a.is_open
    assert not b.is_open
    a.error = None
    use(pool, b)
    assert done[-3:] == ["settle a", "close a", "open b"]


def test_bytes_written_while_a_file_is_settled_are_settled(done: list[str]) -> None:
    a, b = RecordedFile("a", done), RecordedFile("b", done)
    pool = OpenFiles(1)
    use(pool, a)
    a.is_settled = False
    plain = a.settle

    def settle() -> None:
        plain()
        if done.count("settle a") == 1:  # another thread writes, and is through before the file is closed
            use(pool, a)
            a.is_settled = False

    a.settle = settle  # type: ignore[method-assign]
    use(pool, b)
    assert done == ["open a", "settle a", "settle a", "close a", "open b"]


def test_file_that_cannot_be_opened_takes_no_slot(done: list[str]) -> None:
    a, b = RecordedFile("a", done), RecordedFile("b", done)
    a.error = OSError("no such file")
    pool = OpenFiles(1)
    with pytest.raises(OSError, match="no such file"):
        use(pool, a)
    use(pool, b)
    assert done == ["open b"]


def test_dropped_file_is_closed_without_settling(done: list[str]) -> None:
    a = RecordedFile("a", done)
    pool = OpenFiles(1)
    pool.drop(a)
    use(pool, a)
    a.is_settled = False
    pool.drop(a)
    assert done == ["open a", "close a"]


def test_file_dropped_while_in_use_is_closed_afterwards(done: list[str]) -> None:
    a = RecordedFile("a", done)
    pool = OpenFiles(1)
    with pool.using(a):
        with pool.using(a):
            pool.drop(a)
        assert a.is_open
    assert not a.is_open


def test_file_dropped_by_a_garbage_collection_within_the_pool(done: list[str]) -> None:
    """It runs at any allocation, so also in a thread that holds the pool's lock."""
    a, b, c = (RecordedFile(name, done) for name in "abc")
    pool = OpenFiles(2)
    use(pool, a)
    plain = b.reopen

    def reopen() -> None:
        pool.drop(a)
        plain()

    b.reopen = reopen  # type: ignore[method-assign]
    with pool.using(b):
        pass
    assert done == ["open a", "open b", "close a"]
    c.error = OSError("no such file")
    failing = c.reopen

    def fail() -> None:
        pool.drop(b)
        failing()

    c.reopen = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no such file"):
        use(pool, c)
    assert done[-1] == "close b"


def test_threads_wait_while_all_open_files_are_in_use(done: list[str]) -> None:
    a, b = RecordedFile("a", done), RecordedFile("b", done)
    pool = OpenFiles(1)
    begun = threading.Event()

    def other() -> None:
        begun.set()
        use(pool, b)

    thread = threading.Thread(target=other)
    with pool.using(a):
        thread.start()
        assert begun.wait(600)
        thread.join(0.1)
        assert done == ["open a"]
    thread.join(600)
    assert done == ["open a", "close a", "open b"]


def test_open_files_stay_within_the_limit_and_are_settled_before_closing(done: list[str]) -> None:
    """`RecordedFile` checks that no file is opened or closed twice."""
    files = [RecordedFile(str(index), done) for index in range(9)]
    pool = OpenFiles(3)

    def work(start: int) -> None:
        for step in range(2000):
            file = files[(start + step * (start + 1)) % len(files)]
            with pool.using(file):
                assert file.is_open
                file.is_settled = False

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    # from the notes: while a thread counts the open files, others open and close some
    changes = ({"open": 1, "close": -1}.get(step.split()[0], 0) for step in done)
    assert max(itertools.accumulate(changes)) == 3
    for file in files:
        of_it = [step.removesuffix(f" {file.name}") for step in done if step.endswith(f" {file.name}")]
        assert "close" in of_it
        assert all(before == "settle" for before, step in itertools.pairwise(of_it) if step == "close")


@pytest.mark.parametrize(("soft", "expected"), [(16, 4), (64, 8), (256, 32), (1024, 128), (1 << 20, 256), (-1, 256)])
def test_limit_follows_that_of_the_process(monkeypatch: pytest.MonkeyPatch, soft: int, expected: int) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, -1))
    assert files._files_allowed() == expected <= MAX_FILES
