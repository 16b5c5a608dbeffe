"""Removes a split directory, after checking that its source is still available.

Everything in it is checked before the first file is removed; if one file is not ours, nothing is changed. The record
(`split.json`, or the journal) is renamed first, durably, and removed last: so the remains after a crash never look
complete, and the removal can be resumed. Independent of prompts and terminals.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rabbitllm.base.options import expand
from rabbitllm.base.terminal import counted, listed
from rabbitllm.checkpoints.checkpoint import COMPANIONS, SourceIdentity, is_sidecar
from rabbitllm.checkpoints.hub import HubAccess, cached_snapshot, open_repository, staged_name
from rabbitllm.checkpoints.index import gguf_models, is_gguf_file
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.errors import (
    CheckpointError,
    HubError,
    InvalidIndexError,
    SplitError,
    SplitMismatchError,
    system_errors_by_name,
)
from rabbitllm.formats.bounded import read_json
from rabbitllm.models.library import DAMAGED, RECORDS, SplitEntry, is_same_shard, look
from rabbitllm.splitter import journal
from rabbitllm.splitter.disk_sampler import disk_bytes
from rabbitllm.splitter.lock import LEASE_NAME, is_lock_file, locked_without_waiting
from rabbitllm.splitter.source_check import check_finished_source
from rabbitllm.splitter.split import STAGING_NAME
from rabbitllm.storage import durable
from rabbitllm.storage.files import file_opener
from rabbitllm.storage.folders import existing
from rabbitllm.store import locations
from rabbitllm.store.layer_file import (
    COPIES_NAME,
    COPY_FILE,
    DONE_SUFFIX,
    LAYER_SUFFIX,
    SCRATCH_SUFFIX,
    layer_file_name,
)
from rabbitllm.store.layer_store import LayerStore
from rabbitllm.store.manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    REMOVED_SUFFIX,
    SPLITS,
    Manifest,
    is_legacy,
    read_manifest,
)


@dataclass(frozen=True, slots=True)
class Original:
    """The source of a split, as far as it still exists.

    Attributes:
        there: whether every part in the split directory is also available elsewhere.
        where: its location, or the part that is missing or unknown, as text.
    """

    there: bool
    where: str


def original_of(entry: SplitEntry, folder: Path | None = None, *, asks_hub: bool = False) -> Original:
    """Look for the original of a split, by headers and samples of local shards.

    Args:
        entry: the split directory.
        folder: the checkpoint's folder, if the user named it; else the parent of the split directory is searched.
        asks_hub: look whether a repository is still in the hub cache or on the hub; else it is assumed to be.
    """
    source = entry.source
    if source is not None and source.kind == "hub":
        commit = f" at commit {source.commit[:8]}" if source.commit else ""
        on_hub = Original(True, f"on the hub, {source.name}{commit}")
        return _original_of_repository(source, _needed_shards(entry), on_hub) if asks_hub else on_hub
    parent = folder or locations.spelled_out(entry.folder).parent
    if source is None:
        return _original_around(parent, entry.folder)
    needed = _needed_shards(entry)
    if not needed:
        return Original(True, f"in the folder {source.name}; no shard of it is used yet")
    missing = [shard for shard in needed if not is_same_shard(parent, shard, source.fingerprints[shard])]
    if not missing:
        changed = _changed_shard(parent, needed, entry)
        return Original(True, f"in {parent}") if changed is None else Original(False, changed)
    of = f"{len(missing)} of its {len(needed)} shards" if len(missing) > 1 else "its shard"
    return Original(False, f"{of} not in {parent}: {listed(missing, 3)}")


def _original_of_repository(source: SourceIdentity, needed: Sequence[str], on_hub: Original) -> Original:
    """Look for shards of a repository at its commit: in the hub cache, and then on the hub.

    Args:
        source: the repository.
        needed: the shards.
        on_hub: the result if the hub lists them with the digests of the source, and gives the first one to this user.
    """
    access = HubAccess(revision=source.commit)
    snapshot = cached_snapshot(source.name, access)
    cached = [shard for shard in needed if snapshot is not None and (snapshot / shard).exists()]
    if snapshot is not None and all(_is_blob(snapshot / shard, source.fingerprints[shard]) for shard in needed):
        return Original(True, f"in the hub cache, {snapshot}")
    try:
        repository = open_repository(source.name, access, Path())
        listed_there = repository.identity_of(needed).fingerprints
        missing = [shard for shard in needed if listed_there.get(shard) != source.fingerprints[shard]]
        if not missing:
            for shard in needed[:1]:
                repository.require_access(shard)
            return on_hub
        why = f"it lists other files, or none, for {listed(missing, 3)}"
    except (CheckpointError, HubError) as error:
        why = error.problem.rstrip(".")
    cache = f"the hub cache has {len(cached)} of the {counted(len(needed), 'shard')} of {source.name}"
    return Original(False, f"{cache}, and the hub was asked: {why}")


def _is_blob(path: Path, fingerprint: str) -> bool:
    """Whether a file of the hub cache exists, and is the blob of this digest; it is read, if that is a SHA-256."""
    algorithm, _, digest = fingerprint.partition(":")
    if not path.exists() or path.resolve().name != digest:
        return False
    with open(path, "rb", opener=file_opener) as file:
        return algorithm != "sha256" or hashlib.file_digest(file, algorithm).hexdigest() == digest


def _needed_shards(entry: SplitEntry) -> list[str]:
    """The shards that the split directory has the content of: of an unfinished split, those used up.

    A repair counts shards as not used that it reads once more: layers that it leaves are made of them too.
    """
    assert entry.source is not None
    progress = _journal_in(entry.folder)
    if progress is not None and progress.repair_from is None and entry.shards_used < entry.shards:
        return sorted(progress.used)
    return sorted(entry.source.fingerprints)


def _manifest_in(folder: Path) -> Manifest | None:
    """The manifest of a split, also under the name that it has while the split is removed."""
    return read_manifest(folder) or read_manifest(folder, MANIFEST_NAME + REMOVED_SUFFIX)


def _journal_in(folder: Path) -> journal.UnfinishedSplit | None:
    """The same for the progress of an unfinished split."""
    return journal.glance(folder) or journal.glance(folder, JOURNAL_NAME + REMOVED_SUFFIX)


def _changed_shard(folder: Path, shards: Sequence[str], entry: SplitEntry) -> str | None:
    """The problem with a shard whose bytes differ from the recorded checksums; None if there is none.

    All shards are read: a fingerprint is of some of their bytes.
    """
    if (manifest := _manifest_in(entry.folder)) is None:
        return None
    model = next(iter(gguf_models(shards)), shards[0] if is_gguf_file(folder / shards[0]) else None)
    try:
        checkpoint = LocalCheckpoint(folder, known_shards=shards, entry=model)
        present = [metadata for shard in shards if (metadata := checkpoint.metadata(shard)) is not None]
        check_finished_source(manifest, present, checkpoint, entry.folder, verify=True)
    except (CheckpointError, SplitMismatchError) as error:
        return error.problem.removesuffix(" Nothing was deleted.").removesuffix(".")
    except OSError as error:
        return str(error)
    return None


def _original_around(folder: Path, split_folder: Path) -> Original:
    """The original of a RabbitLLM 1.1 split, which has no record of it: a checkpoint around it with its tensors."""
    with contextlib.suppress(CheckpointError, SplitError, OSError):
        checkpoint = LocalCheckpoint(folder)
        shards = [checkpoint.metadata(name) for name in checkpoint.index.shards]
        shapes = {spec.name: spec.shape for shard in shards if shard is not None for spec in shard.header.tensors}
        tensors = LayerStore(split_folder).tensors
        if None not in shards and all(shapes.get(name) == tensor.shape for name, tensor in tensors.items()):
            return Original(True, f"in {folder}")
    return Original(False, "RabbitLLM 1.1 did not record it, and its parent folder has no complete checkpoint")


_OWN_SUFFIXES = (LAYER_SUFFIX, *(LAYER_SUFFIX + end for end in (DONE_SUFFIX, durable.PART_SUFFIX, SCRATCH_SUFFIX)))
_CONFIGS = frozenset(
    ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    + ("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja")
    + ("chat_template.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
    + ("params.json", "audio_tokenizer_config.json", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model")
    + ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
    + ("1_Pooling/config.json", "1_LogitScore/config.json")
    + ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "NOTICE.md")
)
"""Files that a split copies from the checkpoint, and that users may edit afterwards."""
_PARTS = tuple(name + durable.PART_SUFFIX for name in RECORDS)
_OWN_NAMES = _CONFIGS.union(RECORDS, _PARTS, (LEASE_NAME,))


@dataclass(frozen=True, slots=True)
class Removal:
    """The plan of a removal.

    Attributes:
        entry: the split directory.
        files: every file except the records, in the order of removal.
        folders: its own folders, innermost first.
        nbytes: bytes that are freed.
        original: the checkpoint's folder, if the user named it.
    """

    entry: SplitEntry
    files: tuple[Path, ...]
    folders: tuple[Path, ...]
    nbytes: int
    original: Path | None = None


def plan_removal(folder: Path, original: Path | None = None) -> Removal:
    """Check everything in a split directory; change nothing.

    Args:
        folder: the split directory.
        original: the checkpoint's folder, if the user named it.

    Raises:
        SplitError: it is not a split directory, or holds something that is not RabbitLLM's.
    """
    if folder.is_symlink():
        raise SplitError(
            f"{folder} is a link to {folder.resolve()}. Nothing was removed.",
            "To remove that folder, name it directly.",
        )
    entry = look(folder)
    if entry is None:
        raise SplitError(
            f"{folder} is not a split directory: it has no {MANIFEST_NAME}, no {JOURNAL_NAME} and no layer files of "
            "RabbitLLM 1.1. Nothing was removed.",
            "`rabbitllm ls` lists the split directories.",
        )
    if entry.state == DAMAGED and entry.source is None and not entry.legacy:
        raise SplitError(
            f"{folder} cannot be identified as a split directory: {entry.problem}. Nothing was removed.",
            "If you are sure, remove the folder yourself.",
        )
    paths = [*_walk(folder)]
    layers, origins = _layer_files(folder, entry), _origins(entry, original)
    foreign = [path for path in paths if not (_is_ours(path, entry, layers) or _is_copy(path, folder, origins))]
    if foreign:
        names = listed((str(path.relative_to(folder)) for path in foreign), 3)
        raise SplitError(
            f"{folder} holds {counted(len(foreign), 'item')} that RabbitLLM did not write: {names}. "
            "Nothing was removed.",
            "Move them to another folder, and run the command again.",
        )
    last = {folder / name for name in RECORDS} | {path for path in folder.iterdir() if is_lock_file(path.name)}
    files = [path for path in paths if not path.is_dir() and path not in last]
    # markers first: a partial removal never looks complete; JSON last, since it names code files
    files.sort(key=lambda path: (not path.name.endswith(DONE_SUFFIX), path.suffix == ".json"))
    folders = sorted((path for path in paths if path.is_dir()), key=lambda path: -len(path.parts))
    return Removal(entry, tuple(files), tuple(folders), disk_bytes(folder), original)


@system_errors_by_name()
def remove(removal: Removal) -> int:
    """Remove the directory, and return the bytes that were freed.

    Raises:
        SplitError: another process works on the folder, or it has changed since the check.
        OSError: something in it cannot be removed; call again.
    """
    folder = removal.entry.folder
    with locked_without_waiting(folder):
        again = plan_removal(folder, removal.original)
        if set(again.files) != set(removal.files):
            raise SplitError(
                f"{folder} has changed since the check.", "Check it with `rabbitllm ls`, and run the command again."
            )
        for name in (MANIFEST_NAME, JOURNAL_NAME):
            if (folder / name).exists():
                durable.rename(folder / name, folder / (name + REMOVED_SUFFIX))
        durable.sync_folder(folder)
        for path in again.files:
            durable.remove(path)
        for path in again.folders:
            durable.remove_folder(path)
        durable.sync_folder(folder)
        for name in (MANIFEST_NAME, JOURNAL_NAME):
            if (folder / (name + REMOVED_SUFFIX)).exists():  # nothing comes after the last one but the empty folder
                durable.remove(folder / (name + REMOVED_SUFFIX))
    durable.remove_empty_folder(folder)
    home = locations.home().absolute()
    parents = [parent for parent in folder.absolute().parents if parent.is_relative_to(home) and parent != home]
    for parent in parents[:2]:  # those between a split directory and `home()` are ours
        durable.remove_empty_folder(parent)
    durable.sync_folder(existing(folder.absolute()))
    return again.nbytes


def remove_empty_folders(name: str, saving_path: Path | None = None) -> None:
    """Remove the folders, empty or with a lock, that a removal has left which was killed at its very end.

    Args:
        name: the model, as in `library.of_model`.
        saving_path: folder that the user chose for its splits.
    """
    place, model = locations.one_of_several(locations.resolve_name(name))
    checkpoint, base = expand(place), locations.base_for(model, saving_path)
    if place and checkpoint.is_dir():
        folders = [locations.for_local(checkpoint, saving_path, compression, base) for compression in SPLITS]
    else:
        folders = [locations.for_repository(place, "commit", saving_path, compression) for compression in SPLITS]
        if saving_path is None and locations.is_repo_id(place):
            home_of_model = folders[0].parent.parent
            folders = [*home_of_model.glob("*/*"), *home_of_model.glob("*"), home_of_model]
    for folder in folders:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        if names and all(map(is_lock_file, names)):
            with contextlib.suppress(SplitError), locked_without_waiting(folder):
                pass  # a lock file goes when its lock is freed
        durable.remove_empty_folder(folder)


def _walk(folder: Path) -> Iterator[Path]:
    """Everything below a folder: files, folders, links and others; links are not followed."""
    with os.scandir(folder) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    for entry in children:
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))


def _layer_files(folder: Path, entry: SplitEntry) -> frozenset[str] | None:
    """Names of the layer files of a split; None where only their endings are known."""
    if entry.source is not None and (manifest := _manifest_in(folder)) is not None:
        return frozenset(record.file for record in manifest.layers)
    progress = _journal_in(folder)
    return frozenset(map(layer_file_name, progress.stems)) if progress is not None else None


def _is_ours(path: Path, entry: SplitEntry, layers: frozenset[str] | None) -> bool:
    """Whether a file in a split directory has a name under which RabbitLLM writes there."""
    folder, status = entry.folder, path.lstat()
    name = path.relative_to(folder).as_posix()
    if stat.S_ISDIR(status.st_mode):
        return name in (STAGING_NAME, COPIES_NAME, *COMPANIONS)
    if not stat.S_ISREG(status.st_mode):
        return False
    if name.startswith(f"{STAGING_NAME}/"):
        shards = entry.source.fingerprints if entry.source is not None else ()
        return path.name in {staged_name(shard) for shard in shards}
    if name.startswith(f"{COPIES_NAME}/"):
        return COPY_FILE.fullmatch(path.name) is not None
    if name in _OWN_NAMES or fnmatchcase(name, "additional_chat_templates/*.jinja") or is_lock_file(name):
        return True
    if name.endswith(_OWN_SUFFIXES):
        layer = name.partition(LAYER_SUFFIX)[0] + LAYER_SUFFIX
        if layers is not None:
            return layer in layers
        return is_legacy(folder) and (folder / (layer + DONE_SUFFIX)).is_file()
    return name.endswith(".py") and name.removesuffix(".py") in _code_modules(folder)


def _code_modules(folder: Path) -> set[str]:
    """Modules of the model's own code, by the `auto_map` of its configs."""
    modules = set()
    for name in _CONFIGS:
        if name.endswith("config.json") and (folder / name).is_file():
            with contextlib.suppress(InvalidIndexError):
                named = json.dumps(read_json(folder / name).get("auto_map"))
                modules |= {*re.findall(r'"(?:[^"]*--)?(\w+)\.\w+"', named)}
    return modules


