"""`rabbitllm.plan`: the disk use and time of a split and of generation, from headers and a few measurements.

Reads the free space of the disks and the state of the source, and passes both to `splitter.split_estimate`. Writes
only small files into the hub cache, and for a second a file that `estimate/reading.py` needs.
"""

from __future__ import annotations

import dataclasses
import datetime
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from rabbitllm import prepare
from rabbitllm.base.options import ShardPolicy, StreamOptions, expand, parse_max_memory, parse_size
from rabbitllm.checkpoints.config import experts_a_token
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.errors import OptionError, system_errors_by_name
from rabbitllm.estimate.generation import Plan
from rabbitllm.estimate.source_scan import SourceScan
from rabbitllm.quant.compression import CODES
from rabbitllm.splitter import split_estimate
from rabbitllm.splitter.bit_allocation import AllocationSummary, allocation_of
from rabbitllm.splitter.disk_budget import DiskBudget, candidates, shortage
from rabbitllm.splitter.disk_sampler import existing
from rabbitllm.splitter.plan import SplitPlan
from rabbitllm.splitter.request import disk_budget_of, resumed_disk_budget
from rabbitllm.splitter.split_estimate import (
    ROUTES,
    STANDARD,
    CompressionEstimate,
    Disk,
    Rate,
    Rates,
    Recommendation,
    Route,
    anatomy_of,
    big_layers,
    commonest_dtype,
)
from rabbitllm.store.layer_file import LAYER_SUFFIX
from rabbitllm.store.manifest import MANIFEST_NAME

MIN_FREE_DISK = "1GB"


@system_errors_by_name()
def plan(
    path_or_repo_id: str | Path,
    *,
    compression: str | None = None,
    layer_shards_saving_path: str | Path | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    max_disk: int | str | None = None,
    min_free_disk: int | str = MIN_FREE_DISK,
    bandwidth: int | str | None = None,
    device: str | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    fit_scales: bool = False,
) -> Plan:
    """Estimate the disk use and the time of a split, at each compression and on each route, without making it.

    Also estimate generation after it: the placement of the weights, and the time per token, from measurements on this
    machine that take a few seconds. Of a repository only headers and small files are fetched, and up to 8 MiB of a
    shard to measure the connection.

    Args:
        path_or_repo_id: as for `AutoModel.from_pretrained`, like all that follow except `bandwidth`.
        compression: the preferred one: None, "8bit", "4bit", "4bit-double" or "auto".
        layer_shards_saving_path: folder for the split directory.
        revision: branch, tag or commit of the repository.
        token: for the hub.
        cache_dir: the hub cache.
        max_disk: bytes that the split may occupy, e.g. "57GiB".
        min_free_disk: bytes of the disk to keep free.
        bandwidth: bytes per second at which shards are fetched (or read, from a folder), e.g. "12MB", instead of a
            measurement.
        device: device to generate on.
        max_memory: device -> bytes for weights, e.g. `{0: "14GiB"}`; by default what is free.
        fit_scales: see `SplitOptions`.

    Returns:
        A record; its `choice` has the best call that fits.

    Raises:
        RabbitLLMError: an invalid argument, no such source, or a malformed one.
    """
    options = prepare.split_options(compression, max_disk=max_disk, min_free_disk=min_free_disk, fit_scales=fit_scales)
    stream_options = StreamOptions(device=device, max_memory=parse_max_memory(max_memory))
    options = prepare.with_memory(options, stream_options)
    said = None if bandwidth is None else _said_rate(bandwidth)
    saving_path = expand(layer_shards_saving_path) if layer_shards_saving_path else None
    access = HubAccess(revision, token, expand(cache_dir) if cache_dir else None)
    spec = prepare.ModelSpec(str(path_or_repo_id), compression, saving_path, access)
    source = prepare.find(spec, only_look=True)
    survey = SourceScan(source, spec, options)

    from rabbitllm.estimate.predict import generations  # imports transformers, which takes seconds

    devices, predicted = generations(survey, stream_options, options.min_free)
    survey.refused |= {one.compression: one.obstacle for one in predicted if one.refused and one.obstacle}
    measured = _measure(survey, said)
    outlooks = tuple(outlook_at(survey, choice, measured) for choice in survey.folders)
    too_heavy = {one.compression for one in predicted if one.too_little_memory is not None}
    anatomy = anatomy_of(survey.base, survey.config) if survey.base is not None else None
    arguments = {
        "layer_shards_saving_path": str(layer_shards_saving_path) if saving_path is not None else None,
        "revision": revision,
        "token": "hf_…" if isinstance(token, str) else token,  # never the token itself
        "cache_dir": str(cache_dir) if cache_dir else None,
        "max_disk": max_disk,
        "min_free_disk": min_free_disk if min_free_disk != MIN_FREE_DISK else None,
        "device": device,
        "max_memory": dict(max_memory) if max_memory else None,
    }
    return Plan(
        source=source.name,
        kind="hub" if source.repository is not None else "local" if source.local is not None else "split",
        label=survey.checkpoint.label if survey.checkpoint is not None else source.name,
        commit=survey.commit,
        compression=compression,
        max_disk=options.max_disk,
        min_free_disk=options.min_free,
        anatomy=anatomy,
        disks=_disks(survey),
        outlooks=outlooks,
        memory_bytes=split_estimate.memory_bytes(anatomy.tensors if anatomy is not None else 0),
        rates=measured,
        choice=_choice(survey, outlooks, compression, too_heavy, arguments),
        warnings=survey.warnings,
        devices=devices,
        generations=tuple(predicted),
    )


