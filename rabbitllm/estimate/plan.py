"""`rabbitllm.plan`: the disk use and time of a split and of generation, from headers and a few measurements.

Reads the free space of the disks and the state of the source, and passes both to `estimate.split_estimate`. Writes
only small files into the hub cache, and for a second a file that `estimate/machine.py` needs.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rabbitllm import prepare
from rabbitllm.auto_model import LoadRequest, draft_of
from rabbitllm.base.options import ShardPolicy, arguments_checked, parse_size
from rabbitllm.checkpoints.config import experts_a_token
from rabbitllm.errors import OptionError, system_errors_by_name
from rabbitllm.estimate import split_estimate
from rabbitllm.estimate.report import Plan as Plan
from rabbitllm.estimate.scan import SourceScan
from rabbitllm.estimate.split_estimate import (
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
from rabbitllm.splitter.bit_allocation import allocation_of
from rabbitllm.splitter.disk_budget import DiskBudget, candidates, shortage
from rabbitllm.splitter.plan import SplitPlan
from rabbitllm.splitter.request import disk_budget_of, kept_in_cache, resumed_disk_budget
from rabbitllm.storage.folders import existing
from rabbitllm.store.layer_file import LAYER_SUFFIX
from rabbitllm.store.manifest import AUTO, MANIFEST_NAME

MIN_FREE_DISK = "1GB"


@arguments_checked()
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
    draft: str | Path | None = None,
) -> Plan:
    """Estimate the disk use and the time of a split, at each compression and on each route, without making it.

    Also estimate generation after it, as by the commands (on a CPU with `fast_bfloat16`): the placement of the weights,
    and the time per token, from measurements on this machine that take a few seconds. Of a repository only headers and
    small files are fetched, and up to 8.4 MB of a shard to measure the connection.

    Args:
        path_or_repo_id: a folder with a checkpoint, a split directory, or a repository on the hub.
        compression: the preferred one: None, "8bit", "4bit", "4bit-double" or "auto".
        layer_shards_saving_path: folder for the split directory.
        revision: branch, tag or commit of the repository.
        token: access token for the hub.
        cache_dir: folder of the hub cache.
        max_disk: maximum bytes of the split, e.g. "50GB".
        min_free_disk: bytes of the disk that must stay free.
        bandwidth: bytes per second at which shards are fetched (or read, from a folder), e.g. "12MB", instead of a
            measurement.
        device: device to generate on.
        max_memory: maximum bytes of weights for each device, e.g. `{0: "14GB"}`; the default is the free memory.
        fit_scales: expect the scales with the least squared error, as in `AutoModel.from_pretrained`.
        draft: estimate generation with a draft too: its name, or the folder or repository of a small model.

    Returns:
        The estimates; `choice` is the best call that fits.

    Raises:
        RabbitLLMError: an invalid argument, no such source, or a malformed one.
    """
    request = LoadRequest.of(
        path_or_repo_id,
        compression,
        layer_shards_saving_path or None,
        revision=revision,
        token=token,
        cache_dir=cache_dir or None,
        of_split={"max_disk": max_disk, "min_free_disk": min_free_disk, "fit_scales": fit_scales},
        device=device,
        max_memory=max_memory,
    )
    assert request.split is not None
    run_options = request.run
    of_auto = prepare.with_memory(replace(request.split, compression=AUTO), run_options)  # it is planned, too
    options = replace(of_auto, compression=request.split.compression)
    rate = None if bandwidth is None else _given_rate(bandwidth)
    scan = SourceScan(request.spec, options)
    source = scan.source

    from rabbitllm.estimate.predict import generations  # imports transformers, which takes seconds

    devices, predicted = generations(scan, run_options, options.min_free, draft_of(draft, request))
    scan.refused |= {g.compression: g.obstacle for g in predicted if g.refused and g.obstacle}
    measured = _measure(scan, rate)
    estimates = tuple(split_estimate_at(scan, choice, measured) for choice in scan.folders)
    too_heavy = {g.compression for g in predicted if g.too_little_memory is not None}
    anatomy = anatomy_of(scan.base, scan.config) if scan.base is not None else None
    arguments = {
        "layer_shards_saving_path": str(layer_shards_saving_path) if layer_shards_saving_path else None,
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
        label=scan.checkpoint.label if scan.checkpoint is not None else source.name,
        commit=scan.commit,
        compression=options.compression,
        max_disk=options.max_disk,
        min_free_disk=options.min_free,
        anatomy=anatomy,
        disks=_disks(scan),
        outlooks=estimates,
        memory_bytes=split_estimate.memory_bytes(anatomy.tensors if anatomy is not None else 0),
        rates=measured,
        choice=_choice(scan, estimates, options.compression, too_heavy, arguments),
        warnings=scan.warnings,
        devices=devices,
        generations=tuple(predicted),
    )


def _given_rate(bandwidth: int | str) -> Rate:
    nbytes = parse_size(bandwidth, "bandwidth")
    if not nbytes:
        raise OptionError("bandwidth=0; expected more than 0.", "Use bytes per second, such as '12MB'.")
    return Rate(nbytes)


def _measure(scan: SourceScan, bandwidth: Rate | None) -> Rates:
    """Measure the rates that the estimates are based on, as far as they are needed and memory allows it."""
    from rabbitllm.estimate.machine import DROPPED, can_measure, read_rate

    threads = scan.options.threads
    waiting = [shard for c, plan in scan.feasible.items() for shard in plan.shards if shard.name not in scan.used(c)]
    staged = list(dict.fromkeys(shard.name for shard in waiting if shard.staged))
    here = list(dict.fromkeys(shard.name for shard in waiting if not shard.staged))
    fetch = bandwidth if staged else None
    read = bandwidth if here and not staged else None
    if not can_measure():
        return Rates(fetch, read, {}, threads)
    if staged and fetch is None and scan.source.repository is not None:
        fetch = split_estimate.fetch_rate(scan.source.repository, staged[0])
    if here and read is None and scan.checkpoint is not None:
        speed, nbytes = read_rate([scan.checkpoint.acquire(shard) for shard in here], DROPPED)
        read = Rate(speed, nbytes) if speed is not None else None
    quantize: dict[str, Rate] = {}
    fitted = scan.options.fit_scales
    for compression, plan in scan.feasible.items():
        scheme, dtype = split_estimate.measured_scheme(compression, fitted=fitted), commonest_dtype(plan)
        if scheme is None or dtype is None or scheme in quantize:
            continue
        if (rate := split_estimate.quantize_rate(scheme, dtype, threads, fitted=fitted)) is not None:
            quantize[scheme] = rate
    return Rates(fetch, read, quantize, threads)


def split_estimate_at(scan: SourceScan, compression: str | None, measured: Rates) -> CompressionEstimate:
    """Return the split estimate at one compression."""
    folder, plan = scan.folders[compression], scan.plans.get(compression)
    manifest = scan.manifests.get(compression)
    finished = compression in scan.manifests
    if manifest is not None:
        output: int | None = sum(record.size for record in manifest.layers)
    elif finished:
        output = sum(path.stat().st_size for path in folder.glob(f"*{LAYER_SUFFIX}"))
    else:
        output = plan.output_bytes if plan is not None else None
    routes = _route_names(scan, compression) if compression in scan.feasible else ()
    fitted, picked = scan.fitted(compression), experts_a_token(scan.config)
    return CompressionEstimate(
        compression,
        folder,
        "finished" if finished else "unfinished" if compression in scan.journals else "new",
        output,
        layers_above_10_gb=big_layers(plan) if plan is not None else (),
        finished_at=_finished_at(folder) if finished else None,
        shards_used=len(scan.used(compression)),
        shards=len(plan.shards) if plan is not None else 0,
        obstacle=scan.obstacle(compression),
        routes=tuple(_route(scan, name, compression, measured) for name in routes),
        mixture=allocation_of(plan, fitted=fitted, experts_a_token=picked) if plan is not None else None,
    )


def _finished_at(folder: Path) -> str:
    """Return when a split directory was completed; for RabbitLLM 1.1's, when its last layer was written."""
    manifest = folder / MANIFEST_NAME
    files = [manifest] if manifest.exists() else folder.glob(f"*{LAYER_SUFFIX}")
    last = max(path.stat().st_mtime for path in files)
    return datetime.datetime.fromtimestamp(last).astimezone().isoformat(timespec="seconds")


