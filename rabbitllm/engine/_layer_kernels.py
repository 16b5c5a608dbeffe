"""Small operations of a layer in bfloat16 as compiled functions of a `Program`, with torch's bits, and attention.

torch rounds the result of each operation, and so do these. Attention of one row rounds its result alone: its scores,
their exponentials and its sums are float32. Their order depends on the processor's vectors, as torch's does, but on
nothing else.
"""

from __future__ import annotations

import numba
import numpy as np

from rabbitllm.base.compiling import to_array, wide, words_at

_LOG2_E = np.float32(1.4426950408889634)
_C6, _C5, _C4 = np.float32(1.535336188319500e-4), np.float32(1.339887440266574e-3), np.float32(9.618437357674640e-3)
_C3, _C2, _C1 = np.float32(5.550332471162809e-2), np.float32(2.402264791363012e-1), np.float32(6.931472028550421e-1)
"""The coefficients of 2 ** x for x in (-0.5, 0.5) (Cephes, exp2f)."""


@numba.njit(nogil=True, inline="always")
def nearest(bits):  # type: ignore[no-untyped-def]
    """The bits of a float32 rounded to bfloat16, to nearest, ties to even; the lower half is left over."""
    if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return np.uint32(0x7FC00000)
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))


def rotate(data):  # type: ignore[no-untyped-def]
    """`x * cos + rotate_half(x) * sin` in place.

    After the own address those of heads, cosines and sines, the number of heads, the width of what is rotated, and that
    of a head.
    """
    given = to_array(data, 7)
    heads, width, step = given[4], given[5], given[6]
    half = width // 2
    cos, sin = np.empty(width, np.float32), np.empty(width, np.float32)
    x, turned = np.empty(width, np.float32), np.empty(width, np.float32)
    cos_bits, sin_bits = cos.view(np.uint32), sin.view(np.uint32)
    bits, turned_bits = x.view(np.uint32), turned.view(np.uint32)
    words = to_array(words_at(given[1]), heads * step)
    cos_words, sin_words = to_array(words_at(given[2]), width), to_array(words_at(given[3]), width)
    for i in range(width):
        cos_bits[i] = np.uint32(cos_words[i]) << np.uint32(16)
        sin_bits[i] = np.uint32(sin_words[i]) << np.uint32(16)
    for begin in range(0, heads * step, step):
        for i in range(width):
            bits[i] = np.uint32(words[begin + i]) << np.uint32(16)
        for i in range(half):
            turned[i] = -x[half + i] * sin[i]
            turned[half + i] = x[i] * sin[half + i]
        for i in range(width):
            x[i] *= cos[i]
        for i in range(width):
            bits[i] = nearest(bits[i]) & np.uint32(0xFFFF0000)
            turned_bits[i] = nearest(turned_bits[i]) & np.uint32(0xFFFF0000)
        for i in range(width):
            x[i] += turned[i]
        for i in range(width):
            words[begin + i] = np.uint16(nearest(bits[i]) >> np.uint32(16))


def part(data):  # type: ignore[no-untyped-def]
    """Bring what lies behind each head of queries, its gate, before all of them.

    After the own address that of both, how many heads there are, and their width.
    """
    given = to_array(data, 4)
    heads, width = given[2], given[3]
    words = to_array(words_at(given[1]), 2 * heads * width)
    both = words.copy()
    for head in range(heads):
        for i in range(width):
            words[head * width + i] = both[(2 * head + 1) * width + i]
            words[(heads + head) * width + i] = both[2 * head * width + i]


def gate(data):  # type: ignore[no-untyped-def]
    """`table[gates] * factors`: after the own address those of table, gates, factors and results, and their count."""
    words = to_array(data, 6)
    count = words[5]
    table, gates = to_array(words_at(words[1]), 1 << 16), to_array(words_at(words[2]), count)
    factors, results = to_array(words_at(words[3]), count), to_array(words_at(words[4]), count)
    product, factor = np.empty(count, np.float32), np.empty(count, np.float32)
    bits, factor_bits = product.view(np.uint32), factor.view(np.uint32)
    for i in range(count):
        bits[i] = np.uint32(table[gates[i]]) << np.uint32(16)
    for i in range(count):
        factor_bits[i] = np.uint32(factors[i]) << np.uint32(16)
    for i in range(count):
        product[i] *= factor[i]
    for i in range(count):
        results[i] = np.uint16(nearest(bits[i]) >> np.uint32(16))


