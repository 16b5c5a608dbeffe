"""The loop over shards: moves each one's bytes to their offsets in the layer files, once, and then releases the shard.

The order of steps for one shard makes a crash harmless:

1. Its bytes are written into unfinished layer files (`.part`), at offsets fixed by the plan; or into a scratch file
   of the layer, if they are a piece of a tensor that has to wait for its other pieces.
2. In layers that now have all their tensors, scales that are quantized themselves are quantized from the scratch file.
   Every file that the shard changed is fsynced, and these layers get their final name. Where tensors lie in pieces,
   these are joined first, one layer after the other. The scratch file is removed when the name is durable; the journal
   has the checksums of such a layer before, since it cannot be written again then.
3. The folder is fsynced, then the journal records that the shard is used up, and is fsynced.
4. Only then is the shard released; the last one of the source once the finished files are accepted (`keep_last`).

The bytes of a shard that is fetched take the same steps as they arrive, through a file or without one; its digest is
compared with the hub's between 1 and 2. Step 1 is in `filler.py`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rabbitllm.base.progress import BytesDone, LayerDone, ShardDone, ShardStarted, SplitStarted, tell
from rabbitllm.checkpoints.checkpoint import Disposal, Release
from rabbitllm.errors import CorruptShardError
from rabbitllm.splitter import journal
from rabbitllm.splitter.disk_sampler import disk_bytes
from rabbitllm.splitter.filler import Filler, IncomingShard, ShardExecutor, ShardFetcher, SplitWork
from rabbitllm.splitter.mover import FillTarget, Mover, open_targets
from rabbitllm.splitter.plan import PlannedShard, moves_of
from rabbitllm.splitter.source_check import release_if_same, require_unmodified, source_crc32
from rabbitllm.splitter.sums import PartSums, ShardChecksums, TensorSums
from rabbitllm.storage import durable
from rabbitllm.store.layer_file import DONE_SUFFIX, SCRATCH_SUFFIX, LayerLayout
from rabbitllm.store.stored_form import constants
from rabbitllm.telemetry.passes import SHARD_WAIT
from rabbitllm.telemetry.profiler import Profiler

logger = logging.getLogger(__name__)


class Completion:
    """Completes filled layer files of a split, and gives them their final names.

    A layer file is complete when every tensor is at its offset: unchanged ones, scales that waited in the scratch file
    to be quantized themselves, and tensors that arrived in pieces. It is synced before it is renamed, and its scratch
    file is removed when the name is durable. The journal and the release of shards are handled elsewhere.

    Args:
        work: the split.
        mover: the threads.
        filler: names files, and opens unfinished ones.
        profiler: records how long layers have waited for their shards.
        record: makes the checksums of layers durable that are going to lose their scratch files.
    """

    def __init__(
        self, work: SplitWork, mover: Mover, filler: Filler, profiler: Profiler, record: Callable[[TensorSums], None]
    ) -> None:
        self._folder = work.folder
        self._plan = work.plan
        self._mover = mover
        self._filler = filler
        self._profiler = profiler
        self._record = record
        self._first_seen: dict[str, float] = {}

    def is_final(self, layout: LayerLayout) -> bool:
        """Whether a layer has its final name."""
        return self._filler.path(layout).exists() and not self._filler.path(layout, durable.PART_SUFFIX).exists()

    def begun(self, layers: Iterable[str]) -> None:
        """Record that data for these layers is about to arrive."""
        for layer in layers:
            self._first_seen.setdefault(layer, time.perf_counter())

    def complete(
        self, completed: Iterable[str], targets: dict[str, FillTarget], stored: TensorSums
    ) -> dict[str, tuple[PartSums, ...]]:
        """Sync and close the files that a shard was moved into, and rename those of layers that are complete with it.

        Args:
            completed: layers that are complete with it; those without an open file were finished earlier.
            targets: the open files; those that are closed are taken out.
            stored: tensor of the shard -> checksums of its stored parts.

        Returns:
            `stored` with the sums of tensors that were joined or whose scales were quantized.
        """
        completed = [layer for layer in completed if layer in targets]
        in_pieces = [layer for layer in completed if targets[layer].layout.joins]
        whole = [layer for layer in completed if layer not in in_pieces]
        self._settle(targets[layer] for layer in whole)
        for layer in whole:
            self._write_fixed(targets[layer])
        # scratch files of complete layers need no sync: after a crash this shard would be used again
        self._mover.sync(replace(t, scratch=None) if layer in whole else t for layer, t in targets.items())
        for layer in [*targets]:
            if layer not in in_pieces:
                targets.pop(layer).close()
        layouts = [self._plan.layouts[layer] for layer in whole]
        sums = {**stored, **self._mover.sums.take(form for layout in layouts for form in layout.settles)}
        self._replace_scratch(layouts, sums)
        for layer in in_pieces:
            layout = self._plan.layouts[layer]
            self._join(targets[layer])
            targets.pop(layer).close()
            sums |= self._mover.sums.take((*layout.joins, *layout.settles))
            self._replace_scratch([layout], sums)
        return sums

    def _replace_scratch(self, layouts: list[LayerLayout], sums: TensorSums) -> None:
        """Name synced layer files, and remove their scratch files; the checksums of those with one are recorded."""
        forms = [form for layout in layouts if layout.scratch_bytes for form in layout.all_forms]
        if forms:
            self._record({form.source.name: sums[form.source.name] for form in forms if form.source.name in sums})
        self._name_layers(layouts)
        self._drop_scratch(layouts)

    def finish_leftovers(self) -> None:
        """Finish layers that have all their tensors but lack their final name or their marker.

        That happens if a crash interrupts the renaming.
        """
        for layer, layout in self._plan.layouts.items():
            if not self.is_final(layout):
                logger.warning("Layer %s of an earlier run was unfinished; it is finished now.", layer)
                self._finish_layer(layout)
            self._drop_scratch([layout])
        markers = [self._filler.path(layout, DONE_SUFFIX) for layout in self._plan.layouts.values()]
        unmarked = [marker for marker in markers if not marker.exists()]
        for marker in unmarked:
            durable.touch(marker)
        if unmarked:
            durable.sync_folder(self._folder)

    def _write_fixed(self, target: FillTarget) -> None:
        """Write the parts of a layer file that come from no shard: its header, and constants of tensors in pieces."""
        target.file.write_at(memoryview(target.layout.header), 0)
        for form in target.layout.fixed:
            for part, content in constants(form).items():
                target.write(part, 0, memoryview(content))

    def _join(self, target: FillTarget) -> None:
        """Move the pieces from a synced scratch file to their offsets in the layer file, and complete and sync that."""
        layout = target.layout
        work = moves_of((layout.layer.id, form) for form in layout.joins)
        self._mover.from_file(
            self._filler.path(layout, SCRATCH_SUFFIX), {layout.layer.id: target}, work, lambda end: None
        )
        self._settle([target])
        self._write_fixed(target)
        self._mover.sync([target])

    def _settle(self, targets: Iterable[FillTarget]) -> None:
        self._mover.settle((target, self._filler.path(target.layout, SCRATCH_SUFFIX)) for target in targets)

    def _drop_scratch(self, layouts: Iterable[LayerLayout]) -> None:
        """Remove scratch files of layers that have their final names, durably; an earlier run may have left some."""
        paths = [self._filler.path(layout, SCRATCH_SUFFIX) for layout in layouts if layout.scratch_bytes]
        existing = [path for path in paths if path.exists()]
        for path in existing:
            durable.remove(path)
        if existing:
            durable.sync_folder(self._folder)

    def _finish_layer(self, layout: LayerLayout) -> None:
        part = self._filler.path(layout, durable.PART_SUFFIX)
        if part.exists():
            # removed once the layer file has all of it; scales alone are there before the last shard counts as used up
            joined = not (layout.joins and self._filler.path(layout, SCRATCH_SUFFIX).exists())
            target = (
                FillTarget(layout, durable.GrowingFile(part, layout.size)) if joined else self._filler.target(layout)
            )
            with contextlib.closing(target):
                if not joined:
                    self._join(target)
                    # the journal takes no more entries; the file is summed as a whole
                    self._mover.sums.forget((*layout.joins, *layout.settles))
                else:
                    self._write_fixed(target)
                    target.sync()
        self._name_layers([layout])

    def _name_layers(self, layouts: list[LayerLayout]) -> None:
        """Give synced layer files their final names and their markers, and make all names durable."""
        for layout in layouts:
            durable.rename(self._filler.path(layout, durable.PART_SUFFIX), self._filler.path(layout))
            durable.touch(self._filler.path(layout, DONE_SUFFIX))
        durable.sync_folder(self._folder)
        for layout in layouts:
            spans = len(self._plan.layer_map.layer_to_shards[layout.layer.id]) > 1
            if spans and (since := self._first_seen.get(layout.layer.id)) is not None:
                self._profiler.add(layout.layer.id, SHARD_WAIT, time.perf_counter() - since)
            logger.debug("Layer %s is finished: %s.", layout.layer.id, layout.file_name)
            tell(LayerDone(layout.layer.id, layout.file_name, layout.size))


class ShardLoop:
    """The loop, with its threads and open files.

    Args:
        work: the split.
        profiler: records every stage.
        watch: called often, from any thread; may raise to stop.
        executor: fills layer files in other processes; None for this process.
        keep_last: do not delete the last shard of the source before `release_last`.
    """

    def __init__(
        self,
        work: SplitWork,
        profiler: Profiler,
        watch: Callable[[], None],
        executor: ShardExecutor | None = None,
        *,
        keep_last: bool = False,
    ) -> None:
        self.work = work
        self.plan = work.plan
        self.used = set(work.used)
        self.checksums = dict(work.checksums)
        self.source_checksums = dict(work.source_checksums)
        self._deletes = work.options.shards.deletes_used and work.checkpoint.deletable
        self._is_read_only = False
        self._journal = journal.SplitJournal(work.folder)
        self._mover = Mover(work.options.threads, profiler, watch, fitted=work.fitted)
        self._filler = Filler(work, self._mover, profiler)
        self._completion = Completion(work, self._mover, self._filler, profiler, self._journal.mark_complete)
        self._fetcher = ShardFetcher(work.checkpoint, work.shard_transfer.files, watch)
        self._watch = watch
        self._executor = executor
        local_shards = [shard for shard in work.plan.shards if not shard.staged] if keep_last and self._deletes else []
        self._kept = local_shards[-1] if local_shards else None

    def take_shards(self) -> None:
        """Use up every shard that no earlier run has used up, and finish the layers that a crash has left."""
        for shard in self.plan.shards:
            if shard.name in self.used and shard is not self._kept:
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
        else:
            for shard, arriving in self._fetcher.shards(waiting):
                self._tell_started(shard)
                self._use_up(shard, arriving)
                self._dispose(shard)
        self._completion.finish_leftovers()

    def _take_from(self, executor: ShardExecutor, waiting: Sequence[PlannedShard]) -> None:
        """Use up the shards that the executor fills, in the order in which it finishes them."""
        layers = {shard.name: self._unfinished(shard) for shard in waiting}
        parts = [(shard, self.work.of_shard(shard.name, layers[shard.name])) for shard in waiting]
        with contextlib.closing(executor.filled(parts, self._tell_started, self._watch)) as filled:
            for shard, checksums in filled:
                self._take_over(shard, layers[shard.name], checksums)
                forms = self._filler.forms_of(shard, layers[shard.name])
                tell(
                    BytesDone(
                        shard.name,
                        sum(form.source.stored_bytes for form in forms),
                        layers[shard.name][-1] if layers[shard.name] else "",
                        sum(form.source.stored_bytes for form in forms if form.scheme is not None),
                        sum(part.nbytes for form in forms for part in form.parts),
                    )
                )
                self._dispose(shard)

    def _tell_started(self, shard: PlannedShard) -> None:
        tell(ShardStarted(shard.name, self.plan.shards.index(shard) + 1, len(self.plan.shards)))

    def release_last(self) -> None:
        """Release the shard that was kept; the layer files are complete and accepted."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            self._dispose(kept)

    def _dispose(self, shard: PlannedShard) -> None:
        """Release a shard that is used up by the journal, unless it is the last one and kept."""
        if shard is self._kept:
            return
        position = self.plan.shards.index(shard) + 1
        release = self._release(shard)
        disk = disk_bytes(self.work.folder)
        logger.info("Shard %d of %d, %s: %s.", position, len(self.plan.shards), shard.name, release.disposal.value)
        tell(ShardDone(shard.name, position, len(self.plan.shards), release.disposal.value, disk, self._source_left()))

    def close(self) -> None:
        """Stop the threads and close the journal; durable data is kept."""
        self._fetcher.close()
        self._mover.close()
        self._journal.close()

    def _unfinished(self, shard: PlannedShard) -> list[str]:
        """Return the layers of a shard, without those that an earlier run has finished."""
        touched = self.plan.layer_map.shard_to_layers.get(shard.name, ())
        return [layer for layer in touched if not self._completion.is_final(self.plan.layouts[layer])]

    def _use_up(self, shard: PlannedShard, arriving: IncomingShard) -> None:
        layers = self._unfinished(shard)
        self._completion.begun(layers)
        with open_targets() as targets:
            self._filler.fill(shard, arriving, targets, layers)
            checksums = self._mover.sums.take_with_sources(self._filler.forms_of(shard, layers))
            self._complete(shard, checksums, targets)

    def _take_over(self, shard: PlannedShard, layers: Sequence[str], checksums: ShardChecksums) -> None:
        """Do the same as `_use_up` for a shard that workers have moved into layer files and synced."""
        self._filler.require_filled(shard, layers)
        with open_targets() as targets:
            self._complete(shard, checksums, targets, layers)

    def _complete(
        self, shard: PlannedShard, checksums: ShardChecksums, targets: dict[str, FillTarget], closed: Sequence[str] = ()
    ) -> None:
        """Complete layers with a shard whose bytes are written, and journal it; `closed` are its other layers."""
        source_crc = self._source_checksum(shard, checksums)  # before a layer with data of it gets its name
        completed = self.plan.layer_map.completed_by(shard.name, self.used)
        self._filler.open(targets, [layer for layer in completed if layer in closed])
        sums = self._completion.complete(completed, targets, checksums.stored)
        self._journal.mark_used(shard.name, sums, source_crc)
        self.checksums |= sums
        if source_crc is not None:
            self.source_checksums[shard.name] = source_crc
        self.used.add(shard.name)

    def _source_checksum(self, shard: PlannedShard, checksums: ShardChecksums) -> int | None:
        """Return the checksum of the data used of a shard (`source_crc32`); None if the shard has a digest.

        Tensors of layers that an earlier run finished are read for it.

        Raises:
            CorruptShardError: the shard was modified since the plan was made or checked.
        """
        if shard.staged:
            return None
        path = self.work.checkpoint.acquire(shard.name)
        crc = source_crc32(path, shard.tensors, checksums.sources) if shard.needs_checksum else None
        require_unmodified(path, shard, self.work.checkpoint)
        if self.source_checksums.get(shard.name, shard.expected_crc32) not in (None, crc):
            raise CorruptShardError(
                f"{path} differs from its checksum, which was recorded when the split was started or made.",
                "Restore the original file, and make the same call again. The data just read is not used.",
            )
        return crc

    def _release(self, shard: PlannedShard) -> Release:
        if shard.staged:
            return self.work.checkpoint.release(shard.name, only_staged=True)
        if not self.work.options.shards.deletes_used:
            return Release(shard.name, Disposal.KEPT)
        if shard.is_kept(self.plan.source, self.work.options.shards):
            return Release(shard.name, Disposal.LEAVES_OUT)
        release = release_if_same(self.work.checkpoint, shard, self.source_checksums.get(shard.name))
        if release.disposal is Disposal.READ_ONLY and not self._is_read_only:  # once, not for each of a hundred shards
            logger.warning(
                "Used shards of %s cannot be deleted: their folder is read-only.", self.work.checkpoint.label
            )
            self._is_read_only = True
        return release

    def _source_left(self) -> int:
        source, policy = self.plan.source, self.work.options.shards
        local_shards = (s for s in self.plan.shards if not s.staged)
        return sum(
            s.size for s in local_shards if not self._deletes or s.name not in self.used or s.is_kept(source, policy)
        )
