"""Blocks of ggml, the quantized types of GGUF files: sizes, and the numbers that they stand for.

A row of a tensor is a whole number of blocks, so blocks can be cut and joined by rows. Types with a description in
`_gguf_decoders.py` are dequantized by torch on any device, and by a kernel of it on the CPU; all other types by the
`gguf` package, on the CPU. The results equal those of that package bit for bit, in float32; they are then rounded once.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING

from rabbitllm.errors import UnreadableFormatError
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant import _kernels
from rabbitllm.quant._gguf_decoders import DECODERS
from rabbitllm.quant._kernel_interface import NUMBERS

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


WORTH_A_KERNEL = 1 << 16
"""Elements; fewer are dequantized by torch before a kernel is compiled."""
_CHUNK = 1 << 20
"""Elements that are dequantized at a time on the host: 4 MiB of float32, which stay in the cache."""
_BLOCK_WORK = 512
"""Bytes that dequantizing a block on a GPU takes at most, besides its numbers; a group is made at a time."""
_WORK_BYTES = 64 << 20
"""The same for the blocks that are dequantized at a time: so many that the time of a launch does not count."""


def dequantize(name: str, blocks: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a quantized tensor, or of some of its rows.

    Args:
        name: a key of `BLOCK_TYPES`.
        blocks: uint8, of any shape, on any device.
        shape: of the result, whose rows are whole blocks.
        dtype: of the result; float32 is rounded to it, to the nearest.

    Returns:
        A new tensor on the device of the blocks.

    Raises:
        UnreadableFormatError: the type does not exist, or the number of bytes is not that of the shape.
    """
    import torch

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
    decode = _by_torch if name in DECODERS else _by_gguf
    if name in DECODERS and elements >= WORTH_A_KERNEL and is_host and _kernel_agrees(name):
        decode = _by_kernel
    rows = blocks.reshape(count, block.nbytes)
    for begin in range(0, count, step):
        decode(name, rows[begin : begin + step], values[begin : begin + step])
    return values.view(shape)


