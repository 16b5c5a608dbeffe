"""How much memory the weights of a model leave to its requests.

    free before loading    weights | left to requests: KV caches and the activations of a pass
    free after loading     by default half for KV caches; the rest bounds the tokens of a pass

Without this the weights would take all free memory, and none would be left to requests.
"""

from __future__ import annotations

REQUESTS_SHARE = 5
"""By default 1 / `REQUESTS_SHARE` of the free memory is left to requests."""
LEAST_PASS_SHARE = 10
"""If the size of the KV cache is given, at least 1 / `LEAST_PASS_SHARE` of the free memory is left to activations."""


def left_to_requests(free: int, cache_bytes: int | None, pass_bytes: int = 0) -> int:
    """Bytes that the weights must leave free, of those free before they are loaded.

    Args:
        free: bytes free before the weights are loaded.
        cache_bytes: limit of the KV caches; None for the default.
        pass_bytes: bytes of activations of a pass of good size, used if `cache_bytes` is given; 0 if unknown.
    """
    if cache_bytes is None:
        return free // REQUESTS_SHARE
    return min(cache_bytes + max(free // LEAST_PASS_SHARE, pass_bytes), free)
