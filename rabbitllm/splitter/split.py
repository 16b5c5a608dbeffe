"""Runs a plan: each shard's bytes into their places in the layer files, once, and then the shard is given up.

The sequential and the standard route differ in one thing only: when a used-up shard is released. The order of
steps for one shard is what makes a crash harmless:

1. its bytes are written into unfinished layer files (`.part`), at places fixed by the plan;
2. every file it touched is fsynced; those that now have all their tensors get their final name;
3. the folder is fsynced, then the journal says that the shard is used up, and is fsynced;
4. only then is the shard released.

Knows no models and no devices but the one that quantises.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from rabbitllm import durable
from rabbitllm.checkpoints.checkpoint import Checkpoint, Disposal, Release, ShardFacts
from rabbitllm.checkpoints.index import natural_key
from rabbitllm.checkpoints.naming import LayerNaming, assign_layers
from rabbitllm.errors import CorruptShardError, IncompleteSplitError, MissingShardError, SplitMismatchError
from rabbitllm.formats.positional import PositionalFile, page_aligned
from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.layers.compression import BLOCKS, SCALE_BYTES, constants, quantise_blocks
from rabbitllm.layers.layer_file import DONE_SUFFIX, LayerLayout
from rabbitllm.layers.layer_store import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    LayerRecord,
    Manifest,
    read_manifest,
    write_manifest,
)
from rabbitllm.options import BIG_LAYER_BYTES, MIN_FREE_BYTES, SplitOptions
from rabbitllm.profiler import FETCH, QUANTISE, READ, SHARD_WAIT, WRITE, Profiler
from rabbitllm.progress import BytesDone, LayerDone, ShardDone, ShardStarted, SplitDone, SplitStarted, tell
from rabbitllm.splitter import journal
from rabbitllm.splitter.plan import (
    CHUNK_BYTES,
    Move,
    PlannedShard,
    SplitPlan,
    check_space,
    disk_use,
    gib,
    make_plan,
    moves,
    tensors_by_shard,
)

logger = logging.getLogger(__name__)

HEADER_THREADS = 8
"""Headers that are asked for at the same time."""
STAGING_NAME = ".staging"
"""Folder inside the split directory that fetched shards go to; ours, and gone when the split is whole."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to split and how.

    Attributes:
        checkpoint: the source.
        folder: the split directory.
        family: `model_type` of the config, which names the layers.
        naming: patterns of the caller's own, instead of the family's.
        options: see `SplitOptions`.
        quantise_on: "cpu" or "cuda:N".
    """

    checkpoint: Checkpoint
    folder: Path
    family: str | None
    options: SplitOptions
    naming: LayerNaming | None = None
    quantise_on: str = "cpu"


def split(request: Request) -> Profiler:
    """Make a split directory, or finish one that an earlier call began.

    Returns:
        Where the time of each layer went; empty unless `options.profiling`.

    Raises:
        CheckpointError: the source is malformed or incomplete; nothing was touched.
        NotEnoughSpaceException: it would not fit; nothing was touched.
        SplitMismatchError: the folder has layers of another source.
        HubError: fetching failed; the same call goes on where it stopped.
    """
    start = time.perf_counter()
    state = _begin(request)
    run = _Run(request, state)
    try:
        run.take_shards()
        run.flush_leftovers()
    finally:
        run.close()
    _finish(request, state)
    tell(SplitDone(str(request.folder), len(state.plan.layouts), state.plan.output_bytes, time.perf_counter() - start))
    return run.profiler


@dataclass(frozen=True, slots=True)
class _State:
    """A split that may be worked on: its plan, and what is durable of it."""

    plan: SplitPlan
    quantiser: str | None
    used: frozenset[str]


def _begin(request: Request) -> _State:
    """Take up the journal of an earlier run, or plan anew, check the space and begin one."""
    earlier = journal.replay(request.folder)
    done = earlier.used if earlier is not None else frozenset()
    facts = _facts(request.checkpoint, [shard for shard in request.checkpoint.index.shards if shard not in done])
    identity = request.checkpoint.identity(facts.values())
    if earlier is not None:
        if (why := earlier.plan.source.differs_from(identity)) is not None:
            raise SplitMismatchError(
                f"{request.folder} holds an unfinished split of {earlier.plan.source.name}, not of "
                f"{identity.name}: {why}.",
                "Split into another folder (layer_shards_saving_path). If that other model is intact, the "
                "folder may be deleted.",
            )
        _require([s.name for s in earlier.plan.shards if s.name not in earlier.used], facts, request.checkpoint)
        _require_begun_layers(request.folder, earlier)
        logger.info("Going on with %s: %d shards are used up.", request.folder, len(earlier.used))
        return _State(_with_places(earlier.plan, request.checkpoint), earlier.quantiser, earlier.used)
    index = request.checkpoint.index
    _require(index.shards, facts, request.checkpoint)
    tensors = tensors_by_shard(index, facts.values())
    shards = tuple(PlannedShard(f.name, f.size, f.fingerprint, tensors[f.name], f.staged) for f in facts.values())
    names = [tensor.name for shard in shards for tensor in shard.tensors]
    assigned = assign_layers(names, request.family, request.naming)
    plan = make_plan(identity, shards, assigned, request.options.compression)
    deletes = request.options.sequential and request.checkpoint.deletable
    check_space(plan, request.folder, request.options.max_disk, deletes_shards=deletes)
    _warn_of_big_layers(plan)
    durable.make_folder(request.folder)
    _copy_sidecars(request)
    _clear_stale(request.folder, plan)
    quantiser = _quantiser(request)
    journal.begin(request.folder, plan, quantiser)
    return _State(plan, quantiser, frozenset())


def _facts(checkpoint: Checkpoint, shards: list[str]) -> dict[str, ShardFacts]:
    """Headers of the shards that are there, in the order given; several at once, since a hub is far away."""
    with ThreadPoolExecutor(HEADER_THREADS, thread_name_prefix="headers") as pool:
        found = dict(zip(shards, pool.map(checkpoint.facts, shards), strict=True))
    return {shard: facts for shard, facts in found.items() if facts is not None}


def _require(shards: Iterable[str], facts: dict[str, ShardFacts], checkpoint: Checkpoint) -> None:
    missing = [shard for shard in shards if shard not in facts]
    if missing:
        raise MissingShardError(
            f"{checkpoint.label} lacks {len(missing)} of the shards its index names: {', '.join(missing[:5])}"
            f"{' …' if len(missing) > 5 else ''}.",
            "Put them there, or give the repository they come from. Nothing was touched.",
        )


def _require_begun_layers(folder: Path, earlier: journal.Replay) -> None:
    """Make sure that what used-up shards gave is still there; a file made anew would have holes in its place."""
    for layer, layout in earlier.plan.layouts.items():
        begun = earlier.plan.layer_map.layer_to_shards[layer] & earlier.used
        file = folder / layout.file_name
        if begun and not file.exists() and not file.with_name(file.name + durable.PART_SUFFIX).exists():
            raise IncompleteSplitError(
                f"{file} is gone, finished or not; it held tensors of {', '.join(sorted(begun, key=natural_key))}, "
                "which earlier runs used up.",
                f"Put that file back. If those shards can be had again, put them in place, delete {folder} and call "
                "again.",
            )


def _with_places(plan: SplitPlan, checkpoint: Checkpoint) -> SplitPlan:
    """The plan with each shard where it is now: another route may have begun it."""
    shards = tuple(dataclasses.replace(shard, staged=checkpoint.stages(shard.name)) for shard in plan.shards)
    return dataclasses.replace(plan, shards=shards)


def _warn_of_big_layers(plan: SplitPlan) -> None:
    for layer, layout in plan.layouts.items():
        if layout.size > BIG_LAYER_BYTES:
            logger.warning("Layer %s has %s; streaming it needs that much memory at once.", layer, gib(layout.size))


def _copy_sidecars(request: Request) -> None:
    """Config, tokenizer and the like, so that the folder loads alone once the original is gone."""
    for name, path in request.checkpoint.sidecars().items():
        if name in (MANIFEST_NAME, JOURNAL_NAME):
            continue
        target = request.folder / name
        durable.make_folder(target.parent)
        durable.write_whole(target, path.read_bytes())


def _clear_stale(folder: Path, plan: SplitPlan) -> None:
    """Remove layer files of an attempt that has no journal (RabbitLLM 1.1's, unfinished).

    Every shard is there at this point, so nothing in them is the only copy.
    """
    for layout in plan.layouts.values():
        for suffix in (DONE_SUFFIX, "", durable.PART_SUFFIX):
            stale = folder / (layout.file_name + suffix)
            if stale.exists():
                durable.remove(stale)


def _quantiser(request: Request) -> str | None:
    if request.options.compression is None:
        return None
    from importlib.metadata import version

    return f"bitsandbytes {version('bitsandbytes')} on {request.quantise_on.split(':')[0]}"


class _Run:
    """The loop over shards, with its threads, buffers and open files."""

    def __init__(self, request: Request, state: _State) -> None:
        self.request = request
        self.plan = state.plan
        self.options = request.options
        self.folder = request.folder
        self.profiler = Profiler(request.options.profiling, f"Split of {request.checkpoint.label}, by stage")
        self.used = set(state.used)
        self._deletes = request.options.sequential and request.checkpoint.deletable
        self.journal = journal.Journal(request.folder)
        self.pool = ThreadPoolExecutor(request.options.threads, thread_name_prefix="split")
        self.local = threading.local()
        self.first_seen: dict[str, float] = {}

    def take_shards(self) -> None:
        """Use up every shard that no earlier run has."""
        for shard in self.plan.shards:
            if shard.name in self.used:  # a crash may have come between the journal and the release
                self._release(shard.name)
        waiting = [shard for shard in self.plan.shards if shard.name not in self.used]
        use = disk_use(self.plan, deletes_shards=self._deletes, used=frozenset(self.used))
        names = tuple(shard.name for shard in waiting)
        tell(
            SplitStarted(
                self.request.checkpoint.label,
                names,
                self.plan.source_bytes,
                self.plan.output_bytes,
                use.added,
                len(self.used),
            )
        )
        for shard in waiting:
            number = self.plan.shards.index(shard) + 1
            tell(ShardStarted(shard.name, number, len(self.plan.shards)))
            self._warn_of_little_space()
            self._use_up(shard)
            release = self._release(shard.name)
            tell(
                ShardDone(
                    shard.name,
                    number,
                    len(self.plan.shards),
                    release.disposal.value,
                    disk_in_use(self.folder),
                    self._source_left(),
                )
            )

    def flush_leftovers(self) -> None:
        """Finish layers whose tensors are all there and which still lack their final name or their marker.

        That happens when a crash came while they were being named.
        """
        for layer, layout in self.plan.layouts.items():
            if not self._is_final(layout):
                logger.warning("Layer %s was left over by an earlier run and is finished now.", layer)
                self._finish_layers([layout])
        markers = [self._path(layout, DONE_SUFFIX) for layout in self.plan.layouts.values()]
        unmarked = [marker for marker in markers if not marker.exists()]
        for marker in unmarked:
            durable.touch(marker)
        if unmarked:
            durable.sync_folder(self.folder)

    def close(self) -> None:
        """Stop the threads and close the journal; what is durable stays."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.journal.close()

    def _use_up(self, shard: PlannedShard) -> None:
        layers = [
            layer
            for layer in self.plan.layer_map.shard_to_layers.get(shard.name, ())
            if not self._is_final(self.plan.layouts[layer])
        ]
        for layer in layers:
            self.first_seen.setdefault(layer, time.perf_counter())
        with self.profiler.stage(shard.name, FETCH, shard.size):
            path = self.request.checkpoint.acquire(shard.name)
        self._check_header(path, shard)
        files = {layer: self._part(self.plan.layouts[layer]) for layer in layers}
        try:
            with PositionalFile(path) as source:
                source.advise_sequential()
                self._carry_out(source, files, moves(self.plan, shard.name, layers))
            completed = set(self.plan.layer_map.completed_by(shard.name, self.used)) & set(layers)
            for layer in completed:
                files[layer].write_at(memoryview(self.plan.layouts[layer].header), 0)
            for future in [self.pool.submit(file.sync) for file in files.values()]:
                future.result()
        finally:
            for file in files.values():
                file.close()
        self._name_layers([self.plan.layouts[layer] for layer in layers if layer in completed])
        self.journal.mark_used(shard.name)
        self.used.add(shard.name)

    def _check_header(self, path: Path, shard: PlannedShard) -> None:
        """Refuse a shard that is no longer, or never was, what the plan took it for.

        The plan's header came over the network without a digest, or from a file that somebody may have changed since.
        """
        try:
            found = {tensor.name: tensor for tensor in read_header(path, shard.name).tensors}
        except CorruptShardError as error:
            raise CorruptShardError(f"At {path}: {error.problem}", self._advice()) from None
        other = [tensor.name for tensor in shard.tensors if found.get(tensor.name) != tensor]
        if other:
            raise CorruptShardError(
                f"{path} is not the file that the plan was made from: {other[0]!r} is elsewhere in it, or not at all.",
                self._advice(),
            )

    def _carry_out(self, source: PositionalFile, files: dict[str, durable.GrowingFile], work: Iterable[Move]) -> None:
        """Run the moves on the pool; the first failure stops the rest."""
        futures = [self.pool.submit(self._run_batch, source, files, batch) for batch in _batches(work)]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        wait(pending)
        for future in done:
            future.result()

    def _run_batch(self, source: PositionalFile, files: dict[str, durable.GrowingFile], batch: list[Move]) -> None:
        for move in batch:
            self._run_move(source, files[move.layer], move)
        tell(BytesDone(source.path.name, sum(move.nbytes for move in batch)))

    def _run_move(self, source: PositionalFile, file: durable.GrowingFile, move: Move) -> None:
        layout, form = self.plan.layouts[move.layer], move.form
        buffer = self._buffer()[: move.nbytes]
        with self.profiler.stage(move.layer, READ, move.nbytes):
            self._read(source, buffer, move.offset)
        if form.scheme is None:
            with self.profiler.stage(move.layer, WRITE, move.nbytes):
                file.write_at(buffer, layout.places[form.parts[0].name] + move.first, aligned=True)
            return
        payload, scales = form.parts[0], form.parts[1]
        if move.nbytes:
            with self.profiler.stage(move.layer, QUANTISE, move.nbytes):
                codes, absmax = quantise_blocks(form.scheme, buffer, form.source.dtype, self.request.quantise_on)
            codes_at = move.first // 2 if form.scheme == "4bit" else move.first
            scales_at = move.first // BLOCKS[form.scheme] * SCALE_BYTES
            with self.profiler.stage(move.layer, WRITE, len(codes) + len(absmax)):
                file.write_at(codes, layout.places[payload.name] + codes_at)
                file.write_at(absmax, layout.places[scales.name] + scales_at)
        if move.first == 0:
            for name, content in constants(form).items():
                file.write_at(memoryview(content), layout.places[name])

    def _read(self, source: PositionalFile, buffer: memoryview, offset: int) -> None:
        try:
            got = source.read_into(buffer, offset)
        except OSError as error:
            raise CorruptShardError(
                f"{source.path} cannot be read at byte {offset:,}: {error}.", self._advice()
            ) from error
        if got != len(buffer):
            raise CorruptShardError(
                f"{source.path} ended at byte {offset + got:,}; its header promised {offset + len(buffer):,}.",
                self._advice(),
            )

    def _advice(self) -> str:
        return (
            f"Layers finished so far are safe in {self.folder}. For a repository on the hub make the same call again, "
            "or delete that folder first. For a local checkpoint put a sound copy at that path and call again; "
            "delete nothing: other shards may be used up already."
        )

    def _buffer(self) -> memoryview:
        """This thread's own page-aligned buffer, made once."""
        if not hasattr(self.local, "buffer"):
            self.local.buffer = page_aligned(CHUNK_BYTES)
        buffer: memoryview = self.local.buffer
        return buffer

    def _part(self, layout: LayerLayout) -> durable.GrowingFile:
        return durable.GrowingFile(self._path(layout, durable.PART_SUFFIX), layout.size)

    def _path(self, layout: LayerLayout, suffix: str = "") -> Path:
        return self.folder / (layout.file_name + suffix)

    def _is_final(self, layout: LayerLayout) -> bool:
        return self._path(layout).exists() and not self._path(layout, durable.PART_SUFFIX).exists()

    def _finish_layers(self, layouts: list[LayerLayout]) -> None:
        for layout in layouts:
            if self._path(layout, durable.PART_SUFFIX).exists():
                file = self._part(layout)
                try:
                    file.write_at(memoryview(layout.header), 0)
                    file.sync()
                finally:
                    file.close()
        self._name_layers(layouts)

    def _name_layers(self, layouts: list[LayerLayout]) -> None:
        """Give synced layer files their final names and their markers, and make all names durable."""
        for layout in layouts:
            durable.rename(self._path(layout, durable.PART_SUFFIX), self._path(layout))
            durable.touch(self._path(layout, DONE_SUFFIX))
        durable.sync_folder(self.folder)
        for layout in layouts:
            spans = len(self.plan.layer_map.layer_to_shards[layout.layer.id]) > 1
            if spans and (since := self.first_seen.get(layout.layer.id)) is not None:
                self.profiler.add(layout.layer.id, SHARD_WAIT, time.perf_counter() - since)
            tell(LayerDone(layout.layer.id, layout.file_name, layout.size))

    def _release(self, shard: str) -> Release:
        if not self.options.sequential and not self._is_staged(shard):
            return Release(shard, Disposal.KEPT)
        release = self.request.checkpoint.release(shard)
        if release.disposal is Disposal.READ_ONLY:
            logger.warning("%s is used up but cannot be deleted: its folder is read-only.", shard)
        return release

    def _is_staged(self, shard: str) -> bool:
        return any(planned.staged for planned in self.plan.shards if planned.name == shard)

    def _source_left(self) -> int:
        if not self._deletes:
            return sum(s.size for s in self.plan.shards if not s.staged)
        return sum(s.size for s in self.plan.shards if s.name not in self.used and not s.staged)

    def _warn_of_little_space(self) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < MIN_FREE_BYTES:
            logger.warning("Only %s is free at %s; the split may not finish.", gib(free), self.folder)


def _batches(work: Iterable[Move]) -> Iterator[list[Move]]:
    """Moves in groups of about one chunk, so that small tensors do not cost a task each."""
    batch: list[Move] = []
    size = 0
    for move in work:
        batch.append(move)
        size += move.nbytes
        if size >= CHUNK_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def disk_in_use(folder: Path) -> int:
    """Bytes that the files below a folder occupy on the disk; holes count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        total += status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size
    return total


def _finish(request: Request, state: _State) -> None:
    """Declare the directory whole, then clear away what only the making needed."""
    plan = state.plan
    records = tuple(
        LayerRecord(layer, layout.layer.stem, layout.file_name, layout.size, plan.layer_map.layer_to_tensors[layer])
        for layer, layout in plan.layouts.items()
    )
    if read_manifest(request.folder) is None:
        write_manifest(request.folder, Manifest(plan.source, plan.compression, state.quantiser, records))
    clear_away(request.folder)
    if request.options.delete_original:
        discard_original(request.checkpoint)


def clear_away(folder: Path) -> None:
    """Remove what only the making of a whole split directory needed: its journal and fetched shards.

    The directory must have its manifest. A crash may have come between that and this.
    """
    journal_path = folder / JOURNAL_NAME
    if journal_path.exists():  # asked first: a finished split may lie on a read-only mount
        durable.remove(journal_path)
    durable.remove_folder(folder / STAGING_NAME)


def discard_original(checkpoint: Checkpoint) -> None:
    """Remove the shards that are left of a checkpoint, and what its kind counts as the rest (`delete_original`).

    The caller must have made sure that the split directory is whole and was made from this checkpoint.
    """
    disposals = [checkpoint.release(shard).disposal for shard in checkpoint.index.shards]
    if kept := disposals.count(Disposal.READ_ONLY):
        logger.warning("%d shards of %s cannot be deleted: their folder is read-only.", kept, checkpoint.label)
    for path in checkpoint.discard_rest():
        logger.info("Deleted %s.", path)
