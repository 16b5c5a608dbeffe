"""The lock on a split directory, between real processes: waiting, takeover, and removal of its files."""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest

from rabbitllm.errors import InUseError, SplitError
from rabbitllm.splitter import lock
from rabbitllm.splitter.lock import (
    HOLDER_NAME,
    LEASE_NAME,
    LOCK_NAME,
    granted,
    is_left_over,
    locked,
    locked_without_waiting,
    read_lock,
)
from rabbitllm.storage import durable, leases
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.storage.leases import FOLDER_LEASE
from tests.support.splitting import contents, names_in

ROOT = Path(__file__).parent.parent.parent
MINUTE = r"2\d{3}-\d\d-\d\d \d\d:\d\d\b(?!:)"

HOLD = """
import sys
from pathlib import Path
from rabbitllm.splitter import lock
from rabbitllm.splitter.lock import locked
with locked(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.readline()
print("out", flush=True)
"""

# Enters again and again; two that are inside at once show by the file that both want to make.
STRESS = """
import os, random, sys, time
from pathlib import Path
from rabbitllm.splitter import lock
from rabbitllm.splitter.lock import locked
folder, inside, rounds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
for number in range(rounds):
    with locked(folder):
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
        time.sleep(random.random() * 0.002)
        inside.unlink()
    time.sleep(random.random() * 0.002)
"""


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < deadline, "nothing was said"
        time.sleep(0.01)


class Holder:
    """A process that takes the lock, and releases it on request. ``stderr`` goes to a file."""

    def __init__(self, folder: Path, stderr: Path) -> None:
        self._stderr = stderr
        with stderr.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", HOLD, str(folder)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def is_in(self) -> None:
        assert self._line() == "in", self.said()

    def leaves(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self._line() == "out", self.said()
        assert self.process.wait(600) == 0

    def said(self) -> str:
        return self._stderr.read_text()

    def says(self) -> str:
        """Return its stderr, as soon as there is some."""
        until(lambda: self.said().endswith("\n"))
        return self.said()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[Path], Holder]]:
    """Starts processes that hold the lock of a folder, or wait for it."""
    started: list[Holder] = []

    def start(folder: Path) -> Holder:
        started.append(Holder(folder, tmp_path / f"stderr-{len(started)}"))
        return started[-1]

    yield start
    for holder in started:
        holder.process.kill()
        holder.process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A split directory that is not empty."""
    folder = tmp_path / "splitted_model"
    folder.mkdir()
    (folder / "split.journal").write_text("{}")
    return folder


# Who waits


def test_second_process_waits_and_names_the_holder_once(folder: Path, hold: Callable[[Path], Holder]) -> None:
    first = hold(folder)
    first.is_in()
    second = hold(folder)
    message = second.says()
    begin, _, ending = message.partition(" since ")
    assert begin == f"{folder} is in use by process {first.process.pid} on {socket.gethostname()}"
    since, _, end = ending.partition(";")
    assert re.fullmatch(MINUTE, since)
    assert json.loads((folder / HOLDER_NAME).read_bytes())["since"].startswith(since)
    assert end == " waiting.\n"
    time.sleep(0.5)
    assert second.said() == message
    first.leaves()
    second.is_in()
    second.leaves()
    assert second.said() == message
    assert first.said() == ""


def test_waiting_is_logged_and_printed(
    folder: Path,
    hold: Callable[[Path], Holder],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = hold(folder)
    first.is_in()
    leaving = threading.Thread(target=lambda: (until(lambda: caplog.records), first.leaves()))
    leaving.start()
    with locked(folder):
        leaving.join()
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "rabbitllm.splitter.lock")
    process = rf"by process {first.process.pid} on {re.escape(socket.gethostname())} since {MINUTE}"
    assert re.search(rf"{process}(?!:)", record.message)
    assert capsys.readouterr().err == record.message + "\n"


def test_short_wait_prints_no_message(
    folder: Path, hold: Callable[[Path], Holder], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "SILENT_SECONDS", math.inf)
    first = hold(folder)
    first.is_in()
    timer = threading.Timer(0.1, first.leaves)
    timer.start()
    with locked(folder):
        timer.join()
    assert caplog.records == []


def test_holder_with_an_unreadable_note(folder: Path, hold: Callable[[Path], Holder]) -> None:
    first = hold(folder)
    first.is_in()
    (folder / HOLDER_NAME).write_text('{"pid": 12')
    assert hold(folder).says() == f"{folder} is in use by another process; waiting.\n"


def test_threads_exclude_each_other(folder: Path) -> None:
    inside: list[int] = []
    counts: list[int] = []

    def enter(index: int) -> None:
        for _ in range(3):
            with locked(folder):
                inside.append(index)
                counts.append(len(inside))
                time.sleep(0.01)
                inside.remove(index)

    threads = [threading.Thread(target=enter, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1] * 9


@pytest.mark.parametrize("kept", [True, False], ids=["folder stays", "folder comes and goes"])
def test_lock_is_exclusive_while_the_lock_file_is_removed_and_created(tmp_path: Path, kept: bool) -> None:
    folder = tmp_path / "some" / "where" / "splitted_model"
    if kept:
        folder.mkdir(parents=True)
    command = [sys.executable, "-c", STRESS, str(folder), str(tmp_path / "inside"), "40"]
    processes = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, "\n".join(outputs)
    # an empty folder may stay where one process made it again while another one cleared it away
    assert contents(tmp_path) == {}


def test_forked_child_does_not_release_the_lock(folder: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from rabbitllm.splitter.lock import locked
with locked(Path({str(folder)!r})):
    child = os.fork()
    if not child:
        sys.exit()  # leaves the context on its way
    os.waitpid(child, 0)
    print("in", flush=True)
    sys.stdin.readline()
"""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    assert LOCK_NAME in names_in(folder)
    with pytest.raises(InUseError), locked_without_waiting(folder):
        pass
    process.communicate("\n", timeout=600)
    assert process.returncode == 0
    assert names_in(folder) == ["split.journal"]


