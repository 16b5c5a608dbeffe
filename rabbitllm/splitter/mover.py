"""Moves runs of bytes from a shard to their offsets in layer files, quantizing where needed, in a few threads.

From a file each thread reads for itself, at any offset; from a stream one reader fills a fixed number of buffers in
order. Memory is bounded by those buffers; it does not grow with a tensor, a layer or a shard. Every byte that is
written is also summed (CRC-32), so that a layer's checksum needs no second read. Journals and deletions are handled
elsewhere.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rabbitllm.base.forks import require_room_for_a_thread
from rabbitllm.base.progress import BytesDone, BytesFetched, tell
from rabbitllm.errors import CorruptShardError, IncompleteSplitError
from rabbitllm.formats.tensor_spec import Readable
from rabbitllm.quant.schemes import SCALE_BYTES, STORED
from rabbitllm.splitter._held_bytes import HeldBytes
from rabbitllm.splitter.plan import CHUNK_BYTES, Move
from rabbitllm.splitter.sums import Sums
from rabbitllm.storage import durable
from rabbitllm.storage.files import DIRECT_ALIGNMENT, PositionalFile, page_aligned
from rabbitllm.store.layer_file import TENSOR_ALIGNMENT, LayerLayout
from rabbitllm.store.stored_form import ScalesForm, StoredForm, constants, settled
from rabbitllm.store.tensor_values import read_tensor
from rabbitllm.telemetry.passes import FETCH, QUANTIZE, READ, SYNC, WRITE
from rabbitllm.telemetry.profiler import Profiler


class ByteStream:
    """Reads the bytes of a shard in order, from chunks of any size."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._chunk = memoryview(b"")
        self._at = 0

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer` with the next bytes; the stream must have enough of them."""
        while buffer:
            piece = self._next(len(buffer))
            buffer[: len(piece)] = piece
            buffer = buffer[len(piece) :]

    def skip_to(self, offset: int) -> None:
        """Skip to an offset that is not behind the current one."""
        while self._at < offset:
            self._next(offset - self._at)

    def finish(self) -> None:
        """Read the rest of the stream, so that the sender reaches its end."""
        for _ in self._chunks:
            pass

    def _next(self, limit: int) -> memoryview:
        while not self._chunk:
            self._chunk = memoryview(next(self._chunks))
        piece, self._chunk = self._chunk[:limit], self._chunk[limit:]
        self._at += len(piece)
        return piece


def settled_parts(form: ScalesForm, scratch: Path) -> Generator[tuple[int, int, memoryview]]:
    """Yield the stored parts of a tensor with quantized scales, a run at a time.

    Args:
        form: the tensor.
        scratch: the scratch file of its layer, which contains all its scales.

    Yields:
        Number of the part, offset in it in bytes, and the run.

    Raises:
        IncompleteSplitError: the file ends too early.
    """
    with PositionalFile(scratch) as file:

        def read(first: int, count: int) -> npt.NDArray[np.float32]:
            run = bytearray(count * SCALE_BYTES)
            if file.read_into(memoryview(run), form.source.offset + first * SCALE_BYTES) != len(run):
                raise IncompleteSplitError(
                    f"{scratch} is truncated within the scales of {form.of.name!r}.",
                    "If every shard of the source is still there (or it is on the hub), delete that folder and "
                    "call again. Otherwise keep it: it may hold the only copy of some tensors.",
                )
            return np.frombuffer(run, np.float32)

        yield from settled(form, read)


SPARE_BUFFERS = 2
"""Buffers of a stream in addition to one per thread, so that the reader does not wait for the slowest."""
STRIDED_READERS = 2
"""Threads that rearrange elements at a time; each holds up to `tensor_spec.STAGING_BYTES` in addition to its buffer."""
QUEUED_BATCHES = 4
"""Batches of a file that are queued ahead, per thread."""


@dataclass(frozen=True, slots=True)
class FillTarget:
    """A layer file that is being filled: its layout, the file, and its scratch file if it has one."""

    layout: LayerLayout
    file: durable.GrowingFile
    scratch: durable.GrowingFile | None = None

    def write(self, part: str, begin: int, data: memoryview, *, aligned: bool = False) -> None:
        """Write a run of a stored part at `begin` bytes into that part, in the layer file or the scratch file."""
        scratch_offset = self.layout.scratch_offsets.get(part)
        if scratch_offset is None:
            self.file.write_at(data, self.layout.offsets[part] + begin, aligned=aligned)
        else:
            assert self.scratch is not None
            self.scratch.write_at(data, scratch_offset + begin, aligned=aligned)

    def sync(self) -> None:
        """Sync the files; on return everything that was written would survive a power cut."""
        self.file.sync()
        if self.scratch is not None:
            self.scratch.sync()

    def close(self) -> None:
        """Close the files; does not sync."""
        self.file.close()
        if self.scratch is not None:
            self.scratch.close()


@contextlib.contextmanager
def open_targets() -> Iterator[dict[str, FillTarget]]:
    """Yield a mapping for open files; those that are in it at the end are closed."""
    targets: dict[str, FillTarget] = {}
    try:
        yield targets
    finally:
        for target in targets.values():
            target.close()


class Mover:
    """The threads that move bytes, and in `sums` the checksums of what they have written.

    Args:
        threads: number of threads.
        profiler: records every read, quantization and write.
        watch: called before each batch; may raise to stop.
        fitted: whether scales of 4bit are fitted to their blocks.
    """

    def __init__(self, threads: int, profiler: Profiler, watch: Callable[[], None], *, fitted: bool = False) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="split")
        self._threads = threads
        self._fitted = fitted
        self._profiler = profiler
        self._watch = watch
        self._local = threading.local()
        self._strided = threading.Semaphore(STRIDED_READERS)
        self.sums = Sums()

    def close(self) -> None:
        """Stop the threads; batches that have not begun are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def sync(self, targets: Iterable[FillTarget]) -> None:
        """Sync these files; on return everything written to them is durable."""
        self._finish([self._submit(self._sync, target) for target in targets])

    def _sync(self, target: FillTarget) -> None:
        with self._profiler.stage(target.layout.layer.id, SYNC):
            target.sync()

    def from_file(
        self,
        path: Path,
        targets: Mapping[str, FillTarget],
        work: Iterable[Move],
        arrived: Callable[[int], object],
        label: str | None = None,
        *,
        sums_sources: bool = False,
    ) -> None:
        """Carry out `work`, in the shard's own order, from a shard that is a file, or is becoming one.

        Args:
            path: path of the file.
            targets: layer -> its file.
            work: the moves.
            arrived: waits until that many bytes from the start are in the file; may raise to stop.
            label: shard to report the bytes for; None if they are not the source's.
            sums_sources: also compute checksums of the data before quantization.

        Raises:
            CorruptShardError: the file cannot be read, or is shorter than its header says.
        """
        running: list[Future[None]] = []
        with PositionalFile(path) as source:
            source.advise_sequential()
            try:
                for batch in _batches(work):
                    self.sums.expect((move.form for move in batch), sources=sums_sources)
                    arrived(max(move.span[1] for move in batch))
                    while len(running) >= QUEUED_BATCHES * self._threads:
                        wait(running, return_when=FIRST_COMPLETED)
                        running = _still_running(running)
                    running.append(self._submit(self._run_from_file, source, targets, batch, label))
                self._finish(running)
            finally:
                wait(running)

    def from_stream(
        self, label: str, stream: ByteStream, targets: Mapping[str, FillTarget], work: Iterable[Move]
    ) -> None:
        """Carry out `work`, in the shard's own order, from its bytes as they arrive.

        The stream is left where the last run ends; written data must not be trusted until the stream is complete.
        """
        spare: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(self._threads + SPARE_BUFFERS):
            spare.put(page_aligned(CHUNK_BYTES))
        running: list[Future[None]] = []
        try:
            for batch in _windows(work):
                self.sums.expect(move.form for move in batch)
                running = _still_running(running)
                buffer = spare.get()
                begin, end = batch[0].span[0], max(move.span[1] for move in batch)
                with self._profiler.stage(label, FETCH, end - begin):
                    stream.skip_to(begin)
                    stream.read_into(buffer[: end - begin])
                tell(BytesFetched(label, end - begin))
                running.append(self._submit(self._run_from_buffer, label, buffer, spare, targets, batch))
        finally:
            wait(running)
        _still_running(running)

    def settle(self, targets: Iterable[tuple[FillTarget, Path]]) -> None:
        """Quantize scales in scratch files, which are complete now.

        Args:
            targets: layer files, each with the path of its scratch file.
        """
        work = [(form, target, path) for target, path in targets for form in target.layout.settles]
        self.sums.forget(form for form, _, _ in work)
        self.sums.expect(form for form, _, _ in work)
        self._finish([self._submit(self._settle, *job) for job in work])

    def _settle(self, form: ScalesForm, target: FillTarget, path: Path) -> None:
        self._watch()
        stage = self._profiler.stage(target.layout.layer.id, QUANTIZE, form.source.nbytes)
        with stage, contextlib.closing(settled_parts(form, path)) as runs:
            for part, begin, content in runs:
                self._put(target, form, part, begin, content)

    def _finish(self, futures: list[Future[None]]) -> None:
        """Wait for all futures; the first failure cancels the rest."""
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        wait(pending)
        for future in done:
            future.result()

    def _run_from_file(
        self, source: PositionalFile, targets: Mapping[str, FillTarget], batch: list[Move], label: str | None
    ) -> None:
        self._watch()
        written = 0
        for move in batch:
            buffer = self._own_buffer()[: move.nbytes]
            if not move.form.keeps_blocks or self.sums.sums_source(move.form):
                with self._profiler.stage(move.layer, READ, move.nbytes):
                    self._read(source, buffer, move)
            if move.form.scheme is not None and self.sums.sums_source(move.form):
                self.sums.add_source(move.form, move.begin, buffer)
            if move.form.keeps_blocks:
                buffer = self._kept(source, move)
            written += self._write(targets[move.layer], move, buffer, aligned=True)
        if label is not None:
            tell(_bytes_done(label, batch, written))

    def _kept(self, source: Readable, move: Move) -> memoryview:
        """The unchanged blocks of a run, in this thread's own buffer."""
        spec, columns = move.form.source, move.form.source.shape[-1]
        rows = spec.row_blocks
        assert rows is not None
        first, count = move.first // columns, move.elements // columns
        buffer = self._own_buffer()[: count * rows.shape[-1]]
        if move.nbytes and read_tensor(source, rows, first * rows.shape[-1], buffer) != len(buffer):
            raise CorruptShardError(f"{spec.file} ends within the tensor {spec.name!r}.")
        return buffer

    def _read(self, source: PositionalFile, buffer: memoryview, move: Move) -> None:
        spec = move.form.source
        try:
            with self._strided if spec.strides is not None else contextlib.nullcontext():
                count = read_tensor(source, spec, move.begin, buffer)
        except OSError as error:
            raise CorruptShardError(f"{source.path} cannot be read at byte {move.offset:,}: {error}.") from error
        if count == len(buffer):
            return
        if spec.strides is None and spec.blocks is None:
            position, end = move.offset + count, move.offset + move.nbytes
            raise CorruptShardError(f"{source.path} ends at byte {position:,}; by its header it has at least {end:,}.")
        raise CorruptShardError(f"{source.path} ends within the tensor {spec.name!r}.")

    def _run_from_buffer(
        self,
        label: str,
        buffer: memoryview,
        spare: queue.SimpleQueue[memoryview],
        targets: Mapping[str, FillTarget],
        batch: list[Move],
    ) -> None:
        written = 0
        try:
            self._watch()
            for move in batch:
                begin, end = (offset - batch[0].span[0] for offset in move.span)
                data = buffer[begin:end]
                if move.form.source.blocks is not None:
                    held = HeldBytes(data, move.span[0])
                    data = self._kept(held, move) if move.form.keeps_blocks else self._own_buffer()[: move.nbytes]
                    if not move.form.keeps_blocks:
                        read_tensor(held, move.form.source, move.begin, data)
                elif move.form.scheme is not None and begin % TENSOR_ALIGNMENT:  # kernels require aligned values
                    copy = self._own_buffer()[: move.nbytes]
                    copy[:] = data
                    data = copy
                aligned = begin % DIRECT_ALIGNMENT == 0 or move.form.source.blocks is not None
                written += self._write(targets[move.layer], move, data, aligned=aligned)
        finally:
            spare.put(buffer)
        tell(_bytes_done(label, batch, written))

    def _write(self, target: FillTarget, move: Move, data: memoryview, *, aligned: bool) -> int:
        """Write a run, quantized if its tensor is; return the number of bytes written for it."""
        form = move.form
        if form.scheme is None:
            with self._profiler.stage(move.layer, WRITE, move.nbytes):
                self._put(target, form, 0, move.first, data, aligned=aligned)
            return move.nbytes
        written, entry = 0, STORED[form.scheme]
        if form.keeps_blocks:
            written = len(data)
            with self._profiler.stage(move.layer, WRITE, written):
                self._put(target, form, 0, entry.payload_bytes(move.first), data)
        elif move.nbytes:
            with self._profiler.stage(move.layer, QUANTIZE, move.nbytes):
                from rabbitllm.quant.quantize import quantize_blocks  # torch comes with it

                codes, scales = quantize_blocks(form.scheme, data, form.source.dtype, "cpu", fitted=self._fitted)
            written = len(codes) + len(scales)
            with self._profiler.stage(move.layer, WRITE, written):
                self._put(target, form, 0, entry.payload_bytes(move.first), codes)
                if scales:
                    self._put(target, form, 1, move.first // entry.block * SCALE_BYTES, scales)
        if move.first == 0:
            fixed = constants(form)
            for part, placed in enumerate(form.parts):
                if placed.name in fixed:
                    self._put(target, form, part, 0, memoryview(fixed[placed.name]))
        return written

    def _put(
        self,
        target: FillTarget,
        form: StoredForm | ScalesForm,
        part: int,
        begin: int,
        data: memoryview,
        *,
        aligned: bool = False,
    ) -> None:
        """Write a run of a stored part at `begin` bytes into it, and add its checksum."""
        name = form.parts[part].name
        target.write(name, begin, data, aligned=aligned)
        waits = name in target.layout.scratch_offsets
        self.sums.add(form, part, begin, data, None if waits else target.layout.offsets[name])

    def _submit(self, job: Callable[..., None], *args: object) -> Future[None]:
        require_room_for_a_thread()  # the pool starts its threads on demand
        return self._pool.submit(job, *args)

    def _own_buffer(self) -> memoryview:
        """Return this thread's own page-aligned buffer, allocated once."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = page_aligned(CHUNK_BYTES)
        buffer: memoryview = self._local.buffer
        return buffer


def _bytes_done(shard: str, batch: list[Move], written: int) -> BytesDone:
    sizes = [move.form.source.in_file(move.nbytes) for move in batch]
    quantized = sum(size for size, move in zip(sizes, batch, strict=True) if move.form.scheme is not None)
    return BytesDone(shard, sum(sizes), batch[-1].layer, quantized, written)


def _still_running(futures: list[Future[None]]) -> list[Future[None]]:
    """Return the futures that are not done; raise the error of one that failed."""
    for future in futures:
        if future.done():
            future.result()
    return [future for future in futures if not future.done()]


def _batches(work: Iterable[Move]) -> Iterator[list[Move]]:
    """Group moves into batches of about one chunk, so that small tensors do not cost a task each."""
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


def _windows(work: Iterable[Move]) -> Iterator[list[Move]]:
    """Group moves into batches that lie within one chunk of the shard."""
    batch: list[Move] = []
    for move in work:
        if batch and move.span[1] - batch[0].span[0] > CHUNK_BYTES:
            yield batch
            batch = []
        batch.append(move)
    if batch:
        yield batch