def _said_rate(bandwidth: int | str) -> Rate:
    said = parse_size(bandwidth, "bandwidth")
    if not said:
        raise OptionError("bandwidth=0 would never fetch anything.", "Give bytes a second, such as '12MB'.")
    return Rate(said)


def _measure(survey: SourceScan, said: Rate | None) -> Rates:
    """Measure the rates that the estimates are based on, as far as they are needed and memory allows it."""
    from rabbitllm.engine.devices import default_device
    from rabbitllm.estimate.products import can_measure

    device, threads = default_device(), survey.options.threads
    waiting = [
        shard for c, plan in survey.feasible.items() for shard in plan.shards if shard.name not in survey.used(c)
    ]
    staged = list(dict.fromkeys(shard.name for shard in waiting if shard.staged))
    here = list(dict.fromkeys(shard.name for shard in waiting if not shard.staged))
    fetch = said if staged else None
    read = said if here and not staged else None
    if not can_measure():
        return Rates(fetch, read, {}, threads, device)
    if staged and fetch is None and survey.source.repository is not None:
        fetch = split_estimate.fetch_rate(survey.source.repository, staged[0])
    if here and read is None and survey.checkpoint is not None:
        read = split_estimate.read_rate([survey.checkpoint.acquire(shard) for shard in here])
    quantize: dict[str, Rate] = {}
    fitted = survey.options.fit_scales
    for scheme, codes in CODES.items():
        dtype = commonest_dtype(survey.feasible[scheme]) if scheme in survey.feasible else None
        # before its scales are quantized 4bit-double is 4bit, unless they are fitted
        same = scheme if fitted else codes
        if dtype is None or same in quantize:
            continue
        if (rate := split_estimate.quantize_rate(same, dtype, threads, device, fitted=fitted)) is not None:
            quantize[same] = rate
    return Rates(fetch, read, quantize, threads, device)


def outlook_at(survey: SourceScan, compression: str | None, measured: Rates) -> CompressionEstimate:
    """Return the split estimate at one compression."""
    folder, plan = survey.folders[compression], survey.plans.get(compression)
    manifest = survey.manifests.get(compression)
    finished = compression in survey.manifests
    if manifest is not None:
        output: int | None = sum(record.size for record in manifest.layers)
    elif finished:
        output = sum(path.stat().st_size for path in folder.glob(f"*{LAYER_SUFFIX}"))
    else:
        output = plan.output_bytes if plan is not None else None
    routes = _route_names(survey, compression) if compression in survey.feasible else ()
    return CompressionEstimate(
        compression,
        folder,
        "finished" if finished else "unfinished" if compression in survey.journals else "new",
        output,
        layers_above_10_gb=big_layers(plan) if plan is not None else (),
        finished_at=_finished_at(folder) if finished else None,
        shards_used=len(survey.used(compression)),
        shards=len(plan.shards) if plan is not None else 0,
        obstacle=survey.obstacle(compression),
        routes=tuple(_route(survey, name, compression, measured) for name in routes),
        mixture=_mixture(survey, compression),
    )


