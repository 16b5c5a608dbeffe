"""torch's own threads, asked to run a compiled function."""

from __future__ import annotations

import os
import platform
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba import types

from rabbitllm.base import openmp, parts
from rabbitllm.base.compiling import atomic_add, pause, shared
from rabbitllm.base.forks import DaemonThread
from rabbitllm.base.openmp import torchs_team
from rabbitllm.quant import _kernels
from rabbitllm.quant._vectors import lanes
from rabbitllm.quant.products import Matrix
from tests.quant.test_products import inputs, matrix
from tests.support.forked import in_a_fork
from tests.support.fresh_process import python
from tests.support.integer_products import width_of

pytestmark = pytest.mark.skipif(torchs_team() is None, reason="torch has no libgomp here")


@numba.cfunc(types.void(types.CPointer(types.int64), types.int64, types.int64, types.int64))
def mark(data, first, end, parts):  # type: ignore[no-untyped-def]
    """Counts how often each part is computed, and those that are not parts of so many."""
    words = numba.carray(data, 40)
    for part in range(first, end):
        words[1 + part if parts == words[0] else 39] += 1


def assert_each_once(team: openmp.Team, threads: int) -> None:
    data, parts = np.zeros(40, np.int64), threads * openmp.PARTS
    data[0] = parts
    team.run(mark.address, data.ctypes.data, threads)
    assert data[1:].tolist() == [1] * parts + [0] * (39 - parts)


@pytest.fixture(autouse=True)
def no_second_team() -> None:
    """A busy machine leaves that of an earlier test, which keeps the helpers."""
    waiting: Any = openmp.look.__self__  # type: ignore[attr-defined]
    if waiting._over is not None:
        waiting._over.set()
        waiting._over = None
    for holder in _holders():
        holder.join(600)


@pytest.fixture
def team() -> openmp.Team:
    team = torchs_team()
    assert team is not None
    return team


@pytest.fixture(params=[0, 1, 3])
def helped(request: pytest.FixtureRequest, team: openmp.Team) -> Iterator[openmp.Team]:
    """With helpers, or told to have some of which none comes."""
    team.start_helpers(request.param)
    yield team
    team.end_helpers()


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp")
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_each_part_is_computed_once(threads: int, team: openmp.Team) -> None:
    for _ in range(50):
        torch.randn(4, 200_000).exp()  # so that the team has just been at work
        assert_each_once(team, threads)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_helpers_compute_each_part_once(threads: int, helped: openmp.Team) -> None:
    """Also for two callers, of whom one has the helpers, and after the helpers have fallen asleep."""

    def calls() -> None:
        for count in range(2000):
            assert_each_once(helped, threads)
            if count % 200 == 0:
                time.sleep(0.002)

    with ThreadPoolExecutor(2) as callers:
        for done in [callers.submit(calls) for _ in range(2)]:
            done.result(600)


@numba.cfunc(types.void(types.CPointer(types.int64), types.int64, types.int64, types.int64))
def meet(data, first, end, parts):  # type: ignore[no-untyped-def]
    """Waits for another thread, some seconds: own address, threads that came, and whether none came in time."""
    words = numba.carray(data, 3)
    atomic_add(words[0] + 8, 1)
    for _ in range(200_000_000):
        if shared(words[0] + 8) > 1:
            return
        pause(0)
    words[2] = 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="no helpers")
def test_a_helper_that_sleeps_is_woken(team: openmp.Team) -> None:
    team.start_helpers(1)
    try:
        for _ in range(3):
            limit = time.monotonic() + 600
            while not team.words[parts.ASLEEP]:
                assert time.monotonic() < limit
            data = np.zeros(3, np.int64)
            data[0] = data.ctypes.data
            team.run(meet.address, data.ctypes.data, 2)
            assert data[2] == 0
    finally:
        team.end_helpers()
    assert not [thread for thread in threading.enumerate() if thread.name == "helper"]
    assert_each_once(team, 2)


