"""Folders and their disks, and hosts that publish limits which free space does not show.

Queries the system; changes nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

GB = 1000**3
KAGGLE_BYTES = 50 << 30
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
        f"layers belong into /kaggle/tmp; set max_disk='{KAGGLE_BYTES >> 30}GiB', since the quota of the whole does "
        "not show either",
        "models are fetched only if Internet is on in the notebook's settings",
    ),
    {str(KAGGLE_WORKING): 20 * GB},
)
_COLAB = Host(
    "Colab",
    (
        "the disk is gone with the session; /content/drive is slow and its quota is Google Drive's",
        "what a session gets differs; free ones have about 12 GiB of RAM",
    ),
    {},
)
_SPACES = Host("Hugging Face Spaces", ("50 GB of disk on free hardware, gone at a restart; 16 GB of RAM",), {})
_ACTIONS = Host("GitHub Actions", ("14 GB of disk are promised on standard runners, though more may show",), {})
_CODESPACES = Host("GitHub Codespaces", ("32 GB of disk on the smallest machine; /tmp is another, larger disk",), {})
_KNOWN: Iterable[tuple[str, Host]] = (
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
    "a container",
    ("free space is the host's: a quota of the container does not show; max_disk says what a split may take",),
    {},
)


def host_of(environment: Mapping[str, str], root: Path = Path("/")) -> Host | None:
    """Return the host of this process; None for an ordinary machine."""
    found = next((known for variable, known in _KNOWN if environment.get(variable)), None)
    if found is None and (
        (root / ".dockerenv").exists()
        or (root / "run/.containerenv").exists()
        or "KUBERNETES_SERVICE_HOST" in environment
    ):
        return _CONTAINER
    return found


def folder_at(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Folder:
    """Return the facts about one folder."""
    return folder_of((), path.expanduser().absolute(), file_systems(mounts), host_of(os.environ))


def folder_of(uses: tuple[str, ...], path: Path, kinds: Mapping[Path, str], known: Host | None) -> Folder:
    there = next(place for place in (path, *path.parents) if place.exists())
    found = shutil.disk_usage(there)
    real = there.resolve()
    kind = next((kinds[place] for place in (real, *real.parents) if place in kinds), None)
    quota = next((most for place, most in (known.quotas if known else {}).items() if real.is_relative_to(place)), None)
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return Folder(uses, path, writable, kind, there.stat().st_dev, found.total, found.free, quota)


def file_systems(mounts: Path) -> dict[Path, str]:
    """Return mount point -> type of its file system (proc(5): /proc/pid/mountinfo); the last mounted is on top."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        about, dash, kind = line.partition(" - ")
        words = about.split()
        if dash and len(words) > 4 and kind:
            # spaces and other special characters are in octal there
            point = words[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
            found[Path(point)] = kind.split()[0]
    return found
