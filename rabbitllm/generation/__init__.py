"""Many generations on one model in shared passes: each layer's weights are loaded once for all of them."""

__all__ = [
    "batch",
    "cache_manager",
    "draft",
    "grammar",
    "kv_cache",
    "media",
    "memory",
    "reasoning",
    "request",
    "scoring",
    "session",
    "streams",
    "swap",
    "template",
    "transformers_api",
]
