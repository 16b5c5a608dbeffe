"""Which sources go into what a module compiles, and a digest of them.

A compiled function holds machine code of other modules: their loops are put into it, their constants are written into
it, and their code emits its instructions. All of them are in modules that its own module imports at the top, or that
those import in turn; an import inside a function is none of them, since nothing can be compiled with what is not there
yet. A module too many only has something compiled again that need not be.

Knows no compiler.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Callable

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
