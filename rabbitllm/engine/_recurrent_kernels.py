"""Steps of recurrent layers as one call of compiled code each, with torch's bits.

The gated delta rule:

    S = S * decay;  S = S + k (v - S^T k) beta;  out = S^T q

(https://arxiv.org/abs/2412.06464, section 3; transformers' modeling_qwen3_next.py). torch takes ten operations, each of
which reads and writes as many bytes as the states of all heads have; here a head's state stays in a core's cache. Each
product is rounded before it is added, and sums have the order of torch's (`cascade_sum`, SumKernel.cpp): of `RUN` rows
each, which are then added. A convolution is summed as oneDNN does.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.extending import intrinsic

from rabbitllm.base.compiling import float_of, shortened, to_array, wide
from rabbitllm.engine._layer_kernels import bfloats, floats, round_values, store_rounded

RUN = 16
"""Rows that are added in a run."""
DELTA_WORDS, CONVOLUTION_WORDS, STATE_SPACE_WORDS, SELECTIVE_WORDS = 14, 11, 10, 9
"""Of each function, after the own address:

- sequences, tokens, heads, the heads that share a query and a key, rows and columns of a state, whether each row has a
  decay of its own; addresses of the states, queries, keys, values, decays, betas and results, float32 without gaps;
- sequences, channels, tokens of a state, taps, whether values are bfloat16, else float32, whether there is a bias
  (1: added first, as torch does in float32; 2: last, as in bfloat16); addresses of the inputs, states, weights, bias
  and results;
- heads, the heads that share a B, their width, columns of a state; addresses of the states, decays, step sizes, Bs and
  inputs, float32 without gaps, and of the states rounded to bfloat16;
