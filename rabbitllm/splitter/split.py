"""Makes a split directory: plans it or resumes an earlier plan, runs the loop over shards, and writes the manifest.

The sequential and the standard route differ only in when a used-up shard is released. A repair turns a finished
directory into an unfinished split whose sound shards are used up, and finishes that like any other. Independent of
models, and of devices other than the one that quantizes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rabbitllm.base.options import BIG_LAYER_BYTES, ShardPolicy
from rabbitllm.base.progress import SplitDone, tell
from rabbitllm.base.terminal import listed, size
from rabbitllm.checkpoints.checkpoint import Checkpoint, Disposal, ShardMetadata, SourceIdentity
from rabbitllm.checkpoints.index import natural_key
from rabbitllm.errors import IncompleteSplitError, InUseError, RabbitLLMError, SplitMismatchError
from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.splitter import journal
from rabbitllm.splitter._shard_loop import ShardLoop
from rabbitllm.splitter._written import manifest_of, require_as_written, take_names_back
from rabbitllm.splitter.bit_allocation import other_budget
from rabbitllm.splitter.disk_budget import DiskBudget, ShardTransfer, choose_shard_transfer, disk_use
from rabbitllm.splitter.disk_sampler import DiskSampler
from rabbitllm.splitter.filler import SplitWork
from rabbitllm.splitter.plan import PlannedFiles, PlannedShard, SplitPlan
from rabbitllm.splitter.request import (
    SplitRequest,
    disk_budget_of,
    located,
    metadata_of,
    plan_split,
    planned_shards,
    quantizer_of,
    require_shards,
    resumed_disk_budget,
    shards_for,
)
from rabbitllm.splitter.source_check import (
    check_finished_source,
    check_resumed,
    copies_first,
    moved_tensor,
    release_if_same,
    require_same,
    with_checksums,
)
from rabbitllm.splitter.sums import TensorSums
from rabbitllm.storage import durable
from rabbitllm.storage.files import read_whole
from rabbitllm.store.layer_file import DONE_SUFFIX, SCRATCH_SUFFIX
from rabbitllm.store.layer_store import LayerStore, verify
from rabbitllm.store.manifest import (
    AUTO,
    JOURNAL_NAME,
    MANIFEST_NAME,
    REMOVED_SUFFIX,
    Manifest,
    is_half_removed,
    require_fitted,
    write_manifest,
)
from rabbitllm.store.stored_form import StoredForm, stored_schemes
from rabbitllm.telemetry.profiler import Profiler

logger = logging.getLogger(__name__)

STAGING_NAME = ".staging"
"""Folder inside the split directory for fetched shards; removed when the split is complete."""


def clean_up(folder: Path) -> None:
    """Remove files that only the split needed, its journal and fetched shards, and the record of a killed `rm`.

    Without a manifest the journal is all that tells of the split, and stays. Also completes a removal that a crash
    interrupted.
    """
    if not (folder / MANIFEST_NAME).exists():
        return
    for name in (MANIFEST_NAME, JOURNAL_NAME):
        if (folder / (name + REMOVED_SUFFIX)).exists():
            durable.remove(folder / (name + REMOVED_SUFFIX))
    journal_path = folder / JOURNAL_NAME
    if journal_path.exists():  # checked first: a finished split may lie on a read-only mount
        durable.sync_folder(folder)  # the manifest's name may not be durable yet if an earlier process died
        durable.remove(journal_path)
    durable.remove_folder(folder / STAGING_NAME, durable.PART_SUFFIX)


def discard_original(checkpoint: Checkpoint, shards: Iterable[PlannedShard], checksums: Mapping[str, int]) -> None:
    """Remove the remaining shards of a checkpoint, and the other files that its kind allows (`delete_original`).

    The caller must have made sure that the split directory is complete and was made from this checkpoint.

    Args:
        checkpoint: the source.
        shards: those to remove, with the metadata of when they were read or compared; others are kept.
        checksums: shard -> `source_check.source_crc32`.
    """
    ordered = copies_first(checkpoint, shards)
    releases = [release_if_same(checkpoint, shard, checksums.get(shard.name)) for shard in ordered]
    if kept := sum(release.disposal is Disposal.READ_ONLY for release in releases):
        warn_of_read_only(kept, checkpoint)
    if any(checkpoint.at_hand(shard) for shard in checkpoint.index.shards):
        return  # its index, and the other files of a revision in the hub cache, belong to it
    for path in checkpoint.discard_rest():
        logger.info("Deleted %s.", path)


def _warn_of_left_out(
    shards: Iterable[PlannedShard], source: SourceIdentity, policy: ShardPolicy, checkpoint: Checkpoint
) -> None:
    """Name what the split leaves out of each shard, and whether its file is kept for that."""
    shards = tuple(shards)
    loses_metadata = checkpoint.translation is not None and checkpoint.translation.loses_metadata
    if loses_metadata and source.kind == "local" and policy.deletes_original:
        logger.warning(
            "%s is deleted once it is split, and of its metadata the split keeps config, tokenizer and chat template.",
            listed((shard.name for shard in shards if not shard.is_kept(source, policy)), 3),
        )
    for shard in shards:
        if not shard.left_out:
            continue
        what = listed(map(str, shard.left_out), 3)
        if policy.deletes_original and shard.is_kept(source, policy):
            logger.warning(
                "%s in %s is kept, since the split leaves out %s. To delete it too, use "
                "sequential_shard_processing=True and delete_original=True together.",
                *(shard.name, checkpoint.label, what),
            )
        elif policy.deletes_original and not shard.staged:
            on_hub = "; the repository has it" if source.kind == "hub" else ""
            logger.warning("%s is deleted with what the split leaves out%s: %s.", shard.name, on_hub, what)
        elif not loses_metadata:  # which has said it already
            logger.warning("The split leaves out of %s: %s.", shard.name, what)


def warn_of_read_only(count: int, checkpoint: Checkpoint) -> None:
    """Warn that shards stay because nothing can be deleted there."""
    logger.warning("%d shards of %s cannot be deleted: their folder is read-only.", count, checkpoint.label)


def discard_finished(
    checkpoint: Checkpoint, manifest: Manifest, metadata: Sequence[ShardMetadata], folder: Path, policy: ShardPolicy
) -> None:
    """Remove the original of a split that an earlier call finished, after both are compared with their checksums.

    Args:
        checkpoint: the source.
        manifest: of the split.
        metadata: of the shards that still exist; the caller has compared their fingerprints.
        folder: the split directory.
        policy: of deletion; a shard with tensors that the split leaves out may be kept.

    Raises:
        SplitMismatchError: a shard has changed since the split was made; nothing was deleted.
        IncompleteSplitError: a layer file is damaged; nothing was deleted.
    """
    shards = planned_shards(checkpoint, metadata)
    _warn_of_left_out(shards, manifest.source, policy, checkpoint)
    kept = {shard.name for shard in shards if shard.is_kept(manifest.source, policy)}
    deletable = [f for f in metadata if f.name not in kept]
    compared = check_finished_source(manifest, deletable, checkpoint, folder, verify=True)
    if compared and (damaged := verify(folder).damaged):
        names = listed((damage.file for damage in damaged), 3)
        raise IncompleteSplitError(
            f"{folder} is damaged ({names}), so {checkpoint.label} is not deleted.",
            f"Make the damaged layers again: rabbitllm verify {folder} --repair. Then make the same call.",
        )
    discard_original(checkpoint, compared, manifest.source_checksums)


def split(request: SplitRequest) -> Profiler:
    """Make a split directory, or finish one that an earlier call began.

    Returns:
        Profile of the time spent on each layer; empty unless `options.profiling`.

    Raises:
        CheckpointError: the source is malformed or incomplete, or not accepted; nothing was touched.
        NotEnoughSpaceException: it would not fit; nothing was touched.
        SplitMismatchError: the folder has layers of another source, or the source has changed.
        HubError: fetching failed; the same call resumes the split.
        DiskFullError: another process filled the disk; the same call resumes the split.
    """
    start = time.perf_counter()
    work = _begin(request)
    profiler = Profiler(request.options.profiling, f"Split of {request.checkpoint.label}, by stage")
    with DiskSampler(request.folder, request.options.min_free, max_disk=request.options.max_disk) as watch:
        keep_last = request.accept is not None
        with contextlib.closing(ShardLoop(work, profiler, watch.check, request.executor, keep_last=keep_last)) as loop:
            loop.take_shards()
            manifest = manifest_of(work, loop.checksums, loop.source_checksums)
            if request.accept is not None:
                request.accept(LayerStore(request.folder, manifest))
            loop.release_last()
        write_manifest(request.folder, manifest)
        clean_up(request.folder)
        if request.options.shards.deletes_rest:
            deletable = [s for s in work.plan.shards if not s.is_kept(work.plan.source, request.options.shards)]
            discard_original(request.checkpoint, deletable, manifest.source_checksums)
    disk, memory = watch.max_disk_bytes, watch.anonymous_bytes
    logger.info("Peaks: %s of disk in %s, %s of memory.", size(disk), request.folder, size(memory))
    plan, seconds = work.plan, time.perf_counter() - start
    tell(SplitDone(str(request.folder), len(plan.layouts), plan.output_bytes, seconds, disk, memory))
    return profiler


def _begin(request: SplitRequest) -> SplitWork:
    """Resume from the journal of an earlier run, or make a plan, check the space and begin a journal."""
    earlier = journal.replay(request.folder)
    if earlier is not None:
        return _resume(request, earlier)
    plan = plan_split(request)
    quantizer = quantizer_of(request)
    work = _make_work(request, plan, disk_budget_of(request, plan), {}, quantizer)
    for layer, layout in plan.layouts.items():
        if layout.size > BIG_LAYER_BYTES:
            logger.warning("Layer %s has %s; streaming it needs that much memory at once.", layer, size(layout.size))
    if request.options.verify_source:
        plan = with_checksums(plan, request.checkpoint)
        work = replace(work, plan=plan)
    durable.make_folder(request.folder)
    try:
        small_files = _small_files(request.checkpoint)
        mark = request.folder / STAGING_NAME  # without a record it says that small files are copies of a killed run
        if mark.exists():
            _remove_files(request.folder, [*filter(Path.exists, map(request.folder.joinpath, small_files))])
        stale = _refuse_files_of_others(request, plan, small_files)
        durable.make_folder(mark)
        copied = _write_small_files(request.folder, small_files)
        try:
            largest, nbytes = work.largest_file
            durable.require_size(mark / (largest + durable.PART_SUFFIX), nbytes)
            if request.accept is not None:
                request.accept(PlannedFiles(plan, request.folder))
        except BaseException:
            _remove_files(request.folder, copied)
            durable.remove_empty_folder(mark)
            raise
        _warn_of_left_out(plan.shards, plan.source, request.options.shards, request.checkpoint)
        _require_no_record(request.folder)
        markers = [path.with_name(path.name + DONE_SUFFIX) for path in stale]
        for path in (*filter(Path.exists, markers), *stale):  # never a marker without its file
            durable.remove(path)
        journal.begin(request.folder, plan, quantizer, new=True)
        durable.remove_empty_folder(mark)
    except FileExistsError as error:
        raise InUseError(
            f"{request.folder} is in use by another process, which began a split there although this one has locked "
            "it: the locks of this file system do not work between them.",
            "Make the same call again when that process has ended. Nothing of it was changed.",
        ) from error
    return work


def _resume(request: SplitRequest, earlier: journal.Replay) -> SplitWork:
    """Resume an earlier run's plan, after a check that source and folder are the same."""
    checkpoint, before = request.checkpoint, earlier
    lost = lost_layers(request.folder, earlier)
    earlier = earlier.without(lost)
    # including used-up ones that still exist: they are released without another check
    shards = [s for s in checkpoint.index.shards if s not in earlier.used or not checkpoint.stages(s)]
    source = earlier.plan.source
    if earlier.plan.kept:  # other shards may be damaged
        shards = [s.name for s in earlier.plan.shards if s.tensors and s.name in shards]
    metadata = metadata_of(checkpoint, shards)
    identity = checkpoint.identity(metadata.values())
    if earlier.plan.kept:
        identity = replace(identity, fingerprints={**source.fingerprints, **identity.fingerprints})
    reason = source.differs_from(identity) or _lack_of_evidence(request, source, identity)
    if reason is None and checkpoint.translation is None:
        reason = moved_tensor(checkpoint.index, earlier.plan.index.weight_map)
    if reason is not None and source.is_named_like(identity):
        raise SplitMismatchError(
            f"{checkpoint.label} has changed since the split in {request.folder} was started: {reason}.",
            "Restore the original files, and make the same call again. To split the changed checkpoint, use another "
            "folder (--dir, layer_shards_saving_path). Delete the split only if all original shards still exist.",
        )
    if reason is not None:
        renamed = f"If it is the same model, name its folder {source.name!r} again. " if source.kind == "local" else ""
        raise SplitMismatchError(
            f"{request.folder} holds an unfinished split of {source.instead_of(identity.name)}: {reason}.",
            f"{renamed}Split into another folder (--dir, layer_shards_saving_path). If all shards of that other model "
            "still exist, you can delete this folder.",
        )
    require_fitted(request.folder, earlier.quantizer, fit_scales=request.options.fit_scales)
    _require_shards_of(lost, request.folder, earlier.plan, metadata)
    require_shards([s.name for s in earlier.plan.shards if s.name not in earlier.used], metadata, checkpoint)
    logger.info("Resuming %s: %d shards are used.", request.folder, len(earlier.used))
    budget = other_budget(earlier.plan.chosen, request.options) if earlier.plan.compression == AUTO else None
    if budget is not None:
        logger.warning("%s was started %s, and keeps its original bit allocation.", request.folder, budget)
    verify = request.options.verify_source
    plan = located(check_resumed(earlier, metadata, checkpoint, request.folder, verify=verify), checkpoint)
    plan = replace(plan, source=replace(plan.source, name=identity.name))  # the folder may have another name by now
    _warn_of_left_out(plan.shards, plan.source, request.options.shards, checkpoint)
    disk_budget = resumed_disk_budget(disk_budget_of(request, plan), earlier.used)
    work = _make_work(request, plan, disk_budget, earlier.checksums, earlier.quantizer)
    work = replace(work, source_checksums=earlier.source_checksums, sound=earlier.sound)
    require_as_written(work)
    if journal.repair_command(request.folder) is None and (checkpoint.translation is None or checkpoint.derived()):
        _write_small_files(request.folder, _small_files(checkpoint))  # those of now, which the check reads
    if request.accept is not None:
        request.accept(PlannedFiles(earlier.plan, request.folder))
    journal.settle(request.folder)
    if lost:
        _begin_again(lost, before.used - earlier.used, work)
    take_names_back(work)
    if work.shard_transfer is ShardTransfer.STREAM:  # parts of shards that were fetched are fetched again
        durable.remove_folder(request.folder / STAGING_NAME, durable.PART_SUFFIX)
    return work


