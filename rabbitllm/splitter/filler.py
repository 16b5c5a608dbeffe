"""Fills unfinished layer files from one shard: opens them, moves its bytes as they arrive, sums the written bytes.

This is the part before a shard counts as used up; filling from the same shard again writes the same bytes at the same
offsets. It writes no journal, gives no file its final name and deletes nothing, so any process that sees the source
and the split directory may do it. Its inputs are in `SplitWork`; `ShardExecutor` runs it elsewhere, and `ShardFetcher`
fetches the shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Protocol

from rabbitllm.base.forks import DaemonThread
from rabbitllm.base.options import SplitOptions
from rabbitllm.base.progress import BytesFetched, tell
from rabbitllm.checkpoints.checkpoint import Checkpoint
from rabbitllm.errors import CorruptShardError, IncompleteSplitError
from rabbitllm.formats.gguf import MAX_HEADER_BYTES, begins_gguf
from rabbitllm.formats.safetensors_file import LENGTH_BYTES, header_length
from rabbitllm.formats.shard_header import parse_shard_header, read_shard_header
from rabbitllm.formats.tensor_spec import Header
from rabbitllm.splitter._held_bytes import HeldBytes
from rabbitllm.splitter.disk_budget import DiskUse, ShardTransfer
from rabbitllm.splitter.mover import ByteStream, FillTarget, Mover
from rabbitllm.splitter.plan import Gaps, LayerMap, PlannedShard, SplitPlan, moves
from rabbitllm.splitter.sums import FileSums, ShardChecksums, TensorSums
from rabbitllm.storage import durable
from rabbitllm.storage.files import OpenFiles, PositionalFile
from rabbitllm.store.layer_file import SCRATCH_SUFFIX, LayerLayout
from rabbitllm.store.manifest import is_fitted
from rabbitllm.store.stored_form import StoredForm
from rabbitllm.telemetry.passes import FETCH
from rabbitllm.telemetry.profiler import Profiler


@dataclass(frozen=True, slots=True)
class SplitWork:
    """A split that is ready to be carried out.

    Attributes:
        plan: the plan.
        checkpoint: the source.
        folder: the split directory, with a journal in it.
        options: the caller's.
        shard_transfer: how fetched shards reach the layer files.
        use: its disk use.
        used: shards that an earlier run used up.
        checksums: tensor -> checksums of its stored parts, as far as the journal has them.
        source_checksums: shard -> `source_check.source_crc32`, from the journal.
        at_once: maximum of concurrent shards.
        quantizer: as the manifest names it; None without compression.
        sound: of a repair, the checksums of the layer files that it leaves as they are.
    """

    plan: SplitPlan
    checkpoint: Checkpoint
    folder: Path
    options: SplitOptions
    shard_transfer: ShardTransfer
    use: DiskUse
    used: frozenset[str]
    checksums: TensorSums
    at_once: int = 1
    quantizer: str | None = None
    source_checksums: Mapping[str, int] = field(default_factory=dict)
    sound: FileSums = field(default_factory=dict)

    @property
    def fitted(self) -> bool:
        """Whether scales of 4bit are fitted to their blocks."""
        return is_fitted(self.quantizer)

    @property
    def largest_file(self) -> tuple[str, int]:
        """The name and the bytes of the largest file that the split directory will have, a layer or a fetched shard."""
        sizes = {layout.file_name: layout.size for layout in self.plan.layouts.values()}
        fetched = (shard for shard in self.plan.shards if shard.staged and self.shard_transfer.files)
        sizes |= {Path(shard.name).name: shard.size for shard in fetched}
        return max(sizes.items(), key=itemgetter(1), default=("", 0))

    def of_shard(self, shard: str, layers: Iterable[str]) -> SplitWork:
        """Return the part that fills these layers from one shard; another process needs no more."""
        layers = tuple(layers)
        complete = self.plan.layer_map
        layer_map = LayerMap(
            {layer: complete.layers[layer] for layer in layers},
            {layer: complete.layer_to_tensors[layer] for layer in layers},
            {layer: complete.layer_to_shards[layer] for layer in layers},
            {shard: layers},
        )
        plan = dataclasses.replace(
            self.plan,
            source=dataclasses.replace(self.plan.source, fingerprints={}),
            shards=tuple(planned for planned in self.plan.shards if planned.name == shard),
            layer_map=layer_map,
            layouts={layer: self.plan.layouts[layer] for layer in layers},
        )
        return dataclasses.replace(self, plan=plan, used=frozenset(), checksums={}, source_checksums={}, sound={})


Filled = tuple[PlannedShard, ShardChecksums]
"""A shard whose bytes are durable in unfinished layer files, and its checksums."""


class ShardExecutor(Protocol):
    """Runs the jobs that fill layer files, in other processes or on other machines.

    A job can be repeated after a partial attempt. The loop over shards owns the journal, the layers' final names, and
    the release of shards.

    Attributes:
        at_once: maximum of concurrent shards.
    """

    at_once: int

    def sharing(self, folder: Path, seen: Sequence[Path]) -> AbstractContextManager[None]:
        """Check that all workers see the split directory and the source; they keep access while the context is open.

        Args:
            folder: the split directory, which exists and is locked by the caller.
            seen: files and folders of the source; none if it is on the hub.

        Raises:
            ClusterError: a worker does not see them, or has another version of this package; nothing was touched.
        """

    def filled(
        self,
        parts: Sequence[tuple[PlannedShard, SplitWork]],
        began: Callable[[PlannedShard], None],
        watch: Callable[[], None],
    ) -> Generator[Filled]:
        """Fill layer files from each shard; yield each one when its data is synced, in any order.

        At most `SplitWork.at_once` shards are concurrent; one that was yielded counts until the next is requested.

        Args:
            parts: each shard with the work for it, in the order to begin with them.
            began: called with each shard when it begins.
            watch: called often; may raise to stop.
        """


LAST_CHUNK_SECONDS = 0.5
"""Time for a fetch that is being stopped to write data it has just received, seconds."""


class StartedOverError(Exception):
    """The arrived part of a shard was damaged, and the shard is fetched again; data read from it must not be used."""


class IncomingShard(Protocol):
    """A shard that is local or is being fetched."""

    def until(self, end: int) -> Path:
        """Wait until a shard's first `end` bytes are in the file, and return its path; they are not verified yet.

        Raises:
            StartedOverError: see there.
            HubError, MissingShardError, CorruptShardError: it cannot be fetched or found.
        """

    def whole(self) -> Path:
        """Wait until all of it is there and verified; raises the same errors."""


class _LocalShard:
    """A shard that needs no fetching."""

    def __init__(self, checkpoint: Checkpoint, shard: str) -> None:
        self._checkpoint = checkpoint
        self._shard = shard
        self._path: Path | None = None

    def until(self, end: int) -> Path:  # called every few MB, and each `acquire` checks the path again
        if self._path is None:
            self._path = self.whole()
        return self._path

    def whole(self) -> Path:
        return self._checkpoint.acquire(self._shard)


class _FetchedShard:
    """A shard that a thread fetches."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._path: Path | None = None
        self._have = 0
        self._whole = self._started_over = False
        self._error: BaseException | None = None

    def until(self, end: int) -> Path:
        return self._wait(lambda: self._have >= end)

    def whole(self) -> Path:
        return self._wait(lambda: self._whole)

    def _wait(self, ready: Callable[[], bool]) -> Path:
        with self._changed:
            self._changed.wait_for(lambda: ready() or self._started_over or self._error is not None)
            if self._error is not None:
                raise self._error
            if self._started_over:
                self._started_over = False
                raise StartedOverError
            assert self._path is not None
            return self._path

    def advance(self, path: Path, have: int) -> int:
        """Record that `path` has the first `have` bytes; return how many are new (negative: it started over)."""
        with self._changed:
            new = have - self._have
            self._path, self._have = path, have
            self._started_over |= new < 0
            self._changed.notify_all()
            return new

    def end(self, path: Path) -> None:
        """Record that all of it is there and verified."""
        with self._changed:
            self._path, self._whole = path, True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Record that fetching failed."""
        with self._changed:
            self._error = error
            self._changed.notify_all()


class _FillStopped(Exception):
    """The shard that is being fetched is no longer needed."""


class ShardFetcher:
    """Yields the shards on local paths, in order; the arrived part of each can be read meanwhile.

    A thread fetches missing shards, the next one as soon as there is room for it (`choose_shard_transfer`).

    Args:
        checkpoint: source of the shards.
        room: fetched shards that may be on the disk at a time; 0 if the caller streams them itself.
        watch: called as bytes arrive; may raise to stop.
    """

    def __init__(self, checkpoint: Checkpoint, room: int, watch: Callable[[], None]) -> None:
        self._checkpoint = checkpoint
        self._watch = watch
        self._stop = threading.Event()
        self._fetches = room > 0
        self._room = threading.Semaphore(room)
        self._thread: DaemonThread | None = None

    def shards(self, requested: Sequence[PlannedShard]) -> Iterator[tuple[PlannedShard, IncomingShard]]:
        """Yield each shard; a fetched one must be released before the next one is requested."""
        fetching = {shard.name: _FetchedShard() for shard in requested if shard.staged and self._fetches}
        if fetching:
            # a daemon, so that a hub that has stopped answering does not keep an interrupted process alive
            self._thread = DaemonThread(self._fetch_all, "fetch", fetching)
            self._thread.start()
        for shard in requested:
            yield shard, fetching.get(shard.name) or _LocalShard(self._checkpoint, shard.name)
            if shard.name in fetching:
                self._room.release()

    def close(self) -> None:
        """Stop a fetch that is in progress; its arrived bytes are kept."""
        self._stop.set()
        self._room.release()
        if self._thread is not None:  # it may wait for the hub for longer, but then writes nothing
            self._thread.join(LAST_CHUNK_SECONDS)

    def _fetch_all(self, shards: dict[str, _FetchedShard]) -> None:
        for shard, fetched in shards.items():
            self._room.acquire()
            try:
                fetched.end(self._fetch(shard, fetched))
            except BaseException as error:
                fetched.fail(error)
                return

    def _fetch(self, shard: str, fetched: _FetchedShard) -> Path:
        earlier = True  # the first report is of bytes from before this fetch

        def on_have(path: Path, have: int) -> None:
            nonlocal earlier
            if self._stop.is_set():
                raise _FillStopped
            self._watch()
            tell(BytesFetched(shard, fetched.advance(path, have), earlier))
            earlier = False

        if self._stop.is_set():
            raise _FillStopped
        return self._checkpoint.acquire(shard, on_have)


class Filler:
    """Fills layer files of a split. Only a few files are open at a time, however many the shard has tensors for.

    Args:
        work: the split, or the part of it that is filled here.
        mover: the threads.
        profiler: records the time of fetching.
    """

    def __init__(self, work: SplitWork, mover: Mover, profiler: Profiler) -> None:
        self._work = work
        self._plan = work.plan
        self._mover = mover
        self._profiler = profiler
        self._files = OpenFiles()

    def fill(
        self, shard: PlannedShard, arriving: IncomingShard, targets: dict[str, FillTarget], layers: Sequence[str]
    ) -> None:
        """Write the tensors that `shard` has for these layers to their unfinished files; nothing is synced.

        Args:
            shard: the shard to fill from.
            arriving: the same shard as it arrives.
            targets: gets the files of the layers, opened; the caller closes them, also after an error.
            layers: ids of those to fill.

        Raises:
            CorruptShardError: the shard differs from the planned one.
            HubError, MissingShardError: it cannot be fetched or found.
        """
        if self._work.shard_transfer is ShardTransfer.STREAM and shard.staged:
            self.open(targets, layers)
            self._move_stream(shard, targets)
        else:
            self._move_file(shard, arriving, targets, layers)

    def forms_of(self, shard: PlannedShard, layers: Iterable[str]) -> list[StoredForm]:
        """Return the stored forms that a shard provides for some layers."""
        forms = (form for layer in layers for form in self._plan.layouts[layer].forms)
        return [form for form in forms if form.source.file == shard.name]

    def open(self, targets: dict[str, FillTarget], layers: Iterable[str]) -> None:
        """Open the unfinished files of these layers into `targets`; files opened before an error are in it too."""
        for layer in layers:
            targets[layer] = self.target(self._plan.layouts[layer])

    def target(self, layout: LayerLayout) -> FillTarget:
        """Open the unfinished file of a layer."""
        file = self._open(layout, durable.PART_SUFFIX, layout.size)
        if not layout.scratch_bytes:
            return FillTarget(layout, file)
        try:
            scratch = self._open(layout, SCRATCH_SUFFIX, layout.scratch_bytes)
        except BaseException:
            file.close()
            raise
        return FillTarget(layout, file, scratch)

    def _open(self, layout: LayerLayout, suffix: str, size: int) -> durable.GrowingFile:
        return durable.GrowingFile(self.path(layout, suffix), size, write_back=True, files=self._files)

    def require_filled(self, shard: PlannedShard, layers: Iterable[str]) -> None:
        """Check that files filled elsewhere are here; a file that is created again would have holes instead."""
        for layer in layers:
            layout = self._plan.layouts[layer]
            expected = [(self.path(layout, durable.PART_SUFFIX), layout.size)]
            if layout.scratch_bytes:
                expected.append((self.path(layout, SCRATCH_SUFFIX), layout.scratch_bytes))
            for path, size in expected:
                if not path.exists() or path.stat().st_size != size:
                    raise IncompleteSplitError(
                        f"A worker wrote {shard.name} to {path}, but on this machine the file is missing or its size "
                        f"is not {size:,} bytes. Nothing was deleted.",
                        "Use a shared folder in which all machines see the same files, and make the same call again.",
                    )

    def _move_file(
        self, shard: PlannedShard, arriving: IncomingShard, targets: dict[str, FillTarget], layers: Sequence[str]
    ) -> None:
        """Move the arrived part of a shard while the rest arrives; no data is trusted before the shard is complete.

        If the header does not come first, the plan's offsets are used, and are compared when the shard is complete.
        """
        early = shard.header_first or not (shard.staged and shard.streams)

        def arrived(end: int) -> Path:
            with self._profiler.stage(shard.name, FETCH) if shard.staged else contextlib.nullcontext():
                return arriving.until(end) if shard.streams else arriving.whole()

        while True:
            try:
                path = arrived(LENGTH_BYTES)
                if not targets:
                    self.open(targets, layers)
                try:
                    if early:
                        self._compare(shard, _header_so_far(path, shard, arrived))
                    work = moves(self._plan, shard.name, targets)
                    self._mover.from_file(path, targets, work, arrived, shard.name, sums_sources=shard.needs_checksum)
                    if not early:
                        self._compare(shard, read_shard_header(arriving.whole(), shard.name))
                except FileNotFoundError:  # removed if its digest is wrong; `whole` then raises that error
                    arriving.whole()
                    raise
                except CorruptShardError as error:
                    arriving.whole()  # likewise: nothing was verified yet
                    raise CorruptShardError(f"At {path}: {error.problem}", self._advice(shard)) from None
                with self._profiler.stage(shard.name, FETCH) if shard.staged else contextlib.nullcontext():
                    arriving.whole()
            except StartedOverError:
                self._mover.sums.forget(self.forms_of(shard, layers))
            else:
                return

    def _move_stream(self, shard: PlannedShard, targets: dict[str, FillTarget]) -> None:
        with contextlib.closing(self._work.checkpoint.stream(shard.name)) as chunks:  # with its connection
            gaps = None if shard.header_first else Gaps(shard.tensors, shard.size)
            stream = ByteStream(chunks if gaps is None else gaps.watching(chunks))
            try:
                if gaps is None:
                    self._compare(shard, _streamed_header(stream, shard))
                self._mover.from_stream(shard.name, stream, targets, moves(self._plan, shard.name, targets))
                stream.finish()
                if gaps is not None:  # the digest is right, so this verifies the plan
                    self._compare(shard, parse_shard_header(gaps.read_at, shard.size, shard.name))
            except CorruptShardError as error:
                raise CorruptShardError(error.problem, self._advice(shard)) from None

    def _compare(self, shard: PlannedShard, header: Header) -> None:
        """Refuse a shard that differs from the planned one.

        The plan's header came over the network without a digest, or from a file that may have changed since.
        """
        selected = self._work.checkpoint.taken_from(shard.name, header)
        specs = {tensor.name: tensor for tensor in selected.tensors}
        differing = [tensor.name for tensor in shard.tensors if specs.get(tensor.name) != tensor]
        if differing:
            raise CorruptShardError(
                f"{shard.name} differs from the planned file: {differing[0]!r} has another offset, or is missing."
            )

    def _advice(self, shard: PlannedShard) -> str:
        safe = f"Finished layers are kept in {self._work.folder}."
        if shard.staged:
            return (
                f"Make the same call again: the download may have been damaged. {safe} If the error remains, the plan "
                "is based on a damaged header: delete that folder, and make the call again."
            )
        return (
            f"{safe} For a repository on the hub make the same call again, or delete that folder first. For a local "
            "checkpoint put an undamaged copy at that path and make the call again. Do not delete other files: other "
            "shards may be deleted already."
        )

    def path(self, layout: LayerLayout, suffix: str = "") -> Path:
        """The path of a layer's file, or of another one of the layer."""
        return self._work.folder / (layout.file_name + suffix)