def _origins(entry: SplitEntry, original: Path | None) -> list[Path]:
    """Folders that may hold the files that were copied into a split directory."""
    origins = [original or locations.spelled_out(entry.folder).parent]
    if (source := entry.source) is not None and source.kind == "hub":
        snapshot = cached_snapshot(source.name, HubAccess(revision=source.commit))
        origins += [] if snapshot is None else [snapshot]
    return origins


def _is_copy(path: Path, folder: Path, origins: Sequence[Path]) -> bool:
    """Whether a file was copied from the checkpoint: its bytes are also there."""
    name = path.relative_to(folder)
    if not stat.S_ISREG(path.lstat().st_mode) or not is_sidecar(name.as_posix(), path.stat().st_size):
        return False
    others = [origin / name for origin in origins if (origin / name).is_file()]
    kept = [other for other in others if not other.resolve().is_relative_to(folder.resolve())]
    return any(filecmp.cmp(path, other, shallow=False) for other in kept)


def refuse_only_copy(removal: Removal, original: Original) -> None:
    """Refuse to remove the only copy.

    Raises:
        SplitError: the original was not found.
    """
    if original.there:
        return
    raise SplitError(
        f"{removal.entry.folder} may be the only copy of this model: {original.where}. Nothing was removed.",
        "Pass --only-copy to remove it, also if you know that the checkpoint is in another place. If the hub did not "
        "answer, run the command again with a connection.",
    )
