"""numba, with what it compiles kept from one process to the next wherever there is a place to keep it.

numba keeps a function in files named after it, and takes them up again as long as the file that defines the function
is the same; of the other modules that went into the machine code it knows nothing. A digest of all of them
(`kernel_sources.py`) is therefore part of the name. Files of sources that are no more stay where they are, as numba
leaves its own behind wherever a function has moved to another line.

Where neither the package's folder nor the user's cache can be written (a container without a home), numba refuses to
compile at all what it is asked to keep; it is then compiled in each process.
"""

from __future__ import annotations

from typing import Any

import numba

from rabbitllm.quant.kernel_sources import digest_of


def compiled(function: Any) -> Any:
    """A function that is compiled when it is first called, and releases the interpreter lock."""
    if _named_by_sources(function):
        try:
            return numba.njit(nogil=True, cache=True)(function)
        except RuntimeError:  # "no locator available"
            pass
    return numba.njit(nogil=True)(function)


def c_function(signature: Any, function: Any) -> Any:
    """A function of this signature, compiled now, with an `address` that C code can call."""
    make: Any = numba.cfunc
    if _named_by_sources(function):
        try:
            return make(signature, cache=True)(function)
        except RuntimeError:
            pass
    return make(signature)(function)


def _named_by_sources(function: Any) -> bool:
    """Give a function a name that tells what it is compiled from; False where that cannot be told."""
    digest = digest_of(function.__module__)
    if digest is not None:
        function.__qualname__ = f"{function.__name__}_{digest}"
    return digest is not None
