"""Makes a split directory: plans it or resumes an earlier plan, runs the loop over shards, and writes the manifest.

The sequential and the standard route differ only in when a used-up shard is released. Independent of models, and of
devices other than the one that quantizes.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from rabbitllm.base.options import BIG_LAYER_BYTES
from rabbitllm.base.progress import SplitDone, tell
from rabbitllm.base.terminal import size
from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.checkpoints.index import natural_key
from rabbitllm.errors import IncompleteSplitError, SplitMismatchError
from rabbitllm.splitter import journal
from rabbitllm.splitter.choosing import other_budget
from rabbitllm.splitter.disk_budget import DiskBudget, choose_at_once, choose_shard_transfer, use_of
from rabbitllm.splitter.disk_sampler import DiskSampler
from rabbitllm.splitter.disk_use import ShardTransfer
from rabbitllm.splitter.finish import STAGING_NAME, finish, manifest_of
from rabbitllm.splitter.plan import SplitPlan
from rabbitllm.splitter.planned_files import PlannedFiles
from rabbitllm.splitter.request import (
    SplitRequest,
    disk_budget_of,
    facts_of,
    plan_split,
    quantizer_of,
    require_shards,
    resumed_disk_budget,
    with_places,
)
from rabbitllm.splitter.shard_loop import ShardLoop
from rabbitllm.splitter.source_check import check_resumed, with_checksums
from rabbitllm.splitter.sums import TensorSums
from rabbitllm.splitter.work import SplitWork
from rabbitllm.storage import durable
from rabbitllm.store.layer_file import DONE_SUFFIX, SCRATCH_SUFFIX
from rabbitllm.store.layer_store import LayerStore
from rabbitllm.store.manifest import JOURNAL_NAME, MANIFEST_NAME, is_fitted
from rabbitllm.telemetry.profiler import Profiler

logger = logging.getLogger(__name__)


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
    work, quantizer = _begin(request)
    profiler = Profiler(request.options.profiling, f"Split of {request.checkpoint.label}, by stage")
    with DiskSampler(request.folder, request.options.min_free, max_disk=request.options.max_disk) as watch:
        loop = ShardLoop(work, profiler, watch.check, request.executor, holds_last=request.accept is not None)
        try:
            loop.take_shards()
            loop.finish_leftovers()
            manifest = manifest_of(work, quantizer, loop.checksums, loop.source_checksums)
            if request.accept is not None:
                request.accept(LayerStore(request.folder, manifest))
            loop.give_up_last()
        finally:
            loop.close()
        finish(request, manifest)
    peaks = watch.peaks
    logger.info(
        "Peaks: %s of disk in %s, %s of memory.", size(peaks.disk_bytes), request.folder, size(peaks.anonymous_bytes)
    )
    done = SplitDone(
        str(request.folder),
        len(work.plan.layouts),
        work.plan.output_bytes,
        time.perf_counter() - start,
        peaks.disk_bytes,
        peaks.anonymous_bytes,
    )
    tell(done)
    return profiler


def _begin(request: SplitRequest) -> tuple[SplitWork, str | None]:
    """Resume from the journal of an earlier run, or plan anew, check the space and begin a journal.

    Returns:
        The work, and the name of the quantizer for the manifest.
    """
    earlier = journal.replay(request.folder)
    if earlier is not None:
        return _take_up(request, earlier), earlier.quantizer
    plan = plan_split(request)
    quantizer = quantizer_of(request)
    work = _work(request, plan, disk_budget_of(request, plan), {}, is_fitted(quantizer))
    _warn_of_big_layers(plan)
    if request.options.verify_source:
        plan = with_checksums(plan, request.checkpoint)
        work = dataclasses.replace(work, plan=plan)
    durable.make_folder(request.folder)
    copied = _copy_sidecars(request)
    if request.accept is not None:
        try:
            request.accept(PlannedFiles(plan, request.folder))
        except BaseException:
            _remove(request.folder, copied)
            raise
    _clear_stale(request.folder, plan)
    journal.begin(request.folder, plan, quantizer)
    return work, quantizer


def _take_up(request: SplitRequest, earlier: journal.Replay) -> SplitWork:
    """Resume an earlier run's plan, after a check that source and folder are the same."""
    checkpoint = request.checkpoint
    # including used-up ones that still exist: they are released without another check
    shards = [s for s in checkpoint.index.shards if s not in earlier.used or not checkpoint.stages(s)]
    facts = facts_of(checkpoint, shards)
    identity = checkpoint.identity(facts.values())
    known = earlier.plan.source
    why = known.differs_from(identity) or _no_evidence(request, known, identity)
    if why is not None and known.is_named_like(identity):
        raise SplitMismatchError(
            f"{checkpoint.label} has changed since the split in {request.folder} was begun: {why}.",
            "Restore the original files, and make the same call again. To split the changed checkpoint, choose another "
            "folder (layer_shards_saving_path). Delete that folder only if all original shards still exist.",
        )
    if why is not None:
        raise SplitMismatchError(
            f"{request.folder} holds an unfinished split of {earlier.plan.source.name}, not of {identity.name}: {why}.",
            "Split into another folder (layer_shards_saving_path). If that other model is intact, the folder may be "
            "deleted.",
        )
    require_shards([s.name for s in earlier.plan.shards if s.name not in earlier.used], facts, checkpoint)
    _require_begun_layers(request.folder, earlier)
    if request.accept is not None:
        request.accept(PlannedFiles(earlier.plan, request.folder))
    logger.info("Going on with %s: %d shards are used up.", request.folder, len(earlier.used))
    if (other := other_budget(earlier.plan.chosen, request.options)) is not None:
        logger.warning("%s was begun %s, and goes on with the bits chosen then.", request.folder, other)
    verify = request.options.verify_source
    plan = with_places(check_resumed(earlier, facts, checkpoint, request.folder, verify=verify), checkpoint)
    disk_budget = resumed_disk_budget(disk_budget_of(request, plan), earlier.used)
    work = _work(request, plan, disk_budget, earlier.checksums, is_fitted(earlier.quantizer))
    work = dataclasses.replace(work, source_checksums=earlier.source_checksums)
    journal.settle(request.folder)
    if work.shard_transfer is ShardTransfer.STREAM:  # parts of shards that were fetched are fetched again
        durable.remove_folder(request.folder / STAGING_NAME)
    return work


