"""Makes, resumes or repairs the split directory of a source, one process at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rabbitllm.base.options import RunOptions, ShardPolicy, SplitOptions
from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.checkpoint import Checkpoint, ShardMetadata, SourceIdentity
from rabbitllm.checkpoints.config import quantized_as, read_config
from rabbitllm.checkpoints.hub import (
    HubAccess,
    HubCheckpoint,
    HubRepository,
    cached_snapshot,
    download_all,
    open_repository,
)
from rabbitllm.checkpoints.index import (
    WEIGHT_SUFFIXES,
    gguf_models,
    gguf_stem,
    has_format_of,
    is_gguf_file,
    is_index,
)
from rabbitllm.checkpoints.local import LocalCheckpoint, begins_with_any, entry_in, is_writable
from rabbitllm.checkpoints.naming import LayerNaming
from rabbitllm.errors import (
    CheckpointNotFoundError,
    HubError,
    IncompleteSplitError,
    InvalidIndexError,
    MissingShardError,
    OptionError,
    SplitMismatchError,
    system_errors_by_name,
)
from rabbitllm.prepare._finding import (
    Source,
    config_folder,
    config_of,
    is_complete,
    open_folder,
    refuse_another,
    refuse_half_repaired,
    with_other_splits,
)
from rabbitllm.prepare._small_files import check_small_files
from rabbitllm.quant.schemes import check_compression
from rabbitllm.splitter import journal
from rabbitllm.splitter import lock as split_lock
from rabbitllm.splitter.bit_allocation import other_budget
from rabbitllm.splitter.filler import ShardExecutor
from rabbitllm.splitter.interrupted import reporting_interrupts
from rabbitllm.splitter.lock import is_left_over, locked, read_lock
from rabbitllm.splitter.plan import PlannedFiles
from rabbitllm.splitter.request import Acceptance, SplitRequest, check_before_download, plan_split, shards_for
from rabbitllm.splitter.source_check import check_finished_source, moved_layer
from rabbitllm.splitter.split import (
    STAGING_NAME,
    clean_up,
    discard_finished,
    lost_layers,
    repair,
    split,
    warn_of_read_only,
)
from rabbitllm.storage import folder_lock
from rabbitllm.storage.folder_lock import FolderKind, FolderLock
from rabbitllm.store import locations
from rabbitllm.store.layer_store import LayerStore
from rabbitllm.store.manifest import (
    AUTO,
    JOURNAL_NAME,
    MANIFEST_NAME,
    Manifest,
    is_finished,
    is_fitted,
    read_manifest,
    require_fitted,
)
from rabbitllm.telemetry.profiler import Profiler

if TYPE_CHECKING:
    from rabbitllm.engine.devices import Device
    from rabbitllm.engine.load_plan import LoadPlanner, TooLittle

logger = logging.getLogger(__name__)


def devices_of(options: RunOptions) -> Sequence[Device]:
    """Return the devices to run a model on.

    Raises:
        DeviceError: the options name a GPU that does not exist.
    """
    from rabbitllm.engine.devices import resolve_devices  # with torch

    return resolve_devices(options.device, options.max_memory, options.pin_memory)


def with_memory(
    options: SplitOptions, run_options: RunOptions, devices: Sequence[Device] | None = None
) -> SplitOptions:
    """Return the options of a split; at "auto" with the memory for its weights, and whether a GPU multiplies them.

    Args:
        options: of the split.
        run_options: options for running the model.
        devices: devices to run it on; by default those that the options name.

    Raises:
        DeviceError: the options name a GPU that does not exist.
        MissingPackageError: a GPU needs bitsandbytes, which is not installed.
    """
    if options.compression != AUTO:
        return options
    from rabbitllm.engine.devices import weight_memory  # with torch

    devices = devices or devices_of(run_options)
    for_gpu = not all(device.shares_host_memory for device in devices)
    if for_gpu or options.fit_scales:
        check_compression("4bit")
    nbytes = weight_memory(devices, run_options)
    is_given = run_options.max_memory is not None
    return dataclasses.replace(options, memory=nbytes, memory_is_given=is_given, for_gpu=for_gpu)


@contextlib.contextmanager
def acceptance(
    source: Source, options: RunOptions, devices: Sequence[Device] | None = None, *, too_little: TooLittle = "warn"
) -> Iterator[LoadPlanner]:
    """Yield the check that refuses what loading would refuse: of planned layer files, and of finished ones.

    It is passed to `ensure_split`, which calls it before the first shard is touched and before the last one is deleted.
    `plan` decides by the same code, and loading uses the plan that the check has made.

    Args:
        source: the source of the split.
        options: options for running the model.
        devices: devices to run it on; by default those that the options name.
        too_little: see `LoadPlanner`.

    Raises:
        MissingPackageError: transformers is newer than the tested versions, and fails its self-check.
    """
    from rabbitllm.engine.load_plan import LoadPlanner  # with torch
    from rabbitllm.engine.transformers_check import check_transformers

    check_transformers()
    with config_folder(source) as folder:
        planner = LoadPlanner(options, devices or devices_of(options), folder, too_little)
        if not source.finished:
            planner.check_config()
        yield planner


def has_work_left(folder: Path, options: SplitOptions) -> bool:
    """Whether something must be removed after a finished split; only then is the lock needed.

    A split in a folder that cannot be written never has work left, and is loaded without a lock.
    """
    if not (folder / MANIFEST_NAME).exists() or not is_writable(folder):
        return False
    has_leftovers = (folder / JOURNAL_NAME).exists() or (folder / STAGING_NAME).exists() or is_left_over(folder)
    return has_leftovers or options.shards.deletes_rest


def check_finished(source: Source, options: SplitOptions, accept: Acceptance | None = None) -> None:
    """Check that a finished split is of this source, as far as the source still exists.

    If the policy deletes the rest of the original, that is then deleted, if `accept` accepts the split, and both are
    read and have their recorded checksums.
    """
    manifest = read_manifest(source.split_folder)
    if manifest is None:
        return  # made by RabbitLLM 1.1; missing tensors are detected when the model is built
    if manifest.compression != options.compression and source.split_folder != source.config_folder:
        raise SplitMismatchError(
            f"{source.split_folder} is a split at compression {manifest.compression}; requested was "
            f"{options.compression}.",
            "Split into another folder (--dir, layer_shards_saving_path).",
        )
    _check_budget(source, manifest, options)
    require_fitted(source.split_folder, manifest.quantizer, fit_scales=options.fit_scales)
    if is_writable(source.split_folder):
        clean_up(source.split_folder)
    if source.repository is not None:
        refuse_another(source, manifest, source.repository.identity_against(manifest.source))
    checkpoint = _remaining_checkpoint(source, manifest, options)
    if checkpoint is None:
        check_small_files(source, manifest.source, None)
        return
    checkpoint = checkpoint.with_dtype(options.gguf_dtype)  # as split: the recorded checksums are of these values
    here = filter(checkpoint.at_hand, checkpoint.index.shards)  # headers of others are not requested from a repository
    metadata = list(filter(None, map(checkpoint.metadata, here)))
    moved = moved_layer(checkpoint.index, manifest.layers) if checkpoint.translation is None else None
    refuse_another(source, manifest, checkpoint.identity(metadata), moved)
    _refuse_without_evidence(source, manifest, metadata)
    check_small_files(source, manifest.source, checkpoint)
    if options.shards.deletes_rest and checkpoint.deletable:
        store = LayerStore(source.split_folder)  # checks all sizes and headers before anything is deleted
        if accept is not None:
            accept(store)
        _refuse_to_lose(checkpoint, source.split_folder, options.shards)
        discard_finished(checkpoint, manifest, metadata, source.split_folder, options.shards)
        return
    check_finished_source(manifest, metadata, checkpoint, source.split_folder, verify=options.verify_source)
    if options.shards.deletes_rest and metadata:
        warn_of_read_only(len(metadata), checkpoint)


def _check_budget(source: Source, manifest: Manifest, options: SplitOptions) -> None:
    """Warn that a mixed split was made for another budget; refuse it only if it is larger than the disk may hold."""
    budget = other_budget(manifest.chosen, options) if options.compression == AUTO else None
    if budget is None:
        return
    remake = "For the new budget split into another folder (--dir, layer_shards_saving_path), or remove this one"
    nbytes = sum(record.size for record in manifest.layers)
    if options.max_disk is not None and nbytes > options.max_disk:
        raise SplitMismatchError(
            f"{source.split_folder} was made {budget} and has {nbytes:,} bytes of layer files; requested was "
            f"max_disk={options.max_disk:,}.",
            f"To use the split unchanged, remove max_disk. {remake}.",
        )
    logger.warning("%s was made %s and is used unchanged. %s.", source.split_folder, budget, remake)


def _refuse_without_evidence(source: Source, manifest: Manifest, metadata: list[ShardMetadata]) -> None:
    """Refuse a split that lies elsewhere and whose model has another name, if none of its shards is in the folder."""
    split_source = manifest.source
    if source.local is None or metadata or split_source.kind != "local":
        return
    lies_inside = source.split_folder.resolve().is_relative_to(source.local.resolve())
    if not lies_inside and split_source.name != source.local.resolve().name:
        raise SplitMismatchError(
            f"{source.split_folder} was split from a folder named {split_source.name!r}, and {source.local} has none "
            "of the shards that were split.",
            f"If it is the same model, load the split directory: {source.split_folder}. For another model give another "
            "folder (layer_shards_saving_path).",
        )


def _remaining_checkpoint(source: Source, manifest: Manifest, options: SplitOptions) -> Checkpoint | None:
    """Return the local weights that a finished split was made from; None if they are used up.

    The folder may have the weights in another format too. The split does not use that one: it is not opened, and never
    discarded. Other shards of the same format are other weights.

    Raises:
        SplitMismatchError: the folder has those, or nothing shows that the split is of this folder.
    """
    shards = manifest.source.fingerprints
    try:
        if source.repository is not None:
            entry = source.repository.entry()
            reads_them = options.verify_source or options.shards.deletes_rest  # else no header is requested for it
            looked_for = [entry] if is_index(entry) else ["config.json", *shards] if reads_them else []
            if not any(map(source.repository.cached, looked_for)):
                return None
            remote = HubCheckpoint(source.repository)
            return None if shards.keys().isdisjoint(remote.index.shards) else remote
        if source.local is None:
            return None
        if begins_with_any(source.local, shards, source.entry):
            return LocalCheckpoint(source.local, known_shards=shards, entry=source.entry)
        entry = source.entry or entry_in(source.local)
        if (source.local / entry).exists() and has_format_of(entry, shards):
            raise SplitMismatchError(
                f"{source.split_folder} was split from {manifest.source.instead_of(source.name)}: the folder has other "
                f"weights now, {entry}.",
                f"To use the split, load the split directory: {source.split_folder}. To split these weights, use "
                "another folder (--dir, layer_shards_saving_path), or remove the split (`rabbitllm rm`).",
            )
    except (CheckpointNotFoundError, MissingShardError):
        pass  # no weights are left, or not the file of a GGUF set that has the metadata
    except InvalidIndexError as error:  # half written, perhaps; the split does not need it
        if options.verify_source or options.shards.deletes_rest:
            raise
        logger.warning("%s So %s is not compared with its source.", error.problem, source.split_folder)
    _refuse_without_evidence(source, manifest, [])
    return None


def ensure_split(
    source: Source,
    options: SplitOptions,
    naming: LayerNaming | None = None,
    executor: ShardExecutor | None = None,
    accept: Acceptance | None = None,
) -> Profiler:
    """Make or finish the split directory of a source; with `delete_original`, remove the rest of the original.

    One process and one thread at a time: others wait, and find the split finished, or resume it. With `executor`,
    workers fill layer files. Front ends quantize on the CPU also where there is a GPU: bitsandbytes' kernels for GPUs
    give other bits (for a block of zeros; by an approximate reciprocal), and layer files do not depend on the machine.

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
        source_lock = lock_source(source, options) if options.shards.deletes_rest else FolderLock()
        with read_lock(folder), source_lock:  # the first prevents a repair meanwhile
            if is_finished(folder) and not has_work_left(folder, options):
                check_finished(source, options, accept)
                return Profiler(enabled=options.profiling)
    with system_errors_by_name(folder), locked(folder), reporting_interrupts(folder), contextlib.ExitStack() as locks:
        split_lock.revoke(source.split_folder)  # of a run that died and whose workers may still be running
        # checked again: the previous holder of the lock may have finished it
        if is_complete(folder, source.local, source.entry):
            if options.shards.deletes_rest:
                locks.enter_context(lock_source(source, options))
            check_finished(source, options, accept)
            return Profiler(enabled=options.profiling)
        if source.local is None and source.repository is None:
            raise IncompleteSplitError(
                f"{folder} is no longer a finished split: another process removed it, or failed to repair it.",
                "Use the original checkpoint: the same call then finishes the split or makes it again.",
            )
        refuse_half_repaired(folder, only_partial=True)  # its plan has not all layers
        locks.enter_context(lock_source(source, options, by_executor=executor is not None))
        _refuse_to_quantize_again(source, options)
        checkpoint = _open_checkpoint(source, options, by_executor=executor is not None).with_dtype(options.gguf_dtype)
        _refuse_to_lose(checkpoint, folder, options.shards)
        config = config_of(source.config_folder, checkpoint)
        request = SplitRequest(checkpoint, source.split_folder, config, options, naming, executor, accept)
        if isinstance(checkpoint, HubCheckpoint) and not options.shards.takes_one_at_a_time:
            chosen = check_before_download(request)  # for the space that the shards will leave
            downloaded = LocalCheckpoint(download_all(checkpoint, checkpoint.index), entry=checkpoint.gguf_entry())
            checkpoint = downloaded.with_dtype(options.gguf_dtype)
            request = dataclasses.replace(request, checkpoint=checkpoint, chosen=chosen)
        if executor is not None:
            locks.enter_context(executor.sharing(folder, [source.local] if source.local is not None else []))
        try:
            return split(request)
        except MissingShardError as error:
            raise with_other_splits(error, source) from None


