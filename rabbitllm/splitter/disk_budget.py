"""The peak disk use of a split over its steps, whether it fits, and the best transfer of its shards that fits.

The only module of the splitter that reads the free disk. A container's quota does not show in that (Kaggle reports the
host's disk), hence `max_disk`. Writes nothing.
"""

from __future__ import annotations

import enum
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from rabbitllm.base.options import SplitOptions
from rabbitllm.base.rounding import round_up
from rabbitllm.base.terminal import size, size_rounded_up
from rabbitllm.errors import NotEnoughSpaceException, OptionError
from rabbitllm.quant.schemes import COMPRESSIONS
from rabbitllm.splitter.plan import LayerMap, PlannedShard, SplitPlan, recompressed
from rabbitllm.storage.folders import existing
from rabbitllm.store import checksums
from rabbitllm.store.layer_file import LayerLayout
from rabbitllm.store.manifest import AUTO

BLOCK_BYTES = 4096
"""Files occupy a multiple of this."""
RECORDED_NAMES = 5
"""Number of times that journal and manifest together contain a tensor's name."""
CHOSEN_NAMES = 2
"""Number of further times if each tensor has its own compression."""
RECORD_BYTES = 340
"""Bytes that they contain for a tensor in addition to its name: dtype, shape, offset, checksums, JSON."""
BLOCK_RECORD_BYTES = 12
"""Bytes that they contain for a block of a layer file: its checksum, in base64, in each of them."""
SHARD_RECORD_BYTES = 1024
"""Bytes that they contain for a shard, and once for the whole."""
CACHE_RECORD_BYTES = 512
"""Upper bound of one file's entry in the listing of huggingface_hub's cache, bytes."""
NOTHING: Mapping[str, int] = MappingProxyType({})
"""For a split in which the deletion of shards frees nothing."""


