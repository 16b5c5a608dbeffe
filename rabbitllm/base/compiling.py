"""numba, with compiled functions cached for the next process if there is a folder for them.

numba caches a function in files named after it, and reuses them as long as the file that defines the function is
unchanged. A compiled function has code of other modules in it: inlined loops, constants, and instructions that their
code emits. So a digest of all modules of its package and of this one is part of the name. Files of older sources are
not removed, as numba leaves its own when a function moves to another line.

What is not in the cache is compiled, which takes seconds; displays of progress are told. Processes that need the same
function at once compile it once: one holds a lock, and the others wait for what it puts into the cache.

If neither the package's folder nor the user's cache can be written (a container without a home), numba raises an error
for a function that it is to cache; the function is then compiled in each process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from types import FunctionType
from typing import IO, Any

import numba
from llvmlite import ir
from numba import types
from numba.core import event
from numba.core.caching import FunctionCache, NullCache
from numba.core.codegen import get_host_cpu_features
from numba.core.compiler_lock import global_compiler_lock
from numba.core.extending import intrinsic

from rabbitllm.base import progress

_HIGH = 1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2
POWERS_OF_2 = (*_HIGH, 2.402264791363012e-1, 6.931472028550421e-1, 1.0)
"""The coefficients of 2 ** x for x in (-0.5, 0.5), that of x ** 6 first (Cephes, exp2f)."""


class _Telling(event.Listener):
    """Passes on that something is being compiled; numba sends no such event for what it finds in its cache."""

    def on_start(self, event: Any) -> None:
        progress.tell(progress.KernelsCompiling())

    def on_end(self, event: Any) -> None:
        """Nothing: other threads may compile."""


event.register("numba:run_pass", _Telling())  # type: ignore[no-untyped-call]


@functools.cache
def digest_of(package: str) -> str | None:
    """A digest of the sources of all modules of a package and of this one: 32 hexadecimal digits.

    None if there are no sources, or if some changed since this process began: others may have been imported before.
    """
    paths = sorted((path for path in files(package).iterdir() if path.name.endswith(".py")), key=lambda path: path.name)
    paths += [files("rabbitllm.base") / "compiling.py"] if paths else []
    if any(path.stat().st_ctime > _BEGAN for path in paths if isinstance(path, Path)):
        return None
    contents = [(path.name, path.read_bytes()) for path in paths]
    summed = hashlib.sha256(b"".join(f"{name} {len(content)}\n".encode() + content for name, content in contents))
    return summed.hexdigest()[:32] if contents else None


_BEGAN = time.time()
to_array: Any = getattr(numba, "carray")  # noqa: B009 - numba does not say that it exports it


def _emitted(result: Any, argument: Any, emit: Callable[[Any, Any], Any]) -> Any:
    """A function for compiled code, which `emit` emits by a builder and the value of its argument."""

    def definition(context: Any, value: Any) -> Any:
        return result(argument), lambda context, builder, signature, arguments: emit(builder, arguments[0])

    return intrinsic(definition)


def _emitted_ints(emit: Callable[..., Any]) -> Any:
    """The same of one to five int64s, whose values `emit` gets after the builder; it returns one, or None for 0."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = emit(builder, *arguments)
        return ir.Constant(_I64, 0) if value is None else value

    counts = {count: types.int64(*[types.int64] * count) for count in range(1, 6)}
    definitions: dict[int, Callable[..., Any]] = {
        1: lambda context, a: (counts[1], code),
        2: lambda context, a, b: (counts[2], code),
        3: lambda context, a, b, c: (counts[3], code),
        4: lambda context, a, b, c, d: (counts[4], code),
        5: lambda context, a, b, c, d, e: (counts[5], code),
    }
    return intrinsic(definitions[emit.__code__.co_argcount - 1])


_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def _emit_wide(builder: Any, word: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(word, _I32), ir.Constant(_I32, 16)), ir.FloatType())


