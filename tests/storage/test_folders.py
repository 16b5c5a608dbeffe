"""What a disk gets back when a name is deleted: told beforehand on real file systems, and compared with what it got."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rabbitllm.storage.folders import bytes_freed_by_deleting
from tests.support.small_disk import formatted_disk, small_disk

MIB = 1 << 20


def written(path: Path, nbytes: int = MIB) -> Path:
    """A file whose bytes are on the disk, where a sparse or a compressed one would not be."""
    path.write_bytes(os.urandom(nbytes))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def device(path: Path) -> int:
    return path.stat().st_dev


def test_a_file_of_one_name_gives_back_its_blocks(tmp_path: Path) -> None:
    file = written(tmp_path / "shard", MIB + 1)
    assert bytes_freed_by_deleting(file, device(tmp_path)) == file.stat().st_blocks * 512 >= MIB + 1


def test_a_hard_link_gives_nothing_back(tmp_path: Path) -> None:
    file = written(tmp_path / "shard")
    os.link(file, tmp_path / "kept")
    assert bytes_freed_by_deleting(file, device(tmp_path)) == 0
    (tmp_path / "kept").unlink()
    assert bytes_freed_by_deleting(file, device(tmp_path)) >= MIB


def test_a_link_gives_nothing_back(tmp_path: Path) -> None:
    written(tmp_path / "shard")
    (tmp_path / "link").symlink_to("shard")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("link", "dangling", "absent", "."):
        assert bytes_freed_by_deleting(tmp_path / name, device(tmp_path)) == 0


def test_holes_give_nothing_back(tmp_path: Path) -> None:
    file = tmp_path / "shard"
    with file.open("wb") as opened:
        opened.truncate(64 * MIB)
        opened.seek(32 * MIB)
        opened.write(os.urandom(MIB))
    assert MIB <= bytes_freed_by_deleting(file, device(tmp_path)) < 2 * MIB


def test_another_disk_gets_nothing_back(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        file = written(disk.path / "shard")
        assert bytes_freed_by_deleting(file, device(tmp_path)) == 0
        before = disk.free
        told = bytes_freed_by_deleting(file, device(disk.path))
        file.unlink()
        assert disk.free - before == told == MIB


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_shared_extents_give_nothing_back(tmp_path: Path, kind: str) -> None:
    with formatted_disk(tmp_path / "disk", kind, 400 * MIB) as disk:
        file = written(disk.path / "shard", 8 * MIB)
        at = device(disk.path)
        assert bytes_freed_by_deleting(file, at) >= 8 * MIB
        subprocess.run(["cp", "--reflink=always", str(file), str(disk.path / "kept")], check=True)
        assert bytes_freed_by_deleting(file, at) < MIB
        with (disk.path / "kept").open("r+b") as kept:  # half of it is the shard's alone again
            kept.write(os.urandom(4 * MIB))
            os.fsync(kept.fileno())
        assert bytes_freed_by_deleting(file, at) < 5 * MIB
        if kind == "xfs":  # btrfs keeps an extent as long as any part of it is in use
            assert bytes_freed_by_deleting(file, at) > 3 * MIB


def test_many_extents_are_all_asked_for(tmp_path: Path) -> None:
    """More than one answer holds, each shared or not."""
    with formatted_disk(tmp_path / "disk", "xfs", 400 * MIB) as disk:
        file = disk.path / "shard"
        block = 4096
        with file.open("wb") as opened:
            for number in range(600):  # every other block is a hole, so none of them joins another
                opened.seek(2 * number * block)
                opened.write(os.urandom(block))
            os.fsync(opened.fileno())
        at = device(disk.path)
        own = bytes_freed_by_deleting(file, at)
        assert own >= 600 * block
        subprocess.run(["cp", "--reflink=always", str(file), str(disk.path / "kept")], check=True)
        assert bytes_freed_by_deleting(file, at) <= own - 600 * block


def test_a_file_system_that_does_not_tell_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "shard")
    monkeypatch.setattr(fcntl, "ioctl", _fails_with(95))
    assert bytes_freed_by_deleting(file, device(tmp_path)) >= MIB
    monkeypatch.setattr(fcntl, "ioctl", _fails_with(5))
    assert bytes_freed_by_deleting(file, device(tmp_path)) == 0


def _fails_with(code: int) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_copy_gives_back_its_own(tmp_path: Path) -> None:
    file = written(tmp_path / "shard")
    shutil.copyfile(file, tmp_path / "copy")
    assert bytes_freed_by_deleting(file, device(tmp_path)) >= MIB
