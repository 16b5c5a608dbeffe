"""numba, with what it compiles kept from one process to the next wherever there is a place to keep it.

numba keeps a function in files named after it, and takes them up again as long as the file that defines the function
is the same; of the other modules that went into the machine code it knows nothing. A digest of all of them
is therefore part of the name. Files of sources that are no more stay where they are, as numba
leaves its own behind wherever a function has moved to another line.

Where neither the package's folder nor the user's cache can be written (a container without a home), numba refuses to
compile at all what it is asked to keep; it is then compiled in each process.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Callable
from typing import Any

import numba

# Which sources go into what a module compiles, and a digest of them.
#
# A compiled function holds machine code of other modules: their loops are put into it, their constants are written
# into it, and their code emits its instructions. All of them are in modules that its own module imports at the top, or
# that those import in turn; an import inside a function is none of them, since nothing can be compiled with what is
# not there yet. A module too many only has something compiled again that need not be.
#
# Knows no compiler.

_IMPORT = re.compile(r"^(?:from[ ]+(\w[\w.]*)[ ]+import[ ]+(\([^)]*\)|.*)|import[ ]+(.*))$", re.MULTILINE)
"""At the top of a module: from where, which names; or which modules."""


@functools.cache
def digest_of(module: str) -> str | None:
    """What tells the sources of a module, and of all of the same package that go into it, from any others.

    Args:
        module: its name; it is imported, or is being imported and is past its imports.

    Returns:
        32 hexadecimal digits; None where one of the sources is not there to be read.
    """
    try:
        sources = sources_of(module)
    except OSError:
        return None
    summed = hashlib.sha256()
    for name, content in sorted(sources.items()):
        summed.update(f"{name} {len(content)}\n".encode() + content)
    return summed.hexdigest()[:32]


def sources_of(module: str) -> dict[str, bytes]:
    """The source of a module, and of every one of its package that it is made with, by name.

    Raises:
        OSError: one of them is not there to be read.
    """
    package = module.partition(".")[0]
    sources: dict[str, bytes] = {}
    left = [module]
    while left:
        name = left.pop()
        if name not in sources:
            sources[name] = _source(name)
            left += [found for found in _imported(sources[name].decode()) if found.partition(".")[0] == package]
    return sources


def _source(module: str) -> bytes:
    path, loader = getattr(sys.modules[module], "__file__", None), getattr(sys.modules[module], "__loader__", None)
    read: Callable[[str], bytes] | None = getattr(loader, "get_data", None)  # out of an archive too
    if path is None or not path.endswith(".py") or read is None:
        raise FileNotFoundError(f"{module} has no source")
    return read(path)


def _imported(source: str) -> list[str]:
    """Modules that a source imports at its top, and that are there."""
    names: list[str] = []
    for origin, listed, plain in _IMPORT.findall(source):
        words = re.findall(r"\w[\w.]*", re.sub(r"#.*|\bas +\w+", "", listed or plain))
        names += [origin, *(f"{origin}.{word}" for word in words)] if origin else words
    return [name for name in names if name in sys.modules]


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
