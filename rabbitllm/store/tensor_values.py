"""Tensors of any specification in row-major order, from a file or from memory.

From a file a tensor is read in pieces: the blocks of a GGUF file that contain a piece are read and dequantized, a
bounded number at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rabbitllm.base.rounding import round_up
from rabbitllm.errors import UnreadableFormatError
from rabbitllm.formats.tensor_spec import (
    DTYPES,
    GAP_BYTES,
    STAGING_BYTES,
    Readable,
    StoredBlocks,
    TensorSpec,
    ValueChange,
    read_run,
    torch_dtype,
)

if TYPE_CHECKING:
    import torch

_PIECE = 1 << 18
"""Elements that are dequantized at a time; the float32 values and their parts take some megabytes."""


def read_tensor(file: Readable, spec: TensorSpec, begin: int, buffer: memoryview) -> int:
    """Fill `buffer` with the tensor's bytes from byte `begin` on in row-major order, of the specification's dtype.

    Args:
        file: the file that holds it.
        spec: the tensor; not empty if it has strides.
        begin: bytes; of a tensor with strides or blocks a multiple of the element's size, like the length of `buffer`.
        buffer: writable; at most the rest of the tensor.

    Returns:
        The number of bytes filled; fewer than requested only if the file ended.
    """
    if spec.blocks is None:
        return read_run(file, spec, begin, buffer)
    dense = spec._replace(offset=0, blocks=None)
    together = spec.granule * DTYPES[spec.dtype].bits // 8 <= STAGING_BYTES  # rows of a head are dequantized once
    gap = STAGING_BYTES if together else GAP_BYTES
    return read_run(_Values(file, spec, spec.blocks), dense, begin, buffer, gap)


class _Values:
    """The elements of a tensor in the order of its file, as if they were stored as its dtype from offset 0 on."""

    def __init__(self, file: Readable, spec: TensorSpec, blocks: StoredBlocks) -> None:
        self._file = file
        self._spec = spec
        self._blocks = blocks
        self._width = DTYPES[spec.dtype].bits // 8
        self._dtype = torch_dtype(spec.dtype)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """See `Readable`."""
        import torch

        first, count, block = offset // self._width, len(buffer) // self._width, self._blocks.kind
        if not count:
            return 0
        into = torch.frombuffer(buffer, dtype=torch.uint8)
        step = _PIECE // block.elements * block.elements
        begin = first // block.elements * block.elements
        while begin < first + count:
            end = min(begin + step, round_up(first + count, block.elements))
            begins, length = begin // block.elements * block.nbytes, (end - begin) // block.elements * block.nbytes
            raw = bytearray(length)
            if self._file.read_into(memoryview(raw), self._spec.offset + begins) != length:
                return max(begin - first, 0) * self._width
            exact = _dequantized(self._blocks, torch.frombuffer(raw, dtype=torch.uint8))
            values = exact.to(self._dtype)
            if self._dtype == torch.float16 and not torch.equal(values.isinf(), exact.isinf()):
                largest = float(exact[exact.isfinite()].abs().max())
                raise UnreadableFormatError(
                    f"{self._spec.name} has the value {largest}, which exceeds float16.",
                    "Convert the file with --outtype bf16 or f32.",
                )
            chosen = values[max(first - begin, 0) : first + count - begin].view(torch.uint8)
            to = max(begin - first, 0) * self._width
            into[to : to + chosen.numel()] = chosen
            begin = end
        return len(buffer)


def arranged(data: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor in row-major order, from its bytes in the file.

    Args:
        data: uint8 (spec.extent,), aligned for the dtype.
        spec: the tensor.

    Returns:
        A contiguous tensor of the specification's dtype and shape on the same device; a view of `data` if it is stored
        so.
    """
    import torch

    dtype = torch_dtype(spec.dtype)
    values = data.view(dtype) if spec.blocks is None else _dequantized(spec.blocks, data).to(dtype)
    if spec.strides is not None:
        values = torch.as_strided(values, spec.sizes, spec.strides)
    return values.reshape(spec.shape).contiguous()


def _dequantized(blocks: StoredBlocks, data: torch.Tensor) -> torch.Tensor:
    """The values of some blocks after their change: float32, of one dimension."""
    import numpy as np
    import torch

    from rabbitllm.quant import gguf_blocks

    block = blocks.kind
    if block.dtype is not None:
        values = data.view(torch_dtype(block.dtype)).float()
    else:
        count = data.numel() // block.nbytes
        values = gguf_blocks.dequantize(block.name, data, (count * block.elements,), torch.float32)
    if blocks.change is ValueChange.MINUS_ONE:
        return values - 1
    if blocks.change is ValueChange.LOG_OF_NEGATIVE:  # as numpy computes it
        return torch.from_numpy(np.log(-values.cpu().numpy())).to(values.device)
    return values
