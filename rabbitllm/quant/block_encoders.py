"""Encoders of ggml's blocks: the way back from `gguf_blocks.dequantize`, on the CPU, compiled by numba.

Q8_0 is defined by ggml: the scale is the largest magnitude / 127, and a code the nearest multiple of it. For all other
types the scales are searched for. The error that is made small is the sum of w * (x - decoded)**2 over a block, with
w = x**2 + `spread` * mean(x**2): large weights matter more, and a larger `spread` trusts them less.

1. Each group of 16 or 32 elements: a few ranges of codes are tried. For the codes of each, least squares give the scale
   and the minimum. The best of them is fitted again to its own codes.
2. Each block: scales and minima of the groups are multiples of two numbers. A few of such numbers are tried.
3. The multiples next to those, with the best minimum for each; then the two numbers, by least squares for all codes of
   the block; and this again.
4. The codes are the nearest ones.

Groups are the lanes of all loops, so each sum has one order: the bytes are the same on every processor and for any
number of threads. Nothing is contracted to a fused product and sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rabbitllm.errors import UnreadableFormatError
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant._compiling import compiled
from rabbitllm.quant._gguf_decoders import IQ4_VALUES
from rabbitllm.quant.dequantize_kernels import share
from rabbitllm.quant.quantize_kernels import BF16, F16, F32, widen

Bytes: TypeAlias = npt.NDArray[np.uint8]
Factors: TypeAlias = npt.NDArray[np.int16]
Floats: TypeAlias = npt.NDArray[np.float32]

LARGEST = 65504.0
"""The largest float16, which scales are stored in; larger values are refused."""
LANES = 32
"""Groups that are computed together."""
AT_ONCE = 1 << 16
"""Elements whose factors are held at a time; a whole number of tiles."""
_KINDS = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}
_LARGEST_BITS = int(np.float32(LARGEST).view(np.uint32))


@dataclass(frozen=True)
class _Form:
    """How blocks of a type are made.

    Attributes:
        group: elements of a group.
        codes: the least and the greatest; the least is stored as 0. None: indices of `IQ4_VALUES`.
        factors: the least and the greatest multiple of the block's scale; (1, 1) if a block is one group.
        minima: the least and the greatest multiple of the block's minimum, which is positive unless both are 1; (0, 0)
            if nothing is subtracted.
        spread: see above.
        ranges: codes that a group's largest magnitude, or the distance of its extremes, is tried to be.
        planes: bits of the codes: (offset in the block, first bit, bits, run). A byte has those of elements that are
            16 * run apart, the first in its lowest bits; if run is 0, those of consecutive elements.
        halves: offsets of the scale and of the minimum.
        pack: writes factors and minima, int16 (blocks, groups), to blocks.
    """

    group: int
    codes: tuple[int, int] | None
    factors: tuple[int, int]
    minima: tuple[int, int]
    spread: float
    ranges: Sequence[float]
    planes: Sequence[tuple[int, int, int, int]]
    halves: Sequence[int]
    pack: Callable[[Bytes, Factors, Factors], None] | None = None


def _pack_q6_k(out: Bytes, factors: Factors, minima: Factors) -> None:
    out[:, 192:208] = factors.astype(np.int8).view(np.uint8)


def _pack_q3_k(out: Bytes, factors: Factors, minima: Factors) -> None:
    six = factors + 32
    out[:, 96:104] = six[:, :8] & 15 | (six[:, 8:] & 15) << 4
    out[:, 104:108] = sum((six[:, 4 * part : 4 * part + 4] >> 4) << 2 * part for part in range(4))


def _pack_q2_k(out: Bytes, factors: Factors, minima: Factors) -> None:
    out[:, :16] = factors | minima << 4


def _pack_six_bits(out: Bytes, factors: Factors, minima: Factors) -> None:
    for offset, values in ((4, factors), (8, minima)):
        out[:, offset : offset + 4] = values[:, :4] | (values[:, 4:] >> 4) << 6
    out[:, 12:16] = factors[:, 4:] & 15 | (minima[:, 4:] & 15) << 4


def _pack_iq4_xs(out: Bytes, factors: Factors, minima: Factors) -> None:
    six = factors + 32
    out[:, 4:8] = six[:, ::2] & 15 | (six[:, 1::2] & 15) << 4
    out[:, 2:4] = sum((six[:, part::4] >> 4) << 2 * part for part in range(4))


def _negate(out: Bytes, factors: Factors, minima: Factors) -> None:
    """The minimum is added, and not subtracted."""
    out[:, 3] ^= 128


def _evenly(first: float, last: float, count: int) -> tuple[float, ...]:
    return tuple(first + (last - first) * index / (count - 1) for index in range(count))


_OF_IQ4 = (*_evenly(-135, -95, 6), *_evenly(95, 135, 6))
_OF_Q3 = (*_evenly(-5, -2.6, 6), *_evenly(2.6, 5, 6))
_OF_Q5_0 = (*_evenly(-17, -13.5, 6), *_evenly(13.5, 17, 6))
_NO_MINIMA, _ONE_GROUP = (0, 0), (1, 1)
_FORMS = {
    "IQ4_NL": _Form(32, None, _ONE_GROUP, _NO_MINIMA, 4, _OF_IQ4, [(2, 0, 4, 1)], [0]),
    "IQ4_XS": _Form(32, None, (-32, 31), _NO_MINIMA, 4, _OF_IQ4, [(8, 0, 4, 1)], [0], _pack_iq4_xs),
    "Q5_0": _Form(32, (-16, 15), _ONE_GROUP, _NO_MINIMA, 4, _OF_Q5_0, [(6, 0, 4, 1), (2, 4, 1, 0)], [0]),
    "Q5_1": _Form(
        32, (0, 31), _ONE_GROUP, _ONE_GROUP, 4, _evenly(26, 32, 12), [(8, 0, 4, 1), (4, 4, 1, 0)], [0, 2], _negate
    ),
    "Q6_K": _Form(
        16,
        (-32, 31),
        (-128, 127),
        _NO_MINIMA,
        4,
        _evenly(-33, -26, 18),
        [(0, 0, 4, 4), (128, 4, 2, 2)],
        [208],
        _pack_q6_k,
    ),
    "Q5_K": _Form(
        32, (0, 31), (0, 63), (0, 63), 4, _evenly(26, 32, 18), [(48, 0, 4, 2), (16, 4, 1, 2)], [0, 2], _pack_six_bits
    ),
    "Q4_K": _Form(32, (0, 15), (0, 63), (0, 63), 4, _evenly(11.5, 16.5, 14), [(16, 0, 4, 2)], [0, 2], _pack_six_bits),
    "Q3_K": _Form(16, (-4, 3), (-32, 31), _NO_MINIMA, 2, _OF_Q3, [(32, 0, 2, 2), (0, 2, 1, 2)], [108], _pack_q3_k),
    "Q2_K": _Form(16, (0, 3), (0, 15), (0, 15), 1, _evenly(1.6, 3.8, 8), [(16, 0, 2, 2)], [80, 82], _pack_q2_k),
}
ENCODED = ("Q8_0", "Q4_0", *_FORMS)
"""The types that `encode` makes."""


def encode(name: str, values: torch.Tensor | npt.NDArray[Any], threads: int | None = None) -> torch.Tensor:
    """Quantize a matrix to blocks.

    Args:
        name: one of `ENCODED`.
        values: (rows, columns) bfloat16, float16 or float32, on the CPU; rows are whole blocks.
        threads: how many compute; by default as many as torch has.

    Returns:
        uint8 (rows, bytes of a row).

    Raises:
        UnreadableFormatError: another type, dtype or shape; or a value that is not a number or exceeds float16.
    """
    matrix = torch.as_tensor(values)
    kind, block = _KINDS.get(matrix.dtype), BLOCK_TYPES.get(name)
    if name not in ENCODED or block is None or kind is None or matrix.ndim != 2 or matrix.shape[1] % block.elements:
        raise UnreadableFormatError(
            f"{tuple(matrix.shape)} numbers in {matrix.dtype} cannot be encoded as {name}; expected rows of whole "
            f"blocks in bfloat16, float16 or float32, and one of {', '.join(ENCODED)}.",
            "Choose another type for this tensor.",
        )
    words = matrix.contiguous().view(torch.uint32 if kind == F32 else torch.uint16).numpy().reshape(-1)
    out = np.zeros((words.size // block.elements, block.nbytes), np.uint8)
    step = AT_ONCE // block.elements
    refused: list[np.uint32] = []

    def work(begin: int, end: int) -> None:
        for first in range(begin * step, min(end * step, len(out)), step):
            some = out[first : first + step]
            largest = _encode(name, words[first * block.elements :][: len(some) * block.elements], kind, some)
            if largest > _LARGEST_BITS:
                refused.append(np.uint32(largest))

    share(work, -(-len(out) // step), words.size, threads or torch.get_num_threads())
    if refused:
        raise UnreadableFormatError(
            f"A magnitude is {max(refused).view(np.float32)}, and scales of {name} blocks, which are float16, hold at "
            f"most {LARGEST:,.0f}.",
            "Store this tensor as BF16 or F32; if it is not a number, download the file again.",
        )
    return torch.from_numpy(out).view(len(matrix), block.row_bytes(matrix.shape[1]))


def not_a_number(name: str) -> torch.Tensor:
    """A block whose elements are not numbers: uint8 (bytes,)."""
    block = torch.zeros(BLOCK_TYPES[name].nbytes, dtype=torch.uint8)
    offset = _FORMS[name].halves[0] if name in _FORMS else 0
    block[offset : offset + 2] = torch.tensor([torch.nan], dtype=torch.float16).view(torch.uint8)
    return block


def _encode(name: str, words: Any, kind: int, out: Bytes) -> int:
    """Encode whole blocks into `out`, which is zeros; returns the bits of the largest magnitude as float32."""
    scales = np.empty((len(out), 2), np.float32)
    if name not in _FORMS:
        largest: int = (_q8_0 if name == "Q8_0" else _q4_0)(words, kind, out, scales)
        out[:, :2] = scales[:, :1].astype(np.float16).view(np.uint8)
        return largest
    form, (limits, ranges, places) = _FORMS[name], _tables(name)
    factors, minima = np.empty((2, len(out), BLOCK_TYPES[name].elements // form.group), np.int16)
    largest = _search(words, kind, form.group, limits, ranges, places, out, factors, minima, scales)
    for offset, column in zip(form.halves, scales.T, strict=False):
        out[:, offset : offset + 2] = column[:, None].astype(np.float16).view(np.uint8)
    if form.pack is not None:
        form.pack(out, factors, minima)
    return largest


@cache
def _tables(name: str) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """What the kernel needs of a form.

    Returns:
        Limits: least and greatest code, factor and minimum, spread; codes of `IQ4_VALUES` are 0 to -1.
        The ranges.
        Where the bits of 16 codes, or of one, go: index of the first, their number, bits to shift right, mask, offset,
        bits to shift left.
    """
    form = _FORMS[name]
    limits = np.array([*(form.codes or (0, -1)), *form.factors, *form.minima, form.spread], np.float32)
    places = []
    for offset, first, bits, run in form.planes:
        width, stride, a_byte = (16, run, 8 // bits) if run else (1, 1, 8 // bits)
        for unit in range(BLOCK_TYPES[name].elements // width):
            behind = width * (stride * (unit // stride // a_byte) + unit % stride)
            target = offset + behind, bits * (unit // stride % a_byte)
            places.append((width * unit, width, first, (1 << bits) - 1, *target))
    return limits, np.array(form.ranges, np.float32), np.array(places)


_ZERO, _ONE = np.float32(0), np.float32(1)
_SIGN = np.uint32(0x7FFFFFFF)
_TO_WHOLE = np.float32(3 << 22)
"""A number to which this is added and from which it is subtracted is whole, the nearest one, ties to even."""
_LEAST_HALF, _LEAST_NORMAL_HALF = np.float32(2**-24), np.float32(2**-14)
_NOTHING = np.float32(2**-40)
"""Smaller distances within a group are taken for 0."""
_SINGULAR = np.float32(1e-4)
"""Least squares for two numbers are not trusted if their determinant is a smaller part of the squares' product."""
_VALUES = np.array(IQ4_VALUES, np.float32)
_EDGES, _STEPS = (_VALUES[1:] + _VALUES[:-1]) / np.float32(2), _VALUES[1:] - _VALUES[:-1]
_SHARES = np.linspace(1, 0.85, 16).astype(np.float32)
"""Shares of the greatest factor that the largest scale of a block is tried to get."""
_ROUNDS = 2


