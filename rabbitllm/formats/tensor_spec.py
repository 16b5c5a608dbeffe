"""Tensors in files: their description, the header of a file of them, and their bytes in row-major order.

The dtype names are those of the safetensors format, which every other format is mapped to.

A strided tensor is read in pieces, for any strides: the requested piece is divided into boxes (a run of indices along
each dimension); the runs of bytes that hold a box are read and rearranged. The size of a read is limited; nothing is
mapped, so a file that shrinks meanwhile causes an error and does not end the process. Independent of formats.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rabbitllm.base import terminal
from rabbitllm.base.rounding import round_up
from rabbitllm.formats.gguf_types import TensorType

if TYPE_CHECKING:
    import torch


ReadAt = Callable[[int, int], bytes]
"""Reads (offset, length), both in bytes; the result is shorter only at the end of the file."""


class Readable(Protocol):
    """Bytes that can be read at any offset: an open file, or something like one."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset` (bytes); return the number of bytes read, fewer only at the end."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type: bits per element, and whether bitsandbytes can quantize it."""

    bits: int
    torch_name: str
    quantizable: bool = False


DTYPES: dict[str, Dtype] = {
    "F64": Dtype(64, "float64"),
    "F32": Dtype(32, "float32", quantizable=True),
    "F16": Dtype(16, "float16", quantizable=True),
    "BF16": Dtype(16, "bfloat16", quantizable=True),
    "F8_E4M3": Dtype(8, "float8_e4m3fn"),
    "F8_E4M3FNUZ": Dtype(8, "float8_e4m3fnuz"),
    "F8_E5M2": Dtype(8, "float8_e5m2"),
    "F8_E5M2FNUZ": Dtype(8, "float8_e5m2fnuz"),
    "F8_E8M0": Dtype(8, "float8_e8m0fnu"),
    "F4": Dtype(4, "float4_e2m1fn_x2"),
    "I64": Dtype(64, "int64"),
    "I32": Dtype(32, "int32"),
    "I16": Dtype(16, "int16"),
    "I8": Dtype(8, "int8"),
    "U64": Dtype(64, "uint64"),
    "U32": Dtype(32, "uint32"),
    "U16": Dtype(16, "uint16"),
    "U8": Dtype(8, "uint8"),
    "BOOL": Dtype(8, "bool"),
    "C64": Dtype(64, "complex64"),
}
"""The dtypes of https://docs.rs/safetensors/latest/safetensors/tensor/enum.Dtype.html that torch has too.

