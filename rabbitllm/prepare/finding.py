"""Finds the source that the user named and its split directory, finished or still to be made.

Makes at most one request to the hub, and none for weights; if the hub may not be used or does not answer, local files
are used.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from rabbitllm.base.options import expand
from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.checkpoints.hub import HubAccess, HubRepository, cached_snapshot, open_repository
from rabbitllm.checkpoints.index import is_meta
from rabbitllm.checkpoints.local import is_writable
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME, names_a_model
from rabbitllm.errors import (
    CheckpointNotFoundError,
    GatedRepositoryError,
    HubError,
    IncompleteSplitError,
    MissingShardError,
    SplitMismatchError,
    system_errors_by_name,
)
from rabbitllm.prepare.finished import refuse_another
from rabbitllm.prepare.source import Sought, Source
from rabbitllm.prepare.weights import open_folder
from rabbitllm.splitter import journal
from rabbitllm.splitter.finish import STAGING_NAME
from rabbitllm.splitter.lock import locked
from rabbitllm.storage import folder_lock
from rabbitllm.storage.folder_lock import FolderKind
from rabbitllm.store import locations
from rabbitllm.store.locations import meant, with_near_names
from rabbitllm.store.manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    Manifest,
    directory_name,
    is_finished,
    is_legacy,
    read_manifest,
)

logger = logging.getLogger(__name__)


def find(sought: Sought) -> Source:
    """Find the source and its split directory; one request at most for a repository, none for weights.

    Raises:
        CheckpointNotFoundError: neither a folder nor a repository.
        SplitMismatchError: the folder is a split at another compression.
        HubError: the hub did not answer, and local files are not sufficient.
        DiskFullError: no space for the note about a repository's commit.
    """
    sought = dataclasses.replace(sought, name=meant(sought.name))
    folder = expand(sought.name)
    with system_errors_by_name(sought.name):
        if sought.name and folder.is_dir():  # an empty name would be the current folder
            return _find_local(folder, sought)
        return _find_elsewhere(sought)


def _find_elsewhere(sought: Sought) -> Source:
    """Find the source for a name that is not a local folder."""
    try:
        if not locations.is_repo_id(sought.name):
            raise CheckpointNotFoundError(
                f"There is no folder {sought.name!r}, and it is no repository id either.",
                "Give a folder that exists, or a repository as 'organisation/name'.",
            )
        return _find_repository(sought)
    except GatedRepositoryError:
        raise
    except (CheckpointNotFoundError, HubError) as error:
        raise with_near_names(error, sought.name) from error.__cause__


def _find_local(folder: Path, sought: Sought) -> Source:
    manifest = _manifest_of(folder)
    if manifest is not None:
        if sought.compression not in (None, manifest.compression):
            raise SplitMismatchError(
                f"{folder} is a split at compression {manifest.compression}; {sought.compression} was asked for.",
                "Leave compression out, or name the original checkpoint.",
            )
        return Source(sought.name, folder, folder, finished=True)
    target = locations.for_local(folder, sought.saving_path, sought.compression, sought.base)
    finished = is_finished(target)
    repository = None
    if sought.repo_id is not None and not finished:
        repository = open_repository(sought.repo_id, sought.access, target / STAGING_NAME)
    config = target if not names_a_model(folder / CONFIG_NAME) and (target / CONFIG_NAME).exists() else folder
    if not (finished or sought.only_look or is_legacy(folder)):  # raises for a folder without weights
        try:
            finished = _finished_while_looking(folder, repository, target)
        except (CheckpointNotFoundError, MissingShardError):
            folder_lock.shared(folder, FolderKind.SOURCE).close()  # raises if a split is deleting the shards
            raise
    return Source(sought.name, target, config, finished, local=folder, missing_from=repository)


def _manifest_of(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, None if it is no split directory; wait while another process repairs it.

    Raises:
        IncompleteSplitError: the directory is an unfinished split, and no process works on it.
    """
    manifest = read_manifest(folder)
    if manifest is not None or journal.glance(folder) is None or not is_writable(folder):
        return manifest
    with locked(folder):
        manifest = read_manifest(folder)
    if manifest is None and journal.glance(folder) is not None:
        raise IncompleteSplitError(
            f"{folder} is an unfinished split, and no process works on it.",
            "Name the checkpoint that it is made from: the same call then goes on with it.",
        )
    return manifest


def _finished_while_looking(folder: Path, repository: HubRepository | None, target: Path) -> bool:
    """Check that a folder holds a checkpoint; return True if another process has finished splitting it meanwhile.

    No lock is held, so a shard or the journal may be removed between the test for its existence and the read. Each is
    removed only once, so the second or third attempt either finds everything or fails for a real reason.
    """
    for last in (False, False, True):
        try:
            open_folder(folder, repository, target)
        except FileNotFoundError:
            if is_finished(target):
                return True
            if last:
                raise
        else:
            break
    return False