def _mixture(survey: SourceScan, compression: str | None) -> AllocationSummary | None:
    plan = survey.plans.get(compression)
    if plan is None:
        return None
    return allocation_of(plan, fitted=survey.fitted(compression), experts_a_token=experts_a_token(survey.config))


def _finished_at(folder: Path) -> str:
    """Return when a split directory was completed; for RabbitLLM 1.1's, when its last layer was written."""
    manifest = folder / MANIFEST_NAME
    files = [manifest] if manifest.exists() else folder.glob(f"*{LAYER_SUFFIX}")
    last = max(path.stat().st_mtime for path in files)
    return datetime.datetime.fromtimestamp(last).astimezone().isoformat(timespec="seconds")


def _route_names(survey: SourceScan, compression: str | None) -> Sequence[str]:
    """Return the possible routes in order of preference.

    The standard one deletes nothing, so it comes first; but a split that was begun on a sequential one stays on it,
    since on the standard one the used-up shards would be fetched again.
    """
    plan = survey.feasible[compression]
    ways = candidates(plan, "auto")
    sequential = [name for name, way in ROUTES.items() if name != STANDARD and way in ways]
    begun = survey.used(compression) and not all(survey.is_here(shard.name) for shard in plan.shards)
    return [*sequential, STANDARD] if begun else [STANDARD, *sequential]


def _route(survey: SourceScan, name: str, compression: str | None, measured: Rates) -> Route:
    plan, used = survey.feasible[compression], survey.used(compression)
    seconds = split_estimate.seconds_of(split_estimate.load_of(plan, used), name, compression, measured)
    placed, disk_budget = _placed(survey, name, compression)
    if compression in survey.journals:
        disk_budget = resumed_disk_budget(disk_budget, used)
    lacking = shortage(placed, disk_budget, survey.options, ROUTES[name])
    return split_estimate.route_of(name, placed, disk_budget, lacking, seconds)


def _placed(survey: SourceScan, name: str, compression: str | None) -> tuple[SplitPlan, DiskBudget]:
    """Return plan and disk state on a route; on the standard one missing shards go to the hub cache first."""
    fetched = (ShardPolicy.DELETE_FETCHED, ShardPolicy.DELETE_FETCHED_AND_REST)
    frees = name != STANDARD and survey.options.shards not in fetched
    shards = ShardPolicy.DELETE_USED if frees else ShardPolicy.KEEP
    plan, request = survey.feasible[compression], survey.request(compression, shards)
    if name != STANDARD or survey.source.repository is None:
        return plan, disk_budget_of(request, plan)
    kept = tuple(dataclasses.replace(shard, staged=False) for shard in plan.shards)
    disk_budget = disk_budget_of(request, plan, [shard for shard in plan.shards if shard.staged])
    return dataclasses.replace(plan, shards=kept), disk_budget


def _disks(survey: SourceScan) -> tuple[Disk, ...]:
    """Return the disk of the split directory, and that of the hub cache if it is another one."""
    places = [survey.folders.get(survey.options.compression, survey.source.split_folder)]
    if survey.source.repository is not None:
        places.append(survey.source.repository.cache)
    return tuple(Disk(at, shutil.disk_usage(at).free) for at in _of_different_disks(places))


def _of_different_disks(places: Iterable[Path]) -> tuple[Path, ...]:
    """Return the nearest existing folders, the first on each disk."""
    found: dict[int, Path] = {}
    for at in map(existing, places):
        found.setdefault(at.stat().st_dev, at)
    return tuple(found.values())


def _choice(
    survey: SourceScan,
    outlooks: Sequence[CompressionEstimate],
    asked: str | None,
    refused: Collection[str | None],
    given: Mapping[str, object],
) -> Recommendation | None:
    found = split_estimate.best(outlooks, asked, refused)
    if found is None:
        return None
    outlook, route = found
    sequential = True if route is not None and route.name != STANDARD else None
    # how shards arrive is left to the split: "auto" selects the same way as here
    own = {"compression": outlook.compression, "sequential_shard_processing": sequential}
    if outlook.compression not in (None, "8bit") and survey.options.fit_scales and survey.fitted(outlook.compression):
        given = {**given, "fit_scales": True}  # elsewhere it would be refused
    call = split_estimate.call_of(survey.source.name, {**own, **given})
    return Recommendation(outlook.compression, route.name if route is not None else None, call)