def _emit_short(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
    rounded = builder.add(builder.add(bits, ir.Constant(_I32, 0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", value, value)
    whole = builder.select(is_nan, ir.Constant(_I32, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(whole, ir.Constant(_I32, 16)), _I16)


@functools.cache
def features() -> frozenset[str]:
    """The processor's features that numba compiles for, by LLVM's names; `NUMBA_CPU_FEATURES` replaces them.

    LLVM ends the process if a kernel uses an instruction of another feature.
    """
    names: str | None = numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    if names is None:
        names = str(get_host_cpu_features())  # type: ignore[no-untyped-call]
    return frozenset(name[1:] for name in names.split(",") if name.startswith("+"))


def _converts_halves() -> bool:
    """Whether there are instructions for float16; else LLVM would call functions of a C compiler's library, which is
    not there, and end the process."""
    return "f16c" in features() or platform.machine().lower() in ("aarch64", "arm64")


def _emit_wide_half(builder: Any, word: Any) -> Any:
    if _converts_halves():
        return builder.fpext(builder.bitcast(word, ir.HalfType()), ir.FloatType())
    bits = builder.zext(word, _I32)
    shifted = builder.shl(builder.and_(bits, ir.Constant(_I32, 0x7FFF)), ir.Constant(_I32, 13))
    # with the other bias of float32, of numbers below the least normal one, too
    value = builder.fmul(builder.bitcast(shifted, ir.FloatType()), ir.Constant(ir.FloatType(), 2.0**112))
    is_finite = builder.icmp_unsigned("<", shifted, ir.Constant(_I32, 0x0F800000))
    infinite = builder.or_(shifted, ir.Constant(_I32, 0x7F800000))
    whole = builder.select(is_finite, builder.bitcast(value, _I32), infinite)
    sign = builder.shl(builder.and_(bits, ir.Constant(_I32, 0x8000)), ir.Constant(_I32, 16))
    return builder.bitcast(builder.or_(whole, sign), ir.FloatType())


def _emit_short_half(builder: Any, value: Any) -> Any:
    if _converts_halves():
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), _I16)
    bits = builder.bitcast(value, _I32)
    rest = builder.and_(bits, ir.Constant(_I32, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(rest, ir.Constant(_I32, 13)), ir.Constant(_I32, 1))
    # the bias of float16, and what rounds to nearest, ties to even
    biased = builder.add(builder.add(rest, ir.Constant(_I32, (-112 << 23) + 0xFFF)), odd)
    normal = builder.lshr(biased, ir.Constant(_I32, 13))
    # below the least normal number the sum with 0.5 has the bits that stay
    summed = builder.fadd(builder.bitcast(rest, ir.FloatType()), ir.Constant(ir.FloatType(), 0.5))
    small = builder.sub(builder.bitcast(summed, _I32), ir.Constant(_I32, 0x3F000000))
    is_small = builder.icmp_unsigned("<", rest, ir.Constant(_I32, 113 << 23))
    is_nan = builder.icmp_unsigned(">", rest, ir.Constant(_I32, 0x7F800000))
    is_large = builder.icmp_unsigned(">=", rest, ir.Constant(_I32, 143 << 23))
    large = builder.select(is_nan, ir.Constant(_I32, 0x7E00), ir.Constant(_I32, 0x7C00))
    whole = builder.select(is_large, large, builder.select(is_small, small, normal))
    sign = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 0x8000))
    return builder.trunc(builder.or_(whole, sign), _I16)


def _pointer(kind: Any, emitted: ir.Type) -> Any:
    """A function for compiled code that makes an address a pointer to values of a kind."""
    return _emitted(
        types.CPointer(kind),  # type: ignore[no-untyped-call]
        types.int64,
        lambda builder, address: builder.inttoptr(address, emitted.as_pointer()),
    )


def _at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


def _call(builder: Any, result: ir.Type, function: Any, *numbers: Any) -> Any:
    kind = ir.FunctionType(result, [_I64] * len(numbers))
    return builder.call(builder.inttoptr(function, kind.as_pointer()), numbers)


def _emit_parts(builder: Any, function: Any, data: Any, first: Any, end: Any, parts: Any) -> None:
    _call(builder, ir.VoidType(), function, data, first, end, parts)


def _emit_team(builder: Any, parallel: Any, function: Any, data: Any, threads: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I32, _I32])
    count = builder.trunc(threads, _I32)
    builder.call(builder.inttoptr(parallel, kind.as_pointer()), [function, data, count, ir.Constant(_I32, 0)])


def _emit_add(builder: Any, address: Any, value: Any) -> Any:
    return builder.atomic_rmw("add", _at(builder, address), value, "seq_cst")


def _emit_exchange(builder: Any, address: Any, old: Any, new: Any) -> Any:
    pair = builder.cmpxchg(_at(builder, address), old, new, "seq_cst", "seq_cst")
    return builder.zext(builder.extract_value(pair, 1), _I64)


def _emit_load(builder: Any, address: Any) -> Any:
    return builder.load_atomic(_at(builder, address), "seq_cst", 8)


def _emit_store(builder: Any, address: Any, value: Any) -> None:
    builder.store_atomic(value, _at(builder, address), "seq_cst", 8)


def _emit_pause(builder: Any, value: Any) -> None:
    name = "llvm.x86.sse2.pause"
    module = builder.module
    function = module.globals.get(name) or ir.Function(module, ir.FunctionType(ir.VoidType(), []), name)
    builder.call(function, [])


def _emit_system(builder: Any, function: Any, number: Any, first: Any, second: Any, third: Any) -> Any:
    return _call(builder, _I64, function, number, first, second, third, ir.Constant(_I64, 0))


def _emit_read(builder: Any, function: Any, descriptor: Any, address: Any, nbytes: Any, offset: Any) -> Any:
    return _call(builder, _I64, function, descriptor, address, nbytes, offset)


def _emit_own(builder: Any, value: Any) -> Any:
    word = ir.GlobalVariable(builder.module, _I64, "own_word")
    word.linkage, word.initializer = "internal", ir.Constant(_I64, 0)
    return builder.ptrtoint(word, _I64)


wide = _emitted(types.float32, types.uint16, _emit_wide)
"""The float32 of a bfloat16, given as the word of its bits."""
shortened = _emitted(types.uint16, types.float32, _emit_short)
"""The bits of the bfloat16 nearest to a float32, ties to even."""
_IN_FLOAT16 = {
    wide: _emitted(types.float32, types.uint16, _emit_wide_half),
    shortened: _emitted(types.uint16, types.float32, _emit_short_half),
}
"""The same of float16."""
float_of = _emitted(
    types.float32, types.int64, lambda builder, bits: builder.bitcast(builder.trunc(bits, _I32), ir.FloatType())
)
"""The float32 of such bits, as `programs.float_bits` gives them."""
bits_of = _emitted(types.uint32, types.float32, lambda builder, value: builder.bitcast(value, _I32))
"""The bits of a float32."""
call_parts = _emitted_ints(_emit_parts)
"""Call the function at an address with the address of its words, the first of some parts, the one after the last of
them, and the number of all."""
call_team = _emitted_ints(_emit_team)
"""Call GOMP_parallel, at an address, with those of a function and of its data, and a number of threads."""
atomic_add, exchange_if = _emitted_ints(_emit_add), _emitted_ints(_emit_exchange)
"""Add to the int64 at an address, which returns what it was; replace it if it has a value, which returns whether."""
shared, share = _emitted_ints(_emit_load), _emitted_ints(_emit_store)
"""Read and write the int64 at an address that other threads write and read."""
pause = _emitted_ints(_emit_pause)
"""Wait for some tens of cycles."""
system_call = _emitted_ints(_emit_system)
"""Call the C library's `syscall`, at an address, with a number and three arguments."""
call_read = _emitted_ints(_emit_read)
"""Call the C library's `pread`, or another function of four numbers, at an address, with these."""
own_word = _emitted_ints(_emit_own)
"""The address of an int64 of the compiled function's own, 0 at first; for one use in a function."""
bytes_at, words_at = _pointer(types.uint8, ir.IntType(8)), _pointer(types.uint16, _I16)
floats_at, integers_at = _pointer(types.float32, ir.FloatType()), _pointer(types.int64, _I64)
"""The pointers to bytes, words of 16 bits, float32s and int64s at an address. For a view of another array numba would
compile its checks."""
STEP: Any = types.void(types.CPointer(types.int64))  # type: ignore[no-untyped-call]
"""The signature of the functions of a `programs.Program`."""
PARTS: Any = types.void(types.CPointer(types.int64), *[types.int64] * 3)  # type: ignore[no-untyped-call]
"""That of those which compute some parts, as `call_parts` calls them; it may call the others, too."""
CALLBACK: Any = types.int32(types.int32, *[types.int64] * 3)
"""That of functions that Python calls, with an event and addresses."""


def compiled(function: Any, **options: Any) -> Any:
    """A function that is compiled when it is first called, and releases the interpreter lock; `options` are numba's."""
    dispatcher = _cached(functools.partial(numba.njit, nogil=True, **options), function)
    dispatcher.compile = _alone(dispatcher._cache, function)(dispatcher.compile)
    return dispatcher


_WITHOUT_ENTRIES = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner: Any = functools.partial(compiled, **_WITHOUT_ENTRIES)
"""As `compiled`, for functions that only compiled ones call: what Python or C would call is not compiled, which takes a
sixth of the time. Python must not call one."""
helper: Any = functools.partial(numba.njit, nogil=True, **_WITHOUT_ENTRIES)
"""The same with options of numba, and not cached by itself."""


@functools.cache
def in_float16(function: Any) -> Any:
    """The function that computes with float16 where a compiled one computes with bfloat16: what it calls is replaced,
    down to `wide` and `shortened`. The same function if it calls neither."""
    if type(function) is type(wide):
        return _IN_FLOAT16.get(function, function)
    own = getattr(function, "py_func", function)
    values, changed = own.__globals__, dict[str, Any]()
    for name in values.keys() & {*own.__code__.co_names}:
        is_compiled = hasattr(values[name], "py_func") or type(values[name]) is type(wide)
        if is_compiled and (value := in_float16(values[name])) is not values[name]:
            changed[name] = value
    if not changed:
        return function
    name = f"{own.__name__}_in_float16"
    copied = FunctionType(own.__code__, {**own.__globals__, **changed}, name, own.__defaults__, own.__closure__)
    copied.__qualname__ = name
    if own is function:
        return copied
    options = {**function.targetoptions}
    del options["nopython"]  # which njit adds
    return numba.njit(**options)(copied)


def c_function(signature: Any, function: Any) -> Any:
    """A function of this signature, compiled at once, with an `address` that C code can call."""
    cache: Any = NullCache()
    if _is_named(function):
        with contextlib.suppress(RuntimeError):  # "no locator available"
            cache = FunctionCache(function)  # type: ignore[no-untyped-call]
    with _alone(cache, function):
        return _cached(functools.partial(numba.cfunc, signature), function)


@functools.cache
def address_of(function: Any, signature: Any = None) -> int:
    """The address of the compiled function; its signature is by default `STEP`, or `PARTS` if it has more arguments."""
    compiled_function = c_function(signature or (STEP if function.__code__.co_argcount == 1 else PARTS), function)
    _KEPT.append(compiled_function)
    return int(compiled_function.address)


_KEPT: list[Any] = []
"""Compiled functions whose addresses are in use."""


def _cached(make: Callable[..., Any], function: Any) -> Any:
    if _is_named(function):
        with contextlib.suppress(RuntimeError):  # "no locator available"
            return make(cache=True)(function)
    return make()(function)


def _is_named(function: Any) -> bool:
    """Give a function the name by which it is cached, if it can be."""
    digest = digest_of(function.__module__.rpartition(".")[0])
    if digest is not None:
        function.__qualname__ = f"{function.__name__}_{digest}"
    return digest is not None


_PATIENCE = 120.0
"""Seconds after which a function is compiled although another process, which may have been stopped, has its lock."""
_HELD, _STUCK = set[str](), set[str]()
"""The locks of this process, and those that it waited for in vain: it waits for no other then."""


@contextlib.contextmanager
def _alone(cache: Any, function: Any) -> Iterator[None]:
    """Let no other process compile a function meanwhile, where its cache's folder has locks: it finds the result there.

    No two processes wait for each other: threads wait for numba's lock first, and functions call each other in no
    circle. A process that is killed has no locks. What is in the cache is loaded without one.
    """
    name = f"{cache.cache_path}/{function.__module__}.{function.__name__}.lock"
    with global_compiler_lock, contextlib.ExitStack() as stack:
        if cache.cache_path and name not in _HELD:
            own = cache._cache_file
            kept = own._data_path(own._data_name(1))  # its first; numba saves the index before that
            with contextlib.suppress(OSError):
                if not os.path.exists(kept):
                    _lock(stack.enter_context(open(name, "ab")), kept, stack)
            _HELD.add(name)
            stack.callback(_HELD.remove, name)
        yield


def _lock(file: IO[bytes], kept: str, stack: contextlib.ExitStack) -> None:
    """Have the lock of a file until a stack's end, or wait until another one is there."""
    if sys.platform == "win32":
        return
    import fcntl

    end = time.monotonic() + (0 if _STUCK else _PATIENCE)
    while not os.path.exists(kept):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                _STUCK.add(file.name)
                return
            progress.tell(progress.KernelsCompiling())
            time.sleep(0.02)
        else:  # a child that is forked meanwhile keeps the file open
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
            return
