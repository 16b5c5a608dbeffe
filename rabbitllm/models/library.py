"""The split directories of this machine, complete or not: all under `home()`, those in a folder, those of one model.

Reads `split.json` or the journal's first line and the sizes of files, and samples of a checkpoint's shards; opens no
layer, and never contacts the hub. A split directory outside `locations.home()` is only found by its folder.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rabbitllm.base.options import expand
from rabbitllm.base.plain_json import fields_of
from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.checkpoints.hub import HubAccess, cached_snapshot
from rabbitllm.checkpoints.hub_cache import snapshot_of
from rabbitllm.checkpoints.index import gguf_label, gguf_models, index_of
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.errors import CheckpointError, CheckpointNotFoundError, OptionError, RabbitLLMError, SplitMismatchError
from rabbitllm.quant.schemes import COMPRESSIONS
from rabbitllm.splitter import journal
from rabbitllm.splitter.disk_sampler import disk_bytes, occupied
from rabbitllm.store import locations
from rabbitllm.store.layer_file import COPIES_NAME, DONE_SUFFIX, LAYER_SUFFIX
from rabbitllm.store.locations import require_place, resolve_name, with_near_names
from rabbitllm.store.manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    REMOVED_SUFFIX,
    SPLIT_DIRECTORY,
    SPLITS,
    Manifest,
    check_split,
    directory_name,
    is_legacy,
    read_manifest,
)

WHOLE = "whole"
UNFINISHED = "unfinished"
DAMAGED = "damaged"
HALF_REMOVED = "half removed"
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
        layers, layers_of: layer files that have their final name, and their final number.
        shards, shards_used: of an unfinished split, the shards of the source and how many of them are used up.
        problem: damage found; None if none.
        legacy: whether RabbitLLM 1.1 made it.
        nbytes: bytes on the disk.
        copies_bytes: those of copies that a model drafts with.
        gguf: "GGUF Q4_K_M" if it was made from such files; None if from others.
        changed_at: time of the last write to its manifest or journal, ISO 8601 with seconds.
    """

    folder: Path
    name: str
    state: str
    source: SourceIdentity | None
    compression: str | None
    layers: int
    layers_of: int
    shards: int = 0
    shards_used: int = 0
    problem: str | None = None
    legacy: bool = False
    nbytes: int = 0
    copies_bytes: int = 0
    changed_at: str = ""
    gguf: str | None = None

    @property
    def form(self) -> str:
        """How its weights are stored, in text."""
        return self.compression or self.gguf or "uncompressed"

    @property
    def title(self) -> str:
        """A name that tells it apart: of a GGUF file in a folder, or of one of several in a repository."""
        model = locations.model_of(self.folder, self.compression)
        if self.gguf is None or self.source is None:
            return self.name
        if self.source.kind == "hub":
            return f"{self.name}:{model}" if model else self.name
        return next(iter(gguf_models(self.source.fingerprints)), None) or next(iter(self.source.fingerprints))

    @property
    def commit(self) -> str | None:
        """The pinned commit of a repository."""
        return self.source.commit if self.source is not None else None


def look(folder: Path) -> SplitEntry | None:
    """The split directory in a folder; None if it is not one.

    Raises:
        OSError: the folder cannot be read.
    """
    if not folder.is_dir():
        return None
    if (record := _record_in(folder)) is not None:
        entry = (_finished if record.startswith(MANIFEST_NAME) else _unfinished)(folder, record)
        changed = [folder / record]
    elif is_legacy(folder):
        entry = _legacy(folder)
        changed = [*folder.glob(f"*{LAYER_SUFFIX}")] or [folder]
    else:
        return None
    if record is not None and record.endswith(REMOVED_SUFFIX) and entry.source is not None:
        entry = replace(entry, state=HALF_REMOVED, problem=None)
    time = datetime.datetime.fromtimestamp(max(path.stat().st_mtime for path in changed)).astimezone()
    copies = folder / COPIES_NAME
    of_copies, changed_at = disk_bytes(copies) + occupied(copies), time.isoformat(timespec="seconds")
    return replace(entry, nbytes=disk_bytes(folder), copies_bytes=of_copies, changed_at=changed_at)


def _record_in(folder: Path) -> str | None:
    return next((record for record in RECORDS if (folder / record).exists()), None)


def as_record(entry: SplitEntry) -> dict[str, Any]:
    """An entry for `json.dumps`; sizes in bytes."""
    source = entry.source.kind if entry.source is not None else None
    return {
        "name": entry.name,
        "folder": str(entry.folder),
        "state": entry.state,
        "source": source,
        **fields_of(entry, "commit", "compression", "gguf"),
        "bytes": entry.nbytes,
        **fields_of(entry, "layers", "layers_of", "shards", "shards_used", "changed_at", "problem"),
        "rabbitllm_1": entry.legacy,
    }


