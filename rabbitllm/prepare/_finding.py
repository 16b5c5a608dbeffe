"""Finds the source that the user named and its split directory, which may not exist yet, and opens its weights.

Makes at most one request to the hub, and one for the index of a new commit; if the hub may not be used or does not
answer, local files are used. Reads headers, indexes and configs; the engine interprets the config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rabbitllm.base.options import ShardPolicy, SplitOptions, check_transfer, expand, parse_size
from rabbitllm.checkpoints.checkpoint import Checkpoint, SourceIdentity
from rabbitllm.checkpoints.config import MODELOPT_NAME, read_config
from rabbitllm.checkpoints.hub import (
    HubAccess,
    HubCheckpoint,
    HubRepository,
    cached_files,
    cached_snapshot,
    download_all,
    open_repository,
)
from rabbitllm.checkpoints.hub_cache import snapshot_of
from rabbitllm.checkpoints.index import META_PARAMETERS, gguf_entry, gguf_named, is_gguf_file, is_meta
from rabbitllm.checkpoints.local import LocalCheckpoint, begins_with_any, entry_in, is_writable
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME, names_a_model
from rabbitllm.checkpoints.naming import naming_by_block
from rabbitllm.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    GatedRepositoryError,
    HubError,
    IncompleteSplitError,
    MissingShardError,
    RabbitLLMError,
    SplitMismatchError,
    system_errors_by_name,
)
from rabbitllm.quant.schemes import check_fitting
from rabbitllm.splitter import journal
from rabbitllm.splitter.lock import locked
from rabbitllm.splitter.request import metadata_of
from rabbitllm.splitter.split import STAGING_NAME
from rabbitllm.storage import durable, folder_lock
from rabbitllm.storage.folder_lock import FolderKind, FolderLock
from rabbitllm.store import locations
from rabbitllm.store.layer_file import DONE_SUFFIX, LAYER_SUFFIX
from rabbitllm.store.locations import resolve_name, with_near_names
from rabbitllm.store.manifest import (
    JOURNAL_NAME,
    SPLIT_DIRECTORY,
    SPLITS,
    Manifest,
    check_split,
    directory_name,
    is_begun,
    is_finished,
    is_legacy,
    read_manifest,
    refuse_half_removed,
)

logger = logging.getLogger(__name__)
_Error = TypeVar("_Error", bound=CheckpointError)


@dataclass(frozen=True)
class Source:
    """A source that was found.

    Attributes:
        name: as the user wrote it.
        split_folder: its split directory, finished or to be made.
        config_folder: a folder with config and tokenizer.
        finished: whether the split directory is complete.
        repository: repository with the weights; None if they are in a folder, or only a finished split exists.
        local: the folder with the weights.
        missing_from: repository from which shards that the folder lacks are fetched.
        entry: the GGUF file that the user named, in the folder of the weights.
        base: first part of the split directory's name.
    """

    name: str
    split_folder: Path
    config_folder: Path
    finished: bool
    repository: HubRepository | None = None
    local: Path | None = None
    missing_from: HubRepository | None = None
    entry: str | None = None
    base: str = SPLIT_DIRECTORY


@dataclass(frozen=True)
class ModelSpec:
    """A model, and where its split directory is, as a user names them.

    Attributes:
        name: a folder, a split directory, or a repository id; see `locations.resolve_name`.
        compression: None, one for all tensors, or "auto".
        folder: folder for the split directory by the user; None for the default.
        access: how to reach the hub.
        repo_id: repository from which shards that a local folder lacks are fetched.
        base: first part of the split directory's name.
    """

    name: str
    compression: str | None = None
    folder: Path | None = None
    access: HubAccess = field(default_factory=HubAccess)
    repo_id: str | None = None
    base: str = SPLIT_DIRECTORY


def split_options(
    compression: str | None,
    shards: ShardPolicy = ShardPolicy.KEEP,
    *,
    max_disk: int | str | None = None,
    min_free_disk: int | str = "1GB",
    shard_transfer: str = "auto",
    fit_scales: bool = False,
    verify_source: bool = False,
    profiling: bool = False,
) -> SplitOptions:
    """Check and convert the options of a split as users give them; see `SplitOptions`.

    Args:
        compression, shards, shard_transfer, fit_scales, verify_source, profiling: as in `SplitOptions`.
        max_disk, min_free_disk: bytes, or text such as "50GB".

    Raises:
        OptionError: an option is invalid, or two contradict each other.
    """
    return SplitOptions(
        compression=(compression := check_split(compression)),
        shards=shards,
        max_disk=None if max_disk is None else parse_size(max_disk, "max_disk"),
        min_free=parse_size(min_free_disk, "min_free_disk"),
        shard_transfer=check_transfer(shard_transfer, shards.takes_one_at_a_time),
        fit_scales=check_fitting(compression, fit_scales=fit_scales),
        verify_source=verify_source,
        profiling=profiling,
    )


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
            return open_folder(source.local, source.missing_from, folder, source.entry)
        except (CheckpointNotFoundError, MissingShardError) as error:
            absent.append(error)
            finished = finished or is_finished(folder)
    if not finished:
        raise with_other_splits(absent[0], source)
    return None


def whole_checkpoint(source: Source) -> tuple[LocalCheckpoint, FolderLock]:
    """Provide all of a source's shards on this machine, unchanged; a repository is fetched into the hub cache.

    Returns:
        The checkpoint, and the lock that prevents its deletion.

    Raises:
        CheckpointNotFoundError: there are none.
        MissingShardError: one is missing.
        InUseError: another process is deleting them.
        HubError: they cannot be fetched.
        DiskFullError: the disk of the hub cache is full.
    """
    entry = source.entry
    if source.repository is not None:
        entry = source.repository.gguf_entry()
        with system_errors_by_name(source.name):
            folder = download_all(source.repository, HubCheckpoint(source.repository).index)
    elif source.local is not None:
        folder = source.local
    else:
        raise CheckpointNotFoundError(
            f"{source.name} has no original checkpoint, which split=False needs.", "Remove split=False."
        )
    lock, checkpoint = folder_lock.shared(folder, FolderKind.SOURCE), LocalCheckpoint(folder, entry=entry)
    missing = [path for shard in checkpoint.index.shards if not (path := folder / shard).exists()]
    if missing:
        lock.close()
        problem = f"{missing[0]} is missing; the index names it."
        error = MissingShardError(problem, "Restore the file, or download the checkpoint again.")
        raise with_other_splits(error, source)
    return checkpoint, lock


def open_folder(
    folder: Path, missing_from: HubRepository | None, split_folder: Path, entry: str | None = None
) -> LocalCheckpoint:
    """Open the checkpoint in a folder; if its only file is used up, by the journal of its split.

    The folder may have another file, with the same weights in another format or with none of them. `entry` is the GGUF
    file that the user named, if any.
    """
    seen = journal.glance(split_folder) if folder.is_dir() else None
    shards = seen.shards if seen is not None else None
    try:
        if shards is None or begins_with_any(folder, shards, entry):
            return LocalCheckpoint(folder, missing_from, None, shards or (), entry)
    except CheckpointNotFoundError:
        if shards is None:
            raise
    earlier = journal.replay(split_folder)
    if earlier is None:  # another process has finished it meanwhile
        return LocalCheckpoint(folder, missing_from, entry=entry)
    return LocalCheckpoint(folder, missing_from, earlier.plan.index)


@contextlib.contextmanager
def config_folder(source: Source) -> Iterator[Path]:
    """Yield a folder with the model's config, before there is a split directory; a scratch one if it is derived.

    Raises:
        CheckpointError: the files that it would be derived from are invalid.
    """
    derived: Mapping[str, bytes] = {}
    home = source.config_folder
    if source.repository is not None:
        has_parameters = META_PARAMETERS in source.repository.files
    else:
        has_parameters = source.local is not None and (source.local / META_PARAMETERS).exists()
    may_derive = _is_gguf(source) or (has_parameters and not names_a_model(home / CONFIG_NAME))
    if may_derive and not source.finished:
        try:
            checkpoint = open_weights(source, [source.split_folder])
            derived = checkpoint.derived() if checkpoint is not None else {}
        except FileNotFoundError:  # another process has finished the split meanwhile, or something is missing
            if not is_finished(source.split_folder):
                raise
            home = source.split_folder
    with SmallFiles({}, derived if CONFIG_NAME in derived else {}, home) as files:
        yield files.folder


class SmallFiles(contextlib.AbstractContextManager["SmallFiles"]):
    """A scratch folder with the config and tokenizer of a model; a context manager, which deletes it unless it is kept.

    Args:
        paths: files to copy, name -> path; those in subfolders are left out.
        contents: further files, name -> content.
        home: the folder of `paths`, which is used instead if there are no `contents`.

    Attributes:
        folder: the folder.
    """

    def __init__(self, paths: Mapping[str, Path], contents: Mapping[str, bytes], home: Path | None = None) -> None:
        self._scratch: durable.ScratchFolder | None = None
        if home is not None and not contents:
            self.folder = home
            return
        copies = {name: path.read_bytes() for name, path in paths.items() if "/" not in name}
        self._scratch = durable.ScratchFolder()
        self.folder = self._scratch.path
        for name, content in {**copies, **contents}.items():
            durable.write_scratch(self.folder / name, content)

    def keep_for(self, user: object) -> None:
        """Keep the folder until `user` is garbage collected."""
        if self._scratch is not None:
            weakref.finalize(user, self._scratch.remove)
            self._scratch = None

    def __exit__(self, *exception: object) -> None:
        if self._scratch is not None:
            self._scratch.remove()


def _is_gguf(source: Source) -> bool:
    """Whether the weights are GGUF files, whose metadata have the config."""
    if source.repository is not None:
        return source.repository.gguf_entry() is not None
    if source.local is None:
        return False
    try:
        return is_gguf_file(source.local / (source.entry or entry_in(source.local)))
    except CheckpointNotFoundError:  # its files are used up
        return False


def config_of(config_folder: Path, checkpoint: Checkpoint | None = None) -> Mapping[str, Any]:
    """Return the config in a folder, or the one that a checkpoint derives; empty if there is none."""
    derived = checkpoint.derived() if checkpoint is not None else {}
    if CONFIG_NAME in derived:
        config: Mapping[str, Any] = json.loads(derived[CONFIG_NAME])
        return config
    return read_config(config_folder)


def find(spec: ModelSpec, *, only_look: bool = False) -> Source:
    """Find the source and its split directory; few requests for a repository, none for weights.

    Args:
        spec: the model.
        only_look: for a plan: nothing is recorded, and a source whose config or weights are gone is found too.

    Raises:
        CheckpointNotFoundError: neither a folder nor a repository.
        SplitMismatchError: the folder is a split at another compression.
        HubError: the hub did not answer, and local files are not sufficient.
        DiskFullError: no space for the note about a repository's commit.
    """
    spec = dataclasses.replace(spec, name=resolve_name(spec.name))
    place, model = locations.one_of_several(spec.name)
    spec = dataclasses.replace(spec, base=locations.base_for(model, spec.folder, spec.base))
    folder = expand(place)
    with system_errors_by_name(spec.name):
        if place and folder.is_dir():  # an empty name would be the current folder
            entry = gguf_named(folder, model) if model else None
            try:
                return _find_local(folder, spec, only_look=only_look, entry=entry)
            except CheckpointNotFoundError as error:
                if entry is None or (folder / entry).exists():
                    raise
                raise with_near_names(error, spec.name) from None
        return _find_elsewhere(spec, place, model, only_look=only_look)


def _find_elsewhere(spec: ModelSpec, repo_id: str, quantization: str, *, only_look: bool) -> Source:
    """Find the source for a name that is not a local folder."""
    locations.require_place(spec.name)
    try:
        named = dataclasses.replace(spec, name=repo_id)
        source = _find_repository(named, only_look=only_look, quantization=quantization or None)
        return dataclasses.replace(source, name=spec.name)
    except GatedRepositoryError:
        raise
    except (CheckpointNotFoundError, HubError) as error:
        cause = error.__cause__
        if "/" not in repo_id and "organisation/name" not in error.remedy:  # as in a program with a list of its own
            form = "A repository is 'organisation/name', such as 'Qwen/Qwen2.5-7B-Instruct'."
            error = type(error)(error.problem, f"{form} {error.remedy}")
        raise with_near_names(error, spec.name) from cause


def _find_local(folder: Path, spec: ModelSpec, *, only_look: bool, entry: str | None = None) -> Source:
    manifest = _manifest_of(folder) if entry is None else None
    if manifest is not None:
        if spec.compression not in (None, manifest.compression):
            raise SplitMismatchError(
                f"{folder} is a split at compression {manifest.compression}; requested was {spec.compression}.",
                "Remove the compression option, or use the original checkpoint.",
            )
        return Source(spec.name, folder, folder, finished=True)
    has_legacy_layers = is_legacy(folder)
    if entry is None and has_legacy_layers and names_a_model(folder / CONFIG_NAME):
        return Source(spec.name, folder, folder, finished=True)
    target = locations.for_local(folder, spec.folder, spec.compression, spec.base)
    finished = is_complete(target, folder, entry)
    repository = None
    if spec.repo_id is not None and not finished:
        repository = open_repository(spec.repo_id, spec.access, target / STAGING_NAME)
    config = target if not names_a_model(folder / CONFIG_NAME) and (target / CONFIG_NAME).exists() else folder
    source = Source(spec.name, target, config, finished, None, folder, repository, entry, spec.base)
    if finished or only_look or has_legacy_layers:
        return source
    try:  # raises for a folder without weights
        if entry is None and _is_gguf(source) and snapshot_of(folder) is None and journal.glance(target) is None:
            raise CheckpointNotFoundError(
                f"The weights of {folder} are used up; it has {entry_in(folder)}, which may be another model.",
                "Name that file to use it.",
            )
        return dataclasses.replace(source, finished=_finished_while_looking(folder, repository, target, entry))
    except (CheckpointNotFoundError, MissingShardError) as error:
        folder_lock.shared(folder, FolderKind.SOURCE).close()  # raises if a split is deleting the shards
        raise with_other_splits(error, source) from None


def with_other_splits(error: _Error, source: Source) -> _Error:
    """Return the same error, naming other splits, finished or not, that may have used up the missing shards."""
    split_folder = source.split_folder
    if (split_folder / JOURNAL_NAME).exists():
        return error
    folders = {split_folder.parent / directory_name(c, source.base): c for c in SPLITS}
    if source.local is not None:  # also where they are if the user names no folder
        folders |= {locations.for_local(source.local, None, c, source.base): c for c in SPLITS}
    splits = [f"compression={c!r} in {folder}" for folder, c in folders.items() if is_begun(folder)]
    if not splits:
        return error
    remedy = f"Another split may have deleted them. Load or resume that one: {' or '.join(splits)}."
    return type(error)(error.problem, remedy)


def _manifest_of(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, None if it is no split directory; wait while another process repairs it.

    Raises:
        IncompleteSplitError: the directory is an unfinished split or repair, and no process works on it; or it is
            partly removed.
    """
    manifest = read_manifest(folder)
    refuse_half_removed(folder)
    if manifest is not None or journal.glance(folder) is None or not is_writable(folder):
        return manifest
    with locked(folder):
        manifest = read_manifest(folder)
    if manifest is None and journal.glance(folder) is not None:
        refuse_half_repaired(folder)
        raise IncompleteSplitError(
            f"{folder} is an unfinished split, and no process is working on it.",
            "Use the original checkpoint: the same call then resumes the split.",
        )
    return manifest


