"""How many bytes of a disk are free again when a file is deleted; asked before a plan counts on them. Deletes nothing.

A file may be on another disk, have a second name, be a link, have holes, or share its blocks with a copy. Where the
system does not tell, nothing is counted: too little refuses a split, too much lets one run out of disk on its way.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
from pathlib import Path

BLOCK_UNIT = 512
"""Bytes of a block in `st_blocks`, whatever the file system's own are."""

# https://docs.kernel.org/filesystems/fiemap.html
_FS_IOC_FIEMAP = 0xC020660B
_REQUEST = struct.Struct("=QQLLLL")
"""Start, length, flags; extents that came back, room for so many, and nothing."""
_EXTENT = struct.Struct("=QQQQQLLLL")
"""Offset in the file, on the disk, length; twice nothing; flags; three times nothing."""
_AT_A_TIME = 256
_LAST = 0x1
_ENCODED = 0x8
"""Compressed, for one: how long it is on the disk is not said."""
_SHARED = 0x2000


def given_back(path: Path, device: int) -> int:
    """Bytes that become free on a disk when this name is deleted; 0 where none do, or nobody can tell.

    Args:
        path: of the name itself; a link gives nothing back.
        device: of the disk, as `st_dev`.
    """
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_dev != device or status.st_nlink != 1:
            return 0
        if not hasattr(status, "st_blocks"):  # Windows
            return status.st_size
        return max(status.st_blocks * BLOCK_UNIT - _shared_bytes(path), 0)
    except OSError:
        return 0


def _shared_bytes(path: Path) -> int:
    """Bytes of a file that others have too (reflinks, snapshots of the disk), or whose place is not said.

    Raises:
        OSError: the file cannot be opened or asked.
    """
    if sys.platform != "linux":
        return 0
    import fcntl

    shared = start = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        while True:
            answer = bytearray(_REQUEST.size + _AT_A_TIME * _EXTENT.size)
            _REQUEST.pack_into(answer, 0, start, 2**64 - 1 - start, 0, 0, _AT_A_TIME, 0)
            try:
                fcntl.ioctl(descriptor, _FS_IOC_FIEMAP, answer)
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS):
                    return 0  # no file system of this kind shares blocks (tmpfs), or it does not tell
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
