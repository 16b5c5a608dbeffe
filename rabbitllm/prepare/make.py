"""Makes, resumes or repairs the split directory of a source, one process at a time. Independent of the engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path

from rabbitllm.base.options import SplitOptions
from rabbitllm.checkpoints.checkpoint import Checkpoint
from rabbitllm.checkpoints.config import quantized_as
from rabbitllm.checkpoints.hub import HubAccess, HubCheckpoint, HubRepository, download_all, open_repository
from rabbitllm.checkpoints.index import WEIGHT_SUFFIXES
from rabbitllm.checkpoints.local import LocalCheckpoint, is_writable
from rabbitllm.checkpoints.naming import LayerNaming
from rabbitllm.errors import IncompleteSplitError, MissingShardError, OptionError, system_errors_by_name
from rabbitllm.prepare.config import config_of, experts_of, family_of
from rabbitllm.prepare.finished import check_finished, has_work_left
from rabbitllm.prepare.source import Source
from rabbitllm.prepare.weights import open_folder
from rabbitllm.splitter import lease
from rabbitllm.splitter.finish import STAGING_NAME
from rabbitllm.splitter.interrupted import telling_how_to_go_on
from rabbitllm.splitter.lock import locked, read_lock
from rabbitllm.splitter.planned_files import PlannedFiles
from rabbitllm.splitter.repair import repair, shards_for
from rabbitllm.splitter.request import Acceptance, SplitRequest, check_before_download, plan_split
from rabbitllm.splitter.shard_executor import ShardExecutor
from rabbitllm.splitter.split import split
from rabbitllm.storage import folder_lock
from rabbitllm.storage.folder_lock import FolderKind, FolderLock
from rabbitllm.store.manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    SPLITS,
    BitAllocation,
    Manifest,
    directory_name,
    is_finished,
    is_fitted,
)
from rabbitllm.telemetry.profiler import Profiler


def ensure_split(
    source: Source,
    options: SplitOptions,
    quantize_on: str = "cpu",
    naming: LayerNaming | None = None,
    executor: ShardExecutor | None = None,
    accept: Acceptance | None = None,
) -> Profiler:
    """Make or finish the split directory of a source; with `delete_original`, remove the rest of the original.

    One process and one thread at a time: others wait, and find the split finished, or resume it. With `executor`,
    workers fill layer files, on the CPU.

    Returns:
        Profile of the time spent; empty for a split that was finished already.

    Raises:
        SplitMismatchError: the directory belongs to another source.
        MissingShardError: shards are gone and no unfinished split has their tensors.
        OptionError: the published weights are quantized, and compression would quantize them once more.
        InUseError: another process reads shards that this call would delete, or deletes shards that it would read.
        ClusterError: the workers cannot do it.
        DiskFullError: another process filled the disk; the same call resumes the split.
        RabbitLLMError: any error of `accept`; nothing was touched, or at least the last shard is kept.
    """
    folder = source.split_folder
    if source.finished:
        with read_lock(folder):  # prevents a repair meanwhile
            if is_finished(folder) and not has_work_left(folder, options):
                check_finished(source, options, accept)
                return Profiler(enabled=options.profiling)
    with system_errors_by_name(folder), locked(folder), telling_how_to_go_on(folder), contextlib.ExitStack() as locks:
        lease.revoke(source.split_folder)  # of a run that died and whose workers may still be running
        if is_finished(source.split_folder):  # checked again: the previous holder of the lock may have finished it
            if options.delete_original:
                locks.enter_context(lock_source(source, options))
            check_finished(source, options, accept)
            return Profiler(enabled=options.profiling)
        if source.local is None and source.repository is None:
            raise IncompleteSplitError(
                f"{folder} is no longer a finished split: another process has removed it, or could not repair it.",
                "Name the checkpoint that it is made from: the same call then finishes it, or splits it again.",
            )
        locks.enter_context(lock_source(source, options, by_executor=executor is not None))
        _refuse_to_quantize_again(source, options)
        checkpoint, chosen = _open(source, options, naming, accept, by_executor=executor is not None)
        family = family_of(source.config_folder, checkpoint)
        picked = experts_of(source.config_folder, checkpoint)
        request = SplitRequest(
            checkpoint, source.split_folder, family, options, naming, quantize_on, executor, chosen, picked, accept
        )
        try:
            with _sharing(source, executor):
                return split(request)
        except MissingShardError as error:
            raise _with_other_splits(error, source) from None


def check_before_fetching(source: Source, accept: Acceptance) -> None:
    """Check the headers of a repository's shards with `accept` before the shards are fetched; folders are not checked.

    Raises:
        RabbitLLMError: any error of `accept`.
    """
    if source.repository is None:
        return
    remote = HubCheckpoint(source.repository)
    family = family_of(source.config_folder, remote)
    plan = plan_split(SplitRequest(remote, source.split_folder, family, SplitOptions()))
    accept(PlannedFiles(plan, source.split_folder))


def lock_source(source: Source, options: SplitOptions, *, by_executor: bool = False) -> FolderLock:
    """Lock the folder of the source's shards: exclusively if the split will delete them, else for reading.

    For a repository this is its snapshot in the user's hub cache, if the split uses shards there.

    Args:
        source: the source.
        options: of the split.
        by_executor: workers fill the layer files, and do not use the hub cache.

    Raises:
        InUseError: another process reads shards that this split would delete, or deletes shards that it would read.
    """
    folder = source.local
    if folder is None and source.repository is not None and not by_executor:
        folder = _in_hub_cache(source.repository, options)
    if folder is None:
        return FolderLock()
    deletes = (options.sequential or options.delete_original) and is_writable(folder)
    lock = folder_lock.exclusive if deletes else folder_lock.shared
    return lock(folder, FolderKind.SOURCE)


def _in_hub_cache(repository: HubRepository, options: SplitOptions) -> Path | None:
    """Return a repository's snapshot in the hub cache; None if the split neither reads nor deletes shards there."""
    weights = [name for name in repository.files if name.endswith(WEIGHT_SUFFIXES)]
    one_by_one = (options.sequential or options.keep_own) and not options.delete_original
    wanted = weights if one_by_one else ["config.json", repository.entry(), *weights]
    cached = next(filter(None, map(repository.cached, wanted)), None)
    return cached[0].folder if cached is not None else None


