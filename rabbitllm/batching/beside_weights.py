"""Memory beside the weights of a model that answers many: how much of it is left to them, and what it is for. Pure.

    free before loading    weights | what is left to requests: keys and values, and what a pass computes in between
    free after loading     half of it keys and values, where nobody says; the rest bounds the tokens of a pass

Weights take what they can get, as one text needs little beside them; requests would then have no room at all.
"""

from __future__ import annotations

from typing import Any

SHARE = 5
"""One part in so many of what is free is left to requests, where nobody says what keys and values may take."""
PASS_SHARE = 10
"""One part in so many of what is free is left to what a pass computes, beside keys and values of a given size."""
LEAST_TOKENS = 16
"""Of prompts in a pass, however little memory there is."""
CARRIED = 6
"""Times a hidden state that a token takes between two layers, and beside those whose turn it is in one."""


def left_to_requests(free: int, cache_bytes: int | None) -> int:
    """Bytes that the weights are not to take, of those free before they are loaded.

    Args:
        free: bytes.
        cache_bytes: that keys and values may take; None if nobody says.
    """
    return free // SHARE if cache_bytes is None else min(cache_bytes + free // PASS_SHARE, free)


def tokens_of_a_pass(config: Any, itemsize: int, nbytes: int) -> int:
    """Tokens of prompts that one pass can compute in so many bytes, roughly; at least `LEAST_TOKENS`.

    Of a layer, its input and what attention makes of it are there at the same time as the three wide matrices of a
    gated feed-forward network, each perhaps twice: products in 16 bit are summed in more.

    Args:
        config: of the text model.
        itemsize: bytes of a value.
        nbytes: free beside weights, keys and values.
    """
    hidden: int = config.hidden_size
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    each = 2 * itemsize * (8 * hidden + 3 * (wide if isinstance(wide, int) else max(wide)))
    return max(nbytes // each, LEAST_TOKENS)


def tokens_in_parts(config: Any, itemsize: int, nbytes: int) -> tuple[int, int]:
    """Tokens of prompts in a pass whose texts go through each layer in parts, and those of a part.

    Half of the memory is for what a layer makes of a part, half for what all the others have computed so far.

    Args:
        config, itemsize, nbytes: see `tokens_of_a_pass`.

    Returns:
        Of the pass, and of a part of it.
    """
    part = tokens_of_a_pass(config, itemsize, nbytes // 2)
    return max(nbytes // 2 // (CARRIED * itemsize * config.hidden_size), part), part