def _finished(folder: Path, record: str) -> SplitEntry:
    try:
        manifest = read_manifest(folder, record)
    except RabbitLLMError as error:
        return _unreadable(folder, error.problem.removesuffix("."))
    assert manifest is not None
    sizes = {layer.file: _size(folder / layer.file) for layer in manifest.layers}
    problem = _problem(manifest, sizes)
    source, layers = manifest.source, sum(size is not None for size in sizes.values())
    state, shards = WHOLE if problem is None else DAMAGED, len(source.fingerprints)
    gguf = gguf_label(source.fingerprints, manifest.source_metadata)
    numbers = layers, len(sizes), shards, shards
    return SplitEntry(folder, source.name, state, source, manifest.compression, *numbers, problem, gguf=gguf)


def _problem(manifest: Manifest, sizes: Mapping[str, int | None]) -> str | None:
    """The first layer file whose size differs from the manifest; None if all match."""
    wrong = [r for r in manifest.layers if sizes[r.file] != r.size]
    if not wrong:
        return None
    first = wrong[0]
    state = "is missing" if sizes[first.file] is None else f"has {sizes[first.file]:,} bytes instead of {first.size:,}"
    rest = f", and {len(wrong) - 1} more differ from what was written" if wrong[1:] else ""
    return f"{first.file} {state}{rest}"


def _unfinished(folder: Path, record: str) -> SplitEntry:
    progress = journal.glance(folder, record)
    if progress is None:
        return _unreadable(folder, f"{record} cannot be read")
    source, layers = progress.source, _layer_files(folder)
    sizes = layers, len(progress.stems), len(progress.shards), len(progress.used)
    gguf = gguf_label(source.fingerprints)
    return SplitEntry(folder, source.name, UNFINISHED, source, progress.compression, *sizes, gguf=gguf)


def _unreadable(folder: Path, problem: str) -> SplitEntry:
    """A split directory whose manifest or journal cannot be read."""
    layers = _layer_files(folder)
    return SplitEntry(folder, folder.name, DAMAGED, None, None, layers, layers, problem=problem)


def _layer_files(folder: Path) -> int:
    return sum(1 for _ in folder.glob(f"*{LAYER_SUFFIX}"))


def _legacy(folder: Path) -> SplitEntry:
    files = sorted(folder.glob(f"*{LAYER_SUFFIX}"))
    unmarked = [path.name for path in files if not path.with_name(path.name + DONE_SUFFIX).exists()]
    problem = f"{unmarked[0]} has no {DONE_SUFFIX} marker" if unmarked else None
    ending = folder.name.rpartition(".")[2]
    compression = ending if ending in COMPRESSIONS else None
    state, marked = DAMAGED if unmarked else WHOLE, len(files) - len(unmarked)
    name = locations.spelled_out(folder).parent.name
    return SplitEntry(folder, name, state, None, compression, marked, len(files), problem=problem, legacy=True)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


DEPTH = 4
"""Levels below a folder that are searched: `home()` has its splits three below it."""
NEAR_DEPTH = 2
"""The same of the working folder: a split of CHECKPOINT is in CHECKPOINT/splitted_model."""


def known() -> list[SplitEntry]:
    """Every split directory under `home()`."""
    return _entries(_split_directories(locations.home()))


def below(folder: Path, depth: int = DEPTH) -> list[SplitEntry]:
    """Split directories in a folder, or the folder itself if it is one.

    Args:
        folder: where the search starts.
        depth: levels below it that are searched.

    Raises:
        CheckpointNotFoundError: there is no such folder.
    """
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"There is no folder {str(folder)!r}.", "Check the path.")
    return _entries(_split_directories(folder, depth))


def of_model(name: str, compression: str | None = None, saving_path: Path | None = None) -> list[SplitEntry]:
    """The split directories of one model, the largest compression last.

    Args:
        name: a split directory, a checkpoint's folder, a repository, or a name in the entries of `known`.
        compression: one of `SPLITS`, "none" for uncompressed; None for all.
        saving_path: folder that the user chose for them; None for the usual locations. Splits of other models in it
            are left out.

    Raises:
        OptionError: the compression is unknown.
    """
    entries = _at_locations(name, compression, saving_path)
    return [entry for entry in entries if saving_path is None or not _is_of_another(entry, name)]


def _at_locations(name: str, compression: str | None, saving_path: Path | None) -> list[SplitEntry]:
    """The split directories where those of a model are: a folder that the user chose may have those of another one."""
    compression = compression.lower() if compression is not None else None
    if compression not in ("none", *SPLITS):
        raise OptionError(
            f"compression={compression!r} does not exist.", f"Use one of none, {', '.join(filter(None, SPLITS))}."
        )
    entries = _entries(_locations(resolve_name(name), saving_path))
    if compression is None:
        return entries
    return [entry for entry in entries if (entry.compression or "none") == compression]


