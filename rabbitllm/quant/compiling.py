"""numba, with compiled functions cached for the next process if there is a folder for them.

numba caches a function in files named after it, and reuses them as long as the file that defines the function is
unchanged; it ignores changes of the other modules whose code is part of the machine code. A digest of all of them is
therefore part of the name. Files of older sources are not removed, as numba leaves its own when a function moves to
another line.

If neither the package's folder nor the user's cache can be written (a container without a home), numba raises an error
for a function that it is to cache; the function is then compiled in each process.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Callable
from typing import Any

import numba

# A digest of the sources that the compiled functions of a module depend on.
#
# A compiled function has code of other modules in it: inlined loops, constants, and instructions that their code
# emits. All of them are modules that its own module imports at the top, or that those import in turn. Imports inside
# functions do not count, since a function cannot be compiled with a module that is not imported yet. A module too many
# only causes an unnecessary compilation.

_IMPORT = re.compile(r"^(?:from[ ]+(\w[\w.]*)[ ]+import[ ]+(\([^)]*\)|.*)|import[ ]+(.*))$", re.MULTILINE)
"""An import at the top of a module: the module and the names of `from … import …`, or the modules of `import …`."""


@functools.cache
def digest_of(module: str) -> str | None:
    """A digest of the sources of a module and of the modules of the same package that it depends on.

    Args:
        module: its name; it is imported, or is being imported and past its imports.

    Returns:
        32 hexadecimal digits; None if one of the sources cannot be read.
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
    """The source of a module, and of the modules of its package that it depends on, by name.

    Raises:
        OSError: one of them cannot be read.
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
    read: Callable[[str], bytes] | None = getattr(loader, "get_data", None)  # also from an archive
    if path is None or not path.endswith(".py") or read is None:
        raise FileNotFoundError(f"{module} has no source")
    return read(path)


def _imported(source: str) -> list[str]:
    """Modules that a source imports at its top and that are loaded."""
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
    """A function of this signature, compiled at once, with an `address` that C code can call."""
    make: Any = numba.cfunc
    if _named_by_sources(function):
        try:
            return make(signature, cache=True)(function)
        except RuntimeError:
            pass
    return make(signature)(function)


def _named_by_sources(function: Any) -> bool:
    """Add the digest of its sources to a function's name; False if there is no digest."""
    digest = digest_of(function.__module__)
    if digest is not None:
        function.__qualname__ = f"{function.__name__}_{digest}"
    return digest is not None