def add_gated(data):  # type: ignore[no-untyped-def]
    """`others + table[gate] * terms` of rows with a gate each.

    After the own address those of the table, of terms, gates, others and results; rows and their width.
    """
    given = to_array(data, 8)
    rows, width = given[6], given[7]
    table, gates = to_array(words_at(given[1]), 1 << 16), to_array(words_at(given[3]), rows)
    terms, others = to_array(words_at(given[2]), rows * width), to_array(words_at(given[4]), rows * width)
    results, values = to_array(words_at(given[5]), rows * width), np.empty(width, np.float32)
    bits = values.view(np.uint32)
    for row in range(rows):
        begin, factor = row * width, wide(table[gates[row]])
        for i in range(width):
            values[i] = wide(terms[begin + i]) * factor
        for i in range(width):
            bits[i] = nearest(bits[i]) & np.uint32(0xFFFF0000)
        for i in range(width):
            values[i] += wide(others[begin + i])
        for i in range(width):
            results[begin + i] = np.uint16(nearest(bits[i]) >> np.uint32(16))


def add(data):  # type: ignore[no-untyped-def]
    """Sums: after the own address those of two terms and of the results, and their count."""
    given = to_array(data, 5)
    count = given[4]
    first, second = to_array(words_at(given[1]), count), to_array(words_at(given[2]), count)
    results, values = to_array(words_at(given[3]), count), np.empty(count, np.float32)
    bits = values.view(np.uint32)
    for i in range(count):
        values[i] = wide(first[i]) + wide(second[i])
    for i in range(count):
        results[i] = np.uint16(nearest(bits[i]) >> np.uint32(16))


def add_bias(data):  # type: ignore[no-untyped-def]
    """Sums plus a bias: after the own address those of sums in float32, bias and results, and their count."""
    given = to_array(data, 5)
    count = given[4]
    sums = to_array(words_at(given[1]), 2 * count).view(np.float32)
    bias, results = to_array(words_at(given[2]), count), to_array(words_at(given[3]), count)
    values = np.empty(count, np.float32)
    bits = values.view(np.uint32)
    for i in range(count):
        values[i] = sums[i] + wide(bias[i])
    for i in range(count):
        results[i] = np.uint16(nearest(bits[i]) >> np.uint32(16))


def add_biases(data):  # type: ignore[no-untyped-def]
    """Add to rows in place the biases of the experts that computed them.

    After the own address those of the chosen experts (see `joint_kernels.ROUTED_WORDS`; each has its number), of the
    biases of all experts, and of the rows, and their width.
    """
    given = to_array(data, 5)
    width = given[4]
    count = to_array(words_at(given[1]), 4).view(np.int64)[0]
    chosen = to_array(words_at(given[1] + 8), 16 * count).view(np.int64)
    values = np.empty(width, np.float32)
    bits = values.view(np.uint32)
    for i in range(count):
        bias = to_array(words_at(given[2] + 2 * width * chosen[4 * i + 3]), width)
        for row in range(chosen[4 * i + 1], chosen[4 * i + 1] + chosen[4 * i + 2]):
            results = to_array(words_at(given[3] + 2 * width * row), width)
            for j in range(width):
                values[j] = wide(results[j]) + wide(bias[j])
            for j in range(width):
                results[j] = np.uint16(nearest(bits[j]) >> np.uint32(16))


def gate_widely(data):  # type: ignore[no-untyped-def]
    """`factors * table[gates]` in float32, rounded once: after the own address those of the table in float32, of gates,
    of factors and results in one place, and their count."""
    given = to_array(data, 5)
    count = given[4]
    table, gates = to_array(words_at(given[1]), 1 << 17).view(np.float32), to_array(words_at(given[2]), count)
    results, product = to_array(words_at(given[3]), count), np.empty(count, np.float32)
    bits = product.view(np.uint32)
    for i in range(count):
        product[i] = wide(results[i]) * table[gates[i]]
    for i in range(count):
        results[i] = np.uint16(nearest(bits[i]) >> np.uint32(16))


def gate_pairs(data):  # type: ignore[no-untyped-def]
    """`table[gate] * other[factor]` of pairs of a gate and a factor: after the own address those of both tables, of
    pairs and of results, and their count."""
    given = to_array(data, 6)
    count = given[5]
    table, other = to_array(words_at(given[1]), 1 << 16), to_array(words_at(given[2]), 1 << 16)
    pairs, results = to_array(words_at(given[3]), 2 * count), to_array(words_at(given[4]), count)
    product = np.empty(count, np.float32)
    bits = product.view(np.uint32)
    for i in range(count):
        product[i] = wide(table[pairs[2 * i]]) * wide(other[pairs[2 * i + 1]])
    for i in range(count):
        results[i] = np.uint16(nearest(bits[i]) >> np.uint32(16))


