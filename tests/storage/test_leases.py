"""Leases: one holder at a time, also during the takeover of stale ones; a holder that has lost its lease stops."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from rabbitllm.errors import InUseError, SplitError
from rabbitllm.storage import durable, leases
from rabbitllm.storage.leases import FOLDER_LEASE, KeptLease, take
from tests.support.splitting import names_in

ROOT = Path(__file__).parent.parent.parent
RUN = "0123456789abcdef" * 2
LOST = "may be in use by another process now: this one stood still for more than"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(leases, "LATE_SECONDS", math.inf)
    monkeypatch.setattr(leases, "STALE_SECONDS", 0.5)
    return tmp_path / FOLDER_LEASE


@pytest.fixture
def lease(path: Path) -> Iterator[KeptLease]:
    kept = take(path)
    assert kept is not None
    yield kept
    kept.release()


def stale(path: Path, run: str = RUN) -> None:
    """Write the file of a holder that has ended."""
    path.write_text(
        json.dumps({"run": run, "process": "other", "pid": 1 << 30, "host": "node7", "since": "2026-11-25"})
    )


def taken(path: Path) -> KeptLease:
    lease = take(path, lambda: None)
    assert lease is not None
    return lease


def test_held_lease_is_a_file(path: Path, lease: KeptLease) -> None:
    assert names_in(path.parent) == [FOLDER_LEASE]
    assert leases.holder(path).startswith(f"process {os.getpid()} on ")
    lease.check()
    lease.release()
    assert names_in(path.parent) == []
    assert leases.holder(path) == "another process"


def test_a_holder_tells_since_when(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = datetime(2026, 11, 28, 23, 59, 59, tzinfo=UTC)
    monkeypatch.setattr(leases, "datetime", SimpleNamespace(now=lambda: moment, fromisoformat=datetime.fromisoformat))
    path.write_bytes(leases.note())
    since = f"{moment.astimezone():%Y-%m-%d %H:%M}"
    assert leases.described(path) == f"process {os.getpid()} on {socket.gethostname()} since {since}"


def test_living_holder_keeps_its_lease(path: Path, lease: KeptLease, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "STALE_SECONDS", 60.0)
    beats = threading.Timer(0.3, os.utime, [path])
    beats.start()
    assert take(path) is None
    beats.join()
    lease.check()
    assert names_in(path.parent) == [FOLDER_LEASE]


def test_holder_updates_its_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.01)
    held = taken(path)
    before = path.stat().st_mtime_ns
    deadline = time.monotonic() + 600
    while path.stat().st_mtime_ns == before:
        assert time.monotonic() < deadline, "no beat"
        time.sleep(0.01)
    held.release()


@pytest.mark.parametrize("content", ["", "[]", "null", '{"run": 5, "process": ""}', '{"run": "../x", "process": ""}'])
def test_stale_lease_is_taken_over(path: Path, content: str) -> None:
    path.write_text(content)
    held = taken(path)
    held.check()
    held.release()
    assert names_in(path.parent) == []


def test_chain_of_ended_holders_is_taken_over_and_cleared(path: Path) -> None:
    stale(path)
    stale(path.with_name(f"{FOLDER_LEASE}.{RUN}"), RUN[::-1])
    stale(path.with_name(f"{FOLDER_LEASE}.{'f' * 32}"), "e" * 32)  # of a chain that was given back
    path.with_name(f"{FOLDER_LEASE}.x.new").write_text("of a process that was killed while it made a file")
    held = taken(path)
    held.check()
    assert names_in(path.parent) == [FOLDER_LEASE, f"{FOLDER_LEASE}.{RUN}", f"{FOLDER_LEASE}.{RUN[::-1]}"]
    held.release()
    assert names_in(path.parent) == []


def test_circle_of_files_ends(path: Path) -> None:
    stale(path)
    stale(path.with_name(f"{FOLDER_LEASE}.{RUN}"))
    with pytest.raises(InUseError, match=LOST):
        KeptLease(path, path, "f" * 32, str(path.parent)).check()
    durable._guards.clear()


def test_link_is_not_followed(path: Path) -> None:
    (path.parent / "other").write_text("kept")
    path.symlink_to("other")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        take(path)


CONTEST = """
import os, random, sys, time
from pathlib import Path
from rabbitllm.storage import leases
from tests.support.without_flock import count_looks
path, seed = Path(sys.argv[1]), int(sys.argv[2])
count_looks()
leases.POLL_SECONDS = 0.001
chance = random.Random(seed)
for number in range(4):
    lease = leases.take(path, lambda: None)
    with open(path.parent / "held", "a") as file:
        file.write(f"{seed} takes it\\n")
        file.flush()
        time.sleep(chance.random() * 0.05)
        lease.check()
        file.write(f"{seed} gives it\\n")
    if number == 3 and seed % 2:
        os._exit(9)  # without giving it back
    lease.release()
