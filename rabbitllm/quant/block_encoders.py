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

Groups are the lanes of all loops, so each sum has one order, and nothing is contracted to a fused product and sum: the
bytes are the same on every processor and for any number of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rabbitllm.base.compiling import compiled, inner
from rabbitllm.errors import UnreadableFormatError
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant._block_formats import FORMATS, IQ4_VALUES, Fields
from rabbitllm.quant._vectors import inlined
from rabbitllm.quant.dequantize_kernels import share
from rabbitllm.quant.quantize_kernels import BF16, F16, F32, load, pair

LARGEST = 65504.0
"""The largest float16, which scales are stored in; larger values are refused."""
LANES = 32
"""Groups that are computed together."""
AT_ONCE = 1 << 16
"""Elements that a kernel encodes in one call; a whole number of tiles."""
_KINDS = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}
_LARGEST_BITS = int(np.float32(LARGEST).view(np.uint32))


_SEARCHES: dict[str, tuple[Any, ...]] = {
    "IQ4_NL": (4, (-135, -95, 6), (95, 135, 6)),
    "IQ4_XS": (4, (-135, -95, 6), (95, 135, 6)),
    "Q5_0": (4, (-17, -13.5, 6), (13.5, 17, 6)),
    "Q5_1": (4, (26, 32, 12)),
    "Q6_K": (4, (-33, -26, 18)),
    "Q5_K": (4, (26, 32, 18)),
    "Q4_K": (4, (11.5, 16.5, 14)),
    "Q3_K": (2, (-5, -2.6, 6), (2.6, 5, 6)),
    "Q2_K": (1, (1.6, 3.8, 8)),
}
"""Type -> `spread`, and first, last and number of the codes that a group's largest magnitude, or the distance of its
extremes, is tried to be."""
ENCODED = ("Q8_0", "Q4_0", *_SEARCHES)
"""The types that `encode` makes."""