# Numba makes int64 of operations on smaller integers; loops are only fast if each result is made small again.


@compiled
def _load(words, kind, values, bits):  # type: ignore[no-untyped-def]
    """Load floats as float32, whose bits are `bits`; returns the bits of the largest magnitude."""
    if kind == F16:
        widen(words, kind, 0, len(words), values)
    elif kind == BF16:
        for i in range(len(words)):
            bits[i] = np.uint32(np.uint32(words[i]) << np.uint32(16))
    else:
        for i in range(len(words)):
            bits[i] = np.uint32(words[i])
    largest = np.uint32(0)
    for i in range(len(words)):  # magnitudes have the order of their bits
        largest = np.uint32(max(largest, np.uint32(bits[i] & _SIGN)))
    return largest


@compiled
def _q8_0(words, kind, out, scales):  # type: ignore[no-untyped-def]
    values = np.empty(32, np.float32)
    bits = values.view(np.uint32)
    largest = np.uint32(0)
    for block in range(len(out)):
        top = _load(words[32 * block : 32 * block + 32], kind, values, bits)
        largest = max(largest, top)
        scale = np.uint32(top).view(np.float32) / np.float32(127)
        inverse = _ONE / scale if scale != 0 else _ZERO
        codes = out[block, 2:34]
        for i in range(32):  # halves are rounded away from 0
            multiple = values[i] * inverse
            whole = np.int32(multiple)
            rest = multiple - np.float32(whole)
            codes[i] = np.uint8(whole + np.int32(rest >= np.float32(0.5)) - np.int32(rest <= np.float32(-0.5)))
        scales[block, 0] = scale
    return largest


