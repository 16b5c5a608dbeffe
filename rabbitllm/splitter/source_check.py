"""Checks that the shards of a local source have not changed since a split was begun, or since it was made.

A shard whose file metadata (`FileStat`) has changed is read and compared with a recorded checksum, or with the digest
that a hub has published. If there is neither, it is refused. All of this happens before further data is used and before
a shard is deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from rabbitllm.base import progress
from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.checkpoint import (
    Checkpoint,
    Disposal,
    FileStat,
    Release,
    ShardMetadata,
    file_stat,
    has_digest,
)
from rabbitllm.checkpoints.index import CheckpointIndex
from rabbitllm.display.split_display import shown_reading
from rabbitllm.errors import CheckpointError, CorruptShardError, SplitMismatchError
from rabbitllm.formats.shard_header import read_shard_header
from rabbitllm.formats.tensor_spec import LeftOut, TensorSpec
from rabbitllm.splitter.journal import Replay
from rabbitllm.splitter.plan import PlannedShard, SplitPlan, tensors_by_shard
from rabbitllm.storage.files import PositionalFile, file_opener
from rabbitllm.store.checksums import crc32, crc32_combine
from rabbitllm.store.manifest import MANIFEST_NAME, LayerRecord, Manifest
from rabbitllm.store.tensor_values import read_tensor

logger = logging.getLogger(__name__)

READ_BYTES = 4 << 20
"""Size of one read of a shard."""
SECOND_NS = 10**9
_NO_CHECKSUMS: Mapping[str, int] = {}


class Change(enum.Enum):
    """The difference between two `FileStat` of one path."""

    NONE = "none"
    COPIED = "another inode, with the same size and modification time"
    METADATA = "another ctime: renamed, linked, or modified with the modification time set back"
    MODIFIED = "another size or modification time"


def change_between(before: FileStat, now: FileStat) -> Change:
    """Classify the difference between two `FileStat` of one path."""
    if before.size != now.size or not _same_time(before.mtime_ns, now.mtime_ns):
        return Change.MODIFIED
    if before.inode != now.inode:
        return Change.COPIED
    return Change.NONE if before.ctime_ns == now.ctime_ns else Change.METADATA


def _same_time(first: int, second: int) -> bool:
    """Whether two times agree; some copying tools keep whole seconds only."""
    truncated = first // SECOND_NS == second // SECOND_NS and 0 in (first % SECOND_NS, second % SECOND_NS)
    return first == second or truncated


def source_crc32(path: Path, tensors: Iterable[TensorSpec], checksums: Mapping[str, int] = _NO_CHECKSUMS) -> int:
    """Compute the CRC-32 of the data that a split uses of a shard: its tensors by offset, each in row-major order.

    Args:
        path: of the shard.
        tensors: the tensors that the split uses.
        checksums: of some of these tensors, by name; they are not read.

    Raises:
        CorruptShardError: the file is too short.
        OSError: the file cannot be read.
    """
    total = 0
    with PositionalFile(path) as file:
        file.advise_sequential()
        buffer = memoryview(bytearray(READ_BYTES))
        for spec in sorted(tensors, key=lambda spec: (spec.offset, spec.name)):
            crc = checksums.get(spec.name)
            total = crc32_combine(total, _tensor_crc32(file, spec, buffer) if crc is None else crc, spec.nbytes)
    return total


def _tensor_crc32(file: PositionalFile, spec: TensorSpec, buffer: memoryview) -> int:
    crc = 0
    for begin in range(0, spec.nbytes, READ_BYTES):
        part = buffer[: min(READ_BYTES, spec.nbytes - begin)]
        if read_tensor(file, spec, begin, part) != len(part):
            raise CorruptShardError(f"{file.path} ends within {spec.name!r}.")
        crc = crc32(part, crc)
    return crc


def require_unmodified(path: Path, shard: PlannedShard, checkpoint: Checkpoint) -> None:
    """Check after reading a shard that it was not modified since the plan was made or checked.

    A file of the same size and time, but with other metadata, may be a copy: then the fingerprint has to be the same.

    Raises:
        CorruptShardError: it was modified.
    """
    if shard.stat is None:
        return
    now = file_stat(path)
    change = change_between(shard.stat, now)
    if change is Change.NONE:
        return
    difference = _describe_difference(shard.stat, now)
    if change is not Change.MODIFIED:
        current = checkpoint.metadata(shard.name)
        if current is not None and current.fingerprint == shard.fingerprint:
            return
        difference = "its bytes differ"
    raise CorruptShardError(
        f"{path} was modified while it was being split: {difference}.",
        "Restore the file as it was when the split was started, and make the same call again. The data just read "
        "is not used. Do not delete anything: other shards may be deleted already.",
    )


def with_checksums(plan: SplitPlan, checkpoint: Checkpoint) -> SplitPlan:
    """Read all shards on this machine, record their checksums in the plan, and compare those that have a digest.

    Raises:
        CorruptShardError: a shard differs from its digest, or is too short.
    """
    shards = []
    with showing_progress(sum(shard.size for shard in plan.shards if not shard.staged)) as tell:
        for shard in plan.shards:
            if shard.staged:
                shards.append(shard)
                continue
            path = checkpoint.acquire(shard.name)
            if not has_digest(shard.fingerprint):
                shard = dataclasses.replace(shard, expected_crc32=source_crc32(path, shard.tensors))
            elif not _matches_digest(path, shard.fingerprint):
                raise CorruptShardError(
                    f"{path} differs from its digest on the hub.",
                    "Delete that file and make the call again: it is then downloaded again.",
                )
            shards.append(shard)
            tell(shard.name, shard.size)
    return dataclasses.replace(plan, shards=tuple(shards))


def moved_tensor(index: CheckpointIndex, owners: Mapping[str, str]) -> str | None:
    """Return how an index differs from tensor -> shard of when a split was begun; None if it does not."""
    for name, shard in owners.items():
        if (now := index.weight_map.get(name, shard)) != shard:
            return f"its index takes {name} from {now}, not {shard}"
    return None


def moved_layer(index: CheckpointIndex, layers: Iterable[LayerRecord]) -> str | None:
    """Return how an index differs from layer -> shards of a finished split; None if it does not, or lacks tensors."""
    shard_of = index.weight_map
    for layer in layers:
        now = {shard_of[name] for name in layer.tensors if name in shard_of}
        if layer.shards and shard_of.keys() >= {*layer.tensors} and now != {*layer.shards}:
            return f"its index takes layer {layer.id} from {listed(sorted(now), 3)}, not {listed(layer.shards, 3)}"
        owners = {name: layer.shards[number] for name, number in zip(layer.tensors, layer.owners, strict=False)}
        if (moved := moved_tensor(index, owners)) is not None:
            return moved
    return None


def check_resumed(
    earlier: Replay, metadata: Mapping[str, ShardMetadata], checkpoint: Checkpoint, folder: Path, *, verify: bool
) -> SplitPlan:
    """Return an earlier run's plan with the current metadata of its shards, after a check that they are unchanged.

    A used shard of which nothing shows that it is unchanged has its old metadata there, or none; `release_if_same`
    reads it, if it is to be deleted.

    Args:
        earlier: the journal of that run.
        metadata: of the shards that still exist; the caller has compared their fingerprints.
        checkpoint: the source.
        folder: the split directory.
        verify: read every shard that can be compared, not only those with changed metadata.

    Raises:
        SplitMismatchError: a shard has changed, or its metadata has and there is no checksum to compare with.
    """
    stats = {name: shard_metadata.stat for name, shard_metadata in metadata.items()}
    present = [(shard, now) for shard in earlier.plan.shards if (now := stats.get(shard.name)) is not None]
    complete = all(shard.name in metadata or shard.staged for shard in earlier.plan.shards)
    to_read, current = [], {}
    for shard, now in present:
        change = change_between(shard.stat, now) if shard.stat is not None else Change.NONE
        has_checksum = shard.name in earlier.source_checksums or shard.expected_crc32 is not None
        comparable = now.size == shard.size and (has_checksum or has_digest(shard.fingerprint))
        used = shard.name in earlier.used
        is_doubtful = change in _DOUBTFUL or (used and change is Change.COPIED)
        if not used or (shard.stat is not None and (comparable or not is_doubtful)):
            current[shard.name] = now
        if comparable and (verify or is_doubtful):
            to_read.append(shard)
        elif change is Change.MODIFIED:
            assert shard.stat is not None
            raise _change_error(checkpoint, shard, folder, _describe_difference(shard.stat, now), complete)
        elif change is Change.METADATA:
            path = checkpoint.acquire(shard.name)
            logger.warning(
                "%s may have been modified since the split in %s was started: it has %s.", path, folder, change.value
            )
    if verify and (missing := len(present) - len(to_read)):
        logger.warning("%d shards of %s have no recorded checksum and cannot be compared.", missing, checkpoint.label)
    if (changed := _first_changed(to_read, checkpoint, earlier.source_checksums)) is not None:
        raise _change_error(checkpoint, changed, folder, "its bytes differ", complete)
    # their checksums have no copies of tensors, which may have changed
    unsure = () if earlier.plan.kept else to_read
    doubtful = [metadata[shard.name] for shard in unsure if not has_digest(shard.fingerprint)]
    again = left_out_of(checkpoint, doubtful, {shard.name: shard.tensors for shard in earlier.plan.shards})
    shards = []
    for shard in earlier.plan.shards:
        left_out = again.get(shard.name, shard.left_out)
        if not left_out and shard.name in metadata:  # earlier versions did not record it
            left_out = metadata[shard.name].header.left_out
        shards.append(dataclasses.replace(shard, stat=current.get(shard.name, shard.stat), left_out=left_out))
    return dataclasses.replace(earlier.plan, shards=tuple(shards))


_DOUBTFUL = (Change.MODIFIED, Change.METADATA)


def check_finished_source(
    manifest: Manifest, metadata: Sequence[ShardMetadata], checkpoint: Checkpoint, folder: Path, *, verify: bool
) -> list[PlannedShard]:
    """Compare a finished split with the shards of its source that still exist.

    Args:
        manifest: of the split.
        metadata: of these shards; the caller has compared their fingerprints.
        checkpoint: the source.
        folder: the split directory.
        verify: read and compare them. If False, warn of shards that are newer than the split.

    Returns:
        The shards that were compared, with the metadata of before; those without a checksum are not among them.

    Raises:
        SplitMismatchError: a shard has changed since the split was made.
    """
    recorded = manifest.source.fingerprints  # a blob of the hub cache may have become a file, whose name is no digest
    present = [f for f in metadata if f.stat is not None and f.name in recorded]
    if not verify:
        _warn_of_newer(present, checkpoint, folder)
        return []
    comparable = [f for f in present if has_digest(recorded[f.name]) or f.name in manifest.source_checksums]
    if missing := len(present) - len(comparable):
        logger.warning(
            "%d shards of %s have no recorded checksum; they are neither compared nor deleted.",
            missing,
            checkpoint.label,
        )
    tensors = tensors_by_shard(checkpoint.index, comparable)
    shards = [
        PlannedShard(f.name, f.size, recorded[f.name], tensors[f.name], staged=False, stat=f.stat) for f in comparable
    ]
    if (changed := _first_changed(shards, checkpoint, manifest.source_checksums)) is not None:
        path = checkpoint.acquire(changed.name)
        raise SplitMismatchError(
            f"{path} has changed since the split in {folder} was made: its bytes differ. Nothing was deleted.",
            f"To use the split unchanged, remove verify_source and delete_original, or load {folder}. To split "
            "the changed checkpoint, use another folder (--dir, layer_shards_saving_path).",
        )
    return shards


def require_same(shards: Iterable[PlannedShard], checkpoint: Checkpoint) -> None:
    """Read shards on this machine, and compare them with their digests, or with the checksums of when they were split.

    Raises:
        CorruptShardError: one of them differs; one with neither is not compared.
    """
    present = [s for s in shards if not s.staged and (has_digest(s.fingerprint) or s.expected_crc32 is not None)]
    if (changed := _first_changed(present, checkpoint)) is not None:
        raise CorruptShardError(
            f"{checkpoint.acquire(changed.name)} differs from its checksum. Nothing was changed.",
            "Restore the file as it was when it was split, or name another copy with --original.",
        )


def _first_changed(
    shards: Sequence[PlannedShard], checkpoint: Checkpoint, checksums: Mapping[str, int] = _NO_CHECKSUMS
) -> PlannedShard | None:
    """Read shards on this machine up to the first that differs from its digest, else from its checksum; return that.

    Args:
        shards: those to read.
        checkpoint: the source.
        checksums: shard -> `source_crc32`; of others it is the one in the plan.
    """
    with showing_progress(sum(shard.size for shard in shards)) as tell:
        for shard in shards:
            expected = checksums.get(shard.name, shard.expected_crc32)
            if not _is_same(checkpoint.acquire(shard.name), shard, expected):
                return shard
            tell(shard.name, shard.size)
    return None


def _warn_of_newer(present: Iterable[ShardMetadata], checkpoint: Checkpoint, folder: Path) -> None:
    split_time = (folder / MANIFEST_NAME).stat().st_mtime_ns
    newer = [f.name for f in present if f.stat and f.stat.mtime_ns > split_time and not has_digest(f.fingerprint)]
    if newer:
        logger.warning(
            "%s was modified after the split in %s was made (%s); the split has the earlier weights. "
            "verify_source=True checks whether they differ.",
            checkpoint.label,
            folder,
            listed(newer, 2),
        )


def left_out_of(
    checkpoint: Checkpoint, metadata: Iterable[ShardMetadata], tensors: Mapping[str, tuple[TensorSpec, ...]]
) -> dict[str, tuple[LeftOut, ...]]:
    """The tensors of each shard's file that a split leaves out.

    These are tensors that are no weights of the model, and those that the index takes from another shard, unless both
    have the same bytes, which are read for that. Of a shard that is fetched these are not looked at.

    Args:
        checkpoint: the source.
        metadata: of the shards that exist.
        tensors: shard -> those that the split takes of it (`tensors_by_shard`).
    """
    left_out = {}
    used = {spec.name: spec for specs in tensors.values() for spec in specs}
    for shard in metadata:
        omitted, copies = [*shard.header.left_out], [*shard.header.copies]
        if len(shard.header.tensors) != len(tensors[shard.name]):
            names = {spec.name for spec in tensors[shard.name]}
            copies += [spec for spec in shard.header.tensors if spec.name not in names]
        for spec in copies if not shard.staged else ():
            if not _is_copy(checkpoint, spec, used.get(spec.name)):
                owner = checkpoint.index.weight_map.get(spec.name, "another shard")
                omitted.append(LeftOut(f"{spec.name}, which is taken from {owner}", spec.extent))
        left_out[shard.name] = tuple(omitted)
    return left_out


def _is_copy(checkpoint: Checkpoint, spec: TensorSpec, other: TensorSpec | None) -> bool:
    """Whether two tensors on this machine have the same bytes."""
    if other is None or (spec.dtype, spec.shape) != (other.dtype, other.shape):
        return False
    path, other_path = checkpoint.at_hand(spec.file), checkpoint.at_hand(other.file)
    if path is None or other_path is None:
        return False
    first, second = memoryview(bytearray(READ_BYTES)), memoryview(bytearray(READ_BYTES))
    with PositionalFile(path) as file, PositionalFile(other_path) as other_file:
        for begin in range(0, spec.nbytes, READ_BYTES):
            length = min(READ_BYTES, spec.nbytes - begin)
            read = read_tensor(file, spec, begin, first[:length])
            if read != read_tensor(other_file, other, begin, second[:length]) or first[:read] != second[:read]:
                return False
    return True


def copies_first(checkpoint: Checkpoint, shards: Iterable[PlannedShard]) -> list[PlannedShard]:
    """Order shards for their deletion: each comes before those of which it has copies of tensors.

    So after a crash between two deletions the copies that are left can still be compared (`left_out_of`), unless two
    shards have copies of each other's tensors. A shard whose header is damaged counts as one without copies.

    Args:
        checkpoint: the source.
        shards: those to delete, each with the tensors that the split took of it.
    """
    planned = {shard.name: shard for shard in shards}
    owners = {spec.name: shard.name for shard in planned.values() for spec in shard.tensors}
    order = TopologicalSorter[str]()
    for name in planned:
        order.add(name)
        for tensor in _tensors_in(checkpoint, name):
            if (owner := owners.get(tensor.name, name)) != name:
                order.add(owner, name)
    with contextlib.suppress(CycleError):  # it still gives what is in no cycle, nor behind one
        order.prepare()
    names: dict[str, None] = {}
    while ready := order.get_ready():
        names.update(dict.fromkeys(ready))
        order.done(*ready)
    return [planned[name] for name in names | dict.fromkeys(planned)]


def _tensors_in(checkpoint: Checkpoint, shard: str) -> tuple[TensorSpec, ...]:
    """All tensors of a shard's file, with copies; none if it is not on this machine, or its header is damaged."""
    path = checkpoint.at_hand(shard)
    if path is None:
        return ()
    try:
        header = checkpoint.taken_from(shard, read_shard_header(path, shard))
    except CheckpointError:
        return ()
    return *header.tensors, *header.copies


