"""numba, with compiled functions cached for the next process if there is a folder for them.

numba caches a function in files named after it, and reuses them as long as the file that defines the function is
unchanged. A compiled function has code of other modules in it: inlined loops, constants, and instructions that their
code emits. So a digest of all modules of its package is part of the name. Files of older sources are not removed, as
numba leaves its own when a function moves to another line.

What is not in the cache is compiled, which takes seconds; displays of progress are told.

If neither the package's folder nor the user's cache can be written (a container without a home), numba raises an error
for a function that it is to cache; the function is then compiled in each process.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import numba
from numba.core import event

from rabbitllm.base import progress


class _Telling(event.Listener):
    """Passes on that something is being compiled; numba sends no such event for what it finds in its cache."""

    def on_start(self, event: Any) -> None:
        progress.tell(progress.KernelsCompiling())

    def on_end(self, event: Any) -> None:
        """Nothing: other threads may compile."""


event.register("numba:run_pass", _Telling())  # type: ignore[no-untyped-call]


@functools.cache
def digest_of(package: str) -> str | None:
    """A digest of the sources of all modules of a package: 32 hexadecimal digits; None if there are no sources."""
    paths = sorted((path for path in files(package).iterdir() if path.name.endswith(".py")), key=lambda path: path.name)
    contents = [(path.name, path.read_bytes()) for path in paths]
    summed = hashlib.sha256(b"".join(f"{name} {len(content)}\n".encode() + content for name, content in contents))
    return summed.hexdigest()[:32] if contents else None


to_array: Any = getattr(numba, "carray")  # noqa: B009 - numba does not say that it exports it


def compiled(function: Any) -> Any:
    """A function that is compiled when it is first called, and releases the interpreter lock."""
    return _cached(functools.partial(numba.njit, nogil=True), function)


def c_function(signature: Any, function: Any) -> Any:
    """A function of this signature, compiled at once, with an `address` that C code can call."""
    return _cached(functools.partial(numba.cfunc, signature), function)


def _cached(make: Callable[..., Any], function: Any) -> Any:
    digest = digest_of(function.__module__.rpartition(".")[0])
    if digest is not None:
        function.__qualname__ = f"{function.__name__}_{digest}"
        try:
            return make(cache=True)(function)
        except RuntimeError:  # "no locator available"
            pass
    return make()(function)
