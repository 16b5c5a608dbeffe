"""Whether the source of a split directory is still available, or its layer files are the only copy.

Reads headers and samples of local shards; never contacts the hub: a source fetched from the hub is assumed to be
still there, at its pinned commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.checkpoints.index import index_of
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.errors import CheckpointError
from rabbitllm.models.library.entry import REMOVED_SUFFIX, SplitEntry
from rabbitllm.splitter import journal
from rabbitllm.store.manifest import JOURNAL_NAME


@dataclass(frozen=True, slots=True)
class Original:
    """The source of a split, as far as it still exists.

    Attributes:
        there: whether every part in the split directory is also available elsewhere.
        where: in words: where it is, or which part is missing or unknown.
    """

    there: bool
    where: str


def original_of(entry: SplitEntry, folder: Path | None = None) -> Original:
    """Look for the original of a split.

    Args:
        entry: the split directory.
        folder: the checkpoint's folder, if the user named it; else the parent of the split directory is searched.
    """
    source = entry.source
    if source is not None and source.kind == "hub":
        commit = f" at commit {source.commit[:8]}" if source.commit else ""
        return Original(True, f"on the hub, {source.name}{commit}")
    around = [folder] if folder is not None else [entry.folder.parent]
    if source is None:
        return _of_an_unknown(around)
    needed = _needed(entry)
    if not needed:
        return Original(True, f"in the folder {source.name}; no shard of it is used up yet")
    missing: list[str] = list(needed)
    for place in around:
        missing = [shard for shard in needed if not _is_same(place, shard, source.fingerprints[shard])]
        if not missing:
            return Original(True, f"in {place}")
    some = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
    of = f"{len(missing)} of its {len(needed)} shards" if len(missing) > 1 else "its shard"
    return Original(False, f"{of} not in {around[0]}: {some}")


def _needed(entry: SplitEntry) -> list[str]:
    """The shards that the split directory has the content of: of an unfinished split, those used up."""
    assert entry.source is not None
    for name in (JOURNAL_NAME, JOURNAL_NAME + REMOVED_SUFFIX):
        if (seen := journal.glance(entry.folder, name)) is not None and entry.shards_used < entry.shards:
            return sorted(seen.used)
    return sorted(entry.source.fingerprints)


def _is_same(folder: Path, shard: str, fingerprint: str) -> bool:
    """Whether a folder holds the shard that was split."""
    if not (folder / shard).is_file():
        return False
    try:
        facts = LocalCheckpoint(folder, index=index_of({"": shard})).facts(shard)
    except (CheckpointError, OSError):
        return False
    return facts is not None and facts.fingerprint == fingerprint


def _of_an_unknown(folders: Iterable[Path]) -> Original:
    """The original of a RabbitLLM 1.1 split, which has no record of it: a complete checkpoint around it."""
    for folder in folders:
        try:
            checkpoint = LocalCheckpoint(folder)
        except (CheckpointError, OSError):
            continue
        if all((folder / shard).is_file() for shard in checkpoint.index.shards):
            return Original(True, f"in {folder}")
    return Original(False, "RabbitLLM 1.1 noted nothing of it, and no whole checkpoint lies around it")
