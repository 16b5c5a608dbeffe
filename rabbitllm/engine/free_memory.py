"""Memory that this process may still allocate, the return of freed memory to the system, and a sign of a GPU.

The limit of a container or a notebook is that of a control group, which the free memory of the machine does not show.
Groups are nested, and each may have a limit. Independent of models and of torch.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

_NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2**63 if there is no limit."""


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """A control group around this process that limits its memory.

    Attributes:
        version: of control groups, 1 or 2.
        folder: the folder of its files.
        limit: bytes that all processes in it may use, or above which they are throttled (`memory.high`).
        room: bytes left of the limit.
        mapped: bytes of this process's mapped files that count as used.
    """

    version: int
    folder: Path
    limit: int
    room: int
    mapped: int = 0


@dataclass(frozen=True, slots=True)
class ProcessLimit:
    """A limit of this process itself: its name in getrlimit(2), its bytes, and the bytes left of it."""

    name: str
    limit: int
    room: int


@dataclass(frozen=True, slots=True, eq=False)
class Promise:
    """Memory that counts as free to the system, and that a loaded model will use: others must leave it.

    Attributes:
        mapped: bytes of mapped files.
        unspent: gives, for each device, the bytes that its KV caches may still take.
    """

    mapped: int
    unspent: Callable[[], Mapping[str, int]]


PROMISES: set[Promise] = set()
"""Those of the models of a server that has several."""


def unspent(device: str) -> int:
    """Bytes of a device that are promised to KV caches."""
    return sum(promise.unspent().get(device, 0) for promise in list(PROMISES))


def available_ram() -> int:
    """Bytes that this process may still allocate within the machine, its control groups, and its own limits."""
    import psutil

    mapped = sum(promise.mapped for promise in list(PROMISES))
    rooms = [*(group.room for group in group_limits(mapped=mapped)), *(limit.room for limit in process_limits())]
    return max(min([int(psutil.virtual_memory().available) - mapped, *rooms]) - unspent("cpu"), 0)


def reclaimable_bytes() -> int:
    """Half of this process's mapped files that each of its control groups counts: the system takes them before it ends
    a process, and reads them again. `available_ram` counts them as used."""
    return min((group.mapped for group in group_limits()), default=0) // 2


def last_bytes() -> int:
    """These, and swap: once they are taken, too, the system may end a process. Systems other than Linux do not."""
    return reclaimable_bytes() + swap_bytes() if sys.platform == "linux" else sys.maxsize


def process_limits(root: Path = Path("/")) -> list[ProcessLimit]:
    """RLIMIT_AS and RLIMIT_DATA of this process, if they are set (Linux, getrlimit(2)).

    Files that will be mapped later count towards RLIMIT_AS too; they are not subtracted here.
    """
    if sys.platform != "linux":
        return []
    import resource

    limits = []
    for name, field in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            limits.append(ProcessLimit(name, limit, max(limit - status_bytes(root, field), 0)))
    return limits


