"""The bytes between the tensors of a shard, kept as the shard passes by.

A file whose directory stands behind its data can be moved as it arrives, by the plan's offsets; whether these are right
is verified at the end, from the kept bytes. Independent of formats.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from rabbitllm.formats.tensor_spec import TensorSpec

MAX_BYTES = 16 << 20
"""The most that is kept of a shard: enough for a directory and a pickle of 30,000 tensors."""


def can_be_kept(tensors: Iterable[TensorSpec], size: int) -> bool:
    """Whether a file of `size` bytes consists of these tensors one after the other, and little else."""
    at = unused = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.strides is not None or tensor.offset < at:
            return False
        unused += tensor.offset - at
        at = tensor.offset + tensor.nbytes
    return at <= size and unused + size - at <= MAX_BYTES


class Gaps:
    """The bytes of a shard that belong to none of its tensors.

    Args:
        tensors: tensors for which `can_be_kept` is true.
        size: of the shard, bytes.
    """

    def __init__(self, tensors: Iterable[TensorSpec], size: int) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        at = 0
        for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
            self._add(at, tensor.offset)
            at = tensor.offset + tensor.nbytes
        self._add(at, size)
        self._kept = [bytearray() for _ in self._begins]

    def _add(self, begin: int, end: int) -> None:
        if begin < end:
            self._begins.append(begin)
            self._ends.append(end)

    def watching(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the same chunks, all bytes of the shard in order, keeping the bytes in gaps."""
        at = gap = 0
        for chunk in chunks:
            end = at + len(chunk)
            while gap < len(self._begins) and self._begins[gap] < end:
                begin = max(self._begins[gap], at)
                self._kept[gap] += chunk[begin - at : min(self._ends[gap], end) - at]
                if self._ends[gap] > end:
                    break
                gap += 1
            at = end
            yield chunk

    def read_at(self, offset: int, length: int) -> bytes:
        """Return the bytes of a range within a gap; fewer, or none, if it is not within one."""
        gap = bisect_right(self._begins, offset) - 1
        if gap < 0:
            return b""
        start = offset - self._begins[gap]
        return bytes(self._kept[gap][start : start + length])
