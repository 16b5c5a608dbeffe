"""The rates of this machine that estimates need, each measured once: products, reading, copying, Python's overhead.

A token reads every weight once, so in a large model none is found in the processor's caches: measured matrices are
many times larger than those caches. Files that are read are on the disk already; if there are none, an unnamed
temporary file is written.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.devices import Device, aligned_host, resolve_devices
from rabbitllm.engine.free_memory import available_ram
from rabbitllm.engine.prefetch import HostBuffers
from rabbitllm.engine.span_reader import (
    PAST_IS_WORTH,
    READ_BYTES,
    THROUGH_THE_CACHE,
    FileSpan,
    ReadMode,
    SpanReader,
    drop_cached,
)
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.estimate.cost_model import BITSANDBYTES
from rabbitllm.quant import coded, plain
from rabbitllm.quant.products import FusedMatrix, Matrix
from rabbitllm.quant.quantize import NO_SCALES
from rabbitllm.quant.schemes import SCHEMES, STORED, Quantized, code_values
from rabbitllm.storage import durable
from rabbitllm.storage.files import page_aligned

DIRECT, DROPPED = ReadMode(direct=True), ReadMode(drop=True)
READING = {DIRECT: "past the page cache", DROPPED: "through the page cache", THROUGH_THE_CACHE: "out of the page cache"}
"""How reports call the modes of reading."""
SHAPE = (4096, 4096)
"""Of every measured matrix."""
SET_BYTES = 256 << 20
"""Of all matrices that are multiplied with in turn."""
MEASURING_BYTES = 256 << 20
"""Of memory; with less, compilers and samples might have the system end the process."""
SECONDS = 0.1
"""Duration of one measurement, after an uncounted round that loads kernels and touches the memory."""
SAMPLE_BYTES = 128 << 20
"""The most that is read, or written if there is nothing to read, to find a rate."""
PIECE_BYTES, BUFFERS = READ_BYTES, 4
"""Of one read, into several buffers in turn, as in the engine: one might be found in the processor's caches."""
READ_SECONDS = 0.25
WRITE_SECONDS = 1.0
UPLOADED_BYTES = 64 << 20
LAYERS, TOKENS, ROUNDS = (1, 7), 8, 3
"""Of the small models whose tokens are timed."""
BETWEEN_BYTES = 4 << 20
"""Memory that passes through the processor's caches after each product of these, as a matrix does."""
_BYTE = 0x3C
"""Byte that weights are filled with: a small number in every floating dtype, two codes at 4bit and one at 8bit."""

Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of Python and small operations: of a token, and of a module inside a decoder layer."""

    a_token: float
    a_module: float


@dataclass
class Machine:
    """The devices and options that models would run with, and their rates in bytes per second.

    Attributes:
        devices: the first layer's first.
        options: as `AutoModel.from_pretrained` would get them.
        files: to measure reading with.
        is_disturbed: whether an estimate showed that a rate was measured while the machine was busy.
    """

    devices: Sequence[Device]
    options: RunOptions
    files: Sequence[Path] = ()
    _known: dict[object, object] = field(default_factory=dict)
    is_disturbed: bool = False
    _before: dict[object, object] = field(default_factory=dict)

    def device(self, name: str) -> Device:
        """Return a device by name."""
        return next(device for device in self.devices if device.name == name)

    def product(self, device: str, form: str, dtype: torch.dtype, rows: int = 1) -> float:
        """Return the rate at which weights of a form (see `cost_model.Product`) are multiplied with rows of a dtype."""
        key = ("product", device, form, dtype if is_coded(form) else None, rows)
        return self._once(key, lambda: product_rate(self.device(device), form, dtype, rows))

    def reading(self, mode: ReadMode) -> float | None:
        """Return the rate of reading from the disk, or from the page cache; None if there is nothing to read."""
        return self._once(mode, lambda: read_rate(self.files, mode)[0])

    def disk(self) -> tuple[ReadMode, float] | None:
        """Return the mode of reading from the disk that a load would choose, with its rate."""
        rates = [(mode, rate) for mode in (DIRECT, DROPPED) if (rate := self.reading(mode)) is not None]
        return max(rates, key=lambda pair: pair[1] * (PAST_IS_WORTH if pair[0].direct else 1), default=None)

    def link(self, device: str) -> float:
        """Return the rate of copying from host memory to a device that does not share it."""
        return self._once(("link", device), lambda: upload_rate(self.device(device)))

    def overhead(self, device: str) -> Overhead:
        """Return the overhead of small operations on a device."""
        return self._once(("overhead", device), lambda: overhead(self.device(device)))

    def measure_again(self) -> None:
        """Measure each rate once more when it is needed, and keep the better one of the two."""
        self._known, self._before, self.is_disturbed = {}, self._known, False

    def _once(self, key: object, measure: Callable[[], Measured]) -> Measured:
        if key not in self._known:
            self._known[key] = _better(measure(), self._before.get(key))
        return cast(Measured, self._known[key])


def _better(again: object, before: object) -> object:
    if isinstance(again, Overhead) and isinstance(before, Overhead):
        return Overhead(min(again.a_token, before.a_token), min(again.a_module, before.a_module))
    rates = [rate for rate in (again, before) if isinstance(rate, float)]
    return max(rates) if rates else again


def is_coded(form: str) -> bool:
    """Whether weights of this form are codes rather than numbers of a torch dtype."""
    return not isinstance(getattr(torch, form, None), torch.dtype)


def can_measure() -> bool:
    """Whether this process may take the memory that measuring needs."""
    return available_ram() >= MEASURING_BYTES


# Products


def product_rate(device: Device, form: str, dtype: torch.dtype, rows: int) -> float:
    """Measure the bytes of weights of a form that are multiplied with per second, with this many rows of a dtype.

    Of bfloat16 by the kernel that the commands use.
    """
    dtype = dtype if is_coded(form) else getattr(torch, form)
    weights: list[Any] = []
    total = 0
    while total < min(SET_BYTES, available_ram() // 8) or not weights:
        weight, nbytes = _weight(device, form, dtype)
        weights.append(weight)
        total += nbytes
    memory = _filled(device, rows * SHAPE[1] * dtype.itemsize)
    inputs = memory.view(dtype).view(1, rows, SHAPE[1])
    products = [
        weight if isinstance(weight, nn.Module) else partial(plain.product, weight=weight, bias=None)
        for weight in weights
    ]

    def work() -> None:
        for product in products:
            product(inputs)
        device.synchronise()

    with torch.inference_mode():
        return total / _seconds(work)


def _seconds(work: Callable[[], object]) -> float:
    """Return the median time of rounds of some work, after one that is not counted."""
    work()
    times: list[float] = []
    begun = time.perf_counter()
    while not times or time.perf_counter() - begun < SECONDS:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _weight(device: Device, form: str, dtype: torch.dtype) -> tuple[Any, int]:
    """Return a matrix of `SHAPE` (or a module of bitsandbytes that holds one), and its bytes as stored."""
    rows, columns = SHAPE
    elements = rows * columns
    filled = partial(_filled, device)
    if form.startswith(BITSANDBYTES):
        return _bitsandbytes_module(device, form), elements if "8bit" in form else elements * 9 // 16
    if coded.is_scheme(form):
        published = coded.form_named(form, SHAPE)
        codes, scales = filled(rows * published.row_bytes), filled(published.scale_bytes)
        return QuantizedWeight(coded.CodedMatrix(published, codes, scales), dtype), published.nbytes
    if form not in STORED:
        return filled(elements * dtype.itemsize).view(dtype).view(SHAPE), elements * dtype.itemsize
    scheme = STORED[form]
    payload = filled(scheme.payload_bytes(elements)).view(-1, 1)
    if scheme.block_bytes:
        blocks = Matrix(Quantized(form, SHAPE, None), payload, NO_SCALES, NO_SCALES)
        return QuantizedWeight(blocks, dtype), payload.numel()
    absmax = torch.ones(elements // scheme.block, device=payload.device)
    matrix_type = Matrix if device.shares_host_memory else FusedMatrix
    table = code_values(form).to(payload.device)
    matrix = matrix_type(Quantized(form, SHAPE, "float32"), payload, absmax, table)
    return QuantizedWeight(matrix, dtype), payload.numel() + 4 * absmax.numel()


def _bitsandbytes_module(device: Device, form: str) -> nn.Module:
    """Return one of bitsandbytes' own modules, with which checkpoints that are published for it are computed."""
    from bitsandbytes import nn as modules

    rows, columns = SHAPE
    module: Any
    if "8bit" in form:
        module = modules.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False, threshold=6.0)
    else:
        compute = getattr(torch, form.rpartition(" ")[2])
        module = modules.Linear4bit(columns, rows, bias=False, compute_dtype=compute, quant_type="nf4")
    return module.to(device.torch_device).eval()  # type: ignore[no-any-return]