def release_if_same(checkpoint: Checkpoint, shard: PlannedShard, crc32: int | None) -> Release:
    """Release a used shard of the source, unless its file is no longer the one that was split.

    A file is read and compared if its metadata differ from the shard's, or if these are unknown.

    Args:
        checkpoint: the source.
        shard: with the metadata of when it was read or compared.
        crc32: `source_crc32` of it; None if it has a digest, or is not known.
    """
    path = checkpoint.at_hand(shard.name)
    if path is not None:
        is_unchanged = shard.stat is not None and change_between(shard.stat, file_stat(path)) is Change.NONE
        if not is_unchanged and not _is_same(path, shard, crc32):
            logger.warning(
                "%s is kept: it has changed since it was split, or no checksum shows that it has not. The split has "
                "the earlier weights.",
                path,
            )
            return Release(shard.name, Disposal.CHANGED)
    return checkpoint.release(shard.name)


def _is_same(path: Path, shard: PlannedShard, crc32: int | None) -> bool:
    """Whether the file has the digest of the shard, or else this checksum; False if neither is known."""
    if has_digest(shard.fingerprint):
        return _matches_digest(path, shard.fingerprint)
    try:
        return crc32 is not None and source_crc32(path, shard.tensors) == crc32
    except CorruptShardError:
        return False


