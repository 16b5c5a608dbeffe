"""Opens the checkpoint of a source: from its folder, from the hub, or by the journal of its split.

Reads headers and indexes, but no weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rabbitllm.checkpoints.checkpoint import Checkpoint
from rabbitllm.checkpoints.hub import HubCheckpoint, HubRepository, download_all
from rabbitllm.checkpoints.index import index_of
from rabbitllm.checkpoints.local import LocalCheckpoint, begins_with_any
from rabbitllm.errors import CheckpointError, CheckpointNotFoundError, MissingShardError, system_errors_by_name
from rabbitllm.prepare.source import Source
from rabbitllm.splitter import journal
from rabbitllm.storage import folder_lock
from rabbitllm.storage.folder_lock import FolderKind, FolderLock
from rabbitllm.store.manifest import is_finished


def open_weights(source: Source, folders: Iterable[Path]) -> Checkpoint | None:
    """Open the checkpoint of a source, reading only headers; None if only finished splits are left.

    Args:
        source: the result of `find`.
        folders: its split directories, whose journals have the index if that is gone.

    Raises:
        CheckpointNotFoundError: there are no weights, and no finished split either.
        MissingShardError: likewise, if some of the weights are missing (in Meta's own format, which has no index).
    """
    if source.repository is not None:
        return HubCheckpoint(source.repository)
    if source.local is None:
        return None
    absent: list[CheckpointError] = []
    finished = False
    for folder in folders:
        try:
            return open_folder(source.local, source.missing_from, folder)
        except (CheckpointNotFoundError, MissingShardError) as error:
            absent.append(error)
            finished = finished or is_finished(folder)
    if not finished:
        raise absent[0]
    return None


def whole_checkpoint(source: Source) -> tuple[LocalCheckpoint, FolderLock]:
    """Provide all of a source's shards on this machine, unchanged; a repository is fetched into the hub cache.

    Returns:
        The checkpoint, and the lock that prevents its deletion.

    Raises:
        CheckpointNotFoundError: there are none.
        InUseError: another process is deleting them.
        HubError: they cannot be fetched.
        DiskFullError: the disk of the hub cache is full.
    """
    if source.repository is not None:
        with system_errors_by_name(source.name):
            folder = download_all(source.repository, HubCheckpoint(source.repository).index)
    elif source.local is not None:
        folder = source.local
    else:
        raise CheckpointNotFoundError(f"{source.name} has no checkpoint of its own.", "Leave split=False out.")
    lock = folder_lock.shared(folder, FolderKind.SOURCE)
    return LocalCheckpoint(folder), lock


def open_folder(folder: Path, missing_from: HubRepository | None, split_folder: Path) -> LocalCheckpoint:
    """Open the checkpoint in a folder; if its only file is used up, by the journal of its split.

    The folder may have another file, with the same weights in another format or with none of them.
    """
    seen = journal.glance(split_folder) if folder.is_dir() else None
    shards = seen.shards if seen is not None else None
    try:
        if shards is None or begins_with_any(folder, shards):
            return LocalCheckpoint(folder, missing_from, None, shards or ())
    except CheckpointNotFoundError:
        if shards is None:
            raise
    earlier = journal.replay(split_folder)
    if earlier is None:  # another process has finished it meanwhile
        return LocalCheckpoint(folder, missing_from)
    held = {tensor.name: shard.name for shard in earlier.plan.shards for tensor in shard.tensors}
    return LocalCheckpoint(folder, missing_from, index_of(held))
