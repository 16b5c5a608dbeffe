"""Measures how fast this machine reads and multiplies, with the engine's own reader and products.

A token reads every weight once, so in a large model none is found in the processor's caches: measured matrices are many
times larger than those caches. Files are read in pieces as large as the units that will be streamed, and are those that
are on the disk already; if there are none, an unnamed temporary file is written.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rabbitllm.base.forks import DaemonThread
from rabbitllm.base.rounding import round_up
from rabbitllm.engine.devices import Device, aligned_host
from rabbitllm.engine.free_memory import available_ram
from rabbitllm.engine.placement import SLOTS
from rabbitllm.engine.prefetch import HostBuffers
from rabbitllm.engine.span_reader import BLOCK, READ_BYTES, THROUGH_THE_CACHE, FileSpan, ReadMode, SpanReader
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.estimate.cost_model import BITSANDBYTES
from rabbitllm.quant import coded
from rabbitllm.quant.products import FusedMatrix, Matrix
from rabbitllm.quant.schemes import SCHEMES, STORED, Quantized, code_values
from rabbitllm.storage import durable
from rabbitllm.storage.files import PositionalFile, page_aligned

DIRECT, DROPPED = ReadMode(direct=True), ReadMode(drop=True)

# Products

SET_BYTES = 256 << 20
"""Bytes of all matrices that are multiplied with in turn."""
MATRIX_BYTES = 64 << 20
"""A larger matrix is represented by some of its rows."""
MEASURING_BYTES = 256 << 20
"""Of memory; with less, compilers and samples might have the system end the process."""
SECONDS = 0.12
"""Duration of one measurement, after an uncounted round that loads kernels and touches the memory."""
_BYTE = 0x3C
"""Byte that weights are filled with: a small number in every floating dtype, two codes at 4bit and one at 8bit."""
_BLOCK = 64
"""Elements that share a scale, bitsandbytes' default."""

Shapes = Mapping[tuple[int, int], int]
"""(rows, columns) -> bytes that a token needs of matrices of that shape."""


@dataclass(frozen=True)
class WorkingSet:
    """Matrices in memory (or modules of bitsandbytes that hold one), their stored bytes, and the dtype of inputs."""

    weights: Sequence[torch.Tensor | nn.Linear]
    nbytes: int
    device: Device
    dtype: torch.dtype

    def rate(self, inputs: int, *, disturbed: bool = False) -> float:
        """Measure the bytes of weights per second, with this many inputs at a time.

        Undisturbed, by the median of rounds. While other work runs (`disturbed`), by their mean, since most of the
        disturbance may fall into a few rounds.
        """

        @functools.cache
        def rows(width: int, dtype: torch.dtype) -> torch.Tensor:
            memory = memory_of(self.device, mapped=False)
            return _filled(memory, inputs * width * dtype.itemsize).view(dtype).view(1, inputs, width)

        products: list[Callable[[], object]] = [
            functools.partial(nn.functional.linear, rows(weight.shape[1], weight.dtype), weight)
            if isinstance(weight, torch.Tensor)
            else functools.partial(weight, rows(weight.in_features, self.dtype))
            for weight in self.weights
        ]
        with torch.inference_mode():
            taken = _rounds(products, self.device)
        return self.nbytes / (statistics.mean(taken) if disturbed else statistics.median(taken))


def _rounds(work: Sequence[Callable[[], object]], device: Device) -> list[float]:
    """Repeat all of the work, and return the seconds of each round."""
    taken: list[float] = []
    begun = 0.0
    while not taken or time.perf_counter() - begun < SECONDS:
        start = time.perf_counter()
        for one in work:
            one()
        device.synchronise()
        if begun:
            taken.append(time.perf_counter() - start)
        else:
            begun = time.perf_counter()
    return taken


Memory = Callable[[int], torch.Tensor]
"""Allocates uint8 (nbytes,)."""


def memory_of(device: Device, *, mapped: bool) -> Memory:
    """Return an allocator of the kind of memory that weights are in.

    Args:
        device: if it does not share host memory, its own memory is used.
        mapped: small pages, as for weights in mapped files; else as in the loader's buffers.
    """
    if not device.shares_host_memory:
        return device.device_buffer
    return small_pages if mapped else device.host_buffer