def _matches_digest(path: Path, fingerprint: str) -> bool:
    with open(path, "rb", opener=file_opener) as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == fingerprint


def _change_error(
    checkpoint: Checkpoint, shard: PlannedShard, folder: Path, how: str, complete: bool
) -> SplitMismatchError:
    """Return the error for a changed shard; `complete` says whether all shards still exist."""
    path = checkpoint.acquire(shard.name)
    remedy = "Restore the original file, and make the same call again."
    if shard.stat is not None and shard.stat.size == path.stat().st_size:
        seconds, fraction = divmod(shard.stat.mtime_ns, SECOND_NS)
        remedy += f" If it is an unchanged copy, restore its time: touch -d @{seconds}.{fraction:09} {path}."
    if complete:
        remedy += f" All shards still exist: to split the changed ones, delete {folder}."
    else:
        remedy += f" Do not delete anything: {folder} holds the only copy of the deleted shards."
    return SplitMismatchError(f"{path} has changed since the split in {folder} was started: {how}.", remedy)


def _describe_difference(before: FileStat, now: FileStat) -> str:
    if before.size != now.size:
        return f"it has {now.size:,} bytes and had {before.size:,}"
    return f"its modification time is {_format_time(now)} and was {_format_time(before)}"


def _format_time(stat: FileStat) -> str:
    return datetime.fromtimestamp(stat.mtime_ns / SECOND_NS).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


@contextlib.contextmanager
def showing_progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show the progress of reading so many bytes, if the progress of the split is shown."""
    if not total or not progress.is_shown():
        yield lambda name, nbytes: None
        return
    with shown_reading(total) as tell:
        yield tell
