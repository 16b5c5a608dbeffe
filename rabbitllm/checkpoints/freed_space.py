"""Bytes that the deletion of a file frees on a disk, for a plan that relies on them. Deletes nothing.

A file on another disk, a hard link, a symbolic link, a hole and an extent shared with a copy free nothing. If the
system gives no answer, the result is 0: too small a result refuses a split, too large a result fills the disk.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
from pathlib import Path

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
        if sys.platform == "win32":
            return status.st_size
        return max(status.st_blocks * STAT_BLOCK_BYTES - _shared_bytes(path), 0)
    except OSError:
        return 0


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
            for number in range(count):
                offset, _, length, _, _, flags, *_ = _EXTENT.unpack_from(answer, _REQUEST.size + number * _EXTENT.size)
                shared += length if flags & (_SHARED | _ENCODED) else 0
                start = offset + length
                if flags & _LAST:
                    return shared
            if not count:
                return shared
    finally:
        os.close(descriptor)
