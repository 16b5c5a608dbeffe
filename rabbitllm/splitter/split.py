"""Makes a split directory: plans it or takes up an earlier plan, runs the loop over shards, declares it whole.

The sequential and the standard route differ in one thing only: when a used-up shard is released. Knows no models and
no devices but the one that quantises.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rabbitllm import durable
from rabbitllm.checkpoints.checkpoint import Checkpoint, Disposal, ShardFacts, SourceIdentity
from rabbitllm.checkpoints.index import natural_key
from rabbitllm.checkpoints.naming import LayerNaming, assign_layers
from rabbitllm.checkpoints.side_by_side import side_by_side
from rabbitllm.errors import IncompleteSplitError, MissingShardError, SplitMismatchError
from rabbitllm.formats.crc32 import combine_all, crc32_of_file
from rabbitllm.layers.chosen import AUTO, Chosen
from rabbitllm.layers.compression import Settling, StoredForm, constants
from rabbitllm.layers.layer_file import DONE_SUFFIX, SCRATCH_SUFFIX, LayerLayout
from rabbitllm.layers.layer_store import (
    FITTED,
    JOURNAL_NAME,
    MANIFEST_NAME,
    LayerRecord,
    Manifest,
    is_fitted,
    read_manifest,
    write_manifest,
)
from rabbitllm.layers.order import FORMAT_VERSION
from rabbitllm.options import BIG_LAYER_BYTES, SplitOptions
from rabbitllm.profiler import Profiler
from rabbitllm.progress import SplitDone, tell
from rabbitllm.splitter import journal
from rabbitllm.splitter.choosing import other_budget, with_choice
from rabbitllm.splitter.disk_use import Arrival, on_disk, own_records_bytes
from rabbitllm.splitter.hands import Hands
from rabbitllm.splitter.plan import PlannedShard, SplitPlan, gib, make_plan, recompressed, tensors_by_shard
from rabbitllm.splitter.shard_loop import ShardLoop
from rabbitllm.splitter.space import Ground, choose_arrival, choose_at_once, use_of
from rabbitllm.splitter.watch import Watch, disk_bytes
from rabbitllm.splitter.work import Work

logger = logging.getLogger(__name__)

HEADER_THREADS = 8
"""Headers that are asked for at the same time."""
STAGING_NAME = ".staging"
"""Folder inside the split directory that fetched shards go to; ours, and gone when the split is whole."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to split and how.

    Attributes:
        checkpoint: the source.
        folder: the split directory.
        family: `model_type` of the config, which names the layers.
        naming: patterns of the caller's own, instead of the family's.
        options: see `SplitOptions`.
        quantise_on: "cpu" or "cuda:N".
        hands: who fills layer files elsewhere; None for this process.
        chosen: at "auto", what each tensor has; None to choose.
    """

    checkpoint: Checkpoint
    folder: Path
    family: str | None
    options: SplitOptions
    naming: LayerNaming | None = None
    quantise_on: str = "cpu"
    hands: Hands | None = None
    chosen: Chosen | None = None


def split(request: Request) -> Profiler:
    """Make a split directory, or finish one that an earlier call began.

    Returns:
        Where the time of each layer went; empty unless `options.profiling`.

    Raises:
        CheckpointError: the source is malformed or incomplete; nothing was touched.
        NotEnoughSpaceException: it would not fit; nothing was touched.
        SplitMismatchError: the folder has layers of another source.
        HubError: fetching failed; the same call goes on where it stopped.
        DiskFullError: something else took the disk; the same call goes on where it stopped.
    """
    start = time.perf_counter()
    work, quantiser = _begin(request)
    profiler = Profiler(request.options.profiling, f"Split of {request.checkpoint.label}, by stage")
    with Watch(request.folder, request.options.min_free, max_disk=request.options.max_disk) as watch:
        loop = ShardLoop(work, profiler, watch.check, request.hands)
        try:
            loop.take_shards()
            loop.flush_leftovers()
        finally:
            loop.close()
        _finish(request, work.plan, quantiser, loop.checksums)
    peaks = watch.peaks
    logger.info(
        "Peaks: %s of disk in %s, %s of memory.", gib(peaks.disk_bytes), request.folder, gib(peaks.anonymous_bytes)
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


def plan_split(request: Request, format_version: int = FORMAT_VERSION) -> SplitPlan:
    """What a split would do, from headers alone; nothing is written.

    Args:
        request: see there.
        format_version: of the layer files; an earlier one to make some of a finished split anew.

    Raises:
        CheckpointError: the source is malformed or incomplete.
        NotEnoughSpaceException: no choice of bits fits, at "auto".
    """
    plan = _plan_of_headers(request, format_version)
    return _with_bits(plan, ground_of(request, plan), request)


def _with_bits(plan: SplitPlan, ground: Ground, request: Request) -> SplitPlan:
    """The plan, at "auto" with the bits that were or are chosen."""
    if plan.compression != AUTO:
        return plan
    if request.chosen is not None:
        return recompressed(plan, AUTO, request.chosen)
    return with_choice(plan, ground, request.options)


def _plan_of_headers(request: Request, format_version: int = FORMAT_VERSION) -> SplitPlan:
    """The same, at "auto" with no bits chosen yet."""
    checkpoint = request.checkpoint
    facts = _facts(checkpoint, checkpoint.index.shards)
    _require(checkpoint.index.shards, facts, checkpoint)
    tensors = tensors_by_shard(checkpoint.index, facts.values())
    shards = tuple(
        PlannedShard(f.name, f.size, f.fingerprint, tensors[f.name], f.staged, f.header.comes_first)
        for f in facts.values()
    )
    names = [tensor.name for shard in shards for tensor in shard.tensors]
    assigned = assign_layers(names, request.family, request.naming)
    identity = checkpoint.identity(facts.values())
    return make_plan(identity, shards, assigned, request.options.compression, format_version)


def ground_of(request: Request, plan: SplitPlan, downloads: tuple[tuple[Path, int], ...] = ()) -> Ground:
    """What the split stands on where nothing of it has been done yet.

    Args:
        request: see there.
        plan: of that request.
        downloads: bytes that go elsewhere before it begins, by folder.
    """
    sidecars = sum(on_disk(size) for size in request.checkpoint.sidecar_sizes().values())
    deletes = request.options.sequential and request.checkpoint.deletable
    if (fetched := request.checkpoint.downloads()) is not None:
        downloads = (*downloads, (fetched[0], sum(map(on_disk, fetched[1].values()))))
    return Ground(request.folder, deletes, sidecars + own_records_bytes(plan), downloads)


def check_before_download(request: Request, cache: Path) -> Chosen | None:
    """Refuse a split on the standard route for which checkpoint and layer files do not both fit.

    Args:
        request: with the repository as its checkpoint.
        cache: the folder that its missing shards are about to be fetched into.

    Returns:
        At "auto", bits with which both do; None at other compressions.

    Raises:
        NotEnoughSpaceException: before the first byte.
    """
    earlier = journal.replay(request.folder)
    plan = _with_places(earlier.plan, request.checkpoint) if earlier is not None else _plan_of_headers(request)
    missing = sum(on_disk(shard.size) for shard in plan.shards if shard.staged)
    kept = dataclasses.replace(plan, shards=tuple(dataclasses.replace(s, staged=False) for s in plan.shards))
    ground = ground_of(request, plan, ((cache, missing),))
    if earlier is None:
        kept = _with_bits(kept, ground, request)
    used = earlier.used if earlier is not None else frozenset()
    in_use = disk_bytes(request.folder) if earlier is not None else 0
    choose_arrival(kept, dataclasses.replace(ground, used=used, in_use=in_use), request.options)
    return kept.chosen


def _begin(request: Request) -> tuple[Work, str | None]:
    """Take up the journal of an earlier run, or plan anew, check the space and begin one; and what quantises."""
    earlier = journal.replay(request.folder)
    if earlier is not None:
        return _take_up(request, earlier), earlier.quantiser
    plan = plan_split(request)
    quantiser = quantiser_of(request)
    work = _work(request, plan, ground_of(request, plan), {}, is_fitted(quantiser))
    _warn_of_big_layers(plan)
    durable.make_folder(request.folder)
    _copy_sidecars(request)
    _clear_stale(request.folder, plan)
    journal.begin(request.folder, plan, quantiser)
    return work, quantiser


def _take_up(request: Request, earlier: journal.Replay) -> Work:
    """Go on with an earlier run's plan, once it is sure that source and folder are still those."""
    checkpoint = request.checkpoint
    # used-up ones that are still here too: they are given up without another look
    shards = [s for s in checkpoint.index.shards if s not in earlier.used or not checkpoint.stages(s)]
    facts = _facts(checkpoint, shards)
    identity = checkpoint.identity(facts.values())
    why = earlier.plan.source.differs_from(identity) or _no_evidence(request, earlier.plan.source, identity)
    if why is not None:
        raise SplitMismatchError(
            f"{request.folder} holds an unfinished split of {earlier.plan.source.name}, not of {identity.name}: {why}.",
            "Split into another folder (layer_shards_saving_path). If that other model is intact, the folder may be "
            "deleted.",
        )
    _require([s.name for s in earlier.plan.shards if s.name not in earlier.used], facts, checkpoint)
    _require_begun_layers(request.folder, earlier)
    logger.info("Going on with %s: %d shards are used up.", request.folder, len(earlier.used))
    if (other := other_budget(earlier.plan.chosen, request.options)) is not None:
        logger.warning("%s was begun %s, and goes on with the bits chosen then.", request.folder, other)
    plan = _with_places(earlier.plan, checkpoint)
    ground = dataclasses.replace(ground_of(request, plan), used=earlier.used, in_use=disk_bytes(request.folder))
    work = _work(request, plan, ground, earlier.checksums, is_fitted(earlier.quantiser))
    journal.settle(request.folder)
    if work.arrival is Arrival.STREAM:  # whatever was fetched of a shard, it comes anew
        durable.remove_folder(request.folder / STAGING_NAME)
    return work