@pytest.mark.skipif(not lanes(), reason="no vectors of a kind that is used here")
def test_products_have_the_same_bits_with_helpers(helped: openmp.Team, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for least in (1 << 40, 1 << 10):
        monkeypatch.setattr(_kernels, "WORTH_A_THREAD", dict.fromkeys(_kernels.WORTH_A_THREAD, least))
        for method, rows in (("codes", 2), ("bytes", 20)):
            product = method, width_of(method, "4bit"), inputs(rows, 1024)
            found.append(Matrix(*matrix("4bit", 777, 1024)).times_by(*product))
    assert all(map(torch.equal, found[:2], found[2:]))


@pytest.mark.skipif(not lanes(), reason="no vectors of a kind that is used here")
@pytest.mark.parametrize("limit", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.long
def test_a_smaller_team_does_all_of_the_work(limit: int) -> None:
    """As where the number of threads is limited: in a process of its own, since libgomp reads that once."""
    code = """
import torch
from rabbitllm.quant import _kernels
from tests.quant.test_products import inputs, matrix
from rabbitllm.base.forks import DaemonThread
from rabbitllm.base.openmp import torchs_team
from rabbitllm.quant.products import Matrix
from tests.support.forked import in_a_fork
from tests.support.integer_products import width_of
_kernels.WORTH_A_THREAD = {"codes": 1 << 10}
torch.set_num_threads(8)
product = "codes", width_of("codes"), inputs(2, 1024)
found = Matrix(*matrix("4bit", 777, 1024)).times_by(*product)
_kernels.WORTH_A_THREAD = {"codes": 1 << 40}
assert torchs_team() is not None
assert torch.equal(found, Matrix(*matrix("4bit", 777, 1024)).times_by(*product))
"""
    environment = os.environ | {"OMP_THREAD_LIMIT": str(limit), "PYTHONPATH": os.pathsep.join(sys.path)}
    python(code, env=environment)


def test_torchs_library_is_found_behind_a_symlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system lists mapped files by their real names."""
    mapped = [line for line in openmp._MAPS.read_text().splitlines() if "/libgomp" in line]
    second = f"{mapped[0].rpartition(' ')[0]} {tmp_path}/libgomp.so.1"
    (tmp_path / "maps").write_text("\n".join([second, *mapped]))
    (tmp_path / "linked").symlink_to(Path(torch.__file__).resolve().parent)
    monkeypatch.setattr(openmp, "_MAPS", tmp_path / "maps")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "linked" / "__init__.py"))
    team_behind_link, team = torchs_team.__wrapped__(), torchs_team()
    assert team_behind_link is not None
    assert team is not None
    assert team_behind_link.library._name == team.library._name


def test_the_team_is_that_of_torch() -> None:
    """No further thread comes to be for it."""
    team = torchs_team()
    assert team is not None
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(4, 200_000).exp()
        alive = _threads_of_this_process()
        assert_each_once(team, 2)
        assert _threads_of_this_process() <= alive  # one of an earlier test may have ended
    finally:
        torch.set_num_threads(before)


def test_a_team_rests_until_its_thread_computes_again(team: openmp.Team) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(4, 200_000).exp()
        alive, limit = _threads_of_this_process(), time.monotonic() + 600
        openmp.rest()
        while _threads_of_this_process() == alive and time.monotonic() < limit:
            time.sleep(0.01)
        assert _threads_of_this_process() == alive - 1
        assert_each_once(team, 2)
        assert _threads_of_this_process() == alive
    finally:
        torch.set_num_threads(before)


def test_a_second_team_while_threads_wait_for_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libgomp's threads wait for microseconds then, since they are more than the processors."""

    def look_after(waited: float) -> list[threading.Thread]:
        (tmp_path / "1" / "schedstat").write_text(f"1000 {round(waited * 1e9)} 1\n")
        time.sleep(0.02)
        waiting.look()
        return [thread for thread in threading.enumerate() if thread.name == "second-team"]

    monkeypatch.setattr(openmp, "_TASKS", tmp_path)
    monkeypatch.setattr(openmp, "_WINDOW_SECONDS", 0.01)
    monkeypatch.setenv("GOMP_SPINCOUNT", openmp.SPINS)
    (tmp_path / "1").mkdir()
    (tmp_path / "ended").mkdir()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(4, 200_000).exp()
        waiting = openmp._Waiting()
        assert look_after(0) == []
        alive = _threads_of_this_process()
        (second,) = look_after(1000)
        assert look_after(2000) == [second]
        limit = time.monotonic() + 600
        while _threads_of_this_process() < alive + 2 and time.monotonic() < limit:
            time.sleep(0.01)
        assert _threads_of_this_process() >= alive + 2
        look_after(2000)
        second.join(600)
        assert look_after(2000) == []
        monkeypatch.setenv("GOMP_SPINCOUNT", "77")
        assert look_after(3000) == []
        torch.set_num_threads(1)
        monkeypatch.setenv("GOMP_SPINCOUNT", openmp.SPINS)
        assert look_after(4000) == []
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="no helpers")
def test_a_team_that_ends_late_leaves_the_next_ones_helpers(team: openmp.Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its thread waits for a core."""
    end, is_ending, may_end = openmp.Team.end_helpers, threading.Event(), threading.Event()

    def late(self: openmp.Team) -> None:
        is_ending.set()
        assert may_end.wait(600)
        end(self)

    monkeypatch.setattr(openmp.Team, "end_helpers", late)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = openmp._second_team()
        assert first is not None
        first.set()
        assert is_ending.wait(600)
        second = openmp._second_team()
        assert second is not None
        time.sleep(0.05)
        may_end.set()
        limit = time.monotonic() + 600
        while len(_helpers()) != 1 or len(_holders()) != 1:
            assert time.monotonic() < limit
            time.sleep(0.001)
        assert team.words[parts.HELPED]
        assert_each_once(team, 2)
        second.set()
        for holder in _holders():
            holder.join(600)
        assert not _helpers()
        assert not team.words[parts.HELPED]
    finally:
        torch.set_num_threads(before)


def test_without_room_for_helpers_the_team_computes(team: openmp.Team, monkeypatch: pytest.MonkeyPatch) -> None:
    start, failed = DaemonThread.start, threading.Event()

    def refused(self: DaemonThread) -> None:
        if self.name == "helper":
            failed.set()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(DaemonThread, "start", refused)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        over = openmp._second_team()
        assert over is not None
        (holder,) = _holders()
        assert failed.wait(600)
        limit = time.monotonic() + 600
        while team.words[parts.HELPED]:
            assert time.monotonic() < limit
            time.sleep(0.001)
        assert holder.is_alive()
        over.set()
        holder.join(600)
        assert not holder.is_alive()
        assert_each_once(team, 2)
    finally:
        torch.set_num_threads(before)


def _holders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "second-team"]


def _helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "helper"]


@numba.cfunc(types.void(types.CPointer(types.int64), types.int64, types.int64, types.int64))
def begin_and_wait(data, first, end, parts):  # type: ignore[no-untyped-def]
    """Counts parts that have begun, and waits: own address, the count, and whether to go on."""
    words = numba.carray(data, 3)
    atomic_add(words[0] + 8, 1)
    while shared(words[0] + 16) == 0:
        pause(0)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="no helpers")
def test_helpers_in_a_fork_compute_nothing_of_the_parent(team: openmp.Team) -> None:
    """A caller in the parent has parts that no thread has begun."""
    data = np.zeros(3, np.int64)
    data[0] = data.ctypes.data
    team.start_helpers(0)
    with ThreadPoolExecutor(1) as caller:
        done = caller.submit(team.run, begin_and_wait.address, data.ctypes.data, 2)
        limit = time.monotonic() + 600
        while data[1] == 0:
            assert time.monotonic() < limit

        def child() -> None:
            team.start_helpers(1)
            limit = time.monotonic() + 600
            while not team.words[parts.ASLEEP] and data[1] == 1:
                assert time.monotonic() < limit
            assert data[1] == 1
            team.end_helpers()

        try:
            in_a_fork(child)
        finally:
            data[2] = 1
            done.result(30)
            team.end_helpers()
    assert data[1] == 2 * openmp.PARTS


def _threads_of_this_process() -> int:
    if sys.platform != "linux":
        return threading.active_count()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


@pytest.mark.skipif(torchs_team() is None, reason="torch has no libgomp")
@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "77"}, {"OMP_WAIT_POLICY": "active"}])
def test_threads_wait_actively_for_a_short_time(given: dict[str, str]) -> None:
    """libgomp says what it read; what the user says is kept."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    environment |= given | {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = python("import rabbitllm, torch", env=environment).stderr
    spins = re.search(r"GOMP_SPINCOUNT = '(\d+)'", shown)
    assert spins is not None
    assert (spins[1] == openmp.SPINS) == (not given)
    assert given.get("GOMP_SPINCOUNT", spins[1]) == spins[1]