def refuse_half_repaired(folder: Path, *, only_partial: bool = False) -> None:
    """Refuse a split directory whose repair was interrupted, or only one whose repair does without some shards.

    Raises:
        IncompleteSplitError: it was; the remedy is the command that finishes it.
    """
    if (command := journal.repair_command(folder, only_partial=only_partial)) is not None:
        raise IncompleteSplitError(
            f"The repair of {folder} was interrupted, and no process is working on it.", f"Finish it: {command}"
        )


def _finished_while_looking(folder: Path, repository: HubRepository | None, target: Path, entry: str | None) -> bool:
    """Check that a folder holds a checkpoint; return True if another process has finished splitting it meanwhile.

    No lock is held, so a shard or the journal may be removed between the test for its existence and the read. Each is
    removed only once, so the second or third attempt either finds everything or fails for a real reason.
    """
    for last in (False, False, True):
        try:
            open_folder(folder, repository, target, entry)
        except FileNotFoundError:
            if is_finished(target):
                return True
            if last:
                raise
        else:
            break
    return False


def _find_repository(spec: ModelSpec, *, only_look: bool, quantization: str | None) -> Source:
    from huggingface_hub import constants

    if spec.access.local_files_only or constants.HF_HUB_OFFLINE:
        return _offline_source(spec, only_look=only_look, quantization=quantization)
    try:
        repository = open_repository(spec.name, spec.access, Path(), quantization)
    except GatedRepositoryError:
        raise
    except HubError as error:
        if (finished_split := _finished_without_hub(spec)) is None:
            no_folder = f"There is no folder {spec.name!r} either."
            raise HubError(f"{error.problem} {no_folder}", error.remedy) from error.__cause__
        logger.warning("%s Using the existing split in %s.", error.problem, finished_split.split_folder)
        return finished_split
    target = locations.for_repository(spec.name, repository.commit, spec.folder, spec.compression, spec.base)
    if spec.folder is None:
        target = _same_weights(target, repository, spec.compression, spec.base)
        if not only_look:
            locations.remember_commit(spec.name, spec.access.revision, target.parent.name)
    repository.staging = target / STAGING_NAME
    finished = is_finished(target)
    if not finished and (legacy := _legacy_in_snapshot(spec, repository.commit)) is not None:
        return legacy
    has_no_config = repository.gguf_entry() is not None or (
        "config.json" not in repository.files and (only_look or is_meta(repository.entry()))
    )
    config = target if finished or has_no_config else _fetched_config(repository)
    return Source(spec.name, target, config, finished, repository=repository, base=spec.base)


