"""From what the user named to a finished split directory: find it, finish it, or make it.

Knows the sources and the splitter, not the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rabbitllm import durable, locations
from rabbitllm.checkpoints.checkpoint import Checkpoint, ShardFacts, SourceIdentity
from rabbitllm.checkpoints.hub import (
    HubAccess,
    HubCheckpoint,
    HubRepository,
    cached_snapshot,
    download_all,
    open_repository,
)
from rabbitllm.checkpoints.index import META_PARAMETERS, index_of, is_index, is_meta
from rabbitllm.checkpoints.json_file import read_json
from rabbitllm.checkpoints.local import LocalCheckpoint, begins_with_any, is_writable
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME, GENERATION_NAME, names_a_model
from rabbitllm.checkpoints.naming import LayerNaming
from rabbitllm.checkpoints.quantised import quantised_as
from rabbitllm.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    GatedRepositoryError,
    HubError,
    MissingShardError,
    OptionError,
    SplitMismatchError,
)
from rabbitllm.layers.compression import COMPRESSIONS
from rabbitllm.layers.layer_store import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    LayerStore,
    Manifest,
    directory_name,
    is_finished,
    is_legacy,
    read_manifest,
)
from rabbitllm.model_name import meant, with_near_names
from rabbitllm.options import SplitOptions, expand
from rabbitllm.profiler import Profiler
from rabbitllm.splitter import journal
from rabbitllm.splitter.interrupted import telling_how_to_go_on
from rabbitllm.splitter.lock import is_left_over, locked
from rabbitllm.splitter.repair import repair
from rabbitllm.splitter.split import (
    STAGING_NAME,
    Request,
    check_before_download,
    clear_away,
    discard_original,
    split,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """What the user named, found.

    Attributes:
        name: as the user wrote it.
        split_folder: its split directory, finished or to be made.
        config_folder: a folder with config and tokenizer.
        checkpoint: opens the weights; None where a finished split is all there is.
        finished: whether the split directory is whole.
    """

    name: str
    split_folder: Path
    config_folder: Path
    finished: bool
    repository: HubRepository | None = None
    local: Path | None = None
    missing_from: HubRepository | None = None


@dataclass(frozen=True)
class Sought:
    """What to look for.

    Attributes:
        name: a folder, a split directory, or a repository id; see `model_name`.
        compression: None, "4bit" or "8bit".
        saving_path: where the user wants the split directory; None for the default place.
        access: how to reach the hub.
        repo_id: a repository to fetch shards from that a local folder lacks.
        base: first part of the split directory's name.
        only_look: for a plan: nothing is written down, and a source whose config or weights are gone is found too.
    """

    name: str
    compression: str | None = None
    saving_path: Path | None = None
    access: HubAccess = field(default_factory=HubAccess)
    repo_id: str | None = None
    base: str = "splitted_model"
    only_look: bool = False


def find(sought: Sought) -> Source:
    """Find the source and its split directory; one request at most for a repository, none for weights.

    Raises:
        CheckpointNotFoundError: neither a folder nor a repository.
        SplitMismatchError: the folder is a split at another compression.
        HubError: the hub did not answer, and nothing here will do.
    """
    sought = dataclasses.replace(sought, name=meant(sought.name))
    folder = expand(sought.name)
    if sought.name and folder.is_dir():  # an empty name would be the current folder
        return _find_local(folder, sought)
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
    manifest = read_manifest(folder)
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
    if not (finished or sought.only_look or is_legacy(folder)):  # a folder without weights is said to be one
        finished = _finished_while_looking(folder, repository, target)
    return Source(sought.name, target, config, finished, local=folder, missing_from=repository)


def _finished_while_looking(folder: Path, repository: HubRepository | None, target: Path) -> bool:
    """Make sure that a folder holds a checkpoint; True if another process has finished splitting it meanwhile.

    Nothing is locked while looking, so a shard or the journal may go between the question whether it is there and its
    being read. Each goes only once, so a second look, and a third, find everything or a real lack.
    """
    for last in (False, False, True):
        try:
            _open_folder(folder, repository, target)
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
    """The split directory, there or not, of a source that was found, at whichever compression."""
    if source.repository is not None:
        commit, saving_path = source.repository.commit, sought.saving_path
        target = locations.for_repository(source.name, commit, saving_path, compression)
        return target if saving_path is not None else _same_weights(target, source.repository, compression)
    if source.local is not None:
        return locations.for_local(source.local, sought.saving_path, compression, sought.base)
    return source.split_folder


def _same_weights(target: Path, repository: HubRepository, compression: str | None) -> Path:
    """The split directory to use at this commit: its own, or one of another commit that has the very same weights.

    Most commits change a readme, and none of those should cost a download of 150 GB.
    """
    if _is_begun(target):
        return target
    for other in filter(_is_begun, locations.of_other_commits(repository.repo_id, repository.commit, compression)):
        earlier, manifest = _replay(other), read_manifest(other)  # in this order: the one goes when the other is there
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
    """The folder of the config, and of Python code that may belong to it; whether that is run, the engine decides."""
    for name in repository.files:
        if name.endswith(".py") and "/" not in name:
            repository.download(name)
    return repository.download("config.json").parent


def _is_offline(sought: Sought) -> bool:
    from huggingface_hub import constants

    return sought.access.local_files_only or bool(constants.HF_HUB_OFFLINE)


def _finished_without_hub(sought: Sought) -> Source | None:
    """The finished split of a repository, found without asking the hub."""
    commit = locations.remembered_commit(sought.name, sought.access.revision)
    if commit is None and sought.saving_path is None:
        return None
    target = locations.for_repository(sought.name, commit or "", sought.saving_path, sought.compression)
    if not is_finished(target):
        return None
    found = Source(sought.name, target, target, finished=True)
    if (manifest := read_manifest(target)) is not None:
        _refuse_another(found, manifest, _identity_offline(sought, manifest))
    return found


def _offline_source(sought: Sought) -> Source:
    """What can be used where the hub may not be asked."""
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
    """What is known of a repository that may not be asked: its commit only where the caller names one."""
    named = sought.access.revision is not None and locations.is_commit(sought.access.revision)
    return SourceIdentity("hub", sought.name, sought.access.revision if named else manifest.source.commit, {})


def _legacy_in_snapshot(sought: Sought, commit: str) -> Source | None:
    """Layers that RabbitLLM 1.1 put into the snapshot of this commit."""
    access = HubAccess(commit, sought.access.token, sought.access.cache_dir)
    snapshot = cached_snapshot(sought.name, access)
    if snapshot is None or sought.saving_path is not None:
        return None
    folder = snapshot / directory_name(sought.compression)
    return Source(sought.name, folder, snapshot, finished=True) if is_legacy(folder) else None


def ensure_split(
    source: Source, options: SplitOptions, quantise_on: str = "cpu", naming: LayerNaming | None = None
) -> Profiler:
    """Make or finish the split directory of a source; with `delete_original`, remove what is left of the original.

    One process and one thread at a time: others wait, and find the split finished, or go on where it stopped.

    Returns:
        Where the time went; empty for a split that was finished already.

    Raises:
        SplitMismatchError: the directory belongs to another source.
        MissingShardError: shards are gone and no unfinished split has their tensors.
        OptionError: the weights are quantised as they are published, and compression would quantise them once more.
    """
    if source.finished and not _has_work_left(source.split_folder, options):
        _check_finished(source, options)
        return Profiler(enabled=options.profiling)
    with locked(source.split_folder), telling_how_to_go_on(source.split_folder):
        if is_finished(source.split_folder):  # asked anew: whoever had the lock before may have done it
            _check_finished(source, options)
            return Profiler(enabled=options.profiling)
        _refuse_to_quantise_again(source, options)
        checkpoint = _open(source, options, naming)
        family = _family(source.config_folder, checkpoint)
        request = Request(checkpoint, source.split_folder, family, options, naming, quantise_on)
        try:
            return split(request)
        except MissingShardError as error:
            raise _with_other_splits(error, source) from None


def _refuse_to_quantise_again(source: Source, options: SplitOptions) -> None:
    method = quantised_as(_config(source.config_folder)) if options.compression is not None else None
    if method is not None:
        raise OptionError(
            f"The weights of {source.name} are quantised already ({method}); compression={options.compression!r} would "
            "quantise what is left, their scales among it.",
            "Leave compression out: they are split and streamed as they are.",
        )


def _has_work_left(folder: Path, options: SplitOptions) -> bool:
    """Whether something is to be removed after a finished split: only then does it need the lock.

    One that lies where nothing can be written is never in work, and is loaded without.
    """
    if not (folder / MANIFEST_NAME).exists() or not is_writable(folder):
        return False
    left = (folder / JOURNAL_NAME).exists() or (folder / STAGING_NAME).exists() or is_left_over(folder)
    return left or options.delete_original


def _open(source: Source, options: SplitOptions, naming: LayerNaming | None) -> Checkpoint:
    if source.repository is not None:
        remote = HubCheckpoint(source.repository)
        if options.sequential or options.keep_own:
            return remote
        family = _family(source.config_folder, remote)
        check_before_download(Request(remote, source.split_folder, family, options, naming), source.repository.cache)
        return LocalCheckpoint(download_all(source.repository, remote.index))
    assert source.local is not None
    return _open_folder(source.local, source.missing_from, source.split_folder)


def open_weights(source: Source, folders: Iterable[Path]) -> Checkpoint | None:
    """The checkpoint of a source, of which nothing but headers is read; None where only finished splits are left.

    Args:
        source: as `find` gives it.
        folders: its split directories, whose journals know an index that is gone.

    Raises:
        CheckpointNotFoundError: there are no weights, and no finished split either.
        MissingShardError: the same, of a part of them (in Meta's own format, which has no index).
    """
    if source.repository is not None:
        return HubCheckpoint(source.repository)
    if source.local is None:
        return None
    absent: list[CheckpointError] = []
    finished = False
    for folder in folders:
        try:
            return _open_folder(source.local, source.missing_from, folder)
        except (CheckpointNotFoundError, MissingShardError) as error:
            absent.append(error)
            finished = finished or is_finished(folder)
    if not finished:
        raise absent[0]
    return None


def whole_checkpoint(source: Source) -> LocalCheckpoint:
    """All of a source's shards on this machine, as they are; those of a repository are fetched into the hub cache.

    Raises:
        CheckpointNotFoundError: there are none.
        HubError: they cannot be fetched.
    """
    if source.repository is not None:
        return LocalCheckpoint(download_all(source.repository, HubCheckpoint(source.repository).index))
    if source.local is None:
        raise CheckpointNotFoundError(f"{source.name} has no checkpoint of its own.", "Leave split=False out.")
    return LocalCheckpoint(source.local)


def _open_folder(folder: Path, missing_from: HubRepository | None, split_folder: Path) -> LocalCheckpoint:
    """The checkpoint in a folder; one whose only file is used up is known by the journal of its split.

    Beside that file another may lie, with the same weights in another format or with none of them.
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


def _check_finished(source: Source, options: SplitOptions) -> None:
    """Make sure that a finished split is of this source, as far as the source is still there to compare."""
    manifest = read_manifest(source.split_folder)
    if manifest is None:
        return  # RabbitLLM 1.1's; whether it has every tensor shows when the model is built
    if manifest.compression != options.compression and source.split_folder != source.config_folder:
        raise SplitMismatchError(
            f"{source.split_folder} is a split at compression {manifest.compression}; "
            f"{options.compression} was asked for.",
            "Split into another folder (layer_shards_saving_path).",
        )
    if is_writable(source.split_folder):
        clear_away(source.split_folder)
    if source.repository is not None:
        _refuse_another(source, manifest, source.repository.identity(manifest.source.fingerprints))
    checkpoint = _still_there(source, manifest)
    if checkpoint is None:
        return
    found = [facts for shard in checkpoint.index.shards if (facts := _present(checkpoint, shard)) is not None]
    _refuse_another(source, manifest, checkpoint.identity(found))
    _refuse_without_evidence(source, manifest, found)
    if options.delete_original:
        LayerStore(source.split_folder)  # whole, by every size and header, before anything is deleted
        discard_original(checkpoint)


def _refuse_another(source: Source, manifest: Manifest, identity: SourceIdentity) -> None:
    why = manifest.source.differs_from(identity)
    if why is not None:
        raise SplitMismatchError(
            f"{source.split_folder} was split from {manifest.source.name}, not from {source.name}: {why}.",
            "Split into another folder (layer_shards_saving_path), or delete that one if its model is not needed.",
        )


def _refuse_without_evidence(source: Source, manifest: Manifest, found: list[ShardFacts]) -> None:
    """Refuse a split that lies elsewhere and whose model has another name, where no shard is left to compare."""
    known = manifest.source
    if source.local is None or found or known.kind != "local" or source.split_folder.is_relative_to(source.local):
        return
    if known.name != source.local.resolve().name:
        raise SplitMismatchError(
            f"{source.split_folder} was split from a folder named {known.name!r}, and {source.local} has no shard left "
            "by which to tell whether that is the same model.",
            f"If it is, name the split directory itself: {source.split_folder}.",
        )


def _still_there(source: Source, manifest: Manifest) -> Checkpoint | None:
    """The weights that a finished split was made from, as far as they are here; None if they are used up.

    Another form of them may lie beside, which is none of the split's business: it is not opened, and never discarded.
    """
    shards = manifest.source.fingerprints
    try:
        if source.repository is not None:
            remote = HubCheckpoint(source.repository) if _index_is_cached(source.repository) else None
            return remote if remote is not None and not shards.keys().isdisjoint(remote.index.shards) else None
        if source.local is None:
            return None
        if begins_with_any(source.local, shards):
            return LocalCheckpoint(source.local, known_shards=shards)
    except CheckpointNotFoundError:
        return None
    _refuse_without_evidence(source, manifest, [])
    return None


def _index_is_cached(repository: HubRepository) -> bool:
    entry = repository.entry()
    return is_index(entry) and repository.cached(entry) is not None


def _present(checkpoint: Checkpoint, shard: str) -> ShardFacts | None:
    """Facts of a shard that is on this machine; a repository is not asked for its headers."""
    if isinstance(checkpoint, HubCheckpoint) and checkpoint.repository.cached(shard) is None:
        return None
    return checkpoint.facts(shard)


@contextlib.contextmanager
def config_folder(source: Source) -> Iterator[Path]:
    """A folder with the model's config, before there is a split directory; a scratch one where the config is derived.

    Raises:
        CheckpointError: what it would be derived from cannot be believed.
    """
    derived: Mapping[str, bytes] = {}
    home = source.config_folder
    if not source.finished and _may_derive(source) and not names_a_model(home / CONFIG_NAME):
        try:
            checkpoint = open_weights(source, [source.split_folder])
            derived = checkpoint.derived() if checkpoint is not None else {}
        except FileNotFoundError:  # another process has finished the split meanwhile, or something is missing
            if not is_finished(source.split_folder):
                raise
            home = source.split_folder
    if CONFIG_NAME not in derived:
        yield home
        return
    with tempfile.TemporaryDirectory(prefix="rabbitllm-config-") as folder:
        for name in filter(derived.__contains__, (CONFIG_NAME, GENERATION_NAME)):
            durable.write_scratch(Path(folder) / name, derived[name])
        yield Path(folder)


def _may_derive(source: Source) -> bool:
    """Whether there is what a config is derived from."""
    if source.repository is not None:
        return META_PARAMETERS in source.repository.files
    return source.local is not None and (source.local / META_PARAMETERS).exists()


def _family(config_folder: Path, checkpoint: Checkpoint | None = None) -> str | None:
    """The model type by the config in a folder, or by that which a checkpoint derives."""
    family = _config(config_folder, checkpoint).get("model_type")
    return family if isinstance(family, str) else None


def _config(config_folder: Path, checkpoint: Checkpoint | None = None) -> Mapping[str, Any]:
    """The config in a folder, or that which a checkpoint derives; empty where there is none."""
    path = config_folder / CONFIG_NAME
    derived = checkpoint.derived() if checkpoint is not None else {}
    if CONFIG_NAME in derived:
        found: Mapping[str, Any] = json.loads(derived[CONFIG_NAME])
        return found
    return read_json(path) if path.exists() else {}


def _with_other_splits(error: MissingShardError, source: Source) -> MissingShardError:
    """The same error, naming finished splits at other compressions that the missing shards may have gone into."""
    parent = source.split_folder.parent
    others = [c for c in COMPRESSIONS if (parent / directory_name(c) / MANIFEST_NAME).exists()]
    if not others or (source.split_folder / JOURNAL_NAME).exists():
        return error
    choices = " or ".join(f"compression={other!r}" for other in others)
    return MissingShardError(
        error.problem, f"They may have been used up by the split beside them: load that one with {choices}."
    )


def repair_split(folder: Path, manifest: Manifest, layers: Collection[str], original: Path | None = None) -> None:
    """Make damaged layers of a finished split anew, from the source that it was made from.

    Args:
        folder: the split directory.
        manifest: its own.
        layers: ids of the damaged ones.
        original: the checkpoint, for a split that was made from a folder; a repository is found by its name.

    Raises:
        OptionError: the split was made from a folder, and no `original` was given.
        SplitMismatchError: the source is another one; nothing was touched.
    """
    known = manifest.source
    if original is not None:
        checkpoint: Checkpoint = LocalCheckpoint(original)
    elif known.kind == "hub":
        access = HubAccess(revision=known.commit)
        checkpoint = HubCheckpoint(open_repository(known.name, access, folder / STAGING_NAME))
    else:
        raise OptionError(
            f"{folder} was split from a folder named {known.name!r}, whose place is not known.",
            "Name it with --original, if its shards are still there; otherwise split another copy of the model.",
        )
    options = SplitOptions(compression=manifest.compression, sequential=original is None)
    with locked(folder), telling_how_to_go_on(folder):
        repair(Request(checkpoint, folder, _family(folder), options), manifest, layers)
