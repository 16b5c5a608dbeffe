"""Locks on folders, between real processes: sharing, refusal, named holders, and that no files remain."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from rabbitllm.errors import InUseError, SplitError
from rabbitllm.storage import leases
from rabbitllm.storage.folder_lock import NO_LOCKS, FolderKind, exclusive, shared
from rabbitllm.storage.leases import FOLDER_LEASE
from tests.support.small_disk import formatted_disk, small_disk
from tests.support.splitting import contents

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
HOLD = """
import sys
from pathlib import Path
from rabbitllm.storage import folder_lock
hold = getattr(folder_lock, sys.argv[2])(Path(sys.argv[1]), folder_lock.FolderKind.SOURCE)
print("in", flush=True)
sys.stdin.readline()
"""


class Holder:
    """A process that holds a folder until it is told to end."""

    def __init__(self, folder: Path, how: str) -> None:
        command = [sys.executable, "-c", HOLD, str(folder), how]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def ends(self) -> None:
        self.process.communicate("\n", timeout=600)

    def is_killed(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def hold() -> Iterator[Callable[[Path, str], Holder]]:
    started: list[Holder] = []

    def start(folder: Path, how: str) -> Holder:
        started.append(Holder(folder, how))
        return started[-1]

    yield start
    for holder in started:
        holder.is_killed()


Start = Callable[[Path, str], Holder]


def test_readers_share(tmp_path: Path, hold: Start) -> None:
    assert hold(tmp_path, "shared").said == "in"
    assert hold(tmp_path, "shared").said == "in"
    shared(tmp_path, FolderKind.SOURCE).close()
    assert contents(tmp_path) == {}


def test_exclusive_lock_excludes_others(tmp_path: Path, hold: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: 1_800_000_000.0)
    first = hold(tmp_path, "exclusive")
    assert first.said == "in"
    for lock in (shared, exclusive):
        with pytest.raises(InUseError) as refused:
            lock(tmp_path, FolderKind.SOURCE)
        begin, _, ending = refused.value.problem.partition(", which runs since ")
        assert begin == f"{tmp_path} is being split by process {first.process.pid} on {socket.gethostname()}"
        since, _, end = ending.partition(", which")
        assert since == f"{datetime.fromtimestamp(1_800_000_000):%Y-%m-%d %H:%M}"
        assert end == " deletes its shards."
        assert "Nothing was changed" in refused.value.remedy
    first.ends()
    exclusive(tmp_path, FolderKind.SOURCE).close()


def test_error_names_the_readers(tmp_path: Path, hold: Start) -> None:
    readers = [hold(tmp_path, "shared") for _ in range(4)]
    with pytest.raises(InUseError, match=r"is in use by process \d+ on .* and 1 more; this call would") as refused:
        exclusive(tmp_path, FolderKind.SPLIT)
    named = {int(pid) for pid in re.findall(r"process (\d+) on", refused.value.problem)}
    assert named < {reader.process.pid for reader in readers}
    assert len(named) == 3
    assert "replace or remove its layer files" in refused.value.problem
    for reader in readers:
        reader.is_killed()
    with (
        exclusive(tmp_path, FolderKind.SPLIT),
        pytest.raises(InUseError, match=rf"removed by this process \({os.getpid()}\)"),
    ):
        shared(tmp_path, FolderKind.SPLIT)


def test_kill_releases_the_lock(tmp_path: Path, hold: Start) -> None:
    before = os.listdir(tmp_path)
    hold(tmp_path, "exclusive").is_killed()
    assert os.listdir(tmp_path) == before
    exclusive(tmp_path, FolderKind.SOURCE).close()


def test_lock_ends_with_its_last_reference(tmp_path: Path) -> None:
    class User:
        pass

    hold, user = shared(tmp_path, FolderKind.SOURCE), User()
    with hold:
        hold.keep_for(user)
    del hold
    gc.collect()
    with pytest.raises(InUseError, match="this process"):
        exclusive(tmp_path, FolderKind.SOURCE)
    del user
    gc.collect()
    forgotten = [exclusive(tmp_path, FolderKind.SOURCE)]
    with pytest.raises(InUseError):
        shared(tmp_path, FolderKind.SOURCE)
    forgotten.clear()
    gc.collect()
    shared(tmp_path, FolderKind.SOURCE).close()


def test_context_closes_its_lock(tmp_path: Path) -> None:
    with pytest.raises(KeyError), exclusive(tmp_path, FolderKind.SOURCE):
        raise KeyError
    exclusive(tmp_path, FolderKind.SOURCE).close()


def test_ended_fork_does_not_release_the_lock(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from rabbitllm.storage import folder_lock
hold = folder_lock.exclusive(Path({str(tmp_path)!r}), folder_lock.FolderKind.SOURCE)
child = os.fork()
if not child:
    hold.close()
    sys.exit()  # with all that Python does at its end
os.waitpid(child, 0)
print("in", flush=True)
sys.stdin.readline()
hold.close()
print("out", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    with pytest.raises(InUseError):
        shared(tmp_path, FolderKind.SOURCE)
    assert process.communicate("\n", timeout=600)[0] == "out\n"


def test_missing_folder_is_not_locked(tmp_path: Path) -> None:
    shared(tmp_path / "nowhere", FolderKind.SOURCE).close()
    (tmp_path / "file").touch()
    exclusive(tmp_path / "file", FolderKind.SOURCE).close()


def test_a_read_only_folder(tmp_path: Path, hold: Start) -> None:
    with small_disk(tmp_path / "disk", MIB) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk.path)], check=True)
        assert hold(disk.path, "shared").said == "in"
        with pytest.raises(InUseError, match="is in use by process"):
            exclusive(disk.path, FolderKind.SOURCE)


def test_process_is_named_on_btrfs(tmp_path: Path, hold: Start) -> None:
    """On btrfs `stat` and /proc/locks show different devices."""
    with formatted_disk(tmp_path / "disk", "btrfs", 200 * MIB) as disk:
        folder = disk.path / "model"
        folder.mkdir()
        holder = hold(folder, "shared")
        with pytest.raises(InUseError, match=f"is in use by process {holder.process.pid} on"):
            exclusive(folder, FolderKind.SOURCE)
        holder.ends()


@pytest.mark.parametrize("code", NO_LOCKS)
def test_a_file_system_without_locks(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is available here, so its answer replaces the real one."""
    monkeypatch.setattr(fcntl, "flock", _answering(code))
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    with exclusive(tmp_path, FolderKind.SOURCE):
        assert list(contents(tmp_path)) == [FOLDER_LEASE]
        shared(tmp_path, FolderKind.SOURCE).close()
        exclusive(tmp_path, FolderKind.SPLIT).close()  # in the lock of the split directory
        with pytest.raises(InUseError, match=rf"{tmp_path} is in use by process {os.getpid()} on .*; this call would"):
            exclusive(tmp_path, FolderKind.SOURCE)
    assert contents(tmp_path) == {}
    forgotten = [exclusive(tmp_path, FolderKind.SOURCE)]
    forgotten.clear()
    gc.collect()
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_file_system_that_fails_to_lock(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", _answering(code))
    with pytest.raises(SplitError, match=f"{tmp_path} cannot be locked: {os.strerror(code)}") as error:
        shared(tmp_path, FolderKind.SOURCE)
    assert not isinstance(error.value, InUseError)


def _answering(code: int) -> Callable[[int, int], None]:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    return flock
