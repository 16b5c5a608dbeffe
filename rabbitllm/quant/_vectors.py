"""The vector instructions of this processor, and the code with which kernels decode and multiply codes in registers.

`Emitter` is an emitter of LLVM code. For panels 16 (AVX-512) or 8 (AVX2) codes are decoded at a time to float32. 4bit
codes are looked up in a table in registers (VPERMPS, as an intrinsic, since LLVM would gather from memory). The 256
values of 8bit are too many for that: looking them up took twice as long as computing them from the slopes and starts of
eight ramps. Even and odd values are apart, because two 4bit codes share a byte, and 8bit codes are read in words.

Rows and scales are left to the kernels.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from rabbitllm.base.compiling import features as features  # others take it from here
from rabbitllm.quant._kernel_interface import BFLOAT16, FLOAT16, SEGMENT

ZERO_CODE = 127
"""The 8bit code of 0: lower codes are negative values, higher codes positive ones."""
RAMP_BYTES = 64
"""Bytes of the slopes of ramps, and of their starts: 8 float32, twice, since AVX-512 uses four bits of an index."""
RAMP_STEP = 4
"""The difference in distance from zero of two adjacent codes."""
_RAMP_ERROR = 5e-7
"""Maximum relative error of a value: three or four roundings of float32."""


@functools.cache
def table_of(scheme: str, levels: bytes) -> npt.NDArray[Any] | None:
    """The table in the kernels' format, from the float32 values of the codes; None if these do not fit the format.

    It has the values for 4bit, and the slopes and starts of ramps, float32 (32,), for 8bit.
    """
    values = np.frombuffer(levels, np.float32)
    if scheme == "4bit":
        return values.copy()
    return _ramps(values)


def _ramps(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
    """256 values as straight lines; None if they do not lie on lines.

    A dynamic map (https://arxiv.org/abs/1511.04561, bitsandbytes' `create_dynamic_map`) has on each side of zero evenly
    spaced values from distance 2**e to 2**(e + 1): the exponent is the index of the line. Distances are multiplied by
    four: then 0, whose exponent in float32 is 0, shares a line with 128 alone.
    """
    if not np.isfinite(values).all():
        return None
    side = np.arange(256) - ZERO_CODE
    distance = (RAMP_STEP * np.abs(side)).astype(np.float32)
    ramp = distance.view(np.uint32) >> np.uint32(23) & np.uint32(7)
    slopes, starts = np.zeros((2, 8), np.float32)
    for index in range(8):
        places = np.flatnonzero((ramp == index) & (side >= 0))
        first, last = places[0], places[-1]
        if last > first:
            slopes[index] = (values[last] - values[first]) / (distance[last] - distance[first])
        starts[index] = values[first] - np.float64(slopes[index]) * distance[first]  # where values are smallest
    approximated = np.copysign(slopes[ramp].astype(np.float64) * distance + starts[ramp], side)
    if (np.abs(approximated - values) > _RAMP_ERROR * np.abs(values)).any():
        return None
    return np.concatenate([slopes, slopes, starts, starts])


NEAREST, NEAREST_BITS = float(3 << 22), 0x4B400000
"""A float32 that, added to one of less than 2**22, leaves the nearest integer in its last bits; and its own bits."""
F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def is_zen() -> bool:
    """Whether it is a processor of AMD's Zen family; `NUMBA_CPU_NAME` replaces its name."""
    name: str | None = numba.config.CPU_NAME  # type: ignore[attr-defined]
    return (name or str(binding.get_host_cpu_name())).startswith("znver")


def lanes() -> int:
    """Number of codes that are decoded at a time; 0 if there is no kernel for this processor."""
    return 16 if {"avx512f", "avx512bw"} <= features() else 8 if {"avx2", "fma", "f16c"} <= features() else 0


def multiplies_pairs() -> bool:
    """Whether this processor multiplies pairs of bfloat16."""
    return lanes() == 16 and "avx512bf16" in features()


def multiplies_fours(width: int) -> bool:
    """Whether this processor multiplies four bytes with four at a time, in vectors of so many lanes."""
    return "avx512vnni" in features() if width == 16 else bool({"avx512vnni", "avxvnni"} & features())


class Emitter:
    """Shorthand over an LLVM builder, for vectors of one width."""

    def __init__(self, builder: Any, width: int) -> None:
        self.b = builder
        self.width = width
        self.floats = ir.VectorType(F32, width)
        self.ints = ir.VectorType(I32, width)
        self.bytes = ir.VectorType(I8, width)
        self.zero = every(self.floats, 0.0)

    def function(self, name: str, result: ir.Type, *arguments: ir.Type) -> Any:
        declared = ir.FunctionType(result, arguments)
        return cgutils.get_or_insert_function(self.b.module, declared, name)  # type: ignore[no-untyped-call]

    def fours(self, total: Any, codes: Any, inputs: Any) -> Any:
        """Integers, nothing at first, and for each the products of four unsigned bytes and four signed ones."""
        ints = ir.VectorType(I32, codes.type.count // 4)
        operand = codes.type if binding.llvm_version_info >= (22,) else ints
        multiply = self.function(f"llvm.x86.avx512.vpdpbusd.{8 * codes.type.count}", ints, ints, operand, operand)
        values = (self.b.bitcast(each, operand) for each in (codes, inputs))
        return self.b.call(multiply, [every(ints, 0) if total is None else total, *values])

    def variable(self, count: int = 0) -> Any:
        """A variable for a vector of `width` lanes or so many, initially zero, which LLVM keeps in a register."""
        zeros = every(ir.VectorType(F32, count or self.width), 0.0)
        return cgutils.alloca_once_value(self.b, zeros)  # type: ignore[no-untyped-call]

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        """A loop over so many steps; gives the number of the step."""
        with cgutils.for_range(self.b, count) as loop:
            yield loop.index

    def load(self, address: Any, ir_type: ir.Type, alignment: int) -> Any:
        loaded = self.b.load(self.b.inttoptr(address, ir_type.as_pointer()))
        loaded.align = alignment
        return loaded

    def store(self, value: Any, address: Any, alignment: int) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=alignment)

    def prefetch(self, address: Any, levels: int) -> None:
        """Prefetch the bytes at an address, which stay in so many caches; harmless if the address is invalid."""
        pointer, read, keep, data = I8.as_pointer(), *(ir.Constant(I32, value) for value in (0, levels, 1))
        ask = self.function("llvm.prefetch.p0i8", ir.VoidType(), pointer, I32, I32, I32)
        self.b.call(ask, [self.b.inttoptr(address, pointer), read, keep, data])

    def add(self, *terms: Any) -> Any:
        return functools.reduce(self.b.add, (number(term) for term in terms))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.b.call(self.function(f"llvm.fma.v{a.type.count}f32", *[a.type] * 4), [a, b, c])

    def look_up(self, table: Any, index: Any) -> Any:
        """Floats of a vector by indices, of which only the lowest 4 bits (16 lanes) or 3 (8 lanes) count."""
        name = "llvm.x86.avx512.permvar.sf.512" if self.width == 16 else "llvm.x86.avx2.permps"
        return self.b.call(self.function(name, self.floats, self.floats, self.ints), [table, index])

    def every(self, value: int) -> Any:
        return every(self.ints, value)

    def spread(self, scalar: Any, count: int = 0) -> Any:
        """A vector of a scalar, of `width` lanes or so many."""
        undefined = ir.Constant(self.floats, ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.pick(first, undefined, [0] * (count or self.width))

    def spread_lanes(self, vector: Any, address: Any) -> Callable[[int], Any]:
        """How to spread a lane of a vector to eight: by loading it, since AVX2 spreads what it loads for nothing.

        LLVM would shuffle if it knew that this was just stored; the highest bit of any address, which is 0, hides it.
        """
        place = self.memory(4 * vector.type.count)
        self.store(vector, place, 4)
        hidden = self.add(place, self.b.lshr(address, number(63)))
        return lambda lane: self.spread(self.load(self.add(hidden, 4 * lane), F32, 4), 8)

    def memory(self, nbytes: int) -> Any:
        """The address of memory on the stack, valid until the calling function returns."""
        with self.b.goto_entry_block():  # numba's own way would fill it with zeros, value by value
            place = self.b.alloca(I8, size=number(nbytes))
            place.align = 64
            return self.b.ptrtoint(place, I64)

    def sum(self, *vectors: Any) -> Any:
        """A vector of the sum of the lanes of each vector, in an order that does not depend on the processor.

        Lanes of several vectors are added by one instruction, and their sums stored by one.
        """
        lanes, share = self.joined(*vectors), vectors[0].type.count
        while share > 1:
            share //= 2
            halves = ([lane for lane in range(lanes.type.count) if lane // share % 2 == upper] for upper in (0, 1))
            lanes = self.b.fadd(*(self.pick(lanes, lanes, order) for order in halves))
        return lanes

    def halves(self, vector: Any) -> tuple[Any, Any]:
        """The lower and the upper lanes of a vector."""
        count = vector.type.count // 2
        return self.pick(vector, vector, range(count)), self.pick(vector, vector, range(count, 2 * count))

    def reduced(self, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
        """The only lane of a vector whose halves are joined until it has one."""
        while vector.type.count > 1:
            vector = join(*self.halves(vector))
        return self.b.extract_element(vector, ir.Constant(I32, 0))

    def joined(self, *vectors: Any) -> Any:
        """Vectors, as many as a power of two, one after the other."""
        halves = list(vectors)
        while len(halves) > 1:
            count = 2 * halves[0].type.count
            halves = [self.pick(*pair, range(count)) for pair in zip(halves[::2], halves[1::2], strict=True)]
        return halves[0]

    def pick(self, first: Any, second: Any, order: Iterable[int]) -> Any:
        """Elements of two vectors by their numbers in both."""
        places = list(order)
        return self.b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(places)), places))


def narrowed(b: Any, bits: Any) -> Any:
    """The bits of float32, of which the upper halves are bfloat16: to nearest, ties to even; NaN stays NaN."""
    of = functools.partial(every, bits.type)
    is_nan = b.icmp_unsigned(">", b.and_(bits, of(0x7FFFFFFF)), of(0x7F800000))
    odd = b.and_(b.lshr(bits, of(16)), of(1))
    return b.select(is_nan, of(0x7FC00000), b.add(bits, b.add(odd, of(0x7FFF))))


def emit_narrow(emit: Emitter, source: Any, target: Any, count: Any) -> None:
    """Round float32 to bfloat16."""
    b, whole = emit.b, emit.b.udiv(count, number(emit.width))
    rest = b.mul(whole, number(emit.width))
    for lanes, first, times in ((emit.width, number(0), whole), (1, rest, b.sub(count, rest))):
        ints, words = ir.VectorType(I32, lanes), ir.VectorType(I16, lanes)
        with emit.loop(times) as index:
            place = emit.add(first, b.mul(index, number(lanes)))
            bits = narrowed(b, emit.load(emit.add(source, b.shl(place, number(2))), ints, 4))
            emit.store(b.trunc(b.lshr(bits, every(ints, 16)), words), emit.add(target, place, place), 2)


def half_power(emit: Emitter, address: Any) -> Any:
    """2 ** (exponent - 128), float32, of the byte at an address."""
    b, one, two = emit.b, ir.Constant(I32, 1), ir.Constant(I32, 2)
    exponent = b.zext(emit.load(address, I8, 1), I32)
    small = b.shl(b.add(exponent, one), ir.Constant(I32, 21))
    usual = b.shl(b.sub(exponent, one), ir.Constant(I32, 23))
    return b.bitcast(b.select(b.icmp_unsigned("<", exponent, two), small, usual), F32)


def number(value: Any) -> Any:
    """An LLVM value, or a Python number as one."""
    return ir.Constant(I64, value) if isinstance(value, int) else value


def every(vector_type: ir.VectorType, value: float) -> Any:
    """A vector of one value."""
    return ir.Constant(vector_type, [value] * vector_type.count)


def emitted(emit_code: Callable[..., Any], width: int, result: Any = types.void) -> Any:
    """An intrinsic that takes as many int64s as `emit_code`.

    Args:
        emit_code: emits the code; gets an emitter, and the values of the int64s.
        width: lanes of the emitter's vectors; 16 for `PAIRS` and `INTEGERS`.
        result: the type of what `emit_code` returns.
    """

    def definition(context: Any, *argument_types: Any) -> Any:
        def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = emit_code(Emitter(builder, min(width, 16)), *arguments)
            return context.get_dummy_value() if value is None else value

        return result(*[types.int64] * len(argument_types)), lower

    # numba asks for the number of arguments, of which the first is its context
    definition.__signature__ = inspect.signature(emit_code)  # type: ignore[attr-defined]
    return intrinsic(definition)


def on_stack(nbytes: int) -> Any:
    """An intrinsic: see `Emitter.memory`."""
    return emitted(lambda emit: emit.memory(nbytes), 16, types.int64)


# Inlined into each caller: a separate function would have the same name in every kernel. A process that loads two
# kernels that other processes have compiled and cached links them by name, so one would use the other's loops.
inlined: Any = numba.njit(nogil=True, inline="always")


HALF_BYTES = SEGMENT // 2 * 4
"""Bytes of the even or the odd inputs of a segment in float32, and of all its inputs in bfloat16."""
_LARGE, _LARGE_VALUE = 0x4C000000, float(1 << 25)
"""The bits and the value of 2**25 in float32: a code in the lowest bits adds `RAMP_STEP` times the code, without a
conversion."""


Weights: TypeAlias = Callable[[Any], tuple[Any, Any]]
"""From an address, `width` even and `width` odd weights of the codes there."""


def _nibbles(emit: Emitter, table: Any) -> Weights:
    """Looks 4bit codes up, of which the first of a byte is in its high half."""
    parts = [emit.load(emit.add(table, offset), emit.floats, 1) for offset in range(0, 64, 4 * emit.width)]

    def value(index: Any) -> Any:
        values = [emit.look_up(part, index) for part in parts]
        if len(values) == 1:
            return values[0]
        is_high = emit.b.icmp_unsigned("!=", emit.b.and_(index, emit.every(8)), emit.every(0))
        return emit.b.select(is_high, values[1], values[0])

    def weights(address: Any) -> tuple[Any, Any]:
        wide = emit.b.zext(emit.load(address, emit.bytes, 1), emit.ints)
        return value(emit.b.lshr(wide, emit.every(4))), value(wide)

    return weights


def _bytes(emit: Emitter, table: Any) -> Weights:
    """Computes the values of 8bit codes."""
    slopes, starts = (emit.load(emit.add(table, offset), emit.floats, 4) for offset in (0, RAMP_BYTES))

    def value(code: Any) -> Any:
        """The value on the ramp whose index is the exponent of the code's distance from zero, with the code's sign.

        The lookup ignores the sign bit.
        """
        large = emit.b.bitcast(emit.b.or_(code, emit.every(_LARGE)), emit.floats)
        distance = emit.b.fsub(large, every(emit.floats, _LARGE_VALUE + RAMP_STEP * ZERO_CODE))
        bits = emit.b.bitcast(distance, emit.ints)
        ramp = emit.b.lshr(bits, emit.every(23))
        start = emit.b.bitcast(emit.look_up(starts, ramp), emit.ints)
        start = emit.b.bitcast(emit.b.xor(start, emit.b.and_(bits, emit.every(-(1 << 31)))), emit.floats)
        return emit.fma(emit.look_up(slopes, ramp), distance, start)

    def weights(address: Any) -> tuple[Any, Any]:
        wide = emit.b.zext(emit.load(address, ir.VectorType(I16, emit.width), 1), emit.ints)
        return value(emit.b.and_(wide, emit.every(255))), value(emit.b.lshr(wide, emit.every(8)))

    return weights


def _widened(emit: Emitter, table: Any) -> Weights:
    """Widens bfloat16, the upper half of a float32."""

    def weights(address: Any) -> tuple[Any, Any]:
        both = emit.load(address, emit.ints, 2)
        halves = emit.b.shl(both, emit.every(16)), emit.b.and_(both, emit.every(-(1 << 16)))
        return emit.b.bitcast(halves[0], emit.floats), emit.b.bitcast(halves[1], emit.floats)

    return weights


def _widened_halves(emit: Emitter, table: Any) -> Weights:
    """Widens float16, in their order: two vectors, one after the other."""
    halves = ir.VectorType(ir.HalfType(), emit.width)

    def weights(address: Any) -> tuple[Any, Any]:
        first, second = (emit.load(emit.add(address, offset), halves, 2) for offset in (0, 2 * emit.width))
        return emit.b.fpext(first, emit.floats), emit.b.fpext(second, emit.floats)

    return weights


CODEBOOKS: Mapping[str, Callable[[Emitter, Any], Weights]] = {
    "4bit": _nibbles,
    "8bit": _bytes,
    BFLOAT16: _widened,
    FLOAT16: _widened_halves,
}
"""Decoders of a scheme's codes, or of plain values, to float32: from an emitter and the address of the table."""
