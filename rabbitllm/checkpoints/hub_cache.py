"""The user's hub cache: whether a folder is part of it, and freeing a file in it as huggingface_hub does.

Layout (huggingface_hub, "Understand caching"): `<cache>/models--org--name/snapshots/<commit>/<file>` is a link
to `../../blobs/<etag>`, which may itself be a link into a store that several repositories share. Unlinking the
snapshot's link frees nothing, and unlinking the blob may break another revision; so huggingface_hub deletes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.checkpoint import Disposal, Release
from rabbitllm.checkpoints.index import WEIGHT_SUFFIXES
from rabbitllm.errors import UnsafePathError
from rabbitllm.storage import durable
from rabbitllm.storage.folders import bytes_freed_by_deleting

logger = logging.getLogger(__name__)

DAMAGED = (
    "Delete that link and the file it leads to, and make the same call again: it is downloaded again, and a split that "
    "was begun goes on."
)
"""The remedy for a damaged file in the hub cache, which is never the only copy."""

REPO_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class CachedSnapshot:
    """One commit of one repository in a hub cache."""

    cache: Path
    repo_folder: str
    commit: str

    @property
    def folder(self) -> Path:
        """The folder of its files (which are links)."""
        return self.cache / self.repo_folder / "snapshots" / self.commit

    @property
    def repo_id(self) -> str:
        """`org/name`, from the folder's name."""
        return repo_id_of(self.repo_folder)


def folder_name(repo_id: str) -> str:
    """The name of a repository's folder: `models--org--name`."""
    return REPO_PREFIX + repo_id.replace("/", "--")


def repo_id_of(folder_name: str) -> str:
    """`org/name`, from the folder's name."""
    return folder_name.removeprefix(REPO_PREFIX).replace("--", "/")


def snapshot_of(folder: Path) -> CachedSnapshot | None:
    """The snapshot that `folder` is, or None if it is not in a hub cache."""
    resolved = folder.resolve()  # huggingface_hub resolves links too
    repo = resolved.parent.parent
    if resolved.parent.name == "snapshots" and repo.name.startswith(REPO_PREFIX) and (repo / "blobs").is_dir():
        return CachedSnapshot(repo.parent, repo.name, resolved.name)
    return None


def check_in_cache(path: Path, snapshot: CachedSnapshot) -> None:
    """Refuse a link in a snapshot that points anywhere but to the cache's blobs.

    Raises:
        UnsafePathError: the resolved file is in neither blob store, nor in the snapshot itself.
    """
    resolved = path.resolve()
    stores = (snapshot.cache / snapshot.repo_folder / "blobs", snapshot.cache / "blobs", snapshot.folder)
    if not any(resolved.is_relative_to(store.resolve()) for store in stores):
        raise UnsafePathError(
            f"{path} is a link that leads out of the hub cache, to {resolved}.",
            "Delete that link and download the repository again. Nothing was opened or deleted.",
        )


def free_file(snapshot: CachedSnapshot, name: str) -> int:
    """Delete one file of a snapshot: its link, and its blob unless another revision uses it.

    The blob first takes the place of its link, as in caches without links. So a crash leaves no blob without a link,
    of which no later call would know, and no link without a blob, for which huggingface_hub ignores the repository.

    Returns:
        Bytes freed; 0 if another revision uses the blob, or the file did not exist.
    """
    from huggingface_hub import scan_cache_dir

    link = snapshot.folder / name
    info = scan_cache_dir(snapshot.cache)
    strategy = info.delete_files(*(file for file in _files(info) if Path(file.file_path).absolute() == link))
    durable.require_guards(link)
    for blob in strategy.blobs:
        if not blob.is_symlink():  # into a store of several repositories, which huggingface_hub frees by that link
            with contextlib.suppress(OSError):  # read-only, or on another disk
                durable.rename(blob, link)
                strategy = dataclasses.replace(strategy, blobs=frozenset())
    strategy.execute()
    return int(strategy.expected_freed_size)


def freed_bytes(snapshot: CachedSnapshot, names: Iterable[str], device: int) -> Mapping[str, int]:
    """Bytes that `free_file` frees on a disk for each of these files; files that free nothing are left out.

    Args:
        snapshot: the commit.
        names: names of files in it.
        device: the disk, as `st_dev`.
    """
    links = {snapshot.folder / name: name for name in names}
    if not links:
        return {}
    from huggingface_hub import scan_cache_dir

    info = scan_cache_dir(snapshot.cache)
    sizes: dict[str, int] = {}
    for file in _files(info):
        name = links.get(Path(file.file_path).absolute())
        if name is None or info.delete_files(file).expected_freed_size == 0:
            continue
        if nbytes := bytes_freed_by_deleting(Path(file.blob_path).resolve(), device):
            sizes[name] = nbytes
    return sizes


def _files(info: Any) -> list[Any]:
    """All files that huggingface_hub's scan of a cache lists."""
    return [file for repo in info.repos for revision in repo.revisions for file in revision.files]


def release_file(snapshot: CachedSnapshot, name: str) -> Release:
    """Free one file of a snapshot, and return the outcome."""
    try:
        freed = free_file(snapshot, name)
    except OSError as error:
        if error.errno not in durable.READ_ONLY_ERRORS:
            raise
        return Release(name, Disposal.READ_ONLY)
    return Release(name, Disposal.DELETED if freed else Disposal.SHARED, freed)


def free_rest(snapshot: CachedSnapshot) -> list[Path]:
    """Delete the rest of a snapshot: the small files of that revision, and the revision itself.

    Returns:
        The paths that were links of the snapshot; none if the cache is read-only, if the snapshot has other weights,
        such as another GGUF model, which the user did not name, or if it has files that are not the hub's.
    """
    if not os.access(snapshot.cache, os.W_OK):
        return []
    from huggingface_hub import scan_cache_dir

    paths = sorted(path for path in snapshot.folder.rglob("*") if not path.is_dir())
    if any(path.name.endswith(WEIGHT_SUFFIXES) for path in paths):
        return []
    links = [path for path in paths if path.is_symlink()]
    if links and (others := [path.relative_to(snapshot.folder).as_posix() for path in paths if not path.is_symlink()]):
        logger.warning("%s is kept, since it has files that are not the hub's: %s.", snapshot.folder, listed(others, 3))
        return []
    info = scan_cache_dir(snapshot.cache)
    for repo in info.repos:  # a mirror may have the same commit
        if any(revision.snapshot_path.resolve() == snapshot.folder.resolve() for revision in repo.revisions):
            durable.require_guards(snapshot.folder / "config.json")
            dataclasses.replace(info, repos=frozenset([repo])).delete_revisions(snapshot.commit).execute()
    return paths
