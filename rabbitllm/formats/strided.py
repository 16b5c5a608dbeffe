"""The elements of a strided tensor in row-major order, read from its file in pieces, for any strides.

The requested piece is divided into boxes (a run of indices along each dimension); the runs of bytes that hold a box
are read and rearranged. The size of a read is limited; nothing is mapped, so a file that shrinks meanwhile causes an
error and does not end the process. Independent of formats: a tensor is given by its offset in a file, its shape and
its strides, if any.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from rabbitllm.formats.positional import PositionalFile
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec

STAGING_BYTES = 16 << 20
"""Limit of bytes read before they are rearranged."""
GAP_BYTES = 4096
"""Gaps up to this size are read with the elements: a read costs as much as copying about this much."""


class Strided(NamedTuple):
    """A tensor in a file: offset of its first element (bytes from the start of the file), size of an element in bytes
    (1, 2, 4 or 8), shape, and strides in elements."""

    offset: int
    item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Box(NamedTuple):
    """A part of a tensor: the first index and the number of indices along each dimension."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]


class _Reads(NamedTuple):
    """The reads of a box: the dimensions with a read per index, those within one read, and the elements of a read."""

    outer: tuple[int, ...]
    inner: tuple[int, ...]
    extent: int


def read_run(file: PositionalFile, spec: TensorSpec, begin: int, buffer: memoryview) -> int:
    """Like `read_row_major`, for contiguous tensors as well."""
    if spec.strides is None:
        return file.read_into(buffer, spec.offset + begin)
    place = Strided(spec.offset, DTYPES[spec.dtype].bits // 8, spec.sizes, spec.strides)
    return read_row_major(file, place, begin, buffer)


def read_row_major(file: PositionalFile, tensor: Strided, begin: int, buffer: memoryview) -> int:
    """Fill `buffer` with the tensor's bytes from byte `begin` on in row-major order.

    Args:
        file: the file that holds it.
        tensor: not empty, and inside the file.
        begin: a multiple of the element's size, bytes.
        buffer: writable; a multiple of the element's size, and at most the rest of the tensor.

    Returns:
        The number of bytes filled; fewer than requested only if the file ended.
    """
    if is_contiguous(tensor.shape, tensor.strides):
        return file.read_into(buffer, tensor.offset + begin)
    at, first = 0, begin // tensor.item
    for box in _boxes(tensor.shape, first, first + len(buffer) // tensor.item):
        for part in _small_enough(box, tensor):
            length = math.prod(part.sizes) * tensor.item
            if not _gather(file, tensor, part, buffer[at : at + length]):
                return at
            at += length
    return at


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


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[_Box]:
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
        yield from _in_row(row, _boxes(shape[1:], skipped, stop - row * inner))
        begin, row = stop, row + 1
    rows = max(0, end // inner - row)
    if rows:
        yield _Box((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
        begin, row = begin + rows * inner, row + rows
    yield from _in_row(row, _boxes(shape[1:], 0, end - begin))


def _in_row(row: int, boxes: Iterator[_Box]) -> Iterator[_Box]:
    return (_Box((row, *box.starts), (1, *box.sizes)) for box in boxes)


def _small_enough(box: _Box, tensor: Strided) -> Iterator[_Box]:
    """The box, halved repeatedly, in row-major order, until each part can be read at once."""
    waiting = [box]
    while waiting:
        box = waiting.pop()
        reads = _reads(box.sizes, tensor)
        staged = math.prod(box.sizes[number] for number in reads.outer) * reads.extent * tensor.item
        longest = next((number for number, size in enumerate(box.sizes) if size > 1), None)
        if staged <= STAGING_BYTES or longest is None:
            yield box
            continue
        half = box.sizes[longest] // 2
        for start, size in ((half, box.sizes[longest] - half), (0, half)):
            starts, sizes = list(box.starts), list(box.sizes)
            starts[longest] += start
            sizes[longest] = size
            waiting.append(_Box(tuple(starts), tuple(sizes)))


def _reads(sizes: tuple[int, ...], tensor: Strided) -> _Reads:
    """Dimensions of small strides are read together, as long as the gaps between their elements are small."""
    inner: list[int] = []
    extent = 1
    dimensions = sorted((number for number, size in enumerate(sizes) if size > 1), key=tensor.strides.__getitem__)
    for number in dimensions:
        if (tensor.strides[number] - extent) * tensor.item > GAP_BYTES:
            break
        inner.append(number)
        extent += (sizes[number] - 1) * tensor.strides[number]
    return _Reads(tuple(dimensions[len(inner) :]), tuple(inner), extent)


def _gather(file: PositionalFile, tensor: Strided, box: _Box, buffer: memoryview) -> bool:
    """Read a box into `buffer` in row-major order; False if the file ended."""
    import torch

    reads = _reads(box.sizes, tensor)
    first = tensor.offset + tensor.item * sum(
        start * stride for start, stride in zip(box.starts, tensor.strides, strict=True)
    )
    length = reads.extent * tensor.item
    runs = math.prod(box.sizes[number] for number in reads.outer)
    staging = memoryview(bytearray(runs * length))
    offsets = (
        sum(index * tensor.strides[number] for index, number in zip(indices, reads.outer, strict=True))
        for indices in itertools.product(*(range(box.sizes[number]) for number in reads.outer))
    )
    for run, offset in enumerate(offsets):
        if file.read_into(staging[run * length : (run + 1) * length], first + offset * tensor.item) != length:
            return False
    strides = [0] * len(box.sizes)
    for number in reads.inner:
        strides[number] = tensor.strides[number]
    step = reads.extent
    for number in reversed(reads.outer):
        strides[number] = step
        step *= box.sizes[number]
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.item]
    staged = torch.frombuffer(staging, dtype=dtype)
    torch.frombuffer(buffer, dtype=dtype).view(box.sizes).copy_(torch.as_strided(staged, box.sizes, strides))
    return True
