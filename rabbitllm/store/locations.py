"""The locations of split directories, existing and new. Opens no weights.

A local checkpoint is split into a directory in its own folder. A hub repository is split into our own folder next to
the hub cache (`HF_HOME/rabbitllm`, or `RABBITLLM_HOME`), since a snapshot in the cache may be pruned at any time.
RabbitLLM 1.1 wrote layers into the snapshot; they are still found there.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from rabbitllm.checkpoints import hub_cache
from rabbitllm.checkpoints.local import is_writable
from rabbitllm.storage import durable
from rabbitllm.store.layer_store import SPLIT_DIRECTORY, directory_name, is_legacy

HOME_VARIABLE = "RABBITLLM_HOME"
LOCAL_FOLDER = "local"
"""Subfolder of `home()` for checkpoints in folders that are not writable."""
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def home() -> Path:
    """The folder for splits of hub models: `RABBITLLM_HOME`, else `rabbitllm` in huggingface_hub's `HF_HOME`."""
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "rabbitllm"


def is_repo_id(name: str) -> bool:
    """Whether a name could be a repository on the hub rather than a path."""
    return _REPO_ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit's full hash rather than the name of a branch or tag."""
    return _COMMIT.fullmatch(revision) is not None


def for_local(checkpoint: Path, saving_path: Path | None, compression: str | None, base: str = SPLIT_DIRECTORY) -> Path:
    """The split directory of a checkpoint in a folder, existing or not.

    In `saving_path` if given; else in the folder of the weights; or, if that is in the hub cache or on a read-only
    mount, in `home()`.
    """
    name = directory_name(compression, base)
    if saving_path is not None:
        return saving_path / name
    inside = checkpoint / name
    if inside.is_dir() and (is_legacy(inside) or any(inside.iterdir())):
        return inside
    snapshot = hub_cache.snapshot_of(checkpoint)
    if snapshot is not None:
        return home() / snapshot.repo_folder / snapshot.commit / name
    if is_writable(checkpoint):
        return inside
    return home() / LOCAL_FOLDER / local_folder_name(checkpoint) / name


def local_folder_name(checkpoint: Path) -> str:
    """The folder name for a checkpoint that is not writable: its own name with a hash of its path."""
    resolved = checkpoint.resolve()
    return f"{resolved.name}-{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"


def for_repository(repo_id: str, commit: str, saving_path: Path | None, compression: str | None) -> Path:
    """The split directory of a repository at a commit."""
    name = directory_name(compression)
    return (saving_path or home() / hub_cache.folder_name(repo_id) / commit) / name


def of_other_commits(repo_id: str, commit: str, compression: str | None) -> list[Path]:
    """Split directories of the same repository at other commits, in `home()`."""
    found = (home() / hub_cache.folder_name(repo_id)).glob(f"*/{directory_name(compression)}")
    return sorted(path for path in found if path.parent.name != commit)


def known_names() -> list[str]:
    """Names of the models in `home()`: repositories, and folders that were not writable."""
    base = home()
    repositories = (hub_cache.repo_id_of(path.name) for path in base.glob(f"{hub_cache.REPO_PREFIX}*"))
    return sorted({*repositories, *(path.name.rpartition("-")[0] for path in (base / LOCAL_FOLDER).glob("*-*"))})


def remember_commit(repo_id: str, revision: str | None, commit: str) -> None:
    """Record the commit of a revision, for calls without a connection."""
    path = home() / hub_cache.folder_name(repo_id) / "refs" / (revision or "main").replace("/", "--")
    if path.exists() and path.read_text() == commit:
        return
    durable.make_folder(path.parent)
    durable.write_whole(path, commit.encode())


def remembered_commit(repo_id: str, revision: str | None) -> str | None:
    """The commit of a revision when it was last split here; a commit is returned unchanged."""
    if revision is not None and is_commit(revision):
        return revision
    path = home() / hub_cache.folder_name(repo_id) / "refs" / (revision or "main").replace("/", "--")
    return path.read_text() if path.exists() else None
