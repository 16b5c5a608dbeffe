"""Probes of folders and of the place as a whole: disks, file systems, and hosts whose limits are published."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from rabbitllm.estimate.doctor.facts import Folder, Host
from rabbitllm.notebooks import KAGGLE_BYTES
from rabbitllm.prepare import locations

GB = 1000**3
SPLITS = "splits of hub models"
CACHE = "hub cache"
TEMPORARY = "temporary files"
HERE = "this folder"
KAGGLE_TMP, KAGGLE_WORKING = Path("/kaggle/tmp"), Path("/kaggle/working")

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
"""Variable of the environment -> where it is set. Limits as their makers publish them: kaggle.com/docs/notebooks,
research.google.com/colaboratory/faq.html, huggingface.co/docs/hub/spaces-overview, docs.github.com (runners,
codespaces)."""
_CONTAINER = Host(
    "a container",
    ("free space is the host's: a quota of the container does not show; max_disk says what a split may take",),
    {},
)


def host(environment: Mapping[str, str], root: Path = Path("/")) -> Host | None:
    """Where this runs; None for an ordinary machine."""
    found = next((known for variable, known in _KNOWN if environment.get(variable)), None)
    if found is None and (
        (root / ".dockerenv").exists()
        or (root / "run/.containerenv").exists()
        or "KUBERNETES_SERVICE_HOST" in environment
    ):
        return _CONTAINER
    return found


def folders(known: Host | None = None, mounts: Path = Path("/proc/self/mountinfo")) -> tuple[Folder, ...]:
    """The folders that weights go through, those of one path once; the one for layer files first."""
    from huggingface_hub import constants

    wanted = [
        (SPLITS, locations.home()),
        (CACHE, Path(constants.HF_HUB_CACHE)),
        (HERE, Path.cwd()),
        (TEMPORARY, Path(tempfile.gettempdir())),
        *(("Kaggle", path) for path in (KAGGLE_TMP, KAGGLE_WORKING) if path.exists()),
    ]
    uses: dict[Path, list[str]] = {}
    for use, path in wanted:
        uses.setdefault(path.expanduser().absolute(), []).append(use)
    kinds = _file_systems(mounts)
    return tuple(_folder(tuple(found), path, kinds, known) for path, found in uses.items())


def folder_at(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Folder:
    """What is known of one folder."""
    return _folder((), path.expanduser().absolute(), _file_systems(mounts), host(os.environ))


def _folder(uses: tuple[str, ...], path: Path, kinds: Mapping[Path, str], known: Host | None) -> Folder:
    there = next(place for place in (path, *path.parents) if place.exists())
    found = shutil.disk_usage(there)
    real = there.resolve()
    kind = next((kinds[place] for place in (real, *real.parents) if place in kinds), None)
    quota = next((most for place, most in (known.quotas if known else {}).items() if real.is_relative_to(place)), None)
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return Folder(uses, path, writable, kind, there.stat().st_dev, found.total, found.free, quota)


def _file_systems(mounts: Path) -> dict[Path, str]:
    """Mount point -> the kind of its file system (proc(5): /proc/pid/mountinfo); the last mounted is on top."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        about, dash, kind = line.partition(" - ")
        words = about.split()
        if dash and len(words) > 4 and kind:
            # spaces and the like are written in octal there
            point = words[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
            found[Path(point)] = kind.split()[0]
    return found
