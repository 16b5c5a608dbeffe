"""Small operations of a layer in bfloat16 as compiled functions of a `Program`, with torch's bits, and attention.

torch rounds the result of each operation, and so do these. Attention of one row rounds its result alone: its scores,
their exponentials and its sums are float32. Their order depends on the processor's vectors, as torch's does, but on
nothing else.
"""

from __future__ import annotations

import numpy as np

from rabbitllm.base.compiling import (
    POWERS_OF_2,
    bits_of,
    float_of,
    floats_at,
    helper,
    integers_at,
    shortened,
    to_array,
    wide,
    words_at,
)
from rabbitllm.engine.kv_room import CACHED

_NEAR = 1 << 12
"""Values that are computed while they are in the processor's smallest cache."""
_LOG2_E = np.float32(1.4426950408889634)
_C6, _C5, _C4, _C3, _C2, _C1, _ = map(np.float32, POWERS_OF_2)

_SMALL, _LEAST, _UNSURE = np.float32(2.0**-11), np.float32(-64), 32
"""Logits of which two may have one probability; the least logit, from the largest, whose exponential is no subnormal
number; and units in the last place of a float32 that an exponential and two quotients may be off by."""
_APART, _LEAST_HALF = np.float32(2.0**-19), np.float32(2.0**-14)
"""How far logits of float16 are apart that surely have two probabilities, as those of bfloat16 are that are not small;
and the least number that has all bits of a float16."""


@helper(forceinline=True)
def bfloats(address, count):  # type: ignore[no-untyped-def]
    """The bits of bfloat16 values at an address."""
    return to_array(words_at(address), count)


@helper(forceinline=True)
def floats(address, count):  # type: ignore[no-untyped-def]
    """The float32 values at an address."""
    return to_array(floats_at(address), count)


@helper(forceinline=True)
def integers(address, count):  # type: ignore[no-untyped-def]
    """The int64s at an address."""
    return to_array(integers_at(address), count)


@helper(forceinline=True)
def round_values(values):  # type: ignore[no-untyped-def]
    """Round float32 values in place to those of bfloat16."""
    for i in range(len(values)):
        values[i] = wide(shortened(values[i]))


@helper(forceinline=True)
def store_rounded(values, results):  # type: ignore[no-untyped-def]
    """Write float32 values as bfloat16, rounded."""
    for i in range(len(values)):
        results[i] = shortened(values[i])