def _work(
    request: Request, plan: SplitPlan, ground: Ground, checksums: Mapping[str, tuple[int, ...]], fitted: bool
) -> Work:
    if request.hands is None:
        arrival, at_once = choose_arrival(plan, ground, request.options), 1
    else:
        arrival, at_once = choose_at_once(plan, ground, request.options, request.hands.at_once)
    return Work(
        plan,
        request.checkpoint,
        request.folder,
        request.options,
        request.quantise_on,
        arrival,
        use_of(plan, ground, arrival, at_once),
        ground.used,
        checksums,
        at_once,
        fitted,
    )


def _no_evidence(request: Request, known: SourceIdentity, found: SourceIdentity) -> str | None:
    """Why a folder of another name that has none of the known shards is not to be taken for the same one."""
    if (
        known.kind != "local"
        or known.name == found.name
        or not known.fingerprints.keys().isdisjoint(found.fingerprints)
    ):
        return None
    if request.folder.is_relative_to(request.checkpoint.label):  # a folder that was renamed, and its split with it
        return None
    return "it has another name, and none of the shards by which to tell"


def _facts(checkpoint: Checkpoint, shards: Sequence[str]) -> dict[str, ShardFacts]:
    """Headers of the shards that are there, in the order given; several at once, since a hub is far away."""
    found = dict(zip(shards, side_by_side(checkpoint.facts, shards, HEADER_THREADS), strict=True))
    return {shard: facts for shard, facts in found.items() if facts is not None}