"""


def test_only_one_process_takes_over(path: Path) -> None:
    """Six processes, of which three end without a release; the others see that at the same moment."""
    stale(path)
    command = [sys.executable, "-c", CONTEST, str(path)]
    processes = [subprocess.Popen([*command, str(seed)], cwd=ROOT, stderr=subprocess.PIPE) for seed in range(6)]
    outputs = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 9, 0, 9, 0, 9], outputs
    lines = (path.parent / "held").read_text().split("\n")[:-1]
    assert len(lines) == 48
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert (begin.split()[1], end.split()) == ("takes", [begin.split()[0], "gives", "it"]), lines


def test_late_creation_does_not_take_over_a_released_lease(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process sees a stale file, and creates its successor after others have taken the lease over and released it."""
    stale(path)
    create = durable.create_scratch
    other_leases: list[KeptLease] = []

    def later(file_path: Path, data: bytes) -> None:
        if not other_leases:
            monkeypatch.setattr(durable, "create_scratch", create)
            path.unlink()
            other_leases.append(taken(path))
        create(file_path, data)

    monkeypatch.setattr(durable, "create_scratch", later)
    waits: list[bool] = []

    def waiting() -> None:
        if not waits:
            waits.append(True)
            return
        if other_leases:
            other_leases[0].check()
            assert names_in(path.parent) == [FOLDER_LEASE]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take(path, waiting)
    other_leases[0].check()
    other_leases[0].release()


def test_lost_answer_of_the_file_server(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS repeats a request, and gets the answer that the file exists, because of the first one."""
    link = os.link

    def repeated(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", repeated)
    held = take(path)
    assert held is not None
    held.release()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_system_without_hard_links(path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(SplitError, match="has neither locks nor hard links, so that two processes"):
        take(path)
    assert names_in(path.parent) == []


def test_full_disk_is_not_a_missing_feature(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        take(path)


# A lease that is lost


def test_steps_below_the_folder_are_refused_once_another_process_holds_it(path: Path, lease: KeptLease) -> None:
    run = json.loads(path.read_bytes())["run"]
    shard = path.parent / "shard"
    shard.write_text("kept")
    stale(path.with_name(f"{FOLDER_LEASE}.{run}"))
    for step in (durable.remove, durable.touch, lambda shard: durable.write_whole(shard, b"")):
        with pytest.raises(InUseError, match=LOST):
            step(shard)
    with pytest.raises(InUseError, match=LOST):
        durable.rename(shard, path.parent / "other")
    lease.release()
    assert shard.read_text() == "kept"
    assert names_in(path.parent) == [FOLDER_LEASE, f"{FOLDER_LEASE}.{run}", "shard"]
    durable.remove(shard)


def test_steps_below_the_folder_are_refused_once_the_file_is_missing(path: Path, lease: KeptLease) -> None:
    path.unlink()
    with pytest.raises(InUseError, match=f"or {FOLDER_LEASE} was removed"):
        durable.touch(path.parent / "x")


def test_steps_elsewhere_are_allowed(path: Path, lease: KeptLease, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    path.unlink()
    durable.write_whole(other / "file", b"content")
    (other / "link").symlink_to(path.parent)
    with pytest.raises(InUseError, match=LOST):
        durable.touch(other / "link" / "file")


STOPPED = """
import os, signal, sys, threading
from pathlib import Path
from rabbitllm.storage import durable, leases
leases.BEAT_SECONDS, leases.LATE_SECONDS = 0.05, 1.0
path = Path(sys.argv[1])
lease = leases.take(path)
print("in", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
durable.remove(path.parent / "shard")
"""


def test_suspended_holder_stops_without_another_process(path: Path) -> None:
    """Another process may take over at any moment, since the lease is stale."""
    (path.parent / "shard").write_text("kept")
    command = [sys.executable, "-c", STOPPED, str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    output = process.communicate(timeout=600)[1]
    assert LOST in output, output
    assert (path.parent / "shard").read_text() == "kept"


def test_forked_child_does_not_release_the_lease(path: Path, lease: KeptLease) -> None:
    child = os.fork()
    if not child:
        lease.release()
        os._exit(0)
    os.waitpid(child, 0)
    lease.check()