@compiled
def _q4_0(words, kind, out, scales):  # type: ignore[no-untyped-def]
    """The largest magnitude is tried as code -8 and as 7; least squares in integers, whose sums need no order."""
    values, codes, weights = np.empty(32, np.float32), np.empty(32, np.uint8), np.empty(32, np.int32)
    bits = values.view(np.uint32)
    largest = np.uint32(0)
    for block in range(len(out)):
        top = _load(words[32 * block : 32 * block + 32], kind, values, bits)
        positive = np.uint32(0)
        for i in range(32):
            positive = np.uint32(positive | np.uint32(bits[i] == top))
        largest = max(largest, top)
        extreme = np.uint32(top).view(np.float32)
        best, least = _ZERO, np.float32(np.inf)
        parts = np.float32(256) / extreme if extreme > _NOTHING else _ZERO
        for i in range(32):
            part = np.int32(values[i] * parts)
            weights[i] = np.int32(np.int32(np.int32(part * part) >> np.int32(10)) + np.int32(8))
        for code in (-8, 7):
            steps = np.float32(64 * code if positive else -64 * code) / extreme if extreme > _NOTHING else _ZERO
            products, squares, rest = np.int32(0), np.int32(0), np.int32(0)
            for i in range(32):
                fine = np.int32(values[i] * steps)  # 64ths of a step
                whole = np.int32(
                    min(max(np.int32(np.int32(fine + np.int32(32)) >> np.int32(6)), np.int32(-8)), np.int32(7))
                )
                weighted = np.int32(weights[i] * fine)
                products = np.int32(products + np.int32(weighted * whole))
                rest = np.int32(rest + np.int32(weighted * fine))
                squares = np.int32(squares + np.int32(np.int32(weights[i] * whole) * whole))
            fitted = np.float32(products) / (np.float32(squares) if squares > 0 else _ONE)
            error = (np.float32(rest) - fitted * np.float32(products)) / np.float32(code * code)
            if error < least and steps != 0:
                least, best = error, fitted / steps
        inverse = _ONE / best if best != 0 else _ZERO
        for i in range(32):
            codes[i] = np.uint8(np.int32(min(max(values[i] * inverse + np.float32(8.5), _ZERO), np.float32(15))))
        both = out[block, 2:18]
        for i in range(16):
            both[i] = codes[i] | (codes[i + 16] << np.uint8(4))
        scales[block, 0] = best
    return largest


