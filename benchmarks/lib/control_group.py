"""A control group of our own that a process's memory is bounded by. Linux, and needs the right to make one (root).

Page cache that the process fills counts too, as it does in a container. Version 1 and version 2 differ in the names of
files alone, as far as this goes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class ControlGroup:
    """A group without processes, made again.

    Attributes:
        folder: in the file system of control groups.
        limit_file, usage_file: bytes.
        reclaim: file and text that ask for unused page cache to be taken back.
    """

    folder: Path
    limit_file: str
    usage_file: str
    reclaim: tuple[str, str]

    def entering(self) -> list[str]:
        """What to put before a command so that it runs in the group from its first allocation on."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs")]

    def limit_to_idle_and(self, nbytes: int) -> int:
        """Bound the group to what it uses now, without unused page cache, and `nbytes`; return the limit."""
        name, text = self.reclaim
        with contextlib.suppress(OSError):  # what can be reclaimed has been, when it says that it is busy
            (self.folder / name).write_text(text)
        limit = int((self.folder / self.usage_file).read_text()) + nbytes
        (self.folder / self.limit_file).write_text(str(limit))
        return limit


@contextlib.contextmanager
def control_group(name: str, mount: Path = Path("/sys/fs/cgroup")) -> Iterator[ControlGroup]:
    """A group for a while; its processes must have ended at the end.

    Raises:
        SystemExit: none can be made here.
    """
    group = _described(name, mount)
    try:
        group.folder.mkdir(exist_ok=True)
    except OSError as error:
        raise SystemExit(f"No control group can be made in {mount} ({error}): memory cannot be limited.") from error
    try:
        yield group
    finally:
        _remove(group.folder)


def _described(name: str, mount: Path) -> ControlGroup:
    v1 = mount / "memory"
    if v1.is_dir():
        return ControlGroup(v1 / name, "memory.limit_in_bytes", "memory.usage_in_bytes", ("memory.force_empty", "0"))
    return ControlGroup(mount / name, "memory.max", "memory.current", ("memory.reclaim", str(1 << 40)))


def _remove(folder: Path) -> None:
    """A group can be removed once the last of its processes is gone for good."""
    begun = time.monotonic()
    while True:
        try:
            os.rmdir(folder)
            return
        except OSError:
            if time.monotonic() - begun > _PATIENCE_SECONDS:
                raise
            time.sleep(0.05)


def can_limit_memory() -> bool:
    """Whether a group with a limit of memory can be made here."""
    try:
        with control_group(f"rabbitllm-benchmark-{os.getpid()}") as group:
            return (group.folder / group.limit_file).exists()
    except SystemExit:
        return False