def rotate(data, start, end, parts):  # type: ignore[no-untyped-def]
    """`x * cos + rotate_half(x) * sin` in place: some parts of the tokens.

    After the own address those of heads, cosines and sines, the number of heads, the width of what is rotated, that of
    a head, the number of tokens, how many angles each has, which may be those of one half, and how many angles there
    are from a token's to the next one's.
    """
    words = to_array(data, 10)
    heads, width, step, tokens, angles = words[4], words[5], words[6], words[7], words[8]
    half = width // 2
    cos, sin = np.empty(width, np.float32), np.empty(width, np.float32)
    x, turned = np.empty(width, np.float32), np.empty(width, np.float32)
    for token in range(start * tokens // parts, end * tokens // parts):
        cos_bits = bfloats(words[2] + 2 * words[9] * token, angles)
        sin_bits = bfloats(words[3] + 2 * words[9] * token, angles)
        for i in range(width):
            cos[i], sin[i] = wide(cos_bits[i % angles]), wide(sin_bits[i % angles])
        for head in range(token * heads, token * heads + heads):
            bits = bfloats(words[1] + 2 * step * head, width)
            for i in range(width):
                x[i] = wide(bits[i])
            for i in range(half):
                turned[i] = -x[half + i] * sin[i]
                turned[half + i] = x[i] * sin[half + i]
            for i in range(width):
                x[i] *= cos[i]
            round_values(x)
            round_values(turned)
            for i in range(width):
                x[i] += turned[i]
            store_rounded(x, bits)


def part(data):  # type: ignore[no-untyped-def]
    """Bring what lies behind each head of queries, its gate, before all of them.

    After the own address that of both, how many heads there are, and their width.
    """
    words = to_array(data, 4)
    heads, width = words[2], words[3]
    bits = bfloats(words[1], 2 * heads * width)
    both = bits.copy()
    for head in range(heads):
        for i in range(width):
            bits[head * width + i] = both[(2 * head + 1) * width + i]
            bits[(heads + head) * width + i] = both[2 * head * width + i]


@helper()
def _gate(table_at, gates_at, factors_at, out, first, last):  # type: ignore[no-untyped-def]
    """`table[gates] * factors`, some of them."""
    table, product = bfloats(table_at, 1 << 16), np.empty(_NEAR, np.float32)
    for begin in range(first, last, _NEAR):
        count = min(_NEAR, last - begin)
        gates, factors = bfloats(gates_at + 2 * begin, count), bfloats(factors_at + 2 * begin, count)
        for i in range(count):
            product[i] = wide(table[gates[i]])
        for i in range(count):
            product[i] *= wide(factors[i])
        store_rounded(product[:count], bfloats(out + 2 * begin, count))


def gate(data, start, end, parts):  # type: ignore[no-untyped-def]
    """`table[gates] * factors`, some parts of them.

    After the own address those of table, gates, factors and results, and their count.
    """
    words = to_array(data, 6)
    _gate(words[1], words[2], words[3], words[4], start * words[5] // parts, end * words[5] // parts)


def gate_rows(data, start, end, parts):  # type: ignore[no-untyped-def]
    """The same of some parts of rows, each of gates and then of factors: after the own address those of table, rows and
    results, how many rows there are, and the width of results."""
    words = to_array(data, 6)
    width, first, last = words[5], start * words[4] * words[5] // parts, end * words[4] * words[5] // parts
    while first < last:
        row = first // width
        until, gates = min(last, (row + 1) * width), words[2] + 2 * row * width
        _gate(words[1], gates, gates + 2 * width, words[3], first, until)
        first = until


def add_gated(data):  # type: ignore[no-untyped-def]
    """`others + table[gate] * terms` of rows with a gate each.

    After the own address those of the table, of terms, gates, others and results; rows and their width.
    """
    words = to_array(data, 8)
    rows, width = words[6], words[7]
    table, gates, values = bfloats(words[1], 1 << 16), bfloats(words[3], rows), np.empty(width, np.float32)
    for row in range(rows):
        begin, factor = 2 * row * width, wide(table[gates[row]])
        terms, others = bfloats(words[2] + begin, width), bfloats(words[4] + begin, width)
        for i in range(width):
            values[i] = wide(terms[i]) * factor
        round_values(values)
        for i in range(width):
            values[i] += wide(others[i])
        store_rounded(values, bfloats(words[5] + begin, width))


def add(data):  # type: ignore[no-untyped-def]
    """Sums: after the own address those of two terms and of the results, and their count."""
    words = to_array(data, 5)
    count = words[4]
    first, second, values = bfloats(words[1], count), bfloats(words[2], count), np.empty(count, np.float32)
    for i in range(count):
        values[i] = wide(first[i]) + wide(second[i])
    store_rounded(values, bfloats(words[3], count))


def add_bias(data):  # type: ignore[no-untyped-def]
    """Sums plus a bias: after the own address those of sums of rows in float32, of the bias and the results, its width
    and the rows."""
    words = to_array(data, 6)
    width = words[4]
    bias, values = bfloats(words[2], width), np.empty(width, np.float32)
    for row in range(words[5]):
        sums = floats(words[1] + 4 * width * row, width)
        for i in range(width):
            values[i] = sums[i] + wide(bias[i])
        store_rounded(values, bfloats(words[3] + 2 * width * row, width))


def add_biases(data):  # type: ignore[no-untyped-def]
    """Add to rows the biases of the matrices that computed them.

    After the own address those of the chosen matrices (see `joint_kernels.ROUTED_WORDS`; each has its number), of the
    address of the biases of all, of sums in float32, or 0 for results that are rounded already, and of these; and the
    width of rows.
    """
    words = to_array(data, 6)
    width = words[5]
    count, biases = integers(words[1], 1)[0], integers(words[2], 1)[0]
    chosen, values = integers(words[1] + 8, 4 * count), np.empty(width, np.float32)
    for i in range(count):
        bias = bfloats(biases + 2 * width * chosen[4 * i + 3], width)
        for row in range(chosen[4 * i + 1], chosen[4 * i + 1] + chosen[4 * i + 2]):
            sums, results = floats(words[3] + 4 * width * row, width), bfloats(words[4] + 2 * width * row, width)
            for j in range(width):
                values[j] = wide(results[j]) if words[3] == 0 else sums[j]
            for j in range(width):
                values[j] += wide(bias[j])
            store_rounded(values, results)


def gate_widely(data):  # type: ignore[no-untyped-def]
    """`factors * table[gates]` in float32, rounded once: after the own address those of the table in float32, of gates,
    of factors and results in one place, and their count."""
    words = to_array(data, 5)
    count = words[4]
    table, gates, results = floats(words[1], 1 << 16), bfloats(words[2], count), bfloats(words[3], count)
    product = np.empty(count, np.float32)
    for i in range(count):
        product[i] = wide(results[i]) * table[gates[i]]
    store_rounded(product, results)


def gate_pairs(data):  # type: ignore[no-untyped-def]
    """`table[gate] * other[factor]` of pairs of a gate and a factor: after the own address those of both tables, of
    pairs and of results, and their count."""
    words = to_array(data, 6)
    count = words[5]
    table, other, pairs = bfloats(words[1], 1 << 16), bfloats(words[2], 1 << 16), bfloats(words[3], 2 * count)
    product = np.empty(count, np.float32)
    for i in range(count):
        product[i] = wide(table[pairs[2 * i]]) * wide(other[pairs[2 * i + 1]])
    store_rounded(product, bfloats(words[4], count))


@helper()
def _sort(values, order, first, end):  # type: ignore[no-untyped-def]
    """Sort some values, the largest first, and equal ones as before."""
    for i in range(first + 1, end):
        value, number, place = values[i], order[i], i
        while place > first and value > values[place - 1]:
            values[place], order[place] = values[place - 1], order[place - 1]
            place -= 1
        values[place], order[place] = value, number


@helper()
def bring_largest(values, order, used, steps):  # type: ignore[no-untyped-def]
    """Bring the largest values to the front, of equal ones those that libstdc++'s `std::nth_element` does, by which
    torch selects them; returns whether so many steps are enough."""
    first, end, nth = 0, len(values), used - 1
    while end - first > 3:
        if steps == 0:
            return False
        steps -= 1
        a, b, c = first + 1, first + (end - first) // 2, end - 1
        if values[a] > values[b]:
            middle = b if values[b] > values[c] else c if values[a] > values[c] else a
        else:
            middle = a if values[a] > values[c] else c if values[b] > values[c] else b
        values[first], values[middle] = values[middle], values[first]
        order[first], order[middle] = order[middle], order[first]
        low, high, pivot = first + 1, end - 1, values[first]
        while True:
            while values[low] > pivot:
                low += 1
            while pivot > values[high]:
                high -= 1
            if low >= high:
                break
            values[low], values[high] = values[high], values[low]
            order[low], order[high] = order[high], order[low]
            low, high = low + 1, high - 1
        if low <= nth:
            first = low
        else:
            end = low
    _sort(values, order, first, end)
    return True


@helper()
def _select(values, order, used):  # type: ignore[no-untyped-def]
    """The same, and sort them as `std::sort` does; returns whether they are in that order."""
    is_quick = bring_largest(values, order, used, 2 * int(np.log2(len(values))))
    if is_quick:
        _sort(values, order, 0, used - 1)
    return is_quick


def choose(data):  # type: ignore[no-untyped-def]
    """Choose a token's experts by its logits, and their weights, if they are surely those that torch chooses.

    After the own address those of the logits; of all experts' words, 0 for those that are not known; of the chosen ones
    (see `joint_kernels.ROUTED_WORDS`), of which there are none if torch is to choose; of their weights; and of what is
    then 1. The number of experts and of those that are used, whether weights add up to 1, and how many bits of a
    float32 the dtype lacks: 16, or 13 of float16, of which few are equal, and these are left to torch.
    """
    words = to_array(data, 10)
    count, used, is_bfloat = words[6], words[7], words[9] == 16
    middle, apart = np.int32(1) << np.int32(words[9] - 1), np.float32(0) if is_bfloat else _APART
    bits, values, order = bfloats(words[1], count), np.empty(count, np.float32), np.arange(count)
    of_experts, chosen, done = integers(words[2], count), integers(words[3], 1 + 4 * used), integers(words[5], 1)
    shares, rounded = np.empty(used, np.float64), np.empty(used, np.float32)
    most, least, others, summed, small = np.float32(-np.inf), np.float32(np.inf), np.float32(0), 0.0, 0
    for i in range(count):
        value = wide(bits[i])
        values[i], most, least = value, max(most, value), min(least, value)
        others += value * np.float32(0)
        small += is_bfloat and abs(value) < _SMALL
    chosen[0] = done[0] = 0
    # others are NaN if a value is that, or infinite
    if others != 0 or small > 1 or least - most < _LEAST or not _select(values, order, used):
        return
    is_sure = others == 0
    if used * 64 <= count or used > 17 or not is_bfloat:  # torch sorts in other ways
        for i in range(1, count):
            is_sure = is_sure and values[min(i, used) - 1] - values[i] > apart
    for rank in range(used):
        number, place = order[rank], 1 + 4 * rank
        shares[rank] = np.exp(np.float64(values[rank] - most))
        summed += shares[rank]
        chosen[place], chosen[place + 1], chosen[place + 2], chosen[place + 3] = of_experts[number], rank, 1, number
        is_sure = is_sure and of_experts[number] != 0
    if words[8] == 0:
        summed = 0.0
        for i in range(count):
            summed += np.exp(np.float64(values[i] - most))
    for rank in range(used):
        rounded[rank] = shares[rank] / summed
    for rank in range(used):
        distance = (np.int32(bits_of(rounded[rank])) & (2 * middle - 1)) - middle
        is_sure = is_sure and abs(distance) > _UNSURE and (is_bfloat or rounded[rank] >= _LEAST_HALF)
    store_rounded(rounded, bfloats(words[4], used))
    chosen[0] = used if is_sure else 0
    done[0] = is_sure


def stop(data):  # type: ignore[no-untyped-def]
    """End a program if experts were not chosen.

    After the own address that of what `choose` sets, which gets a number if it is 0, that number, and the address of
    the number of the program's functions.
    """
    words = to_array(data, 4)
    done, steps = integers(words[1], 1), integers(words[3], 1)
    if done[0] == 0:
        done[0], steps[0] = words[2], 0


def combine(data):  # type: ignore[no-untyped-def]
    """Weighted sums of rows, added in float32.

    After the own address those of rows, of their weights, of int64 numbers of rows, and of the results; the tokens, the
    rows of each, their width, and whether weights are float32; if not, products are rounded too.
    """
    words = to_array(data, 9)
    tokens, used, width, is_wide = words[5], words[6], words[7], words[8]
    indices = integers(words[3], tokens * used)
    values, total, factor = np.empty(width, np.float32), np.empty(width, np.float32), np.float32(0)
    for token in range(tokens):
        total[:] = 0
        for i in range(token * used, (token + 1) * used):
            if is_wide:
                factor = floats(words[2] + 4 * i, 1)[0]
            else:
                factor = wide(bfloats(words[2] + 2 * i, 1)[0])
            row = bfloats(words[1] + 2 * width * indices[i], width)
            for j in range(width):
                values[j] = wide(row[j]) * factor
            if not is_wide:
                round_values(values)
            for j in range(width):
                total[j] += values[j]
        store_rounded(total, bfloats(words[4] + 2 * width * token, width))


def keep(data):  # type: ignore[no-untyped-def]
    """Write the keys and values of rows, each as the last token of its own.

    After the own address those of the rows' keys, before their values, and of `kv_room.cached` of each row; rows, heads
    and their width.
    """
    words = to_array(data, 6)
    rows, heads, width = words[3], words[4], words[5]
    for row in range(rows):
        cached = integers(words[2] + 8 * CACHED * row, CACHED)
        for half in range(2):
            for head in range(heads):
                source = bfloats(words[1] + 2 * width * ((half * rows + row) * heads + head), width)
                place = cached[half] + head * cached[3 + 2 * half] + (cached[2] - 1) * cached[4 + 2 * half]
                kept = bfloats(place, width)
                for i in range(width):
                    kept[i] = source[i]


@helper(fastmath={"reassoc", "contract", "nsz"})
def dot(query, words, width):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for i in range(width):
        total += query[i] * wide(words[i])
    return total


@helper(fastmath={"contract"})
def _add_rows(total, begin, step, shares, count, width):  # type: ignore[no-untyped-def]
    """Add rows, each times its share."""
    token = 0
    while token + 4 <= count:
        first = begin + token * step
        a, b = bfloats(first, width), bfloats(first + step, width)
        c, d = bfloats(first + 2 * step, width), bfloats(first + 3 * step, width)
        p, q, r, s = shares[token], shares[token + 1], shares[token + 2], shares[token + 3]
        for i in range(width):
            total[i] += p * wide(a[i]) + q * wide(b[i]) + r * wide(c[i]) + s * wide(d[i])
        token += 4
    while token < count:
        a, p = bfloats(begin + token * step, width), shares[token]
        for i in range(width):
            total[i] += p * wide(a[i])
        token += 1


@helper()
def _attend(query, cached, head, sink, runs, scores, powers, total):  # type: ignore[no-untyped-def]
    """What a head of queries attends to, in all tokens of runs of a head of keys and values, and in none: the score of
    that, -inf without one, is its sink."""
    tokens, width = len(scores), len(query)
    keys, values = cached[0] + head * cached[3], cached[1] + head * cached[5]
    most, summed, begin = sink, np.float32(0), 0
    for run in range(0, len(runs), 2):
        first, end = keys + runs[run] * cached[4], begin + runs[run + 1]
        for token in range(begin, end):
            score = dot(query, bfloats(first + (token - begin) * cached[4], width), width)
            scores[token] = score
            most = max(most, score)
            # NaN for a score that is NaN or infinite; -inf is one of a token that has no weight
            summed += (score if score != np.float32(-np.inf) else np.float32(0)) * np.float32(0)
        begin = end
    if most == np.float32(-np.inf):  # no token has any
        total[:] = summed
        return
    for token in range(tokens):
        x = max(scores[token] - most, np.float32(-127))  # less is 0, times which what is infinite is no number
        whole = np.floor(x + np.float32(0.5))
        powers[token] = float_of((np.int32(whole) + np.int32(127)) << np.int32(23))
        x -= whole
        scores[token] = (((((_C6 * x + _C5) * x + _C4) * x + _C3) * x + _C2) * x + _C1) * x + np.float32(1)
    for token in range(tokens):
        scores[token] *= powers[token]
    for token in range(tokens):
        summed += scores[token]
    summed += np.exp2(sink - most)
    total[:] = begin = 0
    for run in range(0, len(runs), 2):
        count = runs[run + 1]
        _add_rows(total, values + runs[run] * cached[6], cached[6], scores[begin : begin + count], count, width)
        begin += count
    for i in range(width):
        total[i] /= summed


def attend(data, start, end, parts):  # type: ignore[no-untyped-def]
    """Attention of rows, each to keys and values of its own: some parts of all heads, by their tokens.

    After the own address those of queries, of results, and of `kv_room.cached` for each row; rows, heads, heads
    for each of the keys', their width, the bits of the factor of scores, the address of sinks of all heads, or 0, and
    that of the tokens to which the only row attends, or 0 for all: how many runs there are, how many tokens these have,
    and of each run the first token and their number.
    """
    words = to_array(data, 11)
    rows, heads, group, width, factor = words[4], words[5], words[6], words[7], float_of(words[8]) * _LOG2_E
    total, most, runs = 0, 0, np.zeros(2, np.int64)
    for row in range(rows):
        tokens = integers(words[3] + 8 * CACHED * row, CACHED)[2]
        total, most = total + heads * tokens, max(most, tokens)
    if words[10] != 0:
        most = integers(words[10], 2)[1]
        total, runs = heads * most, integers(words[10] + 16, 2 * integers(words[10], 2)[0])
    scores, powers = np.empty(most, np.float32), np.empty(most, np.float32)
    query, summed, sinks = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(heads, np.float32)
    sinks[:] = np.float32(-np.inf)
    for head in range(heads if words[9] != 0 else 0):
        sinks[head] = wide(bfloats(words[9], heads)[head]) * _LOG2_E
    begin = 0
    for row in range(rows):
        cached = integers(words[3] + 8 * CACHED * row, CACHED)
        tokens = most if words[10] != 0 else cached[2]
        if words[10] == 0:
            runs[1] = tokens
        first, last = max(start * total // parts - begin, 0), max(end * total // parts - begin, 0)
        for head in range(-(-first // tokens), min(-(-last // tokens), heads)):
            offset = 2 * (row * heads + head) * width
            bits = bfloats(words[1] + offset, width)
            for i in range(width):
                query[i] = wide(bits[i]) * factor
            _attend(query, cached, head // group, sinks[head], runs, scores[:tokens], powers[:tokens], summed)
            store_rounded(summed, bfloats(words[2] + offset, width))
        begin += heads * tokens
