"""Blocks of ggml, the quantized types of GGUF files: the numbers that they stand for.

A row of a tensor is a whole number of blocks, so blocks can be cut and joined by rows. Types with a table in
`_block_formats.py` are dequantized by torch on any device, and by a kernel on the CPU; all other types by the `gguf`
package, on the CPU. The results equal those of that package bit for bit, in float32; they are then rounded once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.errors import UnreadableFormatError
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant import _kernels
from rabbitllm.quant._block_formats import FORMATS, BlockFormat, Field, Fields
from rabbitllm.quant._kernel_interface import NUMBERS

WORTH_A_KERNEL = 1 << 16
"""Elements; fewer are dequantized by torch before a kernel is compiled."""
_CHUNK = 1 << 20
"""Elements that are dequantized at a time on the host: 4 MiB of float32, which stay in the cache."""
_BLOCK_WORK = 512
"""Bytes that dequantizing a block on a GPU takes at most, besides its numbers; a group is made at a time."""
_WORK_BYTES = 64 << 20
"""The same for the blocks that are dequantized at a time: so many that the time of a launch does not count."""


def dequantize(name: str, blocks: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a quantized tensor, or of some of its rows: a new tensor on the device of the blocks.

    Args:
        name: a key of `BLOCK_TYPES`.
        blocks: uint8, of any shape, on any device.
        shape: of the result, whose rows are whole blocks.
        dtype: of the result; float32 is rounded to it, to the nearest.

    Raises:
        UnreadableFormatError: the type does not exist, or the number of bytes is not that of the shape.
    """
    block = BLOCK_TYPES.get(name)
    if block is None:
        raise UnreadableFormatError(
            f"There are no blocks of type {name!r}; expected one of {', '.join(BLOCK_TYPES)}.",
            "Use a GGUF file of the model in one of these types.",
        )
    elements = math.prod(shape)
    count = elements // block.elements
    if elements % block.elements or blocks.numel() != count * block.nbytes or blocks.dtype != torch.uint8:
        raise UnreadableFormatError(
            f"{blocks.numel():,} bytes are not those of {shape} elements in {name} blocks of {block.elements} elements "
            f"and {block.nbytes} bytes.",
            "Download the file again.",
        )
    values = torch.empty(count, block.elements, dtype=dtype, device=blocks.device)
    is_host = blocks.device == torch.device("cpu")
    step = max(_CHUNK // block.elements, 1) if is_host else _WORK_BYTES // _BLOCK_WORK
    decode = _by_torch if name in FORMATS else _by_gguf
    if name in FORMATS and elements >= WORTH_A_KERNEL and is_host and _kernel_agrees(name):
        decode = _by_kernel
    rows = blocks.reshape(count, block.nbytes)
    for begin in range(0, count, step):
        decode(name, rows[begin : begin + step], values[begin : begin + step])
    return values.view(shape)


def work_bytes(name: str, elements: int) -> int:
    """Bytes of memory of a GPU that `dequantize` takes at most, besides the numbers; 0 for other schemes."""
    block = BLOCK_TYPES.get(name)
    return min(elements // block.elements * _BLOCK_WORK, _WORK_BYTES) if block is not None else 0


def sample(name: str, elements: int, random: RandomTensors) -> torch.Tensor:
    """Random blocks with scales of usual size: uint8 (bytes,)."""
    block = BLOCK_TYPES[name]
    blocks = random.integers(0, 256, elements // block.elements, block.nbytes)
    halves = FORMATS[name].halves
    for offset in halves:
        some = random.positive(len(blocks), 1, dtype=torch.float32) / 1024
        blocks[:, offset : offset + 2] = some.half().view(torch.uint8)
    if not halves:  # MXFP4: an exponent
        blocks[:, 0] = random.integers(120, 128, len(blocks))
    return blocks.view(-1)


@functools.cache
def _kernel_agrees(name: str) -> bool:
    """Whether this processor has a kernel whose numbers are those of torch, bit for bit."""
    from rabbitllm.quant import _vectors  # numba comes with it

    def trials() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        blocks = sample(name, 64 * 256, RandomTensors()).view(-1, BLOCK_TYPES[name].nbytes)
        results = torch.empty(2, len(blocks), BLOCK_TYPES[name].elements, dtype=torch.float32, device="cpu")
        _by_kernel(name, blocks, results[0])
        _by_torch(name, blocks, results[1])
        yield results[0], results[1]

    return bool(_vectors.lanes()) and _kernels.agrees(f"by {NUMBERS} at {name}", trials(), tolerance=1e-30)


def _by_kernel(name: str, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Write the numbers of blocks (n, bytes) to `out` (n, elements)."""
    from rabbitllm.quant import _vectors

    block, width = BLOCK_TYPES[name], _vectors.lanes()
    blocks = blocks.contiguous()
    values = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device="cpu")
    if len(blocks):
        steps = block.elements // (2 * width)
        shape = (block.nbytes, steps, 0, 1, len(blocks))
        _kernels.run(NUMBERS, name, width, [(blocks.data_ptr(), *[0] * 4, values.data_ptr(), *shape)], blocks.numel())
    if values is not out:
        out.copy_(values)


def _by_torch(name: str, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """The same, on any device, in few operations: their number is the time on a GPU."""
    form = FORMATS[name]
    scales, minima = _scales(form, blocks)
    size = min(form.group, form.run)
    for begin in range(0, out.shape[1], size):
        if begin % form.run == 0:
            codes = _codes(form, blocks, begin)
        part, group = codes.narrow(1, begin % form.run, size), begin // form.group
        scale, target = scales[:, group : group + 1], out[:, begin : begin + size]
        # bytes are multiplied as float32, and the result is rounded to the dtype of `out`
        if minima is None:
            torch.mul(scale, part, out=target)
        else:
            torch.sub(scale * part, minima[:, group : group + 1], out=target)


def _codes(form: BlockFormat, blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """The codes of a run of elements, or their values: int8 (n, elements)."""
    codes = None
    for plane in form.planes:
        offset, shift = plane.at(begin)
        if plane.run:
            some = blocks[:, offset : offset + form.run]
            some = some >> shift if shift else some
            some = some & (1 << plane.bits) - 1 if shift + plane.bits < 8 else some
        else:
            some = _fields(_bits(offset, form.run), blocks)
        some = some << plane.first if plane.first else some
        codes = some if codes is None else codes | some
    assert codes is not None
    if form.values:
        return _table(form.values, blocks.device)[codes.int()]
    return (codes - -form.least if form.least else codes).view(torch.int8)


def _scales(form: BlockFormat, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scales and minima of the groups: float32 (n, groups)."""
    halves = [blocks[:, offset : offset + 2].contiguous().view(torch.float16).float() for offset in form.halves]
    if not halves:
        exponent = blocks[:, :1].int()
        bits = torch.where(exponent < 2, (exponent + 1) << 21, (exponent - 1) << 23)
        return bits.view(torch.float32), None
    scales, minima = halves[0], -halves[1] if len(halves) > 1 else None
    if form.factors:
        scales = scales * (_fields(form.factors, blocks).view(torch.int8).int() + form.least_factor)
    if form.minima:
        minima = halves[1] * _fields(form.minima, blocks)
    return scales, minima


def _fields(fields: Fields, blocks: torch.Tensor) -> torch.Tensor:
    """The numbers that fields have: uint8 (n, numbers)."""
    offsets, shifts, masks, firsts = _places(fields, blocks.device)
    parts = (blocks[:, offsets] >> shifts & masks) << firsts
    if parts.shape[1] == len(fields):
        return parts
    return parts.view(len(blocks), len(fields), -1).sum(2, dtype=torch.uint8)


@functools.cache
def _bits(offset: int, count: int) -> Fields:
    """Bits from an offset in bytes on."""
    return tuple((Field(offset + k // 8, k % 8, 1),) for k in range(count))


def _by_gguf(name: str, blocks: torch.Tensor, out: torch.Tensor) -> None:
    import gguf
    import numpy as np

    with np.errstate(all="ignore"):  # scales may be infinite
        values = gguf.dequantize(blocks.cpu().numpy(), gguf.GGMLQuantizationType[name])
    out.copy_(torch.from_numpy(values))


@functools.cache
def _table(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Values on a device, int8; kept, since a copy to a GPU makes the host wait."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int8, device=device)


@functools.cache
def _places(fields: Fields, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Offsets, int64, and shifts, masks and first bits, uint8, of fields, as many for each number; kept too."""
    most = max(map(len, fields))
    padded = [field for some in fields for field in (*some, *[Field(0, 0, 0)] * (most - len(some)))]
    offsets, shifts, bits, firsts = zip(*padded, strict=True)
    rest = shifts, [(1 << count) - 1 for count in bits], firsts
    with torch.inference_mode(False):
        offset = torch.tensor(offsets, device=device)
        return offset, *(torch.tensor(some, dtype=torch.uint8, device=device) for some in rest)
