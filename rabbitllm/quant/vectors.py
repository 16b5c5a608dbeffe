"""The vector instructions of this processor, and an emitter of LLVM code for the kernels of products."""

from __future__ import annotations

import functools
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.core.extending import intrinsic

_pointer: Any = types.CPointer
FOR_A_THREAD: Any = types.void(_pointer(types.int64))
"""The signature of the function for a thread of a team; see `row_team.py`."""

F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)


@functools.cache
def features() -> frozenset[str]:
    """The processor's features that numba compiles for, by LLVM's names; `NUMBA_CPU_FEATURES` replaces them.

    LLVM ends the process if a kernel uses an instruction of another feature.
    """
    told: str | None = numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    if told is None:
        told = str(get_host_cpu_features())  # type: ignore[no-untyped-call]
    return frozenset(name[1:] for name in told.split(",") if name.startswith("+"))


def lanes() -> int:
    """Number of codes that are decoded at a time; 0 if there is no kernel for this processor."""
    return 16 if "avx512f" in features() else 8 if {"avx2", "fma"} <= features() else 0


def multiplies_pairs() -> bool:
    """Whether this processor multiplies pairs of bfloat16."""
    return {"avx512f", "avx512bw", "avx512bf16"} <= features()


class Emitter:
    """Shorthand over an LLVM builder, for vectors of one width."""

    def __init__(self, builder: Any, width: int) -> None:
        self.b = builder
        self.width = width
        self.floats = ir.VectorType(F32, width)
        self.ints = ir.VectorType(I32, width)
        self.bytes = ir.VectorType(I8, width)
        self.zero = ir.Constant(self.floats, [0.0] * width)

    def function(self, name: str, result: ir.Type, *arguments: ir.Type) -> Any:
        declared = ir.FunctionType(result, arguments)
        return cgutils.get_or_insert_function(self.b.module, declared, name)  # type: ignore[no-untyped-call]

    def variable(self) -> Any:
        """A variable for a vector, initially zero, which LLVM keeps in a register."""
        return cgutils.alloca_once_value(self.b, self.zero)  # type: ignore[no-untyped-call]

    def load(self, address: Any, kind: ir.Type, alignment: int) -> Any:
        loaded = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        loaded.align = alignment
        return loaded

    def prefetch(self, address: Any) -> None:
        """Prefetch the bytes at an address; harmless if the address is invalid."""
        pointer, read, keep, data = I8.as_pointer(), *(ir.Constant(I32, value) for value in (0, 3, 1))
        ask = self.function("llvm.prefetch.p0i8", ir.VoidType(), pointer, I32, I32, I32)
        self.b.call(ask, [self.b.inttoptr(address, pointer), read, keep, data])

    def add(self, *terms: Any) -> Any:
        return functools.reduce(self.b.add, (number(term) for term in terms))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.of_floats("fma", a, b, c)

    def look_up(self, table: Any, index: Any) -> Any:
        """Floats of a vector by indices, of which only the lowest 4 bits (16 lanes) or 3 (8 lanes) count."""
        name = "llvm.x86.avx512.permvar.sf.512" if self.width == 16 else "llvm.x86.avx2.permps"
        return self.b.call(self.function(name, self.floats, self.floats, self.ints), [table, index])

    def of_floats(self, name: str, *operands: Any) -> Any:
        """Call an LLVM function of vectors of floats that returns such a vector."""
        function = self.function(f"llvm.{name}.v{self.width}f32", self.floats, *[self.floats] * len(operands))
        return self.b.call(function, operands)

    def every(self, value: int) -> Any:
        return ir.Constant(self.ints, [value] * self.width)

    def spread(self, scalar: Any) -> Any:
        nothing = ir.Constant(self.floats, ir.Undefined)
        first = self.b.insert_element(nothing, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(I32, self.width), [0] * self.width))

    def sum(self, vector: Any) -> Any:
        add = self.function(f"llvm.vector.reduce.fadd.v{self.width}f32", F32, F32, self.floats)
        return self.b.call(add, [ir.Constant(F32, -0.0), vector], fastmath=("reassoc",))


def number(value: Any) -> Any:
    """An LLVM value, or a Python number as one."""
    return ir.Constant(I64, value) if isinstance(value, int) else value


@intrinsic
def _told_by(context, address):  # type: ignore[no-untyped-def]
    """The int that a C function without arguments, at an address, returns."""

    def emit_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.inttoptr(arguments[0], ir.FunctionType(I32, []).as_pointer())
        return builder.sext(builder.call(function, []), I64)

    return types.int64(types.int64), emit_code


asked: Any = _told_by

# Inlined into each caller: a separate function would have the same name in every kernel. A process that loads two
# kernels that other processes have compiled and cached links them by name, so one would use the other's loops.
inlined: Any = numba.njit(nogil=True, inline="always")
to_array: Any = getattr(numba, "carray")  # noqa: B009 - numba does not say that it exports it