# Who takes over


def test_waiting_process_takes_over_from_a_killed_holder(folder: Path, hold: Callable[[Path], Holder]) -> None:
    first = hold(folder)
    first.is_in()
    second = hold(folder)
    second.says()
    first.process.kill()
    second.is_in()
    assert names_in(folder) == [LOCK_NAME, HOLDER_NAME, "split.journal"]  # no lease, which would be waited for
    third = hold(folder)
    assert f"process {second.process.pid} on" in third.says()
    second.leaves()
    third.is_in()
    third.leaves()
    assert names_in(folder) == ["split.journal"]


def test_killed_holder_without_waiting_processes_does_not_block(folder: Path, hold: Callable[[Path], Holder]) -> None:
    first = hold(folder)
    first.is_in()
    first.process.kill()
    first.process.wait()
    assert is_left_over(folder)
    with locked(folder):
        pass
    assert not is_left_over(folder)


def test_waiting_process_can_be_interrupted(folder: Path, hold: Callable[[Path], Holder]) -> None:
    first = hold(folder)
    first.is_in()
    second = hold(folder)
    second.says()
    second.process.send_signal(signal.SIGINT)
    assert second.process.wait(600) == -signal.SIGINT
    assert names_in(folder) == [LOCK_NAME, HOLDER_NAME, "split.journal"]
    third = hold(folder)
    assert f"process {first.process.pid} on" in third.says()  # and the lock is still the first one's


# What is left


def test_no_lock_files_remain(folder: Path) -> None:
    before = contents(folder)
    with locked(folder):
        assert names_in(folder) == [LOCK_NAME, HOLDER_NAME, "split.journal"]
    assert contents(folder) == before
    with pytest.raises(KeyError), locked(folder):
        raise KeyError
    assert contents(folder) == before


def test_empty_folder_created_for_the_lock_is_removed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    folder = tmp_path / "there" / "new" / "splitted_model"
    seen: list[str] = []

    def refuse() -> None:
        seen.extend(names_in(folder))
        raise KeyError

    with pytest.raises(KeyError), locked(folder):
        refuse()
    assert seen == [LOCK_NAME, HOLDER_NAME]
    assert names_in(tmp_path / "there") == []