def _work(
    request: SplitRequest, plan: SplitPlan, disk_budget: DiskBudget, checksums: TensorSums, fitted: bool
) -> SplitWork:
    if request.executor is None:
        shard_transfer, at_once = choose_shard_transfer(plan, disk_budget, request.options), 1
    else:
        shard_transfer, at_once = choose_at_once(plan, disk_budget, request.options, request.executor.at_once)
    return SplitWork(
        plan,
        request.checkpoint,
        request.folder,
        request.options,
        request.quantize_on,
        shard_transfer,
        use_of(plan, disk_budget, shard_transfer, at_once),
        disk_budget.used,
        checksums,
        at_once,
        fitted,
    )


def _no_evidence(request: SplitRequest, known: SourceIdentity, found: SourceIdentity) -> str | None:
    """Return why a folder of another name with none of the known shards is not taken for the same source, or None."""
    if (
        known.kind != "local"
        or known.name == found.name
        or not known.fingerprints.keys().isdisjoint(found.fingerprints)
    ):
        return None
    if request.folder.is_relative_to(request.checkpoint.label):  # the folder was renamed, with its split inside
        return None
    return "it has another name, and none of the shards by which to tell"


def _require_begun_layers(folder: Path, earlier: journal.Replay) -> None:
    """Check that the files filled from used-up shards exist; a file that is created again would have holes instead."""
    for layer, layout in earlier.plan.layouts.items():
        begun = earlier.plan.layer_map.layer_to_shards[layer] & earlier.used
        file = folder / layout.file_name
        unfinished = [file.with_name(file.name + durable.PART_SUFFIX)]
        if layout.scratch_bytes:
            unfinished.append(folder / layout.scratch_name)
        if begun and not file.exists() and not all(path.exists() for path in unfinished):
            raise IncompleteSplitError(
                f"{file} is gone, finished or not; it held tensors of {', '.join(sorted(begun, key=natural_key))}, "
                "which earlier runs used up.",
                f"Put that file back. If those shards can be had again, put them in place, delete {folder} and call "
                "again.",
            )


def _warn_of_big_layers(plan: SplitPlan) -> None:
    for layer, layout in plan.layouts.items():
        if layout.size > BIG_LAYER_BYTES:
            logger.warning("Layer %s has %s; streaming it needs that much memory at once.", layer, size(layout.size))


def _copy_sidecars(request: SplitRequest) -> list[Path]:
    """Copy config, tokenizer and the like, so that the folder loads without the original; return the new files."""
    derived = request.checkpoint.derived()
    copied = []
    for name, path in request.checkpoint.sidecars().items():
        if name in (MANIFEST_NAME, JOURNAL_NAME) or name in derived:
            continue
        target = request.folder / name
        copied += [] if target.exists() else [target]
        durable.make_folder(target.parent)
        durable.write_whole(target, path.read_bytes())
    for name, content in derived.items():
        copied += [] if (request.folder / name).exists() else [request.folder / name]
        durable.write_whole(request.folder / name, content)
    return copied


def _remove(folder: Path, files: Sequence[Path]) -> None:
    """Remove these files of a split that is refused, and the folders that become empty."""
    for path in files:
        durable.remove(path)
    for parent in {path.parent for path in files} - {folder}:
        durable.remove_empty_folder(parent)


def _clear_stale(folder: Path, plan: SplitPlan) -> None:
    """Remove layer files of an attempt that has no journal (RabbitLLM 1.1's, unfinished).

    Every shard exists at this point, so nothing in them is the only copy.
    """
    for layout in plan.layouts.values():
        for suffix in (DONE_SUFFIX, "", durable.PART_SUFFIX, SCRATCH_SUFFIX):
            stale = folder / (layout.file_name + suffix)
            if stale.exists():
                durable.remove(stale)
