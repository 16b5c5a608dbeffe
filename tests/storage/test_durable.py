"""Steps on the disk: the result of each, their order, and the state after a failure of any of them."""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

import rabbitllm
from rabbitllm.storage import durable, folder_lock
from rabbitllm.storage.durable import GrowingFile, Log, Step, observe_steps
from rabbitllm.storage.files import DIRECT_ALIGNMENT, OpenFiles, page_aligned, write_back_call
from rabbitllm.storage.folder_lock import FolderKind
from tests.support.forked import in_a_fork
from tests.support.leftovers import open_files
from tests.support.small_disk import small_disk
from tests.support.splitting import failing
from tests.support.swift_disk import real_disk  # noqa: F401  a fixture that applies by itself

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def steps() -> Iterator[list[Step]]:
    seen: list[Step] = []
    with observe_steps(seen.append):
        yield seen


def kinds(steps: list[Step]) -> list[str]:
    return [step.kind for step in steps]


# Whole files


def test_whole_file_is_synced_before_its_name_and_its_folder_after(tmp_path: Path, steps: list[Step]) -> None:
    durable.write_whole(tmp_path / "a.json", b"content")
    assert (tmp_path / "a.json").read_bytes() == b"content"
    assert kinds(steps) == ["create", "write", "sync", "rename", "sync_folder"]
    assert [step.path.name for step in steps[:4]] == ["a.json.part"] * 4
    assert (steps[3].target, steps[4].path) == (tmp_path / "a.json", tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "a.json"]


@pytest.mark.parametrize("before", [None, b"older and longer than the new one"])
@pytest.mark.parametrize("leftover", [None, b"what a crash left of an earlier attempt, longer than both"])
def test_written_file_is_old_or_new_after_any_failure(
    tmp_path: Path, before: bytes | None, leftover: bytes | None
) -> None:
    path, part = tmp_path / "a", tmp_path / "a.part"
    for failed in range(7):
        for file, content in ((path, before), (part, leftover)):
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_bytes(content)
        with (
            failing(FULL, lambda index, step, failing_step=failed: index == failing_step),  # type: ignore[misc]
            pytest.raises(OSError, match="No space left") if failed < 5 else contextlib.suppress(OSError),
        ):
            durable.write_whole(path, b"new")
        assert (path.read_bytes() if path.exists() else None) in (before, b"new")
        assert failed < 2 or sys.platform == "win32" or not part.exists()
        durable.write_whole(path, b"new")
        assert path.read_bytes() == b"new"
        assert not part.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
def test_second_writer_of_a_whole_file_waits_for_the_first(tmp_path: Path) -> None:
    path, ready, released = tmp_path / "a", threading.Event(), threading.Event()

    def pause(step: Step) -> None:
        if step.kind == "rename" and not ready.is_set():
            ready.set()
            released.wait()

    with ThreadPoolExecutor() as pool, observe_steps(pause):
        first = pool.submit(durable.write_whole, path, b"of the first")
        ready.wait()
        second = pool.submit(durable.write_whole, path, b"of the second one")
        wait([second], timeout=0.3)  # it comes to its end if it does not wait
        released.set()
        first.result()
        second.result()
    assert path.read_bytes() == b"of the second one"
    assert list(tmp_path.iterdir()) == [path]


def test_empty_whole_file(tmp_path: Path) -> None:
    durable.write_whole(tmp_path / "empty", b"")
    assert (tmp_path / "empty").read_bytes() == b""


# Files filled in place


def test_growing_file_keeps_existing_bytes(tmp_path: Path, steps: list[Step]) -> None:
    path = tmp_path / "layer.part"
    first = GrowingFile(path, 10)
    first.write_at(memoryview(b"abc"), 4)
    first.close()
    second = GrowingFile(path, 10)
    second.write_at(memoryview(b"xy"), 0)
    second.sync()
    second.close()
    assert path.read_bytes() == b"xy\0\0abc\0\0\0"
    assert kinds(steps) == ["create", "write", "write", "sync"]
    assert (steps[1].offset, bytes(steps[1].data)) == (4, b"abc")