class ShardTransfer(enum.Enum):
    """The way that fetched shards reach their layer files."""

    FILE_AHEAD = "file, with one shard downloaded ahead"
    FILE = "file, one at a time"
    STREAM = "stream, never a file"

    @property
    def files(self) -> int:
        """The fetched shards that are on the disk at a time."""
        return {ShardTransfer.FILE_AHEAD: 2, ShardTransfer.FILE: 1, ShardTransfer.STREAM: 0}[self]


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes on disk over a split.

    Attributes:
        created: maximum size of the split directory: layer files, staged shards and small files.
        added: maximum increase of disk use; less than `created` if the deletion of shards frees space on this disk, or
            if an earlier run has created a part.
    """

    created: int
    added: int


@dataclass(frozen=True, slots=True)
class DiskBudget:
    """The state of the disk that a split starts from.

    Attributes:
        folder: the split directory; it may not exist yet.
        freed: shard -> bytes that its deletion frees on the disk of `folder`; without shards that are kept, lie on
            another disk, or share their data with another file.
        small_files: bytes of the other files that the split directory will have.
        downloads: bytes that are written elsewhere before the split begins (to the hub cache, on the standard route),
            by folder.
        used: shards that an earlier run used up.
        in_use: bytes that an earlier run's files in the folder occupy already.
        lock_bytes: bytes that the lock of this run occupies there already; the need contains them.
    """

    folder: Path
    freed: Mapping[str, int] = field(default_factory=dict)
    small_files: int = 0
    downloads: tuple[tuple[Path, int], ...] = ()
    used: frozenset[str] = frozenset()
    in_use: int = 0
    lock_bytes: int = 0

    def created(self, use: DiskUse) -> int:
        """Return the bytes that `max_disk` bounds: the split directory, and downloads elsewhere that are kept."""
        return use.created + sum(nbytes for _, nbytes in self.downloads)


@dataclass(frozen=True, slots=True)
class EstimatedFile:
    """Sizes of a layer file, as in `LayerLayout`; `joins` are those of an alike layer."""

    header_bytes: int
    size: int
    shard_bytes: Mapping[str, int]
    scratch_bytes: int
    joined_bytes: int
    joins: Sequence[object]


@dataclass(frozen=True, slots=True)
class BitChoice:
    """The sizes of a split at one choice of bits.

    Attributes:
        schemes: the scheme of each group.
        shards, layer_map: as in the plan.
        layouts: layer id -> sizes of its file.
        scales_made: bytes of the scales that are made from quantized ones when the model is used.
    """

    schemes: tuple[str | None, ...]
    shards: tuple[PlannedShard, ...]
    layer_map: LayerMap
    layouts: Mapping[str, EstimatedFile]
    scales_made: int

    @property
    def output_bytes(self) -> int:
        """Bytes of all layer files."""
        return sum(sizes.size for sizes in self.layouts.values())


FileSizes: TypeAlias = LayerLayout | EstimatedFile
PlanSizes: TypeAlias = SplitPlan | BitChoice
"""Of a plan only the shards, the layer map and the sizes of its layouts are needed."""


def disk_use(
    plan: PlanSizes, disk_budget: DiskBudget, shard_transfer: ShardTransfer = ShardTransfer.FILE, at_once: int = 1
) -> DiskUse:
    """Return the peak over the steps of a split; with several shards at a time an upper bound over all orders.

    Args:
        plan: the split, or just its sizes.
        disk_budget: the state of the disk that it starts from.
        shard_transfer: the way that fetched shards arrive.
        at_once: concurrent shards.
    """
    if at_once > 1:
        return _disk_use_at_once(plan, disk_budget, shard_transfer, at_once)
    used, written = disk_budget.used, disk_budget.small_files
    freed_so_far = created = added = 0
    seen: set[str] = set()
    processed: set[str] = set()
    waiting = [shard for shard in plan.shards if shard.name not in used]
    following = dict(zip((shard.name for shard in waiting), [*waiting[1:], None], strict=False))
    for shard in plan.shards:
        written += _bytes_from(plan, shard, seen)
        peak, written = _join_peak(plan, shard, processed, written)
        processed.add(shard.name)
        if shard.name in used:
            continue
        staged = _staged_bytes(shard, following[shard.name], shard_transfer)
        created = max(created, peak + staged)
        added = max(added, peak + staged - freed_so_far - disk_budget.in_use)
        if not shard.staged:
            freed_so_far += disk_budget.freed.get(shard.name, 0)
    return DiskUse(max(created, written), added)


def _join_peak(plan: PlanSizes, shard: PlannedShard, processed: set[str], written: int) -> tuple[int, int]:
    """Return the peak of written bytes while the layers that this shard completes are finished, and those after it.

    Layers that waited only for scales are finished together, those with pieces one after the other.
    """
    completed = [plan.layouts[layer] for layer in plan.layer_map.completed_by(shard.name, processed)]
    at_once = [layout for layout in completed if layout.scratch_bytes and not layout.joins]
    one_by_one = [[layout] for layout in completed if layout.joins]
    peak = written
    for layouts in (at_once, *one_by_one):
        written += sum(layout.joined_bytes for layout in layouts)
        peak = max(peak, written)
        written -= sum(layout.scratch_bytes + scratch_slack(layout) for layout in layouts)
    return peak, written


def scratch_slack(layout: FileSizes) -> int:
    """Return bytes for begun blocks: at the ends of pieces in the scratch file and around gaps in the layer file."""
    return 3 * BLOCK_BYTES * (len(layout.joins) + 1) if layout.scratch_bytes else 0


def _staged_bytes(shard: PlannedShard, following: PlannedShard | None, shard_transfer: ShardTransfer) -> int:
    """Return the bytes of fetched shards that lie on the disk while `shard` is used."""
    staged = [shard, following][: shard_transfer.files]
    return sum(on_disk(fetched.size) for fetched in staged if fetched is not None and fetched.staged)


def on_disk(nbytes: int) -> int:
    """Return the bytes that a file of this length occupies, in whole blocks."""
    return round_up(nbytes, BLOCK_BYTES)


def in_hub_cache(sizes: Collection[int], listed: int) -> int:
    """Return the bytes that a hub cache needs for files: whole blocks, one block for each link, and its listing.

    Args:
        sizes: sizes of the files; 0 is returned for none.
        listed: number of files in the repository's listing.
    """
    return (
        sum(map(on_disk, sizes)) + BLOCK_BYTES * len(sizes) + on_disk(CACHE_RECORD_BYTES * (1 + listed)) if sizes else 0
    )


def own_records_bytes(plan: SplitPlan) -> int:
    """Return an upper bound of the bytes of journal and manifest, from the names and checksums that they list."""
    names = sum(len(tensor.name) for shard in plan.shards for tensor in shard.tensors)
    tensors = sum(len(shard.tensors) for shard in plan.shards)
    times = RECORDED_NAMES if plan.chosen is None else RECORDED_NAMES + CHOSEN_NAMES
    blocks = sum(tensor.nbytes for shard in plan.shards for tensor in shard.tensors) // checksums.BLOCK_BYTES
    listed = times * names + RECORD_BYTES * tensors + BLOCK_RECORD_BYTES * blocks
    return on_disk(listed + SHARD_RECORD_BYTES * (len(plan.shards) + 1))


def _bytes_from(plan: PlanSizes, shard: PlannedShard, seen: set[str]) -> int:
    """Return the growth of layer files by a shard; a file's header and last block count at its first tensor."""
    total = 0
    for layer in plan.layer_map.shard_to_layers.get(shard.name, ()):
        layout = plan.layouts[layer]
        if layer not in seen:
            seen.add(layer)
            total += layout.header_bytes + BLOCK_BYTES + scratch_slack(layout)
        total += layout.shard_bytes[shard.name]
    return total


