"""What a split would take, and how long, before any of it is done: records, and the functions that fill them.

Pure: plans, sizes of disks and measured rates come from the caller. Reads no file, asks no hub, prints nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.base.plain_json import plain
from rabbitllm.quant.compression import CODES
from rabbitllm.splitter.anatomy import Anatomy
from rabbitllm.splitter.choosing import AllocationSummary
from rabbitllm.splitter.disk_budget import DiskBudget, Shortage, use_of
from rabbitllm.splitter.disk_use import ShardTransfer
from rabbitllm.splitter.plan import SplitPlan
from rabbitllm.store.chosen import AUTO

MEMORY_BYTES = 200 * 1000**2
"""Anonymous memory that a split adds to its process at most, without its plan (benchmarks/results: up to 187 MB)."""
MEMORY_BYTES_A_TENSOR = 2400
"""Of the plan and its journal; Qwen3-Coder-Next's 74,391 tensors were measured to take 2,341 each at 4bit."""
STANDARD = "standard"
"""The route that keeps all shards; the sequential ones are named by how shards arrive, in `ROUTES`."""
ROUTES: Mapping[str, ShardTransfer] = {
    STANDARD: ShardTransfer.FILE,
    "sequential_ahead": ShardTransfer.FILE_AHEAD,
    "sequential_file": ShardTransfer.FILE,
    "sequential_stream": ShardTransfer.STREAM,
}
"""Every route, the one to prefer first."""
WIDTH = 76
"""Columns that a call is laid out for."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes a second, and over how many bytes that was measured; `measured_bytes` is 0 where the caller said it."""

    bytes_per_second: float
    measured_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """What the estimates of time rest on; None for what is not needed or could not be measured.

    Attributes:
        fetch: from the hub.
        read: from this disk.
        quantize: source bytes, by compression; 4bit-double by itself where scales fit their blocks, since fewer of them
            are tried then.
        threads: that quantize.
        quantize_on: "cpu" or "cuda:N".
    """

    fetch: Rate | None
    read: Rate | None
    quantize: Mapping[str, Rate]
    threads: int
    quantize_on: str

    def quantizing(self, compression: str) -> Rate | None:
        """How fast a split at a compression quantizes, or at "auto" at the slowest that it may use."""
        if compression == AUTO:
            return min(self.quantize.values(), key=lambda rate: rate.bytes_per_second, default=None)
        return self.quantize.get(compression) or self.quantize.get(CODES[compression])


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
        name: a key of `ROUTES`.
        disk_bytes: the most by which this machine's disks are fuller than now, the hub cache included. So much must be
            free in addition to `min_free_disk`.
        created_bytes: the most that the split directory occupies, and what goes into the hub cache before it is begun;
            what `max_disk` bounds.
        cache_bytes: of `disk_bytes`, what goes into the hub cache.
        lacking: what is missing, as the split itself would say; None if it fits.
        seconds: estimated; None if a rate for it is not known.
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
    """What lies ahead at one compression.

    Attributes:
        compression: None, one for all tensors, or "auto".
        folder: the split directory, there or not.
        state: of it, "new", "unfinished" or "finished".
        output_bytes: of all layer files; None where no header is left to tell.
        layers_above_10_gb: ids of layers whose file is that large.
        finished_at: when the split directory became whole, ISO 8601; None if it is not.
        shards_used: how many an earlier run used up.
        shards: how many there are in all.
        obstacle: why there is no way at all: the folder belongs to another model, or shards are gone.
        routes: those there are, the one to prefer first; none where nothing is left to do, or nothing can be.
        mixture: at "auto", which bits are chosen; None at other compressions, and where no header is left to tell.
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
        """Whether the split directory is whole and of this source."""
        return self.state == "finished" and self.obstacle is None


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk that a split would write to: a folder on it, and the bytes that are free."""

    folder: Path
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The best that fits: its compression, its route (None for a finished split), and the call that does it."""

    compression: str | None
    route: str | None
    call: str


@dataclass(frozen=True, slots=True)
class SplitEstimate:
    """All that can be told before a split.

    Attributes:
        source: as the caller named it.
        kind: "hub", "local", or "split" where a finished split directory is all there is.
        label: the folder, or the repository and commit.
        commit: the pinned commit of a repository.
        compression: what was asked for.
        max_disk, min_free_disk: what was allowed, bytes.
        anatomy: of the checkpoint; None where no header of it is left.
        disks: the one that the layer files go to first.
        outlooks: by compression, from the largest output to the smallest.
        memory_bytes: anonymous memory that the split adds at most.
        rates: what the times rest on.
        choice: the best that fits; None if nothing does.
        warnings: what else to know.
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
        """The outlook at a compression."""
        return next((outlook for outlook in self.outlooks if outlook.compression == compression), None)

    def called(self, compression: str | None) -> str:
        """What people call the layer files at a compression: those of codes are not "uncompressed"."""
        if compression is not None:
            return compression
        return "as published" if self.anatomy is not None and self.anatomy.quantized is not None else "uncompressed"