def encode(name: str, values: torch.Tensor | npt.NDArray[Any], threads: int | None = None) -> torch.Tensor:
    """Quantize a matrix to blocks: uint8 (rows, bytes of a row).

    Args:
        name: one of `ENCODED`.
        values: (rows, columns) bfloat16, float16 or float32, on the CPU; rows are whole blocks.
        threads: how many compute; by default as many as torch has.

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
    kernel, *tables = _kernel_of(name)
    step = AT_ONCE // block.elements
    refused: list[np.uint32] = []

    def work(begin: int, end: int) -> None:
        for first in range(begin * step, min(end * step, len(out)), step):
            some = out[first : first + step]
            these = words[first * block.elements :][: len(some) * block.elements]
            largest = kernel(pair(these, kind), kind, *tables, some)
            if largest > _LARGEST_BITS:
                refused.append(np.uint32(largest))

    share(work, -(-len(out) // step), words.size, threads)
    if refused:
        raise UnreadableFormatError(
            f"A magnitude is {max(refused).view(np.float32)}, and scales of {name} blocks, which are float16, hold at "
            f"most {LARGEST:,.0f}.",
            "Store this tensor as BF16 or F32; if it is not a number, download the file again.",
        )
    return torch.from_numpy(out).view(len(matrix), block.row_bytes(matrix.shape[1]))


@cache
def _kernel_of(name: str) -> tuple[Any, ...]:
    """The kernel that encodes whole blocks, into zeros, and what `_search` needs of a type.

    Returns:
        The kernel.
        Elements of a group, and groups.
        Limits: least and greatest code, factor and minimum, spread. Codes of `IQ4_VALUES` are 0 to -1, factors of one
        group 1 to 1; so are minima that are added, and 0 to 0 if there are none.
        The ranges.
        Where the bits of 16 or 32 codes go, by fours: index of the first, number, shift to the right, mask, offset,
        shift to the left; those of 32 are single bits of consecutive ones.
        Where factors and minima go: row of the tile, group, number stored as 0, then the same from the shift on.
        The first offset of all codes, and the end; and the offsets of scale and minimum.
    """
    if name not in _SEARCHES:
        return (_q8_0 if name == "Q8_0" else _q4_0,)
    form, elements, (spread, *ranges) = FORMATS[name], BLOCK_TYPES[name].elements, _SEARCHES[name]
    code_bits = sum(plane.bits for plane in form.planes)
    codes = (0, -1) if form.values else (form.least, form.least + (1 << code_bits) - 1)
    added = (1, 1) if len(form.halves) > 1 else (0, 0)
    factors, minima = _bounds(form.factors, form.least_factor, (1, 1)), _bounds(form.minima, 0, added)
    limits = tuple(map(np.float32, (*codes, *factors, *minima, spread)))
    places, payload = [], min(form.planes).offset
    for plane in form.planes:
        width = 16 if plane.run else 32
        for begin in range(0, elements, width):
            offset, shift = plane.at(begin)
            mask = ((1 << plane.bits) - 1) * 0x01010101
            places.append((begin // 4, width // 4, plane.first, mask, (offset - payload) // 4, shift))
    fields = np.array(
        [
            (row, group, least, field.first, (1 << field.bits) - 1, field.offset, field.shift)
            for row, numbers, least in ((_FACTORS, form.factors, form.least_factor), (_MULTIPLES, form.minima, 0))
            for group, some in enumerate(numbers)
            for field in some
        ],
        np.int64,
    ).reshape(-1, 7)
    end = payload + code_bits * elements // 8
    sizes, halves = (form.group, elements // form.group), np.array(form.halves)
    tried = np.concatenate([np.linspace(*some) for some in ranges]).astype(np.float32)
    return _search, *sizes, limits, tried, np.array(places), fields, (payload, end), halves


def _bounds(fields: Fields, least: int, otherwise: tuple[int, int]) -> tuple[int, int]:
    """The least and greatest number that fields have."""
    if not fields:
        return otherwise
    bits = sum(field.bits for field in fields[-1])
    least = -128 if bits == 8 else least
    return least, least + (1 << bits) - 1


_ZERO, _ONE = np.float32(0), np.float32(1)
_SIGN, _MINUS = np.uint32(0x7FFFFFFF), np.uint32(0x80000000)
_TO_WHOLE = np.float32(3 << 22)
"""A number to which this is added and from which it is subtracted is whole, the nearest one, ties to even."""
_LEAST_HALF, _LEAST_NORMAL_HALF, _LARGEST_HALF = np.float32(2**-24), np.float32(2**-14), np.float32(LARGEST)
_NOTHING = np.float32(2**-40)
"""Smaller distances within a group are taken for 0."""
_SINGULAR = np.float32(1e-4)
"""Least squares for two numbers are not trusted if their determinant is a smaller part of the squares' product."""
_VALUES = np.array(IQ4_VALUES, np.float32)
_BELOW = np.searchsorted((_VALUES[1:] + _VALUES[:-1]).astype(np.int32), np.arange(-256, 256), "left").astype(np.float32)
"""The index in `IQ4_VALUES` of the value nearest to y, by 256 + twice y, rounded up: a number is above an edge between
two values, a multiple of a half, if and only if twice the number, rounded up, is above twice the edge."""
_NEAREST = _VALUES[_BELOW.astype(np.int32)]
_SHARES = np.linspace(1, 0.85, 16).astype(np.float32)
"""Shares of the greatest factor that the largest scale of a block is tried to get."""
_ROUNDS = 2

# A tile is one array, float32, since loops are only made of vectors if it is known that no arrays overlap. A row of it
# has a number for each of LANES groups; here are the offsets of the rows, and of those of elements and their weights.
_LEAST, _GREATEST, _TOTAL, _PER_TOTAL, _FIRST = range(0, 5 * LANES, LANES)  # sum of weights; 1 / it; weighted sum
# weighted sums of codes q, of q * q, of x * q; then those of the best codes
_ONCE, _SQUARES, _PRODUCTS, _KEPT_ONCE, _KEPT_SQUARES, _KEPT_PRODUCTS = range(5 * LANES, 11 * LANES, LANES)
_SCALES, _MINIMA, _INVERSES, _OFFSETS, _EXTREMES, _MOST = range(11 * LANES, 17 * LANES, LANES)
_FACTORS, _MULTIPLES, _UNITS, _LEAST_UNITS = range(17 * LANES, 21 * LANES, LANES)
_MIDDLE, _AROUND, _BEFORE, _TRIED, _X = range(21 * LANES, 26 * LANES, LANES)
_WEIGHTS = _X + 32 * LANES
_TILE = _WEIGHTS + 32 * LANES
_UNROLLED = 8