def _disk_use_at_once(plan: PlanSizes, disk_budget: DiskBudget, shard_transfer: ShardTransfer, at_once: int) -> DiskUse:
    """Return the peak over all orders in which shards can be begun and finished, `at_once` at a time.

    At any moment some shards are done: their bytes are written and, if the source is deleted, they are gone. Up to
    `at_once` others have given all their bytes and still exist. For a shard that gives w bytes and frees f, being done
    adds w - f and being in work adds w. So the increase is at most the sum of w - f over all shards where it is
    positive, plus the `at_once` largest of min(w, f), which is still to be freed.
    """
    used = disk_budget.used
    overhead = disk_budget.small_files + sum(
        layout.header_bytes + BLOCK_BYTES + layout.joined_bytes + scratch_slack(layout)
        for layout in plan.layouts.values()
    )
    waiting = [shard for shard in plan.shards if shard.name not in used]
    layers = plan.layer_map.shard_to_layers
    shard_bytes = {  # with one begun block for each layer
        shard.name: sum(
            plan.layouts[layer].shard_bytes[shard.name] + BLOCK_BYTES for layer in layers.get(shard.name, ())
        )
        for shard in plan.shards
    }
    freed = {shard.name: 0 if shard.staged else disk_budget.freed.get(shard.name, 0) for shard in waiting}
    staged = _largest((on_disk(s.size) for s in waiting if s.staged), at_once if shard_transfer.files else 0)
    net_growth = sum(max(0, shard_bytes[name] - freed_bytes) for name, freed_bytes in freed.items())
    in_progress = _largest((min(shard_bytes[name], freed_bytes) for name, freed_bytes in freed.items()), at_once)
    used_bytes = sum(shard_bytes[name] for name in used if name in shard_bytes)
    return DiskUse(
        overhead + sum(shard_bytes.values()) + staged,
        max(0, overhead + used_bytes + net_growth + in_progress + staged - disk_budget.in_use),
    )


def _largest(sizes: Iterable[int], count: int) -> int:
    return sum(sorted(sizes, reverse=True)[:count])