def combine(data):  # type: ignore[no-untyped-def]
    """Weighted sums of rows, added in float32.

    After the own address those of rows, of their weights, of int64 numbers of rows, and of the results; the tokens, the
    rows of each, their width, and whether weights are float32; if not, products are rounded too.
    """
    given = to_array(data, 9)
    tokens, used, width, is_wide = given[5], given[6], given[7], given[8]
    places = to_array(words_at(given[3]), 4 * tokens * used).view(np.int64)
    values, total = np.empty(width, np.float32), np.empty(width, np.float32)
    bits, total_bits, one = values.view(np.uint32), total.view(np.uint32), np.empty(1, np.float32)
    for token in range(tokens):
        total[:] = 0
        for i in range(token * used, (token + 1) * used):
            if is_wide:
                one[0] = to_array(words_at(given[2] + 4 * i), 2).view(np.float32)[0]
            else:
                one[0] = wide(to_array(words_at(given[2] + 2 * i), 1)[0])
            factor = one[0]
            row = to_array(words_at(given[1] + 2 * width * places[i]), width)
            for j in range(width):
                values[j] = wide(row[j]) * factor
            if not is_wide:
                for j in range(width):
                    bits[j] = nearest(bits[j]) & np.uint32(0xFFFF0000)
            for j in range(width):
                total[j] += values[j]
        results = to_array(words_at(given[4] + 2 * width * token), width)
        for j in range(width):
            results[j] = np.uint16(nearest(total_bits[j]) >> np.uint32(16))


@numba.njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _dot(query, words, width):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for i in range(width):
        total += query[i] * wide(words[i])
    return total


@numba.njit(nogil=True, fastmath={"contract"})
def _add_rows(total, begin, step, shares, count, width):  # type: ignore[no-untyped-def]
    """Add rows, each times its share."""
    token = 0
    while token + 4 <= count:
        first = begin + token * step
        a, b = to_array(words_at(first), width), to_array(words_at(first + step), width)
        c, d = to_array(words_at(first + 2 * step), width), to_array(words_at(first + 3 * step), width)
        p, q, r, s = shares[token], shares[token + 1], shares[token + 2], shares[token + 3]
        for i in range(width):
            total[i] += p * wide(a[i]) + q * wide(b[i]) + r * wide(c[i]) + s * wide(d[i])
        token += 4
    while token < count:
        a, p = to_array(words_at(begin + token * step), width), shares[token]
        for i in range(width):
            total[i] += p * wide(a[i])
        token += 1


def attend(data, start, end, parts):  # type: ignore[no-untyped-def]
    """Attention of one row: some parts of its heads.

    After the own address those of queries, keys, values and results; the tokens; bytes from a head to the next and from
    a token to the next, of keys and of values; heads, heads for each of the keys', their width, and the bits of the
    factor of scores.
    """
    given = to_array(data, 14)
    tokens, heads, group, width = given[5], given[10], given[11], given[12]
    one = np.empty(1, np.uint32)
    one[0] = np.uint32(given[13])
    factor = one.view(np.float32)[0] * _LOG2_E
    query, total = np.empty(width, np.float32), np.empty(width, np.float32)
    total_bits = total.view(np.uint32)
    scores, powers = np.empty(tokens, np.float32), np.empty(tokens, np.int32)
    exponents = powers.view(np.float32)
    for head in range(start * heads // parts, end * heads // parts):
        words = to_array(words_at(given[1] + 2 * head * width), width)
        for i in range(width):
            query[i] = wide(words[i]) * factor
        keys, values = given[2] + head // group * given[6], given[3] + head // group * given[8]
        most, summed = np.float32(-np.inf), np.float32(0)
        for token in range(tokens):
            score = _dot(query, to_array(words_at(keys + token * given[7]), width), width)
            scores[token] = score
            most = max(most, score)
            summed += score * np.float32(0)  # NaN for a score that is NaN or infinite
        for token in range(tokens):
            x = max(scores[token] - most, np.float32(-126))
            whole = np.floor(x + np.float32(0.5))
            powers[token] = (np.int32(whole) + np.int32(127)) << np.int32(23)
            x -= whole
            scores[token] = (((((_C6 * x + _C5) * x + _C4) * x + _C3) * x + _C2) * x + _C1) * x + np.float32(1)
        for token in range(tokens):
            scores[token] *= exponents[token]
        for token in range(tokens):
            summed += scores[token]
        total[:] = 0
        _add_rows(total, values, given[9], scores, tokens, width)
        results = to_array(words_at(given[4] + 2 * head * width), width)
        for i in range(width):
            total[i] /= summed
        for i in range(width):
            results[i] = np.uint16(nearest(total_bits[i]) >> np.uint32(16))