def work_bytes(name: str, elements: int) -> int:
    """Bytes of memory of a GPU that `dequantize` takes at most, besides the numbers; 0 for other schemes."""
    block = BLOCK_TYPES.get(name)
    return min(elements // block.elements * _BLOCK_WORK, _WORK_BYTES) if block is not None else 0


def lanes_for(name: str) -> int:
    """Lanes of the kernels for a type of blocks on this processor; 0 if there are none."""
    if name not in DECODERS:
        return 0
    from rabbitllm.quant import _vectors  # numba comes with it

    return _vectors.lanes() if _vectors.reads_halves() else 0


def sample(name: str, elements: int, generator: torch.Generator) -> torch.Tensor:
    """Random blocks with scales of usual size: uint8 (bytes,)."""
    import torch

    block = BLOCK_TYPES[name]
    blocks = torch.randint(0, 256, (elements // block.elements, block.nbytes), dtype=torch.uint8, generator=generator)
    reader = _TensorReader(blocks[:1])
    for _ in DECODERS[name](reader):
        pass
    for offset in reader.halves:
        halves = ((torch.rand(len(blocks), 1, generator=generator) + 0.5) / 1024).half()
        blocks[:, offset : offset + 2] = halves.view(torch.uint8)
    if not reader.halves:  # MXFP4: an exponent
        blocks[:, 0] = torch.randint(120, 128, (len(blocks),), dtype=torch.uint8, generator=generator)
    return blocks.view(-1)


@functools.cache
def _kernel_agrees(name: str) -> bool:
    """Whether this processor has a kernel whose numbers are those of torch, bit for bit."""
    import torch

    if not lanes_for(name):
        return False
    some = sample(name, 64 * 256, torch.Generator().manual_seed(0)).view(-1, BLOCK_TYPES[name].nbytes)
    results, expected = (torch.empty(len(some), BLOCK_TYPES[name].elements) for _ in range(2))
    _by_kernel(name, some, results)
    _by_torch(name, some, expected)
    agrees = torch.equal(results, expected)
    if not agrees:
        logger.warning("The kernel that dequantizes %s is wrong here and is not used.", name)
    return agrees


def _by_kernel(name: str, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Write the numbers of blocks (n, bytes) to `out` (n, elements)."""
    import torch

    block, width = BLOCK_TYPES[name], lanes_for(name)
    blocks = blocks.contiguous()
    values = out if out.dtype == torch.float32 else torch.empty(out.shape)
    if len(blocks):
        steps = block.elements // (2 * width)
        shape = (block.nbytes, steps, block.elements, 1, len(blocks))
        _kernels.run(NUMBERS, name, width, [(blocks.data_ptr(), *[0] * 4, values.data_ptr(), *shape)], blocks.numel())
    if values is not out:
        out.copy_(values)


def _by_torch(name: str, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """The same, on any device, in few operations: their number is the time on a GPU."""
    import torch

    begin = 0
    for codes, scales, minima, signed in DECODERS[name](_TensorReader(blocks)):
        for index, part in enumerate((codes.view(torch.int8) if signed else codes).chunk(len(scales), 1)):
            target = out[:, begin : begin + part.shape[1]]
            # bytes are multiplied as float32, and the result is rounded to the dtype of `out`
            if minima:
                torch.sub(scales[index] * part, minima[index], out=target)
            else:
                torch.mul(scales[index], part, out=target)
            begin += part.shape[1]


def _by_gguf(name: str, blocks: torch.Tensor, out: torch.Tensor) -> None:
    import gguf
    import numpy as np
    import torch

    with np.errstate(all="ignore"):  # scales may be infinite
        values = gguf.dequantize(blocks.cpu().numpy(), gguf.GGMLQuantizationType[name])
    out.copy_(torch.from_numpy(values))


@functools.cache
def _table(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Values on a device, int8; kept, since a copy to a GPU makes the host wait."""
    import torch

    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int8, device=device)


@functools.cache
def _bit_places(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The byte of each of so many bits, int64, and its offset in the byte, uint8; kept as `_table` is."""
    import torch

    with torch.inference_mode(False):
        places = torch.arange(count, device=device)
        return places // 8, (places % 8).to(torch.uint8)


class _TensorReader:
    """Reads blocks, uint8 (n, nbytes): vectors are uint8 (n, count), ints int32 (n, 1), floats float32 (n, 1).

    Attributes:
        halves: offsets of the float16 that were read.
    """

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks
        self._ints: dict[int, torch.Tensor] = {}
        self.halves: list[int] = []

    def bytes(self, offset: int, count: int) -> torch.Tensor:
        return self._blocks[:, offset : offset + count]

    def bits(self, offset: int, count: int) -> torch.Tensor:
        where, shifts = _bit_places(count, self._blocks.device)
        return self._blocks[:, offset : offset + (count + 7) // 8][:, where] >> shifts & 1

    def look_up(self, values: tuple[int, ...], index: torch.Tensor) -> torch.Tensor:
        import torch

        return _table(values, index.device)[index.int()].view(torch.uint8)

    def byte(self, offset: int) -> torch.Tensor:
        import torch

        run = offset // 16 * 16  # the bytes around it are scales too
        if run not in self._ints:
            self._ints[run] = self._blocks[:, run : run + 16].to(torch.int32)
        return self._ints[run][:, offset - run : offset - run + 1]

    def signed(self, value: torch.Tensor) -> torch.Tensor:
        import torch

        return value.to(torch.int8).to(torch.int32)

    def half(self, offset: int) -> torch.Tensor:
        import torch

        self.halves.append(offset)
        return self._blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()

    def half_power(self, exponent: torch.Tensor) -> torch.Tensor:
        import torch

        usual = (exponent - 1) << 23
        return torch.where(exponent < 2, (exponent + 1) << 21, usual).view(torch.float32)
