"""Folders and their disks, hosts that publish limits which free space does not show, and bytes that a deletion frees.

Queries the system; changes nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.base.terminal import size
from rabbitllm.errors import NotEnoughSpaceException

GB = 1000**3
_LATER_BYTES = 1 << 20
"""Allowance for folders, small files and padding to whole blocks."""
KAGGLE_BYTES = 54 * GB
"""Disk for a split on Kaggle: users report disks of 57 to 73 GB, and installed packages take some of it."""
KAGGLE_TMP, KAGGLE_WORKING = Path("/kaggle/tmp"), Path("/kaggle/working")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that is used, and its disk.

    Attributes:
        uses: its uses.
        path: the path, which may not exist yet.
        writable: whether files can be created there, or the folder itself.
        filesystem: type of the file system, as named by the system.
        disk: equal for folders on the same disk.
        total, free: bytes of the disk; a container's quota does not show in them.
        quota: bytes that a known host allows in it.
    """

    uses: tuple[str, ...]
    path: Path
    writable: bool
    filesystem: str | None
    disk: int
    total: int
    free: int
    quota: int | None = None

    @property
    def in_memory(self) -> bool:
        """Whether files there take memory."""
        return self.filesystem in ("tmpfs", "ramfs")

    @property
    def room(self) -> int:
        """Bytes that may be written there, as far as that is known."""
        return self.free if self.quota is None else min(self.free, self.quota)


@dataclass(frozen=True, slots=True)
class Host:
    """A host with published limits: its name, and hints about it."""

    name: str
    hints: tuple[str, ...]
    quotas: Mapping[str, int]


_KAGGLE = Host(
    "Kaggle",
    (
        "/kaggle/working is kept as the notebook's output and holds 20 GB at most; free space there is the host's",
        f"layers belong into /kaggle/tmp; set max_disk='{KAGGLE_BYTES // GB}GB', since the quota of the whole does "
        "not show either",
        "downloads need Internet on in the notebook's settings, which needs a verified phone number",
    ),
    {str(KAGGLE_WORKING): 20 * GB},
)
_COLAB = Host(
    "Colab",
    (
        "the disk is deleted with the session; /content/drive is slow and has Google Drive's quota",
        "resources differ by session; free ones have about 13 GB of RAM",
    ),
    {},
)
_SPACES = Host("Hugging Face Spaces", ("50 GB of disk on free hardware, deleted at a restart; 16 GB of RAM",), {})
_ACTIONS = Host("GitHub Actions", ("14 GB of disk are promised on standard runners, though more may show",), {})
_CODESPACES = Host("GitHub Codespaces", ("32 GB of disk on the smallest machine; /tmp is another, larger disk",), {})
_HOSTS: Iterable[tuple[str, Host]] = (
    ("KAGGLE_KERNEL_RUN_TYPE", _KAGGLE),
    ("KAGGLE_URL_BASE", _KAGGLE),
    ("COLAB_RELEASE_TAG", _COLAB),
    ("COLAB_GPU", _COLAB),
    ("SPACE_ID", _SPACES),
    ("CODESPACES", _CODESPACES),
    ("GITHUB_ACTIONS", _ACTIONS),
)
"""Environment variable -> the host that sets it. Limits as published: kaggle.com/docs/notebooks,
research.google.com/colaboratory/faq.html, huggingface.co/docs/hub/spaces-overview, docs.github.com (runners,
codespaces).
"""
_CONTAINER = Host(
    "a container", ("free space is the host's, without the container's quota; limit splits with max_disk",), {}
)


def host_of(environment: Mapping[str, str], root: Path = Path("/")) -> Host | None:
    """Return the host of this process; None for an ordinary machine."""
    host = next((host for variable, host in _HOSTS if environment.get(variable)), None)
    if host is None and (
        (root / ".dockerenv").exists()
        or (root / "run/.containerenv").exists()
        or environment.get("KUBERNETES_SERVICE_HOST")
    ):
        return _CONTAINER
    return host


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent, which is on the same disk."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def require_room(
    path: Path, nbytes: int, writing: str, *, reusable: int = 0, max_disk: int | None = None, min_free: int = 0
) -> None:
    """Refuse to write files that the disk has no room for.

    Args:
        path: where they will be; it may not exist yet.
        nbytes: of all files.
        writing: names the work at the start of the message.
        reusable: bytes that the work frees first.
        max_disk: limit of the bytes to write; None for the free ones.
        min_free: bytes that must stay free.

    Raises:
        NotEnoughSpaceException: there is less room; nothing was written.
    """
    location = existing(path.absolute())
    need = nbytes + _LATER_BYTES
    free = shutil.disk_usage(location).free + reusable
    have = free - min_free
    reserve = f", of which {size(min_free)} must stay free (min_free_disk)" if min_free else ""
    room = f"{size(free)} are free on the disk of {location}{reserve}"
    if max_disk is not None and max_disk < have:
        have, room = max_disk, f"{size(max_disk)} are allowed by max_disk"
    if need > have:
        raise NotEnoughSpaceException(
            f"{writing} needs {size(need)} of disk; {room}.",
            f"Free {size(need - have)}, or use another disk. Nothing was written.",
        )