The sub-byte F6 types are left out: torch has no dtype for them.
"""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """The position of a tensor in a larger one, of which it is a part; the larger one is cut along one dimension.

    Attributes:
        of: the larger tensor's name.
        shape: shape of the larger tensor.
        dim: the dimension of the cut.
        begin: the first index along that dimension in this piece.
    """

    of: str
    shape: tuple[int, ...]
    dim: int
    begin: int


class ValueChange(enum.Enum):
    """An elementwise operation after dequantization, in float32; the value is its name in a journal."""

    NONE = ""
    MINUS_ONE = "minus one"
    LOG_OF_NEGATIVE = "log of the negative"


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """The blocks of a tensor in its file, of which the specification has the dequantized elements.

    Attributes:
        kind: type of the blocks; a row, the last dimension in the file, is a whole number of them.
        nbytes: of all blocks.
        change: operation on each element.
        may_stay: whether they may be stored as they are; else they are dequantized.
    """

    kind: TensorType
    nbytes: int
    change: ValueChange = ValueChange.NONE
    may_stay: bool = True


class TensorSpec(NamedTuple):
    """One tensor of one file: a run of its bytes in row-major order, or elements at strides.

    A named tuple, since plans make hundreds of thousands of them, and a frozen dataclass takes twice as long.

    Attributes:
        name: its name in the checkpoint. Never a path.
        dtype: a key of `DTYPES`.
        shape: elements along each dimension; `()` is a scalar.
        file: name of the shard, relative to the checkpoint.
        offset: of its first element, from the start of the file.
        nbytes: length in bytes, in row-major order.
        strides: in elements, one per dimension, never negative; None for a contiguous tensor. Only dtypes of whole
            bytes have them.
        view: the shape of the strides, if it differs: the same elements in the same row-major order with other
            dimensions. None if it is `shape`.
        piece: its part of a larger tensor; None for a tensor of its own.
        blocks: its form in the file, if that is not `dtype`: the elements are dequantized, then changed, converted to
            `dtype`, and only then taken at the strides. None for a tensor whose bytes are those of `dtype`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    strides: tuple[int, ...] | None = None
    view: tuple[int, ...] | None = None
    piece: TensorPiece | None = None
    blocks: StoredBlocks | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_one_run(self) -> bool:
        """Whether its bytes in the file are its elements in row-major order."""
        return self.strides is None and self.blocks is None

    @property
    def stored_bytes(self) -> int:
        """Bytes of its elements in the file."""
        return self.nbytes if self.blocks is None else self.blocks.nbytes

    def in_file(self, nbytes: int) -> int:
        """The bytes in the file of so many bytes of its elements; of blocks they are fewer."""
        return nbytes * self.stored_bytes // max(self.nbytes, 1)

    @property
    def extent(self) -> int:
        """Bytes of the file from the first of its elements to the end of the last."""
        if self.blocks is not None or self.strides is None:
            return self.stored_bytes
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return (last + 1) * DTYPES[self.dtype].bits // 8

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape that the strides are for: the view, or the shape."""
        return self.shape if self.view is None else self.view

    @property
    def granule(self) -> int:
        """Number of elements that are read together: each run of that many elements in row-major order, from a multiple
        on, is a run of bytes in the file. All elements, if only the whole tensor is."""
        if self.blocks is None:
            return 1 if self.strides is None else max(self.elements, 1)
        inner = self.elements
        if self.strides is None:
            inner = 1
        else:  # outer dimensions that are row-major do not scatter the inner ones
            for size, stride in zip(self.sizes, self.strides, strict=True):
                if size > 1 and stride * size != inner:
                    break
                inner //= max(size, 1)
        return math.lcm(max(inner, 1), self.blocks.kind.elements)

    def span(self, first: int, count: int) -> tuple[int, int]:
        """The bytes of the file, from the start of the file, that elements `first` to `first + count` are read from.

        Args:
            first, count: elements in row-major order; of a tensor with strides and no blocks the result has no meaning.
        """
        if self.blocks is None:
            bits = DTYPES[self.dtype].bits
            return self.offset + first * bits // 8, self.offset + (first + count) * bits // 8
        step, block = self.granule, self.blocks.kind
        begin, end = first // step * step, min(round_up(first + count, step), self.elements)
        return tuple(self.offset + element // block.elements * block.nbytes for element in (begin, end))  # type: ignore[return-value]

    @property
    def whole(self) -> TensorSpec:
        """The tensor that this is a piece of, as far as one piece determines it; itself if it is not a piece."""
        if self.piece is None:
            return self
        shape, blocks = self.piece.shape, self.blocks if self.piece.dim == 0 else None
        if blocks is not None:
            nbytes = math.prod(shape) // blocks.kind.elements * blocks.kind.nbytes
            blocks = StoredBlocks(blocks.kind, nbytes, blocks.change, blocks.may_stay)
        nbytes = byte_size(self.dtype, shape)
        return TensorSpec(self.piece.of, self.dtype, shape, self.file, 0, nbytes, blocks=blocks)

    @property
    def row_blocks(self) -> TensorSpec | None:
        """Its blocks as a tensor of bytes; None if its rows are not made of whole blocks.

        A specification of U8, whose shape has the bytes of a row in place of its elements, with the same blocks in the
        same order.
        """
        stored, strides = self.blocks, self.strides
        if stored is None or stored.kind.dtype or stored.change is not ValueChange.NONE or len(self.shape) < 2:
            return None
        columns, run, block = self.shape[-1], self.sizes[-1], stored.kind
        if columns % block.elements or run % block.elements:
            return None
        if strides is not None:
            if strides[-1] != 1 or any(stride % block.elements for stride in strides[:-1]):
                return None
            strides = (*map(block.row_bytes, strides[:-1]), 1)
        shape = (*self.shape[:-1], block.row_bytes(columns))
        view = None if self.view is None else (*self.view[:-1], block.row_bytes(run))
        return TensorSpec(self.name, "U8", shape, self.file, self.offset, math.prod(shape), strides, view)

    def keeps_blocks(self, kind: str | None) -> bool:
        """Whether its blocks stay unchanged where it is stored in those of a type, by its name."""
        stored = self.blocks
        return stored is not None and stored.kind.name == kind and stored.may_stay and self.row_blocks is not None


MAX_SHOWN = 160
"""Limit of the letters of a name in a message."""


class LeftOut(NamedTuple):
    """Tensors of a file that are no weights of the model, such as an optimizer's, or other values, such as an epoch.

    Attributes:
        name: theirs, or that of what they belong to.
        nbytes: bytes of all tensors.
        tensors: number of the tensors.
    """

    name: str
    nbytes: int
    tensors: int = 1

    def __str__(self) -> str:
        """For messages: `optimizer (2 tensors, 1.50 GB)`, `epoch (no tensor)`."""
        if not self.tensors:
            return f"{terminal.harmless(self.name, MAX_SHOWN)} (no tensor)"
        tensors = terminal.counted(self.tensors, "tensor")
        return f"{terminal.harmless(self.name, MAX_SHOWN)} ({tensors}, {terminal.size(self.nbytes)})"


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header, or its equivalent in another format.

    Attributes:
        tensors: in file order.
        metadata: `__metadata__` of the file.
        data_start: offset of the data in bytes.
        comes_first: whether it precedes all data, so that the file can be processed as a stream.
        left_out: what is in the file and not in `tensors`.
        copies: further tensors, which should have the bytes of those of the same name in another file.
    """

    tensors: tuple[TensorSpec, ...]
    metadata: Mapping[str, str]
    data_start: int
    comes_first: bool = True
    left_out: tuple[LeftOut, ...] = ()
    copies: tuple[TensorSpec, ...] = ()