def _make_work(
    request: SplitRequest, plan: SplitPlan, disk_budget: DiskBudget, checksums: TensorSums, quantizer: str | None
) -> SplitWork:
    limit = request.executor.at_once if request.executor is not None else None
    shard_transfer, at_once = choose_shard_transfer(plan, disk_budget, request.options, limit)
    return SplitWork(
        plan,
        request.checkpoint,
        request.folder,
        request.options,
        shard_transfer,
        disk_use(plan, disk_budget, shard_transfer, at_once),
        disk_budget.used,
        checksums,
        at_once,
        quantizer,
    )


def _lack_of_evidence(request: SplitRequest, source: SourceIdentity, identity: SourceIdentity) -> str | None:
    """Return why a folder of another name without any known shard is not accepted as the same source; else None."""
    if (
        source.kind != "local"
        or source.name == identity.name
        or not source.fingerprints.keys().isdisjoint(identity.fingerprints)
    ):
        return None
    if request.folder.resolve().is_relative_to(Path(request.checkpoint.label).resolve()):
        return None  # the folder was renamed, with its split inside
    return "it has another name, and no shard is left to compare"


def lost_layers(folder: Path, earlier: journal.Replay) -> list[str]:
    """Return the layers whose files lack what used-up shards filled; what is created or extended would have holes."""

    def has(path: Path, nbytes: int) -> bool:
        return path.exists() and path.stat().st_size >= nbytes

    def end(forms: Iterable[StoredForm], offsets: Mapping[str, int]) -> int:
        parts = (part for form in forms if form.source.name in names for part in form.parts)
        return max((offsets[part.name] + part.nbytes for part in parts if part.name in offsets), default=0)

    names = {tensor.name for shard in earlier.plan.shards if shard.name in earlier.used for tensor in shard.tensors}
    lost = []
    for layer, layout in earlier.plan.layouts.items():
        file = folder / layout.file_name
        is_begun = earlier.plan.layer_map.layer_to_shards[layer] & earlier.used or layer in earlier.sound
        unfinished = [(file.with_name(file.name + durable.PART_SUFFIX), end(layout.forms, layout.offsets))]
        if layout.scratch_bytes:
            unfinished.append((folder / layout.scratch_name, end(layout.forms, layout.scratch_offsets)))
        is_whole = has(file, layout.size) or all(has(*each) for each in unfinished)
        if not is_whole and (is_begun or file.exists()):
            lost.append(layer)
    return lost