# Numba makes int64 of operations on smaller integers; loops are only fast if each result is made small again.


@inner
def _store_half(value, target):  # type: ignore[no-untyped-def]
    """A float32 that is below the limit, as float16: to the nearest, ties to even."""
    word = np.float32(value).view(np.uint32)
    bits = np.uint32(word & _SIGN)
    small = np.float32(np.float32(abs(value)) + np.float32(0.5)).view(np.uint32)
    even = np.uint32((bits >> np.uint32(13)) & np.uint32(1))
    half = np.uint32(np.uint32(np.uint32(bits + np.uint32(0xFFF)) + even) >> np.uint32(13))
    half = np.uint32(half - np.uint32(112 << 10))
    if abs(value) < _LEAST_NORMAL_HALF:
        half = np.uint32(small - np.uint32(0x3F000000))
    half = np.uint32(half | np.uint32(np.uint32(word & _MINUS) >> np.uint32(16)))
    target[0], target[1] = np.uint8(half), np.uint8(half >> np.uint32(8))


@compiled
def _q8_0(both, kind, out):  # type: ignore[no-untyped-def]
    tile = np.empty(32 * LANES, np.float32)
    tile_bits = tile.view(np.uint32)
    largest = np.uint32(0)
    for first in range(0, len(out), LANES):
        count = min(LANES, len(out) - first)
        largest = max(largest, load(both, kind, 32 * first, 32 * count, tile, tile_bits))
        for block in range(count):
            values, bits = tile[32 * block : 32 * block + 32], tile_bits[32 * block : 32 * block + 32]
            top = np.uint32(0)
            for i in range(len(values)):
                top = np.uint32(max(top, np.uint32(bits[i] & _SIGN)))
            scale = np.uint32(top).view(np.float32) / np.float32(127)
            inverse = _inverse(scale)
            codes = out[first + block, 2:34]
            for i in range(len(values)):  # halves are rounded away from 0
                below_half = np.uint32(np.uint32(bits[i] & _MINUS) | np.uint32(0x3EFFFFFF)).view(np.float32)
                codes[i] = np.uint8(np.int32(values[i] * inverse + below_half))
            _store_half(scale, out[first + block])
    return largest


@compiled
def _q4_0(both, kind, out):  # type: ignore[no-untyped-def]
    """The largest magnitude is tried as code -8 and as 7; least squares in whole numbers, whose sums are exact."""
    t, values = np.empty(_TILE, np.float32), np.empty(32 * LANES, np.float32)
    rests, row = np.empty(LANES, np.int32), np.empty(LANES, np.uint8)
    largest = np.uint32(0)
    for first in range(0, len(out), LANES):
        count = min(LANES, len(out) - first)
        largest = max(largest, _load_tile(both, kind, 32 * first, 32 * count, 32, t, values))
        for g in range(LANES):
            extreme = t[_GREATEST + g] if t[_GREATEST + g] >= -t[_LEAST + g] else t[_LEAST + g]
            t[_EXTREMES + g] = extreme if abs(extreme) > _NOTHING else np.float32(np.inf)
            t[_INVERSES + g] = np.float32(256) / abs(t[_EXTREMES + g])
            t[_MOST + g], t[_SCALES + g] = np.float32(np.inf), _ZERO
        for begin in range(_X, _X + 32 * LANES, LANES):
            xs, weights = t[begin : begin + LANES], t[begin + _WEIGHTS - _X : begin + _WEIGHTS - _X + LANES]
            for g in range(LANES):
                part = np.int32(xs[g] * t[_INVERSES + g])
                weights[g] = np.float32(np.int32(np.int32(np.int32(part * part) >> np.int32(10)) + np.int32(8)))
        for code in (-8, 7):
            for g in range(LANES):
                t[_UNITS + g] = np.float32(64 * code) / t[_EXTREMES + g]
                t[_PRODUCTS + g] = t[_SQUARES + g] = _ZERO
                rests[g] = 0
            for begin in range(_X, _X + 32 * LANES, _UNROLLED * LANES):
                xs, weights = _rows(t, begin), _rows(t, begin + _WEIGHTS - _X)
                for g in range(LANES):
                    products, squares, rest, steps = t[_PRODUCTS + g], t[_SQUARES + g], rests[g], t[_UNITS + g]
                    for j in range(_UNROLLED):
                        fine = np.int32(xs[j * LANES + g] * steps)  # 64ths of a step
                        whole = np.float32(
                            min(max(np.int32(np.int32(fine + np.int32(32)) >> np.int32(6)), np.int32(-8)), np.int32(7))
                        )
                        weighted = weights[j * LANES + g] * np.float32(fine)
                        products += weighted * whole
                        squares += weights[j * LANES + g] * whole * whole
                        rest = np.int32(rest + np.int32(np.int32(weighted) * fine))
                    t[_PRODUCTS + g], t[_SQUARES + g], rests[g] = products, squares, rest
            for g in range(LANES):
                products, squares, steps, most = t[_PRODUCTS + g], t[_SQUARES + g], t[_UNITS + g], t[_MOST + g]
                fitted = products / (squares if squares > 0 else _ONE)
                error = (np.float32(rests[g]) - fitted * products) / np.float32(code * code)
                scale = fitted / (steps if steps != 0 else _ONE)
                better = (error < most) & (steps != 0)
                t[_MOST + g] = error if better else most
                t[_SCALES + g] = scale if better else t[_SCALES + g]
        for g in range(LANES):
            t[_INVERSES + g] = _inverse(t[_SCALES + g])
        for i in range(16):
            low, high = t[_X + i * LANES : _X + (i + 1) * LANES], t[_X + (i + 16) * LANES : _X + (i + 17) * LANES]
            for g in range(LANES):
                inverse = t[_INVERSES + g]
                lower = np.int32(min(max(low[g] * inverse + np.float32(8.5), _ZERO), np.float32(15)))
                upper = np.int32(min(max(high[g] * inverse + np.float32(8.5), _ZERO), np.float32(15)))
                row[g] = np.uint8(np.int32(lower | np.int32(upper << np.int32(4))))
            column = out[first : first + count, 2 + i]
            for g in range(count):
                column[g] = row[g]
        for g in range(count):
            _store_half(t[_SCALES + g], out[first + g])
    return largest


