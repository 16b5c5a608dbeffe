"""A folder or a hub repository as one logical checkpoint: its tensors, their shards and their layers."""

__all__ = [
    "checkpoint",
    "config",
    "fetch",
    "gguf_checkpoint",
    "gguf_model",
    "gguf_rotary",
    "hub",
    "hub_cache",
    "index",
    "local",
    "meta_checkpoint",
    "naming",
    "transformers_gguf",
]