def _find_repository(sought: Sought) -> Source:
    if _is_offline(sought):
        return _offline_source(sought)
    try:
        repository = open_repository(sought.name, sought.access, Path())
    except GatedRepositoryError:
        raise
    except HubError as error:
        if (known := _finished_without_hub(sought)) is None:
            raise
        logger.warning("%s Going on with the split that is here, in %s.", error.problem, known.split_folder)
        return known
    target = locations.for_repository(sought.name, repository.commit, sought.saving_path, sought.compression)
    if sought.saving_path is None:
        target = _same_weights(target, repository, sought.compression)
        if not sought.only_look:
            locations.remember_commit(sought.name, sought.access.revision, target.parent.name)
    repository.staging = target / STAGING_NAME
    if not is_finished(target) and (legacy := _legacy_in_snapshot(sought, repository.commit)) is not None:
        return legacy
    finished = is_finished(target)
    if "config.json" not in repository.files and (sought.only_look or is_meta(repository.entry())):
        return Source(sought.name, target, target, finished, repository=repository)
    config = target if finished else _fetched_config(repository)
    return Source(sought.name, target, config, finished, repository=repository)


def folder_at(source: Source, sought: Sought, compression: str | None) -> Path:
    """Return the split directory of a source at a compression; it may not exist yet."""
    if source.repository is not None:
        commit, saving_path = source.repository.commit, sought.saving_path
        target = locations.for_repository(source.name, commit, saving_path, compression)
        return target if saving_path is not None else _same_weights(target, source.repository, compression)
    if source.local is not None:
        return locations.for_local(source.local, sought.saving_path, compression, sought.base)
    return source.split_folder


def _same_weights(target: Path, repository: HubRepository, compression: str | None) -> Path:
    """Return the split directory to use at this commit: its own, or one of another commit with identical weights.

    Most commits change a readme, which should not cause a download of 150 GB.
    """
    if _is_begun(target):
        return target
    for other in filter(_is_begun, locations.of_other_commits(repository.repo_id, repository.commit, compression)):
        earlier, manifest = _replay(other), read_manifest(other)  # in this order: the manifest replaces the journal
        made_from = manifest.source if manifest is not None else earlier.plan.source if earlier is not None else None
        if made_from is not None and not made_from.differs_from(repository.identity(made_from.fingerprints)):
            logger.info("Commit %s has the weights of the split in %s.", repository.commit, other)
            return other
    return target


def _replay(folder: Path) -> journal.Replay | None:
    try:
        return journal.replay(folder)
    except FileNotFoundError:  # another process has just finished that split
        return None


def _is_begun(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).exists() or (folder / JOURNAL_NAME).exists()


def _fetched_config(repository: HubRepository) -> Path:
    """Fetch config and Python code, and return their folder; whether code is run is decided by the engine."""
    for name in repository.files:
        if name.endswith(".py") and "/" not in name:
            repository.download(name)
    return repository.download("config.json").parent


def _is_offline(sought: Sought) -> bool:
    from huggingface_hub import constants

    return sought.access.local_files_only or bool(constants.HF_HUB_OFFLINE)


def _finished_without_hub(sought: Sought) -> Source | None:
    """Find the finished split of a repository without the hub."""
    commit = locations.remembered_commit(sought.name, sought.access.revision)
    if commit is None and sought.saving_path is None:
        return None
    target = locations.for_repository(sought.name, commit or "", sought.saving_path, sought.compression)
    if not is_finished(target):
        return None
    found = Source(sought.name, target, target, finished=True)
    if (manifest := read_manifest(target)) is not None:
        refuse_another(found, manifest, _identity_offline(sought, manifest))
    return found


def _offline_source(sought: Sought) -> Source:
    """Find the source if the hub may not be used."""
    if (known := _finished_without_hub(sought)) is not None:
        return known
    snapshot = cached_snapshot(sought.name, sought.access)
    if snapshot is None:
        raise HubError(
            f"{sought.name} is neither split here nor in the hub cache, and the hub may not be asked.",
            "Allow it (local_files_only=False, and HF_HUB_OFFLINE unset), or give a folder.",
        )
    return _find_local(snapshot, sought)


def _identity_offline(sought: Sought, manifest: Manifest) -> SourceIdentity:
    """Return the identity of a repository without the hub: its commit only if the caller names one."""
    named = sought.access.revision is not None and locations.is_commit(sought.access.revision)
    return SourceIdentity("hub", sought.name, sought.access.revision if named else manifest.source.commit, {})


def _legacy_in_snapshot(sought: Sought, commit: str) -> Source | None:
    """Find layers that RabbitLLM 1.1 put into the snapshot of this commit."""
    access = HubAccess(commit, sought.access.token, sought.access.cache_dir)
    snapshot = cached_snapshot(sought.name, access)
    if snapshot is None or sought.saving_path is not None:
        return None
    folder = snapshot / directory_name(sought.compression)
    return Source(sought.name, folder, snapshot, finished=True) if is_legacy(folder) else None