def folder_at(source: Source, spec: ModelSpec, compression: str | None) -> Path:
    """Return the split directory of a source at a compression; it may not exist yet."""
    if source.repository is not None:
        repository, saving_path = source.repository, spec.folder
        target = locations.for_repository(repository.repo_id, repository.commit, saving_path, compression, source.base)
        return target if saving_path is not None else _same_weights(target, repository, compression, source.base)
    if source.local is not None:
        return locations.for_local(source.local, spec.folder, compression, source.base)
    return source.split_folder


def _same_weights(target: Path, repository: HubRepository, compression: str | None, base: str) -> Path:
    """Return the split directory to use at this commit: its own, or another one with identical weights.

    Most commits change a readme, which should not cause a download of 150 GB; and the only GGUF model of a repository
    may be named by its quantization or not.
    """
    if is_begun(target):
        return target
    others = locations.of_other_commits(repository.repo_id, repository.commit, compression, base)
    entry = repository.gguf_entry()
    if entry is not None:
        others += locations.of_any_name(target, compression)
    for folder in filter(is_begun, others):
        made_from = journal.source_of(folder)
        if made_from is None or entry not in (None, *made_from.fingerprints):
            continue
        if not made_from.differs_from(repository.identity_against(made_from)):
            logger.info("Commit %s has the weights of the split in %s.", repository.commit, folder)
            return folder
    return target