@inner
def _place(y):  # type: ignore[no-untyped-def]
    """The place of a number in `_BELOW` and `_NEAREST`."""
    twice = min(max(y + y, np.float32(-256)), np.float32(255))
    whole = (twice + _TO_WHOLE) - _TO_WHOLE
    return np.int32(np.int32(np.int32(whole) + np.int32(twice > whole) + np.int32(256)) & np.int32(511))


@inner
def _half(value):  # type: ignore[no-untyped-def]
    """A float16 nearest to a number, but 0 only for 0, and finite: a fitted minimum may be below all values."""
    magnitude = abs(value)
    if magnitude < _LEAST_NORMAL_HALF:
        apart = np.float32(0.75)
        rounded = max((magnitude + apart) - apart, _LEAST_HALF if magnitude > 0 else _ZERO)
        return rounded if value > 0 else -rounded
    held = min(max(value, -_LARGEST_HALF), _LARGEST_HALF)
    wide = held * np.float32(8193)  # 2**13 + 1
    return wide - (wide - held)


@inner
def _inverse(value):  # type: ignore[no-untyped-def]
    return _ONE / (value if value != 0 else np.float32(np.inf))


@inner
def _rows(t, begin):  # type: ignore[no-untyped-def]
    """Rows whose loop is unrolled: a slice, since an offset that may be negative would be checked for each number."""
    return t[begin : begin + _UNROLLED * LANES]


@inner
def _load_tile(both, kind, begin, count, group, t, values):  # type: ignore[no-untyped-def]
    """Begin a tile with whole blocks, of which there may be fewer; returns the bits of the largest magnitude."""
    values[count:] = _ZERO
    largest = load(both, kind, begin, count, values, values.view(np.uint32))
    for i in range(group):
        for g in range(LANES):
            t[_X + i * LANES + g] = values[g * group + i]
    for g in range(LANES):
        t[_LEAST + g] = t[_GREATEST + g] = t[_X + g]
        t[_SQUARES + g] = _ZERO
    for begin in range(_X, _X + group * LANES, _UNROLLED * LANES):
        xs = _rows(t, begin)
        for g in range(LANES):
            least, greatest, squares = t[_LEAST + g], t[_GREATEST + g], t[_SQUARES + g]
            for j in range(_UNROLLED):
                x = xs[j * LANES + g]
                squares += x * x
                least, greatest = min(least, x), max(greatest, x)
            t[_LEAST + g], t[_GREATEST + g], t[_SQUARES + g] = least, greatest, squares
    return largest