def test_existing_or_filled_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with locked(tmp_path / "there"):
        pass
    assert names_in(tmp_path / "there") == []
    with locked(tmp_path / "new"):
        (tmp_path / "new" / "split.journal").touch()
    assert names_in(tmp_path / "new") == ["split.journal"]


def test_locking_announces_only_the_creation_of_the_folder(tmp_path: Path) -> None:
    """Kills and power cuts are tested at steps; the lock has no data that could be lost."""
    steps: list[Step] = []
    with observe_steps(steps.append):
        with locked(tmp_path / "new"):
            (tmp_path / "new" / "x").touch()
        assert [(step.kind, step.path) for step in steps] == [
            ("make_folder", tmp_path / "new"),
            ("sync_folder", tmp_path),
        ]
        with locked(tmp_path / "new"):
            pass
    assert len(steps) == 2


def test_full_disk_locks_without_the_note(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        path.touch()  # a name may still fit
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rabbitllm.storage.durable.write_scratch", full)
    with locked(folder):
        assert names_in(folder) == [LOCK_NAME, HOLDER_NAME, "split.journal"]
    assert names_in(folder) == ["split.journal"]


def test_link_in_place_of_the_lock_file_is_not_followed(folder: Path) -> None:
    (folder / LOCK_NAME).symlink_to(folder / "split.journal")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)), locked(folder):
        pass
    assert (folder / "split.journal").read_text() == "{}"


def test_lock_on_an_unlinked_file_does_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder removed it while this process waited, and a third process created a new one."""
    acquire = filelock.FileLock.acquire
    attempts: list[int] = []

    def late(self: filelock.FileLock, *arguments: object, **options: object) -> object:
        proxy = acquire(self, *arguments, **options)  # type: ignore[arg-type]
        attempts.append(1)
        if len(attempts) == 1:
            (folder / LOCK_NAME).unlink()
            (folder / LOCK_NAME).touch()
        return proxy

    monkeypatch.setattr(filelock.FileLock, "acquire", late)
    with locked(folder):
        assert len(attempts) == 2
        with pytest.raises(InUseError), locked_without_waiting(folder):
            pass
    assert names_in(folder) == ["split.journal"]


def test_a_file_system_that_tells_another_inode_at_each_look(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can never be known whether the locked file has the name: the wait for that had no end."""
    numbers = itertools.count(1)
    status = os.fstat
    monkeypatch.setattr(
        os, "fstat", lambda descriptor: os.stat_result((*(now := status(descriptor))[:1], next(numbers), *now[2:]))
    )
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)) as caught, locked(folder):
        pass
    assert caught.value.filename == str(folder / LOCK_NAME)


def test_lock_file_of_another_process_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process locks it after this one has released it, and before this one removes the file."""
    flock, holder = fcntl.flock, list[int]()

    def late(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if released:
            (folder / LOCK_NAME).unlink()
            holder.append(os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT))

    released: list[bool] = []
    release = filelock.FileLock.release

    def letting_go(self: filelock.FileLock, *arguments: object, **options: object) -> None:
        release(self, *arguments, **options)  # type: ignore[arg-type]
        if not released:
            (folder / LOCK_NAME).touch()  # newer versions of filelock have removed it
        released.append(True)

    monkeypatch.setattr(fcntl, "flock", late)
    monkeypatch.setattr(filelock.FileLock, "release", letting_go)
    with locked(folder):
        pass
    assert len(holder) == 1
    os.close(holder[0])
    assert LOCK_NAME in names_in(folder)


def answering(monkeypatch: pytest.MonkeyPatch, code: int, lets_go: bool) -> None:
    """Have flock fail; with `lets_go` only where a lock is asked for, as some file systems answer."""

    def refuse(descriptor: int, operation: int) -> None:
        if not (lets_go and operation == fcntl.LOCK_UN):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(leases, "LATE_SECONDS", math.inf)


NONE = [(code, False) for code in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)]
NONE += [(code, True) for code in (errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)]


@pytest.mark.parametrize(("code", "lets_go"), NONE)
def test_file_system_without_locks(
    folder: Path, code: int, lets_go: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None is available here, so its answer replaces the real one."""
    answering(monkeypatch, code, lets_go)
    for enter in (locked, functools.partial(locked, excluding_readers=True), locked_without_waiting):
        with enter(folder):
            assert names_in(folder) == [FOLDER_LEASE, "split.journal"]
            assert is_left_over(folder)
            read_lock(folder).close()
        assert names_in(folder) == ["split.journal"]
    assert caplog.records == []
    with locked(folder.parent / "new"):
        pass
    assert names_in(folder.parent) == ["splitted_model"]