@compiled
def _nearest(y, least, greatest):  # type: ignore[no-untyped-def]
    """The code nearest to a number; one of IQ4_VALUES if there is no code."""
    if greatest < least:
        value = _VALUES[0]
        for k in range(15):
            value += _STEPS[k] if y > _EDGES[k] else _ZERO
        return value
    return min(max((y + _TO_WHOLE) - _TO_WHOLE, least), greatest)


@compiled
def _half(value):  # type: ignore[no-untyped-def]
    """A float16 nearest to a number, but 0 only for 0."""
    magnitude = abs(value)
    if magnitude < _LEAST_NORMAL_HALF:
        apart = np.float32(0.75)
        rounded = max((magnitude + apart) - apart, _LEAST_HALF if magnitude > 0 else _ZERO)
        return rounded if value > 0 else -rounded
    wide = value * np.float32(8193)  # 2**13 + 1
    return wide - (wide - value)


@compiled
def _inverse(value):  # type: ignore[no-untyped-def]
    return _ONE / value if value != 0 else _ZERO


@compiled
def _load_tile(words, kind, count, groups, values, x, spread, weights, known):  # type: ignore[no-untyped-def]
    """Fill x and weights, both (elements, LANES), with `count` blocks; returns the bits of the largest magnitude.

    Known of each lane: the least, the greatest, sum of weights, weighted sum.
    """
    group = len(x)
    least, greatest, total, first = known[0], known[1], known[2], known[3]
    bits = values.view(np.uint32)
    largest = np.uint32(0)
    x[:], known[:] = _ZERO, _ZERO
    for block in range(count):
        top = _load(words[block * len(values) : (block + 1) * len(values)], kind, values, bits)
        largest = max(largest, top)
        if np.uint32(top).view(np.float32) <= _LEAST_HALF / np.float32(2):
            continue
        for k in range(groups):
            lane = x[:, block * groups + k]
            for i in range(group):
                lane[i] = values[k * group + i]
    squares = weights[0]
    squares[:], least[:], greatest[:] = _ZERO, x[0], x[0]
    for i in range(group):
        row = x[i]
        for g in range(LANES):
            squares[g] += row[g] * row[g]
            least[g] = min(least[g], row[g])
            greatest[g] = max(greatest[g], row[g])
    added = np.empty(LANES, np.float32)
    for begin in range(0, LANES, groups):
        mean = _ZERO
        for k in range(groups):
            mean += squares[begin + k]
        added[begin : begin + groups] = mean * spread / np.float32(len(values))
    for i in range(group):
        row, weight = x[i], weights[i]
        for g in range(LANES):
            weight[g] = row[g] * row[g] + added[g]
            total[g] += weight[g]
            first[g] += weight[g] * row[g]
    return largest