def check_from_headers(source: Source, options: SplitOptions | None, accept: Acceptance) -> None:
    """Call `accept`, which may raise, with planned files, before a shard is fetched or split; None: without a split."""
    if options is not None:
        _refuse_to_quantize_again(source, options)
    folder = source.split_folder
    earlier = journal.replay(folder) if options is not None else None
    chosen = options or SplitOptions()
    checkpoint = _open_checkpoint(source, chosen).with_dtype(chosen.gguf_dtype)
    request = SplitRequest(checkpoint, folder, config_of(source.config_folder, checkpoint), chosen)
    accept(PlannedFiles(plan_split(request) if earlier is None else earlier.plan, folder))


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
    deletes = options.shards.deletes_original and is_writable(folder)
    lock = folder_lock.exclusive if deletes else folder_lock.shared
    return lock(folder, FolderKind.SOURCE)


def _in_hub_cache(repository: HubRepository, options: SplitOptions) -> Path | None:
    """Return a repository's snapshot in the hub cache; None if the split neither reads nor deletes shards there."""
    weights = [name for name in repository.files if name.endswith(WEIGHT_SUFFIXES)]
    only_weights = options.shards in (ShardPolicy.DELETE_FETCHED, ShardPolicy.DELETE_USED)
    names = weights if only_weights else ["config.json", repository.entry(), *weights]
    cached = next(filter(None, map(repository.cached, names)), None)
    return cached[0].folder if cached is not None else None


