"""Measures how fast this machine multiplies with weights in memory, on matrices of a model's own shapes.

A token reads every weight once, so in a large model none is found in the processor's caches: the measured matrices are
many times larger than those caches. Makes its own numbers; independent of files.
"""

from __future__ import annotations

import mmap
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rabbitllm.engine.devices import Device, aligned_host
from rabbitllm.engine.free_memory import available_ram
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.estimate.bitsandbytes_products import is_form, matrix, nbytes_of
from rabbitllm.quant.compression import BLOCKS, CODES_A_BYTE, Quantized, code_values
from rabbitllm.quant.packed_products import Matrix

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

Shapes = Mapping[tuple[int, int], int]
"""(rows, columns) -> bytes that a token needs of matrices of that shape."""


@dataclass(frozen=True)
class WorkingSet:
    """Matrices in memory, and their stored bytes."""

    weights: Sequence[torch.Tensor]
    nbytes: int
    device: Device

    def rate(self, inputs: int, *, disturbed: bool = False) -> float:
        """Measure the bytes of weights per second, with this many inputs at a time.

        Undisturbed, by the median of rounds. While other work runs (`disturbed`), by their mean, since most of the
        disturbance may fall into a few rounds.
        """
        rows = {key: self._inputs(inputs, *key) for key in {_fits(weight) for weight in self.weights}}
        products: list[Callable[[], object]] = [
            lambda weight=weight: torch.nn.functional.linear(rows[_fits(weight)], weight)  # type: ignore[misc]
            for weight in self.weights
        ]
        with torch.inference_mode():
            taken = _rounds(products, self.device)
        return self.nbytes / (statistics.mean(taken) if disturbed else statistics.median(taken))

    def _inputs(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        memory = memory_of(self.device, mapped=False)
        return _filled(memory, count * width * dtype.itemsize).view(dtype).view(1, count, width)


def _fits(weight: torch.Tensor) -> tuple[int, torch.dtype]:
    """Return width and dtype of inputs: a matrix in float32 has float32 inputs."""
    return weight.shape[1], weight.dtype


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
        form: "4bit" or "8bit", multiplied from codes; a form of bitsandbytes' own; else a torch dtype's name.
        shapes: at least one.
        dtype: of the inputs to codes.
        device: device of the matrices.
        nbytes: bytes of all the model's weights in this form: a small model stays in the processor's caches.
        mapped: see `memory_of`.
    """
    memory = memory_of(device, mapped=mapped)
    nbytes = min(nbytes, set_bytes())
    total = sum(shapes.values()) or 1
    weights: list[torch.Tensor] = []
    made = 0
    for (rows, columns), share in shapes.items():
        row_bytes = _nbytes(form, 1, columns)
        few = max(min(rows, min(MATRIX_BYTES, set_bytes()) // row_bytes), 1)
        for _ in range(max(round(nbytes * share / total / (few * row_bytes)), 1)):
            weights.append(_weight(form, few, columns, dtype, memory))
            made += _nbytes(form, few, columns)
    return WorkingSet(weights, made, device)


def _nbytes(form: str, rows: int, columns: int) -> int:
    """Return the bytes of a matrix as stored, with its scales."""
    if is_form(form):
        return nbytes_of(form, rows, columns)
    elements = rows * columns
    if form in BLOCKS:
        return elements // CODES_A_BYTE[form] + -(-elements // BLOCKS[form]) * 4
    dtype: torch.dtype = getattr(torch, form)
    return elements * dtype.itemsize


def _weight(form: str, rows: int, columns: int, dtype: torch.dtype, memory: Memory) -> torch.Tensor:
    if is_form(form):
        return QuantizedWeight(matrix(form, rows, columns, lambda nbytes: _filled(memory, nbytes)), dtype)
    if form not in BLOCKS:
        plain: torch.dtype = getattr(torch, form)
        return _filled(memory, rows * columns * plain.itemsize).view(plain).view(rows, columns)
    elements = rows * columns
    payload = _filled(memory, elements // CODES_A_BYTE[form]).view(-1, 1)
    absmax = torch.ones(-(-elements // BLOCKS[form]))
    return QuantizedWeight(
        Matrix(Quantized(form, (rows, columns), "float32"), payload, absmax, code_values(form)), dtype
    )


def _filled(memory: Memory, nbytes: int) -> torch.Tensor:
    """Allocate filled memory, uint8 (nbytes,): untouched memory has no pages, and is read at no cost."""
    return memory(nbytes).fill_(_BYTE)