@pytest.mark.parametrize(("size", "content"), [(3, b"abc"), (5, b"abcd\0"), (0, b"")])
def test_growing_file_is_given_its_size(tmp_path: Path, size: int, content: bytes) -> None:
    (tmp_path / "f").write_bytes(b"abcd")
    GrowingFile(tmp_path / "f", size).close()
    assert (tmp_path / "f").read_bytes() == content


def test_growing_file_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / "f").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        GrowingFile(tmp_path / "f", 1)
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


def test_threads_fill_one_file(tmp_path: Path) -> None:
    content = os.urandom(1 << 20)
    file = GrowingFile(tmp_path / "f", len(content))
    with ThreadPoolExecutor(8) as pool:
        for offset in range(0, len(content), 7000):
            pool.submit(file.write_at, memoryview(content)[offset : offset + 7000], offset)
    file.close()
    assert (tmp_path / "f").read_bytes() == content


@pytest.mark.parametrize("offset", [0, DIRECT_ALIGNMENT, 3 * DIRECT_ALIGNMENT, 100])
@pytest.mark.parametrize("length", [0, 1, DIRECT_ALIGNMENT - 1, DIRECT_ALIGNMENT, 3 * DIRECT_ALIGNMENT + 77])
def test_aligned_writes_of_any_length(tmp_path: Path, offset: int, length: int) -> None:
    buffer = page_aligned(1 << 16)[:length]
    buffer[:] = content = os.urandom(length)
    file = GrowingFile(tmp_path / "f", 1 << 16)
    file.write_at(buffer, offset, aligned=True)
    file.sync()
    file.close()
    written = (tmp_path / "f").read_bytes()
    assert written[offset : offset + length] == content
    assert written.count(0, offset + length) == len(written) - offset - length
    assert not any(written[:offset])


def test_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, refused = os.open, []

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    buffer = page_aligned(3 * DIRECT_ALIGNMENT)
    buffer[:] = content = os.urandom(len(buffer))
    file = GrowingFile(tmp_path / "f", len(buffer))
    for offset in range(0, len(buffer), DIRECT_ALIGNMENT):
        file.write_at(buffer[offset : offset + DIRECT_ALIGNMENT], offset, aligned=True)
    file.close()
    assert (tmp_path / "f").read_bytes() == content
    assert len(refused) == 1  # asked once


def test_failed_direct_write_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    file = GrowingFile(tmp_path / "f", DIRECT_ALIGNMENT)
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="Input/output error"):
        file.write_at(page_aligned(DIRECT_ALIGNMENT), 0, aligned=True)
    file.close()


@pytest.mark.parametrize("aligned", [False, True])
def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aligned: bool) -> None:
    written = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: written(fd, data[:1000], offset))
    buffer = page_aligned(2 * DIRECT_ALIGNMENT + 5)[: 2 * DIRECT_ALIGNMENT + 5]
    buffer[:] = content = os.urandom(len(buffer))
    file = GrowingFile(tmp_path / "f", len(buffer))
    file.write_at(buffer, 0, aligned=aligned)
    file.close()
    assert (tmp_path / "f").read_bytes() == content


def test_system_without_positional_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pwrite")
    monkeypatch.delattr(os, "O_DIRECT")
    content = os.urandom(100_000)
    file = GrowingFile(tmp_path / "f", len(content))
    with ThreadPoolExecutor(4) as pool:
        for offset in range(0, len(content), 999):
            pool.submit(file.write_at, memoryview(content)[offset : offset + 999], offset, aligned=True)
    file.close()
    assert (tmp_path / "f").read_bytes() == content


# Files of a pool