def untouched_bytes(memory: memoryview) -> int:
    """Bytes of page-aligned memory that the system has not provided yet: a page counts as used once it is written to.

    Always 0 where the system cannot say (mincore(2), Linux).
    """
    types = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    resident = _function("mincore", *types) if sys.platform == "linux" else None
    if resident is None or not len(memory):
        return 0
    pages = -(-len(memory) // mmap.PAGESIZE)
    states = bytearray(pages)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if resident(start, len(memory), (ctypes.c_ubyte * pages).from_buffer(states)):
        return 0
    return states.count(0) * mmap.PAGESIZE


def group_limits(root: Path = Path("/"), mapped: int = 0) -> list[GroupLimit]:
    """The control groups of this process that have a limit, innermost first (v2 and v1; Linux only).

    The page cache of a group can be reclaimed, except the files that this process maps: its libraries would be read
    from the disk again and again. Mapped files that are charged to another group do not count. Formats: cgroups(7), the
    kernel's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst. `mapped` bytes of files will be in memory at least.
    """
    in_memory = status_bytes(root, "RssFile")  # files of this process that are mapped and in memory
    groups = []
    for folder, limit_name, kinds in _groups(root):
        try:
            limit = (folder / limit_name).read_text().strip()
            high = folder / "memory.high"
            if limit_name == "memory.max" and high.exists():
                limits = (limit, high.read_text().strip())
                limit = min(limits, key=lambda text: int(text) if text.isdigit() else _NO_LIMIT)
            lines = (folder / "memory.stat").read_text().splitlines()
            used = {key: int(nbytes) for key, nbytes in map(str.split, lines)}
        except (OSError, ValueError):
            continue
        if limit.isdigit() and int(limit) < _NO_LIMIT:
            # in version 1 only the fields that begin with total_ include the groups within the group
            kept = sum(used.get(f"total_{field}", used.get(field, 0)) for field in kinds)
            version = 2 if limit_name == "memory.max" else 1
            maps = "file_mapped" if version == 2 else "mapped_file"
            charged = min(in_memory, used.get(f"total_{maps}", used.get(maps, in_memory)))
            room = int(limit) - kept - max(charged, mapped)
            groups.append(GroupLimit(version, folder, int(limit), max(room, 0), charged))
    return groups


def _groups(root: Path) -> Iterator[tuple[Path, str, tuple[str, ...]]]:
    """Folder, the limit's file in it, and the kinds of memory that cannot be reclaimed; innermost groups first."""
    try:
        rows = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        rows = []
    paths = {controllers: path for _, controllers, path in (row.split(":", 2) for row in rows if row.count(":") > 1)}
    v1 = next((path for controllers, path in paths.items() if "memory" in controllers.split(",")), "/")
    for path in _upwards(paths.get("", "/")):
        yield root / "sys/fs/cgroup" / path, "memory.max", ("anon", "shmem")
    for path in _upwards(v1):
        yield root / "sys/fs/cgroup/memory" / path, "memory.limit_in_bytes", ("rss", "shmem")


def _upwards(path: str) -> Iterator[PurePosixPath]:
    """A group's path and its parents, relative to the mount.

    Inside a container the path may be that of the host and not exist; the container's group is then the mount itself.
    """
    group = PurePosixPath(path.lstrip("/"))
    yield group
    yield from group.parents if group != PurePosixPath() else ()


def swap_bytes(root: Path = Path("/")) -> int:
    """Bytes of swap that are free: memory beyond a group's limit may go there. 0 if the system does not say."""
    return status_bytes(root, "SwapFree", "proc/meminfo")


def status_bytes(root: Path, field: str, file: str = "proc/self/status") -> int:
    """A size in bytes, by default of this process (proc_pid_status(5)); 0 if it is not there."""
    kibibytes = proc_fields(root / file).get(field, "").partition(" ")[0]
    return int(kibibytes) << 10 if kibibytes.isdigit() else 0


def proc_fields(file: Path) -> dict[str, str]:
    """The fields of a file of /proc with `name: value` lines; of a name that is repeated the first one."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, sign, value in (line.partition(":") for line in lines[::-1]) if sign}


def has_nvidia_driver() -> bool:
    """Whether NVIDIA's driver is installed; WSL and Windows have its program `nvidia-smi` alone."""
    files = map(Path, ("/proc/driver/nvidia/version", "/dev/nvidiactl"))
    return any(file.exists() for file in files) or shutil.which("nvidia-smi") is not None


# The allocator of glibc

LARGE_BYTES = 1 << 20
"""Minimum size of a block that is mapped separately: the system zeroes its pages in a small part of the time in which a
layer fills them."""
_M_MMAP_THRESHOLD = -3


@functools.cache
def trimming() -> Callable[[], object] | None:
    """A function that returns free memory to the system, in some milliseconds; None without glibc.

    Holes of whole pages are returned too (https://man7.org/linux/man-pages/man3/malloc_trim.3.html).
    """
    trim = _function("malloc_trim", ctypes.c_size_t)
    return None if trim is None else functools.partial(trim, 0)


@functools.cache
def keep_large_apart() -> bool:
    """Map every large block of the process separately from now on; False without glibc."""
    option = _function("mallopt", ctypes.c_int, ctypes.c_int)
    if option is None or trimming() is None:  # others have an empty function of that name
        return False
    return bool(option(_M_MMAP_THRESHOLD, LARGE_BYTES))


@functools.cache
def _function(name: str, *types: type[ctypes._SimpleCData[Any]]) -> ctypes._NamedFuncPointer | None:
    """A function of the C library with arguments of these types, which returns an int; None if there is none."""
    try:
        function: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes, function.restype = types, ctypes.c_int
    return function