def test_next_process_waits_for_the_lease_without_locks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answering(monkeypatch, errno.ENOLCK, lets_go=False)
    monkeypatch.setattr(lock, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    entered: list[str] = []

    def enter() -> None:
        with locked(folder):
            entered.append("in")

    second = threading.Thread(target=enter)
    with locked(folder):
        second.start()
        with (
            pytest.raises(InUseError, match=rf"{folder} is in use by process {os.getpid()} on .* since 2"),
            locked_without_waiting(folder),
        ):
            pass
        until(lambda: caplog.records)
        assert not entered
    second.join(600)
    assert entered == ["in"]
    (record,) = caplog.records
    process = rf"{folder} is in use by process {os.getpid()} on {re.escape(socket.gethostname())} since {MINUTE}"
    assert re.match(rf"{process}; waiting", record.message)
    assert record.message.endswith("; waiting, at most 120 s if that process has ended.")
    assert names_in(folder) == ["split.journal"]


def test_lost_lease_does_not_remove_that_of_the_next_holder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, errno.ENOLCK, lets_go=False)
    other = b'{"run": "0123456789abcdef0123456789abcdef", "process": "other"}'
    with locked(folder):
        (folder / FOLDER_LEASE).write_bytes(other)
        with pytest.raises(InUseError, match="may be in use by another process now"):
            durable.remove(folder / "split.journal")
    assert (folder / FOLDER_LEASE).read_bytes() == other
    assert (folder / "split.journal").exists()


def test_workers_of_the_next_run_keep_their_lease(folder: Path) -> None:
    with granted(folder):
        (folder / LEASE_NAME).write_text("another run's")
    assert (folder / LEASE_NAME).read_text() == "another run's"
    with granted(folder) as lease:
        assert lease.holds()
    assert not lease.holds()
    assert names_in(folder) == ["split.journal"]


@pytest.mark.parametrize("lets_go", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_file_system_that_fails_to_lock(
    folder: Path, code: int, lets_go: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, code, lets_go)
    for enter in (locked, locked_without_waiting):
        with pytest.raises(SplitError, match=f"{folder} cannot be locked: {os.strerror(code)}"), enter(folder):
            pass
    with pytest.raises(SplitError, match="cannot be locked"):
        read_lock(folder)


# Those who only read


def test_replacing_layer_files_is_refused_while_they_are_read(folder: Path) -> None:
    with read_lock(folder):
        with locked(folder):  # to finish or to clear away
            pass
        for enter in (functools.partial(locked, excluding_readers=True), locked_without_waiting):
            with pytest.raises(InUseError, match=rf"{folder} is in use by this process \({os.getpid()}\)"):
                enter(folder).__enter__()
    assert names_in(folder) == ["split.journal"]
    with locked(folder, excluding_readers=True):
        pass


def test_reader_waits_while_layer_files_are_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, messages = list[str](), list[str]()

    def read_it() -> None:
        with read_lock(folder):
            read.append("read")

    reader = threading.Thread(target=read_it)
    with locked(folder, excluding_readers=True):
        reader.start()
        until(lambda: messages.append(capsys.readouterr().err) or messages[-1])
        assert not read
    reader.join(600)
    assert read == ["read"]
    assert messages[-1].startswith(f"{folder} is in use by process {os.getpid()} on {socket.gethostname()} since ")
    assert "; waiting." in messages[-1]
