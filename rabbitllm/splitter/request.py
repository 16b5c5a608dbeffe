"""A request to split, and its plan from headers alone.

Reads the free disk and files of earlier runs; writes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rabbitllm.base.options import SplitOptions
from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.checkpoint import Checkpoint, ShardMetadata
from rabbitllm.checkpoints.config import experts_a_token, layers_before_heads, model_type_of
from rabbitllm.checkpoints.fetch import side_by_side
from rabbitllm.checkpoints.index import dtype_without_config, natural_key
from rabbitllm.checkpoints.naming import LayerName, LayerNaming, assign_layers, predicts_further
from rabbitllm.errors import USED_UP, CheckpointError, HubError, InvalidIndexError, MissingShardError, RabbitLLMError
from rabbitllm.quant.schemes import BLOCKS, PRESETS
from rabbitllm.splitter import journal
from rabbitllm.splitter.bit_allocation import with_choice
from rabbitllm.splitter.disk_budget import (
    BLOCK_BYTES,
    DiskBudget,
    choose_shard_transfer,
    in_hub_cache,
    on_disk,
    own_records_bytes,
)
from rabbitllm.splitter.disk_sampler import disk_bytes, occupied
from rabbitllm.splitter.filler import ShardExecutor
from rabbitllm.splitter.lock import HOLDER_NAME, LOCK_NAME
from rabbitllm.splitter.plan import (
    PlannedFiles,
    PlannedShard,
    SplitPlan,
    make_plan,
    recompressed,
    tensors_by_shard,
)
from rabbitllm.splitter.source_check import left_out_of
from rabbitllm.storage.folders import existing
from rabbitllm.storage.leases import FOLDER_LEASE
from rabbitllm.store.layer_file import FORMAT_VERSION, layer_file_name
from rabbitllm.store.layer_store import WeightFiles
from rabbitllm.store.manifest import AUTO, FITTED, BitAllocation, Manifest
from rabbitllm.version import __version__

Acceptance = Callable[[WeightFiles], None]
"""Raises the errors that loading a model from these files would raise; the files may be planned or exist."""
HEADER_THREADS = 8
"""Headers that are fetched at the same time."""


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """A request to split: its source, its target and its options.

    Attributes:
        checkpoint: the source.
        folder: the split directory.
        config: of the model; it names the family, which determines the names of layers.
        options: see `SplitOptions`.
        naming: patterns of the caller's own, instead of the family's.
        executor: fills layer files in other processes; None for this process.
        accept: called with the planned files before a shard is touched, and with the finished ones before the last
            shard is deleted; None if nothing will be loaded from them.
        chosen: at "auto", the scheme of each tensor; None to choose.
    """

    checkpoint: Checkpoint
    folder: Path
    config: Mapping[str, Any]
    options: SplitOptions
    naming: LayerNaming | None = None
    executor: ShardExecutor | None = None
    accept: Acceptance | None = None
    chosen: BitAllocation | None = None


def plan_split(
    request: SplitRequest,
    format_version: int = FORMAT_VERSION,
    finished: Manifest | None = None,
    layers: Collection[str] = (),
) -> SplitPlan:
    """Plan a split from headers alone; nothing is written.

    Args:
        request: see there.
        format_version: of the layer files.
        finished: a finished split to repair, whose format, layers and bits are those of the plan.
        layers: of it, those to make again. The headers of their shards are needed; layers that also come from others
            are left out of the plan (`SplitPlan.kept`) where these are absent or damaged.

    Raises:
        CheckpointError: the source is malformed or incomplete.
        NotEnoughSpaceException: no choice of bits fits, at "auto".
    """
    if finished is not None:
        return _plan_of_repair(replace(request, chosen=finished.chosen), finished, layers)
    plan = _plan_of_headers(request, format_version)
    return _with_bits(plan, disk_budget_of(request, plan), request)


def _with_bits(plan: SplitPlan, disk_budget: DiskBudget, request: SplitRequest) -> SplitPlan:
    """Return the plan; at "auto" with the bits that the request has, or with newly chosen ones."""
    if request.chosen is not None:
        return recompressed(plan, plan.compression, request.chosen)
    if plan.compression != AUTO:
        return plan
    return with_choice(plan, disk_budget, request.options, experts_a_token(request.config))


def _plan_of_headers(request: SplitRequest, format_version: int = FORMAT_VERSION) -> SplitPlan:
    """Plan a split, at "auto" with no bits chosen yet."""
    checkpoint = request.checkpoint
    metadata = metadata_of(checkpoint, checkpoint.index.shards)
    require_shards(checkpoint.index.shards, metadata, checkpoint)
    shards = planned_shards(checkpoint, metadata.values())
    names = [tensor.name for shard in shards for tensor in shard.tensors]
    assigned = assign_layers(names, model_type_of(request.config), request.naming)
    _require_distinct_files(dict.fromkeys(assigned.values()))
    layers = layers_before_heads(request.config)
    heads = frozenset(tensor for tensor, layer in assigned.items() if predicts_further(layer.id, layers))
    identity = checkpoint.identity(metadata.values())
    dtype = dtype_without_config(checkpoint.index, {name: f.header.tensors for name, f in metadata.items()})
    options = request.options.compression, format_version, request.chosen, dtype, heads
    return make_plan(identity, shards, assigned, *options)


def shards_for(manifest: Manifest, layers: Collection[str]) -> list[str]:
    """Return the shards that these layers were made from, in numerical order."""
    return sorted(
        {shard for record in manifest.layers if record.id in layers for shard in record.shards}, key=natural_key
    )


def _plan_of_repair(request: SplitRequest, finished: Manifest, layers: Collection[str]) -> SplitPlan:
    """Plan a finished split once more, without what comes from shards that are neither needed nor readable."""
    checkpoint, source = request.checkpoint, finished.source
    needed = [shard for shard in shards_for(finished, layers) if shard in checkpoint.index.shards]
    metadata = metadata_of(checkpoint, needed)
    require_shards(needed, metadata, checkpoint)
    others = [shard for shard in checkpoint.index.shards if shard not in metadata]
    metadata |= metadata_of(checkpoint, others, damaged=(CheckpointError, HubError))
    metadata = {shard: metadata[shard] for shard in checkpoint.index.shards if shard in metadata}
    kept = tuple(record for record in finished.layers if not metadata.keys() >= {*record.shards})
    absent = {
        name: PlannedShard(name, 0, mark, (), False, metadata=finished.source_metadata.get(name, {}))
        for name, mark in source.fingerprints.items()
        if kept and name not in metadata
    }
    planned = absent | {shard.name: shard for shard in planned_shards(checkpoint, metadata.values())}
    shards = tuple(planned[name] for name in dict.fromkeys((*source.fingerprints, *planned)) if name in planned)
    identity = checkpoint.identity(metadata.values())
    marks = {name: shard.fingerprint for name, shard in absent.items()} | {**identity.fingerprints}
    # grouped as before: a family's naming may have changed since, or may have been given by the caller
    assigned = {tensor: LayerName(record.id, record.stem) for record in finished.layers for tensor in record.tensors}
    new = [tensor.name for shard in shards for tensor in shard.tensors if tensor.name not in assigned]
    assigned |= assign_layers(new, model_type_of(request.config), request.naming)
    tensors = {name: shard.header.tensors for name, shard in metadata.items()}
    dtype = finished.dtype if kept else dtype_without_config(checkpoint.index, tensors)
    options = request.options.compression, finished.format_version, finished.chosen, dtype
    return make_plan(replace(identity, fingerprints=marks), shards, assigned, *options, kept=kept)


def planned_shards(checkpoint: Checkpoint, metadata: Collection[ShardMetadata]) -> tuple[PlannedShard, ...]:
    """Return shards with the tensors that a split takes of each, and with what it leaves out."""
    tensors = tensors_by_shard(checkpoint.index, metadata)
    left_out = left_out_of(checkpoint, metadata, tensors)
    return tuple(
        PlannedShard(
            *(f.name, f.size, f.fingerprint, tensors[f.name], f.staged, f.header.comes_first, f.stat),
            left_out=left_out[f.name],
            metadata={} if f.staged else {key: text for key, text in f.header.metadata.items() if key != "format"},
        )
        for f in metadata
    )


def _require_distinct_files(layers: Iterable[LayerName]) -> None:
    """Refuse layers whose files differ only in case: on some disks they are one file."""
    stems: dict[str, str] = {}
    for layer in layers:
        other = stems.setdefault(layer_file_name(layer.stem).casefold(), layer.stem)
        if other != layer.stem:
            raise InvalidIndexError(
                f"The layers {other!r} and {layer.stem!r} would be the same file on some disks; expected names that "
                "differ in more than case. Nothing was changed.",
                "Set other layers: rabbitllm.register_layer_naming.",
            )


def disk_budget_of(request: SplitRequest, plan: SplitPlan, fetched: Iterable[PlannedShard] = ()) -> DiskBudget:
    """Return the state of the disk for a split that has not been begun.

    Args:
        request: see there.
        plan: of that request.
        fetched: shards that will be downloaded into the hub cache before the split begins.
    """
    checkpoint = request.checkpoint
    small_files = sum(on_disk(size) for size in checkpoint.sidecar_sizes().values()) + own_records_bytes(plan)
    lock_bytes = sum(occupied(request.folder / name) for name in (LOCK_NAME, HOLDER_NAME, FOLDER_LEASE))
    freed: Mapping[str, int] = {}
    if request.options.shards.deletes_used and checkpoint.deletable:
        policy = request.options.shards
        deletable = (shard.name for shard in plan.shards if not shard.is_kept(plan.source, policy))
        freed = checkpoint.freed_bytes(deletable, existing(request.folder).stat().st_dev)
    downloads: tuple[tuple[Path, int], ...] = ()
    if (pending := checkpoint.downloads()) is not None:
        sizes = [*pending.sizes.values(), *(shard.size for shard in fetched)]
        downloads = ((pending.cache, in_hub_cache(sizes, pending.listed)),)
    return DiskBudget(request.folder, freed, small_files + BLOCK_BYTES, downloads, lock_bytes=lock_bytes)


def resumed_disk_budget(disk_budget: DiskBudget, used: frozenset[str]) -> DiskBudget:
    """Return the state of the disk for a split of which an earlier run has used up these shards."""
    return dataclasses.replace(disk_budget, used=used, in_use=disk_bytes(disk_budget.folder) - disk_budget.lock_bytes)


def check_before_download(request: SplitRequest) -> BitAllocation | None:
    """Refuse a split on the standard route for which checkpoint and layer files do not both fit.

    Args:
        request: with the repository as its checkpoint, whose missing shards are about to be fetched into the hub cache.

    Returns:
        At "auto", bits with which both fit; those of a preset; None at other compressions.

    Raises:
        NotEnoughSpaceException: before the first byte.
    """
    earlier = journal.replay(request.folder)
    plan = located(earlier.plan, request.checkpoint) if earlier is not None else _plan_of_headers(request)
    plan, disk_budget = kept_in_cache(request, plan)
    if earlier is None:
        plan = _with_bits(plan, disk_budget, request)
    if request.accept is not None:
        request.accept(PlannedFiles(plan, request.folder))
    if earlier is not None:
        disk_budget = resumed_disk_budget(disk_budget, earlier.used)
    choose_shard_transfer(plan, disk_budget, request.options)
    return plan.chosen


def quantizer_of(request: SplitRequest) -> str | None:
    """Return the name of the quantizer for the manifest; None without compression."""
    if request.options.compression is None:
        return None
    from importlib.metadata import version

    if request.options.compression in (*BLOCKS, *PRESETS):
        return f"rabbitllm {__version__}"
    name = f"bitsandbytes {version('bitsandbytes')} on cpu"
    return name + FITTED if request.options.fit_scales else name


def metadata_of(
    checkpoint: Checkpoint, shards: Sequence[str], damaged: tuple[type[RabbitLLMError], ...] = ()
) -> dict[str, ShardMetadata]:
    """Read the headers of the shards that exist, in the order given; several at once, because of a hub's latency.

    A shard whose header cannot be read, by one of the errors `damaged`, counts as absent.
    """

    def read(shard: str) -> ShardMetadata | None:
        with contextlib.suppress(*damaged):
            return checkpoint.metadata(shard)
        return None

    by_shard = dict(zip(shards, side_by_side(read, shards, HEADER_THREADS), strict=True))
    return {shard: metadata for shard, metadata in by_shard.items() if metadata is not None}


def require_shards(shards: Iterable[str], metadata: Mapping[str, ShardMetadata], checkpoint: Checkpoint) -> None:
    """Check that all of these shards exist.

    Raises:
        MissingShardError: some do not; the message names them.
    """
    missing = [shard for shard in shards if shard not in metadata]
    if missing:
        raise MissingShardError(
            f"{checkpoint.label} lacks {len(missing)} of the shards in its index: {listed(missing)}. Nothing "
            "was changed.",
            f"Add the missing shards, or use the repository that has them, with access to the hub. {USED_UP}",
        )


def located(plan: SplitPlan, checkpoint: Checkpoint) -> SplitPlan:
    """Return the plan with the present location of each shard: another route may have begun it."""
    shards = tuple(dataclasses.replace(shard, staged=checkpoint.stages(shard.name)) for shard in plan.shards)
    return dataclasses.replace(plan, shards=shards)


def kept_in_cache(request: SplitRequest, plan: SplitPlan) -> tuple[SplitPlan, DiskBudget]:
    """Return the plan and the state of the disk on the standard route, which fetches shards into the hub cache."""
    disk_budget = disk_budget_of(request, plan, [shard for shard in plan.shards if shard.staged])
    shards = tuple(dataclasses.replace(shard, staged=False) for shard in plan.shards)
    return dataclasses.replace(plan, shards=shards), disk_budget