def _route_names(scan: SourceScan, compression: str | None) -> Sequence[str]:
    """Return the possible routes in order of preference.

    The standard one deletes nothing, so it comes first; but a split that was begun on a sequential one stays on it,
    since on the standard one the used-up shards would be fetched again.
    """
    plan = scan.feasible[compression]
    ways = candidates(plan, "auto")
    sequential = [name for name, way in ROUTES.items() if name != STANDARD and way in ways]
    begun = scan.used(compression) and not all(scan.is_here(shard.name) for shard in plan.shards)
    return [*sequential, STANDARD] if begun else [STANDARD, *sequential]


def _route(scan: SourceScan, name: str, compression: str | None, measured: Rates) -> Route:
    plan, used = scan.feasible[compression], scan.used(compression)
    seconds = split_estimate.seconds_of(split_estimate.load_of(plan, used), name, compression, measured)
    placed, disk_budget = _placed(scan, name, compression)
    if compression in scan.journals:
        disk_budget = resumed_disk_budget(disk_budget, used)
    lacking = shortage(placed, disk_budget, scan.options, ROUTES[name])
    return split_estimate.route_of(name, placed, disk_budget, lacking, seconds)


def _placed(scan: SourceScan, name: str, compression: str | None) -> tuple[SplitPlan, DiskBudget]:
    """Return plan and disk state on a route; on the standard one missing shards go to the hub cache first."""
    frees = name != STANDARD and ShardPolicy.DELETE_FETCHED not in scan.options.shards
    shards = ShardPolicy.DELETE_USED if frees else ShardPolicy.KEEP
    plan, request = scan.feasible[compression], scan.request(compression, shards)
    if name != STANDARD or scan.source.repository is None:
        return plan, disk_budget_of(request, plan)
    return kept_in_cache(request, plan)


