"""A split directory from outside, complete or not: its own record, and the sizes of its files.

Reads `split.json` or the journal's first line and the sizes of files; opens no layer.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.errors import RabbitLLMError
from rabbitllm.quant.compression import COMPRESSIONS
from rabbitllm.splitter import journal
from rabbitllm.splitter.disk_sampler import disk_bytes
from rabbitllm.store.layer_file import DONE_SUFFIX, LAYER_SUFFIX
from rabbitllm.store.manifest import JOURNAL_NAME, MANIFEST_NAME, Manifest, is_legacy, read_manifest

WHOLE = "whole"
UNFINISHED = "unfinished"
DAMAGED = "damaged"
HALF_REMOVED = "half removed"
REMOVED_SUFFIX = ".removed"
"""Appended to the name of a manifest or journal while its directory is being removed."""
RECORDS = (MANIFEST_NAME, JOURNAL_NAME, MANIFEST_NAME + REMOVED_SUFFIX, JOURNAL_NAME + REMOVED_SUFFIX)
"""Files that mark a split directory of this version."""


@dataclass(frozen=True, slots=True)
class SplitEntry:
    """A split directory.

    Attributes:
        folder: the split directory.
        name: the repository id, or the name of the folder that was split; for RabbitLLM 1.1's, which do not record it,
            the parent folder.
        state: `WHOLE`, `UNFINISHED`, `DAMAGED` or `HALF_REMOVED`.
        source: the checkpoint that was split; None where nothing records it.
        compression: None, a single one for all tensors, or "auto".
        nbytes: bytes on the disk.
        layers, layers_of: layer files that have their final name, and their final number.
        shards, shards_used: of an unfinished split, the shards of the source and how many of them are used up.
        changed_at: time of the last write to its manifest or journal, ISO 8601 with seconds.
        problem: damage found; None if none.
        legacy: whether RabbitLLM 1.1 made it.
    """

    folder: Path
    name: str
    state: str
    source: SourceIdentity | None
    compression: str | None
    nbytes: int
    layers: int
    layers_of: int
    shards: int
    shards_used: int
    changed_at: str
    problem: str | None = None
    legacy: bool = False

    @property
    def commit(self) -> str | None:
        """The pinned commit of a repository."""
        return self.source.commit if self.source is not None else None


def look(folder: Path) -> SplitEntry | None:
    """The split directory in a folder; None if it is not one.

    Raises:
        OSError: the folder cannot be read.
    """
    if folder.is_symlink() or not folder.is_dir():
        return None
    if (folder / MANIFEST_NAME).exists():
        return _finished(folder, MANIFEST_NAME)
    if (folder / JOURNAL_NAME).exists():
        return _unfinished(folder, JOURNAL_NAME)
    if (folder / (MANIFEST_NAME + REMOVED_SUFFIX)).exists():
        return _finished(folder, MANIFEST_NAME + REMOVED_SUFFIX)
    if (folder / (JOURNAL_NAME + REMOVED_SUFFIX)).exists():
        return _unfinished(folder, JOURNAL_NAME + REMOVED_SUFFIX)
    return _legacy(folder) if is_legacy(folder) else None


def as_record(entry: SplitEntry) -> dict[str, Any]:
    """An entry for `json.dumps`; sizes in bytes."""
    kind = entry.source.kind if entry.source is not None else None
    return {
        "name": entry.name,
        "folder": str(entry.folder),
        "state": entry.state,
        "source": kind,
        "commit": entry.commit,
        "compression": entry.compression,
        "bytes": entry.nbytes,
        "layers": entry.layers,
        "layers_of": entry.layers_of,
        "shards": entry.shards,
        "shards_used": entry.shards_used,
        "changed_at": entry.changed_at,
        "problem": entry.problem,
        "rabbitllm_1": entry.legacy,
    }


def _finished(folder: Path, record: str) -> SplitEntry:
    changed = _changed(folder / record)
    try:
        manifest = read_manifest(folder, record)
        assert manifest is not None
    except RabbitLLMError as error:
        done = sum(1 for _ in folder.glob(f"*{LAYER_SUFFIX}"))
        return SplitEntry(
            folder, folder.name, DAMAGED, None, None, disk_bytes(folder), done, done, 0, 0, changed, error.problem
        )
    sizes = {r.file: _size(folder / r.file) for r in manifest.layers}
    problem = None if record != MANIFEST_NAME else _problem(manifest, sizes)
    whole = DAMAGED if problem is not None else WHOLE
    return SplitEntry(
        folder,
        manifest.source.name,
        whole if record == MANIFEST_NAME else HALF_REMOVED,
        manifest.source,
        manifest.compression,
        disk_bytes(folder),
        sum(size is not None for size in sizes.values()),
        len(sizes),
        len(manifest.source.fingerprints),
        len(manifest.source.fingerprints),
        changed,
        problem,
    )


def _problem(manifest: Manifest, sizes: Mapping[str, int | None]) -> str | None:
    """The first layer file whose size differs from the manifest; None if all match."""
    wrong = [r for r in manifest.layers if sizes[r.file] != r.size]
    if not wrong:
        return None
    first = wrong[0]
    found = "is missing" if sizes[first.file] is None else f"has {sizes[first.file]:,} bytes instead of {first.size:,}"
    more = f", and {len(wrong) - 1} more are not as they were written" if wrong[1:] else ""
    return f"{first.file} {found}{more}"


def _unfinished(folder: Path, record: str) -> SplitEntry:
    changed = _changed(folder / record)
    done = sum(1 for _ in folder.glob(f"*{LAYER_SUFFIX}"))
    seen = journal.glance(folder, record)
    if seen is None:
        problem = f"{record} cannot be read back"
        return SplitEntry(
            folder, folder.name, DAMAGED, None, None, disk_bytes(folder), done, done, 0, 0, changed, problem
        )
    return SplitEntry(
        folder,
        seen.source.name,
        UNFINISHED if record == JOURNAL_NAME else HALF_REMOVED,
        seen.source,
        seen.compression,
        disk_bytes(folder),
        done,
        len(seen.stems),
        len(seen.shards),
        len(seen.used),
        changed,
    )


def _legacy(folder: Path) -> SplitEntry:
    files = sorted(folder.glob(f"*{LAYER_SUFFIX}"))
    unmarked = [path.name for path in files if not path.with_name(path.name + DONE_SUFFIX).exists()]
    problem = f"{unmarked[0]} has no {DONE_SUFFIX} marker" if unmarked else None
    compression = folder.name.rpartition(".")[2]
    return SplitEntry(
        folder,
        folder.parent.name,
        DAMAGED if unmarked else WHOLE,
        None,
        compression if compression in COMPRESSIONS else None,
        disk_bytes(folder),
        len(files) - len(unmarked),
        len(files),
        0,
        0,
        max(map(_changed, files), default=_changed(folder)),
        problem,
        legacy=True,
    )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _changed(path: Path) -> str:
    return datetime.datetime.fromtimestamp(path.stat().st_mtime).astimezone().isoformat(timespec="seconds")