@dataclass(frozen=True, slots=True)
class Shortage:
    """A lack of disk for a split.

    Attributes:
        need: bytes that `max_disk`, or the free disk, must have at least.
        have: bytes that it has; of the free disk also those of the reserve.
        where: which of the two, as text.
        limited: True for `max_disk`, which bounds everything that the split creates; False for the free disk, to which
            deleted shards add.
        reserve: bytes of the free disk that must stay free (`min_free`).
        besides: the lack of free disk, where `max_disk` is too small too.
        command: the command that splits so.
    """

    need: int
    have: int
    where: str
    limited: bool = False
    reserve: int = 0
    besides: Shortage | None = None
    command: str = "pull"

    @property
    def missing(self) -> int:
        """Bytes by which the limit must rise, or that must be freed."""
        return self.need - self.have + self.reserve

    @property
    def advice(self) -> str:
        """What makes it fit, as the beginning of a sentence."""
        if not self.limited:
            besides = f" and free {size_rounded_up(self.need - self.have)}" if self.need > self.have else ""
            option = f"min_free_disk (rabbitllm {self.command} --min-free-disk)"
            lower = f", or lower {option}{besides}" if self.reserve else ""
            return f"Free {size_rounded_up(self.missing)} there{lower}"
        freed = self.besides and size_rounded_up(self.besides.missing)
        return f"Set max_disk to {self.need}" + (f" and free {freed} of the disk" if freed else "")

    @property
    def needed(self) -> str:
        """The need as text, rounded up: a limit with this value is large enough."""
        return f"{size_rounded_up(self.need)} ({self.need:,} bytes) of {'max_disk' if self.limited else 'free disk'}"

    @property
    def found(self) -> str:
        """What there is, as a sentence without its end."""
        return f"{size(self.have)} is {self.where}"

    def record(self) -> dict[str, int | str]:
        """For `json.dumps`."""
        return {"need_bytes": self.need, "have_bytes": self.have, "where": self.where}


def candidates(plan: SplitPlan, transfer: str) -> tuple[ShardTransfer, ...]:
    """Return the transfers of shards that the caller and the shards allow, the best first.

    Args:
        plan: the split; if it fetches nothing there is only one transfer.
        transfer: "auto", "file" or "stream".

    Raises:
        OptionError: "stream" where shards cannot be streamed.
    """
    if not any(shard.staged for shard in plan.shards):
        return (ShardTransfer.FILE,)
    files = (ShardTransfer.FILE_AHEAD, ShardTransfer.FILE)
    if not plan.unstreamable:
        return {"file": files, "stream": (ShardTransfer.STREAM,), "auto": (*files, ShardTransfer.STREAM)}[transfer]
    if transfer == "stream":
        raise OptionError(
            f"shard_transfer='stream' is not possible for {plan.source.name}: {plan.unstreamable[0]} is a torch.save "
            "file whose tensors share storage or are strided, so it must be a complete file.",
            "Remove shard_transfer (or use 'file'): one shard at a time is then on the disk. Or use a revision of this "
            "model with safetensors weights.",
        )
    return files


def choose_shard_transfer(
    plan: SplitPlan, disk_budget: DiskBudget, options: SplitOptions, at_once: int | None = None
) -> tuple[ShardTransfer, int]:
    """Return the best transfer of shards that fits, and the number of concurrent shards.

    Args:
        plan: the split.
        disk_budget: the state of the disk that it starts from.
        options: its limits.
        at_once: maximum of concurrent shards of workers; None for this process, which takes one at a time.

    Raises:
        NotEnoughSpaceException: none fits; the message names the need, the free space, and options that would fit.
        OptionError: see `candidates`.
    """
    transfers = candidates(plan, options.shard_transfer)
    if at_once is not None:  # each shard is fetched by the worker that fills from it, so none is fetched ahead
        transfers = tuple(transfer for transfer in transfers if transfer is not ShardTransfer.FILE_AHEAD)
        at_once = min(at_once, sum(shard.name not in disk_budget.used for shard in plan.shards))
    for count in range(max(at_once or 1, 1), 0, -1):
        for transfer in transfers:
            if shortage(plan, disk_budget, options, transfer, count) is None:
                return transfer, count
    short = shortage(plan, disk_budget, options, transfers[-1])
    assert short is not None
    raise NotEnoughSpaceException(
        f"Splitting {plan.source.title} into {disk_budget.folder} needs {short.needed} at its peak; {short.found}.",
        _suggest_remedy(plan, disk_budget, options, short),
    )


