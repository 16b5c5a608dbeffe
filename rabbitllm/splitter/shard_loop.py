"""The loop over shards: each one's bytes into their places in the layer files, once, and then the shard is given up.

The order of steps for one shard is what makes a crash harmless:

1. its bytes are written into unfinished layer files (`.part`), at places fixed by the plan; or into a scratch file
   beside one, if they are a piece of a tensor that has to wait for its other pieces;
2. in layers that now have all their tensors, scales that are quantised themselves are, from the scratch file that they
   have waited in; every file it touched is fsynced, and these layers get their final name; where some tensors lie in
   pieces, these are joined first, one layer after the other; the scratch file goes when the name is durable;
3. the folder is fsynced, then the journal says that the shard is used up, and is fsynced;
4. only then is the shard released.

The bytes of a shard that is fetched go the same way as they come, through a file or past it; its digest is compared
with the hub's between 1 and 2.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rabbitllm import durable
from rabbitllm.checkpoints.checkpoint import Disposal, Release
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.layers.compression import constants
from rabbitllm.layers.layer_file import DONE_SUFFIX, SCRATCH_SUFFIX, LayerLayout
from rabbitllm.profiler import SHARD_WAIT, Profiler
from rabbitllm.progress import BytesDone, LayerDone, ShardDone, ShardStarted, SplitStarted, tell
from rabbitllm.splitter import journal
from rabbitllm.splitter.arrivals import Arrivals, Arriving
from rabbitllm.splitter.filler import Filler
from rabbitllm.splitter.hands import Hands
from rabbitllm.splitter.mover import Mover, Target
from rabbitllm.splitter.moves import moves_of
from rabbitllm.splitter.plan import PlannedShard
from rabbitllm.splitter.watch import disk_bytes
from rabbitllm.splitter.work import ROOM, Work

logger = logging.getLogger(__name__)


class ShardLoop:
    """The loop, with its threads and open files.

    Args:
        work: what to do.
        profiler: told of every stage.
        watch: called often, from any thread; may raise to stop.
        hands: who fills layer files elsewhere; None for this process.
    """

    def __init__(self, work: Work, profiler: Profiler, watch: Callable[[], None], hands: Hands | None = None) -> None:
        self.work = work
        self.plan = work.plan
        self.profiler = profiler
        self.used = set(work.used)
        self.checksums = dict(work.checksums)
        self._deletes = work.options.sequential and work.checkpoint.deletable
        self._journal = journal.Journal(work.folder)
        self._mover = Mover(work.options.threads, work.quantise_on, profiler, watch, fitted=work.fitted)
        self._filler = Filler(work, self._mover, profiler)
        self._arrivals = Arrivals(work.checkpoint, ROOM[work.arrival], watch)
        self._first_seen: dict[str, float] = {}
        self._watch = watch
        self._hands = hands

    def take_shards(self) -> None:
        """Use up every shard that no earlier run has."""
        for shard in self.plan.shards:
            if shard.name in self.used:  # a crash may have come between the journal and the release
                self._release(shard)
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
                sum(self._is_final(layout) for layout in self.plan.layouts.values()),
            )
        )
        if self._hands is not None:
            self._take_from(self._hands, waiting)
            return
        for shard, arriving in self._arrivals.shards(waiting):
            self._tell_started(shard)
            self._use_up(shard, arriving)
            self._give_up(shard)

    def _take_from(self, hands: Hands, waiting: Sequence[PlannedShard]) -> None:
        """Take the shards up in the order in which other hands are through with them."""
        layers = {shard.name: self._unfinished(shard) for shard in waiting}
        parts = [(shard, self.work.of_shard(shard.name, layers[shard.name])) for shard in waiting]
        with contextlib.closing(hands.filled(parts, self._tell_started, self._watch)) as through:
            for shard, sums in through:
                self._take_over(shard, layers[shard.name], sums)
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

    def _give_up(self, shard: PlannedShard) -> None:
        """Release a shard that the journal says is used up."""
        number = self.plan.shards.index(shard) + 1
        release = self._release(shard)
        disk = disk_bytes(self.work.folder)
        logger.info("Shard %d of %d, %s: %s.", number, len(self.plan.shards), shard.name, release.disposal.value)
        tell(ShardDone(shard.name, number, len(self.plan.shards), release.disposal.value, disk, self._source_left()))

    def flush_leftovers(self) -> None:
        """Finish layers whose tensors are all there and which still lack their final name or their marker.

        That happens when a crash came while they were being named.
        """
        for layer, layout in self.plan.layouts.items():
            if not self._is_final(layout):
                logger.warning("Layer %s was left over by an earlier run and is finished now.", layer)
                self._finish_layer(layout)
            self._drop_scratch([layout])
        markers = [self._path(layout, DONE_SUFFIX) for layout in self.plan.layouts.values()]
        unmarked = [marker for marker in markers if not marker.exists()]
        for marker in unmarked:
            durable.touch(marker)
        if unmarked:
            durable.sync_folder(self.work.folder)

    def close(self) -> None:
        """Stop the threads and close the journal; what is durable stays."""
        self._arrivals.close()
        self._mover.close()
        self._journal.close()

    def _unfinished(self, shard: PlannedShard) -> list[str]:
        """The layers that a shard has something for, less those that an earlier run has finished."""
        touched = self.plan.layer_map.shard_to_layers.get(shard.name, ())
        return [layer for layer in touched if not self._is_final(self.plan.layouts[layer])]

    def _use_up(self, shard: PlannedShard, arriving: Arriving) -> None:
        layers = self._unfinished(shard)
        for layer in layers:
            self._first_seen.setdefault(layer, time.perf_counter())
        targets: dict[str, Target] = {}
        try:
            self._filler.fill(shard, arriving, targets, layers)
            sums = self._complete(shard, targets, lambda: self._mover.sums.take(self._filler.forms_of(shard, layers)))
        finally:
            for target in targets.values():
                target.close()
        self._mark_used(shard, sums)

    def _take_over(self, shard: PlannedShard, layers: Sequence[str], sums: Mapping[str, tuple[int, ...]]) -> None:
        """The same of a shard whose bytes other hands have put into layer files and synced."""
        self._require_filled(shard, layers)
        completed = self.plan.layer_map.completed_by(shard.name, self.used)
        targets: dict[str, Target] = {}
        try:
            self._filler.open(targets, [layer for layer in completed if layer in layers])
            all_sums = self._complete(shard, targets, lambda: dict(sums))
        finally:
            for target in targets.values():
                target.close()
        self._mark_used(shard, all_sums)

    def _require_filled(self, shard: PlannedShard, layers: Iterable[str]) -> None:
        """Make sure that what was filled elsewhere is there; a file made anew would have holes in its place."""
        for layer in layers:
            layout = self.plan.layouts[layer]
            wanted = [(self._path(layout, durable.PART_SUFFIX), layout.size)]
            if layout.scratch_bytes:
                wanted.append((self._path(layout, SCRATCH_SUFFIX), layout.scratch_bytes))
            for path, size in wanted:
                if not path.exists() or path.stat().st_size != size:
                    raise IncompleteSplitError(
                        f"A worker has put {shard.name} into {path}, and here that file is not there or has not "
                        f"{size:,} bytes.",
                        "Use a shared folder that shows every machine the same files at once; then make the same call "
                        "again. Nothing was deleted.",
                    )

    def _complete(
        self, shard: PlannedShard, targets: dict[str, Target], checksums: Callable[[], dict[str, tuple[int, ...]]]
    ) -> dict[str, tuple[int, ...]]:
        """Sync and close what a shard was put into, and give the layers their names that are whole with it.

        Args:
            shard: which.
            targets: the open files; those that are closed are taken out.
            checksums: of what the shard gave; asked when the files are synced.

        Returns:
            Those, and the sums of tensors that were joined.
        """
        completed = [layer for layer in self.plan.layer_map.completed_by(shard.name, self.used) if layer in targets]
        in_pieces = [layer for layer in completed if targets[layer].layout.joins]
        whole = [layer for layer in completed if layer not in in_pieces]
        self._settle(targets[layer] for layer in whole)
        for layer in whole:
            self._write_fixed(targets[layer])
        # what has waited in the scratch file of a whole layer is of no use without this shard, which would come again
        self._mover.sync(replace(t, scratch=None) if layer in whole else t for layer, t in targets.items())
        for layer in [*targets]:
            if layer not in in_pieces:
                targets.pop(layer).close()
        layouts = [self.plan.layouts[layer] for layer in whole]
        self._name_layers(layouts)
        self._drop_scratch(layouts)
        sums = checksums()
        for layout in layouts:
            sums |= self._mover.sums.take(layout.settles)
        for layer in in_pieces:
            layout = self.plan.layouts[layer]
            self._join(targets[layer])
            targets.pop(layer).close()
            self._name_layers([layout])
            self._drop_scratch([layout])
            sums |= self._mover.sums.take((*layout.joins, *layout.settles))
        return sums

    def _mark_used(self, shard: PlannedShard, sums: Mapping[str, tuple[int, ...]]) -> None:
        self._journal.mark_used(shard.name, sums)
        self.checksums |= sums
        self.used.add(shard.name)

    def _write_fixed(self, target: Target) -> None:
        """What of a layer file comes from no shard: its header, and constants of tensors that came in pieces."""
        target.file.write_at(memoryview(target.layout.header), 0)
        for form in target.layout.fixed:
            for part, content in constants(form).items():
                target.write(part, 0, memoryview(content))

    def _join(self, target: Target) -> None:
        """Put the pieces in a synced scratch file to their places in the layer file, which is whole and synced then."""
        layout = target.layout
        work = moves_of((layout.layer.id, form) for form in layout.joins)
        self._mover.from_file(self._path(layout, SCRATCH_SUFFIX), {layout.layer.id: target}, work, lambda end: None)
        self._settle([target])
        self._write_fixed(target)
        self._mover.sync([target])

    def _settle(self, targets: Iterable[Target]) -> None:
        self._mover.settle((target, self._path(target.layout, SCRATCH_SUFFIX)) for target in targets)

    def _drop_scratch(self, layouts: Iterable[LayerLayout]) -> None:
        """Remove scratch files of layers that have their final names, durably; an earlier run may have left some."""
        found = [self._path(layout, SCRATCH_SUFFIX) for layout in layouts if layout.scratch_bytes]
        left = [path for path in found if path.exists()]
        for path in left:
            durable.remove(path)
        if left:
            durable.sync_folder(self.work.folder)

    def _path(self, layout: LayerLayout, suffix: str = "") -> Path:
        return self.work.folder / (layout.file_name + suffix)

    def _is_final(self, layout: LayerLayout) -> bool:
        return self._path(layout).exists() and not self._path(layout, durable.PART_SUFFIX).exists()

    def _finish_layer(self, layout: LayerLayout) -> None:
        part = self._path(layout, durable.PART_SUFFIX)
        if part.exists():
            # it goes when all of it is in the layer file; of scales alone all is, before a journal names the last shard
            joined = not (layout.joins and self._path(layout, SCRATCH_SUFFIX).exists())
            target = Target(layout, durable.GrowingFile(part, layout.size)) if joined else self._filler.target(layout)
            try:
                if not joined:
                    self._join(target)
                    # the journal is closed to them; the file is summed as a whole
                    self._mover.sums.forget((*layout.joins, *layout.settles))
                else:
                    self._write_fixed(target)
                    target.sync()
            finally:
                target.close()
        self._name_layers([layout])

    def _name_layers(self, layouts: list[LayerLayout]) -> None:
        """Give synced layer files their final names and their markers, and make all names durable."""
        for layout in layouts:
            durable.rename(self._path(layout, durable.PART_SUFFIX), self._path(layout))
            durable.touch(self._path(layout, DONE_SUFFIX))
        durable.sync_folder(self.work.folder)
        for layout in layouts:
            spans = len(self.plan.layer_map.layer_to_shards[layout.layer.id]) > 1
            if spans and (since := self._first_seen.get(layout.layer.id)) is not None:
                self.profiler.add(layout.layer.id, SHARD_WAIT, time.perf_counter() - since)
            logger.debug("Layer %s is finished: %s.", layout.layer.id, layout.file_name)
            tell(LayerDone(layout.layer.id, layout.file_name, layout.size))

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