@inner
def _weigh(group, groups, spread, t):  # type: ignore[no-untyped-def]
    """Weights of a tile, and their sums; what is too small for any scale becomes 0."""
    for begin in range(0, LANES, groups):
        mean, most = _ZERO, _ZERO
        for g in range(begin, begin + groups):
            mean += t[_SQUARES + g]
            most = max(most, max(t[_GREATEST + g], -t[_LEAST + g]))
        for g in range(begin, begin + groups):
            t[_OFFSETS + g] = mean * spread / np.float32(group * groups)
            if most <= _LEAST_HALF / np.float32(2):
                t[_LEAST + g] = t[_GREATEST + g] = t[_OFFSETS + g] = _ZERO
                for i in range(group):
                    t[_X + i * LANES + g] = _ZERO
    for g in range(LANES):
        t[_TOTAL + g] = t[_FIRST + g] = _ZERO
    for begin in range(_X, _X + group * LANES, _UNROLLED * LANES):
        xs, weights = _rows(t, begin), _rows(t, begin + _WEIGHTS - _X)
        for g in range(LANES):
            total, first, added = t[_TOTAL + g], t[_FIRST + g], t[_OFFSETS + g]
            for j in range(_UNROLLED):
                x = xs[j * LANES + g]
                weight = x * x + added
                weights[j * LANES + g] = weight
                total += weight
                first += weight * x
            t[_TOTAL + g], t[_FIRST + g] = total, first
    for g in range(LANES):
        t[_PER_TOTAL + g] = _inverse(t[_TOTAL + g])


@inlined
def _rounded(y, low, high):  # type: ignore[no-untyped-def]
    return min(max((y + _TO_WHOLE) - _TO_WHOLE, low), high)


@inlined
def _looked_up(y, low, high):  # type: ignore[no-untyped-def]
    return _NEAREST[_place(y)]


@inlined
def _add_rows(code_of, subtracts, t, begin, low, high):  # type: ignore[no-untyped-def]
    """Add some rows to the weighted sums of their nearest codes; both arguments in front are constants."""
    xs, weights = _rows(t, begin), _rows(t, begin + _WEIGHTS - _X)
    for g in range(LANES):
        once, squares, products = t[_ONCE + g], t[_SQUARES + g], t[_PRODUCTS + g]
        inverse, offset = t[_INVERSES + g], t[_OFFSETS + g]
        for j in range(_UNROLLED):
            x = xs[j * LANES + g]
            code = code_of((x + offset if subtracts else x) * inverse, low, high)
            weighted = weights[j * LANES + g] * code
            if subtracts:
                once += weighted
            squares += weighted * code
            products += weighted * x
        t[_ONCE + g], t[_SQUARES + g], t[_PRODUCTS + g] = once, squares, products


@inner
def _sum(t, group, low, high, subtracts):  # type: ignore[no-untyped-def]
    """The weighted sums of the nearest codes, for inverses of scales and for offsets; `once` only if it is used."""
    for g in range(LANES):
        t[_ONCE + g] = t[_SQUARES + g] = t[_PRODUCTS + g] = _ZERO
    for begin in range(_X, _X + group * LANES, _UNROLLED * LANES):
        if high < low:
            _add_rows(_looked_up, False, t, begin, low, high)
        elif subtracts:
            _add_rows(_rounded, True, t, begin, low, high)
        else:
            _add_rows(_rounded, False, t, begin, low, high)


@inner
def _keep(t, g, gain, new, old):  # type: ignore[no-untyped-def]
    """Keep the numbers and sums of better codes. Values are chosen, not branches, so that loops are made of vectors."""
    most, once, squares, products = t[_MOST + g], t[_ONCE + g], t[_SQUARES + g], t[_PRODUCTS + g]
    kept_once, kept_squares, kept_products = t[_KEPT_ONCE + g], t[_KEPT_SQUARES + g], t[_KEPT_PRODUCTS + g]
    better = gain > most
    t[_MOST + g] = gain if better else most
    t[_KEPT_ONCE + g] = once if better else kept_once
    t[_KEPT_SQUARES + g] = squares if better else kept_squares
    t[_KEPT_PRODUCTS + g] = products if better else kept_products
    return (new[0] if better else old[0], new[1] if better else old[1])