def _require_shards_of(lost: Collection[str], folder: Path, plan: SplitPlan, present: Collection[str]) -> None:
    """Check that lost layers can be made again."""
    for layer in lost:
        if missing := plan.layer_map.layer_to_shards[layer].difference(present):
            raise IncompleteSplitError(
                f"{folder / plan.layouts[layer].file_name} is missing or cut; it held tensors of "
                f"{', '.join(sorted(missing, key=natural_key))}, which earlier runs have used.",
                "Restore that file, or those shards, and make the same call again.",
            )


def _begin_again(lost: Collection[str], shards: Collection[str], work: SplitWork) -> None:
    """Remove what is left of lost layers, and record that these shards are to be used once more for them."""
    sums = work.source_checksums
    again = [replace(s, expected_crc32=sums.get(s.name)) for s in work.plan.shards if s.name in shards]
    require_same(again, work.checkpoint)
    for layer in lost:
        for suffix in (DONE_SUFFIX, durable.PART_SUFFIX, SCRATCH_SUFFIX, ""):
            durable.remove(work.folder / (work.plan.layouts[layer].file_name + suffix))
    durable.sync_folder(work.folder)
    with contextlib.closing(journal.SplitJournal(work.folder)) as split_journal:
        split_journal.mark_lost(lost, shards)
    logger.warning("Files of %s are missing or cut; these layers are made again.", listed(lost, 3))


