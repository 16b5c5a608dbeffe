"""Measures how fast this machine reads, multiplies and copies, in seconds; and provides the bench for estimates.

Uses the measurements of a plan. Each rate is measured once and used for every model of the list.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rabbitllm.base.options import StreamOptions
from rabbitllm.engine.devices import Device, resolve_devices, suits_bf16
from rabbitllm.engine.span_reader import ReadMode
from rabbitllm.estimate.expert_times import DIRECT, DROPPED
from rabbitllm.estimate.machine import RoughMachine, product_key
from rabbitllm.estimate.products import SET_BYTES, working_set
from rabbitllm.estimate.reading import FileSample, something_to_read
from rabbitllm.quant.schemes import SCHEMES, check_compression

SHAPES = {(4096, 4096): 1, (14336, 4096): 3, (4096, 14336): 1}
"""(rows, columns) -> share of the bytes, as in a model of 8 billion parameters."""
UNIT_BYTES = 32 << 20
"""Size of one read when measuring."""


@dataclass(frozen=True)
class Bench:
    """The machine and files that models are estimated with.

    Attributes:
        machine: measures each kind of rate once.
        folder: the future folder of layer files.
        files: on its disk, to measure reading with; empty if there is no room for any.
    """

    machine: RoughMachine
    folder: Path
    files: Sequence[Path]


@contextlib.contextmanager
def bench_at(folder: Path, min_free: int) -> Iterator[Bench]:
    """Provide all GPUs, or the CPU, and a file to read, which is removed afterwards.

    Args:
        folder: the future folder of layer files.
        min_free: bytes of its disk to keep free.
    """
    options = StreamOptions(device="auto", show_progress=False)
    machine = RoughMachine(resolve_devices("auto", None), options, min_free, prompts=False)
    with something_to_read(folder, (), min_free) as files, _quiet("transformers", "rabbitllm"):
        machine.files = files
        yield Bench(machine, folder, files)


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silence these loggers, whose warnings are about models that are not loaded."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def measurements(bench: Bench) -> Iterator[tuple[Callable[[], float | None], str]]:
    """Yield measurements: a function that returns bytes per second, and its description."""
    sample = FileSample(bench.files, UNIT_BYTES)
    for way, words in ((DIRECT, "past the page cache"), (DROPPED, "through the page cache")):
        yield partial(_reading, bench, sample, way), f"reading the disk of layer files, {words}"
    for device in bench.machine.devices:
        plain = "bfloat16" if suits_bf16(device) else "float16"
        coded = dict.fromkeys(scheme.codes for scheme in SCHEMES.values()) if device.shares_host_memory else ()
        for form in (plain, *coded):
            codes = " codes" if form in SCHEMES else ""
            yield partial(_product, bench.machine, device, form), f"multiplying with {form}{codes} on {device.name}"
        if not device.shares_host_memory:
            yield partial(bench.machine.upload, device.name), f"copying from host memory to {device.name}"


def _reading(bench: Bench, sample: FileSample, way: ReadMode) -> float | None:
    return bench.machine.measured(("read", way), partial(sample.rate, way))


def _product(machine: RoughMachine, device: Device, form: str) -> float:
    import torch

    if form in SCHEMES:
        check_compression(form)
    dtype = torch.bfloat16 if suits_bf16(device) else torch.float16

    def measure() -> float:
        return working_set(form, SHAPES, dtype, device, SET_BYTES, mapped=True).rate(1)

    return machine.measured(product_key(device.name, form, True, 1), measure)
