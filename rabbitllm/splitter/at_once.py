"""The most disk that a split takes where several shards are in work at a time, whatever order they are finished in.

Pure. With one shard at a time the order is known, and `plan.disk_use` says it exactly; here it is a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
from rabbitllm.splitter.plan import PlannedShard


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
    """The peak over all orders in which so many shards at a time can be begun and finished.

    At any moment some shards are through, with what they gave written and, of a source that is deleted, themselves
    gone; up to `at_once` others have given all they will and are still there. For a shard that gives w bytes and frees
    f, being through adds w - f and being in work adds w. So what is added is at most the sum of all gains, and of the
    `at_once` largest of what is still to be freed, min(w, f).

    Args:
        plan: the split, or as much of it as its sizes are.
        at_once: shards in work at a time.
        arrival, freed, small_files, used, in_use: as for `disk_use`.
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
    """Bytes that layer files and scratch files grow by; blocks that are begun count."""
    layers = plan.layer_map.shard_to_layers.get(shard.name, ())
    return sum(plan.layouts[layer].shard_bytes[shard.name] + BLOCK_BYTES for layer in layers)


def _largest(sizes: Iterable[int], count: int) -> int:
    return sum(sorted(sizes, reverse=True)[:count])