@compiled
def _sum(x, weights, inverses, minima, low, high, sums):  # type: ignore[no-untyped-def]
    """Weighted sums of the nearest codes q for scales and minima: of q, of q * q, of x * q."""
    once, squares, products = sums[0], sums[1], sums[2]
    sums[:] = _ZERO
    for i in range(len(x)):
        row, weight = x[i], weights[i]
        if high < low:  # apart, so that each loop is made of vectors
            for g in range(LANES):
                code = _nearest((row[g] + minima[g]) * inverses[g], _ZERO, -_ONE)
                weighted = weight[g] * code
                once[g] += weighted
                squares[g] += weighted * code
                products[g] += weighted * row[g]
        else:
            for g in range(LANES):
                code = min(max(((row[g] + minima[g]) * inverses[g] + _TO_WHOLE) - _TO_WHOLE, low), high)
                weighted = weight[g] * code
                once[g] += weighted
                squares[g] += weighted * code
                products[g] += weighted * row[g]


@compiled
def _fit_groups(x, weights, known, limits, ranges, sums, scales, minima, kept):  # type: ignore[no-untyped-def]
    """The best scale and minimum of each group by itself, and the sums of its codes in `kept`."""
    least, greatest, total, first = known[0], known[1], known[2], known[3]
    low, high, subtracts = limits[0], limits[1], limits[5] > 0
    lowest = -np.float32(np.inf) if limits[4] > 0 else _ZERO  # of minima
    work = np.empty((3, LANES), np.float32)
    inverses, offsets, most = work[0], work[1], work[2]
    once, squares, products = sums[0], sums[1], sums[2]
    kept_once, kept_squares, kept_products = kept[0], kept[1], kept[2]
    most[:], scales[:], minima[:], kept[:] = -_ONE, _ZERO, _ZERO, _ZERO
    for k in range(ranges.size + 1):
        for g in range(LANES):
            if k == ranges.size:  # the best one, fitted to its own codes
                inverses[g], offsets[g] = _inverse(scales[g]), minima[g]
                continue
            offsets[g] = max(-least[g], lowest) if subtracts else _ZERO
            extreme = greatest[g] if greatest[g] > -least[g] else least[g]
            extreme = greatest[g] + offsets[g] if subtracts else extreme
            inverses[g] = ranges[k] / extreme if abs(extreme) > _NOTHING else _ZERO
        _sum(x, weights, inverses, offsets, low, high, sums)
        for g in range(LANES):  # values are chosen, not branches, so that this is made of vectors too
            determinant = total[g] * squares[g] - once[g] * once[g]
            regular = subtracts and determinant > _SINGULAR * (total[g] * squares[g])
            inverse = _inverse(determinant if regular else _ZERO)
            minimum = (once[g] * products[g] - first[g] * squares[g]) * inverse
            regular = regular and minimum > lowest
            alone = -first[g] * _inverse(total[g]) if subtracts and squares[g] == _ZERO else _ZERO
            minimum = minimum if regular else (alone if alone > lowest else _ZERO)
            scale = products[g] * _inverse(squares[g])
            scale = (total[g] * products[g] - first[g] * once[g]) * inverse if regular else scale
            gain = scale * products[g] - minimum * first[g]
            better = gain > most[g]
            most[g] = gain if better else most[g]
            scales[g] = scale if better else scales[g]
            minima[g] = minimum if better else minima[g]
            kept_once[g] = once[g] if better else kept_once[g]
            kept_squares[g] = squares[g] if better else kept_squares[g]
            kept_products[g] = products[g] if better else kept_products[g]


