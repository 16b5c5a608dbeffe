"""Makes filled layer files whole, and gives them their final names.

A layer file is whole when every tensor is in its place: those that came as they are, scales that had to wait in the
scratch file to be quantized themselves, and tensors that were put there piece by piece. It is synced before it is
named, and its scratch file goes when the name is durable. Knows no journal and releases no shard.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rabbitllm.base.progress import LayerDone, tell
from rabbitllm.quant.compression import constants
from rabbitllm.splitter.filler import Filler
from rabbitllm.splitter.mover import FillTarget, Mover
from rabbitllm.splitter.moves import moves_of
from rabbitllm.splitter.sums import PartSums, TensorSums
from rabbitllm.splitter.work import SplitWork
from rabbitllm.storage import durable
from rabbitllm.store.layer_file import DONE_SUFFIX, SCRATCH_SUFFIX, LayerLayout
from rabbitllm.telemetry.profiler import SHARD_WAIT, Profiler

logger = logging.getLogger(__name__)


class Completion:
    """Completes the layer files of a split.

    Args:
        work: the split.
        mover: the threads.
        filler: opens unfinished files.
        profiler: told how long layers have waited for their shards.
    """

    def __init__(self, work: SplitWork, mover: Mover, filler: Filler, profiler: Profiler) -> None:
        self._folder = work.folder
        self._plan = work.plan
        self._mover = mover
        self._filler = filler
        self._profiler = profiler
        self._first_seen: dict[str, float] = {}

    def is_final(self, layout: LayerLayout) -> bool:
        """Whether a layer has its final name."""
        return self._path(layout).exists() and not self._path(layout, durable.PART_SUFFIX).exists()

    def begun(self, layers: Iterable[str]) -> None:
        """Something is coming for these layers."""
        for layer in layers:
            self._first_seen.setdefault(layer, time.perf_counter())

    def complete(
        self,
        completed: Iterable[str],
        targets: dict[str, FillTarget],
        stored: TensorSums,
    ) -> dict[str, tuple[PartSums, ...]]:
        """Sync and close what a shard was put into, and give the layers their names that are whole with it.

        Args:
            completed: layers that are whole with it; those that have no open file are done already.
            targets: the open files; those that are closed are taken out.
            stored: tensor of the shard -> CRC-32 of each stored part.

        Returns:
            Those, and the sums of tensors that were joined.
        """
        completed = [layer for layer in completed if layer in targets]
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
        layouts = [self._plan.layouts[layer] for layer in whole]
        self._name_layers(layouts)
        self._drop_scratch(layouts)
        sums = dict(stored)
        for layout in layouts:
            sums |= self._mover.sums.take(layout.settles)
        for layer in in_pieces:
            layout = self._plan.layouts[layer]
            self._join(targets[layer])
            targets.pop(layer).close()
            self._name_layers([layout])
            self._drop_scratch([layout])
            sums |= self._mover.sums.take((*layout.joins, *layout.settles))
        return sums

    def finish_leftovers(self) -> None:
        """Finish layers whose tensors are all there and which still lack their final name or their marker.

        That happens when a crash came while they were being named.
        """
        for layer, layout in self._plan.layouts.items():
            if not self.is_final(layout):
                logger.warning("Layer %s was left over by an earlier run and is finished now.", layer)
                self._finish_layer(layout)
            self._drop_scratch([layout])
        markers = [self._path(layout, DONE_SUFFIX) for layout in self._plan.layouts.values()]
        unmarked = [marker for marker in markers if not marker.exists()]
        for marker in unmarked:
            durable.touch(marker)
        if unmarked:
            durable.sync_folder(self._folder)

    def _write_fixed(self, target: FillTarget) -> None:
        """What of a layer file comes from no shard: its header, and constants of tensors that came in pieces."""
        target.file.write_at(memoryview(target.layout.header), 0)
        for form in target.layout.fixed:
            for part, content in constants(form).items():
                target.write(part, 0, memoryview(content))

    def _join(self, target: FillTarget) -> None:
        """Put the pieces in a synced scratch file to their places in the layer file, which is whole and synced then."""
        layout = target.layout
        work = moves_of((layout.layer.id, form) for form in layout.joins)
        self._mover.from_file(self._path(layout, SCRATCH_SUFFIX), {layout.layer.id: target}, work, lambda end: None)
        self._settle([target])
        self._write_fixed(target)
        self._mover.sync([target])

    def _settle(self, targets: Iterable[FillTarget]) -> None:
        self._mover.settle((target, self._path(target.layout, SCRATCH_SUFFIX)) for target in targets)

    def _drop_scratch(self, layouts: Iterable[LayerLayout]) -> None:
        """Remove scratch files of layers that have their final names, durably; an earlier run may have left some."""
        found = [self._path(layout, SCRATCH_SUFFIX) for layout in layouts if layout.scratch_bytes]
        left = [path for path in found if path.exists()]
        for path in left:
            durable.remove(path)
        if left:
            durable.sync_folder(self._folder)

    def _path(self, layout: LayerLayout, suffix: str = "") -> Path:
        return self._folder / (layout.file_name + suffix)

    def _finish_layer(self, layout: LayerLayout) -> None:
        part = self._path(layout, durable.PART_SUFFIX)
        if part.exists():
            # it goes when all of it is in the layer file; of scales alone all is, before a journal names the last shard
            joined = not (layout.joins and self._path(layout, SCRATCH_SUFFIX).exists())
            target = (
                FillTarget(layout, durable.GrowingFile(part, layout.size)) if joined else self._filler.target(layout)
            )
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
        durable.sync_folder(self._folder)
        for layout in layouts:
            spans = len(self._plan.layer_map.layer_to_shards[layout.layer.id]) > 1
            if spans and (since := self._first_seen.get(layout.layer.id)) is not None:
                self._profiler.add(layout.layer.id, SHARD_WAIT, time.perf_counter() - since)
            logger.debug("Layer %s is finished: %s.", layout.layer.id, layout.file_name)
            tell(LayerDone(layout.layer.id, layout.file_name, layout.size))
