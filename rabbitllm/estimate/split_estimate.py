"""Estimates of a split: the composition of a checkpoint, sizes, times, and measured rates.

The records and the functions that fill them are pure; plans and disk sizes come from the caller. The rates at which
this machine fetches, reads and quantizes are measured on small samples. Nothing is written. Each measurement takes a
bounded time, and returns None if it fails: an estimate must not raise an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.base.forks import DaemonThread
from rabbitllm.base.grouping import grouped, summed
from rabbitllm.base.options import BIG_LAYER_BYTES
from rabbitllm.base.plain_json import plain
from rabbitllm.checkpoints.config import quantized_as, text_config
from rabbitllm.checkpoints.hub import HubFile, HubRepository
from rabbitllm.errors import MissingPackageError, RabbitLLMError
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, torch_dtype
from rabbitllm.quant.schemes import BLOCKS, MAX_ROUTER_ROWS, MIN_ELEMENTS, PRESETS, SCHEMES, is_compressible
from rabbitllm.splitter.bit_allocation import AllocationSummary
from rabbitllm.splitter.disk_budget import DiskBudget, ShardTransfer, Shortage, disk_use
from rabbitllm.splitter.plan import CHUNK_BYTES, SplitPlan
from rabbitllm.store.manifest import AUTO

_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer)\.|^output\.")


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors with a common trait: its description, their number, and their bytes in the checkpoint."""

    what: str
    count: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The composition of a checkpoint.

    Attributes:
        total_bytes: size of all shards.
        shards: number of shards.
        largest_shard_bytes: size of the largest shard.
        layers: number of layers.
        largest_layer: id of the layer with the largest uncompressed layer file.
        largest_layer_bytes: size of that file.
        tensors: number of tensors.
        parameters: number of elements of floating tensors.
        tied_embeddings: True if the config says so and there is no output head; False if there is one; None where
            there is none and the config does not say so.
        never_compressed: floating tensors of two or more dimensions that are never compressed, by reason.
        not_floating: tensors that are not floating, by dtype.
        empty: number of tensors without elements.
        scalars: number of tensors without dimensions.
        layers_over_shards: number of layers whose tensors are in several shards.
        most_shards_of_a_layer: largest number of shards of one layer.
        quantized: quantization of the published weights; None for plain ones.
    """

    total_bytes: int
    shards: int
    largest_shard_bytes: int
    layers: int
    largest_layer: str
    largest_layer_bytes: int
    tensors: int
    parameters: int
    tied_embeddings: bool | None
    never_compressed: tuple[TensorGroup, ...]
    not_floating: tuple[TensorGroup, ...]
    empty: int
    scalars: int
    layers_over_shards: int
    most_shards_of_a_layer: int
    quantized: str | None = None


def anatomy_of(plan: SplitPlan, config: Mapping[str, Any]) -> Anatomy:
    """Return the composition of a checkpoint, from its uncompressed plan and its config."""
    specs = plan.tensors
    sizes = {layer: layout.size for layer, layout in plan.layouts.items()}
    largest = max(sizes, key=sizes.__getitem__, default="")
    spread = [len(shards) for shards in plan.layer_map.layer_to_shards.values()]
    return Anatomy(
        total_bytes=plan.source_bytes,
        shards=len(plan.shards),
        largest_shard_bytes=max((shard.size for shard in plan.shards), default=0),
        layers=len(sizes),
        largest_layer=largest,
        largest_layer_bytes=sizes.get(largest, 0),
        tensors=len(specs),
        parameters=sum(spec.elements for spec in specs if is_floating(spec)),
        tied_embeddings=_is_tied(specs, config),
        never_compressed=_groups((why, spec) for spec in specs if (why := why_never_compressed(spec)) is not None),
        not_floating=_groups((spec.dtype, spec) for spec in specs if not is_floating(spec)),
        empty=sum(not spec.elements for spec in specs),
        scalars=sum(spec.shape == () for spec in specs),
        layers_over_shards=sum(shards > 1 for shards in spread),
        most_shards_of_a_layer=max(spread, default=0),
        quantized=quantized_as(config),
    )


def is_floating(spec: TensorSpec) -> bool:
    """Whether a tensor has a floating dtype."""
    return "float" in DTYPES[spec.dtype].torch_name


def why_never_compressed(spec: TensorSpec) -> str | None:
    """Return why a floating tensor of two or more dimensions is never compressed; None for every other tensor."""
    if not is_floating(spec) or len(spec.shape) < 2 or not spec.elements or is_compressible(spec):
        return None
    if not DTYPES[spec.dtype].quantizable:
        return f"{spec.dtype} already"
    if spec.elements < MIN_ELEMENTS:
        return f"under {MIN_ELEMENTS:,} elements"
    if len(spec.shape) > 3:
        return "more than 3 dimensions"
    if is_compressible(spec._replace(shape=(MAX_ROUTER_ROWS + 1, MIN_ELEMENTS))):
        return "expert router"  # the only rule that exempts a tensor of that name because it has few rows
    if spec.name.endswith("bias"):
        return "biases of experts"
    return "convolution" if "conv" in spec.name.lower() else "state-space decay"


def _groups(specs: Iterable[tuple[str, TensorSpec]]) -> tuple[TensorGroup, ...]:
    groups = grouped((name, spec.nbytes) for name, spec in specs)
    tensor_groups = (TensorGroup(name, len(sizes), sum(sizes)) for name, sizes in groups.items())
    return tuple(sorted(tensor_groups, key=lambda group: (-group.total_bytes, group.what)))


def _is_tied(specs: Iterable[TensorSpec], config: Mapping[str, Any]) -> bool | None:
    if any(_HEAD.search(spec.name) for spec in specs):
        return False
    declared = config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings"))
    return True if declared is True else None


def big_layers(plan: SplitPlan) -> tuple[str, ...]:
    """Return the layers with files above `BIG_LAYER_BYTES`, of which the split warns."""
    return tuple(layer for layer, layout in plan.layouts.items() if layout.size > BIG_LAYER_BYTES)


def commonest_dtype(plan: SplitPlan) -> str | None:
    """Return the dtype of most of the bytes that compression quantizes; None if there are none."""
    sums = summed((spec.dtype, spec.nbytes) for spec in filter(is_compressible, plan.tensors))
    return max(sums, key=sums.__getitem__, default=None)


MEMORY_BYTES = 200 * 1000**2
"""Maximum anonymous memory that a split adds to its process, without its plan (benchmarks/results: up to 187 MB)."""
MEMORY_BYTES_A_TENSOR = 2400
"""Memory of the plan and its journal per tensor; 2,341 each were measured for Qwen3-Coder-Next's 74,391 at 4bit."""
STANDARD = "standard"
"""The route that keeps all shards; sequential routes are named by the transfer of shards, in `ROUTES`."""
ROUTES: Mapping[str, ShardTransfer] = {
    STANDARD: ShardTransfer.FILE,
    "sequential_ahead": ShardTransfer.FILE_AHEAD,
    "sequential_file": ShardTransfer.FILE,
    "sequential_stream": ShardTransfer.STREAM,
}
"""All routes, in order of preference."""
WIDTH = 76
"""Maximum columns of a printed call."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes per second, and the bytes over which it was measured; `measured_bytes` is 0 if the caller gave the rate."""

    bytes_per_second: float
    measured_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates that estimates of time are based on; None if one is not needed or could not be measured.

    Attributes:
        fetch: from the hub.
        read: from this disk.
        quantize: source bytes, by compression; 4bit-double has another rate if scales are fitted to their blocks, since
            fewer scales are tried then.
        threads: number of threads that quantize.
        quantize_on: always "cpu"; for readers of the JSON of `plan`.
    """

    fetch: Rate | None
    read: Rate | None
    quantize: Mapping[str, Rate]
    threads: int
    quantize_on: str = "cpu"

    def quantizing(self, compression: str) -> Rate | None:
        """Return the rate of quantizing at a compression; at "auto" that of the slowest scheme."""
        if compression == AUTO:
            rates = (self.quantize[scheme] for scheme in SCHEMES if scheme in self.quantize)
            return min(rates, key=lambda rate: rate.bytes_per_second, default=None)
        return self.quantize.get(compression) or self.quantize.get(measured_scheme(compression) or "")


def measured_scheme(compression: str | None, *, fitted: bool = False) -> str | None:
    """Return the scheme whose rate is that of a compression; None at None and "auto", which have none of their own.

    Before its scales are quantized 4bit-double is 4bit, unless they are fitted. Of a preset it is the scheme of most
    tensors.
    """
    if (scheme := SCHEMES.get(compression or "")) is not None:
        return compression if fitted else scheme.codes
    base, _ = PRESETS.get(compression or "", (compression, None))
    return BLOCKS.get(base or "")


@dataclass(frozen=True, slots=True)
class Load:
    """Source bytes that are still to be fetched from the hub, to be read from this disk, and to be quantized."""

    fetched: int
    read: int
    quantized: int


@dataclass(frozen=True, slots=True)
class Route:
    """One way to make a split.

    Attributes:
        name: "standard" (shards are kept), or a sequential route: "sequential_ahead" (the next shard is fetched
            meanwhile), "sequential_file" (one shard at a time) or "sequential_stream" (no shard is a file).
        disk_bytes: largest increase of disk use during the split, hub cache included. This must be free in addition to
            `min_free_disk`.
        created_bytes: largest size of the split directory and of downloads for it; limited by `max_disk`.
        cache_bytes: part of `disk_bytes` in the hub cache.
        lacking: the shortage that the split would report; None if it fits.
        seconds: estimated time; None if a rate is unknown.
    """

    name: str
    disk_bytes: int
    created_bytes: int
    cache_bytes: int
    lacking: Shortage | None
    seconds: float | None

    @property
    def fits(self) -> bool:
        """Whether a split on this route would begin."""
        return self.lacking is None


@dataclass(frozen=True, slots=True)
class CompressionEstimate:
    """The split estimate at one compression.

    Attributes:
        compression: one of `SPLITS`.
        folder: the split directory; it may not exist yet.
        state: state of the split directory: "new", "unfinished" or "finished".
        output_bytes: size of all layer files; None if no header is left to compute it from.
        layers_above_10_gb: ids of layers whose file is that large.
        finished_at: when the split directory was completed, ISO 8601; None if it is not.
        shards_used: number of shards that an earlier run has processed.
        shards: number of all shards.
        obstacle: why no route is possible: the folder belongs to another model, or shards are gone.
        routes: the possible routes in order of preference; none if the split is finished or not possible.
        mixture: at "auto", the bit allocation; None at other compressions, and if no header is left to compute it from.
    """

    compression: str | None
    folder: Path
    state: str
    output_bytes: int | None
    layers_above_10_gb: tuple[str, ...] = ()
    finished_at: str | None = None
    shards_used: int = 0
    shards: int = 0
    obstacle: str | None = None
    routes: tuple[Route, ...] = ()
    mixture: AllocationSummary | None = None

    @property
    def finished(self) -> bool:
        """Whether the split directory is complete and of this source."""
        return self.state == "finished" and self.obstacle is None


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk that a split would write to: a folder on it, and the bytes that are free."""

    folder: Path
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The best call that fits.

    Attributes:
        compression: its compression.
        route: its route; None for a finished split.
        call: the call as Python code.
    """

    compression: str | None
    route: str | None
    call: str


@dataclass(frozen=True, slots=True)
class SplitEstimate:
    """The complete split estimate.

    Attributes:
        source: the model as the caller named it.
        kind: "hub", "local", or "split" if only a finished split directory exists.
        label: the folder, or the repository and commit.
        commit: the pinned commit of a repository.
        compression: the requested compression.
        max_disk, min_free_disk: the caller's limits in bytes.
        anatomy: composition of the checkpoint; None if none of its headers is left.
        disks: disks that the split writes to; that of the layer files comes first.
        outlooks: one for each compression, from the largest layer files to the smallest.
        memory_bytes: maximum memory that the split adds, without mapped files.
        rates: measured or given rates that the times are based on.
        choice: the best call that fits; None if nothing fits.
        warnings: further notes.
    """

    source: str
    kind: str
    label: str
    commit: str | None
    compression: str | None
    max_disk: int | None
    min_free_disk: int
    anatomy: Anatomy | None
    disks: tuple[Disk, ...]
    outlooks: tuple[CompressionEstimate, ...]
    memory_bytes: int
    rates: Rates
    choice: Recommendation | None
    warnings: tuple[str, ...] = ()

    def at(self, compression: str | None) -> CompressionEstimate | None:
        """Return the estimate at a compression; None if there is none.

        Args:
            compression: one of `SPLITS`.
        """
        return next((estimate for estimate in self.outlooks if estimate.compression == compression), None)

    def called(self, compression: str | None) -> str:
        """Return the usual name of the layer files at a compression: codes as published are not "uncompressed"."""
        if compression is not None:
            return compression
        return "as published" if self.anatomy is not None and self.anatomy.quantized is not None else "uncompressed"


def memory_bytes(tensors: int) -> int:
    """Return the maximum anonymous memory that a split of this number of tensors adds to its process."""
    return MEMORY_BYTES + MEMORY_BYTES_A_TENSOR * tensors


def load_of(plan: SplitPlan, used: frozenset[str]) -> Load:
    """Return the load of a plan without its used shards."""
    waiting = [shard for shard in plan.shards if shard.name not in used]
    names = {shard.name for shard in waiting}
    forms = [form for layout in plan.layouts.values() for form in layout.forms if form.source.file in names]
    open_layers = (layer for layer, shards in plan.layer_map.layer_to_shards.items() if not shards.isdisjoint(names))
    joins = [form for layer in open_layers for form in plan.layouts[layer].joins]
    return Load(
        fetched=sum(shard.size for shard in waiting if shard.staged),
        read=sum(shard.size for shard in waiting if not shard.staged) + sum(form.source.nbytes for form in joins),
        quantized=sum(form.source.nbytes for form in (*forms, *joins) if form.scheme and not form.keeps_blocks),
    )


def seconds_of(load: Load, route: str, compression: str | None, rates: Rates) -> float | None:
    """Estimate the time of a split from a few rates.

    If each shard is a file, or all are fetched first, fetching and splitting alternate. If the next shard is fetched
    meanwhile, or shards are streamed, they overlap, and the slower of the two decides. Writing is not included: it
    overlaps with both, and its rate cannot be measured without writing.

    Returns:
        Seconds; None if a rate that it needs is not known.
    """
    quantizer = rates.quantizing(compression) if compression else None
    work = ((load.fetched, rates.fetch), (load.read, rates.read), (load.quantized, quantizer))
    if any(nbytes and rate is None for nbytes, rate in work):
        return None
    fetch, read, quantize = (nbytes / rate.bytes_per_second if rate is not None else 0.0 for nbytes, rate in work)
    overlap = ROUTES[route] is not ShardTransfer.FILE
    return max(fetch, read + quantize) if overlap else fetch + read + quantize


def route_of(
    name: str, plan: SplitPlan, disk_budget: DiskBudget, lacking: Shortage | None, seconds: float | None
) -> Route:
    """Return the disk use of one route, in the figures that the split itself is checked with.

    Args:
        name: a key of `ROUTES`.
        plan: the split, its shards marked as staged or not as they are on that route.
        disk_budget: the state of the disk on that route.
        lacking: result of `disk_budget.shortage`.
        seconds: see `seconds_of`.
    """
    use = disk_use(plan, disk_budget, ROUTES[name])
    cache_bytes = sum(nbytes for _, nbytes in disk_budget.downloads)
    return Route(name, use.added + cache_bytes, disk_budget.created(use), cache_bytes, lacking, seconds)


def best(
    estimates: Sequence[CompressionEstimate], requested: str | None, refused: Collection[str | None] = ()
) -> tuple[CompressionEstimate, Route | None] | None:
    """Select the compression and route: the requested compression if it fits, else none; then what is finished, "auto",
    and of the others the least compressed one that fits.

    The route is the first one that fits; None as a route means that the split is finished. None if nothing fits.
    Compressions that are `refused` are left out: they could not be loaded here.
    """
    possible = [estimate for estimate in estimates if estimate.compression not in refused]

    def rank(estimate: CompressionEstimate) -> tuple[bool, ...]:
        compression = estimate.compression
        return compression != requested, compression is not None, not estimate.finished, compression != AUTO

    for estimate in sorted(possible, key=rank):
        if estimate.finished:
            return estimate, None
        for route in estimate.routes:
            if route.fits:
                return estimate, route
    return None


def smallest(estimates: Sequence[CompressionEstimate]) -> tuple[CompressionEstimate, Route] | None:
    """If nothing fits, select the route with the least disk use, and of several the one that lacks least."""
    lacking = [(estimate, route) for estimate in estimates for route in estimate.routes if route.lacking is not None]
    return min(lacking, key=lambda pair: (pair[1].disk_bytes, missing_bytes(pair[1])), default=None)


def missing_bytes(route: Route) -> int:
    """Return the bytes that a route lacks; 0 if it fits."""
    return route.lacking.missing if route.lacking is not None else 0


def call_of(source: str, arguments: Mapping[str, object]) -> str:
    """Return the Python that makes a split, ready to paste: on one line if that is short enough."""
    pairs = [f"{name}={_literal(value)}" for name, value in arguments.items() if value is not None]
    parts = [_literal(source), *pairs]
    lead = "AutoModel.from_pretrained("
    short = f"model = {lead}{', '.join(parts)})"
    if len(short) > WIDTH:
        short = f"model = {lead}\n" + "".join(f"    {part},\n" for part in parts) + ")"
    return f"from rabbitllm import AutoModel\n\n{short}"


def _literal(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(entry)}" for key, entry in value.items()) + "}"
    if not isinstance(value, str):
        return repr(value)
    quoted = repr(value)
    return f'"{value}"' if quoted == f"'{value}'" and '"' not in value else quoted


def as_json(estimate: SplitEstimate) -> dict[str, Any]:
    """Convert a split estimate to one JSON object: snake_case keys, sizes in bytes, times in seconds."""
    content: dict[str, Any] = plain(dataclasses.asdict(estimate))
    for entry, outlook in zip(content["outlooks"], estimate.outlooks, strict=True):
        entry["finished"] = outlook.finished
        entry["fits"] = outlook.finished or any(route.fits for route in outlook.routes)
        for record, route in zip(entry["routes"], outlook.routes, strict=True):
            record["fits"] = route.fits
            if route.lacking is not None:
                record["lacking"] = route.lacking.record()
    return content


# Measured rates.


FETCHED_BYTES = 8 << 20
"""Maximum bytes that are fetched of a shard, from its start."""
MAX_SECONDS = 3.0
"""A fetch stops after this time; the bytes that arrived until then count."""
QUANTIZE_SECONDS = 0.3


def fetch_rate(repository: HubRepository, shard: str) -> Rate | None:
    """Measure how fast a shard comes from the hub: one request for its first bytes, which are not kept."""
    size = min(repository.files[shard].size, FETCHED_BYTES)
    # a list of files in which the shard has this size and no digest
    sample = dataclasses.replace(repository, files={shard: HubFile(shard, size, None, None)})
    start = time.perf_counter()
    arrived: list[tuple[float, int]] = []
    enough = threading.Event()

    def take() -> None:
        with contextlib.suppress(RabbitLLMError):
            for chunk in sample.stream(shard):
                arrived.append((time.perf_counter() - start, len(chunk)))
                if enough.is_set():
                    return

    taker = DaemonThread(take, "fetch-rate")  # a hub may not answer, and retries pause
    taker.start()
    taker.join(MAX_SECONDS)
    enough.set()
    return _steady_rate(tuple(arrived))


def _steady_rate(arrived: Sequence[tuple[float, int]]) -> Rate | None:
    """Return the rate of chunks that arrived at these seconds, without the wait for the first if enough follow it.

    The latency of a request counts once per shard, and a sample is a thousandth of a shard.
    """
    if not arrived:
        return None
    total = sum(nbytes for _, nbytes in arrived)
    (first, head), (last, _) = arrived[0], arrived[-1]
    if last > first and 2 * head < total:
        return Rate((total - head) / (last - first), total)
    return Rate(total / last, total)


def quantize_rate(scheme: str, dtype: str, threads: int, *, fitted: bool = False) -> Rate | None:
    """Measure how many source bytes per second the quantizer processes, called as in a split.

    Args:
        scheme: see `quantize_blocks`.
        dtype: of the source, F32, F16 or BF16.
        threads: number of threads that call it at the same time.
        fitted: whether scales of 4bit are fitted to their blocks.
    """
    import torch

    from rabbitllm.base.random_tensors import RandomTensors
    from rabbitllm.quant.quantize import quantize_blocks

    values = RandomTensors().normal(CHUNK_BYTES * 8 // DTYPES[dtype].bits, dtype=torch_dtype(dtype))
    chunk = values.view(torch.uint8).numpy().data

    def work(_: int) -> tuple[int, float]:
        quantize_blocks(scheme, chunk, dtype, "cpu", fitted=fitted)  # a thread's first call loads kernels
        done, start = 0, time.perf_counter()
        while not done or time.perf_counter() - start < QUANTIZE_SECONDS:
            quantize_blocks(scheme, chunk, dtype, "cpu", fitted=fitted)
            done += len(chunk)
        return done, time.perf_counter() - start

    with ThreadPoolExecutor(threads, thread_name_prefix="quantize-rate") as pool:
        try:
            work_times = list(pool.map(work, range(threads)))
        except MissingPackageError:
            return None
    return Rate(sum(done / seconds for done, seconds in work_times), sum(done for done, _ in work_times))