@compiled
def _factors(targets, weights, low, high, factors):  # type: ignore[no-untyped-def]
    """A float16 and its multiples nearest to the numbers of a block; of some float16, the one with the least error."""
    extreme, best, least = _ZERO, _ZERO, np.float32(np.inf)
    for g in range(len(targets)):
        extreme = targets[g] if abs(targets[g]) > abs(extreme) else extreme
    for k in range(_SHARES.size):
        scale = extreme / (_SHARES[k] * (low if low < 0 else high))
        inverse = _inverse(scale)
        products, squares, rest = _ZERO, _ZERO, _ZERO
        for g in range(len(targets)):
            factor = min(max((targets[g] * inverse + _TO_WHOLE) - _TO_WHOLE, low), high)
            products += weights[g] * factor * targets[g]
            squares += weights[g] * factor * factor
            rest += weights[g] * targets[g] * targets[g]
        fitted = products * _inverse(squares)
        error = rest - fitted * products
        if error < least:
            least, best = error, fitted
    best = _half(best)
    inverse = _inverse(best)
    for g in range(len(targets)):
        factors[g] = min(max((targets[g] * inverse + _TO_WHOLE) - _TO_WHOLE, low), high)
    return best


@compiled
def _move_factors(x, weights, known, limits, sums, units, least_units, factors, multiples, kept):  # type: ignore[no-untyped-def]
    """Replace each factor by the best of it and its neighbours, with the best multiple of the minimum for its codes."""
    total, first = known[2], known[3]
    once, squares, products = sums[0], sums[1], sums[2]
    work = np.empty((4, LANES), np.float32)
    inverses, offsets, most, tried = work[0], work[1], work[2], work[3]
    kept_once, kept_squares, kept_products = kept[0], kept[1], kept[2]
    middle, around, before = factors.copy(), multiples.copy(), kept[0].copy()
    most[:] = -np.float32(np.inf)
    for change in range(-1, 2) if limits[2] < limits[3] else range(1):
        for g in range(LANES):
            tried[g] = min(max(middle[g] + np.float32(change), limits[2]), limits[3])
            inverses[g] = _inverse(units[g] * tried[g])
            offsets[g] = least_units[g] * around[g]
            if limits[5] > 0:  # a larger scale goes with a larger minimum
                moved = offsets[g] + units[g] * np.float32(change) * before[g] * _inverse(total[g])
                offsets[g] = moved if moved > 0 or limits[4] > 0 else _ZERO
        _sum(x, weights, inverses, offsets, limits[0], limits[1], sums)
        for g in range(LANES):
            scale, multiple = units[g] * tried[g], _ZERO
            if limits[5] > 0:
                wanted = (scale * once[g] - first[g]) * _inverse(total[g]) * _inverse(least_units[g])
                multiple = min(max((wanted + _TO_WHOLE) - _TO_WHOLE, limits[4]), limits[5])
            minimum = least_units[g] * multiple
            gain = scale * (np.float32(2) * products[g] - scale * squares[g])
            gain -= minimum * (minimum * total[g] + np.float32(2) * (first[g] - scale * once[g]))
            better = gain > most[g]
            most[g] = gain if better else most[g]
            factors[g] = tried[g] if better else factors[g]
            multiples[g] = multiple if better else multiples[g]
            kept_once[g] = once[g] if better else kept_once[g]
            kept_squares[g] = squares[g] if better else kept_squares[g]
            kept_products[g] = products[g] if better else kept_products[g]