def _fetched_config(repository: HubRepository) -> Path:
    """Fetch config, quantization settings and code, and return their folder; the engine decides whether code is run."""
    repository.download_torn()
    for name in repository.files:
        if (name.endswith(".py") and "/" not in name) or name == MODELOPT_NAME:
            repository.download(name)
    return repository.download("config.json").parent


def _finished_without_hub(spec: ModelSpec) -> Source | None:
    """Find the finished split of a repository without the hub."""
    commit = locations.remembered_commit(spec.name, spec.access.revision)
    if commit is None and spec.folder is None:
        return None
    target = locations.for_repository(spec.name, commit or "", spec.folder, spec.compression, spec.base)
    if not is_finished(target) and spec.folder is None:
        same = locations.of_repository(spec.name, spec.base)
        others = locations.of_any_name(target, spec.compression)
        target = next((folder for folder in others if folder in same and is_finished(folder)), target)
    if not is_finished(target):
        return None
    source = Source(spec.name, target, target, finished=True)
    if (manifest := read_manifest(target)) is not None:
        revision = spec.access.revision
        is_pinned = revision is not None and locations.is_commit(revision)  # else any commit is accepted
        identity = SourceIdentity("hub", spec.name, revision if is_pinned else manifest.source.commit, {})
        refuse_another(source, manifest, identity)
    return source