def _require(shards: Iterable[str], facts: dict[str, ShardFacts], checkpoint: Checkpoint) -> None:
    missing = [shard for shard in shards if shard not in facts]
    if missing:
        raise MissingShardError(
            f"{checkpoint.label} lacks {len(missing)} of the shards its index names: {', '.join(missing[:5])}"
            f"{' …' if len(missing) > 5 else ''}.",
            "Put them there, or give the repository they come from. Nothing was touched.",
        )


def _require_begun_layers(folder: Path, earlier: journal.Replay) -> None:
    """Make sure that what used-up shards gave is still there; a file made anew would have holes in its place."""
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


def _with_places(plan: SplitPlan, checkpoint: Checkpoint) -> SplitPlan:
    """The plan with each shard where it is now: another route may have begun it."""
    shards = tuple(dataclasses.replace(shard, staged=checkpoint.stages(shard.name)) for shard in plan.shards)
    return dataclasses.replace(plan, shards=shards)


def _warn_of_big_layers(plan: SplitPlan) -> None:
    for layer, layout in plan.layouts.items():
        if layout.size > BIG_LAYER_BYTES:
            logger.warning("Layer %s has %s; streaming it needs that much memory at once.", layer, gib(layout.size))


def _copy_sidecars(request: Request) -> None:
    """Config, tokenizer and the like, so that the folder loads alone once the original is gone."""
    derived = request.checkpoint.derived()
    for name, path in request.checkpoint.sidecars().items():
        if name in (MANIFEST_NAME, JOURNAL_NAME) or name in derived:
            continue
        target = request.folder / name
        durable.make_folder(target.parent)
        durable.write_whole(target, path.read_bytes())
    for name, content in derived.items():
        durable.write_whole(request.folder / name, content)


