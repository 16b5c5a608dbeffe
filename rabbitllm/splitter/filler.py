"""Fills unfinished layer files from one shard: opens them, moves its bytes as they arrive, sums the written bytes.

This is the part before a shard counts as used up; filling from the same shard again writes the same bytes at the same
offsets. It writes no journal, gives no file its final name and deletes nothing, so any process that sees the source
and the split directory may do it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rabbitllm.errors import CorruptShardError, IncompleteSplitError
from rabbitllm.formats.safetensors_file import LENGTH_BYTES, header_length, parse_header
from rabbitllm.formats.shard_header import parse_torch_header, read_shard_header
from rabbitllm.formats.tensor_spec import Header
from rabbitllm.quant.compression import StoredForm
from rabbitllm.splitter.byte_stream import ByteStream
from rabbitllm.splitter.disk_use import ShardTransfer
from rabbitllm.splitter.gaps import Gaps
from rabbitllm.splitter.mover import FillTarget, Mover
from rabbitllm.splitter.moves import moves
from rabbitllm.splitter.plan import PlannedShard
from rabbitllm.splitter.shard_fetcher import IncomingShard, StartedOverError
from rabbitllm.splitter.work import SplitWork
from rabbitllm.storage import durable
from rabbitllm.storage.files import OpenFiles
from rabbitllm.store.layer_file import SCRATCH_SUFFIX, LayerLayout
from rabbitllm.telemetry.profiler import FETCH, Profiler


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
            CorruptShardError: the shard is not the one that was planned with.
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
            layout = self._plan.layouts[layer]
            targets[layer] = self.target(layout)

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
        return durable.GrowingFile(self._path(layout, suffix), size, write_back=True, files=self._files)

    def require_filled(self, shard: PlannedShard, layers: Iterable[str]) -> None:
        """Check that files filled elsewhere are here; a file that is created again would have holes instead."""
        for layer in layers:
            layout = self._plan.layouts[layer]
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

    def _move_file(
        self, shard: PlannedShard, arriving: IncomingShard, targets: dict[str, FillTarget], layers: Sequence[str]
    ) -> None:
        """Move the arrived part of a shard while the rest arrives; nothing of it is trusted before it is complete.

        If the header does not come first, the plan's offsets are used and compared when all is here.
        """
        as_it_comes = shard.streams
        early = shard.header_first or not (shard.staged and as_it_comes)

        def arrived(end: int) -> Path:
            with self._profiler.stage(shard.name, FETCH) if shard.staged else contextlib.nullcontext():
                return arriving.until(end) if as_it_comes else arriving.whole()

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
                    self._compare(shard, parse_torch_header(gaps.read_at, shard.size, shard.name))
            except CorruptShardError as error:
                raise CorruptShardError(error.problem, self._advice(shard)) from None

    def _compare(self, shard: PlannedShard, header: Header) -> None:
        """Refuse a shard that is not, or no longer, the one that was planned with.

        The plan's header came over the network without a digest, or from a file that may have changed since.
        """
        taken = self._work.checkpoint.taken_from(shard.name, header)
        found = {tensor.name: tensor for tensor in taken.tensors}
        other = [tensor.name for tensor in shard.tensors if found.get(tensor.name) != tensor]
        if other:
            raise CorruptShardError(
                f"{shard.name} is not the file that the plan was made from: {other[0]!r} is elsewhere in it, or not "
                "at all."
            )

    def _advice(self, shard: PlannedShard) -> str:
        safe = f"Layers finished so far are safe in {self._work.folder}."
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

    def _path(self, layout: LayerLayout, suffix: str) -> Path:
        return self._work.folder / (layout.file_name + suffix)


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