def memory_bytes(tensors: int) -> int:
    """Anonymous memory that a split of so many tensors adds to its process at most; of any size they may be."""
    return MEMORY_BYTES + MEMORY_BYTES_A_TENSOR * tensors


def load_of(plan: SplitPlan, used: frozenset[str]) -> Load:
    """What is still to be done of a plan of which some shards are used up."""
    waiting = [shard for shard in plan.shards if shard.name not in used]
    names = {shard.name for shard in waiting}
    forms = [form for layout in plan.layouts.values() for form in layout.forms if form.source.file in names]
    open_layers = (layer for layer, shards in plan.layer_map.layer_to_shards.items() if not shards.isdisjoint(names))
    joins = [form for layer in open_layers for form in plan.layouts[layer].joins]
    return Load(
        fetched=sum(shard.size for shard in waiting if shard.staged),
        read=sum(shard.size for shard in waiting if not shard.staged) + sum(form.source.nbytes for form in joins),
        quantized=sum(form.source.nbytes for form in (*forms, *joins) if form.scheme),
    )


def seconds_of(load: Load, route: str, compression: str | None, rates: Rates) -> float | None:
    """An estimate of how long a split takes, from a few rates.

    Fetching and splitting take turns where each shard is a file and where all are fetched first; they overlap, so that
    the slower of both decides, where the next shard is fetched meanwhile and where shards are streamed. Writing is not
    in it: it overlaps with both, and its rate cannot be measured without writing.

    Returns:
        Seconds; None if a rate that it needs is not known.
    """
    quantizer = rates.quantizing(compression) if compression else None
    parts = [_seconds(load.fetched, rates.fetch), _seconds(load.read, rates.read), _seconds(load.quantized, quantizer)]
    if any(part is None for part in parts):
        return None
    fetch, read, quantize = (part or 0.0 for part in parts)
    overlap = ROUTES[route] is not ShardTransfer.FILE
    return max(fetch, read + quantize) if overlap else fetch + read + quantize


def _seconds(nbytes: int, rate: Rate | None) -> float | None:
    if not nbytes:
        return 0.0
    return nbytes / rate.bytes_per_second if rate is not None else None


def route_of(
    name: str, plan: SplitPlan, disk_budget: DiskBudget, lacking: Shortage | None, seconds: float | None
) -> Route:
    """What one route takes of the disk, in the figures that the split itself is checked with.

    Args:
        name: a key of `ROUTES`.
        plan: the split, its shards marked as staged or not as they are on that route.
        ground: what it stands on, on that route.
        lacking: what `space.shortage` says of it.
        seconds: see `seconds_of`.
    """
    use = use_of(plan, disk_budget, ROUTES[name])
    cache_bytes = sum(nbytes for _, nbytes in disk_budget.downloads)
    return Route(name, use.added + cache_bytes, disk_budget.created(use), cache_bytes, lacking, seconds)


def best(
    outlooks: Sequence[CompressionEstimate], asked: str | None, refused: Collection[str | None] = ()
) -> tuple[CompressionEstimate, Route | None] | None:
    """The compression and route to take: the compression asked for if it fits, else the least compressed that does.

    Of its routes the first that fits, in their own order; None as a route means that the split is finished. None if
    nothing fits. Compressions that are `refused` are left out: they could not be loaded here.
    """
    outlooks = [outlook for outlook in outlooks if outlook.compression not in refused]
    for outlook in sorted(outlooks, key=lambda outlook: outlook.compression != asked):
        if outlook.finished:
            return outlook, None
        for route in outlook.routes:
            if route.fits:
                return outlook, route
    return None


def least(outlooks: Sequence[CompressionEstimate]) -> tuple[CompressionEstimate, Route] | None:
    """Where nothing fits, what comes nearest: the route that lacks least, and of several the one that takes least."""
    found = [(outlook, route) for outlook in outlooks for route in outlook.routes if route.lacking is not None]
    return min(found, key=lambda pair: (missing_bytes(pair[1]), pair[1].disk_bytes), default=None)


def missing_bytes(route: Route) -> int:
    """What a route lacks; 0 if it fits."""
    return route.lacking.need - route.lacking.have if route.lacking is not None else 0


def call_of(source: str, arguments: Mapping[str, object]) -> str:
    """The Python that makes a split, ready to paste: on one line if that is short enough."""
    given = [f"{name}={_literal(value)}" for name, value in arguments.items() if value is not None]
    parts = [_literal(source), *given]
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


def as_json(forecast: SplitEstimate) -> dict[str, Any]:
    """A forecast as one JSON object: snake_case keys, sizes in bytes, times in seconds."""
    content: dict[str, Any] = plain(dataclasses.asdict(forecast))
    for entry, outlook in zip(content["outlooks"], forecast.outlooks, strict=True):
        entry["finished"] = outlook.finished
        entry["fits"] = outlook.finished or any(route.fits for route in outlook.routes)
        for record, route in zip(entry["routes"], outlook.routes, strict=True):
            record["fits"] = route.fits
            if route.lacking is not None:
                lacking = route.lacking
                record["lacking"] = {"need_bytes": lacking.need, "have_bytes": lacking.have, "where": lacking.where}
    return content
