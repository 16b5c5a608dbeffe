"""A disk of a chosen size, in memory: a tmpfs of its own, which is really full when it is full.

    with small_disk(tmp_path / "disk", 64 << 20) as disk:
        disk.leave(1 << 20)     # other files take all but so much
        disk.give_back()

Needs Linux and the right to mount: root, or a namespace of one's own (`unshare -rm`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NAMESPACE = ("unshare", "--map-root-user", "--mount")
"""Runs a command where it may mount, without being root."""


class SmallDisk:
    """A mounted disk, and a file that takes space on it as other files would."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._other = path / "other files"

    @property
    def free(self) -> int:
        """Bytes."""
        return shutil.disk_usage(self.path).free

    def leave(self, nbytes: int) -> None:
        """Take space until no more than this is free; less, by up to a page, since files occupy whole ones."""
        self.give_back()
        if (taken := self.free - nbytes) > 0:
            with self._other.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, taken)

    def give_back(self) -> None:
        self._other.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(path: Path, nbytes: int) -> Iterator[SmallDisk]:
    """Mount a disk of this size; skips the test where that is not allowed."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    path.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(path))
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "--lazy", str(path))  # a failed test may have left something open


@contextlib.contextmanager
def formatted_disk(path: Path, file_system: str, nbytes: int) -> Iterator[SmallDisk]:
    """Mount a file of this size as a disk with a file system of this kind (xfs, btrfs); or skip the test."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    if shutil.which(f"mkfs.{file_system}") is None:
        pytest.skip(f"there is no mkfs.{file_system}")
    path.mkdir(parents=True)
    image = path.with_name(f"{path.name}.image")
    with image.open("wb") as file:
        file.truncate(nbytes)
    _run(f"mkfs.{file_system}", "-q", str(image))
    tried = subprocess.run(["mount", "-o", "loop", str(image), str(path)], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no {file_system} may be mounted here ({tried.stderr.strip()})")
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "--lazy", str(path))
        image.unlink()


@functools.cache
def why_not() -> str | None:
    """Why no disk can be mounted by this process, in words; None if one can."""
    if sys.platform != "linux":
        return "a small disk is mounted as Linux does it"
    if shutil.which("mount") is None:
        return "there is no mount command"
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            _run("umount", folder)
            return None
    return (
        f"no disk may be mounted here ({tried.stderr.splitlines()[0]}); run as root, or: {' '.join(NAMESPACE)} pytest"
    )


def namespace_works() -> bool:
    """Whether this process can start another one that may mount."""
    if shutil.which(NAMESPACE[0]) is None:
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