@inner
def _fit_groups(t, group, limits, ranges):  # type: ignore[no-untyped-def]
    """The best scale and minimum of each group by itself, and the sums of its codes."""
    low, high, subtracts = limits[0], limits[1], limits[5] > 0
    lowest = -np.float32(np.inf) if limits[4] > 0 else _ZERO  # of minima
    for g in range(LANES):
        least, greatest = t[_LEAST + g], t[_GREATEST + g]
        offset = max(-least, lowest) if subtracts else _ZERO
        extreme = greatest if greatest > -least else least
        t[_OFFSETS + g], t[_MOST + g] = offset, -_ONE
        t[_EXTREMES + g] = greatest + offset if subtracts else extreme
    for k in range(ranges.size + 1):
        if k < ranges.size:
            for g in range(LANES):
                extreme = t[_EXTREMES + g]
                t[_INVERSES + g] = ranges[k] / extreme if abs(extreme) > _NOTHING else _ZERO
        else:  # the best one, fitted to its own codes
            for g in range(LANES):
                t[_INVERSES + g], t[_OFFSETS + g] = _inverse(t[_SCALES + g]), t[_MINIMA + g]
        _sum(t, group, low, high, subtracts)
        if subtracts:
            for g in range(LANES):
                total, first, once = t[_TOTAL + g], t[_FIRST + g], t[_ONCE + g]
                squares, products, per_total = t[_SQUARES + g], t[_PRODUCTS + g], t[_PER_TOTAL + g]
                determinant = total * squares - once * once
                rest = once * products - first * squares
                regular = (determinant > _SINGULAR * (total * squares)) & (rest > lowest)
                inverse = _inverse(determinant if regular else squares)
                alone = max(-first * per_total, lowest) if squares == _ZERO else _ZERO
                minimum = rest * inverse if regular else alone
                scale = (total * products - first * once if regular else products) * inverse
                kept = _keep(
                    t, g, scale * products - minimum * first, (scale, minimum), (t[_SCALES + g], t[_MINIMA + g])
                )
                t[_SCALES + g], t[_MINIMA + g] = kept
        else:
            for g in range(LANES):
                products = t[_PRODUCTS + g]
                scale = products * _inverse(t[_SQUARES + g])
                kept = _keep(t, g, scale * products, (scale, _ZERO), (t[_SCALES + g], _ZERO))
                t[_SCALES + g] = kept[0]


@inner
def _factors(t, shares, targets, weights, begin, end, low, high, factors):  # type: ignore[no-untyped-def]
    """A float16 and its multiples nearest to the numbers of a block; of some float16, the one with the least error."""
    extreme, rest = _ZERO, _ZERO
    for g in range(begin, end):
        extreme = t[targets + g] if abs(t[targets + g]) > abs(extreme) else extreme
        rest += t[weights + g] * t[targets + g] * t[targets + g]
    most = low if low < 0 else high
    for k in range(len(shares)):  # lanes are shares here
        t[_INVERSES + k] = _inverse(extreme / (shares[k] * most))
        t[_PRODUCTS + k] = t[_SQUARES + k] = _ZERO
    for g in range(begin, end):
        target, weight = t[targets + g], t[weights + g]
        for k in range(len(shares)):
            factor = _rounded(target * t[_INVERSES + k], low, high)
            weighted = weight * factor
            t[_PRODUCTS + k] += weighted * target
            t[_SQUARES + k] += weighted * factor
    best, least = _ZERO, np.float32(np.inf)
    for k in range(len(shares)):
        fitted = t[_PRODUCTS + k] * _inverse(t[_SQUARES + k])
        error = rest - fitted * t[_PRODUCTS + k]
        if error < least:
            least, best = error, fitted
    best = _half(best)
    inverse = _inverse(best)
    for g in range(begin, end):
        t[factors + g] = _rounded(t[targets + g] * inverse, low, high)
    return best


