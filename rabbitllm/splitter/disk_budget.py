"""Whether a planned split fits, and the best way for its shards to arrive that fits.

The only module of the splitter that reads the free disk. A container's quota does not show in that (Kaggle reports the
host's disk), hence `max_disk`. Writes nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rabbitllm.base.options import SplitOptions
from rabbitllm.base.terminal import size, size_rounded_up
from rabbitllm.errors import NotEnoughSpaceException, OptionError
from rabbitllm.quant.compression import COMPRESSIONS
from rabbitllm.splitter.disk_sampler import existing
from rabbitllm.splitter.disk_use import (
    BLOCK_BYTES,
    NOTHING,
    DiskUse,
    PlanSizes,
    ShardTransfer,
    disk_use,
    on_disk,
    scratch_slack,
)
from rabbitllm.splitter.plan import PlannedShard, SplitPlan, recompressed
from rabbitllm.store.manifest import AUTO

# The peak disk use of a split with several shards in work at a time, in whatever order they are finished. Pure.
#
# With one shard at a time the order is known and `disk_use.disk_use` is exact; here it is an upper bound.


def disk_use_at_once(
    plan: PlanSizes,
    at_once: int,
    *,
    shard_transfer: ShardTransfer,
    freed: Mapping[str, int] = NOTHING,
    small_files: int = 0,
    used: frozenset[str] = frozenset(),
    in_use: int = 0,
) -> DiskUse:
    """Return the peak over all orders in which shards can be begun and finished, `at_once` at a time.

    At any moment some shards are done: their bytes are written and, if the source is deleted, they are gone. Up to
    `at_once` others have given all their bytes and still exist. For a shard that gives w bytes and frees f, being done
    adds w - f and being in work adds w. So the increase is at most the sum of w - f over all shards where it is
    positive, plus the `at_once` largest of min(w, f), which is still to be freed.

    Args:
        plan: the split, or just its sizes.
        at_once: shards in work at a time.
        shard_transfer, freed, small_files, used, in_use: as for `disk_use`.
    """
    if at_once == 1:
        return disk_use(
            plan, shard_transfer=shard_transfer, freed=freed, small_files=small_files, used=used, in_use=in_use
        )
    around = small_files + sum(
        layout.header_bytes + BLOCK_BYTES + layout.joined_bytes + scratch_slack(layout)
        for layout in plan.layouts.values()
    )
    waiting = [shard for shard in plan.shards if shard.name not in used]
    gives = {shard.name: _gives(plan, shard) for shard in plan.shards}
    back = {shard.name: 0 if shard.staged else freed.get(shard.name, 0) for shard in waiting}
    staged = (
        0
        if shard_transfer is ShardTransfer.STREAM
        else _largest((on_disk(s.size) for s in waiting if s.staged), at_once)
    )
    through = sum(max(0, gives[name] - size) for name, size in back.items())
    in_work = _largest((min(gives[name], size) for name, size in back.items()), at_once)
    before = sum(gives[name] for name in used if name in gives)
    return DiskUse(
        around + sum(gives.values()) + staged,
        max(0, around + before + through + in_work + staged - in_use),
    )


def _gives(plan: PlanSizes, shard: PlannedShard) -> int:
    """Return the bytes that a shard adds to layer files and scratch files, with one begun block for each layer."""
    layers = plan.layer_map.shard_to_layers.get(shard.name, ())
    return sum(plan.layouts[layer].shard_bytes[shard.name] + BLOCK_BYTES for layer in layers)


def _largest(sizes: Iterable[int], count: int) -> int:
    return sum(sorted(sizes, reverse=True)[:count])


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
class Shortage:
    """A lack of disk for a split.

    Attributes:
        need: bytes that `max_disk`, or the free disk, must have at least.
        have: bytes that it has.
        where: which of the two, in words.
        limited: True for `max_disk`, which bounds everything that the split creates; False for the free disk, to which
            deleted shards add.
    """

    need: int
    have: int
    where: str
    limited: bool = False

    @property
    def needed(self) -> str:
        """The need in words, rounded up: a limit with this value is large enough."""
        return f"{size_rounded_up(self.need)} ({self.need:,} bytes) of {'max_disk' if self.limited else 'free disk'}"


def candidates(plan: SplitPlan, transfer: str) -> tuple[ShardTransfer, ...]:
    """Return the ways for shards to arrive that the caller and the shards allow, the best first.

    Args:
        plan: the split; if it fetches nothing there is only one way.
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
            f"shard_transfer='stream' is not possible for {plan.source.name}: {plan.unstreamable[0]} is a file of "
            "torch.save with tensors that share bytes, lie at strides or are a part of more, so it can only be used "
            "when all of it is here.",
            "Leave shard_transfer out (or 'file'): one such shard at a time is then on the disk. Or use a revision of "
            "this model with safetensors weights.",
        )
    return files