def _filled(device: Device, nbytes: int) -> torch.Tensor:
    """Return filled memory, uint8 (nbytes,): untouched memory has no pages, and is read at no cost."""
    memory = _small_pages(nbytes) if device.shares_host_memory else device.device_buffer(nbytes)
    return memory.fill_(_BYTE)


def _small_pages(nbytes: int) -> torch.Tensor:
    """Return host memory in small pages, as of mapped files: products with codes are slower there by a fifth."""
    if sys.platform != "linux":
        return aligned_host(nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


# Python's overhead


def overhead(device: Device) -> Overhead:
    """Measure the overhead with Llamas of few and of more layers, whose matrices are too small to count.

    On the CPU other memory passes through the processor's caches after each product, as matrices do in a real model:
    Python is half as fast if it comes from memory again.
    """
    (short, few), (long, many) = (_token_seconds(layers, device) for layers in LAYERS)
    a_module = max(long - short, 0.0) / (many - few)
    return Overhead(max(short - few * a_module, 0.0), a_module)


def _token_seconds(layers: int, device: Device) -> tuple[float, int]:
    """Return the seconds of a token of a small Llama, and the number of modules in its layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):  # the caller's generator must not be advanced
        model: Any = LlamaForCausalLM(config).to(device.torch_device).eval()
    matrix = torch.ones(BETWEEN_BYTES // 4 if device.shares_host_memory else 0)
    not_counted = 0.0

    def between(*arguments: object) -> None:
        nonlocal not_counted
        start = time.perf_counter()
        matrix.sum()
        not_counted += time.perf_counter() - start

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(between)
    prompt = torch.ones(1, 4, dtype=torch.int64, device=device.torch_device)
    times = []
    for _ in range(ROUNDS):
        not_counted, start = 0.0, time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=TOKENS)
        times.append(time.perf_counter() - start - not_counted)
    return statistics.median(times) / TOKENS, sum(1 for _ in model.model.layers.modules())


# Reading and copying


def read_rate(files: Sequence[Path], mode: ReadMode) -> tuple[float | None, int]:
    """Measure the bytes per second of reading pieces that are spread over files; return them and the bytes read.

    From the disk, or in `THROUGH_THE_CACHE` from the page cache, which keeps the pieces afterwards. None if the files
    cannot be read in this mode, or not at all.
    """
    store: Any = SimpleNamespace(path=Path)  # files whose names are their paths
    reader = SpanReader(store, mode)
    try:
        pieces = [
            FileSpan(str(path), offset, min(PIECE_BYTES, path.stat().st_size - offset), 0)
            for path in files
            for offset in range(0, path.stat().st_size, PIECE_BYTES)
        ]
        pieces = pieces[:: max(-(-len(pieces) * PIECE_BYTES // SAMPLE_BYTES), 1)]
        buffers = [page_aligned(PIECE_BYTES) for _ in pieces[:BUFFERS]]
        for buffer in buffers:
            buffer[:] = bytes(PIECE_BYTES)  # else the first touch of its pages would be timed as reading
        if mode == THROUGH_THE_CACHE:
            _read(reader, pieces, buffers)
        else:
            dropped = drop_cached(store, pieces)
            pieces = pieces if mode.direct else dropped or pieces  # some file systems are in memory
        start = time.perf_counter()
        nbytes = _read(reader, pieces, buffers)
        seconds = time.perf_counter() - start
        if mode != THROUGH_THE_CACHE:
            drop_cached(store, pieces)
    except OSError:
        return None, 0
    return (nbytes / seconds if nbytes and reader.mode == mode else None), nbytes


def _read(reader: SpanReader, pieces: Sequence[FileSpan], buffers: Sequence[memoryview]) -> int:
    """Read pieces into buffers in turn, for `READ_SECONDS` at most; return their bytes."""
    nbytes, start = 0, time.perf_counter()
    for piece, buffer in zip(pieces, itertools.cycle(buffers), strict=False):
        reader.read([piece], buffer)
        nbytes += piece.nbytes
        if time.perf_counter() - start > READ_SECONDS:
            break
    return nbytes


@contextlib.contextmanager
def something_to_read(folder: Path, files: Sequence[Path], min_free: int) -> Iterator[Sequence[Path]]:
    """Yield files on the disk of a folder: those of `files` that are on it, or one that is written for this.

    Args:
        folder: the folder; if it does not exist, its nearest existing parent.
        files: files that may be on the same disk.
        min_free: bytes of it to keep free; without room nothing is written, and no file is yielded.
    """
    nearest = next(place for place in (folder, *folder.parents) if place.is_dir())
    disk = nearest.stat().st_dev
    here = [path for path in files if path.is_file() and path.stat().st_dev == disk and path.stat().st_size]
    room = shutil.disk_usage(nearest).free - min_free
    with contextlib.ExitStack() as stack:
        if not here and room >= SAMPLE_BYTES and Path("/proc/self/fd").exists():
            with contextlib.suppress(OSError):  # a folder that cannot be written to
                descriptor = stack.enter_context(durable.nameless_file(nearest, _noise()))
                here = [Path(f"/proc/self/fd/{descriptor}")]
        yield here


def _noise() -> Iterator[bytes]:
    """Yield incompressible data, for a second at most."""
    generator, start = np.random.default_rng(0), time.perf_counter()
    for _ in range(SAMPLE_BYTES // PIECE_BYTES):
        yield generator.bytes(PIECE_BYTES)
        if time.perf_counter() - start > WRITE_SECONDS:
            return


def upload_rate(device: Device) -> float:
    """Measure bytes per second from host memory to a device that does not share it, copied as in the engine."""
    memory = HostBuffers(device)  # unpins the memory before it is freed
    host, buffer = memory.take_anyhow(UPLOADED_BYTES).fill_(0), device.device_buffer(UPLOADED_BYTES)

    def copy() -> None:
        ticket = device.upload(host, buffer, device.leave())
        device.landed(ticket)
        device.arrive(ticket)
        device.synchronise()

    return UPLOADED_BYTES / _seconds(copy)


# For many models in little time


@contextlib.contextmanager
def this_machine(folder: Path, min_free: int) -> Iterator[Machine]:
    """Provide all GPUs, or the CPU, and a file to read, which is removed afterwards; loggers are silent meanwhile.

    Args:
        folder: the future folder of layer files.
        min_free: bytes of its disk to keep free.
    """
    options = RunOptions(device="auto", show_progress=False)
    devices = resolve_devices("auto" if torch.cuda.is_available() else "cpu", None)  # without a warning
    with something_to_read(folder, (), min_free) as files, _quiet("transformers", "rabbitllm"):
        yield Machine(devices, options, files)


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silence these loggers, whose warnings are about models that are not loaded."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def measurements(machine: Machine) -> Iterator[tuple[Callable[[], float | None], str]]:
    """Yield the measurements for most models: a function that returns bytes per second, and its description."""
    for mode in (DIRECT, DROPPED):
        yield partial(machine.reading, mode), f"reading the disk of layer files, {READING[mode]}"
    for device in machine.devices:
        dtype = torch.bfloat16 if device.has_bf16 else torch.float16
        schemes = dict.fromkeys(scheme.codes for scheme in SCHEMES.values()) if device.shares_host_memory else ()
        for form in (str(dtype).removeprefix("torch."), *schemes):
            yield partial(machine.product, device.name, form, dtype), multiplying(form, device.name)
        if not device.shares_host_memory:
            yield partial(machine.link, device.name), f"copying from host memory to {device.name}"


def multiplying(form: str, device: str) -> str:
    """Return the description of a rate of products."""
    return f"multiplying with {form}{' codes' if form in STORED else ''} on {device}"