def test_file_is_synced_before_the_pool_closes_it(tmp_path: Path, steps: list[Step]) -> None:
    pool = OpenFiles(1)
    first, second = (GrowingFile(tmp_path / name, 8, write_back=True, files=pool) for name in "ab")
    assert kinds(steps) == ["create", "create"]  # of a file that was only made nothing can be lost
    first.write_at(memoryview(b"abc"), 0)
    second.write_at(memoryview(b"xyz"), 0)
    assert [(step.kind, step.path.name) for step in steps[2:]] == [("write", "a"), ("sync", "a"), ("write", "b")]
    first.write_at(memoryview(b"de"), 3)
    assert len(list(open_files(tmp_path))) == 1
    second.sync()
    assert [(step.kind, step.path.name) for step in steps[5:]] == [("sync", "b"), ("write", "a")]
    first.sync()
    first.sync()
    assert kinds(steps)[7:] == ["sync"]
    for file in (first, second):
        file.close()
    assert not list(open_files(tmp_path))
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()) == (b"abcde\0\0\0", b"xyz" + bytes(5))


def test_file_closed_by_the_pool_is_synced_without_new_writes(tmp_path: Path, steps: list[Step]) -> None:
    """Bytes in it may be those of a process that died, and may not be durable."""
    (tmp_path / "a").write_bytes(b"earlier")
    pool = OpenFiles(1)
    first, second = (GrowingFile(tmp_path / name, 7, files=pool) for name in "ab")
    first.sync()
    assert [(step.kind, step.path.name) for step in steps] == [("create", "b"), ("sync", "a")]
    first.close()
    second.close()


def test_threads_fill_many_files_of_a_small_pool(tmp_path: Path) -> None:
    pool = OpenFiles(3)
    contents = [os.urandom(20_000) for _ in range(12)]
    files = [GrowingFile(tmp_path / str(index), 20_000, files=pool) for index in range(12)]

    def fill(offset: int) -> int:
        buffer = page_aligned(DIRECT_ALIGNMENT)
        for file, content in zip(files, contents, strict=True):
            part = content[offset : offset + DIRECT_ALIGNMENT]
            buffer[: len(part)] = part
            file.write_at(buffer[: len(part)], offset, aligned=True)
        return len(list(open_files(tmp_path)))

    with ThreadPoolExecutor(4) as threads:
        peak = max(threads.map(fill, range(0, 20_000, DIRECT_ALIGNMENT)))
    assert peak <= 2 * 3  # each may have a second descriptor, for writes past the page cache
    for file in files:
        file.sync()
        file.close()
    assert [(tmp_path / str(index)).read_bytes() for index in range(12)] == contents


@pytest.mark.parametrize("there", [False, True])
def test_removed_file_is_not_created_again(tmp_path: Path, there: bool) -> None:
    pool = OpenFiles(1)
    first, second = (GrowingFile(tmp_path / name, 3, files=pool) for name in "ab")
    (tmp_path / "a").rename(tmp_path / "aside")
    if there:
        (tmp_path / "a").write_bytes(b"\0\0\0")
    with pytest.raises(OSError, match="the file was replaced" if there else "No such file"):
        first.write_at(memoryview(b"abc"), 0)
    assert (tmp_path / "a").exists() == there
    first.close()
    second.close()


def test_failed_sync_in_the_pool_is_raised(tmp_path: Path) -> None:
    pool = OpenFiles(1)
    first, second = (GrowingFile(tmp_path / name, 3, files=pool) for name in "ab")
    first.write_at(memoryview(b"abc"), 0)
    error = OSError(errno.EIO, "Input/output error")
    with (
        failing(error, lambda index, step: step.path.name == "a", ("sync",)),
        pytest.raises(OSError, match="Input/output error"),
    ):
        second.write_at(memoryview(b"xyz"), 0)
    assert (tmp_path / "b").read_bytes() == bytes(3)
    with failing(error, lambda index, step: True, ("sync",)), pytest.raises(OSError, match="Input/output error"):
        first.sync()
    first.close()
    second.close()


