"""Stored tensors as plain checkpoint bytes, in chunks, in bounded memory.

Uncompressed tensors keep their bits; 4bit and 8bit tensors are dequantized, a run of blocks at a time, with the same
bits as dequantizing the whole. Uses positional reads, not a mapping. Independent of models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.positional import PositionalFile, page_aligned
from rabbitllm.formats.safetensors_file import TensorToWrite, view_bytes
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, dtype_name, torch_dtype
from rabbitllm.quant.compression import (
    BLOCKS,
    CODES_A_BYTE,
    NESTED_BLOCK,
    SCALE_BYTES,
    Quantized,
    dequantize,
    expand_scales,
)
from rabbitllm.store.layer_store import StoredTensor, WeightFiles

CHUNK_BYTES = 8 << 20
"""Bytes of a stored tensor in memory at a time; for a quantized one, plus the dequantized values of that chunk."""


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A stored tensor and its form in a checkpoint; `memory` is set if it may have been changed in memory."""

    stored: StoredTensor
    placed: TensorToWrite
    memory: torch.Tensor | None = None


def plain(stored: StoredTensor, dtype: str) -> PlainTensor:
    """The plain form of a stored tensor; `dtype` is that of dequantized ones."""
    form = stored.quantized
    if form is None:
        return PlainTensor(stored, TensorToWrite(stored.name, stored.parts[0].dtype, stored.parts[0].shape))
    return PlainTensor(stored, TensorToWrite(stored.name, dtype, form.shape))


def in_memory(stored: StoredTensor, memory: torch.Tensor) -> PlainTensor:
    """A tensor that is taken from memory instead of its file."""
    return PlainTensor(stored, TensorToWrite(stored.name, dtype_name(memory.dtype), tuple(memory.shape)), memory)


class PlainReader:
    """Reads tensors of a store; a context manager.

    Args:
        store: the store.
    """

    def __init__(self, store: WeightFiles) -> None:
        self._store = store
        self._buffer = page_aligned(CHUNK_BYTES)
        self._open: tuple[str, PositionalFile] | None = None

    def chunks(self, tensor: PlainTensor) -> Iterator[memoryview]:
        """The bytes of a tensor in order; each chunk is valid until the next one is requested.

        Raises:
            IncompleteSplitError: the file is truncated or damaged.
        """
        if tensor.memory is not None:
            whole = tensor.memory.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            for begin in range(0, len(whole), CHUNK_BYTES):
                yield whole[begin : begin + CHUNK_BYTES]
        elif tensor.stored.quantized is None:
            part = tensor.stored.parts[0]
            for begin in range(0, part.nbytes, CHUNK_BYTES):
                yield self._read(part, begin, min(CHUNK_BYTES, part.nbytes - begin))
        else:
            yield from self._dequantized(tensor.stored, tensor.stored.quantized, tensor.placed.dtype)

    def read(self, stored: StoredTensor, dtype: torch.dtype | None) -> torch.Tensor:
        """A tensor from its file; a floating-point one is converted to `dtype`, if given."""
        tensor = plain(stored, dtype_name(dtype or torch.float32))
        data = bytearray()
        for chunk in self.chunks(tensor):
            data += chunk
        spec = TensorSpec(stored.name, tensor.placed.dtype, tensor.placed.shape, "", 0, len(data))
        found = view_bytes(memoryview(data), spec)
        return found.to(dtype) if dtype is not None and found.is_floating_point() else found

    def _dequantized(self, stored: StoredTensor, form: Quantized, dtype: str) -> Iterator[memoryview]:
        payload, _, table = stored.parts[:3]
        values = torch.frombuffer(self._read(table, 0, table.nbytes, own=True), dtype=torch.float32)
        block, codes_each = BLOCKS[form.scheme], CODES_A_BYTE[form.scheme]
        whole = block if form.offset is None else block * NESTED_BLOCK
        step = max(CHUNK_BYTES * 8 // DTYPES[dtype].bits // whole, 1) * whole
        elements = math.prod(form.shape)
        for begin in range(0, elements, step):
            count = min(step, elements - begin)
            scales = self._scales(stored, form, begin // block, math.ceil(count / block))
            codes = self._read(payload, begin // codes_each, math.ceil(count / codes_each))
            shape = (count // block, block) if count % block == 0 else (count,)  # rows are divided among threads
            made = dequantize(
                Quantized(form.codes.scheme, shape, form.dtype),
                torch.frombuffer(codes, dtype=torch.uint8),
                scales,
                values,
                torch_dtype(dtype),
            )
            yield made.view(-1).view(torch.uint8).numpy().data.cast("B")

    def _scales(self, stored: StoredTensor, form: Quantized, first: int, count: int) -> torch.Tensor:
        """A run of a tensor's scales, float32; quantized scales begin at one of their blocks."""
        absmax = stored.parts[1]
        if form.offset is None:
            plain = self._read(absmax, first * SCALE_BYTES, count * SCALE_BYTES, own=True)
            return torch.frombuffer(plain, dtype=torch.float32)
        nested, table = stored.parts[3:5]
        begin, length = first // NESTED_BLOCK * SCALE_BYTES, math.ceil(count / NESTED_BLOCK) * SCALE_BYTES
        return expand_scales(
            torch.frombuffer(self._read(absmax, first, count, own=True), dtype=torch.uint8),
            torch.frombuffer(self._read(nested, begin, length, own=True), dtype=torch.float32),
            torch.frombuffer(self._read(table, 0, table.nbytes, own=True), dtype=torch.float32),
            form.offset,
        )

    def _read(self, part: TensorSpec, begin: int, length: int, *, own: bool = False) -> memoryview:
        """A run of a part's bytes, in the shared buffer or in newly allocated memory."""
        into = memoryview(bytearray(length)) if own else self._buffer[:length]
        came = self._file(part.file).read_into(into, part.offset + begin)
        if came != length:
            raise IncompleteSplitError(
                f"{self._store.path(part.file)} ends in the middle of {part.name!r}: it was cut off since the model "
                "was loaded.",
                "Load the model again; what is wrong with the file is then said.",
            )
        if self._store.checks is not None:
            self._store.checks.read(part.file, part.offset + begin, into)
        return into

    def _file(self, name: str) -> PositionalFile:
        if self._open is None or self._open[0] != name:
            self.close()
            file = PositionalFile(self._store.path(name))
            file.advise_sequential()
            self._open = name, file
        return self._open[1]

    def close(self) -> None:
        """Close the last file."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def __enter__(self) -> PlainReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
