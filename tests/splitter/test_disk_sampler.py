"""The sampler of memory and disk, with real files, real memory and the real free disk."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rabbitllm.base.terminal import size
from rabbitllm.errors import DiskFullError, SplitError
from rabbitllm.splitter import disk_sampler
from rabbitllm.splitter.disk_sampler import DISK_SHARE, DiskSampler, disk_bytes
from tests.support.fresh_process import in_a_fresh_process

MB = 1 << 20
SHORT = 0.01


def free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def on_disk(folder: Path) -> int:
    """Blocks of everything below a folder, folders and links included."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Free space


def test_enough_free_space(tmp_path: Path) -> None:
    with DiskSampler(tmp_path, free(tmp_path) // 2, SHORT) as watch:
        for _ in range(5):
            watch.check()
            time.sleep(SHORT)
    watch.check()


def test_too_little_free_space_is_reported_at_once(tmp_path: Path) -> None:
    min_free = 2 * free(tmp_path)
    with DiskSampler(tmp_path, min_free, interval=1000) as watch, pytest.raises(DiskFullError) as full:
        watch.check()
    assert isinstance(full.value, SplitError)
    assert watch.min_free_bytes < min_free
    assert full.value.problem.startswith("Only ")  # other processes may free and take some meanwhile
    assert full.value.problem.endswith(
        f" were free at {tmp_path}, less than min_free_disk ({size(min_free)}). "
        "The split stopped; its finished part is kept."
    )
    assert full.value.remedy == ("Free disk space or lower min_free_disk, and make the same call again: it resumes.")


def test_free_space_that_runs_out_during_the_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of 10 MB that only this test writes to."""
    file = tmp_path / "layer.part"
    file.touch()
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: real._replace(free=10 * MB - file.stat().st_size))
    with DiskSampler(tmp_path, 6 * MB, SHORT) as watch:
        os.truncate(file, 4 * MB)
        wait_until(lambda: watch.min_free_bytes == 6 * MB)
        watch.check()
        os.truncate(file, 4 * MB + 1)
        wait_until(lambda: watch.min_free_bytes < 6 * MB)
        with pytest.raises(DiskFullError):
            watch.check()
        os.truncate(file, 0)
        time.sleep(5 * SHORT)
        with pytest.raises(DiskFullError):  # later calls raise it too
            watch.check()


def test_no_limit(tmp_path: Path) -> None:
    with DiskSampler(tmp_path, 0) as watch:
        watch.check()


def test_missing_folder(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where"
    with DiskSampler(folder, 2 * free(tmp_path), SHORT) as watch:
        with pytest.raises(DiskFullError):
            watch.check()
        folder.mkdir(parents=True)
        (folder / "layer").write_bytes(bytes(MB))
    assert watch.max_disk_bytes == on_disk(folder) >= MB


# Peaks


def test_disk_peak_is_the_largest_sample(tmp_path: Path) -> None:
    staged = tmp_path / ".staging" / "shard.part"
    staged.parent.mkdir()
    with DiskSampler(tmp_path, 0, SHORT) as watch:
        (tmp_path / "layer").write_bytes(bytes(3 * MB))
        staged.write_bytes(bytes(5 * MB))
        peak = on_disk(tmp_path)
        wait_until(lambda: watch.max_disk_bytes >= peak)
        staged.unlink()
        wait_until(lambda: disk_bytes(tmp_path) < 4 * MB)
    assert watch.max_disk_bytes == peak


def test_disk_is_counted_in_blocks(tmp_path: Path) -> None:
    (tmp_path / "holes").touch()
    os.truncate(tmp_path / "holes", 50 * MB)
    (tmp_path / "one byte").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "holes")
    (tmp_path / "chat_templates").mkdir()
    (tmp_path / "chat_templates" / "tool.jinja").write_bytes(bytes(10_000))
    assert 12_000 < disk_bytes(tmp_path) == on_disk(tmp_path) < MB


def test_peak_of_memory(tmp_path: Path) -> None:
    in_a_fresh_process(check_peak_of_memory, tmp_path)


def check_peak_of_memory(tmp_path: Path) -> None:
    with DiskSampler(tmp_path, 0, SHORT) as watch:
        block = bytearray(os.urandom(64 * MB))
        wait_until(lambda: watch.anonymous_bytes >= 60 * MB)
        del block
    assert 60 * MB <= watch.anonymous_bytes < 160 * MB  # urandom's own bytes lived at the same time for a moment


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells pages of files from others")
def test_mapped_pages_do_not_count_as_memory(tmp_path: Path) -> None:
    (tmp_path / "layer").write_bytes(os.urandom(64 * MB))
    with (
        DiskSampler(tmp_path, 0, SHORT) as watch,
        (tmp_path / "layer").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert sum(mapped[offset] for offset in range(0, len(mapped), 4096)) > 0
        time.sleep(5 * SHORT)
    assert watch.anonymous_bytes < 32 * MB


def test_memory_counts_from_the_start(tmp_path: Path) -> None:
    before = bytearray(os.urandom(64 * MB))
    with DiskSampler(tmp_path, 0, SHORT) as watch:
        time.sleep(5 * SHORT)
    assert len(before) == 64 * MB
    assert 0 <= watch.anonymous_bytes < 32 * MB


# The thread


def test_thread_ends_with_the_context(tmp_path: Path) -> None:
    def watching() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "watch"]

    before = len(watching())
    with DiskSampler(tmp_path, 0):
        (thread, *_) = watching()[before:]
        assert thread.daemon  # or Ctrl-C might have to wait for it
    assert len(watching()) == before
    with pytest.raises(KeyError), DiskSampler(tmp_path, 0):
        raise KeyError
    assert len(watching()) == before


def test_folder_that_is_removed_meanwhile(tmp_path: Path) -> None:
    folder = tmp_path / "splitted_model"
    for _ in range(2):
        (folder / ".staging").mkdir(parents=True)
        (folder / ".staging" / "x").write_bytes(bytes(MB))
        with DiskSampler(folder, 0, SHORT) as watch:
            shutil.rmtree(folder)
            time.sleep(3 * SHORT)
            folder.mkdir()
            (folder / "layer").write_bytes(bytes(2 * MB))
            wait_until(lambda: watch.max_disk_bytes >= 2 * MB)
        shutil.rmtree(folder)


def test_many_files_are_summed_at_longer_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of time stays small; free space is sampled as often as before."""
    sums: list[float] = []

    def slow(folder: Path) -> int:
        sums.append(time.monotonic())
        end = time.thread_time() + 0.02
        while time.thread_time() < end:  # of a core; what is waited for counts less
            pass
        return 0

    monkeypatch.setattr(disk_sampler, "disk_bytes", slow)
    samples: list[int] = []
    disk_usage = shutil.disk_usage

    def counted(folder: Path) -> object:
        samples.append(1)
        return disk_usage(folder)

    monkeypatch.setattr(shutil, "disk_usage", counted)
    began = time.monotonic()
    with DiskSampler(tmp_path, 0, SHORT):
        wait_until(lambda: len(samples) > 20)
    # at the start and at the end, and in between as often as 0.02 s are the allowed part of the time
    assert 2 <= len(sums) <= 2 + (time.monotonic() - began) * DISK_SHARE / 0.02


@pytest.mark.skipif(sys.platform != "linux", reason="only there memory is read from a file")
def test_sampling_goes_on_without_a_free_descriptor(tmp_path: Path) -> None:
    in_a_fresh_process(check_sampling_without_a_free_descriptor, tmp_path)


def check_sampling_without_a_free_descriptor(tmp_path: Path) -> None:
    import resource

    with DiskSampler(tmp_path, 0, SHORT) as watch:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        with pytest.raises(OSError, match="Too many open files"):
            open("/proc/self/statm").close()
        watch._thread.join(50 * SHORT)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        (tmp_path / "layer").write_bytes(bytes(MB))
        wait_until(lambda: watch.max_disk_bytes >= MB)