def _header_so_far(path: Path, shard: PlannedShard, arrived: Callable[[int], object]) -> Header:
    if not (shard.staged and shard.header_first):
        return read_shard_header(path, shard.name)
    with PositionalFile(path) as file:
        end = _header_end(file.read_at(0, LENGTH_BYTES), shard)
        arrived(end)
        return parse_shard_header(file.read_at, shard.size, shard.name)


def _streamed_header(stream: ByteStream, shard: PlannedShard) -> Header:
    prefix = bytearray(LENGTH_BYTES)
    stream.read_into(memoryview(prefix))
    remainder = bytearray(_header_end(bytes(prefix), shard) - LENGTH_BYTES)
    stream.read_into(memoryview(remainder))
    return parse_shard_header(HeldBytes(memoryview(prefix + remainder), 0).read_at, shard.size, shard.name)


def _header_end(prefix: bytes, shard: PlannedShard) -> int:
    """Return the number of bytes from the start of the shard that contain its header; `prefix` are the first eight."""
    if not begins_gguf(prefix):
        return LENGTH_BYTES + header_length(prefix, shard.size, shard.name)
    # a GGUF header has no length; it ends before the first tensor that is used
    return min([*(spec.offset for spec in shard.tensors), shard.size, MAX_HEADER_BYTES])