def _clear_stale(folder: Path, plan: SplitPlan) -> None:
    """Remove layer files of an attempt that has no journal (RabbitLLM 1.1's, unfinished).

    Every shard is there at this point, so nothing in them is the only copy.
    """
    for layout in plan.layouts.values():
        for suffix in (DONE_SUFFIX, "", durable.PART_SUFFIX, SCRATCH_SUFFIX):
            stale = folder / (layout.file_name + suffix)
            if stale.exists():
                durable.remove(stale)


def quantiser_of(request: Request) -> str | None:
    """What would quantise, as the manifest names it; None without compression."""
    if request.options.compression is None:
        return None
    from importlib.metadata import version

    own = f"bitsandbytes {version('bitsandbytes')} on {request.quantise_on.split(':')[0]}"
    return own + FITTED if request.options.fit_scales else own


def _finish(request: Request, plan: SplitPlan, quantiser: str | None, checksums: Mapping[str, tuple[int, ...]]) -> None:
    """Declare the directory whole, then clear away what only the making needed."""
    if read_manifest(request.folder) is None:
        records = tuple(
            LayerRecord(
                layer,
                layout.layer.stem,
                layout.file_name,
                layout.size,
                layout.tensors,
                _checksum(layout, checksums, request.folder),
                tuple(sorted(plan.layer_map.layer_to_shards[layer], key=natural_key)),
            )
            for layer, layout in plan.layouts.items()
        )
        manifest = Manifest(plan.source, plan.compression, quantiser, records, plan.format_version, plan.chosen)
        write_manifest(request.folder, manifest)
    clear_away(request.folder)
    if request.options.delete_original:
        discard_original(request.checkpoint)


def _checksum(layout: LayerLayout, checksums: Mapping[str, tuple[int, ...]], folder: Path) -> int:
    """The CRC-32 of a layer file, from what was summed as it was written."""
    parts: dict[int, tuple[int, int]] = {}
    written: list[StoredForm | Settling] = [*layout.forms, *layout.joins, *layout.settles]
    for form in written:
        if form.source.name not in checksums:  # a crash came between the file's name and the journal's line
            return crc32_of_file(folder / layout.file_name)
        for part, crc in zip(form.parts, checksums[form.source.name], strict=True):
            if part.nbytes and part.name in layout.places:  # else it was in the scratch file
                parts[layout.places[part.name]] = (crc, part.nbytes)
    for form in layout.fixed:
        for name, content in constants(form).items():
            parts[layout.places[name]] = (zlib.crc32(content), len(content))
    pieces = [(zlib.crc32(layout.header), layout.header_bytes), *(parts[at] for at in sorted(parts))]
    return combine_all(pieces)


def clear_away(folder: Path) -> None:
    """Remove what only the making of a whole split directory needed: its journal and fetched shards.

    The directory must have its manifest. A crash may have come between that and this.
    """
    journal_path = folder / JOURNAL_NAME
    if journal_path.exists():  # asked first: a finished split may lie on a read-only mount
        durable.sync_folder(folder)  # the manifest's name: a process that died may have left it uncertain
        durable.remove(journal_path)
    durable.remove_folder(folder / STAGING_NAME)


def discard_original(checkpoint: Checkpoint) -> None:
    """Remove the shards that are left of a checkpoint, and what its kind counts as the rest (`delete_original`).

    The caller must have made sure that the split directory is whole and was made from this checkpoint.
    """
    disposals = [checkpoint.release(shard).disposal for shard in checkpoint.index.shards]
    if kept := disposals.count(Disposal.READ_ONLY):
        logger.warning("%d shards of %s cannot be deleted: their folder is read-only.", kept, checkpoint.label)
    for path in checkpoint.discard_rest():
        logger.info("Deleted %s.", path)