def test_sync_waits_for_that_of_another_thread(tmp_path: Path) -> None:
    pool = OpenFiles(1)
    first, second = (GrowingFile(tmp_path / name, 3, files=pool) for name in "ab")
    first.write_at(memoryview(b"abc"), 0)
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def slow(descriptor: int) -> None:
        begun.set()
        assert go_on.wait(600)
        done.append("synced")

    def sync() -> None:
        first.sync()
        done.append("returned")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", slow)
        closing = threading.Thread(target=lambda: second.write_at(memoryview(b"xyz"), 0))
        closing.start()
        assert begun.wait(600)
        syncing = threading.Thread(target=sync)
        syncing.start()
        syncing.join(0.1)
        go_on.set()
        syncing.join(600)
        closing.join(600)
    assert done == ["synced", "returned"]
    first.close()
    second.close()


def test_closed_file_refuses_writes(tmp_path: Path) -> None:
    file = GrowingFile(tmp_path / "a", 3)
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.write_at(memoryview(b"abc"), 0)


def test_file_that_cannot_get_its_size_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(OSError, match="No space left"):
        GrowingFile(tmp_path / "a", 3)
    assert not list(open_files(tmp_path))


def test_full_disk_names_the_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        log = disk.path / "log"
        log.touch()
        disk.leave(0)
        for write in (lambda: durable.write_whole(disk.path / "a", bytes(5000)), lambda: Log(log).append("x" * 5000)):
            with pytest.raises(OSError, match="No space left") as full:
                write()
            assert full.value.filename in (str(disk.path / "a.part"), str(log))


# Lines


def test_log_syncs_each_line(tmp_path: Path, steps: list[Step]) -> None:
    (tmp_path / "log").write_bytes(b"first\n")
    log = Log(tmp_path / "log")
    log.append("sécond")
    log.append("")
    log.close()
    assert (tmp_path / "log").read_text() == "first\nsécond\n\n"
    assert kinds(steps) == ["write", "sync", "write", "sync"]
    assert steps[0].offset == len(b"first\n")


def test_opening_a_log_does_not_create_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Log(tmp_path / "log")


# Names


def test_removing_a_missing_file_is_no_error(tmp_path: Path, steps: list[Step]) -> None:
    (tmp_path / "f").touch()
    durable.remove(tmp_path / "f")
    durable.remove(tmp_path / "f")
    assert kinds(steps) == ["unlink", "unlink"]
    assert list(tmp_path.iterdir()) == []


def test_removing_a_link_spares_its_target(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    durable.remove(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_folders_are_made_from_the_top_and_each_is_durable(tmp_path: Path, steps: list[Step]) -> None:
    durable.make_folder(tmp_path / "a" / "b" / "c")
    durable.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert [(step.kind, step.path.name) for step in steps] == [
        ("make_folder", "a"),
        ("sync_folder", tmp_path.name),
        ("make_folder", "b"),
        ("sync_folder", "a"),
        ("make_folder", "c"),
        ("sync_folder", "b"),
    ]


def test_removing_a_folder_of_files(tmp_path: Path, steps: list[Step]) -> None:
    folder = tmp_path / "staging"
    durable.remove_folder(folder)
    folder.mkdir()
    (folder / "shard.part").touch()
    durable.remove_folder(folder)
    assert not folder.exists()
    assert kinds(steps) == ["unlink", "remove_folder"]


def test_touch_and_publish(tmp_path: Path, steps: list[Step]) -> None:
    (tmp_path / "f.part").write_bytes(b"synced")
    durable.publish(tmp_path / "f.part", tmp_path / "f")
    durable.touch(tmp_path / "f.done")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"f": b"synced", "f.done": b""}
    assert kinds(steps) == ["rename", "sync_folder", "create"]


# The seam


def test_steps_are_announced_before_they_happen(tmp_path: Path) -> None:
    def refuse(step: Step) -> None:
        raise FULL

    (tmp_path / "f").write_bytes(b"kept")
    for attempt in (
        lambda: durable.remove(tmp_path / "f"),
        lambda: durable.rename(tmp_path / "f", tmp_path / "g"),
        lambda: durable.touch(tmp_path / "h"),
        lambda: durable.make_folder(tmp_path / "i"),
        lambda: durable.write_whole(tmp_path / "f", b"other"),
        lambda: GrowingFile(tmp_path / "j", 5),
        lambda: Log(tmp_path / "f").append("line"),
    ):
        with observe_steps(refuse), pytest.raises(OSError, match="No space left"):
            attempt()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"f": b"kept"}


