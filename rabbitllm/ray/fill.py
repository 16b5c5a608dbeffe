"""What a worker does with one shard: puts it into the layer files that are waiting for it, and makes that durable.

Runs in a process of its own, which may be killed at any moment: done again, it writes the same bytes to the same
places. Knows no cluster.
"""

from __future__ import annotations

from rabbitllm.splitter.filler import Filler
from rabbitllm.splitter.lease import Lease, LeaseCheck
from rabbitllm.splitter.mover import FillTarget, Mover
from rabbitllm.splitter.plan import PlannedShard
from rabbitllm.splitter.shard_fetcher import ShardFetcher
from rabbitllm.splitter.sums import ShardChecksums
from rabbitllm.splitter.work import ROOM, SplitWork
from rabbitllm.telemetry.profiler import Profiler


def fill_from(shard: PlannedShard, work: SplitWork, lease: Lease, threads: int) -> ShardChecksums:
    """Fill unfinished layer files from a shard.

    Args:
        shard: which.
        work: the part of a split that is about this shard (`SplitWork.of_shard`).
        lease: asked before every few MB; without it nothing more is written.
        threads: that read, quantize and write.

    Returns:
        The checksums of the shard's tensors. All of its bytes are durable.

    Raises:
        ClusterError: the lease is gone.
        CorruptShardError, HubError, MissingShardError: see `Filler.fill`.
    """
    looks = LeaseCheck(lease)
    looks.check()
    profiler = Profiler(enabled=False)
    layers = list(work.plan.layouts)
    targets: dict[str, FillTarget] = {}
    mover = Mover(threads, work.quantize_on, profiler, looks.check, fitted=work.fitted)
    fetcher = ShardFetcher(work.checkpoint, ROOM[work.shard_transfer], looks.check)
    try:
        filler = Filler(work, mover, profiler)
        for _, arriving in fetcher.shards([shard]):
            filler.fill(shard, arriving, targets, layers)
        mover.sync(targets.values())
        return mover.sums.take_with_sources(filler.forms_of(shard, layers))
    finally:
        fetcher.close()
        mover.close()
        for target in targets.values():
            target.close()