def folder_at(path: Path) -> Folder:
    """Return the properties of one folder."""
    return folder_of((), path.expanduser().absolute(), file_systems(), host_of(os.environ))


def folder_of(uses: tuple[str, ...], path: Path, kinds: Mapping[Path, str], host: Host | None) -> Folder:
    """Return the properties of one folder, on one of the file systems `kinds`, used for `uses`."""
    location = existing(path)
    usage = shutil.disk_usage(location)
    real = location.resolve()
    file_system = next((kinds[path] for path in (real, *real.parents) if path in kinds), None)
    quotas = host.quotas.items() if host else ()
    quota = next((nbytes for inside, nbytes in quotas if real.is_relative_to(inside)), None)
    writable = location.is_dir() and os.access(location, os.W_OK | os.X_OK)
    return Folder(uses, path, writable, file_system, location.stat().st_dev, usage.total, usage.free, quota)


def file_systems() -> dict[Path, str]:
    """Return mount point -> type of its file system; the last mounted is on top."""
    import psutil

    try:
        return {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    except OSError:
        return {}


STAT_BLOCK_BYTES = 512
"""The unit of `st_blocks`, independent of the block size of the file system."""

# https://docs.kernel.org/filesystems/fiemap.html
_FS_IOC_FIEMAP = 0xC020660B
_REQUEST = struct.Struct("=QQLLLL")
"""fm_start, fm_length, fm_flags, fm_mapped_extents, fm_extent_count, reserved."""
_EXTENT = struct.Struct("=QQQQQLLLL")
"""fe_logical, fe_physical, fe_length, two reserved, fe_flags, three reserved."""
_EXTENTS_A_CALL = 256
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS)
_LAST = 0x1
_ENCODED = 0x8
"""Compressed or encrypted: the length on the disk is unknown."""
_SHARED = 0x2000


def bytes_freed_by_deleting(path: Path, device: int) -> int:
    """Bytes that the deletion of this directory entry frees; 0 for a link, and if unknown.

    Args:
        path: the directory entry; links are not followed.
        device: the disk as `st_dev`; a file on another disk frees nothing there.
    """
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_dev != device or status.st_nlink != 1:
            return 0
        if not _may_delete(status, path.parent.stat()):
            return 0
        return max(allocated(status) - _shared_bytes(path), 0)
    except OSError:
        return 0


def _may_delete(status: os.stat_result, folder: os.stat_result) -> bool:
    """Whether this user may delete a file in a folder for writing; in a sticky one that is its owner alone."""
    if sys.platform == "win32" or not folder.st_mode & stat.S_ISVTX:
        return True
    return os.geteuid() in (0, status.st_uid, folder.st_uid)


def allocated(status: os.stat_result) -> int:
    """Bytes that a file occupies on its disk, without holes; on Windows its length."""
    if sys.platform == "win32":
        return status.st_size
    return status.st_blocks * STAT_BLOCK_BYTES


def _shared_bytes(path: Path) -> int:
    """Bytes in extents that other files share (reflinks, snapshots), or whose length on the disk is unknown.

    Raises:
        OSError: the file cannot be opened, or the query failed.
    """
    if sys.platform != "linux":
        return 0
    import fcntl

    shared = start = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        while True:
            answer = bytearray(_REQUEST.size + _EXTENTS_A_CALL * _EXTENT.size)
            _REQUEST.pack_into(answer, 0, start, 2**64 - 1 - start, 0, 0, _EXTENTS_A_CALL, 0)
            try:
                fcntl.ioctl(descriptor, _FS_IOC_FIEMAP, answer)
            except OSError as error:
                if error.errno in _NOT_SUPPORTED:  # file systems with shared extents (xfs, btrfs) support the query
                    return 0
                raise
            count = _REQUEST.unpack_from(answer)[3]
            for index in range(count):
                offset, _, length, _, _, flags, *_ = _EXTENT.unpack_from(answer, _REQUEST.size + index * _EXTENT.size)
                shared += length if flags & (_SHARED | _ENCODED) else 0
                start = offset + length
                if flags & _LAST:
                    return shared
            if not count:
                return shared
    finally:
        os.close(descriptor)