def _is_of_another(entry: SplitEntry, name: str) -> bool:
    """Whether a split directory was made from another model than the named one.

    A folder's shards tell; where none of them is left, its name does.
    """
    place = locations.one_of_several(resolve_name(name))[0]
    folder, source = expand(place), entry.source
    if source is None or folder.resolve() == entry.folder.resolve():
        return False
    if not folder.is_dir():
        return source.name != place
    if (snapshot := snapshot_of(folder)) is not None:
        return (source.kind, source.name) != ("hub", snapshot.repo_id)
    shards = [shard for shard in source.fingerprints if (folder / shard).is_file()]
    if source.kind != "local" or not shards:
        return (source.kind, source.name) != ("local", folder.resolve().name)
    return not any(is_same_shard(folder, shard, source.fingerprints[shard]) for shard in shards)


def is_same_shard(folder: Path, shard: str, fingerprint: str) -> bool:
    """Whether a folder holds the shard that was split."""
    if not (folder / shard).is_file():
        return False
    try:
        metadata = LocalCheckpoint(folder, index=index_of({"": shard})).metadata(shard)
    except (CheckpointError, OSError):
        return False
    return metadata is not None and metadata.fingerprint == fingerprint


def folders_of(name: str) -> list[Path]:
    """The folders on this machine with files of a model: its checkpoint, also in the hub cache, and its splits."""
    folders: list[Path | None] = []
    with contextlib.suppress(RabbitLLMError):
        folders += [entry.folder for entry in of_model(name)]
        name = locations.one_of_several(resolve_name(name))[0]
        is_repository = locations.is_repo_id(name) and not expand(name).is_dir()
        folders.append(cached_snapshot(name, HubAccess()) if is_repository else expand(name))
    return [folder for folder in folders if folder is not None and folder.is_dir()]


def one_of_model(name: str, compression: str | None = None, saving_path: Path | None = None) -> SplitEntry:
    """The split directory of a model, which must have exactly one.

    Raises:
        CheckpointNotFoundError: there is none.
        SplitMismatchError: only another model has one in the folder that the user chose.
        OptionError: there are several.
    """
    entries = of_model(name, compression, saving_path)
    if not entries:
        require_place(name)
        for other in _at_locations(name, compression, saving_path):
            source = other.source.instead_of(name) if other.source is not None else other.name
            raise SplitMismatchError(
                f"{other.folder} was split from {source}. Nothing was changed.",
                "Check MODEL and --dir. If you mean this split, use its folder as MODEL.",
            )
        raise no_split_of(name)
    if len(entries) > 1:
        several = "; ".join(f"{entry.compression or entry.gguf or 'none'} in {entry.folder}" for entry in entries)
        raise OptionError(
            f"{name} has {len(entries)} split directories: {several}.",
            "Choose one with --compression, or use its folder as MODEL.",
        )
    return entries[0]


def compression_here(name: str, saving_path: Path | None = None) -> str | None:
    """The default compression of a model: that of its least compressed complete split, else none."""
    whole = [entry.compression for entry in of_model(name, saving_path=saving_path) if entry.state == WHOLE]
    return min(whole, key=SPLITS.index, default=None)


def compression_to_run(name: str, word: str | None, folder: Path | None = None) -> str | None:
    """The compression that the user names ("none" in any spelling), else that of a split on this machine."""
    if word is None:
        return compression_here(name, folder)
    return None if str(word).lower() == "none" else check_split(word)


def no_split_of(name: str) -> CheckpointNotFoundError:
    """The error for a model without a split on this machine."""
    error = CheckpointNotFoundError(
        f"There is no known split of {name} on this machine.",
        "`rabbitllm ls` lists the known splits; for a split in another folder, use that folder as MODEL.",
    )
    return with_near_names(error, name)


def _locations(name: str, saving_path: Path | None) -> Iterator[Path]:
    """Folders that may be splits of a model; some may not exist."""
    name, model = locations.one_of_several(name)
    folder, base = expand(name), locations.base_for(model, saving_path)
    if name and folder.is_dir():
        if not model and look(folder) is not None:
            yield folder
            return
        for compression in SPLITS:
            yield locations.for_local(folder, saving_path, compression, base)
        return
    if saving_path is not None:
        yield from (saving_path / directory_name(compression) for compression in SPLITS)
        return
    if locations.is_repo_id(name):
        yield from locations.of_repository(name, base)
        if "/" not in name:
            folders = (locations.home() / locations.LOCAL_FOLDER).glob(f"{name}-*/{SPLIT_DIRECTORY}*")
            yield from sorted(path for path in folders if path.parent.name.rpartition("-")[0] == name)


def _entries(folders: Iterable[Path]) -> list[SplitEntry]:
    results = []
    for folder in folders:
        with contextlib.suppress(OSError):  # removed meanwhile, or not readable by this user
            results.append(look(folder))
    entries = [entry for entry in results if entry is not None]
    return sorted(entries, key=lambda entry: (entry.name.lower(), entry.folder.parent, SPLITS.index(entry.compression)))


def _split_directories(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    for name, below, _ in os.walk(folder):
        path = Path(name)
        if _is_split(path):
            yield path
            below.clear()
        elif len(path.relative_to(folder).parts) == depth:
            below.clear()
        yield from (link for link in map(path.joinpath, below) if link.is_symlink() and _is_split(link))


def _is_split(folder: Path) -> bool:
    return _record_in(folder) is not None or is_legacy(folder)
