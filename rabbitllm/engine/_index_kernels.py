"""Which tokens a row attends to, chosen by an index, as compiled functions of a `Program`.

Keys of the index are means of those of a block's tokens; blocks are chosen by their scores.
"""

from __future__ import annotations

import numpy as np

from rabbitllm.base.compiling import to_array, wide
from rabbitllm.engine._layer_kernels import bfloats, bring_largest, dot, floats, integers, store_rounded


def keep_and_pool(data):  # type: ignore[no-untyped-def]
    """Write a token's key behind the others, and the means of the keys of new blocks.

    After the own address those of the key, of where it is written, of the first token of the new blocks, and of their
    means; how many blocks these are, the tokens of each, and the width of a key.
    """
    words = to_array(data, 8)
    tokens, width = words[6], words[7]
    key, kept = bfloats(words[1], width), bfloats(words[2], width)
    for i in range(width):
        kept[i] = key[i]
    total = np.empty(width, np.float32)
    for block in range(words[5]):
        total[:] = 0
        for token in range(block * tokens, (block + 1) * tokens):
            bits = bfloats(words[3] + 2 * width * token, width)
            for i in range(width):
                total[i] += wide(bits[i])
        for i in range(width):
            total[i] /= np.float32(tokens)
        store_rounded(total, bfloats(words[4] + 2 * width * block, width))


def score_blocks(data, start, end, parts):  # type: ignore[no-untyped-def]
    """The sums over heads of products that are not negative: some parts of the blocks.

    After the own address those of queries, of blocks' keys and of scores in float32; how many blocks, heads, and the
    width of a key.
    """
    words = to_array(data, 7)
    heads, width = words[5], words[6]
    bits, queries = bfloats(words[1], heads * width), np.empty((heads, width), np.float32)
    for head in range(heads):
        for i in range(width):
            queries[head, i] = wide(bits[head * width + i])
    scores, root = floats(words[3], words[4]), np.float32(np.sqrt(width))
    for block in range(start * words[4] // parts, end * words[4] // parts):
        key, score = bfloats(words[2] + 2 * width * block, width), np.float32(0)
        for head in range(heads):
            product = dot(queries[head], key, width)
            score += product if not product < 0 else np.float32(0)
        # torch chooses what is no number first
        scores[block] = score / root if score == score else np.float32(np.inf)


def choose_blocks(data):  # type: ignore[no-untyped-def]
    """The tokens of the blocks with the largest scores and those behind all blocks; all without blocks.

    After the own address those of the scores and of the runs for `_layer_kernels.attend`; how many blocks, how many are
    chosen, the tokens of each, and all tokens.
    """
    words = to_array(data, 7)
    blocks, chosen, ratio, tokens = words[3], words[4], words[5], words[6]
    runs, is_chosen = integers(words[2], 4 + 2 * chosen), np.ones(blocks, np.bool_)
    if blocks > chosen:
        values, order = floats(words[1], blocks).copy(), np.arange(blocks)
        bring_largest(values, order, chosen, -1)
        is_chosen[:] = False
        is_chosen[order[:chosen]] = True
    count = end = summed = 0
    for block in range(blocks + 1):
        if block < blocks and not is_chosen[block]:
            continue
        begin, last = block * ratio, (block + 1) * ratio if block < blocks else tokens
        if count == 0 or begin > end:
            count += 1
            runs[2 * count], runs[2 * count + 1] = begin, 0
        runs[2 * count + 1] += last - begin
        end, summed = last, summed + last - begin
    runs[0], runs[1] = count, summed
