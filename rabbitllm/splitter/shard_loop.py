"""The loop over shards: each one's bytes into their places in the layer files, once, and then the shard is given up.

The order of steps for one shard is what makes a crash harmless:

1. its bytes are written into unfinished layer files (`.part`), at places fixed by the plan; or into a scratch file
   beside one, if they are a piece of a tensor that has to wait for its other pieces;
2. every file it touched is fsynced; those that now have all their tensors get their final name; where some of them lie
   in pieces, these are joined first, one layer after the other, and the scratch file goes when the name is durable;
3. the folder is fsynced, then the journal says that the shard is used up, and is fsynced;
4. only then is the shard released.

The bytes of a shard that is fetched go the same way as they come, through a file or past it; its digest is compared
with the hub's between 1 and 2.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rabbitllm import durable
from rabbitllm.checkpoints.checkpoint import Checkpoint, Disposal, Release
from rabbitllm.errors import CorruptShardError
from rabbitllm.formats.safetensors_file import LENGTH_BYTES, Header, header_length, parse_header
from rabbitllm.formats.shard_header import parse_torch_header, read_shard_header
from rabbitllm.layers.compression import StoredForm, constants
from rabbitllm.layers.layer_file import DONE_SUFFIX, SCRATCH_SUFFIX, LayerLayout
from rabbitllm.options import SplitOptions
from rabbitllm.profiler import FETCH, SHARD_WAIT, Profiler
from rabbitllm.progress import LayerDone, ShardDone, ShardStarted, SplitStarted, tell
from rabbitllm.splitter import journal
from rabbitllm.splitter.arrivals import Arrivals, Arriving, StartedOverError
from rabbitllm.splitter.gaps import Gaps
from rabbitllm.splitter.mover import ByteStream, Mover, Target
from rabbitllm.splitter.plan import Arrival, DiskUse, PlannedShard, SplitPlan, moves, moves_of
from rabbitllm.splitter.watch import disk_bytes

logger = logging.getLogger(__name__)

ROOM: Mapping[Arrival, int] = {Arrival.FILE_AHEAD: 2, Arrival.FILE: 1, Arrival.STREAM: 0}
"""Fetched shards that may be on the disk at a time."""


@dataclass(frozen=True, slots=True)
class Work:
    """A split that may be worked on.

    Attributes:
        plan: what to do.
        checkpoint: the source.
        folder: the split directory, with a journal in it.
        options: the caller's.
        quantise_on: "cpu" or "cuda:N".
        arrival: how fetched shards reach the layer files.
        use: what it takes of the disk.
        used: shards that an earlier run used up.
        checksums: tensor -> CRC-32 of each stored part, as far as the journal knows them.
    """

    plan: SplitPlan
    checkpoint: Checkpoint
    folder: Path
    options: SplitOptions
    quantise_on: str
    arrival: Arrival
    use: DiskUse
    used: frozenset[str]
    checksums: Mapping[str, tuple[int, ...]]


class ShardLoop:
    """The loop, with its threads and open files.

    Args:
        work: what to do.
        profiler: told of every stage.
        watch: called often, from any thread; may raise to stop.
    """

    def __init__(self, work: Work, profiler: Profiler, watch: Callable[[], None]) -> None:
        self.work = work
        self.plan = work.plan
        self.profiler = profiler
        self.used = set(work.used)
        self.checksums = dict(work.checksums)
        self._deletes = work.options.sequential and work.checkpoint.deletable
        self._journal = journal.Journal(work.folder)
        self._mover = Mover(work.options.threads, work.quantise_on, profiler, watch)
        self._arrivals = Arrivals(work.checkpoint, ROOM[work.arrival], watch)
        self._first_seen: dict[str, float] = {}

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
        for shard, arriving in self._arrivals.shards(waiting):
            number = self.plan.shards.index(shard) + 1
            tell(ShardStarted(shard.name, number, len(self.plan.shards)))
            self._use_up(shard, arriving)
            release = self._release(shard)
            disk = disk_bytes(self.work.folder)
            logger.info("Shard %d of %d, %s: %s.", number, len(self.plan.shards), shard.name, release.disposal.value)
            tell(
                ShardDone(shard.name, number, len(self.plan.shards), release.disposal.value, disk, self._source_left())
            )

    def flush_leftovers(self) -> None:
        """Finish layers whose tensors are all there and which still lack their final name or their marker.

        That happens when a crash came while they were being named.
        """
        for layer, layout in self.plan.layouts.items():
            if not self._is_final(layout):
                logger.warning("Layer %s was left over by an earlier run and is finished now.", layer)
                self._finish_layer(layout)
            self._drop_scratch(layout)
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

    def _use_up(self, shard: PlannedShard, arriving: Arriving) -> None:
        layers = [
            layer
            for layer in self.plan.layer_map.shard_to_layers.get(shard.name, ())
            if not self._is_final(self.plan.layouts[layer])
        ]
        for layer in layers:
            self._first_seen.setdefault(layer, time.perf_counter())
        targets: dict[str, Target] = {}
        try:
            if self.work.arrival is Arrival.STREAM and shard.staged:
                self._open(targets, layers)
                self._move_stream(shard, targets)
            else:
                self._move_file(shard, arriving, targets, layers)
            completed = [layer for layer in self.plan.layer_map.completed_by(shard.name, self.used) if layer in targets]
            in_pieces = [layer for layer in completed if targets[layer].scratch is not None]
            whole = [layer for layer in completed if layer not in in_pieces]
            for layer in whole:
                self._write_fixed(targets[layer])
            self._mover.sync(targets.values())
            for layer in [*targets]:
                if layer not in in_pieces:
                    targets.pop(layer).close()
            self._name_layers([self.plan.layouts[layer] for layer in whole])
            sums = self._mover.checksums(self._forms_of(shard, layers))
            for layer in in_pieces:
                layout = self.plan.layouts[layer]
                self._join(targets[layer])
                targets.pop(layer).close()
                self._name_layers([layout])
                self._drop_scratch(layout)
                sums |= self._mover.checksums(layout.joins)
        finally:
            for target in targets.values():
                target.close()
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
        self._write_fixed(target)
        self._mover.sync([target])

    def _drop_scratch(self, layout: LayerLayout) -> None:
        """Remove the scratch file of a layer that has its final name, durably; an earlier run may have left it."""
        if layout.scratch_bytes and self._path(layout, SCRATCH_SUFFIX).exists():
            durable.remove(self._path(layout, SCRATCH_SUFFIX))
            durable.sync_folder(self.work.folder)

    def _forms_of(self, shard: PlannedShard, layers: list[str]) -> list[StoredForm]:
        forms = (form for layer in layers for form in self.plan.layouts[layer].forms)
        return [form for form in forms if form.source.file == shard.name]

    def _open(self, targets: dict[str, Target], layers: list[str]) -> None:
        for layer in layers:
            layout = self.plan.layouts[layer]
            targets[layer] = self._target(layout)

    def _target(self, layout: LayerLayout) -> Target:
        file = durable.GrowingFile(self._path(layout, durable.PART_SUFFIX), layout.size, write_back=True)
        if not layout.scratch_bytes:
            return Target(layout, file)
        try:
            scratch = durable.GrowingFile(self._path(layout, SCRATCH_SUFFIX), layout.scratch_bytes, write_back=True)
        except BaseException:
            file.close()
            raise
        return Target(layout, file, scratch)

    def _move_file(
        self, shard: PlannedShard, arriving: Arriving, targets: dict[str, Target], layers: list[str]
    ) -> None:
        """Move what has come of a shard while the rest is coming; nothing of it is believed before it is whole.

        Where the header does not come first, the places are the plan's and are compared when all is there.
        """
        as_it_comes = shard.streams
        early = shard.header_first or not (shard.staged and as_it_comes)

        def arrived(end: int) -> Path:
            with self.profiler.stage(shard.name, FETCH) if shard.staged else contextlib.nullcontext():
                return arriving.until(end) if as_it_comes else arriving.whole()

        while True:
            try:
                path = arrived(LENGTH_BYTES)
                if not targets:
                    self._open(targets, layers)
                try:
                    if early:
                        self._compare(shard, _header_so_far(path, shard, arrived))
                    work = moves(self.plan, shard.name, targets)
                    self._mover.from_file(path, targets, work, arrived, shard.name)
                    if not early:
                        self._compare(shard, read_shard_header(arriving.whole(), shard.name))
                except FileNotFoundError:  # it was not what the hub says, and was taken away; if so, this says it too
                    arriving.whole()
                    raise
                except CorruptShardError as error:
                    arriving.whole()  # the same: nothing was verified yet
                    raise CorruptShardError(f"At {path}: {error.problem}", self._advice(shard)) from None
                with self.profiler.stage(shard.name, FETCH) if shard.staged else contextlib.nullcontext():
                    arriving.whole()
            except StartedOverError:
                self._mover.forget(self._forms_of(shard, layers))
            else:
                return

    def _move_stream(self, shard: PlannedShard, targets: dict[str, Target]) -> None:
        with contextlib.closing(self.work.checkpoint.stream(shard.name)) as chunks:  # with its connection
            gaps = None if shard.header_first else Gaps(shard.tensors, shard.size)
            stream = ByteStream(chunks if gaps is None else gaps.watching(chunks))
            try:
                if gaps is None:
                    self._compare(shard, _streamed_header(stream, shard))
                self._mover.from_stream(shard.name, stream, targets, moves(self.plan, shard.name, targets))
                stream.finish()
                if gaps is not None:  # the digest is right, so this says whether the plan was
                    self._compare(shard, parse_torch_header(gaps.read_at, shard.size, shard.name))
            except CorruptShardError as error:
                raise CorruptShardError(error.problem, self._advice(shard)) from None

    def _compare(self, shard: PlannedShard, header: Header) -> None:
        """Refuse a shard that is no longer, or never was, what the plan took it for.

        The plan's header came over the network without a digest, or from a file that somebody may have changed since.
        """
        taken = self.work.checkpoint.taken_from(shard.name, header)
        found = {tensor.name: tensor for tensor in taken.tensors}
        other = [tensor.name for tensor in shard.tensors if found.get(tensor.name) != tensor]
        if other:
            raise CorruptShardError(
                f"{shard.name} is not the file that the plan was made from: {other[0]!r} is elsewhere in it, or not "
                "at all."
            )

    def _advice(self, shard: PlannedShard) -> str:
        safe = f"Layers finished so far are safe in {self.work.folder}."
        if shard.staged:
            return (
                f"Make the same call again, in case it was damaged on the way. {safe} If it stays so, what the hub "
                "said of it when the split was planned was damaged: delete that folder, and call again."
            )
        return (
            f"{safe} For a repository on the hub make the same call again, or delete that folder first. For a local "
            "checkpoint put a sound copy at that path and call again; delete nothing: other shards may be used up "
            "already."
        )

    def _path(self, layout: LayerLayout, suffix: str = "") -> Path:
        return self.work.folder / (layout.file_name + suffix)

    def _is_final(self, layout: LayerLayout) -> bool:
        return self._path(layout).exists() and not self._path(layout, durable.PART_SUFFIX).exists()

    def _finish_layer(self, layout: LayerLayout) -> None:
        part = self._path(layout, durable.PART_SUFFIX)
        if part.exists():
            joined = not self._path(layout, SCRATCH_SUFFIX).exists()  # it goes when all of it is in the layer file
            target = Target(layout, durable.GrowingFile(part, layout.size)) if joined else self._target(layout)
            try:
                if layout.scratch_bytes and not joined:
                    self._join(target)
                    self._mover.forget(layout.joins)  # the journal is closed to them; the file is summed as a whole
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


def _header_so_far(path: Path, shard: PlannedShard, arrived: Callable[[int], object]) -> Header:
    if not (shard.staged and shard.header_first):
        return read_shard_header(path, shard.name)
    with path.open("rb") as file:
        length = header_length(file.read(LENGTH_BYTES), shard.size, shard.name)
        arrived(LENGTH_BYTES + length)
        return parse_header(file.read(length), shard.size, shard.name)


def _streamed_header(stream: ByteStream, shard: PlannedShard) -> Header:
    prefix = bytearray(LENGTH_BYTES)
    stream.read_into(memoryview(prefix))
    raw = bytearray(header_length(bytes(prefix), shard.size, shard.name))
    stream.read_into(memoryview(raw))
    return parse_header(bytes(raw), shard.size, shard.name)
