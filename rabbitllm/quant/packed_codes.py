"""Emits the code with which kernels decode and multiply 4bit and 8bit codes in the processor's registers.

16 (AVX-512) or 8 (AVX2) codes are decoded at a time. 4bit codes are looked up in a table in registers (VPERMPS, as an
intrinsic, since LLVM would gather from memory). The 256 values of 8bit are too many for that: looking them up took
twice as long as computing them from the slopes and starts of eight ramps (see `code_tables.py`).

Even and odd inputs are in two arrays, because two 4bit codes share a byte, and 8bit codes are read in words.

bfloat16 inputs are used unchanged if the processor multiplies pairs of them (VDPBF16PS). A table of bfloat16 then needs
half the lookups and half the products, and the 256 values of 8bit are looked up too, by VPERMI2W. The values are
rounded to bfloat16, after multiplication by the factor with the least rounding error (see `code_tables.py`); sums are
in float32 as before.

Rows and scales are left to the kernels.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from rabbitllm.quant.code_tables import RAMP_BYTES, RAMP_STEP, ZERO_CODE
from rabbitllm.quant.vectors import F32, I8, I16, I32, Emitter

SEGMENT = 64
"""Codes that are summed before their scale is applied: a block at 4bit, a part of a block at 8bit."""
HALF_BYTES = SEGMENT // 2 * 4
"""Bytes of the even or the odd inputs of a segment in float32, and of all its inputs in bfloat16."""
_LARGE, _LARGE_VALUE = 0x4C000000, float(1 << 25)
"""The bits and the value of 2**25 in float32: a code in the lowest bits adds `RAMP_STEP` times the code, without a
conversion."""


class _BFloat(ir.Type):  # type: ignore[misc]
    """bfloat16, a type that llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_WORDS = ir.VectorType(I16, 32)


