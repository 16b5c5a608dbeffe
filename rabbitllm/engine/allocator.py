"""What glibc's allocator does with memory that was let go of, as far as a program may say. Knows no models.

Blocks come out of heaps that grow in one piece, or each is a mapping of its own, which goes back to the system when it
is let go of. Which blocks are large enough for the latter glibc learns by itself: whoever lets go of a large one raises
the limit, up to 32 MiB (https://man7.org/linux/man-pages/man3/mallopt.3.html, M_MMAP_THRESHOLD). Then what a layer
computes lies in heaps, keys and values that stay come to lie between, and holes stay behind.
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
