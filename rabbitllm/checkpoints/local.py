"""A checkpoint in a local folder: an ordinary folder, a snapshot in the hub cache, or a read-only mount.

Every file that the index names is checked to be in the folder before it is opened. Missing shards may be fetched
from a repository, if the caller names one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from pathlib import Path

from rabbitllm.checkpoints import hub_cache
from rabbitllm.checkpoints.checkpoint import (
    Checkpoint,
    Disposal,
    Release,
    ShardMetadata,
    SourceIdentity,
    file_stat,
    ignore_progress,
    sampled_fingerprint,
    sidecars_in,
)
from rabbitllm.checkpoints.gguf_checkpoint import GgufCheckpoint
from rabbitllm.checkpoints.hub import HubRepository
from rabbitllm.checkpoints.index import (
    META_PARAMETERS,
    WEIGHT_SUFFIXES,
    CheckpointIndex,
    check_inside,
    entry_of,
    gguf_files,
    gguf_models,
    has_format_of,
    index_of,
    is_gguf,
    is_gguf_file,
    is_index,
    is_meta,
    is_rank,
    read_index,
    remark_on,
)
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME, TOKENIZER_NAMES, MetaCheckpoint, ranks_of, read_meta
from rabbitllm.errors import USED_UP, CheckpointNotFoundError, CorruptShardError, MissingShardError
from rabbitllm.formats.gguf import read_gguf
from rabbitllm.formats.shard_header import read_shard_header
from rabbitllm.formats.tensor_spec import Header
from rabbitllm.storage import durable
from rabbitllm.storage.files import read_range
from rabbitllm.storage.folders import bytes_freed_by_deleting, existing, folder_at

logger = logging.getLogger(__name__)

_DAMAGED = (
    "Put an undamaged copy at that path and make the same call again. Delete nothing else: if a split was begun, its "
    "folder may hold the only copy of other shards."
)


class LocalCheckpoint(Checkpoint):
    """A folder of shards: safetensors, GGUF, or files of `torch.save`, including Meta's own format.

    Args:
        folder: holds an index and its shards, or one file of weights; see `entry_of`.
        missing_from: a repository from which to fetch shards that the index names and the folder lacks.
        index: the index that an unfinished split recorded for a folder whose own is gone (a single file is its index).
        known_shards: the source shards of an earlier split. Meta's own format does not record the shard count.
        entry: the GGUF file with which the checkpoint begins, if the folder has several models.

    Raises:
        CheckpointNotFoundError: the folder does not exist, or has no weights.
        InvalidIndexError, UnsafePathError, CheckpointError: see `read_index` and `read_shard_header`.
    """

    def __init__(
        self,
        folder: Path,
        missing_from: HubRepository | None = None,
        index: CheckpointIndex | None = None,
        known_shards: Collection[str] = (),
        entry: str | None = None,
    ) -> None:
        if not folder.is_dir():
            raise CheckpointNotFoundError(
                f"{folder} is not a folder; expected a folder with a checkpoint.",
                "Check the path; a repository on the hub is named as 'organisation/name'.",
            )
        self.folder = folder
        self.label = str(folder)
        self._snapshot = hub_cache.snapshot_of(folder)
        self._missing_from = missing_from
        self._fetched: set[str] = set()
        self._warned_of_links = False
        self._entry: str | None = entry
        if index is not None:
            self.index = index
            if all(map(is_rank, index.shards)) and (folder / META_PARAMETERS).is_file():
                self.translation = self._read_meta(index.shards)
        else:
            self.index = self._find_index(known_shards)
        for shard in self.index.shards:
            self._check(shard)

    def _find_index(self, known_shards: Collection[str]) -> CheckpointIndex:
        entry = self._entry = self._entry or entry_in(self.folder)
        remark_on(entry, _files_in(self.folder), self.label)
        self._check(entry)
        if is_gguf_file(self.folder / entry):
            self.translation = self._read_gguf(entry)
        elif is_index(entry):
            return read_index(self.folder / entry)
        elif is_meta(entry):
            remote = self._missing_from.files if self._missing_from is not None else ()
            local = (path.name for path in self.folder.iterdir() if path.is_file())
            ranks = ranks_of({*local, *remote, *known_shards}, self.label)
            self.translation = self._read_meta(ranks)
        else:
            return index_of({tensor.name: entry for tensor in self._header(entry).tensors})
        return self.translation.index()

    def _read_gguf(self, entry: str) -> GgufCheckpoint:
        shards = gguf_files(entry)
        present = [shard for shard in shards if (self.folder / shard).exists()]
        for shard in present:
            self._check(shard)
        if not present:
            raise CheckpointNotFoundError(f"{self.folder / entry} does not exist.", "Check the path.")

        read = functools.partial(read_range, self.folder / shards[-1])
        return GgufCheckpoint(shards, {shard: read_gguf(self.folder / shard, shard) for shard in present}, read)

    def _read_meta(self, ranks: tuple[str, ...]) -> MetaCheckpoint:
        self._check(META_PARAMETERS)
        return read_meta(self.folder / META_PARAMETERS, ranks, self._rank_header, self.folder.joinpath)

    def _rank_header(self, rank: str) -> Header | None:
        """The header of a rank, with its own names; None if it is not in the folder."""
        if not (self.folder / rank).exists():
            return None
        self._check(rank)
        return self._header(rank)

    def _check(self, shard: str) -> None:
        check_path(self.folder / shard, self.folder, self._snapshot)

    def _is_link(self, shard: str) -> bool:
        """Whether a shard, or its subfolder, is a link, or the file that another shard's link leads to.

        It may be the only copy of another folder's file, or of the tensors that the index puts into the other shard.
        """
        place = self.folder.resolve() / shard
        return (self.folder / shard).resolve() != place or self._files[place] > 1

    @functools.cached_property
    def _files(self) -> Counter[Path]:
        """The number of shards that lead to each file."""
        return Counter((self.folder / shard).resolve() for shard in self.index.shards)

    @property
    def deletable(self) -> bool:
        return is_writable(self.folder)

    def identity(self, shards: Iterable[ShardMetadata]) -> SourceIdentity:
        """A snapshot of the hub cache is identified by repository and commit, any other folder by its bytes."""
        fingerprints = {metadata.name: metadata.fingerprint for metadata in shards}
        if self._snapshot is not None:
            return SourceIdentity("hub", self._snapshot.repo_id, self._snapshot.commit, fingerprints)
        return SourceIdentity("local", self.folder.resolve().name, None, fingerprints)

    def stages(self, shard: str) -> bool:
        return (
            not (self.folder / shard).exists() and self._missing_from is not None and self._missing_from.stages(shard)
        )

    def metadata(self, shard: str) -> ShardMetadata | None:
        path = self.folder / shard
        if not path.exists():
            metadata = self._missing_from.metadata(shard) if self._missing_from is not None else None
            return metadata and dataclasses.replace(metadata, header=self.taken_from(shard, metadata.header))
        stat = file_stat(path)  # before the file is read
        _refuse_unfinished(path)
        header = self._header(shard)
        split_header = self.taken_from(shard, header)
        return ShardMetadata(shard, stat.size, self._fingerprint(path, header), split_header, stat=stat)

    def _header(self, shard: str) -> Header:
        """The header of a shard; errors of a damaged one come with a remedy."""
        try:
            return read_shard_header(self.folder / shard, shard)
        except CorruptShardError as error:
            remedy = hub_cache.DAMAGED if self._snapshot else _DAMAGED
            raise CorruptShardError(f"In {self.folder}: {error.problem}", f"{error.remedy} {remedy}".strip()) from None

    def _fingerprint(self, path: Path, header: Header) -> str:
        blob = path.resolve().name
        if self._snapshot is not None and len(blob) == 64:
            return f"sha256:{blob}"  # the cache names the blobs of large files by their sha256
        return sampled_fingerprint(path, header)

    def acquire(self, shard: str, on_have: Callable[[Path, int], None] = ignore_progress) -> Path:
        path = self.folder / shard
        if path.exists():
            self._check(shard)  # again, as the file may have been replaced
            return path
        if self._missing_from is not None:
            self._fetched.add(shard)
            return self._missing_from.acquire(shard, on_have)
        raise MissingShardError(
            f"{path} is missing; by the index it holds {[*self.index.weight_map.values()].count(shard)} tensors.",
            f"Put the shard at that path, or use the id of its repository. {USED_UP}",
        )

    def stream(self, shard: str) -> Generator[bytes]:
        assert self._missing_from is not None, "only a shard that would be staged can be streamed"
        self._fetched.add(shard)
        return self._missing_from.stream(shard)

    def at_hand(self, shard: str) -> Path | None:
        if (self.folder / shard).exists():
            return self.acquire(shard)
        return self._missing_from.at_hand(shard) if self._missing_from is not None and shard in self._fetched else None

    def release(self, shard: str, *, only_staged: bool = False) -> Release:
        path = self.folder / shard
        if only_staged or not path.exists():
            if self._missing_from is not None and (shard in self._fetched or self._missing_from.staged(shard).exists()):
                return self._missing_from.release(shard, only_staged=only_staged)
            # an earlier run may have been killed between the deletion and this sync; a subfolder may be gone, too
            durable.sync_folder(existing(path.parent))
            return Release(shard, Disposal.DELETED)
        size = path.stat().st_size
        if self._snapshot is not None:
            return hub_cache.release_file(self._snapshot, shard)
        if self._is_link(shard):
            if not self._warned_of_links:  # once, not for each of a hundred shards
                logger.warning("%s is kept, as all such shards are: nothing behind a link is deleted.", path)
            self._warned_of_links = True
            return Release(shard, Disposal.LINK)
        try:
            durable.remove(path)
            durable.sync_folder(path.parent)  # otherwise it may reappear after a power cut and never be deleted
        except OSError as error:
            if error.errno not in durable.READ_ONLY_ERRORS:
                raise
            return Release(shard, Disposal.READ_ONLY)
        return Release(shard, Disposal.DELETED, size)

    def freed_bytes(self, shards: Iterable[str], device: int) -> Mapping[str, int]:
        present = [shard for shard in shards if (self.folder / shard).exists()]
        if self._snapshot is not None:
            return hub_cache.freed_bytes(self._snapshot, present, device)
        files = [shard for shard in present if not self._is_link(shard)]
        sizes = {shard: bytes_freed_by_deleting(self.folder / shard, device) for shard in files}
        return {shard: nbytes for shard, nbytes in sizes.items() if nbytes}

    def discard_rest(self) -> list[Path]:
        if self._snapshot is not None:
            return hub_cache.free_rest(self._snapshot)
        if self._entry is None or not is_index(self._entry) or not is_writable(self.folder):
            return []
        index = self.folder / self._entry
        if not index.exists() or self._entry_without(self._entry) is not None:
            return []  # or the folder would begin with other weights, and the same call would take it for another model
        durable.remove(index)
        return [index]

    def outlasts(self, folder: Path) -> bool:
        """Whether shards that can be deleted, and are on no hub, would outlast a restart, and files in a folder not."""
        is_only_copy = self._snapshot is None and self.deletable
        return is_only_copy and folder_at(folder).in_memory and not folder_at(self.folder).in_memory

    def left_behind(self) -> str | None:
        """The file with other weights in the same format with which the folder begins once its shards are gone.

        None if there is none, or if an index or the user's name for a GGUF file still tells which weights are meant.
        """
        if self._snapshot is not None or self._entry is None or is_index(self._entry) or is_gguf(self._entry):
            return None
        return self._entry_without(*(shard for shard in self.index.shards if not self._is_link(shard)))

    def _entry_without(self, *gone: str) -> str | None:
        with contextlib.suppress(CheckpointNotFoundError):
            entry = entry_of(set(_files_in(self.folder)).difference(gone), self.label)
            if entry != self._entry and has_format_of(entry, self.index.shards):
                return None if begins_with_any(self.folder, self.index.shards, entry) else entry
        return None

    def sidecars(self) -> Mapping[str, Path]:
        named = (self.folder / name for name in (CONFIG_NAME, *TOKENIZER_NAMES))
        if gguf_models(self.index.shards) and not any(map(os.path.lexists, named)):
            return {}  # a folder of downloads, whose texts belong to no model
        paths = sidecars_in(self.folder)
        weights = [self.folder / shard for shard in self.index.shards if self._is_link(shard)]
        linked_folders = {weight.resolve().parent for weight in weights}
        for path in paths.values():
            check_path(path, self.folder, self._snapshot, linked_folders)
        return paths

    def copied_sizes(self) -> Mapping[str, int]:
        return {name: path.stat().st_size for name, path in self.sidecars().items()}


_RECORDS = (".aria2", ".st", ".lftp-pget-status")
"""Suffixes of the records that aria2, axel and lftp keep of a download; its file has its name and its size before."""


def _refuse_unfinished(path: Path) -> None:
    """Refuse a shard that a program has not finished to download: it has zeros for what is still to come."""
    for record in (path.with_name(path.name + suffix) for suffix in _RECORDS):
        if record.exists():
            raise CorruptShardError(
                f"{path} is not downloaded as a whole: {record.name} records a download that has not finished.",
                "Let the program that wrote it finish the download, and make the same call again. If the file is "
                "whole, remove that record.",
            )


def entry_in(folder: Path) -> str:
    """The file with which the checkpoint in a folder begins; for errors see `entry_of`."""
    names = _files_in(folder)
    try:
        return entry_of(names, str(folder))
    except CheckpointNotFoundError as error:
        models = [name for name in names if _is_unnamed_gguf(folder / name)]
        if len(models) == 1:
            return models[0]
        inside = [] if any(name.endswith(WEIGHT_SUFFIXES) for name in names) else _checkpoints_below(folder)
        if inside:
            raise CheckpointNotFoundError(error.problem, f"Use its folder {' or '.join(map(repr, inside))}.") from None
        raise


def _files_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_file()]


def _is_unnamed_gguf(path: Path) -> bool:
    return not is_gguf(path.name) and not path.is_symlink() and is_gguf_file(path)


MAX_FOLDERS = 3
"""Limit of the folders that a message proposes."""


def _checkpoints_below(folder: Path) -> list[str]:
    """Folders in a folder that hold checkpoints, by the names of their files."""
    proposed: list[str] = []
    for path in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        with contextlib.suppress(CheckpointNotFoundError, OSError):
            entry_of(_files_in(path), str(path))
            proposed.append(str(path))
    return proposed[:MAX_FOLDERS]


def begins_with_any(folder: Path, shards: Collection[str], entry: str | None = None) -> bool:
    """Whether any of these shards belong to the checkpoint that a folder begins with.

    False where the shards are used up and the folder also holds the weights in another format, or another model. No
    weights are opened. `entry` is the file with which the checkpoint begins, if it was named.

    Raises:
        CheckpointNotFoundError: the folder has no checkpoint.
        InvalidIndexError, UnsafePathError: see `read_index`.
    """
    entry = entry or entry_in(folder)
    if is_gguf_file(folder / entry):
        return any(shard in shards and (folder / shard).exists() for shard in gguf_files(entry))
    if is_meta(entry):
        return any(is_rank(shard) and (folder / shard).exists() for shard in shards)
    if not is_index(entry):
        return entry in shards
    check_path(folder / entry, folder, hub_cache.snapshot_of(folder))
    return any(shard in shards for shard in read_index(folder / entry).shards)


def check_path(
    path: Path, folder: Path, snapshot: hub_cache.CachedSnapshot | None, linked_folders: Collection[Path] | None = None
) -> None:
    """Refuse a link to what is no checkpoint's file, see `check_inside`; in a snapshot, each that leads out of the hub
    cache."""
    if snapshot is not None:
        hub_cache.check_in_cache(path, snapshot)
    else:
        check_inside(path, folder, linked_folders)


def is_writable(folder: Path) -> bool:
    """Whether files can be created and deleted in a folder (False on a read-only mount such as `/kaggle/input`)."""
    return os.access(folder, os.W_OK)