def _disks(scan: SourceScan) -> tuple[Disk, ...]:
    """Return the disk of the split directory, and that of the hub cache if it is another one."""
    places = [scan.folders.get(scan.options.compression, scan.source.split_folder)]
    if scan.source.repository is not None:
        places.append(scan.source.repository.cache)
    paths: dict[int, Path] = {}
    for path in map(existing, places):
        paths.setdefault(path.stat().st_dev, path)
    return tuple(Disk(path, shutil.disk_usage(path).free) for path in paths.values())


def _choice(
    scan: SourceScan,
    estimates: Sequence[CompressionEstimate],
    preferred: str | None,
    refused: Collection[str | None],
    arguments: Mapping[str, object],
) -> Recommendation | None:
    best = split_estimate.best(estimates, preferred, refused)
    if best is None:
        return None
    estimate, route = best
    sequential = True if route is not None and route.name != STANDARD else None
    # how shards arrive is left to the split: "auto" selects the same way as here
    chosen = {"compression": estimate.compression, "sequential_shard_processing": sequential}
    if estimate.compression not in (None, "8bit") and scan.options.fit_scales and scan.fitted(estimate.compression):
        arguments = {**arguments, "fit_scales": True}  # elsewhere it would be refused
    call = split_estimate.call_of(scan.source.name, {**chosen, **arguments})
    return Recommendation(estimate.compression, route.name if route is not None else None, call)