def _refuse_files_of_others(request: SplitRequest, plan: SplitPlan, small_files: Mapping[str, bytes]) -> list[Path]:
    """Refuse a folder without a record of a split that has files which this split would replace.

    Copies of a run that was killed before its first record are gone by now, if it left its mark. An unfinished split of
    RabbitLLM 1.1 has layer files with the tensors of these layers, and may have a torn one.

    Returns:
        The layer files of such a split, or of one that is partly removed. Every shard exists at this point, so they are
        not the only copy.

    Raises:
        SplitMismatchError: it has others; nothing was changed.
        FileExistsError: there is a record by now: another process splits here despite the lock.
    """
    folder = request.folder
    for name, content in small_files.items():
        path = folder / name
        if path.exists() and read_whole(path) != content:
            raise _holds_other(path, request.checkpoint.label, "with other content")
    for file in filter(None, (request.checkpoint.at_hand(shard.name) for shard in plan.shards)):
        if file.resolve().parent == folder.resolve():  # also behind a link: it would be taken for a stale layer file
            raise _holds_other(file, request.checkpoint.label, "as a shard in the split directory itself")
    layouts = {folder / layout.file_name: layout for layout in plan.layouts.values()}
    suffixes = (durable.PART_SUFFIX, SCRATCH_SUFFIX)
    unfinished = [path.with_name(path.name + suffix) for path in layouts for suffix in suffixes]
    tensors = {path: _tensors_in(path) for path in layouts if path.exists()}
    others = [path for path, names in tensors.items() if names and names != set(layouts[path].tensors)]
    if not any(tensors.values()):
        others = list(tensors)
    left = [*filter(Path.exists, unfinished)]
    if others := others if is_half_removed(folder) else [*others, *left]:
        _require_no_record(folder)
        raise _holds_other(others[0], request.checkpoint.label, "and nothing records a split")
    return [*tensors, *left]