- sequences, channels, columns of a state; the same addresses, with a decay for each value, and step sizes for channels.
"""


def _multiplied(context: Any, a: Any, b: Any, c: Any) -> Any:
    def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), call


_fma: Any = intrinsic(_multiplied)
"""`a * b + c`, rounded once."""


def delta_step(data, start, end, parts):  # type: ignore[no-untyped-def]
    """The tokens of a head one after the other, while its state is in the cache."""
    words = to_array(data, 1 + DELTA_WORDS)[1:]
    sequences, tokens, heads, shared = words[0], words[1], words[2], words[3]
    rows, columns, by_row = words[4], words[5], words[6]
    of_heads, of_keys = sequences * heads, sequences * tokens * heads // shared * rows
    states, values = floats(words[7], of_heads * rows * columns), floats(words[10], of_heads * tokens * columns)
    queries, keys = floats(words[8], of_keys), floats(words[9], of_keys)
    decays = floats(words[11], of_heads * tokens * (rows if by_row else 1))
    betas, results = floats(words[12], of_heads * tokens), floats(words[13], of_heads * tokens * columns)
    run, total = np.empty(columns, np.float32), np.empty(columns, np.float32)
    for of_head in range(start * of_heads // parts, end * of_heads // parts):
        for token in range(tokens):
            place = (of_head // heads * tokens + token) * heads + of_head % heads
            of_key = place // shared * rows
            value = values[place * columns : (place + 1) * columns]
            result = results[place * columns : (place + 1) * columns]
            total[:] = 0
            for first in range(0, rows, RUN):
                run[:] = 0
                for row in range(first, first + RUN):
                    decay, key = decays[place * rows + row if by_row else place], keys[of_key + row]
                    state = states[(of_head * rows + row) * columns : (of_head * rows + row + 1) * columns]
                    for i in range(columns):
                        state[i] *= decay
                        run[i] += state[i] * key
                for i in range(columns):
                    total[i] += run[i]
            for i in range(columns):
                total[i] = (value[i] - total[i]) * betas[place]
                result[i] = 0
            for first in range(0, rows, RUN):
                run[:] = 0
                for row in range(first, first + RUN):
                    query, key = queries[of_key + row], keys[of_key + row]
                    state = states[(of_head * rows + row) * columns : (of_head * rows + row + 1) * columns]
                    for i in range(columns):
                        state[i] += key * total[i]
                        run[i] += state[i] * query
                for i in range(columns):
                    result[i] += run[i]


@numba.njit(inline="always")
def _rounded(value):  # type: ignore[no-untyped-def]
    """The bits of a float32 as bfloat16."""
    return shortened(value)


@numba.njit(inline="always")
def _same(value):  # type: ignore[no-untyped-def]
    return value


@numba.njit(inline="always")
def _convolve(wide_of, value_of, values_at, words, start, end, parts):  # type: ignore[no-untyped-def]
    """See `convolution_step`; the first three are how values become floats, and back, and are read at an address."""
    sequences, channels, tokens, taps, bias_turn = words[0], words[1], words[2], words[3], words[5]
    inputs, states = values_at(words[6], sequences * channels), values_at(words[7], sequences * channels * tokens)
    weights, bias = values_at(words[8], channels * taps), values_at(words[9], channels)
    results = values_at(words[10], sequences * channels)
    for sequence in range(sequences):
        for channel in range(start * channels // parts, end * channels // parts):
            place, weight = sequence * channels + channel, channel * taps
            old = place * tokens
            total = wide_of(bias[channel]) if bias_turn == 1 else np.float32(0)
            for tap in range(taps - 1):
                total = _fma(wide_of(states[old + tokens - taps + 1 + tap]), wide_of(weights[weight + tap]), total)
            total = _fma(wide_of(inputs[place]), wide_of(weights[weight + taps - 1]), total)
            results[place] = value_of(total + wide_of(bias[channel]) if bias_turn == 2 else total)
            for token in range(tokens - 1):
                states[old + token] = states[old + token + 1]
            states[old + tokens - 1] = inputs[place]


def convolution_step(data, start, end, parts):  # type: ignore[no-untyped-def]
    """Sums from the oldest token on; the state loses its oldest token."""
    words = to_array(data, 1 + CONVOLUTION_WORDS)[1:]
    if words[4]:
        _convolve(wide, _rounded, bfloats, words, start, end, parts)
    else:
        _convolve(_same, _same, floats, words, start, end, parts)


def state_space_step(data, start, end, parts):  # type: ignore[no-untyped-def]
    """S = S * decay + (step size * B) * x, whose products are rounded to bfloat16."""
    words = to_array(data, 1 + STATE_SPACE_WORDS)[1:]
    heads, shared, width, size = words[0], words[1], words[2], words[3]
    states, decays, steps = floats(words[4], heads * width * size), floats(words[5], heads), floats(words[6], heads)
    inputs, values = floats(words[7], heads // shared * size), floats(words[8], heads * width)
    rounded = bfloats(words[9], heads * width * size)
    scaled, product = np.empty(size, np.float32), np.empty(size, np.float32)
    for head in range(start * heads // parts, end * heads // parts):
        own = inputs[head // shared * size : (head // shared + 1) * size]
        for i in range(size):
            scaled[i] = steps[head] * own[i]
        round_values(scaled)
        for row in range(head * width, (head + 1) * width):
            state, result = states[row * size : (row + 1) * size], rounded[row * size : (row + 1) * size]
            for i in range(size):
                product[i] = scaled[i] * values[row]
            round_values(product)
            for i in range(size):
                state[i] = state[i] * decays[head] + product[i]
            store_rounded(state, result)


def selective_step(data, start, end, parts):  # type: ignore[no-untyped-def]
    """S = S * decay + step size * B * x, with a decay for each value."""
    words = to_array(data, 1 + SELECTIVE_WORDS)[1:]
    sequences, channels, size = words[0], words[1], words[2]
    rows = sequences * channels
    states, decays, steps = floats(words[3], rows * size), floats(words[4], rows * size), floats(words[5], rows)
    inputs, values = floats(words[6], sequences * size), floats(words[7], rows)
    rounded, last = bfloats(words[8], rows * size), end * rows // parts
    product, own = np.empty(RUN * size, np.float32), np.empty(size, np.float32)
    for first in range(start * rows // parts, last, RUN):
        count = min(last - first, RUN)
        for row in range(count):
            step, value, place = steps[first + row], values[first + row], (first + row) // channels * size
            scaled = product[row * size : (row + 1) * size]
            for i in range(size):
                own[i] = step * inputs[place + i]
            for i in range(size):
                scaled[i] = own[i] * value
        begin, end = first * size, (first + count) * size
        state, decay, result = states[begin:end], decays[begin:end], rounded[begin:end]
        for i in range(count * size):
            state[i] = state[i] * decay[i] + product[i]
        store_rounded(state, result)


def part_heads(data):  # type: ignore[no-untyped-def]
    """Bring queries, keys, values and gates, which lie side by side for each head of keys, apart.

    After the own address those of all, of the first three, and of the gates; heads, the width of a query and of a key,
    and that of the values of a head of keys.
    """
    words = to_array(data, 7)
    heads, rows, width = words[4], words[5], words[6]
    step, count = 2 * (rows + width), heads * rows
    both, gates = bfloats(words[1], heads * step), bfloats(words[3], heads * width)
    results = bfloats(words[2], 2 * count + heads * width)
    for head in range(heads):
        begin = head * step
        for i in range(rows):
            results[head * rows + i] = both[begin + i]
            results[count + head * rows + i] = both[begin + rows + i]
        for i in range(width):
            results[2 * count + head * width + i] = both[begin + 2 * rows + i]
            gates[head * width + i] = both[begin + 2 * rows + width + i]


def look_up(data):  # type: ignore[no-untyped-def]
    """`table[x]` in float32: after the own address those of the table, of x and of the results, and their count."""
    words = to_array(data, 5)
    table, x, results = bfloats(words[1], 1 << 16), bfloats(words[2], words[4]), floats(words[3], words[4])
    for i in range(words[4]):
        results[i] = wide(table[x[i]])


def divide(data):  # type: ignore[no-untyped-def]
    """Quotients in place: after the own address that of float32s, their count, and the bits of the divisor."""
    words = to_array(data, 4)
    x, divisor = floats(words[1], words[2]), float_of(words[3])
    for i in range(words[2]):
        x[i] /= divisor