@compiled
def _fit_units(known, kept, factors, multiples, units, least_units):  # type: ignore[no-untyped-def]
    """Least squares for what the factors and multiples of one block are multiplied by."""
    total, first = known
    once, squares, products = kept
    a, b, mixed, right, least_right = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
    for g in range(len(factors)):
        a += factors[g] * factors[g] * squares[g]
        b += multiples[g] * multiples[g] * total[g]
        mixed += factors[g] * multiples[g] * once[g]
        right += factors[g] * products[g]
        least_right -= multiples[g] * first[g]
    determinant = a * b - mixed * mixed
    if b == 0:
        units[:] = _half(right * _inverse(a))
    elif determinant > _SINGULAR * (a * b):
        units[:] = _half((b * right + mixed * least_right) / determinant)
        least_units[:] = _half((a * least_right + mixed * right) / determinant)


@compiled
def _search(words, kind, group, limits, ranges, places, out, all_factors, all_minima, all_scales):  # type: ignore[no-untyped-def]
    """Encode blocks, all but their scales and factors; returns the bits of the largest magnitude."""
    groups = all_factors.shape[1]
    elements, at_once = group * groups, LANES // groups
    x, weights = np.empty((group, LANES), np.float32), np.empty((group, LANES), np.float32)
    known, sums, kept = (
        np.empty((4, LANES), np.float32),
        np.empty((3, LANES), np.float32),
        np.empty((3, LANES), np.float32),
    )
    work = np.empty((7, LANES), np.float32)
    scales, minima, factors, multiples, units, least_units, bend = (
        work[0],
        work[1],
        work[2],
        work[3],
        work[4],
        work[5],
        work[6],
    )
    values, codes = np.empty(elements, np.float32), np.empty((LANES, elements), np.uint8)
    total, first_sum = known[2], known[3]
    largest = np.uint32(0)
    for first in range(0, len(out), at_once):
        count = min(at_once, len(out) - first)
        tile = words[first * elements : (first + count) * elements]
        largest = max(largest, _load_tile(tile, kind, count, groups, values, x, limits[6], weights, known))
        _fit_groups(x, weights, known, limits, ranges, sums, scales, minima, kept)
        least_units[:], multiples[:] = _ZERO, _ZERO
        for g in range(LANES):
            bend[g] = kept[1, g] - (kept[0, g] * kept[0, g] * _inverse(total[g]) if minima[g] > 0 else _ZERO)
        for begin in range(0, LANES, groups):
            end = begin + groups
            if limits[2] < limits[3]:
                units[begin:end] = _factors(
                    scales[begin:end], bend[begin:end], limits[2], limits[3], factors[begin:end]
                )
            else:
                units[begin], factors[begin] = _half(scales[begin]), _ONE
        if limits[4] > 0:
            for g in range(LANES):
                least_units[g], multiples[g] = _half(minima[g]), _ONE
        elif limits[5] > 0:
            for g in range(LANES):
                minima[g] = (units[g] * factors[g] * kept[0, g] - first_sum[g]) * _inverse(total[g])
                minima[g] = minima[g] if minima[g] > 0 else _ZERO
            for begin in range(0, LANES, groups):
                end = begin + groups
                least_units[begin:end] = _factors(
                    minima[begin:end], total[begin:end], _ZERO, limits[5], multiples[begin:end]
                )
        for _ in range(_ROUNDS):
            _move_factors(x, weights, known, limits, sums, units, least_units, factors, multiples, kept)
            for begin in range(0, LANES, groups):
                end = begin + groups
                _fit_units(
                    known[2:, begin:end],
                    kept[:, begin:end],
                    factors[begin:end],
                    multiples[begin:end],
                    units[begin:end],
                    least_units[begin:end],
                )
        for g in range(LANES):
            scales[g], minima[g] = _inverse(units[g] * factors[g]), least_units[g] * multiples[g]
        for i in range(group):
            for g in range(count * groups):
                y = (x[i, g] + minima[g]) * scales[g]
                code = np.uint8(0)
                if limits[1] < limits[0]:
                    for k in range(15):
                        code += np.uint8(y > _EDGES[k])
                else:
                    code = np.uint8(_nearest(y, limits[0], limits[1]) - limits[0])
                codes[g // groups, g % groups * group + i] = code
        for block in range(count):
            all_scales[first + block, 0] = units[block * groups]
            all_scales[first + block, 1] = least_units[block * groups]
            for k in range(groups):
                all_factors[first + block, k] = np.int16(factors[block * groups + k])
                all_minima[first + block, k] = np.int16(multiples[block * groups + k])
            for p in range(len(places)):
                begin, width, right, mask, offset, left = places[p]
                source, target = codes[block, begin : begin + width], out[first + block, offset : offset + width]
                for i in range(width):
                    target[i] |= np.uint8(((source[i] >> np.uint8(right)) & np.uint8(mask)) << np.uint8(left))
    return largest
