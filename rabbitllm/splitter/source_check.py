"""Whether the shards of a local source are still those that a split was begun with, or made from.

The system says when a file was last written (`Stamp`); what is doubtful is read and compared, where something is known
to compare it with: the sum of what was taken from a shard, or the digest that a hub has published of it. What cannot be
compared is refused, before anything more is taken or deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rabbitllm import progress
from rabbitllm.checkpoints.checkpoint import Checkpoint, ShardFacts, Stamp, has_digest, stamp_of
from rabbitllm.errors import CorruptShardError, SplitMismatchError
from rabbitllm.formats.crc32 import combine
from rabbitllm.formats.positional import PositionalFile
from rabbitllm.formats.strided import read_run
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.layers.layer_store import MANIFEST_NAME, Manifest
from rabbitllm.splitter.journal import Replay
from rabbitllm.splitter.plan import PlannedShard, SplitPlan, tensors_by_shard
from rabbitllm.verify_display import shown_reading

logger = logging.getLogger(__name__)

READ_BYTES = 4 << 20
"""Of a shard at a time."""
SECOND_NS = 10**9
NOTHING_KNOWN: Mapping[str, int] = {}


class Change(enum.Enum):
    """What a second look at a file shows."""

    NONE = "it is as it was"
    COPIED = "it is another file of the same length and time"
    TOUCHED = "its name or attributes were changed, or its time was set back after its bytes were"
    WRITTEN = "its length or its time of change is another one"


def change_between(known: Stamp, now: Stamp) -> Change:
    """What two stamps of a file say."""
    if known.size != now.size or not _same_time(known.mtime_ns, now.mtime_ns):
        return Change.WRITTEN
    if known.inode != now.inode:
        return Change.COPIED
    return Change.NONE if known.ctime_ns == now.ctime_ns else Change.TOUCHED


def _same_time(first: int, second: int) -> bool:
    """Whether two times are the same; what copies a file may keep its whole seconds only."""
    whole = first // SECOND_NS == second // SECOND_NS and 0 in (first % SECOND_NS, second % SECOND_NS)
    return first == second or whole


def taken_crc32(path: Path, tensors: Iterable[TensorSpec], known: Mapping[str, int] = NOTHING_KNOWN) -> int:
    """The CRC-32 of what a split takes from a shard: its tensors by their place, each in row-major order.

    Args:
        path: of the shard.
        tensors: those that the split takes from it.
        known: the sums of some of them, which are then not read.

    Raises:
        CorruptShardError: the file ends too soon.
        OSError: it cannot be read.
    """
    total = 0
    with PositionalFile(path) as file:
        file.advise_sequential()
        buffer = memoryview(bytearray(READ_BYTES))
        for spec in sorted(tensors, key=lambda spec: (spec.offset, spec.name)):
            crc = known.get(spec.name)
            total = combine(total, _crc32_of(file, spec, buffer) if crc is None else crc, spec.nbytes)
    return total


def _crc32_of(file: PositionalFile, spec: TensorSpec, buffer: memoryview) -> int:
    crc = 0
    for begin in range(0, spec.nbytes, READ_BYTES):
        part = buffer[: min(READ_BYTES, spec.nbytes - begin)]
        if read_run(file, spec, begin, part) != len(part):
            raise CorruptShardError(f"{file.path} ended inside {spec.name!r}.")
        crc = zlib.crc32(part, crc)
    return crc


def require_unwritten(path: Path, shard: PlannedShard) -> None:
    """Make sure that a shard which has just been read was not written to since it was looked at.

    Raises:
        CorruptShardError: it was.
    """
    if shard.stamp is None:
        return
    now = stamp_of(path)
    if change_between(shard.stamp, now) is Change.WRITTEN:
        raise CorruptShardError(
            f"{path} was written to while it was being split: {_difference(shard.stamp, now)}.",
            "Put it back as it was when the split was begun, and make the same call again. Nothing that was read of it "
            "is used; delete nothing else, since other shards may be used up already.",
        )


def with_sums(plan: SplitPlan, checkpoint: Checkpoint) -> SplitPlan:
    """The plan with the sums of the shards that are here, all of which are read; digests of a hub are compared.

    Raises:
        CorruptShardError: a shard is not what its hub has published, or ends too soon.
    """
    shards = []
    here = [shard for shard in plan.shards if not shard.staged]
    with _shown(here) as tell:
        for shard in plan.shards:
            if shard.staged:
                shards.append(shard)
                continue
            path = checkpoint.acquire(shard.name)
            if has_digest(shard.fingerprint):
                if not _has_digest_of(path, shard.fingerprint):
                    raise CorruptShardError(
                        f"{path} has not the bytes that the hub has published under its name.",
                        "Delete that file and call again: it is fetched anew.",
                    )
                shards.append(shard)
            else:
                shards.append(dataclasses.replace(shard, crc32=taken_crc32(path, shard.tensors)))
            tell(shard.name, shard.size)
    return dataclasses.replace(plan, shards=tuple(shards))


def still_the_same(
    earlier: Replay, facts: Mapping[str, ShardFacts], checkpoint: Checkpoint, folder: Path, *, verify: bool
) -> SplitPlan:
    """The plan of an earlier run, with the stamps that its shards have now, once it is sure that they are the same.

    Args:
        earlier: that run's journal.
        facts: of the shards that are there; what they sample of each is compared already.
        checkpoint: the source.
        folder: the split directory.
        verify: read every shard of which anything is known to compare it with.

    Raises:
        SplitMismatchError: a shard has changed, or may have and cannot be compared.
    """
    here = [(s, stamp) for s in earlier.plan.shards if (stamp := _stamp(facts, s)) is not None]
    replaceable = all(shard.name in facts or shard.staged for shard in earlier.plan.shards)
    doubtful = []
    for shard, now in here:
        change = change_between(shard.stamp, now) if shard.stamp is not None else Change.NONE
        known = now.size == shard.size and _is_known(earlier, shard)
        used = shard.name in earlier.used
        if known and (verify or change in (Change.WRITTEN, Change.TOUCHED) or (used and change is Change.COPIED)):
            doubtful.append(shard)
        elif change is Change.WRITTEN:
            assert shard.stamp is not None
            raise _changed(checkpoint, shard, folder, _difference(shard.stamp, now), replaceable)
        elif change is Change.TOUCHED:
            path = checkpoint.acquire(shard.name)
            logger.warning(
                "%s may have been written to since the split in %s was begun: %s.", path, folder, change.value
            )
    if verify and (missing := len(here) - len(doubtful)):
        _say_unknown(missing, checkpoint)
    with _shown(doubtful) as tell:
        for shard in doubtful:
            if not _is_same(checkpoint.acquire(shard.name), shard, earlier.taken.get(shard.name, shard.crc32)):
                raise _changed(checkpoint, shard, folder, "its bytes are not those that it had then", replaceable)
            tell(shard.name, shard.size)
    stamps = {shard.name: now for shard, now in here}
    shards = (dataclasses.replace(s, stamp=stamps.get(s.name, s.stamp)) for s in earlier.plan.shards)
    return dataclasses.replace(earlier.plan, shards=tuple(shards))


def check_original(
    manifest: Manifest, facts: Sequence[ShardFacts], checkpoint: Checkpoint, folder: Path, *, verify: bool
) -> None:
    """Compare what is left of its original with a finished split; what it samples of each shard is compared already.

    Args:
        manifest: of the split.
        facts: of the shards that are there.
        checkpoint: the original.
        folder: the split directory.
        verify: read them, and compare; else say which were written to after the split was made.

    Raises:
        SplitMismatchError: a shard has other bytes than the split was made from.
    """
    here = [found for found in facts if found.stamp is not None and found.name in manifest.source.fingerprints]
    if not verify:
        made = (folder / MANIFEST_NAME).stat().st_mtime_ns
        for found in here:
            if found.stamp is not None and found.stamp.mtime_ns > made and not has_digest(found.fingerprint):
                logger.warning(
                    "%s was written to after the split in %s was made, which has nothing of that; verify_source=True "
                    "tells whether its weights are other ones.",
                    checkpoint.acquire(found.name),
                    folder,
                )
        return
    known = [found for found in here if has_digest(found.fingerprint) or found.name in manifest.taken]
    if missing := len(here) - len(known):
        _say_unknown(missing, checkpoint)
    tensors = tensors_by_shard(checkpoint.index, known)
    shards = [PlannedShard(f.name, f.size, f.fingerprint, tensors[f.name], staged=False) for f in known]
    with _shown(shards) as tell:
        for shard in shards:
            path = checkpoint.acquire(shard.name)
            if not _is_same(path, shard, manifest.taken.get(shard.name)):
                raise SplitMismatchError(
                    f"{path} has changed since the split in {folder} was made: its bytes are not those that it had "
                    "then.",
                    f"To use the split as it is, leave verify_source out, or name {folder} itself. To split what is "
                    "there now, choose another folder (layer_shards_saving_path).",
                )
            tell(shard.name, shard.size)


def _say_unknown(count: int, checkpoint: Checkpoint) -> None:
    text = "Nothing is known of the bytes of %d shards of %s by which to compare them."
    logger.warning(text, count, checkpoint.label)


def _stamp(facts: Mapping[str, ShardFacts], shard: PlannedShard) -> Stamp | None:
    found = facts.get(shard.name)
    return found.stamp if found is not None else None


def _is_known(earlier: Replay, shard: PlannedShard) -> bool:
    return has_digest(shard.fingerprint) or shard.name in earlier.taken or shard.crc32 is not None


def _is_same(path: Path, shard: PlannedShard, crc32: int | None) -> bool:
    """Whether a shard has the bytes that are known of it."""
    if has_digest(shard.fingerprint):
        return _has_digest_of(path, shard.fingerprint)
    try:
        return taken_crc32(path, shard.tensors) == crc32
    except CorruptShardError:
        return False


def _has_digest_of(path: Path, fingerprint: str) -> bool:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == fingerprint


def _changed(
    checkpoint: Checkpoint, shard: PlannedShard, folder: Path, how: str, replaceable: bool
) -> SplitMismatchError:
    path = checkpoint.acquire(shard.name)
    back = "Put it back as it was, and make the same call again."
    if shard.stamp is not None and shard.stamp.size == path.stat().st_size:
        seconds, rest = divmod(shard.stamp.mtime_ns, SECOND_NS)
        back += f" If it is a sound copy of that file, give it its time back: touch -d @{seconds}.{rest:09} {path}."
    if replaceable:
        back += f" All shards are still there: to split them as they are now, delete {folder}."
    else:
        back += " Delete nothing: the shards that are used up exist in that folder only."
    return SplitMismatchError(f"{path} has changed since the split in {folder} was begun: {how}.", back)


def _difference(known: Stamp, now: Stamp) -> str:
    if known.size != now.size:
        return f"it has {now.size:,} bytes and had {known.size:,}"
    return f"it was written {_time(now)}, and before that {_time(known)}"


def _time(stamp: Stamp) -> str:
    return datetime.fromtimestamp(stamp.mtime_ns / SECOND_NS).astimezone().isoformat(sep=" ", timespec="milliseconds")


@contextlib.contextmanager
def _shown(shards: Iterable[PlannedShard]) -> Iterator[Callable[[str, int], None]]:
    """Show what is read of these shards, where a split shows itself."""
    total = sum(shard.size for shard in shards)
    if not total or not progress.is_shown():
        yield lambda name, nbytes: None
        return
    with shown_reading(total) as tell:
        yield tell
