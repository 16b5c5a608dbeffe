"""What a pass computes takes memory besides weights, keys and values: how much, by the sizes of a model. Pure.

    a layer, of each token of a part   what lives where it is widest: a product of the feed-forward part, or attention
    between two layers                 of each token of the pass: hidden states, and what the model keeps with them
    whatever goes through              a matrix, or the part of one, as the processor multiplies it
    behind the head                    logits of each text whose next token is wanted

Products of 16 bit are summed in 32, and where the processor does not multiply 16 bit their inputs are widened too
(`quant/bfloat_products.py`); so these count for both, and one that does takes as little as a quarter. Measured on
the CPU, see docs/PERFORMANCE.md.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

from rabbitllm.checkpoints.routing import picked_by
from rabbitllm.generation.cache_cost import layer_configs
from rabbitllm.quant.bfloat_products import CHUNK_ELEMENTS

LEAST_TOKENS = 16
"""Of prompts in a pass, however little memory there is."""
MANY_TOKENS = 512
"""Of a part, with which products are about as quick as with more, however large blocks are then."""
GOOD_TOKENS, GOOD_PARTS = 256, 8
"""Of a part that wastes little of the processor's time, and so many of them that a pass is worth its weights."""
CARRIED = 6
"""Times a hidden state that a token takes between two layers, and beside those whose turn it is in one."""
HEAP_BLOCK_BYTES = 32 << 20
"""Larger blocks the allocator gets from the system each time, page by page, which took a sixth of one processor's time
where parts made such blocks (glibc's DEFAULT_MMAP_THRESHOLD_MAX)."""
TIGHT = 3
"""Holes between blocks that stay take up to so many times what parts take."""
_SPARE = 5, 4
"""Times what is reckoned is what is reckoned with: allocators round, and interpreters keep what was just used."""


@dataclass(frozen=True, slots=True)
class PassCost:
    """Bytes of a pass.

    Attributes:
        each: of a token in a layer.
        pair: of a token that looks at a token, where attention makes a matrix of them; 0 where it does not.
        carried: of a token between two layers.
        fixed: whatever goes through.
        answered: of a text whose next token is wanted.
        block: of a token in the largest tensor of a layer.
    """

    each: int
    pair: int
    carried: int
    fixed: int
    answered: int
    block: int

    def of(self, tokens: int, part: int, texts: int) -> int:
        """Of a pass.

        Args:
            tokens: of all texts.
            part: of these, those that go through a layer at a time; of one text, so that they may look at each other.
            texts: whose next token is wanted.
        """
        return self.fixed + texts * self.answered + tokens * self.carried + part * (self.each + part * self.pair)

    def good(self, texts: int) -> int:
        """Of a pass that is worth its weights."""
        return self.of(GOOD_PARTS * GOOD_TOKENS, GOOD_TOKENS, texts)

    def least(self) -> int:
        """Of the smallest pass that there is."""
        return self.of(LEAST_TOKENS, LEAST_TOKENS, 1)

    def tokens_in(self, nbytes: int) -> int:
        """That can go through a layer at a time in so many bytes; at least `LEAST_TOKENS`."""
        if self.pair:
            half = self.each / (2 * self.pair)
            found = int(math.sqrt(half * half + max(nbytes, 0) / self.pair) - half)
        else:
            found = nbytes // self.each
        return max(found, LEAST_TOKENS)

    @property
    def most_tokens(self) -> int:
        """That gain by going through a layer together."""
        return max(HEAP_BLOCK_BYTES // self.block, MANY_TOKENS)

    def is_tight(self, part: int, nbytes: int) -> bool:
        """Whether so many bytes for parts have no room for holes."""
        return nbytes < TIGHT * self.of(0, part, 0)

    def texts_in(self, nbytes: int) -> int:
        """Whose next tokens may be wanted in one pass: a quarter of so many bytes is for that; at least one."""
        return max(nbytes // (4 * self.answered), 1)

    def parts_in(self, nbytes: int, texts: int) -> tuple[int, int]:
        """Tokens of prompts in a pass whose texts go through each layer in parts, and those of a part.

        Half of the memory is for what a layer makes of a part, half for what all the others have computed so far.

        Args:
            nbytes: beside weights, keys and values.
            texts: whose next token is wanted at the same time.

        Returns:
            Of the pass, and of a part of it, at most.
        """
        left = max(nbytes - self.fixed - texts * self.answered, 0)
        part = self.tokens_in(left // 2)
        return max((left - left // 2) // self.carried, part), part


def cost_of_a_pass(config: Any, itemsize: int) -> PassCost:
    """By a model's sizes; of a mixture of experts all that a token is sent to count as one.

    Args:
        config: of the text model.
        itemsize: bytes of a value.
    """
    each_layer = [_cost_by(layer, itemsize) for layer in layer_configs(config)]
    return PassCost(*map(max, zip(*map(astuple, each_layer), strict=True)))


def _cost_by(config: Any, itemsize: int) -> PassCost:
    """By the sizes of a layer."""
    hidden: int = config.hidden_size
    wide = _wide(config, hidden)
    heads: int = getattr(config, "num_attention_heads", None) or 1
    head = getattr(config, "head_dim", None) or hidden // heads
    queries = heads * head
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head
    widened = 4 if itemsize < 4 else 0  # of a product: its inputs, and its sums before they are rounded
    # a product of a part of the matrix, before it is put beside the others
    part_of_sums = widened * min(CHUNK_ELEMENTS // hidden, wide)
    # the rows as they came, as they were normed, one result, and the second one being computed
    up = itemsize * (2 * hidden + 2 * wide) + widened * (hidden + wide) + part_of_sums
    both = itemsize * (2 * hidden + 3 * wide)
    down = itemsize * (3 * hidden + wide) + widened * (hidden + wide)
    # queries that are being turned by their angles: they, two products, the half of them, the sum
    turned = itemsize * (2 * hidden + 6 * queries + 4 * keys) + widened * (hidden + queries)
    normed = itemsize * 2 * hidden + 3 * 4 * hidden
    each = max(up, both, down, turned, normed) * _SPARE[0] // _SPARE[1]
    is_eager = getattr(config, "_attn_implementation", None) == "eager"
    pair = heads * (2 * itemsize + 4) if is_eager else 0
    matrix = hidden * max(wide, queries)
    fixed = max(2 * 4 * min(CHUNK_ELEMENTS, matrix) if widened else 0, itemsize * matrix)
    vocabulary: int = getattr(config, "vocab_size", None) or 0
    answered = max((4 + itemsize) * vocabulary, 1)
    return PassCost(
        each, pair, CARRIED * itemsize * hidden, fixed, answered, max(widened, itemsize) * max(wide, queries)
    )


def _wide(config: Any, hidden: int) -> int:
    """The width of the feed-forward network, of the layer that has the widest."""
    given = getattr(config, "intermediate_size", None) or 4 * hidden
    wide: int = given if isinstance(given, int) else max(given)
    expert, picked = getattr(config, "moe_intermediate_size", None), picked_by(config)
    return max(wide, expert * picked) if isinstance(expert, int) and picked else wide