def test_only_one_observer_at_a_time(tmp_path: Path) -> None:
    seen: list[Step] = []

    def observed() -> None:
        with observe_steps(seen.append):
            with pytest.raises(RuntimeError, match="already observed"), observe_steps(seen.append):
                pass
            durable.touch(tmp_path / "a")
            raise KeyError

    with pytest.raises(KeyError):
        observed()
    durable.touch(tmp_path / "b")
    assert [step.path.name for step in seen] == ["a"]


WRITING_CALLS = {
    "unlink",
    "touch",
    "rmdir",
    "rmtree",
    "write_bytes",
    "write_text",
    "rename",
    "mkdir",
    "mkdtemp",
    "TemporaryDirectory",
    "makedirs",
    "symlink_to",
}
ELSEWHERE = {"demo/models.py", "demo/run.py", "ray/_cluster.py"}
"""The copy of the demonstration's model, and Ray's own temporary folder."""
WRITING_FUNCTIONS = {"os.replace", "os.remove", "os.write", "os.pwrite", "os.truncate", "os.ftruncate", "os.fsync"}
NAMED = re.compile("|".join(map(re.escape, WRITING_CALLS | WRITING_FUNCTIONS)))


def test_only_this_module_changes_the_disk() -> None:
    package = Path(rabbitllm.__file__).parent
    modules = [*package.rglob("*.py")]
    assert len(modules) > 200
    writers = {path.relative_to(package).as_posix() for path in modules if any(map(changes_the_disk, calls_in(path)))}
    assert writers == {"storage/durable.py", *ELSEWHERE}


def calls_in(path: Path) -> Iterator[ast.Call]:
    """Of a file in which such a name is written; to parse the others takes two seconds."""
    if not NAMED.search(path.read_text()):
        return iter(())
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def changes_the_disk(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    name = ast.unparse(call.func)
    if name.split(".")[0] == "durable":
        return False
    if name == "os.write" and ast.unparse(call.args[0]) == "2":  # standard error
        return False
    return call.func.attr in WRITING_CALLS or name in WRITING_FUNCTIONS


# Writing back


@pytest.mark.skipif(sys.platform != "linux", reason="sync_file_range is Linux's")
def test_kernel_accepts_sync_file_range(tmp_path: Path) -> None:
    begin = write_back_call()
    assert begin is not None
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * 100_000)
        file.flush()
        assert begin(file.fileno()) == 0
    assert begin(2**20) == -1  # no file of that number is open


def test_write_back_begins_after_enough_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr(durable, "write_back_call", lambda: begun.append)
    monkeypatch.setattr(durable, "WRITE_BACK_BYTES", 1000)
    data = bytes(range(250))
    for write_back in (True, False):
        file = GrowingFile(tmp_path / str(write_back), 5000, write_back=write_back)
        for index in range(20):
            file.write_at(memoryview(data), index * 250)
        file.sync()
        file.close()
        assert (tmp_path / str(write_back)).read_bytes() == data * 20
        assert len(begun) == 5


# A file without a name


