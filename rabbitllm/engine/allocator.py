"""Settings of glibc's allocator: how it returns freed memory to the system. Independent of models.

A block is a part of a heap, which grows in one piece, or a mapping of its own, which is returned to the system when the
block is freed. glibc adapts the minimum size of a mapping: freeing a mapping raises it to the mapping's size, up to
32 MiB (https://man7.org/linux/man-pages/man3/mallopt.3.html, M_MMAP_THRESHOLD). Then a layer's activations lie in
heaps, between long-lived KV caches, and leave holes when they are freed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

LARGE_BYTES = 1 << 20
"""Minimum size of a block that gets a mapping of its own: the system provides its zeroed pages in a small part of the
time in which a layer fills them."""
_M_MMAP_THRESHOLD = -3


@functools.cache
def trimming() -> Callable[[], object] | None:
    """A function that returns free memory to the system, in some milliseconds; None without glibc.

    Holes of whole pages are returned too (https://man7.org/linux/man-pages/man3/malloc_trim.3.html).
    """
    trim = _function("malloc_trim")
    if trim is None:
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return functools.partial(trim, 0)


@functools.cache
def keep_large_apart() -> bool:
    """Give every large block of the process a mapping of its own from now on; False without glibc."""
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