@inner
def _move_factors(t, group, limits):  # type: ignore[no-untyped-def]
    """Replace each factor by the best of it and its neighbours, with the best multiple of the minimum for its codes."""
    low, high, least_factor, most_factor, least_multiple, most_multiple, _ = limits
    subtracts, lowest = most_multiple > 0, -np.float32(np.inf) if least_multiple > 0 else _ZERO
    for g in range(LANES):
        t[_MIDDLE + g], t[_AROUND + g], t[_BEFORE + g] = t[_FACTORS + g], t[_MULTIPLES + g], t[_KEPT_ONCE + g]
        t[_MOST + g] = -np.float32(np.inf)
    for change in range(-1, 2) if least_factor < most_factor else range(1):
        step = np.float32(change)
        for g in range(LANES):
            t[_TRIED + g] = min(max(t[_MIDDLE + g] + step, least_factor), most_factor)
            t[_INVERSES + g] = _inverse(t[_UNITS + g] * t[_TRIED + g])
            # a larger scale goes with a larger minimum
            moved = t[_LEAST_UNITS + g] * t[_AROUND + g]
            moved = moved + t[_UNITS + g] * step * t[_BEFORE + g] * t[_PER_TOTAL + g]
            t[_OFFSETS + g] = max(moved, lowest)
        _sum(t, group, low, high, subtracts)
        for g in range(LANES):
            scale, least_unit, tried = t[_UNITS + g] * t[_TRIED + g], t[_LEAST_UNITS + g], t[_TRIED + g]
            total, first, once, per_total = t[_TOTAL + g], t[_FIRST + g], t[_ONCE + g], t[_PER_TOTAL + g]
            wanted = (scale * once - first) * per_total * _inverse(least_unit)
            multiple = _rounded(wanted, least_multiple, most_multiple)
            minimum = least_unit * multiple
            gain = scale * (np.float32(2) * t[_PRODUCTS + g] - scale * t[_SQUARES + g])
            gain -= minimum * (minimum * total + np.float32(2) * (first - scale * once))
            kept = _keep(t, g, gain, (tried, multiple), (t[_FACTORS + g], t[_MULTIPLES + g]))
            t[_FACTORS + g], t[_MULTIPLES + g] = kept


@inner
def _fit_units(t, begin, end):  # type: ignore[no-untyped-def]
    """Least squares for what the factors and multiples of one block are multiplied by."""
    a, b, mixed, right, least_right = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
    for g in range(begin, end):
        factor, multiple = t[_FACTORS + g], t[_MULTIPLES + g]
        a += factor * factor * t[_KEPT_SQUARES + g]
        b += multiple * multiple * t[_TOTAL + g]
        mixed += factor * multiple * t[_KEPT_ONCE + g]
        right += factor * t[_KEPT_PRODUCTS + g]
        least_right -= multiple * t[_FIRST + g]
    determinant = a * b - mixed * mixed
    unit, least_unit = t[_UNITS + begin], t[_LEAST_UNITS + begin]
    if b == 0:
        unit = _half(right * _inverse(a))
    elif determinant > _SINGULAR * (a * b):
        unit = _half((b * right + mixed * least_right) / determinant)
        least_unit = _half((a * least_right + mixed * right) / determinant)
    for g in range(begin, end):
        t[_UNITS + g], t[_LEAST_UNITS + g] = unit, least_unit