def _refuse_to_quantize_again(source: Source, options: SplitOptions) -> None:
    method = quantized_as(read_config(source.config_folder)) if options.compression is not None else None
    if method is not None:
        raise OptionError(
            f"The weights of {source.name} are already quantized ({method}); compression={options.compression!r} would "
            "also quantize their scales.",
            "Remove compression: the quantized weights are split and used as they are.",
        )


def _refuse_to_lose(checkpoint: Checkpoint, folder: Path, policy: ShardPolicy) -> None:
    """Refuse to delete shards where a restart would lose the split, or the same call then take others for theirs."""
    if not (policy.deletes_original and isinstance(checkpoint, LocalCheckpoint)):
        return
    if checkpoint.outlasts(folder):
        raise OptionError(
            f"{folder} is in memory: a restart would lose the weights of {checkpoint.label}. Nothing was deleted.",
            "Use a folder on a disk (--dir, layer_shards_saving_path), or keep the original.",
        )
    if other := checkpoint.left_behind():
        text = f"{checkpoint.label} has {other}, too, which the same call would take for it then; nothing was deleted."
        raise OptionError(text, f"Move {other} into another folder, or keep the original.")


def _open_checkpoint(source: Source, options: SplitOptions, *, by_executor: bool = False) -> Checkpoint:
    """Open the checkpoint.

    With an executor, shards are fetched unless they are in a folder that all workers see; the user's cache is not used.
    """
    repository, missing_from = source.repository, source.missing_from
    if by_executor:
        repository = dataclasses.replace(repository, uses_cache=False) if repository is not None else None
        missing_from = dataclasses.replace(missing_from, uses_cache=False) if missing_from is not None else None
    if repository is None:
        assert source.local is not None
        return open_folder(source.local, missing_from, source.split_folder, source.entry)
    if by_executor and not options.shards.takes_one_at_a_time:
        raise OptionError(
            f"--keep-shards keeps the shards of {source.name} in this machine's hub cache, which workers on other "
            "machines cannot read.",
            "Remove --keep-shards, or download the repository into a shared folder and use that folder.",
        )
    return HubCheckpoint(repository)


