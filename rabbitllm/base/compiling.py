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
from llvmlite import ir
from numba import types
from numba.core import event
from numba.core.extending import intrinsic

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


def _emitted(result: Any, argument: Any, emit: Callable[[Any, Any], Any]) -> Any:
    """A function for compiled code, which `emit` emits by a builder and the value of its argument."""

    def definition(context: Any, value: Any) -> Any:
        return result(argument), lambda context, builder, signature, arguments: emit(builder, arguments[0])

    return intrinsic(definition)


_I16, _I32 = ir.IntType(16), ir.IntType(32)


def _emit_wide(builder: Any, word: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(word, _I32), ir.Constant(_I32, 16)), ir.FloatType())


def _emit_asked(builder: Any, address: Any) -> Any:
    function = builder.inttoptr(address, ir.FunctionType(_I32, []).as_pointer())
    return builder.sext(builder.call(function, []), ir.IntType(64))


wide = _emitted(types.float32, types.uint16, _emit_wide)
"""The float32 of a bfloat16, given as the word of its bits."""
asked = _emitted(types.int64, types.int64, _emit_asked)
"""The int that a C function without arguments, at an address, returns."""
words_at = _emitted(
    types.CPointer(types.uint16),  # type: ignore[no-untyped-call]
    types.int64,
    lambda builder, address: builder.inttoptr(address, _I16.as_pointer()),
)
"""The pointer to words of 16 bits at an address."""
STEP: Any = types.void(types.CPointer(types.int64))  # type: ignore[no-untyped-call]
"""The signature of the functions of a `quant.joint.Program`."""


def compiled(function: Any) -> Any:
    """A function that is compiled when it is first called, and releases the interpreter lock."""
    return _cached(functools.partial(numba.njit, nogil=True), function)


def c_function(signature: Any, function: Any) -> Any:
    """A function of this signature, compiled at once, with an `address` that C code can call."""
    return _cached(functools.partial(numba.cfunc, signature), function)


@functools.cache
def address_of(function: Any) -> int:
    """The address of the compiled function of the signature `STEP`."""
    compiled_function = c_function(STEP, function)
    _KEPT.append(compiled_function)
    return int(compiled_function.address)


_KEPT: list[Any] = []
"""Compiled functions whose addresses are in use."""


def _cached(make: Callable[..., Any], function: Any) -> Any:
    digest = digest_of(function.__module__.rpartition(".")[0])
    if digest is not None:
        function.__qualname__ = f"{function.__name__}_{digest}"
        try:
            return make(cache=True)(function)
        except RuntimeError:  # "no locator available"
            pass
    return make()(function)