@pytest.mark.parametrize("at_places", sorted({False, durable.NamelessFile.READS_AT_OFFSETS}))
def test_nameless_file_is_private_and_returns_the_written_bytes(
    tmp_path: Path, steps: list[Step], monkeypatch: pytest.MonkeyPatch, at_places: bool
) -> None:
    monkeypatch.setattr(durable.NamelessFile, "READS_AT_OFFSETS", at_places)
    file = durable.NamelessFile(tmp_path)
    file.write_at(memoryview(b"abc"), 0)
    file.write_at(memoryview(b"defg"), 3)
    descriptor = file._file.fileno()
    assert not list(tmp_path.iterdir())
    if os.name == "posix":
        assert os.fstat(descriptor).st_mode & 0o777 == 0o600
        assert os.fstat(descriptor).st_nlink == 0  # nothing of it outlives the process
    assert [(step.kind, step.path, step.offset, bytes(step.data)) for step in steps] == [
        ("write", tmp_path, 0, b"abc"),
        ("write", tmp_path, 3, b"defg"),
    ]
    into = bytearray(5)
    file.read_at(memoryview(into), 1)
    assert into == b"bcdef"
    with pytest.raises(OSError, match="shorter"):
        file.read_at(memoryview(into), 3)
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT")
def test_nameless_file_that_cannot_be_reopened_takes_whole_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, refused = os.open, []

    def refuse(path: Path, flags: int, *mode: int, **more: int) -> int:
        if flags & os.O_DIRECT == os.O_DIRECT:
            refused.append(path)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return opened(path, flags, *mode, **more)

    file = durable.NamelessFile(tmp_path)
    monkeypatch.setattr(os, "open", refuse)
    data, into = page_aligned(2 * DIRECT_ALIGNMENT), page_aligned(2 * DIRECT_ALIGNMENT)
    data[:] = os.urandom(len(data))
    file.write_at(data, DIRECT_ALIGNMENT, aligned=True)
    file.read_at(into, DIRECT_ALIGNMENT, aligned=True)
    assert into == data
    assert len(refused) == 1  # asked once
    file.close()


@pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT")
def test_nameless_file_completes_short_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[: 4096 + 512], offset))
    monkeypatch.setattr(os, "preadv", lambda file, data, offset: read(file, [data[0][: 4096 + 512]], offset))
    file = durable.NamelessFile(tmp_path)
    data, into = page_aligned(3 * DIRECT_ALIGNMENT), page_aligned(3 * DIRECT_ALIGNMENT)
    data[:] = os.urandom(len(data))
    file.write_at(data, 0, aligned=True)
    file.read_at(into, 0, aligned=True)
    assert into == data
    file.close()


# folders among the system's temporary files


def test_scratch_folder_of_a_killed_process_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def dies() -> None:
        scratch = durable.ScratchFolder()
        (scratch.path / "file").write_bytes(b"x")
        os.kill(os.getpid(), signal.SIGKILL)

    (tmp_path / "rabbitllm-other").mkdir()
    with durable.ScratchFolder() as first:
        (first / "folder").mkdir()
        (first / "folder" / "file").write_bytes(b"x")
        child = os.fork()
        if not child:
            dies()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert len([*tmp_path.iterdir()]) == 3
        with durable.ScratchFolder() as second:
            assert {*tmp_path.iterdir()} == {first.parent, second.parent, tmp_path / "rabbitllm-other"}
            in_a_fork(lambda: None)  # a child that ends leaves its parent's
            assert second.is_dir()
    assert [*tmp_path.iterdir()] == [tmp_path / "rabbitllm-other"]


def test_a_checkpoint_in_a_scratch_folder_can_be_locked() -> None:
    """For readers, and for a split that deletes its shards."""
    with durable.ScratchFolder() as folder:
        folder_lock.shared(folder, FolderKind.SOURCE).close()
        folder_lock.exclusive(folder, FolderKind.SOURCE).close()


@pytest.mark.parametrize("expected", [b"begin", re.compile(rb"begin|\Z")], ids=["bytes", "a pattern"])
def test_own_files_are_told_by_their_first_bytes(tmp_path: Path, expected: bytes | re.Pattern[bytes]) -> None:
    file, part = tmp_path / "file", tmp_path / "file.part"
    for content, is_own, is_own_unfinished in (
        (b"begin and more", True, True),
        (b"", True, True),
        (bytes(9000), False, True),  # a power cut keeps the size of an unfinished file without its bytes
        (b"begun", False, False),
        (b"other\0\0", False, False),
    ):
        file.write_bytes(content)
        part.write_bytes(content)
        assert (durable.begins_as(file, expected), durable.begins_as(part, expected)) == (is_own, is_own_unfinished)
        assert durable.begins_as(file, b"another kind", expected) == is_own
    file.write_bytes(b"beg")
    assert durable.begins_as(file, b"begin")
