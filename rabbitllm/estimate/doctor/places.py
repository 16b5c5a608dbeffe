"""Probes of folders and of the host: disks, file systems, and hosts whose limits are published."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rabbitllm.storage.folders import KAGGLE_TMP, KAGGLE_WORKING, Folder, Host, file_systems, folder_of
from rabbitllm.store import locations

SPLITS = "splits of hub models"
CACHE = "hub cache"
TEMPORARY = "temporary files"
HERE = "this folder"


def folders(known: Host | None = None, mounts: Path = Path("/proc/self/mountinfo")) -> tuple[Folder, ...]:
    """Return the folders that weights pass through, each path once; the one for layer files first."""
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
    kinds = file_systems(mounts)
    return tuple(folder_of(tuple(found), path, kinds, known) for path, found in uses.items())