@functools.lru_cache(maxsize=4096)
def byte_size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a contiguous tensor.

    Raises:
        ValueError: the elements do not end on a byte (sub-byte dtypes).
    """
    bits = math.prod(shape) * DTYPES[dtype].bits
    if bits % 8:
        raise ValueError(f"{shape} elements of {dtype} are {bits} bits, which is not a whole number of bytes")
    return bits // 8


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name."""
    import torch

    torch_type: torch.dtype = getattr(torch, DTYPES[dtype].torch_name)
    return torch_type


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors dtype name of a torch dtype."""
    torch_name = str(dtype).removeprefix("torch.")
    return next(name for name, entry in DTYPES.items() if entry.torch_name == torch_name)


STAGING_BYTES = 16 << 20
"""Limit of bytes read before they are rearranged."""
GAP_BYTES = 4096
"""Gaps up to this size are read with the elements: a read costs as much as copying about this much."""


class _Box(NamedTuple):
    """A part of a tensor: the first index and the number of indices along each dimension."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]


def read_run(file: Readable, spec: TensorSpec, begin: int, buffer: memoryview, gap: int = GAP_BYTES) -> int:
    """Fill `buffer` with the tensor's bytes from byte `begin` on in row-major order.

    Args:
        file: the file that holds it.
        spec: the tensor, inside the file; not empty if it has strides.
        begin: bytes; of a tensor with strides a multiple of the element's size, like the length of `buffer`.
        buffer: writable; at most the rest of the tensor.
        gap: bytes between elements up to which they are read together.

    Returns:
        The number of bytes filled; fewer than requested only if the file ended.
    """
    if spec.strides is None or is_contiguous(spec.sizes, spec.strides):
        return file.read_into(buffer, spec.offset + begin)
    item = DTYPES[spec.dtype].bits // 8
    filled, first = 0, begin // item
    for box in _divide_range(spec.sizes, first, first + len(buffer) // item):
        for part in _divide_box(box, spec.strides, item, gap):
            length = math.prod(part.sizes) * item
            offset = spec.offset + item * sum(map(operator.mul, part.starts, spec.strides))
            if not _gather(file, offset, part.sizes, spec.strides, item, buffer[filled : filled + length], gap):
                return filled
            filled += length
    return filled


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements are in row-major order without gaps, like torch's `is_contiguous`."""
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _divide_range(shape: tuple[int, ...], begin: int, end: int) -> Iterator[_Box]:
    """The elements from `begin` to `end`, counted in row-major order, as boxes in that order: at most two per dimension
    plus one."""
    if begin >= end:
        return
    if not shape:
        yield _Box((), ())
        return
    inner = math.prod(shape[1:])
    row, skipped = divmod(begin, inner)
    if skipped:
        stop = min(end, (row + 1) * inner)
        yield from _in_row(row, _divide_range(shape[1:], skipped, stop - row * inner))
        begin, row = stop, row + 1
    rows = max(0, end // inner - row)
    if rows:
        yield _Box((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
        begin, row = begin + rows * inner, row + rows
    yield from _in_row(row, _divide_range(shape[1:], 0, end - begin))


def _in_row(row: int, boxes: Iterator[_Box]) -> Iterator[_Box]:
    return (_Box((row, *box.starts), (1, *box.sizes)) for box in boxes)


def _divide_box(box: _Box, strides: tuple[int, ...], item: int, gap: int) -> Iterator[_Box]:
    """The box, halved repeatedly, in row-major order, until each part can be read at once."""
    waiting = [box]
    while waiting:
        box = waiting.pop()
        outer, _, extent = _reads(box.sizes, strides, item, gap)
        staged = math.prod(box.sizes[dim] for dim in outer) * extent * item
        split_dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
        if staged <= STAGING_BYTES or split_dim is None:
            yield box
            continue
        half = box.sizes[split_dim] // 2
        for start, size in ((half, box.sizes[split_dim] - half), (0, half)):
            starts, sizes = list(box.starts), list(box.sizes)
            starts[split_dim] += start
            sizes[split_dim] = size
            waiting.append(_Box(tuple(starts), tuple(sizes)))


def _reads(sizes: tuple[int, ...], strides: tuple[int, ...], item: int, gap: int) -> tuple[list[int], list[int], int]:
    """The dimensions with a read per index, those within one read, and the elements of a read.

    Dimensions of small strides are read together, as long as the gaps between their elements are small.
    """
    inner: list[int] = []
    extent = 1
    dimensions = sorted((dim for dim, size in enumerate(sizes) if size > 1), key=strides.__getitem__)
    for dim in dimensions:
        if (strides[dim] - extent) * item > gap:
            break
        inner.append(dim)
        extent += (sizes[dim] - 1) * strides[dim]
    return dimensions[len(inner) :], inner, extent


def _gather(
    file: Readable,
    first: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    item: int,
    buffer: memoryview,
    gap: int,
) -> bool:
    """Read a box whose first element is at byte `first` into `buffer` in row-major order; False if the file ended."""
    import torch

    outer, inner, extent = _reads(sizes, strides, item, gap)
    length = extent * item
    staging = memoryview(bytearray(math.prod(sizes[dim] for dim in outer) * length))
    steps = itertools.product(*(range(0, sizes[dim] * strides[dim], strides[dim]) for dim in outer))
    for run, step in enumerate(steps):
        if file.read_into(staging[run * length : (run + 1) * length], first + sum(step) * item) != length:
            return False
    staged_strides = [strides[dim] if dim in inner else 0 for dim in range(len(sizes))]
    for dim in reversed(outer):
        staged_strides[dim] = extent
        extent *= sizes[dim]
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item]
    staged = torch.frombuffer(staging, dtype=dtype)
    torch.frombuffer(buffer, dtype=dtype).view(sizes).copy_(torch.as_strided(staged, sizes, staged_strides))
    return True