def choose_shard_transfer(plan: SplitPlan, disk_budget: DiskBudget, options: SplitOptions) -> ShardTransfer:
    """Return the best way for shards to arrive that fits.

    Raises:
        NotEnoughSpaceException: none fits; the message names the need, the free space, and options that would fit.
        OptionError: see `candidates`.
    """
    return choose_way(plan, disk_budget, options, candidates(plan, options.shard_transfer), 1)[0]


def choose_at_once(
    plan: SplitPlan, disk_budget: DiskBudget, options: SplitOptions, at_once: int
) -> tuple[ShardTransfer, int]:
    """Return the way for shards to arrive that allows most of them in work at a time, up to `at_once`, and how many.

    Raises:
        NotEnoughSpaceException, OptionError: as `choose_shard_transfer`; not even one at a time fits.
    """
    waiting = sum(shard.name not in disk_budget.used for shard in plan.shards)
    # each is fetched by the worker that fills from it, so none is fetched ahead
    ways = [way for way in candidates(plan, options.shard_transfer) if way is not ShardTransfer.FILE_AHEAD]
    return choose_way(plan, disk_budget, options, ways, max(1, min(at_once, waiting)))


def choose_way(
    plan: SplitPlan, disk_budget: DiskBudget, options: SplitOptions, ways: Sequence[ShardTransfer], at_once: int
) -> tuple[ShardTransfer, int]:
    """Return the first of the ways that allows the most shards at a time, and how many; raise if not even one fits."""
    for count in range(at_once, 0, -1):
        for way in ways:
            if shortage(plan, disk_budget, options, way, count) is None:
                return way, count
    short = shortage(plan, disk_budget, options, ways[-1])
    assert short is not None
    raise NotEnoughSpaceException(
        f"Splitting {plan.source.name} into {disk_budget.folder} needs {short.needed} at its peak; "
        f"{size(short.have)} is {short.where}.",
        _what_would_fit(plan, disk_budget, options, short),
    )


def use_of(plan: PlanSizes, disk_budget: DiskBudget, shard_transfer: ShardTransfer, at_once: int = 1) -> DiskUse:
    """Return the disk use of the split from this state of the disk."""
    return disk_use_at_once(
        plan,
        at_once,
        shard_transfer=shard_transfer,
        freed=disk_budget.freed,
        small_files=disk_budget.small_files,
        used=disk_budget.used,
        in_use=disk_budget.in_use,
    )


def shortage(
    plan: PlanSizes, disk_budget: DiskBudget, options: SplitOptions, shard_transfer: ShardTransfer, at_once: int = 1
) -> Shortage | None:
    """Return the lack of disk for a split with `at_once` shards at a time that arrive this way; None if it fits."""
    use = use_of(plan, disk_budget, shard_transfer, at_once)
    created = disk_budget.created(use)
    if options.max_disk is not None and created > options.max_disk:
        return Shortage(created, options.max_disk, f"allowed by max_disk={options.max_disk:,}", limited=True)
    for place, need in _by_disk([(disk_budget.folder, use.added), *disk_budget.downloads]):
        free = shutil.disk_usage(place).free + (disk_budget.lock_bytes if place == existing(disk_budget.folder) else 0)
        if need and need + options.min_free > free:
            reserve = f", less {size(options.min_free)} that stay free (min_free_disk)" if options.min_free else ""
            return Shortage(need, max(free - options.min_free, 0), f"free on the disk of {place}{reserve}")
    return None


def _by_disk(wants: Iterable[tuple[Path, int]]) -> Sequence[tuple[Path, int]]:
    """Sum the bytes wanted in several folders over those that lie on one disk."""
    sums: dict[int, tuple[Path, int]] = {}
    for folder, need in wants:
        at = existing(folder)
        place, before = sums.get(at.stat().st_dev, (at, 0))
        sums[at.stat().st_dev] = (place, before + need)
    return list(sums.values())


def _what_would_fit(plan: SplitPlan, disk_budget: DiskBudget, options: SplitOptions, short: Shortage) -> str:
    """Return the options that would make it fit, or how much is missing."""
    way = candidates(plan, "auto")[-1]
    if (
        options.shard_transfer == "file"
        and way is ShardTransfer.STREAM
        and shortage(plan, disk_budget, options, way) is None
    ):
        return "shard_transfer='stream' (or 'auto') would fit: no shard is then on the disk."
    if not (options.sequential or options.keep_own) and any(need for _, need in disk_budget.downloads):
        return "sequential_shard_processing=True takes one shard at a time instead of downloading all of them first."
    smaller = COMPRESSIONS[COMPRESSIONS.index(plan.compression) + 1 :] if plan.compression != AUTO else ()
    for compression in () if disk_budget.used else smaller:
        if shortage(recompressed(plan, compression), disk_budget, options, way) is None:
            return f"compression='{compression}' would fit."
    missing = size_rounded_up(short.need - short.have)
    place = f"allow max_disk={short.need}" if short.limited else f"free {missing} there"
    return (
        f"{place[0].upper()}{place[1:]}, or name another place with layer_shards_saving_path. No other compression "
        "fits as it is."
    )
