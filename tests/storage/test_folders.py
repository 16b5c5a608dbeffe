"""Bytes that a deletion frees, predicted on real file systems and compared with the free disk afterwards."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rabbitllm.storage.folders import bytes_freed_by_deleting
from tests.support.forked import in_a_fork
from tests.support.small_disk import formatted_disk, small_disk
from tests.support.swift_disk import real_disk  # noqa: F401  a fixture that applies by itself

MIB = 1 << 20


def written(path: Path, nbytes: int = MIB) -> Path:
    """A file whose bytes are on the disk, where a sparse or a compressed one would not be."""
    path.write_bytes(os.urandom(nbytes))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def device(path: Path) -> int:
    return path.stat().st_dev


def test_file_with_one_name_frees_its_blocks(tmp_path: Path) -> None:
    file = written(tmp_path / "shard", MIB + 1)
    assert bytes_freed_by_deleting(file, device(tmp_path)) == file.stat().st_blocks * 512 >= MIB + 1


def test_hard_link_frees_no_space(tmp_path: Path) -> None:
    file = written(tmp_path / "shard")
    os.link(file, tmp_path / "kept")
    assert bytes_freed_by_deleting(file, device(tmp_path)) == 0
    (tmp_path / "kept").unlink()
    assert bytes_freed_by_deleting(file, device(tmp_path)) >= MIB


def test_link_frees_no_space(tmp_path: Path) -> None:
    written(tmp_path / "shard")
    (tmp_path / "link").symlink_to("shard")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("link", "dangling", "absent", "."):
        assert bytes_freed_by_deleting(tmp_path / name, device(tmp_path)) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_file_of_another_user_in_a_sticky_folder_frees_no_space() -> None:
    with tempfile.TemporaryDirectory() as open_to_all:  # pytest's own folders are this user's alone
        folder = Path(open_to_all)
        file = written(folder / "shard")

        def freed_as_another() -> int:
            os.setuid(65534)
            return bytes_freed_by_deleting(file, device(folder))

        folder.chmod(0o777)
        assert in_a_fork(freed_as_another) >= MIB
        folder.chmod(0o1777)
        assert in_a_fork(freed_as_another) == 0
        assert bytes_freed_by_deleting(file, device(folder)) >= MIB


def test_holes_free_no_space(tmp_path: Path) -> None:
    file = tmp_path / "shard"
    with file.open("wb") as opened:
        opened.truncate(64 * MIB)
        opened.seek(32 * MIB)
        opened.write(os.urandom(MIB))
    assert MIB <= bytes_freed_by_deleting(file, device(tmp_path)) < 2 * MIB


def test_file_frees_no_space_on_another_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        file = written(disk.path / "shard")
        assert bytes_freed_by_deleting(file, device(tmp_path)) == 0
        before = disk.free
        freed = bytes_freed_by_deleting(file, device(disk.path))
        file.unlink()
        assert disk.free - before == freed == MIB


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_shared_extents_free_no_space(tmp_path: Path, kind: str) -> None:
    with formatted_disk(tmp_path / "disk", kind, 400 * MIB) as disk:
        file = written(disk.path / "shard", 8 * MIB)
        disk_id = device(disk.path)
        assert bytes_freed_by_deleting(file, disk_id) >= 8 * MIB
        subprocess.run(["cp", "--reflink=always", str(file), str(disk.path / "kept")], check=True)
        assert bytes_freed_by_deleting(file, disk_id) < MIB
        with (disk.path / "kept").open("r+b") as kept:  # half of it is the shard's alone again
            kept.write(os.urandom(4 * MIB))
            os.fsync(kept.fileno())
        assert bytes_freed_by_deleting(file, disk_id) < 5 * MIB
        if kind == "xfs":  # btrfs keeps an extent as long as any part of it is in use
            assert bytes_freed_by_deleting(file, disk_id) > 3 * MIB


def test_all_of_many_extents_are_queried(tmp_path: Path) -> None:
    """There are more extents than one answer of the system holds."""
    with formatted_disk(tmp_path / "disk", "xfs", 400 * MIB) as disk:
        file = disk.path / "shard"
        block = 4096
        with file.open("wb") as opened:
            for index in range(600):  # every other block is a hole, so none of them joins another
                opened.seek(2 * index * block)
                opened.write(os.urandom(block))
            os.fsync(opened.fileno())
        disk_id = device(disk.path)
        freed = bytes_freed_by_deleting(file, disk_id)
        assert freed >= 600 * block
        subprocess.run(["cp", "--reflink=always", str(file), str(disk.path / "kept")], check=True)
        assert bytes_freed_by_deleting(file, disk_id) <= freed - 600 * block


def test_file_system_without_the_query_frees_all_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "shard")
    monkeypatch.setattr(fcntl, "ioctl", _fails_with(95))
    assert bytes_freed_by_deleting(file, device(tmp_path)) >= MIB
    monkeypatch.setattr(fcntl, "ioctl", _fails_with(5))
    assert bytes_freed_by_deleting(file, device(tmp_path)) == 0


def _fails_with(code: int) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_copy_frees_its_blocks(tmp_path: Path) -> None:
    file = written(tmp_path / "shard")
    shutil.copyfile(file, tmp_path / "copy")
    assert bytes_freed_by_deleting(file, device(tmp_path)) >= MIB