def _offline_source(spec: ModelSpec, *, only_look: bool, quantization: str | None) -> Source:
    """Find the source if the hub may not be used."""
    snapshot = cached_snapshot(spec.name, spec.access)
    if (source := _finished_without_hub(spec)) is not None:
        commit = manifest.source.commit if (manifest := read_manifest(source.split_folder)) is not None else None
        if snapshot is not None and commit not in (None, snapshot.name):
            logger.warning(
                "%s has the weights of commit %s, and the hub cache has %s. To compare them, allow access to the hub.",
                *(source.split_folder, commit, snapshot.name),
            )
        return source
    if snapshot is None:
        raise HubError(
            f"There is no folder {spec.name!r}. {spec.name} has no split here and is not in the hub cache, and access "
            "to the hub is off.",
            "Unset HF_HUB_OFFLINE (in Python pass local_files_only as False too), or check the path if it is a folder.",
        )
    entry = gguf_entry(cached_files(snapshot), quantization, f"{spec.name} in the hub cache")
    return _find_local(snapshot, spec, only_look=only_look, entry=entry)


def refuse_another(source: Source, manifest: Manifest, identity: SourceIdentity, moved: str | None = None) -> None:
    """Refuse a finished split that was made from something else, or of whose tensors an index has `moved` some.

    Raises:
        SplitMismatchError: the source differs; the message says how.
    """
    why = manifest.source.differs_from(identity) or moved
    if why is not None and manifest.source.is_named_like(identity):
        raise SplitMismatchError(
            f"{source.name} has changed since it was split into {source.split_folder}: {why}.",
            f"To use the split unchanged, load {source.split_folder}. To split the changed checkpoint, use another "
            "folder (--dir, layer_shards_saving_path), or delete this split if you do not need it.",
        )
    if why is not None:
        raise SplitMismatchError(
            f"{source.split_folder} was split from {manifest.source.instead_of(source.name)}: {why}.",
            "Split into another folder (--dir, layer_shards_saving_path), or delete this split if you do not need it.",
        )


