"""numba, with what it compiles kept from one process to the next wherever there is a place to keep it.

Where neither the package's folder nor the user's cache can be written (a container without a home), numba refuses to
compile at all what it is asked to keep; it is then compiled in each process.
"""

from __future__ import annotations

from typing import Any

import numba


def compiled(function: Any) -> Any:
    """A function that is compiled when it is first called, and releases the interpreter lock."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "no locator available"
        return numba.njit(nogil=True)(function)


def c_function(signature: Any, function: Any) -> Any:
    """A function of this signature, compiled now, with an `address` that C code can call."""
    make: Any = numba.cfunc
    try:
        return make(signature, cache=True)(function)
    except RuntimeError:
        return make(signature)(function)