def _holds_other(path: Path, label: str, how: str) -> SplitMismatchError:
    return SplitMismatchError(
        f"{path} exists, {how}; the split of {label} would replace it. Nothing was changed.",
        "Split into another folder (--dir, layer_shards_saving_path), or move this file away; delete it only if you do "
        "not need it.",
    )


def _tensors_in(file: Path) -> set[str]:
    """Return the names of a layer file's tensors; none if it is torn."""
    try:
        return set(stored_schemes({spec.name: spec for spec in read_header(file).tensors}))
    except RabbitLLMError:
        return set()


def _small_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return config, tokenizer and the like, copied or derived, with which the folder loads without the original."""
    derived = checkpoint.derived()
    names = {MANIFEST_NAME, JOURNAL_NAME, *derived}
    copied = {name: path.read_bytes() for name, path in checkpoint.sidecars().items() if name not in names}
    return {**copied, **derived}


def _write_small_files(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write these files, and return the new ones."""
    new = []
    for name, content in files.items():
        target = folder / name
        new += [] if target.exists() else [target]
        durable.make_folder(target.parent)
        durable.write_whole(target, content)
    return new


def _remove_files(folder: Path, files: Sequence[Path]) -> None:
    """Remove these files of a split that is refused, and the folders that become empty."""
    for path in files:
        durable.remove(path)
    for parent in {path.parent for path in files} - {folder}:
        durable.remove_empty_folder(parent)