def small_pages(nbytes: int) -> torch.Tensor:
    """Allocate host memory in small pages, as of mapped files: products with codes are slower there by a fifth."""
    if sys.platform != "linux":
        return aligned_host(nbytes)
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def can_measure() -> bool:
    """Whether this process may take the memory that measuring needs."""
    return available_ram() >= MEASURING_BYTES


def set_bytes() -> int:
    """Bytes of matrices to measure with: as many as no cache holds, or a part of what this process may still take."""
    return min(SET_BYTES, available_ram() // 8)


def working_set(
    form: str, shapes: Shapes, dtype: torch.dtype, device: Device, nbytes: int, *, mapped: bool = False
) -> WorkingSet:
    """Make matrices of these shapes, in proportion to the bytes that a token needs of each.

    Args:
        form: see `cost_model.Product`.
        shapes: at least one.
        dtype: of the inputs to codes.
        device: device of the matrices.
        nbytes: bytes of all the model's weights in this form: a small model stays in the processor's caches.
        mapped: see `memory_of`.
    """
    memory = memory_of(device, mapped=mapped)
    nbytes = min(nbytes, set_bytes())
    total = sum(shapes.values()) or 1
    weights: list[torch.Tensor | nn.Linear] = []
    made = 0
    for (rows, columns), share in shapes.items():
        row_bytes = _nbytes(form, 1, columns)
        few = max(min(rows, min(MATRIX_BYTES, set_bytes()) // row_bytes), 1)
        for _ in range(max(round(nbytes * share / total / (few * row_bytes)), 1)):
            weights.append(_weight(form, few, columns, dtype, memory, fused=not device.shares_host_memory))
            made += _nbytes(form, few, columns)
    return WorkingSet(weights, made, device, dtype)


def _nbytes(form: str, rows: int, columns: int) -> int:
    """Return the bytes of a matrix as stored, with its scales."""
    elements = rows * columns
    if form.startswith(BITSANDBYTES):
        return elements + 4 * rows if "8bit" in form else elements // 2 + -(-elements // _BLOCK) * 4
    if coded.is_scheme(form):
        return coded.form_named(form, (rows, columns)).nbytes
    if form in STORED and STORED[form].block_bytes:
        return elements // STORED[form].block * STORED[form].block_bytes
    if form in SCHEMES:
        return elements // SCHEMES[form].codes_a_byte + -(-elements // SCHEMES[form].block) * 4
    dtype: torch.dtype = getattr(torch, form)
    return elements * dtype.itemsize


def _weight(
    form: str, rows: int, columns: int, dtype: torch.dtype, memory: Memory, *, fused: bool
) -> torch.Tensor | nn.Linear:
    if form.startswith(BITSANDBYTES):
        return bitsandbytes_module(form, rows, columns, memory)
    if coded.is_scheme(form):
        published = coded.form_named(form, (rows, columns))
        codes, scales = (_filled(memory, nbytes) for nbytes in (rows * published.row_bytes, published.scale_bytes))
        return QuantizedWeight(coded.CodedMatrix(published, codes, scales), dtype)
    if form not in STORED:
        plain: torch.dtype = getattr(torch, form)
        return _filled(memory, rows * columns * plain.itemsize).view(plain).view(rows, columns)
    elements = rows * columns
    if STORED[form].block_bytes:
        blocks, nothing = _filled(memory, _nbytes(form, rows, columns)), torch.empty(0)
        return QuantizedWeight(Matrix(Quantized(form, (rows, columns), None), blocks, nothing, nothing), dtype)
    payload = _filled(memory, elements // SCHEMES[form].codes_a_byte).view(-1, 1)
    absmax = torch.ones(-(-elements // SCHEMES[form].block), device=payload.device)
    kind, table = FusedMatrix if fused else Matrix, code_values(form).to(payload.device)
    return QuantizedWeight(kind(Quantized(form, (rows, columns), "float32"), payload, absmax, table), dtype)


def bitsandbytes_module(form: str, rows: int, columns: int, memory: Memory) -> nn.Linear:
    """Return one of bitsandbytes' own modules around made-up codes, constructed as for a checkpoint.

    Args:
        form: "bitsandbytes 8bit", or "bitsandbytes 4bit in " and a dtype's name.
        rows, columns: of the matrix.
        memory: for its codes.
    """
    from bitsandbytes import functional
    from bitsandbytes import nn as modules

    made: Any
    if "8bit" in form:
        codes = _filled(memory, rows * columns).view(torch.int8).view(rows, columns)
        with torch.device("meta"):
            made = modules.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False, threshold=6.0)
        scales = torch.ones(rows, device=codes.device)
        made.weight = modules.Int8Params(codes, requires_grad=False, CB=codes, SCB=scales)
        return made.eval()  # type: ignore[no-any-return]
    compute = getattr(torch, form.rpartition(" ")[2])
    codes = _filled(memory, rows * columns // 2).view(-1, 1)
    with torch.device("meta"):
        made = modules.Linear4bit(columns, rows, bias=False, compute_dtype=compute, quant_type="nf4")
    table = functional.get_4bit_type("nf4", device=codes.device)
    absmax = torch.ones(-(-rows * columns // _BLOCK), device=codes.device)
    state = functional.QuantState(
        absmax, torch.Size((rows, columns)), table, blocksize=_BLOCK, quant_type="nf4", dtype=compute
    )
    made.weight = modules.Params4bit(
        codes, requires_grad=False, quant_state=state, quant_type="nf4", bnb_quantized=True, module=made
    )
    return made.eval()  # type: ignore[no-any-return]


def _filled(memory: Memory, nbytes: int) -> torch.Tensor:
    """Allocate filled memory, uint8 (nbytes,): untouched memory has no pages, and is read at no cost."""
    return memory(nbytes).fill_(_BYTE)


# Reading


SAMPLE_BYTES = 256 << 20
"""The most that is read to find a rate."""
WRITTEN_BYTES = 128 << 20
"""The most that is written if there are no files to read."""
READ_SECONDS = 0.25
"""Duration of a measurement; the rest of the sample is then skipped."""
APART_BYTES = 128 << 20
"""The most memory that is filled in turns."""
WRITE_SECONDS = 1.0
UPLOADED_BYTES = 64 << 20
"""Bytes that are copied to a device at a time."""


class FileSample:
    """Runs of bytes of files on a disk.

    Args:
        files: existing files.
        unit: bytes of the largest unit that is streamed, which the engine reads at once.
        whole: whether runs always have the length `unit`, as for an expert; else at most that of one system call.

    Attributes:
        spans: the runs, spread evenly over the files.
        bytes_read: bytes that the last measurement has read.
    """

    def __init__(self, files: Sequence[Path], unit: int, *, whole: bool = False) -> None:
        self._files = {str(number): path for number, path in enumerate(files)}
        sizes = {name: path.stat().st_size for name, path in self._files.items()}
        self.bytes_read = 0
        self.spans = tuple(_pieces(sizes, max(unit if whole else min(unit, READ_BYTES), BLOCK)))
        longest = max((span.end for span in self.spans), default=BLOCK)
        # as much memory in turns as the engine fills: less might be found in the processor's caches
        count = min(SLOTS * -(-unit // longest), max(APART_BYTES // longest, SLOTS))
        self._buffers = itertools.cycle([page_aligned(longest) for _ in range(count)])

    def path(self, file: str) -> Path:
        """Return a file's path, for `SpanReader`."""
        return self._files[file]

    def rate(self, mode: ReadMode) -> float | None:
        """Measure bytes per second from the disk; None if it cannot be read in this mode, or not at all."""
        self.forget()
        found = self._read(mode)
        self.forget()
        return found

    def cached_rate(self) -> float | None:
        """Measure bytes per second from the page cache, which keeps the sample afterwards."""
        if self._read(THROUGH_THE_CACHE) is None:
            return None
        found: list[float] = []
        start = time.perf_counter()
        while len(found) < 3 or time.perf_counter() - start < READ_SECONDS / 2:
            rate = self._read(THROUGH_THE_CACHE)
            if rate is None:
                return None
            found.append(rate)
        return statistics.median(found)

    def mapped_rate(self) -> float | None:
        """Measure bytes per second from the disk of mapped files that are touched page by page, in scattered pieces.

        None if they cannot be mapped.
        """
        self.forget()
        done, start = 0, time.perf_counter()
        try:
            for span in self.spans:
                with self.path(span.file).open("rb") as file:
                    at = span.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
                    length = span.offset + span.nbytes - at
                    with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=at) as mapped:
                        sum(mapped[0 : length : mmap.PAGESIZE])
                done += span.nbytes
                if time.perf_counter() - start > READ_SECONDS:
                    break
        except (OSError, ValueError):
            return None
        self.forget()
        return done / (time.perf_counter() - start) if done else None

    def forget(self) -> None:
        """Drop the sample from the page cache."""
        for span in self.spans:
            with contextlib.suppress(OSError), PositionalFile(self.path(span.file)) as file:
                file.drop_cache(span.offset, span.nbytes)

    def _read(self, mode: ReadMode, stop: threading.Event | None = None) -> float | None:
        """Measure bytes per second: of all spans, for `READ_SECONDS` at most; or again and again until `stop`."""
        reader, done, start = SpanReader(self, mode), 0, time.perf_counter()
        try:
            for span in self.spans if stop is None else itertools.cycle(self.spans):
                reader.read([span], next(self._buffers))
                done += span.nbytes
                if stop.is_set() if stop is not None else time.perf_counter() - start > READ_SECONDS:
                    break
        except OSError:
            return None
        self.bytes_read = done
        return done / (time.perf_counter() - start) if done and reader.mode == mode else None

    @contextlib.contextmanager
    def reading(self, mode: ReadMode) -> Iterator[list[float | None]]:
        """Read repeatedly in a thread while the context is open; its rate is in the list afterwards."""
        stop, found = threading.Event(), list[float | None]()
        thread = DaemonThread(lambda: found.append(self._read(mode, stop)), "background-read")
        thread.start()
        try:
            yield found
        finally:
            stop.set()
            thread.join()


def _pieces(sizes: dict[str, int], piece: int) -> Iterator[FileSpan]:
    """Yield spans that are spread evenly over files, of at most `SAMPLE_BYTES` in all."""
    whole = [
        FileSpan(file, at, min(piece, size - at), 0)
        for file, size in sizes.items()
        for at in range(0, size, round_up(piece, BLOCK))
    ]
    count = max(SAMPLE_BYTES // piece, 1)
    yield from whole[:: max(-(-len(whole) // count), 1)]


@contextlib.contextmanager
def something_to_read(folder: Path, files: Sequence[Path], min_free: int) -> Iterator[Sequence[Path]]:
    """Yield files on the disk of a folder: those of `files` that are on it, or one that is written for this.

    Args:
        folder: the folder; if it does not exist, its nearest existing parent.
        files: files that may be on the same disk.
        min_free: bytes of it to keep free; without room nothing is written, and no file is yielded.
    """
    at = next(place for place in (folder, *folder.parents) if place.is_dir())
    disk = at.stat().st_dev
    here = [path for path in files if path.is_file() and path.stat().st_dev == disk]
    if sum(path.stat().st_size for path in here):
        yield here
        return
    room = shutil.disk_usage(at).free - min_free
    if room < WRITTEN_BYTES or not Path("/proc/self/fd").exists():
        yield []
        return
    with contextlib.ExitStack() as stack:
        try:
            descriptor = stack.enter_context(durable.nameless_file(at, _noise()))
        except OSError:  # a folder that cannot be written to
            yield []
            return
        yield [Path(f"/proc/self/fd/{descriptor}")]


def _noise() -> Iterator[bytes]:
    """Yield incompressible data, for a second at most."""
    generator, start = np.random.default_rng(0), time.perf_counter()
    for _ in range(WRITTEN_BYTES // READ_BYTES):
        yield generator.bytes(READ_BYTES)
        if time.perf_counter() - start > WRITE_SECONDS:
            return


def upload_rate(device: Device) -> float:
    """Measure bytes per second from host memory to a device that does not share it, copied as in the engine."""
    memory = HostBuffers(device)  # unpins the memory before it is freed
    host, buffer = memory.take_anyhow(UPLOADED_BYTES).fill_(0), device.device_buffer(UPLOADED_BYTES)
    times, start = 0, 0.0
    while times < 2 or time.perf_counter() - start < READ_SECONDS / 2:
        if times == 1:
            start = time.perf_counter()  # the first round touches the memory and is not counted
        ticket = device.upload(host, buffer, device.leave())
        device.landed(ticket)
        device.arrive(ticket)
        device.synchronise()
        times += 1
    return (times - 1) * UPLOADED_BYTES / (time.perf_counter() - start)