def original_around(folder: Path, shards: Collection[str]) -> Path | None:
    """Return the folder around a split directory, if it has all of these shards."""
    parent = locations.spelled_out(folder).parent
    return parent if shards and all((parent / shard).is_file() for shard in shards) else None


def repair_split(folder: Path, manifest: Manifest, layers: Collection[str], original: Path | None = None) -> None:
    """Make damaged layers of a finished split again, from the source that it was made from.

    Args:
        folder: the split directory.
        manifest: its manifest.
        layers: ids of the damaged layers.
        original: the checkpoint, for a split that was made from a folder; by default the folder around the split
            directory, if it has the shards. A repository is found by its name, or in the hub cache if the hub does not
            answer; only shards that the repair fetches itself are deleted.

    Raises:
        OptionError: the split was made from a folder, no `original` was given, and the shards are not around the split.
        SplitMismatchError: the source is another one, or the split has changed since the check; nothing was touched.
        InUseError: another process has loaded the model, or deletes shards of the source; nothing was touched.
    """
    with _locked_for_repair(folder, manifest.source, shards_for(manifest, layers), original) as (checkpoint, policy):
        if read_manifest(folder) != manifest:
            raise SplitMismatchError(
                f"{folder} has changed since it was checked: another process repaired, removed or replaced it.",
                "Make the same call again.",
            )
        options = SplitOptions(manifest.compression, policy, fit_scales=is_fitted(manifest.quantizer))
        named = str(original.absolute()) if original is not None else ""
        repair(SplitRequest(checkpoint, folder, read_config(folder), options), manifest, layers, named)