def _require_no_record(folder: Path) -> None:
    for record in (folder / JOURNAL_NAME, folder / MANIFEST_NAME):  # a finished split has its manifest first
        if record.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(record))


def repair(request: SplitRequest, manifest: Manifest, layers: Collection[str], named: str) -> None:
    """Make these layers of a finished split again, from only the shards that they need.

    After a crash `split` with the same request finishes it.

    Args:
        request: with the source that the split was made from, and its compression.
        manifest: of the directory.
        layers: ids of the damaged layers; their files are deleted once the shards that they need are compared.
        named: the original that the user named, "" if none; for the command that finishes it.

    Raises:
        SplitMismatchError: the source is another one, or would be split differently; nothing was touched.
        CorruptShardError: a shard differs from its checksum; nothing was touched.
        CheckpointError, HubError: the source is not available; nothing was touched.
    """
    folder = request.folder
    plan = plan_split(request, finished=manifest, layers=layers)
    needed = set(shards_for(manifest, layers))
    _refuse_another_source(plan, manifest, folder, needed)
    quantizer = quantizer_of(request)
    if quantizer != manifest.quantizer:
        logger.warning("The other layers were quantized by %s, these will be by %s.", manifest.quantizer, quantizer)
    checksums = manifest.source_checksums
    # the shards that are read must be unchanged since the split was made; changes of the others do not matter
    shards = [
        replace(shard, expected_crc32=checksums.get(shard.name)) if shard.name in needed else replace(shard, stat=None)
        for shard in plan.shards
    ]
    plan = replace(plan, shards=tuple(shards))
    require_same([shard for shard in shards if shard.name in needed], request.checkpoint)
    left = (record for record in manifest.layers if record.id not in layers and record not in plan.kept)
    sound = {record.id: (record.crc32, record.blocks) for record in left}
    journal.begin(folder, plan, manifest.quantizer, named, sound)
    with contextlib.closing(journal.SplitJournal(folder)) as split_journal:
        for shard in plan.shards:
            if shard.name not in needed:
                split_journal.mark_used(shard.name, {}, checksums.get(shard.name))
    # The damaged files are removed before the manifest. A journal is ignored if there is a manifest, and a manifest
    # that names a missing file is refused, so a crash at any point here is detected and repaired by the next call.
    for record in manifest.layers:
        if record.id in layers:
            for suffix in (DONE_SUFFIX, ""):
                durable.remove(folder / (record.file + suffix))
    durable.sync_folder(folder)
    durable.remove(folder / MANIFEST_NAME)
    durable.sync_folder(folder)
    split(request)


def _refuse_another_source(plan: SplitPlan, manifest: Manifest, folder: Path, needed: Collection[str]) -> None:
    why = manifest.source.differs_from(plan.source)
    if why is None and (absent := set(needed).difference(shard.name for shard in plan.shards if shard.tensors)):
        why = f"it has other shards, without {listed(sorted(absent, key=natural_key), 3)}"
    planned = {layer: (layout.file_name, layout.size) for layer, layout in plan.layouts.items()}
    remade = (record for record in manifest.layers if record not in plan.kept)
    if why is None and planned != {record.id: (record.file, record.size) for record in remade}:
        why = "its layer files would differ"
    if why is not None:
        raise SplitMismatchError(
            f"{folder} cannot be repaired from {plan.source.title}: {why}.",
            "Split again into another folder (--dir, layer_shards_saving_path).",
        )