def _legacy_in_snapshot(spec: ModelSpec, commit: str) -> Source | None:
    """Find layers that RabbitLLM 1.1 put into the snapshot of this commit."""
    access = HubAccess(commit, spec.access.token, spec.access.cache_dir)
    snapshot = cached_snapshot(spec.name, access)
    if snapshot is None or spec.folder is not None:
        return None
    folder = snapshot / directory_name(spec.compression)
    is_usable = is_legacy(folder) and is_complete(folder, snapshot)
    return Source(spec.name, folder, snapshot, finished=True) if is_usable else None


def is_complete(folder: Path, local: Path | None, entry: str | None = None) -> bool:
    """Whether a folder is a complete split directory, also by the checkpoint that it may have been made from.

    One of RabbitLLM 1.1 does not record its layers. If it lacks some, and the checkpoint has all its shards, that split
    was interrupted, and is made again.

    Args:
        folder: the split directory.
        local: the folder of the checkpoint; None if it is not on this machine.
        entry: of the checkpoint, see `Source`.
    """
    was_interrupted = local is not None and is_legacy(folder) and _was_interrupted(folder, local, entry)
    return is_finished(folder) and not was_interrupted


_LAYERS_OF_1_1 = ("embed_tokens", "norm", "lm_head")
"""Ids of the layers that RabbitLLM 1.1 wrote besides the stack of decoder layers; it left out all others."""


def _was_interrupted(folder: Path, local: Path, entry: str | None) -> bool:
    try:
        checkpoint = LocalCheckpoint(local, entry=entry)
        shards = metadata_of(checkpoint, checkpoint.index.shards)
    except (RabbitLLMError, OSError):
        return False
    if len(shards) < len(checkpoint.index.shards):
        return False  # the folder may be the only copy
    names = (spec.name for shard in shards.values() for spec in shard.header.tensors)
    layers = {layer.stem: layer.id for layer in map(naming_by_block().find, names) if layer is not None}
    written = {stem for stem in layers if (folder / f"{stem}{LAYER_SUFFIX}{DONE_SUFFIX}").exists()}
    stacks = {stem.rpartition(".")[0] for stem in written if stem.rpartition(".")[2].isdigit()}
    return any(layers[stem] in _LAYERS_OF_1_1 or stem.rpartition(".")[0] in stacks for stem in layers.keys() - written)