@compiled
def _search(both, kind, group, groups, limits, ranges, places, fields, payload, halves, out):  # type: ignore[no-untyped-def]
    """Encode blocks, into zeros; returns the bits of the largest magnitude."""
    elements, at_once = group * groups, LANES // groups
    low, high, least_factor, most_factor, least_multiple, most_multiple, spread = limits
    shares = _SHARES.copy()  # loops over a constant are not made of vectors, but written out
    t, values = np.empty(_TILE, np.float32), np.empty(group * LANES, np.float32)
    row, codes = np.empty(LANES, np.uint8), np.empty(group * LANES, np.uint8)
    packed = np.empty((payload[1] - payload[0]) // 4, np.uint32)
    fours, packed_bytes = codes.view(np.uint32), packed.view(np.uint8)
    largest = np.uint32(0)
    for first in range(0, len(out), at_once):
        count = min(at_once, len(out) - first)
        t[:_X] = _ZERO
        largest = max(largest, _load_tile(both, kind, first * elements, count * elements, group, t, values))
        _weigh(group, groups, spread, t)
        _fit_groups(t, group, limits, ranges)
        for g in range(LANES):  # what a scale's error counts, if the minimum follows
            bend = t[_KEPT_ONCE + g] * t[_KEPT_ONCE + g] * t[_PER_TOTAL + g]
            t[_OFFSETS + g] = t[_KEPT_SQUARES + g] - (bend if t[_MINIMA + g] > 0 else _ZERO)
        for begin in range(0, LANES, groups):
            end = begin + groups
            if least_factor < most_factor:
                unit = _factors(t, shares, _SCALES, _OFFSETS, begin, end, least_factor, most_factor, _FACTORS)
            else:
                unit, t[_FACTORS + begin] = _half(t[_SCALES + begin]), _ONE
            t[_UNITS + begin : _UNITS + end] = unit
        if least_multiple > 0:
            for g in range(LANES):
                t[_LEAST_UNITS + g], t[_MULTIPLES + g] = _half(t[_MINIMA + g]), _ONE
        elif most_multiple > 0:
            for g in range(LANES):
                wanted = t[_UNITS + g] * t[_FACTORS + g] * t[_KEPT_ONCE + g] - t[_FIRST + g]
                t[_MINIMA + g] = max(wanted * t[_PER_TOTAL + g], _ZERO)
            for begin in range(0, LANES, groups):
                end = begin + groups
                unit = _factors(t, shares, _MINIMA, _TOTAL, begin, end, _ZERO, most_multiple, _MULTIPLES)
                t[_LEAST_UNITS + begin : _LEAST_UNITS + end] = unit
        for _ in range(_ROUNDS):
            _move_factors(t, group, limits)
            for begin in range(0, LANES, groups):
                _fit_units(t, begin, begin + groups)
        for g in range(LANES):
            t[_INVERSES + g] = _inverse(t[_UNITS + g] * t[_FACTORS + g])
            t[_OFFSETS + g] = t[_LEAST_UNITS + g] * t[_MULTIPLES + g]
        for i in range(group):
            xs = t[_X + i * LANES : _X + (i + 1) * LANES]
            if high < low:
                for g in range(LANES):
                    row[g] = np.uint8(np.int32(_BELOW[_place(xs[g] * t[_INVERSES + g])]))
            else:
                for g in range(LANES):
                    y = (xs[g] + t[_OFFSETS + g]) * t[_INVERSES + g]
                    row[g] = np.uint8(np.int32(_rounded(y, low, high) - low))
            for g in range(LANES):
                codes[g * group + i] = row[g]
        for block in range(count):
            begin = block * groups
            _store_half(t[_UNITS + begin], out[first + block, halves[0] :])
            if len(halves) > 1:  # a minimum without factors is added, and not subtracted
                least = t[_LEAST_UNITS + begin]
                _store_half(-least if least_multiple > 0 else least, out[first + block, halves[1] :])
            _pack_fields(t, begin, fields, out[first + block])
            _pack(fours[block * elements // 4 : (block + 1) * elements // 4], places, packed)
            target = out[first + block, payload[0] : payload[1]]
            for i in range(len(target)):
                target[i] = packed_bytes[i]
    return largest


@inner
def _pack_fields(t, begin, fields, out):  # type: ignore[no-untyped-def]
    """Pack the factors and minima of the groups from `begin` on into a block."""
    for f in range(len(fields)):
        value = np.int64(t[fields[f, 0] + begin + fields[f, 1]]) - fields[f, 2]
        out[fields[f, 5]] |= np.uint8((value >> fields[f, 3] & fields[f, 4]) << fields[f, 6])


@inner
def _pack(codes, places, packed):  # type: ignore[no-untyped-def]
    """Pack the codes of a block, four in a uint32."""
    packed[:] = np.uint32(0)
    for p in range(len(places)):
        begin, count, right, mask, target, left = places[p]
        bits, shift, up = np.uint32(mask), np.uint32(right), np.uint32(left)
        if count == 4:
            for i in range(count):
                packed[target + i] |= np.uint32(np.uint32(np.uint32(codes[begin + i] >> shift) & bits) << up)
        else:  # four bits of a uint32 become the highest ones
            for i in range(count):
                four = np.uint32(np.uint32(np.uint32(codes[begin + i] >> shift) & bits) * np.uint32(0x01020408))
                packed[target] |= np.uint32(np.uint32(four >> np.uint32(24)) << np.uint32(4 * i))
