"""Memory beside the weights of a model that answers many: how much of it is left to them. Pure.

    free before loading    weights | what is left to requests: keys and values, and what a pass computes in between
    free after loading     half of it keys and values, where nobody says; the rest bounds the tokens of a pass

Weights take what they can get, as one text needs little beside them; requests would then have no room at all.
"""

from __future__ import annotations

REQUESTS_SHARE = 5
"""One part in so many of what is free is left to requests, where nobody says what keys and values may take."""
LEAST_PASS_SHARE = 10
"""One part in so many of what is free is left to what a pass computes, or more, beside keys and values of a given
size."""


def left_to_requests(free: int, cache_bytes: int | None, pass_bytes: int = 0) -> int:
    """Bytes that the weights are not to take, of those free before they are loaded.

    Args:
        free: bytes.
        cache_bytes: that keys and values may take; None if nobody says.
        pass_bytes: that a good pass computes in, beside keys and values of a given size; 0 if that is not known.
    """
    if cache_bytes is None:
        return free // REQUESTS_SHARE
    return min(cache_bytes + max(free // LEAST_PASS_SHARE, pass_bytes), free)