def finish_repair(folder: Path, original: Path | None = None) -> None:
    """Finish a repair that was interrupted, or the removal of what it left; do nothing if there is neither.

    Args:
        folder: the split directory.
        original: as in `repair_split`.

    Raises:
        RabbitLLMError: as in `repair_split`.
    """
    if has_work_left(folder, SplitOptions()):
        with locked(folder):
            clean_up(folder)
    if journal.repair_command(folder) is None or (earlier := journal.replay(folder)) is None:
        return
    sums, used = earlier.checksums, earlier.without(lost_layers(folder, earlier)).used
    shards = [s.name for s in earlier.plan.shards if s.name not in used or any(t.name in sums for t in s.tensors)]
    with _locked_for_repair(folder, earlier.plan.source, shards, original) as (checkpoint, policy):
        clean_up(folder)
        if journal.repair_command(folder) is None:  # another process has finished or removed it
            return
        options = SplitOptions(earlier.plan.compression, policy, fit_scales=is_fitted(earlier.quantizer))
        split(SplitRequest(checkpoint, folder, read_config(folder), options))


@contextlib.contextmanager
def _locked_for_repair(
    folder: Path, identity: SourceIdentity, shards: Collection[str], original: Path | None
) -> Iterator[tuple[Checkpoint, ShardPolicy]]:
    """Hold a split directory and its source while these shards are read; yield the source and the policy of shards."""
    repository = None
    if original is None and identity.kind != "hub":
        original = original_around(folder, shards)
    every = [*identity.fingerprints]
    model = next(iter(gguf_models(every)), None)
    if original is not None:
        if model is None and len(every) == 1 and is_gguf_file(original / every[0]):  # named without a suffix
            model = every[0]
        checkpoint: Checkpoint = LocalCheckpoint(original, entry=model)
    elif identity.kind == "hub":
        access = HubAccess(revision=identity.commit)
        quantization = gguf_stem(model) if model is not None else None
        try:
            repository = open_repository(identity.name, access, folder / STAGING_NAME, quantization)
            checkpoint = HubCheckpoint(repository)
        except (CheckpointNotFoundError, HubError) as error:
            original = cached_snapshot(identity.name, access)
            if original is None or not all((original / shard).exists() for shard in shards):
                raise
            repository, checkpoint = None, LocalCheckpoint(original, entry=model)
            logger.warning("%s Using its files in %s.", error.problem, original)
    else:
        around = locations.spelled_out(folder).parent
        missing = listed([shard for shard in shards if not (around / shard).is_file()], 3) or "its shards"
        raise OptionError(
            f"{folder} was split from a folder named {identity.name!r}, and {around} lacks {missing}.",
            "Pass its path with --original, if its shards still exist; otherwise split another copy of the model.",
        )
    policy = ShardPolicy.DELETE_FETCHED if original is None else ShardPolicy.KEEP
    source = Source(identity.name, folder, folder, finished=False, repository=repository, local=original)
    with (
        system_errors_by_name(folder),
        locked(folder, excluding_readers=True),
        reporting_interrupts(folder),
        lock_source(source, SplitOptions(shards=policy)),
    ):
        yield checkpoint, policy
