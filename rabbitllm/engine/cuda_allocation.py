"""What runs of GPU memory really take: torch's allocator hands them out of segments, and rounds. Pure.

The sizes are those of torch's caching allocator for CUDA (c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize,
kSmallBuffer, kMinLargeAlloc, kLargeBuffer, kRoundLarge), the same since its version 1.0.
"""

from __future__ import annotations

_ROUND = 512
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_LARGE = 10 << 20
_LARGE_SEGMENT = 20 << 20
_ROUND_LARGE = 2 << 20


def taken(nbytes: int) -> int:
    """Bytes of a GPU that one of many runs of `nbytes` takes, with its share of what is left at the ends of segments.

    Half as much again at worst: two of 6.7 MiB have a segment of 20.
    """
    rounded = max(_up(nbytes, _ROUND), _ROUND)
    if rounded >= _LARGE:
        return _up(rounded, _ROUND_LARGE)
    segment = _SMALL_SEGMENT if rounded <= _SMALL else _LARGE_SEGMENT
    return segment // (segment // rounded)


def _up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