def shortage(
    plan: PlanSizes, disk_budget: DiskBudget, options: SplitOptions, shard_transfer: ShardTransfer, at_once: int = 1
) -> Shortage | None:
    """Return the lack of disk for a split with `at_once` shards at a time that arrive this way; None if it fits."""
    use = disk_use(plan, disk_budget, shard_transfer, at_once)
    created = disk_budget.created(use)
    short = _lack_of_free_disk(use, disk_budget, options)
    if options.max_disk is not None and created > options.max_disk:
        allowed = f"allowed by max_disk={options.max_disk:,}"
        return Shortage(created, options.max_disk, allowed, limited=True, besides=short)
    return short


def _lack_of_free_disk(use: DiskUse, disk_budget: DiskBudget, options: SplitOptions) -> Shortage | None:
    for folder, need in _by_disk([(disk_budget.folder, use.added), *disk_budget.downloads]):
        free = shutil.disk_usage(folder).free
        free += disk_budget.lock_bytes if folder == existing(disk_budget.folder) else 0
        if need and need + options.min_free > free:
            reserve = f", of which {size(options.min_free)} must stay free (min_free_disk)" if options.min_free else ""
            where = f"free on the disk of {folder}{reserve}"
            command = "convert" if options.gguf_dtype else "pull"
            return Shortage(need, free, where, reserve=options.min_free, command=command)
    return None


def _by_disk(needs: Iterable[tuple[Path, int]]) -> Sequence[tuple[Path, int]]:
    """Sum the bytes wanted in several folders over those that lie on one disk."""
    sums: dict[int, tuple[Path, int]] = {}
    for folder, need in needs:
        location = existing(folder)
        first, before = sums.get(location.stat().st_dev, (location, 0))
        sums[location.stat().st_dev] = (first, before + need)
    return list(sums.values())


def _suggest_remedy(plan: SplitPlan, disk_budget: DiskBudget, options: SplitOptions, short: Shortage) -> str:
    """Return the options that would make it fit, or how much is missing."""
    transfer = candidates(plan, "auto")[-1]
    if (
        options.shard_transfer == "file"
        and transfer is ShardTransfer.STREAM
        and shortage(plan, disk_budget, options, transfer) is None
    ):
        return "shard_transfer='stream' (or 'auto') would fit: it writes no shard to the disk."
    if not options.shards.takes_one_at_a_time and any(need for _, need in disk_budget.downloads):
        option = "sequential (--sequential)" if options.gguf_dtype else "sequential_shard_processing=True"
        return f"Use {option}: it downloads one shard at a time instead of all."
    if options.gguf_dtype:
        return f"{short.advice}, or write to another disk (--output)."
    if disk_budget.in_use:  # begun, perhaps with shards that are gone by now
        return f"{short.advice}. The split is then resumed."
    begin = COMPRESSIONS.index(plan.compression) if plan.compression in COMPRESSIONS else 0
    smaller = COMPRESSIONS[begin + 1 :] if plan.compression != AUTO else ()
    for compression in smaller:
        if shortage(recompressed(plan, compression), disk_budget, options, transfer) is None:
            return f"compression='{compression}' would fit."
    elsewhere = "use a folder on another disk (--dir, layer_shards_saving_path)"
    return f"{short.advice}, or {elsewhere}. No compression would fit now."
