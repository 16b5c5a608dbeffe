"""The loop over shards: each one's bytes into their places in the layer files, once, and then the shard is given up.

The order of steps for one shard is what makes a crash harmless:

1. its bytes are written into unfinished layer files (`.part`), at places fixed by the plan; or into a scratch file
   of the layer, if they are a piece of a tensor that has to wait for its other pieces;
2. in layers that now have all their tensors, scales that are quantized themselves are, from the scratch file that they
   have waited in; every file it touched is fsynced, and these layers get their final name; where some tensors lie in
   pieces, these are joined first, one layer after the other; the scratch file goes when the name is durable;
3. the folder is fsynced, then the journal says that the shard is used up, and is fsynced;
4. only then is the shard released; the last one of the source when the finished files are accepted (`holds_last`).

The bytes of a shard that is fetched go the same way as they come, through a file or past it; its digest is compared
with the hub's between 1 and 2. Step 1 is `filler.py`'s, step 2 `completion.py`'s.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from rabbitllm.base.progress import BytesDone, ShardDone, ShardStarted, SplitStarted, tell
from rabbitllm.checkpoints.checkpoint import Disposal, Release
from rabbitllm.errors import CorruptShardError
from rabbitllm.splitter import journal
from rabbitllm.splitter.completion import Completion
from rabbitllm.splitter.disk_sampler import disk_bytes
from rabbitllm.splitter.filler import Filler
from rabbitllm.splitter.mover import FillTarget, Mover
from rabbitllm.splitter.plan import PlannedShard
from rabbitllm.splitter.shard_executor import ShardExecutor
from rabbitllm.splitter.shard_fetcher import IncomingShard, ShardFetcher
from rabbitllm.splitter.source_check import require_unmodified, source_crc32
from rabbitllm.splitter.sums import ShardChecksums, TensorSums
from rabbitllm.splitter.work import ROOM, SplitWork
from rabbitllm.telemetry.profiler import Profiler

logger = logging.getLogger(__name__)


class ShardLoop:
    """The loop, with its threads and open files.

    Args:
        work: what to do.
        profiler: told of every stage.
        watch: called often, from any thread; may raise to stop.
        executor: who fills layer files elsewhere; None for this process.
        holds_last: do not delete the last shard of the source before `give_up_last`.
    """

    def __init__(
        self,
        work: SplitWork,
        profiler: Profiler,
        watch: Callable[[], None],
        executor: ShardExecutor | None = None,
        *,
        holds_last: bool = False,
    ) -> None:
        self.work = work
        self.plan = work.plan
        self.used = set(work.used)
        self.checksums = dict(work.checksums)
        self.source_checksums = dict(work.source_checksums)
        self._deletes = work.options.sequential and work.checkpoint.deletable
        self._journal = journal.SplitJournal(work.folder)
        self._mover = Mover(work.options.threads, work.quantize_on, profiler, watch, fitted=work.fitted)
        self._filler = Filler(work, self._mover, profiler)
        self._completion = Completion(work, self._mover, self._filler, profiler)
        self._fetcher = ShardFetcher(work.checkpoint, ROOM[work.shard_transfer], watch)
        self._watch = watch
        self._executor = executor
        own = [shard for shard in work.plan.shards if not shard.staged] if holds_last and self._deletes else []
        self._held = own[-1] if own else None

    def take_shards(self) -> None:
        """Use up every shard that no earlier run has."""
        for shard in self.plan.shards:
            if shard.name in self.used and shard is not self._held:
                self._release(shard)  # a crash may have come between the journal and the release
        waiting = [shard for shard in self.plan.shards if shard.name not in self.used]
        names = tuple(shard.name for shard in waiting)
        tell(
            SplitStarted(
                self.work.checkpoint.label,
                names,
                self.plan.source_bytes,
                self.plan.output_bytes,
                self.work.use.added,
                len(self.used),
                tuple(shard.size for shard in waiting),
                len(self.plan.layouts),
                self._source_left(),
                any(shard.staged for shard in waiting),
                self.plan.compression is not None,
                sum(self._completion.is_final(layout) for layout in self.plan.layouts.values()),
            )
        )
        if self._executor is not None:
            self._take_from(self._executor, waiting)
            return
        for shard, arriving in self._fetcher.shards(waiting):
            self._tell_started(shard)
            self._use_up(shard, arriving)
            self._give_up(shard)

    def _take_from(self, executor: ShardExecutor, waiting: Sequence[PlannedShard]) -> None:
        """Take the shards up in the order in which other hands are through with them."""
        layers = {shard.name: self._unfinished(shard) for shard in waiting}
        parts = [(shard, self.work.of_shard(shard.name, layers[shard.name])) for shard in waiting]
        with contextlib.closing(executor.filled(parts, self._tell_started, self._watch)) as through:
            for shard, found in through:
                self._take_over(shard, layers[shard.name], found)
                forms = self._filler.forms_of(shard, layers[shard.name])
                tell(
                    BytesDone(
                        shard.name,
                        sum(form.source.nbytes for form in forms),
                        layers[shard.name][-1] if layers[shard.name] else "",
                        sum(form.source.nbytes for form in forms if form.scheme is not None),
                        sum(part.nbytes for form in forms for part in form.parts),
                    )
                )
                self._give_up(shard)

    def _tell_started(self, shard: PlannedShard) -> None:
        tell(ShardStarted(shard.name, self.plan.shards.index(shard) + 1, len(self.plan.shards)))

    def give_up_last(self) -> None:
        """Release the shard that was held; the layer files are whole and accepted."""
        if self._held is not None:
            held, self._held = self._held, None
            self._give_up(held)

    def _give_up(self, shard: PlannedShard) -> None:
        """Release a shard that the journal says is used up, unless it is held."""
        if shard is self._held:
            return
        number = self.plan.shards.index(shard) + 1
        release = self._release(shard)
        disk = disk_bytes(self.work.folder)
        logger.info("Shard %d of %d, %s: %s.", number, len(self.plan.shards), shard.name, release.disposal.value)
        tell(ShardDone(shard.name, number, len(self.plan.shards), release.disposal.value, disk, self._source_left()))

    def finish_leftovers(self) -> None:
        """Finish layers whose tensors are all there and which still lack their final name or their marker."""
        self._completion.finish_leftovers()

    def close(self) -> None:
        """Stop the threads and close the journal; what is durable stays."""
        self._fetcher.close()
        self._mover.close()
        self._journal.close()

    def _unfinished(self, shard: PlannedShard) -> list[str]:
        """The layers that a shard has something for, less those that an earlier run has finished."""
        touched = self.plan.layer_map.shard_to_layers.get(shard.name, ())
        return [layer for layer in touched if not self._completion.is_final(self.plan.layouts[layer])]

    def _use_up(self, shard: PlannedShard, arriving: IncomingShard) -> None:
        layers = self._unfinished(shard)
        self._completion.begun(layers)
        targets: dict[str, FillTarget] = {}
        try:
            self._filler.fill(shard, arriving, targets, layers)
            found = self._mover.sums.take_with_sources(self._filler.forms_of(shard, layers))
            source_crc = self._source_checksum(shard, found)  # before a layer with data of it gets its name
            completed = self.plan.layer_map.completed_by(shard.name, self.used)
            sums = self._completion.complete(completed, targets, found.stored)
        finally:
            for target in targets.values():
                target.close()
        self._mark_used(shard, sums, source_crc)

    def _take_over(self, shard: PlannedShard, layers: Sequence[str], found: ShardChecksums) -> None:
        """The same of a shard whose bytes other hands have put into layer files and synced."""
        self._filler.require_filled(shard, layers)
        source_crc = self._source_checksum(shard, found)
        completed = self.plan.layer_map.completed_by(shard.name, self.used)
        targets: dict[str, FillTarget] = {}
        try:
            self._filler.open(targets, [layer for layer in completed if layer in layers])
            sums = self._completion.complete(completed, targets, found.stored)
        finally:
            for target in targets.values():
                target.close()
        self._mark_used(shard, sums, source_crc)

    def _source_checksum(self, shard: PlannedShard, found: ShardChecksums) -> int | None:
        """The checksum of the data used of a shard (`source_crc32`); None if the shard has a digest.

        Tensors of layers that an earlier run finished are read for it.

        Raises:
            CorruptShardError: the shard was modified since the plan was made or checked.
        """
        if shard.staged:
            return None
        path = self.work.checkpoint.acquire(shard.name)
        crc = source_crc32(path, shard.tensors, found.sources) if shard.needs_checksum else None
        require_unmodified(path, shard)
        if shard.expected_crc32 not in (None, crc):
            raise CorruptShardError(
                f"{path} differs from the checksum that was recorded for it when the split was begun or made.",
                "Restore the file as it was, and make the same call again. The data that was just read is not used.",
            )
        return crc

    def _mark_used(self, shard: PlannedShard, sums: TensorSums, source_crc: int | None) -> None:
        self._journal.mark_used(shard.name, sums, source_crc)
        self.checksums |= sums
        if source_crc is not None:
            self.source_checksums[shard.name] = source_crc
        self.used.add(shard.name)

    def _release(self, shard: PlannedShard) -> Release:
        if not self.work.options.sequential and not shard.staged:
            return Release(shard.name, Disposal.KEPT)
        release = self.work.checkpoint.release(shard.name)
        if release.disposal is Disposal.READ_ONLY:
            logger.warning("%s is used up but cannot be deleted: its folder is read-only.", shard.name)
        return release

    def _source_left(self) -> int:
        left = (s for s in self.plan.shards if not s.staged)
        return sum(s.size for s in left if not self._deletes or s.name not in self.used)
