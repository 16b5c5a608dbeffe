"""What glibc's allocator does with freed memory, as far as a program can set it. Knows no models.

A block is a part of a heap, which grows in one piece, or a mapping of its own, which is returned to the system when the
block is freed. glibc adapts the least size of the latter: freeing a mapping raises it to the mapping's size, up to
32 MiB (https://man7.org/linux/man-pages/man3/mallopt.3.html, M_MMAP_THRESHOLD). Then a layer's activations lie in
heaps, between KV caches that stay, and leave holes when they are freed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

LARGE_BYTES = 1 << 20
"""Of a block that is to be a mapping of its own: the system hands out its pages, zeros, in a small part of the time in
which a layer fills them."""
_M_MMAP_THRESHOLD = -3


@functools.cache
def trimming() -> Callable[[], object] | None:
    """Gives back what is free, in some milliseconds; None without glibc.

    Holes of whole pages are given back too (https://man7.org/linux/man-pages/man3/malloc_trim.3.html).
    """
    trim = _function("malloc_trim")
    if trim is None:
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return functools.partial(trim, 0)


@functools.cache
def keep_large_apart() -> bool:
    """Let every large block be a mapping of its own from now on, in all of the process; False without glibc."""
    option = _function("mallopt")
    if option is None or _function("malloc_trim") is None:  # others have an empty function of that name
        return False
    option.argtypes, option.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(option(_M_MMAP_THRESHOLD, LARGE_BYTES))


def _function(name: str) -> ctypes._NamedFuncPointer | None:
    try:
        found: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    return found