class _Floats:
    """Multiplies segments in float32; even and odd inputs are in separate arrays."""

    codes_a_step: int
    has_factor = False

    def __init__(self, emit: Emitter, scheme: str) -> None:
        self._emit = emit
        self._codes_a_byte = 2 if scheme == "4bit" else 1

    def weights(self, address: Any) -> tuple[Any, Any]:
        """Even and odd weights of the codes at an address."""
        raise NotImplementedError

    def inputs(self, even: Any, odd: Any, begin: Any) -> list[Any]:
        """Vectors of a segment's inputs, from bytes `begin` on."""
        emit = self._emit
        places = range(0, HALF_BYTES, emit.width * 4)
        return [emit.load(emit.add(half, begin, at), emit.floats, 4) for at in places for half in (even, odd)]

    def products(self, address: Any, inputs: list[list[Any]]) -> list[Any]:
        """Sums of a segment's codes times the inputs of each token, still apart in lanes."""
        emit = self._emit
        parts: list[Any] = [emit.zero] * len(inputs)
        for step in range(SEGMENT // self.codes_a_step):
            both = self.weights(emit.add(address, step * self.codes_a_step // self._codes_a_byte))
            for t, vectors in enumerate(inputs):
                for weight, value in zip(both, vectors[2 * step :], strict=False):
                    parts[t] = emit.fma(weight, value, parts[t])
        return parts


class _Nibbles(_Floats):
    """Looks up 4bit codes: `width` bytes give `width` even and `width` odd weights."""

    def __init__(self, emit: Emitter, table: Any) -> None:
        super().__init__(emit, "4bit")
        self.codes_a_step = 2 * emit.width
        self._tables = [
            emit.load(emit.add(table, 32 * half), emit.floats, 4) for half in range(1 if emit.width == 16 else 2)
        ]

    def weights(self, address: Any) -> tuple[Any, Any]:
        emit = self._emit
        wide = emit.b.zext(emit.load(address, emit.bytes, 1), emit.ints)
        return self._look_up(emit.b.lshr(wide, emit.every(4))), self._look_up(wide)  # the first in the high half

    def _look_up(self, index: Any) -> Any:
        emit = self._emit
        if emit.width == 16:
            return emit.look_up(self._tables[0], index)
        low, high = (emit.look_up(table, index) for table in self._tables)
        is_high = emit.b.icmp_unsigned("!=", emit.b.and_(index, emit.every(8)), emit.every(0))
        return emit.b.select(is_high, high, low)


def _of_256(emit: Emitter, vectors: list[Any], index: Any) -> Any:
    """Words from a table of 256 words in 8 vectors, by a vector of 16-bit indices."""
    permute = emit.function("llvm.x86.avx512.vpermi2var.hi.512", _WORDS, _WORDS, _WORDS, _WORDS)
    quarters = [emit.b.call(permute, [vectors[2 * q], index, vectors[2 * q + 1]]) for q in range(4)]

    def bit(value: int) -> Any:
        masked = emit.b.and_(index, ir.Constant(_WORDS, [value] * 32))
        return emit.b.icmp_unsigned("!=", masked, ir.Constant(_WORDS, [0] * 32))

    low, high = (emit.b.select(bit(64), quarters[2 * h + 1], quarters[2 * h]) for h in range(2))
    return emit.b.select(bit(128), high, low)


class _Bytes(_Floats):
    """Computes the values of 8bit codes: `width` words give `width` even and `width` odd weights."""

    def __init__(self, emit: Emitter, table: Any) -> None:
        super().__init__(emit, "8bit")
        self.codes_a_step = 2 * emit.width
        self._slopes, self._starts = (emit.load(emit.add(table, at), emit.floats, 4) for at in (0, RAMP_BYTES))

    def weights(self, address: Any) -> tuple[Any, Any]:
        emit = self._emit
        wide = emit.b.zext(emit.load(address, ir.VectorType(I16, emit.width), 1), emit.ints)
        return self._meant(emit.b.and_(wide, emit.every(255))), self._meant(emit.b.lshr(wide, emit.every(8)))

    def _meant(self, code: Any) -> Any:
        """The value on the ramp whose index is the exponent of the code's distance from zero, with the code's sign.

        The lookup ignores the sign bit.
        """
        emit = self._emit
        large = emit.b.bitcast(emit.b.or_(code, emit.every(_LARGE)), emit.floats)
        distance = emit.b.fsub(large, ir.Constant(emit.floats, [_LARGE_VALUE + RAMP_STEP * ZERO_CODE] * emit.width))
        bits = emit.b.bitcast(distance, emit.ints)
        ramp = emit.b.lshr(bits, emit.every(23))
        start = emit.b.bitcast(emit.look_up(self._starts, ramp), emit.ints)
        start = emit.b.bitcast(emit.b.xor(start, emit.b.and_(bits, emit.every(-(1 << 31)))), emit.floats)
        return emit.fma(emit.look_up(self._slopes, ramp), distance, start)


class Pairs:
    """Multiplies pairs of bfloat16; a segment has 64 inputs in their own order. The table ends with a factor."""

    has_factor = True
    _PAIRED = ir.VectorType(_BFloat(), 32)

    def __init__(self, emit: Emitter, scheme: str, table: Any) -> None:
        self._emit = emit
        self._scheme = scheme
        vectors = 1 if scheme == "4bit" else 8
        self._tables = [emit.load(emit.add(table, 64 * at), _WORDS, 2) for at in range(vectors)]
        self.factor = emit.load(emit.add(table, 64 * vectors), F32, 2)

    def inputs(self, even: Any, odd: Any, begin: Any) -> list[Any]:
        """Two vectors of a segment's inputs; at 4bit the even ones first, as the codes of a byte are separated."""
        emit = self._emit
        one, two = (emit.load(emit.add(even, begin, at), _WORDS, 2) for at in (0, 64))
        if self._scheme == "8bit":
            return [one, two]
        order = ir.VectorType(I32, 32)
        return [emit.b.shuffle_vector(one, two, ir.Constant(order, list(range(odd, 64, 2)))) for odd in (0, 1)]

    def products(self, address: Any, inputs: list[list[Any]]) -> list[Any]:
        """Sums of a segment's codes times the inputs of each token, still apart in lanes."""
        emit, paired = self._emit, self._PAIRED
        multiply = emit.function("llvm.x86.avx512bf16.dpbf16ps.512", emit.floats, emit.floats, paired, paired)
        both = [emit.b.bitcast(words, paired) for words in self._weights(address)]
        parts: list[Any] = [emit.zero] * len(inputs)
        for t, vectors in enumerate(inputs):
            for weight, value in zip(both, vectors, strict=True):
                parts[t] = emit.b.call(multiply, [parts[t], weight, emit.b.bitcast(value, paired)])
        return parts

    def _weights(self, address: Any) -> tuple[Any, Any]:
        emit = self._emit
        if self._scheme == "8bit":
            indices = (emit.load(emit.add(address, at), ir.VectorType(I8, 32), 1) for at in (0, 32))
            first, second = (_of_256(emit, self._tables, emit.b.zext(index, _WORDS)) for index in indices)
            return first, second
        permute = emit.function("llvm.x86.avx512.permvar.hi.512", _WORDS, _WORDS, _WORDS)
        wide = emit.b.zext(emit.load(address, ir.VectorType(I8, 32), 1), _WORDS)
        nibbles = (emit.b.lshr(wide, ir.Constant(_WORDS, [4] * 32)), wide)  # the first is in the high half
        first, second = (emit.b.call(permute, [self._tables[0], index]) for index in nibbles)
        return first, second


def codebook(emit: Emitter, scheme: str, table: Any) -> Any:
    """The decoder of a scheme's codes to float32, with the table at an address."""
    return _Nibbles(emit, table) if scheme == "4bit" else _Bytes(emit, table)