def _sharing(source: Source, executor: ShardExecutor | None) -> AbstractContextManager[None]:
    """Return the context to hold open during the split, for an executor or for this process alone."""
    if executor is None:
        return contextlib.nullcontext()
    return executor.sharing(source.split_folder, [source.local] if source.local is not None else [])


def _refuse_to_quantize_again(source: Source, options: SplitOptions) -> None:
    method = quantized_as(config_of(source.config_folder)) if options.compression is not None else None
    if method is not None:
        raise OptionError(
            f"The weights of {source.name} are quantized already ({method}); compression={options.compression!r} would "
            "quantize what is left, their scales among it.",
            "Leave compression out: they are split and streamed as they are.",
        )


def _open(
    source: Source,
    options: SplitOptions,
    naming: LayerNaming | None,
    accept: Acceptance | None,
    *,
    by_executor: bool = False,
) -> tuple[Checkpoint, BitAllocation | None]:
    """Open the checkpoint; also return bits that were chosen for the space left by the shards fetched for it.

    With an executor, shards are fetched unless they are in a folder that all workers see; the user's cache is not used.
    """
    repository, missing_from = source.repository, source.missing_from
    if by_executor:
        repository = dataclasses.replace(repository, uses_cache=False) if repository is not None else None
        missing_from = dataclasses.replace(missing_from, uses_cache=False) if missing_from is not None else None
    if repository is not None:
        remote = HubCheckpoint(repository)
        if options.sequential or options.keep_own:
            return remote, None
        if by_executor:
            raise OptionError(
                f"All shards of {source.name} are to be kept in the hub cache of this machine, where workers on others "
                "do not see them.",
                "Leave --keep-shards out, or download the repository into a shared folder and name that folder.",
            )
        family = family_of(source.config_folder, remote)
        picked = experts_of(source.config_folder, remote)
        request = SplitRequest(
            remote, source.split_folder, family, options, naming, experts_a_token=picked, accept=accept
        )
        chosen = check_before_download(request)
        return LocalCheckpoint(download_all(repository, remote.index)), chosen
    assert source.local is not None
    return open_folder(source.local, missing_from, source.split_folder), None


def _with_other_splits(error: MissingShardError, source: Source) -> MissingShardError:
    """Return the same error, naming finished splits at other compressions that may have used up the missing shards."""
    parent = source.split_folder.parent
    others = [c for c in SPLITS if (parent / directory_name(c) / MANIFEST_NAME).exists()]
    if not others or (source.split_folder / JOURNAL_NAME).exists():
        return error
    choices = " or ".join(f"compression={other!r}" for other in others)
    return MissingShardError(
        error.problem, f"A split at another compression may have used them up: load that split with {choices}."
    )


def original_around(folder: Path, manifest: Manifest, layers: Collection[str]) -> Path | None:
    """Return the folder around a split directory, if it has every shard that these layers were made from."""
    shards = shards_for(manifest, layers)
    return folder.parent if shards and all((folder.parent / shard).is_file() for shard in shards) else None


def repair_split(folder: Path, manifest: Manifest, layers: Collection[str], original: Path | None = None) -> None:
    """Make damaged layers of a finished split again, from the source that it was made from.

    Args:
        folder: the split directory.
        manifest: its manifest.
        layers: ids of the damaged layers.
        original: the checkpoint, for a split that was made from a folder; by default the folder around the split
            directory, if it has the shards. A repository is found by its name.

    Raises:
        OptionError: the split was made from a folder, no `original` was given, and the shards are not around the split.
        SplitMismatchError: the source is another one; nothing was touched.
        InUseError: another process has loaded the model, or deletes shards of the source; nothing was touched.
    """
    known = manifest.source
    repository = None
    if original is None and known.kind != "hub":
        original = original_around(folder, manifest, layers)
    if original is not None:
        checkpoint: Checkpoint = LocalCheckpoint(original)
    elif known.kind == "hub":
        repository = open_repository(known.name, HubAccess(revision=known.commit), folder / STAGING_NAME)
        checkpoint = HubCheckpoint(repository)
    else:
        raise OptionError(
            f"{folder} was split from a folder named {known.name!r}, whose place is not known.",
            "Name it with --original, if its shards are still there; otherwise split another copy of the model.",
        )
    fitted = is_fitted(manifest.quantizer)
    options = SplitOptions(compression=manifest.compression, sequential=original is None, fit_scales=fitted)
    source = Source(known.name, folder, folder, finished=False, repository=repository, local=original)
    with (
        system_errors_by_name(folder),
        locked(folder, excluding_readers=True),
        telling_how_to_go_on(folder),
        lock_source(source, options),
    ):
        repair(SplitRequest(checkpoint, folder, family_of(folder), options), manifest, layers)
