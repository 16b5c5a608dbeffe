"""The kernels for AVX-512, with and without its products of bfloat16, on a processor that has neither.

LLVM compiles a vector of 16 lanes to two vectors of 8. Only the instructions that the kernels name themselves are
emulated here: permutations, sums of products of integers, and VDPBF16PS, which adds the product of the odd elements of
two pairs before that of the even ones, in float32. The rest is the code, loops and tables of the kernels.

Machine code that was made with this must not be kept with the package's own: NUMBA_CACHE_DIR says where else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir

from rabbitllm.quant import _integers, _vectors
from rabbitllm.quant._vectors import F32, I8, I16, I32, Emitter

FEATURES = frozenset({"avx512f", "avx512bw", "avx512bf16"})


def install() -> None:
    """For the rest of this process, whose processor has AVX2.

    Raises:
        RuntimeError: machine code is kept where that of the package is.
    """
    if not numba.config.CACHE_DIR:
        raise RuntimeError("NUMBA_CACHE_DIR must name a folder for emulated kernels alone")
    real, ordinary = _vectors.features(), Emitter.function
    assert _integers.features is _vectors.features  # kept: integers have the same bits with the instructions of AVX2
    _vectors.features = functools.cache(lambda: real | FEATURES)

    def function(self: Emitter, name: str, result: ir.Type, *arguments: ir.Type) -> Any:
        emulated = _EMULATED.get(name)
        if emulated is None:
            return ordinary(self, name, result, *arguments)
        return _defined(self, "emulated." + name.removeprefix("llvm.x86."), emulated, result, *arguments)

    Emitter.function = function  # type: ignore[method-assign]


def _defined(emit: Emitter, name: str, body: Callable[..., Any], result: ir.Type, *arguments: ir.Type) -> Any:
    """A function with this body, once in each module."""
    known = emit.b.module.globals.get(name)
    if known is not None:
        return known
    function = ir.Function(emit.b.module, ir.FunctionType(result, arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    builder.ret(body(builder, *function.args))
    return function


def _permuted(b: Any, table: Any, indices: Any, bits: int) -> Any:
    """table[indices & bits], lane by lane, from a copy in memory: LLVM would write it there again for each lane."""
    kept = b.alloca(table.type)
    b.store(table, kept)
    first = b.bitcast(kept, table.type.element.as_pointer())
    vector = ir.Constant(indices.type if table.type.element != F32 else table.type, ir.Undefined)
    for lane in range(indices.type.count):
        place = ir.Constant(I32, lane)
        index = b.and_(b.extract_element(indices, place), ir.Constant(indices.type.element, bits))
        index = b.zext(index, I32) if index.type != I32 else index
        vector = b.insert_element(vector, b.load(b.gep(first, [index])), place)
    return vector


def _of_two(b: Any, first: Any, indices: Any, second: Any) -> Any:
    both = b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, 64), list(range(64))))
    return _permuted(b, both, indices, 63)


def _dot_pairs(b: Any, sums: Any, left: Any, right: Any) -> Any:
    words, floats = ir.VectorType(I32, 16), ir.VectorType(F32, 16)
    left, right = b.bitcast(left, words), b.bitcast(right, words)
    high, by = ir.Constant(words, [-(1 << 16)] * 16), ir.Constant(words, [16] * 16)
    for half in (lambda pair: b.and_(pair, high), lambda pair: b.shl(pair, by)):
        sums = b.fadd(sums, b.fmul(*(b.bitcast(half(pair), floats) for pair in (left, right))))
    return sums


def _dot_integers(b: Any, left: Any, right: Any) -> Any:
    """The sums of the products of pairs of words; of pairs of bytes, of which the first have no sign, as words."""
    count, is_bytes = left.type.count, left.type.element == I8
    ints, sums = ir.VectorType(I32, count), ir.VectorType(I32, count // 2)
    products = b.mul((b.zext if is_bytes else b.sext)(left, ints), b.sext(right, ints))
    orders = (ir.Constant(sums, list(range(first, count, 2))) for first in (0, 1))
    total = b.add(*(b.shuffle_vector(products, products, order) for order in orders))
    if not is_bytes:
        return total
    most, least = ir.Constant(sums, [(1 << 15) - 1] * (count // 2)), ir.Constant(sums, [-(1 << 15)] * (count // 2))
    total = b.select(b.icmp_signed(">", total, most), most, total)
    return b.trunc(b.select(b.icmp_signed("<", total, least), least, total), ir.VectorType(I16, count // 2))


_EMULATED: dict[str, Callable[..., Any]] = {
    "llvm.x86.avx512.permvar.sf.512": functools.partial(_permuted, bits=15),
    "llvm.x86.avx512.permvar.hi.512": functools.partial(_permuted, bits=31),
    "llvm.x86.avx512.vpermi2var.hi.512": _of_two,
    "llvm.x86.avx512.pmaddw.d.512": _dot_integers,
    "llvm.x86.avx512.pmaddubs.w.512": _dot_integers,
    "llvm.x86.avx512bf16.dpbf16ps.512": _dot_pairs,
}
